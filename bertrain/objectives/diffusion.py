"""Masked diffusion (MDLM, Sahoo et al., 2024; LLaDA, Nie et al., 2025): predict a text from any part of it."""

from __future__ import annotations

import numpy as np
from torch.nn import functional as F
from transformers import PreTrainedModel

from bertdata import IGNORE_INDEX, Batch
from bertdata.errors import UsageError
from bertrain.models.encoder import Encoder
from bertrain.objectives.base import Objective, Outputs
from bertrain.objectives.losses import LossSum
from bertrain.options.config import Config
from bertrain.runtime.feed import MicroBatch


class Diffusion(Objective):
    """Cross entropy of the masked tokens, those of a row times 1 / its masked share; counts tokens that may be masked.

    The mean is a bound of the negative log-likelihood of a token, in nats. The accuracy has the same weights. Raises
    UsageError for other masks than those of `--masking uniform`.
    """

    def __init__(self, model: PreTrainedModel, config: Config) -> None:
        super().__init__(model, config)
        for part in config.parts:
            if part.options.masking != "uniform":
                sentence = (
                    f"--objective diffusion learns from any share of masks, and --masking {part.options.masking} has "
                    "one share; give --masking uniform"
                )
                raise UsageError(sentence, "needs-option", option="masking", given=part.options.masking)

    def count(self, batch: Batch) -> int:
        assert batch.weights is not None  # noqa: S101  (of the policy "uniform")
        return int(np.rint(batch.weights * (batch.targets != IGNORE_INDEX).sum(1)).sum())

    def forward(self, encoder: Encoder, outputs: Outputs, piece: MicroBatch) -> LossSum:
        assert outputs.logits is not None  # noqa: S101  (uses_logits is true)
        logits, targets, weights = outputs.logits.float(), piece["targets"], piece["weights"]
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
        sums = losses.view_as(targets).sum(1) * weights
        right = (logits.detach().argmax(-1) == targets).sum(1) * weights
        return LossSum(sums.sum(), right.sum())
