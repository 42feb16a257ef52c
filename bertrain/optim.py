"""AdamW and the learning rate, which is a pure function of the step."""

from __future__ import annotations

import math

import torch

WEIGHT_DECAY = 0.01  # of matrices; norms and biases are not decayed
BETAS = (0.9, 0.98)
EPSILON = 1e-6
CLIP_NORM = 1.0
WSD_DECAY = 0.2  # share of the run that wsd decays over


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, 2019), fused, in two groups: by number of dimensions, not by name."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPSILON, fused=True)


def learning_rate(step: int, *, peak: float, steps: int, warmup_steps: int, schedule: str) -> float:
    """The rate of step 0 ≤ step < steps; never 0.

    Linear warm-up reaches the peak at step `warmup_steps`. Then `linear` falls to 1 / (steps − warmup_steps) of it,
    `cosine` follows half a cosine (Loshchilov and Hutter, 2017), and `wsd` stays and falls over the last fifth as
    1 − sqrt (Hägele et al., 2024).
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    left = steps - step  # the last step has 1 left
    falling = steps - warmup_steps
    if schedule == "wsd":
        falling = min(falling, max(1, math.ceil(WSD_DECAY * steps)))
        return peak if left > falling else peak * (1 - math.sqrt((falling - left) / falling))
    share = left / falling
    return peak * share if schedule == "linear" else peak * 0.5 * (1 - math.cos(math.pi * share))
