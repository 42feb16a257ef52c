"""Samples that are documents, or pieces of documents: one in a row (`documents`) or several (`packed`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import damaged, require
from bertdata.read.index import Append, index_identity, open_index
from bertdata.read.kernels import pieces as kernels
from bertdata.read.stream import Columns, Samples, Wanted, require_sound

PACKED_TOGETHER = 1 << 19  # tokens: only pieces that start in the same range of this many tokens may share a row
_NOT_WANTED = np.empty((0, 0), np.int64)
MAX_LENGTH = 1 << 16  # most tokens of a row: an index has 16 bits for the length of a piece


class Pieces(Samples):
    """Samples that are pieces of documents. A document, without its separator, is cut every T - 2 tokens.

    `documents` puts one piece into a row. A document of nine tokens in rows of six:

        sample 0    [CLS] 0 1 2 3 [SEP]
        sample 1    [CLS] 4 5 6 7 [SEP]
        sample 2    [CLS] 8 [SEP] [PAD] [PAD] [PAD]

    `packed` puts several pieces into a row by best fit, the largest first, each between its own [CLS] and [SEP], and
    with position_ids from 0. Pieces of 6, 3, 2 and 1 tokens, which take 8, 5, 4 and 3 tokens of a row of ten:

        sample 0    8 8 8 8 8 8 8 8 . .
        sample 1    5 5 5 5 5 4 4 4 4 .
        sample 2    3 3 3 . . . . . . .

    Every epoch has the same rows. The first Loader of a kind makes an index of 8 bytes per piece, and with `packed` 8
    bytes per row, in O(pieces) time and constant memory.

    Raises UsageError for rows of more than 65,536 tokens, and DatasetError if the offsets of documents are damaged.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        expected = f"at most {MAX_LENGTH}, the longest row of documents or packed"
        require(self.length <= MAX_LENGTH, "length", self.length, expected, "too-long")
        self._packed = self.kind == "packed"
        more = {"packed_together": PACKED_TOGETHER} if self._packed else {}
        dtypes = {"pieces": "<u8"} | ({"rows": "<u8"} if self._packed else {})
        make = self._write_packed if self._packed else self._write_pieces
        arrays, self._facts = open_index(index_identity(self) | more, dtypes, make)
        self._pieces, self._bounds = arrays["pieces"], arrays.get("rows", arrays["pieces"][:0])
        self.num_samples = self._bounds.size - 1 if self._packed else self._pieces.size
        if self.num_samples < 1:  # all documents consist only of the separator
            raise damaged(self.dataset.path)
        self.spans_per_row = int(self._facts.pop("max_pieces", 1))  # most pieces in a row

    def columns(self, num_rows: int) -> Columns:
        return {"position_ids": np.empty((num_rows, self.length), np.int64)} if self._packed else {}

    def lay_out(self, wanted: Wanted, frames: tuple[Any, ...], columns: Columns, num_spans: int) -> int:
        index, position_ids = (self._pieces, self._bounds), columns.get("position_ids", _NOT_WANTED)
        own, table = (wanted.which, wanted.sample_ids), self.table
        return int(kernels.piece_rows(*own, *index, table, frames, position_ids, num_spans))

    def ranges(self, epoch: int, first: int, stop: int) -> list[tuple[int, int]]:
        if self._packed:
            first, stop = int(self._bounds[first]), int(self._bounds[stop])
        pieces = self._pieces[first:stop]
        require_sound(pieces.size - 1)
        starts = kernels.piece_start(pieces)
        return [(int(starts.min()), int((starts + kernels.piece_length(pieces)).max()))]

    def _all_pieces(self) -> Iterator[NDArray[np.uint64]]:
        """Yield the pieces of some documents at a time, in the order of the stream, in the form of `pack_pieces`."""
        for number, documents in self.documents():
            offsets = documents.astype(np.int64)
            sizes = np.diff(offsets) - self.separator
            if sizes.min() < 0 or offsets[0] < 0 or offsets[-1] > self.shards[number].num_tokens:
                raise damaged(self.dataset.path)
            document, before, lengths = pieces_of(sizes, self.length - 2)
            yield kernels.pack_pieces(self.starts[number] + offsets[document] + before, lengths)

    def _write_pieces(self, append: Append) -> dict[str, Any]:
        """Make the index of `documents`."""
        num_pieces = num_tokens = 0
        for pieces in self._all_pieces():
            append("pieces", pieces)
            num_pieces, num_tokens = num_pieces + pieces.size, num_tokens + int(kernels.piece_length(pieces).sum())
        return {"pad_share": 1 - (num_tokens / max(1, num_pieces) + 2) / self.length, "crop_share": 0.0}

    def _write_packed(self, append: Append) -> dict[str, Any]:
        """Make the index of `packed`. Pieces wait until all pieces of their area are known."""
        num_rows = num_pieces = num_places = max_pieces = 0
        append("rows", np.zeros(1, np.uint64))
        waiting = np.zeros(0, np.uint64)
        for more in itertools.chain(self._all_pieces(), [None]):  # None: there are no more
            together = waiting if more is None else np.concatenate([waiting, more])
            cuts = [0, *borders(kernels.piece_start(together)).tolist()]
            if more is None:
                cuts.append(together.size)
            for start, stop in zip(cuts, cuts[1:], strict=False):
                pieces = together[start:stop]
                sizes = kernels.piece_length(pieces).astype(np.int64) + 2
                rows_here, order, row_of = packed(sizes, self.length)
                append("pieces", pieces[order[np.argsort(row_of[order], kind="stable")]])
                pieces_of_row = np.bincount(row_of, minlength=rows_here)
                append("rows", num_pieces + np.cumsum(pieces_of_row))
                num_rows, num_pieces = num_rows + rows_here, num_pieces + pieces.size
                num_places += int(sizes.sum())
                max_pieces = max(max_pieces, int(pieces_of_row.max(initial=0)))
            waiting = together[cuts[-1] :]
        pad_share = 1 - num_places / max(1, num_rows * self.length)
        return {"pad_share": pad_share, "crop_share": 0.0, "max_pieces": max_pieces}


def pieces_of(sizes: NDArray[np.int64], most: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut documents into pieces of at most `most` tokens. sizes: tokens of the documents.

    Return for each piece the index of its document, its offset in the document, and its number of tokens: int64
    [num_pieces] each.
    """
    counts = -(-sizes // most)
    document = np.repeat(np.arange(sizes.size), counts)
    before = most * (np.arange(document.size) - np.repeat(np.cumsum(counts) - counts, counts))
    return document, before, np.minimum(most, sizes[document] - before)


def borders(starts: NDArray[Any]) -> NDArray[np.int64]:
    """Return the first piece of each area, except the first area. starts: the start of each piece in the stream."""
    return np.flatnonzero(np.diff(starts // starts.dtype.type(PACKED_TOGETHER))) + 1


def packed(sizes: NDArray[np.int64], length: int) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
    """Pack the pieces of an area into rows. sizes: their tokens, including [CLS] and [SEP].

    Return the number of rows, the order of adding the pieces, and the row of each piece.
    """
    order, row_of = np.argsort(-sizes, kind="stable"), np.empty(sizes.size, np.int64)
    return kernels.pack(sizes, order, length, row_of), order, row_of
