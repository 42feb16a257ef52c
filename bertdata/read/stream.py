"""The tokens of a split as one stream, and the rows of a batch that are filled from it."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import resource
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import DatasetError, UsageError, damaged, require
from bertdata.format.arrays import npy_header, pages_of
from bertdata.format.dataset import Dataset
from bertdata.read.kernels import rows as kernels
from bertdata.read.kernels.masks import NOT_STORED

MAX_LENGTH = 1 << 20  # what is counted for each length of a row, for masks, then takes a second
_DOCUMENTS_AT_ONCE = 1 << 16
_OTHER_MAPS = 4096  # of libraries and of other splits
Columns = dict[str, NDArray[np.int64]]
"""The members of Batch that only one kind of samples has, by name."""


class Rows(NamedTuple):
    """A batch before it is masked. All arrays but inside_word are int64."""

    ids: NDArray[np.int64]  # [B, T], padded at the end
    text_places: NDArray[np.int64]  # [B]: places between the first [CLS] and the last [SEP]
    attention_mask: NDArray[np.int64] | None  # [B, T]: 1 where filled; None if no row is padded
    inside_word: NDArray[np.uint8] | None
    """[B, T]: 0 where a token begins a word, 1 where it continues one, 2 where that is not stored; None: not stored for
    any row, or not asked."""
    columns: Columns  # position_ids [B, T] of packed rows, token_type_ids [B, T] and next_sentence_label [B] of pairs
    spans: NDArray[Any]  # kernels.SPAN [n]: which tokens of the stream the rows are made of
    epochs: NDArray[np.int64]  # [B]
    sample_ids: NDArray[np.int64]  # [B]
    sources: NDArray[np.int64] | None  # [B], as in Batch


class Wanted(NamedTuple):
    """Samples of one dataset, and the rows of a batch that they fill."""

    which: NDArray[np.int64]  # [n]: numbers of the rows
    epochs: NDArray[np.int64]  # [B], of all rows of the batch
    sample_ids: NDArray[np.int64]  # [B]


class Samples(Protocol):
    """One way to cut a split into samples: Windows, Pieces or Pairs."""

    stream: TokenStream
    num_samples: int  # of an epoch
    spans_per_row: int  # at most

    @property
    def facts(self) -> dict[str, float]:
        """Shares of an epoch, from 0 to 1; see `Loader.facts`."""

    def columns(self, num_rows: int) -> Columns:
        """Return the members of Batch that only this kind of samples has, not initialized."""

    def lay_out(self, wanted: Wanted, frames: tuple[Any, ...], columns: Columns, num_spans: int) -> int:
        """Lays out rows of a batch, whose arrays are frames and columns, and adds their spans to the first `num_spans`.

        frames: a kernels.Frames as a plain tuple.

        Returns the number of spans with them; below 0 if the index is damaged.
        """

    def ranges(self, epoch: int, first: int, stop: int) -> list[tuple[int, int]]:
        """Ranges of the stream that hold the text of samples first, first + 1, ..., stop - 1."""


class TokenStream:
    """The tokens of a split, its shards end to end. All processes that read a dataset share its pages.

    .starts int64 [num_shards + 1]: where each shard begins in the stream, then the length of the stream.
    .word_addresses int64 [num_shards]: memory address of the words array of each shard; None: not stored or not asked.

    Raises UsageError if the dataset has no such split, if rows of this length have no room for text, or if the
    tokenizer lacks [CLS] or [SEP].
    """

    def __init__(
        self, dataset: Dataset, *, split: str, length: int, words: bool = False, at_random: bool = False
    ) -> None:
        """length: places of a row. words: fill Rows.inside_word, if the dataset stores where words begin. at_random:
        of tokens larger than half of the memory, the system reads only the pages that are used.
        """
        if split not in [*dataset.splits]:
            sentence = f"{dataset.path} has no split {split!r}, only {', '.join(dataset.splits)}; build it with that"
            raise UsageError(sentence, "no-split", option="split", given=split)
        expected = f"3 to {MAX_LENGTH:,}: a row has [CLS], text and [SEP]"
        require(3 <= length <= MAX_LENGTH, "length", length, expected)
        special = dataset.special_tokens
        if special.cls is None or special.sep is None:
            sentence = f"the tokenizer of {dataset.path} has no [CLS] or no [SEP]; build with --special-tokens"
            raise UsageError(sentence, "tokenizer-lacks-token", option="shards", given=dataset.path)
        self.dataset, self.split, self.length = dataset, split, length
        self.shards, self.starts = dataset.splits[split], dataset.splits[split].first_tokens
        self.zero = np.dtype(dataset.manifest.token_dtype).type(0)  # tells kernels the dtype of tokens
        self.pad = special.pad or 0  # without a padding token it is 0: the attention mask hides it
        count, separator = len(self.shards), int(special.separator is not None)
        self._tokens: dict[int, NDArray[Any]] = {}  # by the number of the shard, of those that are open
        self._addresses = np.zeros(count, np.int64)  # 0 of those that are not open
        self.separator = separator  # tokens of it after each document
        table = kernels.TokenTable(
            self.starts, self._addresses, self.zero.itemsize, separator, cls=special.cls, sep=special.sep
        )
        self.table = tuple(table)  # for kernels
        self._words: list[Any] = []
        has_words = words and dataset.splits[split].stores("words")
        self.word_addresses = np.zeros(count, np.int64) if has_words else None
        half_of_memory = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // 2
        self._is_random = at_random and int(self.starts[-1]) * self.zero.itemsize > half_of_memory
        self.num_files = 0 if dataset.opens_at_once else count * (1 + has_words)
        """How many files reading opens by and by."""
        if dataset.opens_at_once:
            self._open(range(count))

    def _open(self, numbers: Iterable[int]) -> None:
        """Open shards that are not open yet."""
        for number in numbers:
            if number in self._tokens:
                continue
            tokens = self.dataset.tokens(self.split, number)
            if self._is_random:
                pages_of(tokens).madvise(mmap.MADV_RANDOM)
            if self.word_addresses is not None:
                self._words.append(self.dataset.array(self.shards[number].name, "words"))
                self.word_addresses[number] = self._words[-1].ctypes.data
            self._addresses[number] = tokens.ctypes.data  # last: what fails above leaves the shard closed
            self._tokens[number] = tokens

    def open_shards_of(self, spans: NDArray[Any]) -> None:
        """Open the shards of spans. The addresses that a kernel wrote for shards that were closed begin at 0."""
        if len(self._tokens) == len(self.shards):
            return
        numbers = np.searchsorted(self.starts, spans["start"], side="right") - 1
        is_new = np.array([number not in self._tokens for number in numbers.tolist()], np.bool_)
        self._open(np.unique(numbers[is_new]).tolist())
        spans["address"][is_new] += self._addresses[numbers[is_new]]

    def documents(self) -> Iterator[tuple[int, NDArray[np.uint64]]]:
        """Yield the number of a shard and the offsets of some of its documents, in order; 8 bytes a document.

        What is made of them is kept for every copy of the dataset. So this raises DatasetError if the dataset_id is not
        that of the arrays, or if the offsets of documents or sentences are not those that it stands for.
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

    def read_ahead(self, ranges: list[tuple[int, int]]) -> None:
        """Request ranges of the stream from the disk, and do not wait."""
        for start, stop in ranges:
            # A damaged index may point out of the stream. It is refused when its rows are read.
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


def require_room(streams: Sequence[TokenStream]) -> None:
    """Raise DatasetError if the system does not let a process open and map all files of streams."""
    num_arrays, path = sum(stream.num_files for stream in streams), streams[0].dataset.path
    if not num_arrays:
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = num_arrays if most == resource.RLIM_INFINITY else most
    with contextlib.suppress(OSError, ValueError):  # elsewhere than on Linux
        most = min(most, int(Path("/proc/sys/vm/max_map_count").read_text()) - _OTHER_MAPS)
    if num_arrays > most:
        advice = "raise ulimit -Hn and vm.max_map_count, or build with a larger --shard-size"
        sentence = f"{path} has {num_arrays:,} files to open, and this system allows {most:,}; {advice}"
        raise DatasetError(sentence, "too-many-files", option="shards", given=path)


def rows_of(parts: Sequence[tuple[Samples, Wanted]], sources: NDArray[np.int64] | None = None) -> Rows:
    """Return the rows of a batch. parts: samples of one or more datasets, all of one kind, length and tokenizer.

    Raises DatasetError for a damaged index, and for an id outside the vocabulary.
    """
    first, num_rows = parts[0][0].stream, parts[0][1].sample_ids.size
    ids, text_places = np.empty((num_rows, first.length), np.int64), np.empty(num_rows, np.int64)
    spans = np.empty(num_rows * max([samples.spans_per_row for samples, _ in parts]), kernels.SPAN)
    frames, columns = tuple(kernels.Frames(ids, text_places, spans)), parts[0][0].columns(num_rows)
    num_spans, inside_word = 0, None
    for samples, wanted in parts:
        stream, first_span = samples.stream, num_spans
        num_spans = samples.lay_out(wanted, frames, columns, num_spans)
        require_sound(num_spans)
        stream.open_shards_of(spans[first_span:num_spans])
        if stream.word_addresses is not None:
            own = spans[first_span:num_spans]
            inside_word = np.full(ids.shape, NOT_STORED) if inside_word is None else inside_word
            kernels.mark_inside_words(own, stream.starts, stream.word_addresses, inside_word)
    largest, padding = kernels.fill_rows(frames, num_spans, first.zero, first.pad)
    if largest >= first.dataset.special_tokens.vocab_size:
        raise damaged(next(samples.stream.dataset.path for samples, wanted in parts if largest in ids[wanted.which]))
    attention_mask = None
    if padding:
        attention_mask = np.empty_like(ids)
        kernels.attend(text_places, attention_mask)
    _, epochs, sample_ids = parts[0][1]  # the last two are the same in all parts
    rest = columns, spans[:num_spans], epochs, sample_ids, sources
    return Rows(ids, text_places, attention_mask, inside_word, *rest)


def require_sound(count: int) -> None:
    """Raise DatasetError if a count that comes from an index is negative."""
    if count < 0:
        sentence = "a sampling index is damaged; delete it in $BERTDATA_CACHE, by default ~/.cache/bertdata"
        raise DatasetError(sentence, "damaged")
