"""sample_id → spans of shards → rows of ids.

Windows: the documents of a split, end to end with their separators, cut every C = length − 2 tokens from a phase that
each epoch moves. No index is stored or read: an address is arithmetic and a row is one slice, or two where it crosses
shards. Nothing is lost; at most one row an epoch is padded.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bertdata import _kernels
from bertdata.errors import DatasetError, UsageError
from bertdata.reader import Dataset


class Windows:
    """The windows of one split. Holds a memory map per shard and one offset each; any number may share the pages."""

    def __init__(self, dataset: Dataset, *, split: str, length: int, seed: int) -> None:
        if split not in dataset.splits:
            known = ", ".join(dataset.splits)
            raise UsageError(
                f"{dataset.path} has no split {split!r}, only {known}; a very small corpus may have put all its "
                "documents there: build it with --validation 0"
            )
        if length < 3:
            raise UsageError(f"length is {length}; a row needs [CLS], [SEP] and a token between them: at least 3")
        self._frame = _frame(dataset)
        self._dataset, self._split = dataset, split
        self._text_length, self._seed = length - 2, seed
        shards = dataset.splits[split].shards
        sizes = [shard.num_tokens for shard in shards]
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        tokens = [dataset.tokens(split, number) for number in range(len(shards))]
        self._addresses = np.array([array.ctypes.data for array in tokens])
        self._like = tokens[0].dtype.type(0)
        self.num_samples = -(-int(self._starts[-1]) // self._text_length)

    def rows(
        self, epochs: NDArray[np.int64], sample_ids: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows of ids, int64 [B, T], padded at the end, and how many tokens of text each holds, int64 [B]."""
        num_shards = self._starts.size - 1
        ids = np.empty((sample_ids.size, self._text_length + 2), np.int64)
        filled = np.empty(sample_ids.size, np.int64)
        spans = np.empty((sample_ids.size * (min(num_shards, self._text_length) + 1), 4), np.int64)
        cls, sep, pad = self._frame
        count = _kernels.window_rows(
            epochs, sample_ids, np.uint64(self._seed), self._text_length, self._starts, self._addresses,
            self._like.itemsize, cls, sep, ids, filled, spans,
        )  # fmt: skip
        if _kernels.fill_rows(spans[:count], self._like, pad, filled, ids) >= self._dataset.special_tokens.vocab_size:
            raise DatasetError(f"{self._dataset.path} is damaged; bertdata verify says where")
        return ids, filled


def _frame(dataset: Dataset) -> tuple[int, int, int]:
    """The ids of [CLS], [SEP] and padding. Without a padding token it is 0, which the attention mask makes inert."""
    special = dataset.special_tokens
    if special.cls is None or special.sep is None:
        raise UsageError(
            f"the tokenizer of {dataset.path} has no [CLS] and [SEP], which stand at the ends of every row; "
            "build the dataset with a BERT-type tokenizer"
        )
    return special.cls, special.sep, special.pad or 0
