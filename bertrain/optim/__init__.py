"""How weights change: optimizers, and the learning rate as a function of the step."""

from bertrain.optim.optimizers import (
    OPTIMIZERS,
    build,
    check_scales,
    parameter_groups,
    scaled_rates,
    set_learning_rate,
    set_weight_decay,
    step,
)
from bertrain.optim.schedules import SCHEDULES, learning_rate

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "build",
    "check_scales",
    "learning_rate",
    "parameter_groups",
    "scaled_rates",
    "set_learning_rate",
    "set_weight_decay",
    "step",
]
