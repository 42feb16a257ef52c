"""Everything that differs between families of masked language models, in one table.

The rest of the trainer asks this table and never looks at `model_type`. docs/extending.md adds a family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from bertdata import SpecialTokens
from bertdata.errors import UsageError

DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "embedding_dropout", "mlp_dropout",
            "attention_dropout", "dropout")  # fmt: skip
"""The names that configurations of all families give to dropout probabilities."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the trainer must know about one family of transformers' masked language models."""

    config: type[PreTrainedConfig]
    model: type[PreTrainedModel]  # the masked language model
    head: Callable[[PreTrainedModel, torch.Tensor], torch.Tensor]  # model, hidden states [B, K, H] → logits [B, K, V]
    layers: Callable[[PreTrainedModel], Sequence[Module]]  # the transformer layers, first to last
    projections: Callable[[Module], Sequence[Module]]  # of a layer: three linear maps for q, k, v, or one for all
    feed_forward: tuple[str, int] = ("intermediate_size", 2)  # name of its width in the config; its number of matrices
    next_sentence: type[PreTrainedModel] | None = None  # the model with a head for next sentences too, if there is one
    isolates: bool = False  # whether its attention can keep packed documents apart (isolation.py)
    max_length: Callable[[PreTrainedConfig], int] = lambda config: config.max_position_embeddings  # the longest row


def _bert_head(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    return getattr(model.cls, "predictions", model.cls)(hidden)  # BertForPreTraining has one level more


FAMILIES: dict[str, Family] = {
    "bert": Family(
        config=BertConfig,
        model=BertForMaskedLM,
        head=_bert_head,
        layers=lambda model: model.bert.encoder.layer,
        projections=lambda layer: [getattr(layer.attention.self, name) for name in ("query", "key", "value")],
        next_sentence=BertForPreTraining,
        isolates=True,
    ),
    "modernbert": Family(
        config=ModernBertConfig,
        model=ModernBertForMaskedLM,
        head=lambda model, hidden: model.decoder(model.head(hidden)),
        layers=lambda model: model.model.layers,
        projections=lambda layer: [layer.attn.Wqkv],
        feed_forward=("intermediate_size", 3),
        isolates=True,
    ),
}
"""Families by the model_type of their configurations."""


def family_of(model: PreTrainedModel | PreTrainedConfig) -> Family:
    """The family of a model or configuration. Raises UsageError, naming the families there are, if it has none."""
    model_type = getattr(model, "config", model).model_type
    if model_type not in FAMILIES:
        raise UsageError(f"models of type {model_type} are not supported; give one of {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


# ------------------------------------------------------------------------------------------------------------- presets

_BERT = {  # layers, width; Turc et al., 2019, and Devlin et al., 2019
    "bert-tiny": (2, 128),
    "bert-mini": (4, 256),
    "bert-small": (4, 512),
    "bert-base": (12, 768),
    "bert-large": (24, 1024),
}
_MODERN = {  # layers, width, feed-forward width; base is Warner et al., 2024
    "modernbert-tiny": (2, 128, 256),
    "modernbert-small": (6, 384, 576),
    "modernbert-base": (22, 768, 1152),
}
PRESETS = (*_BERT, *_MODERN)
"""Names that --model takes beside configurations. Presets have no dropout."""


def preset(name: str, special: SpecialTokens, *, length: int) -> PreTrainedConfig:
    """The configuration of a preset for a vocabulary and rows of `length` tokens."""
    if name in _BERT:
        layers, width = _BERT[name]
        return BertConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=width // 64,
            intermediate_size=4 * width,
            max_position_embeddings=max(512, length),
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **_vocabulary(special),
        )
    layers, width, feed_forward = _MODERN[name]
    small = name != "modernbert-base"  # every layer sees the whole row, which is shorter than a local window
    return ModernBertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=width // 64,
        intermediate_size=feed_forward,
        max_position_embeddings=max(8192, length),
        layer_types=["full_attention"] * layers if small else None,
        cls_token_id=special.cls,
        sep_token_id=special.sep,
        classifier_pooling="mean",  # as its authors' checkpoints have it: masked tokens do not train [CLS]
        **_vocabulary(special),
    )


def _vocabulary(special: SpecialTokens) -> dict[str, Any]:
    ids = {"pad_token_id": special.pad, "bos_token_id": special.bos, "eos_token_id": special.eos}
    return {"vocab_size": special.vocab_size} | ids
