"""The tokens of a split, shard after shard, and spans of them copied into rows."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import DatasetError, UsageError
from bertdata.format.arrays import (
    Unmapped,
    pages_of,
)
from bertdata.format.dataset import Dataset
from bertdata.read import kernels

_INDEX_VERSION = 1
_DOCUMENTS_AT_ONCE = 1 << 16


class Rows(NamedTuple):
    """What a batch is before it is masked. Every array but the last is int64."""

    ids: NDArray[np.int64]  # [B, T], padded at the end
    filled: NDArray[np.int64]  # [B]: places between the first [CLS] and the last [SEP]
    position_ids: NDArray[np.int64] | None = None  # [B, T]
    token_type_ids: NDArray[np.int64] | None = None  # [B, T]
    next_sentence_label: NDArray[np.int64] | None = None  # [B]
    goes_on: NDArray[np.uint8] | None = None  # [B, T]: 1 where a token begins no word; None: not stored or not asked


class TokenStream:
    """The tokens of a split, shard after shard. Any number of processes share the pages."""

    def __init__(self, dataset: Dataset, *, split: str, length: int, words: bool = False) -> None:
        """words: whether to tell where words begin, if the dataset knows."""
        if split not in dataset.splits:
            known = ", ".join(dataset.splits)
            raise UsageError(
                f"{dataset.path} has no split {split!r}, only {known}; a very small corpus may have put all its "
                "documents there: build it with --validation 0"
            )
        if length < 3:
            raise UsageError(f"length is {length}; a row needs [CLS], [SEP] and a token between them: at least 3")
        special = dataset.special_tokens
        if special.cls is None or special.sep is None:
            raise UsageError(
                f"the tokenizer of {dataset.path} has no [CLS] and [SEP], which stand at the ends of every row; "
                "build the dataset with a BERT-type tokenizer"
            )
        self.dataset, self.split, self.length = dataset, split, length
        self.shards = dataset.splits[split].shards
        self.starts = np.cumsum([0, *(shard.num_tokens for shard in self.shards)], dtype=np.int64)
        self._tokens: list[Any] = [dataset.tokens(split, number) for number in range(len(self.shards))]
        self._like = self._tokens[0].dtype.type(0)
        self._pad = special.pad or 0  # without a padding token it is 0, which the attention mask makes inert
        self._mapped = not any(isinstance(array, Unmapped) for array in self._tokens)
        addresses = np.array([array.ctypes.data if self._mapped else 0 for array in self._tokens])
        self.table = self.starts, addresses, self._like.itemsize, special.cls, special.sep
        """What kernels that lay out rows are told."""
        self._words: NDArray[np.int64] | None = None
        if words and all("words" in shard.arrays for shard in self.shards):
            self._words = np.array([dataset.array(shard.name, "words").ctypes.data for shard in self.shards])

    @property
    def has_separators(self) -> bool:
        return self.dataset.special_tokens.separator is not None

    def empty(self, num_rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """ids [B, T] and filled [B] to be overwritten."""
        return np.empty((num_rows, self.length), np.int64), np.empty(num_rows, np.int64)

    def fill(
        self, spans: NDArray[np.int64], filled: NDArray[np.int64], ids: NDArray[np.int64]
    ) -> NDArray[np.uint8] | None:
        """Copies the spans' tokens into rows whose frames are there, and pads them. Returns Rows.goes_on."""
        if not self._mapped:
            tokens = self._read(spans)
            spans[:, 0] = tokens.ctypes.data + np.append(0, np.cumsum(spans[:-1, 3])) * tokens.itemsize
        if kernels.fill_rows(spans, self._like, self._pad, filled, ids) >= self.dataset.special_tokens.vocab_size:
            raise DatasetError(f"{self.dataset.path} is damaged; bertdata verify says where")
        if self._words is None:
            return None
        goes_on = np.zeros(ids.shape, np.uint8)
        kernels.word_flags(spans, self.starts, self._words, goes_on)
        return goes_on

    def _read(self, spans: NDArray[np.int64]) -> NDArray[Any]:
        """The tokens of all spans, end to end."""
        tokens, done = np.empty(int(spans[:, 3].sum()), self._like.dtype), 0
        for length, place in spans[:, 3:].tolist():
            shard = int(np.searchsorted(self.starts, place, side="right")) - 1
            self._tokens[shard].read(place - int(self.starts[shard]), tokens[done : done + length])
            done += length
        return tokens

    def identity(self, samples: str) -> dict[str, Any]:
        """What an index of this split is found by."""
        name = {"version": _INDEX_VERSION, "dataset_id": self.dataset.dataset_id, "split": self.split}
        return name | {"samples": samples, "length": self.length}

    def documents(self) -> Iterator[tuple[int, NDArray[np.uint64]]]:
        """Shard number and offsets of some of its documents, in order, 8 bytes a document."""
        for number, shard in enumerate(self.shards):
            offsets = self.dataset.array(shard.name, "documents")
            for first in range(0, shard.num_documents, _DOCUMENTS_AT_ONCE):
                yield number, offsets[first : first + _DOCUMENTS_AT_ONCE + 1]

    def read_at_random(self) -> None:
        """Tells the kernel not to read around what is asked for, if the tokens do not fit in half of the memory."""
        if (
            self._mapped
            and int(self.starts[-1]) * self._like.itemsize > os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // 2
        ):
            for tokens in self._tokens:
                pages_of(tokens).madvise(mmap.MADV_RANDOM)

    def read_ahead(self, ranges: list[tuple[int, int]]) -> None:
        """Asks for ranges of the stream to be read from the disk, without waiting."""
        for start, stop in ranges:
            start, stop = max(0, start), min(stop, int(self.starts[-1]))  # an index may be damaged; its rows will tell
            while self._mapped and start < stop:
                shard = int(np.searchsorted(self.starts, start, side="right")) - 1
                end = min(stop, int(self.starts[shard + 1]))
                pages = pages_of(self._tokens[shard])
                offset = len(pages) - self._tokens[shard].nbytes
                first, last = (offset + self._like.itemsize * (at - int(self.starts[shard])) for at in (start, end))
                first -= first % mmap.PAGESIZE
                pages.madvise(mmap.MADV_WILLNEED, first, last - first)
                start = end


def require_sound(count: int) -> None:
    if count < 0:
        raise DatasetError(
            "the index of samples is damaged; delete the cache directory, BERTDATA_CACHE or ~/.cache/bertdata"
        )
