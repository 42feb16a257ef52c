"""Batches of numpy → tensors: micro-batches on the device for our loop, torch datasets for other loops.

The only file that turns batches into tensors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils.data

from bertdata import IGNORE_INDEX, Batch, Loader

MicroBatch = dict[str, torch.Tensor]
AMPERE = (8, 0)  # the first GPUs that have a kernel for sequences of unequal length


def num_targets(batch: Batch) -> int:
    """How many places of this rank's batch are predicted."""
    return int((batch.targets != IGNORE_INDEX).sum())


def micro_batches(batch: Batch, *, size: int, count: int, device: torch.device) -> Iterator[MicroBatch]:
    """Exactly `count` pieces of at most `size` rows, as arguments for Learner.

    A rank may have one row less than another. A micro-batch after its last row is one row without targets, whose
    sample_ids is −1, so that every rank runs the same number of passes. Packed rows come with cu_seqlens, int32, on
    GPUs whose attention kernel needs them.
    """
    arrays = {name: torch.from_numpy(array) for name, array in batch.arrays().items()}
    for number in range(count):
        piece = {name: array[number * size : (number + 1) * size] for name, array in arrays.items()}
        if piece["input_ids"].shape[0] == 0:
            piece = {name: torch.zeros((1, *array.shape[1:]), dtype=array.dtype) for name, array in arrays.items()}
            piece["sample_ids"] -= 1
            for name in {"targets", "next_sentence_label"} & piece.keys():
                piece[name] += IGNORE_INDEX
            if "position_ids" in piece:  # one document, not as many as places
                piece["position_ids"] += torch.arange(batch.input_ids.shape[1])
            piece.pop("attention_mask", None)
        if "position_ids" in piece and has_kernel(device):
            piece["cu_seqlens"] = cu_seqlens_of(piece["position_ids"])
        yield {name: to_device(array, device) for name, array in piece.items()}


@functools.cache
def has_kernel(device: torch.device) -> bool:
    """Whether torch has attention for sequences of unequal length, with windows, for a device: torch 2.11 or newer."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < AMPERE:
        return False
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "window_size" in inspect.signature(varlen_attn).parameters


def cu_seqlens_of(position_ids: torch.Tensor) -> torch.Tensor:
    """position_ids int64 [B, T] of packed rows → where their documents begin in the B · T places, and the end: int32.

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


def tensors(batch: Batch) -> MicroBatch:
    """A batch as arguments of transformers' models: input_ids, attention_mask, labels, and what else its rows have."""
    arrays = {
        "input_ids": batch.input_ids,
        "attention_mask": np.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask,
        "labels": batch.labels,
        "token_type_ids": batch.token_type_ids,
        "position_ids": batch.position_ids,
        "next_sentence_label": batch.next_sentence_label,
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items() if array is not None}


class SampleDataset(torch.utils.data.Dataset[MicroBatch]):
    """The samples of one epoch of a Loader, by number, in the Loader's order: for samplers, Trainer and accelerate.

    Sample i is dict(input_ids [T], attention_mask [T], labels [T], ...), int64: no collator has to mask, and the
    default one stacks. It does not matter which process reads it, or when. `set_epoch(e)` goes to the order and masks
    of epoch e, also in persistent workers of a DataLoader: they share the number. Pickles in under 4 KB.
    """

    def __init__(self, loader: Loader, *, epoch: int = 0) -> None:
        self.loader = loader
        self._epoch = torch.tensor(epoch).share_memory_()

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return self.loader.num_samples

    def __getitem__(self, index: int) -> MicroBatch:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[MicroBatch]:
        """Several at once, which is how DataLoader asks."""
        numbers = np.asarray(indices, np.int64) % len(self)
        whole = tensors(self.loader.read(self.epoch * len(self) + numbers))
        return [{name: tensor[row] for name, tensor in whole.items()} for row in range(numbers.size)]


class BatchDataset(torch.utils.data.IterableDataset[MicroBatch]):
    """The batches of a Loader as dicts of tensors [B, T]: `DataLoader(BatchDataset(loader), batch_size=None)`.

    Of n DataLoader workers, worker w makes batches w, w + n, ..., so they come out in order, the same for any n. Each
    iteration begins where the Loader stands, or where a state was taken. With several ranks each has its own Loader,
    with its rank; do not shard the dataset again.

    `state_dict(batches)` is the state after so many batches of the current iteration. Without a number it counts the
    batches that this copy of the dataset made: all of them without workers, else those of one worker, which is what
    torchdata's StatefulDataLoader keeps.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self._made = self._resumed = 0

    def __iter__(self) -> Iterator[MicroBatch]:
        worker = torch.utils.data.get_worker_info()
        number, step = (worker.id, worker.num_workers) if worker else (0, 1)
        self._made, self._resumed = self._resumed, 0
        while (batch := self.loader.batch(number + step * self._made)) is not None:
            self._made += 1
            yield tensors(batch)

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        if batches is None:
            return {"loader": self.loader.state_dict(), "made": self._made}
        state = self.loader.state_dict()
        return {"loader": state | {"position": self.loader.position_of(batches)}, "made": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises StateError if the state belongs to another stream."""
        self.loader.load_state_dict(state["loader"])
        self._resumed = state["made"]
