"""Byte-pair encoding: merging the ids of one word by rank (Sennrich et al., 2016)."""

from __future__ import annotations

import numpy as np
from numba import int64, uint64

from bertdata.jit import jit, part
from bertdata.tokenize.kernels.records import EMPTY
from bertdata.tokenize.kernels.runs import GOLDEN
from bertdata.tokenize.kernels.tries import longest_token

NO_RANK = np.int64(1 << 62)
SILVER = np.uint64(0xD6E8FEB86659FD93)
MOST_MOVES = 1000  # moves between slots before a table counts as full
LONGEST_TOKEN = 1 << 10  # bytes of a token, for `mark_reached`
SUFFIX = 0xFF  # a byte that never occurs in UTF-8: it represents the end-of-word mark of byte-level BPE


@part(forceinline=True)
def _slot(key, factor, slots):
    """Return one of the two slots of a key in a table of merges. The number of slots is a power of two."""
    return ((key * factor) >> uint64(40)) & uint64(slots - 1)


@part(forceinline=True)
def rank_of(pairs, left, right):
    """Return the rank of the merge of two ids, NO_RANK if there is none. Has no branch, because it would be
    unpredictable.

    pairs: see `add_pairs`.
    """
    key = (uint64(left) << uint64(20)) | uint64(right)
    found, other = pairs[_slot(key, GOLDEN, pairs.size)], pairs[_slot(key, SILVER, pairs.size)]
    found = found if found >> uint64(24) == key else other
    return int64(found & uint64(0xFFFFFF)) if found >> uint64(24) == key else NO_RANK


@part()
def merge(size, pairs, merged, ids, ranks):
    """Merge ids[:size] in place. Return the number of remaining ids, and the rank of the last merge, or NO_RANK.

    Merges the pair of lowest rank first, and the leftmost of equal pairs, until no pair can be merged (Sennrich et al.,
    2016). pairs, merged: as in WordTables. ranks: int64 [at least size]. Takes O(size²) time, with a small factor.
    """
    last = NO_RANK
    for k in range(size - 1):
        ranks[k] = rank_of(pairs, ids[k], ids[k + 1])
    while size > 1:
        best, place = NO_RANK, 0
        for k in range(size - 1):
            best = min(best, ranks[k])
        if best == NO_RANK:
            break
        while ranks[place] != best:
            place += 1
        ids[place], last = merged[best], best
        size -= 1
        for k in range(place + 1, size):
            ids[k], ranks[k] = ids[k + 1], ranks[k + 1]
        if place > 0:
            ranks[place - 1] = rank_of(pairs, ids[place - 1], ids[place])
        if place < size - 1:
            ranks[place] = rank_of(pairs, ids[place], ids[place + 1])
    return size, last


@jit(arrays=True)
def mark_reached(text, bounds, byte_ids, pairs, merged, is_reached):
    """Set is_reached[r] for the rank r of each merge that can happen in a word.

    In a word, a token results from the same merges as its bytes alone, so the last of these is the only merge that
    makes it. text, bounds: the bytes of all tokens, at most LONGEST_TOKEN of each. byte_ids: int64 [1 or 2, 256], row 1
    for bytes before SUFFIX. pairs, merged: as in WordTables, of ids. is_reached: bool [num_ranks], False.
    """
    ids, ranks = np.zeros(LONGEST_TOKEN, np.int64), np.zeros(LONGEST_TOKEN, np.int64)
    for t in range(bounds.size - 1):
        size = bounds[t + 1] - bounds[t]
        has_ids = True
        at_end = int64(byte_ids.shape[0] > 1 and text[bounds[t + 1] - 1] == SUFFIX)
        size -= at_end
        for k in range(size):
            ids[k] = byte_ids[at_end if k == size - 1 else 0, text[bounds[t] + k]]
            has_ids = has_ids and ids[k] >= 0
        if has_ids and size > 1:
            count, last = merge(size, pairs, merged, ids, ranks)
            if count == 1:
                is_reached[last] = True


@jit()
def add_pairs(lefts, rights, ranks, pairs):
    """Fill the hash table of merges. The merge of rank ranks[r] joins ids lefts[r] and rights[r]. False if it is full.

    pairs: uint64 [power of two], all EMPTY: left in bits 44 to 63, right in bits 24 to 43, rank below. Each merge is in
    one of two slots (cuckoo hashing: Pagh and Rodler, 2001).
    """
    for r in range(lefts.size):
        entry = (uint64(lefts[r]) << uint64(44)) | (uint64(rights[r]) << uint64(24)) | uint64(ranks[r])
        j = _slot(entry >> uint64(24), GOLDEN, pairs.size)
        for _ in range(MOST_MOVES):
            entry, pairs[j] = pairs[j], entry
            if entry == EMPTY:
                break
            key = entry >> uint64(24)
            j ^= _slot(key, GOLDEN, pairs.size) ^ _slot(key, SILVER, pairs.size)  # the other slot of the old merge
        if entry != EMPTY:
            return False
    return True


@part()
def character_ids(word, size, tables, ids):
    """Write the ids of the characters of a word to `ids`, for BPE. Return their number."""
    count, i, in_unknown = 0, 0, False
    while i < size:
        width = 1 if word[i] < 0x80 else 2 if word[i] < 0xE0 else 3 if word[i] < 0xF0 else 4
        is_last = int64(i + width == size)  # root 1: characters that end a word
        found, after = longest_token(tables.trie, is_last, word, i, i + width)
        if after == i + width:
            ids[count] = found
            count += 1
            in_unknown = False
        elif tables.byte_ids[0, 0] >= 0:
            for k in range(i, i + width):
                ids[count] = tables.byte_ids[0, word[k]]
                count += 1
        elif tables.unk >= 0:
            if not in_unknown or tables.fuse_unk == 0:
                ids[count] = tables.unk
                count += 1
            in_unknown = True
        i += width
    return count
