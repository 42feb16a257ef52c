"""The cache of runs in the text of a thread, bytes of a run → its ids; and the cache of pairs of code points.

A set occupies two cache lines. Most runs of up to 16 bytes are in the line where their search begins.
"""

from __future__ import annotations

import numpy as np
from numba import int64, uint64

from bertdata.bits import load64, store64
from bertdata.jit import jit, part
from bertdata.tokenize.kernels.records import EMPTY, NUM_HARD

UNPACKED = np.uint64(15)  # count of a value whose ids do not fit
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
LOW32 = np.uint64(0xFFFFFFFF)
LONGEST_KEY = 64  # most bytes of a run in the tables
_MASKS = [(1 << 8 * length) - 1 for length in range(17)] + [0]
KEY_MASKS = np.array([half for mask in _MASKS for half in (mask & (1 << 64) - 1, mask >> 64)], np.uint64)


@part(forceinline=True)
def put_ids(out, p, value):
    """Write the ids of a value at out[p:] and return its count. Always writes three elements (uint16: four).

    The second value of a slot has the count 0, and up to four ids of two bytes each.
    """
    if out.itemsize == 2:
        store64(out, 2 * p, value)
        return int64(value >> uint64(48))
    store64(out, 4 * p, (value & uint64(0xFFFFF)) | ((value & uint64(0xFFFFF00000)) << uint64(12)))
    out[p + 2] = (value >> uint64(40)) & uint64(0xFFFFF)
    return int64(value >> uint64(60))


@part(forceinline=True)
def most_ids(out):
    """Return the largest number of ids that two values of a slot can hold."""
    return uint64(7) if out.itemsize == 2 else uint64(6)


@part(forceinline=True)
def num_ids(out, value):
    """Return the number of ids in a value, UNPACKED if they are in the pool."""
    return value >> uint64(48) if out.itemsize == 2 else value >> uint64(60)


@part(forceinline=True)
def packed(out, ids, first, stop, count):
    """Return a value that holds a count and ids[first:stop]; with the count 0, a second value."""
    bits = uint64(16) if out.itemsize == 2 else uint64(20)
    value = uint64(count) << (uint64(48) if out.itemsize == 2 else uint64(60))
    for k in range(first, stop):
        value |= uint64(ids[k]) << (uint64(k - first) * bits)
    return value


@part(forceinline=True)
def put_new(out, p, ids, count, special, special_to):
    """Write ids[:count] at out[p:], with special ids replaced by `special_to`. Return the number of replaced ids."""
    num_special = 0
    for k in range(count):
        if special[ids[k]]:
            num_special += 1
            ids[k] = special_to
        out[p + k] = ids[k]
    return num_special


@part()
def put_hard(output, start, stop, place, where):
    """Add a row to Output.hard."""
    row = output.hard[output.state[NUM_HARD]]
    row[0], row[1], row[2], row[3] = start, stop, place, where
    output.state[NUM_HARD] += 1


@part(forceinline=True)
def near_key(text, start, length):
    """Return the first 8 bytes of a run of up to 16 bytes, and the rest, padded with zeros; zeros for a longer run."""
    m = uint64(2 * min(length, 17))
    return load64(text, start) & KEY_MASKS[m], load64(text, start + 8) & KEY_MASKS[m + uint64(1)]


@part(forceinline=True)
def first_slot(table, key, rest):
    """Return the slot of RunTables.near or RunTables.far where the search for a run begins. key, rest: see `key_of`."""
    return (((key ^ (rest * uint64(0xBF58476D1CE4E5B9))) * GOLDEN) >> uint64(42)) & uint64(table.size - 8)


@part()
def hash_of(text, start, length):
    """Return the hash of a run of 9 bytes or more."""
    h = uint64(length)
    for k in range(0, length - 8, 8):
        h = (h ^ load64(text, start + k)) * GOLDEN
        h ^= h >> uint64(32)
    h = (h ^ load64(text, start + length - 8)) * GOLDEN
    return h ^ (h >> uint64(32))


@part(forceinline=True)
def key_of(text, start, length):
    """Return the key of a run of up to LONGEST_KEY bytes, two words: EMPTY and its hash for more than 16 bytes."""
    return near_key(text, start, length) if length <= 16 else (EMPTY, hash_of(text, start, length))


@part(forceinline=True)
def _is_spelled(text, start, length, spelled, place):
    """Return whether a run of 8 bytes or more equals the bytes at an index of RunTables.spelled."""
    k, last = 0, length - 8
    while k < last and load64(text, start + k) == load64(spelled, place + k):
        k += 8
    return k >= last and load64(text, start + last) == load64(spelled, place + last)


@part()
def put_run(text, start, length, key, rest, out, p, near, far, spelled, pool):
    """Write the ids of the run with a key at out[p:]. Return their number, -1 if the run is not in the tables."""
    is_far = key == EMPTY
    table = far if is_far else near
    j = first_slot(table, key, rest)
    for k in range(4):
        slot = j ^ uint64(4 * k)
        found, more = table[slot], table[slot + uint64(1)]
        if is_far:
            is_alike = found == rest and more & uint64(0xFF) == uint64(length)
            if is_alike and _is_spelled(text, start, length, spelled, int64(more >> uint64(8))):
                return _put_slot(out, p, table, slot, pool)
        elif found == key and more == rest:
            return _put_slot(out, p, table, slot, pool)
    return int64(-1)


@part()
def _put_slot(out, p, table, slot, pool):
    """Write the ids of a slot at out[p:]. Return their number."""
    value = table[slot + uint64(2)]
    size = num_ids(out, value)
    if size == UNPACKED:
        first, count = int64(value & LOW32), int64((value >> uint64(32)) & uint64(0xFFFF))
        for k in range(count):
            out[p + k] = pool[first + k]
        return count
    put_ids(out, p, value)
    if size > uint64(3):
        put_ids(out, p + 3, table[slot + uint64(3)])
    return int64(size)


@part(forceinline=True)
def keep_run(text, start, length, key, rest, ids, count, out, runs):
    """Add a new run to the tables, with its key and ids. If there is no room, clears all tables first.

    Uses a free slot of its set, else the second slot.
    """
    near, used = runs.near, runs.used
    if count > runs.pool.size:
        return
    if used[0] + length > runs.spelled.size or used[1] + count > runs.pool.size:
        near[:], runs.far[:], used[:] = uint64(0), uint64(0), 0
    value, more = packed(out, ids, 0, min(count, 3), min(count, int64(UNPACKED))), uint64(0)
    if count > int64(most_ids(out)):
        value = packed(out, ids, 0, 0, UNPACKED) | uint64(used[1]) | (uint64(count) << uint64(32))
        for k in range(count):
            runs.pool[used[1] + k] = ids[k]
        used[1] += count
    elif count > 3:
        more = packed(out, ids, 3, count, 0)
    table = runs.far if key == EMPTY else near
    j = first_slot(table, key, rest)
    if key == EMPTY:
        key, rest = rest, (uint64(used[0]) << uint64(8)) | uint64(length)
        for k in range(length):
            runs.spelled[used[0] + k] = text[start + k]
        used[0] += length
    k = 0
    while k < 4 and table[j ^ uint64(4 * k)] != uint64(0):
        k += 1
    slot = j ^ uint64(4 * (k if k < 4 else 1))
    table[slot], table[slot + uint64(1)] = key, rest
    table[slot + uint64(2)], table[slot + uint64(3)] = value, more


@jit()
def keep_runs(text, runs_of_text, ids, bounds, out, runs):
    """Add runs to the tables that `tokenizers` has encoded.

    runs_of_text: int64, rows of Output.hard; run i is text[runs_of_text[i, 0] : runs_of_text[i, 1]]. Its ids are
    ids[bounds[i] : bounds[i + 1]], int64. out: an array of the stored dtype of ids. Skips runs with more ids than
    bytes, because outputs have no room for them, and runs that end with a zero byte, because keys have no length.
    """
    for i in range(runs_of_text.shape[0]):
        start, stop = runs_of_text[i, 0], runs_of_text[i, 1]
        length, count = stop - start, bounds[i + 1] - bounds[i]
        if 0 < length <= LONGEST_KEY and count <= length and text[stop - 1] != 0:
            key, rest = key_of(text, start, length)
            keep_run(text, start, length, key, rest, ids[bounds[i] :], count, out, runs)


@part()
def stable_place(stable, key):
    """Return the slot of a pair of code points in RunTables.stable, or a free slot for it."""
    mask = uint64(stable.size - 1)
    j = ((uint64(key) * GOLDEN) >> uint64(40)) & mask
    while stable[j] != 0 and stable[j] >> 1 != key:
        j = (j + uint64(1)) & mask
    return j


@jit()
def keep_pair(before, point, is_stable, runs):
    """Add a pair of code points to RunTables.stable. Clears the table when it is half full."""
    key = (before << 21) | point
    if runs.stable[stable_place(runs.stable, -1)] == 0:
        num_used = 0
        for j in range(runs.stable.size):
            num_used += runs.stable[j] != 0
        if 2 * num_used >= runs.stable.size:
            for j in range(runs.stable.size):
                runs.stable[j] = 0
    runs.stable[stable_place(runs.stable, key)] = (key << 1) | int64(is_stable)
