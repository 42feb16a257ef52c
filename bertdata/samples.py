"""sample_id → spans of shards → rows of ids. Four ways to cut a split into samples:

windows    the documents end to end with their separators, cut every C = length − 2 tokens from a phase that each epoch
           moves. No index: an address is arithmetic. Nothing is lost; at most one row an epoch is padded.
documents  a document, or a piece of C tokens of one: never two in a row.
packed     rows of several such pieces, each between a [CLS] and a [SEP] of its own, by best fit.
pairs      two segments of sentences, half of the time not from the same document: BERT's next sentence prediction.

The last three need to know where documents begin: an index, made once (index.py).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertdata import _kernels
from bertdata.errors import DatasetError, UsageError
from bertdata.index import Append, derived
from bertdata.reader import Dataset
from bertdata.shard import Unmapped, pages_of

PACKED_TOGETHER = 1 << 19  # tokens of the stream whose pieces may share rows
LONGEST = 1 << 16  # places of a row that an index can describe
_DOCUMENTS_AT_ONCE = 1 << 16
_INDEX_VERSION = 1


class Rows(NamedTuple):
    """What a batch is before it is masked. Every array but the last is int64."""

    ids: NDArray[np.int64]  # [B, T], padded at the end
    filled: NDArray[np.int64]  # [B]: places between the first [CLS] and the last [SEP]
    position_ids: NDArray[np.int64] | None = None  # [B, T]
    token_type_ids: NDArray[np.int64] | None = None  # [B, T]
    next_sentence_label: NDArray[np.int64] | None = None  # [B]
    goes_on: NDArray[np.uint8] | None = None  # [B, T]: 1 where a token begins no word; None: not stored or not asked


class Stream:
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
        if _kernels.fill_rows(spans, self._like, self._pad, filled, ids) >= self.dataset.special_tokens.vocab_size:
            raise DatasetError(f"{self.dataset.path} is damaged; bertdata verify says where")
        if self._words is None:
            return None
        goes_on = np.zeros(ids.shape, np.uint8)
        _kernels.word_flags(spans, self.starts, self._words, goes_on)
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


class Windows:
    def __init__(self, stream: Stream, *, seed: int) -> None:
        self.stream, self._seed, self._text_length = stream, seed, stream.length - 2
        self._total = int(stream.starts[-1])
        self.num_samples = -(-self._total // self._text_length)
        self.facts = {"pad_share": 1 - (self._total / self.num_samples + 2) / stream.length, "crop_share": 0.0}

    def rows(self, epochs: NDArray[np.int64], sample_ids: NDArray[np.int64]) -> Rows:
        ids, filled = self.stream.empty(sample_ids.size)
        shards_of_row = min(len(self.stream.shards), self._text_length) + 1
        spans = np.empty((sample_ids.size * shards_of_row, 5), np.int64)
        names = epochs, sample_ids, np.uint64(self._seed)
        count = _kernels.window_rows(*names, self._text_length, *self.stream.table, ids, filled, spans)
        return Rows(ids, filled, goes_on=self.stream.fill(spans[:count], filled, ids))

    def ranges(self, epoch: int, first: int, stop: int) -> list[tuple[int, int]]:
        """Where in the stream samples first, first + 1, ..., stop - 1 are."""
        phase, total = _kernels.phase(np.uint64(self._seed), epoch, self._total), self._total
        start, end = (phase + min(sample * self._text_length, total) for sample in (first, stop))
        return [(start, min(end, total)), (0, max(0, end - total))] if start < total else [(start - total, end - total)]


class Pieces:
    """documents and packed."""

    def __init__(self, stream: Stream, *, packed: bool) -> None:
        if stream.length > LONGEST:
            raise UsageError(f"length is {stream.length}; rows of documents have at most {LONGEST} places")
        self.stream, self._packed = stream, packed
        identity = stream.identity("packed" if packed else "documents")
        if packed:
            identity["packed_together"] = PACKED_TOGETHER
            arrays, self.facts = derived(identity, {"pieces": "<u8", "rows": "<u8"}, self._pack)
        else:
            arrays, self.facts = derived(identity, {"pieces": "<u8"}, self._cut)
        self._pieces, self._bounds = arrays["pieces"], arrays.get("rows", np.zeros(0, np.uint64))
        self.num_samples = self._bounds.size - 1 if packed else self._pieces.size

    def rows(self, epochs: NDArray[np.int64], sample_ids: NDArray[np.int64]) -> Rows:
        ids, filled = self.stream.empty(sample_ids.size)
        position_ids = np.empty(ids.shape if self._packed else (0, 0), np.int64)
        pieces_of_row = self.stream.length // 3 if self._packed else 1
        spans = np.empty((sample_ids.size * pieces_of_row, 5), np.int64)
        count = _kernels.piece_rows(
            sample_ids, self._bounds, self._pieces, *self.stream.table, ids, filled, position_ids, spans
        )
        _require_sound(count)
        goes_on = self.stream.fill(spans[:count], filled, ids)
        return Rows(ids, filled, position_ids if self._packed else None, goes_on=goes_on)

    def ranges(self, epoch: int, first: int, stop: int) -> list[tuple[int, int]]:
        if self._packed:
            first, stop = int(self._bounds[first]), int(self._bounds[stop])
        pieces = self._pieces[first:stop]
        _require_sound(pieces.size - 1)
        starts = pieces >> np.uint64(16)
        return [(int(starts.min()), int((starts + (pieces & np.uint64(0xFFFF))).max()))]

    def _all(self) -> Iterator[NDArray[np.uint64]]:
        """Pieces in the order of the stream: the place of the first token << 16 | length."""
        stream, most = self.stream, self.stream.length - 2
        for number, offsets in stream.documents():
            offsets = offsets.astype(np.int64)
            sizes = np.diff(offsets) - stream.has_separators
            if sizes.min() < 0 or offsets[0] < 0 or offsets[-1] > stream.shards[number].num_tokens:
                raise DatasetError(f"{stream.dataset.path} is damaged; bertdata verify says where")
            counts = -(-sizes // most)
            document = np.repeat(np.arange(sizes.size), counts)
            before = most * (np.arange(document.size) - np.repeat(np.cumsum(counts) - counts, counts))
            places = stream.starts[number] + offsets[document] + before
            yield (places << 16 | np.minimum(most, sizes[document] - before)).astype(np.uint64)

    def _cut(self, append: Append) -> dict[str, Any]:
        count = tokens = 0
        for pieces in self._all():
            append("pieces", pieces)
            count, tokens = count + pieces.size, tokens + int((pieces & np.uint64(0xFFFF)).sum())
        return {"pad_share": 1 - (tokens / max(1, count) + 2) / self.stream.length, "crop_share": 0.0}

    def _pack(self, append: Append) -> dict[str, Any]:
        num_rows = num_pieces = places = 0
        append("rows", np.zeros(1, np.uint64))
        waiting = np.zeros(0, np.uint64)
        for more in (*self._all(), None):
            together = waiting if more is None else np.concatenate([waiting, more])
            area = (together >> np.uint64(16)) // np.uint64(PACKED_TOGETHER)
            cuts = [0, *(np.flatnonzero(np.diff(area)) + 1).tolist()]
            if more is None:
                cuts.append(together.size)
            for start, stop in zip(cuts, cuts[1:], strict=False):
                pieces = together[start:stop]
                sizes = (pieces & np.uint64(0xFFFF)).astype(np.int64) + 2
                order, row_of = np.argsort(-sizes, kind="stable"), np.empty(sizes.size, np.int64)
                count = _kernels.pack(sizes, order, self.stream.length, row_of)
                append("pieces", pieces[order[np.argsort(row_of[order], kind="stable")]])
                append("rows", num_pieces + np.cumsum(np.bincount(row_of, minlength=count)))
                num_rows, num_pieces, places = num_rows + count, num_pieces + pieces.size, places + int(sizes.sum())
            waiting = together[cuts[-1] :]
        return {"pad_share": 1 - places / max(1, num_rows * self.stream.length), "crop_share": 0.0}


class Pairs:
    def __init__(self, stream: Stream, *, seed: int, short_seq_prob: float) -> None:
        dataset, split = stream.dataset, stream.split
        if any(shard.num_sentences is None for shard in stream.shards):
            raise UsageError(
                f"{dataset.path} does not know where sentences begin, which pairs are made of; build it with "
                "--sentences line"
            )
        if dataset.splits[split].num_documents < 2:
            raise UsageError(f"split {split} of {dataset.path} has one document, and half of all pairs are of two")
        if stream.length < 5:
            raise UsageError(f"length is {stream.length}; a pair needs [CLS], two [SEP] and two tokens: at least 5")
        self.stream, self._seed, self._short_seq_prob = stream, seed, short_seq_prob
        identity = stream.identity("pairs") | {"seed": seed, "short_seq_prob": short_seq_prob}
        arrays, self._known = derived(identity, {"pairs": "<i8", "sentences": "<u8"}, self._make)
        self._pairs, self._sentences = arrays["pairs"].reshape(-1, 5), arrays["sentences"]
        self.num_samples = self._pairs.shape[0]
        _require_sound(self.num_samples - 1)

    @property
    def facts(self) -> dict[str, float]:
        """Padding and what is cut off are those of 4,096 samples."""
        chosen = np.linspace(0, self.num_samples - 1, min(4096, self.num_samples)).astype(np.int64)
        rows, cropped = self._rows(np.zeros_like(chosen), chosen)
        kept, lost = int((rows.filled - 1).sum()), int(cropped.sum())
        pad_share = 1 - (kept + 3 * chosen.size) / (self.stream.length * chosen.size)
        return self._known | {"pad_share": pad_share, "crop_share": lost / (kept + lost)}

    def rows(self, epochs: NDArray[np.int64], sample_ids: NDArray[np.int64]) -> Rows:
        return self._rows(epochs, sample_ids)[0]

    def _rows(self, epochs: NDArray[np.int64], sample_ids: NDArray[np.int64]) -> tuple[Rows, NDArray[np.int64]]:
        """And how many tokens each row lost."""
        ids, filled = self.stream.empty(sample_ids.size)
        token_type_ids, labels, cropped = np.empty_like(ids), np.empty_like(filled), np.empty_like(filled)
        spans = np.empty((sample_ids.size * 2, 5), np.int64)
        count = _kernels.pair_rows(
            epochs, sample_ids, np.uint64(self._seed), self._pairs, self._sentences, int(self.stream.has_separators),
            *self.stream.table, ids, filled, token_type_ids, labels, cropped, spans,
        )  # fmt: skip
        _require_sound(count)
        goes_on = self.stream.fill(spans[:count], filled, ids)
        return Rows(ids, filled, None, token_type_ids, labels, goes_on), cropped

    def ranges(self, epoch: int, first: int, stop: int) -> list[tuple[int, int]]:
        """Without the second segments that are from elsewhere."""
        pairs = self._pairs[first:stop, :3]
        return [(int(pairs[:, 0].min()), int(pairs.max()))]

    def _make(self, append: Append) -> dict[str, Any]:
        stream, most = self.stream, self.stream.length - 3
        num_documents = num_sentences = num_pairs = num_random = 0
        for number, documents in stream.documents():
            sentences = stream.dataset.array(stream.shards[number].name, "sentences")
            first, last = np.searchsorted(sentences, documents[[0, -1]])
            sentences = sentences[first : last + 1]
            if sentences.size < 2:
                raise DatasetError(f"{stream.dataset.path} is damaged; bertdata verify says where")
            flagged = np.empty(sentences.size - 1, np.uint64)
            pairs = np.empty((flagged.size, 5), np.int64)
            count = _kernels.segment(
                documents, sentences, num_documents, num_sentences, int(stream.starts[number]),
                int(stream.has_separators), most, np.uint64(round(self._short_seq_prob * 2**32)),
                np.uint64(self._seed), pairs, flagged,
            )  # fmt: skip
            if count < 0:
                raise DatasetError(f"{stream.dataset.path} is damaged; bertdata verify says where")
            append("pairs", pairs[:count].ravel())
            append("sentences", flagged)
            num_documents, num_sentences = num_documents + documents.size - 1, num_sentences + flagged.size
            num_pairs, num_random = num_pairs + count, num_random + int((pairs[:count, 2] < 0).sum())
        append("sentences", np.array([int(stream.starts[-1]) << 1 | 1], np.uint64))
        return {"random_share": num_random / num_pairs}


def _require_sound(count: int) -> None:
    if count < 0:
        raise DatasetError(
            "the index of samples is damaged; delete the cache directory, BERTDATA_CACHE or ~/.cache/bertdata"
        )


def of(
    dataset: Dataset, samples: str, *, split: str, length: int, seed: int, short_seq_prob: float, words: bool
) -> Windows | Pieces | Pairs:
    """The samples of one split by one of the ways above."""
    stream = Stream(dataset, split=split, length=length, words=words)
    if samples == "windows":
        return Windows(stream, seed=seed)
    if samples == "pairs":
        return Pairs(stream, seed=seed, short_seq_prob=short_seq_prob)
    return Pieces(stream, packed=samples == "packed")
