"""How fast is a training step on one GPU: BERT-base and -large, ModernBERT-base, rows of 128, 512 and 1,024?

    python benchmarks/gpu_step.py [--seconds 450] [--quick]

Needs nothing but this repository and a GPU: weights are random, data is made up (documents of random length over 30,522
ids). bf16, AdamW, clipping, batches from the Loader, as in bertrain.pretrain. Beside each, a plain step: transformers'
model with labels for all places, an attention mask, no compilation, batches by the same Loader. Each case warms up
(and compiles), then runs for some seconds; cases that do not fit are tried with half the rows. What does not fit into
the time is left out and named. --quick: tiny models on any device, to see that the script works.
"""

from __future__ import annotations

import gc
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from common import report

import bertdata
from bertdata.format.manifest import Manifest, Shard, Split
from bertdata.format.shard import ShardWriter
from bertdata.types import SpecialTokens
from bertrain import feed, optim
from bertrain.config import Config
from bertrain.models import build as model
from bertrain.objectives import Learner, MaskedTokens
from bertrain.runtime import rates

ROWS = {128: 256, 512: 64, 1024: 32}  # to begin with
CASES = [
    (name, length, compiled, isolate)
    for name, lengths in (("bert-base", (128, 512)), ("bert-large", (128, 512)), ("modernbert-base", (128, 512, 1024)))
    for length in lengths
    for compiled, isolate in ((True, False), (False, False), (True, True))
]


def make_shards(out: Path, num_tokens: int = 20_000_000) -> bertdata.Dataset:
    special = SpecialTokens(vocab_size=30522, pad=0, cls=101, sep=102, mask=103, special_ids=(0, 101, 102, 103))
    random = np.random.default_rng(0)
    writer = ShardWriter(out, "train-00000", split="train", token_dtype="<u2", sentences=False)
    tokens = random.integers(999, 30522, num_tokens, dtype=np.uint16)
    ends = np.unique(np.append(np.cumsum(random.geometric(1 / 400, num_tokens // 500) + 8), num_tokens))
    ends = ends[ends <= num_tokens].astype(np.uint64)
    tokens[ends - np.uint64(1)] = 102
    writer.append(tokens, ends)
    arrays = writer.commit(input_range=(0, 1), counts={})["arrays"]
    public = {name: {k: v for k, v in entry.items() if k != "crc32"} for name, entry in arrays.items()}
    splits = {"train": Split((Shard(writer.name, ends.size, num_tokens, None, public),))}
    Manifest("<u2", special, tokenizer={}, settings={}, splits=splits, counts={}).write(out)
    return bertdata.open(out)


def measure(
    shards: bertdata.Dataset, name: str, length: int, *, compiled: bool, isolate: bool, plain: bool, rows: int,
    seconds: float, device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """Tokens a second of whole steps, what share of the time waits for data, MFU and peak memory."""
    weights = model.build(name, shards.special_tokens, length=length, seed=0)[0].to(device).train()
    samples = "packed" if isolate else "windows"
    loader = bertdata.Loader(shards, length=length, global_batch_size=rows, samples=samples)
    module: Any = weights if plain else Learner(weights, {"mlm": MaskedTokens(weights, None)}, isolate=isolate)
    if compiled:
        module.compile(fullgraph=True, dynamic=False)
    config = Config(data=str(shards.path), out="none")
    optimizer = optim.build(weights, config)
    waited = 0.0

    def step() -> None:
        nonlocal waited
        start = time.perf_counter()
        batch = next(loader)
        waited += time.perf_counter() - start
        with torch.autocast(device.type, torch.bfloat16):
            if plain:
                given = {key: feed.to_device(tensor, device) for key, tensor in feed.tensors(batch).items()}
                given.pop("position_ids", None)
                loss = module(**given).loss
            else:
                piece = next(feed.micro_batches(batch, size=rows, count=1, device=device))
                loss = module(**piece)["mlm"].sum / (rows * loader.num_slots)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.parameters(), config.clip_norm)
        optim.set_learning_rate(optimizer, 1e-4)
        optimizer.step()
        optimizer.zero_grad()

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    start = time.perf_counter()
    for _ in range(4):
        step()
    finish()
    warm_s = time.perf_counter() - start
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    waited, count, start = 0.0, 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(5):
            step()
        finish()
        count += 5
    passed = time.perf_counter() - start
    slots = length if plain else loader.num_slots
    flops = rates.Operations.of(weights).of_step(rows=rows * count, length=length, slots=loader.num_slots) / passed
    peak = rates.peak_flops(device, "bf16")
    return {
        "model": name, "length": length, "compile": compiled, "isolate": isolate, "plain": plain, "rows": rows,
        "tok/s": round(count * rows * length / passed), "MFU": round(flops / peak, 4) if peak else None,
        "places through the head": slots, "data wait": round(waited / passed, 5), "warm-up, s": round(warm_s, 1),
        "peak memory, GB": round(torch.cuda.max_memory_allocated() / 1e9, 2) if device.type == "cuda" else None,
    }  # fmt: skip


@click.command()
@click.option("--seconds", default=450.0, help="For everything.")
@click.option("--each", default=4.0, help="Seconds measured of a case.")
@click.option("--quick", is_flag=True, help="Tiny models, to see that it works.")
def main(seconds: float, each: float, quick: bool) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not quick:
        raise click.UsageError("there is no GPU; --quick shows that the script works")
    cases: list[tuple[str, int, bool, bool]] = CASES
    if quick:
        cases = [(name, 32, False, isolate) for name in ("bert-tiny", "modernbert-tiny") for isolate in (False, True)]
    torch.backends.cuda.matmul.allow_tf32 = True
    begun, found, left_out = time.perf_counter(), [], []
    with tempfile.TemporaryDirectory() as scratch:
        shards = make_shards(Path(scratch), 200_000 if quick else 20_000_000)
        todo = [(*case, False) for case in cases]
        todo += [(name, length, False, False, True) for name, length in dict.fromkeys(case[:2] for case in cases)]
        todo.sort(key=lambda case: (case[3], case[4] and 0, -case[2]))  # what matters most first
        for name, length, compiled, isolate, plain in todo:
            if time.perf_counter() - begun > seconds - 20:
                left_out.append([name, length, compiled, isolate, plain])
                continue
            rows = 4 if quick else ROWS[length]
            while True:
                try:
                    kind = {"compiled": compiled, "isolate": isolate, "plain": plain}
                    result = measure(shards, name, length, **kind, rows=rows, seconds=each, device=device)
                except torch.OutOfMemoryError:
                    rows //= 2
                except Exception as error:  # one path that fails must not hide the others
                    result = {
                        "model": name,
                        "length": length,
                        **kind,
                        "error": f"{type(error).__name__}: {error}"[:300],
                    }
                    break
                else:
                    break
                finally:
                    gc.collect()
                    torch.compiler.reset()
                    if device.type == "cuda":
                        torch.cuda.empty_cache()
            found.append(result)
            print({key: value for key, value in result.items() if value not in (None, False)}, flush=True)
    gpu = torch.cuda.get_device_name(0) if device.type == "cuda" else "none"
    result = {"GPU": gpu, "cases": found, "left out": left_out}
    report("a training step on one GPU", "bf16", result)


if __name__ == "__main__":
    main()
