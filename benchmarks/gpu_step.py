"""How fast is a training step on one GPU: BERT-base and -large, ModernBERT-base, rows of 128, 512 and 1,024?

    python benchmarks/gpu_step.py --out benchmarks/results/gpu.jsonl [--seconds 480] [--quick]

Needs nothing but this repository and a GPU: weights are random, and so is the text (documents of random length over
30,522 words). bf16, AdamW, clipping, batches from the Loader, as in bertrain.pretrain. Each case warms up (and
compiles), then runs for some seconds, then for 10 steps under torch's profiler, whose shares of the time are in
`profile`: by kind of kernel, and `idle`, in which no kernel ran. The batch with the padded row at the end of an epoch,
for which a second graph is compiled, is left out; `pretrain` and `muon` read it. A case that does not fit into memory
is tried with half the rows.

compiled   the step of bertrain, as it is on GPUs
cudnn      the same with cuDNN's kernel of attention alone
pretrain   bertrain pretrain itself: the last entries of its log
plain      transformers' model with labels for all places and an attention mask, not compiled, with the same batches
packed     the step of bertrain with --isolate-documents, compiled; its MFU counts attention over whole rows
eager      the step of bertrain, not compiled
muon       as pretrain, with --optimizer muon

Each way has a case before any has a second one. Each case that is done is a line of --out at once, and is not run
again, so the command can be stopped and repeated. It begins no case that may take longer than what is left of
--seconds. --only names cases, as they are printed. --quick: tiny models on any device, to see that the script works.
"""

# ruff: noqa: E402  (bertdata need not be installed)
from __future__ import annotations

import contextlib
import gc
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bertrain.data import micro_batches, to_device
from bertrain.models.encoder import KERNELS, attention_kernels, choose_attention, has_kernel, limit_kernels
from bertrain.models.load import new_model
from bertrain.speed import flops_of_row, peak_flops

sys.path.insert(0, str(Path(__file__).parent.parent))

import click
import numpy as np
import torch
from common import machine

import bertdata
from bertdata.options import Shares
from bertdata.torch import tensors
from bertdata.write import build
from bertrain.config import Config
from bertrain.objectives import Learner, MaskedTokens
from bertrain.optim import optimizers
from bertrain.pretrain import pretrain

ROWS = {32: 4, 128: 256, 512: 64, 1024: 32}  # of a step, by length
GRID = [("bert-base", 128), ("modernbert-base", 1024), ("modernbert-base", 128), ("bert-base", 512),
        ("bert-large", 128), ("modernbert-base", 512), ("bert-large", 512)]  # fmt: skip
WAYS = {
    "compiled": GRID,
    "pretrain": GRID[:2],
    "packed": GRID,
    "plain": GRID,
    "eager": GRID,
    "cudnn": GRID,
    "muon": GRID[:1],
}  # fmt: skip  (what matters most first)
QUICK = {way: [("bert-tiny", 32), ("modernbert-tiny", 32)] for way in ("pretrain", "packed", "plain", "eager")}
LONGEST_S = dict.fromkeys(("compiled", "packed", "pretrain", "cudnn", "muon"), 50)  # of a case; others 30
PROFILED = 10  # steps
KINDS = {
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk"),
    "optimizer": ("multi_tensor", "adam"),
    "fused": ("triton",),
    "copies": ("memcpy", "memset"),
}
"""Kinds of kernels by parts of their names, in small letters; the first that has one. The rest is "other"."""


def in_order(ways: dict[str, list[tuple[str, int]]]) -> list[list[Any]]:
    """The cases, [model, length, way] each: the first one of each way, then the second ones."""
    turns = itertools.zip_longest(*([[name, length, way] for name, length in grid] for way, grid in ways.items()))
    return [case for turn in turns for case in turn if case]


def make_shards(place: Path, num_tokens: int) -> bertdata.Dataset:
    """Documents of 8 tokens and more, 400 in the mean."""
    letters, random = "abcdefghijklmnop", np.random.default_rng(0)
    words = [a + b + c + d for a in letters for b in letters for c in letters for d in letters][: 30522 - 5]
    (place / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    lengths = random.geometric(1 / 392, num_tokens // 400) + 8
    texts = (" ".join(words[i] for i in random.integers(0, len(words), length).tolist()) for length in lengths)
    (place / "corpus.txt").write_text("\n\n".join(texts) + "\n")
    build([place / "corpus.txt"], place / "shards", tokenizer=str(place / "vocab.txt"), shares=Shares(validation=0))
    return bertdata.open(place / "shards")


def kernels_of(way: str, module: Any, device: torch.device) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A function that makes the context of a step: which kernels of attention may run."""
    if way == "plain":
        return contextlib.nullcontext
    return limit_kernels(attention_kernels(way if way in KERNELS else "auto", module, device))


def profile(steps: Callable[[int], None]) -> dict[str, Any]:
    """Shares of the time of steps by kind of kernel, idle among them, and the kernels that take most."""
    steps(1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        start = time.perf_counter()
        steps(PROFILED)
        passed = time.perf_counter() - start
    shares: Counter[str] = Counter()
    kernels = Counter({event.key: event.self_device_time_total / 1e6 / passed for event in profiler.key_averages()})
    for name, share in kernels.items():
        kind = next((kind for kind, parts in KINDS.items() if any(part in name.lower() for part in parts)), "other")
        shares[kind] += share
    shares["idle"] = 1 - shares.total()
    most = [[name[:100], round(share, 3)] for name, share in kernels.most_common(16)]
    return {"step_ms": round(1000 * passed / PROFILED, 2), "most": most} | {k: round(v, 3) for k, v in shares.items()}


def measure(
    shards: bertdata.Dataset, name: str, length: int, way: str, *, rows: int, seconds: float, device: torch.device
) -> dict[str, Any]:
    """Tokens a second of whole steps, what share of the time waits for data, MFU and peak memory."""
    weights = new_model(name, shards.special_tokens, length=length, seed=0)[0].to(device).train()
    isolate = way == "packed"
    if way in ("compiled", "cudnn", "eager") and has_kernel(device):
        choose_attention(weights, "auto", precision="bf16", device=device, length=length)
    loader = bertdata.Loader(shards, length=length, global_batch_size=rows, samples="packed" if isolate else "windows")
    module: Any = weights if way == "plain" else Learner(weights, {"mlm": MaskedTokens(weights, None)}, isolate=isolate)
    if way in ("compiled", "cudnn", "packed") and device.type == "cuda":
        torch.compiler.config.cache_key_tag = way  # as bertrain does, so that no other way's kernels are taken
        module.compile(fullgraph=True, dynamic=False)
    limited = kernels_of(way, module, device)
    config = Config.make(data=str(shards.path), out="none")
    optimizer = optimizers.build(weights, config)
    waited = 0.0

    def step() -> None:
        nonlocal waited
        start = time.perf_counter()
        batch = next(each for each in loader if isolate or each.attention_mask is None)
        waited += time.perf_counter() - start
        with limited():
            with torch.autocast(device.type, torch.bfloat16):
                if way == "plain":
                    given = {key: to_device(tensor, device) for key, tensor in tensors(batch).items()}
                    loss = module(**given).loss
                else:
                    piece = next(micro_batches(batch, size=rows, count=1, device=device))
                    loss = module(**piece)["mlm"].sum / (rows * loader.num_slots)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.parameters(), config.clip_norm)
        optimizers.set_learning_rate(optimizer, 1e-4)
        optimizer.step()
        optimizer.zero_grad()

    def steps(count: int) -> None:
        for _ in range(count):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    start = time.perf_counter()
    steps(4)
    warm_s = time.perf_counter() - start
    waited, count, start = 0.0, 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        steps(5)
        count += 5
    passed = time.perf_counter() - start
    flops = rows * count * flops_of_row(weights, length, loader.num_slots) / passed
    peak = peak_flops(device, "bf16")
    return {
        "tokens_per_s": round(count * rows * length / passed),
        "mfu": round(flops / peak, 4) if peak else None,
        "step_ms": round(1000 * passed / count, 2),
        "data_wait": round(waited / passed, 5),
        "warm_up_s": round(warm_s, 1),
        "profile": profile(steps) if device.type == "cuda" and seconds else None,
    }


def whole_run(shards: bertdata.Dataset, name: str, length: int, *, rows: int, **given: Any) -> dict[str, Any]:
    """The last entry of the log of a short run, which is of its last 20 steps. given: options of the run."""
    with tempfile.TemporaryDirectory() as out:
        each, start = 2 if length == 32 else 20, time.perf_counter()
        options = {"global_batch_size": rows, "micro_batch_size": rows, "steps": 3 * each, "log_every": each, **given}
        pretrain(Config.make(data=str(shards.path), out=out, model=name, length=length, eval_every=0, **options))
        entry = json.loads((Path(out) / "log.jsonl").read_text().splitlines()[-1])
    kept = {key: entry.get(key) for key in ("tokens_per_s", "mfu", "data_wait")}
    return kept | {"step_ms": round(1000 * rows * length / entry["tokens_per_s"], 2),
                   "whole_s": round(time.perf_counter() - start, 1)}  # fmt: skip


def case(shards: bertdata.Dataset, name: str, length: int, way: str, seconds: float, device: torch.device) -> Any:
    """The result of a case, or why there is none: one path that fails must not hide the others."""
    rows = ROWS[length]
    while True:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            if way in ("pretrain", "muon"):
                found = whole_run(shards, name, length, rows=rows, optimizer="muon" if way == "muon" else "adamw")
            else:
                found = measure(shards, name, length, way, rows=rows, seconds=seconds, device=device)
        except torch.OutOfMemoryError:
            rows //= 2
        except (Exception, SystemExit) as error:
            return {"error": f"{type(error).__name__}: {error}"[:1000]}
        else:
            memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
            return {"rows": rows, **found, "memory_bytes": memory}
        finally:
            gc.unfreeze()  # pretrain froze what it had made
            gc.collect()
            torch.compiler.reset()
            if device.type == "cuda":
                torch.cuda.empty_cache()


@click.command()
@click.option("--out", type=Path, required=True, help="File of JSON lines; cases that are in it are not run again.")
@click.option("--seconds", default=480.0, help="For everything.")
@click.option("--each", default=4.0, help="Seconds measured of a case.")
@click.option("--only", multiple=True, help="A case, such as 'bert-base 128 compiled'; may be given several times.")
@click.option("--data", type=Path, help="A dataset in place of the random one.")
@click.option("--quick", is_flag=True, help="Tiny models, to see that it works.")
def main(out: Path, seconds: float, each: float, only: tuple[str, ...], data: Path | None, quick: bool) -> None:
    begun = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not quick:
        raise click.ClickException("torch finds no GPU here; --quick shows that the script works")
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "none"
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = [line["case"] for line in lines if line["GPU"] == gpu]
    cases = [one for one in in_order(QUICK if quick else WAYS) if one not in done]
    if only:
        cases = [one for one in cases if " ".join(map(str, one)) in only]
    left_out = []
    with tempfile.TemporaryDirectory() as scratch:
        if data:
            shards = bertdata.open(data)
        elif cases:
            shards = make_shards(Path(scratch), 100_000 if quick else 4_000_000)
        for name, length, way in cases:
            if time.perf_counter() - begun + LONGEST_S.get(way, 30) > seconds:
                left_out.append(f"{name} {length} {way}")
                continue
            result = case(shards, name, length, way, each, device)
            line = {"case": [name, length, way], "GPU": gpu, "result": result, "machine": machine()}
            with open(out, "a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{name} {length} {way}: {result}", flush=True)
            if "CUDA error" in result.get("error", ""):
                raise click.ClickException("after this error the GPU takes no more work of this process; run it again")
    print(f"{len(left_out)} cases are left for another call" + "".join(f"; {name}" for name in left_out))


if __name__ == "__main__":
    main()
