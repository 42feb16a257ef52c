"""Compiled loops that cut text into documents.

Python allocates the arrays, and a kernel never raises. tests/reference has a reference implementation of each kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import int64, types, uint64
from numba.extending import intrinsic

from bertdata.bits import NEWLINE, RETURN, SPACE, TAB, is_byte, load64, pointer_to, trailing_zeros
from bertdata.jit import jit

TEXT_PADDING = 128  # bytes after a text that a kernel may read or write
HIGH = np.uint64(0x8080808080808080)
MINUS = ord("-")
RECORD, COMMENT = ord(">"), ord(";")  # first bytes of special lines of FASTA


class CutDocuments(NamedTuple):
    """The output arrays of `cut` and `cut_fasta`."""

    text: Any  # uint8 [n + 1 + TEXT_PADDING] for n bytes of input: the documents, each followed by a newline
    offsets: Any  # int64 [m + 1]: document d is text[offsets[d] : offsets[d + 1] - 1]
    starts: Any  # int64 [m]: offset of the document in the input
    invalid: Any  # int64 [m]: offset of its first invalid byte in the input; -1: it is valid UTF-8
    used: Any  # int64 [1]: bytes of input consumed; the document that begins there is not complete


@intrinsic
def _copy_line(typing: Any, source: Any, i: Any, target: Any, p: Any) -> Any:
    """Copy the 64 bytes at source[i:] to target[p:].

    Returns two words with a bit for each byte: whether it is a newline, and whether it is not ASCII.
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


@jit()
def first_invalid(text, start, stop):
    """Return the index of the first invalid byte of UTF-8 in text[start:stop], as CPython reports it; -1 if all is
    valid.

    text must be at least 8 bytes longer than `stop`.
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
            low = 0xA0  # an overlong encoding
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
    """Find the documents in data[:size], as docs/format.md defines them. Returns the number of complete documents.

    data: uint8, TEXT_PADDING bytes longer than `size`. offset: of data[0] in the input. is_end: whether the input ends
    with these bytes, so that the last line and the last document are complete. by_line: whether each nonblank line is a
    document; else blank lines end documents. cuts: CutDocuments.

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
    """Find the records of FASTA in data[:size]: a line that begins with >, and the lines up to the next such line.

    Returns the number of complete records. A document in `cuts` is the record without its first line, without lines
    that begin with ; and without white space. is_at_head: whether the input begins with data[0]; else data[0] is any
    byte of a record. Text before the first record is a document, too. Lines before the first document are not consumed.
    starts[0] is -1 if there is no document; else its document may be incomplete. The first invalid byte refers to the
    raw lines, including comments.
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
            is_invalid = has_high and first_invalid(text, offsets[count], p) >= 0
            invalid[count] = offset + max(first_invalid(data, body, i), body) if is_invalid else -1
            text[p] = NEWLINE
            p += 1
            count += 1
            offsets[count], is_open, has_high = p, False, False
        if not is_open and count > 0:
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


@jit()
def may_be_special(text, size):
    """Return whether text[:size] has a NUL, -NaN, or Inf before white space or one of ,]} (a number in pyarrow).

    text: uint8, 3 bytes longer than `size`. A special value must end in text[:size].
    """
    found = False
    for i in range(size):  # without a branch, to compile to vector instructions
        a, b, c, d = text[i], text[i + 1], text[i + 2], text[i + 3]
        ends = (d <= SPACE) | (d == ord(",")) | (d == ord("]")) | (d == ord("}"))
        is_nan = (a == MINUS) & (b == ord("N")) & (c == ord("a")) & (d == ord("N"))
        found |= (a == 0) | is_nan | ((a == ord("I")) & (b == ord("n")) & (c == ord("f")) & ends)
    return found
