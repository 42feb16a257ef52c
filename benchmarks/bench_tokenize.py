"""How long does a text take from a tokenizer's file to ids, and once more, compared with other libraries?

    python benchmarks/bench_tokenize.py corpus.txt tokenizer.json [--rounds 5] [--environments .bench]

Documents (between blank lines) in memory → ids, one thread on one core, all libraries in turns. From file: a tokenizer
is read from its file and encodes the text; ours has its kernels loaded and its tables on disk. Warm: the same tokenizer
encodes the text once more. No imports are counted.

Each library (other_tokenize.py) runs in a process and an environment of its own (environments.py) on the same core,
gets documents of the type that it encodes fastest, and keeps its own type of result. Without --environments only the
installed `tokenizers` is compared. A copy of the text in memory is timed too: nothing can be faster.

Before anything is timed the ids of all documents are compared with those of the installed `tokenizers`. A library with
different ids, or that does not support the tokenizer, is left out, with the reason.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
import tokenizers
from common import report
from environments import PINS, LeftOut, in_turns
from numpy.typing import NDArray
from other_tokenize import INSTALLED, OTHERS, OURS, Other, read_ids, write_documents

os.environ["TOKENIZERS_PARALLELISM"] = "false"
Pass = tuple[int, float]  # bytes and seconds


def library_ids(path: str, documents: list[str]) -> list[NDArray[Any]]:
    """Return the ids of each document by the installed `tokenizers`."""
    library = tokenizers.Tokenizer.from_file(path)
    encodings = library.encode_batch_fast(documents, add_special_tokens=False)
    return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


def check(other: Other, ids: Path, expected: list[NDArray[Any]]) -> None:
    """Encode once untimed, which imports the library. Raises LeftOut if its ids are not the expected ones."""
    other.encode(from_file=True, ids=ids)
    pairs = zip(expected, read_ids(ids), strict=True)
    if different := sum(not np.array_equal(left, right) for left, right in pairs):
        raise LeftOut(f"{different} of {len(expected)} documents have different ids")


@click.command()
@click.argument("corpus", type=Path)
@click.argument("tokenizer")
@click.option("--megabytes", default=20.0)
@click.option("--rounds", "repeats", default=5)
@click.option(
    "--environments", "directory", type=Path, help="Also times other libraries, whose environments are made here."
)
def main(corpus: Path, tokenizer: str, megabytes: float, repeats: int, directory: Path | None) -> None:
    text = corpus.read_bytes()[: int(megabytes * 1e6)].decode(errors="ignore")
    documents = [document for document in text.replace("\r\n", "\n").split("\n\n") if document.strip()]
    size = sum(len(document.encode()) for document in documents)
    expected = library_ids(tokenizer, documents)
    contenders: dict[str, Callable[[], Pass]] = {"copy in memory": partial(copied, bytes(size))}
    left_out: dict[str, str] = {}
    library_of: dict[str, str] = {}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory()))
        write_documents(scratch / "documents.json", documents)
        for name in OTHERS if directory else (OURS, INSTALLED):
            try:
                other = Other(name, directory, tokenizer, scratch / "documents.json")
                stack.callback(other.close)
                check(other, scratch / "ids.npz", expected)
            except LeftOut as reason:
                left_out[name] = str(reason)
                print(f"without {name}: {reason}")
                continue
            for state in ("from file", "warm"):
                library_of[f"{name} {state}"] = name
                contenders[f"{name} {state}"] = partial(timed, other, size, state == "from file")
        passes = in_turns(contenders, repeats, library_of, left_out)
    medians = {
        name: round(statistics.median(done / seconds / 1e6 for done, seconds in each), 2)
        for name, each in passes.items()
    }
    for name, median in medians.items():
        print(f"{name:<28}{median:>9.2f} MB/s")

    packages = [pin for _, environment in OTHERS.values() if environment for pin in PINS[environment]]
    report("from a tokenizer's file to ids", "one thread, imports not counted", {
        "corpus": corpus.name, "tokenizer": Path(tokenizer).parent.name, "bytes": size, "documents": len(documents),
        "rounds": repeats, "MB/s median": medians, "packages": packages, "left out": left_out,
    })  # fmt: skip


def copied(data: bytes) -> Pass:
    start = time.perf_counter()
    bytearray(data)
    return len(data), time.perf_counter() - start


def timed(other: Other, size: int, from_file: bool) -> Pass:
    return size, other.encode(from_file=from_file)


if __name__ == "__main__":
    main()
