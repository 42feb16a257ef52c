"""The base of rotary positions, which a phase may change (Su et al., 2021; longer rows need a larger base)."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from bertdata.errors import UsageError

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"  # kinds of layers, as transformers calls them


@torch.no_grad()
def set_bases(model: PreTrainedModel, base: float | None, local: float | None) -> None:
    """Gives a model other bases, in its configuration and its buffers. None: as it is.

    Raises UsageError for a model that has none.
    """
    config: Any = model.config
    for option, kind, value in (("rope_base", _GLOBAL, base), ("rope_base_local", _LOCAL, local)):
        if value is None:
            continue
        if (parameters := _parameters(config, kind)) is None:
            layers = "local layers with rotary positions" if kind == _LOCAL else "rotary positions"
            sentence = f"{option} is {value:g}, and {config.model_type} has no {layers}; leave it out"
            raise UsageError(sentence, "unsupported", option=option, given=value)
        parameters["rope_theta"] = value
    if base is None and local is None:
        return
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            made: Any = type(module)
            fresh = dict(made(config).named_buffers(recurse=False))
            for name, buffer in module.named_buffers(recurse=False):
                buffer.copy_(fresh[name])


def kinds_of(config: Any) -> tuple[bool, bool]:
    """Whether a model has layers with rotary positions, and local ones."""
    return _parameters(config, _GLOBAL) is not None, _parameters(config, _LOCAL) is not None


def _parameters(config: Any, kind: str) -> dict[str, Any] | None:
    """What a configuration says of the rotary positions of a kind of layer; None: it has no such layer."""
    given = getattr(config, "rope_parameters", None) or {}
    parameters: dict[str, Any] | None = (given if given.keys() & {_GLOBAL, _LOCAL} else {_GLOBAL: given}).get(kind)
    if kind == _LOCAL and kind not in (getattr(config, "layer_types", None) or [kind]):
        return None  # ModernBERT's configuration has them without such a layer, too
    return parameters if parameters and "rope_theta" in parameters else None
