"""Every compiled loop of the build path: text → ids. Little is shared with the read path's kernels.

Contract as in read/kernels.py: Python validates and allocates, kernels never raise. What they cannot answer they
report. tests/reference/ holds the slow twin: the `tokenizers` library.

The words used here. A *stop* is a byte that is no ASCII letter or digit. A *run* is what lies between stops. A *word*
is what the pre-tokenizer gives to the model. A *value* is up to three ids and their count in one uint64, so that
writing a frequent word is one store: 3 x 16 bits and the count above them for uint16 ids, 3 x 20 bits for uint32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import int64, types, uint64
from numba.extending import intrinsic

from bertdata.jit import jit
from bertdata.keys import absorbed, purpose


@intrinsic
def _trailing_zeros(typing: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


PADDING = 80  # readable bytes that must follow the text
EMPTY = np.uint64(0xFFFFFFFFFFFFFFFF)  # key of a free slot; no run spells it
UNPACKED = np.uint64(15)  # count of a value whose ids do not fit: ask the vocabulary again
FOLD = np.uint64(0x2020202020202020)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
LOW32 = np.uint64(0xFFFFFFFF)
SPLIT_KEY = np.uint64(absorbed(purpose("split")))
# What a code point does, low 3 bits of its entry; 0: not probed yet
SILENT, LETTER, BREAK, ALONE, HARD = (np.uint64(n) for n in range(1, 6))
DONE, UNKNOWN_CODE_POINT, TOO_MANY_HARD = 0, 1, 2


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
    """One bit for each of the 64 bytes at an offset: 1 where it is no ASCII letter or digit. Vector instructions."""

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
    """Writes a value's ids; three places are written whatever the count."""
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
    bits, top = (uint64(16), uint64(48)) if out.itemsize == 2 else (uint64(20), uint64(60))
    if count > 3:
        return UNPACKED << top
    value = uint64(count) << top
    for k in range(count):
        value |= uint64(ids[k]) << (uint64(k) * bits)
    return value


@jit()
def _child(edges, node, byte):
    """The trie's child of a node along a byte, 0 if there is none. An edge is (node, byte, child) in one uint64."""
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
    """Adds tokens text[bounds[t] : bounds[t + 1]] under roots[t]. Returns the number of nodes; 0 and 1 are roots.

    edges: all EMPTY, a power of two in size, at least twice the bytes. node_ids int32, all -1, one for each byte + 2.
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
def _wordpiece(word, size, num_chars, max_chars, unk, edges, node_ids, ids):
    """The ids of a normalized word, longest match first, into ids [size]; returns how many. All bytes or one unk."""
    if num_chars > max_chars:
        ids[0] = unk
        return 1
    count, start = 0, 0
    while start < size:
        node, best, stop = uint64(start > 0), int64(-1), start
        for b in range(start, size):
            node = _child(edges, node, word[b])
            if node == uint64(0):
                break
            if node_ids[node] >= 0:
                best, stop = int64(node_ids[node]), b + 1
        if best < 0:
            ids[0] = unk
            return 1
        ids[count] = best
        count += 1
        start = stop
    return count


@jit()
def _learn(text, start, length, fold, max_chars, unk, edges, node_ids, word, ids, out):
    """The value of an ASCII run."""
    for k in range(length):
        byte = text[start + k]
        word[k] = byte | ((byte >> 1) & 0x20) if fold != 0 else byte
    return _pack(out, ids, _wordpiece(word, length, length, max_chars, unk, edges, node_ids, ids))


@jit()
def wordpiece(
    text, bounds, separators, separator, points, stop_values, fold, max_chars, unk, edges, node_ids,
    short, long, used, word, ids, out, out_bounds, hard, state,
):  # fmt: skip
    """Pieces of text → ids, each word by its run, its code points or, where `hard`, not at all.

    text uint8, PADDING bytes longer than bounds says; valid UTF-8. Piece i is text[bounds[i] : bounds[i + 1]] and ends
    in a newline. separators bool [n]: whether `separator` follows the piece. points uint64 [0x110000, 2]: what each
    code point does; stop_values uint64 [256]: the value of a stop, EMPTY where it ends no word. fold: FOLD for lower
    case, else 0. short uint64 [2 * slots], long uint64 [4 * slots], used int64 [2]: the run tables and their load; at
    most 2**19 slots. word uint8, ids int64: scratch. out: one place for each byte of text, and three. out_bounds
    int64 [n + 1]. hard int64 [h, 3]: runs left to the caller, as (start, stop, place in out). state int64 [5]: (piece,
    byte, place, hard runs, code point), zeros at first; where to go on, if the answer is UNKNOWN_CODE_POINT.
    """
    short_mask, long_mask = uint64(short.size // 2 - 1), uint64(long.size // 4 - 1)
    i, p, num_hard = state[1], state[2], state[3]
    for piece in range(state[0], bounds.size - 1):
        end = bounds[piece + 1]
        i = max(i, bounds[piece])
        while i < end:
            base = i
            stops = _stops64(text, base)
            if end - base < 64:
                stops &= (uint64(1) << uint64(end - base)) - uint64(1)
            slow = stops == uint64(0)  # a run of 64 bytes or more
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
                        short[uint64(2) * j + uint64(1)] = _learn(
                            text, i, length, fold, max_chars, unk, edges, node_ids, word, ids, out
                        )
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
                        long[uint64(4) * j + uint64(2)] = _learn(
                            text, i, length, fold, max_chars, unk, edges, node_ids, word, ids, out
                        )
                    value = long[uint64(4) * j + uint64(2)]
                if _count(out, value) == UNPACKED:
                    slow = True
                    break
                p += _put(out, p, value)
                p += _put(out, p, stop_value)
                i = s + 1
            while slow:  # word by word, until one ends before an ASCII byte
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
                        state[0], state[1], state[2], state[3], state[4] = piece, start, p, num_hard, point
                        return UNKNOWN_CODE_POINT
                    i += width
                if is_hard or (size + 16 > word.size and num_chars <= max_chars):
                    if num_hard == hard.shape[0]:
                        return TOO_MANY_HARD
                    hard[num_hard, 0], hard[num_hard, 1], hard[num_hard, 2] = start, i, p
                    num_hard += 1
                elif size > 0:
                    count = _wordpiece(word, size, num_chars, max_chars, unk, edges, node_ids, ids)
                    for k in range(count):
                        out[p + k] = ids[k]
                    p += count
                p += _put(out, p, value)
                i += width
                slow = i < end and text[i] >= 0x80
        if separators[piece]:
            out[p] = separator
            p += 1
        out_bounds[piece + 1] = p
    state[3] = num_hard
    return DONE


def literals(strings):
    """What the next kernels take: the bytes of strings, the bounds of each, and which bytes begin one."""
    encoded = [string.encode() for string in strings]
    begins = np.zeros(256, np.bool_)
    begins[[token[0] for token in encoded if token]] = True
    bounds = np.append(0, np.cumsum([len(token) for token in encoded], dtype=np.int64))
    return np.frombuffer(b"".join(encoded) or b"\0", np.uint8), bounds, begins


@jit()
def count_literals(text, stop, tokens, bounds, begins, counts):
    """How often text[:stop] has each of the strings tokens[bounds[t] : bounds[t + 1]], into counts int64 [t].

    Occurrences of one string do not overlap. begins bool [256]: whether a string begins with the byte.
    """
    free = np.zeros(counts.size, np.int64)
    for i in range(stop):
        if begins[text[i]]:
            for t in range(counts.size):
                size = bounds[t + 1] - bounds[t]
                if i < free[t] or i + size > stop:
                    continue
                k = 0
                while k < size and text[i + k] == tokens[bounds[t] + k]:
                    k += 1
                if k == size:
                    counts[t] += 1
                    free[t] = i + size


@jit()
def find_literals(text, bounds, tokens, token_bounds, begins, found):
    """Which pieces have one of the strings that count_literals takes, into found bool [n]."""
    for piece in range(found.size):
        found[piece] = False
        for i in range(bounds[piece], bounds[piece + 1]):
            if begins[text[i]]:
                for t in range(token_bounds.size - 1):
                    size = token_bounds[t + 1] - token_bounds[t]
                    k = 0
                    while k < size and i + k < bounds[piece + 1] and text[i + k] == tokens[token_bounds[t] + k]:
                        k += 1
                    if k == size:
                        found[piece] = True
                        break
            if found[piece]:
                break


WORD, NUMBER, SPACE, OTHER, COMPOSING = 1, 2, 3, 4, 5  # classes of code points; 0: not probed yet


@jit()
def _merge(size, pairs, ids):
    """The ids of a word from those of its bytes, in ids [size]; returns how many.

    The pair of lowest rank is merged first, the leftmost of equals, until no pair has a rank (Sennrich et al., 2016).
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
    """Fills the table of merges: (left, right) → rank and id of the result. pairs: all EMPTY, 2 * slots."""
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
def byte_level_bpe(
    text, bounds, separators, separator, left, classes, byte_ids, pairs, longest,
    short, long, used, ids, out, out_bounds, hard, state,
):  # fmt: skip
    """Pieces of text → ids, as `wordpiece` does it, by GPT-2's rule for words and merges of bytes.

    The newline that ends a piece is not text. classes uint8 [0x110000]. byte_ids int64 [256]: the id of each byte.
    Words of more than `longest` bytes are hard, and so are whole pieces that are `left`, bool [n], or have a COMPOSING
    code point. The other arguments are those of `wordpiece`.
    """
    short_mask, long_mask = uint64(short.size // 2 - 1), uint64(long.size // 4 - 1)
    i, p, num_hard = state[1], state[2], state[3]
    for piece in range(state[0], bounds.size - 1):
        end = bounds[piece + 1] - 1
        i = max(i, bounds[piece])
        whole = left[piece]
        while i < end and not whole:
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
                    whole = True
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
                    state[0], state[1], state[2], state[3], state[4] = piece, i, p, num_hard, point
                    return UNKNOWN_CODE_POINT
            length = stop - i
            value, known, has_nul = UNPACKED, False, False
            slot, key, rest = uint64(0), uint64(0), uint64(0)
            if length <= 16:
                for k in range(i, stop):
                    if text[k] == 0:  # which a key cannot tell from its end
                        has_nul = True
                key = _load64(text, i)
                if length <= 8:
                    key &= ~uint64(0) >> uint64(64 - 8 * length)
                    slot = ((key * GOLDEN) >> uint64(45)) & short_mask
                    while short[uint64(2) * slot] != key and short[uint64(2) * slot] != EMPTY:
                        slot = (slot + uint64(1)) & short_mask
                    known = short[uint64(2) * slot] == key and not has_nul
                    value = short[uint64(2) * slot + uint64(1)]
                else:
                    rest = _load64(text, i + 8) & (~uint64(0) >> uint64(128 - 8 * length))
                    slot = (((key ^ (rest * uint64(0xBF58476D1CE4E5B9))) * GOLDEN) >> uint64(45)) & long_mask
                    while long[uint64(4) * slot] != EMPTY and (
                        long[uint64(4) * slot] != key or long[uint64(4) * slot + uint64(1)] != rest
                    ):
                        slot = (slot + uint64(1)) & long_mask
                    known = long[uint64(4) * slot] == key and not has_nul
                    value = long[uint64(4) * slot + uint64(2)]
            if known and _count(out, value) != UNPACKED:
                p += _put(out, p, value)
            elif length > longest:
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
                if not known and length <= 8 and not has_nul:
                    if 2 * used[0] >= short.size // 2:
                        _clear(short)
                        used[0] = 0
                        slot = ((key * GOLDEN) >> uint64(45)) & short_mask
                    used[0] += 1
                    short[uint64(2) * slot] = key
                    short[uint64(2) * slot + uint64(1)] = _pack(out, ids, count)
                elif not known and length <= 16 and not has_nul:
                    if 2 * used[1] >= long.size // 4:
                        _clear(long)
                        used[1] = 0
                        slot = (((key ^ (rest * uint64(0xBF58476D1CE4E5B9))) * GOLDEN) >> uint64(45)) & long_mask
                    used[1] += 1
                    long[uint64(4) * slot] = key
                    long[uint64(4) * slot + uint64(1)] = rest
                    long[uint64(4) * slot + uint64(2)] = _pack(out, ids, count)
            i = stop
        if whole:
            p = out_bounds[piece]
            while num_hard > 0 and hard[num_hard - 1, 0] >= bounds[piece]:
                num_hard -= 1
            if num_hard == hard.shape[0]:
                return TOO_MANY_HARD
            hard[num_hard, 0], hard[num_hard, 1], hard[num_hard, 2] = bounds[piece], end, p
            num_hard += 1
        i = bounds[piece + 1]
        if separators[piece]:
            out[p] = separator
            p += 1
        out_bounds[piece + 1] = p
    state[3] = num_hard
    return DONE


@jit()
def mix(x):
    x = (x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
    return x ^ (x >> uint64(31))


@jit()
def hash_documents(data, offsets, out):
    """data uint8, offsets int64 [N + 1]: document i is data[offsets[i] : offsets[i + 1] - 1]. out uint64 [N]."""
    for i in range(out.size):
        h = SPLIT_KEY
        start = min(max(offsets[i], 0), data.size)
        stop = min(max(offsets[i + 1] - 1, start), data.size)
        at = start
        while at < stop:
            word = uint64(0)
            for k in range(min(8, stop - at)):
                word |= uint64(data[at + k]) << uint64(8 * k)
            h = (h ^ word) * GOLDEN
            h ^= h >> uint64(32)
            at += 8
        out[i] = mix(h ^ uint64(stop - start))
