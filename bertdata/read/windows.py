"""Samples that are windows: the stream of a split, cut every T - 2 tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from bertdata.read.kernels import windows as kernels
from bertdata.read.stream import Columns, Samples, Wanted


class Windows(Samples):
    """Samples that are windows over the stream of a split, separators included.

    The first window of an epoch starts at the phase, a random token, and the last one ends there. So every epoch cuts
    the text differently, and every token is in exactly one sample of each epoch. Ten tokens, rows of six tokens, phase
    7:

        stream      0 1 2 3 4 5 6 7 8 9
        sample 0    [CLS] 7 8 9 0 [SEP]
        sample 1    [CLS] 1 2 3 4 [SEP]
        sample 2    [CLS] 5 6 [SEP] [PAD] [PAD]

    The start of a sample is computed, without an index. Only the last sample of an epoch can be padded.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._text_length, self._total = self.length - 2, int(self.starts[-1])
        self.spans_per_row = min(len(self.shards), self._text_length) + 1
        self.num_samples = -(-self._total // self._text_length)
        self._facts = {"pad_share": 1 - (self._total / self.num_samples + 2) / self.length, "crop_share": 0.0}

    def lay_out(self, wanted: Wanted, frames: tuple[Any, ...], columns: Columns, num_spans: int) -> int:
        return int(kernels.window_rows(*wanted, np.uint64(self.seed), self.table, frames, num_spans))

    def ranges(self, epoch: int, first: int, stop: int) -> list[tuple[int, int]]:
        total = self._total
        phase = kernels.phase(np.uint64(self.seed), epoch, total)
        start, end = (phase + min(sample * self._text_length, total) for sample in (first, stop))
        if start >= total:
            return [(start - total, end - total)]
        return [(start, min(end, total)), (0, max(0, end - total))]
