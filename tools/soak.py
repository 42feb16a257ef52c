"""Measure the memory of many batches and of a large build. Each prints one JSON object, and fails above its bound.

python tools/soak.py batches --minutes 30     a loader, then four DataLoader workers, half of the time each
python tools/soak.py build --gigabytes 10     a build, and the memory it took
"""

from __future__ import annotations

import json
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
import psutil
from inputs import write_inputs
from torch.utils.data import DataLoader

import bertdata
from bertdata.torch import BatchDataset


def build(scratch: Path, times: int) -> tuple[bertdata.Dataset, dict[str, Any]]:
    """Build from a text of 4 MB, read so many times, in another process, and measure its memory."""
    write_inputs(scratch, 20_000)
    text, out = scratch / "english.txt", scratch / "shards"
    command = [
        sys.executable,
        "-m",
        "bertdata",
        "build",
        *[str(text)] * times,
        "--tokenizer",
        str(scratch / "vocab.txt"),
    ]
    subprocess.run([*command, "--out", str(out)], check=True, capture_output=True)
    dataset, peak = bertdata.open(out), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    facts = {"bytes": times * text.stat().st_size, "tokens": dataset.num_tokens, "peak_bytes": peak}
    assert peak < 1 << 30, facts
    return dataset, facts


def batches(scratch: Path, minutes: float) -> dict[str, Any]:
    """Measure resident memory, descriptors and threads, without the first fifth of the time.

    Fails above 50 bytes a batch and 1 MiB in all, which the allocators of five processes need.
    """
    dataset, _ = build(scratch, 1)
    facts: dict[str, Any] = {"minutes": minutes}
    this = psutil.Process()
    for kind in ("loader", "four_workers"):
        loader = bertdata.Loader(dataset, length=128, global_batch_size=64)
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
                memory = sum(process.memory_info().rss for process in [this, *this.children()])
                seen.append((count, memory, this.num_fds(), this.num_threads(), spent))
        late = np.array([entry for entry in seen if entry[4] > 6 * minutes])
        slope, grown = np.polyfit(late[:, 0], late[:, 1], 1)[0], int(late[-1, 1] - late[0, 1])
        facts[kind] = {"batches": count, "bytes_a_batch": round(float(slope), 2), "grown_bytes": grown}
        del stream
        half = late.shape[0] // 2
        assert slope < 50 or grown < 1 << 20, facts
        # tensors on their way from workers have some descriptors
        assert (late[half:, 2:4].min(0) <= late[:half, 2:4].min(0)).all(), facts
    return facts


@click.command()
@click.argument("what", type=click.Choice(["batches", "build"]))
@click.option("--minutes", default=2.0, show_default=True)
@click.option("--gigabytes", default=1.0, show_default=True)
def main(what: str, minutes: float, gigabytes: float) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        facts = (
            batches(Path(scratch), minutes) if what == "batches" else build(Path(scratch), round(250 * gigabytes))[1]
        )
    click.echo(json.dumps({"what": what, **facts}))


if __name__ == "__main__":
    main()
