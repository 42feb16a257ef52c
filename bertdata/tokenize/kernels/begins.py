"""Find the starts of words by the rules of GPT-2 and Llama 3, 64 bytes at a time, without an automaton.

A multibyte character is looked up in a table of code points and sets its bits like an ASCII one. A window of text ends
before a character whose normal form may be of a different kind for the rule. The tests compare with `tokenizers`.
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
# Indexes of RunTables.carry: bits that carry from this block into the next one: the class of the last byte, newlines
# that belong to the previous punctuation, punctuation that includes the letters after it, and contractions; last, the
# number of digits in the current group of up to three.
LETTERS, NUMBERS, OTHERS, SPACES, BLANKS, INLINE, NEWLINES, TAKEN, TAKING, BEGIN, INSIDE, DIGITS = range(12)
NUM_CARRIES = 12
# Indexes of RunTables.bits after LETTERS, NUMBERS and OTHERS: white space; bytes inside a character; and the last white
# space of a run, if it is not ASCII
WHITE, INNER, LAST = 3, 4, 5
NUM_BITS = 6


LETTER_BYTES, DIGIT_BYTES = ranges("AZ", "az"), ranges("09")
SPACE_BYTES, NEWLINE_BYTES, BLANK_BYTES = ranges("  "), ranges("\r\r", "\n\n"), ranges("\t\r", "  ")
ST, MD, LL = ranges("st", "ST"), ranges("mm", "MM", "dd", "DD"), ranges("ll", "LL")
VR, EE, CAPITALS = ranges("vv", "VV", "rr", "RR"), ranges("ee", "EE"), ranges("AZ")
APOSTROPHES, ZERO_BYTES, HIGH_BYTES = ranges("''"), ranges("\0\0"), ranges("\x80\xff")


@part(forceinline=True)
def _below(count):
    """Return a word with the lowest `count` bits set, all if `count` is 64 or more."""
    if count >= 64:
        return ALL
    return (ONE << uint64(count)) - ONE if count > 0 else uint64(0)


@part(forceinline=True)
def _after(bits, carry):
    """Return the bits of the next bytes after `bits`. carry: 1 if the first byte is one, else 0."""
    return (bits << ONE) | carry


@part()
def _add_others(text, i, begin, end, high, bits, kinds):
    """Add the non-ASCII characters of a block to its bits, by their code points.

    high: their bytes. bits: RunTables.bits. Return -1, or the position of a character of unknown kind.
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
    """Fill `bits` for 64 bytes, or fewer at the end, with blanks beyond the end.

    Return spaces, newlines, apostrophes, the last ASCII blank of each run, and the result of `_add_others`.
    """
    valid, blanks, high = _below(end - i), in_ranges64(text, i, BLANK_BYTES), in_ranges64(text, i, HIGH_BYTES)
    letters, digits = in_ranges64(text, i, LETTER_BYTES), in_ranges64(text, i, DIGIT_BYTES)
    blanks |= ~valid
    is_followed, unclear = end - i <= 64, int64(-1)  # whether the last byte is followed by a blank or the end
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
    if zeros != uint64(0):  # a key does not store the number of zero bytes at its end
        unclear = i + trailing_zeros(zeros)
    elif high != uint64(0) and unclear < 0:
        unclear = _add_others(text, i, begin, end, high, bits, kinds)
    following_blanks = (bits[WHITE] >> ONE) | (uint64(is_followed) << uint64(63))
    spaces, newlines = in_ranges64(text, i, SPACE_BYTES) & valid, in_ranges64(text, i, NEWLINE_BYTES) & valid
    return spaces, newlines, in_ranges64(text, i, APOSTROPHES) & valid, blanks & valid & ~following_blanks, unclear


@part(forceinline=True)
def _with_contractions(text, i, left, begins, apostrophes, folds, carry):
    """Return the starts of words if contractions such as 's and 'll are words: none inside these, but one after them.

    folds: whether contractions in capital letters count.
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
    """Return a bit for each of 64 bytes that begins a word by GPT-2's rule, and the result of `_add_others`."""
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
    """Return whether the blanks from byte i on include a newline, and the result of `_add_others`."""
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
    """Return the bits of the digits that begin groups of up to three."""
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
    """Like `_gpt2_begins`, for the rule of Llama 3, which equals tiktoken's cl100k_base."""
    spaces, newlines, apostrophes, last, unclear = _block(text, i, begin, end, kinds, bits)
    if unclear >= 0:
        return uint64(0), unclear
    letters, others, blanks, inside = bits[LETTERS], bits[OTHERS], bits[WHITE], bits[INNER]
    other_before = _after(others, carry[OTHERS])
    taken = newlines & (other_before | carry[TAKEN])  # newlines belong to the previous punctuation
    taken = newlines & ~(newlines + taken)  # the carry of the sum runs through a run of newlines
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
    """Write the ends of the words from byte i on to runs.places, as distances from byte i.

    A word begins at byte i; `end` is the end of the piece. Return the number of ends, and the byte before which the
    automaton must find further words (i if there is none). -1 ends: the kind of state[CODE_POINT] is unknown.
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
        begins &= _below(stop - i) & ~uint64(i == first)  # which does not end a word
        count += write_places(places, count, begins, i - first)
        i += 64
    if stop < end:
        # Only text before a letter and a blank is independent of the following text.
        while count > 0 and not _is_cut(text, first + int64(places[uint64(count - 1)]), stop, kinds):
            count -= 1
        return count, stop + 1
    if i >= end:
        places[uint64(count)] = end - first
        count += 1
    return count, first + int64(count == 0)


@part()
def _is_cut(text, place, stop, kinds):
    """Return whether the words before a place are independent of the bytes from `stop` on."""
    blank, width = decoded(text, place)
    if kinds[blank] != IS_BLANK or place + width >= stop:
        return False
    return kinds[decoded(text, last_begin(text, 0, place - 1))[0]] == IS_LETTER
