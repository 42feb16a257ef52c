"""Everything that differs between families of masked language models, in one table.

Where a fact can be read off a model, it is: the head is the model's own forward pass (encoder.py), and layers,
projections and widths are found in its modules. The table holds the rest. docs/models.md shows it, and
docs/extending.md adds a family. A family that is not in it trains through its own forward pass, in which all positions
of a row reach the vocabulary projection.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import Module, ModuleList
from transformers import BertConfig, BertForPreTraining, ModernBertConfig, PreTrainedConfig, PreTrainedModel

from bertdata import SpecialTokens

DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "embedding_dropout",
    "mlp_dropout",
    "attention_dropout",
    "dropout",
)
"""The names that configurations of all families give to dropout probabilities of the encoder."""
_PROJECTIONS = (
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("q_proj", "k_proj", "v_proj"),
    ("query_proj", "key_proj", "value_proj"),
    ("q", "k", "v"),
    ("Wqkv",),
)
"""The names that attention modules give to their linear maps for queries, keys and values, or to one for all three."""
FUSED = {"Wqkv": 3, "Wi": 2}
"""Linear maps whose weights are several matrices one below the other, by name: queries, keys, values; input, gate."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the trainer must know about one family of transformers' masked language models, and cannot read off one."""

    head: Callable[[PreTrainedModel, torch.Tensor], torch.Tensor] | None = None
    """model, hidden states [B, K, H] → logits [B, K, V]. None: the model's own forward pass after its encoder."""
    dense: bool = False  # no head for some positions alone: all of a row go through the vocabulary projection
    positions_after_padding: bool = False  # the first token of a row has position padding id + 1, as in RoBERTa
    padding_id: int | None = None  # the only one that transformers' code of it takes; None: that of the configuration
    isolation: Literal["kernel", "mask"] | None = None
    """How its attention keeps packed documents apart (isolation.py). None: it cannot. With "kernel" rows without
    padding have no mask on GPUs, packed or not."""
    embed: Callable[[PreTrainedModel, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    """model, input_ids and position_ids of packed rows, int64 [B, T], positions from 0 in each document → what enters
    the first layer [B, T, H]. Only where embeddings of transformers depend on the rest of the row."""
    layers: Callable[[PreTrainedModel], Sequence[Module]] | None = None
    """The transformer layers, first to last. None: the outermost list of config.num_hidden_layers modules."""
    untrained: tuple[str, ...] = ()  # parts of the encoder that a masked language model has and does not train
    scores: Callable[[PreTrainedConfig, int], float] = lambda config, tokens: 2 * tokens
    """Configuration, tokens that a token attends to → how many vectors of a layer a token is multiplied with there."""
    is_new: bool = False  # whether transformers 4.57 does not know it
    half: bool = True  # whether it computes in bf16 and fp16 too
    next_sentence: type[PreTrainedModel] | None = None  # the model with a head for next sentences too, if there is one


def _bert_head(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    head: Any = model.cls
    return getattr(head, "predictions", head)(hidden)  # BertForPreTraining has one level more


def _esm_embeddings(model: PreTrainedModel, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Token dropout (Lin et al., 2023) by document: a mask is 0, and the other tokens are scaled by 0.88 / (1 − masks).

    masks is the share of masks among the tokens of the document; transformers takes that of the row. 0.88 is
    1 − 0.15 · 0.8, whatever the run's masks are.
    """
    embeddings: Any = model.base_model.embeddings
    vectors = embeddings.word_embeddings(input_ids)
    if embeddings.token_dropout:
        is_mask, document = input_ids == embeddings.mask_token_id, (position_ids == 0).cumsum(1) - 1
        zeros = torch.zeros(document.shape, device=document.device)
        num_masks = zeros.scatter_add(1, document, is_mask.float()).gather(1, document)
        num_tokens = zeros.scatter_add(1, document, torch.ones_like(zeros)).gather(1, document)
        scale = (1 - 0.15 * 0.8) / (1 - num_masks / num_tokens)
        vectors = vectors * scale.masked_fill(is_mask, 0.0)[..., None].to(vectors.dtype)
    return embeddings(inputs_embeds=vectors, position_ids=position_ids + first_position(model.config))


def _albert_layers(model: PreTrainedModel) -> list[Module]:
    """Layers share weights in groups: one module stands for several layers."""
    albert: Any = model.albert
    groups, number = albert.encoder.albert_layer_groups, model.config.num_hidden_layers
    return [groups[layer * len(groups) // number] for layer in range(number)]


def _deberta_scores(config: PreTrainedConfig, tokens: int) -> float:
    """Keys and values; and for each kind of relative attention a table of relative positions, to both sides."""
    furthest = config.max_relative_positions if config.max_relative_positions > 0 else config.max_position_embeddings
    table = getattr(config, "position_buckets", 0)  # only DeBERTa-v2 multiplies with the complete table each time
    if table <= 0:
        table = min(tokens, furthest) if config.model_type == "deberta" else furthest
    return 2 * tokens + 2 * table * len(config.pos_att_type or ()) * config.relative_attention


_NEW = Family(isolation="kernel", is_new=True)
_ROBERTA = Family(positions_after_padding=True, isolation="kernel")

FAMILIES: dict[str, Family] = {
    "bert": Family(head=_bert_head, isolation="kernel", next_sentence=BertForPreTraining),
    "modernbert": Family(isolation="kernel"),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "xlm-roberta-xl": _ROBERTA,
    "roberta-prelayernorm": _ROBERTA,
    "data2vec-text": _ROBERTA,
    "distilbert": Family(isolation="kernel"),
    "electra": Family(isolation="kernel"),
    "albert": Family(isolation="kernel", layers=_albert_layers),
    "ernie": Family(isolation="kernel"),
    "eurobert": _NEW,
    "gte": _NEW,
    "nomic_bert": _NEW,
    "jina_embeddings_v3": _NEW,
    "ultrabert": _NEW,
    "esmc": _NEW,
    "esm": Family(positions_after_padding=True, isolation="kernel", embed=_esm_embeddings, untrained=("contact_head",)),
    "mpnet": Family(positions_after_padding=True, padding_id=1, isolation="mask"),
    "megatron-bert": Family(isolation="mask"),
    "rembert": Family(isolation="mask"),
    "roformer": Family(isolation="mask", untrained=("encoder.embed_positions",)),  # sines, which are computed
    "deberta": Family(scores=_deberta_scores, half=False),
    "deberta-v2": Family(scores=_deberta_scores),
    "mobilebert": Family(),  # its embeddings look at neighbouring tokens
    "convbert": Family(),
    "nystromformer": Family(),
    # Fourier transforms, which GPUs do not compute in bf16, and in fp16 only for lengths that are powers of two.
    "fnet": Family(untrained=("pooler",), scores=lambda config, tokens: 0, half=False),
    "squeezebert": Family(untrained=("pooler",)),
    "flaubert": Family(),
    "xlm": Family(),
}
"""Families by the model_type of their configurations."""

UNLISTED = Family(dense=True)
"""Every other family."""


def family_of(model: PreTrainedModel | PreTrainedConfig) -> Family:
    """The family of a model or configuration: its row of FAMILIES, else UNLISTED."""
    config: Any = getattr(model, "config", model)
    return FAMILIES.get(config.model_type, UNLISTED)


def add_names_of_4(config: PreTrainedConfig) -> bool:
    """Give a configuration the names of its settings in transformers 4. Return whether 4.57 reads its models.

    Only ModernBERT has other names there. transformers 4 cannot have every pattern of its layers. It ties the biases of
    heads whose weights are not tied, and does not know the new head of DeBERTa-v2.
    """
    if family_of(config) is UNLISTED or family_of(config).is_new or not getattr(config, "tie_word_embeddings", True):
        return False
    if not isinstance(config, ModernBertConfig):
        return bool(getattr(config, "legacy", True))
    is_full = [kind == "full_attention" for kind in config.layer_types or ()]
    every = (n for n in range(1, len(is_full) + 1) if is_full == [i % n == 0 for i in range(len(is_full))])
    rope: Any = config.rope_parameters
    places = rope["full_attention"], rope["sliding_attention"]
    every_n_layers = next(every, None)
    if every_n_layers is None or {place["rope_type"] for place in places} != {"default"}:
        return False
    config.global_attn_every_n_layers = every_n_layers
    config.global_rope_theta, config.local_rope_theta = (place["rope_theta"] for place in places)
    return True


def first_position(config: PreTrainedConfig) -> int:
    """The position of the first token of a row; for a family that is not in FAMILIES the largest that there may be."""
    family, padding = family_of(config), getattr(config, "pad_token_id", None)
    return padding + 1 if padding is not None and (family.positions_after_padding or family.dense) else 0


def layers_of(model: PreTrainedModel) -> Sequence[Module] | ModuleList:
    """The transformer layers, first to last; nothing where they cannot be found."""
    if find := family_of(model).layers:
        return find(model)
    lists = (module for module in model.base_model.modules() if isinstance(module, ModuleList))
    number = getattr(model.config, "num_hidden_layers", 0)
    return next((modules for modules in lists if len(modules) == number), ModuleList())


def projections_of(layer: Module) -> list[Module]:
    """The linear maps of a layer for queries, keys and values, or one for all three; nothing where there are none."""
    for module in layer.modules():
        parts = dict(module.named_children())
        for names in _PROJECTIONS:
            if parts.keys() >= set(names):
                return [parts[name] for name in names]
    return []


def has_dropout(model: PreTrainedModel) -> bool:
    """Whether the encoder of a model draws dropout while it trains."""
    return any(getattr(model.config, name, 0.0) for name in DROPOUTS)


def freeze(model: PreTrainedModel) -> PreTrainedModel:
    """Takes what gets no gradient out of the optimizer, and out of what ranks exchange."""
    for name in family_of(model).untrained:
        model.base_model.get_submodule(name).requires_grad_(False)
    return model


def has_token_types(model: PreTrainedModel) -> bool:
    """Whether a model tells the two segments of a row apart by token_type_ids."""
    takes = "token_type_ids" in inspect.signature(model.base_model.forward).parameters
    return takes and (getattr(model.config, "type_vocab_size", 0) or 0) > 1


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
    small = name != "modernbert-base"  # every layer sees the full row, which is shorter than a local window
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
