"""How many masked tokens a second does one core deliver, beside loaders people use with transformers' collator?

    python benchmarks/bench_loader.py shards/ [--rows 256] [--length 128]

Regime: one process without workers, warm pages and compiled kernels, random order, batches of 256 x 128, arrays int64.
Ours reads the whole train split; the others get ready rows of ids (20,000 of them, written by their own writers), so
that only their reading, collating and masking count. Those that are not installed are left out. Ceiling: copying random
windows of 128 uint16 and nothing else is bound by memory latency.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from common import report, rounds
from transformers import AutoTokenizer, DataCollatorForLanguageModeling

import bertdata

NUM_ROWS, BATCHES = 20_000, 20  # of the others, and of a turn of theirs
MODES = [
    ("windows", "exact"), ("windows", "bernoulli"), ("windows", "whole_word"), ("windows", "span"),
    ("documents", "exact"), ("packed", "exact"), ("packed", "whole_word"), ("pairs", "exact"), ("pairs", "whole_word"),
]  # fmt: skip


def forever(make: Callable[[], Any]) -> Iterator[Any]:
    while True:
        yield from make()


def hf_datasets(rows: np.ndarray, size: int, collate: Any, at: str) -> Iterator[Any]:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"input_ids": list(rows)}).save_to_disk(at)
    stored = datasets.load_from_disk(at)
    return forever(lambda: torch.utils.data.DataLoader(stored, size, shuffle=True, drop_last=True, collate_fn=collate))


def mosaicml_streaming(rows: np.ndarray, size: int, collate: Any, at: str) -> Iterator[Any]:
    import streaming

    with streaming.MDSWriter(out=at, columns={"input_ids": f"ndarray:int64:{rows.shape[1]}"}) as writer:
        for row in rows:
            writer.write({"input_ids": row})
    stored = streaming.StreamingDataset(local=at, shuffle=True, batch_size=size)
    return forever(lambda: torch.utils.data.DataLoader(stored, size, drop_last=True, collate_fn=collate))


def litdata(rows: np.ndarray, size: int, collate: Any, at: str) -> Iterator[Any]:
    import litdata
    from litdata.streaming.cache import Cache
    from litdata.streaming.item_loader import TokensLoader

    loader = TokensLoader(block_size=rows.shape[1])
    cache = Cache(at, chunk_bytes="64MB", item_loader=loader)
    for number, row in enumerate(rows):
        cache[number] = torch.from_numpy(row)
    cache.done()
    cache.merge()
    stored = litdata.StreamingDataset(at, item_loader=TokensLoader(block_size=rows.shape[1]), shuffle=True)

    def collate_rows(found: list[torch.Tensor]) -> Any:
        return collate([{"input_ids": row} for row in found])

    return forever(
        lambda: litdata.StreamingDataLoader(stored, batch_size=size, drop_last=True, collate_fn=collate_rows)
    )


@click.command()
@click.argument("path")
@click.option("--rows", "size", default=256)
@click.option("--length", default=128)
@click.option("--rounds", "repeats", default=7)
def main(path: str, size: int, length: int, repeats: int) -> None:
    torch.set_num_threads(1)
    shards = bertdata.open(path)
    options: dict[str, Any] = {"length": length, "global_batch_size": size}
    modes = [mode for mode in MODES if mode[0] != "pairs" or shards.splits["train"].shards[0].num_sentences]

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

    collator = DataCollatorForLanguageModeling(AutoTokenizer.from_pretrained(path), mlm_probability=0.15)

    def collate(rows: list[dict[str, Any]]) -> Any:
        return collator([{"input_ids": torch.as_tensor(row["input_ids"])} for row in rows])

    plain = bertdata.Loader(shards, **options, masking=None)
    rows = plain.read(np.arange(NUM_ROWS)).input_ids
    rivals = {"datasets": hf_datasets, "mosaicml-streaming": mosaicml_streaming, "litdata": litdata}
    with tempfile.TemporaryDirectory() as scratch:
        for name, make in rivals.items():
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    batches = make(rows, size, collate, str(Path(scratch, name)))
            except ImportError as error:
                print(f"without {name}: {error}")
                continue

            def run(batches: Iterator[Any] = batches) -> float:
                return sum(batch["input_ids"].numel() for batch in islice(batches, BATCHES))

            contenders[f"{name} + collator"] = run
        ready = [{"input_ids": row} for row in rows[:size]]
        contenders["collator alone"] = lambda: [collate(ready)["input_ids"].numel() for _ in range(5)][0] * 5
        found = rounds(contenders, repeats=repeats)
    rates = {name: round(rate["median"] / 1e6, 3) for name, rate in found.items()}
    for name, rate in rates.items():
        print(f"{name:<34}{rate:>10.2f} Mtok/s")
    others = [name for name in rates if name.endswith("+ collator")]
    ratios = {f"windows, exact ÷ {name}": round(rates["windows, exact"] / rates[name], 1) for name in others}
    per_8_gpus = round(6 / rates["windows, exact"], 3)
    print(f"cores for 6 Mtok/s, which eight H200 want at BERT-base: {per_8_gpus}")
    regime = f"warm, {size} x {length}, random order, one process"
    result = {"train tokens": shards.splits["train"].num_tokens, "Mtok/s": rates, "times": ratios, "cores": per_8_gpus}
    report("masked tokens a second of one core", regime, result)
    os._exit(0)  # threads of the others would keep the process


if __name__ == "__main__":
    main()
