"""Optimizers, and the learning rate as a function of the step."""

from bertrain.optim.optimizers import OPTIMIZERS, parameter_groups, set_learning_rate
from bertrain.optim.schedules import SCHEDULES, Curve

__all__ = ["OPTIMIZERS", "SCHEDULES", "Curve", "parameter_groups", "set_learning_rate"]
