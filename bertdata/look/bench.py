"""What bench prints: how fast this machine reads a dataset, and how much memory that takes.

Each measurement runs in its own process, which opens the dataset again. Rates are places a second, padding included.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bertdata.choices import MASKING_POLICIES, SAMPLE_KINDS
from bertdata.errors import UsageError
from bertdata.format.dataset import Dataset
from bertdata.format.manifest import Split
from bertdata.read.loader import Loader
from bertdata.read.pieces import MAX_LENGTH
from bertdata.types import Masking


def run(path: str, *, length: int, rows: int, seconds: float, processes: int, cold: bool) -> dict[str, Any]:
    """All measurements as one JSON-able object; takes about 20 times `seconds`.

    rows, length: of a batch. processes: how many read together. cold: also measure reading from the disk, for which the
    dataset is dropped from the page cache. Raises UsageError if there is no split train.
    """
    dataset = Dataset(path)
    options: dict[str, Any] = {"length": length, "global_batch_size": rows}
    measured: dict[str, Any] = {
        "path": path,
        "dataset_id": dataset.dataset_id,
        "tokens": dataset.num_tokens,
        "split": "train",
        "length": length,
        "rows": rows,
        "seconds": seconds,
        "cores": len(os.sched_getaffinity(0)),
    }
    if "train" not in dataset.splits:
        raise UsageError(
            f"{path} has no split train, which bench reads; build it again with a smaller --validation",
            "no-split",
            option="shards",
            given=path,
        )
    kinds = [name for name in SAMPLE_KINDS if _is_possible(name, dataset.splits["train"], length)]
    del dataset
    if cold:  # first, because the other measurements bring the dataset into memory
        measured["cold"] = {shuffle: _alone(_cold, path, options, shuffle, seconds) for shuffle in ("blocks", "full")}
    measured["warm"] = _alone(_warm, path, options, kinds, seconds)
    measured["opening"] = _alone(_opening, path, options)
    measured["processes"] = read_together(path, options, processes, seconds)
    return measured


def _is_possible(samples: str, split: Split, length: int) -> bool:
    """Whether a kind of samples can be made in rows of a length, which may be too long for an index."""
    return split.has_pairs if samples == "pairs" else samples == "windows" or length <= MAX_LENGTH


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """New processes, which share nothing but files with this one."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield pool


def _alone(function: Any, *arguments: Any) -> Any:
    """Calls a function in a new process."""
    with _pool(1) as pool:
        return pool.submit(function, *arguments).result()


def _rate(loader: Loader, seconds: float) -> float:
    """Places a second, measured for `seconds`."""
    start, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < seconds:
        count += next(loader).input_ids.size
    return count / passed


def _warm(path: str, options: dict[str, Any], kinds: list[str], seconds: float) -> dict[str, dict[str, float]]:
    """Rates by kind of samples and masking policy: the median of five measurements."""
    rates: dict[str, dict[str, float]] = {name: {} for name in kinds}
    for name in kinds:
        for policy in MASKING_POLICIES:
            loader = Loader(Dataset(path), **options, samples=name, masking=Masking(policy=policy))
            next(loader)  # compiles
            rates[name][policy] = statistics.median(_rate(loader, seconds / 5) for _ in range(5))
    return rates


def _opening(path: str, options: dict[str, Any]) -> dict[str, float]:
    """Milliseconds to open the dataset and a loader, and then to the first batch. Kernels are loaded before."""
    next(Loader(Dataset(path), **options))
    opening, first = [], []
    for _ in range(20):
        start = time.perf_counter()
        loader = Loader(Dataset(path), **options)
        opened = time.perf_counter()
        next(loader)
        opening.append(opened - start)
        first.append(time.perf_counter() - opened)
    return {"open_ms": 1e3 * statistics.median(opening), "first_batch_ms": 1e3 * statistics.median(first)}


def evict(directory: str | Path) -> None:
    """Drops the files of a directory from the page cache; pages that a process has mapped stay."""
    for file in Path(directory).iterdir():
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            try:
                os.fsync(fd)  # pages that are not written yet cannot be dropped
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def _cold(path: str, options: dict[str, Any], shuffle: str, seconds: float) -> dict[str, float]:
    """The rate over `seconds`, at first with nothing in memory, and bytes read from the disk for each one used."""
    next(Loader(Dataset(path), **options))  # loads the kernels
    evict(path)
    loader = Loader(Dataset(path), **options, shuffle=shuffle)
    before = read_bytes()
    start, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < seconds:
        count += next(loader).input_ids.size
    itemsize = loader.sources[0].dataset.tokens("train", 0).itemsize
    return {"rate": count / passed, "disk_bytes_per_byte": (read_bytes() - before) / (count * itemsize)}


def read_bytes() -> int:
    """Bytes that this process has read from the disk."""
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))


def memory() -> dict[str, int]:
    """Memory of this process in bytes: private, shared with other processes, and PSS.

    PSS is the private memory and, of each shared page, the part that falls to this process. Pages of a file that only
    this process has mapped are in neither of the first two: the system can drop them at any time.
    """
    with open("/proc/self/smaps_rollup") as file:
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in list(file)[1:]}
    shared = sizes["Shared_Clean"] + sizes["Shared_Dirty"]
    return {"pss": sizes["Pss"], "private": sizes["Private_Dirty"], "shared": shared}


def read_together(path: str, options: dict[str, Any], processes: int, seconds: float) -> dict[str, Any]:
    """Several readers at once, each a rank of one job: the sums of their rates and of their memory.

    bare_*: their memory before they opened the dataset.
    """
    manager = get_context("spawn").Manager()
    barrier = manager.Barrier(processes, timeout=60 + 2 * seconds)  # ends if one of them fails
    with _pool(processes) as pool:
        parts = [pool.submit(_reader, path, options, rank, processes, seconds, barrier) for rank in range(processes)]
        results = [part.result() for part in parts]
    manager.shutdown()
    totals = {name: sum(result[name] for result in results) for name in results[0]}
    return {"number": processes} | totals


def _reader(
    path: str, options: dict[str, Any], rank: int, world_size: int, seconds: float, barrier: Any
) -> dict[str, float]:
    barrier.wait()
    bare = memory()
    barrier.wait()
    loader = Loader(Dataset(path), **options, rank=rank, world_size=world_size)
    next(loader)
    barrier.wait()
    rate = _rate(loader, seconds)
    barrier.wait()
    used = memory()
    barrier.wait()  # all measure their memory before the first one ends
    return {"rate": rate} | used | {f"bare_{name}": size for name, size in bare.items()}


def text(measured: dict[str, Any]) -> str:
    """The measurements for a terminal."""
    lines = [
        f"{measured['path']}: {measured['tokens']:,} tokens, split {measured['split']}, "
        f"batches of {measured['rows']} x {measured['length']}, {measured['cores']} cores",
        "",
        "  one process, warm, Mtok/s" + "".join(f"{policy:>13}" for policy in MASKING_POLICIES),
    ]
    for name, rates in measured["warm"].items():
        lines.append(f"  {name:<25}" + "".join(f"{rate / 1e6:>13.0f}" for rate in rates.values()))
    opening, together = measured["opening"], measured["processes"]
    lines += [
        "",
        f"  opening {opening['open_ms']:.1f} ms, then the first batch {opening['first_batch_ms']:.1f} ms",
        "",
        f"  {together['number']} processes together, windows, exact: {together['rate'] / 1e6:.0f} Mtok/s",
        f"  {'':<36}{'all of them':>12}{'bare':>12}",
    ]
    for name, what in (
        ("pss", "memory (PSS)"),
        ("private", "of it private"),
        ("shared", "mapped and shared, each once"),
    ):
        lines.append(f"  {what:<36}{together[name] / 1e6:>9,.0f} MB{together['bare_' + name] / 1e6:>9,.0f} MB")
    for shuffle, rates in measured.get("cold", {}).items():
        lines.append(
            f"  cold, shuffle {shuffle}: {rates['rate'] / 1e6:.1f} Mtok/s, {rates['disk_bytes_per_byte']:.2f} bytes "
            "from the disk for each byte used"
        )
    return "\n".join(lines)
