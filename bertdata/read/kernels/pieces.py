"""Rows of one or more pieces of documents."""

from __future__ import annotations

import numpy as np
from numba import uint64

from bertdata.bits import trailing_zeros
from bertdata.jit import inline, jit
from bertdata.read.kernels.draws import U1
from bertdata.read.kernels.rows import Frames, TokenTable, add_piece


def pack_pieces(starts, lengths):
    """Return pieces in the form of an index, uint64: index of the first token in the stream, then 16 bits of length."""
    return (starts << 16 | lengths).astype(np.uint64)


def piece_start(piece):
    """Return the index of the first token in the stream. piece: uint64, a scalar or an array."""
    return piece >> np.uint64(16)


def piece_length(piece):
    """Return the number of tokens. piece: uint64, a scalar or an array."""
    return piece & np.uint64(0xFFFF)


_piece_start, _piece_length = inline()(piece_start), inline()(piece_length)


@jit()
def piece_rows(which, sample_ids, pieces, bounds, table, frames, position_ids, num_spans):
    """Lay out rows of one or more pieces of documents, each between its own [CLS] and [SEP].

    pieces uint64 [P]: see `pack_pieces`. bounds uint64 [N + 1]: row k has the pieces bounds[k] to bounds[k + 1] - 1; if
    bounds is empty, piece k. position_ids int64 [B, T], or [0, 0] if not needed: from 0 in each piece, and from 0 again
    in the padding. num_spans: as in Samples.lay_out; -1 if the index is damaged.
    """
    table, frames = TokenTable(*table), Frames(*frames)
    length = frames.ids.shape[1]
    for b in which:
        k = sample_ids[b]
        if bounds.size:
            first, stop = np.int64(bounds[k]), np.int64(bounds[k + 1])
        else:
            first, stop = k, k + 1
        if not 0 <= first < stop <= pieces.size or num_spans + stop - first > frames.spans.size:
            return -1
        place = 0
        for piece in pieces[first:stop]:
            size = np.int64(_piece_length(piece))
            if place + size + 2 > length:
                return -1
            start = np.int64(_piece_start(piece))
            num_spans = add_piece(table, frames, num_spans, start, size, b, place + 1)
            if num_spans < 0:
                return -1
            frames.ids[b, place] = table.cls
            frames.ids[b, place + size + 1] = table.sep
            if position_ids.size:
                for t in range(size + 2):
                    position_ids[b, place + t] = t
            place += size + 2
        frames.text_places[b] = place - 2
        if position_ids.size:
            for t in range(length - place):
                position_ids[b, place + t] = t
    return num_spans


@jit(arrays=True)
def pack(sizes, order, capacity, rows):
    """Pack pieces into rows by best fit.

    Pieces are added in the order order[0], order[1], ... Each is added to the row with the least sufficient room (the
    most recently changed of several such rows), or else to a new row.

    sizes, order int64 [P]: tokens of each piece, at most `capacity`, and the order. rows int64 [P]: output, the row of
    each piece. Return the number of rows. O(P · capacity / 64) in the worst case.
    """
    tops = np.full(capacity + 1, -1, np.int64)  # by room: the top of the stack of rows with this room
    under = np.empty(sizes.size, np.int64)  # by row: the next row in its stack
    with_room = np.zeros((capacity >> 6) + 1, np.uint64)  # bit r: the stack of room r is not empty
    num_rows = 0
    for i in order:
        room = sizes[i]
        word = room >> 6
        bits = with_room[word] >> uint64(room & 63) << uint64(room & 63)
        while not bits and word + 1 < with_room.size:
            word += 1
            bits = with_room[word]
        if bits:
            room = (word << 6) + trailing_zeros(bits)
            row = tops[room]
            tops[room] = under[row]
            if tops[room] < 0:
                with_room[word] &= ~(U1 << uint64(room & 63))
        else:
            room, row = capacity, num_rows
            num_rows += 1
        rows[i] = row
        room -= sizes[i]
        under[row], tops[room] = tops[room], row
        with_room[room >> 6] |= U1 << uint64(room & 63)
    return num_rows
