"""How long does text take to become fsynced shards, start-up and all, beside other engines?

    python benchmarks/bench_build.py corpus.txt tokenizer.json [--rounds 3] [--environments .bench]

The file is in the page cache, kernels are compiled, and each run is a process with two workers. Other libraries
(other_build.py, environments.py) get the documents in two files, datatrove as JSON lines. The number and the sum of the
ids are compared first. Slopes are megabytes a second from a quarter of the documents to all of them.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import numpy as np
from common import report
from environments import LeftOut, command_of, in_turns, last_line, python_of, seconds_of
from other_build import documents

import bertdata

OTHERS = ("datasets", "datatrove", "litdata", "streaming", "megatron")
LIMIT_S = 240.0  # of one run of another library


@click.command()
@click.argument("corpus", type=Path)
@click.argument("tokenizer")
@click.option("--rounds", "repeats", default=3)
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
        quarter = Path(directory) / "quarter.txt"
        quarter.write_text("\n\n".join(texts[: len(texts) // 4]), encoding="utf-8")
        further = size - quarter.stat().st_size / 1e6
        turns: dict[str, Callable[[], float]] = {
            "ours, one": lambda: build(corpus),
            "ours, a quarter": lambda: build(quarter),
            "least": lambda: least(corpus, Path(directory)),
        }
        left_out: dict[str, str] = {}
        for name in OTHERS if environments else ():
            try:
                turns |= turns_of(name, environments, tokenizer, texts, Path(directory))
            except LeftOut as reason:
                left_out[name] = str(reason)
                print(f"without {name}: {reason}", flush=True)
        library_of = {turn: name for name in OTHERS for turn in (name, f"{name}, a quarter")}
        seconds = in_turns(turns, repeats, library_of, left_out)
    medians = {name: round(statistics.median(found), 3) for name, found in seconds.items()}
    for name, median in medians.items():
        print(f"{name:<20}{median:>9.2f} s")
    result = {
        "seconds": medians, "MB": round(size, 1), "rounds": repeats, "left out": left_out,
        "MB/s by slope": slopes(medians, further),
    }  # fmt: skip
    report("file to shards", "whole command, two workers", result)


def slopes(medians: dict[str, float], further: float) -> dict[str, float]:
    """Megabytes a second, of those that a whole text has further than its quarter; 0 where it took no longer."""
    wholes = {"ours": "ours, one"} | {name: name for name in OTHERS if name in medians}
    seconds = {name: medians[whole] - medians[f"{name}, a quarter"] for name, whole in wholes.items()}
    return {name: round(further / each, 2) if each else 0.0 for name, each in seconds.items()}


def turns_of(
    name: str, environments: Path, tokenizer: str, texts: list[str], directory: Path
) -> dict[str, Callable[[], float]]:
    """Turns of a library on all texts and on a quarter of them. Raises LeftOut if it fails or makes other ids."""
    python = python_of(name, environments)
    files = {share: in_two_files(texts[: len(texts) // share], directory / f"{name}-{share}", name) for share in (1, 4)}

    def turn(share: int, out: str | None = None) -> float:
        with tempfile.TemporaryDirectory() as scratch:
            command = command_of(python, "other_build.py", "build", name, tokenizer, out or scratch, *files[share])
            return seconds_of(command, LIMIT_S)

    with tempfile.TemporaryDirectory() as scratch:
        turn(1, scratch)
        found = last_line(command_of(python, "other_build.py", "count", name, tokenizer, scratch), seconds=LIMIT_S)
    if found != (wanted := count(bertdata.open(directory / "shards"))):
        raise LeftOut(f"makes other ids: {found}, ours {wanted}")
    return {name: partial(turn, 1), f"{name}, a quarter": partial(turn, 4)}


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
