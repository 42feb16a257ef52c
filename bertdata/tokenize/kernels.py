"""The compiled loops that turn text into ids.

The contract is that of read/kernels.py: Python validates the arguments and allocates the arrays, and a kernel never
raises. A kernel that needs help returns a code that says which. Kernels take records of arrays (`Text`,
`WordPieceTables`, ...). tests/ compares every kernel with the `tokenizers` library.

Four words have a special meaning here. A *stop* is a byte that is not an ASCII letter or digit. A *run* is the text
between two stops. A *word* is what the pre-tokenizer passes to the model. A *value* is a uint64 that holds up to three
ids and their count, so that the ids of a frequent word are written by one store. The ids take 16 bits each if they are
stored as uint16, and 20 bits each if they are stored as uint32; the count lies above them.

Two kernels may run at the same time in two threads. They share only arrays that nobody writes to any more; every array
that changes belongs to one thread (see engine.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import int64, types, uint64
from numba.extending import intrinsic

from bertdata.jit import jit


@intrinsic
def _trailing_zeros(typing: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


PADDING = 80  # bytes that must be readable after the text
EMPTY = np.uint64(0xFFFFFFFFFFFFFFFF)  # key of a free slot; no run has these bytes
UNPACKED = np.uint64(15)  # count of a value whose ids do not fit into it
FOLD = np.uint64(0x2020202020202020)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
LOW32 = np.uint64(0xFFFFFFFF)
# Classes of code points for WordPiece, in the low 3 bits of an entry. 0 means that the entry is not known yet.
#   SILENT  the normalizer removes it          LETTER  it is part of a word
#   BREAK   it ends a word, like a space       ALONE   it ends a word and is a word itself, like a comma
#   HARD    its result depends on its neighbours, so the tokenizer must be asked
SILENT, LETTER, BREAK, ALONE, HARD = (np.uint64(n) for n in range(1, 6))
# Classes of code points for byte-level BPE. 0 means that the class is not known yet.
#   COMPOSING  the normal form NFC may change it or its neighbours
WORD, NUMBER, SPACE, OTHER, COMPOSING = 1, 2, 3, 4, 5
# What the kernels return: all text is encoded; the entry of state[CODE_POINT] is missing; `Output.hard` is full
DONE, UNKNOWN_CODE_POINT, TOO_MANY_HARD = 0, 1, 2
# Indexes of `Output.state`
PIECE, BYTE, PLACE, NUM_HARD, CODE_POINT = 0, 1, 2, 3, 4


class Text(NamedTuple):
    """Pieces of text, for example documents or lines."""

    data: Any  # uint8 [n]: valid UTF-8, at least PADDING bytes longer than bounds[-1]
    bounds: Any  # int64 [num_pieces + 1]: piece i is data[bounds[i] : bounds[i + 1]] and ends in a newline
    separators: Any  # bool [num_pieces]: whether `separator` is written after the ids of the piece
    separator: int  # token id


class WordPieceTables(NamedTuple):
    """What the WordPiece kernel knows about a tokenizer."""

    points: Any  # uint64 [0x110000, 2]: an entry for each code point (wordpiece.py packs them); 0: not known yet
    stop_values: Any  # uint64 [256]: value of each stop that is one ASCII byte; EMPTY for all other bytes
    fold: Any  # uint64: FOLD if the tokenizer lower-cases, else 0
    max_chars: int  # a word with more characters is unknown
    unk: int  # id of the unknown token
    edges: Any  # uint64 [power of two]: hash table of the trie's edges; see `_child`
    node_ids: Any  # int32 [num_nodes]: id of the token that ends at a node, -1 if none does


class BpeTables(NamedTuple):
    """What the byte-level BPE kernel knows about a tokenizer."""

    points: Any  # uint8 [0x110000]: class of each code point; 0: not known yet
    byte_ids: Any  # int64 [256]: id of each byte
    pairs: Any  # uint64 [2 * power of two]: hash table of the merges; see `add_pairs`
    longest: int  # bytes; a longer word is hard


class RunTables(NamedTuple):
    """Hash tables of the runs a thread has met, with the value of each, and scratch memory of that thread."""

    short: Any  # uint64 [2 * slots]: (run of up to 8 bytes, value); at most 2**19 slots, a power of two
    long: Any  # uint64 [4 * slots]: (first 8 bytes, other bytes, value, unused), for runs of 9 to 16 bytes
    used: Any  # int64 [2]: how many slots of each table are in use; a table is emptied when half of it is
    word: Any  # uint8 [m]: the bytes of a word
    ids: Any  # int64 [m]: the ids of a word


class Output(NamedTuple):
    """What a kernel writes."""

    ids: Any  # uint16 or uint32 [bounds[-1] + 4]: the ids; a store may write up to three places too many
    bounds: Any  # int64 [num_pieces + 1]: the ids of piece i are ids[bounds[i] : bounds[i + 1]]
    hard: Any  # int64 [h, 3]: runs that the tokenizer must encode, as (start, stop, place in ids)
    state: Any  # int64 [5]: where the kernel stands, so that it can continue; zeros and the first byte at the start


class Literals(NamedTuple):
    """Strings to search a text for."""

    data: Any  # uint8 [n]: the strings one after the other, in UTF-8
    bounds: Any  # int64 [num_strings + 1]: string t is data[bounds[t] : bounds[t + 1]]
    begins: Any  # bool [256]: whether a string begins with the byte


@intrinsic
def _load64(typing: Any, array: Any, offset: Any) -> Any:
    """The 8 bytes at a byte offset, any alignment."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        place = builder.gep(builder.bitcast(data, ir.IntType(8).as_pointer()), [args[1]])
        word = builder.load(builder.bitcast(place, ir.IntType(64).as_pointer()))
        word.align = 1
        return word

    return types.uint64(array, types.int64), generate


@intrinsic
def _store64(typing: Any, array: Any, offset: Any, value: Any) -> Any:
    """Writes 8 bytes at a byte offset, any alignment."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        place = builder.gep(builder.bitcast(data, ir.IntType(8).as_pointer()), [args[1]])
        builder.store(args[2], builder.bitcast(place, ir.IntType(64).as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(array, types.int64, types.uint64), generate


@intrinsic
def _stops64(typing: Any, array: Any, offset: Any) -> Any:
    """A bit for each of the 64 bytes at an offset: 1 where the byte is a stop. Compiles to vector instructions."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, vector = ir.IntType(8), ir.VectorType(ir.IntType(8), 64)

        def splat(value: int) -> Any:
            return ir.Constant(vector, [value] * 64)

        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        place = builder.gep(builder.bitcast(data, byte.as_pointer()), [args[1]])
        text = builder.load(builder.bitcast(place, vector.as_pointer()))
        text.align = 1
        letter = builder.icmp_unsigned("<", builder.sub(builder.or_(text, splat(0x20)), splat(ord("a"))), splat(26))
        digit = builder.icmp_unsigned("<", builder.sub(text, splat(ord("0"))), splat(10))
        stops = builder.not_(builder.or_(letter, digit))
        return builder.bitcast(stops, ir.IntType(64))

    return types.uint64(array, types.int64), generate


@jit()
def _put(out, p, value):
    """Writes the ids of a value at out[p:] and returns how many they are. Always writes three places."""
    if out.itemsize == 2:
        _store64(out, 2 * p, value)
        return int64(value >> uint64(48))
    _store64(out, 4 * p, (value & uint64(0xFFFFF)) | ((value & uint64(0xFFFFF00000)) << uint64(12)))
    out[p + 2] = (value >> uint64(40)) & uint64(0xFFFFF)
    return int64(value >> uint64(60))


@jit()
def _count(out, value):
    return value >> uint64(48) if out.itemsize == 2 else value >> uint64(60)


@jit()
def _pack(out, ids, count):
    """The value of ids[:count]."""
    bits, top = (uint64(16), uint64(48)) if out.itemsize == 2 else (uint64(20), uint64(60))
    if count > 3:
        return UNPACKED << top
    value = uint64(count) << top
    for k in range(count):
        value |= uint64(ids[k]) << (uint64(k) * bits)
    return value


@jit()
def _child(edges, node, byte):
    """The child of a trie's node along a byte, 0 if there is none.

    An edge is one uint64: the node in bits 40 to 63, the byte in bits 32 to 39, the child in bits 0 to 31.
    """
    key = (node << uint64(8)) | uint64(byte)
    mask = uint64(edges.size - 1)
    j = ((key * GOLDEN) >> uint64(32)) & mask
    while edges[j] != EMPTY:
        if edges[j] >> uint64(32) == key:
            return edges[j] & LOW32
        j = (j + uint64(1)) & mask
    return uint64(0)


@jit()
def _clear(table):
    for j in range(table.size):
        table[j] = EMPTY


@jit()
def grow_trie(text, bounds, roots, ids, edges, node_ids):
    """Adds token t, text[bounds[t] : bounds[t + 1]] with id ids[t], under node roots[t]. Returns the number of nodes.

    Nodes 0 and 1 are roots. edges: uint64, all EMPTY; its size is a power of two and at least twice the bytes of all
    tokens. node_ids: int32, all -1; its size is at least the bytes of all tokens + 2.
    """
    num_nodes = uint64(2)
    for t in range(ids.size):
        node = uint64(roots[t])
        for b in range(bounds[t], bounds[t + 1]):
            child = _child(edges, node, text[b])
            if child == uint64(0):
                key = (node << uint64(8)) | uint64(text[b])
                j = ((key * GOLDEN) >> uint64(32)) & uint64(edges.size - 1)
                while edges[j] != EMPTY:
                    j = (j + uint64(1)) & uint64(edges.size - 1)
                edges[j] = (key << uint64(32)) | num_nodes
                child = num_nodes
                num_nodes += uint64(1)
            node = child
        node_ids[node] = ids[t]
    return int64(num_nodes)


@jit()
def _wordpiece(word, size, num_chars, tables, ids):
    """Writes the ids of a normalized word of `size` bytes to `ids`, longest match first. Returns how many.

    A word that the vocabulary cannot spell is one unknown token.
    """
    if num_chars > tables.max_chars:
        ids[0] = tables.unk
        return 1
    count, start = 0, 0
    while start < size:
        node, best, stop = uint64(start > 0), int64(-1), start
        for b in range(start, size):
            node = _child(tables.edges, node, word[b])
            if node == uint64(0):
                break
            if tables.node_ids[node] >= 0:
                best, stop = int64(tables.node_ids[node]), b + 1
        if best < 0:
            ids[0] = tables.unk
            return 1
        ids[count] = best
        count += 1
        start = stop
    return count


@jit()
def _learn(text, start, length, tables, runs, out):
    """The value of an ASCII run."""
    for k in range(length):
        byte = text[start + k]
        runs.word[k] = byte | ((byte >> 1) & 0x20) if tables.fold != 0 else byte
    return _pack(out, runs.ids, _wordpiece(runs.word, length, length, tables, runs.ids))


@jit()
def wordpiece(pieces, tables, runs, output):
    """Encodes pieces of text. Returns DONE, UNKNOWN_CODE_POINT or TOO_MANY_HARD.

    pieces: Text. tables: WordPieceTables. runs: RunTables. output: Output. After UNKNOWN_CODE_POINT the caller adds the
    entry of output.state[CODE_POINT] to tables.points and calls the kernel again; it continues from output.state.

    A run that is in the tables is written by one store. Other text is read code point by code point.
    """
    text, bounds, separators = pieces.data, pieces.bounds, pieces.separators
    points, stop_values, fold = tables.points, tables.stop_values, tables.fold
    short, long, used, word, ids = runs.short, runs.long, runs.used, runs.word, runs.ids
    out, out_bounds, hard, state = output.ids, output.bounds, output.hard, output.state
    short_mask, long_mask = uint64(short.size // 2 - 1), uint64(long.size // 4 - 1)
    i, p, num_hard = state[BYTE], state[PLACE], state[NUM_HARD]
    for piece in range(state[PIECE], bounds.size - 1):
        end = bounds[piece + 1]
        i = max(i, bounds[piece])
        while i < end:
            base = i
            stops = _stops64(text, base)
            if end - base < 64:
                stops &= (uint64(1) << uint64(end - base)) - uint64(1)
            slow = stops == uint64(0)  # the run has 64 bytes or more
            while stops != uint64(0):
                s = base + _trailing_zeros(stops)
                stops &= stops - uint64(1)
                length = s - i
                stop_value = stop_values[text[uint64(s)]]
                if stop_value == EMPTY or length > 16:
                    slow = True
                    break
                key = _load64(text, i)
                if length <= 8:
                    key &= ~uint64(0) >> uint64(64 - 8 * length) if length > 0 else uint64(0)
                    key |= (key >> uint64(1)) & fold
                    j = ((key * GOLDEN) >> uint64(45)) & short_mask
                    while short[uint64(2) * j] != key and short[uint64(2) * j] != EMPTY:
                        j = (j + uint64(1)) & short_mask
                    if short[uint64(2) * j] == EMPTY:
                        if 2 * used[0] >= short.size // 2:
                            _clear(short)
                            used[0] = 0
                            j = ((key * GOLDEN) >> uint64(45)) & short_mask
                        used[0] += 1
                        short[uint64(2) * j] = key
                        short[uint64(2) * j + uint64(1)] = _learn(text, i, length, tables, runs, out)
                    value = short[uint64(2) * j + uint64(1)]
                else:
                    key |= (key >> uint64(1)) & fold
                    rest = _load64(text, i + 8) & (~uint64(0) >> uint64(128 - 8 * length))
                    rest |= (rest >> uint64(1)) & fold
                    h = (key ^ (rest * uint64(0xBF58476D1CE4E5B9))) * GOLDEN
                    j = (h >> uint64(45)) & long_mask
                    while (long[uint64(4) * j] != key or long[uint64(4) * j + uint64(1)] != rest) and long[
                        uint64(4) * j
                    ] != EMPTY:
                        j = (j + uint64(1)) & long_mask
                    if long[uint64(4) * j] == EMPTY:
                        if 2 * used[1] >= long.size // 4:
                            _clear(long)
                            used[1] = 0
                            j = (h >> uint64(45)) & long_mask
                        used[1] += 1
                        long[uint64(4) * j] = key
                        long[uint64(4) * j + uint64(1)] = rest
                        long[uint64(4) * j + uint64(2)] = _learn(text, i, length, tables, runs, out)
                    value = long[uint64(4) * j + uint64(2)]
                if _count(out, value) == UNPACKED:
                    slow = True
                    break
                p += _put(out, p, value)
                p += _put(out, p, stop_value)
                i = s + 1
            while slow:  # a word at a time, until a word ends before an ASCII byte
                start, size, num_chars, is_hard = i, int64(0), int64(0), False
                what, value = uint64(0), uint64(0)
                while True:
                    point, width = int64(text[i]), 1
                    if point >= 0xF0:
                        point = (point & 7) << 18 | int64(text[i + 1] & 63) << 12 | int64(text[i + 2] & 63) << 6
                        point = min(point | int64(text[i + 3] & 63), 0x10FFFF)
                        width = 4
                    elif point >= 0xE0:
                        point = (point & 15) << 12 | int64(text[i + 1] & 63) << 6 | int64(text[i + 2] & 63)
                        width = 3
                    elif point >= 0x80:
                        point = (point & 31) << 6 | int64(text[i + 1] & 63)
                        width = 2
                    entry = points[point, 0]
                    what = entry & uint64(7)
                    if what == LETTER:
                        if size + 16 <= word.size:
                            _store64(word, size, points[point, 1])
                            _store64(word, size + 8, entry >> uint64(32))
                        size += int64((entry >> uint64(8)) & uint64(255))
                        num_chars += int64((entry >> uint64(16)) & uint64(255))
                    elif what in (BREAK, ALONE):
                        value = points[point, 1]
                        break
                    elif what == HARD:
                        is_hard = True
                    elif what != SILENT:
                        state[PIECE], state[BYTE], state[PLACE], state[NUM_HARD] = piece, start, p, num_hard
                        state[CODE_POINT] = point
                        return UNKNOWN_CODE_POINT
                    i += width
                if is_hard or (size + 16 > word.size and num_chars <= tables.max_chars):
                    if num_hard == hard.shape[0]:
                        return TOO_MANY_HARD
                    hard[num_hard, 0], hard[num_hard, 1], hard[num_hard, 2] = start, i, p
                    num_hard += 1
                elif size > 0:
                    count = _wordpiece(word, size, num_chars, tables, ids)
                    for k in range(count):
                        out[p + k] = ids[k]
                    p += count
                p += _put(out, p, value)
                i += width
                slow = i < end and text[i] >= 0x80
        if separators[piece]:
            out[p] = pieces.separator
            p += 1
        out_bounds[piece + 1] = p
    state[NUM_HARD] = num_hard
    return DONE


def literals(strings):
    """The record of strings for kernels that search a text."""
    encoded = [string.encode() for string in strings]
    begins = np.zeros(256, np.bool_)
    begins[[string[0] for string in encoded if string]] = True
    bounds = np.append(0, np.cumsum([len(string) for string in encoded], dtype=np.int64))
    return Literals(np.frombuffer(b"".join(encoded) or b"\0", np.uint8), bounds, begins)


@jit()
def find_literals(text, bounds, strings, has_one):
    """Sets has_one[i], a bool, to whether text[bounds[i] : bounds[i + 1]] contains one of `strings` (Literals)."""
    for piece in range(has_one.size):
        has_one[piece] = False
        for i in range(bounds[piece], bounds[piece + 1]):
            if strings.begins[text[i]]:
                for t in range(strings.bounds.size - 1):
                    first, size = strings.bounds[t], strings.bounds[t + 1] - strings.bounds[t]
                    k = 0
                    while k < size and i + k < bounds[piece + 1] and text[i + k] == strings.data[first + k]:
                        k += 1
                    if k == size:
                        has_one[piece] = True
                        break
            if has_one[piece]:
                break


@jit()
def _merge(size, pairs, ids):
    """Merges the ids of a word's bytes, ids[:size], in place. Returns how many ids are left.

    Merges the pair of lowest rank first, and the leftmost of equal pairs, until no pair can be merged (Sennrich et al.,
    2016). Takes time in the square of `size`.
    """
    mask = uint64(pairs.size // 2 - 1)
    while size > 1:
        best, place = EMPTY, -1
        for k in range(size - 1):
            key = (uint64(ids[k]) << uint64(32)) | uint64(ids[k + 1])
            j = ((key * GOLDEN) >> uint64(40)) & mask
            while pairs[uint64(2) * j] != key and pairs[uint64(2) * j] != EMPTY:
                j = (j + uint64(1)) & mask
            if pairs[uint64(2) * j] == key and pairs[uint64(2) * j + uint64(1)] < best:
                best, place = pairs[uint64(2) * j + uint64(1)], k
        if place < 0:
            break
        ids[place] = int64(best & LOW32)
        size -= 1
        for k in range(place + 1, size):
            ids[k] = ids[k + 1]
    return size


@jit()
def add_pairs(lefts, rights, merged, pairs):
    """Fills the hash table of merges. Merge r joins ids lefts[r] and rights[r] to id merged[r].

    pairs: uint64 [2 * slots], all EMPTY. A slot is (left in the high half and right in the low half; rank in the high
    half and merged in the low half).
    """
    mask = uint64(pairs.size // 2 - 1)
    for rank in range(lefts.size):
        key = (uint64(lefts[rank]) << uint64(32)) | uint64(rights[rank])
        j = ((key * GOLDEN) >> uint64(40)) & mask
        while pairs[uint64(2) * j] != EMPTY:
            j = (j + uint64(1)) & mask
        pairs[uint64(2) * j] = key
        pairs[uint64(2) * j + uint64(1)] = (uint64(rank) << uint64(32)) | uint64(merged[rank])


@jit()
def _decode(text, i):
    """The code point at byte i of valid UTF-8 and its width."""
    point = int64(text[i])
    if point < 0x80:
        return point, 1
    if point < 0xE0:
        return (point & 31) << 6 | int64(text[i + 1] & 63), 2
    if point < 0xF0:
        return (point & 15) << 12 | int64(text[i + 1] & 63) << 6 | int64(text[i + 2] & 63), 3
    point = (point & 7) << 18 | int64(text[i + 1] & 63) << 12 | int64(text[i + 2] & 63) << 6 | int64(text[i + 3] & 63)
    return min(point, 0x10FFFF), 4


@jit()
def byte_level_bpe(pieces, left_out, tables, runs, output):
    """Encodes pieces of text by GPT-2's rule for words and by merges of bytes. Returns what `wordpiece` returns.

    pieces: Text; the newline that ends a piece is not encoded. left_out: bool [num_pieces], pieces that are hard as a
    whole; so is a piece with a COMPOSING code point. tables: BpeTables. runs: RunTables. output: Output.
    """
    text, bounds, separators = pieces.data, pieces.bounds, pieces.separators
    classes, byte_ids, pairs = tables.points, tables.byte_ids, tables.pairs
    short, long, used, ids = runs.short, runs.long, runs.used, runs.ids
    out, out_bounds, hard, state = output.ids, output.bounds, output.hard, output.state
    short_mask, long_mask = uint64(short.size // 2 - 1), uint64(long.size // 4 - 1)
    i, p, num_hard = state[BYTE], state[PLACE], state[NUM_HARD]
    for piece in range(state[PIECE], bounds.size - 1):
        end = bounds[piece + 1] - 1
        i = max(i, bounds[piece])
        is_hard = left_out[piece]
        while i < end and not is_hard:
            stop, a, b = i, text[i], text[i + 1]
            if a == ord("'") and i + 1 < end:
                if b == ord("s") or b == ord("t") or b == ord("m") or b == ord("d"):  # noqa: PLR1714
                    stop = i + 2
                elif i + 2 < end:
                    c = text[i + 2]
                    if (c == ord("e") and (b == ord("r") or b == ord("v"))) or (b == ord("l") and c == ord("l")):
                        stop = i + 3
            if stop == i:
                if a == ord(" ") and i + 1 < end:
                    stop = i + 1  # a space belongs to what follows, unless that is a space
                point, width = _decode(text, stop)
                kind = classes[point]
                if kind == SPACE and stop > i:
                    stop = i
                    point, width, kind = int64(a), 1, classes[a]
                if kind == COMPOSING:
                    is_hard = True
                    break
                last = stop
                while kind != 0:
                    last, stop = stop, stop + width
                    if stop >= end:
                        break
                    point, width = _decode(text, stop)
                    if classes[point] != kind:
                        if classes[point] != 0 and kind == SPACE and last > i:
                            stop = last  # the last of several spaces begins the next word
                        break
                if kind == 0 or (stop < end and classes[point] == 0):
                    state[PIECE], state[BYTE], state[PLACE], state[NUM_HARD] = piece, i, p, num_hard
                    state[CODE_POINT] = point
                    return UNKNOWN_CODE_POINT
            length = stop - i
            value, in_table, has_nul = UNPACKED, False, False
            slot, key, rest = uint64(0), uint64(0), uint64(0)
            if length <= 16:
                for k in range(i, stop):
                    if text[k] == 0:  # a key would not tell it from the end of the run
                        has_nul = True
                key = _load64(text, i)
                if length <= 8:
                    key &= ~uint64(0) >> uint64(64 - 8 * length)
                    slot = ((key * GOLDEN) >> uint64(45)) & short_mask
                    while short[uint64(2) * slot] != key and short[uint64(2) * slot] != EMPTY:
                        slot = (slot + uint64(1)) & short_mask
                    in_table = short[uint64(2) * slot] == key and not has_nul
                    value = short[uint64(2) * slot + uint64(1)]
                else:
                    rest = _load64(text, i + 8) & (~uint64(0) >> uint64(128 - 8 * length))
                    slot = (((key ^ (rest * uint64(0xBF58476D1CE4E5B9))) * GOLDEN) >> uint64(45)) & long_mask
                    while long[uint64(4) * slot] != EMPTY and (
                        long[uint64(4) * slot] != key or long[uint64(4) * slot + uint64(1)] != rest
                    ):
                        slot = (slot + uint64(1)) & long_mask
                    in_table = long[uint64(4) * slot] == key and not has_nul
                    value = long[uint64(4) * slot + uint64(2)]
            if in_table and _count(out, value) != UNPACKED:
                p += _put(out, p, value)
            elif length > tables.longest:
                if num_hard == hard.shape[0]:
                    return TOO_MANY_HARD
                hard[num_hard, 0], hard[num_hard, 1], hard[num_hard, 2] = i, stop, p
                num_hard += 1
            else:
                for k in range(length):
                    ids[k] = byte_ids[text[i + k]]
                count = _merge(length, pairs, ids)
                for k in range(count):
                    out[p + k] = ids[k]
                p += count
                if not in_table and length <= 8 and not has_nul:
                    if 2 * used[0] >= short.size // 2:
                        _clear(short)
                        used[0] = 0
                        slot = ((key * GOLDEN) >> uint64(45)) & short_mask
                    used[0] += 1
                    short[uint64(2) * slot] = key
                    short[uint64(2) * slot + uint64(1)] = _pack(out, ids, count)
                elif not in_table and length <= 16 and not has_nul:
                    if 2 * used[1] >= long.size // 4:
                        _clear(long)
                        used[1] = 0
                        slot = (((key ^ (rest * uint64(0xBF58476D1CE4E5B9))) * GOLDEN) >> uint64(45)) & long_mask
                    used[1] += 1
                    long[uint64(4) * slot] = key
                    long[uint64(4) * slot + uint64(1)] = rest
                    long[uint64(4) * slot + uint64(2)] = _pack(out, ids, count)
            i = stop
        if is_hard:
            p = out_bounds[piece]
            while num_hard > 0 and hard[num_hard - 1, 0] >= bounds[piece]:
                num_hard -= 1
            if num_hard == hard.shape[0]:
                return TOO_MANY_HARD
            hard[num_hard, 0], hard[num_hard, 1], hard[num_hard, 2] = bounds[piece], end, p
            num_hard += 1
        i = bounds[piece + 1]
        if separators[piece]:
            out[p] = pieces.separator
            p += 1
        out_bounds[piece + 1] = p
    state[NUM_HARD] = num_hard
    return DONE
