"""Adam's moments (Kingma and Ba, 2015), for optimizers that change the size of each tensor's step.

The tensors of a group go through each operation together, and the host never waits for the device.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch


class Moments(NamedTuple):
    """Of those parameters of a group that have a gradient: lists with one tensor or number for each."""

    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    means: list[torch.Tensor]  # of the gradients, times `biases`
    biases: list[float]
    roots: list[torch.Tensor]  # of the mean squares of the gradients, whose bias is corrected; no part of the state

    def updates(self, *, weight_decay: float, eps: float) -> list[torch.Tensor]:
        """What AdamW subtracts, at a learning rate of 1. Changes `roots`."""
        torch._foreach_add_(self.roots, eps)
        torch._foreach_mul_(self.roots, self.biases)
        updates = torch._foreach_div(self.means, self.roots)
        if weight_decay:
            torch._foreach_add_(updates, self.parameters, alpha=weight_decay)
        return list(updates)


def advance(state: defaultdict[torch.Tensor, Any], group: dict[str, Any]) -> Moments | None:
    """Takes the gradients of a group into the state; None if no parameter has one.

    The state of a parameter is that of torch.optim.AdamW: "step", on the host, "exp_avg" and "exp_avg_sq". Parameters
    without a gradient are passed over, so each counts its own steps.
    """
    parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
    if not parameters:
        return None
    for parameter in parameters:
        if not state[parameter]:
            zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            state[parameter].update({"step": torch.tensor(0.0), **zeros})
    gradients = [parameter.grad for parameter in parameters]
    steps, means, squares = (
        [state[parameter][name] for parameter in parameters] for name in ("step", "exp_avg", "exp_avg_sq")
    )
    beta1, beta2 = group["betas"]
    torch._foreach_add_(steps, 1)
    torch._foreach_lerp_(means, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    counts = [step.item() for step in steps]
    roots = list(torch._foreach_div(squares, [1 - beta2**count for count in counts]))
    torch._foreach_sqrt_(roots)
    return Moments(parameters, gradients, means, [1 - beta1**count for count in counts], roots)
