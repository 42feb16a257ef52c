"""The compiled loops that cut text, and ids, into documents.

Python allocates the arrays, and a kernel never raises. tests/reference has a slow reference implementation of each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import int64, types, uint16, uint64
from numba.extending import intrinsic

from bertdata.bits import bits64, is_byte, load64, pointer_to, trailing_zeros
from bertdata.jit import jit, part

PADDING = 128  # bytes after a text that a kernel may read or write
HIGH = np.uint64(0x8080808080808080)
NEWLINE, RETURN, TAB, SPACE, MINUS = 10, 13, 9, 32, 45
RECORD, COMMENT = ord(">"), ord(";")  # what lines of FASTA begin with


class Cuts(NamedTuple):
    """What `cut` and `cut_fasta` write."""

    text: Any  # uint8 [n + 1 + PADDING] for n bytes of input: the documents, each followed by a newline
    offsets: Any  # int64 [m + 1]: document d is text[offsets[d] : offsets[d + 1] - 1]
    starts: Any  # int64 [m]: where the document begins in the input
    invalid: Any  # int64 [m]: where the first invalid byte of the document is in the input; -1: it is valid UTF-8
    used: Any  # int64 [1]: bytes of input that are done; the document that begins there is not complete


@intrinsic
def _copy_line(typing: Any, source: Any, i: Any, target: Any, p: Any) -> Any:
    """Copies the 64 bytes at source[i:] to target[p:].

    Returns two words with a bit for each byte: 1 where it is a newline, and 1 where it is not ASCII.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector, kinds = ir.VectorType(ir.IntType(8), 64), signature.args
        text = builder.load(pointer_to(context, builder, kinds[0], args[0], args[1], vector))
        text.align = 1
        builder.store(text, pointer_to(context, builder, kinds[2], args[2], args[3], vector)).align = 1
        high = builder.icmp_signed("<", text, ir.Constant(vector, [0] * 64))
        words = [builder.bitcast(bits, ir.IntType(64)) for bits in (is_byte(builder, text, NEWLINE), high)]
        return context.make_tuple(builder, signature.return_type, words)

    return types.UniTuple(types.uint64, 2)(source, types.int64, target, types.int64), generate


@intrinsic
def _special64(typing: Any, array: Any, offset: Any) -> Any:
    """A bit for each of the 64 bytes at an offset: 1 where it is NUL, or begins -N or In. Reads 65 bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        after = builder.add(args[1], ir.Constant(args[1].type, 1))
        following = pointer_to(context, builder, signature.args[0], args[0], after, ir.VectorType(ir.IntType(8), 64))

        def is_set(builder: Any, text: Any) -> Any:
            second = builder.load(following)
            second.align = 1
            hits = is_byte(builder, text, 0)
            for pair in (b"-N", b"In"):
                both = builder.and_(is_byte(builder, text, pair[0]), is_byte(builder, second, pair[1]))
                hits = builder.or_(hits, both)
            return hits

        return bits64(context, builder, signature, args, is_set)

    return types.uint64(array, types.int64), generate


@jit()
def first_invalid(text, start, stop):
    """The index of the first byte of text[start:stop] that is not valid UTF-8, as CPython reports it; -1: all is valid.

    text must have 8 bytes more than `stop`.
    """
    i = start
    while i < stop:
        high = load64(text, i) & HIGH
        if high == uint64(0):
            i += 8
            continue
        i += trailing_zeros(high) >> 3
        if i >= stop:
            return -1
        lead, low, most = text[i], 0x80, 0xBF
        width = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        if lead < 0xC2 or lead > 0xF4 or i + width > stop:
            return i
        if lead == 0xE0:
            low = 0xA0  # a shorter sequence would do
        elif lead == 0xED:
            most = 0x9F  # surrogates
        elif lead == 0xF0:
            low = 0x90
        elif lead == 0xF4:
            most = 0x8F  # above U+10FFFF
        if text[i + 1] < low or text[i + 1] > most:
            return i
        for k in range(i + 2, i + width):
            if text[k] & 0xC0 != 0x80:
                return i
        i += width
    return -1


@jit()
def cut(data, size, offset, is_end, by_line, cuts):
    """Finds the documents in data[:size], as docs/format.md says. Returns how many are complete.

    data: uint8, PADDING bytes longer than `size`. offset: of data[0] in the input. is_end: whether the input ends with
    these bytes, so that the last line and the last document are complete. by_line: whether each line that is not blank
    is a document; else blank lines end documents. cuts: Cuts.

    A document in `cuts` has its lines joined by newlines, and may hold invalid bytes.
    """
    text, offsets, starts, invalid = cuts.text, cuts.offsets, cuts.starts, cuts.invalid
    i, p, count, is_open = int64(0), int64(0), 0, False
    offsets[0], cuts.used[0] = 0, 0
    while i < size:
        line, q, has_high, is_whole = i, p, False, False
        while i < size and not is_whole:
            newlines, high = _copy_line(data, i, text, q)
            length = min(size - i, 64)
            if length < 64:
                newlines &= (uint64(1) << uint64(length)) - uint64(1)
            if newlines != uint64(0):
                length, is_whole = trailing_zeros(newlines), True
            if length < 64:
                high &= (uint64(1) << uint64(length)) - uint64(1)
            has_high |= high != uint64(0)
            i += length
            q += length
        if not (is_whole or is_end):
            break
        k = line
        while k < i and (data[k] == SPACE or data[k] == TAB or data[k] == RETURN):  # noqa: PLR1714
            k += 1
        if k < i:  # the line is not blank
            if not is_open:
                starts[count], invalid[count], is_open = offset + line, -1, True
            if has_high and invalid[count] < 0:
                bad = first_invalid(data, line, i)
                if bad >= 0:
                    invalid[count] = offset + bad
            if is_whole and data[i - 1] == RETURN:
                q -= 1
            text[q] = NEWLINE
            p = q + 1
        i += is_whole
        if is_open and (by_line or k == i - is_whole or i >= size and is_end):
            count += 1
            offsets[count], is_open = p, False
        if not is_open:
            cuts.used[0] = i
    return count


@jit()
def cut_fasta(data, size, offset, is_end, is_at_head, cuts):
    """The same for records of FASTA, each a line that begins with > and the lines up to the next such line.

    A document in `cuts` is the record without the first line, without lines that begin with ; and without white space.
    is_at_head: whether no record has begun before data[0]; else data[0] is the beginning or any byte of one. Text
    before the first record is a document, too. starts[0] is -1 if there is no document; else it may be that of one
    that is not complete.
    """
    text, offsets, starts, invalid = cuts.text, cuts.offsets, cuts.starts, cuts.invalid
    i, p, count, has_high, body = int64(0), int64(0), 0, False, int64(0)
    is_open = not is_at_head and size > 0 and data[0] != RECORD
    offsets[0], cuts.used[0], starts[0] = 0, 0, offset if is_open else -1
    while i < size or (is_open and is_end):
        stop = i
        while stop < size and data[stop] != NEWLINE:
            stop += 1
        if stop == size and not is_end:
            break
        is_first = i < size and data[i] == RECORD
        if is_open and (is_first or i >= size):
            invalid[count] = _invalid_in_lines(data, body, i, text, offsets[count], p, offset) if has_high else -1
            text[p] = NEWLINE
            p += 1
            count += 1
            offsets[count], is_open, has_high = p, False, False
        if not is_open:
            cuts.used[0] = i
        if is_first:
            starts[count], is_open, body = offset + i, True, min(stop + 1, size)
        elif i < stop and data[i] != COMMENT:
            before, high = p, data[i] & 0
            for k in range(i, stop):
                byte = data[k]
                text[p] = byte
                high |= byte
                p += (byte != SPACE) & (byte != TAB) & (byte != RETURN)
            has_high |= high >= 0x80
            if p > before and not is_open:
                starts[count], is_open, body = offset + i, True, i
        i = min(stop + 1, size)
    return count


@part()
def _invalid_in_lines(data, start, stop, text, first, last, offset):
    """Where in the input the first invalid byte of text[first:last] is, which are the lines data[start:stop]; or -1."""
    bad = first_invalid(text, first, last)
    if bad < 0:
        return -1
    left, is_comment, is_begin = bad - first, False, True
    for k in range(start, stop):
        byte = data[k]
        is_comment = byte == COMMENT if is_begin else is_comment
        is_begin = byte == NEWLINE
        if is_comment or byte in (NEWLINE, SPACE, TAB, RETURN):
            continue
        if left == 0:
            return offset + k
        left -= 1
    return -1


@jit()
def lay(data, offsets, text, laid, invalid):
    """Copies the values data[offsets[i] : offsets[i + 1]] to `text`, a newline after each.

    text: uint8, PADDING bytes longer than the values and their newlines. laid: int64 [n + 1], where each value begins
    in `text`. invalid: bool [n], whether it is not valid UTF-8.
    """
    p = int64(0)
    for i in range(invalid.size):
        laid[i] = p
        for k in range(offsets[i], offsets[i + 1]):
            text[p] = data[k]
            p += 1
        invalid[i] = first_invalid(text, laid[i], p) >= 0
        text[p] = NEWLINE
        p += 1
    laid[invalid.size] = p


@jit()
def may_be_special(text, size):
    """Whether text[:size] has a NUL, -NaN, or Inf before white space or one of ,]} (which pyarrow takes for a number).

    text: uint8, PADDING bytes longer than `size`.
    """
    for base in range(0, size, 64):
        hits = _special64(text, base)
        while hits != uint64(0):
            i = base + trailing_zeros(hits)
            hits &= hits - uint64(1)
            if i < size and text[i] == 0:
                return True
            if i + 3 < size:
                third, fourth = text[i + 2], text[i + 3]
                if text[i] == MINUS and third == ord("a") and fourth == ord("N"):
                    return True
                if text[i] != MINUS and third == ord("f") and _ends_number(fourth):
                    return True
    return False


@part()
def _ends_number(byte):
    return byte in (SPACE, TAB, RETURN, NEWLINE, ord(","), ord("]"), ord("}"))


@jit()
def find_token(ids, token, ends):
    """Writes i + 1 for each ids[i] that is `token` to ends int64 [n + 1], and returns how many. ids: [n] integers."""
    count = 0
    for base in range(0, ids.size, 64):
        block = ids[base : base + 64]
        if block.size == 64:
            hits = uint16(0)
            for k in range(64):  # a constant number, so that it compiles to vector instructions
                hits = uint16(hits + uint16(block[k] == token))
            if hits == 0:
                continue
        for k in range(block.size):
            ends[count] = base + k + 1
            count += block[k] == token
    return count
