"""Where words of the rules of GPT-2 and Llama 3 begin, 64 bytes at a time, without an automaton.

A character of several bytes is looked up in a table of code points and sets its bits like the others. A window of text
ends before a character whose normal form the rule may take for another kind. The tests compare with `tokenizers`.
"""

from __future__ import annotations

import numpy as np
from numba import int64, uint64

from bertdata.bits import trailing_zeros
from bertdata.jit import part
from bertdata.tokenize.kernels.bits import decoded, in_ranges64, last_begin, ranges, write_places
from bertdata.tokenize.kernels.records import (
    CODE_POINT,
    GPT2_WORDS,
    IS_BLANK,
    IS_LETTER,
    NOT_KNOWN,
    WINDOW,
)

ALL, ONE = np.uint64(0xFFFFFFFFFFFFFFFF), np.uint64(1)
# Indexes of RunTables.carry: bits of the bytes of the next block that follow from this one. Of the class of the byte
# before, of a newline that belongs to the punctuation before, of punctuation that takes the letters after it, and of
# contractions; last, how many digits the present group of up to three has.
LETTERS, NUMBERS, OTHERS, SPACES, BLANKS, INLINE, NEWLINES, TAKEN, TAKING, BEGIN, INSIDE, DIGITS = range(12)
NUM_CARRIES = 12
# Indexes of RunTables.bits after LETTERS, NUMBERS and OTHERS: white space; the bytes that begin no character; and
# white space that ends a run of it, if it is not ASCII
WHITE, INNER, LAST = 3, 4, 5
NUM_BITS = 6


LETTER_BYTES, DIGIT_BYTES = ranges("AZ", "az"), ranges("09")
SPACE_BYTES, NEWLINE_BYTES, BLANK_BYTES = ranges("  "), ranges("\r\r", "\n\n"), ranges("\t\r", "  ")
ST, MD, LL = ranges("st", "ST"), ranges("mm", "MM", "dd", "DD"), ranges("ll", "LL")
VR, EE, CAPITALS = ranges("vv", "VV", "rr", "RR"), ranges("ee", "EE"), ranges("AZ")
APOSTROPHES, ZERO_BYTES, HIGH_BYTES = ranges("''"), ranges("\0\0"), ranges("\x80\xff")


@part(forceinline=True)
def _below(count):
    """Return the lowest `count` bits, all if there are 64 or more."""
    if count >= 64:
        return ALL
    return (ONE << uint64(count)) - ONE if count > 0 else uint64(0)


@part(forceinline=True)
def _after(bits, carry):
    """Return the bits of the bytes after those of `bits`. carry: whether the first byte is one, 0 or 1."""
    return (bits << ONE) | carry


@part()
def _add_others(text, i, begin, end, high, bits, kinds):
    """Add the characters of a block that are not ASCII to its bits, by their code points.

    high: their bytes. bits: RunTables.bits. Return -1, or the place of a character whose kind is not known.
    """
    while high != uint64(0):
        place = last_begin(text, begin, i + trailing_zeros(high))
        point, width = decoded(text, place)
        first, stop = max(place - i, 0), min(place + width - i, 64)
        own, kind = _below(stop) & ~_below(first), kinds[point]
        if not IS_LETTER <= kind <= IS_BLANK:
            return place
        bits[kind - IS_LETTER] |= own
        if kind == IS_BLANK and place >= i and place + width < end:
            following = kinds[decoded(text, place + width)[0]]
            if not IS_LETTER <= following <= IS_BLANK:
                return place + width
            if following != IS_BLANK:
                bits[LAST] |= ONE << uint64(first)
        bits[INNER] |= own & ~(ONE << uint64(first)) if place >= i else own
        high &= ~own
    return int64(-1)


@part(forceinline=True)
def _block(text, i, begin, end, kinds, bits):
    """Fill `bits` for 64 bytes, or fewer at the end, where what is behind counts as blank.

    Return spaces, newlines, apostrophes, the ASCII blanks that end a run, and what `_add_others` does.
    """
    valid, blanks, high = _below(end - i), in_ranges64(text, i, BLANK_BYTES), in_ranges64(text, i, HIGH_BYTES)
    letters, digits = in_ranges64(text, i, LETTER_BYTES), in_ranges64(text, i, DIGIT_BYTES)
    blanks |= ~valid
    is_followed, unclear = end - i <= 64, int64(-1)  # whether a blank, or the end, follows the last byte
    zeros = in_ranges64(text, i, ZERO_BYTES) & valid
    if not is_followed and blanks >> uint64(63) != uint64(0):
        following = kinds[decoded(text, i + 64)[0]]
        is_followed = following == IS_BLANK
        if not IS_LETTER <= following <= IS_BLANK:
            unclear = i + 64
    bits[LETTERS], bits[NUMBERS], bits[WHITE] = letters & valid, digits & valid, blanks
    bits[OTHERS] = ~(letters | digits | blanks | high) & valid
    bits[INNER] = bits[LAST] = uint64(0)
    high &= valid
    if zeros != uint64(0):  # a key does not say how many it has at its end
        unclear = i + trailing_zeros(zeros)
    elif high != uint64(0) and unclear < 0:
        unclear = _add_others(text, i, begin, end, high, bits, kinds)
    following_blanks = (bits[WHITE] >> ONE) | (uint64(is_followed) << uint64(63))
    spaces, newlines = in_ranges64(text, i, SPACE_BYTES) & valid, in_ranges64(text, i, NEWLINE_BYTES) & valid
    return spaces, newlines, in_ranges64(text, i, APOSTROPHES) & valid, blanks & valid & ~following_blanks, unclear


@part(forceinline=True)
def _with_contractions(text, i, left, begins, apostrophes, folds, carry):
    """Return where words begin if contractions such as 's and 'll are words: not inside these, and after them.

    folds: whether capital letters count too.
    """
    begins = (begins | carry[BEGIN]) & ~carry[INSIDE]
    carry[BEGIN] = carry[INSIDE] = uint64(0)
    apostrophes &= begins
    if apostrophes != uint64(0):
        one = in_ranges64(text, i + 1, ST) | in_ranges64(text, i + 1, MD)
        two = in_ranges64(text, i + 1, LL) & in_ranges64(text, i + 2, LL)
        two |= in_ranges64(text, i + 1, VR) & in_ranges64(text, i + 2, EE)
        if not folds:
            capitals = in_ranges64(text, i + 1, CAPITALS)
            one &= ~capitals
            two &= ~(capitals | in_ranges64(text, i + 2, CAPITALS))
        one &= apostrophes & _below(left - 1)
        two &= apostrophes & _below(left - 2)
        begins &= ~(((one | two) << ONE) | (two << uint64(2)))
        begins |= (one << uint64(2)) | (two << uint64(3))
        carry[INSIDE] = ((one | two) >> uint64(63)) | (two >> uint64(62))
        carry[BEGIN] = (one >> uint64(62)) | (two >> uint64(61))
    return begins


@part(forceinline=True)
def _gpt2_begins(text, i, begin, end, kinds, bits, carry):
    """Return a bit for each of 64 bytes at which a word of GPT-2's rule begins, and what `_add_others` returns."""
    spaces, _, apostrophes, last, unclear = _block(text, i, begin, end, kinds, bits)
    if unclear >= 0:
        return uint64(0), unclear
    letters, numbers, others, blanks = bits[LETTERS], bits[NUMBERS], bits[OTHERS], bits[WHITE]
    same = letters & _after(letters, carry[LETTERS])
    same |= numbers & _after(numbers, carry[NUMBERS])
    same |= others & _after(others, carry[OTHERS])
    begins = ~blanks & ~same & ~_after(spaces, carry[SPACES])
    begins |= blanks & (~_after(blanks, carry[BLANKS]) | last | bits[LAST])
    begins = _with_contractions(text, i, end - i, begins & ~bits[INNER], apostrophes, False, carry)
    for k in range(4):
        carry[k] = (bits[k] if k < 3 else spaces) >> uint64(63)
    carry[BLANKS] = blanks >> uint64(63)
    return begins, unclear


@part()
def _has_newline(text, i, end, kinds):
    """Return whether the blanks from byte i on have a newline among them, and what `_add_others` returns."""
    while i < end:
        point, width = decoded(text, i)
        if point == 10 or point == 13:  # noqa: PLR1714
            return True, int64(-1)
        if kinds[point] != IS_BLANK:
            return False, int64(-1) if IS_LETTER <= kinds[point] <= IS_BLANK else i
        i += width
    return False, int64(-1)


@part(forceinline=True)
def _number_begins(numbers, inside, carry):
    """Return the bits of the digits at which groups of up to three begin."""
    is_next, rest, size, begins = _after(numbers, carry[NUMBERS]), numbers & ~inside, carry[DIGITS], uint64(0)
    while rest != uint64(0):
        bit = rest & (~rest + ONE)
        if is_next & bit == uint64(0) or size == uint64(3):
            begins, size = begins | bit, uint64(0)
        size += ONE
        rest ^= bit
    carry[DIGITS] = size
    return begins


@part(forceinline=True)
def _llama3_begins(text, i, begin, end, kinds, bits, carry):
    """Do what `_gpt2_begins` does, for the rule of Llama 3, which is that of tiktoken's cl100k_base."""
    spaces, newlines, apostrophes, last, unclear = _block(text, i, begin, end, kinds, bits)
    if unclear >= 0:
        return uint64(0), unclear
    letters, others, blanks, inside = bits[LETTERS], bits[OTHERS], bits[WHITE], bits[INNER]
    other_before = _after(others, carry[OTHERS])
    taken = newlines & (other_before | carry[TAKEN])  # newlines belong to the punctuation before them
    taken = newlines & ~(newlines + taken)  # the sum carries through a run of newlines
    taken_before = _after(taken, carry[TAKEN])
    after_newline = _after(newlines, carry[NEWLINES]) & blanks & ~newlines & _below(end - i)
    blank_begins = (blanks & ~_after(blanks, carry[BLANKS]) & ~taken) | (last & ~newlines) | bits[LAST]
    blank_begins |= after_newline & taken_before
    rest = after_newline & ~taken_before & ~inside
    while rest != uint64(0):
        place = trailing_zeros(rest)
        has_newline, unclear = _has_newline(text, i + place, end, kinds)
        if unclear >= 0:
            return uint64(0), unclear
        blank_begins |= uint64(not has_newline) << uint64(place)
        rest &= rest - ONE
    other_begins = others & ~other_before & ~_after(spaces, carry[SPACES]) & ~inside
    taking = other_begins | (carry[TAKING] & inside & others)
    for _ in range(3 if inside != uint64(0) else 0):  # the bytes of a character
        taking |= (taking << ONE) & inside & others
    inline = blanks & ~newlines
    joined = _after(letters, carry[LETTERS]) | _after(inline, carry[INLINE]) | _after(taking, carry[TAKING])
    begins = other_begins | blank_begins | (letters & ~joined) | _number_begins(bits[NUMBERS], inside, carry)
    begins = _with_contractions(text, i, end - i, begins & ~inside, apostrophes, True, carry)
    for k in range(3):
        carry[k] = bits[k] >> uint64(63)
    carry[SPACES], carry[BLANKS], carry[INLINE] = spaces >> uint64(63), blanks >> uint64(63), inline >> uint64(63)
    carry[NEWLINES], carry[TAKEN] = newlines >> uint64(63), taken >> uint64(63)
    carry[TAKING] = taking >> uint64(63)
    return begins, unclear


@part(forceinline=True)
def find_words(text, i, end, tables, runs, state):
    """Write the places at which the words from byte i on end to runs.places, as distances from byte i.

    A word begins at byte i, and `end` is that of the piece. Return how many places, and the byte before which the
    automaton must find further words, i if there is none. -1 places: the kind of state[CODE_POINT] is not known.
    """
    kinds, bits, carry, places = tables.kinds, runs.bits, runs.carry, runs.places
    first, stop, count = i, end, 0
    carry[:] = uint64(0)
    while i < stop and (i < first + WINDOW or (count == 0 and i < first + tables.longest)):
        if tables.finds == GPT2_WORDS:
            begins, unclear = _gpt2_begins(text, i, first, stop, kinds, bits, carry)
        else:
            begins, unclear = _llama3_begins(text, i, first, stop, kinds, bits, carry)
        if unclear >= 0:
            state[CODE_POINT] = decoded(text, unclear)[0]
            if kinds[state[CODE_POINT]] == NOT_KNOWN:
                return -1, i
            stop = unclear  # as if the text ended there
            continue
        begins &= _below(stop - i) & ~uint64(i == first)  # which ends no word
        count += write_places(places, count, begins, i - first)
        i += 64
    if stop < end:
        # Only what is before a letter and a blank is the same whatever follows.
        while count > 0 and not _is_cut(text, first + int64(places[uint64(count - 1)]), stop, kinds):
            count -= 1
        return count, stop + 1
    if i >= end:
        places[uint64(count)] = end - first
        count += 1
    return count, first + int64(count == 0)


@part()
def _is_cut(text, place, stop, kinds):
    """Return whether the words before a place are the same whatever stands from byte `stop` on."""
    blank, width = decoded(text, place)
    if kinds[blank] != IS_BLANK or place + width >= stop:
        return False
    return kinds[decoded(text, last_begin(text, 0, place - 1))[0]] == IS_LETTER
