"""The loop over text for byte-level BPE whose rule is GPT-2's or Llama 3's: 64 bytes at a time, without an automaton.

Three loops over a window of text take turns: one finds where words begin, as bits, and writes their places; one makes
the keys of the words, and asks the processor to load what the cache of runs has of each; one writes the ids. So the
latencies of the cache overlap. A character of several bytes is looked up in a table of code points and sets its bits
like the others. tests/ compares the places with the automaton of the rule, and the ids with `tokenizers`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import int64, types, uint64
from numba.extending import intrinsic

from bertdata.bits import are_equal128, bits64, is_among, is_byte, keep_masked, pointer_to, prefetch, trailing_zeros
from bertdata.jit import jit, part
from bertdata.tokenize.kernels.bits import decoded, leads64, write_places
from bertdata.tokenize.kernels.merges import merge
from bertdata.tokenize.kernels.records import (
    BYTE,
    CODE_POINT,
    DONE,
    EMPTY,
    GIVES_SPECIAL,
    GPT2_WORDS,
    HAS_BEGUN,
    IS_BLANK,
    IS_LETTER,
    LONGEST_WORD,
    MAY_CHANGE,
    NOT_KNOWN,
    NUM_HARD,
    ONE_WORD,
    PIECE,
    PLACE,
    REPLACED,
    TOO_MANY_HARD,
    UNKNOWN_CODE_POINT,
    WINDOW,
    WORD,
)
from bertdata.tokenize.kernels.runs import (
    LONGEST_KEY,
    emit,
    emit_slot,
    far_set,
    find_far,
    hash_of,
    keep_in_slot,
    keep_run,
    most_ids,
    near_set,
    num_ids,
    other_slot,
    put_hard,
    put_ids,
    put_more,
    put_new,
)
from bertdata.tokenize.kernels.splits import cut_word

ALL, ONE = np.uint64(0xFFFFFFFFFFFFFFFF), np.uint64(1)
# Indexes of ByteTables.carry: bits of the bytes of the next block that follow from this one. Of the class of the byte
# before, of a newline that belongs to the punctuation before, of punctuation that takes the letters after it, and of
# contractions; last, how many digits the present group of up to three has.
LETTERS, NUMBERS, OTHERS, SPACES, BLANKS, INLINE, NEWLINES, TAKEN, TAKING, BEGIN, INSIDE, DIGITS = range(12)
NUM_CARRIES = 12
# Indexes of ByteTables.bits after LETTERS, NUMBERS and OTHERS: white space; the bytes that begin no character; and
# white space that ends a run of it, if it is not ASCII
WHITE, INNER, LAST = 3, 4, 5


@intrinsic
def _classes64(typing: Any, array: Any, offset: Any) -> Any:
    """Bits of the 64 bytes at an offset: letters, digits, spaces, newlines, white space, not ASCII, ', zero bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def bits(is_set: Any) -> Any:
            return bits64(context, builder, signature, args, is_set)

        def is_letter(builder: Any, text: Any) -> Any:
            return is_among(builder, builder.or_(text, ir.Constant(text.type, [0x20] * 64)), ord("a"), 26)

        def is_newline(builder: Any, text: Any) -> Any:
            return builder.or_(is_byte(builder, text, 10), is_byte(builder, text, 13))

        def is_blank(builder: Any, text: Any) -> Any:
            return builder.or_(is_byte(builder, text, 32), is_among(builder, text, 9, 5))

        tests = (
            is_letter,
            lambda b, t: is_among(b, t, ord("0"), 10),
            lambda b, t: is_byte(b, t, 32),
            is_newline,
            is_blank,
            lambda b, t: is_among(b, t, 128, 128),
            lambda b, t: is_byte(b, t, ord("'")),
            lambda b, t: is_byte(b, t, 0),
        )
        return context.make_tuple(builder, signature.return_type, [bits(test) for test in tests])

    return types.UniTuple(types.uint64, 8)(array, types.int64), generate


@intrinsic
def _contractions64(typing: Any, array: Any, offset: Any, fold: Any) -> Any:
    """Bits of 64 bytes at an offset: those after which s, t, m or d stands, and those after which ll, ve or re does.

    fold: uint64, 0x20 if capital letters and the long s, U+017F, count too, else 0.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector, lane = ir.VectorType(ir.IntType(8), 64), ir.IntType(32)

        def following(distance: int) -> Any:
            place = builder.add(args[1], ir.Constant(ir.IntType(64), distance))
            text = builder.load(pointer_to(context, builder, signature.args[0], args[0], place, vector))
            text.align = 1
            fold = builder.insert_element(
                ir.Constant(vector, ir.Undefined), builder.trunc(args[2], ir.IntType(8)), lane(0)
            )
            fold = builder.shuffle_vector(fold, fold, ir.Constant(ir.VectorType(lane, 64), [0] * 64))
            is_capital = is_among(builder, text, ord("A"), 26)
            return builder.select(is_capital, builder.or_(text, fold), text)

        first, second = following(1), following(2)
        one = is_byte(builder, first, ord("s"))
        for letter in b"tmd":
            one = builder.or_(one, is_byte(builder, first, letter))
        two = builder.and_(is_byte(builder, first, ord("l")), is_byte(builder, second, ord("l")))
        before_e = builder.or_(is_byte(builder, first, ord("v")), is_byte(builder, first, ord("r")))
        two = builder.or_(two, builder.and_(before_e, is_byte(builder, second, ord("e"))))
        folds = builder.icmp_unsigned("!=", args[2], ir.Constant(ir.IntType(64), 0))
        long_s = builder.and_(is_byte(builder, first, 0xC5), is_byte(builder, second, 0xBF))
        two = builder.or_(two, builder.select(folds, long_s, ir.Constant(long_s.type, [0] * 64)))
        words = [builder.bitcast(bits, ir.IntType(64)) for bits in (one, two)]
        return context.make_tuple(builder, signature.return_type, words)

    return types.UniTuple(types.uint64, 2)(array, types.int64, types.uint64), generate


@part(forceinline=True)
def _below(count):
    """The lowest `count` bits, all if there are 64 or more."""
    if count >= 64:
        return ALL
    return (ONE << uint64(count)) - ONE if count > 0 else uint64(0)


@part(forceinline=True)
def _after(bits, carry):
    """The bits of the bytes after those of `bits`. carry: whether the first byte is one, 0 or 1."""
    return (bits << ONE) | carry


@part()
def _add_others(text, i, begin, end, high, bits, classes):
    """Adds the characters of a block that are not ASCII to its bits, by their code points.

    high: their bytes. bits: uint64 [6], by LETTERS, NUMBERS, OTHERS, WHITE, INNER and LAST. Returns whether all classes
    are known, and a code point whose is not.
    """
    while high != uint64(0):
        place = i + trailing_zeros(high)
        while text[place] & 0xC0 == 0x80 and place > begin:
            place -= 1
        point, width = decoded(text, place)
        first, stop = max(place - i, 0), min(place + width - i, 64)
        own, kind = _below(stop) & ~_below(first), classes[point]
        if kind == NOT_KNOWN:
            return False, point
        bits[kind - IS_LETTER] |= own
        if kind == IS_BLANK and place >= i and place + width < end:
            point = decoded(text, place + width)[0]
            if classes[point] == NOT_KNOWN:
                return False, point
            if classes[point] != IS_BLANK:
                bits[LAST] |= ONE << uint64(first)
        bits[INNER] |= own & ~(ONE << uint64(first)) if place >= i else own
        high &= ~own
    return True, int64(0)


@part(forceinline=True)
def _block(text, i, begin, end, tables):
    """The classes of 64 bytes, or fewer at the end, where what is behind counts as blank.

    Fills tables.bits, see `_add_others`. Returns spaces, newlines, apostrophes, whether there is a zero byte, the
    ASCII blanks that end a run, and what `_add_others` does.
    """
    bits, classes = tables.bits, tables.classes
    letters, digits, spaces, newlines, blanks, high, apostrophes, zeros = _classes64(text, i)
    valid, is_known, point = _below(end - i), True, int64(0)
    blanks |= ~valid
    is_followed = end - i <= 64  # whether a blank, or the end, follows the last byte
    if not is_followed and blanks >> uint64(63) != uint64(0):
        point = decoded(text, i + 64)[0]
        is_followed, is_known = classes[point] == IS_BLANK, classes[point] != NOT_KNOWN
    bits[LETTERS], bits[NUMBERS], bits[WHITE] = letters & valid, digits & valid, blanks
    bits[OTHERS] = ~(letters | digits | blanks | high) & valid
    bits[INNER] = bits[LAST] = uint64(0)
    high &= valid
    if high != uint64(0) and is_known:
        is_known, point = _add_others(text, i, begin, end, high, bits, classes)
    following_blanks = (bits[WHITE] >> ONE) | (uint64(is_followed) << uint64(63))
    last = blanks & valid & ~following_blanks
    return spaces & valid, newlines & valid, apostrophes & valid, (zeros & valid) != uint64(0), last, is_known, point


@part(forceinline=True)
def _with_contractions(text, i, left, begins, apostrophes, fold, carry):
    """Where words begin if contractions such as 's and 'll are words: not inside these, and after them."""
    begins = (begins | carry[BEGIN]) & ~carry[INSIDE]
    carry[BEGIN] = carry[INSIDE] = uint64(0)
    apostrophes &= begins
    if apostrophes != uint64(0):
        one, two = _contractions64(text, i, fold)
        one &= apostrophes & _below(left - 1)
        two &= apostrophes & _below(left - 2)
        begins &= ~(((one | two) << ONE) | (two << uint64(2)))
        begins |= (one << uint64(2)) | (two << uint64(3))
        carry[INSIDE] = ((one | two) >> uint64(63)) | (two >> uint64(62))
        carry[BEGIN] = (one >> uint64(62)) | (two >> uint64(61))
    return begins


@part(forceinline=True)
def _gpt2_begins(text, i, begin, end, tables):
    """A bit for each of 64 bytes at which a word of GPT-2's rule begins.

    Also whether there is a zero byte, and what `_add_others` returns.
    """
    bits, carry = tables.bits, tables.carry
    spaces, _, apostrophes, has_zero, last, is_known, point = _block(text, i, begin, end, tables)
    if not is_known:
        return uint64(0), has_zero, False, point
    letters, numbers, others, blanks = bits[LETTERS], bits[NUMBERS], bits[OTHERS], bits[WHITE]
    same = letters & _after(letters, carry[LETTERS])
    same |= numbers & _after(numbers, carry[NUMBERS])
    same |= others & _after(others, carry[OTHERS])
    begins = ~blanks & ~same & ~_after(spaces, carry[SPACES])
    begins |= blanks & (~_after(blanks, carry[BLANKS]) | last | bits[LAST])
    begins = _with_contractions(text, i, end - i, begins & ~bits[INNER], apostrophes, uint64(0), carry)
    for k in range(4):
        carry[k] = (bits[k] if k < 3 else spaces) >> uint64(63)
    carry[BLANKS] = blanks >> uint64(63)
    return begins & _below(end - i), has_zero, True, point


@part()
def _has_newline(text, i, end, classes):
    """Whether the blanks from byte i on have a newline among them, and what `_add_others` returns."""
    while i < end:
        point, width = decoded(text, i)
        if point == 10 or point == 13:  # noqa: PLR1714
            return True, True, point
        if classes[point] != IS_BLANK:
            return False, classes[point] != NOT_KNOWN, point
        i += width
    return False, True, int64(0)


@part()
def _group_begins(numbers, inside, carry):
    """Where groups of up to three digits begin, digit by digit."""
    size, begins = int64(carry[DIGITS]), uint64(0)
    for k in range(64):
        bit = ONE << uint64(k)
        if numbers & bit == uint64(0):
            size = 0
        elif inside & bit == uint64(0):
            if size == 0:
                begins |= bit
            size = size + 1 if size < 2 else 0
    carry[DIGITS] = uint64(size)
    return begins


@part(forceinline=True)
def _number_begins(numbers, inside, carry):
    """Where groups of up to three digits begin."""
    before = _after(numbers, carry[NUMBERS])
    longer = numbers & (numbers << ONE) & (numbers << uint64(2)) & (numbers << uint64(3))
    if (carry[NUMBERS] & numbers) | longer | (inside & numbers) != uint64(0):
        return _group_begins(numbers, inside, carry)
    size = 0
    while size < 3 and (numbers << uint64(size)) >> uint64(63) != uint64(0):
        size += 1
    carry[DIGITS] = uint64(size if size < 3 else 0)
    return numbers & ~before


@part(forceinline=True)
def _llama3_begins(text, i, begin, end, tables):
    """The same for the rule of Llama 3, which is that of tiktoken's cl100k_base with digits in groups of three."""
    bits, carry, valid = tables.bits, tables.carry, _below(end - i)
    spaces, newlines, apostrophes, has_zero, last, is_known, point = _block(text, i, begin, end, tables)
    if not is_known:
        return uint64(0), has_zero, False, point
    letters, others, blanks, inside = bits[LETTERS], bits[OTHERS], bits[WHITE], bits[INNER]
    other_before = _after(others, carry[OTHERS])
    taken = newlines & (other_before | carry[TAKEN])  # newlines belong to the punctuation before them
    taken = newlines & ~(newlines + taken)  # the sum carries through a run of newlines
    taken_before = _after(taken, carry[TAKEN])
    after_newline = _after(newlines, carry[NEWLINES]) & blanks & ~newlines & valid
    blank_begins = (blanks & ~_after(blanks, carry[BLANKS]) & ~taken) | (last & ~newlines) | bits[LAST]
    blank_begins |= after_newline & taken_before
    rest = after_newline & ~taken_before & ~inside
    while rest != uint64(0):
        place = trailing_zeros(rest)
        has_newline, is_known, point = _has_newline(text, i + place, end, tables.classes)
        if not is_known:
            return uint64(0), has_zero, False, point
        blank_begins |= uint64(not has_newline) << uint64(place)
        rest &= rest - ONE
    other_begins = others & ~other_before & ~_after(spaces, carry[SPACES]) & ~inside
    taking = other_begins | (carry[TAKING] & inside & others)
    for _ in range(3 if inside != uint64(0) else 0):  # the bytes of a character
        taking |= (taking << ONE) & inside & others
    inline = blanks & ~newlines
    joined = _after(letters, carry[LETTERS]) | _after(inline, carry[INLINE]) | _after(taking, carry[TAKING])
    begins = other_begins | blank_begins | (letters & ~joined) | _number_begins(bits[NUMBERS], inside, carry)
    begins = _with_contractions(text, i, end - i, begins & ~inside, apostrophes, uint64(0x20), carry)
    for k in range(3):
        carry[k] = bits[k] >> uint64(63)
    carry[SPACES], carry[BLANKS], carry[INLINE] = spaces >> uint64(63), blanks >> uint64(63), inline >> uint64(63)
    carry[NEWLINES], carry[TAKEN] = newlines >> uint64(63), taken >> uint64(63)
    carry[TAKING] = taking >> uint64(63)
    return begins & valid, has_zero, True, point


@part(forceinline=True)
def find_words(text, begin, i, end, tables, state):
    """Writes the places of words that begin in a window of a piece to tables.places, as distances from byte i.

    begin, end: of the piece. Returns how many, the byte at which the next window begins, whether there is a zero byte,
    and whether all classes are known; if not, state[CODE_POINT] is one whose is not, and the window ends before it. The
    last window also writes the end of the piece.
    """
    count, first, stop, places, has_zero = 0, i, min(i + WINDOW, end), tables.places, False
    while i < stop:
        if tables.rule == GPT2_WORDS:
            begins, is_zero, is_known, point = _gpt2_begins(text, i, begin, end, tables)
        else:
            begins, is_zero, is_known, point = _llama3_begins(text, i, begin, end, tables)
        if not is_known:
            state[CODE_POINT] = point
            return count, i, has_zero, False
        has_zero |= is_zero
        begins &= ~uint64(i == begin)  # which ends no word
        count += write_places(places, count, begins, i - first)
        i += 64
    if i >= end:
        i = end
        places[uint64(count)] = end - first
        count += 1
    return count, i, has_zero, True


@part(forceinline=True)
def _make_keys(text, first, start, count, has_zero, tables, runs):
    """Makes the keys of words, and asks the processor to load their sets.

    first: the byte from which the places count. start: where the first word begins. The key of a word of more than 16
    bytes, or with a zero byte, is zeros, as that of a free slot, whose value is 0.
    """
    places, keys, near, masks, at, num_long = tables.places, runs.keys, runs.near, tables.key_masks, start, 0
    for k in range(count):
        stop = first + int64(places[uint64(k)])
        q = uint64(4 * k)
        key, rest = keep_masked(text, at, masks, 2 * min(stop - at, 17), keys, 4 * k)
        j = near_set(near, key, rest)
        prefetch(near, int64(j << uint64(3)))
        num_long += stop - at > 16
        keys[q + uint64(2)] = j
        at = stop
    if num_long > 0:
        _hash_long(text, first, start, count, tables, runs)
    if has_zero:
        _drop_zeros(text, first, start, count, tables, runs)


@part()
def _hash_long(text, first, start, count, tables, runs):
    """Makes the hashes of words of more than 16 bytes, and asks the processor to load their sets."""
    for k in range(count):
        stop = first + int64(tables.places[uint64(k)])
        if 16 < stop - start <= LONGEST_KEY:
            run_hash = hash_of(text, start, stop - start)
            prefetch(runs.far, int64(far_set(runs.far, run_hash) << uint64(3)))
            runs.keys[uint64(4 * k + 3)] = run_hash
        start = stop


@part()
def _drop_zeros(text, first, start, count, tables, runs):
    """Makes the keys of words with a zero byte zeros."""
    for k in range(count):
        stop = first + int64(tables.places[uint64(k)])
        for byte in range(start, stop):
            if text[byte] == 0:
                runs.keys[4 * k : 4 * k + 3] = uint64(0)
        start = stop


@part(forceinline=True)
def _new_word(text, start, length, k, tables, runs, output, p):
    """Writes the ids of word number k, which RunTables.near does not have, at place p.

    Returns how many they are, -1 if one is of a special token.
    """
    out, ids, q = output.ids, runs.ids, uint64(4 * k)
    if 16 < length <= LONGEST_KEY:
        value = find_far(text, start, length, runs.keys[q + uint64(3)], runs.far, runs.spelled)
        if value != EMPTY:
            return emit(out, p, value, runs.pool)
    count = cut_word(text, start, start + length, tables, ids, tables.dead)
    if count == 0:
        for i in range(length):
            ids[i] = text[start + i]
        count = merge(length, tables.pairs, tables.merged, ids, runs.ranks[0])[0]
    for i in range(count):
        ids[i] = tables.ids[ids[i]]
    num_special = put_new(out, p, ids, count, tables.special, tables.special_to)
    if num_special > 0:
        output.state[REPLACED] += num_special
        return count if tables.special_to >= 0 else -1
    key, rest = runs.keys[q], runs.keys[q + ONE]
    if key != uint64(0) and count <= runs.pool.size:
        keep_in_slot(runs.keys[q + uint64(2)], key, rest, ids, count, out, runs)
    elif 16 < length <= LONGEST_KEY:
        keep_run(text, start, length, ids, count, out, runs)
    return count


@part(forceinline=True)
def _write_known(k, count, keys, near, pool, out, p):
    """Writes the ids of words from number k on, up to the first that RunTables.near does not have, at out[p:].

    Returns the number of that word, `count` if there is none, and the place after the ids.
    """
    while k < count:
        while k < count:
            q = uint64(4 * k)
            j = keys[q + uint64(2)]
            value = near[j + uint64(2)]
            size = num_ids(out, value)
            if not are_equal128(near, int64(j), keys, int64(q)) or size - ONE >= most_ids(out):
                break
            put_ids(out, p, value)
            if size > uint64(3):
                put_more(out, p + 3, near[j + uint64(3)])
            p += int64(size)
            k += 1
        if k == count:
            break
        q = uint64(4 * k)
        key, rest, j = keys[q], keys[q + ONE], keys[q + uint64(2)]
        if (near[j] ^ key) | (near[j + ONE] ^ rest) != uint64(0):
            slot = other_slot(near, j, key, rest)
            if slot == j:
                break
            j = slot
        if near[j + uint64(2)] == uint64(0):
            break
        p += emit_slot(out, p, near, j, pool)
        k += 1
    return k, p


@part(forceinline=True)
def _write_words(text, first, start, count, tables, runs, output, p):
    """Writes the ids of words whose keys are made. Returns the place after them, -1 for a special id.

    A word that is too long for the scratch memory is hard; at most one such word ends in a window.
    """
    places, k = tables.places, int64(0)
    while True:
        k, p = _write_known(k, count, runs.keys, runs.near, runs.pool, output.ids, p)
        if k == count:
            return p
        begin = first + int64(places[uint64(k - 1)]) if k > 0 else start
        stop = first + int64(places[uint64(k)])
        if stop - begin > LONGEST_WORD:
            put_hard(output, begin, stop, p, ONE_WORD)
        else:
            num_ids = _new_word(text, begin, stop - begin, k, tables, runs, output, p)
            if num_ids < 0:
                return int64(-1)
            p += num_ids
        k += 1


@jit()
def find_changes(pieces, tables, first, may_change):
    """Sets may_change[i] for the pieces, from number `first` on, that may not be their own normal form.

    A piece without a code point of class MAY_CHANGE is its own normal form. Returns the number of a piece with a code
    point whose class is not known, and the code point; or how many pieces there are, and 0.
    """
    text, classes = pieces.data, tables.classes
    for piece in range(first, pieces.starts.size):
        begin, end = pieces.starts[piece], pieces.stops[piece]
        for i in range(begin, end, 64):
            leads = leads64(text, i) & _below(end - i)
            while leads != uint64(0) and not may_change[piece]:
                point = decoded(text, i + trailing_zeros(leads))[0]
                if classes[point] == NOT_KNOWN:
                    return piece, point
                may_change[piece] = classes[point] == MAY_CHANGE
                leads &= leads - ONE
            if may_change[piece]:
                break
    return pieces.starts.size, int64(0)


@jit()
def encode_bytes(pieces, tables, runs, output):
    """Encodes pieces of text by byte-level BPE. Returns DONE, UNKNOWN_CODE_POINT, TOO_MANY_HARD or GIVES_SPECIAL.

    pieces: Text. tables: ByteTables. runs: RunTables. output: Output. It goes on as `encode_words` does; after
    UNKNOWN_CODE_POINT the caller fills tables.classes.
    """
    text, state, p = pieces.data, output.state, output.state[PLACE]
    for piece in range(state[PIECE], pieces.starts.size):
        begin, end = pieces.starts[piece], pieces.stops[piece]
        i, start, code, had_zero = state[BYTE], state[WORD], DONE, True
        if state[HAS_BEGUN] == 0:
            i = start = begin
            tables.carry[:] = uint64(0)
        while i < end and code == DONE:
            if state[NUM_HARD] == output.hard.shape[0]:
                code = TOO_MANY_HARD
                break
            first = i
            count, i, has_zero, is_known = find_words(text, begin, first, end, tables, state)
            if not is_known:
                code = UNKNOWN_CODE_POINT
            _make_keys(text, first, start, count, has_zero or had_zero, tables, runs)
            had_zero = has_zero  # which may be in the word that has not ended
            p = _write_words(text, first, start, count, tables, runs, output, p)
            if p < 0:
                return GIVES_SPECIAL
            if count > 0:
                start = first + int64(tables.places[uint64(count - 1)])
        if code != DONE:
            state[PIECE], state[BYTE], state[WORD], state[PLACE], state[HAS_BEGUN] = piece, i, start, p, 1
            return code
        state[HAS_BEGUN] = 0
        if pieces.tails[piece] >= 0:
            output.ids[p] = pieces.tails[piece]
            p += 1
        output.bounds[piece + 1] = p
    return DONE
