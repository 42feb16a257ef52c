"""Next sentence prediction (Devlin et al., 2019): does the second segment follow the first in its document?"""

from __future__ import annotations

from typing import Any

from bertdata import Batch
from bertrain.models.encoder import Encoder
from bertrain.objectives.base import Objective, Outputs
from bertrain.objectives.losses import LossSum, classification
from bertrain.runtime.feed import MicroBatch


class NextSentences(Objective):
    """Cross entropy of next_sentence_label [B]; counts rows. The model is a BertForPreTraining."""

    samples = "pairs"
    uses_logits = False

    def count(self, batch: Batch) -> int:
        return batch.sample_ids.size

    def forward(self, encoder: Encoder, outputs: Outputs, piece: MicroBatch) -> LossSum:
        model: Any = encoder.model  # a BertForPreTraining
        pooled = model.bert.pooler(outputs.hidden)
        return classification(model.cls.seq_relationship(pooled), piece["next_sentence_label"])
