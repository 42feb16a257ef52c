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
    """Return a batch as keyword arguments of transformers models: input_ids, attention_mask, labels and others.

    Leaves out the weights of uniform masking, which no model accepts. Raises UsageError for packed rows.
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
    """Raise UsageError for batches for which the loss of transformers models would be different.

    Packed rows need a [T, T] mask, which disables the local attention of ModernBERT and has a different meaning in
    DeBERTa; RoBERTa's position ids start at 2. The models accept no row weights.
    """
    alternative = "which models of transformers support, such as 'documents' or 'exact', or read the Loader"
    require(samples != "packed", "samples", samples, f"samples {alternative}", "unsupported")
    is_weighted = masking is not None and masking.policy == "uniform"
    require(not is_weighted, "masking", masking, f"a policy {alternative}", "unsupported")


class SampleDataset(torch.utils.data.Dataset[Tensors]):
    """The samples of one epoch of a Loader, by index, in the Loader's order: for samplers, Trainer and accelerate.

    Sample i is dict(input_ids [T], attention_mask [T], labels [T], ...), int64. It is already masked, so use the
    default collator. It is the same in every process and at any time. `set_epoch(e)` selects the order and masks of
    epoch e, also in persistent workers of a DataLoader. The dataset follows the epoch of accelerate's sampler when the
    sampler starts. With a DistributedSampler, call `set_epoch` of both. A pickled dataset is smaller than 4 KB.
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
        """Adopt the epoch of a sampler of accelerate when it starts: it calls len() of the dataset first.

        On several processes, and after skip_first_batches, accelerate sets the epoch of its sampler, but not of the
        dataset.
        """
        sampler = caller.f_locals.get("self") if caller.f_code.co_name == "__iter__" else None
        if isinstance(sampler, RandomSampler) and hasattr(sampler, "epoch"):  # torch's own class has no epoch
            self.set_epoch(sampler.epoch)

    def __getitem__(self, index: int) -> Tensors:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Tensors]:
        """Return several samples, for DataLoader. Raises IndexError for an index that is out of range."""
        numbers, n = np.asarray(indices, np.int64), len(self)
        if (wrong := numbers[(numbers < -n) | (numbers >= n)]).size:
            raise IndexError(f"sample {wrong[0]} of {n}")
        batch = tensors(self.loader.read(self.epoch * n + numbers % n))
        return [{name: tensor[row] for name, tensor in batch.items()} for row in range(numbers.size)]


class BatchDataset(torch.utils.data.IterableDataset[Tensors]):
    """The batches of a Loader as dicts of tensors [B, T]: `DataLoader(BatchDataset(loader), batch_size=None)`.

    Of n DataLoader workers, worker w makes batches w, w + n, ..., so the order of batches is the same for any n. Each
    iteration starts at the position of the Loader or of the loaded state. With several ranks, give each rank its own
    Loader, made with its rank; do not shard the dataset again.

    `state_dict(batches)` returns the state of the Loader after this number of batches of the current iteration. By
    default it counts the batches that this copy of the dataset made: with DataLoader workers, give the number.
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
