"""How many tokens a second does the loop train on, beside transformers' Trainer on the same data, model and dtype?

    python benchmarks/bench_trainer.py shards/ [--ranks 2] [--steps 30] [--rows 64] [--precision fp32]

Three contenders, each under torchrun with one thread a rank, in turns: ours; the Trainer as people use it (ready rows,
DataCollatorForLanguageModeling, all positions through the vocabulary projection); and a Trainer that gets our batches
and our sparse head, so that only the loop differs. All have the same precision, the same implementation of attention
(the one that ours chooses) and the same settings of malloc (MALLOC, which ours sets by itself). BERT of 4 layers, width
256, the shards' vocabulary; length 128, AdamW with the same rates. Steps before the clock starts are not counted. The
peak of the machine is a matrix product of 1024 x 1024 on every rank at once.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from common import MALLOC, has_bf16, report

import bertdata
from bertrain.models.encoder import choose_attention

LENGTH, WARM = 128, 5


def config_of(shards: bertdata.Dataset) -> dict[str, Any]:
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    special = {"vocab_size": shards.special_tokens.vocab_size, "pad_token_id": shards.special_tokens.pad}
    return {"model_type": "bert", "max_position_embeddings": 512} | sizes | dropouts | special


def attention_of(model: Any) -> str:
    return model.config._attn_implementation  # noqa: SLF001


def trainer(kind: str, data: str, out: str, rows: int, steps: int, world_size: int, precision: str) -> None:
    """One rank of a run by transformers; rank 0 prints tokens a second and the losses."""
    from transformers import (
        AutoTokenizer,
        BertConfig,
        BertForMaskedLM,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )  # fmt: skip

    from bertdata.torch import SampleDataset
    from bertrain.objectives import Learner, MaskedTokens

    shards = bertdata.open(data)
    torch.manual_seed(0)
    values = config_of(shards)
    model: Any = BertForMaskedLM(BertConfig(**{name: value for name, value in values.items() if name != "model_type"}))
    choose_attention(model, "auto", precision=precision, device=torch.device("cpu"), length=LENGTH)
    masking = None if kind == "usual" else bertdata.Masking()
    samples = SampleDataset(bertdata.Loader(shards, length=LENGTH, masking=masking))
    collator = None
    if kind == "usual":
        collator = DataCollatorForLanguageModeling(AutoTokenizer.from_pretrained(data), mlm_probability=0.15)
        whole = samples.loader.read(np.arange(steps * rows)).input_ids
        dataset: Any = [{"input_ids": row} for row in torch.from_numpy(whole)]
    else:

        class Sparse(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner, self.config = Learner(model, {"mlm": MaskedTokens(model, None)}), model.config

            def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
                slots = round(0.15 * LENGTH)
                chosen = labels.ne(-100)
                places = chosen.to(torch.int8).topk(slots, dim=1).indices
                targets = labels.gather(1, places)
                losses = self.inner(input_ids=input_ids, masked_positions=places, targets=targets)
                return {"loss": losses["mlm"].sum / chosen.sum()}

        model = Sparse()
        dataset = samples.__getitems__(range(steps * rows))  # our loader is not what is asked about here

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == WARM:
                self.start = time.perf_counter()
            if state.global_step == steps:
                self.seconds = time.perf_counter() - self.start

    clock = Clock()
    arguments = TrainingArguments(
        output_dir=out, max_steps=steps, per_device_train_batch_size=rows // world_size, learning_rate=1e-3,
        lr_scheduler_type="linear", warmup_steps=2, weight_decay=0.01, adam_beta2=0.98, adam_epsilon=1e-6,
        max_grad_norm=1.0, logging_steps=5, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        bf16=precision == "bf16",
        optim="adamw_torch_fused", dataloader_num_workers=0, remove_unused_columns=kind == "usual",
        ddp_find_unused_parameters=False, dataloader_pin_memory=False,
    )  # fmt: skip
    run = Trainer(model=model, args=arguments, train_dataset=dataset, data_collator=collator, callbacks=[clock])
    run.train()
    if run.args.process_index == 0:
        losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
        rate = (steps - WARM) * rows * LENGTH / clock.seconds
        found = {"tokens_per_s": rate, "losses": losses, "attention": attention_of(run.model)}
        Path(out, "found.json").write_text(json.dumps(found))


def ours(data: str, out: str, rows: int, steps: int, precision: str) -> None:
    from bertrain import trainer
    from bertrain.config import Config
    from bertrain.pretrain import pretrain

    chosen, choose = list[str](), trainer.choose_attention

    def watched(model: Any, *given: Any, **more: Any) -> None:
        choose(model, *given, **more)
        chosen.append(attention_of(model))

    trainer.choose_attention = watched
    options = {"length": LENGTH, "global_batch_size": rows, "steps": steps, "lr": 1e-3, "log_every": 5}
    options |= {"model": f"{out}/../config.json", "warmup_steps": 2, "eval_every": 0, "precision": precision}
    pretrain(Config.make(data=data, out=out, **options))
    if os.environ["RANK"] == "0":
        entries = [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]
        entries = [entry for entry in entries if "lr" in entry]
        seconds = entries[-1]["seconds"] - entries[0]["seconds"]
        found = {"tokens_per_s": (steps - 5) * rows * LENGTH / seconds, "losses": [e["loss"] for e in entries]}
        found["attention"] = chosen[-1]
        found["flops_per_s"] = statistics.median(entry["flops_per_s"] for entry in entries[1:])
        Path(out, "found.json").write_text(json.dumps(found))


def gemm_peak(precision: str) -> float:
    """Operations a second of one thread."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = torch.randn(1024, 1024, dtype=dtype), torch.randn(1024, 1024, dtype=dtype)
    best = 0.0
    for _ in range(20):
        start = time.perf_counter()
        a @ b
        best = max(best, 2 * 1024**3 / (time.perf_counter() - start))
    return best


@click.command()
@click.argument("data")
@click.option("--ranks", default=2)
@click.option("--steps", default=30)
@click.option("--rows", default=64, help="Of a step, over all ranks.")
@click.option("--rounds", "repeats", default=3)
@click.option("--precision", default="fp32", help="Of all three: fp32 or bf16.")
@click.option("--worker", help="What one rank of a run does; used by the benchmark itself.")
@click.option("--out", default="")
def main(
    data: str, ranks: int, steps: int, rows: int, repeats: int, precision: str, worker: str | None, out: str
) -> None:
    if worker:
        torch.set_num_threads(1)
        if worker == "peak":
            Path(out, f"peak-{os.environ['RANK']}").write_text(str(gemm_peak(precision)))
        elif worker == "ours":
            ours(data, out, rows, steps, precision)
        else:
            trainer(worker, data, out, rows, steps, ranks, precision)
        return
    if precision == "bf16" and not has_bf16():
        sys.exit("this processor has no instructions for bf16 (avx512_bf16 or amx_bf16)")
    found: dict[str, list[dict[str, Any]]] = {}
    peaks: list[float] = []
    for turn in range(repeats):
        for name in ("ours", "usual", "sparse", "peak")[: 3 + (turn == 0)]:
            with tempfile.TemporaryDirectory() as scratch:
                run = Path(scratch, "run")
                run.mkdir()
                Path(scratch, "config.json").write_text(json.dumps(config_of(bertdata.open(data))))
                command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
                command += [__file__, data, "--worker", name, "--out", str(run), "--steps", str(steps)]
                command += ["--rows", str(rows), "--ranks", str(ranks), "--precision", precision]
                environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | MALLOC
                subprocess.run(command, check=True, env=environment, capture_output=True)
                if name == "peak":
                    peaks.append(sum(float(path.read_text()) for path in run.glob("peak-*")) / ranks)
                else:
                    found.setdefault(name, []).append(json.loads(Path(run, "found.json").read_text()))
    rates = {name: statistics.median(run["tokens_per_s"] for run in runs) for name, runs in found.items()}
    losses = {name: [round(loss, 3) for loss in runs[-1]["losses"]] for name, runs in found.items()}
    (attention,) = {run["attention"] for runs in found.values() for run in runs}  # or it is no comparison
    peak = statistics.median(peaks)
    share = statistics.median(run["flops_per_s"] for run in found["ours"]) / peak
    for name, rate in rates.items():
        print(f"{name:<10}{rate:>10.0f} tokens/s   last losses {losses[name][-3:]}")
    times = {name: round(rates["ours"] / rates[name], 2) for name in ("usual", "sparse")}
    print(f"ours ÷ Trainer {times['usual']}, ÷ Trainer with our head {times['sparse']}; {share:.0%} of the GEMM peak")
    result = {
        "tokens/s": {name: round(rate) for name, rate in rates.items()}, "times": times, "losses": losses,
        "GEMM peak, GFLOP/s a rank": round(peak / 1e9, 1), "share of peak": round(share, 3), "steps": steps,
        "rows": rows, "ranks": ranks, "attention": attention,
    }  # fmt: skip
    report("tokens a second of training", f"CPU, {ranks} ranks, one thread each, {precision}", result)


if __name__ == "__main__":
    main()
