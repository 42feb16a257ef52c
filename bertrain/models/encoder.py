"""A masked language model in the form that the trainer calls: rows → hidden states → logits at the masked positions.

This module also sets the attention, which separates packed documents, and the bases of rotary positions.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.nn import Module
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from bertdata.support import UsageError
from bertrain.models.families import family_of, first_position, has_token_types

MicroBatch = dict[str, torch.Tensor]
PLACES = 8192  # tokens in a forward pass of an evaluation; a longer row is a pass of its own

# ----------------------------------------------------------------------------------------------------------- attention

ISOLATED, WHOLE_ROWS = "bertrain_isolated", "bertrain_whole_rows"
"""The names in transformers of the attention of packed rows, and of the attention of other rows."""
AMPERE = (8, 0)  # the first GPUs with a kernel for sequences of unequal length
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
ON_CPUS = ("flash", "math")
LAST_FAULTY = (2, 13)
"""The newest tested torch whose cuDNN attention may return NaN in the backward pass (pytorch #196678, since 2.11, for
masks and some lengths on H100 and H200; diffusers #9768 for 2.5). --attention auto does not use cuDNN up to it."""
SHORT = 512  # up to this row length, plain products in bf16 are faster on CPUs than torch's kernel


@functools.cache
def has_kernel(device: torch.device) -> bool:
    """Return whether torch has attention for sequences of unequal length, with windows, on a device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= AMPERE


def choose_attention(model: PreTrainedModel, choice: str, *, precision: str, device: torch.device, length: int) -> None:
    """Set the fastest attention for rows of at most `length` tokens. choice: the value of --attention.

    On CPUs, short rows in bf16 use plain products. On GPUs, rows without padding need no mask of all pairs of tokens; a
    model with sliding windows then needs `has_kernel` and half precision.
    """
    on_cpu, has_windows = device.type == "cpu", precision != "fp32" and has_kernel(device)
    needs_windows = "sliding_attention" in (getattr(model.config, "layer_types", None) or ())
    can = family_of(model).isolation == "kernel" and model.config._attn_implementation == "sdpa"  # noqa: SLF001
    if choice == "auto" and on_cpu and precision == "bf16" and length <= SHORT and not has_windows:
        model.set_attn_implementation("eager")
    elif can and (has_windows or not (on_cpu or needs_windows)):
        model.set_attn_implementation(WHOLE_ROWS)


def attention_kernels(choice: str, encoder: Encoder, device: torch.device) -> tuple[str, ...]:
    """Return the kernels that --attention allows, or the name of the attention if the model uses no kernel."""
    own = str(encoder.model.config._attn_implementation)  # noqa: SLF001
    if own not in ("sdpa", ISOLATED, WHOLE_ROWS):
        return (own,)
    if choice == "flash" and device.type != "cpu":
        return "flash", "efficient"  # on GPUs, flash does not support the masks of rows with padding
    if choice != "auto":
        return (choice,)
    if device.type == "cpu":
        return ON_CPUS
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return tuple(name for name in KERNELS if name != "cudnn" or version > LAST_FAULTY)


def limit_kernels(names: tuple[str, ...]) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a function that returns a context in which torch uses only these kernels."""
    allowed = [KERNELS[name] for name in names if name in KERNELS]
    return lambda: sdpa_kernel(allowed) if allowed else contextlib.nullcontext()


def require_kernel(choice: str, encoder: Encoder, device: torch.device, precision: str) -> None:
    """Raise UsageError if a model or a device does not support the value of --attention."""
    is_supported = choice in ON_CPUS if device.type == "cpu" else precision != "fp32" or choice in ("efficient", "math")
    if choice != "auto" and not (is_supported and attention_kernels(choice, encoder, device)[0] == choice):
        model = encoder.model.config.model_type
        sentence = f"a {model} cannot use --attention {choice} in {precision} on {device.type}; give auto"
        raise UsageError(sentence, "unsupported", option="attention", given=choice)


def cu_seqlens_of(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the offsets of the documents of packed rows, and the end, int32. position_ids: int64 [B, T].

    The padding of a row counts as a document. The end is repeated until the number of documents is a power of two:
    there are fewer shapes then, and a kernel's backward pass needs memory and time for each shape.
    """
    starts = (position_ids == 0).flatten().nonzero().flatten()
    padded = torch.full(((1 << (starts.numel() - 1).bit_length()) + 1,), position_ids.numel(), dtype=torch.int32)
    padded[: starts.numel()] = starts
    return padded


def _documents(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the document number of each token, int64 [B, T]. The padding of a row counts as a document."""
    return (position_ids == 0).cumsum(1)


def _same(document_ids: torch.Tensor) -> torch.Tensor:
    """Return which pairs of tokens belong to the same document, bool [B, 1, T, T]. document_ids: int64 [B, T]."""
    return document_ids[:, None, :, None] == document_ids[:, None, None, :]


def attend(
    module: Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    document_ids: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to the tokens of the same document. query [B, heads, T, D] → [B, T, heads, D], as transformers expects.

    key, value: [B, heads, T, D]; several heads of the query may share one. document_ids: int64 [B, T]. cu_seqlens: see
    `cu_seqlens_of`. sliding_window: tokens attend only at smaller distances. is_causal: False for a decoder used as an
    encoder, whose tokens also attend at exactly this distance; None for all other models.
    """
    rows, heads, length, width = query.shape
    reach = -1 if sliding_window is None else sliding_window - (is_causal is None)
    if (sharing := heads // key.shape[1]) > 1:
        key, value = key.repeat_interleave(sharing, 1), value.repeat_interleave(sharing, 1)
    # The kernel needs one half-precision dtype. Autocast does not convert its inputs, and the rotary positions of some
    # families convert queries and keys to float32.
    is_supported = value.dtype != torch.float32 and dropout == 0 and width % 8 == 0 and width <= 256
    if cu_seqlens is not None and is_supported:
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (tensor.to(value.dtype).transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
        bounds = (cu_seqlens, cu_seqlens, length, length)
        attended: Any = varlen_attn(q, k, v, *bounds, scale=scaling, window_size=(reach, reach))
        return attended.unflatten(0, (rows, length)), None
    mask = _same(document_ids)
    if sliding_window is not None:
        positions = torch.arange(length, device=query.device)
        mask = mask & ((positions[:, None] - positions[None, :]).abs() <= reach)
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return attended.transpose(1, 2).contiguous(), None


def attend_in_rows(
    module: Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend in rows that are not packed: with `attend` for windows without padding, else as in transformers."""
    rows, length = query.shape[0], query.shape[2]
    if attention_mask is not None or sliding_window is None or sliding_window >= length:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **others)
    document_ids = torch.zeros((rows, length), dtype=torch.int64, device=query.device)
    cu_seqlens = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=query.device)
    others |= {"sliding_window": sliding_window, "document_ids": document_ids, "cu_seqlens": cu_seqlens}
    return attend(module, query, key, value, None, **others)


def mask_of_padding(**given: Any) -> torch.Tensor | None:
    """Return transformers' mask, bool [B, 1, T, T], or None for rows without padding.

    attention_mask: bool [B, T], False in padding. use_vmap: whether a model adds conditions to the mask.
    """
    return None if given.get("attention_mask") is None and not given.get("use_vmap") else sdpa_mask(**given)


AttentionInterface.register(ISOLATED, attend)
AttentionInterface.register(WHOLE_ROWS, attend_in_rows)
AttentionMaskInterface.register(WHOLE_ROWS, mask_of_padding)

# ----------------------------------------------------------------------------------------------------- rotary positions

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"  # names of kinds of layers in transformers


@torch.no_grad()
def set_rotary_bases(model: PreTrainedModel, base: float | None, local: float | None, *, strict: bool = True) -> None:
    """Set the bases of rotary positions in the configuration and the buffers of a model. None: keep a base.

    Raises UsageError if the model has no such layers. With `strict`, also if it ignores the base.
    """
    config: Any = model.config
    for option, kind, value in (("rope_base", _GLOBAL, base), ("rope_base_local", _LOCAL, local)):
        parameters = _rotary(config, kind)
        if value is None or not (parameters or strict):
            continue
        if parameters is None:
            layers = "local layers with rotary positions" if kind == _LOCAL else "rotary positions"
            sentence = f"{option} is {value:g}, and {config.model_type} has no {layers}; leave it out"
            raise UsageError(sentence, "unsupported", option=option, given=value)
        parameters["rope_theta"] = value
    if base is None and local is None:
        return
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            fresh = type(module)(config)
            for name, buffer in module.named_buffers(recurse=False):
                buffer.copy_(fresh.get_buffer(name))


def _rotary(config: Any, kind: str) -> dict[str, Any] | None:
    """Return the rotary parameters of a kind of layer in a configuration; None if there is no such layer."""
    given = getattr(config, "rope_parameters", None) or {}
    parameters: dict[str, Any] | None = (given if given.keys() & {_GLOBAL, _LOCAL} else {_GLOBAL: given}).get(kind)
    if kind == _LOCAL and kind not in (getattr(config, "layer_types", None) or [kind]):
        return None  # ModernBERT's configuration has parameters of local layers even if it has no local layers
    return parameters if parameters and "rope_theta" in parameters else None


# ------------------------------------------------------------------------------------------------------------- encoder


class Encoder(Module):
    """A masked language model of transformers that accepts packed or padded rows.

    isolate: rows contain several packed documents, and tokens attend only to tokens of the same document. Raises
    UsageError if the model's family does not support this.
    """

    def __init__(self, model: PreTrainedModel, *, isolate: bool = False) -> None:
        super().__init__()
        family = family_of(model)
        if isolate and family.isolation is None:
            sentence = f"a {model.config.model_type} does not support --isolate-documents; leave it out, or use a bert"
            raise UsageError(sentence, "unsupported", option="isolate_documents")
        self.model, self.isolate, self.is_dense = model, isolate, family.dense
        self._head = functools.partial(family.head, model) if family.head else _own_head(model)
        self._first_position = first_position(model.config)
        self._takes_positions = "position_ids" in inspect.signature(model.base_model.forward).parameters
        self._takes_types, self._masks = has_token_types(model), family.isolation == "mask"
        self._embed = family.embed if isolate else None
        if isolate and not self._masks:
            model.set_attn_implementation(ISOLATED)

    def _arguments(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        **_: torch.Tensor,
    ) -> dict[str, Any]:
        """Return the arguments of the model's forward pass from the tensors of a micro-batch; others are ignored."""
        arguments: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None and self._takes_types:
            arguments["token_type_ids"] = token_type_ids
        if not self.isolate:
            return arguments
        assert position_ids is not None  # noqa: S101  (packed samples have them)
        if self._masks:
            apart = ~_same(_documents(position_ids))
            zeros = torch.zeros(apart.shape, device=apart.device)
            arguments["attention_mask"] = zeros.masked_fill(apart, torch.finfo(torch.float32).min)
        else:
            arguments |= {"attention_mask": None, "document_ids": _documents(position_ids), "cu_seqlens": cu_seqlens}
        if self._takes_positions:
            arguments["position_ids"] = position_ids + self._first_position
        if self._embed:
            arguments |= {"input_ids": None, "inputs_embeds": self._embed(self.model, input_ids, position_ids)}
        return arguments

    def encode(self, input_ids: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [B, T, H] of rows. others: other tensors of a micro-batch, int64 [B, T].

        position_ids start at 0 in each document of a packed row; cu_seqlens: see `cu_seqlens_of`. Omit attention_mask
        if no row has padding, which is faster.
        """
        return self.model.base_model(**self._arguments(input_ids, **others)).last_hidden_state

    def predict(self, hidden: torch.Tensor, masked_positions: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, K, V] at masked_positions, int64 [B, K]. hidden: states [B, T, H].

        Only the K masked positions of a row reach the vocabulary projection. The result is exact, because a head treats
        each position separately, and saves 85 % of the largest matrix product of a small model.
        """
        return self._head(_at(hidden, masked_positions))

    def outputs(self, piece: MicroBatch, *, predict: bool = True) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the hidden states [B, T, H] and logits [B, K, V] of a micro-batch; logits are None without `predict`.

        A family outside FAMILIES runs its own forward pass, with logits [B, T, V], and its hidden states are None.
        """
        if self.is_dense and predict:
            return None, _at(self.model(**self._arguments(**piece)).logits, piece["masked_positions"])
        hidden = self.encode(**piece)
        return hidden, self.predict(hidden, piece["masked_positions"]) if predict else None

    def logits(self, **piece: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, K, V] of a micro-batch with masked_positions int64 [B, K]."""
        return cast(torch.Tensor, self.outputs(piece)[1])


def _at(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the states [B, K, H] at positions, int64 [B, K]. states: [B, T, H].

    Positions [1, N] with more rows of states count from the first row; the result is [1, N, H].
    """
    if len(positions) < len(states):
        states = states.flatten(0, 1).unsqueeze(0)
    return states.gather(1, positions.unsqueeze(-1).expand(-1, -1, states.shape[-1]))


class _Given(Module):
    """A replacement for the encoder of a model. Its input is hidden states, which it returns unchanged.

    It has the encoder's modules, because a head may multiply by the embeddings.
    """

    def __init__(self, encoder: Module) -> None:
        super().__init__()
        self.__dict__["_modules"] = encoder._modules  # noqa: SLF001

    def forward(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> BaseModelOutputWithPoolingAndCrossAttentions:
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=input_ids)


def _own_head(model: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the model's forward pass without its encoder: hidden states [B, K, H] → logits [B, K, V].

    It is a shallow copy of the model that shares all modules except the encoder, so families need no code for heads.
    """
    head = copy.copy(model)
    head.__dict__["_modules"] = dict(model._modules) | {model.base_model_prefix: _Given(model.base_model)}  # noqa: SLF001
    return functools.partial(_logits, head)  # deepcopy of a partial would copy the model


def _logits(head: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    return head(input_ids=hidden).logits


def recompute_activations(model: PreTrainedModel) -> None:
    """Make layers recompute their activations in the backward pass (Chen et al., 2016), or raise UsageError."""
    model.config.use_cache = False  # True logs a warning in each call, which breaks compiled graphs
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError:
        sentence = f"{model.config.model_type} does not support --gradient-checkpointing; leave it out"
        raise UsageError(sentence, "unsupported", option="gradient_checkpointing") from None
