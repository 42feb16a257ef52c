"""Optimizers by name, and the groups of parameters that they treat differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bertdata.errors import UsageError
from bertrain.config import Config
from bertrain.optim.muon import Muon, hidden_matrices


def build(module: torch.nn.Module, config: Config) -> torch.optim.Optimizer:
    """The optimizer that --optimizer names, for all parameters of a module that are trained."""
    return OPTIMIZERS[config.optimizer](module, config)


def adamw(module: torch.nn.Module, config: Config) -> torch.optim.Optimizer:
    """AdamW with decoupled weight decay (Loshchilov and Hutter, 2019), fused into one kernel."""
    groups, betas = parameter_groups(module, config.weight_decay), (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.epsilon, fused=True)


def muon(module: torch.nn.Module, config: Config) -> torch.optim.Optimizer:
    """Muon for the hidden matrices of a model, AdamW for all else. module: a Learner."""
    matrices = hidden_matrices(module.model)
    if not matrices:
        raise UsageError(
            f"--optimizer muon: a {module.model.config.model_type} has no linear maps in its layers; give adamw"
        )
    theirs = {parameter for parameter, _ in matrices}
    others = parameter_groups(module, config.weight_decay)
    for group in others:
        group["params"] = [parameter for parameter in group["params"] if parameter not in theirs]
    half = torch.cuda.is_bf16_supported(including_emulation=False) if torch.cuda.is_available() else False
    return Muon(
        matrices,
        others,
        momentum=config.muon_momentum,
        weight_decay=config.weight_decay,
        rate_scale=config.muon_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        dtype=torch.bfloat16 if (half and config.precision != "fp32") or config.precision == "bf16" else torch.float32,
    )


OPTIMIZERS: dict[str, Callable[[torch.nn.Module, Config], torch.optim.Optimizer]] = {"adamw": adamw, "muon": muon}
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
