"""What does a dataset that is not in memory cost to read: bytes from the disk for each byte used, and tokens a second?

    python benchmarks/bench_cold.py [--gigabytes 4] [--windows 12] [--directory /where/there/is/room]

Random tokens on a real disk, evicted from the page cache before each run; batches of 256 x 128, exact masks, one
process. Blocks: windows of 64 MiB. Full shuffle: with and without MADV_RANDOM.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from pathlib import Path

import click
import numpy as np
from common import report

import bertdata
from bertdata.files import Stage
from bertdata.format.arrays import pages_of
from bertdata.format.manifest import Manifest, Split
from bertdata.format.shards import ShardWriter
from bertdata.read import order
from bertdata.types import SpecialTokens

LENGTH, ROWS = 128, 256


def make(out: Path, num_tokens: int) -> None:
    special = SpecialTokens(
        vocab_size=30522, pad=0, unk=100, cls=101, sep=102, mask=103, special_ids=(0, 101, 102, 103)
    )
    random, shards, size, stage = np.random.default_rng(0), [], 1 << 28, Stage(out)
    for number in range(-(-num_tokens // size)):
        writer = ShardWriter(stage, f"train-{number:05d}")
        tokens = random.integers(999, 30522, size, dtype=np.uint16)
        tokens[999::1000] = 102
        tokens[-1] = 102
        ends = np.append(np.arange(1000, size, 1000, dtype=np.uint64), np.uint64(size))
        writer.append(tokens, ends)
        shards.append(writer.finish(input_range=(0, 1), counts={}))
    splits = {"train": Split.from_shards(shards)}
    Manifest("<u2", special, tokenizer={}, settings={}, splits=splits, counts={}).write(stage)
    stage.publish()


def evict(directory: Path) -> None:
    """Drop the files of a directory from the page cache; pages that a process has mapped stay."""
    for path in directory.glob("*.npy"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # pages that are not written yet cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_bytes() -> int:
    """Return the bytes that this process has read from the disk."""
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))


def read(loader: bertdata.Loader, *, positions: int | None, seconds: float) -> dict[str, float]:
    before, start, count = read_bytes(), time.perf_counter(), 0
    while positions is None or loader.position < positions:
        count += next(loader).input_ids.size
        if time.perf_counter() - start > seconds:
            break
    passed, used = time.perf_counter() - start, 2 * count * (LENGTH - 2) / LENGTH
    return {"Mtok/s": round(count / passed / 1e6, 2), "bytes used, MB": round(used / 1e6, 1),
            "from disk ÷ used": round((read_bytes() - before) / used, 3)}  # fmt: skip


@click.command()
@click.option("--gigabytes", default=4.0)
@click.option("--windows", default=12)
@click.option("--directory", default=None)
def main(gigabytes: float, windows: int, directory: str | None) -> None:
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        out = Path(scratch)
        make(out, int(gigabytes * 1e9 / 2))
        options = {"length": LENGTH, "global_batch_size": ROWS}
        next(bertdata.Loader(bertdata.open(out), **options))  # kernels
        found = {}
        evict(out)
        loader = bertdata.Loader(bertdata.open(out), **options, shuffle="blocks")
        positions = windows * 64 * (order.BLOCK_TOKENS // (LENGTH - 2))
        found["blocks"] = read(loader, positions=positions, seconds=120)
        for name, at_random in (("full, MADV_RANDOM", True), ("full, read around", False)):
            del loader
            evict(out)
            loader = bertdata.Loader(bertdata.open(out), **options)
            if at_random:
                for number in range(len(loader.shards.splits["train"])):
                    pages_of(loader.shards.tokens("train", number)).madvise(mmap.MADV_RANDOM)
            found[name] = read(loader, positions=None, seconds=10)
        for name, figures in found.items():
            print(f"{name:<20}" + ", ".join(f"{what} {value}" for what, value in figures.items()))
        report("reading a dataset that is not in memory", "evicted, one process", {"GB": gigabytes} | found)


if __name__ == "__main__":
    main()
