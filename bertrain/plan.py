"""What the options of a run amount to for a dataset and a number of ranks: steps, warm-up, micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import bertdata
from bertdata.errors import counted
from bertrain.config import MICRO_BATCH_SIZE, Config
from bertrain.optim import learning_rate

BUDGET_STEPS = 1_000_000  # the resolution of a schedule over time; a run with a budget takes as many steps as it can


def masking_of(config: Config, *, num_samples: int = 0, skipped: int = 0) -> bertdata.Masking:
    """The masking of a stream of a run that reads `num_samples` in all, and before this stream `skipped` of them.

    num_samples: 0 if it is not known; then the share of tokens does not change.
    """
    shares = config.mask_shares if num_samples else config.mask_shares[:1]
    by_position = {round(begin * num_samples) - skipped: share for begin, share in shares}
    first = [share for position, share in by_position.items() if position <= 0][-1]
    later = tuple((position, share) for position, share in by_position.items() if position > 0)
    return bertdata.Masking(probability=first, policy=config.masking, later=later)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The numbers of a run that follow from its Config.

    What changes along a run changes at a step of its schedule. These are the steps of the run, and with a budget
    millionths of its time.
    """

    steps: int  # of the schedule
    long_from: int  # the first step of the schedule with --long-length
    warmup_steps: int  # of the schedule
    batch_sizes: tuple[tuple[int, int], ...]  # (first step of the schedule, rows of a step from then on)
    depths: tuple[tuple[int, int], ...]  # (first step of the schedule, layers from then on); nothing without --grow
    micro_batch_size: int
    accumulation: int  # forward passes in a step, the same on every rank
    share: int  # rows of a step on the rank that has most
    length: int
    world_size: int
    warnings: tuple[str, ...]

    def scheduled(self, config: Config, step: int, progress: float) -> int:
        """The step of the schedule. progress: share of the run that is done."""
        return min(int(progress * self.steps) if config.budget else step, self.steps - 1)

    def rows(self, scheduled: int) -> int:
        """Rows of a step, over all ranks."""
        return next(rows for first, rows in reversed(self.batch_sizes) if first <= scheduled)

    def stage(self, scheduled: int) -> int:
        """Number of growths up to a step of the schedule; 0 without --grow."""
        return sum(first <= scheduled for first, _ in self.depths[1:])

    def samples(self, steps: int) -> int:
        """The rows of the first steps of a run without a budget."""
        ends = [*(first for first, _ in self.batch_sizes[1:]), max(self.steps, steps)]
        parts = zip(self.batch_sizes, ends, strict=True)
        return sum(rows * max(0, min(steps, end) - first) for (first, rows), end in parts)

    def masking(self, config: Config, *, is_long: bool = False) -> bertdata.Masking:
        """How the rows of --length or --long-length are masked; with a budget only those until the share changes."""
        if config.budget:
            return masking_of(config)
        skipped = self.samples(self.long_from) if is_long else 0
        return masking_of(config, num_samples=self.samples(self.steps), skipped=skipped)

    def micro_batches(self, length: int, rows: int) -> tuple[int, int]:
        """Rows and number of the forward passes of a step, for rows of `length`. Longer rows come fewer at a time."""
        share = -(-rows // self.world_size)
        size = max(1, min(share, self.micro_batch_size * min(self.length, length) // length))
        return size, -(-share // size)

    def learning_rate(self, config: Config, scheduled: int) -> float:
        return learning_rate(
            scheduled, peak=config.lr, steps=self.steps, warmup_steps=self.warmup_steps, schedule=config.schedule,
            decay_share=config.decay_share,
        )  # fmt: skip

    @classmethod
    def of(cls, config: Config, *, num_samples: int, world_size: int) -> Plan:
        """Whole steps, so that every rank takes the same number; the last may reach into the next epoch."""
        warnings = []
        sizes = config.batch_sizes
        begins = [begin for begin, _ in sizes] + [1.0]
        mean = sum(rows * (end - begin) for (begin, rows), end in zip(sizes, begins[1:], strict=True))
        steps = config.steps or math.ceil((config.epochs or 1.0) * num_samples / mean)
        if config.budget:
            steps = BUDGET_STEPS
        firsts = {round(begin * steps): rows for begin, rows in sizes}  # of two at one step the later
        largest = max(rows for _, rows in sizes)
        share = -(-largest // world_size)  # rows of the fullest rank
        micro = min(share, config.micro_batch_size or MICRO_BATCH_SIZE)
        warmup = round(config.warmup * steps) if config.warmup_steps is None else config.warmup_steps
        if warmup > steps:
            clamped = max(1, steps // 10)
            length = counted(steps, "step")
            warnings.append(f"--warmup-steps {warmup} is longer than the run of {length}; using {clamped}")
            warmup = clamped
        if largest > num_samples:
            warnings.append(
                f"a step of {counted(largest, 'row')} sees each of the {counted(num_samples, 'sample')} more than once"
            )
        if (least := min(rows for _, rows in sizes)) < world_size:
            warnings.append(f"{world_size} ranks share {counted(least, 'row')} a step, so some ranks are idle")
        return cls(
            steps=steps,
            long_from=steps if config.long_length is None else min(steps - 1, round(steps * (1 - config.long_share))),
            warmup_steps=warmup,
            batch_sizes=tuple(firsts.items()),
            depths=tuple((min(steps - 1, round(begin * steps)), layers) for begin, layers in config.depths),
            micro_batch_size=micro,
            accumulation=-(-share // micro),
            share=share,
            length=config.length,
            world_size=world_size,
            warnings=tuple(warnings),
        )
