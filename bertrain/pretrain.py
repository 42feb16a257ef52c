"""Pre-train a masked language model on shards.

    torchrun --nproc-per-node 2 -m bertrain.pretrain --data shards/ --out run/
    python -m bertrain.pretrain --data shards/ --out run/ --model bert-base --steps 100000
    python -m bertrain.pretrain --config run/run.json --out run2/ --seed 1

The global batch of every step, and so the run, is the same for any number of ranks, up to the order of sums. Stopped
and started again, it goes on from the newest checkpoint as if nothing had happened; on CPUs bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import bertdata
from bertdata.cli import one_sentence
from bertdata.errors import BertdataError, UsageError
from bertdata.shard import write_file
from bertrain import checkpoint, feed, metrics, model, optim
from bertrain.config import Config, Plan, command
from bertrain.dist import World, world
from bertrain.evaluate import evaluate, predictions
from bertrain.loss import MaskedLM

EVAL_SAMPLES = 2048  # of the validation split, looked at during a run
QUIET_S = 10.0  # between printed lines where there is no terminal for a bar


class TrainingError(BertdataError):
    """A run cannot go on."""


def pretrain(config: Config) -> None:
    """Pre-train a masked language model on the shards that bertdata build made. Runs alone or under torchrun."""
    with one_sentence(), world() as ranks, contextlib.ExitStack() as stack:
        run = Path(config.out)
        ranks.on_first(lambda: stack.enter_context(checkpoint.locked(run)))
        ranks.together(lambda: _Run(config, run, ranks)).train()


class _Run:
    """Everything a run needs, made ready on this rank. Making it fails on all ranks if it fails on one."""

    def __init__(self, config: Config, run: Path, ranks: World) -> None:
        self.config, self.run, self.ranks = config, run, ranks
        self.shards = bertdata.open(config.data)
        self.loader = bertdata.Loader(
            self.shards,
            length=config.length,
            global_batch_size=config.global_batch_size,
            seed=config.seed,
            rank=ranks.rank,
            world_size=ranks.world_size,
            shuffle=config.shuffle,
            masking=bertdata.Masking(probability=config.mlm_probability, policy=config.masking),
        )
        self.plan = Plan.of(config, num_samples=self.loader.num_samples, world_size=ranks.world_size)
        _check_targets(self.loader)
        found, self.warnings = checkpoint.newest(run)
        if found and config.resume == "no":
            raise UsageError(f"{run} already holds checkpoints; give another --out, or --resume auto to go on")
        self.step = 0
        if found:
            trainer = checkpoint.read_trainer(found)
            if trainer["model"] != config.model:
                raise UsageError(
                    f"{found} was trained with --model {trainer['model']}, and --model {config.model} was given; "
                    "give the same, or another --out"
                )
            self.loader.load_state_dict(trainer["loader"])
            self.step = trainer["step"]
            weights = model.load(found)
        else:
            special = self.shards.special_tokens
            weights = model.build(config.model, special, length=config.length, seed=config.seed)
        self.module = MaskedLM(weights).to(ranks.device).train()
        self.optimizer = optim.adamw(self.module)
        if found:
            checkpoint.read_optimizer(found, self.optimizer)
        self.reference = metrics.reference_losses(self.shards, "train")
        self.warnings += self.plan.warnings
        self.resumed_from = found
        # Loss, right and number of targets since the last entry of the log; rank 0 goes on with what it was.
        known = trainer["since_entry"] if found and ranks.rank == 0 else [0.0, 0.0, 0.0]
        self.totals = torch.tensor(known, dtype=torch.float64, device=ranks.device)
        self.said = time.perf_counter()

    # ------------------------------------------------------------------------------------------------------ the loop

    def train(self) -> None:
        first = self.ranks.rank == 0
        self.ranks.on_first(self._announce)
        with contextlib.ExitStack() as stack:
            self.log = stack.enter_context(metrics.Log(self.run / "log.jsonl", after_step=self.step)) if first else None
            total, off = self.plan.steps, None if first else True
            self.bar = stack.enter_context(tqdm(total=total, initial=self.step, unit="step", disable=off))
            self._loop()
        if first:
            saved = checkpoint.find(self.run)
            print(f"done: {saved}\nAutoModelForMaskedLM.from_pretrained({str(saved)!r})", flush=True)

    def _loop(self) -> None:
        config, plan, ranks = self.config, self.plan, self.ranks
        wrapped: torch.nn.Module = self.module
        if ranks.world_size > 1:
            wrapped = DistributedDataParallel(self.module, gradient_as_bucket_view=True)
        rates, started = metrics.Rates(), time.perf_counter()
        while self.step < plan.steps:
            waiting = time.perf_counter()
            batch = next(self.loader)
            rates.add(tokens=config.global_batch_size * config.length, waited=time.perf_counter() - waiting)
            norm, rate = self._step(wrapped, batch)
            self.bar.update()
            last = self.step == plan.steps
            if last or self.step % config.log_every == 0:
                entry = {
                    "step": self.step,
                    **metrics.means(*ranks.sum(self.totals).tolist()),
                    "lr": rate,
                    "grad_norm": float(norm),
                    "tokens": self.loader.position * config.length,
                    **rates.take(),
                    "seconds": round(time.perf_counter() - started, 3),
                }
                self.totals.zero_()
                self._write(entry)
            if last or (config.eval_every and self.step % config.eval_every == 0):
                self._evaluate()
                rates = metrics.Rates()
            if last or self.step % config.save_every == 0:
                ranks.sum(self.totals).mul_(ranks.rank == 0)
                ranks.on_first(self._save)

    def _step(self, wrapped: torch.nn.Module, batch: bertdata.Batch) -> tuple[torch.Tensor, float]:
        """One optimizer step; adds to the totals, and returns the norm of the gradient and the learning rate."""
        config, plan, ranks = self.config, self.plan, self.ranks
        targets = torch.tensor(feed.num_targets(batch), dtype=torch.float64, device=ranks.device)
        self.totals[2] += targets
        ranks.sum(targets)
        # DistributedDataParallel averages the gradients of the ranks; this makes of it their sum ÷ all targets.
        scale = (ranks.world_size / targets.clamp(min=1)).float()
        if model.has_dropout(self.module.model):
            torch.manual_seed(bertdata.key(config.seed, "dropout", self.step, ranks.rank) >> 1)
        for number, piece in enumerate(
            feed.micro_batches(batch, size=plan.micro_batch_size, count=plan.accumulation, device=ranks.device)
        ):
            with _gradients_later(wrapped, number + 1 < plan.accumulation), _precision(ranks.device):
                loss, right = wrapped(**piece)
                (loss * scale).backward()
            self.totals[0] += loss.detach()
            self.totals[1] += right
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), optim.CLIP_NORM)
        rate = optim.learning_rate(
            self.step, peak=config.lr, steps=plan.steps, warmup_steps=plan.warmup_steps, schedule=config.schedule
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return norm, rate

    # ------------------------------------------------------------------------------------------- seeing and keeping

    def _announce(self) -> None:
        """Prints what the run amounts to, and keeps it in run.json."""
        config, plan, loader = self.config, self.plan, self.loader
        for warning in self.warnings:
            print(f"warning: {warning}", flush=True)
        parameters = sum(parameter.numel() for parameter in self.module.parameters())
        facts = {
            "dataset_id": self.shards.dataset_id,
            "samples_per_epoch": loader.num_samples,
            "world_size": self.ranks.world_size,
            "device": str(self.ranks.device),
            "parameters": parameters,
            "steps": plan.steps,
            "warmup_steps": plan.warmup_steps,
            "micro_batch_size": plan.micro_batch_size,
            "accumulation": plan.accumulation,
            "reference_loss": self.reference,
            "versions": checkpoint.versions(),
        }
        write_file(self.run / "run.json", json.dumps({"config": asdict(config), "resolved": facts}, indent=1).encode())
        goes_on = f", going on after step {self.step} of {self.resumed_from}" if self.resumed_from else ""
        print(
            f"{config.model}: {parameters:,} parameters, {plan.steps:,} steps of {config.global_batch_size} rows "
            f"({plan.accumulation} × {plan.micro_batch_size} on each of {self.ranks.world_size} ranks), "
            f"{loader.num_samples:,} samples an epoch{goes_on}\n"
            f"a loss to compare with: {self.reference['uniform']:.3f} by guessing evenly, "
            f"{self.reference['unigram']:.3f} by frequency alone (nats a token)",
            flush=True,
        )

    def _write(self, entry: dict[str, Any]) -> None:
        """Keeps and shows what happened since the last entry. The same on every rank, so all stop together at a NaN."""
        if not math.isfinite(entry["loss"] or 0.0) or not math.isfinite(entry["grad_norm"]):
            raise TrainingError(
                f"the loss is {entry['loss']} and the gradient norm {entry['grad_norm']} at step {self.step}; "
                f"lower --lr {self.config.lr} or lengthen --warmup and run again from the newest checkpoint"
            )
        if self.log is None:
            return
        self.log.write(entry)
        loss = "-" if entry["loss"] is None else f"{entry['loss']:.4f}"
        line = (
            f"loss {loss} (unigram {self.reference['unigram']:.2f}), {entry['tokens_per_s'] / 1000:.1f} ktok/s, "
            f"lr {entry['lr']:.2e}, data wait {entry['data_wait']:.1%}"
        )
        self.bar.set_postfix_str(line)
        if self.bar.disable and (self.step == self.plan.steps or time.perf_counter() - self.said > QUIET_S):
            self.said = time.perf_counter()
            print(f"step {self.step}/{self.plan.steps}: {line}, {entry['seconds']:.0f} s", flush=True)

    def _evaluate(self) -> None:
        if "validation" not in self.shards.splits:
            return
        options: dict[str, Any] = {"split": "validation", "length": self.config.length}
        result = evaluate(self.module, self.shards, self.ranks, max_samples=EVAL_SAMPLES, **options)
        if self.log is None:
            return
        seen = {f"validation_{name}": result[name] for name in ("loss", "accuracy", "targets")}
        self.log.write({"step": self.step} | seen)
        rows = predictions(self.module, self.shards, self.ranks.device, rows=1, **options)
        loss = "no target in it" if result["loss"] is None else f"{result['loss']:.4f}, {result['accuracy']:.1%} right"
        self.bar.write("\n".join([f"step {self.step}: validation loss {loss}", *rows[:6]]))

    def _save(self) -> None:
        trainer = {
            "model": self.config.model,
            "loader": self.loader.state_dict(),
            "since_entry": self.totals.tolist(),
            "rng": {"keyed by": self.config.seed},  # every draw is a function of (seed, step, rank): there is no state
            "world_size": self.ranks.world_size,
        }
        checkpoint.save(
            self.run,
            step=self.step,
            model=self.module.model,
            optimizer=self.optimizer,
            trainer=trainer,
            tokenizer_from=self.shards.path,
            keep=self.config.keep,
        )


def _check_targets(loader: bertdata.Loader) -> None:
    """Refuses data whose rows are too short to mask anything in."""
    batch = loader.read(np.arange(min(loader.num_samples, 1024)))
    if feed.num_targets(batch) == 0:
        raise TrainingError(
            f"nothing to predict: the {loader.num_samples} samples of {loader.shards.path} are too short to mask "
            f"{loader.masking.probability:.0%} of them (ranks {loader.world_size}, batch {loader.global_batch_size}); "
            "build with more text, or raise --mlm-probability"
        )


@contextlib.contextmanager
def _gradients_later(module: torch.nn.Module, later: bool) -> Iterator[None]:
    """Keeps the ranks' gradients apart until the last pass of a step: one all-reduce a step."""
    with module.no_sync() if later and isinstance(module, DistributedDataParallel) else contextlib.nullcontext():
        yield


def _precision(device: torch.device) -> Any:
    """bfloat16 where a GPU does the work, float32 on CPUs."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


main = command(pretrain)

if __name__ == "__main__":
    main()
