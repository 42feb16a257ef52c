"""Encoded documents → finished shards of units, in the directory of an unfinished build.

One thread makes a unit from beginning to end: it writes the blocks that other threads encode, in the order of the text.
So the bytes of a shard do not depend on the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.files import Stage
from bertdata.format.shards import ShardWriter, shard_name
from bertdata.options import Shares
from bertdata.tokenize.tokenizer import LoadedTokenizer
from bertdata.write.kernels import copy_ranges, hash_documents
from bertdata.write.staging import SPLIT_COUNTS, Tally, UnitRecord, record_name

SPLITS_BY_HASH = ("validation", "test", "train")  # in ascending order of hash ranges


@dataclass(frozen=True, kw_only=True)
class EncodedDocuments:
    """Documents of one unit, with all data to write."""

    unit: int
    ids: NDArray[Any]  # [n], of the stored dtype
    offsets: NDArray[np.int64]  # [num_documents + 1] half-open, into ids
    sentences: NDArray[np.int64] | None = None  # starts of sentences in ids, ascending; None: not stored
    word_starts: NDArray[np.bool_] | None = None  # [n] whether an id begins a word; None: not stored
    origins: NDArray[np.uint64] | None = None  # [num_documents] format/origins.py; None: not stored
    splits: NDArray[np.int64]  # [num_documents] an index of SPLITS_BY_HASH
    has_ids: NDArray[np.bool_]  # [num_documents] whether to store the document; dropped ones are counted
    replaced: NDArray[np.int64]  # [num_documents] how many invalid byte sequences became U+FFFD
    tally: Tally  # further counts
    bytes_read: int  # bytes of the input on disk up to the end of these documents


class UnitWriter(Stage):
    """Writes a unit's documents to the shards of their splits. A context manager: without `commit` no file remains."""

    def __init__(
        self, directory: Path, unit: int, shard_size: int, apart: Path | None = None, *, keeps_empty: bool = False
    ) -> None:
        """shard_size: bytes of a unit. apart: as in `Stage`. keeps_empty: store the places of empty documents."""
        self.unit, self.shard_size, self.keeps_empty = unit, shard_size, keeps_empty
        super().__init__(directory, apart)
        self._tally = Tally()
        self._writers: dict[str, ShardWriter] = {}
        self._counts = np.zeros((len(SPLIT_COUNTS), len(SPLITS_BY_HASH)), np.int64)

    def append(self, documents: EncodedDocuments) -> None:
        """Write documents of the unit."""
        self._tally.add(documents.tally)
        num_chosen, num_kept, num_replaced = (
            np.bincount(documents.splits, weights, len(SPLITS_BY_HASH)).astype(np.int64)
            for weights in (None, documents.has_ids, documents.replaced)
        )
        self._counts += (num_kept, num_chosen - num_kept, num_replaced)
        for number, split in enumerate(SPLITS_BY_HASH):
            if num_kept[number] or (num_chosen[number] and self.keeps_empty):
                self._write(split, documents, (documents.splits == number) & documents.has_ids)

    def _write(self, split: str, documents: EncodedDocuments, kept: NDArray[np.bool_]) -> None:
        """Append the documents that `kept` selects to the shard of a split."""
        if split not in self._writers:
            self._writers[split] = ShardWriter(self, shard_name(split, self.unit))
        offsets, sentences, ids, word_starts = select(
            kept, documents.offsets, documents.sentences, documents.ids, documents.word_starts
        )
        if sentences is not None:  # ends of documents; empty documents have no separator
            sentences = np.append(sentences[1:], ids.size)[: sentences.size].astype(np.uint64)
        self._writers[split].append(
            ids,
            offsets[1:].astype(np.uint64),
            sentences,
            word_starts,
            np.cumsum(kept, dtype=np.int64)[~kept] if self.keeps_empty else None,
            None if documents.origins is None else documents.origins[kept],
        )

    def commit(self, crc32: int | None = None) -> UnitRecord:
        """Publish the shards of the unit with its record, and return the record. crc32: of the iterable's items."""
        unit, size, shards = self.unit, self.shard_size, {}
        for split, writer in self._writers.items():
            counts = _named(self._counts[:, SPLITS_BY_HASH.index(split)])
            if counts["documents"]:
                shards[split] = writer.finish(input_range=(unit * size, (unit + 1) * size), counts=counts)
            else:  # there are only empty documents
                writer.discard()
        origins = {writer.name: writer.origins for writer in self._writers.values() if writer.origins}
        self._tally.counts.update(_named(self._counts.sum(1)))
        record = UnitRecord(unit, self._tally, shards, origins, crc32)
        self.write(record_name(unit), record.sealed())
        self.publish()
        return record


def _named(counts: NDArray[np.int64]) -> dict[str, int]:
    return dict(zip(SPLIT_COUNTS, counts.tolist(), strict=True))


def special_counts(tokenizer: LoadedTokenizer, counts: NDArray[np.int64]) -> dict[str, int]:
    """Return names and counts for `Tally.counts`. counts: of special tokens, in the order of tokenizer.spellings."""
    return {f"{tokenizer.spellings[number]} inside": int(counts[number]) for number in counts.nonzero()[0].tolist()}


def select(
    kept: NDArray[np.bool_], documents: NDArray[np.int64], sentences: NDArray[np.int64] | None, *columns: Any
) -> tuple[Any, ...]:
    """Select documents by `kept` bool [num_documents]. Return their offsets, sentences and columns.

    documents [num_documents + 1]: half-open offsets. sentences: starts of sentences, ascending, or None. columns:
    arrays with a number for each token, or None.
    """
    if kept.all():
        return documents, sentences, *columns
    edges = np.zeros(kept.size + 2, np.bool_)
    edges[1:-1] = kept
    turns = (edges[1:] != edges[:-1]).nonzero()[0]  # start and stop of kept documents
    offsets = np.zeros(np.count_nonzero(kept) + 1, np.int64)
    (documents[1:] - documents[:-1])[kept].cumsum(out=offsets[1:])
    if sentences is not None:
        number = np.searchsorted(documents, sentences, side="right") - 1
        number, sentences = number[kept[number]], sentences[kept[number]]
        sentences = sentences - documents[number] + offsets[np.cumsum(kept)[number] - 1]
    chosen = [None if column is None else np.empty(offsets[-1], column.dtype) for column in columns]
    for column, copy in zip(columns, chosen, strict=True):
        if column is not None:
            copy_ranges(column, documents[turns].reshape(-1, 2), copy)
    return offsets, sentences, *chosen


def splits_of(shares: Shares, data: NDArray[np.uint8], offsets: NDArray[np.int64], gap: int) -> NDArray[np.int64]:
    """Return the split of each document, as an index of SPLITS_BY_HASH, by the hash of its bytes.

    Document i is data[offsets[i] : offsets[i + 1] - gap].
    """
    hashes = np.empty(offsets.size - 1, np.uint64)
    hash_documents(data, offsets, gap, hashes)
    return np.array(shares.limits, np.uint64).searchsorted(hashes >> np.uint64(32), side="right")
