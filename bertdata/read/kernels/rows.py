"""Rows of ids, made from spans of the tokens in memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from bertdata.bits import request
from bertdata.jit import inline, jit, part

PREFETCHED = 1024  # bytes of a span to prefetch; the processor prefetches longer spans by itself


class TokenTable(NamedTuple):
    """The tokens of a split in memory: its shards in order form one stream. Each Loader has a table for each source."""

    starts: NDArray[np.int64]  # [num_shards + 1]: start of each shard in the stream, and the length of the stream
    addresses: NDArray[np.int64]  # [num_shards]: address of the first token of each shard, 0 if it is not mapped
    itemsize: int  # bytes per token: 2 or 4
    separator: int  # separators after each document: 1 or 0
    cls: int  # id of [CLS]
    sep: int  # id of [SEP]


SPAN = np.dtype(
    [
        ("address", np.int64),  # memory address of the first token
        ("row", np.int64),  # row of the batch
        ("place", np.int64),  # position of the first token in the row
        ("length", np.int64),  # tokens
        ("start", np.int64),  # index of the first token in the stream
    ]
)
"""Consecutive tokens of one shard that are consecutive in one row."""


class Frames(NamedTuple):
    """The rows of a batch before their text is copied: special tokens, and spans of text."""

    ids: NDArray[np.int64]  # [B, T]
    text_places: NDArray[np.int64]  # [B]: tokens between the first [CLS] and the last [SEP]
    spans: NDArray[Any]  # SPAN [at least the number of spans in the rows]


@intrinsic
def _pointer(typing: Any, address: Any, like: Any) -> Any:
    """Return a pointer to values of the type of `like`. Indexing the pointer is not checked."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(address, like), generate


@intrinsic
def _prefetch(typing: Any, address: Any) -> Any:
    """Prefetch the 64 bytes at an address. The address may be invalid."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        request(builder, builder.inttoptr(args[0], ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(address), generate


@inline()
def add_span(table, frames, number, shard, start, length, row, place):
    """Write span `number` and prefetch its tokens. Return number + 1."""
    address = table.addresses[shard] + (start - table.starts[shard]) * table.itemsize
    span = frames.spans[number]
    span["address"] = address
    span["row"] = row
    span["place"] = place
    span["length"] = length
    span["start"] = start
    for line in range(address & ~63, address + min(length * table.itemsize, PREFETCHED), 64):
        _prefetch(line)
    return number + 1


@part()
def shard_of(starts, start):
    """Return the index of the shard with token `start` of the stream, by bisection."""
    lo, hi = 0, starts.size - 1
    while hi - lo > 1:
        middle = (lo + hi) // 2
        if starts[middle] <= start:
            lo = middle
        else:
            hi = middle
    return lo


@inline()
def add_piece(table, frames, number, start, length, row, place):
    """Add a span from an index. Return number + 1, or -1 if the span is not inside one shard."""
    if not (0 <= start < table.starts[-1] and length > 0):
        return np.int64(-1)
    shard = shard_of(table.starts, start)
    if length > table.starts[shard + 1] - start:
        return np.int64(-1)
    return add_span(table, frames, number, shard, start, length, row, place)


@jit()
def fill_rows(frames, num_spans, like, pad):
    """Copy the tokens of the first `num_spans` spans into their rows, and pad the rows.

    like: a scalar of the dtype of the tokens. The addresses of spans must be valid. Return the largest id, and the
    number of padding tokens.
    """
    frames = Frames(*frames)
    ids = frames.ids
    largest, padding = np.int64(0), np.int64(0)
    for i in range(num_spans):
        span = frames.spans[i]
        place, length = span["place"], span["length"]
        tokens = _pointer(span["address"], like)
        out = ids[span["row"], place : place + length]
        largest_of_span = like
        for t in range(length):
            out[t] = tokens[t]
            largest_of_span = max(largest_of_span, tokens[t])
        largest = max(largest, np.int64(largest_of_span))
    for b in range(ids.shape[0]):
        stop = frames.text_places[b] + 2
        ids[b, stop:] = pad
        padding += ids.shape[1] - stop
    return largest, padding


@jit()
def attend(text_places, attention_mask):
    """Write attention_mask, int64 [B, T]: 1 for tokens, 0 for padding."""
    for b in range(text_places.size):
        attention_mask[b, : text_places[b] + 2] = 1
        attention_mask[b, text_places[b] + 2 :] = 0


@jit()
def mark_inside_words(spans, starts, word_addresses, inside_word):
    """Write inside_word, uint8 [B, T], for each token of a span: 1 if it continues the previous word, else 0.

    spans: SPAN [n], of one dataset. starts: as in TokenTable. word_addresses int64 [num_shards]: memory address of the
    words array of each shard (docs/format.md).
    """
    for i in range(spans.size):
        span = spans[i]
        row, place, length = span["row"], span["place"], span["length"]
        shard = shard_of(starts, span["start"])
        first = span["start"] - starts[shard]
        words = _pointer(word_addresses[shard], np.uint8(0))
        for t in range(length):
            inside_word[row, place + t] = words[(first + t) >> 3] >> np.uint8((first + t) & 7) & 1 ^ 1
