"""A run is a list of phases, each of which begins at a step. `resolve` makes the list from the options of a run.

The plan also says how the ranks share a step. docs/determinism.md has the rules under "Phases of a run";
docs/phases.md is for users.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from decimal import Context, Decimal
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import bertdata
from bertdata.support import UsageError, counted
from bertrain.config import (
    MICRO_BATCH_SIZE,
    MICRO_BATCH_TOKENS,
    TOTALS,
    Config,
    all_options,
    layered,
    without_removed,
)
from bertrain.methods import methods_of
from bertrain.optim import learning_rate
from bertrain.options import LONGEST, amount, exact, flag

DURATIONS = ("steps", "tokens", "epochs", "share")  # of a phase, which has one of them
_WARMUP = {"warmup", "warmup_steps"}
_RATE = {"lr", "lr_end", "schedule", "decay_share"} | _WARMUP  # options, one of which begins another curve
Sources = tuple[tuple[str, float], ...]  # (directory or URL of a dataset, its weight)


class Ramp(NamedTuple):
    """The rows of a step along a phase: from `first` to `last`, in multiples of their greatest common divisor.

    Each of these numbers of rows has as many steps as the others, but for rounding.
    """

    first: int
    last: int

    @property
    def mean(self) -> Fraction:
        return Fraction(self.first + self.last, 2)

    def at(self, step: int, steps: int) -> int:
        """Return the rows of step number `step` of `steps`."""
        unit, sizes = self._parts()
        return self.first + unit * (step * sizes // steps)

    def total(self, steps: int) -> int:
        """Return the rows of all steps. The sum of (step · sizes) // steps over `steps` steps has a closed form."""
        unit, sizes = self._parts()
        return self.first * steps + unit * (((sizes - 1) * (steps - 1) + math.gcd(sizes, steps) - 1) // 2)

    def _parts(self) -> tuple[int, int]:
        """Return the difference of consecutive numbers of rows, below 0 for a ramp that falls, and how many numbers."""
        unit = math.gcd(self.first, self.last)
        sizes = abs(self.last - self.first) // unit + 1
        return unit if self.last > self.first else -unit, sizes

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}..{self.last}"


def ramp(rows: int | str) -> Ramp:
    """Return "16..64" as a ramp, and 64 as the same rows in every step."""
    first, _, last = str(rows).partition("..")
    return Ramp(int(first), int(last or first))


class Part(NamedTuple):
    """A [[phase]] as it is given; the run itself where there is none."""

    options: Config  # those of the run, with those of the phase in their place
    unit: str  # of its duration: one of DURATIONS
    amount: Fraction
    sets: frozenset[str]  # the options that the phase itself gives


def parts_of(config: Config) -> tuple[Part, ...]:
    """Return the phases as they are given; one, of the whole run, without any. Raises UsageError for a faulty one."""
    if not config.phase:
        return (Part(config, "share", Fraction(1), frozenset()),)
    parts, rest = list[Part](), Fraction(1)
    for number, table in enumerate(config.phase, 1):
        with _of_phase(number):
            parts.append(_part(config, table, rest))
            rest -= parts[-1].amount
    units = {part.unit for part in parts}
    for number, table in enumerate(config.phase, 1):
        if not table.keys() & set(DURATIONS) and (units != {"share"} or number < len(parts)):
            sentence = f"[[phase]] {number} has no duration; give it one of {', '.join(DURATIONS)}"
            raise UsageError(sentence, "missing", option="phase", given=number)
    given = [f"{flag(name)} {getattr(config, name)}" for name in TOTALS if getattr(config, name)]
    if units != {"share"} and (given or "share" in units and len(units) > 1):
        sentence = (
            f"the phases have {' and '.join(sorted(units))}{f', and {given[0]} was given' if given else ''}; give "
            "each phase steps, tokens or epochs, or each a share of --steps, --tokens or --epochs"
        )
        raise UsageError(sentence, "conflict", option="phase")
    if units == {"share"} and (total := sum(part.amount for part in parts)) != 1:
        sentence = f"the shares of the phases add up to {float(total):g}; give shares whose sum is 1"
        raise UsageError(sentence, "out-of-range", option="share", given=float(total))
    for name in ("rope_base", "rope_base_local"):
        if len({getattr(part.options, name) is None for part in parts}) > 1:
            sentence = f"some phases set {name} and others do not; set it in each, or above them"
            raise UsageError(sentence, "conflict", option=name)
    return tuple(parts)


def _part(config: Config, table: Mapping[str, Any], rest: Fraction) -> Part:
    """Return a phase. rest: the share of a run that is left to it, if it has no duration."""
    table = without_removed(table, "the phase")
    allowed = {name for name, each in all_options().items() if each.metadata["phase"]}
    if wrong := sorted(table.keys() - allowed - set(DURATIONS)):
        is_known = wrong[0] in all_options()
        reason = "is an option of the whole run, so set it above the phases" if is_known else "is unknown"
        sentence = f"{wrong[0]} {reason}; a phase may set {', '.join(sorted(allowed))}"
        raise UsageError(sentence, "unknown", option=wrong[0], given=table[wrong[0]])
    given = [name for name in DURATIONS if name in table]
    if len(given) > 1:
        sentence = f"{' and '.join(given)} were given; a phase has one duration, so give one of them"
        raise UsageError(sentence, "conflict", option=given[1])
    unit = given[0] if given else "share"
    sets, above = {name: value for name, value in table.items() if name not in DURATIONS}, config.flat()
    kept = {name: value for name, value in above.items() if name not in ("phase", *TOTALS)}
    options = Config.of(**layered(kept, sets))
    return Part(options, unit, _duration(unit, table[unit]) if given else rest, frozenset(sets))


@contextlib.contextmanager
def _of_phase(number: int) -> Iterator[None]:
    """Name the phase in an error that is raised inside."""
    try:
        yield
    except UsageError as error:
        sentence = f"[[phase]] {number}: {error}"
        raise UsageError(sentence, error.kind, option=error.option, given=error.given) from None


def _duration(unit: str, given: Any) -> Fraction:
    """Return a duration as a number: of steps, tokens or epochs, or a share. Raises UsageError for anything else."""
    try:
        text = str(amount(given) if unit == "tokens" else given)
        number = Fraction(0 if re.search(r"e[+-]?\d{4,}$", text.lower()) else text)  # which had as many digits
        if isinstance(given, bool) or not 0 < number <= LONGEST or (unit == "steps" and number.denominator > 1):
            raise ValueError
    except (ValueError, TypeError, ZeroDivisionError):
        examples = {"tokens": "40M or 1.7T", "steps": "1000"}
        sentence = f"{unit} is {given!r}, which is no duration; write it like {examples.get(unit, '0.5')}"
        raise UsageError(sentence, "malformed", option=unit, given=given) from None
    return number


def options_of(config: Config) -> list[Config]:
    """Return the options of each phase: those of the run, with those of the phase in their place."""
    return [part.options for part in parts_of(config)]


def paths(config: Config) -> tuple[str, ...]:
    """Return the datasets of a run: directories or URLs."""
    return tuple(dict.fromkeys(path for options in options_of(config) for path in options.data))


def longest(config: Config) -> int:
    """Return the length of the longest row of a run, in tokens."""
    return max(options.length for options in options_of(config))


def check(config: Config) -> None:
    """Raises UsageError for phases that do not fit together, and options that do not go with those of methods."""
    options_of(config)
    for method in methods_of(config):
        method.check(config)


class Sizes(Protocol):
    """How large the datasets of a run are."""

    def samples(self, paths: Sequence[str], length: int) -> int:
        """The samples of an epoch of these datasets, in rows of `length`."""

    def tokens(self, path: str) -> int:
        """The tokens of the split that is trained on."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The learning rate of the steps from `start` on, of which there are `steps`."""

    start: int
    steps: int
    peak: float
    end: float  # a share of the peak
    schedule: str
    decay_share: float
    warmup_steps: int
    asked: int  # the warm-up that was asked for, in steps: `resolve` replaces one that is too long
    warmup: str  # the same as it was given: "50 steps", or a share of the steps

    def at(self, step: int) -> float:
        return learning_rate(
            step - self.start,
            peak=self.peak,
            end=self.end,
            steps=self.steps,
            warmup_steps=self.warmup_steps,
            schedule=self.schedule,
            decay_share=self.decay_share,
        )


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What holds in the steps from `start` to before `stop`. The number counts from 1."""

    number: int
    start: int
    stop: int
    sources: Sources
    length: int
    rows: Ramp
    masking: bertdata.Masking
    rate: Curve
    weight_decay: float
    methods: Mapping[str, Any] = field(hash=False)  # options that a phase may set, of the methods of the run
    trains: str  # a regular expression; empty: all parameters train
    rope_base: float | None  # None: that of --model
    rope_base_local: float | None

    @property
    def steps(self) -> int:
        return self.stop - self.start

    def rows_at(self, step: int) -> int:
        """Rows of a step, over all ranks."""
        return self.rows.at(step - self.start, self.steps)

    def samples(self) -> int:
        """The rows of all its steps."""
        return self.rows.total(self.steps)


def resolve(config: Config, sizes: Sizes) -> tuple[Phase, ...]:
    """The phases of a run; one where the options have no [[phase]].

    Raises UsageError, with the number of the phase, for what cannot be.
    """
    check(config)
    parts = parts_of(config)
    sources = [_sources(part.options, sizes) for part in parts]
    borders = [0, *_borders(config, parts, sources, sizes)]
    for number, (start, stop) in enumerate(pairwise(borders), 1):
        if stop <= start:
            sentence = (
                f"[[phase]] {number} of {len(parts)} has no step, as the run has {counted(borders[-1], 'step')}; make "
                "the run or this phase longer"
            )
            raise UsageError(sentence, "out-of-range", option="phase", given=number)
    curves = _curves(parts, borders)
    phases = tuple(
        Phase(
            number=number,
            start=borders[number - 1],
            stop=borders[number],
            sources=sources[number - 1],
            length=part.options.length,
            rows=ramp(part.options.global_batch_size),
            masking=masking_of(part.options),
            rate=curves[number - 1],
            weight_decay=part.options.weight_decay,
            methods=_of_methods(config, part.options),
            trains=part.options.trains,
            rope_base=part.options.rope_base,
            rope_base_local=part.options.rope_base_local,
        )
        for number, part in enumerate(parts, 1)
    )
    if sum(phase.samples() for phase in phases) > LONGEST:
        raise UsageError("the run has more than 2**62 rows, longer than any run; make it shorter", "out-of-range")
    return phases


def masking_of(options: Config) -> bertdata.Masking:
    """The masking of the rows that a phase trains on."""
    return bertdata.Masking(
        probability=options.mlm_probability,
        policy=options.masking,
        mask_fraction=options.mask_fraction,
        random_fraction=options.random_fraction,
    )


def _of_methods(config: Config, part: Config) -> dict[str, Any]:
    """The options that a phase may set, of the methods of a run, by name. part: the options of the phase."""
    given, found = {type(options): options for options in part.methods}, dict[str, Any]()
    for method in methods_of(config):
        options = given.get(method.options_type) or method.options_type()
        found |= {name: getattr(options, name) for name in sorted(options.names(of_phases=True))}
    return found


def _sources(options: Config, sizes: Sizes) -> Sources:
    """The datasets of a phase, with the weights that are given or follow from their sizes."""
    if options.mix_temperature is None or len(options.data) == 1:
        return tuple(zip(options.data, map(float, options.weights or (1,)), strict=True))
    tokens = [sizes.tokens(path) for path in options.data]
    digits, power = Context(prec=28), Decimal(str(options.mix_temperature))
    shares = [digits.power(digits.divide(Decimal(number), Decimal(max(tokens))), power) for number in tokens]
    weights = [
        max(1, int(digits.multiply(share, Decimal(10**6)).to_integral_value(context=digits))) for share in shares
    ]
    return tuple(zip(options.data, map(float, weights), strict=True))


def _borders(config: Config, parts: Sequence[Part], sources: Sequence[Sources], sizes: Sizes) -> list[int]:
    """The step at which each phase ends."""
    amounts = [part.amount for part in parts]

    def epoch(number: int) -> int:
        return sizes.samples([path for path, _ in sources[number]], parts[number].options.length)

    def steps_of(number: int) -> int:
        options, amount = parts[number].options, amounts[number]
        if parts[number].unit == "steps":
            return int(amount)
        if parts[number].unit == "epochs":
            return math.ceil(amount * epoch(number) / ramp(options.global_batch_size).mean)
        tokens = amount * (config.tokens or 0) if parts[number].unit == "share" else amount
        return math.ceil(tokens / (options.length * ramp(options.global_batch_size).mean))

    if parts[0].unit == "share" and not config.tokens:
        mean = sum(part.amount * ramp(part.options.global_batch_size).mean for part in parts)
        steps = config.steps or math.ceil(exact(config.epochs or 1) * epoch(0) / mean)
        return [round(steps * done) for done in accumulate(amounts)]
    return list(accumulate(map(steps_of, range(len(parts)))))


def _curves(parts: Sequence[Part], borders: Sequence[int]) -> list[Curve]:
    """The curve of each phase; phases that set nothing of it share that of the phase before them."""
    begins = [number for number, part in enumerate(parts) if number == 0 or part.sets & _RATE]
    curves: list[Curve] = []
    for begin, end in pairwise([*begins, len(parts)]):
        options, start, steps = parts[begin].options, borders[begin], borders[end] - borders[begin]
        warmup, given = options.warmup_steps, f"{options.warmup_steps} steps"
        if warmup is None:
            warmup, given = round(exact(options.warmup) * steps), f"{options.warmup:g}"
        if begin and not parts[begin].sets & _WARMUP:
            warmup, given = 0, "0"
        curve = Curve(
            start=start,
            steps=steps,
            peak=options.lr,
            end=options.lr_end,
            schedule=options.schedule,
            decay_share=options.decay_share,
            asked=warmup,
            warmup=given,
            warmup_steps=warmup if warmup <= steps else max(1, steps // 10),
        )
        curves += [curve] * (end - begin)
    return curves


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The phases of a run, and how its ranks share a step."""

    phases: tuple[Phase, ...]
    steps: int
    micro_batch_size: int  # at most, for rows as long as those of the first phase
    world_size: int
    warnings: tuple[str, ...]

    def phase_at(self, step: int) -> Phase:
        return next(phase for phase in reversed(self.phases) if phase.start <= step)

    def samples(self) -> int:
        """The rows of all steps."""
        return sum(phase.samples() for phase in self.phases)

    def micro_batches(self, length: int, rows: int) -> tuple[int, int]:
        """Rows and number of the forward passes of a step, for rows of `length`. Longer rows come fewer at a time."""
        share, first = -(-rows // self.world_size), self.phases[0].length
        size = max(1, min(share, self.micro_batch_size * min(first, length) // length))
        return size, -(-share // size)

    def first_micro_batches(self) -> tuple[int, int]:
        """The same for a step of the first phase, where it has most rows."""
        return self.micro_batches(self.phases[0].length, max(self.phases[0].rows))

    def describe(self, names: Mapping[str, str] | None = None) -> list[str]:
        """A line for each phase; none for a run of one. names: as `line` has them."""
        return [self.line(phase, names) for phase in self.phases] if len(self.phases) > 1 else []

    def describe_change(self, before: Sequence[Mapping[str, Any]], step: int) -> list[str]:
        """Return a line on what becomes of the rate in a run that resumes after `step`; none if nothing has changed.

        before: the phases of the checkpoint; one of version 0.1.0 may have none.
        """
        if not before or [phase["rate"] for phase in before] == [asdict(phase.rate) for phase in self.phases]:
            return []
        was, steps = next((phase for phase in before if phase["stop"] > step), before[-1]), before[-1]["stop"]
        last = Curve(**was["rate"]).at(min(step, steps - 1))
        rate = self.phase_at(step).rate.at(min(step, self.steps - 1))
        end, new_end = Curve(**before[-1]["rate"]).at(steps - 1), self.phases[-1].rate.at(self.steps - 1)
        return [
            f"the options have changed: {steps:,} → {self.steps:,} steps, learning rate of step {step + 1:,} "
            f"{last:.2e} → {rate:.2e}, of the last step {end:.2e} → {new_end:.2e}"
        ]

    def line(self, phase: Phase, names: Mapping[str, str] | None = None) -> str:
        """What holds in a phase, for people. names: of the datasets by their paths; the paths themselves without."""
        sources = [(names[path] if names else path, weight) for path, weight in phase.sources]
        data = ", ".join(f"{name} {weight:g}" if len(sources) > 1 else name for name, weight in sources)
        last = phase.stop - 1
        highest = min(max(phase.rate.start + phase.rate.warmup_steps, phase.start), last)
        first, peak, end = (phase.rate.at(step) for step in (phase.start, highest, last))
        masked = "any share" if phase.masking.policy == "uniform" else f"{phase.masking.probability:.0%}"
        bases = [base for base in (phase.rope_base, phase.rope_base_local) if base]
        more = "".join(f", {name} {'all' if value is None else value}" for name, value in phase.methods.items())
        more += f", trains {phase.trains}" if phase.trains else ""
        more += f", rotary base {' and '.join(f'{base:g}' for base in bases)}" if bases else ""
        return (
            f"phase {phase.number} of {len(self.phases)}, steps {phase.start:,} to {phase.stop:,}: {data}, "
            f"{phase.rows} rows of {phase.length} tokens, {masked} masked, rate {first:.2e} to {end:.2e}, "
            f"peak {peak:.2e} ({phase.rate.schedule}){more}"
        )

    @classmethod
    def of(cls, config: Config, sizes: Sizes, *, world_size: int, on_gpu: bool = False) -> Plan:
        """Whole steps, so that every rank takes the same number; the last may reach into the next epoch."""
        phases = resolve(config, sizes)
        share = -(-max(max(phase.rows) for phase in phases) // world_size)  # rows of the fullest rank, at most
        most = max(1, MICRO_BATCH_TOKENS // phases[0].length) if on_gpu else MICRO_BATCH_SIZE
        return cls(
            phases=phases,
            steps=phases[-1].stop,
            micro_batch_size=min(share, config.micro_batch_size or most),
            world_size=world_size,
            warnings=tuple(dict.fromkeys(_warnings(phases, sizes, world_size))),
        )


def _warnings(phases: tuple[Phase, ...], sizes: Sizes, world_size: int) -> Iterator[str]:
    for curve in dict.fromkeys(phase.rate for phase in phases):
        if curve.warmup_steps != curve.asked:
            steps = counted(curve.steps, "step")
            yield f"--warmup-steps {curve.asked} is longer than a schedule of {steps}; using {curve.warmup_steps}"
    for phase in phases:
        largest, num_samples = max(phase.rows), sizes.samples([path for path, _ in phase.sources], phase.length)
        if largest > num_samples:
            rows, samples = counted(largest, "row"), counted(num_samples, "sample")
            yield f"a step of {rows} sees some of the {samples} more than once"
        if (least := min(phase.rows)) < world_size:
            yield f"{world_size} ranks share {counted(least, 'row')} a step, so some ranks are idle"
