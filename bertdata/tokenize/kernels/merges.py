"""Byte-pair encoding: merging the ids of one word by rank (Sennrich et al., 2016)."""

from __future__ import annotations

import numpy as np
from numba import int64, uint64

from bertdata.jit import jit, part
from bertdata.tokenize.kernels.bits import least32
from bertdata.tokenize.kernels.records import EMPTY
from bertdata.tokenize.kernels.runs import GOLDEN
from bertdata.tokenize.kernels.tries import whole_word

NO_RANK = np.int64(1 << 62)
SILVER = np.uint64(0xD6E8FEB86659FD93)
MOST_MOVES = 1000  # of merges from slot to slot, before a table counts as full
LONGEST_TOKEN = 1 << 10  # bytes of a token, for `mark_reached`
LANES, NO_LANE = 32, np.int32(0x7FFFFFFF)  # of `merge_short`; a place takes 5 bits, and `least32` takes 32 lanes


@part(forceinline=True)
def _slot(key, factor, slots):
    """One of the two slots in which a key may be in a table of merges of so many slots, a power of two."""
    return ((key * factor) >> uint64(40)) & uint64(slots - 1)


@part(forceinline=True)
def rank_of(pairs, left, right):
    """The rank of the merge of two ids, NO_RANK if they are not merged. It has no branch, as no processor could
    predict it.

    pairs: see `add_pairs`.
    """
    key = (uint64(left) << uint64(20)) | uint64(right)
    found, other = pairs[_slot(key, GOLDEN, pairs.size)], pairs[_slot(key, SILVER, pairs.size)]
    found = found if found >> uint64(24) == key else other
    return int64(found & uint64(0xFFFFFF)) if found >> uint64(24) == key else NO_RANK


@part()
def merge(size, pairs, merged, ids, ranks):
    """Merges ids[:size] in place. Returns how many ids are left, and the rank of the last merge, NO_RANK if none was.

    Merges the pair of lowest rank first, and the leftmost of equal pairs, until no pair can be merged (Sennrich et al.,
    2016). pairs, merged: as in WordTables. ranks: int64 [at least size]. Takes time in the square of `size`, with a
    small factor.
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


@part(forceinline=True)
def _lane(rank, place):
    """An entry of the lanes of `merge_short`."""
    return np.int32(rank << 5 | place) if rank != NO_RANK else NO_LANE


@part()
def merge_short(size, pairs, merged, ids, lanes, links):
    """Does what `merge` does, for at most LANES ids, with one vector instruction for each search of the lowest rank.

    pairs, merged: as in WordTables. lanes: int32 [LANES]: (rank << 5 | place) of the pair that begins at a place.
    links: int64 [2, LANES + 1]: of each place the next one and the one before.
    """
    after, before = links[0], links[1]
    for k in range(LANES):
        lanes[k] = NO_LANE
    for k in range(size):
        after[k], before[k] = k + 1, k - 1
        if k + 1 < size:
            lanes[k] = _lane(rank_of(pairs, ids[k], ids[k + 1]), k)
    best = least32(lanes)
    while best != NO_LANE:
        k = int64(best) & 31
        gone = after[k]
        following, previous = after[gone], before[k]
        ids[k], after[k], before[following], lanes[gone] = merged[best >> 5], following, k, NO_LANE
        lanes[k] = _lane(rank_of(pairs, ids[k], ids[following]), k) if following < size else NO_LANE
        if previous >= 0:
            lanes[previous] = _lane(rank_of(pairs, ids[previous], ids[k]), previous)
        best = least32(lanes)
    count, k = 0, 0
    while k < size:
        ids[count] = ids[k]
        count += 1
        k = after[k]
    return count


@part()
def merge_any(size, tables, runs):
    """Merges runs.ids[:size] in place. Returns how many ids are left."""
    if size <= LANES:
        return merge_short(size, tables.pairs, tables.merged, runs.ids, runs.lanes, runs.links)
    return merge(size, tables.pairs, tables.merged, runs.ids, runs.ranks[0])[0]


@jit(arrays=True)
def mark_reached(text, bounds, byte_ids, pairs, merged, is_reached):
    """Sets is_reached[r] for each rank of a merge that can happen in a word. Returns False if a token is too long.

    Inside a word, a token is made by the same merges as if its bytes were alone. So no other merge makes it than the
    last one there. text, bounds: the bytes of all tokens. byte_ids int64 [256]. pairs, merged: as in WordTables.
    is_reached: bool [num_ranks], False.
    """
    ids, ranks = np.zeros(LONGEST_TOKEN, np.int64), np.zeros(LONGEST_TOKEN, np.int64)
    for t in range(bounds.size - 1):
        size = bounds[t + 1] - bounds[t]
        if size > LONGEST_TOKEN:
            return False
        has_ids = True
        for k in range(size):
            ids[k] = byte_ids[text[bounds[t] + k]]
            has_ids = has_ids and ids[k] >= 0
        if has_ids and size > 1:
            count, last = merge(size, pairs, merged, ids, ranks)
            if count == 1:
                is_reached[last] = True
    return True


@jit(arrays=True)
def keep_whole(text, bounds, byte_ids, ids, pairs, merged, is_whole):
    """Sets is_whole[t] where merging the bytes text[bounds[t] : bounds[t + 1]] of a token gives its id ids[t].

    byte_ids, pairs, merged: as in WordTables. is_whole: bool [num_tokens].
    """
    found, lanes, links = np.zeros(LANES, np.int64), np.zeros(LANES, np.int32), np.zeros((2, LANES + 1), np.int64)
    for t in range(ids.size):
        size = bounds[t + 1] - bounds[t]
        has_ids = 0 < size <= LANES
        for k in range(size if has_ids else 0):
            found[k] = byte_ids[int64(k == size - 1), text[bounds[t] + k]]
            has_ids = has_ids and found[k] >= 0
        is_whole[t] = has_ids and merge_short(size, pairs, merged, found, lanes, links) == 1 and found[0] == ids[t]


@jit()
def add_pairs(lefts, rights, ranks, pairs):
    """Fills the hash table of merges. The merge of rank ranks[r] joins ids lefts[r] and rights[r]. False: it is full.

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
            j ^= _slot(key, GOLDEN, pairs.size) ^ _slot(key, SILVER, pairs.size)  # the other slot of what was there
        if entry != EMPTY:
            return False
    return True


@part()
def character_ids(word, size, tables, ids):
    """Writes the ids of the characters of a word to `ids`, for BPE. Returns how many."""
    count, i, in_unknown = 0, 0, False
    while i < size:
        width = 1 if word[i] < 0x80 else 2 if word[i] < 0xE0 else 3 if word[i] < 0xF0 else 4
        found = whole_word(
            word, i, i + width, tables.trie, int64(i + width == size)
        )  # root 1: characters that end a word
        if found >= 0:
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
