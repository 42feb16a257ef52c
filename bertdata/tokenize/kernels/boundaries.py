"""Find the ends of words with an automaton, and places where any text can be cut."""

from __future__ import annotations

import numpy as np
from numba import int64, uint64

from bertdata.bits import trailing_zeros
from bertdata.jit import part
from bertdata.tokenize.kernels.bits import decoded, in_ranges64, last_begin, ranges
from bertdata.tokenize.kernels.records import (
    BEFORE,
    BLANK,
    CLASSES,
    CODE_POINT,
    DONE,
    ENDED,
    HARD_FORM,
    MEETS,
    SILENT_FORM,
    STATES,
    STRIPS_LATE,
    STRIPS_LEFT,
    STRIPS_RIGHT,
    UNKNOWN_CODE_POINT,
    UNKNOWN_PAIR,
)
from bertdata.tokenize.kernels.runs import stable_place

MAY_DIFFER = -1
SMALL_LETTERS = ranges("az")
MOST_FOLLOWERS = 8  # most code points in a row that may change others; longer rows are left to `tokenizers`


@part()
def strip(text, start, stop, strips, points, state):
    """Strip blank code points from the ends of text[start:stop]. Return its start and stop, and a code.

    strips: as in WordTables. The code is UNKNOWN_CODE_POINT if an entry is missing, and MAY_DIFFER if neighbours may
    change the removed code points, such as a mark after a blank.
    """
    begin, place, code, has_marks = start, stop, DONE, False
    while start < stop and strips & STRIPS_LEFT != 0:
        entry, width = entry_at(text, start, points, state)
        if entry == uint64(0):
            return start, stop, UNKNOWN_CODE_POINT
        if entry & BLANK == uint64(0):
            if entry & HARD_FORM != uint64(0) or (entry & MEETS != uint64(0) and start > begin):
                code = MAY_DIFFER
            break
        start += width
    while start < place and strips & STRIPS_RIGHT != 0:
        place = last_begin(text, start, place - 1)
        entry, width = entry_at(text, place, points, state)
        if entry == uint64(0):
            return start, stop, UNKNOWN_CODE_POINT
        if entry & BLANK != uint64(0) and not has_marks:
            stop = place
        elif entry & (MEETS | HARD_FORM) == MEETS:
            has_marks = True
        else:
            if entry & (BLANK | HARD_FORM) != uint64(0):
                code = MAY_DIFFER
            break
    return start, stop, code if strips & STRIPS_LATE != 0 else DONE


@part(forceinline=True)
def entry_at(text, i, points, state):
    """Return the entry of the code point at byte i, and its width. state[CODE_POINT] becomes the code point."""
    point, width = decoded(text, i)
    state[CODE_POINT] = point
    return points[point, 0], width


@part()
def is_unstable(text, begin, start, stop, points, stable, state):
    """Return 1 if a code point in text[start:stop] may change another one, else 0; minus a code if data is missing.

    begin: start of the piece. Each code point that may change others is tested against all code points before it, back
    to the last one that changes none. Many in a row, or two after an ASCII character, count as unstable without a test.
    """
    i = start
    while i > begin:  # back to a code point that changes none
        i = last_begin(text, begin, i - 1)
        point, width = decoded(text, i)
        if points[point, 0] & (MEETS | SILENT_FORM) == uint64(0):
            break
    chain, base, followers = i, int64(-1), 0
    while i < stop:
        point, width = decoded(text, i)
        entry = points[point, 0]
        if entry == uint64(0):
            state[CODE_POINT] = point
            return -UNKNOWN_CODE_POINT
        if entry & HARD_FORM != uint64(0) and i >= start:
            return 1
        if entry & HARD_FORM == uint64(0) and entry & MEETS != uint64(0):
            followers += 1
            if followers > MOST_FOLLOWERS or (base < 0x80 and followers > 1):
                return 1
            k = chain
            while k < i:
                other, other_width = decoded(text, k)
                k += other_width
                if points[other, 0] & SILENT_FORM != uint64(0):
                    continue  # the characters on both sides of it may meet
                found = stable[stable_place(stable, (other << 21) | point)]
                if found == 0:
                    state[BEFORE], state[CODE_POINT] = other, point
                    return -UNKNOWN_PAIR
                if found & 1 == 0:
                    return 1
        elif entry & SILENT_FORM == uint64(0):
            chain, base, followers = i, point, 0
        i += width
    return 0


@part()
def cut_after(text, i, stop, points, cuts, state):
    """Return the first place after byte i where the text can be cut, for any result of `tokenizers` before it.

    Returns -1 if an entry is missing. The code points before and after the place change nothing, and no word contains
    both. The one before is not stripped at the end of a text.
    """
    previous = uint64(0)  # class of the previous code point, 0 if it may change something
    while i < stop:
        entry, width = entry_at(text, i, points, state)
        if entry == uint64(0):
            return -1
        kind = entry & uint64(0xFF)
        if entry & (MEETS | HARD_FORM | SILENT_FORM) != uint64(0):
            kind = uint64(0)
        if previous != uint64(0) and kind != uint64(0) and cuts[previous * uint64(CLASSES) + kind]:
            if i + width >= stop:
                return i
            following = entry_at(text, i + width, points, state)[0]
            if following == uint64(0):
                return -1
            if following & (MEETS | HARD_FORM | SILENT_FORM) == uint64(0):
                return i
        previous = kind if entry & BLANK == uint64(0) else uint64(0)
        i += width
    return stop


@part(forceinline=True)
def walk(text, i, end, automaton, points, steps, skips, state):
    """Find the end of the word at byte i with the automaton: -1 if no word begins there.

    Return a code, this end, the end of the last code point read, and the flags of all steps.
    """
    place, word_stop, flags, width = i, int64(-1), np.uint16(0), 0
    while True:
        kind = uint64(0)
        if place < end:
            point, width = int64(text[uint64(place)]), 1
            if point >= 0x80:
                point, width = decoded(text, place)
            kind = points[uint64(point), 0] & uint64(0xFF)
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
        if skips[automaton]:
            mask = ~in_ranges64(text, place, SMALL_LETTERS)
            skipped = min(trailing_zeros(mask) if mask != uint64(0) else 64, end - place)
            if skipped > 0:
                place += skipped
                word_stop = place - 1


@part()
def word_end(text, i, stop, start_state, keeps_gaps, points, steps, skips, state):
    """Return the end of the word that begins at byte i. -1: no word begins there. -2: an entry is missing.

    keeps_gaps: whether text between words is a word, too; then i may be the start of such text.
    """
    begin = i
    while i < stop:
        code, word_stop, _, _ = walk(text, i, stop, uint64(start_state), points, steps, skips, state)
        if code != DONE:
            return int64(-2)
        if not keeps_gaps or word_stop >= 0:
            return i if keeps_gaps and i > begin else word_stop
        i += decoded(text, i)[1]
    return stop
