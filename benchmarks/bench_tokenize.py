"""How fast does text in memory become ids and offsets, beside `tokenizers` and nanotoken?

    python benchmarks/bench_tokenize.py corpus.txt|random tokenizer.json [--megabytes 64] [--rounds 7]

Regime: documents (between blank lines) in memory → one array of ids and the offsets of documents, one thread but where
it says two, kernels compiled. Cold: tables of words empty at the start; warm: as the pass before left them. The rivals
take turns. `tokenizers` gets another sixteenth of the text in each round, as all of it would take minutes; nanotoken
(if installed, and if it takes the tokenizer) all of it, as we do. Before anything is timed every document's ids are
compared with those of `tokenizers`. Rates by CPU time, of all threads together, show what threads cost each other where
other jobs take the cores.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import numpy as np
from common import report
from numpy.typing import NDArray

from bertdata.tokenize.kernels import PADDING
from bertdata.tokenize.load import load as load_tokenizer

os.environ["TOKENIZERS_PARALLELISM"] = "false"
SLICES = 16


def join(documents: list[bytes]) -> bytes:
    """A block with room behind it for the kernel to read over the end, so that nothing copies it."""
    return b"".join([*(document + b"\n" for document in documents), bytes(PADDING)])


def offsets_of(documents: list[bytes]) -> NDArray[np.int64]:
    return np.append(0, np.cumsum([len(document) + 1 for document in documents])).astype(np.int64)


def random_text(size: int) -> str:
    """About `size` bytes of characters of every script, none likelier than another: the worst case for tables of words.

    Half of them ASCII, a seventh of all spaces, a document every thousand characters.
    """
    rng = np.random.default_rng(0)
    points = rng.integers(0xA0, 0x30000, int(size / 2.4))
    points = points[(points < 0xD800) | (points >= 0xE000)]
    points = np.where(rng.random(points.size) < 0.5, rng.integers(0x21, 0x7F, points.size), points)
    points[rng.random(points.size) < 1 / 7] = ord(" ")
    points[999::1000], points[998::1000] = ord("\n"), ord("\n")
    return points.astype("<u4").tobytes().decode("utf-32-le")


def halves(documents: list[bytes], parts: int) -> list[list[bytes]]:
    """Documents in `parts` stretches of about equal bytes."""
    ends = np.cumsum([len(document) + 1 for document in documents])
    cuts = [0, *np.searchsorted(ends, ends[-1] * np.arange(1, parts) / parts).tolist(), len(documents)]
    return [documents[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]


@click.command()
@click.argument("corpus", type=Path)
@click.argument("tokenizer")
@click.option("--megabytes", default=64.0)
@click.option("--rounds", "repeats", default=7)
@click.option("--check/--no-check", default=True, help="Compare every document's ids with those of tokenizers first.")
def main(corpus: Path, tokenizer: str, megabytes: float, repeats: int, check: bool) -> None:
    wanted = int(megabytes * 1e6)
    text = random_text(wanted) if corpus.name == "random" else corpus.read_bytes()[:wanted].decode(errors="ignore")
    documents = [document.encode() for document in text.replace("\r\n", "\n").split("\n\n") if document.strip()]
    ours = load_tokenizer(tokenizer)
    ours.prepare()
    library = ours._tokenizer  # exactly what the dataset's ids are defined by  # noqa: SLF001
    joined, offsets = join(documents), offsets_of(documents)
    size = int(offsets[-1])
    slices = [[document.decode() for document in part] for part in halves(documents, SLICES)]
    split = [(join(part), offsets_of(part)) for part in halves(documents, 2)]
    pool = ThreadPoolExecutor(2)

    if check:
        found, at = ours.encode(joined, offsets, sentences=False), 0
        has_separator = ours.special.separator is not None
        for part in slices:
            for encoding in library.encode_batch_fast(part, add_special_tokens=False):
                start, stop = found.documents[at : at + 2].tolist()
                if not np.array_equal(found.ids[start : stop - has_separator], encoding.ids):
                    sys.exit(f"document {at} has other ids than tokenizers gives")
                at += 1
        print(f"{at} documents, {found.ids.size:,} ids: exact")

    def forget() -> None:
        ours._engine._of_thread = threading.local()  # noqa: SLF001

    def encode() -> int:
        ours.encode(joined, offsets, sentences=False)
        return size

    def encode_by_two() -> int:
        list(pool.map(lambda part: ours.encode(*part, sentences=False), split))
        return size

    turn = iter(range(10**9))

    def encode_by_library() -> int:
        part = slices[next(turn) % SLICES]
        library.encode_batch_fast(part, add_special_tokens=False)
        return sum(len(document) + 1 for document in part)

    contenders: dict[str, tuple[Callable[[], None], Callable[[], int]]] = {
        "encode_batch_fast": (lambda: None, encode_by_library),
        "cold": (forget, encode),
        "two threads cold": (forget, encode_by_two),
        "two threads warm": (encode_by_two, encode_by_two),  # first, for either thread may be given either half
        "warm": (encode, encode),
    }
    try:
        import nanotoken

        theirs = nanotoken.Tokenizer(tokenizer)
    except (ImportError, ValueError) as error:
        print(f"without nanotoken: {error}")
    else:

        def encode_by_nanotoken() -> int:
            theirs.encode_batch(documents, add_special_tokens=False, parallel=False)
            return size

        contenders["nanotoken cold"] = theirs.clear_cache, encode_by_nanotoken
        contenders["nanotoken warm"] = lambda: None, encode_by_nanotoken

    rates: dict[str, list[float]] = {name: [] for name in contenders}
    by_cpu: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, (before, run) in contenders.items():
            before()
            start, cpu = time.perf_counter(), time.process_time()
            done = run()
            rates[name].append(done / (time.perf_counter() - start) / 1e6)
            by_cpu[name].append(done / (time.process_time() - cpu) / 1e6)
    medians = {name: round(statistics.median(found), 2) for name, found in rates.items()}
    most = {name: round(max(found), 2) for name, found in rates.items()}
    cpu_medians = {name: round(statistics.median(found), 2) for name, found in by_cpu.items()}
    for name in contenders:
        print(
            f"{name:<20}{medians[name]:>9.2f} MB/s median{most[name]:>9.2f} most{cpu_medians[name]:>9.2f} by CPU time"
        )

    def ratios(of: dict[str, float]) -> dict[str, float]:
        pairs = [
            ("cold", "encode_batch_fast"), ("warm", "encode_batch_fast"), ("cold", "nanotoken cold"),
            ("warm", "nanotoken warm"), ("two threads cold", "cold"), ("two threads warm", "warm"),
        ]  # fmt: skip
        return {f"{a} / {b}": round(of[a] / of[b], 2) for a, b in pairs if b in of}

    result = {
        "MB/s median": medians,
        "MB/s most": most,
        "MB/s of CPU time": cpu_medians,
        "of medians": ratios(medians),
        "of most": ratios(most),
    }
    names = {"corpus": corpus.name, "tokenizer": Path(tokenizer).parent.name, "bytes": size, "rounds": repeats}
    report("text in memory to ids", "one thread, compiled", names | {"checked": check} | result)


if __name__ == "__main__":
    main()
