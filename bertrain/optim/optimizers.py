"""Optimizers by name, and the groups of parameters that they treat differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bertrain.config import Config


def build(module: torch.nn.Module, config: Config) -> torch.optim.Optimizer:
    """The optimizer that --optimizer names, for all parameters of a module that are trained."""
    return OPTIMIZERS[config.optimizer](module, config)


def adamw(module: torch.nn.Module, config: Config) -> torch.optim.Optimizer:
    """AdamW with decoupled weight decay (Loshchilov and Hutter, 2019), fused into one kernel."""
    groups, betas = parameter_groups(module, config.weight_decay), (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.epsilon, fused=True)


OPTIMIZERS: dict[str, Callable[[torch.nn.Module, Config], torch.optim.Optimizer]] = {"adamw": adamw}
"""Optimizers by the name that --optimizer gives them. Add your own: docs/extending.md."""


def parameter_groups(module: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices, which are decayed, then norms and biases, which are not.

    Groups are chosen by the number of dimensions of a parameter, not by its name. A group may hold "rate_scale", a
    factor on its learning rate; without it the factor is 1.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Gives every group the learning rate `rate` times its rate_scale."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate_scale", 1.0)
