"""Batches of numpy → micro-batches of tensors on the device, for our loop; bertdata.torch is for other loops."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from bertdata import IGNORE_INDEX, Batch

MicroBatch = dict[str, torch.Tensor]
AMPERE = (8, 0)  # the first GPUs that have a kernel for sequences of unequal length


def num_targets(batch: Batch) -> int:
    """How many tokens of this rank's batch are predicted."""
    return int((batch.targets != IGNORE_INDEX).sum())


def micro_batches(batch: Batch, *, size: int, count: int, device: torch.device) -> Iterator[MicroBatch]:
    """Exactly `count` pieces of at most `size` rows, as arguments for Learner.

    A rank may have one row less than another. A micro-batch after its last row is one row without targets, whose
    sample_ids is −1, so that every rank runs the same number of passes. Packed rows come with cu_seqlens, int32, on
    GPUs whose attention kernel needs them, and with an attention_mask there, whether a row has padding or not.
    """
    arrays = {name: torch.from_numpy(array) for name, array in batch.arrays().items() if name != "sources"}
    for number in range(count):
        piece = {name: array[number * size : (number + 1) * size] for name, array in arrays.items()}
        if piece["input_ids"].shape[0] == 0:
            piece = {name: torch.zeros((1, *array.shape[1:]), dtype=array.dtype) for name, array in arrays.items()}
            piece["sample_ids"] -= 1
            for name in {"targets", "next_sentence_label"} & piece.keys():
                piece[name] += IGNORE_INDEX
            if "position_ids" in piece:  # one document, not as many as tokens
                piece["position_ids"] += torch.arange(batch.input_ids.shape[1])
            piece.pop("attention_mask", None)
        if "position_ids" in piece and has_kernel(device):
            piece["cu_seqlens"] = cu_seqlens_of(piece["position_ids"])
            piece.setdefault("attention_mask", torch.ones_like(piece["input_ids"]))  # with and without: two graphs
        yield {name: to_device(array, device) for name, array in piece.items()}


@functools.cache
def has_kernel(device: torch.device) -> bool:
    """Whether torch has attention for sequences of unequal length, with windows, for a device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= AMPERE


def cu_seqlens_of(position_ids: torch.Tensor) -> torch.Tensor:
    """position_ids int64 [B, T] of packed rows → where documents begin among the B · T tokens, and the end: int32.

    The padding of a row counts as a document. The end is repeated until the number of documents is a power of two, so
    that there are few shapes: a kernel's backward pass takes memory and time for each.
    """
    starts = (position_ids == 0).flatten().nonzero().flatten()
    padded = torch.full(((1 << (starts.numel() - 1).bit_length()) + 1,), position_ids.numel(), dtype=torch.int32)
    padded[: starts.numel()] = starts
    return padded


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies through pinned memory, which torch reuses, so that the host need not wait for the copy."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
