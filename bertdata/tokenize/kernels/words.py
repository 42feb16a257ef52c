"""The loop over text for tokenizers that cut it into words by rules: BPE, Unigram and others."""

from __future__ import annotations

import numpy as np
from numba import int64, uint64

from bertdata.bits import trailing_zeros
from bertdata.jit import jit, part
from bertdata.tokenize.kernels.bits import decoded, not_lower64, outside64
from bertdata.tokenize.kernels.boundaries import MAY_DIFFER, cut_after, is_unstable, strip, word_end
from bertdata.tokenize.kernels.records import (
    AT_BEGIN,
    BYTE,
    CLASSES,
    CODE_POINT,
    DONE,
    EACH_PIECE,
    EACH_WORD,
    EMPTY,
    ENDED,
    FIRST_PIECE,
    GAP,
    GIVES_SPECIAL,
    HARD_STEP,
    HAS_BEGUN,
    IN_MIDDLE,
    LATER_PIECE,
    LEVEL,
    LIMITS,
    MEETS,
    MEETS_STEP,
    NEXT_BEGINS,
    NO_BYTES,
    NOT_QUICK,
    NUM_HARD,
    ONE_WORD,
    OWN_WORD,
    PIECE,
    PLACE,
    PREFIXED,
    REPLACED,
    SILENT_FORM,
    STATES,
    TOO_MANY_HARD,
    UNKNOWN_CODE_POINT,
    WITH_PREFIX,
)
from bertdata.tokenize.kernels.runs import (
    LONGEST_KEY,
    emit,
    find_far,
    find_near,
    find_run,
    hash_of,
    keep_run,
    near_key,
    near_set,
)
from bertdata.tokenize.kernels.word import encode_word


@part(_nrt=False)
def _put_hard(hard, number, start, stop, place, where):
    """Writes row `number` of Output.hard. Returns the number of the next one."""
    hard[number, 0], hard[number, 1], hard[number, 2], hard[number, 3] = start, stop, place, where
    return number + 1


@part(forceinline=True, _nrt=False)
def _after_silent(text, i, end, points, state):
    """The first byte from i on whose code point has a normal form, and its entry. 0: the entry is missing."""
    entry, width = SILENT_FORM, 0
    while i + width < end and entry & SILENT_FORM != uint64(0):
        i += width
        point, width = decoded(text, i)
        entry, state[CODE_POINT] = points[point, 0], point
    return i, entry


@part(forceinline=True, _nrt=False)
def _quick_words(text, i, end, p, tables, runs, out):
    """Writes the ids of words from byte i on as long as they need no automaton and the tables of runs have them.

    Returns where the next word begins, the next place in `out`, and where that word ends; -1: ask the automaton.
    """
    quick, after, near = tables.quick, tables.after, runs.near
    mask, base = uint64(0), i
    while True:
        if mask == uint64(0):
            base, mask = i, outside64(text, i, tables.inside)
            if mask & uint64(1) != uint64(0) and after[text[uint64(i)]] == NEXT_BEGINS:
                mask &= mask - uint64(1)  # the space that begins this word does not end it
            if mask == uint64(0):
                return i, p, int64(-1)
        s = base + trailing_zeros(mask)
        what, length = after[text[uint64(s)]], s - i
        # a mark at s + 1 would change the byte that ends the word
        if s >= end or what == NOT_QUICK or (tables.meets != 0 and quick[text[uint64(s + 1)]] == 0):
            return i, p, int64(-1)
        mask &= mask - uint64(1)
        if length == 0 and what == GAP:
            i = s + 1
            continue
        if length == 0 or (length == 1 and after[text[uint64(i)]] == NEXT_BEGINS):
            return i, p, int64(-1)  # nothing, or nothing but a space: what follows decides what this is
        if length <= 16:
            key, rest = near_key(text, i, length)
            value = find_near(near, near_set(near, key, rest), key, rest)
        else:
            value = find_far(text, i, length, hash_of(text, i, length), runs.far, runs.spelled)
        if value == EMPTY:
            return i, p, s
        p += emit(out, p, value, runs.pool)
        i = s
        if what == GAP:
            i += 1
        elif what == OWN_WORD:
            if s + 1 >= end or text[uint64(s + 1)] != ord(" "):
                return i, p, int64(-1)
            if tables.meets != 0 and quick[text[uint64(s + 2)]] == 0:
                return i, p, int64(-1)
            key = uint64(text[uint64(s)])
            value = find_near(near, near_set(near, key, uint64(0)), key, uint64(0))
            if value == EMPTY:
                return i, p, int64(-1)
            p += emit(out, p, value, runs.pool)
            i, mask = s + 1 + int64(after[ord(" ")] == GAP), mask & (mask - uint64(1))


@part(forceinline=True, _nrt=False)
def _by_automaton(text, i, end, automaton, tables, state):
    """Where the automaton ends the word at byte i, -1 if none begins there.

    Returns a code, that place, the place after the last code point that was read, and the flags of all steps.
    """
    points, steps = tables.points, tables.steps
    place, word_stop, flags, width = i, int64(-1), np.uint16(0), 0
    while True:
        kind = uint64(0)
        if place < end:
            point, width = int64(text[uint64(place)]), 1
            if point < 0x80:
                kind = uint64(tables.ascii[uint64(point)])
            else:
                point, width = decoded(text, place)
                kind = points[point, 0] & uint64(0xFF)
            if kind == uint64(0):
                state[CODE_POINT] = point
                return UNKNOWN_CODE_POINT, word_stop, place, flags
        step = steps[automaton * uint64(CLASSES) + kind]
        flags |= step
        if step & ENDED != 0:
            word_stop = place
        automaton = uint64(step & STATES)
        if automaton == uint64(0) or place >= end:
            return DONE, word_stop, min(place + width, end), flags
        place += width
        if tables.skips[automaton]:
            mask = not_lower64(text, place)
            skipped = min(trailing_zeros(mask) if mask != uint64(0) else 64, end - place)
            if skipped > 0:
                place += skipped
                word_stop = place - 1


@part(forceinline=True, _nrt=False)
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


@part(forceinline=True, _nrt=False)
def _next_word(text, begin, i, end, automaton, tables, runs, state):
    """A code; where the word at byte i ends, -1 if none begins there; and, if it is hard, where that ends, else -1."""
    code, word_stop, place, flags = _by_automaton(text, i, end, automaton, tables, state)
    hard_stop = int64(-1)
    if code == DONE and tables.meets != 0:
        hard_stop, code = _hard_until(text, begin, i, place, end, flags, tables, runs, state)
    if code == DONE and word_stop < 0 and tables.keeps_gaps[0]:
        word_stop = word_end(text, i, end, tables.starts[0], True, tables.points, tables.ascii, tables.steps, state)
        if word_stop < 0:
            code = UNKNOWN_CODE_POINT
    return code, word_stop, hard_stop


@part(forceinline=True, _nrt=False)
def _cut_by_rules(text, i, level, tables, limits, state):
    """Cuts the text from byte i on by the rules from `level` on, each within what the one before has found.

    limits: int64 [num_rules], where each rule's text ends. Returns the number of rules whose limits are known; the last
    of them is where the word ends, below 0 if an entry is missing.
    """
    while level < tables.starts.size and limits[level - 1] >= 0:
        limits[level] = word_end(
            text,
            i,
            limits[level - 1],
            tables.starts[level],
            tables.keeps_gaps[level],
            tables.points,
            tables.ascii,
            tables.steps,
            state,
        )
        level += 1
    return level


@part(forceinline=True, _nrt=False)
def _put_word(text, i, length, prefixed, is_key, p, tables, runs, output):
    """Writes the ids of the word text[i : i + length] at output.ids[p:], and keeps them if `is_key`.

    Returns the next place, -1 if the text gives the id of a special token that may not stand there.
    """
    out = output.ids
    count, num_special = encode_word(text, i, i + length, prefixed, tables, runs), 0
    for k in range(count):
        if tables.special[runs.ids[k]]:
            num_special += 1
            runs.ids[k] = tables.special_to
        out[p + k] = runs.ids[k]
    if num_special > 0 and tables.special_to < 0:
        return int64(-1)
    output.state[REPLACED] += num_special
    if is_key and num_special == 0:
        keep_run(text, i, length, runs.ids, count, out, runs)
    return p + count


@part(forceinline=True, _nrt=False)
def _encode_piece(pieces, piece, tables, runs, output):
    """Encodes a piece of text from where output.state says, and notes there how far it came. Returns a code."""
    text, begin, end = pieces.data, pieces.starts[piece], pieces.stops[piece]
    points, hard, state = tables.points, output.hard, output.state
    limits = state[LIMITS:]
    num_rules, first_state, longest = tables.starts.size, uint64(tables.starts[0]), runs.word.size // 4 - 16
    i, p, num_hard, has_begun, level = state[BYTE], state[PLACE], state[NUM_HARD], state[HAS_BEGUN], state[LEVEL]
    i, code, begins = max(i, begin), DONE, pieces.begins[piece]
    if num_hard == hard.shape[0]:
        return TOO_MANY_HARD
    if tables.strips != 0:
        start, end, code = strip(text, begin, end, tables.strips, points, state)
        if code == UNKNOWN_CODE_POINT:
            return code
        if code == MAY_DIFFER and has_begun == 0:
            where = AT_BEGIN if begins or tables.prefix_when != FIRST_PIECE else LATER_PIECE
            state[NUM_HARD] = _put_hard(hard, num_hard, begin, pieces.stops[piece], p, where)
            return DONE
        i, code = max(i, start), DONE
    while i < end:
        if num_hard == hard.shape[0]:
            code = TOO_MANY_HARD
            break
        automaton, prefixed, is_first, word_stop = first_state, tables.prefix_when == EACH_WORD, False, int64(-1)
        if has_begun == 0 and (tables.prefix_when == EACH_PIECE or (tables.prefix_when == FIRST_PIECE and begins)):
            i, entry = _after_silent(text, i, end, points, state)
            if entry == uint64(0):
                code = UNKNOWN_CODE_POINT
                break
            if tables.prefix_when == FIRST_PIECE and i > begin:
                # What begins the text has no normal form; is there a prefix?
                num_hard = _put_hard(hard, num_hard, begin, end, p, AT_BEGIN)
                break
            if entry & SILENT_FORM != uint64(0):
                break  # nothing but code points without a normal form is left
            is_first, prefixed = True, tables.prefix_always != 0 or entry & PREFIXED == uint64(0)
            if prefixed:
                automaton = uint64(tables.steps[first_state * uint64(CLASSES) + uint64(tables.prefix_class)] & STATES)
        elif tables.inside != NO_BYTES:
            start = i
            i, p, word_stop = _quick_words(text, i, end, p, tables, runs, output.ids)
            has_begun |= int64(i > start)
            if i >= end:
                break
        is_quick, hard_stop = word_stop >= 0, int64(-1)
        if level == 0 and not is_quick:
            code, word_stop, hard_stop = _next_word(text, begin, i, end, automaton, tables, runs, state)
            if code != DONE:
                break
        if num_rules > 1 and hard_stop < 0 and (level > 0 or word_stop > i):
            if level == 0:
                limits[0], level = word_stop, 1
            level = _cut_by_rules(text, i, level, tables, limits, state)
            word_stop = limits[level - 1]
        stop = hard_stop if hard_stop >= 0 else word_stop
        if stop < i or (stop == i and not prefixed):  # no word begins here
            i += decoded(text, i)[1]
        else:
            length, value = stop - i, EMPTY
            is_key = 0 < length <= LONGEST_KEY and not is_first
            if is_key and not is_quick:
                value = find_run(text, i, length, runs.near, runs.far, runs.spelled)
            if value != EMPTY:
                p += emit(output.ids, p, value, runs.pool)
            elif hard_stop >= 0 and is_first:  # with what was passed over, as it may keep a blank from being stripped
                num_hard = _put_hard(hard, num_hard, begin, stop, p, AT_BEGIN)
            elif hard_stop >= 0 or length > longest:
                where = IN_MIDDLE if hard_stop >= 0 else (WITH_PREFIX if prefixed else ONE_WORD)
                num_hard = _put_hard(hard, num_hard, i, stop, p, where)
            else:
                p = _put_word(text, i, length, prefixed, is_key, p, tables, runs, output)
                if p < 0:
                    return GIVES_SPECIAL
            i, has_begun = stop, 1
        while level > 0 and i >= limits[level - 1]:
            level -= 1
    state[PLACE], state[NUM_HARD], state[HAS_BEGUN] = p, num_hard, has_begun
    state[BYTE], state[LEVEL] = (i, level) if has_begun != 0 else (begin, 0)  # what begins a text is looked at anew
    return code


@jit(_nrt=False)
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
