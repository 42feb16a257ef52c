"""Masked language modelling (Devlin et al., 2019): predict the tokens that were masked."""

from __future__ import annotations

from bertdata import Batch
from bertrain.models.encoder import Encoder
from bertrain.objectives.base import Objective, Outputs
from bertrain.objectives.losses import LossSum, classification
from bertrain.runtime.feed import MicroBatch, num_targets


class MaskedTokens(Objective):
    """Cross entropy of the masked tokens; counts targets."""

    def count(self, batch: Batch) -> int:
        return num_targets(batch)

    def forward(self, encoder: Encoder, outputs: Outputs, piece: MicroBatch) -> LossSum:
        assert outputs.logits is not None  # noqa: S101  (uses_logits is true)
        return classification(outputs.logits.flatten(0, 1), piece["targets"].flatten())
