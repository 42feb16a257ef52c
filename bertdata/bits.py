"""Operations on 64-bit words and on the bytes of arrays, which kernels cannot express with Python's operators."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

TAB, NEWLINE, RETURN, SPACE = 9, 10, 13, 32


@intrinsic
def trailing_zeros(typing: Any, word: Any) -> Any:
    """Return the index of the lowest set bit of a word that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


@intrinsic
def count_ones(typing: Any, word: Any) -> Any:
    """Return the number of set bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), generate


def pointer_to(context: Any, builder: Any, kind: Any, array: Any, offset: Any, target: Any) -> Any:
    """Generate a pointer to values of LLVM type `target`, at a byte offset in an array of numba type `kind`."""
    data = context.make_array(kind)(context, builder, array).data
    place = builder.gep(builder.bitcast(data, ir.IntType(8).as_pointer()), [offset])
    return builder.bitcast(place, target.as_pointer())


@intrinsic
def load64(typing: Any, array: Any, offset: Any) -> Any:
    """Return the 8 bytes at a byte offset, of any alignment."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.load(pointer_to(context, builder, signature.args[0], args[0], args[1], ir.IntType(64)))
        word.align = 1
        return word

    return types.uint64(array, types.int64), generate


@intrinsic
def store64(typing: Any, array: Any, offset: Any, value: Any) -> Any:
    """Write 8 bytes at a byte offset, of any alignment."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = pointer_to(context, builder, signature.args[0], args[0], args[1], ir.IntType(64))
        builder.store(args[2], place).align = 1
        return context.get_dummy_value()

    return types.void(array, types.int64, types.uint64), generate


@intrinsic
def keep_masked(typing: Any, array: Any, offset: Any, masks: Any, row: Any, kept: Any, place: Any) -> Any:
    """Write (16 bytes at a byte offset) & (a row of masks) to kept[place:], and return the result as two words.

    masks, kept: uint64; row, place: int64, even indices of their elements.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pair, number = ir.VectorType(ir.IntType(64), 2), ir.IntType(64)

        def pointer(which: int, offset: Any) -> Any:
            return pointer_to(context, builder, signature.args[which], args[which], offset, pair)

        def bytes_of(elements: Any) -> Any:
            return builder.shl(elements, ir.Constant(number, 3))

        text, mask = builder.load(pointer(0, args[1])), builder.load(pointer(2, bytes_of(args[3])))
        text.align, mask.align = 1, 8
        key = builder.and_(text, mask)
        builder.store(key, pointer(4, bytes_of(args[5]))).align = 8
        halves = [builder.extract_element(key, ir.Constant(ir.IntType(32), k)) for k in range(2)]
        return context.make_tuple(builder, signature.return_type, halves)

    kind = types.UniTuple(types.uint64, 2)
    return kind(array, types.int64, masks, types.int64, kept, types.int64), generate


@intrinsic
def are_equal128(typing: Any, first: Any, i: Any, second: Any, k: Any) -> Any:
    """Return whether first[i : i + 2] and second[k : k + 2] are equal. Both arrays are uint64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pair, number = ir.VectorType(ir.IntType(64), 2), ir.IntType(64)
        words = []
        for which in (0, 2):
            offset = builder.shl(args[which + 1], ir.Constant(number, 3))
            words.append(builder.load(pointer_to(context, builder, signature.args[which], args[which], offset, pair)))
            words[-1].align = 8
        differs = builder.bitcast(builder.icmp_unsigned("!=", *words), ir.IntType(2))
        return builder.icmp_unsigned("==", differs, ir.Constant(ir.IntType(2), 0))

    return types.boolean(first, types.int64, second, types.int64), generate


def request(builder: Any, place: Any) -> None:
    """Generate a request to the processor to load the 64 bytes at a pointer to bytes."""
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
    function = builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
    builder.call(function, [place, number(0), number(3), number(1)])


@intrinsic
def prefetch(typing: Any, array: Any, offset: Any) -> Any:
    """Ask the processor to load the 64 bytes at a byte offset, and do not wait."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        request(builder, pointer_to(context, builder, signature.args[0], args[0], args[1], ir.IntType(8)))
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


def bits64(context: Any, builder: Any, signature: Any, args: Any, is_set: Any) -> Any:
    """Generate a word with a bit for each of the 64 bytes at an offset. is_set: generates the test of a byte vector.

    The array and the offset are the first two arguments of the intrinsic.
    """
    vector = ir.VectorType(ir.IntType(8), 64)
    text = builder.load(pointer_to(context, builder, signature.args[0], args[0], args[1], vector))
    text.align = 1
    return builder.bitcast(is_set(builder, text), ir.IntType(64))


def is_byte(builder: Any, text: Any, byte: int) -> Any:
    """Generate the comparison of a vector of 64 bytes with `byte`."""
    return builder.icmp_unsigned("==", text, ir.Constant(text.type, [byte] * 64))


def is_among(builder: Any, text: Any, first: int, count: int) -> Any:
    """Generate the test whether each of 64 bytes is one of the `count` bytes from `first` on."""
    lowest, number = (ir.Constant(text.type, [value] * 64) for value in (first, count))
    return builder.icmp_unsigned("<", builder.sub(text, lowest), number)
