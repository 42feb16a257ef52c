"""The tokens of a split as one stream, its samples, and the rows of a batch."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import DatasetError, UsageError, damaged, require
from bertdata.format.arrays import npy_header, pages_of
from bertdata.format.dataset import Dataset
from bertdata.read import order
from bertdata.read.kernels import rows as kernels
from bertdata.read.kernels.masks import NOT_STORED

MAX_LENGTH = 1 << 20  # for longer rows, computing the tables of masks would take more than a second
_DOCUMENTS_AT_ONCE = 1 << 16
Columns = dict[str, NDArray[np.int64]]
"""Members of Batch that only one kind of samples has, by name."""


class Rows(NamedTuple):
    """A batch before it is masked."""

    members: dict[str, Any]  # members of Batch, except masks
    text_places: NDArray[np.int64]  # [B]: tokens between the first [CLS] and the last [SEP]
    epochs: NDArray[np.int64]  # [B]
    spans: NDArray[Any]  # kernels.SPAN [n]: the parts of the stream in the rows
    inside_word: NDArray[np.uint8] | None
    """[B, T]: 0 if a token starts a word, 1 if it continues one, 2 if this is not stored; None: not stored for any row,
    or not needed."""


class Wanted(NamedTuple):
    """Samples of one dataset, and the rows of a batch that they fill."""

    which: NDArray[np.int64]  # [n]: indices of the rows
    epochs: NDArray[np.int64]  # [B]: for all rows of the batch
    sample_ids: NDArray[np.int64]  # [B]


class Samples:
    """The samples of a split, of one of four kinds. The tokens of its shards, in order, form one stream.

    windows    The stream, including separators, cut every T - 2 tokens, in each epoch from a different token on. No
               token is lost, and at most one row of an epoch is padded.
    documents  A document, or a piece of T - 2 tokens of a document.
    packed     Several of these pieces in a row, each between its own [CLS] and [SEP], packed by best fit.
    pairs      Two segments of sentences, in half of the rows from two documents.

    The last three use an index of documents, which is made once (index.py). All processes that read a dataset share its
    memory.

    .num_samples: N, the samples of an epoch. .spans_per_row: the largest number of spans of a row. .starts int64
    [num_shards + 1]: the start of each shard in the stream, and the length of the stream. .word_addresses int64
    [num_shards]: memory address of the words array of each shard; None: not stored or not needed.

    Raises UsageError if the dataset has no such split, if rows of this length have no room for text, or if the
    tokenizer lacks [CLS] or [SEP].
    """

    num_samples: int
    spans_per_row: int
    _facts: dict[str, float]

    def __init__(
        self,
        dataset: Dataset,
        kind: str,
        *,
        split: str,
        length: int,
        seed: int,
        short_seq_prob: float,
        words: bool,
        block: int | None,
        variants: int | None,
    ) -> None:
        """kind: one of choices.SAMPLE_KINDS. length: tokens of a row. words: whether to fill Rows.inside_word, if the
        dataset stores words. block: as in order.sample_ids; without blocks, tokens larger than half of the memory are
        read without read-ahead. short_seq_prob, variants: as in Loader.
        """
        if split not in [*dataset.splits]:
            sentence = f"{dataset.path} has no split {split!r}, only {', '.join(dataset.splits)}; give one of these"
            raise UsageError(sentence, "no-split", option="split", given=split)
        expected = f"3 to {MAX_LENGTH:,}: a row has [CLS], text and [SEP]"
        require(3 <= length <= MAX_LENGTH, "length", length, expected)
        special = dataset.special_tokens
        if special.cls is None or special.sep is None:
            sentence = f"the tokenizer of {dataset.path} has no [CLS] or [SEP]; build with --special-tokens or --roles"
            raise UsageError(sentence, "tokenizer-lacks-token", option="shards", given=dataset.path)
        self.dataset, self.kind, self.split, self.length, self.seed = dataset, kind, split, length, seed
        self.short_seq_prob, self._block, self._variants = short_seq_prob, block, variants
        self._group = self._requested = (-1, 0)  # groups of blocks: the current one, and the last one read ahead
        self.shards, self.starts = dataset.splits[split], dataset.splits[split].first_tokens
        self.zero = np.dtype(dataset.manifest.token_dtype).type(0)  # gives kernels the dtype of tokens
        self.pad = special.pad or 0  # 0 without a padding token: the attention mask hides it
        count, separator = len(self.shards), int(special.separator is not None)
        self._tokens: dict[int, NDArray[Any]] = {}  # open shards, by number
        self._addresses = np.zeros(count, np.int64)  # 0 if the shard is not open
        self.separator = separator  # separators after each document: 0 or 1
        table = kernels.TokenTable(
            self.starts, self._addresses, self.zero.itemsize, separator, cls=special.cls, sep=special.sep
        )
        self.table = tuple(table)  # for kernels
        self._words: list[Any] = []
        has_words = words and dataset.splits[split].stores("words")
        self.word_addresses = np.zeros(count, np.int64) if has_words else None
        half_of_memory = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // 2
        self._is_random = block is None and int(self.starts[-1]) * self.zero.itemsize > half_of_memory
        if dataset.opens_at_once:
            self._open(range(count))

    @property
    def facts(self) -> dict[str, float]:
        """Shares of an epoch, from 0 to 1; see `Loader.facts`."""
        return self._facts

    def columns(self, num_rows: int) -> Columns:
        """Return the members of Batch that only this kind of samples has, not initialized."""
        return {}

    def lay_out(self, wanted: Wanted, frames: tuple[Any, ...], columns: Columns, num_spans: int) -> int:
        """Lay out rows of a batch in its arrays, frames and columns, and append their spans to the first `num_spans`.

        frames: a kernels.Frames as a plain tuple. Return the new number of spans; below 0 if the index is damaged.
        """
        raise NotImplementedError

    def ranges(self, epoch: int, first: int, stop: int) -> list[tuple[int, int]]:
        """Return ranges of the stream that contain the text of samples first to stop - 1."""
        raise NotImplementedError

    def _open(self, numbers: Iterable[int]) -> None:
        """Open the shards that are still closed."""
        for number in numbers:
            if number in self._tokens:
                continue
            tokens = self.dataset.tokens(self.split, number)
            if self._is_random:
                pages_of(tokens).madvise(mmap.MADV_RANDOM)
            if self.word_addresses is not None:
                self._words.append(self.dataset.array(self.shards[number].name, "words"))
                self.word_addresses[number] = self._words[-1].ctypes.data
            self._addresses[number] = tokens.ctypes.data  # last, so that after an error above the shard is not open
            self._tokens[number] = tokens

    def open_shards_of(self, spans: NDArray[Any]) -> None:
        """Open the shards of spans, and correct addresses in shards that were closed: these are relative to 0."""
        if len(self._tokens) == len(self.shards):
            return
        numbers = np.searchsorted(self.starts, spans["start"], side="right") - 1
        is_new = self._addresses[numbers] == 0
        self._open(np.unique(numbers[is_new]).tolist())
        spans["address"][is_new] += self._addresses[numbers[is_new]]

    def documents(self) -> Iterator[tuple[int, NDArray[np.uint64]]]:
        """Yield (index of a shard, offsets of some of its documents), in order; 8 bytes per document.

        Every copy of the dataset uses the index that is made from them. So this raises DatasetError if the dataset_id
        does not match the arrays, or if the offsets of documents or sentences do not match the manifest.
        """
        manifest = self.dataset.manifest
        if manifest.computed_id() != manifest.dataset_id:
            raise damaged(self.dataset.path)
        for number, shard in enumerate(self.shards):
            for name in shard.arrays.keys() & {"documents", "sentences"}:
                entry, array = shard.arrays[name], self.dataset.array(shard.name, name)[:]
                sha256 = hashlib.sha256(npy_header(entry["dtype"], entry["length"]))
                sha256.update(array.data)
                if sha256.hexdigest() != entry["sha256"]:
                    raise damaged(self.dataset.path)
            offsets = self.dataset.array(shard.name, "documents")
            for first in range(0, shard.num_documents, _DOCUMENTS_AT_ONCE):
                yield number, offsets[first : first + _DOCUMENTS_AT_ONCE + 1]

    def read_ahead(self, position: int) -> None:
        """Request the group of blocks of a position, and the next group, from the disk, once for each group."""
        if self._block is None:
            return
        n, block = self.num_samples, self._block
        if self._variants is not None:
            position %= self._variants * n
        epoch, number = group = order.group_of(position, num_samples=n, block=block)
        if group == self._group:
            return
        is_last = order.group_of((epoch + 1) * n - 1, num_samples=n, block=block) == group
        next_epoch = epoch + 1 if self._variants is None else (epoch + 1) % self._variants
        next_group = (next_epoch, 0) if is_last else (epoch, number + 1)
        for wanted in [next_group] if group == self._requested else [group, next_group]:
            for first, stop in order.blocks_of(*wanted, num_samples=n, seed=self.seed, block=block):
                self._request(self.ranges(wanted[0], first, stop))
        self._group, self._requested = group, next_group

    def _request(self, ranges: list[tuple[int, int]]) -> None:
        """Request ranges of the stream from the disk, without waiting."""
        for start, stop in ranges:
            # A damaged index may point outside the stream; reading its rows raises the error.
            start, stop = max(0, start), min(stop, int(self.starts[-1]))
            while start < stop:
                shard = int(np.searchsorted(self.starts, start, side="right")) - 1
                stop_here = min(stop, int(self.starts[shard + 1]))
                self._open([shard])
                pages = pages_of(self._tokens[shard])
                header = len(pages) - self._tokens[shard].nbytes
                first, last = (
                    header + self.zero.itemsize * (place - int(self.starts[shard])) for place in (start, stop_here)
                )
                first -= first % mmap.PAGESIZE
                pages.madvise(mmap.MADV_WILLNEED, first, last - first)
                start = stop_here


def rows_of(parts: Sequence[tuple[Samples, Wanted]], sources: NDArray[np.int64] | None = None) -> Rows:
    """Return the rows of a batch. parts: samples of datasets with the same kind, length and tokenizer.

    Raises DatasetError for a damaged index, and for an id outside the vocabulary.
    """
    first, num_rows = parts[0][0], parts[0][1].sample_ids.size
    ids, text_places = np.empty((num_rows, first.length), np.int64), np.empty(num_rows, np.int64)
    spans = np.empty(num_rows * max([samples.spans_per_row for samples, _ in parts]), kernels.SPAN)
    frames, columns = tuple(kernels.Frames(ids, text_places, spans)), parts[0][0].columns(num_rows)
    num_spans, inside_word = 0, None
    for samples, wanted in parts:
        first_span = num_spans
        num_spans = samples.lay_out(wanted, frames, columns, num_spans)
        require_sound(num_spans)
        samples.open_shards_of(spans[first_span:num_spans])
        if samples.word_addresses is not None:
            own = spans[first_span:num_spans]
            inside_word = np.full(ids.shape, NOT_STORED) if inside_word is None else inside_word
            kernels.mark_inside_words(own, samples.starts, samples.word_addresses, inside_word)
    largest, padding = kernels.fill_rows(frames, num_spans, first.zero, first.pad)
    if largest >= first.dataset.special_tokens.vocab_size:
        raise damaged(next(samples.dataset.path for samples, wanted in parts if largest in ids[wanted.which]))
    _, epochs, sample_ids = parts[0][1]  # the last two are the same for all parts
    members = {"input_ids": ids, "sample_ids": sample_ids, "sources": sources, **columns}
    if padding:
        members["attention_mask"] = attention_mask = np.empty_like(ids)
        kernels.attend(text_places, attention_mask)
    return Rows(members, text_places, epochs, spans[:num_spans], inside_word)


def require_sound(count: int) -> None:
    """Raise DatasetError if a count from an index is negative."""
    if count < 0:
        sentence = "a sampling index is damaged; delete it in $BERTDATA_CACHE, by default ~/.cache/bertdata"
        raise DatasetError(sentence, "damaged")
