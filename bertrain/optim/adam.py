"""Optimizers with Adam's moments (Kingma and Ba, 2015) that scale the step of each tensor.

Operations run on all tensors of a group at once. The host never waits for the device, even if a step is skipped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch


class _OnMoments(torch.optim.Optimizer):
    """An optimizer with the parameter groups and the state of torch.optim.AdamW. A subclass implements `_updates`."""

    _step_supports_amp_scaling = True  # torch's flag for optimizers that support `found_inf`

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
        """Return the updates of the parameters at a learning rate of 1; the caller subtracts them."""
        raise NotImplementedError


class StableAdamW(_OnMoments):
    """AdamW with update clipping, as in Adafactor (Wortsman et al., 2023, arXiv 2304.13013).

    When gradients grow suddenly, the second moment is too small for some steps, so AdamW's steps are too large. This
    class divides the learning rate of each tensor by the root mean square of gradient / sqrt(second moment), if that is
    above 1. As in the paper, this also scales the weight decay.
    """

    def _updates(self, moments: Moments, group: dict[str, Any]) -> list[torch.Tensor]:
        ratios = torch._foreach_div(moments.gradients, torch._foreach_clamp_min(moments.roots, group["eps"]))
        divisors = list(torch._foreach_norm(ratios))  # root mean squares, at least 1
        torch._foreach_mul_(divisors, [gradient.numel() ** -0.5 for gradient in moments.gradients])
        torch._foreach_clamp_min_(divisors, 1.0)
        updates = moments.updates(weight_decay=group["weight_decay"], eps=group["eps"])
        torch._foreach_div_(updates, divisors)  # one kernel for each tensor
        return updates


class Lamb(_OnMoments):
    """LAMB for large batches (You et al., 2020, arXiv 1904.00962).

    The step of a tensor has the direction of AdamW's update, and its norm is the learning rate times the norm of the
    weights. If the weights or the update are 0, or the group has no weight decay, it is AdamW's step, as in NVIDIA's
    kernels for BERT (DeepLearningExamples, multi_tensor_lamb.cu, without use_nvlamb).
    """

    def _updates(self, moments: Moments, group: dict[str, Any]) -> list[torch.Tensor]:
        updates = moments.updates(weight_decay=group["weight_decay"], eps=group["eps"])
        if group["weight_decay"]:
            weights, steps = (torch.stack(torch._foreach_norm(each)) for each in (moments.parameters, updates))
            ratios = torch.where((weights > 0) & (steps > 0), weights / steps, 1.0)
            torch._foreach_mul_(updates, list(ratios.unbind()))  # one kernel for each tensor
        return updates


class Moments(NamedTuple):
    """The moments of a group: lists with one tensor for each parameter that has a gradient."""

    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    means: list[torch.Tensor]  # first moments, without bias correction
    biases: list[torch.Tensor]  # float64 []: bias corrections, which divide the first moments
    roots: list[torch.Tensor]  # square roots of the second moments, with bias correction; not in the state

    def updates(self, *, weight_decay: float, eps: float) -> list[torch.Tensor]:
        """Return AdamW's update at a learning rate of 1; the caller subtracts it. Overwrites `roots`."""
        torch._foreach_add_(self.roots, eps)
        torch._foreach_mul_(self.roots, self.biases)
        updates = torch._foreach_div(self.means, self.roots)
        if weight_decay:
            torch._foreach_add_(updates, self.parameters, alpha=weight_decay)
        return list(updates)


def is_skipped(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Return whether an optimizer's `found_inf` skips this step, bool [] (see `optimizers.step`)."""
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is None:  # a caller other than `optimizers.step`
        return torch.zeros((), dtype=torch.bool, device=optimizer.param_groups[0]["params"][0].device)
    return found_inf != 0


def commit(tensors: Iterable[torch.Tensor], values: Iterable[torch.Tensor], skipped: torch.Tensor) -> None:
    """Assign each tensor its new value, or keep the old one if `skipped`, bool [], is true."""
    for tensor, value in zip(tensors, values, strict=True):
        torch.where(skipped, tensor, value, out=tensor)  # one kernel for each tensor


def advance(state: defaultdict[torch.Tensor, Any], group: dict[str, Any], skipped: torch.Tensor) -> Moments | None:
    """Update the moments of a group. Return None if no parameter has a gradient.

    The state of a parameter is that of a fused torch.optim.AdamW: "step", float32 on the device, "exp_avg" and
    "exp_avg_sq". For parameters without a gradient, "step" does not increase. skipped: bool []; if it is true, the
    state stays the same and the result is meaningless.
    """
    parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
    if not parameters:
        return None
    for parameter in parameters:
        if not state[parameter]:
            zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            state[parameter].update({"step": torch.tensor(0.0), **zeros})
        state[parameter]["step"] = state[parameter]["step"].to(parameter.device)  # a loaded state may be on the CPU
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
