"""The cache of runs: the ids of what a thread has met, found by the run's bytes; and of pairs of code points.

A set lies in two lines of a processor's cache. Most runs of up to 16 bytes are in the line where their search begins.
"""

from __future__ import annotations

import numpy as np
from numba import int64, uint64

from bertdata.bits import load64, store64
from bertdata.jit import jit, part
from bertdata.tokenize.kernels.records import EMPTY, NUM_HARD

UNPACKED = np.uint64(15)  # count of a value whose ids do not fit into it
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
LOW32 = np.uint64(0xFFFFFFFF)
LONGEST_KEY = 64  # bytes of a run that has a place in the tables


@part(forceinline=True)
def put_ids(out, p, value):
    """Writes the ids of a value at out[p:] and returns how many they are. Always writes three places."""
    if out.itemsize == 2:
        store64(out, 2 * p, value)
        return int64(value >> uint64(48))
    store64(out, 4 * p, (value & uint64(0xFFFFF)) | ((value & uint64(0xFFFFF00000)) << uint64(12)))
    out[p + 2] = (value >> uint64(40)) & uint64(0xFFFFF)
    return int64(value >> uint64(60))


@part(forceinline=True)
def put_more(out, p, more):
    """Writes the ids of the second value of a slot at out[p:]: three, or four of two bytes each."""
    if out.itemsize == 2:
        store64(out, 2 * p, more)
    else:
        put_ids(out, p, more)


@part(forceinline=True)
def most_ids(out):
    """How many ids the two values of a slot hold."""
    return uint64(7) if out.itemsize == 2 else uint64(6)


@part(forceinline=True)
def num_ids(out, value):
    """How many ids a value holds, UNPACKED if they are in the pool."""
    return value >> uint64(48) if out.itemsize == 2 else value >> uint64(60)


@part(forceinline=True)
def packed(out, ids, first, stop):
    """The bits of a value, or of a second one, for ids[first:stop]."""
    bits, value = uint64(16) if out.itemsize == 2 else uint64(20), uint64(0)
    for k in range(first, stop):
        value |= uint64(ids[k]) << (uint64(k - first) * bits)
    return value


@part(forceinline=True)
def counted(out, count):
    """The bits of a value that say how many ids there are."""
    return uint64(count) << (uint64(48) if out.itemsize == 2 else uint64(60))


@part(forceinline=True)
def put_new(out, p, ids, count, special, special_to):
    """Write ids[:count] at out[p:], with `special_to` in place of special ids. Return how many these are."""
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


@part()
def clear_runs(runs):
    """Empties the tables of runs."""
    for table in (runs.near, runs.far):
        table[:] = uint64(0)
    runs.used[:] = 0


@part(forceinline=True)
def _first_bytes(word, count):
    """The first `count` bytes of a word, 0 to 8, and zeros."""
    half = uint64(32 - 4 * count)  # a shift by 64 would have no result
    return word & ((~uint64(0) >> half) >> half)


@part(forceinline=True)
def near_key(text, start, length):
    """The first 8 bytes of a run of up to 16 bytes, and the others. Zeros fill both up."""
    key = _first_bytes(load64(text, start), min(length, 8))
    return key, _first_bytes(load64(text, start + 8), max(length, 8) - 8)


@part(forceinline=True)
def near_set(near, key, rest):
    """The slot of RunTables.near where the search for a run begins."""
    return (((key ^ (rest * uint64(0xBF58476D1CE4E5B9))) * GOLDEN) >> uint64(42)) & uint64(near.size - 8)


@part(forceinline=True)
def far_set(far, run_hash):
    """The slot of RunTables.far where the search for a longer run begins."""
    return (run_hash >> uint64(42)) & uint64(far.size - 8)


@part(forceinline=True)
def find_near(near, j, key, rest):
    """The value of a run of up to 16 bytes, EMPTY if the table does not have it. j: its `near_set`."""
    if near[j] == key and near[j + uint64(1)] == rest:
        return near[j + uint64(2)]
    slot = other_slot(near, j, key, rest)
    return EMPTY if slot == j else _moved_first(near, j, slot)


@part()
def other_slot(near, j, key, rest):
    """The slot of a run of RunTables.near if it is in another slot of its set than j, else j."""
    for k in range(1, 4):
        slot = j ^ uint64(4 * k)
        if near[slot] == key and near[slot + uint64(1)] == rest:
            return slot
    return j


@part(forceinline=True)
def _moved_first(table, j, slot):
    """Exchanges the slots j and `slot` of a set. Returns the value that is in the first then."""
    for k in range(4):
        first, second = j + uint64(k), slot + uint64(k)
        table[first], table[second] = table[second], table[first]
    return table[j + uint64(2)]


@part(forceinline=True)
def set_run(table, j, first, second, value):
    """Writes a new run to a slot of the set of slot j, a free one, else the second one. Returns the slot."""
    slot = j
    if table[j] != uint64(0):
        slot = j ^ uint64(4)
        for k in range(1, 4):
            if table[j ^ uint64(4 * k)] == uint64(0):
                slot = j ^ uint64(4 * k)
                break
    table[slot], table[slot + uint64(1)], table[slot + uint64(2)] = first, second, value
    return slot


@part()
def add_to_pool(ids, count, runs):
    """Adds ids[:count] to the pool. Returns where they are, as a value holds it. The caller has made room."""
    first = runs.used[1]
    for k in range(count):
        runs.pool[first + k] = ids[k]
    runs.used[1] += count
    return uint64(first) | (uint64(count) << uint64(32))


@part(forceinline=True)
def _has_zero(word):
    """Whether one of the 8 bytes of a word is zero."""
    return ((word - uint64(0x0101010101010101)) & ~word & uint64(0x8080808080808080)) != uint64(0)


@part()
def hash_of(text, start, length):
    """The hash of a run of 9 bytes or more."""
    h = uint64(length)
    for k in range(0, length - 8, 8):
        h = (h ^ load64(text, start + k)) * GOLDEN
        h ^= h >> uint64(32)
    h = (h ^ load64(text, start + length - 8)) * GOLDEN
    return h ^ (h >> uint64(32))


@part(forceinline=True)
def find_run(text, start, length, near, far, spelled):
    """The value of a run, EMPTY if the tables do not have it. length: 1 to LONGEST_KEY.

    A run of up to 16 bytes that contains a zero byte is never found, as a key does not say where it ends.
    """
    if length > 16:
        return find_far(text, start, length, hash_of(text, start, length), far, spelled)
    key, rest = near_key(text, start, length)
    has_zero = _has_zero(key | ~_first_bytes(~uint64(0), min(length, 8)))
    if has_zero or _has_zero(rest | ~_first_bytes(~uint64(0), max(length, 8) - 8)):
        return EMPTY
    return find_near(near, near_set(near, key, rest), key, rest)


@part(forceinline=True)
def _is_spelled(text, start, length, spelled, place):
    """Whether a run of 8 bytes or more is what is at a place of RunTables.spelled."""
    k, last = 0, length - 8
    while k < last and load64(text, start + k) == load64(spelled, place + k):
        k += 8
    return k >= last and load64(text, start + last) == load64(spelled, place + last)


@part()
def find_far(text, start, length, run_hash, far, spelled):
    """The value of a run of 17 to LONGEST_KEY bytes, EMPTY if the table does not have it."""
    j = far_set(far, run_hash)
    for k in range(4):
        slot = j ^ uint64(4 * k)
        where = far[slot + uint64(1)]
        is_alike = far[slot] == run_hash and where & uint64(0xFF) == uint64(length)
        if is_alike and _is_spelled(text, start, length, spelled, int64(where >> uint64(8))):
            return far[slot + uint64(2)] if slot == j else _moved_first(far, j, slot)
    return EMPTY


@part(forceinline=True)
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
    if length <= 16:
        key, rest = near_key(text, start, length)
        keep_near(near_set(near, key, rest), key, rest, ids, count, out, runs)
        return
    if used[0] + length > runs.spelled.size:
        clear_runs(runs)
    value = value_of(ids, count, out, runs)
    h = hash_of(text, start, length)
    for k in range(length):
        runs.spelled[used[0] + k] = text[start + k]
    set_run(far, far_set(far, h), h, (uint64(used[0]) << uint64(8)) | uint64(length), value)
    used[0] += length


@part()
def keep_key(text, stop, keys, q, ids, count, out, runs):
    """Add a run that ends at byte `stop` with its ids, by row q of RunTables.keys. See `keep_run`."""
    length = int64(keys[q + uint64(2)] >> uint64(48))
    if length > 16:
        keep_run(text, stop - length, length, ids, count, out, runs)
    elif count <= runs.pool.size:
        keep_near(keys[q + uint64(2)] & LOW32, keys[q], keys[q + uint64(1)], ids, count, out, runs)


@part(forceinline=True)
def keep_near(j, key, rest, ids, count, out, runs):
    """Adds a run of up to 16 bytes with this key and no zero byte, whose search begins at slot j. See `keep_run`."""
    set_run(runs.near, j, key, rest, value_of(ids, count, out, runs))


@part(forceinline=True)
def keep_in_slot(j, key, rest, ids, count, out, runs):
    """Does what `keep_near` does, for a kernel that reads both values of a slot."""
    if 3 < count <= most_ids(out):
        slot = set_run(runs.near, j, key, rest, counted(out, count) | packed(out, ids, int64(0), int64(3)))
        runs.near[slot + uint64(3)] = packed(out, ids, int64(3), count)
    else:
        keep_near(j, key, rest, ids, count, out, runs)


@part()
def emit_slot(out, p, near, slot, pool):
    """Writes the ids of a slot that `keep_in_slot` has filled at out[p:] and returns how many they are."""
    value = near[slot + uint64(2)]
    size = num_ids(out, value)
    if size == UNPACKED:
        return _emit_pooled(out, p, value, pool)
    put_ids(out, p, value)
    if size > uint64(3):
        put_more(out, p + 3, near[slot + uint64(3)])
    return int64(size)


@part(forceinline=True)
def value_of(ids, count, out, runs):
    """The value of ids[:count]."""
    if count <= 3:
        return counted(out, count) | packed(out, ids, int64(0), count)
    if runs.used[1] + count > runs.pool.size:
        clear_runs(runs)
    return counted(out, UNPACKED) | add_to_pool(ids, count, runs)


@jit()
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


@part()
def stable_place(stable, key):
    """The slot of a pair of code points in RunTables.stable, or the free slot where it belongs."""
    mask = uint64(stable.size - 1)
    j = ((uint64(key) * GOLDEN) >> uint64(40)) & mask
    while stable[j] != 0 and stable[j] >> 1 != key:
        j = (j + uint64(1)) & mask
    return j


@jit()
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


@part(forceinline=True)
def emit(out, p, value, pool):
    """Writes the ids of a value at out[p:] and returns how many they are."""
    if num_ids(out, value) == UNPACKED:
        return _emit_pooled(out, p, value, pool)
    return put_ids(out, p, value)


@part()
def _emit_pooled(out, p, value, pool):
    """Does what `emit` does, for a value that says where its ids are in the pool."""
    first, count = int64(value & LOW32), int64((value >> uint64(32)) & uint64(0xFFFF))
    for k in range(count):
        out[p + k] = pool[first + k]
    return count
