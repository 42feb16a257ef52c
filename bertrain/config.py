"""The options of a run: one dataclass, and the kinds of their values. Methods add more (methods.py)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, fields
from datetime import date
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, get_args

from bertdata.support import MOST_ROWS, SHUFFLES, MaskingPolicy, UsageError, nearest, require_local_output
from bertrain import options as kinds
from bertrain.methods import options_of_methods
from bertrain.options import Check, Either, Kind, Needs, Options, Rule, amount, choice, is_empty, named, option, several
from bertrain.trackers import TRACKERS

T = TypeVar("T", bound=Options)
PRECISIONS = ("auto", "fp32", "bf16", "fp16")
ATTENTION = ("auto", "flash", "cudnn", "efficient", "math")
MICRO_BATCH_SIZE, MICRO_BATCH_TOKENS = 64, 32_768  # limits of the default: rows on CPUs, tokens on GPUs

HEADINGS = ("Data", "Model", "Schedule and optimizer", "Speed and memory", "Checkpoints and log")
DATA, MODEL, SCHEDULE, HARDWARE, CHECKPOINTS = HEADINGS  # in --help; methods are before the last two
RESERVED = {"recipe", "config", "file", "help", "nproc", "hours", "methods"}
"""Names that no option of a method may have: options that only some commands have, and arguments of Config."""
WITHOUT_MUON = ("adamw", "stableadamw", "lamb")
TOTALS = ("steps", "epochs", "tokens")  # the options that set how long a run is
DURATIONS = (*TOTALS, "share")  # of a phase


def rate_scale(given: str) -> tuple[re.Pattern[str], float]:
    """Return the pattern and the factor in PATTERN=FACTOR. Raises ValueError or re.error for an invalid text."""
    pattern, _, factor = given.rpartition("=")
    if not pattern:
        raise ValueError
    return re.compile(pattern), kinds.FROM_0.parse(factor)


def milestone(given: str) -> tuple[str, list[int]]:
    """Return the unit and the amounts in tokens=1B,2B or words=1M,10M. Raises ValueError for an invalid text."""
    unit, _, numbers = given.partition("=")
    if unit not in ("tokens", "words"):
        raise ValueError
    return unit, [*map(amount, numbers.split(","))]


def _part(given: float | str) -> Fraction:
    """Return a decimal or a fraction, above 0 and at most 1. Raises ValueError or TypeError for invalid values."""
    text = "" if isinstance(given, bool) else str(given)
    part = Fraction(0 if re.search(r"e[+-]?\d{4,}$", text.lower()) else text)  # too many digits
    if not 0 < part <= 1:
        raise ValueError("out-of-range")
    return part


def _rows(given: int | str) -> int | str:
    """Return 64 for 64 and "64", and "16..64" for itself."""
    sizes = [kinds.COUNT.parse(part) for part in str(given).split("..")]
    if len(sizes) > 2 or max(sizes) > MOST_ROWS:
        raise ValueError("out-of-range")
    return sizes[0] if sizes[0] == sizes[-1] else f"{sizes[0]}..{sizes[1]}"


def _checked(expected: str, check: Callable[[Any], Any], kind: type = str) -> Kind:
    """Return the kind of a value that `check` accepts and does not change."""

    def parse(given: Any) -> Any:
        if not isinstance(given, kind):
            raise TypeError
        check(given)
        return given

    return Kind(expected, parse)


def _has_its_masks(c: Any) -> bool:
    """Return whether the masking of a phase, or of a run without phases, fits its objective."""
    return c.phase or c.masking == "uniform" or "diffusion" not in c.objective.split("+")


TEXTS = several(kinds.TEXT, "a text, or a list of texts")
NUMBERS = several(kinds.ABOVE_0, "numbers above 0 with commas between", separator=",")
ROWS = Kind("a number of rows to 2**24, such as 64 or 16..64", _rows)
AMOUNT = Kind("a number of tokens, such as 40M", amount)
PART = Kind('a part of the run, such as 0.9 or "1/3"', _part)
DIRECTORY = _checked("a directory of this machine", require_local_output)
PATTERN = _checked("a regular expression, such as layers.[6-9]|head", re.compile)
SCALES = several(_checked("", rate_scale), "a regular expression, = and a factor of 0 or more, such as embeddings=0.1")
MILESTONES = several(_checked("", milestone), "tokens=1B,2B or words=1M,10M")
TABLES = several(_checked("", dict, Mapping), "tables; write [[phase]] above each")
LOGS = several(choice(*TRACKERS), choice(*TRACKERS).expected)
OPTIONS = several(_checked("", fields, Options), "options of methods")


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    """All options of bertrain.pretrain except those of methods, which `Config.make` also accepts.

    run/run.json contains them, and --config reads them. Names of objectives, optimizers, schedules and models are
    checked where they are used, so that external programs can add their own.
    """

    data: tuple[str, ...] = option((), TEXTS, DATA, phase=True, resume="content")
    """Dataset of bertdata build: a directory or a URL. May be repeated; several datasets are mixed by --weights.
    [required]
    """
    weights: tuple[float, ...] = option((), NUMBERS, DATA, phase=True, of="data")
    """Share of each --data in the rows, in their order, with commas between: --data a/ --data b/ --weights 0.7,0.3."""
    mix_temperature: float | None = option(None, kinds.FROM_0, DATA, phase=True)
    """Mix several --data by size, instead of --weights: in the ratio of their tokens to this power, such as 0.7. 1 is
    the ratio of their tokens.
    """
    out: str = option("", DIRECTORY, CHECKPOINTS, resume="free")
    """Directory of the run: checkpoints, log.jsonl and run.json. Default: a new directory, runs/MODEL-DATE."""
    model: str = option("modernbert-tiny", kinds.TEXT, MODEL, resume="content")
    """Model to train from random weights: a preset (bert-tiny, -mini, -small, -base, -large; modernbert-tiny, -small,
    -base), or any masked language model of transformers: a config.json, its directory, or a name on the Hugging Face
    hub. Vocabulary size and positions are fitted to the data.
    """
    init: str = option("", kinds.TEXT, MODEL, resume="content")
    """Weights to start from instead of --model: a run, a checkpoint directory or a name on the Hugging Face hub."""
    objective: str = option("mlm", kinds.TEXT, MODEL)
    """Objectives to train on, joined by +: mlm, mlm+nsp for sentence pairs, or diffusion with --masking
    uniform (docs/objectives.md).
    """
    trains: str = option("", PATTERN, MODEL, phase=True, in_files=True)
    """Regular expression: only parameters of the model whose name contains a match are trained."""
    rope_base: float | None = option(None, kinds.ABOVE_0, MODEL, phase=True)
    """Base of the rotary positions, of global layers where a model has local ones too. Default: that of --model."""
    rope_base_local: float | None = option(None, kinds.ABOVE_0, MODEL, phase=True)
    """Base of the rotary positions of local layers. Default: that of --model."""
    length: int = option(128, kinds.COUNT, DATA, phase=True)
    """Row length in tokens, special tokens included."""
    isolate_documents: bool = option(False, kinds.FLAG, DATA)
    """Pack several documents into a row; tokens attend only to tokens of the same document."""
    steps: int | None = option(None, kinds.COUNT, SCHEDULE, phase=True, resume="told")
    """Number of optimizer steps. Default: one epoch."""
    epochs: float | None = option(None, kinds.ABOVE_0, SCHEDULE, phase=True, resume="told")
    """Number of epochs, instead of --steps."""
    tokens: int | None = option(None, AMOUNT, SCHEDULE, phase=True, resume="told")
    """Number of tokens to train on, padding included, instead of --steps: a number, which K, M, B or T may follow."""
    global_batch_size: int | str = option(256, ROWS, SCHEDULE, phase=True)
    """Rows in one optimizer step, over all ranks. 16..64 is a linear ramp over the run."""
    micro_batch_size: int | None = option(None, kinds.COUNT, HARDWARE, resume="free")
    """Rows in one forward pass of a rank. Default: its share of a step, but at most 64 on CPUs, and at most 32,768
    tokens on GPUs.
    """
    lr: float = option(5e-4, kinds.ABOVE_0, SCHEDULE, phase=True, of="optimizer")
    """Peak learning rate."""
    lr_end: float = option(0.0, kinds.WEIGHT, SCHEDULE, phase=True)
    """Learning rate at the end of the schedule, as a share of --lr."""
    warmup: float = option(0.06, kinds.BELOW_1, SCHEDULE, phase=True)
    """Length of the linear warm-up, as a share of the run."""
    warmup_steps: int | None = option(None, kinds.COUNT_OR_0, SCHEDULE, phase=True)
    """Length of the linear warm-up in steps, instead of --warmup."""
    schedule: str = option("linear", kinds.TEXT, SCHEDULE, phase=True, resume="told")
    """Learning rate after the warm-up: constant; linear, cosine or 1-sqrt, which fall; or wsd, which stays at the peak
    and falls at the end as 1-sqrt.
    """
    decay_share: float = option(0.2, kinds.SHARE, SCHEDULE, phase=True, of="schedule", resume="told")
    """Share of the run, at its end, in which the learning rate of --schedule wsd falls."""
    optimizer: str = option("adamw", kinds.TEXT, SCHEDULE)
    """Optimizer: adamw; muon, which makes updates of hidden matrices orthogonal and uses AdamW for the others;
    stableadamw, AdamW with smaller steps where gradients grow suddenly; or lamb, for large batches, with steps in
    proportion to the norm of each matrix.
    """
    muon_rate: float = option(4.0, kinds.ABOVE_0, SCHEDULE, of="optimizer")
    """Learning rate of Muon's matrices, as a multiple of --lr."""
    muon_momentum: float = option(0.95, kinds.BELOW_1, SCHEDULE, of="optimizer")
    """Decay rate of Muon's mean of gradients."""
    lr_scale: tuple[str, ...] = option((), SCALES, SCHEDULE)
    """PATTERN=FACTOR: scale the learning rate of parameters whose name contains a match of PATTERN, a regular
    expression, such as embeddings=0.1. 0 freezes them. May be repeated; the last pattern that matches counts.
    """
    weight_decay: float = option(0.01, kinds.FROM_0, SCHEDULE, phase=True)
    """Weight decay of matrices; norms and biases have none."""
    beta1: float = option(0.9, kinds.BELOW_1, SCHEDULE)
    """Decay rate of the optimizer's mean of gradients."""
    beta2: float = option(0.98, kinds.BELOW_1, SCHEDULE)
    """Decay rate of the optimizer's mean of squared gradients."""
    epsilon: float = option(1e-6, kinds.ABOVE_0, SCHEDULE)
    """Number that the optimizer adds to its denominator."""
    clip_norm: float = option(1.0, kinds.ABOVE_0, SCHEDULE)
    """Largest norm of the gradient; larger gradients are scaled down."""
    mlm_probability: float = option(0.15, kinds.SHARE, DATA, phase=True)
    """Share of a row's tokens to mask and predict."""
    mask_fraction: float = option(0.8, kinds.WEIGHT, DATA, phase=True)
    """Share of the chosen tokens that becomes [MASK]."""
    random_fraction: float = option(0.1, kinds.WEIGHT, DATA, phase=True)
    """Share of the chosen tokens that becomes a random token. The others stay as they are."""
    masking: MaskingPolicy = option("exact", choice(*get_args(MaskingPolicy)), DATA, phase=True)
    """How to choose tokens: exact, the same share of each row; bernoulli, each token independently; whole_word, all
    tokens of a word; span, one to ten neighbouring words; uniform, a random share for each row, for --objective
    diffusion.
    """
    shuffle: str = option("full", choice(*SHUFFLES), DATA)
    """Order of an epoch: full, or blocks of 64 MiB for data larger than memory."""
    seed: int = option(0, kinds.INTEGER, SCHEDULE)
    """Random seed for initial weights and dropout, and for the data without --data-seed."""
    data_seed: int | None = option(None, kinds.INTEGER, DATA)
    """Random seed for data order and masks. Default: the same as --seed."""
    precision: str = option("auto", choice(*PRECISIONS), HARDWARE)
    """Number format of matrix products. auto: bf16 on GPUs, fp16 on GPUs before Ampere, fp32 on CPUs."""
    attention: str = option("auto", choice(*ATTENTION), HARDWARE, resume="free")
    """Kernel of torch for attention in training. auto: torch chooses, without cudnn if it has known bugs. On
    GPUs, flash uses efficient for rows with padding, and flash and cudnn do not support fp32; CPUs have flash and math.
    """
    compile: str = option("auto", choice("auto", "on", "off"), HARDWARE, resume="free")
    """Use torch.compile. auto: on GPUs."""
    gradient_checkpointing: bool = option(False, kinds.FLAG, HARDWARE, resume="free")
    """Save memory: recompute activations in the backward pass."""
    save_every: int = option(1000, kinds.COUNT, CHECKPOINTS, resume="free")
    """Steps between checkpoints; the last step always has one."""
    save_at: tuple[str, ...] = option((), MILESTONES, CHECKPOINTS, resume="free")
    """Write checkpoints that --keep never removes, after these numbers of tokens or words: tokens=1B,2B or
    words=1M,10M. May be repeated.
    """
    keep: int = option(3, kinds.COUNT, CHECKPOINTS, resume="free")
    """Number of checkpoints to keep."""
    resume: str = option("auto", choice("auto", "no"), CHECKPOINTS, resume="free")
    """auto: continue from the newest complete checkpoint in --out. no: raise an error if there is one."""
    eval_masking: float = option(0.15, kinds.SHARE, CHECKPOINTS)
    """Share of the tokens of the validation split to mask and predict."""
    eval_precision: str = option("auto", choice(*PRECISIONS), CHECKPOINTS)
    """Number format of matrix products in evaluations. auto: that of training on GPUs, fp32 on CPUs."""
    eval_every: int = option(500, kinds.COUNT_OR_0, CHECKPOINTS, resume="free")
    """Steps between evaluations on up to 2,048 samples of the validation split. 0: only at the end."""
    log_every: int = option(10, kinds.COUNT, CHECKPOINTS, resume="free")
    """Steps between entries of log.jsonl."""
    log_to: tuple[str, ...] = option((), LOGS, CHECKPOINTS, resume="free")
    """Where to send the log besides log.jsonl: tensorboard, which writes to OUT/tensorboard, wandb or trackio
    (docs/records.md). May be repeated.
    """
    share: Fraction | None = option(None, PART, SCHEDULE, phase=True, in_files=True, resume="told")
    """Part of the run that a phase lasts, instead of its own steps, epochs or tokens."""
    phase: tuple[Mapping[str, Any], ...] = option((), TABLES, DATA, in_files=True, resume="told")
    """The phases of the run, each with a duration and what it sets (docs/phases.md)."""
    methods: tuple[Options, ...] = option((), OPTIONS, MODEL, in_files=True)
    """The options of methods: an object of each whose options are given."""

    rules = (
        Either(TOTALS),
        Either(DURATIONS, "a phase has one duration"),
        Either(("phase", "share"), "only a phase has a share"),
        Either(("weights", "mix_temperature")),
        Either(("warmup", "warmup_steps")),
        Either(("model", "init")),
        Needs(("decay_share",), lambda c: c.schedule == "wsd", "--schedule wsd"),
        Needs(("muon_rate", "muon_momentum"), lambda c: c.optimizer not in WITHOUT_MUON, "--optimizer muon"),
        Check("data", lambda c: c.data or c.phase, "the directory of a dataset"),
        Check(
            "weights",
            lambda c: not c.data or c.mix_temperature is not None or len(c.weights) == len(c.data) * (len(c.data) > 1),
            "a number for each of several --data, such as --data a/ --data b/ --weights 0.7,0.3, or --mix-temperature",
        ),
        Check("masking", _has_its_masks, "uniform, which --objective diffusion needs"),
        Check(
            "random_fraction", lambda c: c.mask_fraction + c.random_fraction < 1 + 1e-9, "1 - --mask-fraction or less"
        ),
    )

    def __post_init__(self) -> None:
        """Parse all values. Raises UsageError for an invalid one, and for options that exclude each other."""
        super().__post_init__()
        options, flat = all_options(), self.flat()
        values = {name: flat.get(name, option.default) for name, option in options.items()}
        given = {name for name, value in values.items() if not is_empty(value) and value != options[name].default}
        for rule in _rules():
            rule.require(SimpleNamespace(**values), given)

    @classmethod
    def make(cls, **given: Any) -> Config:
        """Return the options of a run and its methods, from values by name. Raises UsageError for an unknown name."""
        methods, given = [], known_options(given, "the run")
        for kind in options_of_methods().values():
            own = {name: given.pop(name) for name in kind.names() & given.keys()}
            if own and (options := kind(**own)) != kind():
                methods.append(options)
        return cls(**given, methods=tuple(methods))

    def flat(self) -> dict[str, Any]:
        """Return all options by name, including those of methods. `Config.make` turns them back into a Config."""
        values = {each.name: getattr(own, each.name) for own in (self, *self.methods) for each in fields(own)}
        return {name: value for name, value in values.items() if name != "methods"}

    def method_options(self, kind: type[T]) -> T:
        """Return the options of a method, or its defaults if none of them is set."""
        return next((options for options in self.methods if isinstance(options, kind)), kind())

    def differing(self) -> dict[str, Any]:
        """Return the options that differ from the default and affect the weights, in the form of the command line.

        Paths that exist are shortened to their last name.
        """
        options, differing = all_options(), {}
        for name, value in self.flat().items():
            is_shown = options[name].metadata["group"] != CHECKPOINTS and name not in ("data", "phase")
            if is_shown and value != options[name].default:
                is_path = isinstance(value, str) and (os.path.isabs(value) or os.path.exists(value))
                differing[named(name)] = (Path(value).name or value) if is_path else value
        return differing

    @property
    def rate_scales(self) -> list[tuple[re.Pattern[str], float]]:
        """--lr-scale as (pattern, factor), in order."""
        return [*map(rate_scale, self.lr_scale)]

    @property
    def milestones(self) -> dict[str, list[int]]:
        """--save-at: numbers of tokens and of words, ascending."""
        given = [*map(milestone, self.save_at)]
        return {unit: sorted(n for each, ns in given for n in ns if each == unit) for unit in ("tokens", "words")}


def _rules() -> Iterator[Rule]:
    """Return the rules for the options of a run and of every method."""
    classes: list[type[Options]] = [Config, *options_of_methods().values()]
    return (rule for each in classes for rule in each.rules)


def all_options() -> dict[str, Field[Any]]:
    """Return the options of a run and of every method by name. Raises UsageError if two options have the same name."""
    options: dict[str, Field[Any]] = {each.name: each for each in fields(Config) if each.name != "methods"}
    for name, kind in options_of_methods().items():
        if same := min(kind.names() & (options.keys() | RESERVED), default=""):
            sentence = f"the method {name} has the option {named(same)}, which already exists; rename it"
            raise UsageError(sentence, "bad-entry", option=same, given=name)
        options |= {each.name: each for each in fields(kind)}
    return options


def layered(before: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of two layers, such as a file and the command line. The later layer has priority."""
    left_out = replaced(before, layer)
    return {name: value for name, value in before.items() if name not in left_out} | dict(layer)


def replaced(before: Mapping[str, Any], layer: Mapping[str, Any]) -> set[str]:
    """Return the options of earlier layers that a later layer makes invalid.

    An option replaces all others of its `Either`. If its value changes, it also replaces the options that are `of` it.
    """
    options = all_options()
    values = {name: option.default for name, option in options.items()} | dict(before)
    changed = {name for name in values.keys() & layer.keys() if kinds.texts(values[name]) != kinds.texts(layer[name])}
    same = [rule.names for rule in _rules() if isinstance(rule, Either) and not rule.why and layer.keys() & rule.names]
    return {name for name, option in options.items() if option.metadata["of"] in changed}.union(layer, *same)


REMOVED: dict[str, Any] = {"branch": "", "average": 0.0, "side_channel": "", "budget": "", "time": ""}
"""Options of earlier versions, with their defaults. CHANGELOG.md says what replaces them."""


def known_options(given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return options without removed ones at their defaults (REMOVED). Raises UsageError for an unknown option."""
    kept = {name: value for name, value in given.items() if name not in REMOVED or value != REMOVED[name]}
    if unknown := sorted(kept.keys() - all_options().keys()):
        listed = ", ".join(" → ".join([name, *nearest(name, all_options())]) for name in unknown)
        sentence = f"{source} has unknown options: {listed}; correct them, or install what adds them (CHANGELOG.md)"
        raise UsageError(sentence, "unknown", option=unknown[0], given=kept[unknown[0]])
    return kept


def default_out(config: Config) -> str:
    """Return the directory of a run without --out: runs/<model>-<date>. All ranks must use the result from rank 0."""
    path = Path(config.init or config.model)
    name = path.parent.resolve().name if path.name == "config.json" else path.resolve().name
    return f"runs/{name}-{date.today():%Y-%m-%d}"


def pick(registry: dict[str, Any], name: str, flag: str, page: str = "docs/extending.md") -> Any:
    """Return registry[name]. Raises UsageError, which lists the known names, for an unknown name."""
    if name not in registry:
        known = ", ".join(registry)
        sentence = f"{flag} {name or '(empty)'} is unknown; give one of {known}, or run the file that adds it ({page})"
        raise UsageError(sentence, "unknown", option=flag[2:].replace("-", "_"), given=name)
    return registry[name]
