"""Hooks that keep what passes through some layers of a model: hidden states, queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from bertrain.models.families import family_of

EMBEDDINGS = -1  # stands for the embeddings among layer numbers


class Taps:
    """What passed through some layers in the last forward pass.

    hidden: layer number → its output [B, T, H], EMBEDDINGS for that of the embeddings; empty unless asked for.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int], *, hidden: bool) -> None:
        self.hidden: dict[int, torch.Tensor] = {}
        self._projected: dict[tuple[int, int], torch.Tensor] = {}
        family = family_of(model)
        for number in layers:
            layer = model.base_model.embeddings if number == EMBEDDINGS else family.layers(model)[number]
            if hidden:
                layer.register_forward_hook(_keep_in(self.hidden, number))
            if number != EMBEDDINGS:
                modules = family.projections(layer)
                self._is_fused = len(modules) == 1
                for part, module in enumerate(modules):
                    module.register_forward_hook(_keep_in(self._projected, (number, part)))

    def projections(self, layer: int) -> list[torch.Tensor]:
        """Queries, keys and values of a layer, [B, T, H] each, before any rotation by position."""
        if self._is_fused:
            return list(self._projected[layer, 0].chunk(3, -1))
        return [self._projected[layer, part] for part in range(3)]


def _keep_in(store: dict[Any, torch.Tensor], name: Any) -> Callable[..., None]:
    def keep(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        store[name] = output[0] if isinstance(output, tuple) else output

    return keep
