"""Rows of consecutive tokens of the stream."""

from __future__ import annotations

import numpy as np
from numba import uint64

from bertdata import keys
from bertdata.jit import jit
from bertdata.read.kernels.draws import below, key3
from bertdata.read.kernels.rows import Frames, TokenTable, add_span, shard_of

PHASE = np.uint64(keys.purpose("phase"))


@jit()
def phase(seed, epoch, total):
    """Return the start of an epoch's windows in a stream of `total` tokens."""
    return np.int64(below(key3(seed, PHASE, uint64(epoch)), uint64(total)))


@jit()
def window_rows(which, epochs, sample_ids, seed, table, frames, num_spans):
    """Lay out windows. epochs, sample_ids int64 [B]. num_spans: as in Samples.lay_out."""
    table, frames = TokenTable(*table), Frames(*frames)
    total, text_length = table.starts[-1], frames.ids.shape[1] - 2
    last_epoch, first = np.int64(-1), np.int64(0)
    for b in which:
        if epochs[b] != last_epoch:
            last_epoch = epochs[b]
            first = phase(seed, last_epoch, total)
        start = sample_ids[b] * text_length
        left = min(text_length, total - start)
        frames.text_places[b] = left
        frames.ids[b, 0] = table.cls
        frames.ids[b, left + 1] = table.sep
        start += first
        start = start - total if start >= total else start
        shard = shard_of(table.starts, start)
        place = 1
        while left > 0:
            length = min(left, table.starts[shard + 1] - start)
            num_spans = add_span(table, frames, num_spans, shard, start, length, b, place)
            place += length
            left -= length
            start += length
            shard += 1
            if shard == table.starts.size - 1:
                shard, start = 0, 0
    return num_spans
