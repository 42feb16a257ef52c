"""Losses as sums. Whoever knows the counts of all ranks divides by them, once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from bertdata import IGNORE_INDEX


class LossSum(NamedTuple):
    """One loss of a micro-batch."""

    sum: torch.Tensor  # float32 []: the loss summed over what Objective.count counts
    num_correct: torch.Tensor  # []: how many predictions were right, or the sum of their weights


def classification(logits: torch.Tensor, targets: torch.Tensor) -> LossSum:
    """logits [N, V], targets int64 [N] with IGNORE_INDEX for none → the sum of their cross entropies."""
    logits = logits.float()
    if torch.compiler.is_compiling():  # the compiler fuses the passes itself
        total = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    else:
        total = _CrossEntropySum.apply(logits, targets)
    return LossSum(total, (logits.detach().argmax(-1) == targets).sum())


class _CrossEntropySum(torch.autograd.Function):
    """F.cross_entropy with the gradient written into the log probabilities.

    For a large vocabulary this saves two of four passes over the largest tensor of a step.
    """

    @staticmethod
    def forward(context: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logprobs = logits.log_softmax(-1)
        used, columns = targets != IGNORE_INDEX, targets.clamp(min=0).unsqueeze(-1)
        losses = -(logprobs.gather(-1, columns).squeeze(-1) * used)
        gradient = logprobs.exp_().scatter_add_(-1, columns, torch.full_like(columns, -1, dtype=logprobs.dtype))
        context.save_for_backward(gradient, used)
        return losses.sum()

    @staticmethod
    def backward(context: Any, outer: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient, used = context.saved_tensors
        return gradient.mul_((used * outer).unsqueeze(-1)), None
