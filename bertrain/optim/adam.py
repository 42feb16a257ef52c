"""Optimizers on Adam's moments (Kingma and Ba, 2015) that change the size of each tensor's step.

The tensors of a group go through each operation together, and the host never waits for the device: also not to know
whether a step is skipped (`commit`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch


class _OnMoments(torch.optim.Optimizer):
    """groups: as for torch.optim.AdamW. The state of a parameter is AdamW's, too. A subclass gives `_updates`."""

    _step_supports_amp_scaling = True  # torch's name for optimizers that know `found_inf`

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float = 0.0, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure
        skipped = is_skipped(self)
        for group in self.param_groups:
            if moments := advance(self.state, group, skipped):
                updates = self._updates(moments, group)
                values = torch._foreach_add(moments.parameters, updates, alpha=-group["lr"])
                commit(moments.parameters, values, skipped)

    def _updates(self, moments: Moments, group: dict[str, Any]) -> list[torch.Tensor]:
        """What the parameters lose, at a learning rate of 1."""
        raise NotImplementedError


class StableAdamW(_OnMoments):
    """AdamW that makes smaller steps while its moments lag behind (Wortsman et al., 2023, arXiv 2304.13013).

    Where gradients grow suddenly, the mean of their squares is too small for some steps, and AdamW's steps are too
    large. Here the learning rate of each tensor is divided by the root mean square of its gradient relative to the root
    of that mean, where this is above 1, as in Adafactor. As in the paper, weight decay has the divided rate, too.
    """

    def _updates(self, moments: Moments, group: dict[str, Any]) -> list[torch.Tensor]:
        divisors = _divisors(moments, group["eps"])
        updates = moments.updates(weight_decay=group["weight_decay"], eps=group["eps"])
        torch._foreach_div_(updates, divisors)  # one kernel for each tensor
        return updates


def _divisors(moments: Moments, eps: float) -> list[torch.Tensor]:
    """Of each tensor the root mean square of gradient / max(root, eps), at least 1."""
    ratios = torch._foreach_div(moments.gradients, torch._foreach_clamp_min(moments.roots, eps))
    divisors = list(torch._foreach_norm(ratios))
    torch._foreach_mul_(divisors, [gradient.numel() ** -0.5 for gradient in moments.gradients])
    torch._foreach_clamp_min_(divisors, 1.0)
    return divisors


class Lamb(_OnMoments):
    """LAMB (You et al., 2020, arXiv 1904.00962), for large batches: steps follow the size of the weights.

    The step of a tensor is the learning rate times the norm of its weights, in the direction of AdamW's update. It is
    AdamW's own where the weights or the update are all 0, and for tensors without weight decay, which are norms and
    biases; so do NVIDIA's kernels for BERT (DeepLearningExamples, multi_tensor_lamb.cu, without use_nvlamb).
    """

    def _updates(self, moments: Moments, group: dict[str, Any]) -> list[torch.Tensor]:
        updates = moments.updates(weight_decay=group["weight_decay"], eps=group["eps"])
        if group["weight_decay"]:
            torch._foreach_mul_(updates, _ratios(moments.parameters, updates))  # one kernel for each tensor
        return updates


def _ratios(parameters: list[torch.Tensor], updates: list[torch.Tensor]) -> list[torch.Tensor]:
    """Norm of each tensor / norm of its update; 1 where one of them is 0."""
    weights, steps = torch.stack(torch._foreach_norm(parameters)), torch.stack(torch._foreach_norm(updates))
    return list(torch.where((weights > 0) & (steps > 0), weights / steps, 1.0).unbind())


class Moments(NamedTuple):
    """Of those parameters of a group that have a gradient: lists with one tensor or number for each."""

    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    means: list[torch.Tensor]  # of the gradients, times `biases`
    biases: list[torch.Tensor]  # float64 [] each
    roots: list[torch.Tensor]  # of the mean squares of the gradients, whose bias is corrected; no part of the state

    def updates(self, *, weight_decay: float, eps: float) -> list[torch.Tensor]:
        """What AdamW subtracts, at a learning rate of 1. Changes `roots`."""
        torch._foreach_add_(self.roots, eps)
        torch._foreach_mul_(self.roots, self.biases)
        updates = torch._foreach_div(self.means, self.roots)
        if weight_decay:
            torch._foreach_add_(updates, self.parameters, alpha=weight_decay)
        return list(updates)


def is_skipped(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """bool []: whether a step changes nothing, as `found_inf` of the optimizer says (see `optimizers.step`)."""
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is None:  # it is called by itself
        return torch.zeros((), dtype=torch.bool, device=optimizer.param_groups[0]["params"][0].device)
    return found_inf != 0


def commit(tensors: Iterable[torch.Tensor], values: Iterable[torch.Tensor], skipped: torch.Tensor) -> None:
    """Gives each tensor its new value; where `skipped`, bool [], is true it stays as it was, to the bit."""
    for tensor, value in zip(tensors, values, strict=True):
        torch.where(skipped, tensor, value, out=tensor)  # one kernel for each tensor


def advance(state: defaultdict[torch.Tensor, Any], group: dict[str, Any], skipped: torch.Tensor) -> Moments | None:
    """Takes the gradients of a group into the state; None if no parameter has one.

    The state of a parameter is that of a fused torch.optim.AdamW: "step", float32 on its device, "exp_avg" and
    "exp_avg_sq". Parameters without a gradient are passed over, so each counts its own steps. skipped: bool []; where
    it is true the state stays as it was, and what is returned means nothing.
    """
    parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
    if not parameters:
        return None
    for parameter in parameters:
        if not state[parameter]:
            zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            state[parameter].update({"step": torch.tensor(0.0), **zeros})
        state[parameter]["step"] = state[parameter]["step"].to(parameter.device)  # a checkpoint may have it elsewhere
    gradients = [parameter.grad for parameter in parameters]
    steps, means, squares = (
        [state[parameter][name] for parameter in parameters] for name in ("step", "exp_avg", "exp_avg_sq")
    )
    beta1, beta2 = group["betas"]
    torch._foreach_add_(steps, [(~skipped).float()] * len(steps))
    commit(means, torch._foreach_lerp(means, gradients, 1 - beta1), skipped)
    new_squares = torch._foreach_mul(squares, beta2)
    torch._foreach_addcmul_(new_squares, gradients, gradients, 1 - beta2)
    commit(squares, new_squares, skipped)
    counts = torch.stack(steps).double()
    roots = list(torch._foreach_div(squares, list((1 - beta2**counts).unbind())))
    torch._foreach_sqrt_(roots)
    return Moments(parameters, gradients, means, list((1 - beta1**counts).unbind()), roots)
