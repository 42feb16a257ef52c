"""The loop over text for tokenizers that cut it into words by rules: BPE, Unigram and others."""

from __future__ import annotations

import numpy as np
from numba import int64, uint64

from bertdata.bits import prefetch, trailing_zeros
from bertdata.jit import jit, part
from bertdata.tokenize.kernels.bits import decoded, in_ranges64
from bertdata.tokenize.kernels.boundaries import MAY_DIFFER, cut_after, is_unstable, strip, walk, word_end
from bertdata.tokenize.kernels.records import (
    AT_BEGIN,
    BYTE,
    CLASSES,
    CODE_POINT,
    DONE,
    EACH_PIECE,
    EACH_WORD,
    EMPTY,
    FIRST_PIECE,
    GIVES_SPECIAL,
    HARD_STEP,
    HAS_BEGUN,
    IN_MIDDLE,
    LATER_PIECE,
    LEVEL,
    LIMITS,
    LONE,
    MEETS,
    MEETS_STEP,
    NEXT_BEGINS,
    NOT_QUICK,
    NOTHING,
    NUM_HARD,
    ONE_WORD,
    OWN_WORD,
    PIECE,
    PLACE,
    PREFIXED,
    REPLACED,
    RUNS,
    SILENT_FORM,
    STATES,
    TOO_MANY_HARD,
    UNKNOWN_CODE_POINT,
    WINDOW,
    WITH_PREFIX,
    WORDS,
)
from bertdata.tokenize.kernels.runs import (
    LONGEST_KEY,
    LOW32,
    emit,
    find_far,
    find_run,
    hash_of,
    keep_key,
    keep_run,
    near_key,
    near_set,
    other_slot,
    put_hard,
    put_ids,
    put_new,
)
from bertdata.tokenize.kernels.word import encode_word

HIGH = np.uint64(0x8080808080808080)
AHEAD = 2048  # bytes of text that are prefetched
LONE_FIRST, LONE_LAST = 0xE3, 0xEA  # the first bytes from U+3000 and from U+A000 on: words of one character


@part(forceinline=True)
def _hard_until(text, begin, i, place, end, flags, tables, runs, state):
    """Where the text ends that `tokenizers` must encode, -1 if the word at byte i is not hard; and a code.

    place: after the last code point that the automaton has read. flags: of its steps. Code points after it may change
    the last one.
    """
    points = tables.points
    while place < end:
        point, width = decoded(text, place)
        entry = points[point, 0]
        if entry == uint64(0):
            state[CODE_POINT] = point
            return int64(-1), UNKNOWN_CODE_POINT
        if entry & (MEETS | SILENT_FORM) == uint64(0):
            break
        if entry & MEETS != uint64(0):
            flags |= MEETS_STEP
        place += width
    is_hard = int64(flags & HARD_STEP != 0)
    if is_hard == 0 and flags & MEETS_STEP != 0:
        is_hard = is_unstable(text, begin, i, place, points, runs.stable, state)
    if is_hard <= 0:
        return int64(-1), -is_hard
    stop = cut_after(text, place, end, points, tables.cuts, state)
    return stop, DONE if stop >= 0 else UNKNOWN_CODE_POINT


@part(forceinline=True)
def _next_word(text, begin, i, end, automaton, tables, runs, state):
    """A code; where the word at byte i ends, -1 if none begins there; and, if it is hard, where that ends, else -1."""
    code, word_stop, place, flags = walk(
        text, i, end, automaton, tables.points, tables.ascii, tables.steps, tables.skips, state
    )
    hard_stop = int64(-1)
    if code == DONE and tables.meets != 0:
        hard_stop, code = _hard_until(text, begin, i, place, end, flags, tables, runs, state)
    if code == DONE and word_stop < 0 and tables.keeps_gaps[0]:
        word_stop = word_end(
            text, i, end, tables.starts[0], True, tables.points, tables.ascii, tables.steps, tables.skips, state
        )
        if word_stop < 0:
            code = UNKNOWN_CODE_POINT
    return code, word_stop, hard_stop


@part(forceinline=True)
def _cut_by_rules(text, i, level, tables, limits, state):
    """Cuts the text from byte i on by the rules from `level` on, each within what the one before has found.

    limits: int64 [num_rules], where each rule's text ends. Returns the number of rules whose limits are known; the last
    of them is where the word ends, below 0 if an entry is missing.
    """
    while level < tables.starts.size and limits[level - 1] >= 0:
        start, keeps_gaps = tables.starts[level], tables.keeps_gaps[level]
        entries, automaton = (tables.points, tables.ascii), (tables.steps, tables.skips)
        limits[level] = word_end(text, i, limits[level - 1], start, keeps_gaps, *entries, *automaton, state)
        level += 1
    return level


@part(forceinline=True)
def _put_word(text, i, length, prefixed, is_key, p, tables, runs, output):
    """Writes the ids of the word text[i : i + length] at output.ids[p:], and keeps them if `is_key`.

    Returns the next place, -1 if the text gives the id of a special token that may not stand there.
    """
    out = output.ids
    count = encode_word(text, i, i + length, prefixed, tables, runs)
    num_special = put_new(out, p, runs.ids, count, tables.special, tables.special_to)
    if num_special > 0 and tables.special_to < 0:
        return int64(-1)
    output.state[REPLACED] += num_special
    if is_key and num_special == 0:
        keep_run(text, i, length, runs.ids, count, out, runs)
    return p + count


@part(forceinline=True)
def _encode_word(text, begin, i, end, is_first, prefixed, run_length, p, tables, runs, output):
    """Encode the word at byte i, or pass over a character that begins none.

    is_first: whether the word begins a piece that may get a prefix. prefixed: whether it gets one. run_length: bytes of
    the run that it belongs to and that the tables do not have, else 0. Return a code, and the byte and the place to
    continue at.
    """
    state, hard, num_rules = output.state, output.hard, tables.starts.size
    limits, level, word_stop, hard_stop = state[LIMITS:], state[LEVEL], int64(-1), int64(-1)
    if state[NUM_HARD] == hard.shape[0]:
        return TOO_MANY_HARD, i, p
    if level == 0:
        automaton = uint64(tables.starts[0])
        if is_first and prefixed:
            automaton = uint64(tables.steps[automaton * uint64(CLASSES) + uint64(tables.prefix_class)] & STATES)
        code, word_stop, hard_stop = _next_word(text, begin, i, end, automaton, tables, runs, state)
        if code != DONE:
            return code, i, p
    if num_rules > 1 and hard_stop < 0 and (level > 0 or word_stop > i):
        if level == 0:
            limits[0], level = word_stop, 1
        level = _cut_by_rules(text, i, level, tables, limits, state)
        word_stop = limits[level - 1]
    stop = hard_stop if hard_stop >= 0 else word_stop
    if stop < i or (stop == i and not prefixed):  # no word begins here
        point, width = decoded(text, i)
        i += width
        if tables.points[point, 0] & LONE != uint64(0):
            p += put_ids(output.ids, p, tables.points[point, 1])
    else:
        length, value = stop - i, EMPTY
        is_key = 0 < length <= LONGEST_KEY and length != run_length and not is_first
        if is_key:
            value = find_run(text, i, length, runs.near, runs.far, runs.spelled)
        if value != EMPTY:
            p += emit(output.ids, p, value, runs.pool)
        elif hard_stop >= 0 and is_first:  # with what was passed over, as it may keep a blank from being stripped
            put_hard(output, begin, stop, p, AT_BEGIN)
        elif hard_stop >= 0 or length > tables.longest:
            where = IN_MIDDLE if hard_stop >= 0 else (WITH_PREFIX if prefixed else ONE_WORD)
            put_hard(output, i, stop, p, where)
        else:
            p = _put_word(text, i, length, prefixed, is_key, p, tables, runs, output)
            if p < 0:
                return GIVES_SPECIAL, i, p
        i, state[HAS_BEGUN] = stop, 1
    while level > 0 and i >= limits[level - 1]:
        level -= 1
    state[LEVEL] = level
    return DONE, i, p


@part(forceinline=True)
def _find_runs(text, i, end, tables, runs):
    """Make the keys of the runs from byte i on, and prefetch the set of each.

    A run ends at one of the bytes tables.ends, a stop, or at the end of the piece. Write a row of runs.keys for each:
    the two parts of its key; its set, its distance from byte i in bits 32 to 47, and its length; the value of its stop.
    The key of a run of more than 16 bytes is EMPTY and its hash. Return the number of runs, the byte after the last
    stop, and whether the automaton must find the word that begins there.
    """
    near, keys, stops, quick, fold = runs.near, runs.keys, tables.stops, tables.quick, tables.fold
    count, first, limit = 0, i, min(i + WINDOW, end)
    while i < limit:
        base, mask = i, in_ranges64(text, i, tables.ends)
        prefetch(text, base + AHEAD)
        if end - base < 64:
            last = uint64(1) << uint64(end - base)
            mask = (mask & (last - uint64(1))) | last
        while mask != uint64(0):
            s = base + trailing_zeros(mask)
            mask &= mask - uint64(1)
            value, length = uint64(0) if s == end else stops[text[uint64(s)]], s - i
            if tables.finds == WORDS:
                if value == NEXT_BEGINS and length == 0:
                    continue  # the space that begins this word does not end it
                is_space = length == 1 and stops[text[uint64(i)]] == NEXT_BEGINS  # what follows decides what it is
                if is_space or value == NOT_QUICK or (length == 0 and value == OWN_WORD):
                    return count, i, True
            elif value == NOT_QUICK:
                if text[uint64(s)] != 0:
                    continue
                return count, i, True  # a key has no zero byte
            if tables.has_marks != 0 and s + 1 < end and quick[text[uint64(s + 1)]] == 0:
                return count, i, True  # a mark may change the byte that ends the run
            if length <= 16:
                key, rest = near_key(text, i, length)
                if (key | rest) & HIGH == uint64(0):
                    key |= (key >> uint64(1)) & fold
                    rest |= (rest >> uint64(1)) & fold
            elif length > LONGEST_KEY or LONE_FIRST <= text[uint64(i)] < LONE_LAST:
                return count, i, True
            else:
                key, rest = EMPTY, hash_of(text, i, length)
            j, q = near_set(near, key, rest), uint64(4 * count)
            prefetch(near, int64(j << uint64(3)))
            keys[q], keys[q + uint64(1)] = key, rest
            keys[q + uint64(2)] = j | (uint64(i - first) << uint64(32)) | (uint64(length) << uint64(48))
            keys[q + uint64(3)] = value
            count += 1
            if value < OWN_WORD:
                i = s + 1
                continue
            keys[q + uint64(3)], i = uint64(0), s
            if value == OWN_WORD:
                if s + 1 >= end or text[uint64(s + 1)] != ord(" ") or quick[text[uint64(s + 2)]] == 0:
                    return count, i, True
                key, q = uint64(text[uint64(s)]), uint64(4 * count)
                j = near_set(near, key, uint64(0))
                keys[q], keys[q + uint64(1)], keys[q + uint64(3)] = key, uint64(0), uint64(0)
                keys[q + uint64(2)] = j | (uint64(i - first) << uint64(32)) | (uint64(1) << uint64(48))
                count += 1
                i = s + 1
        if i == base:
            return count, i, True
    return count, i, False


@part(forceinline=True)
def _write_known(k, count, keys, near, pool, out, p):
    """Write the ids of runs and stops from number k on, up to the first run that is in neither of its first two slots.

    Return the number of that run, `count` if there is none, and the place after the ids.
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


@part()
def _value_elsewhere(text, start, length, keys, q, near, far, spelled):
    """The value of a run that `_write_known` does not write; EMPTY if the tables do not have it."""
    key, rest, j = keys[q], keys[q + uint64(1)], keys[q + uint64(2)] & LOW32
    if key == EMPTY:
        return find_far(text, start, length, rest, far, spelled)
    if length == 0:
        return uint64(0)
    slot = other_slot(near, j, key, rest)
    return EMPTY if slot == j else near[slot + uint64(2)]


@part(forceinline=True)
def _write_runs(text, first, k, count, runs, out, p):
    """Write the ids of runs and stops from number k on, up to the first run that the tables do not have.

    first: the byte from which rows of runs.keys count. Return the number of that run, `count` if there is none, where
    it begins and ends, and the place after the ids.
    """
    keys, start, length = runs.keys, first, int64(0)
    while True:
        k, p = _write_known(k, count, keys, runs.near, runs.pool, out, p)
        if k == count:
            return k, start, start, p
        q = uint64(4 * k)
        where = keys[q + uint64(2)] >> uint64(32)
        start, length = first + int64(where & uint64(0xFFFF)), int64(where >> uint64(16))
        value = _value_elsewhere(text, start, length, keys, q, runs.near, runs.far, runs.spelled)
        if value == EMPTY:
            return k, start, start + length, p
        p += emit(out, p, value, runs.pool)
        p += put_ids(out, p, keys[q + uint64(3)])
        k += 1


@part(forceinline=True)
def _write_lone(text, i, end, points, out, p):
    """Write the ids of code points that are words by themselves, such as Chinese ones, from byte i on.

    Return the byte and the place after them.
    """
    while i < end and text[uint64(i)] >= 0x80:
        point, width = decoded(text, i)
        if points[point, 0] & LONE == uint64(0):
            break
        p += put_ids(out, p, points[point, 1])
        i += width
    return i, p


@part(forceinline=True)
def _before_prefix(text, begin, i, end, p, tables, output):
    """The first byte from i on whose code point has a normal form, `end` if none is left, and whether it gets a prefix.

    Also return a code.
    """
    entry, width = SILENT_FORM, 0
    while i + width < end and entry & SILENT_FORM != uint64(0):
        i += width
        point, width = decoded(text, i)
        entry, output.state[CODE_POINT] = tables.points[point, 0], point
    if entry == uint64(0):
        return i, False, UNKNOWN_CODE_POINT
    if tables.prefix_when == FIRST_PIECE and i > begin:
        # What begins the text has no normal form; is there a prefix?
        put_hard(output, begin, end, p, AT_BEGIN)
        return end, False, DONE
    i = end if entry & SILENT_FORM != uint64(0) else i
    return i, tables.prefix_always != 0 or entry & PREFIXED == uint64(0), DONE


@part(forceinline=True)
def _encode_piece(pieces, piece, tables, runs, output):
    """Encode a piece of text from where output.state says, and note there how far it came. Return a code."""
    text, begin, end = pieces.data, pieces.starts[piece], pieces.stops[piece]
    points, state, out, begins, when = tables.points, output.state, output.ids, pieces.begins[piece], tables.prefix_when
    i, p, code = max(state[BYTE], begin), state[PLACE], DONE
    first, k, count, after_runs, ends_slow, is_slow = i, int64(0), int64(0), i, False, tables.finds == NOTHING
    if state[NUM_HARD] == output.hard.shape[0]:
        return TOO_MANY_HARD
    if tables.strips != 0:
        start, end, code = strip(text, begin, end, tables.strips, points, state)
        if code == UNKNOWN_CODE_POINT:
            return code
        if code == MAY_DIFFER and state[HAS_BEGUN] == 0:
            put_hard(output, begin, pieces.stops[piece], p, AT_BEGIN if begins or when != FIRST_PIECE else LATER_PIECE)
            return DONE
        i, code = max(i, start), DONE
    while i < end and code == DONE:
        is_first, prefixed, stop, is_run = False, when == EACH_WORD, end, False
        if state[HAS_BEGUN] == 0 and (when == EACH_PIECE or (when == FIRST_PIECE and begins)):
            i, prefixed, code = _before_prefix(text, begin, i, end, p, tables, output)
            is_first = True
            if code != DONE or i >= end:
                break
        else:
            state[HAS_BEGUN] = 1
        if not is_slow and not is_first:
            if k == count:
                first, k, count, ends_slow = i, int64(0), int64(0), LONE_FIRST <= text[uint64(i)] < LONE_LAST
                if not ends_slow:
                    count, after_runs, ends_slow = _find_runs(text, i, end, tables, runs)
            k, i, stop, p = _write_runs(text, first, k, count, runs, out, p)
            is_run = k < count
            if not is_run:
                i, stop, is_slow = max(i, after_runs), end, ends_slow
                if not is_slow or i >= end:
                    continue
        length = stop - i if is_run else 0
        place, num_others = p, state[NUM_HARD] + state[REPLACED]
        while True:
            start = i
            i, p = _write_lone(text, i, stop, points, out, p)
            if i == start or (i < stop and text[uint64(i)] >= 0x80):
                code, i, p = _encode_word(text, begin, i, stop, is_first, prefixed, length, p, tables, runs, output)
            if code != DONE or not is_run or i >= stop:
                break
        if not is_run:
            following = text[uint64(i)] if tables.finds == RUNS else text[uint64(i)] | text[uint64(i + 1)]
            is_slow = tables.finds == NOTHING or following >= 0x80
        elif code == DONE:
            if num_others == state[NUM_HARD] + state[REPLACED]:
                keep_key(text, stop, runs.keys, uint64(4 * k), out[place:], p - place, out, runs)
            p += put_ids(out, p, runs.keys[uint64(4 * k + 3)])
            k += 1
            if k == count:
                i, is_slow = after_runs, ends_slow
    state[PLACE] = p  # -1 after GIVES_SPECIAL, when nothing is encoded any more
    if state[HAS_BEGUN] != 0:
        state[BYTE] = i
    else:  # what begins a text is looked at anew
        state[BYTE], state[LEVEL] = begin, 0
    return code


@jit()
def encode_words(pieces, tables, runs, output):
    """Encodes pieces of text by the rules and the model of `tables`. Returns one of the codes of records.py.

    pieces: Text. tables: WordTables. runs: RunTables. output: Output. After a code other than DONE the caller supplies
    what is missing and calls the kernel again; it continues from output.state. After GIVES_SPECIAL it gives up.

    The automaton finds where the next word ends. Most words are in the tables of runs and are copied from there. A
    stretch whose code points change each other is hard: it begins and ends where text can be cut, whatever it holds.
    """
    state = output.state
    for piece in range(state[PIECE], pieces.starts.size):
        code = _encode_piece(pieces, piece, tables, runs, output)
        if code != DONE:
            state[PIECE] = piece
            return code
        if pieces.tails[piece] >= 0:
            output.ids[state[PLACE]] = pieces.tails[piece]
            state[PLACE] += 1
        output.bounds[piece + 1] = state[PLACE]
        state[BYTE], state[HAS_BEGUN], state[LEVEL] = pieces.stops[piece], 0, 0
    return DONE
