"""The learning rate as a function of the step: linear warm-up to the peak, then the schedule that --schedule names."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

from bertdata.support import UsageError
from bertrain.options import exact


def learning_rate(
    step: int, *, peak: float, steps: int, warmup_steps: int, schedule: str, decay_share: float = 0.2, end: float = 0.0
) -> float:
    """Return the learning rate of a step, 0 ≤ step < steps. Step `warmup_steps` has `peak`.

    end: the share of the peak at which a schedule ends. decay_share: the share of the steps in which `wsd` decays.
    Raises UsageError if a schedule does not return a number of 0 or more.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    options = {"decay_share": decay_share} if schedule == "wsd" else {}
    factor = SCHEDULES[schedule](step, steps, warmup_steps, **options)
    if not (isinstance(factor, Real) and 0 <= factor < math.inf):
        sentence = f"--schedule {schedule} returned {factor!r} at step {step} of {steps}; return a number of 0 or more"
        raise UsageError(sentence, "bad-entry", option="schedule", given=schedule)
    return peak * (end + (1 - end) * factor)


def constant(step: int, steps: int, warmup_steps: int) -> float:
    """Stay at the peak."""
    return 1.0


def linear(step: int, steps: int, warmup_steps: int) -> float:
    """Decay linearly. The last step has 1 / (steps − warmup_steps) of the peak."""
    return (steps - step) / (steps - warmup_steps)


def cosine(step: int, steps: int, warmup_steps: int) -> float:
    """Follow half a period of a cosine (Loshchilov and Hutter, 2017)."""
    return 0.5 * (1 - math.cos(math.pi * ((steps - step) / (steps - warmup_steps))))


def one_minus_sqrt(step: int, steps: int, warmup_steps: int) -> float:
    """Decay as 1 − sqrt, fast at first (Hägele et al., 2024)."""
    return 1 - math.sqrt((step - warmup_steps) / (steps - warmup_steps))


def wsd(step: int, steps: int, warmup_steps: int, decay_share: float = 0.2) -> float:
    """Warmup-stable-decay: stay at the peak, then decay as 1 − sqrt in the last part (Hägele et al., 2024)."""
    start = steps - min(steps - warmup_steps, max(1, math.ceil(exact(decay_share) * steps)))
    return one_minus_sqrt(max(step, start), steps, start)


SCHEDULES: dict[str, Callable[..., float]] = {
    "linear": linear,
    "cosine": cosine,
    "constant": constant,
    "1-sqrt": one_minus_sqrt,
    "wsd": wsd,
}
"""Functions of (step, steps, warmup_steps) that return a factor on the peak for steps after the warm-up.

docs/extending.md adds one.
"""
