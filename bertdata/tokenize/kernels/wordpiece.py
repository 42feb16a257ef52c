"""WordPiece: longest matches in one word, and the loop over text that does what BERT's tokenizer does."""

from __future__ import annotations

import numpy as np
from numba import int64, uint64

from bertdata.bits import prefetch, store64, trailing_zeros
from bertdata.jit import jit, part
from bertdata.tokenize.kernels.bits import ascii_stops64, decoded
from bertdata.tokenize.kernels.records import (
    ALONE,
    BREAK,
    BYTE,
    CODE_POINT,
    DONE,
    EMPTY,
    HARD,
    IN_MIDDLE,
    LETTER,
    NUM_HARD,
    PIECE,
    PLACE,
    TOO_MANY_HARD,
    UNKNOWN_CODE_POINT,
    WINDOW,
)
from bertdata.tokenize.kernels.runs import (
    LONGEST_KEY,
    LOW32,
    emit,
    find_run,
    keep_run,
    near_key,
    near_set,
    other_slot,
    put_ids,
    set_run,
    value_of,
)
from bertdata.tokenize.kernels.tries import child_of, token_of

HIGH = np.uint64(0x8080808080808080)
CJK, HANGUL = 0xE3, 0xEA  # the first bytes from U+3000 and from U+A000 on


@part(_nrt=False)
def longest_matches(word, size, num_chars, tables, ids):
    """Writes the ids of a normalized word of `size` bytes to `ids`, longest match first. Returns how many.

    A word that the vocabulary cannot spell is one unknown token.
    """
    if num_chars > tables.max_chars:
        ids[0] = tables.unk
        return 1
    trie, count, start = tables.trie, 0, 0
    while start < size:
        entry, best, stop = trie[int64(start > 0)], int64(-1), start
        for b in range(start, size):
            entry = child_of(trie, entry, word[b])
            if entry == uint64(0):
                break
            if token_of(entry) >= 0:
                best, stop = token_of(entry), b + 1
        if best < 0:
            ids[0] = tables.unk
            return 1
        ids[count] = best
        count += 1
        start = stop
    return count


@part(_nrt=False)
def _learn(text, start, length, tables, runs, out):
    """The value of an ASCII run that the tables do not have. Empties the tables if there is no room for its ids."""
    for k in range(length):
        byte = text[start + k]
        runs.word[k] = byte | ((byte >> 1) & 0x20) if tables.fold != 0 else byte
    count = longest_matches(runs.word, length, length, tables, runs.ids)
    return value_of(runs.ids, count, out, runs)


@part(forceinline=True, _nrt=False)
def _find_runs(text, i, end, tables, runs):
    """Makes the keys of the runs from byte i on, and asks the processor to load what the table has of each.

    It ends with a window of text, before a run of more than 16 bytes, and before one that no plain stop follows. Writes
    rows to runs.keys: the two parts of a key; where the set is, how far from byte i the run is, and its length; and the
    value of the stop. Returns how many, the byte after the last stop, and whether one of those two runs is there.
    """
    near, keys, stop_values, fold = runs.near, runs.keys, tables.stop_values, tables.fold
    count, first, limit = 0, i, min(i + WINDOW, end)
    while i < limit:
        base, mask = i, ascii_stops64(text, i)
        if end - base < 64:  # the end of the piece is a stop without an id
            mask = (mask & ((uint64(1) << uint64(end - base)) - uint64(1))) | (uint64(1) << uint64(end - base))
        if mask == uint64(0):
            return count, i, True
        while mask != uint64(0):
            s = base + trailing_zeros(mask)
            mask &= mask - uint64(1)
            stop_value = uint64(0) if s == end else stop_values[text[uint64(s)]]
            if stop_value == EMPTY or s - i > 16:
                return count, i, True
            key, rest = near_key(text, i, s - i)
            if (key | rest) & HIGH == uint64(0):
                key |= (key >> uint64(1)) & fold
                rest |= (rest >> uint64(1)) & fold
            j, q = near_set(near, key, rest), uint64(4 * count)
            prefetch(near, int64(j << uint64(3)))
            keys[q], keys[q + uint64(1)], keys[q + uint64(3)] = key, rest, stop_value
            keys[q + uint64(2)] = j | (uint64(i - first) << uint64(32)) | (uint64(s - i) << uint64(48))
            count += 1
            i = s + 1
    return count, i, False


@part(_nrt=False)
def _write_known(k, count, keys, near, pool, out, p):
    """Writes the ids of runs and stops from number k on, at out[p:], up to the first run that is not in the line where
    the search for it begins.

    Returns the number of that run, `count` if there is none, and the place after the ids.
    """
    while k < count:
        q = uint64(4 * k)
        key, rest, j = keys[q], keys[q + uint64(1)], keys[q + uint64(2)] & LOW32
        if (near[j] ^ key) | (near[j + uint64(1)] ^ rest) == uint64(0):
            p += emit(out, p, near[j + uint64(2)], pool)
        elif (near[j + uint64(4)] ^ key) | (near[j + uint64(5)] ^ rest) == uint64(0):
            p += emit(out, p, near[j + uint64(6)], pool)
        else:
            break
        p += put_ids(out, p, keys[q + uint64(3)])
        k += 1
    return k, p


@part(forceinline=True, _nrt=False)
def _normal_word(text, i, stop, tables, word, state):
    """Reads a word from byte i on, up to `stop`, a break or a character that is a word, and writes its normal form.

    Returns the byte after it, the size of the normal form in bytes and in characters, whether `tokenizers` must encode
    it, the value of what ended it, and DONE or UNKNOWN_CODE_POINT.
    """
    points, size, num_chars, is_hard, value = tables.points, int64(0), int64(0), False, uint64(0)
    while i < stop:
        point, width = decoded(text, i)
        entry = points[point, 0]
        what = entry & uint64(7)
        if what == uint64(0):
            state[CODE_POINT] = point
            return i, size, num_chars, is_hard, value, UNKNOWN_CODE_POINT
        i += width
        if what == LETTER:
            if size + 16 <= word.size:
                store64(word, size, points[point, 1])
                store64(word, size + 8, entry >> uint64(32))
            size += int64((entry >> uint64(8)) & uint64(255))
            num_chars += int64((entry >> uint64(16)) & uint64(255))
        elif what in (BREAK, ALONE):
            value = points[point, 1]
            break
        elif what == HARD:
            is_hard = True
    is_hard = is_hard or (size + 16 > word.size and num_chars <= tables.max_chars)
    return i, size, num_chars, is_hard, value, DONE


@part(forceinline=True, _nrt=False)
def _read_run(text, i, end, p, tables, runs, output):
    """Encodes a run that `_find_runs` cannot take, and the stop after it, or a part of a run without a key.

    Returns the byte and the place after it, and a code as `encode_wordpiece` does; with another one than DONE these are
    where to go on.
    """
    out, hard, state, stop_values, word = output.ids, output.hard, output.state, tables.stop_values, runs.word
    run_start, run_place, run_stop, is_key = i, p, end, end - i <= LONGEST_KEY
    mask = ascii_stops64(text, i)
    if mask != uint64(0) and i + trailing_zeros(mask) < end:
        run_stop = i + trailing_zeros(mask)
        is_key = stop_values[text[run_stop]] != EMPTY
        if not is_key:
            run_stop = end
    is_known = is_key and run_stop == i
    if is_key and not is_known:
        value = find_run(text, i, run_stop - i, runs.near, runs.far, runs.spelled)
        is_known = value != EMPTY
        if is_known:
            p += emit(out, p, value, runs.pool)
    while i < run_stop and not is_known:  # a word at a time
        start = i
        i, size, num_chars, is_hard, value, code = _normal_word(text, i, run_stop, tables, word, state)
        if code == DONE and is_hard and state[NUM_HARD] == hard.shape[0]:
            code = TOO_MANY_HARD
        if code != DONE:
            return run_start, run_place, code
        if is_hard:
            if is_key:
                start, i, p = run_start, run_stop, run_place
            row = hard[state[NUM_HARD]]
            row[0], row[1], row[2], row[3] = start, i, p, IN_MIDDLE
            state[NUM_HARD] += 1
            is_known, value = is_key, uint64(0)
        elif size > 0:
            count = longest_matches(word, size, num_chars, tables, runs.ids)
            for k in range(count):
                out[p + k] = runs.ids[k]
            p += count
        p += put_ids(out, p, value)
        if not is_key:
            run_start, run_place = i, p
            if i >= end or text[i] < 0x80:
                return i, p, DONE
    if is_key:
        if not is_known:
            keep_run(text, run_start, run_stop - run_start, out[run_place:], p - run_place, out, runs)
        i = run_stop
        if i < end:
            p += put_ids(out, p, stop_values[text[i]])
            i += 1
    return i, p, DONE


@part(_nrt=False)
def _write_others(text, first, k, count, end, tables, runs, output, p):
    """Writes the ids of the runs that `_find_runs` found from byte `first` on, from number k on, where
    `_write_known` ended.

    Returns the place after them, DONE and a byte of no meaning; or the place, the code and the byte where to go on.
    """
    keys, out = runs.keys, output.ids
    while k < count:
        q = uint64(4 * k)
        where = keys[q + uint64(2)] >> uint64(32)
        start, length = first + int64(where & uint64(0xFFFF)), int64(where >> uint64(16))
        if (keys[q] | keys[q + uint64(1)]) & HIGH != uint64(0):
            start, p, code = _read_run(text, start, end, p, tables, runs, output)
            if code != DONE:
                return p, code, start
        else:
            slot = j = keys[q + uint64(2)] & LOW32
            if runs.near[j ^ uint64(4)] != uint64(0):  # else no run whose search begins here is in the other line
                slot = other_slot(runs.near, j, keys[q], keys[q + uint64(1)])
            if slot == j and length > 0:  # between two stops is a run of no bytes
                value = _learn(text, start, length, tables, runs, out)
                slot = set_run(runs.near, j, keys[q], keys[q + uint64(1)], value)
            if length > 0:
                p += emit(out, p, runs.near[slot + uint64(2)], runs.pool)
            p += put_ids(out, p, keys[q + uint64(3)])
        k, p = _write_known(k + 1, count, keys, runs.near, runs.pool, out, p)
    return p, DONE, first


@part(forceinline=True, _nrt=False)
def _write_alone(text, i, end, points, out, p):
    """Writes the ids of words of one character each, such as Chinese ones, from byte i on. Returns byte and place."""
    while i < end and text[i] >= 0x80:
        point, width = decoded(text, i)
        if points[point, 0] & uint64(7) != ALONE:
            break
        p += put_ids(out, p, points[point, 1])
        i += width
    return i, p


@jit(_nrt=False)
def encode_wordpiece(pieces, tables, runs, output):
    """Encodes pieces of text as BERT does. Returns DONE, UNKNOWN_CODE_POINT or TOO_MANY_HARD.

    pieces: Text. tables: WordPieceTables. runs: RunTables. output: Output. After UNKNOWN_CODE_POINT the caller adds the
    entry of output.state[CODE_POINT] to tables.points, after TOO_MANY_HARD it empties output.hard; then it calls the
    kernel again, which continues from output.state.

    Runs of up to 16 bytes are looked for together, a window of text at a time, and each is written by one store, as is
    the stop after it. Another run of up to 64 bytes is looked up too. Longer ones, and new ones that are not ASCII, are
    read code point by code point.
    """
    text, points, out, state = pieces.data, tables.points, output.ids, output.state
    i, p = state[BYTE], state[PLACE]
    for piece in range(state[PIECE], pieces.starts.size):
        end, code = pieces.stops[piece], DONE
        i = max(i, pieces.starts[piece])
        while i < end and code == DONE:
            is_slow = CJK <= text[i] < HANGUL  # words of one character, of which no run is kept
            if not is_slow:
                first = i
                count, i, is_slow = _find_runs(text, i, end, tables, runs)
                k, p = _write_known(int64(0), count, runs.keys, runs.near, runs.pool, out, p)
                if k < count:
                    p, code, place = _write_others(text, first, k, count, end, tables, runs, output, p)
                    if code != DONE:
                        i = place
            while is_slow and code == DONE:
                start = i
                i, p = _write_alone(text, i, end, points, out, p)
                is_slow = i < end and text[i] >= 0x80
                if i == start or is_slow:
                    i, p, code = _read_run(text, i, end, p, tables, runs, output)
                    is_slow = i < end and text[i] >= 0x80
        if code != DONE:
            state[PIECE], state[BYTE], state[PLACE] = piece, i, p
            return code
        i = pieces.stops[piece]
        if pieces.tails[piece] >= 0:
            out[p] = pieces.tails[piece]
            p += 1
        output.bounds[piece + 1] = p
    return DONE
