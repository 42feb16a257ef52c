"""Pre-train a masked language model on shards.

    torchrun --nproc-per-node 2 -m bertrain.pretrain --data shards/ --out run/
    python -m bertrain.pretrain --data shards/ --out run/ --model bert-base --steps 100000
    python -m bertrain.pretrain --config run/run.json --out run2/ --seed 1

The global batch of every step, and so the run, is the same for any number of ranks, up to the order of sums. Stopped
and started again, it goes on from the newest checkpoint as if nothing had happened; on CPUs bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import bertdata
from bertdata.cli import one_sentence
from bertdata.errors import UsageError
from bertrain import checkpoint, distil, feed, metrics, model, optim
from bertrain.config import Config, Plan, command
from bertrain.dist import Readings, World, world
from bertrain.evaluate import evaluate, predictions
from bertrain.watch import Watch, check_targets

EVAL_SAMPLES = 2048  # of the validation split, looked at during a run
_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def pretrain(config: Config) -> None:
    """Pre-train a masked language model on the shards that bertdata build made. Runs alone or under torchrun."""
    with one_sentence(), world() as ranks, contextlib.ExitStack() as stack:
        ranks.on_first(lambda: stack.enter_context(checkpoint.locked(Path(config.out))))
        ranks.together(lambda: _Run(config, ranks)).train()


class _Run:
    """Everything a run needs, made ready on this rank. Making it fails on all ranks if it fails on one."""

    def __init__(self, config: Config, ranks: World) -> None:
        self.config, self.run, self.ranks = config, Path(config.out), ranks
        self.shards = bertdata.open(config.data)
        self.tokenizer = {name: self.shards.tokenizer_file(name) for name in checkpoint.TOKENIZER_FILES}
        self.loader = self._loader_of(config.length)
        self.plan = Plan.of(config, num_samples=self.loader.num_samples, world_size=ranks.world_size)
        check_targets(self.loader, config, self.plan)
        found, self.warnings = checkpoint.newest(self.run)
        if found and config.resume == "no":
            raise UsageError(f"{self.run} already holds checkpoints; give another --out, or --resume auto to go on")
        nsp, length = config.objective == "mlm+nsp", max(config.length, config.long_length or 0)
        name = config.init or config.model
        trainer: dict[str, Any] = {"step": 0, "spent_s": 0.0, "tokens": 0, "scaler": {}, "since_entry": []}
        if found:
            trainer |= checkpoint.read_trainer(found)
            if trainer["model"] != name:
                raise UsageError(
                    f"{found} was trained with --model {trainer['model']}, and --model {name} was given; "
                    "give the same, or another --out"
                )
            if config.long_length and trainer["step"] > self.plan.long_from:
                self.loader = self._loader_of(config.long_length)
            self.loader.load_state_dict(trainer["loader"])
            weights = model.load(found, nsp=nsp)
        elif config.init:
            weights, more = model.start_from(config.init, self.shards, length=length, nsp=nsp)
            self.warnings += more
        else:
            weights = model.build(config.model, self.shards.special_tokens, length=length, seed=config.seed, nsp=nsp)
        self.step, self.spent, self.tokens = trainer["step"], trainer["spent_s"], trainer["tokens"]
        self.resumed_from = found
        if config.gradient_checkpointing:
            model.keep_few_activations(weights)
        on_gpu = ranks.device.type == "cuda"
        best = ("bf16" if metrics.has_bf16(ranks.device) else "fp16") if on_gpu else "fp32"
        self.precision = best if config.precision == "auto" else config.precision
        model.choose_attention(weights, bf16=self.precision == "bf16", on_gpu=on_gpu, length=length)
        self.module, self.taught = distil.student(config, weights, self.shards, ranks.device, self._precision)
        self.module.to(ranks.device).train()
        if found and trainer.get("teacher") != self.module.teacher:
            raise UsageError(
                f"{found} was trained with {trainer.get('teacher') or 'no teacher'}, and this run has "
                f"{self.module.teacher or 'none'}; give the same, or another --out"
            )
        if config.compiles(on_gpu=on_gpu):
            torch._dynamo.config.recompile_limit = 64  # of shapes and modes there are more than the 8 it would stop at
            self.module.compile(fullgraph=True, dynamic=False)
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=self.precision == "fp16")
        self.optimizer = optim.adamw(self.module)
        if found:
            checkpoint.read_optimizer(found, self.optimizer, self.module)
            if self.scaler.is_enabled() and trainer["scaler"]:
                self.scaler.load_state_dict(trainer["scaler"])
        # Of each kind of loss its sum, how many were right, and of how many, since the last entry of the log; rank 0
        # goes on with what they were.
        self.totals = torch.zeros(3 * len(self.module.counts), dtype=torch.float64, device=ranks.device)
        known = torch.tensor(trainer["since_entry"] if ranks.rank == 0 else [], dtype=torch.float64)
        self.totals[: known.numel()] += known.to(ranks.device)

    def _loader_of(self, length: int) -> bertdata.Loader:
        config = self.config
        return bertdata.Loader(
            self.shards,
            length=length,
            global_batch_size=config.global_batch_size,
            seed=config.seed,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            samples=config.samples,
            shuffle=config.shuffle,
            masking=bertdata.Masking(probability=config.mlm_probability, policy=config.masking),
            teacher_cache=config.teacher_cache or None,
        )

    # ------------------------------------------------------------------------------------------------------ the loop

    def train(self) -> None:
        watch = self.ranks.together(lambda: Watch(self.config, self.plan, self.ranks, self.shards, step=self.step))
        with watch as self.watch, _signals() as self.signals:
            self.ranks.on_first(self._announce)
            stopped = self._loop()
        if self.ranks.rank == 0 and stopped:
            print(f"stopped by {stopped} after step {self.step}; the same command goes on", flush=True)
        elif self.ranks.rank == 0:
            saved = checkpoint.find(self.run)
            print(f"done: {saved}\nAutoModelForMaskedLM.from_pretrained({str(saved)!r})", flush=True)

    def _loop(self) -> str | None:
        """Steps until all are taken, or the time is up, or a signal comes; says which."""
        config, plan, ranks = self.config, self.plan, self.ranks
        wrapped: torch.nn.Module = self.module
        if ranks.world_size > 1:
            wrapped = DistributedDataParallel(self.module, gradient_as_bucket_view=True)
        gc.collect()
        gc.freeze()  # what is there stays; the collector need not look at it again
        rates = metrics.Rates(self.module.model, ranks.device, self.precision)
        spent_before, stopped, warm, agreed = self.spent, False, False, Readings()
        last = self.step >= plan.steps or self._progress >= 1
        while not last:
            if self.step == plan.long_from:
                self.loader = self._loader_of(config.long_length or 0)
            waiting = time.perf_counter()
            batch = next(self.loader)
            waited = time.perf_counter() - waiting
            decided, norm, rate = self._step(wrapped, batch)
            rows, length = config.global_batch_size, self.loader.length
            self.tokens += rows * length
            rates.add(rows=rows / ranks.world_size, length=length, slots=self.loader.num_slots, waited=waited)
            self.watch.advance()
            if not warm:
                ranks.expect_answers()
                warm = True
            signals, seconds = agreed.read(decided[-2:])
            stopped, self.spent = signals > 0, spent_before + seconds
            logs = self.step % config.log_every == 0
            last = self.step == plan.steps or self._progress >= 1 or stopped
            if last or logs:
                means = metrics.means(*ranks.sum(self.totals).tolist())
                seen = {"lr": rate, "grad_norm": self._known(norm), "tokens": self.tokens}
                seen |= rates.take(ranks.world_size)
                seen["seconds"] = round(time.perf_counter() - self.watch.started, 3)
                self.totals.zero_()
                entry = {"step": self.step, **means, **seen}
                ranks.together(functools.partial(self.watch.entry, entry, done=last))
            if not stopped and (last or (config.eval_every and self.step % config.eval_every == 0)):
                self._evaluate()
                rates.take(ranks.world_size)
            if last or self.step % config.save_every == 0:
                self.watch.require_finite(self.step, None, self._known(norm))
                ranks.sum(self.totals).mul_(ranks.rank == 0)
                ranks.on_first(functools.partial(self._save, required=bool(last)))
        return (self.signals or ["another rank"])[0] if stopped else None

    @property
    def _progress(self) -> float:
        """Share of the run that is done."""
        return self.spent / self.config.seconds if self.config.budget else self.step / self.plan.steps

    def _step(self, wrapped: torch.nn.Module, batch: bertdata.Batch) -> tuple[torch.Tensor, torch.Tensor, float]:
        """One optimizer step; adds to the totals. Returns what all ranks decided, the gradient's norm, and the rate."""
        config, plan, ranks = self.config, self.plan, self.ranks
        now = time.perf_counter() - self.watch.started if ranks.rank == 0 else 0.0
        seen = feed.num_targets(batch), batch.sample_ids.size
        counts = [seen[kind] for kind in self.module.counts]
        mine = torch.tensor([*counts, len(self.signals), now], dtype=torch.float64)
        mine = feed.to_device(mine, ranks.device)
        self.totals[2::3] += mine[:-2]
        decided = ranks.sum(mine)
        # DistributedDataParallel averages the gradients of the ranks; this makes of it their sum ÷ all targets.
        scale = (ranks.world_size / decided[:-2].clamp(min=1)).float()
        if model.has_dropout(self.module.model):
            torch.manual_seed(bertdata.key(config.seed, "dropout", self.step, ranks.rank) >> 1)
        size, count = plan.micro_batches(self.loader.length)
        pieces = self.taught(feed.micro_batches(batch, size=size, count=count, device=ranks.device))
        for number, piece in enumerate(pieces):
            with _gradients_later(wrapped, number + 1 < count), self._precision():
                losses, right = wrapped(**piece)
                self.scaler.scale((losses * scale[: losses.numel()]).sum()).backward()
            for kind in range(losses.numel()):
                self.totals[3 * kind] += losses.detach()[kind]
                self.totals[3 * kind + 1] += right[kind]
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), optim.CLIP_NORM)
        scheduled = int(self._progress * plan.steps) if config.budget else self.step
        rate = optim.learning_rate(
            min(scheduled, plan.steps - 1), peak=config.lr, steps=plan.steps, warmup_steps=plan.warmup_steps,
            schedule=config.schedule,
        )  # fmt: skip
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.step += 1
        return decided, norm, rate

    def _known(self, norm: torch.Tensor) -> float | None:
        """The gradient's norm; None where fp16 has overflowed, which the scaler sees to by passing over the step."""
        found = float(norm)
        return None if self.scaler.is_enabled() and not math.isfinite(found) else found

    def _precision(self) -> Any:
        dtype = _DTYPES[self.precision]
        return torch.autocast(self.ranks.device.type, dtype) if dtype else contextlib.nullcontext()

    # ------------------------------------------------------------------------------------------- seeing and keeping

    def _announce(self) -> None:
        parameters = sum(parameter.numel() for parameter in self.module.parameters())
        resumed = str(self.resumed_from) if self.resumed_from else None
        facts = {"step": self.step, "resumed_from": resumed, "precision": self.precision}
        self.watch.announce(
            facts, parameters=parameters, num_samples=self.loader.num_samples,
            warnings=[*self.warnings, *self.plan.warnings],
        )  # fmt: skip

    def _evaluate(self) -> None:
        if "validation" not in self.shards.splits:
            return
        options: dict[str, Any] = {"split": "validation", "length": self.loader.length}
        result = evaluate(self.module, self.shards, self.ranks, max_samples=EVAL_SAMPLES, **options)

        def show() -> None:
            rows = predictions(self.module, self.shards, self.ranks.device, rows=1, **options)
            self.watch.evaluation(self.step, result, rows)

        self.ranks.on_first(show)

    def _save(self, *, required: bool) -> None:
        """A full disk ends no run that has steps to go: its newest checkpoint stays as it is, and the next may do."""
        trainer = {
            "model": self.config.init or self.config.model,
            "teacher": self.module.teacher,
            "loader": self.loader.state_dict(),
            "since_entry": self.totals.tolist(),
            "tokens": self.tokens,
            "spent_s": self.spent,
            "scaler": self.scaler.state_dict(),
            "rng": {"keyed by": self.config.seed},  # every draw is a function of (seed, step, rank): there is no state
            "world_size": self.ranks.world_size,
        }
        parts = {"module": self.module, "optimizer": self.optimizer, "tokenizer": self.tokenizer}
        try:
            checkpoint.save(self.run, step=self.step, trainer=trainer, keep=self.config.keep, **parts)
        except (OSError, bertdata.BertdataError) as error:
            if required:
                raise
            self.watch.warn(f"no checkpoint of step {self.step}, and training goes on: {error}")


@contextlib.contextmanager
def _signals() -> Iterator[list[str]]:
    """The names of SIGTERM and SIGUSR1 as they come: schedulers send them before they end a job."""
    came: list[str] = []
    handlers = {}
    with contextlib.suppress(ValueError):  # only the main thread may
        for number in (signal.SIGTERM, signal.SIGUSR1):
            handlers[number] = signal.signal(number, lambda n, frame: came.append(signal.Signals(n).name))
    try:
        yield came
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _gradients_later(module: torch.nn.Module, later: bool) -> Iterator[None]:
    """Keeps the ranks' gradients apart until the last pass of a step: one all-reduce a step."""
    with module.no_sync() if later and isinstance(module, DistributedDataParallel) else contextlib.nullcontext():
        yield


main = command(pretrain)

if __name__ == "__main__":
    main()
