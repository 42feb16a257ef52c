"""Measure the memory of many batches and of a large build. Each prints one JSON object, and fails above its bound.

python tools/soak.py batches --minutes 30     a loader, then four DataLoader workers, half of the time each
python tools/soak.py build --gigabytes 10     a build, and the memory it took
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

import bertdata
from bertdata.write import build

WORDS = ("the", "of", "and", "stone", "river", "light", "under", "morning", "bread", "letter", "wind", "house", "salt")


def write_text(path: Path, num_bytes: int, seed: int = 0) -> Path:
    """Documents of one to twelve sentences of few words."""
    draw, size = random.Random(seed), 0
    with open(path, "w", encoding="utf-8") as file:
        while size < num_bytes:
            for _ in range(draw.randint(1, 12)):
                size += file.write(" ".join(draw.choices(WORDS, k=draw.randint(1, 9))) + ".\n")
            size += file.write("\n")
    return path


def write_vocab(path: Path) -> Path:
    special, letters = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], "abcdefghijklmnopqrstuvwxyz"
    path.write_text("\n".join([*special, ".", *letters, *("##" + letter for letter in letters), *WORDS]) + "\n")
    return path


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def batches(scratch: Path, minutes: float) -> dict[str, Any]:
    """Measure resident memory, descriptors and threads, without the first fifth of the time.

    Fails above 50 bytes a batch and 1 MiB in all, which the allocators of five processes need.
    """
    from torch.utils.data import DataLoader

    from bertdata.torch import BatchDataset

    vocab = write_vocab(scratch / "vocab.txt")
    shards = build([write_text(scratch / "text", 4_000_000)], scratch / "shards", tokenizer=str(vocab)).dataset
    facts: dict[str, Any] = {"minutes": minutes}
    for kind in ("loader", "four_workers"):
        loader = bertdata.Loader(shards, length=128, global_batch_size=64)
        stream: Iterator[Any] = loader
        if kind == "four_workers":
            stream = iter(DataLoader(BatchDataset(loader), batch_size=None, num_workers=4))
        next(stream)  # the first batch waits for workers and kernels
        seen, began, count, looked = [], time.monotonic(), 0, 0.0
        while (spent := time.monotonic() - began) < 30 * minutes:
            next(stream)
            count += 1
            if spent - looked > 0.5:
                looked = spent
                open_files = len(os.listdir("/proc/self/fd"))
                threads = len(os.listdir("/proc/self/task"))
                seen.append((count, resident() + sum(map(_resident_of, _children())), open_files, threads, spent))
        late = np.array([entry for entry in seen if entry[4] > 6 * minutes])
        slope, grown = np.polyfit(late[:, 0], late[:, 1], 1)[0], int(late[-1, 1] - late[0, 1])
        facts[kind] = {
            "batches": count,
            "bytes_a_batch": round(float(slope), 2),
            "grown_bytes": grown,
            # tensors on their way from workers have some
            "descriptors": [int(late[:, 2].min()), int(late[:, 2].max())],
            "threads": [int(late[:, 3].min()), int(late[:, 3].max())],
        }
        del stream
        half = late.shape[0] // 2
        assert slope < 50 or grown < 1 << 20, facts
        assert (late[half:, 2:4].min(0) <= late[:half, 2:4].min(0)).all(), facts
    return facts


def _children() -> list[int]:
    return [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]


def _resident_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def large_build(scratch: Path, gigabytes: float) -> dict[str, Any]:
    vocab, part = write_vocab(scratch / "vocab.txt"), write_text(scratch / "part", 20_000_000)
    count = round(gigabytes * 1e9 / part.stat().st_size)
    command = [sys.executable, "-m", "bertdata", "build", *[str(part)] * count, "--tokenizer", str(vocab)]
    started = time.perf_counter()
    subprocess.run([*command, "--out", str(scratch / "shards")], check=True, capture_output=True)
    seconds, peak = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    size = count * part.stat().st_size
    tokens = bertdata.open(scratch / "shards").num_tokens
    facts = {"bytes": size, "tokens": tokens, "seconds": round(seconds, 1), "peak_bytes": peak}
    assert peak < 1 << 30, facts
    return facts


@click.command()
@click.argument("what", type=click.Choice(["batches", "build"]))
@click.option("--minutes", default=2.0, show_default=True)
@click.option("--gigabytes", default=1.0, show_default=True)
@click.option("--directory", help="Where to make the scratch directory.")
def main(what: str, minutes: float, gigabytes: float, directory: str | None) -> None:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        facts = batches(Path(scratch), minutes) if what == "batches" else large_build(Path(scratch), gigabytes)
    click.echo(json.dumps({"what": what, **facts, "took_s": round(time.perf_counter() - started, 1)}))


if __name__ == "__main__":
    main()
