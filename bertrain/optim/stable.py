"""StableAdamW (Wortsman et al., 2023, arXiv 2304.13013): AdamW that makes smaller steps while its moments lag behind.

Where gradients grow suddenly, the mean of their squares is too small for some steps, and AdamW's steps are too large.
Here the learning rate of each tensor is divided by the root mean square of its gradient relative to the root of that
mean, where this is above 1, as in Adafactor. As in the paper, weight decay has the divided rate, too.
"""

from __future__ import annotations

from typing import Any

import torch

from bertrain.optim.moments import Moments, advance, commit, is_skipped


class StableAdamW(torch.optim.Optimizer):
    """groups: as for torch.optim.AdamW. The state of a parameter is AdamW's, too."""

    _step_supports_amp_scaling = True  # torch's name for optimizers that know `found_inf`

    def __init__(self, groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure
        skipped = is_skipped(self)
        for group in self.param_groups:
            if moments := advance(self.state, group, skipped):
                divisors = _divisors(moments, group["eps"])
                updates = moments.updates(weight_decay=group["weight_decay"], eps=group["eps"])
                torch._foreach_div_(updates, divisors)  # one kernel for each tensor
                values = torch._foreach_add(moments.parameters, updates, alpha=-group["lr"])
                commit(moments.parameters, values, skipped)


def _divisors(moments: Moments, eps: float) -> list[torch.Tensor]:
    """Of each tensor the root mean square of gradient / max(root, eps), at least 1."""
    ratios = torch._foreach_div(moments.gradients, torch._foreach_clamp_min(moments.roots, eps))
    divisors = list(torch._foreach_norm(ratios))
    torch._foreach_mul_(divisors, [gradient.numel() ** -0.5 for gradient in moments.gradients])
    torch._foreach_clamp_min_(divisors, 1.0)
    return divisors
