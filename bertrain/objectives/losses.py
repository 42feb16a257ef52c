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
    rows: torch.Tensor | None = None
    """float32 [B, 2]: what each row adds to the sum, and to the count. None: the log has no loss by source."""


def classification(logits: torch.Tensor, targets: torch.Tensor, *, num_rows: int | None = None) -> LossSum:
    """logits [N, V], targets int64 [N] with IGNORE_INDEX for none → the sum of their cross entropies.

    num_rows: how many rows the N are of, where the loss of each row is wanted.
    """
    logits, rows = logits.float(), None
    total, each = _cross_entropies(logits, targets)
    if num_rows is not None:
        rows = torch.stack([each, (targets != IGNORE_INDEX).float()], -1).view(num_rows, -1, 2).sum(1)
    return LossSum(total, (logits.detach().argmax(-1) == targets).sum(), rows)


def _cross_entropies(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits float32 [N, V], targets int64 [N] → the sum of cross entropies, float32 [], and each, [N], to look at."""
    if torch.compiler.is_compiling():  # the compiler fuses the passes itself, and leaves out what is not used
        total, each = (
            F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction=kind) for kind in ("sum", "none")
        )
        return total, each.detach()
    return _CrossEntropySum.apply(logits, targets)


class _CrossEntropySum(torch.autograd.Function):
    """F.cross_entropy with the gradient written into the log probabilities.

    For a large vocabulary this saves two of four passes over the largest tensor of a step.
    """

    @staticmethod
    def forward(context: Any, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = logits.log_softmax(-1)
        used, columns = targets != IGNORE_INDEX, targets.clamp(min=0).unsqueeze(-1)
        each = -(logprobs.gather(-1, columns).squeeze(-1) * used)
        gradient = logprobs.exp_().scatter_add_(-1, columns, torch.full_like(columns, -1, dtype=logprobs.dtype))
        context.save_for_backward(gradient, used)
        context.mark_non_differentiable(each)
        return each.sum(), each

    @staticmethod
    def backward(context: Any, outer: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient, used = context.saved_tensors
        return gradient.mul_((used * outer).unsqueeze(-1)), None
