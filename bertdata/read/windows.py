"""Samples that are windows: the documents end to end, cut every C tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bertdata.read import kernels
from bertdata.read.stream import Rows, TokenStream


class Windows:
    def __init__(self, stream: TokenStream, *, seed: int) -> None:
        self.stream, self._seed, self._text_length = stream, seed, stream.length - 2
        self._total = int(stream.starts[-1])
        self.num_samples = -(-self._total // self._text_length)
        self.facts = {"pad_share": 1 - (self._total / self.num_samples + 2) / stream.length, "crop_share": 0.0}

    def rows(self, epochs: NDArray[np.int64], sample_ids: NDArray[np.int64]) -> Rows:
        ids, filled = self.stream.empty(sample_ids.size)
        shards_of_row = min(len(self.stream.shards), self._text_length) + 1
        spans = np.empty((sample_ids.size * shards_of_row, 5), np.int64)
        names = epochs, sample_ids, np.uint64(self._seed)
        count = kernels.window_rows(*names, self._text_length, *self.stream.table, ids, filled, spans)
        return Rows(ids, filled, goes_on=self.stream.fill(spans[:count], filled, ids))

    def ranges(self, epoch: int, first: int, stop: int) -> list[tuple[int, int]]:
        """Where in the stream samples first, first + 1, ..., stop - 1 are."""
        phase, total = kernels.phase(np.uint64(self._seed), epoch, self._total), self._total
        start, end = (phase + min(sample * self._text_length, total) for sample in (first, stop))
        return [(start, min(end, total)), (0, max(0, end - total))] if start < total else [(start - total, end - total)]
