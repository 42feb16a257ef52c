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
        sizes = [shard.num_tokens for shard in dataset.splits[split].shards]
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.num_samples = -(-int(self._starts[-1]) // self._text_length)

    def rows(
        self, epochs: NDArray[np.int64], sample_ids: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows of ids, int64 [B, T], padded at the end, and how many tokens of text each holds, int64 [B]."""
        num_rows, num_shards = sample_ids.size, self._starts.size - 1
        cls, sep, pad = self._frame
        ids = np.full((num_rows, self._text_length + 2), pad, np.int64)
        filled = np.empty(num_rows, np.int64)
        spans = np.empty((num_rows * (min(num_shards, self._text_length) + 1), 5), np.int64)
        count = _kernels.window_spans(
            epochs, sample_ids, np.uint64(self._seed), self._text_length, self._starts, spans, filled
        )
        spans = spans[:count]
        for shard in np.unique(spans[:, 0]) if num_shards > 1 else range(num_shards):
            largest = _kernels.gather(self._dataset.tokens(self._split, int(shard)), shard, spans, ids)
            if not 0 <= largest < self._dataset.special_tokens.vocab_size:
                raise DatasetError(f"{self._dataset.path} is damaged; bertdata verify says where")
        ids[:, 0] = cls
        ids[np.arange(num_rows), filled + 1] = sep
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
