"""The options of a run: one dataclass, its checks, and the command line made from it."""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields, replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import click

from bertdata.choices import MASKING_POLICIES, SHUFFLES, MaskingPolicy
from bertdata.cli import OneSentence, one_sentence
from bertdata.errors import UsageError, counted
from bertrain import recipes

METHODS, LAYERS = ("auto", "logits", "relations", "hidden"), ("uniform", "last")
GROWTH = ("stack", "fresh")
TRACKERS = ("tensorboard", "wandb", "trackio")
PRECISIONS = ("auto", "fp32", "bf16", "fp16")
MICRO_BATCH_SIZE = 64  # the default is at most this
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

DATA, MODEL, SCHEDULE = "Data", "Model", "Schedule and optimizer"
DISTILLATION, HARDWARE, CHECKPOINTS = "Distillation", "Speed and memory", "Checkpoints and log"


class Bounds(NamedTuple):
    """Which values an option may have."""

    expected: str  # what to give, for errors
    hold: Callable[[Any], bool]


class Needs(NamedTuple):
    """What an option means nothing without."""

    expected: str  # what to give, for errors
    is_given: Callable[[Config], bool]


COUNT = Bounds("at least 1", lambda value: value >= 1)
ABOVE_0 = Bounds("a number above 0", lambda value: 0 < value < math.inf)
FROM_0 = Bounds("0 or a number above it", lambda value: 0 <= value < math.inf)
BETWEEN = Bounds("a share between 0 and 1, such as 0.1", lambda value: 0 < value < 1)
DECAY = Bounds("a number from 0 to below 1, such as 0.9", lambda value: 0 <= value < 1)
PART = Bounds("a share of the run from 0 to below 1, such as 0.1", lambda value: 0 <= value < 1)
WARMUP = Bounds("a share of the run below 1, such as 0.06, or --warmup-steps", PART.hold)
SHARE = Bounds("a share above 0 and at most 1, such as 0.2", lambda value: 0 < value <= 1)
WEIGHT = Bounds("a weight from 0 to 1", lambda value: 0 <= value <= 1)
WSD = Needs("--schedule wsd", lambda config: config.schedule == "wsd")
MUON = Needs("--optimizer muon", lambda config: config.optimizer not in ("adamw", "stableadamw", "lamb"))
GROW = Needs("--grow", lambda config: bool(config.grow))
ELASTIC = Needs("--elastic", lambda config: bool(config.elastic))
INIT = Needs("--init: the weights to freeze", lambda config: bool(config.init))
TEACHER = Needs("a --teacher-cache or a --teacher", lambda config: bool(config.distil_method))


def _option(group: str, default: Any, help: str, **more: Any) -> Any:
    """A field of Config. more: `bounds` of each of its values, what it `needs`; the rest is for click."""
    return field(default=default, metadata={"group": group, "help": help} | more)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every option of bertrain.pretrain. run/run.json holds them, and --config reads them from there.

    Names of objectives, optimizers, schedules and models are checked where they are looked up, so that other programs
    can add their own.
    """

    data: str | tuple[str, ...] = _option(
        DATA,
        (),
        "Dataset of bertdata build: a directory or a URL. May be repeated; several datasets are mixed by --weights.  "
        "[required]",
        many=True,
    )
    weights: str | tuple[float, ...] = _option(
        DATA,
        (),
        "Share of each --data in the rows, in their order, with commas between: --data a/ --data b/ --weights 0.7,0.3.",
        numbers=True,
        bounds=ABOVE_0,
    )
    out: str = _option(
        CHECKPOINTS,
        "",
        "Directory of the run: checkpoints, log.jsonl and run.json. Default: runs/MODEL-DATE, of today.",
    )
    model: str = _option(
        MODEL,
        "modernbert-tiny",
        "Model to train from random weights: a preset (bert-tiny, -mini, -small, -base, -large; modernbert-tiny, "
        "-small, -base), or any masked language model of transformers: a config.json, its directory, or a name on the "
        "Hugging Face hub. Vocabulary size and positions are fitted to the data.",
    )
    init: str = _option(
        MODEL,
        "",
        "Weights to start from instead of --model: a run, a checkpoint directory or a name on the Hugging Face hub.",
    )
    lora: str = _option(
        MODEL,
        "",
        "Train an adapter on the weights of --init, which are frozen: r=8,alpha=16. r: rank; alpha: scale (alpha / r). "
        "bits=4 and target=PATTERN may follow (docs/adapters.md).",
        needs=INIT,
    )
    objective: str = _option(MODEL, "mlm", "Objectives to train on, joined by +: mlm, or mlm+nsp for sentence pairs.")
    grow: str = _option(
        MODEL,
        "",
        "Numbers of layers, such as 3,6,12: the run begins with the first number, and the model grows to the others "
        "during the run. The last number must be that of --model (docs/growing.md).",
    )
    grow_at: str = _option(MODEL, "", "Shares of the run at which the model grows, such as 0.2,0.5.", needs=GROW)
    grow_by: str = _option(
        MODEL,
        "stack",
        "Weights of new layers. stack: copies of the layers below. fresh: random weights.",
        type=click.Choice(GROWTH),
        needs=GROW,
    )
    freeze_trunk: bool = _option(
        MODEL,
        False,
        "After a growth, train only the new layers and the modules above them, until the next growth.",
        needs=GROW,
    )
    elastic: str = _option(
        MODEL,
        "",
        "Train sub-networks that share the model's weights, for bertrain search: their sizes, such as layers=2:6,"
        "width=64:256:32,heads=1:4,feed_forward=128:512:64 (first:last, or first:last:step; docs/search.md).",
    )
    sub_networks: int = _option(
        MODEL, 2, "Number of sub-networks in a step with --elastic.", bounds=COUNT, needs=ELASTIC
    )
    side_channel: str = _option(
        MODEL,
        "",
        "File of names that tokens share, such as the radicals of characters: each line has a token, a tab and names. "
        "The word embeddings of tokens with a common name learn together (docs/side-channels.md).",
    )
    length: int = _option(DATA, 128, "Row length in tokens, special tokens included.")
    long_length: int | None = _option(
        DATA, None, "Row length in the last part of the run, such as 512. Default: --length throughout.", type=int
    )
    long_share: float = _option(DATA, 0.1, "Share of the run, at its end, that uses --long-length.", bounds=BETWEEN)
    isolate_documents: bool = _option(
        DATA, False, "Pack several documents into a row; no token attends to another document."
    )
    steps: int | None = _option(
        SCHEDULE, None, "Number of optimizer steps. Default: one epoch.", type=int, bounds=ABOVE_0
    )
    epochs: float | None = _option(SCHEDULE, None, "Number of epochs, instead of --steps.", type=float, bounds=ABOVE_0)
    budget: str = _option(
        SCHEDULE,
        "",
        "Training time, instead of --steps: a number with s, m, h or d, such as 90m or 24h. Compiling, evaluation and "
        "checkpoints do not count.",
    )
    global_batch_size: int | str = _option(
        SCHEDULE,
        256,
        "Rows in one optimizer step, over all ranks. 64:128 uses 64 in the first half of the run, then 128. 64:128@0.8 "
        "changes after 80 % of the run.",
        staged=int,
        bounds=COUNT,
    )
    micro_batch_size: int | None = _option(
        HARDWARE,
        None,
        f"Rows in one forward pass of a rank. Default: its share of a step, at most {MICRO_BATCH_SIZE}.",
        type=int,
        bounds=ABOVE_0,
    )
    lr: float = _option(SCHEDULE, 1e-3, "Peak learning rate.", bounds=ABOVE_0)
    warmup: float = _option(SCHEDULE, 0.06, "Length of the linear warm-up, as a share of the run.", bounds=WARMUP)
    warmup_steps: int | None = _option(
        SCHEDULE, None, "Length of the linear warm-up in steps, instead of --warmup.", type=int, bounds=FROM_0
    )
    schedule: str = _option(
        SCHEDULE,
        "linear",
        "Learning rate after the warm-up: linear, cosine, or wsd, which stays at the peak and falls at the end.",
    )
    decay_share: float = _option(
        SCHEDULE,
        0.2,
        "Share of the run, at its end, in which the learning rate of --schedule wsd falls.",
        bounds=SHARE,
        needs=WSD,
    )
    optimizer: str = _option(
        SCHEDULE,
        "adamw",
        "Optimizer: adamw; muon, which makes updates of hidden matrices orthogonal and uses AdamW for the others; "
        "stableadamw, AdamW with smaller steps where gradients grow suddenly; or lamb, for large batches, with steps "
        "in proportion to the norm of each matrix.",
    )
    muon_rate: float = _option(
        SCHEDULE, 4.0, "Learning rate of Muon's matrices, as a multiple of --lr.", bounds=ABOVE_0, needs=MUON
    )
    muon_momentum: float = _option(SCHEDULE, 0.95, "Decay rate of Muon's mean of gradients.", bounds=DECAY, needs=MUON)
    lr_scale: tuple[str, ...] = _option(
        SCHEDULE,
        (),
        "PATTERN=FACTOR: scale the learning rate of parameters whose name contains a match of PATTERN, a regular "
        "expression, such as embeddings=0.1. 0 freezes them. May be repeated; the last pattern that matches counts.",
        many=True,
    )
    weight_decay: float = _option(
        SCHEDULE, 0.01, "Weight decay of matrices; norms and biases have none.", bounds=FROM_0
    )
    beta1: float = _option(SCHEDULE, 0.9, "Decay rate of the optimizer's mean of gradients.", bounds=DECAY)
    beta2: float = _option(SCHEDULE, 0.98, "Decay rate of the optimizer's mean of squared gradients.", bounds=DECAY)
    epsilon: float = _option(SCHEDULE, 1e-6, "Number that the optimizer adds to its denominator.", bounds=ABOVE_0)
    clip_norm: float = _option(
        SCHEDULE, 1.0, "Largest norm of the gradient; larger gradients are scaled down.", bounds=ABOVE_0
    )
    mlm_probability: float | str = _option(
        DATA,
        0.15,
        "Share of a row's tokens to mask and predict. 0.3:0.15 changes it after half of the run's rows, 0.3:0.15@0.8 "
        "after 80 % of them.",
        staged=float,
        bounds=SHARE,
    )
    average: float = _option(
        SCHEDULE,
        0.0,
        "Share of the run, at its end, over which weights are averaged. The mean is evaluated, and saved as "
        "a separate checkpoint, OUT/average-XXXXXXXX.",
        bounds=PART,
    )
    masking: MaskingPolicy = _option(
        DATA,
        "exact",
        "How to choose tokens: exact, the same share of each row; bernoulli, each token independently; whole_word, all "
        "tokens of a word; span, one to ten neighbouring words.",
        type=click.Choice(MASKING_POLICIES),
    )
    shuffle: str = _option(
        DATA,
        "full",
        "Order of an epoch: full, or blocks of 64 MiB for data larger than memory.",
        type=click.Choice(SHUFFLES),
    )
    seed: int = _option(
        SCHEDULE, 0, "Random seed for initial weights and dropout, and for the data without --data-seed."
    )
    data_seed: int | None = _option(
        DATA, None, "Random seed for data order and masks. Default: the same as --seed.", type=int
    )
    teacher_cache: str = _option(
        DISTILLATION, "", "Directory of stored predictions of a teacher, written by bertrain teacher."
    )
    teacher: str = _option(DISTILLATION, "", "Directory of a teacher that runs during training: a run or a checkpoint.")
    distil: str = _option(
        DISTILLATION,
        "auto",
        "What to learn from a teacher: its logits (Hinton, 2015), the relations of its queries, keys and values "
        "(MiniLMv2), or its hidden states and attention (TinyBERT). auto: logits with --teacher-cache, relations with "
        "--teacher.",
        type=click.Choice(METHODS),
        needs=TEACHER,
    )
    distil_layers: str = _option(
        DISTILLATION,
        "uniform",
        "Layers that --distil hidden compares. uniform: every layer of the student with evenly spaced layers of the "
        "teacher. last: only the last.",
        type=click.Choice(LAYERS),
        needs=TEACHER,
    )
    alpha: float = _option(
        DISTILLATION,
        0.5,
        "Weight of the teacher's loss; the loss on the text has the weight 1 - alpha.",
        bounds=WEIGHT,
        needs=TEACHER,
    )
    temperature: float = _option(
        DISTILLATION,
        1.0,
        "Temperature of the teacher's and the student's logits, for --distil logits.",
        bounds=ABOVE_0,
        needs=TEACHER,
    )
    precision: str = _option(
        HARDWARE,
        "auto",
        "Number format of matrix products. auto: bf16 on GPUs, fp16 on GPUs before Ampere, fp32 on CPUs.",
        type=click.Choice(PRECISIONS),
    )
    compile: str = _option(
        HARDWARE, "auto", "Use torch.compile. auto: on GPUs.", type=click.Choice(["auto", "on", "off"])
    )
    gradient_checkpointing: bool = _option(HARDWARE, False, "Save memory: recompute activations in the backward pass.")
    save_every: int = _option(
        CHECKPOINTS, 1000, "Steps between checkpoints; the last step always has one.", bounds=COUNT
    )
    keep: int = _option(CHECKPOINTS, 3, "Number of checkpoints to keep.", bounds=COUNT)
    resume: str = _option(
        CHECKPOINTS,
        "auto",
        "auto: continue from the newest complete checkpoint in --out. no: refuse if there is one.",
        type=click.Choice(["auto", "no"]),
    )
    eval_every: int = _option(
        CHECKPOINTS,
        500,
        "Steps between evaluations on up to 2,048 samples of the validation split. 0: only at the end.",
        bounds=FROM_0,
    )
    log_every: int = _option(CHECKPOINTS, 10, "Steps between entries of log.jsonl.", bounds=COUNT)
    log_to: tuple[str, ...] = _option(
        CHECKPOINTS,
        (),
        "Where to send the log besides log.jsonl: tensorboard, which writes to OUT/tensorboard, wandb or trackio "
        "(docs/trackers.md). May be repeated.",
        many=True,
        type=click.Choice(TRACKERS),
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            object.__setattr__(self, option.name, self._parsed(option))
        for name in self.log_to:
            if name not in TRACKERS:
                sentence = f"--log-to {name} is unknown; give one of {', '.join(TRACKERS)}"
                raise UsageError(sentence, "unknown", option="log_to", given=name)
        if not self.data:
            raise UsageError("--data is missing; give the directory of a dataset", "missing", option="data")
        for option in fields(self):
            self._check_bounds(option)
        is_longer = self.long_length is None or self.long_length > self.length
        self._require("long_length", is_longer, f"more than --length {self.length}")
        self._check_weights()
        self.rate_scales  # noqa: B018  (refuses what is no factor or no pattern)
        for option in fields(self):
            self._check_needs(option)
        self._check_adapter()
        self._check_growth()
        self._check_elastic()
        self._check_duration()
        self._check_distillation()

    def _parsed(self, option: Field[Any]) -> Any:
        """The value of an option, from Python, a file or the command line. Raises UsageError for another type."""
        value, kind, meta = getattr(self, option.name), _kind(option), option.metadata
        if value is None and option.default is None:
            return None
        if meta.get("numbers"):
            numbers = _numbers(value, float) if isinstance(value, str) and value else value or ()
            is_right = isinstance(numbers, list | tuple) and all(isinstance(each, int | float) for each in numbers)
            if is_right and (numbers or not value):
                return tuple(numbers)
            expected = "numbers with commas between"
        elif meta.get("many"):
            texts = [value] * bool(value) if option.name == "data" and isinstance(value, str) else value
            if isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts):
                return tuple(texts)
            expected = "a list of texts"
        elif staged := meta.get("staged"):
            values = stages(option.name, value, staged)
            return values[0][1] if len(values) == 1 else value  # the command line gives a text
        else:
            is_kind = isinstance(value, (int, float) if kind is float else kind)
            if is_kind and isinstance(value, bool) == (kind is bool):
                return value
            expected = _KINDS[kind]
        sentence = f"{_flag(option.name)} is {value!r}, which is not {expected}"
        raise UsageError(sentence, "malformed", option=option.name, given=value)

    def _check_bounds(self, option: Field[Any]) -> None:
        bounds, value = option.metadata.get("bounds"), getattr(self, option.name)
        if bounds is None or value is None:
            return
        staged = option.metadata.get("staged")
        values = [part for _, part in stages(option.name, value, staged)] if staged else [value]
        self._require(
            option.name, all(map(bounds.hold, value if isinstance(value, tuple) else values)), bounds.expected
        )

    def _require(self, name: str, is_right: bool, expected: str) -> None:
        """Raises UsageError for an option out of its range. expected: what to give instead."""
        value = getattr(self, name)
        if not is_right:
            raise UsageError(f"{_flag(name)} is {value}; give {expected}", "out-of-range", option=name, given=value)

    def _check_needs(self, option: Field[Any]) -> None:
        """Raises UsageError for an option that is given and means nothing."""
        needs, value = option.metadata.get("needs"), getattr(self, option.name)
        if needs and value != option.default and not needs.is_given(self):
            flag = _flag(option.name)
            sentence = f"{flag} {value} needs {needs.expected}; give that too, or leave {flag} out"
            raise UsageError(sentence, "needs-option", option=option.name, given=value)

    def _check_weights(self) -> None:
        number = len(self.data)
        if len(self.weights) != (number if number > 1 else 0):
            sentence = (
                f"{counted(number, 'dataset')} and {counted(len(self.weights), 'weight')} were given; give --weights a "
                "number for each --data: --data a/ --data b/ --weights 0.7,0.3"
                if number > 1
                else "--weights was given, and there is one --data; give several, or leave --weights out"
            )
            raise UsageError(sentence, "conflict", option="weights", given=list(self.weights))

    def _check_adapter(self) -> None:
        if self.lora and self.grow:
            sentence = "--grow and --lora were given; a model that grows trains all its weights, so give one of them"
            raise UsageError(sentence, "conflict", option="lora")
        if self.lora and self.side_channel:
            sentence = (
                "--side-channel and --lora were given; a side channel trains the word embeddings, which are frozen "
                "beside an adapter, so give one of them"
            )
            raise UsageError(sentence, "conflict", option="lora")

    def _check_growth(self) -> None:
        if not self.grow:
            return
        begins = [begin for begin, _ in self.depths]
        if self.init:
            sentence = "--grow and --init were given; --grow begins with random weights, so give --model"
            raise UsageError(sentence, "conflict", option="init")
        if self.distil_method in ("relations", "hidden"):
            sentence = (
                f"--distil {self.distil_method} compares layers by their number, which --grow changes; give --distil "
                "logits, or leave --grow out"
            )
            raise UsageError(sentence, "conflict", option="distil", given=self.distil)
        if begins[-1] > 1 - self.average + 1e-9:
            most = math.floor(100 * (1 - begins[-1]) + 1e-9) / 100
            sentence = (
                f"--average {self.average} takes in weights from before the last growth at {begins[-1]}; give at most "
                f"{most:g}"
            )
            raise UsageError(sentence, "out-of-range", option="average", given=self.average)

    def _check_elastic(self) -> None:
        if not self.elastic:
            return
        if self.grow:
            sentence = "--elastic and --grow were given, and both say how many layers are trained; give one"
            raise UsageError(sentence, "conflict", option="elastic")
        if self.lora:
            sentence = "--elastic and --lora were given; sub-networks train all their weights, so give one"
            raise UsageError(sentence, "conflict", option="elastic")
        if self.gradient_checkpointing:
            sentence = (
                "--gradient-checkpointing and --elastic were given; the weights of a sub-network exist only in the "
                "forward pass, so its layers cannot be computed again; leave --gradient-checkpointing out"
            )
            raise UsageError(sentence, "conflict", option="gradient_checkpointing")
        if self.compile == "on":
            sentence = "--compile on would compile each sub-network of --elastic; leave it out"
            raise UsageError(sentence, "conflict", option="compile", given=self.compile)
        if self.distil_method == "hidden" and self.distil_layers == "uniform":
            sentence = (
                "--distil hidden compares every layer, and the sub-networks of --elastic have different ones; give "
                "--distil-layers last"
            )
            raise UsageError(sentence, "conflict", option="distil_layers", given=self.distil_layers)

    def _check_duration(self) -> None:
        if self.warmup_steps is not None and self.warmup != Config.warmup:
            sentence = f"--warmup {self.warmup} and --warmup-steps {self.warmup_steps} were given; give one of them"
            raise UsageError(sentence, "conflict", option="warmup_steps", given=self.warmup_steps)
        durations = {"--steps": self.steps, "--epochs": self.epochs, "--budget": self.budget or None}
        given = [f"{flag} {value}" for flag, value in durations.items() if value is not None]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} were given; give one of them", "conflict", option="steps")
        if self.budget:
            self.seconds  # noqa: B018  (refuses what is no time)
            if self.warmup_steps is not None:
                sentence = "--warmup-steps and --budget were given; give --warmup, a share of the time"
                raise UsageError(sentence, "conflict", option="warmup_steps", given=self.warmup_steps)
            if self.teacher_cache and len(self.mask_shares) > 1:
                sentence = (
                    f"--mlm-probability {self.mlm_probability} changes with the time of a --budget, and "
                    "--teacher-cache has answers to rows whose masks are known in advance; give --steps"
                )
                raise UsageError(sentence, "conflict", option="budget", given=self.budget)

    def _check_distillation(self) -> None:
        if self.teacher and self.teacher_cache:
            raise UsageError(
                "--teacher and --teacher-cache were given; give one of them", "conflict", option="teacher_cache"
            )
        if self.teacher_cache and len(self.sources) > 1:
            sentence = (
                f"--teacher-cache holds answers to the rows of one dataset, and --data names {len(self.sources)}; give "
                "one, or --teacher, which answers during training"
            )
            raise UsageError(sentence, "conflict", option="teacher_cache")
        if self.teacher_cache and self.distil in ("relations", "hidden"):
            sentence = f"--distil {self.distil} needs a --teacher: a --teacher-cache holds logits; give --distil logits"
            raise UsageError(sentence, "needs-option", option="distil", given=self.distil)
        if self.teacher_cache and self.long_length is not None:
            sentence = (
                "--teacher-cache and --long-length were given; a cache has answers to rows of one length, so leave one "
                "of them out"
            )
            raise UsageError(sentence, "conflict", option="teacher_cache")
        if self.compile == "on" and self._recomputes_tapped_layers:
            sentence = (
                f"--compile on does not go with --gradient-checkpointing and --distil {self.distil_method}, which "
                "reads the layers that are computed again; leave one of them out"
            )
            raise UsageError(sentence, "conflict", option="compile", given=self.compile)

    @property
    def _recomputes_tapped_layers(self) -> bool:
        return self.gradient_checkpointing and self.distil_method in ("relations", "hidden")

    def compiles(self, *, on_gpu: bool) -> bool:
        """--compile, resolved."""
        automatic = on_gpu and not self.elastic and not self._recomputes_tapped_layers
        return self.compile == "on" or (self.compile == "auto" and automatic)

    @property
    def sources(self) -> tuple[tuple[str, float], ...]:
        """--data as (directory or URL, weight); a single one has the weight 1."""
        return tuple(zip(self.data, map(float, self.weights or (1,)), strict=True))

    @property
    def distil_method(self) -> str | None:
        """--distil, resolved; None without a teacher."""
        if not (self.teacher or self.teacher_cache):
            return None
        return self.distil if self.distil != "auto" else "logits" if self.teacher_cache else "relations"

    @property
    def seconds(self) -> float:
        """--budget in seconds."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", self.budget)
        if not match or float(match[1]) <= 0:
            sentence = f"--budget {self.budget} is not a time; write it like 90s, 30m or 24h"
            raise UsageError(sentence, "malformed", option="budget", given=self.budget)
        return float(match[1]) * _SECONDS[match[2]]

    @property
    def mask_shares(self) -> tuple[tuple[float, float], ...]:
        """--mlm-probability as (share of the run that is done, share of tokens from then on)."""
        return stages("mlm_probability", self.mlm_probability, float)

    @property
    def batch_sizes(self) -> tuple[tuple[float, int], ...]:
        """--global-batch-size as (share of the run that is done, rows of a step from then on)."""
        return stages("global_batch_size", self.global_batch_size, int)

    @property
    def depths(self) -> tuple[tuple[float, int], ...]:
        """--grow and --grow-at as (share of the run that is done, layers from then on); nothing without them."""
        if not self.grow:
            return ()
        layers = _numbers(self.grow, int)
        begins = [0.0, *_numbers(self.grow_at, float)]
        if len(layers) < 2 or layers[0] < 1 or layers != sorted(layers):
            sentence = f"--grow is {self.grow}; give numbers of layers that do not fall, such as 3,6,12"
            raise UsageError(sentence, "malformed", option="grow", given=self.grow)
        if len(begins) != len(layers) or begins != sorted(set(begins)) or not begins[-1] < 1:
            sentence = (
                f"--grow-at is {self.grow_at or 'missing'}; --grow {self.grow} needs {len(layers) - 1} rising shares "
                "of the run between 0 and 1, such as 0.5"
            )
            raise UsageError(sentence, "malformed", option="grow_at", given=self.grow_at)
        return tuple(zip(begins, layers, strict=True))

    @property
    def rate_scales(self) -> tuple[tuple[re.Pattern[str], float], ...]:
        """--lr-scale as (pattern, factor), in their order."""
        scales = []
        for given in self.lr_scale:
            pattern, _, factor = given.rpartition("=")
            try:
                scales.append((re.compile(pattern), float(factor)))
            except (ValueError, re.error) as error:
                sentence = (
                    f"--lr-scale {given} is not a regular expression, = and a number ({error}); write it like "
                    "embeddings=0.1"
                )
                raise UsageError(sentence, "malformed", option="lr_scale", given=given) from None
            if not pattern or not 0 <= scales[-1][1] < math.inf:
                sentence = (
                    f"--lr-scale {given} needs a pattern, = and a factor of 0 or more; write it like embeddings=0.1"
                )
                raise UsageError(sentence, "malformed", option="lr_scale", given=given)
        return tuple(scales)

    @property
    def longest(self) -> int:
        """The longest row of the run, in tokens."""
        return max(self.length, self.long_length or 0)


def default_out(config: Config) -> str:
    """The directory of a run without --out: runs/<model>-<date of today>. Ranks must take that of rank 0."""
    path = Path(config.init or config.model)
    name = path.parent.resolve().name if path.name == "config.json" else path.resolve().name
    return f"runs/{name}-{date.today():%Y-%m-%d}"


def pick(registry: dict[str, Any], name: str, flag: str, page: str = "docs/extending.md") -> Any:
    """registry[name]. Raises UsageError, listing the known names, if the name is unknown."""
    if name not in registry:
        sentence = (
            f"{flag} {name or 'without a name'} is unknown; give one of {', '.join(registry)}, or run the file that "
            f"adds your own ({page})"
        )
        raise UsageError(sentence, "unknown", option=flag[2:].replace("-", "_"), given=name)
    return registry[name]


def stages(name: str, given: float | str, kind: Callable[[str], Any]) -> tuple[tuple[float, Any], ...]:
    """Values for the parts of a run, as (begin, value): "0.3:0.15@0.8" → ((0, 0.3), (0.8, 0.15)).

    A begin is a share of the run; without @ the parts are equally long. Raises UsageError for anything else. name: of
    the option in Config.
    """
    parts = str(given).split(":")
    try:
        values = []
        for number, part in enumerate(parts):
            value, at, begin = part.partition("@")
            values.append((float(begin) if at else number / len(parts), kind(value)))
    except ValueError:
        values = []
    begins = [begin for begin, _ in values]
    if not values or begins[0] != 0 or begins != sorted(set(begins)) or not all(begin < 1 for begin in begins):
        examples = {float: "0.3, or 0.3:0.15, or 0.3:0.15@0.8", int: "64, or 64:128, or 64:128@0.8"}[kind]  # type: ignore[index]  # kind is one of the two
        sentence = f"{_flag(name)} is {given}; give one value, or values for the parts of a run: {examples}"
        raise UsageError(sentence, "malformed", option=name, given=given)
    return tuple(values)


def _numbers(given: str, kind: Callable[[str], Any]) -> list[Any]:
    """Numbers with commas between; nothing for any other text."""
    try:
        return [kind(part) for part in given.split(",")]
    except ValueError:
        return []


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _kind(option: Field[Any]) -> type:
    """bool, int, float or str."""
    kind = option.metadata.get("type", type(option.default))
    return kind if kind in _KINDS else str  # a click.Choice


# -------------------------------------------------------------------------------------------------------- command line


class _GroupedOption(click.Option):
    def __init__(self, *arguments: Any, group: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.group = group


class _GroupedCommand(OneSentence):
    """A command whose --help lists its options under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {
            name: [] for name in (DATA, MODEL, SCHEDULE, DISTILLATION, HARDWARE, CHECKPOINTS, "Other")
        }
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                groups[getattr(parameter, "group", "Other")].append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


_INSTEAD = {
    "model": ["init"],
    "data": ["weights"],
    "warmup": ["warmup_steps"],
    "warmup_steps": ["warmup"],
    "steps": ["epochs", "budget"],
    "epochs": ["steps", "budget"],
    "budget": ["steps", "epochs"],
}
"""An option on the command line → options of a file that say the same in another way."""
_OF_VALUE = {"optimizer": ["lr", "muon_rate", "muon_momentum"], "schedule": ["decay_share"]}
"""An option whose value on the command line is another than in a file → options of the file that go with its own."""


def command(run: Callable[[Config], None]) -> click.Command:
    """A click command with a flag for every option of Config, --recipe and --config."""

    def main(file: str | None, recipe: str | None, **flags: Any) -> None:
        with one_sentence(quiet=os.environ.get("RANK", "0") != "0"):  # every rank would say the same
            given = {name: value for name, value in flags.items() if value not in (None, ())}
            if file and recipe:
                sentence = "--config and --recipe were given; both have options of a whole run, so give one of them"
                raise UsageError(sentence, "conflict", option="recipe", given=recipe)
            if not file and not recipe and not recipes.CHOICES & given.keys():
                recipe = recipes.DEFAULT
            path = recipes.file_of(recipe) if recipe else Path(file) if file else None
            read = read_options(path) if path else {}
            changed = [name for name, value in given.items() if read.get(name) != value]
            replaced = set(given).union(*(_INSTEAD.get(name, ()) for name in given))
            replaced = replaced.union(*(_OF_VALUE.get(name, ()) for name in changed))
            values = {name: value for name, value in read.items() if name not in replaced}
            config = Config(**values | given)
        if os.environ.get("RANK", "0") == "0":
            if not config.out:
                config = replace(config, out=default_out(config))
                click.echo(f"--out {config.out}")
            if recipe:
                click.echo(" ".join([f"--recipe {recipe}:", *(f"{_flag(name)} {values[name]}" for name in values)]))
        run(config)

    parameters: list[click.Parameter] = []
    for option in fields(Config):
        meta = dict(option.metadata)
        group, text = meta.pop("group"), meta.pop("help")
        for name in ("bounds", "needs"):
            meta.pop(name, None)
        many = meta.pop("many", False)
        if meta.pop("staged", None) or meta.pop("numbers", None) or many:
            meta.setdefault("type", str)
        more: dict[str, Any] = {"multiple": True} if many else {}
        default = "off" if option.default is False else option.default
        shown = f"{text}  [default: {default}]" if option.default not in (None, "", ()) else text
        flag, kind = _flag(option.name), {"type": meta.get("type", type(option.default))}
        if option.default is False:
            flag, kind = f"{flag}/--no-{flag[2:]}", {}
        parameters.append(_GroupedOption([flag, option.name], group=group, default=None, help=shown, **kind, **more))
    parameters += [
        click.Option(
            ["--recipe"],
            help=f"Options that belong together (docs/recipes.md): {', '.join(recipes.NAMES)}. Options on the command "
            f"line override them. Default: {recipes.DEFAULT}; none beside --config, "
            f"{', '.join(sorted(map(_flag, recipes.CHOICES)))}.",
        ),
        click.Option(
            ["--config", "file"],
            help="Read options from this run.json, or from a TOML file of option = value. Options on the command line "
            "override them.",
        ),
    ]
    settings = {"help_option_names": ["-h", "--help"]}
    return _GroupedCommand("pretrain", callback=main, params=parameters, help=run.__doc__, context_settings=settings)


def read_options(path: Path) -> dict[str, Any]:
    """The options in a run.json, or in a TOML file. Raises UsageError if it is neither, or has unknown options."""
    try:
        content = path.read_bytes()
        saved = tomllib.loads(content.decode()) if path.suffix == ".toml" else dict(json.loads(content)["config"])
    except FileNotFoundError:
        sentence = f"--config {path} does not exist; give the run.json of a run"
        raise UsageError(sentence, "not-found", option="config", given=str(path)) from None
    except OSError as error:
        sentence = f"--config {path} cannot be read: {error.strerror}; give the run.json of a run"
        raise UsageError(sentence, "unreadable", option="config", given=str(path)) from None
    except tomllib.TOMLDecodeError as error:
        sentence = f"--config {path} is not TOML: {error}; write lines such as lr = 1e-3"
        raise UsageError(sentence, "malformed", option="config", given=str(path)) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        sentence = (
            f"--config {path} is not a run.json that bertrain pretrain wrote, nor a .toml file of options; give one "
            "of them"
        )
        raise UsageError(sentence, "not-a-run", option="config", given=str(path)) from None
    if unknown := sorted(saved.keys() - {option.name for option in fields(Config)}):
        sentence = (
            f"--config {path} has options that this version does not have: {', '.join(unknown)}; remove them from it"
        )
        raise UsageError(sentence, "other-version", option="config", given=unknown)
    return saved
