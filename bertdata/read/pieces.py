"""Samples that are documents or pieces of them, one a row or several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import DatasetError, UsageError
from bertdata.read import kernels
from bertdata.read.index import Append, derived
from bertdata.read.stream import Rows, TokenStream, require_sound

PACKED_TOGETHER = 1 << 19  # tokens of the stream whose pieces may share rows
LONGEST = 1 << 16  # places of a row that an index can describe


class Pieces:
    """documents and packed."""

    def __init__(self, stream: TokenStream, *, packed: bool) -> None:
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
        count = kernels.piece_rows(
            sample_ids, self._bounds, self._pieces, *self.stream.table, ids, filled, position_ids, spans
        )
        require_sound(count)
        goes_on = self.stream.fill(spans[:count], filled, ids)
        return Rows(ids, filled, position_ids if self._packed else None, goes_on=goes_on)

    def ranges(self, epoch: int, first: int, stop: int) -> list[tuple[int, int]]:
        if self._packed:
            first, stop = int(self._bounds[first]), int(self._bounds[stop])
        pieces = self._pieces[first:stop]
        require_sound(pieces.size - 1)
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
                count = kernels.pack(sizes, order, self.stream.length, row_of)
                append("pieces", pieces[order[np.argsort(row_of[order], kind="stable")]])
                append("rows", num_pieces + np.cumsum(np.bincount(row_of, minlength=count)))
                num_rows, num_pieces, places = num_rows + count, num_pieces + pieces.size, places + int(sizes.sum())
            waiting = together[cuts[-1] :]
        return {"pad_share": 1 - places / max(1, num_rows * self.stream.length), "crop_share": 0.0}
