"""What the options of a run amount to for a dataset and a number of ranks: steps, warm-up, micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bertrain.config import MICRO_BATCH_SIZE, Config
from bertrain.optim import learning_rate

BUDGET_STEPS = 1_000_000  # the resolution of a schedule over time; a run with a budget takes as many steps as it can


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The numbers of a run that follow from its Config."""

    steps: int  # of the schedule; with a budget parts of the time, else optimizer steps
    long_from: int  # the first step with --long-length
    warmup_steps: int  # in units of `steps`
    micro_batch_size: int
    accumulation: int  # forward passes in a step, the same on every rank
    share: int  # rows of a step on the rank that has most
    length: int
    warnings: tuple[str, ...]

    def micro_batches(self, length: int) -> tuple[int, int]:
        """Rows and number of the forward passes of a step, for rows of `length`. Longer rows come fewer at a time."""
        size = max(1, self.micro_batch_size * min(self.length, length) // length)
        return size, -(-self.share // size)

    def learning_rate(self, config: Config, step: int, progress: float) -> float:
        """With --budget the schedule advances with elapsed time, otherwise with steps. progress: share of the run."""
        scheduled = min(int(progress * self.steps) if config.budget else step, self.steps - 1)
        return learning_rate(
            scheduled, peak=config.lr, steps=self.steps, warmup_steps=self.warmup_steps, schedule=config.schedule
        )

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
