"""Attention that stays inside a document, for rows of packed documents; for others inside a window, or over whole rows.

transformers calls an attention function by name, so ours are registered beside its own. It has no mask function for
packed rows, so it makes no mask. On CUDA, in half precision, the documents go to torch's kernel for sequences of
unequal length, elsewhere to scaled dot-product attention with a mask of the tokens that share a document. (position_ids
alone isolate nothing: without flash attention transformers does not look at them.)

Other rows have an attention of ours on GPUs alone, so that none without padding has a mask of all pairs of tokens. In
layers that attend to a window each row is a document of that kernel. transformers would make a mask for the others too
if a model is compiled by an older torch (2.11), as that says that it exports the model; and flash takes no mask.

Families that compute attention themselves take a mask of all pairs of tokens instead ("mask" in the table of families).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME, WHOLE_ROWS = "bertrain_isolated", "bertrain_whole_rows"
"""What transformers calls the attention of packed rows, and that of other rows."""


def documents(position_ids: torch.Tensor, cu_seqlens: torch.Tensor | None) -> dict[str, Any]:
    """position_ids int64 [B, T] of packed rows → the arguments that `attend` needs.

    position_ids are 0 where a document begins. The padding of a row counts as a document of its own.
    """
    arguments: dict[str, Any] = {"document_ids": (position_ids == 0).cumsum(1)}
    if cu_seqlens is not None:
        arguments |= {"cu_seqlens": cu_seqlens, "max_seqlen": position_ids.shape[1]}
    return arguments


def mask(position_ids: torch.Tensor) -> torch.Tensor:
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
    mask = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    if sliding_window is not None:
        positions = torch.arange(query.shape[2], device=query.device)
        mask = mask & ((positions[:, None] - positions[None, :]).abs() < sliding_window)
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
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


AttentionInterface.register(NAME, attend)
AttentionInterface.register(WHOLE_ROWS, attend_in_rows)
AttentionMaskInterface.register(WHOLE_ROWS, mask_of_padding)
