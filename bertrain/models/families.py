"""The differences between families of masked language models, in one table.

The trainer reads most facts from a model: its head is its own forward pass (encoder.py), and its modules show layers,
projections and widths. The table contains the other facts. docs/models.md shows it, and docs/extending.md explains how
to add a family. A family outside the table trains through its own forward pass, in which all positions reach the
vocabulary projection. The table also contains the decoders that transformers can run with attention to both sides.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from torch.nn import Module, ModuleList
from transformers import BertConfig, BertForPreTraining, ModernBertConfig, PreTrainedConfig, PreTrainedModel

from bertdata import SpecialTokens

FUSED = {"Wqkv": 3, "Wi": 2, "gate_up_proj": 2}
"""Linear maps with several stacked matrices → their number: queries, keys and values; input and gate."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """The facts about a family that the trainer cannot read from a model."""

    head: Callable[[PreTrainedModel, torch.Tensor], torch.Tensor] | None = None
    """Model, hidden states [B, K, H] → logits [B, K, V]. None: the model's own forward pass without its encoder."""
    dense: bool = False  # all positions of a row go through the vocabulary projection
    decoder: bool = False  # a decoder that is_causal = False in its configuration turns into an encoder
    positions_after_padding: bool = False  # the first token of a row has position padding id + 1, as in RoBERTa
    padding_id: int | None = None  # the only padding id that transformers supports; None: any
    isolation: Literal["kernel", "mask"] | None = None
    """How attention separates packed documents (encoder.py); None: not supported. With "kernel", rows without padding
    have no mask on GPUs, packed or not."""
    embed: Callable[[PreTrainedModel, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    """Model, input_ids and position_ids of packed rows, int64 [B, T] → inputs of the first layer [B, T, H]. Needed if
    transformers' embeddings of a token depend on other tokens of the row. Positions start at 0 in each document."""
    layers: Callable[[PreTrainedModel], Sequence[Module]] | None = None
    """The transformer layers, first to last. None: the outermost list of config.num_hidden_layers modules."""
    untrained: tuple[str, ...] = ()  # parts of the encoder that a masked language model does not train
    is_new: bool = False  # transformers 4.57 does not support the family
    half: bool = True  # supports bf16 and fp16
    next_sentence: type[PreTrainedModel] | None = None  # the class that also has a head for next sentences


def _bert_head(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    head: Any = model.cls
    return getattr(head, "predictions", head)(hidden)  # BertForPreTraining has one level more


def _esm_embeddings(model: PreTrainedModel, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Apply token dropout (Lin et al., 2023) by document; transformers applies it by row.

    The embedding of a mask is 0; others are multiplied by 0.88 / (1 − share of masks in the document). 0.88 is 1 − 0.15
    · 0.8 for any masking.
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
    """Return the layers of an ALBERT, in which one module can be several layers."""
    albert: Any = model.albert
    groups, number = albert.encoder.albert_layer_groups, model.config.num_hidden_layers
    return [groups[layer * len(groups) // number] for layer in range(number)]


FAMILIES: dict[str, Family] = {
    "bert": Family(head=_bert_head, isolation="kernel", next_sentence=BertForPreTraining),
    **dict.fromkeys(("modernbert", "distilbert", "electra", "ernie"), Family(isolation="kernel")),
    **dict.fromkeys(
        ("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "roberta-prelayernorm", "data2vec-text"),
        Family(positions_after_padding=True, isolation="kernel"),
    ),
    **dict.fromkeys(
        ("eurobert", "gte", "nomic_bert", "jina_embeddings_v3", "ultrabert", "esmc"),
        Family(isolation="kernel", is_new=True),
    ),
    **dict.fromkeys(
        ("llama", "qwen2", "qwen3", "gemma3_text", "mistral", "olmo2", "phi3"),
        Family(decoder=True, isolation="kernel", is_new=True),
    ),
    "albert": Family(isolation="kernel", layers=_albert_layers),
    "esm": Family(positions_after_padding=True, isolation="kernel", embed=_esm_embeddings, untrained=("contact_head",)),
    "mpnet": Family(positions_after_padding=True, padding_id=1, isolation="mask"),
    "roformer": Family(isolation="mask", untrained=("encoder.embed_positions",)),  # constant sines
    **dict.fromkeys(("megatron-bert", "rembert"), Family(isolation="mask")),
    # GPUs compute no Fourier transforms in bf16, and in fp16 only for lengths that are powers of two.
    "fnet": Family(untrained=("pooler",), half=False),
    "deberta": Family(half=False),
    "squeezebert": Family(untrained=("pooler",)),
    **dict.fromkeys(("deberta-v2", "mobilebert", "convbert", "nystromformer", "flaubert", "xlm"), Family()),
}
"""Families by model_type."""

UNLISTED = Family(dense=True)
"""All other families."""


def family_of(model: PreTrainedModel | PreTrainedConfig) -> Family:
    """Return the family of a model or a configuration: its entry in FAMILIES, or UNLISTED."""
    config: Any = getattr(model, "config", model)
    return FAMILIES.get(config.model_type, UNLISTED)


def auto_class(model: PreTrainedModel | PreTrainedConfig) -> Any:
    """Return the class of transformers that loads a model with the head that predicts tokens."""
    return transformers.AutoModelForCausalLM if family_of(model).decoder else transformers.AutoModelForMaskedLM


def add_names_of_4(config: PreTrainedConfig) -> bool:
    """Add setting names of transformers 4 to a configuration. Return whether version 4.57 can load its models.

    Only ModernBERT has different names. transformers 4 does not support every pattern of its layers, ties the biases of
    heads without tied weights, and does not support the new head of DeBERTa-v2.
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
    """Return the position of a row's first token; outside FAMILIES, the largest possible one."""
    family, padding = family_of(config), getattr(config, "pad_token_id", None)
    return padding + 1 if padding is not None and (family.positions_after_padding or family.dense) else 0


def layers_of(model: PreTrainedModel) -> Sequence[Module] | ModuleList:
    """Return the transformer layers, first to last, or an empty list if they are unknown."""
    if find := family_of(model).layers:
        return find(model)
    lists = (module for module in model.base_model.modules() if isinstance(module, ModuleList))
    number = getattr(model.config, "num_hidden_layers", 0)
    return next((modules for modules in lists if len(modules) == number), ModuleList())


def freeze(model: PreTrainedModel) -> PreTrainedModel:
    """Freeze the parts that get no gradient, so that the optimizer and the other ranks ignore them."""
    for name in family_of(model).untrained:
        model.base_model.get_submodule(name).requires_grad_(False)
    return model


def has_token_types(model: PreTrainedModel) -> bool:
    """Return whether a model uses token_type_ids for the two segments of a row."""
    takes = "token_type_ids" in inspect.signature(model.base_model.forward).parameters
    return takes and (getattr(model.config, "type_vocab_size", 0) or 0) > 1


# ------------------------------------------------------------------------------------------------------------- presets

PRESETS = {  # layers, width, feed-forward width
    "bert-tiny": (2, 128, 512),  # Turc et al., 2019, to bert-small
    "bert-mini": (4, 256, 1024),
    "bert-small": (4, 512, 2048),
    "bert-base": (12, 768, 3072),  # Devlin et al., 2019
    "bert-large": (24, 1024, 4096),
    "modernbert-tiny": (2, 128, 256),
    "modernbert-small": (6, 384, 576),
    "modernbert-base": (22, 768, 1152),  # Warner et al., 2024
}
"""Models that --model builds without a configuration. They have no dropout."""


def preset(name: str, special: SpecialTokens, *, length: int) -> PreTrainedConfig:
    """Return the configuration of a preset for a vocabulary and rows of `length` tokens."""
    layers, width, feed_forward = PRESETS[name]
    shared: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": width // 64,
        "intermediate_size": feed_forward,
        "vocab_size": special.vocab_size,
        "pad_token_id": special.pad,
        "bos_token_id": special.bos,
        "eos_token_id": special.eos,
    }
    if name.startswith("bert"):
        no_dropout: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return BertConfig(max_position_embeddings=max(512, length), **shared, **no_dropout)
    has_windows = name == "modernbert-base"  # rows of the small presets are shorter than a window
    return ModernBertConfig(
        max_position_embeddings=max(8192, length),
        layer_types=None if has_windows else ["full_attention"] * layers,
        cls_token_id=special.cls,
        sep_token_id=special.sep,
        classifier_pooling="mean",  # as in the published checkpoints: masked tokens do not train [CLS]
        **shared,
    )
