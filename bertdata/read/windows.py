"""Samples that are windows: the documents of a split end to end, cut every T - 2 tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from bertdata.read.kernels import windows as kernels
from bertdata.read.stream import Columns, TokenStream, Wanted


class Windows:
    """Samples that are windows over the stream of a split, separators included.

    The first window of an epoch begins at its phase, a random place, and the last one ends there. So every epoch cuts
    the text at other places, and every token is in exactly one sample of each epoch. Ten tokens, rows of six places,
    phase 7:

        stream      0 1 2 3 4 5 6 7 8 9
        sample 0    [CLS] 7 8 9 0 [SEP]
        sample 1    [CLS] 1 2 3 4 [SEP]
        sample 2    [CLS] 5 6 [SEP] [PAD] [PAD]

    Where a sample begins is arithmetic: there is no index. Only the last sample of an epoch can be padded.
    """

    def __init__(self, stream: TokenStream, *, seed: int) -> None:
        self.stream, self._seed = stream, np.uint64(seed)
        self._text_length, self._total = stream.length - 2, int(stream.starts[-1])
        self.spans_per_row = min(len(stream.shards), self._text_length) + 1
        self.num_samples = -(-self._total // self._text_length)
        self.facts = {"pad_share": 1 - (self._total / self.num_samples + 2) / stream.length, "crop_share": 0.0}

    def columns(self, num_rows: int) -> Columns:
        return {}

    def lay_out(self, wanted: Wanted, frames: tuple[Any, ...], columns: Columns, num_spans: int) -> int:
        return int(kernels.window_rows(*wanted, self._seed, self.stream.table, frames, num_spans))

    def ranges(self, epoch: int, first: int, stop: int) -> list[tuple[int, int]]:
        total = self._total
        phase = kernels.phase(self._seed, epoch, total)
        start, end = (phase + min(sample * self._text_length, total) for sample in (first, stop))
        if start >= total:
            return [(start - total, end - total)]
        return [(start, min(end, total)), (0, max(0, end - total))]
