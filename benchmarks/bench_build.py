"""How long does text take to become fsynced shards, by the whole command, compared with other libraries?

    python benchmarks/bench_build.py corpus.txt tokenizer.json [--rounds 5] [--environments .bench]

The file is in the page cache, kernels are compiled, and each run is a process with two workers. Other libraries
(other_build.py, environments.py) get the documents in two files, datatrove as JSON lines. The number and the sum of the
ids are compared first.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
from common import report
from environments import LeftOut, command_of, in_turns, last_line, python_of, seconds_of
from other_build import documents

import bertdata

OTHERS = ("datasets", "datatrove", "megatron")
LIMIT_S = 240.0  # of one run of another library


@click.command()
@click.argument("corpus", type=Path)
@click.argument("tokenizer")
@click.option("--rounds", "repeats", default=5)
@click.option(
    "--environments", "environments", type=Path, help="Also times other libraries, whose environments are made here."
)
def main(corpus: Path, tokenizer: str, repeats: int, environments: Path | None) -> None:
    size = corpus.stat().st_size / 1e6

    def build(path: Path, *options: str, out: str | None = None) -> float:
        with tempfile.TemporaryDirectory() as scratch:
            command = ["build", str(path), "--out", out or f"{scratch}/shards", "--tokenizer", tokenizer]
            return seconds_of([sys.executable, "-m", "bertdata", *command, "--workers", "2", *options], LIMIT_S)

    with tempfile.TemporaryDirectory() as directory:
        build(corpus, "--validation", "0", out=f"{directory}/shards")
        texts = documents(str(corpus))
        turns: dict[str, Callable[[], float]] = {
            "ours": lambda: build(corpus),
            "least": lambda: least(corpus, Path(directory)),
        }
        left_out: dict[str, str] = {}
        for name in OTHERS if environments else ():
            try:
                turns[name] = turn_of(name, environments, tokenizer, texts, Path(directory))
            except LeftOut as reason:
                left_out[name] = str(reason)
                print(f"without {name}: {reason}", flush=True)
        seconds = in_turns(turns, repeats, {name: name for name in OTHERS}, left_out)
    medians = {name: round(statistics.median(found), 3) for name, found in seconds.items()}
    for name, median in medians.items():
        print(f"{name:<20}{median:>9.2f} s")
    result = {"seconds": medians, "MB": round(size, 1), "rounds": repeats, "left out": left_out}
    report("file to shards", "whole command, two workers", result)


def turn_of(name: str, environments: Path, tokenizer: str, texts: list[str], directory: Path) -> Callable[[], float]:
    """Return what times a library on the texts. Raises LeftOut if it fails or makes different ids."""
    python = python_of(name, environments)
    files = in_two_files(texts, directory / name, name)

    def turn(out: str | None = None) -> float:
        with tempfile.TemporaryDirectory() as scratch:
            command = command_of(python, "other_build.py", "build", name, tokenizer, out or scratch, *files)
            return seconds_of(command, LIMIT_S)

    with tempfile.TemporaryDirectory() as scratch:
        turn(scratch)
        found = last_line(command_of(python, "other_build.py", "count", name, tokenizer, scratch), seconds=LIMIT_S)
    if found != (wanted := count(bertdata.open(directory / "shards"))):
        raise LeftOut(f"makes different ids: {found}, ours {wanted}")
    return turn


def count(shards: bertdata.Dataset) -> dict[str, int]:
    """The number of ids, and their sum, without separators."""
    numbers = range(len(shards.splits["train"]))
    ids = np.concatenate([shards.tokens("train", number) for number in numbers])
    ids = ids[ids != shards.special_tokens.separator]
    return {"tokens": ids.size, "sum": int(ids.astype(np.int64).sum())}


def in_two_files(texts: list[str], directory: Path, name: str) -> list[Path]:
    directory.mkdir()
    paths = [directory / f"{half}.{'jsonl' if name == 'datatrove' else 'txt'}" for half in range(2)]
    for half, path in enumerate(paths):
        part = texts[half * len(texts) // 2 : (half + 1) * len(texts) // 2]
        lines = [json.dumps({"id": str(number), "text": text}) for number, text in enumerate(part)]
        path.write_text("\n".join(lines) if name == "datatrove" else "\n\n".join(part), encoding="utf-8")
    return paths


def least(corpus: Path, directory: Path) -> float:
    """Seconds to read the text, and to write as many bytes as its ids have."""
    size = (directory / "shards" / "train-00000.tokens.npy").stat().st_size
    start = time.perf_counter()
    text = corpus.read_bytes()
    with open(directory / "least", "wb") as file:
        file.write(memoryview(text)[:size])
        os.fsync(file.fileno())
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
