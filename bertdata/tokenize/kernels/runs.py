"""The cache of runs: the ids of what a thread has met, found by the run's bytes; and of pairs of code points.

A set lies in one line of a processor's cache, and a run of up to 16 bytes that is found costs one such line.
"""

from __future__ import annotations

import numpy as np
from numba import int64, uint64

from bertdata.bits import load64, store64
from bertdata.jit import jit
from bertdata.tokenize.kernels.records import EMPTY

UNPACKED = np.uint64(15)  # count of a value whose ids do not fit into it
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
LOW32 = np.uint64(0xFFFFFFFF)
LONGEST_KEY = 64  # bytes of a run that has a place in the tables


@jit(forceinline=True, _nrt=False)
def put_ids(out, p, value):
    """Writes the ids of a value at out[p:] and returns how many they are. Always writes three places."""
    if out.itemsize == 2:
        store64(out, 2 * p, value)
        return int64(value >> uint64(48))
    store64(out, 4 * p, (value & uint64(0xFFFFF)) | ((value & uint64(0xFFFFF00000)) << uint64(12)))
    out[p + 2] = (value >> uint64(40)) & uint64(0xFFFFF)
    return int64(value >> uint64(60))


@jit(forceinline=True, _nrt=False)
def _count(out, value):
    """How many ids a value holds, UNPACKED if they are in the pool."""
    return value >> uint64(48) if out.itemsize == 2 else value >> uint64(60)


@jit(forceinline=True, _nrt=False)
def packed(out, ids, count):
    """The value of ids[:count]."""
    bits, top = (uint64(16), uint64(48)) if out.itemsize == 2 else (uint64(20), uint64(60))
    if count > 3:
        return UNPACKED << top
    value = uint64(count) << top
    for k in range(count):
        value |= uint64(ids[k]) << (uint64(k) * bits)
    return value


@jit(_nrt=False)
def clear_runs(runs):
    """Empties the tables of runs."""
    for table in (runs.near, runs.far):
        table[:] = uint64(0)
    runs.used[:] = 0


@jit(forceinline=True, _nrt=False)
def _first_bytes(word, count):
    """The first `count` bytes of a word, 0 to 8, and zeros."""
    half = uint64(32 - 4 * count)  # a shift by 64 would have no result
    return word & ((~uint64(0) >> half) >> half)


@jit(forceinline=True, _nrt=False)
def near_key(text, start, length):
    """The first 8 bytes of a run of up to 16 bytes, and the others. Zeros fill both up."""
    key = _first_bytes(load64(text, start), min(length, 8))
    return key, _first_bytes(load64(text, start + 8), max(length, 8) - 8)


@jit(forceinline=True, _nrt=False)
def near_set(near, key, rest):
    """Where the set of a run begins in RunTables.near."""
    return (((key ^ (rest * uint64(0xBF58476D1CE4E5B9))) * GOLDEN) >> uint64(42)) & uint64(near.size - 8)


@jit(forceinline=True, _nrt=False)
def _far_set(far, run_hash):
    """Where the set of a longer run begins in RunTables.far."""
    return (run_hash >> uint64(42)) & uint64(far.size - 8)


@jit(forceinline=True, _nrt=False)
def find_near(near, j, key, rest):
    """The value of a run of up to 16 bytes, EMPTY if the table does not have it. j: where its set begins."""
    if near[j] == key and near[j + uint64(1)] == rest:
        return near[j + uint64(2)]
    if near[j + uint64(4)] != key or near[j + uint64(5)] != rest:
        return EMPTY
    return _swapped(near, j)


@jit(forceinline=True, _nrt=False)
def _swapped(table, j):
    """Exchanges the slots of the set at j. Returns the value in the first."""
    for k in range(3):
        first, second = j + uint64(k), j + uint64(k + 4)
        table[first], table[second] = table[second], table[first]
    return table[j + uint64(2)]


@jit(forceinline=True, _nrt=False)
def set_run(table, j, first, second, value):
    """Writes a new run to the set at j."""
    slot = j if table[j] == uint64(0) else j + uint64(4)
    table[slot], table[slot + uint64(1)], table[slot + uint64(2)] = first, second, value


@jit(_nrt=False)
def add_to_pool(ids, count, runs):
    """Adds ids[:count] to the pool. Returns where they are, as a value holds it. The caller has made room."""
    first = runs.used[1]
    for k in range(count):
        runs.pool[first + k] = ids[k]
    runs.used[1] += count
    return uint64(first) | (uint64(count) << uint64(32))


@jit(forceinline=True, _nrt=False)
def _has_zero(word):
    """Whether one of the 8 bytes of a word is zero."""
    return ((word - uint64(0x0101010101010101)) & ~word & uint64(0x8080808080808080)) != uint64(0)


@jit(_nrt=False)
def _hash(text, start, length):
    """The hash of a run of 9 bytes or more."""
    h = uint64(length)
    for k in range(0, length - 8, 8):
        h = (h ^ load64(text, start + k)) * GOLDEN
        h ^= h >> uint64(32)
    h = (h ^ load64(text, start + length - 8)) * GOLDEN
    return h ^ (h >> uint64(32))


@jit(forceinline=True, _nrt=False)
def find_run(text, start, length, near, far, spelled):
    """The value of a run, EMPTY if the tables do not have it. length: 1 to LONGEST_KEY.

    A run of up to 16 bytes that contains a zero byte is never found, as a key does not say where it ends.
    """
    if length > 16:
        return find_far(text, start, length, far, spelled)
    key, rest = near_key(text, start, length)
    has_zero = _has_zero(key | ~_first_bytes(~uint64(0), min(length, 8)))
    if has_zero or _has_zero(rest | ~_first_bytes(~uint64(0), max(length, 8) - 8)):
        return EMPTY
    return find_near(near, near_set(near, key, rest), key, rest)


@jit(_nrt=False)
def find_far(text, start, length, far, spelled):
    """The value of a run of 17 to LONGEST_KEY bytes, EMPTY if the table does not have it."""
    h = _hash(text, start, length)
    j = _far_set(far, h)
    for slot in (j, j + uint64(4)):
        where = far[slot + uint64(1)]
        if far[slot] == h and where & uint64(0xFF) == uint64(length):
            place, k = int64(where >> uint64(8)), 0
            while k < length and spelled[place + k] == text[start + k]:
                k += 1
            if k == length:
                return far[slot + uint64(2)] if slot == j else _swapped(far, j)
    return EMPTY


@jit(forceinline=True, _nrt=False)
def keep_run(text, start, length, ids, count, out, runs):
    """Adds a run that the tables do not have, with its ids. If there is no room, all tables are emptied first.

    A run of up to 16 bytes that contains a zero byte is left out.
    """
    near, far, used = runs.near, runs.far, runs.used
    if count > runs.pool.size:
        return
    if length <= 16:
        for k in range(start, start + length):
            if text[k] == 0:
                return
    if used[0] + length > runs.spelled.size or used[1] + count > runs.pool.size:
        clear_runs(runs)
    value = packed(out, ids, count)
    if count > 3:
        value |= add_to_pool(ids, count, runs)
    if length <= 16:
        key, rest = near_key(text, start, length)
        set_run(near, near_set(near, key, rest), key, rest, value)
    else:
        h = _hash(text, start, length)
        for k in range(length):
            runs.spelled[used[0] + k] = text[start + k]
        set_run(far, _far_set(far, h), h, (uint64(used[0]) << uint64(8)) | uint64(length), value)
        used[0] += length


@jit(_nrt=False)
def keep_runs(text, runs_of_text, ids, bounds, out, runs):
    """Adds runs that `tokenizers` has encoded to the tables.

    runs_of_text: int64, rows of Output.hard; run i is text[runs_of_text[i, 0] : runs_of_text[i, 1]]. Its ids are
    ids[bounds[i] : bounds[i + 1]], int64. out: an array of the dtype of ids as they are stored. A run with more ids
    than bytes is left out, as an output has no room for it.
    """
    for i in range(runs_of_text.shape[0]):
        start, length = runs_of_text[i, 0], runs_of_text[i, 1] - runs_of_text[i, 0]
        if length == 0 or length > LONGEST_KEY or bounds[i + 1] - bounds[i] > length:
            continue
        if find_run(text, start, length, runs.near, runs.far, runs.spelled) == EMPTY:
            keep_run(text, start, length, ids[bounds[i] :], bounds[i + 1] - bounds[i], out, runs)


@jit(_nrt=False)
def stable_place(stable, key):
    """The slot of a pair of code points in RunTables.stable, or the free slot where it belongs."""
    mask = uint64(stable.size - 1)
    j = ((uint64(key) * GOLDEN) >> uint64(40)) & mask
    while stable[j] != 0 and stable[j] >> 1 != key:
        j = (j + uint64(1)) & mask
    return j


@jit(_nrt=False)
def keep_pair(before, point, is_stable, runs):
    """Adds a pair of code points to RunTables.stable. The table is emptied when it is half full."""
    key = (before << 21) | point
    if runs.stable[stable_place(runs.stable, -1)] == 0:
        num_used = 0
        for j in range(runs.stable.size):
            num_used += runs.stable[j] != 0
        if 2 * num_used >= runs.stable.size:
            for j in range(runs.stable.size):
                runs.stable[j] = 0
    runs.stable[stable_place(runs.stable, key)] = (key << 1) | int64(is_stable)


@jit(forceinline=True, _nrt=False)
def emit(out, p, value, pool):
    """Writes the ids of a value at out[p:] and returns how many they are."""
    if _count(out, value) == UNPACKED:
        return _emit_pooled(out, p, value, pool)
    return put_ids(out, p, value)


@jit(_nrt=False)
def _emit_pooled(out, p, value, pool):
    """Does what `emit` does, for a value that says where its ids are in the pool."""
    first, count = int64(value & LOW32), int64((value >> uint64(32)) & uint64(0xFFFF))
    for k in range(count):
        out[p + k] = pool[first + k]
    return count
