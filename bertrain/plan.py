"""The plan of a run: its phases, and how its ranks divide a step.

docs/determinism.md, "Phases of a run", has the rules. docs/phases.md is for users.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import bertdata
from bertdata.support import UsageError, counted
from bertrain.config import DURATIONS, MICRO_BATCH_SIZE, MICRO_BATCH_TOKENS, TOTALS, Config, all_options, layered
from bertrain.optim import Curve
from bertrain.options import LONGEST, exact, flag

if TYPE_CHECKING:
    from bertrain.data import Stream

CURVE = ("lr", "lr_end", "schedule", "decay_share", "warmup", "warmup_steps")  # each starts a new learning rate curve
Sources = tuple[tuple[str, float], ...]  # (directory or URL of a dataset, its weight)


def ramp(rows: int | str) -> range:
    """Return the possible numbers of rows in the steps of a phase: multiples of their greatest common divisor.

    Each number is used for about the same number of steps. With 64 every step has 64 rows.
    """
    given = [int(number) for number in str(rows).split("..")]
    unit = math.gcd(*given) * (1 if given[0] <= given[-1] else -1)
    return range(given[0], given[-1] + unit, unit)


def mean_rows(options: Config) -> Fraction:
    """Return the mean number of rows in a step of a phase with these options."""
    rows = ramp(options.global_batch_size)
    return Fraction(rows[0] + rows[-1], 2)


@dataclass(frozen=True)
class Phase:
    """A phase: the steps from `start` to before `stop`, and their options."""

    number: int  # counted from 1
    start: int
    stop: int
    sources: Sources
    options: Config  # options of the run, overridden by those of the phase
    masking: bertdata.Masking
    curve: Curve

    @property
    def steps(self) -> int:
        return self.stop - self.start

    @property
    def rows(self) -> range:
        return ramp(self.options.global_batch_size)

    def rows_at(self, step: int) -> int:
        """Return the number of rows in a step, over all ranks."""
        return self.rows[(step - self.start) * len(self.rows) // self.steps]

    def samples(self) -> int:
        """Return the number of rows in all steps of the phase: the sum of `rows_at` in closed form."""
        rows, steps = self.rows, self.steps
        return rows[0] * steps + rows.step * (((len(rows) - 1) * (steps - 1) + math.gcd(len(rows), steps) - 1) // 2)

    def saved(self) -> dict[str, Any]:
        """Return the phase as JSON values for checkpoints and run.json (docs/checkpoint.md)."""
        names = ("length", "weight_decay", "trains", "rope_base", "rope_base_local")
        saved: dict[str, Any] = {name: getattr(self, name) for name in ("number", "start", "stop", "sources")}
        saved |= {"rows": (self.rows[0], self.rows[-1])} | {name: getattr(self.options, name) for name in names}
        saved |= {"methods": phase_options(self.options), "masking": asdict(self.masking), "rate": asdict(self.curve)}
        return dict(json.loads(json.dumps(saved)))


def phase_options(options: Config) -> dict[str, Any]:
    """Return the options that a phase may set, by name, including those of the run's methods."""
    return {name: getattr(each, name) for each in options.methods for name in sorted(each.names(of_phases=True))}


# ------------------------------------------------------------------------------------------------ phases from options


def options_of(config: Config) -> list[Config]:
    """Return the options of each phase: those of the run, overridden by those of the phase.

    A run without [[phase]] has one phase, with the options of the run. Raises UsageError that names the phase.
    """
    above = {name: value for name, value in config.flat().items() if name not in ("phase", *DURATIONS)}
    allowed = sorted(name for name, each in all_options().items() if each.metadata["phase"])
    phases, rest = [] if config.phase else [config], Fraction(1)
    for number, table in enumerate(config.phase, 1):
        if number == len(config.phase) and rest > 0 and not table.keys() & set(DURATIONS):
            table = {**table, "share": rest}
        try:
            if wrong := min(table.keys() - set(allowed), default=""):
                sentence = (
                    f"{wrong} is not an option that a phase may set; remove it, or give one of {', '.join(allowed)}"
                )
                raise UsageError(sentence, "unknown", option=wrong, given=table[wrong])
            phases.append(Config.make(**layered(above, table)))
        except UsageError as error:
            sentence = f"[[phase]] {number}: {error}"
            raise UsageError(sentence, error.kind, option=error.option, given=error.given) from None
        rest -= phases[-1].share or 0
        above = layered(above, {"warmup": 0.0})  # a warm-up outside [[phase]] is for the first curve only
    units = {next((name for name in DURATIONS if getattr(phase, name)), "no duration") for phase in phases}
    total = [f"{flag(name)} {getattr(config, name)}" for name in TOTALS if getattr(config, name)]
    shares = sum(phase.share or 0 for phase in phases)
    if shares != 1 if units == {"share"} else config.phase and (total or units & {"share", "no duration"}):
        sentence = (
            f"the phases have {' and '.join([*sorted(units), *total])}, and their shares add up to {float(shares):g}; "
            "give each phase steps, tokens or epochs, or shares of --steps, --tokens or --epochs that add up to 1"
        )
        raise UsageError(sentence, "conflict", option="phase")
    for name in ("rope_base", "rope_base_local"):
        if len({getattr(phase, name) is None for phase in phases}) > 1:
            sentence = f"some phases set {name} and others do not; set it in each, or above them"
            raise UsageError(sentence, "conflict", option=name)
    return phases


def paths(config: Config) -> tuple[str, ...]:
    """Return the datasets of a run: directories or URLs."""
    return tuple(dict.fromkeys(path for options in options_of(config) for path in options.data))


def longest(config: Config) -> int:
    """Return the length of the longest row of a run, in tokens."""
    return max(options.length for options in options_of(config))


def resolve(config: Config, sizes: Stream) -> tuple[Phase, ...]:
    """Return the phases of a run; without [[phase]] it has one. Raises UsageError for impossible phases."""
    options = options_of(config)
    borders = _borders(config, options, [sizes.samples(each.data, each.length) for each in options])
    begins = [number for number, table in enumerate(config.phase) if number and table.keys() & set(CURVE)]
    curves = [
        _curve(options[begin], borders[begin], borders[end])
        for begin, end in pairwise([0, *begins, len(options)])
        for _ in range(begin, end)
    ]
    phases = []
    for number, (each, curve, (start, stop)) in enumerate(zip(options, curves, pairwise(borders), strict=True), 1):
        if stop <= start:
            steps = counted(borders[-1], "step")
            sentence = f"[[phase]] {number} of {len(options)} has no step; make it, or the run of {steps}, longer"
            raise UsageError(sentence, "out-of-range", option="phase", given=number)
        phases.append(Phase(number, start, stop, _sources(each, sizes), each, masking_of(each), curve))
    if sum(phase.samples() for phase in phases) > LONGEST:
        raise UsageError("the run has more than 2**62 rows, longer than any run; make it shorter", "out-of-range")
    return tuple(phases)


def masking_of(options: Config) -> bertdata.Masking:
    """Return the masking of a phase's training rows."""
    fractions = {name: getattr(options, name) for name in ("mask_fraction", "random_fraction")}
    return bertdata.Masking(probability=options.mlm_probability, policy=options.masking, **fractions)


def _sources(options: Config, sizes: Stream) -> Sources:
    """Return the datasets of a phase with their weights, which are set by the user or computed from their sizes."""
    if options.mix_temperature is None or len(options.data) == 1:
        return tuple(zip(options.data, map(float, options.weights or (1,)), strict=True))
    tokens = [sizes.tokens(path) for path in options.data]
    with localcontext(Context(prec=28)):
        shares = [(Decimal(number) / max(tokens)) ** Decimal(str(options.mix_temperature)) for number in tokens]
        weights = [max(1, int((share * 10**6).to_integral_value())) for share in shares]
    return tuple(zip(options.data, map(float, weights), strict=True))


def _borders(config: Config, phases: Sequence[Config], samples: Sequence[int]) -> list[int]:
    """Return 0 and the step at which each phase ends. samples: number of samples in an epoch of each phase."""
    means = [*map(mean_rows, phases)]
    shares = [options.share or Fraction(0) for options in phases]
    if shares[0] and not config.tokens:
        rows = sum((share * mean for share, mean in zip(shares, means, strict=True)), Fraction(0))
        steps = config.steps or math.ceil(exact(config.epochs or 1) * samples[0] / rows)
        return [round(steps * done) for done in accumulate(shares, initial=Fraction(0))]

    def steps_of(options: Config, mean: Fraction, epoch: int) -> int:
        if tokens := options.tokens or (options.share or 0) * (config.tokens or 0):
            return math.ceil(tokens / (options.length * mean))
        return options.steps or math.ceil(exact(options.epochs or 1) * epoch / mean)

    return list(accumulate(map(steps_of, phases, means, samples), initial=0))


def _curve(options: Config, start: int, stop: int) -> Curve:
    steps, asked, given = stop - start, options.warmup_steps, f"{options.warmup_steps} steps"
    if asked is None:
        asked, given = round(exact(options.warmup) * steps), f"{options.warmup:g}"
    return Curve(
        start=start,
        steps=steps,
        peak=options.lr,
        end=options.lr_end,
        schedule=options.schedule,
        decay_share=options.decay_share,
        warmup_steps=asked if asked <= steps else max(1, steps // 10),
        asked=asked,
        warmup=given,
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The phases of a run, and how its ranks divide a step."""

    phases: tuple[Phase, ...]
    steps: int
    micro_batch_size: int  # limit, for the row length of the first phase
    world_size: int
    warnings: tuple[str, ...]

    @classmethod
    def make(cls, config: Config, sizes: Stream, *, world_size: int, on_gpu: bool = False) -> Plan:
        """Return the plan of a run. All steps are complete; the last step may read rows of the next epoch."""
        phases = resolve(config, sizes)
        share = -(-max(max(phase.rows) for phase in phases) // world_size)  # largest number of rows of a rank
        most = max(1, MICRO_BATCH_TOKENS // phases[0].options.length) if on_gpu else MICRO_BATCH_SIZE
        return cls(
            phases=phases,
            steps=phases[-1].stop,
            micro_batch_size=min(share, config.micro_batch_size or most),
            world_size=world_size,
            warnings=tuple(dict.fromkeys(_warnings(phases, sizes, world_size))),
        )

    def phase_at(self, step: int) -> Phase:
        return next(phase for phase in reversed(self.phases) if phase.start <= step)

    def samples(self) -> int:
        """Return the number of rows in all steps."""
        return sum(phase.samples() for phase in self.phases)

    def micro_batches(self, length: int, rows: int) -> tuple[int, int]:
        """Return the rows and the number of forward passes for the rows of a step. Longer rows have smaller passes."""
        share, first = -(-rows // self.world_size), self.phases[0].options.length
        size = max(1, min(share, self.micro_batch_size * min(first, length) // length))
        return size, -(-share // size)

    def first_micro_batches(self) -> tuple[int, int]:
        """Return the same for the largest step of the first phase."""
        return self.micro_batches(self.phases[0].options.length, max(self.phases[0].rows))

    def describe(self, names: Mapping[str, str] | None = None) -> list[str]:
        """Return a line for each phase; empty for a run with one phase. names: as in `line`."""
        return [self.line(phase, names) for phase in self.phases] if len(self.phases) > 1 else []

    def describe_change(self, before: Sequence[Mapping[str, Any]], step: int) -> list[str]:
        """Return a line about a changed learning rate in a run that resumes after `step`; empty if it is unchanged.

        before: the phases in the checkpoint; version 0.1.0 may have saved none.
        """
        if not before or [phase["rate"] for phase in before] == [asdict(phase.curve) for phase in self.phases]:
            return []
        was, steps = next((phase for phase in before if phase["stop"] > step), before[-1]), before[-1]["stop"]
        old = Curve(**was["rate"]).rate(min(step, steps - 1))
        new = self.phase_at(step).curve.rate(min(step, self.steps - 1))
        change = f"{steps:,} → {self.steps:,} steps, learning rate of step {step + 1:,} {old:.2e} → {new:.2e}"
        return [f"the options have changed: {change}"]

    def line(self, phase: Phase, names: Mapping[str, str] | None = None) -> str:
        """Return a description of a phase for users. names: path → name of each dataset; None: its path."""
        options, curve, last = phase.options, phase.curve, phase.stop - 1
        sources = [(names[path] if names else path, weight) for path, weight in phase.sources]
        data = ", ".join(f"{name} {weight:g}" if len(sources) > 1 else name for name, weight in sources)
        highest = min(max(curve.start + curve.warmup_steps, phase.start), last)
        first, peak, end = (curve.rate(step) for step in (phase.start, highest, last))
        masked = "any share" if options.masking == "uniform" else f"{options.mlm_probability:.0%}"
        bases = [f"{base:g}" for base in (options.rope_base, options.rope_base_local) if base]
        more = phase_options(options) | {"trains": options.trains or None, "rotary base": " and ".join(bases) or None}
        return (
            f"phase {phase.number} of {len(self.phases)}, steps {phase.start:,} to {phase.stop:,}: {data}, "
            f"{options.global_batch_size} rows of {options.length} tokens, {masked} masked, rate {first:.2e} to "
            f"{end:.2e}, peak {peak:.2e} ({curve.schedule})"
        ) + "".join(f", {name} {value}" for name, value in more.items() if value is not None)


def _warnings(phases: Sequence[Phase], sizes: Stream, world_size: int) -> Iterator[str]:
    for phase in phases:
        curve, fewest, most = phase.curve, min(phase.rows), max(phase.rows)
        samples = sizes.samples(phase.options.data, phase.options.length)
        if curve.warmup_steps != curve.asked:
            steps = counted(curve.steps, "step")
            yield f"--warmup-steps {curve.asked} is longer than a schedule of {steps}; using {curve.warmup_steps}"
        if most > samples:
            yield f"a step of {counted(most, 'row')} sees some of the {counted(samples, 'sample')} more than once"
        if fewest < world_size:
            yield f"{world_size} ranks share {counted(fewest, 'row')} a step, so some ranks are idle"
