"""Hooks that store the activations of some layers of a model: hidden states, queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Module
from transformers import PreTrainedModel

from bertdata.support import UsageError
from bertrain.models.families import FAMILIES, layers_of

READABLE = {
    "deberta": "hidden",  # one map for queries, keys and values, interleaved by head
    "deberta-v2": "hidden",  # maps are called twice, once for relative positions
    "convbert": "hidden",  # convolutions use its maps, too; attention has fewer heads than the configuration says
    "phi3": "hidden",  # one map for queries, keys and values, which may have fewer heads
    "fnet": "hidden",  # Fourier transforms instead of attention
    "squeezebert": None,  # its layers have hidden states as [B, H, T]
    "flaubert": None,  # a layer is not one module
    "xlm": None,
}
"""model_type → what --distil can read: only hidden states, or nothing (None).

For other types in FAMILIES it can also read queries, keys and values; for types outside FAMILIES, nothing.
"""
_PROJECTIONS = (
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("q_proj", "k_proj", "v_proj"),
    ("query_proj", "key_proj", "value_proj"),
    ("q", "k", "v"),
    ("Wqkv",),
)
"""The names of the linear maps for queries, keys and values, or of one map for all three, in attention modules."""
EMBEDDINGS = -1  # the number of the embeddings among layer numbers


def readable(model_type: str) -> str | None:
    """Return what --distil can read from a model of this type: "attention", "hidden" or None."""
    return READABLE.get(model_type, "attention" if model_type in FAMILIES else None)


def check(model: PreTrainedModel, *, hidden: bool) -> None:
    """Raise UsageError if hidden states (`hidden`), or else queries, keys and values, of a model are not readable."""
    taps = readable(model.config.model_type) if layers_of(model) else None
    if taps is None or not (hidden or has_attention(model)):
        sentence = (
            f"--distil {'hidden' if hidden else 'relations'} cannot read the layers of {model.config.model_type} "
            f"(docs/models.md); give --distil logits{' or hidden' if taps else ''}"
        )
        raise UsageError(sentence, "unsupported", option="distil", given="hidden" if hidden else "relations")


def projections_of(layer: Module) -> list[Module]:
    """Return a layer's linear maps for queries, keys and values, or one map for all three, or an empty list."""
    for module in layer.modules():
        parts = dict(module.named_children())
        for names in _PROJECTIONS:
            if parts.keys() >= set(names):
                return [parts[name] for name in names]
    return []


def has_attention(model: PreTrainedModel) -> bool:
    """Return whether the queries, keys and values of every layer of a model can be read."""
    return readable(model.config.model_type) == "attention" and all(projections_of(layer) for layer in layers_of(model))


class Taps:
    """Activations of some layers in the last forward pass.

    hidden: layer number → its output [B, T, H], EMBEDDINGS → the input of the first layer. It is empty unless
    requested; values are None before the first pass and after `forget`. Raises UsageError if several layers are one
    module. Call `check` first.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int], *, hidden: bool) -> None:
        # The dictionary has all names from the start: torch.compile would compile again if it grew.
        self.hidden: dict[Any, Any] = dict.fromkeys(layers) if hidden else {}
        self._projected: dict[Any, Any] = {}
        all_layers = layers_of(model)
        self.has_attention = has_attention(model)
        if len(layers) > 1 and len({id(layer) for layer in all_layers}) < len(all_layers):
            sentence = f"the layers of {model.config.model_type} share their weights; give --distil-layers last"
            raise UsageError(sentence, "unsupported", option="distil_layers")
        for number in layers:
            layer = all_layers[max(number, 0)]
            if hidden:
                layer.register_forward_hook(_keep_in(self.hidden, number), with_kwargs=True)
            if self.has_attention and number != EMBEDDINGS:
                modules = projections_of(layer)
                self._is_fused = len(modules) == 1
                for part, module in enumerate(modules):
                    self._projected[number, part] = None
                    module.register_forward_hook(_keep_in(self._projected, (number, part)), with_kwargs=True)

    def forget(self) -> None:
        """Release the tensors. As outputs of a compiled graph with gradients, they would stay in memory."""
        for store in (self.hidden, self._projected):
            store.update(dict.fromkeys(store))

    def projections(self, layer: int) -> list[torch.Tensor]:
        """Return queries, keys and values of a layer, [B, T, width] each, before rotation by position."""
        if self._is_fused:
            return list(self._projected[layer, 0].chunk(3, -1))
        return [self._projected[layer, part] for part in range(3)]


def _keep_in(store: dict[Any, torch.Tensor], name: Any) -> Callable[..., None]:
    def keep(module: torch.nn.Module, inputs: Any, named_inputs: dict[str, Any], output: Any) -> None:
        # A backward pass may recompute a layer after `forget`. A tensor kept then would stay until the next step.
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:  # noqa: SLF001
            kept = output if name != EMBEDDINGS else inputs or named_inputs["hidden_states"]
            store[name] = kept[0] if isinstance(kept, tuple) else kept

    return keep
