"""Compiled loops over the text of a build (except tokenization) and over the ids of an import.

Python allocates the arrays, and a kernel never raises. tests/reference has a reference implementation of each kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types, uint64
from numba.extending import intrinsic

from bertdata.bits import RETURN, SPACE, TAB, bits64, count_ones, is_among, is_byte, load64, trailing_zeros
from bertdata.jit import inline, jit, part
from bertdata.keys import GOLDEN, absorbed, mix, purpose

SPLIT_KEY = np.uint64(absorbed(purpose("split")))


class Literals(NamedTuple):
    """Strings to search a text for."""

    data: Any  # uint8 [n]: the concatenated strings, in UTF-8
    bounds: Any  # int64 [num_strings + 1]: string t is data[bounds[t] : bounds[t + 1]]
    first_bytes: Any  # uint8 [m]: the distinct first bytes of the strings


@intrinsic
def _equal64(typing: Any, array: Any, offset: Any, byte: Any) -> Any:
    """Return a word with a bit for each of 64 bytes at an offset: 1 for `byte`. Compiles to vector instructions."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def is_set(builder: Any, text: Any) -> Any:
            lane = ir.IntType(32)
            first = builder.insert_element(ir.Constant(text.type, ir.Undefined), args[2], lane(0))
            every = builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(lane, 64), [0] * 64))
            return builder.icmp_unsigned("==", text, every)

        return bits64(context, builder, signature, args, is_set)

    return types.uint64(array, types.int64, types.uint8), generate


@intrinsic
def _spaces64(typing: Any, array: Any, offset: Any) -> Any:
    """Return a word with a bit for each of 64 bytes: 1 for ASCII white space. Compiles to vector instructions."""

    def is_set(builder: Any, text: Any) -> Any:
        return builder.or_(is_byte(builder, text, SPACE), is_among(builder, text, TAB, RETURN - TAB + 1))

    return types.uint64(array, types.int64), lambda *code: bits64(*code, is_set)


def literals(strings):
    """Return the strings as Literals for `count_literals`."""
    encoded = [string.encode() for string in strings]
    bounds = np.append(0, np.cumsum([len(string) for string in encoded], dtype=np.int64))
    first_bytes = np.array(sorted({string[0] for string in encoded if string}), np.uint8)
    return Literals(np.frombuffer(b"".join(encoded) or b"\0", np.uint8), bounds, first_bytes)


@jit(arrays=True)
def count_literals(text, size, strings, counts):
    """Count how often each of `strings` occurs in text[:size], into counts int64 [num_strings].

    text: uint8, TEXT_PADDING bytes longer than `size`. strings: Literals. Occurrences of one string do not overlap.
    """
    free = np.zeros(counts.size, np.int64)
    for base in range(0, size, 64):
        length = min(size - base, 64)
        hits = uint64(0)
        for byte in strings.first_bytes:
            hits |= _equal64(text, base, byte)
        if length < 64:
            hits &= (uint64(1) << uint64(length)) - uint64(1)
        while hits != uint64(0):
            i = base + trailing_zeros(hits)
            hits &= hits - uint64(1)
            for t in range(counts.size):
                first, length = strings.bounds[t], strings.bounds[t + 1] - strings.bounds[t]
                if i < free[t] or i + length > size:
                    continue
                k = 0
                while k < length and text[i + k] == strings.data[first + k]:
                    k += 1
                if k == length:
                    counts[t] += 1
                    free[t] = i + length


@jit()
def _bounds(data, offsets, gap, i):
    """Return the start and the end of document i in data."""
    start = min(max(offsets[i], 0), data.size)
    return start, min(max(offsets[i + 1] - gap, start), data.size)


@jit()
def count_words(data, offsets, gap, counts):
    """Write the number of words of each document to counts int64 [N]. No branch depends on the bytes.

    A word is a longest run of bytes that are not ASCII white space: space, tab, LF, VT, FF and CR. data: uint8,
    TEXT_PADDING bytes longer than the documents. offsets int64 [N + 1]: document i is
    data[offsets[i] : offsets[i + 1] - gap].
    """
    for i in range(counts.size):
        start, stop = _bounds(data, offsets, gap, i)
        count, before = 0, uint64(1)  # whether the previous byte is white space
        for base in range(start, stop, 64):
            length, spaces = min(stop - base, 64), _spaces64(data, base)
            begins = ~spaces & ((spaces << uint64(1)) | before)
            count += count_ones(begins & (~uint64(0) >> uint64(64 - length)))
            before = spaces >> uint64(63)
        counts[i] = count


_mix = inline()(mix)


@part()
def _absorbed(h, word):
    h = (h ^ word) * GOLDEN
    return h ^ (h >> uint64(32))


@jit()
def hash_documents(data, offsets, gap, out):
    """Write the hash of each document's bytes to out uint64 [N]; docs/determinism.md defines the hash.

    data uint8, offsets int64 [N + 1]: document i is data[offsets[i] : offsets[i + 1] - gap].
    """
    for i in range(out.size):
        place, stop = _bounds(data, offsets, gap, i)
        h, length = SPLIT_KEY, stop - place
        for _ in range(length >> 3):
            h = _absorbed(h, load64(data, place))
            place += 8
        if place < stop:
            word = uint64(0)
            for k in range(stop - place):
                word |= uint64(data[place + k]) << uint64(8 * k)
            h = _absorbed(h, word)
        out[i] = _mix(h ^ uint64(length))


@jit()
def copy_ranges(source, ranges, out):
    """Concatenate source[start:stop] for each row (start, stop) of ranges int64 [n, 2] into `out`, until it is full."""
    place = 0
    for k in range(ranges.shape[0]):
        start = min(max(ranges[k, 0], 0), source.size)
        stop = min(max(ranges[k, 1], start), source.size)
        length = min(stop - start, out.size - place)
        for i in range(length):
            out[place + i] = source[start + i]
        place += length


@jit()
def count_special(ids, number_of, plain, counts):
    """Count the special ids in ids [n], integers of any dtype except uint64, into counts int64 [num_special].

    number_of int32 [V]: the index of each special id, -1 for all other ids. plain: a half-open range of ids without a
    special one; 64 ids inside it are checked at once, ids outside it one by one. Stops at the first id outside the
    vocabulary and returns its index, or -1 if there is none.
    """
    start, stop = plain
    for base in range(0, ids.size, 64):
        block = ids[base : base + 64]
        if block.size == 64:
            smallest = largest = block[0]
            for k in range(64):  # a constant count, to compile to vector instructions
                smallest, largest = min(smallest, block[k]), max(largest, block[k])
            if smallest >= start and largest < stop:
                continue
        for k in range(block.size):
            token = np.int64(block[k])
            if token < 0 or token >= number_of.size:
                return base + k
            if number_of[token] >= 0:
                counts[number_of[token]] += 1
    return -1
