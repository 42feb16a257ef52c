"""What do masked batches cost, beside other engines: cold and warm, to open, to resume, and in memory?

    python benchmarks/bench_reading.py shards/ tokenizer.json --environments .bench [--rounds 3] [--seconds 1]

Every engine has the same text: the shards of ours, and for the others the rows of one epoch of it, each written by its
own writer. Regime: other_read.py. A round is one process of each engine in turn. Cold: the files were dropped from the
page cache; from opening to the 20th batch, and megabytes from the disk. Masked, unmasked, own (by its own masks, or by
transformers' collator): batches for so many seconds, 20 at least, with warm files. Opening and resuming: to the first
batch, from nothing and from a quarter of an epoch on; the median of five times. Memory: what the engine and its
libraries add to the private memory of a process that has imported torch and transformers. `memmap` is a
file of rows in random order by np.memmap. `collator` is transformers' collator alone: own of no engine that uses it can
be faster.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
from common import report
from environments import LeftOut, command_of, last_line, python_of

import bertdata

LENGTH = 128
ALONE = ("ours", "memmap", "collator")  # which need no environment
OTHERS = ("datasets", "streaming", "litdata", "datatrove", "megatron")
LIMIT_S = 300.0  # of one process
FIGURES = {
    "masked": "Mtok/s", "unmasked": "Mtok/s", "own": "Mtok/s", "cold": "Mtok/s", "opening": "ms", "resuming": "ms",
    "memory": "MB",
}  # fmt: skip


@click.command()
@click.argument("shards")
@click.argument("tokenizer")
@click.option("--environments", "environments", type=Path, required=True, help="Where their environments are made.")
@click.option("--rounds", "repeats", default=3)
@click.option("--seconds", default=1.0, help="Of warm reading in each round.")
@click.option("--directory", help="Where to write; default: the directory for temporary files.")
def main(shards: str, tokenizer: str, environments: Path, repeats: int, seconds: float, directory: str | None) -> None:
    left_out: dict[str, str] = {}
    sizes: dict[str, float] = {}
    rounds: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        rows = Path(scratch, "rows.npy")
        tokens = write_rows(shards, rows)
        commands: dict[str, list[str]] = {}

        def command(what: str, name: str, *more: object) -> list[str]:
            at = shards if name == "ours" else Path(scratch, name)
            given = ("other_read.py", what, name, rows, tokenizer, at, *more)
            if name in ALONE:
                return [sys.executable, str(Path(__file__).parent / given[0]), *map(str, given[1:])]
            return command_of(python_of(name, environments), *given)

        def fails(name: str, reason: LeftOut) -> None:
            left_out[name] = str(reason)
            commands.pop(name, None)
            print(f"without {name}: {reason}", flush=True)

        for name in (*ALONE, *OTHERS):
            Path(scratch, name).mkdir()
            try:
                sizes[name] = last_line(command("write", name), seconds=LIMIT_S)["MB"]
                commands[name] = command("read", name, seconds)
            except LeftOut as reason:
                fails(name, reason)
        for _ in range(repeats):
            for name, one in list(commands.items()):
                try:
                    rounds.setdefault(name, []).append(last_line(one, seconds=LIMIT_S))
                except LeftOut as reason:
                    fails(name, reason)
                    rounds.pop(name, None)
    found = {name: {part: summary([one[part] for one in each]) for part in FIGURES} for name, each in rounds.items()}
    for name, parts in found.items():
        shown = [f"{part} {each.get(FIGURES[part], each.get('reason'))}" for part, each in parts.items()]
        print(f"{name:<10} {', '.join(shown)}")
    result = {
        "tokens": tokens, "MB of files": {name: round(size, 1) for name, size in sizes.items()},
        "rounds": repeats, "left out": left_out, "figures": found,
    }  # fmt: skip
    report("masked batches", f"one core, one process, 256 x {LENGTH}, random order", result)


def write_rows(shards: str, path: Path) -> int:
    """An epoch of rows of ours. Returns their tokens. Nothing stays mapped, as it could not be read cold then."""
    loader = bertdata.Loader(bertdata.open(shards), length=LENGTH, global_batch_size=256, masking=None)
    rows = loader.read(np.arange(loader.num_samples)).input_ids
    np.save(path, rows)
    return rows.size


def summary(each: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure over rounds, or the reason why there is none."""
    failed = [one["reason"] for one in each if "reason" in one]
    if failed:
        return {"reason": failed[0]}
    return {name: round(statistics.median(one[name] for one in each), 3) for name in each[0]}


if __name__ == "__main__":
    main()
