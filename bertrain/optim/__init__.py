"""Optimizers, and the learning rate as a function of the step."""

from bertrain.optim.optimizers import OPTIMIZERS, parameter_groups, set_learning_rate
from bertrain.optim.schedules import SCHEDULES, learning_rate

__all__ = ["OPTIMIZERS", "SCHEDULES", "learning_rate", "parameter_groups", "set_learning_rate"]
