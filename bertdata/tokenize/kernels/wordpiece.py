"""WordPiece: longest matches in one word, and the loop over text that does what BERT's tokenizer does."""

from __future__ import annotations

from numba import int64, uint64

from bertdata.bits import store64, trailing_zeros
from bertdata.jit import jit
from bertdata.tokenize.kernels.bits import ascii_stops64, decoded, stops64
from bertdata.tokenize.kernels.records import (
    ALONE,
    BREAK,
    BYTE,
    CODE_POINT,
    DONE,
    EMPTY,
    HARD,
    LETTER,
    NUM_HARD,
    PIECE,
    PLACE,
    TOO_MANY_HARD,
    UNKNOWN_CODE_POINT,
)
from bertdata.tokenize.kernels.runs import (
    LONGEST_KEY,
    add_to_pool,
    clear_runs,
    emit,
    find_near,
    find_run,
    keep_run,
    near_key,
    near_set,
    packed,
    put_ids,
    set_run,
)
from bertdata.tokenize.kernels.tries import child_of, token_of


@jit(_nrt=False)
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


@jit(_nrt=False)
def _learn(text, start, length, tables, runs, out):
    """The value of an ASCII run that the tables do not have. Empties the tables if there is no room for its ids."""
    if runs.used[1] + length > runs.pool.size:
        clear_runs(runs)
    for k in range(length):
        byte = text[start + k]
        runs.word[k] = byte | ((byte >> 1) & 0x20) if tables.fold != 0 else byte
    count = longest_matches(runs.word, length, length, tables, runs.ids)
    value = packed(out, runs.ids, count)
    return value if count <= 3 else value | add_to_pool(runs.ids, count, runs)


@jit(_nrt=False)
def encode_wordpiece(pieces, tables, runs, output):
    """Encodes pieces of text as BERT does. Returns DONE, UNKNOWN_CODE_POINT or TOO_MANY_HARD.

    pieces: Text. tables: WordPieceTables. runs: RunTables. output: Output. After UNKNOWN_CODE_POINT the caller adds the
    entry of output.state[CODE_POINT] to tables.points, after TOO_MANY_HARD it empties output.hard; then it calls the
    kernel again, which continues from output.state.

    An ASCII run of up to 16 bytes and the stop after it are written by one store each. Another run of up to 64 bytes is
    looked up too. Longer ones are read code point by code point.
    """
    text, starts, stops = pieces.data, pieces.starts, pieces.stops
    points, stop_values, fold = tables.points, tables.stop_values, tables.fold
    near, far, spelled, pool = runs.near, runs.far, runs.spelled, runs.pool
    word, ids = runs.word, runs.ids
    out, out_bounds, hard, state = output.ids, output.bounds, output.hard, output.state
    i, p, num_hard = state[BYTE], state[PLACE], state[NUM_HARD]
    for piece in range(state[PIECE], starts.size):
        end = stops[piece]
        i = max(i, starts[piece])
        code = DONE
        while i < end:
            base = i
            mask = stops64(text, base)
            if end - base < 64:  # the end of the piece is a stop without an id
                mask = (mask & ((uint64(1) << uint64(end - base)) - uint64(1))) | (uint64(1) << uint64(end - base))
            slow = mask == uint64(0)  # the run has 64 bytes or more
            while mask != uint64(0):
                s = base + trailing_zeros(mask)
                mask &= mask - uint64(1)
                length = s - i
                stop_value = uint64(0) if s == end else stop_values[text[uint64(s)]]
                if stop_value == EMPTY or length > 16:
                    slow = True
                    break
                key, rest = near_key(text, i, length)
                key |= (key >> uint64(1)) & fold
                rest |= (rest >> uint64(1)) & fold
                j = near_set(near, key, rest)
                value = find_near(near, j, key, rest)
                if value == EMPTY:
                    value = _learn(text, i, length, tables, runs, out)
                    set_run(near, j, key, rest, value)
                p += emit(out, p, value, pool)
                p += put_ids(out, p, stop_value)
                i = s + 1
            while slow:
                run_start, run_place, run_stop, is_key, is_hard = i, p, end, False, False
                while i < end and text[i] >= 0x80:  # words of one character, such as Chinese ones
                    point, width = decoded(text, i)
                    if points[point, 0] & uint64(7) != ALONE:
                        break
                    p += put_ids(out, p, points[point, 1])
                    i += width
                if i > run_start:
                    slow = i < end and text[i] >= 0x80
                    if not slow:
                        break
                    run_start, run_place = i, p
                mask = ascii_stops64(text, i)
                if mask != uint64(0) and i + trailing_zeros(mask) < end:
                    run_stop = i + trailing_zeros(mask)
                    is_key = stop_values[text[run_stop]] != EMPTY
                    if not is_key:
                        run_stop = end
                elif end - i <= LONGEST_KEY:
                    is_key = True
                is_known = is_key and run_stop == i
                if is_key and not is_known:
                    value = find_run(text, i, run_stop - i, near, far, spelled)
                    is_known = value != EMPTY
                    if is_known:
                        p += emit(out, p, value, pool)
                while i < run_stop and not is_known:  # a word at a time
                    start, size, num_chars, is_hard, value = i, int64(0), int64(0), False, uint64(0)
                    while i < run_stop:
                        point, width = decoded(text, i)
                        entry = points[point, 0]
                        what = entry & uint64(7)
                        if what == uint64(0):
                            code, state[CODE_POINT] = UNKNOWN_CODE_POINT, point
                            break
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
                    if code == DONE and is_hard and num_hard == hard.shape[0]:
                        code = TOO_MANY_HARD
                    if code != DONE:
                        i, p = run_start, run_place
                        break
                    if is_hard:
                        if is_key:
                            start, i, p = run_start, run_stop, run_place
                        hard[num_hard, 0], hard[num_hard, 1], hard[num_hard, 2], hard[num_hard, 3] = start, i, p, 0
                        num_hard += 1
                        is_known = is_key
                        value = uint64(0)
                    elif size > 0:
                        count = longest_matches(word, size, num_chars, tables, ids)
                        for k in range(count):
                            out[p + k] = ids[k]
                        p += count
                    p += put_ids(out, p, value)
                    if not is_key:
                        run_start, run_place = i, p
                        if i >= end or text[i] < 0x80:
                            break
                if code != DONE:
                    break
                if is_key:
                    if not is_known:
                        keep_run(text, run_start, run_stop - run_start, out[run_place:], p - run_place, out, runs)
                    i = run_stop
                    if i < end:
                        p += put_ids(out, p, stop_values[text[i]])
                        i += 1
                slow = i < end and text[i] >= 0x80
            if code != DONE:
                break
        if code != DONE:
            state[PIECE], state[BYTE], state[PLACE], state[NUM_HARD] = piece, i, p, num_hard
            return code
        i = stops[piece]
        if pieces.tails[piece] >= 0:
            out[p] = pieces.tails[piece]
            p += 1
        out_bounds[piece + 1] = p
    state[NUM_HARD] = num_hard
    return DONE
