"""How fast does text in memory become ids and offsets, beside `tokenizers` 0.x and other libraries?

    python benchmarks/bench_tokenize.py corpus.txt|random tokenizer.json [--rounds 7] [--environments .bench]

Regime: documents (between blank lines) in memory → one array of ids and the offsets of documents, one thread on one
core but where it says two, kernels compiled. Cold: tables of words empty at the start; warm: as the pass before left
them. All take turns. `encode_batch_fast` of the installed `tokenizers` gets another sixteenth of the text in each
round, as all of it would take minutes.

The others (other_tokenize.py) live in environments of their own (environments.py), which are made in the directory that
--environments names; without it they are left out. Each runs in a process of its own on the same core, gets the
documents in the type that it takes fastest, and keeps its own type of result. A copy of the text in memory is timed
too: nothing can be faster. Cold is a tokenizer just read from its file; reading is not timed. Another gets the whole
text. If that takes it longer than PASS_S, it gets one part of the text in each round; its cold rate is then lower than
for the whole, because more of the words of a part are met for the first time. Where a tokenizer does not split text
(Llama 2, Gemma), `tokenizers` 1.0 keeps whole documents in its table: a warm pass finds them there, and text that
differs by a letter is as slow as cold.

Before anything is timed every document's ids, ours and theirs, are compared with those of `tokenizers` 0.x. A library
that gives other ids, or does not take the tokenizer, is left out, with the reason. Rates by CPU time, of all threads
together, show what threads cost each other where other jobs take the cores.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import cycle, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
from common import report
from environments import PINS, LeftOut, in_turns, one_core
from numpy.typing import NDArray
from other_tokenize import OTHERS, Other, read_ids

from bertdata.tokenize.kernels.records import PADDING
from bertdata.tokenize.load import load as load_tokenizer

os.environ["TOKENIZERS_PARALLELISM"] = "false"
SLICES = 16
PASS_S = 5.0
# A pass: its bytes, seconds, and seconds of CPU time of all threads.
Pass = tuple[int, float, float]


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


def cuts(documents: list[bytes], parts: int) -> list[int]:
    """Where to cut documents into `parts` stretches of about equal bytes, with both ends."""
    ends = np.cumsum([len(document) + 1 for document in documents])
    return [0, *np.searchsorted(ends, ends[-1] * np.arange(1, parts) / parts).tolist(), len(documents)]


def halves(documents: list[bytes], parts: int) -> list[list[bytes]]:
    """Documents in `parts` stretches of about equal bytes."""
    return [documents[a:b] for a, b in pairwise(cuts(documents, parts))]


def other_ids(wanted: list[NDArray[Any]], found: list[NDArray[Any]]) -> list[int]:
    """The documents whose ids are not the wanted ones."""
    pairs = enumerate(zip(wanted, found, strict=True))
    return [document for document, (left, right) in pairs if not np.array_equal(left, right)]


def timed(run: Callable[[], int], cores: set[int], before: Callable[[], object] = lambda: None) -> Callable[[], Pass]:
    """Passes of this process, on these cores."""

    def turn() -> Pass:
        os.sched_setaffinity(0, cores)
        before()
        start, cpu = time.perf_counter(), time.process_time()
        done = run()
        return done, time.perf_counter() - start, time.process_time() - cpu

    return turn


def first_pass(other: Other, documents: int, ids: Path, expected: list[NDArray[Any]]) -> float:
    """Seconds of a library for all documents. Raises LeftOut if ids are expected and it has others."""
    seconds, _ = other.encode(0, documents, cold=True, ids=ids)
    if expected and (others := other_ids(expected, read_ids(ids))):
        raise LeftOut(f"{len(others)} of {documents} documents have other ids")
    return seconds


def asked(other: Other, cuts: list[int], offsets: NDArray[np.int64], cold: bool) -> Callable[[], Pass]:
    """Passes of a library, each over the next of the stretches."""
    stretches = cycle(pairwise(cuts))

    def turn() -> Pass:
        first, stop = next(stretches)
        if not cold:  # once untimed, as for ours
            other.encode(first, stop, cold=False)
        return int(offsets[stop] - offsets[first]), *other.encode(first, stop, cold=cold)

    return turn


@click.command()
@click.argument("corpus", type=Path)
@click.argument("tokenizer")
@click.option("--megabytes", default=64.0)
@click.option("--rounds", "repeats", default=7)
@click.option("--check/--no-check", default=True, help="Compare every document's ids with those of tokenizers first.")
@click.option(
    "--environments", "directory", type=Path, help="Also times other libraries, whose environments are made here."
)
def main(corpus: Path, tokenizer: str, megabytes: float, repeats: int, check: bool, directory: Path | None) -> None:
    wanted = int(megabytes * 1e6)
    text = random_text(wanted) if corpus.name == "random" else corpus.read_bytes()[:wanted].decode(errors="ignore")
    texts = [document for document in text.replace("\r\n", "\n").split("\n\n") if document.strip()]
    documents = [document.encode() for document in texts]
    ours = load_tokenizer(tokenizer)
    ours.prepare()
    library = ours._tokenizer  # exactly what the dataset's ids are defined by  # noqa: SLF001
    joined, offsets = join(documents), offsets_of(documents)
    size = int(offsets[-1])
    slices = [[document.decode() for document in part] for part in halves(documents, SLICES)]
    split = [(join(part), offsets_of(part)) for part in halves(documents, 2)]
    pool = ThreadPoolExecutor(2)

    expected: list[NDArray[np.uint32]] = []
    if check:
        for part in slices:
            encodings = library.encode_batch_fast(part, add_special_tokens=False)
            expected += [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]
        found = ours.encode(joined, offsets, sentences=False)
        ends = found.documents[1:] - (ours.special.separator is not None)
        pairs = zip(found.documents[:-1].tolist(), ends.tolist(), strict=True)
        for document in other_ids(expected, [found.ids[start:end] for start, end in pairs])[:1]:
            sys.exit(f"document {document} has other ids than tokenizers gives")
        print(f"{len(documents)} documents, {found.ids.size:,} ids: exact")

    def forget() -> None:
        ours._engine._of_thread = threading.local()  # noqa: SLF001

    def encode() -> int:
        ours.encode(joined, offsets, sentences=False)
        return size

    def encode_by_two() -> int:
        list(pool.map(lambda part: ours.encode(*part, sentences=False), split))
        return size

    turns = cycle(slices)

    def encode_by_library() -> int:
        part = next(turns)
        library.encode_batch_fast(part, add_special_tokens=False)
        return sum(len(document) + 1 for document in part)

    one, cores = one_core(), os.sched_getaffinity(0)
    contenders: dict[str, Callable[[], Pass]] = {
        "copy in memory": timed(lambda: len(bytearray(joined)), one),
        "encode_batch_fast": timed(encode_by_library, one),
        "cold": timed(encode, one, before=forget),
        "two threads cold": timed(encode_by_two, cores, before=forget),
        # First once untimed, for either thread may be given either half.
        "two threads warm": timed(encode_by_two, cores, before=encode_by_two),
        "warm": timed(encode, one, before=encode),
    }
    left_out: dict[str, str] = {}
    parts: dict[str, int] = {}
    with ExitStack() as stack:
        if directory:
            scratch = Path(stack.enter_context(TemporaryDirectory()))
            (scratch / "documents.json").write_text(json.dumps(texts), encoding="utf-8")
            for name in OTHERS:
                try:
                    other = Other(name, directory, tokenizer, scratch / "documents.json")
                    stack.callback(other.close)
                    seconds = first_pass(other, len(texts), scratch / "ids.npz", expected)
                except LeftOut as reason:
                    left_out[name] = str(reason)
                    print(f"without {name}: {reason}")
                    continue
                parts[name] = math.ceil(seconds / PASS_S)
                for state in ("cold", "warm"):
                    contenders[f"{name} {state}"] = asked(other, cuts(documents, parts[name]), offsets, state == "cold")
        library_of = {f"{name} {state}": name for name in parts for state in ("cold", "warm")}
        passes = in_turns(contenders, repeats, library_of, left_out)
    os.sched_setaffinity(0, cores)
    parts = {name: count for name, count in parts.items() if name not in left_out}
    rates = {name: [done / seconds / 1e6 for done, seconds, _ in each] for name, each in passes.items()}
    by_cpu = {name: [done / cpu / 1e6 for done, _, cpu in each] for name, each in passes.items()}
    medians = {name: round(statistics.median(found), 2) for name, found in rates.items()}
    most = {name: round(max(found), 2) for name, found in rates.items()}
    cpu_medians = {name: round(statistics.median(found), 2) for name, found in by_cpu.items()}
    for name in passes:
        print(
            f"{name:<20}{medians[name]:>9.2f} MB/s median{most[name]:>9.2f} most{cpu_medians[name]:>9.2f} by CPU time"
        )

    def ratios(of: dict[str, float]) -> dict[str, float]:
        pairs = [("cold", "encode_batch_fast"), ("warm", "encode_batch_fast")]
        pairs += [(state, f"{name} {state}") for name in parts for state in ("cold", "warm")]
        pairs += [("two threads cold", "cold"), ("two threads warm", "warm")]
        return {f"{a} / {b}": round(of[a] / of[b], 2) for a, b in pairs}

    result = {
        "MB/s median": medians,
        "MB/s most": most,
        "MB/s of CPU time": cpu_medians,
        "of medians": ratios(medians),
        "of most": ratios(most),
    }
    if directory:
        packages = [pin for _, environment in OTHERS.values() for pin in PINS[environment]]
        result |= {"packages": packages, "parts of the text": parts, "left out": left_out}
    names = {"corpus": corpus.name, "tokenizer": Path(tokenizer).parent.name, "bytes": size, "rounds": repeats}
    report("text in memory to ids", "one thread, compiled", names | {"checked": check} | result)


if __name__ == "__main__":
    main()
