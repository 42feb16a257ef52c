"""Measure how fast one process reads a dataset, in tokens per second, including padding."""

from __future__ import annotations

import statistics
import time
from typing import Any

from bertdata.choices import SAMPLE_KINDS
from bertdata.errors import UsageError
from bertdata.format.dataset import Dataset
from bertdata.options import Machines
from bertdata.read.loader import Loader
from bertdata.types import Masking

SECONDS = 1.0  # seconds for each Loader


def measured(path: str, *, length: int, rows: int) -> str:
    """Return a table of the rates by kind of samples, with and without masks. Takes some seconds.

    rows, length: the shape of a batch. Raises UsageError if there is no split train.
    """
    dataset, cores = Dataset(path), Machines().threads
    lines = [
        f"{path}: {dataset.num_tokens:,} tokens, split train, batches of {rows} x {length}, 1 process of {cores} cores",
        f"  {'Mtok/s':<12}{'unmasked':>10}{'masked':>10}",
    ]
    for name in SAMPLE_KINDS:
        options: dict[str, Any] = {"length": length, "global_batch_size": rows, "samples": name}
        try:
            loaders = [Loader(dataset, **options, masking=masking) for masking in (None, Masking())]
        except UsageError as error:  # the dataset does not support this kind
            if error.kind not in ("not-stored", "empty", "too-long"):
                raise
        else:
            lines.append(f"  {name:<12}" + "".join(f"{_rate(loader) / 1e6:>10.0f}" for loader in loaders))
    return "\n".join(lines)


def _rate(loader: Loader) -> float:
    """Return tokens per second: the median of five measurements of SECONDS / 5 each."""
    next(loader)  # compiles
    rates = []
    for _ in range(5):
        start, count = time.perf_counter(), 0
        while (passed := time.perf_counter() - start) < SECONDS / 5:
            count += next(loader).input_ids.size
        rates.append(count / passed)
    return statistics.median(rates)
