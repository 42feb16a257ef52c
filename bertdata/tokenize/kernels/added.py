"""Find added tokens in a text, and code points whose normal form may contain them."""

from __future__ import annotations

import numpy as np
from numba import int64, uint64

from bertdata.bits import trailing_zeros
from bertdata.jit import jit
from bertdata.tokenize.kernels.bits import decoded, in_ranges64, last_begin
from bertdata.tokenize.kernels.tries import longest_token


@jit()
def find_added(text, starts, stops, added, seen, found):
    """Find added tokens in the pieces text[starts[i] : stops[i]], from left to right, the longest token at each place.

    added: Added. seen: uint64 [0x110000 / 64], output, a bit for each code point that begins with a watched byte; or
    empty. found: int64 [n, 4], output, rows (piece, start, stop, id). Return the number of tokens found; rows beyond n
    are not written.
    """
    trie, ids, begins = added.trie, added.ids, added.begins
    count = 0
    for piece in range(starts.size):
        stop = stops[piece]
        free = starts[piece]  # end of the last token found
        for base in range(starts[piece], stop, 64):
            in_piece = ~uint64(0) if stop - base >= 64 else (uint64(1) << uint64(stop - base)) - uint64(1)
            mask = in_ranges64(text, base, added.first) & in_ranges64(text, base + 1, added.second) & in_piece
            while mask != uint64(0):
                i = base + trailing_zeros(mask)
                mask &= mask - uint64(1)
                if i < free or not begins[int64(text[i]) << 8 | int64(text[i + 1])]:
                    continue
                token, after = longest_token(trie, 0, text, i, stop)
                free = max(free, after)
                if token >= 0 and ids[token] != -1:
                    if count < found.shape[0]:
                        found[count, 0], found[count, 1] = piece, i
                        found[count, 2], found[count, 3] = free, ids[token]
                    count += 1
            mask = in_ranges64(text, base, added.watched) & in_piece if seen.size > 0 else uint64(0)
            while mask != uint64(0):
                point = decoded(text, base + trailing_zeros(mask))[0]
                seen[point >> 6] |= uint64(1) << uint64(point & 63)
                mask &= mask - uint64(1)
    return count


@jit()
def find_hazards(text, starts, stops, hazards, adjacent, watched, is_harmed):
    """Set is_harmed[i] if only the normal form of piece i may contain an added token.

    hazards: uint8 [0x110000]. 2: the normal form of a code point has characters of a token. 1: it is empty; then the
    piece is harmed if the characters before and after it (ignoring other such code points) are adjacent in a token.
    From 3 on: the number of a character of a token. adjacent: bool [256, 256], by these numbers. watched: as in Added;
    all code points of hazard 1 and 2 begin with a watched byte.
    """
    for piece in range(starts.size):
        start, stop = starts[piece], stops[piece]
        for base in range(start, stop, 64):
            mask = in_ranges64(text, base, watched)
            while mask != uint64(0) and not is_harmed[piece]:
                i = base + trailing_zeros(mask)
                mask &= mask - uint64(1)
                if i >= stop:
                    break
                point, width = decoded(text, i)
                hazard, after, before = hazards[point], np.uint8(1), np.uint8(1)
                k = i + width
                while hazard == 1 and after == 1 and k < stop:
                    point, width = decoded(text, k)
                    after = hazards[point]
                    k += width
                while hazard == 1 and before == 1 and i > start:
                    i = last_begin(text, start, i - 1)
                    before = hazards[decoded(text, i)[0]]
                is_harmed[piece] = hazard == 2 or (hazard == 1 and adjacent[before, after])
