"""WordPiece: longest matches in one word."""

from __future__ import annotations

from numba import int64

from bertdata.jit import part
from bertdata.tokenize.kernels.tries import longest_token


@part()
def longest_matches(word, size, num_chars, tables, ids):
    """Write the ids of a normalized word of `size` bytes to `ids`, longest match first. Return how many.

    A word that the vocabulary cannot spell is one unknown token.
    """
    count, start = 0, 0
    while start < size and num_chars <= tables.max_chars:
        ids[count], start = longest_token(tables.trie, int64(start > 0), word, start, size)
        if ids[count] < 0:
            break
        count += 1
    if start < size:
        ids[0] = tables.unk
        return 1
    return count
