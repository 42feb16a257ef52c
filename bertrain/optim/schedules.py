"""The learning rate as a function of the step: linear warm-up to the peak, then the schedule in --schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

from bertdata.support import UsageError
from bertrain.options import exact


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The learning rate of `steps` steps, the first of which is `start`."""

    start: int = 0
    steps: int
    peak: float
    end: float = 0.0  # share of the peak at the end of a schedule
    schedule: str
    decay_share: float = 0.2  # share of the steps in which `wsd` decays
    warmup_steps: int  # this step has the peak
    asked: int = 0  # requested warm-up steps; `warmup_steps` is less if they do not fit
    warmup: str = ""  # the requested warm-up as text: "50 steps", or a share of the steps

    def rate(self, step: int) -> float:
        """Return the learning rate of a step. Raises UsageError if a schedule returns a negative or invalid number."""
        step -= self.start
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        options = {"decay_share": self.decay_share} if self.schedule == "wsd" else {}
        factor = SCHEDULES[self.schedule](step, self.steps, self.warmup_steps, **options)
        if not (isinstance(factor, Real) and 0 <= factor < math.inf):
            sentence = f"--schedule {self.schedule} returned {factor!r} at step {step}; return a number of 0 or more"
            raise UsageError(sentence, "bad-entry", option="schedule", given=self.schedule)
        return self.peak * (self.end + (1 - self.end) * factor)


def constant(step: int, steps: int, warmup_steps: int) -> float:
    """Return 1: the rate stays at the peak."""
    return 1.0


def linear(step: int, steps: int, warmup_steps: int) -> float:
    """Return a linear decay. At the last step it is 1 / (steps − warmup_steps)."""
    return (steps - step) / (steps - warmup_steps)


def cosine(step: int, steps: int, warmup_steps: int) -> float:
    """Return half a period of a cosine (Loshchilov and Hutter, 2017)."""
    return 0.5 * (1 - math.cos(math.pi * ((steps - step) / (steps - warmup_steps))))


def one_minus_sqrt(step: int, steps: int, warmup_steps: int) -> float:
    """Return a decay of 1 − sqrt, which is fast at first (Hägele et al., 2024)."""
    return 1 - math.sqrt((step - warmup_steps) / (steps - warmup_steps))


def wsd(step: int, steps: int, warmup_steps: int, decay_share: float = 0.2) -> float:
    """Return warmup-stable-decay: 1, then a decay of 1 − sqrt in the last part (Hägele et al., 2024)."""
    start = steps - min(steps - warmup_steps, max(1, math.ceil(exact(decay_share) * steps)))
    return one_minus_sqrt(max(step, start), steps, start)


SCHEDULES: dict[str, Callable[..., float]] = {each.__name__: each for each in (linear, cosine, constant, wsd)}
SCHEDULES["1-sqrt"] = one_minus_sqrt
"""Functions of (step, steps, warmup_steps) that return a factor on the peak for steps after the warm-up.

docs/extending.md shows how to add one.
"""
