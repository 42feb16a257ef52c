"""Code points, and tests of 64 bytes at a time, which compile to vector instructions."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
from llvmlite import ir
from numba import int64, types, uint64
from numba.extending import intrinsic

from bertdata.bits import bits64, count_ones, pointer_to, trailing_zeros
from bertdata.jit import cpu_has, part
from bertdata.tokenize.kernels.records import RANGES


def ranges(*pairs: str) -> Any:
    """Return uint8 [RANGES, 2], for `in_ranges64`, from ranges of bytes, each given as its first and last byte."""
    return np.array([(ord(pair[0]), ord(pair[1]) - ord(pair[0])) for pair in (pairs * RANGES)[:RANGES]], np.uint8)


@intrinsic
def in_ranges64(typing: Any, array: Any, offset: Any, ranges: Any) -> Any:
    """Return a word with a bit for each of 64 bytes: 1 if it is in one of RANGES ranges (least, most - least).

    Constant ranges are part of the compiled code.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bounds, lane = context.make_array(signature.args[2])(context, builder, args[2]).data, ir.IntType(32)

        def splat(place: int, kind: Any) -> Any:
            bound = builder.load(builder.gep(bounds, [ir.Constant(ir.IntType(64), place)]))
            vector = builder.insert_element(ir.Constant(kind, ir.Undefined), bound, lane(0))
            return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(lane, 64), [0] * 64))

        def is_set(builder: Any, text: Any) -> Any:
            hits = [
                builder.icmp_unsigned("<=", builder.sub(text, splat(2 * k, text.type)), splat(2 * k + 1, text.type))
                for k in range(RANGES)
            ]
            return reduce(builder.or_, hits)

        return bits64(context, builder, signature, args, is_set)

    return types.uint64(array, types.int64, ranges), generate


@part(forceinline=True)
def decoded(text, i):
    """Return the code point at byte i of valid UTF-8 and its width."""
    point = int64(text[i])
    if point < 0x80:
        return point, 1
    if point < 0xE0:
        return (point & 31) << 6 | int64(text[i + 1] & 63), 2
    if point < 0xF0:
        return (point & 15) << 12 | int64(text[i + 1] & 63) << 6 | int64(text[i + 2] & 63), 3
    point = (point & 7) << 18 | int64(text[i + 1] & 63) << 12 | int64(text[i + 2] & 63) << 6 | int64(text[i + 3] & 63)
    return min(point, 0x10FFFF), 4


@part(forceinline=True)
def last_begin(text, begin, i):
    """Return the first byte of the code point that contains byte i; at least `begin`."""
    while text[i] & 0xC0 == 0x80 and i > begin:
        i -= 1
    return i


@intrinsic
def _compress64(typing: Any, places: Any, count: Any, bits: Any, distance: Any) -> Any:
    """Implement `write_places` with an instruction of AVX-512 VBMI2."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        places, count, bits, distance = args
        bytes64, shorts32, number = ir.VectorType(ir.IntType(8), 64), ir.VectorType(ir.IntType(16), 32), ir.IntType(32)
        mask = ir.VectorType(ir.IntType(1), 64)
        kind = ir.FunctionType(bytes64, [bytes64, bytes64, mask])
        compress = builder.module.declare_intrinsic("llvm.x86.avx512.mask.compress.v64i8", (), kind)
        all_places, none = ir.Constant(bytes64, list(range(64))), ir.Constant(bytes64, [0] * 64)
        found = builder.call(compress, [all_places, none, builder.bitcast(bits, mask)])
        first = builder.insert_element(
            ir.Constant(shorts32, ir.Undefined), builder.trunc(distance, ir.IntType(16)), number(0)
        )
        first = builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(number, 32), [0] * 32))

        def store(half: int) -> None:
            lanes = ir.Constant(ir.VectorType(number, 32), list(range(32 * half, 32 * half + 32)))
            values = builder.add(builder.zext(builder.shuffle_vector(found, found, lanes), shorts32), first)
            offset = builder.mul(builder.add(count, ir.Constant(count.type, 32 * half)), ir.Constant(count.type, 2))
            place = pointer_to(context, builder, signature.args[0], places, offset, shorts32)
            builder.store(values, place).align = 1

        store(0)
        number_of = builder.ctpop(bits)
        with builder.if_then(builder.icmp_unsigned(">", number_of, ir.Constant(number_of.type, 32)), likely=False):
            store(1)
        return number_of

    return types.int64(places, types.int64, types.uint64, types.int64), generate


@part(forceinline=True)
def _places_one_by_one(places, count, bits, distance):
    """Implement `write_places` on any processor."""
    num_places = count_ones(bits)
    for k in range(count, count + num_places, 8):  # eight at a time; excess ones are overwritten
        for q in range(8):
            places[uint64(k + q)] = distance + trailing_zeros(bits | (uint64(1) << uint64(63)))
            bits &= bits - uint64(1)
    return num_places


# Writes the indices of the set bits, each plus `distance`, to places[count:], and returns their number. places: uint16
# [at least count + 64]. Elements after the written ones may be overwritten.
write_places = _compress64 if cpu_has("avx512vbmi2") else _places_one_by_one
