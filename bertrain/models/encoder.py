"""A masked language model as the trainer calls it: rows → hidden states → logits of the masked positions alone.

Also how it computes attention, keeps packed documents apart, and turns positions.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import Module
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from bertdata.errors import UsageError, is_out_of_memory
from bertrain.models.families import FAMILIES, family_of, first_position, has_token_types

MicroBatch = dict[str, torch.Tensor]


AMPERE = (8, 0)  # the first GPUs that have a kernel for sequences of unequal length


def cu_seqlens_of(position_ids: torch.Tensor) -> torch.Tensor:
    """position_ids int64 [B, T] of packed rows → where documents begin among the B · T tokens, and the end: int32.

    The padding of a row counts as a document. The end is repeated until the number of documents is a power of two, so
    that there are few shapes: a kernel's backward pass takes memory and time for each.
    """
    starts = (position_ids == 0).flatten().nonzero().flatten()
    padded = torch.full(((1 << (starts.numel() - 1).bit_length()) + 1,), position_ids.numel(), dtype=torch.int32)
    padded[: starts.numel()] = starts
    return padded


@functools.cache
def has_kernel(device: torch.device) -> bool:
    """Whether torch has attention for sequences of unequal length, with windows, for a device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= AMPERE


ISOLATED, WHOLE_ROWS = "bertrain_isolated", "bertrain_whole_rows"
"""What transformers calls the attention of packed rows, and that of other rows."""


def document_arguments(position_ids: torch.Tensor, cu_seqlens: torch.Tensor | None) -> dict[str, Any]:
    """position_ids int64 [B, T] of packed rows → the arguments that `attend` needs.

    position_ids are 0 where a document begins. The padding of a row counts as a document of its own.
    """
    arguments: dict[str, Any] = {"document_ids": (position_ids == 0).cumsum(1)}
    if cu_seqlens is not None:
        arguments |= {"cu_seqlens": cu_seqlens, "max_seqlen": position_ids.shape[1]}
    return arguments


def isolation_mask(position_ids: torch.Tensor) -> torch.Tensor:
    """position_ids int64 [B, T] of packed rows → what to add to attention scores, float32 [B, 1, T, T]."""
    document_ids = (position_ids == 0).cumsum(1)
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return torch.zeros(same.shape, device=same.device).masked_fill(~same, torch.finfo(torch.float32).min)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    document_ids: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query, key, value [B, heads, T, D] → [B, T, heads, D]. Several heads may share a key and a value.

    sliding_window: a token attends to tokens at a smaller distance than this. document_ids int64 [B, T].
    """
    width = query.shape[-1]
    if (sharing := query.shape[1] // key.shape[1]) > 1:
        key, value = key.repeat_interleave(sharing, 1), value.repeat_interleave(sharing, 1)
    # What the kernel takes: bf16 and fp16, of one dtype. Autocast leaves it alone, and rotary positions make float32 of
    # queries and keys in some families.
    is_half = value.dtype != torch.float32
    can = is_half and dropout == 0 and width % 8 == 0 and width <= 256
    if cu_seqlens is not None and max_seqlen is not None and can:
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (tensor.to(value.dtype).transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
        reach = -1 if sliding_window is None else sliding_window - 1
        attended = varlen_attn(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=scaling, window_size=(reach, reach)
        )
        tokens: Any = attended  # a pair only where return_aux is given
        return tokens.unflatten(0, (query.shape[0], query.shape[2])), None
    if document_ids is None:
        raise RuntimeError("a model that isolates documents was called without document_ids; call it through Encoder")
    isolation_mask = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    if sliding_window is not None:
        positions = torch.arange(query.shape[2], device=query.device)
        isolation_mask = isolation_mask & ((positions[:, None] - positions[None, :]).abs() < sliding_window)
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=isolation_mask, dropout_p=dropout, scale=scaling
    )
    return attended.transpose(1, 2).contiguous(), None


def attend_in_rows(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """As `attend`, for rows that are not packed. Only a window in rows without padding is computed otherwise."""
    rows, length = query.shape[0], query.shape[2]
    if attention_mask is not None or sliding_window is None or sliding_window >= length:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **others)
    documents = {
        "document_ids": torch.zeros((rows, length), dtype=torch.int64, device=query.device),
        "cu_seqlens": torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=query.device),
        "max_seqlen": length,
    }
    return attend(module, query, key, value, None, sliding_window=sliding_window, **others | documents)


def mask_of_padding(
    *, attention_mask: torch.Tensor | None = None, use_vmap: bool = False, **others: Any
) -> torch.Tensor | None:
    """The mask that transformers makes for a layer, bool [B, 1, T, T]; None for rows without padding.

    attention_mask bool [B, T]: False in padding. use_vmap: set where a model adds a condition of its own to the mask.
    """
    if attention_mask is None and not use_vmap:
        return None
    return sdpa_mask(attention_mask=attention_mask, use_vmap=use_vmap, **others)


AttentionInterface.register(ISOLATED, attend)
AttentionInterface.register(WHOLE_ROWS, attend_in_rows)
AttentionMaskInterface.register(WHOLE_ROWS, mask_of_padding)


_GLOBAL, _LOCAL = "full_attention", "sliding_attention"  # kinds of layers, as transformers calls them


@torch.no_grad()
def set_rotary_bases(model: PreTrainedModel, base: float | None, local: float | None) -> None:
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


def rotary_kinds(config: Any) -> tuple[bool, bool]:
    """Whether a model has layers with rotary positions, and local ones."""
    return _parameters(config, _GLOBAL) is not None, _parameters(config, _LOCAL) is not None


def _parameters(config: Any, kind: str) -> dict[str, Any] | None:
    """What a configuration says of the rotary positions of a kind of layer; None: it has no such layer."""
    given = getattr(config, "rope_parameters", None) or {}
    parameters: dict[str, Any] | None = (given if given.keys() & {_GLOBAL, _LOCAL} else {_GLOBAL: given}).get(kind)
    if kind == _LOCAL and kind not in (getattr(config, "layer_types", None) or [kind]):
        return None  # ModernBERT's configuration has them without such a layer, too
    return parameters if parameters and "rope_theta" in parameters else None


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
            model.set_attn_implementation(ISOLATED)

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
                arguments["attention_mask"] = isolation_mask(position_ids)
            else:
                del arguments["attention_mask"]
                arguments |= document_arguments(position_ids, cu_seqlens)
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
        (cu_seqlens_of). Where all rows are full there is no attention_mask, so that attention takes its fastest
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


KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
ON_CPUS = ("flash", "math")
LAST_FAULTY = (2, 13)
"""The newest torch whose cuDNN attention is left out: its backward pass may give NaN (pytorch #196678, since 2.11, for
masks and some lengths on H100 and H200; diffusers #9768 of 2.5). Raise it, or not, when a newer one was tried."""
SHORT = 512  # tokens of a row up to which bf16 attention on CPUs is faster as plain products than torch's kernel
PROBED = 64  # tokens of the row that shows whether a kernel can run


def attention_kernels(choice: str, encoder: Encoder, device: torch.device) -> tuple[str, ...]:
    """The kernels that --attention lets a model run; what transformers calls its attention if it has no such kernel."""
    own = str(encoder.model.config._attn_implementation)  # noqa: SLF001
    if own not in ("sdpa", ISOLATED, WHOLE_ROWS):
        return (own,)
    if choice == "flash" and device.type != "cpu":
        return "flash", "efficient"  # rows with padding have masks, which flash does not take there
    if choice != "auto":
        return (choice,)
    if device.type == "cpu":
        return ON_CPUS
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return tuple(name for name in KERNELS if name != "cudnn" or version > LAST_FAULTY)


def limit_kernels(names: tuple[str, ...]) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A function that makes the context in which only these kernels run."""
    some = [KERNELS[name] for name in names if name in KERNELS]
    return lambda: sdpa_kernel(some) if some else contextlib.nullcontext()


def require_kernel(
    choice: str, encoder: Encoder, device: torch.device, autocast: Callable[[], contextlib.AbstractContextManager[Any]]
) -> None:
    """Raises UsageError if a model cannot run with the kernel that --attention names; auto always can.

    Calls the model on one row of PROBED tokens, as training would.
    """
    if choice == "auto":
        return
    own, kind = attention_kernels(choice, encoder, device), encoder.model.config.model_type
    positions = torch.arange(PROBED)[None]
    piece = {"input_ids": positions % encoder.model.config.vocab_size, "masked_positions": positions[:, :1]}
    if encoder.isolate:
        piece["position_ids"] = positions
        piece |= {"cu_seqlens": cu_seqlens_of(positions)} if has_kernel(device) else {}
    try:
        if own[0] != choice:
            raise RuntimeError(f"the model computes attention by itself: {own[0]}")
        with autocast(), limit_kernels((choice,))():  # alone: a full row has no mask
            encoder.logits(**{name: tensor.to(device) for name, tensor in piece.items()})
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split()).rstrip(".")
        sentence = f"--attention {choice} cannot run for a {kind} on {device.type} ({reason}); give another, or auto"
        raise UsageError(sentence, "unsupported", option="attention", given=choice) from None


def choose_attention(model: PreTrainedModel, *, bf16: bool, on_gpu: bool, length: int) -> None:
    """Sets plain products where they are faster than torch's kernels: bf16 on CPUs, rows of at most 512 tokens."""
    if bf16 and not on_gpu and length <= SHORT:
        model.set_attn_implementation("eager")


def leave_out_masks(model: PreTrainedModel, *, in_windows: bool) -> None:
    """Lets a model compute rows without padding without a mask of all pairs of tokens, where it can.

    in_windows: whether the device has a kernel for layers that attend to a window, as GPUs have in half precision. If
    not, a model with such layers keeps its masks.
    """
    is_local = "sliding_attention" in (getattr(model.config, "layer_types", None) or ())
    can = family_of(model).isolation == "kernel" and model.config._attn_implementation == "sdpa"  # noqa: SLF001
    if can and (in_windows or not is_local):
        model.set_attn_implementation(WHOLE_ROWS)
