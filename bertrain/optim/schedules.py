"""The learning rate is a pure function of the step: linear warm-up to the peak, then what --schedule names."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

from bertdata.errors import UsageError
from bertrain.options import exact


def learning_rate(
    step: int, *, peak: float, steps: int, warmup_steps: int, schedule: str, decay_share: float = 0.2, end: float = 0.0
) -> float:
    """The rate of step 0 ≤ step < steps. It reaches `peak` at step `warmup_steps`; no schedule here gives 0.

    end: share of the peak towards which it falls. decay_share: of the steps, in which `wsd` falls. Raises UsageError
    for a schedule that gives no number of 0 or more.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if SCHEDULES[schedule] is wsd:
        factor = wsd(step, steps, warmup_steps, decay_share)
    else:
        factor = SCHEDULES[schedule](step, steps, warmup_steps)
    if not (isinstance(factor, Real) and 0 <= factor < math.inf):
        sentence = (
            f"--schedule {schedule} gives {factor!r} at step {step} of {steps}; it must give a number of 0 or more "
            "(docs/extending.md)"
        )
        raise UsageError(sentence, "bad-entry", option="schedule", given=schedule)
    return peak * (end + (1 - end) * factor)


def constant(step: int, steps: int, warmup_steps: int) -> float:
    """Stays at the peak."""
    return 1.0


def linear(step: int, steps: int, warmup_steps: int) -> float:
    """Falls in a straight line; the last step has 1 / (steps − warmup_steps) of the peak."""
    return (steps - step) / (steps - warmup_steps)


def cosine(step: int, steps: int, warmup_steps: int) -> float:
    """Follows half a cosine (Loshchilov and Hutter, 2017)."""
    return 0.5 * (1 - math.cos(math.pi * ((steps - step) / (steps - warmup_steps))))


def one_minus_sqrt(step: int, steps: int, warmup_steps: int) -> float:
    """Falls as 1 − sqrt, fast at first (Hägele et al., 2024)."""
    return 1 - math.sqrt((step - warmup_steps) / (steps - warmup_steps))


def wsd(step: int, steps: int, warmup_steps: int, decay_share: float = 0.2) -> float:
    """Warm-up, stable, decay: stays at the peak, then falls in the last part as 1 − sqrt (Hägele et al., 2024)."""
    left, falling = steps - step, min(steps - warmup_steps, max(1, math.ceil(exact(decay_share) * steps)))
    return 1.0 if left > falling else 1 - math.sqrt((falling - left) / falling)


SCHEDULES: dict[str, Callable[[int, int, int], float]] = {
    "linear": linear,
    "cosine": cosine,
    "constant": constant,
    "1-sqrt": one_minus_sqrt,
    "wsd": wsd,
}
"""(step, steps, warmup_steps) → factor on the peak learning rate, for steps after the warm-up. Add your own:
docs/extending.md."""
