"""Batches as tensors, for third-party training loops: datasets for torch's DataLoader."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torch.utils.data import RandomSampler

from bertdata.errors import require
from bertdata.read.loader import Loader
from bertdata.types import Batch, Masking

Tensors = dict[str, torch.Tensor]


def tensors(batch: Batch) -> Tensors:
    """Return a batch as arguments of transformers' models: input_ids, attention_mask, labels, and what else they take.

    The weights of uniform masking, which no model takes, are left out. Raises UsageError for packed rows.
    """
    _require_supported("packed" if batch.position_ids is not None else "", None)
    arrays = {
        "input_ids": batch.input_ids,
        "attention_mask": np.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask,
        "labels": batch.labels,
        "token_type_ids": batch.token_type_ids,
        "next_sentence_label": batch.next_sentence_label,
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items() if array is not None}


def _require_supported(samples: str, masking: Masking | None) -> None:
    """Raise UsageError for batches that models of transformers train on with a different loss.

    Packed rows need a mask of all pairs of tokens, which takes the windows of ModernBERT away and which DeBERTa reads
    differently; RoBERTa's positions begin at 2. The models take no weights of rows.
    """
    alternative = "which models of transformers support, such as 'documents' or 'exact', or read the Loader"
    require(samples != "packed", "samples", samples, f"samples {alternative}", "unsupported")
    is_weighted = masking is not None and masking.policy == "uniform"
    require(not is_weighted, "masking", masking, f"a policy {alternative}", "unsupported")


class SampleDataset(torch.utils.data.Dataset[Tensors]):
    """The samples of one epoch of a Loader, by number, in the Loader's order: for samplers, Trainer and accelerate.

    Sample i is dict(input_ids [T], attention_mask [T], labels [T], ...), int64: no collator has to mask, and the
    default one stacks. It does not matter which process reads it, or when. `set_epoch(e)` goes to the order and masks
    of epoch e, also in persistent workers of a DataLoader: they share the number. The dataset takes the epoch of
    accelerate's sampler when that starts. With a DistributedSampler call `set_epoch` of both. Pickles in under 4 KB.
    """

    def __init__(self, loader: Loader, *, epoch: int = 0) -> None:
        _require_supported(loader.samples, loader.masking)
        self.loader = loader
        self._epoch = torch.tensor(epoch).share_memory_()

    def __repr__(self) -> str:
        return f"<SampleDataset of epoch {self.epoch}: {self.loader!r}>"

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        self._follow(sys._getframe(1))  # noqa: SLF001
        return self.loader.num_samples

    def _follow(self, caller: FrameType) -> None:
        """Take the epoch of a sampler of accelerate that starts, which asks for the length first.

        accelerate tells the epoch to its sampler alone, not to the dataset, on several processes and after
        skip_first_batches.
        """
        sampler = caller.f_locals.get("self") if caller.f_code.co_name == "__iter__" else None
        if isinstance(sampler, RandomSampler) and hasattr(sampler, "epoch"):  # that of torch has none
            self.set_epoch(sampler.epoch)

    def __getitem__(self, index: int) -> Tensors:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Tensors]:
        """Several at once, which is how DataLoader asks. Raises IndexError for a number that no sample has."""
        numbers, n = np.asarray(indices, np.int64), len(self)
        if (wrong := numbers[(numbers < -n) | (numbers >= n)]).size:
            raise IndexError(f"sample {wrong[0]} of {n}")
        batch = tensors(self.loader.read(self.epoch * n + numbers % n))
        return [{name: tensor[row] for name, tensor in batch.items()} for row in range(numbers.size)]


class BatchDataset(torch.utils.data.IterableDataset[Tensors]):
    """The batches of a Loader as dicts of tensors [B, T]: `DataLoader(BatchDataset(loader), batch_size=None)`.

    Of n DataLoader workers, worker w makes batches w, w + n, ..., so they come out in order, the same for any n. Each
    iteration begins where the Loader stands, or where a state was taken. With several ranks each has its own Loader,
    with its rank; do not shard the dataset again.

    `state_dict(batches)` is the state of the Loader after this number of batches of the current iteration. Without a
    number it counts the batches that this copy of the dataset made, which are all of them without workers.
    """

    def __init__(self, loader: Loader) -> None:
        _require_supported(loader.samples, loader.masking)
        self.loader = loader
        self._made = 0  # batches of the current iteration

    def __repr__(self) -> str:
        return f"<BatchDataset: {self.loader!r}>"

    def __iter__(self) -> Iterator[Tensors]:
        worker = torch.utils.data.get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        self._made = 0
        while (batch := self.loader.batch(number + workers * self._made)) is not None:
            self._made += 1
            yield tensors(batch)

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        number = self._made if batches is None else batches
        return self.loader.state_dict() | {"position": self.loader.position_of(number)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise StateError if the state belongs to another stream."""
        self.loader.load_state_dict(state)
        self._made = 0
