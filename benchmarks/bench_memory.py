"""Does reading cost memory: for opening what is huge, for many batches?

    python benchmarks/bench_memory.py shards/ [--batches 100000]

Opening and resuming: sparse files of 10**10 and 10**13 zeros. Private memory is from /proc/self/smaps_rollup. Batches:
the slope of resident memory, without the first tenth; in this process, and in a DataLoader with two workers.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from common import report
from torch.utils.data import DataLoader

import bertdata
from bertdata.files import Stage
from bertdata.format.arrays import HEADER_BYTES, array_path, npy_header
from bertdata.format.manifest import Manifest, Shard, Split
from bertdata.torch import BatchDataset
from bertdata.types import SpecialTokens


def make_sparse(out: Path, num_tokens: int) -> None:
    """One document a shard, of at most 10**12 tokens, all 0."""
    special = SpecialTokens(
        vocab_size=30522, pad=0, unk=100, cls=101, sep=102, mask=103, special_ids=(0, 101, 102, 103)
    )
    shards = []
    for number in range(-(-num_tokens // 10**12)):
        size, name = min(num_tokens, 10**12), f"train-{number:05d}"
        arrays = {}
        for array, dtype, length in (("tokens", "<u2", size), ("documents", "<u8", 2)):
            with open(array_path(out, name, array), "wb") as file:
                file.write(npy_header(dtype, length))
                if array == "documents":
                    file.write(np.array([0, size], "<u8").tobytes())
                file.truncate(HEADER_BYTES + int(dtype[-1]) * length)
            arrays[array] = {"dtype": dtype, "length": length, "sha256": f"{number:064x}"}
        shards.append(Shard(name, 1, size, None, arrays))
    stage, splits = Stage(out), {"train": Split.from_shards(shards)}
    Manifest("<u2", special, tokenizer={}, settings={}, splits=splits, counts={}).write(stage)
    stage.publish()


def private_bytes() -> int:
    """Return the memory of this process that it shares with no other."""
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Private_Dirty"))


def opening(num_tokens: int, directory: str | None) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        make_sparse(Path(scratch), num_tokens)
        options: dict[str, Any] = {"length": 128, "global_batch_size": 256}
        next(bertdata.Loader(bertdata.open(scratch), **options))  # kernels
        state = bertdata.Loader(bertdata.open(scratch), **options).state_dict()
        opened, resumed, taken = [], [], []
        for number in range(20):
            before, start = private_bytes(), time.perf_counter()
            loader = bertdata.Loader(bertdata.open(scratch), **options)
            opened.append(time.perf_counter() - start)
            start = time.perf_counter()
            loader.load_state_dict(state | {"position": number * num_tokens // 777})
            batch = next(loader)
            resumed.append(time.perf_counter() - start)
            taken.append(private_bytes() - before - sum(array.nbytes for array in batch.arrays().values()))
        return {
            "open, ms": round(1e3 * float(np.median(opened)), 3),
            "resume and first batch, ms": round(1e3 * float(np.median(resumed)), 3),
            "private, KiB, most": round(max(taken) / 1024, 1),
        }


def slope(step: Any, batches: int) -> dict[str, float]:
    """step() makes 1,000 batches and says the bytes of all processes concerned."""
    sizes = np.array([step() for _ in range(batches // 1000)], float)
    kept = sizes[len(sizes) // 10 :]
    per_thousand = float(np.polyfit(np.arange(kept.size), kept, 1)[0])
    return {"bytes a batch": round(per_thousand / 1000, 2), "first, MB": round(kept[0] / 1e6, 1),
            "last, MB": round(kept[-1] / 1e6, 1)}  # fmt: skip


def resident(pids: list[int | str]) -> int:
    """Anonymous memory: pages of the dataset are the system's."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/status") as file:
            total += sum(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))
    return total


@click.command()
@click.argument("path")
@click.option("--batches", default=100_000)
@click.option("--directory", default=None)
def main(path: str, batches: int, directory: str | None) -> None:
    found: dict[str, Any] = {f"{n:.0e} tokens": opening(n, directory) for n in (10**10, 10**13)}
    options: dict[str, Any] = {"length": 128, "global_batch_size": 256}
    loader = bertdata.Loader(bertdata.open(path), **options)

    def here() -> int:
        for _ in range(1000):
            next(loader)
        return resident(["self"])

    found["one process"] = slope(here, batches)
    workers = iter(DataLoader(BatchDataset(loader), batch_size=None, num_workers=2))

    def there() -> int:
        for _ in range(1000):
            next(workers)
        return resident(["self", *(worker.pid for worker in workers._workers)])  # noqa: SLF001

    found["DataLoader, two workers"] = slope(there, batches // 2)
    for name, figures in found.items():
        print(f"{name:<26}" + ", ".join(f"{what} {value}" for what, value in figures.items()))
    report("memory of reading", f"{batches} batches of 256 x 128", found)


if __name__ == "__main__":
    main()
