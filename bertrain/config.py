"""The options of a run: one dataclass, and what they amount to. Methods bring further ones (methods.py)."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import click

from bertdata.support import MASKING_POLICIES, SHUFFLES, MaskingPolicy, UsageError, counted, require_local_output
from bertrain.methods import known_methods
from bertrain.options import (
    ABOVE_0,
    COUNT,
    DECAY,
    FROM_0,
    SHARE,
    WARMUP,
    WEIGHT,
    Excludes,
    Needs,
    Options,
    Ramp,
    amount,
    flag,
    option,
    ramp,
)

TRACKERS = ("tensorboard", "wandb", "trackio")
PRECISIONS = ("auto", "fp32", "bf16", "fp16")
ATTENTION = ("auto", "flash", "cudnn", "efficient", "math")
MICRO_BATCH_SIZE, MICRO_BATCH_TOKENS = 64, 32_768  # the default is at most so many rows on CPUs, tokens on GPUs

DATA, MODEL, SCHEDULE = "Data", "Model", "Schedule and optimizer"
HARDWARE, CHECKPOINTS = "Speed and memory", "Checkpoints and log"
RESERVED = {"recipe", "config", "file", "help", "nproc", "hours", "methods"}
"""Names that no option of a method may have: of options that single commands add, and of arguments of Config."""
LONGEST = 1 << 62  # duration of a run, in any unit, and its rows
TOTALS = ("steps", "epochs", "tokens")

WSD = Needs("--schedule wsd", lambda config: config.schedule == "wsd")
MUON = Needs("--optimizer muon", lambda config: config.optimizer not in ("adamw", "stableadamw", "lamb"))

EXCLUDES = (Excludes("mix_temperature", "weights", "both say how datasets are mixed"),)
"""What does not go together, for any values. Methods have their own."""


def _option(group: str, default: Any, **more: Any) -> Any:
    """An option in a group of --help."""
    return option(default, group=group, **more)


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    """Every option of bertrain.pretrain but those of methods, which `Config.of` takes too.

    run/run.json holds all of them, and --config reads them from there. Names of objectives, optimizers, schedules and
    models are checked where they are looked up, so that other programs can add their own.
    """

    data: str | tuple[str, ...] = _option(DATA, (), form="many", phase=True, resume="content")
    """Dataset of bertdata build: a directory or a URL. May be repeated; several datasets are mixed by --weights.
    [required]
    """
    weights: str | tuple[float, ...] = _option(DATA, (), form="numbers", bounds=ABOVE_0, phase=True)
    """Share of each --data in the rows, in their order, with commas between: --data a/ --data b/ --weights 0.7,0.3."""
    mix_temperature: float | None = _option(DATA, None, type=float, bounds=FROM_0, phase=True)
    """Mixes several --data by their size, instead of --weights: in the ratio of their tokens to this power, such as
    0.7. 1 is the ratio of their tokens.
    """
    out: str = _option(CHECKPOINTS, "", resume="free")
    """Directory of the run: checkpoints, log.jsonl and run.json. Default: runs/MODEL-DATE, of today."""
    model: str = _option(MODEL, "modernbert-tiny", resume="content")
    """Model to train from random weights: a preset (bert-tiny, -mini, -small, -base, -large; modernbert-tiny, -small,
    -base), or any masked language model of transformers: a config.json, its directory, or a name on the Hugging Face
    hub. Vocabulary size and positions are fitted to the data.
    """
    init: str = _option(MODEL, "", resume="content")
    """Weights to start from instead of --model: a run, a checkpoint directory or a name on the Hugging Face hub."""
    objective: str = _option(MODEL, "mlm")
    """Objectives to train on, joined by +: mlm, mlm+nsp for sentence pairs, or diffusion with --masking
    uniform (docs/methods.md).
    """
    trains: str = _option(MODEL, "", phase=True, in_files=True)
    """Regular expression: only parameters of the model whose name contains a match are trained."""
    rope_base: float | None = _option(MODEL, None, type=float, bounds=ABOVE_0, phase=True)
    """Base of the rotary positions, of global layers where a model has local ones too. Default: that of --model."""
    rope_base_local: float | None = _option(MODEL, None, type=float, bounds=ABOVE_0, phase=True)
    """Base of the rotary positions of local layers. Default: that of --model."""
    length: int = _option(DATA, 128, bounds=COUNT, phase=True)
    """Row length in tokens, special tokens included."""
    isolate_documents: bool = _option(DATA, False)
    """Pack several documents into a row; no token attends to another document."""
    steps: int | None = _option(SCHEDULE, None, type=int, bounds=ABOVE_0, resume="told")
    """Number of optimizer steps. Default: one epoch."""
    epochs: float | None = _option(SCHEDULE, None, type=float, bounds=ABOVE_0, resume="told")
    """Number of epochs, instead of --steps."""
    tokens: str = _option(SCHEDULE, "", form="amount", resume="told")
    """Number of tokens to train on, padding included, instead of --steps: a number, which K, M, B or T may follow."""
    global_batch_size: int | str = _option(SCHEDULE, 256, form="rows", phase=True)
    """Rows in one optimizer step, over all ranks. 16..64 is a linear ramp over the run."""
    micro_batch_size: int | None = _option(HARDWARE, None, type=int, bounds=ABOVE_0, resume="free")
    """Rows in one forward pass of a rank. Default: its share of a step, but at most 64 on CPUs, and at most 32,768
    tokens on GPUs.
    """
    lr: float = _option(SCHEDULE, 1e-3, bounds=ABOVE_0, phase=True)
    """Peak learning rate."""
    lr_end: float = _option(SCHEDULE, 0.0, bounds=WEIGHT, phase=True)
    """Learning rate at the end of the schedule, as a share of --lr."""
    warmup: float = _option(SCHEDULE, 0.06, bounds=WARMUP, phase=True)
    """Length of the linear warm-up, as a share of the run."""
    warmup_steps: int | None = _option(SCHEDULE, None, type=int, bounds=FROM_0, phase=True)
    """Length of the linear warm-up in steps, instead of --warmup."""
    schedule: str = _option(SCHEDULE, "linear", phase=True, resume="told")
    """Learning rate after the warm-up: constant; linear, cosine or 1-sqrt, which fall; or wsd, which stays at the peak
    and falls at the end as 1-sqrt.
    """
    decay_share: float = _option(SCHEDULE, 0.2, bounds=SHARE, needs=WSD, phase=True, resume="told")
    """Share of the run, at its end, in which the learning rate of --schedule wsd falls."""
    optimizer: str = _option(SCHEDULE, "adamw")
    """Optimizer: adamw; muon, which makes updates of hidden matrices orthogonal and uses AdamW for the others;
    stableadamw, AdamW with smaller steps where gradients grow suddenly; or lamb, for large batches, with steps in
    proportion to the norm of each matrix.
    """
    muon_rate: float = _option(SCHEDULE, 4.0, bounds=ABOVE_0, needs=MUON)
    """Learning rate of Muon's matrices, as a multiple of --lr."""
    muon_momentum: float = _option(SCHEDULE, 0.95, bounds=DECAY, needs=MUON)
    """Decay rate of Muon's mean of gradients."""
    lr_scale: tuple[str, ...] = _option(SCHEDULE, (), form="many")
    """PATTERN=FACTOR: scale the learning rate of parameters whose name contains a match of PATTERN, a regular
    expression, such as embeddings=0.1. 0 freezes them. May be repeated; the last pattern that matches counts.
    """
    weight_decay: float = _option(SCHEDULE, 0.01, bounds=FROM_0, phase=True)
    """Weight decay of matrices; norms and biases have none."""
    beta1: float = _option(SCHEDULE, 0.9, bounds=DECAY)
    """Decay rate of the optimizer's mean of gradients."""
    beta2: float = _option(SCHEDULE, 0.98, bounds=DECAY)
    """Decay rate of the optimizer's mean of squared gradients."""
    epsilon: float = _option(SCHEDULE, 1e-6, bounds=ABOVE_0)
    """Number that the optimizer adds to its denominator."""
    clip_norm: float = _option(SCHEDULE, 1.0, bounds=ABOVE_0)
    """Largest norm of the gradient; larger gradients are scaled down."""
    mlm_probability: float = _option(DATA, 0.15, bounds=SHARE, phase=True)
    """Share of a row's tokens to mask and predict."""
    mask_fraction: float = _option(DATA, 0.8, bounds=WEIGHT, phase=True)
    """Share of the chosen tokens that becomes [MASK]."""
    random_fraction: float = _option(DATA, 0.1, bounds=WEIGHT, phase=True)
    """Share of the chosen tokens that becomes a random token. The others stay as they are."""
    masking: MaskingPolicy = _option(DATA, "exact", type=click.Choice(MASKING_POLICIES), phase=True)
    """How to choose tokens: exact, the same share of each row; bernoulli, each token independently; whole_word, all
    tokens of a word; span, one to ten neighbouring words; uniform, a share drawn anew for each row, for --objective
    diffusion.
    """
    shuffle: str = _option(DATA, "full", type=click.Choice(SHUFFLES))
    """Order of an epoch: full, or blocks of 64 MiB for data larger than memory."""
    seed: int = _option(SCHEDULE, 0)
    """Random seed for initial weights and dropout, and for the data without --data-seed."""
    data_seed: int | None = _option(DATA, None, type=int)
    """Random seed for data order and masks. Default: the same as --seed."""
    precision: str = _option(HARDWARE, "auto", type=click.Choice(PRECISIONS))
    """Number format of matrix products. auto: bf16 on GPUs, fp16 on GPUs before Ampere, fp32 on CPUs."""
    attention: str = _option(HARDWARE, "auto", type=click.Choice(ATTENTION), resume="free")
    """Kernel of torch for attention in training. auto: torch chooses, without cudnn where it has known faults. On
    GPUs flash leaves rows with padding to efficient, and flash and cudnn take no fp32; CPUs have flash and math.
    """
    compile: str = _option(HARDWARE, "auto", type=click.Choice(["auto", "on", "off"]), resume="free")
    """Use torch.compile. auto: on GPUs."""
    gradient_checkpointing: bool = _option(HARDWARE, False, resume="free")
    """Save memory: recompute activations in the backward pass."""
    save_every: int = _option(CHECKPOINTS, 1000, bounds=COUNT, resume="free")
    """Steps between checkpoints; the last step always has one."""
    save_at: tuple[str, ...] = _option(CHECKPOINTS, (), form="many", resume="free")
    """Checkpoints that --keep never removes, after so many tokens or words were read: tokens=1B,2B or words=1M,10M. May
    be repeated.
    """
    keep: int = _option(CHECKPOINTS, 3, bounds=COUNT, resume="free")
    """Number of checkpoints to keep."""
    resume: str = _option(CHECKPOINTS, "auto", type=click.Choice(["auto", "no"]), resume="free")
    """auto: continue from the newest complete checkpoint in --out. no: refuse if there is one."""
    eval_masking: float = _option(CHECKPOINTS, 0.15, bounds=SHARE)
    """Share of the tokens of the validation split to mask and predict."""
    eval_precision: str = _option(CHECKPOINTS, "auto", type=click.Choice(PRECISIONS))
    """Number format of matrix products in evaluations. auto: that of training on GPUs, fp32 on CPUs."""
    eval_every: int = _option(CHECKPOINTS, 500, bounds=FROM_0, resume="free")
    """Steps between evaluations on up to 2,048 samples of the validation split. 0: only at the end."""
    log_every: int = _option(CHECKPOINTS, 10, bounds=COUNT, resume="free")
    """Steps between entries of log.jsonl."""
    log_to: tuple[str, ...] = _option(CHECKPOINTS, (), form="many", type=click.Choice(TRACKERS), resume="free")
    """Where to send the log besides log.jsonl: tensorboard, which writes to OUT/tensorboard, wandb or trackio
    (docs/records.md). May be repeated.
    """

    phase: tuple[Mapping[str, Any], ...] = _option(DATA, (), form="tables", in_files=True, resume="told")
    """The phases of the run, each with a duration and what it sets (docs/phases.md)."""
    methods: tuple[Options, ...] = _option(MODEL, (), form="options", in_files=True)
    """The options of methods: an object of each whose options are given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.data and not self.phase:
            raise UsageError("--data is missing; give the directory of a dataset", "missing", option="data")
        if self.data:
            self._check_weights()
        if self.out:
            require_local_output(self.out)
        total = self.mask_fraction + self.random_fraction
        self.require("random_fraction", total <= 1 + 1e-9, f"at most 1 - --mask-fraction {self.mask_fraction}")
        self.rate_scales  # noqa: B018  (refuses what is no factor or no pattern)
        self.milestones  # noqa: B018  (refuses what is none)
        self._check_trains()
        for pair in EXCLUDES:
            self.check_excludes(pair, all(is_set(self, name) for name in pair[:2]))
        self._check_duration()

    @classmethod
    def of(cls, **given: Any) -> Config:
        """The options of a run and of its methods, by name. Raises UsageError for a name that is unknown."""
        found = []
        for method in known_methods().values():
            own = {name: given.pop(name) for name in method.options_type.names() & given.keys()}
            if own and (options := method.options_type(**own)) != method.options_type():
                found.append(options)
        if unknown := sorted(given.keys() - all_options().keys() - {"methods"}):
            raise UsageError(f"{unknown[0]} is no option of a run; leave it out", "unknown", option=unknown[0])
        return cls(**given | ({"methods": (*given.get("methods", ()), *found)} if found else {}))

    def flat(self) -> dict[str, Any]:
        """All options by name, with those of its methods. `Config.of` makes the same options of them."""
        found = {
            each.name: getattr(options, each.name) for options in (self, *self.methods) for each in fields(options)
        }
        del found["methods"]
        return found

    def differing(self) -> dict[str, Any]:
        """Options, as the command line has them, that have another value than the default.

        Without those of records, and with the last name alone of what is a path here: the directories are nobody
        else's business.
        """
        flat, options = self.flat(), all_options()
        found = {name: value for name, value in flat.items() if value != options[name].default}
        return {
            flag(name): _without_directories(value)
            for name, value in found.items()
            if options[name].metadata.get("group") != CHECKPOINTS and name not in ("data", "phase")
        }

    def check_excludes(self, pair: Excludes, both_given: bool) -> None:
        if both_given:
            in_files = [all_options()[name].metadata.get("in_files") for name in pair[:2]]
            names = [f"{name} in phases" if only else flag(name) for name, only in zip(pair, in_files, strict=False)]
            sentence = f"{' and '.join(names)} were given: {pair.why}; give one of them"
            given = self.flat().get(pair.option)
            raise UsageError(sentence, "conflict", option=pair.option, given=given)

    def _check_weights(self) -> None:
        number = len(self.data)
        if self.mix_temperature is None and len(self.weights) != (number if number > 1 else 0):
            sentence = (
                f"{counted(number, 'dataset')} and {counted(len(self.weights), 'weight')} were given; give --weights a "
                "number for each --data: --data a/ --data b/ --weights 0.7,0.3, or --mix-temperature"
                if number > 1
                else "--weights was given, and there is one --data; give several, or leave --weights out"
            )
            raise UsageError(sentence, "conflict", option="weights", given=list(self.weights))

    def _check_trains(self) -> None:
        try:
            re.compile(self.trains)
        except re.error as error:
            sentence = f"trains {self.trains!r} is not a regular expression ({error}); write it like layers.[6-9]|head"
            raise UsageError(sentence, "malformed", option="trains", given=self.trains) from None

    def _check_duration(self) -> None:
        if self.warmup_steps is not None and self.warmup != Config.warmup:
            sentence = f"--warmup {self.warmup} and --warmup-steps {self.warmup_steps} were given; give one of them"
            raise UsageError(sentence, "conflict", option="warmup_steps", given=self.warmup_steps)
        given = [f"{flag(name)} {getattr(self, name)}" for name in TOTALS if getattr(self, name)]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} were given; give one of them", "conflict", option="steps")

    @property
    def start(self) -> str:
        """With which model the run begins: --init or --model, as it is given."""
        return self.init or self.model

    @property
    def num_tokens(self) -> int:
        """--tokens; 0 without it."""
        return amount(self.tokens) if self.tokens else 0

    @cached_property
    def milestones(self) -> dict[str, list[int]]:
        """--save-at: numbers of tokens and of words, ascending. Raises UsageError for anything else."""
        found: dict[str, list[int]] = {"tokens": [], "words": []}
        for given in self.save_at:
            unit, _, numbers = given.partition("=")
            try:
                found[unit] += map(amount, numbers.split(","))
            except (KeyError, ValueError):
                sentence = f"--save-at {given} names no milestones; write it like tokens=1B,2B or words=1M,10M"
                raise UsageError(sentence, "malformed", option="save_at", given=given) from None
        return {unit: sorted(numbers) for unit, numbers in found.items()}

    @property
    def rows(self) -> Ramp:
        """--global-batch-size."""
        return ramp(self.global_batch_size)

    @cached_property
    def rate_scales(self) -> tuple[tuple[re.Pattern[str], float], ...]:
        """--lr-scale as (pattern, factor), in their order."""
        scales = []
        for given in self.lr_scale:
            pattern, _, factor = given.rpartition("=")
            try:
                scales.append((re.compile(pattern), float(factor)))
                if not pattern or not 0 <= scales[-1][1] < math.inf:
                    raise ValueError("a part is missing, or out of range")
            except (ValueError, re.error) as error:
                sentence = (
                    f"--lr-scale {given} is not a regular expression, = and a factor of 0 or more ({error}); write it "
                    "like embeddings=0.1"
                )
                raise UsageError(sentence, "malformed", option="lr_scale", given=given) from None
        return tuple(scales)


def all_options() -> dict[str, Field[Any]]:
    """The options of a run and of every method, by name. Raises UsageError for a name that two of them have."""
    found: dict[str, Field[Any]] = {each.name: each for each in fields(Config) if each.name != "methods"}
    for name, method in known_methods().items():
        for each in fields(method.options_type):
            if each.name in found or each.name in RESERVED:
                sentence = f"the method {name} has the option {flag(each.name)}, and there is one already; rename it"
                raise UsageError(sentence, "bad-entry", option=each.name, given=name)
            found[each.name] = each
    return found


REMOVED: dict[str, tuple[Any, str]] = {
    "branch": ("", "copy the checkpoint into a new directory for --out, and give the options of its run"),
    "average": (0.0, "keep more checkpoints, and average the last ones with bertrain merge"),
    "side-channel": ("", "use examples/structured_embeddings.py"),
    "budget": ("", "give --steps, and bertrain doctor --hours prints how many fit into a time"),
    "time": ("", "give each phase steps, tokens or epochs, and bertrain doctor --hours says how many fit into a time"),
}
"""Options of earlier versions, as the command line had them → (default as in JSON, what to do instead)."""


def without_removed(options: Mapping[str, Any], source: object) -> dict[str, Any]:
    """Return options without those of REMOVED. Raises UsageError for one that is not at its default."""
    kept = dict(options)
    for name, (default, instead) in REMOVED.items():
        value = kept.pop(name.replace("-", "_"), default)
        if value != default:
            sentence = f"{source} has {name} = {value!r}, an option that was removed; {instead}"
            raise UsageError(sentence, "other-version", option=name, given=value)
    return kept


def _without_directories(value: Any) -> Any:
    """The last name of a path: of one that is there, or begins at the root. Any other value as it is."""
    is_path = isinstance(value, str) and (os.path.isabs(value) or os.path.exists(value))
    return Path(value).name or value if is_path else value


def is_set(config: Config, name: str) -> bool:
    """Whether an option is not at its default; one of a method that the options do not have is."""
    option = all_options().get(name)
    return option is not None and config.flat().get(name, option.default) != option.default


def default_out(config: Config) -> str:
    """The directory of a run without --out: runs/<model>-<date of today>. Ranks must take that of rank 0."""
    path = Path(config.start)
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


_INSTEAD = {
    "model": ["init"],
    "data": ["weights"],
    "weights": ["mix_temperature"],
    "mix_temperature": ["weights"],
    "warmup": ["warmup_steps"],
    "warmup_steps": ["warmup"],
    "steps": ["epochs", "tokens"],
    "epochs": ["steps", "tokens"],
    "tokens": ["steps", "epochs"],
}
"""An option → options that say the same in another way: it replaces them where it is given later."""
OF_VALUE = {"optimizer": ["lr", "muon_rate", "muon_momentum"], "schedule": ["decay_share"]}
"""An option → options that go with its value: another value, given later, leaves them out."""


def replaced_by(given: Mapping[str, Any], before: Mapping[str, Any]) -> set[str]:
    """Which options of `before` do not hold any more beside those that are given after them."""
    changed = [name for name, value in given.items() if before.get(name) != value]
    replaced = set(given).union(*(_INSTEAD.get(name, ()) for name in given))
    return replaced.union(*(OF_VALUE.get(name, ()) for name in changed))
