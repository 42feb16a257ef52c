"""Measure how fast one process reads a dataset, in tokens a second, padding included."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

from bertdata.choices import SAMPLE_KINDS
from bertdata.errors import UsageError
from bertdata.format.dataset import Dataset
from bertdata.format.manifest import Split
from bertdata.read.loader import Loader
from bertdata.read.pieces import MAX_LENGTH
from bertdata.types import Masking

SECONDS = 1.0  # of a measurement


def run(path: str, *, length: int, rows: int) -> dict[str, Any]:
    """Return the rates by kind of samples, masked and not, as a JSON-able object. Takes some seconds.

    rows, length: of a batch. Raises UsageError if there is no split train.
    """
    dataset = Dataset(path)
    if "train" not in dataset.splits:
        sentence = f"{path} has no split train, which bench reads; build it again with a smaller --validation"
        raise UsageError(sentence, "no-split", option="shards", given=path)
    rates: dict[str, dict[str, float]] = {}
    for name in SAMPLE_KINDS:
        if is_possible(name, dataset.splits["train"], length):
            options: dict[str, Any] = {"length": length, "global_batch_size": rows, "samples": name}
            rates[name] = {
                "unmasked": _rate(Loader(dataset, **options, masking=None)),
                "masked": _rate(Loader(dataset, **options, masking=Masking())),
            }
    return {
        "path": path,
        "dataset_id": dataset.dataset_id,
        "tokens": dataset.num_tokens,
        "length": length,
        "rows": rows,
        "cores": len(os.sched_getaffinity(0)),
        "tokens_per_s": rates,
    }


def is_possible(samples: str, split: Split, length: int) -> bool:
    """Whether a kind of samples can be made in rows of a length, which may be too long for an index."""
    return split.has_pairs if samples == "pairs" else samples == "windows" or length <= MAX_LENGTH


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
