"""Batches of numpy → micro-batches of tensors on the device. The only file that turns arrays into tensors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from bertdata import IGNORE_INDEX, Batch

MicroBatch = dict[str, torch.Tensor]


def num_targets(batch: Batch) -> int:
    return int((batch.targets != IGNORE_INDEX).sum())


def micro_batches(batch: Batch, *, size: int, count: int, device: torch.device) -> Iterator[MicroBatch]:
    """Exactly `count` pieces of at most `size` rows, as arguments for MaskedLM.

    A piece beyond the batch's rows (ranks may differ by one) is one row without targets, so that every rank runs the
    same number of passes.
    """
    arrays = {name: array for name, array in batch.arrays().items() if name != "sample_ids"}
    for number in range(count):
        piece = {name: array[number * size : (number + 1) * size] for name, array in arrays.items()}
        if piece["input_ids"].shape[0] == 0:
            piece = {name: np.zeros((1, array.shape[1]), np.int64) for name, array in arrays.items()}
            piece["targets"] -= -IGNORE_INDEX
            piece.pop("attention_mask", None)
        yield {name: to_device(array, device) for name, array in piece.items()}


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
