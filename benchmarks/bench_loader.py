"""How many masked tokens a second does one core deliver, beside what a Hugging Face collator masks?

    python benchmarks/bench_loader.py shards/

Regime: one process, warm pages and compiled kernels, random order over the whole train split, batches of 256 × 128,
arrays int64. Ceiling: copying random windows of 128 uint16 and nothing else is bound by memory latency. The collator is
given ready rows of ids, as tensors, in order, so that only its masking and stacking count.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from common import report, rounds
from transformers import AutoTokenizer, DataCollatorForLanguageModeling

import bertdata

LENGTH, ROWS = 128, 256


def main() -> None:
    torch.set_num_threads(1)
    shards = bertdata.open(sys.argv[1])

    def of(masking: bertdata.Masking | None, batches: int) -> object:
        loader = bertdata.Loader(shards, length=LENGTH, global_batch_size=ROWS, masking=masking)

        def run() -> float:
            for _ in range(batches):
                next(loader)
            return batches * ROWS * LENGTH

        return run

    tokens = shards.tokens("train", 0)
    starts = np.random.default_rng(0).integers(0, tokens.size - LENGTH, (200, ROWS, 1)) + np.arange(LENGTH)

    def copy() -> float:
        for batch in starts:
            tokens[batch].astype(np.int64)
        return starts.size

    collator = DataCollatorForLanguageModeling(AutoTokenizer.from_pretrained(sys.argv[1]), mlm_probability=0.15)
    loader = bertdata.Loader(shards, length=LENGTH, global_batch_size=ROWS, masking=None)
    ready = [[{"input_ids": torch.from_numpy(row)} for row in next(loader).input_ids] for _ in range(5)]

    def collate() -> float:
        for rows in ready:
            collator(rows)
        return len(ready) * ROWS * LENGTH

    contenders = {
        "exact": of(bertdata.Masking(), 300),
        "bernoulli": of(bertdata.Masking(policy="bernoulli"), 300),
        "unmasked": of(None, 300),
        "numpy copy of random windows": copy,
        "transformers collator": collate,
    }
    found = rounds(contenders, repeats=7)  # type: ignore[arg-type]
    rates = {name: round(rate["median"] / 1e6, 2) for name, rate in found.items()}
    for name, rate in rates.items():
        print(f"{name:<30}{rate:>10.2f} Mtok/s")
    ratio = round(rates["exact"] / rates["transformers collator"], 1)
    report(
        "masked tokens a second of one core",
        "warm, 256 x 128, random order",
        {"Mtok/s": rates, "exact ÷ collator": ratio},
    )


if __name__ == "__main__":
    main()
