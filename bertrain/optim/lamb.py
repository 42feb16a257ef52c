"""LAMB (You et al., 2020, arXiv 1904.00962): Adam for large batches, whose steps follow the size of the weights.

The step of a tensor is the learning rate times the norm of its weights, in the direction of AdamW's update. It is
AdamW's own where the weights or the update are all 0, and for tensors without weight decay, which are norms and biases;
so do NVIDIA's kernels for BERT (DeepLearningExamples, multi_tensor_lamb.cu, without use_nvlamb).
"""

from __future__ import annotations

from typing import Any

import torch

from bertrain.optim.moments import advance, commit, is_skipped


class Lamb(torch.optim.Optimizer):
    """groups: as for torch.optim.AdamW. The state of a parameter is AdamW's, too."""

    _step_supports_amp_scaling = True  # torch's name for optimizers that know `found_inf`

    def __init__(self, groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure
        skipped = is_skipped(self)
        for group in self.param_groups:
            if moments := advance(self.state, group, skipped):
                updates = moments.updates(weight_decay=group["weight_decay"], eps=group["eps"])
                if group["weight_decay"]:
                    torch._foreach_mul_(updates, _ratios(moments.parameters, updates))  # one kernel for each tensor
                values = torch._foreach_add(moments.parameters, updates, alpha=-group["lr"])
                commit(moments.parameters, values, skipped)


def _ratios(parameters: list[torch.Tensor], updates: list[torch.Tensor]) -> list[torch.Tensor]:
    """Norm of each tensor / norm of its update; 1 where one of them is 0."""
    weights, steps = torch.stack(torch._foreach_norm(parameters)), torch.stack(torch._foreach_norm(updates))
    return list(torch.where((weights > 0) & (steps > 0), weights / steps, 1.0).unbind())
