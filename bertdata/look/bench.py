"""Measure how fast one process reads a dataset, in tokens a second, padding included."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

from bertdata.choices import SAMPLE_KINDS
from bertdata.errors import UsageError
from bertdata.format.dataset import Dataset
from bertdata.read.loader import Loader
from bertdata.types import Masking

SECONDS = 1.0  # of a measurement


def run(path: str, *, length: int, rows: int) -> dict[str, Any]:
    """Return the rates by kind of samples, masked and not, as a JSON-able object. Takes some seconds.

    rows, length: of a batch. Raises UsageError if there is no split train.
    """
    dataset, rates = Dataset(path), dict[str, dict[str, float]]()
    for name in SAMPLE_KINDS:
        options: dict[str, Any] = {"length": length, "global_batch_size": rows, "samples": name}
        try:
            unmasked, masked = (Loader(dataset, **options, masking=masking) for masking in (None, Masking()))
        except UsageError as error:  # this kind is not possible
            if error.kind not in ("not-stored", "empty", "too-long"):
                raise
        else:
            rates[name] = {"unmasked": _rate(unmasked), "masked": _rate(masked)}
    return {
        "path": path,
        "dataset_id": dataset.dataset_id,
        "tokens": dataset.num_tokens,
        "length": length,
        "rows": rows,
        "cores": len(os.sched_getaffinity(0)),
        "tokens_per_s": rates,
    }


def _rate(loader: Loader) -> float:
    """Return tokens a second: the median of five measurements of SECONDS / 5."""
    next(loader)  # compiles
    rates = []
    for _ in range(5):
        start, count = time.perf_counter(), 0
        while (passed := time.perf_counter() - start) < SECONDS / 5:
            count += next(loader).input_ids.size
        rates.append(count / passed)
    return statistics.median(rates)


def text(measured: dict[str, Any]) -> str:
    """Return the measurements for a terminal."""
    lines = [
        f"{measured['path']}: {measured['tokens']:,} tokens, split train, batches of {measured['rows']} x "
        f"{measured['length']}, one process of {measured['cores']} cores",
        f"  {'Mtok/s':<12}{'unmasked':>10}{'masked':>10}",
    ]
    for name, rates in measured["tokens_per_s"].items():
        lines.append(f"  {name:<12}{rates['unmasked'] / 1e6:>10.0f}{rates['masked'] / 1e6:>10.0f}")
    return "\n".join(lines)
