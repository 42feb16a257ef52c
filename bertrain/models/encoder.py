"""A masked language model as the trainer calls it: rows → hidden states → logits of the masked positions alone."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import Module
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from bertdata.errors import UsageError
from bertrain.models import isolation
from bertrain.models.families import FAMILIES, family_of, first_position, has_token_types

PLACES = 8192  # tokens in a forward pass of an evaluation, or one row if it is longer


class Encoder(Module):
    """A masked language model of transformers, called on packed or padded rows.

    model: any masked language model. isolate: rows hold several packed documents, and no token attends to a token of
    another document. Raises UsageError where the model's family cannot do so.
    """

    def __init__(self, model: PreTrainedModel, *, isolate: bool = False) -> None:
        super().__init__()
        family = family_of(model)
        if isolate and family.isolation is None:
            can = ", ".join(name for name, other in FAMILIES.items() if other.isolation)
            sentence = (
                f"{model.config.model_type} cannot keep packed documents apart, as --isolate-documents and --samples "
                f"packed ask; leave them out, or give one of {can}"
            )
            raise UsageError(sentence, "unsupported", option="isolate_documents")
        self.model, self.isolate = model, isolate
        self.is_dense = family.dense
        self._head = functools.partial(family.head, model) if family.head else _own_head(model)
        self._first_position = first_position(model.config)
        takes = inspect.signature(model.base_model.forward).parameters
        self._takes_positions, self._takes_types = "position_ids" in takes, has_token_types(model)
        self._masks = family.isolation == "mask"
        self._embed = family.embed if isolate else None
        self._kept: dict[str, torch.Tensor] = {}
        if family.dense and model.base_model is not model:
            model.base_model.register_forward_hook(self._keep)
        if isolate and not self._masks:
            model.set_attn_implementation(isolation.NAME)

    def _keep(self, module: Module, inputs: Any, output: Any) -> None:
        self._kept["hidden"] = output[0]

    def _arguments(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """What a model of transformers takes of a micro-batch."""
        arguments: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
        if self.isolate:
            assert position_ids is not None  # noqa: S101  (packed samples have them)
            if self._masks:
                arguments["attention_mask"] = isolation.mask(position_ids)
            else:
                del arguments["attention_mask"]
                arguments |= isolation.documents(position_ids, cu_seqlens)
            if self._takes_positions:
                arguments["position_ids"] = position_ids + self._first_position
            if self._embed:
                del arguments["input_ids"]
                arguments["inputs_embeds"] = self._embed(self.model, input_ids, position_ids)
        if token_type_ids is not None and self._takes_types:
            arguments["token_type_ids"] = token_type_ids
        return arguments

    def encode(self, input_ids: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        """The tensors that `inputs_of` names, int64 [B, T] each → hidden states [B, T, H].

        position_ids: those of packed rows, from 0 in each document. cu_seqlens int32: where their documents begin
        (feed.cu_seqlens_of). Where all rows are full there is no attention_mask, so that attention takes its fastest
        path.
        """
        return self.model.base_model(**self._arguments(input_ids, **others)).last_hidden_state

    def predict(self, hidden: torch.Tensor, masked_positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, T, H], masked_positions int64 [B, K] → logits [B, K, V].

        Only the K masked positions of a row reach the vocabulary projection. That is exact, as the head works on each
        position alone, and saves 85 % of the largest matrix product of a small model.
        """
        return self._head(_at(hidden, masked_positions))

    def outputs(
        self, piece: Mapping[str, torch.Tensor], *, predict: bool = True
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The tensors of a micro-batch → hidden states [B, T, H], and logits [B, K, V] where they are asked for.

        A family that is not in FAMILIES runs its own forward pass, which gives logits [B, T, V] first; its hidden
        states are what its encoder gives first, None where transformers knows no encoder in it.
        """
        if self.is_dense and predict:
            logits = self.model(**self._arguments(**inputs_of(piece))).logits
            return self._kept.pop("hidden", None), _at(logits, piece["masked_positions"])
        hidden = self.encode(**inputs_of(piece))
        return hidden, self.predict(hidden, piece["masked_positions"]) if predict else None

    def logits(self, **piece: torch.Tensor) -> torch.Tensor:
        """The tensors of a micro-batch, masked_positions int64 [B, K] among them → [B, K, V]. Others are ignored."""
        logits = self.outputs(piece)[1]
        assert logits is not None  # noqa: S101  (they were asked for)
        return logits


def _at(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[B, T, H], int64 [B, K] → [B, K, H]."""
    return states.gather(1, positions.unsqueeze(-1).expand(-1, -1, states.shape[-1]))


class _Given(Module):
    """Stands where a model has its encoder, and gives back the hidden states that come instead of ids.

    It has the encoder's parts, as a head may multiply by the embeddings.
    """

    def __init__(self, encoder: Module) -> None:
        super().__init__()
        self.__dict__["_modules"] = encoder._modules  # noqa: SLF001

    def forward(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> BaseModelOutputWithPoolingAndCrossAttentions:
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=input_ids)


def _own_head(model: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """The model's forward pass without its encoder: hidden states [B, K, H] → logits [B, K, V].

    It is a shallow copy of the model that shares all modules but the encoder, so no family has to describe its head.
    """
    head = copy.copy(model)
    head.__dict__["_modules"] = dict(model._modules) | {model.base_model_prefix: _Given(model.base_model)}  # noqa: SLF001
    return functools.partial(_logits, head)  # a copy of which belongs to a copy of the model


def _logits(head: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    return head(input_ids=hidden).logits


def inputs_of(piece: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a micro-batch that `Encoder.encode` takes."""
    names = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "cu_seqlens")
    return {name: piece[name] for name in names if name in piece}


def recompute_activations(model: PreTrainedModel) -> None:
    """Layers keep no activations and compute them again in the backward pass (Chen et al., 2016)."""
    model.config.use_cache = False  # of a decoder; transformers would warn in each call, which no compiler takes
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError:
        sentence = (
            f"transformers cannot compute the activations of {model.config.model_type} again; leave "
            "--gradient-checkpointing out"
        )
        raise UsageError(sentence, "unsupported", option="gradient_checkpointing") from None
