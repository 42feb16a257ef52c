"""The options of a run, and what they amount to for a dataset and a number of ranks."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import click

from bertdata.cli import one_sentence
from bertdata.errors import UsageError

SCHEDULES = ("linear", "cosine", "wsd")
METHODS, LAYERS = ("auto", "logits", "relations", "hidden"), ("uniform", "last")
OBJECTIVES, PRECISIONS = ("mlm", "mlm+nsp"), ("auto", "fp32", "bf16", "fp16")
BUDGET_STEPS = 1_000_000  # that a budget of time is divided into for the schedule
MICRO_BATCH_SIZE = 64  # at most, where none is given


POLICIES = ("exact", "bernoulli", "whole_word", "span")
_TIMES = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _option(default: Any, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": help} | more)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every option of bertrain.pretrain; run/run.json holds them as they were resolved."""

    data: str = _option("", "Directory of shards that bertdata build published.")
    out: str = _option("", "Directory for checkpoints, log and configuration.")
    model: str = _option("modernbert-tiny", "A preset, or a transformers config file. bert-base needs a GPU.")
    init: str = _option("", "Weights to begin with, in place of --model: a checkpoint directory or a hub name.")
    objective: str = _option("mlm", "mlm+nsp: also next sentence prediction, of pairs.", type=click.Choice(OBJECTIVES))
    length: int = _option(128, "Tokens of a row, [CLS] and [SEP] included.")
    long_length: int | None = _option(None, "Tokens of a row in the last part of the run, such as 512.", type=int)
    long_share: float = _option(0.1, "Share of the steps that have --long-length.")
    isolate_documents: bool = _option(False, "Rows of packed documents that do not see each other.")
    steps: int | None = _option(None, "Optimizer steps; or give --epochs.", type=int)
    epochs: float | None = _option(None, "Passes over the data, in place of --steps. Neither: one pass.", type=float)
    budget: str = _option("", "Time to train for, in place of --steps, such as 90m or 24h.")
    global_batch_size: int = _option(256, "Rows of a step, over all ranks.")
    micro_batch_size: int | None = _option(
        None, f"Rows of a forward pass on one rank. None: its share of a step, at most {MICRO_BATCH_SIZE}.", type=int
    )
    lr: float = _option(1e-3, "Peak learning rate.")
    warmup: float = _option(0.06, "Steps of linear warm-up, or below 1 their share of the run.")
    schedule: str = _option("linear", "What follows warm-up.", type=click.Choice(SCHEDULES))
    mlm_probability: float = _option(0.15, "Share of a row's tokens to predict.")
    masking: str = _option("exact", "How they are selected.", type=click.Choice(POLICIES))
    shuffle: str = _option(
        "full", "blocks: 64 MiB at a time, for data larger than memory.", type=click.Choice(["full", "blocks"])
    )
    seed: int = _option(0, "Of order, masks and initial weights.")
    teacher_cache: str = _option("", "Directory of a teacher's answers, of bertrain.teacher, to learn from too.")
    teacher: str = _option("", "Directory of a teacher to ask as training goes on: a run's, or one with a masked LM.")
    distil: str = _option(
        "auto",
        "What is learned of a teacher: its logits (Hinton, 2015), relations of queries, keys and values (MiniLMv2), "
        "hidden states and attention (TinyBERT). auto: logits of a cache, relations of a --teacher.",
        type=click.Choice(METHODS),
    )
    distil_layers: str = _option("uniform", "Layers that --distil hidden maps.", type=click.Choice(LAYERS))
    alpha: float = _option(0.5, "Share of the teacher in the loss; the rest is that of the text.")
    temperature: float = _option(1.0, "Of the logits of teacher and student, for --distil logits.")
    precision: str = _option(
        "auto", "auto: bf16 on GPUs, fp16 before Ampere, fp32 on CPUs.", type=click.Choice(PRECISIONS)
    )
    compile: str = _option("auto", "torch.compile. auto: on a GPU.", type=click.Choice(["auto", "on", "off"]))
    gradient_checkpointing: bool = _option(False, "Compute activations twice to keep fewer of them.")
    save_every: int = _option(1000, "Steps between checkpoints; the last step always has one.")
    keep: int = _option(3, "Checkpoints to keep.")
    resume: str = _option("auto", "auto: go on from the newest whole checkpoint.", type=click.Choice(["auto", "no"]))
    eval_every: int = _option(500, "Steps between evaluations on the validation split. 0: only at the end.")
    log_every: int = _option(10, "Steps between entries of log.jsonl.")
    log: str = _option("json", "tensorboard: also in OUT/tensorboard.", type=click.Choice(["json", "tensorboard"]))

    def __post_init__(self) -> None:
        for name in ("data", "out"):
            if not getattr(self, name):
                raise UsageError(f"--{name} is missing")
        for name in ("global_batch_size", "save_every", "keep", "log_every"):
            if getattr(self, name) < 1:
                raise UsageError(f"{_flag(name)} is {getattr(self, name)}; give at least 1")
        for name in ("steps", "epochs", "micro_batch_size"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{_flag(name)} is {value}; give a number above 0")
        lengths = {"--steps": self.steps, "--epochs": self.epochs, "--budget": self.budget or None}
        given = [f"{flag} {value}" for flag, value in lengths.items() if value is not None]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} were given; give one of them")
        if self.budget:
            self.seconds  # noqa: B018  (refuses what is no time)
            if self.warmup >= 1:
                raise UsageError(
                    f"--warmup {self.warmup:.0f} counts steps, and a --budget has no number of them; give a share"
                )
            if self.long_length is not None:
                raise UsageError("--long-length begins at a step, and a --budget has no number of them; give --steps")
        if self.long_length is not None and not self.long_length > self.length:
            raise UsageError(f"--long-length {self.long_length} must be more than --length {self.length}")
        if not 0 < self.long_share < 1:
            raise UsageError(f"--long-share is {self.long_share}; give a share between 0 and 1")
        if self.isolate_documents and self.objective == "mlm+nsp":
            raise UsageError("--isolate-documents does not go with --objective mlm+nsp: a pair may be of two documents")
        if not 0 < self.mlm_probability <= 1:
            raise UsageError(f"--mlm-probability is {self.mlm_probability}; give a share above 0, such as 0.15")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise UsageError(f"--lr is {self.lr}; give a number above 0, such as 0.001")
        self._check_teaching()
        for name in ("warmup", "eval_every"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{_flag(name)} is {getattr(self, name)}; give 0 or a number above it")

    def _check_teaching(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise UsageError(f"--alpha is {self.alpha}; give the teacher's share of the loss, from 0 to 1")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise UsageError(f"--temperature is {self.temperature}; give a number above 0, such as 2")
        if self.teacher and self.teacher_cache:
            raise UsageError("--teacher and --teacher-cache were given; give one of them")
        if self.teacher_cache and self.distil in ("relations", "hidden"):
            raise UsageError(f"--distil {self.distil} needs a --teacher: a --teacher-cache holds logits")
        if self.teacher_cache and self.long_length is not None:
            raise UsageError("--teacher-cache does not go with --long-length: its answers are to rows of one length")
        others = {field.name: field.default for field in fields(self)}
        for name in ("distil", "distil_layers", "alpha", "temperature"):
            if not self.method and getattr(self, name) != others[name]:
                raise UsageError(f"{_flag(name)} {getattr(self, name)} needs a --teacher-cache or a --teacher")
        if self.compile == "on" and self._recomputes_what_is_taught:
            raise UsageError(
                f"--compile on does not go with --gradient-checkpointing and --distil {self.method}, which looks into "
                "the layers that are computed anew; leave one of them out"
            )

    @property
    def _recomputes_what_is_taught(self) -> bool:
        return self.gradient_checkpointing and self.method in ("relations", "hidden")

    def compiles(self, *, on_gpu: bool) -> bool:
        """--compile, resolved."""
        return self.compile == "on" or (self.compile == "auto" and on_gpu and not self._recomputes_what_is_taught)

    @property
    def method(self) -> str | None:
        """--distil, resolved; None where nobody teaches."""
        if not (self.teacher or self.teacher_cache):
            return None
        return self.distil if self.distil != "auto" else "logits" if self.teacher_cache else "relations"

    @property
    def seconds(self) -> float:
        """--budget."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", self.budget)
        if not match or float(match[1]) <= 0:
            raise UsageError(f"--budget {self.budget} is no time; write it like 90s, 30m or 24h")
        return float(match[1]) * _TIMES[match[2]]

    @property
    def samples(self) -> str:
        return "pairs" if self.objective == "mlm+nsp" else "packed" if self.isolate_documents else "windows"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def command(run: Any) -> click.Command:
    """A click command with a flag for every option of Config, and --config."""

    @click.option("--config", "file", help="A run.json to repeat; flags given beside it override it.")
    def main(file: str | None, **flags: Any) -> None:
        with one_sentence(quiet=os.environ.get("RANK", "0") != "0"):  # every rank would say the same
            values = _read(Path(file)) if file else {}
            given = {name: value for name, value in flags.items() if value is not None}
            lengths = {"steps", "epochs", "budget"}
            if lengths & given.keys():  # one replaces the others
                values = {name: value for name, value in values.items() if name not in lengths}
            if "model" in given:
                values.pop("init", None)
            try:
                config = Config(**values | given)
            except TypeError as error:
                raise UsageError(f"--config {file} holds a value of the wrong type: {error}") from None
        run(config)

    for option in reversed(fields(Config)):
        meta = dict(option.metadata)
        text = meta.pop("help")
        shown = f"{text}  [default: {option.default}]" if option.default not in (None, "") else text
        flag, kind = _flag(option.name), {"type": meta.get("type", type(option.default))}
        if option.default is False:
            flag, kind = f"{flag}/--no-{flag[2:]}", {}
        main = click.option(flag, option.name, default=None, help=shown, **kind)(main)
    return click.command(help=run.__doc__, context_settings={"help_option_names": ["-h", "--help"]})(main)


def _read(path: Path) -> dict[str, Any]:
    try:
        saved = json.loads(path.read_bytes())["config"]
        return {option.name: saved[option.name] for option in fields(Config) if option.name in saved}
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"--config {path} is not a run.json that bertrain.pretrain wrote") from None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a Config amounts to."""

    steps: int  # with a budget, of which a step is as many as it has used up of the time
    long_from: int  # the first step with --long-length
    warmup_steps: int
    micro_batch_size: int
    accumulation: int  # forward passes of a step, the same on every rank
    share: int  # rows of a step on the rank that has most
    length: int
    warnings: tuple[str, ...]

    def micro_batches(self, length: int) -> tuple[int, int]:
        """Rows and number of the forward passes of a step, for rows of `length`: longer ones come fewer at a time."""
        size = max(1, self.micro_batch_size * min(self.length, length) // length)
        return size, -(-self.share // size)

    @classmethod
    def of(cls, config: Config, *, num_samples: int, world_size: int) -> Plan:
        """Whole steps, so that every rank takes the same number; the last may reach into the next epoch."""
        warnings = []
        steps = config.steps or math.ceil((config.epochs or 1.0) * num_samples / config.global_batch_size)
        if config.budget:
            steps = BUDGET_STEPS
        share = -(-config.global_batch_size // world_size)  # rows of the fullest rank
        micro = min(share, config.micro_batch_size or MICRO_BATCH_SIZE)
        warmup = round(config.warmup * steps) if config.warmup < 1 else round(config.warmup)
        if warmup > steps:
            clamped = max(1, steps // 10)
            warnings.append(f"--warmup {warmup} is longer than the run of {steps} steps; using {clamped}")
            warmup = clamped
        if config.global_batch_size > num_samples:
            warnings.append(
                f"a step of {config.global_batch_size} rows sees each of the {num_samples} samples more than once"
            )
        if config.global_batch_size < world_size:
            warnings.append(f"{world_size} ranks share {config.global_batch_size} rows a step, so some ranks are idle")
        return cls(
            steps=steps,
            long_from=steps if config.long_length is None else min(steps - 1, round(steps * (1 - config.long_share))),
            warmup_steps=warmup,
            micro_batch_size=micro,
            accumulation=-(-share // micro),
            share=share,
            length=config.length,
            warnings=tuple(warnings),
        )
