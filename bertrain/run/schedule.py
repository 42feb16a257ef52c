"""What the options of a run amount to for its datasets and a number of ranks: phases, micro-batches, warnings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bertdata.errors import counted
from bertrain.options.config import MICRO_BATCH_SIZE, MICRO_BATCH_TOKENS, Config
from bertrain.run.phases import Phase, Sizes, resolve


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
