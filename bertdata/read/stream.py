"""The tokens of a split as one stream, and the rows of a batch that are filled from it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import DatasetError, UsageError, damaged
from bertdata.format.arrays import Unmapped, pages_of
from bertdata.format.dataset import Dataset
from bertdata.read import kernels

_DOCUMENTS_AT_ONCE = 1 << 16


class Rows(NamedTuple):
    """A batch before it is masked. All arrays but inside_word are int64."""

    ids: NDArray[np.int64]  # [B, T], padded at the end
    text_places: NDArray[np.int64]  # [B]: places between the first [CLS] and the last [SEP]
    attention_mask: NDArray[np.int64] | None  # [B, T]: 1 where filled; None if no row is padded
    inside_word: NDArray[np.uint8] | None  # [B, T]: 1 where a token continues a word; None: not stored or not asked
    position_ids: NDArray[np.int64] | None = None  # [B, T], of packed rows
    token_type_ids: NDArray[np.int64] | None = None  # [B, T], of pairs
    next_sentence_label: NDArray[np.int64] | None = None  # [B], of pairs
    spans: NDArray[Any] | None = None  # kernels.SPAN [n]: which tokens of the stream the rows are made of


class Samples(Protocol):
    """One way to cut a split into samples: Windows, Pieces or Pairs."""

    stream: TokenStream
    num_samples: int  # of an epoch

    @property
    def facts(self) -> dict[str, float]:
        """Shares of an epoch, from 0 to 1; see `Loader.facts`."""

    def rows(self, epochs: NDArray[np.int64], sample_ids: NDArray[np.int64]) -> Rows:
        """The rows of samples: epochs and sample_ids int64 [B]. Raises DatasetError for damage."""

    def ranges(self, epoch: int, first: int, stop: int) -> list[tuple[int, int]]:
        """Ranges of the stream that hold the text of samples first, first + 1, ..., stop - 1."""


class TokenStream:
    """The tokens of a split, its shards end to end. All processes that read a dataset share its pages.

    .starts int64 [num_shards + 1]: where each shard begins in the stream, then the length of the stream.

    Raises UsageError if the dataset has no such split, if rows of this length have no room for text, or if the
    tokenizer lacks [CLS] or [SEP].
    """

    def __init__(self, dataset: Dataset, *, split: str, length: int, words: bool = False) -> None:
        """length: places of a row. words: fill Rows.inside_word, if the dataset stores where words begin."""
        if split not in dataset.splits:
            raise UsageError(
                f"{dataset.path} has no split {split!r}; it has {', '.join(dataset.splits)}. A small corpus can leave "
                "a split without documents; to put all documents into train, build with --validation 0"
            )
        if length < 3:
            raise UsageError(f"length is {length}; give at least 3, for [CLS], one token of text and [SEP]")
        special = dataset.special_tokens
        if special.cls is None or special.sep is None:
            missing = " and ".join(
                name for name, token in (("[CLS]", special.cls), ("[SEP]", special.sep)) if token is None
            )
            raise UsageError(
                f"the tokenizer of {dataset.path} has no {missing}, and every row begins with [CLS] and ends with "
                "[SEP]; make the dataset again with --special-tokens, which adds the special tokens that are missing"
            )
        self.dataset, self.split, self.length = dataset, split, length
        self.shards, self.starts = dataset.splits[split].shards, dataset.splits[split].first_tokens
        self._zero = np.dtype(dataset.manifest.token_dtype).type(0)  # tells kernels the dtype of tokens
        self._pad = special.pad or 0  # without a padding token it is 0: the attention mask hides it
        count, separator = len(self.shards), int(special.separator is not None)
        self._tokens: dict[int, Any] = {}  # by the number of the shard, of those that are open
        self._addresses = np.zeros(count, np.int64)  # 0 of those that are not open, or not mapped
        self.table = kernels.TokenTable(
            self.starts, self._addresses, self._zero.itemsize, separator, cls=special.cls, sep=special.sep
        )
        self._words: list[Any] = []
        has_words = words and dataset.splits[split].stores("words")
        self._word_addresses = np.zeros(count, np.int64) if has_words else None
        self._is_random = False
        self._open([0])
        self._mapped = not isinstance(self._tokens[0], Unmapped)
        if dataset.opens_at_once:
            self._open(range(count))

    def _open(self, numbers: Iterable[int]) -> None:
        """Opens shards that are not open yet."""
        for number in numbers:
            if number in self._tokens:
                continue
            tokens = self.dataset.tokens(self.split, number)
            if not isinstance(tokens, Unmapped):
                self._addresses[number] = tokens.ctypes.data
                if self._is_random:
                    pages_of(tokens).madvise(mmap.MADV_RANDOM)
            if self._word_addresses is not None:
                self._words.append(self.dataset.array(self.shards[number].name, "words"))
                self._word_addresses[number] = self._words[-1].ctypes.data
            self._tokens[number] = tokens

    def _open_shards_of(self, spans: NDArray[Any]) -> None:
        """Opens the shards that spans lie in. A kernel gave spans of other shards addresses that begin at 0."""
        numbers = np.searchsorted(self.starts, spans["start"], side="right") - 1
        is_new = np.array([number not in self._tokens for number in numbers.tolist()], np.bool_)
        self._open(np.unique(numbers[is_new]).tolist())
        spans["address"][is_new] += self._addresses[numbers[is_new]]

    def frames(self, num_rows: int, *, spans_per_row: int) -> kernels.Frames:
        """Arrays for rows, not initialized."""
        return kernels.Frames(
            np.empty((num_rows, self.length), np.int64),
            np.empty(num_rows, np.int64),
            np.empty(num_rows * spans_per_row, kernels.SPAN),
        )

    def rows(self, frames: kernels.Frames, num_spans: int, **columns: NDArray[np.int64] | None) -> Rows:
        """Copies the tokens of spans into their rows, and pads the rows.

        num_spans: what a kernel returned that lays out rows; below 0 if its index was damaged. columns: members of Rows
        that only some kinds of samples have. Raises DatasetError for a damaged index, and for an id outside the
        vocabulary.
        """
        require_sound(num_spans)
        if len(self._tokens) < len(self.shards):
            self._open_shards_of(frames.spans[:num_spans])
        tokens = None if self._mapped else self._read(frames.spans[:num_spans])
        largest, padding = kernels.fill_rows(frames, num_spans, self._zero, self._pad)
        del tokens  # spans point into it until here
        if largest >= self.dataset.special_tokens.vocab_size:
            raise damaged(self.dataset.path)
        attention_mask = inside_word = None
        if padding:
            attention_mask = np.empty_like(frames.ids)
            kernels.attend(frames.text_places, attention_mask)
        if self._word_addresses is not None:
            inside_word = np.zeros(frames.ids.shape, np.uint8)
            kernels.mark_inside_words(frames, num_spans, self.starts, self._word_addresses, inside_word)
        spans = frames.spans[:num_spans]
        return Rows(frames.ids, frames.text_places, attention_mask, inside_word, **columns, spans=spans)

    def _read(self, spans: NDArray[Any]) -> NDArray[Any]:
        """Reads the tokens of spans from files that are not mapped, and points the spans at them."""
        offsets = np.append(0, np.cumsum(spans["length"]))
        tokens = np.empty(int(offsets[-1]), self._zero.dtype)
        bounds = offsets.tolist()
        for first, stop, start in zip(bounds, bounds[1:], spans["start"].tolist(), strict=False):
            shard = int(np.searchsorted(self.starts, start, side="right")) - 1
            self._tokens[shard].read(start - int(self.starts[shard]), tokens[first:stop])
        spans["address"] = tokens.ctypes.data + offsets[:-1] * tokens.itemsize
        return tokens

    def documents(self) -> Iterator[tuple[int, NDArray[np.uint64]]]:
        """Yields the number of a shard and the offsets of some of its documents, in order; 8 bytes a document."""
        for number, shard in enumerate(self.shards):
            offsets = self.dataset.array(shard.name, "documents")
            for first in range(0, shard.num_documents, _DOCUMENTS_AT_ONCE):
                yield number, offsets[first : first + _DOCUMENTS_AT_ONCE + 1]

    def read_at_random(self) -> None:
        """Tells the system to read no more pages than are asked for, if the tokens are larger than half the memory."""
        num_bytes = int(self.starts[-1]) * self._zero.itemsize
        self._is_random = self._mapped and num_bytes > os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // 2
        for tokens in self._tokens.values() if self._is_random else ():
            pages_of(tokens).madvise(mmap.MADV_RANDOM)

    def read_ahead(self, ranges: list[tuple[int, int]]) -> None:
        """Asks the system to read ranges of the stream from the disk, and does not wait."""
        for start, stop in ranges:
            # A damaged index may point out of the stream. It is refused when its rows are read.
            start, stop = max(0, start), min(stop, int(self.starts[-1]))
            while self._mapped and start < stop:
                shard = int(np.searchsorted(self.starts, start, side="right")) - 1
                stop_here = min(stop, int(self.starts[shard + 1]))
                self._open([shard])
                pages = pages_of(self._tokens[shard])
                header = len(pages) - self._tokens[shard].nbytes
                first, last = (
                    header + self._zero.itemsize * (place - int(self.starts[shard])) for place in (start, stop_here)
                )
                first -= first % mmap.PAGESIZE
                pages.madvise(mmap.MADV_WILLNEED, first, last - first)
                start = stop_here


def require_sound(count: int) -> None:
    """Raises DatasetError if a count that comes from an index is negative."""
    if count < 0:
        raise DatasetError(
            "the sampling index is damaged; delete its directory, which is $BERTDATA_CACHE or else ~/.cache/bertdata, "
            "and it will be made again"
        )
