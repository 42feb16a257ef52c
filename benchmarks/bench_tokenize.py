"""How fast does text in memory become ids and offsets, compared with `tokenizers` 0.x and other libraries?

    python benchmarks/bench_tokenize.py corpus.txt tokenizer.json [--rounds 7] [--environments .bench]

Documents (between blank lines) in memory → one array of ids and the offsets of documents, one thread on one core,
kernels compiled, all in turns. Cold: a tokenizer that was just loaded, or empty tables of words. Warm: as the pass
before left them. `encode_batch_fast` of the installed `tokenizers` gets another sixteenth of the text in each round.

The others (other_tokenize.py) have their own environments (environments.py) in the directory of --environments; without
it they are left out. Each runs in its own process on the same core, gets documents of the type that it encodes fastest,
and keeps its own type of result. A copy of the text in memory is timed too: nothing can be faster. If the whole text
takes a library longer than PASS_S, it gets one part in each round; its cold rate is then lower than for the whole text,
as more words are new. Where a tokenizer does not split text (Llama 2, Gemma), `tokenizers` 1.0 keeps whole documents in
its table: a warm pass finds them there.

Before anything is timed the ids of all documents are compared with those of `tokenizers` 0.x. A library with other ids,
or that does not support the tokenizer, is left out, with the reason.
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
Pass = tuple[int, float]  # bytes and seconds


def join(documents: list[bytes]) -> bytes:
    """A block with room behind it for the kernel to read over the end, so that nothing copies it."""
    return b"".join([*(document + b"\n" for document in documents), bytes(PADDING)])


def offsets_of(documents: list[bytes]) -> NDArray[np.int64]:
    return np.append(0, np.cumsum([len(document) + 1 for document in documents])).astype(np.int64)


def cuts(documents: list[bytes], parts: int) -> list[int]:
    """Where to cut documents into `parts` stretches of about equal bytes, with both ends."""
    ends = np.cumsum([len(document) + 1 for document in documents])
    return [0, *np.searchsorted(ends, ends[-1] * np.arange(1, parts) / parts).tolist(), len(documents)]


def other_ids(wanted: list[NDArray[Any]], found: list[NDArray[Any]]) -> list[int]:
    """The documents whose ids are not the wanted ones."""
    pairs = enumerate(zip(wanted, found, strict=True))
    return [document for document, (left, right) in pairs if not np.array_equal(left, right)]


def timed(run: Callable[[], int], before: Callable[[], object] = lambda: None) -> Callable[[], Pass]:
    """Passes of this process, on one core."""

    def turn() -> Pass:
        os.sched_setaffinity(0, one_core())
        before()
        start = time.perf_counter()
        return run(), time.perf_counter() - start

    return turn


def first_pass(other: Other, documents: int, ids: Path, expected: list[NDArray[Any]]) -> float:
    """Seconds of a library for all documents. Raises LeftOut if ids are expected and it has others."""
    seconds = other.encode(0, documents, cold=True, ids=ids)
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
        return int(offsets[stop] - offsets[first]), other.encode(first, stop, cold=cold)

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
    text = corpus.read_bytes()[:wanted].decode(errors="ignore")
    texts = [document for document in text.replace("\r\n", "\n").split("\n\n") if document.strip()]
    documents = [document.encode() for document in texts]
    ours = load_tokenizer(tokenizer)
    library = ours.library
    joined, offsets = join(documents), offsets_of(documents)
    size = int(offsets[-1])
    slices = [texts[first:stop] for first, stop in pairwise(cuts(documents, SLICES))]

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
        ours.engine._local = threading.local()  # noqa: SLF001

    def encode() -> int:
        ours.encode(joined, offsets, sentences=False)
        return size

    turns = cycle(slices)

    def encode_by_library() -> int:
        part = next(turns)
        library.encode_batch_fast(part, add_special_tokens=False)
        return sum(len(document) + 1 for document in part)

    cores = os.sched_getaffinity(0)
    contenders: dict[str, Callable[[], Pass]] = {
        "copy in memory": timed(lambda: len(bytearray(joined))),
        "encode_batch_fast": timed(encode_by_library),
        "cold": timed(encode, before=forget),
        "warm": timed(encode, before=encode),
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
    rates = {name: [done / seconds / 1e6 for done, seconds in each] for name, each in passes.items()}
    medians = {name: round(statistics.median(found), 2) for name, found in rates.items()}
    for name in passes:
        print(f"{name:<20}{medians[name]:>9.2f} MB/s")

    result: dict[str, Any] = {"MB/s median": medians}
    if directory:
        packages = [pin for _, environment in OTHERS.values() for pin in PINS[environment]]
        result |= {"packages": packages, "parts of the text": parts, "left out": left_out}
    names = {"corpus": corpus.name, "tokenizer": Path(tokenizer).parent.name, "bytes": size, "rounds": repeats}
    report("text in memory to ids", "one thread, compiled", names | {"checked": check} | result)


if __name__ == "__main__":
    main()
