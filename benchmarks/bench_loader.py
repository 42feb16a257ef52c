"""How many masked tokens a second does one core deliver, by kind of sample and masking policy?

    python benchmarks/bench_loader.py shards/ [--rows 256] [--length 128]

Regime: one process without workers, warm pages and compiled kernels, random order, batches of 256 x 128, arrays int64,
the whole train split. Ceiling: copying random windows of 128 uint16 and nothing else is bound by memory latency.
bench_reading.py has other engines beside ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import numpy as np
from common import report, rounds

import bertdata

MODES = [
    ("windows", "exact"), ("windows", "bernoulli"), ("windows", "whole_word"), ("windows", "span"),
    ("documents", "exact"), ("packed", "exact"), ("packed", "whole_word"), ("pairs", "exact"), ("pairs", "whole_word"),
]  # fmt: skip


@click.command()
@click.argument("path")
@click.option("--rows", "size", default=256)
@click.option("--length", default=128)
@click.option("--rounds", "repeats", default=7)
def main(path: str, size: int, length: int, repeats: int) -> None:
    shards = bertdata.open(path)
    options: dict[str, Any] = {"length": length, "global_batch_size": size}
    modes = [mode for mode in MODES if mode[0] != "pairs" or shards.splits["train"][0].num_sentences]

    def ours(samples: str, policy: str | None) -> Callable[[], float]:
        masking = bertdata.Masking(policy=policy) if policy else None
        loader = bertdata.Loader(shards, **options, samples=samples, masking=masking)

        def run() -> float:
            for _ in range(300):
                next(loader)
            return 300 * size * length

        return run

    tokens = shards.tokens("train", 0)
    starts = np.random.default_rng(0).integers(0, tokens.size - length, (200, size, 1)) + np.arange(length)

    def copy() -> float:
        for batch in starts:
            tokens[batch].astype(np.int64)
        return starts.size

    contenders = {f"{samples}, {policy}": ours(samples, policy) for samples, policy in modes}
    contenders |= {"windows, unmasked": ours("windows", None), "numpy: random windows, unmasked": copy}

    found = rounds(contenders, repeats=repeats)
    rates = {name: round(rate["median"] / 1e6, 3) for name, rate in found.items()}
    for name, rate in rates.items():
        print(f"{name:<34}{rate:>10.2f} Mtok/s")
    per_8_gpus = round(6 / rates["windows, exact"], 3)
    print(f"cores for 6 Mtok/s, which eight H200 want at BERT-base: {per_8_gpus}")
    regime = f"warm, {size} x {length}, random order, one process"
    result = {"train tokens": shards.splits["train"].num_tokens, "Mtok/s": rates, "cores": per_8_gpus}
    report("masked tokens a second of one core", regime, result)


if __name__ == "__main__":
    main()
