"""The compiled loops that turn text into ids.

The contract is that of read/kernels.py: Python validates the arguments and allocates the arrays, and a kernel never
raises. A kernel that needs help returns a code that says which. Kernels take records of arrays (`Text`,
`WordPieceTables`, ...). tests/ compares every kernel with the `tokenizers` library.

Four words have a special meaning here. A *word* is what the pre-tokenizer passes to the model. A *run* is text whose
ids depend on nothing else: a word as it stands in the text, or for BERT the text between two stops. A *stop* is an
ASCII byte that is not a letter or digit. A *value* is a uint64 that holds up to three ids and their count, so that the
ids of a frequent run are written by one store. The ids take 16 bits each if they are stored as uint16, and 20 bits each
if they are stored as uint32; the count lies above them. If a run has more ids, its value says where they are in the
pool.

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
# What the kernels return: all text is encoded; the entry of state[CODE_POINT] is missing; what `tokenizers` does with
# the code points state[BEFORE] and state[CODE_POINT] side by side is missing; `Output.hard` is full; the text gives the
# id of a special token
DONE, UNKNOWN_CODE_POINT, UNKNOWN_PAIR, TOO_MANY_HARD, GIVES_SPECIAL = range(5)
# Indexes of `Output.state`
PIECE, BYTE, PLACE, NUM_HARD, CODE_POINT, BEFORE, HAS_BEGUN, REPLACED, LEVEL, LIMITS = range(10)
MOST_RULES = 8
NUM_STATES = LIMITS + MOST_RULES
# A step of WordTables.steps: the next state in the low bits, and flags
CLASSES = 64  # of characters, at most; class 0 is the end of the text
STATES = np.uint16(0x0FFF)
HARD_STEP = np.uint16(0x2000)  # the character fits no table
MEETS_STEP = np.uint16(0x4000)  # the character may change the one before it
ENDED = np.uint16(0x8000)  # a word ends before the character
# Bits of the first uint64 of an entry of WordTables.points, above the class
#   MEETS        may change the code point before it, or be changed with it
#   HARD_FORM    fits no table
#   SILENT_FORM  has an empty normal form
#   SPACE_FORM   has the normal form of a space
#   BLANK        is removed at the ends of a piece
#   PREFIXED     has a normal form that begins with the prefix
MEETS, HARD_FORM, SILENT_FORM, SPACE_FORM, BLANK, PREFIXED = (np.uint64(1 << n) for n in range(24, 30))
# WordTables.model
BYTE_BPE, CHARACTER_BPE, UNIGRAM, WORD_PIECE, WHOLE_WORD = range(5)
# Output.hard, last column: where a hard run stands, or that it is one word, to which the prefix is added or not
IN_MIDDLE, AT_BEGIN, ONE_WORD, WITH_PREFIX = range(4)
NO_RANK = np.int64(1 << 62)
LONGEST_KEY = 64  # bytes of a run that has a place in the tables
SMALL = 24  # ids; up to here the lowest rank is searched for in one loop, else in two loops that compile to vectors


class Text(NamedTuple):
    """Pieces of text, for example documents, lines, or what lies between two added tokens."""

    data: Any  # uint8 [n]: valid UTF-8, at least PADDING bytes longer than the last piece
    starts: Any  # int64 [num_pieces]: piece i is data[starts[i] : stops[i]]; pieces do not overlap and are in order
    stops: Any  # int64 [num_pieces]
    tails: Any  # int64 [num_pieces]: id that is written after the ids of the piece, -1 for none
    begins: Any  # bool [num_pieces]: whether the piece begins a document


class WordPieceTables(NamedTuple):
    """What the WordPiece kernel knows about a tokenizer."""

    points: Any  # uint64 [0x110000, 2]: an entry for each code point (wordpiece.py packs them); 0: not known yet
    stop_values: Any  # uint64 [256]: value of each stop that is one ASCII byte; EMPTY for all other bytes
    fold: Any  # uint64: FOLD if the tokenizer lower-cases, else 0
    max_chars: int  # a word with more characters is unknown
    unk: int  # id of the unknown token
    edges: Any  # uint64 [power of two]: hash table of the trie's edges; see `_child`
    node_ids: Any  # int32 [num_nodes]: id of the token that ends at a node, -1 if none does


class WordTables(NamedTuple):
    """What the kernel for words knows about a tokenizer."""

    points: Any  # uint64 [0x110000, 2]: an entry for each code point (forms.py packs them); 0: not known yet
    ascii: Any  # uint8 [128]: class of each ASCII character
    steps: Any  # uint16 [num_states * CLASSES]: see rules.Rules
    starts: Any  # int64 [num_rules]
    keeps_gaps: Any  # bool [num_rules]: whether text between the words of a rule is a word too
    cuts: Any  # bool [CLASSES * CLASSES]
    meets: int  # 1 if a code point may change the one before it, else 0
    strips: int  # 1 if blank characters at both ends of a piece are removed, else 0
    prefix: Any  # uint8 [k]: text put before a piece
    prefix_class: int  # class of the prefix
    prefix_when: int  # 0: never; 1: before each piece; 2: before the piece that begins a document; 3: before each word
    prefix_always: int  # 1: also before a piece that begins with it, else 0
    collapses: int  # 1: of several spaces one is left, else 0
    model: int  # BYTE_BPE, ...
    byte_ids: Any  # int64 [2, 256]: id of each byte, -1 if it has none; [1] where the byte ends a word
    pairs: Any  # uint64 [2 * power of two]: hash table of the merges; see `add_pairs`
    whole: int  # 1: a word that is in the vocabulary is not merged, else 0
    edges: Any  # uint64 [power of two]: hash table of the trie's edges; see `_child`
    node_ids: Any  # int32 [num_nodes]: id of the token that ends at a node, -1 if none does
    scores: Any  # float64 [vocab_size]: score of each token of a Unigram model
    unk_score: float  # score of an unknown character in a Unigram model
    unk: int  # id of the unknown token, -1 if there is none
    fuse_unk: int  # 1: unknown characters side by side are one token, else 0
    max_chars: int  # WORD_PIECE: a word with more characters is unknown
    special: Any  # bool [vocab_size]: whether text may not give the id
    special_to: int  # id that is written in place of such an id, -1 if there is none


class RunTables(NamedTuple):
    """Hash tables of the runs a thread has met, with the value of each, and scratch memory of that thread."""

    short: Any  # uint64 [2 * slots]: (run of up to 8 bytes, value); at most 2**19 slots, a power of two
    long: Any  # uint64 [4 * slots]: (first 8 bytes, other bytes, value, unused), for runs of 9 to 16 bytes
    far: Any  # uint64 [4 * slots]: (hash, place in `spelled` and length, value, unused), for runs of 17 to 64 bytes
    used: Any  # int64 [5]: slots in use of each table, bytes of `spelled`, ids of `pool`; half of a table is the most
    spelled: Any  # uint8 [n]: the runs of `far`
    pool: Any  # uint32 [n]: the ids of values that have more than three
    stable: Any  # int64 [slots]: hash table of pairs of code points: (pair, whether the two leave each other alone)
    word: Any  # uint8 [m]: the bytes of a word
    ids: Any  # int64 [m]: the ids of a word
    ranks: Any  # int64 [2, m]: for BPE the rank and the id of each merge; for Unigram where the best token begins
    best: Any  # float64 [m]: for Unigram the score of the best way to each place


class Output(NamedTuple):
    """What a kernel writes."""

    ids: Any  # uint16 or uint32 [n]: the ids; a store may write up to three places too many
    bounds: Any  # int64 [num_pieces + 1]: the ids of piece i are ids[bounds[i] : bounds[i + 1]]
    hard: Any  # int64 [h, 4]: runs that `tokenizers` must encode: (start, stop, place in ids, IN_MIDDLE or another)
    state: Any  # int64 [NUM_STATES]: where the kernel stands, so that it can continue; zeros at the start


class Added(NamedTuple):
    """Added tokens to search a text for."""

    edges: Any  # uint64 [power of two]: the trie of their spellings, with their numbers at its nodes; see `_child`
    node_ids: Any  # int32 [num_nodes]
    ids: Any  # int64 [num_tokens]: the id of each; -1: the token is passed over
    begins: Any  # bool [65536]: whether a token begins with two bytes, the first times 256 plus the second


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


@intrinsic
def _ascii_stops64(typing: Any, array: Any, offset: Any) -> Any:
    """A bit for each of the 64 bytes at an offset: 1 where the byte is an ASCII character, no letter and no digit."""

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
        high = builder.icmp_unsigned(">=", text, splat(0x80))
        stops = builder.not_(builder.or_(builder.or_(letter, digit), high))
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
def _clear_runs(runs):
    """Empties the tables of runs."""
    for table in (runs.short, runs.long, runs.far):
        for j in range(table.size):
            table[j] = EMPTY
    runs.used[:] = 0


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
def _pool(runs, count):
    """Adds runs.ids[:count] to the pool. Returns where they are, as a value holds it. The caller has made room."""
    first = runs.used[4]
    for k in range(count):
        runs.pool[first + k] = runs.ids[k]
    runs.used[4] += count
    return uint64(first) | (uint64(count) << uint64(32))


@jit()
def _learn(text, start, length, tables, runs, out):
    """The value of an ASCII run."""
    for k in range(length):
        byte = text[start + k]
        runs.word[k] = byte | ((byte >> 1) & 0x20) if tables.fold != 0 else byte
    count = _wordpiece(runs.word, length, length, tables, runs.ids)
    value = _pack(out, runs.ids, count)
    return value if count <= 3 else value | _pool(runs, count)


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
def find_added(text, starts, stops, added, seen, found):
    """Finds added tokens in the pieces text[starts[i] : stops[i]]: the leftmost, there the longest, then the next.

    added: Added. seen: uint64 [0x110000 / 64], gets a bit for each code point of the text, or is empty. found: int64
    [n, 4], gets rows (piece, start, stop, id). Returns the number of tokens found; the rows beyond n were not written.
    """
    edges, node_ids, ids, begins = added.edges, added.node_ids, added.ids, added.begins
    count = 0
    for piece in range(starts.size):
        i, stop = starts[piece], stops[piece]
        seen_to = i
        while i < stop:
            if seen.size > 0 and i >= seen_to:
                point, width = _decode(text, i)
                seen[point >> 6] |= uint64(1) << uint64(point & 63)
                seen_to = i + width
            step = 1
            if begins[int64(text[i]) << 8 | int64(text[i + 1])]:
                node, token = uint64(0), int64(-1)
                for k in range(i, stop):
                    node = _child(edges, node, text[k])
                    if node == uint64(0):
                        break
                    if node_ids[node] >= 0:
                        token, step = int64(node_ids[node]), k + 1 - i
                if token >= 0 and ids[token] != -1:
                    if count < found.shape[0]:
                        found[count, 0], found[count, 1] = piece, i
                        found[count, 2], found[count, 3] = i + step, ids[token]
                    count += 1
            i += step
    return count


@jit()
def find_hazards(text, starts, stops, hazards, is_harmed):
    """Sets is_harmed[i] where piece i has a code point of hazard 2, or one of hazard 1 after one of hazard 3.

    hazards: uint8 [0x110000]. Code points of hazard 1 in between do not count.
    """
    for piece in range(starts.size):
        i, before = starts[piece], 0
        while i < stops[piece]:
            point, width = _decode(text, i)
            hazard = hazards[point]
            if hazard == 2 or (hazard == 1 and before == 3):
                is_harmed[piece] = True
                break
            if hazard != 1:
                before = hazard
            i += width


@jit()
def _rank(pairs, left, right):
    """(rank << 32 | merged id) of a pair of ids, EMPTY if they are not merged."""
    mask = uint64(pairs.size // 2 - 1)
    key = (uint64(left) << uint64(32)) | uint64(right)
    j = ((key * GOLDEN) >> uint64(40)) & mask
    while pairs[uint64(2) * j] != key:
        if pairs[uint64(2) * j] == EMPTY:
            return EMPTY
        j = (j + uint64(1)) & mask
    return pairs[uint64(2) * j + uint64(1)]


@jit()
def _merge(size, pairs, ids, ranks):
    """Merges ids[:size] in place. Returns how many ids are left.

    Merges the pair of lowest rank first, and the leftmost of equal pairs, until no pair can be merged (Sennrich et al.,
    2016). ranks: int64 [2, at least size]. Takes time in the square of `size`, with a small factor.
    """
    rank, merged = ranks[0], ranks[1]
    for k in range(size - 1):
        found = _rank(pairs, ids[k], ids[k + 1])
        rank[k] = NO_RANK if found == EMPTY else int64(found >> uint64(32))
        merged[k] = int64(found & LOW32)
    while size > 1:
        best, place = NO_RANK, 0
        if size <= SMALL:
            for k in range(size - 1):
                if rank[k] < best:
                    best, place = rank[k], k
        else:
            for k in range(size - 1):
                best = min(best, rank[k])
            while rank[place] != best:
                place += 1
        if best == NO_RANK:
            break
        ids[place] = merged[place]
        size -= 1
        for k in range(place + 1, size):
            ids[k] = ids[k + 1]
        for k in range(place + 1, size - 1):
            rank[k], merged[k] = rank[k + 1], merged[k + 1]
        for k in range(max(place - 1, 0), min(place + 1, size - 1)):
            found = _rank(pairs, ids[k], ids[k + 1])
            rank[k] = NO_RANK if found == EMPTY else int64(found >> uint64(32))
            merged[k] = int64(found & LOW32)
    return size


@jit()
def add_pairs(lefts, rights, merged, ranks, pairs):
    """Fills the hash table of merges. Merge r joins ids lefts[r] and rights[r] to id merged[r].

    The merge of lowest rank goes first.

    pairs: uint64 [2 * slots], all EMPTY. A slot is (left in the high half and right in the low half; rank in the high
    half and merged in the low half).
    """
    mask = uint64(pairs.size // 2 - 1)
    for r in range(lefts.size):
        key = (uint64(lefts[r]) << uint64(32)) | uint64(rights[r])
        j = ((key * GOLDEN) >> uint64(40)) & mask
        while pairs[uint64(2) * j] != EMPTY:
            j = (j + uint64(1)) & mask
        pairs[uint64(2) * j] = key
        pairs[uint64(2) * j + uint64(1)] = (uint64(ranks[r]) << uint64(32)) | uint64(merged[r])


@jit()
def _has_zero(word):
    """Whether one of the 8 bytes of a word is zero."""
    return ((word - uint64(0x0101010101010101)) & ~word & uint64(0x8080808080808080)) != uint64(0)


@jit()
def _hash(text, start, length):
    """The hash of a run of 9 bytes or more."""
    h = uint64(length)
    for k in range(0, length - 8, 8):
        h = (h ^ _load64(text, start + k)) * GOLDEN
        h ^= h >> uint64(32)
    h = (h ^ _load64(text, start + length - 8)) * GOLDEN
    return h ^ (h >> uint64(32))


@jit()
def _find(text, start, length, short, long, far, spelled):
    """The value of a run, EMPTY if the tables do not have it. length: 1 to LONGEST_KEY."""
    if length <= 8:
        rest = ~uint64(0) >> uint64(64 - 8 * length)
        key = _load64(text, start) & rest
        if _has_zero(key | ~rest):
            return EMPTY
        mask = uint64(short.size // 2 - 1)
        j = ((key * GOLDEN) >> uint64(45)) & mask
        while short[uint64(2) * j] != key:
            if short[uint64(2) * j] == EMPTY:
                return EMPTY
            j = (j + uint64(1)) & mask
        return short[uint64(2) * j + uint64(1)]
    if length <= 16:
        key = _load64(text, start)
        rest = _load64(text, start + 8) & (~uint64(0) >> uint64(128 - 8 * length))
        if _has_zero(key) or _has_zero(rest | ~(~uint64(0) >> uint64(128 - 8 * length))):
            return EMPTY
        mask = uint64(long.size // 4 - 1)
        j = (((key ^ (rest * uint64(0xBF58476D1CE4E5B9))) * GOLDEN) >> uint64(45)) & mask
        while long[uint64(4) * j] != key or long[uint64(4) * j + uint64(1)] != rest:
            if long[uint64(4) * j] == EMPTY:
                return EMPTY
            j = (j + uint64(1)) & mask
        return long[uint64(4) * j + uint64(2)]
    h = _hash(text, start, length)
    mask = uint64(far.size // 4 - 1)
    j = (h >> uint64(40)) & mask
    while far[uint64(4) * j] != EMPTY:
        where = far[uint64(4) * j + uint64(1)]
        if far[uint64(4) * j] == h and where & uint64(0xFF) == uint64(length):
            place, k = int64(where >> uint64(8)), 0
            while k < length and spelled[place + k] == text[start + k]:
                k += 1
            if k == length:
                return far[uint64(4) * j + uint64(2)]
        j = (j + uint64(1)) & mask
    return EMPTY


@jit()
def _keep(text, start, length, ids, count, out, runs):
    """Adds a run that the tables do not have, with its ids. If one of the tables is half full, all are emptied first.

    A run of up to 16 bytes that contains a zero byte is left out, as a key does not say where it ends.
    """
    short, long, far, used = runs.short, runs.long, runs.far, runs.used
    if count > runs.pool.size:
        return
    if length <= 16:
        for k in range(start, start + length):
            if text[k] == 0:
                return
    if (
        4 * used[0] >= short.size or 8 * used[1] >= long.size or 8 * used[2] >= far.size
        or used[3] + length > runs.spelled.size or used[4] + count > runs.pool.size
    ):  # fmt: skip
        _clear_runs(runs)
    value = _pack(out, ids, count)
    if count > 3:
        for k in range(count):
            runs.pool[used[4] + k] = ids[k]
        value |= uint64(used[4]) | (uint64(count) << uint64(32))
        used[4] += count
    if length <= 8:
        key = _load64(text, start) & (~uint64(0) >> uint64(64 - 8 * length))
        mask = uint64(short.size // 2 - 1)
        j = ((key * GOLDEN) >> uint64(45)) & mask
        while short[uint64(2) * j] != EMPTY:
            j = (j + uint64(1)) & mask
        used[0] += 1
        short[uint64(2) * j], short[uint64(2) * j + uint64(1)] = key, value
    elif length <= 16:
        key = _load64(text, start)
        rest = _load64(text, start + 8) & (~uint64(0) >> uint64(128 - 8 * length))
        mask = uint64(long.size // 4 - 1)
        j = (((key ^ (rest * uint64(0xBF58476D1CE4E5B9))) * GOLDEN) >> uint64(45)) & mask
        while long[uint64(4) * j] != EMPTY:
            j = (j + uint64(1)) & mask
        used[1] += 1
        long[uint64(4) * j], long[uint64(4) * j + uint64(1)], long[uint64(4) * j + uint64(2)] = key, rest, value
    else:
        mask = uint64(far.size // 4 - 1)
        h = _hash(text, start, length)
        j = (h >> uint64(40)) & mask
        while far[uint64(4) * j] != EMPTY:
            j = (j + uint64(1)) & mask
        for k in range(length):
            runs.spelled[used[3] + k] = text[start + k]
        far[uint64(4) * j], far[uint64(4) * j + uint64(2)] = h, value
        far[uint64(4) * j + uint64(1)] = (uint64(used[3]) << uint64(8)) | uint64(length)
        used[2] += 1
        used[3] += length


@jit()
def keep_runs(text, runs_of_text, ids, bounds, out, runs):
    """Adds runs that `tokenizers` has encoded to the tables.

    runs_of_text: int64 [n, 3], run i is text[runs_of_text[i, 0] : runs_of_text[i, 1]]. Its ids are
    ids[bounds[i] : bounds[i + 1]], int64. out: an array of the dtype of ids as they are stored. A run with more ids
    than bytes is left out, as an output has no room for it.
    """
    for i in range(runs_of_text.shape[0]):
        start, length = runs_of_text[i, 0], runs_of_text[i, 1] - runs_of_text[i, 0]
        if length == 0 or length > LONGEST_KEY or bounds[i + 1] - bounds[i] > length:
            continue
        if _find(text, start, length, runs.short, runs.long, runs.far, runs.spelled) == EMPTY:
            _keep(text, start, length, ids[bounds[i] :], bounds[i + 1] - bounds[i], out, runs)


@jit()
def _stable_place(stable, key):
    """The slot of a pair of code points in RunTables.stable, or the free slot where it belongs."""
    mask = uint64(stable.size - 1)
    j = ((uint64(key) * GOLDEN) >> uint64(40)) & mask
    while stable[j] != 0 and stable[j] >> 1 != key:
        j = (j + uint64(1)) & mask
    return j


@jit()
def keep_pair(before, point, is_stable, runs):
    """Adds a pair of code points to RunTables.stable. The table is emptied when it is half full."""
    key = (before << 21) | point
    if runs.stable[_stable_place(runs.stable, -1)] == 0:
        num_used = 0
        for j in range(runs.stable.size):
            num_used += runs.stable[j] != 0
        if 2 * num_used >= runs.stable.size:
            for j in range(runs.stable.size):
                runs.stable[j] = 0
    runs.stable[_stable_place(runs.stable, key)] = (key << 1) | int64(is_stable)


@jit()
def _is_unstable(text, begin, start, stop, points, stable, state):
    """1 if a code point in text[start:stop] may change another one, else 0. Below 0: minus the code of what is missing.

    begin: where the piece begins. Each code point that may change the one before it is tested against that one, and
    against the last one that changes none. Two of them in a row after an ASCII character count as unstable untested.
    """
    i = start
    while i > begin:  # back to a code point that changes none
        i -= 1
        while i > begin and text[i] & 0xC0 == 0x80:
            i -= 1
        point, width = _decode(text, i)
        if points[point, 0] & (MEETS | SILENT_FORM) == uint64(0):
            break
    before, base, followers = int64(-1), int64(-1), 0
    while i < stop:
        point, width = _decode(text, i)
        entry = points[point, 0]
        if entry == uint64(0):
            state[CODE_POINT] = point
            return -UNKNOWN_CODE_POINT
        if entry & HARD_FORM != uint64(0):
            if i >= start:
                return 1
        elif entry & MEETS != uint64(0):
            followers += 1
            if base < 0x80 and followers > 1:
                return 1
            for other in (before, base):
                if other >= 0:
                    found = stable[_stable_place(stable, (other << 21) | point)]
                    if found == 0:
                        state[BEFORE], state[CODE_POINT] = other, point
                        return -UNKNOWN_PAIR
                    if found & 1 == 0:
                        return 1
        elif entry & SILENT_FORM != uint64(0):
            i += width  # what stands on both sides of it may meet
            continue
        else:
            base, followers = point, 0
        before = point
        i += width
    return 0


@jit()
def _cut_after(text, i, stop, points, cuts, state):
    """The first place after byte i where the text can be cut, whatever `tokenizers` makes of the text before.

    -1: an entry is missing. Before and after the place stand code points that change nothing and are not stripped at
    the ends of a text, and no word contains both.
    """
    previous = uint64(0)  # class of the code point before, 0 if it may change something
    while i < stop:
        point, width = _decode(text, i)
        entry = points[point, 0]
        if entry == uint64(0):
            state[CODE_POINT] = point
            return -1
        kind = entry & uint64(0xFF)
        if entry & (MEETS | HARD_FORM | SILENT_FORM | BLANK) != uint64(0):
            kind = uint64(0)
        if previous != uint64(0) and kind != uint64(0) and cuts[previous * uint64(CLASSES) + kind]:
            if i + width >= stop:
                return i
            following = points[_decode(text, i + width)[0], 0]
            if following == uint64(0):
                state[CODE_POINT] = _decode(text, i + width)[0]
                return -1
            if following & (MEETS | HARD_FORM) == uint64(0):
                return i
        previous = kind
        i += width
    return stop


@jit()
def _walk(text, i, stop, start_state, keeps_gaps, points, ascii_classes, steps, state):
    """Where the word that begins at byte i ends. -1: no word begins there. -2: an entry is missing.

    keeps_gaps: whether text between words is a word too; then that is found from where it begins.
    """
    begin = i
    while i < stop:
        best, automaton, place = int64(-1), uint64(start_state), i
        while True:
            width, kind = 0, uint64(0)
            if place < stop:
                point, width = _decode(text, place)
                kind = uint64(ascii_classes[point]) if point < 0x80 else points[point, 0] & uint64(0xFF)
                if kind == uint64(0):
                    state[CODE_POINT] = point
                    return -2
            step = steps[automaton * uint64(CLASSES) + kind]
            if step & ENDED != 0:
                best = place
            automaton = uint64(step & STATES)
            if automaton == uint64(0) or width == 0:
                break
            place += width
        if not keeps_gaps:
            return best
        if best >= 0:
            return best if i == begin else i
        i += _decode(text, i)[1]
    return stop


@jit()
def _whole_word(word, size, edges, node_ids):
    """The id of a word that is a token, -1 if it is none."""
    node = uint64(0)
    for k in range(size):
        node = _child(edges, node, word[k])
        if node == uint64(0):
            return int64(-1)
    return int64(node_ids[node])


@jit()
def _unigram(word, size, tables, ids, ranks, best):
    """Writes the ids of the most probable way to cut word[:size] (Kudo, 2018) to `ids`. Returns how many.

    Of equally probable ways the one is taken that was found first, from the left and with short tokens first, as
    `tokenizers` does.
    """
    edges, node_ids, scores = tables.edges, tables.node_ids, tables.scores
    came_from, token = ranks[0], ranks[1]
    for k in range(size + 1):
        came_from[k], best[k] = -1, 0.0
    i = 0
    while i < size:
        width = 1 if word[i] < 0x80 else 2 if word[i] < 0xE0 else 3 if word[i] < 0xF0 else 4
        so_far, node, is_known, k = best[i], uint64(0), False, i
        while k < size:
            node = _child(edges, node, word[k])
            if node == uint64(0):
                break
            k += 1
            found = node_ids[node]
            if found >= 0:
                score = scores[found] + so_far
                if came_from[k] < 0 or score > best[k]:
                    came_from[k], token[k], best[k] = i, found, score
                if k == i + width:
                    is_known = True
        if not is_known:
            score = tables.unk_score + so_far
            if came_from[i + width] < 0 or score > best[i + width]:
                came_from[i + width], token[i + width], best[i + width] = i, tables.unk, score
        i += width
    count, i, unknown_stop = 0, size, -1
    while i > 0 or unknown_stop >= 0:
        if i > 0 and token[i] == tables.unk:
            if unknown_stop < 0:
                unknown_stop = i
            i = came_from[i]
            continue
        if unknown_stop >= 0:  # word[i:unknown_stop] is unknown
            found = int64(-1)
            if tables.byte_ids[0, 0] >= 0:
                found = _whole_word(word[i:unknown_stop], unknown_stop - i, edges, node_ids)
            if tables.byte_ids[0, 0] >= 0 and found < 0:
                for k in range(unknown_stop - 1, i - 1, -1):
                    ids[count] = tables.byte_ids[0, word[k]]
                    count += 1
            else:
                ids[count] = tables.unk
                count += 1
            unknown_stop = -1
            continue
        ids[count] = token[i]
        count += 1
        i = came_from[i]
    for k in range(count // 2):
        ids[k], ids[count - 1 - k] = ids[count - 1 - k], ids[k]
    return count


@jit()
def _characters(word, size, tables, ids):
    """Writes the ids of the characters of a word to `ids`, for BPE. Returns how many."""
    count, i, in_unknown = 0, 0, False
    while i < size:
        width = 1 if word[i] < 0x80 else 2 if word[i] < 0xE0 else 3 if word[i] < 0xF0 else 4
        node = uint64(i + width == size)  # under root 1 are the characters that end a word
        for k in range(i, i + width):
            node = _child(tables.edges, node, word[k])
            if node == uint64(0):
                break
        found = int64(tables.node_ids[node]) if node != uint64(0) else int64(-1)
        if found >= 0:
            ids[count] = found
            count += 1
            in_unknown = False
        elif tables.byte_ids[0, 0] >= 0:
            for k in range(i, i + width):
                ids[count] = tables.byte_ids[0, word[k]]
                count += 1
        elif tables.unk >= 0:
            if not in_unknown or tables.fuse_unk == 0:
                ids[count] = tables.unk
                count += 1
            in_unknown = True
        i += width
    return count


@jit()
def _emit(out, p, value, pool):
    """Writes the ids of a value at out[p:] and returns how many they are."""
    if _count(out, value) != UNPACKED:
        return _put(out, p, value)
    first, count = int64(value & LOW32), int64((value >> uint64(32)) & uint64(0xFFFF))
    for k in range(count):
        out[p + k] = pool[first + k]
    return count


@jit()
def wordpiece(pieces, tables, runs, output):
    """Encodes pieces of text as BERT does. Returns DONE, UNKNOWN_CODE_POINT or TOO_MANY_HARD.

    pieces: Text. tables: WordPieceTables. runs: RunTables. output: Output. After UNKNOWN_CODE_POINT the caller adds the
    entry of output.state[CODE_POINT] to tables.points, after TOO_MANY_HARD it empties output.hard; then it calls the
    kernel again, which continues from output.state.

    An ASCII run of up to 16 bytes and the stop after it are written by one store each. Another run of up to 64 bytes is
    looked up too. Longer ones are read code point by code point.
    """
    text, starts, stops = pieces.data, pieces.starts, pieces.stops
    points, stop_values, fold = tables.points, tables.stop_values, tables.fold
    short, long, far, spelled, pool = runs.short, runs.long, runs.far, runs.spelled, runs.pool
    used, word, ids = runs.used, runs.word, runs.ids
    out, out_bounds, hard, state = output.ids, output.bounds, output.hard, output.state
    short_mask, long_mask = uint64(short.size // 2 - 1), uint64(long.size // 4 - 1)
    i, p, num_hard = state[BYTE], state[PLACE], state[NUM_HARD]
    for piece in range(state[PIECE], starts.size):
        end = stops[piece]
        i = max(i, starts[piece])
        code = DONE
        while i < end:
            base = i
            mask = _stops64(text, base)
            if end - base < 64:  # the end of the piece is a stop without an id
                mask = (mask & ((uint64(1) << uint64(end - base)) - uint64(1))) | (uint64(1) << uint64(end - base))
            slow = mask == uint64(0)  # the run has 64 bytes or more
            while mask != uint64(0):
                s = base + _trailing_zeros(mask)
                mask &= mask - uint64(1)
                length = s - i
                stop_value = uint64(0) if s == end else stop_values[text[uint64(s)]]
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
                        if 4 * used[0] >= short.size or used[4] + length > pool.size:
                            _clear_runs(runs)
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
                        if 8 * used[1] >= long.size or used[4] + length > pool.size:
                            _clear_runs(runs)
                            j = (h >> uint64(45)) & long_mask
                        used[1] += 1
                        long[uint64(4) * j] = key
                        long[uint64(4) * j + uint64(1)] = rest
                        long[uint64(4) * j + uint64(2)] = _learn(text, i, length, tables, runs, out)
                    value = long[uint64(4) * j + uint64(2)]
                if _count(out, value) == UNPACKED:
                    p += _emit(out, p, value, pool)
                else:
                    p += _put(out, p, value)
                p += _put(out, p, stop_value)
                i = s + 1
            while slow:
                run_start, run_place, run_stop, is_key, is_hard = i, p, end, False, False
                while i < end and text[i] >= 0x80:  # words of one character, such as Chinese ones
                    point, width = _decode(text, i)
                    if points[point, 0] & uint64(7) != ALONE:
                        break
                    p += _put(out, p, points[point, 1])
                    i += width
                if i > run_start:
                    slow = i < end and text[i] >= 0x80
                    if not slow:
                        break
                    run_start, run_place = i, p
                mask = _ascii_stops64(text, i)
                if mask != uint64(0) and i + _trailing_zeros(mask) < end:
                    run_stop = i + _trailing_zeros(mask)
                    is_key = stop_values[text[run_stop]] != EMPTY
                    if not is_key:
                        run_stop = end
                elif end - i <= LONGEST_KEY:
                    is_key = True
                is_known = is_key and run_stop == i
                if is_key and not is_known:
                    value = _find(text, i, run_stop - i, short, long, far, spelled)
                    is_known = value != EMPTY
                    if is_known:
                        p += _emit(out, p, value, pool)
                while i < run_stop and not is_known:  # a word at a time
                    start, size, num_chars, is_hard, value = i, int64(0), int64(0), False, uint64(0)
                    while i < run_stop:
                        point, width = _decode(text, i)
                        entry = points[point, 0]
                        what = entry & uint64(7)
                        if what == uint64(0):
                            code, state[CODE_POINT] = UNKNOWN_CODE_POINT, point
                            break
                        i += width
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
                    is_hard = is_hard or (size + 16 > word.size and num_chars <= tables.max_chars)
                    if code == DONE and is_hard and num_hard == hard.shape[0]:
                        code = TOO_MANY_HARD
                    if code != DONE:
                        i, p = run_start, run_place
                        break
                    if is_hard:
                        if is_key:
                            start, i, p = run_start, run_stop, run_place
                        hard[num_hard, 0], hard[num_hard, 1], hard[num_hard, 2], hard[num_hard, 3] = start, i, p, 0
                        num_hard += 1
                        is_known = is_key
                        value = uint64(0)
                    elif size > 0:
                        count = _wordpiece(word, size, num_chars, tables, ids)
                        for k in range(count):
                            out[p + k] = ids[k]
                        p += count
                    p += _put(out, p, value)
                    if not is_key:
                        run_start, run_place = i, p
                        if i >= end or text[i] < 0x80:
                            break
                if code != DONE:
                    break
                if is_key:
                    if not is_known:
                        _keep(text, run_start, run_stop - run_start, out[run_place:], p - run_place, out, runs)
                    i = run_stop
                    if i < end:
                        p += _put(out, p, stop_values[text[i]])
                        i += 1
                slow = i < end and text[i] >= 0x80
            if code != DONE:
                break
        if code != DONE:
            state[PIECE], state[BYTE], state[PLACE], state[NUM_HARD] = piece, i, p, num_hard
            return code
        i = stops[piece]
        if pieces.tails[piece] >= 0:
            out[p] = pieces.tails[piece]
            p += 1
        out_bounds[piece + 1] = p
    state[NUM_HARD] = num_hard
    return DONE


@jit()
def _encode_word(text, start, stop, prefixed, tables, runs):
    """Writes the ids of the word text[start:stop] to runs.ids. Returns how many.

    prefixed: whether the prefix is put before the word. Where each word gets one, a word that begins with it does not.
    """
    word, ids, size, num_chars, after_space = runs.word, runs.ids, 0, 0, False
    if prefixed:
        for k in range(tables.prefix.size):
            word[k] = tables.prefix[k]
        size, num_chars, after_space = tables.prefix.size, 1, True
    i = start
    while i < stop:
        point, width = _decode(text, i)
        entry = tables.points[point, 0]
        length = int64((entry >> uint64(8)) & uint64(255))
        i += width
        if tables.collapses != 0 and length > 0:
            is_space = entry & SPACE_FORM != uint64(0)
            if is_space and after_space:
                continue
            after_space = is_space
        _store64(word, size, tables.points[point, 1])
        _store64(word, size + 8, entry >> uint64(32))
        size += length
        num_chars += int64((entry >> uint64(16)) & uint64(255))
    if prefixed and tables.prefix_when == 3:
        width = tables.prefix.size
        has_it = size == width or size >= 2 * width
        for k in range(width, min(2 * width, size)):
            has_it = has_it and word[k] == tables.prefix[k - width]
        if has_it:
            size -= width
            num_chars -= 1
            for k in range(size):
                word[k] = word[k + width]
    if size == 0:
        return 0
    if tables.model == BYTE_BPE or tables.model == CHARACTER_BPE:  # noqa: PLR1714
        if tables.whole != 0:
            found = _whole_word(word, size, tables.edges, tables.node_ids)
            if found >= 0:
                ids[0] = found
                return 1
        count = 0
        if tables.model == BYTE_BPE:
            for k in range(size):
                found = tables.byte_ids[int64(k == size - 1), word[k]]
                if found >= 0:
                    ids[count] = found
                    count += 1
        else:
            count = _characters(word, size, tables, ids)
        return _merge(count, tables.pairs, ids, runs.ranks)
    if tables.model == UNIGRAM:
        return _unigram(word, size, tables, ids, runs.ranks, runs.best)
    if tables.model == WORD_PIECE:
        return _wordpiece(word, size, num_chars, tables, ids)
    found = _whole_word(word, size, tables.edges, tables.node_ids)
    ids[0] = found if found >= 0 else tables.unk
    return 1


@jit()
def words(pieces, tables, runs, output):
    """Encodes pieces of text by the rules and the model of `tables`. Returns one of the codes above.

    pieces: Text. tables: WordTables. runs: RunTables. output: Output. After a code other than DONE the caller supplies
    what is missing and calls the kernel again; it continues from output.state. After GIVES_SPECIAL it gives up.

    The automaton finds where the next word ends. Most words are in the tables of runs and are copied from there. A
    stretch whose code points change each other is hard: it begins and ends where text can be cut, whatever it holds.
    """
    text, starts, stops = pieces.data, pieces.starts, pieces.stops
    points, ascii_classes, steps, cuts = tables.points, tables.ascii, tables.steps, tables.cuts
    short, long, far, spelled, pool = runs.short, runs.long, runs.far, runs.spelled, runs.pool
    out, out_bounds, hard, state = output.ids, output.bounds, output.hard, output.state
    limits = state[LIMITS:]  # where the text ends that each rule is cutting
    num_rules, first_state = tables.starts.size, uint64(tables.starts[0])
    longest, short_mask = runs.word.size // 4 - 16, uint64(short.size // 2 - 1)
    i, p, num_hard, has_begun = state[BYTE], state[PLACE], state[NUM_HARD], state[HAS_BEGUN]
    for piece in range(state[PIECE], starts.size):
        begin, end, code, level = starts[piece], stops[piece], DONE, state[LEVEL]
        i = max(i, begin)
        if tables.strips != 0:
            while i < end and has_begun == 0:
                point, width = _decode(text, i)
                if points[point, 0] == uint64(0):
                    code, state[CODE_POINT] = UNKNOWN_CODE_POINT, point
                    break
                if points[point, 0] & BLANK == uint64(0):
                    break
                i += width
            while i < end and code == DONE:
                last = end - 1
                while text[last] & 0xC0 == 0x80:
                    last -= 1
                point, width = _decode(text, last)
                if points[point, 0] == uint64(0):
                    code, state[CODE_POINT] = UNKNOWN_CODE_POINT, point
                if points[point, 0] & BLANK == uint64(0):
                    break
                end = last
        while i < end and code == DONE:
            automaton, prefixed, is_first = first_state, tables.prefix_when == 3, False
            if has_begun == 0 and (tables.prefix_when == 1 or (tables.prefix_when == 2 and pieces.begins[piece])):
                entry, width = SILENT_FORM, 0
                while i + width < end and entry & SILENT_FORM != uint64(0):
                    i += width
                    point, width = _decode(text, i)
                    entry = points[point, 0]
                if entry == uint64(0):
                    code, state[CODE_POINT] = UNKNOWN_CODE_POINT, point
                    break
                if tables.prefix_when == 2 and i > begin:  # what begins the text has no normal form; is there a prefix?
                    if num_hard == hard.shape[0]:
                        code = TOO_MANY_HARD
                        break
                    hard[num_hard, 0], hard[num_hard, 1], hard[num_hard, 2], hard[num_hard, 3] = begin, end, p, AT_BEGIN
                    num_hard += 1
                    i, has_begun = end, 1
                    continue
                if entry & SILENT_FORM != uint64(0):
                    break  # nothing but code points without a normal form is left
                is_first, prefixed = True, tables.prefix_always != 0 or entry & PREFIXED == uint64(0)
                if prefixed:
                    automaton = uint64(steps[first_state * uint64(CLASSES) + uint64(tables.prefix_class)] & STATES)
            if level == 0:
                place, word_stop, flags, width = i, int64(-1), np.uint16(0), 0
                while True:
                    kind = uint64(0)
                    if place < end:
                        point, width = int64(text[uint64(place)]), 1
                        if point < 0x80:
                            kind = uint64(ascii_classes[uint64(point)])
                        else:
                            point, width = _decode(text, place)
                            kind = points[point, 0] & uint64(0xFF)
                        if kind == uint64(0):
                            code, state[CODE_POINT] = UNKNOWN_CODE_POINT, point
                            break
                    step = steps[automaton * uint64(CLASSES) + kind]
                    flags |= step
                    if step & ENDED != 0:
                        word_stop = place
                    automaton = uint64(step & STATES)
                    if automaton == uint64(0) or place >= end:
                        break
                    place += width
                if code != DONE:
                    break
                region_stop = int64(-1)
                if tables.meets != 0:
                    place = min(place + width, end)
                    if place < end:  # the automaton has seen the code point before; does this one change it?
                        point, width = _decode(text, place)
                        if points[point, 0] == uint64(0):
                            code, state[CODE_POINT] = UNKNOWN_CODE_POINT, point
                            break
                        if points[point, 0] & MEETS != uint64(0):
                            flags |= MEETS_STEP
                            place += width
                    is_hard = int64(flags & HARD_STEP != 0)
                    if is_hard == 0 and flags & MEETS_STEP != 0:
                        is_hard = _is_unstable(text, begin, i, place, points, runs.stable, state)
                    if is_hard > 0:
                        region_stop = _cut_after(text, place, end, points, cuts, state)
                        if region_stop < 0:
                            is_hard = -UNKNOWN_CODE_POINT
                    if is_hard < 0:
                        code = -is_hard
                        break
                if word_stop < 0 and tables.keeps_gaps[0]:
                    word_stop = _walk(text, i, end, first_state, True, points, ascii_classes, steps, state)
                    if word_stop < 0:
                        code = UNKNOWN_CODE_POINT
                        break
                if region_stop >= 0:
                    value = EMPTY
                    if not is_first and region_stop - i <= LONGEST_KEY:
                        value = _find(text, i, region_stop - i, short, long, far, spelled)
                    if value != EMPTY:
                        p += _emit(out, p, value, pool)
                    elif num_hard == hard.shape[0]:
                        code = TOO_MANY_HARD
                        break
                    else:
                        hard[num_hard, 0], hard[num_hard, 1], hard[num_hard, 2] = i, region_stop, p
                        hard[num_hard, 3] = AT_BEGIN if is_first else IN_MIDDLE
                        num_hard += 1
                    i, has_begun = region_stop, 1
                    continue
            if num_rules > 1 and (level > 0 or word_stop > i):
                if level == 0:
                    limits[0], level = word_stop, 1
                word_stop = limits[level - 1]
                while level < num_rules and word_stop >= 0:
                    word_stop = _walk(
                        text, i, word_stop, tables.starts[level], tables.keeps_gaps[level], points, ascii_classes,
                        steps, state,
                    )  # fmt: skip
                    limits[level] = word_stop
                    level += 1
            if word_stop < i or (word_stop == i and not prefixed):  # no word begins here
                i += _decode(text, i)[1]
            elif word_stop - i > longest:
                if num_hard == hard.shape[0]:
                    code = TOO_MANY_HARD
                    break
                hard[num_hard, 0], hard[num_hard, 1], hard[num_hard, 2] = i, word_stop, p
                hard[num_hard, 3] = WITH_PREFIX if prefixed else ONE_WORD
                num_hard += 1
                i, has_begun = word_stop, 1
            else:
                length = word_stop - i
                is_key = 0 < length <= LONGEST_KEY and not is_first
                value = EMPTY
                if is_key and length <= 8:  # as in `_find`
                    rest = ~uint64(0) >> uint64(64 - 8 * length)
                    key = _load64(text, i) & rest
                    slot = ((key * GOLDEN) >> uint64(45)) & short_mask
                    while short[uint64(2) * slot] != key and short[uint64(2) * slot] != EMPTY:
                        slot = (slot + uint64(1)) & short_mask
                    if short[uint64(2) * slot] == key and not _has_zero(key | ~rest):
                        value = short[uint64(2) * slot + uint64(1)]
                elif is_key:
                    value = _find(text, i, length, short, long, far, spelled)
                if value != EMPTY:
                    if _count(out, value) != UNPACKED:
                        p += _put(out, p, value)
                    else:
                        p += _emit(out, p, value, pool)
                else:
                    count = _encode_word(text, i, word_stop, prefixed, tables, runs)
                    num_special = 0
                    for k in range(count):
                        if tables.special[runs.ids[k]]:
                            num_special += 1
                            runs.ids[k] = tables.special_to
                        out[p + k] = runs.ids[k]
                    p += count
                    if num_special > 0 and tables.special_to < 0:
                        return GIVES_SPECIAL
                    state[REPLACED] += num_special
                    if is_key and num_special == 0:
                        _keep(text, i, length, runs.ids, count, out, runs)
                i, has_begun = word_stop, 1
            if num_rules > 1:
                while level > 0 and i >= limits[level - 1]:
                    level -= 1
        if code != DONE:
            state[PIECE], state[BYTE], state[PLACE], state[NUM_HARD] = piece, i, p, num_hard
            state[HAS_BEGUN], state[LEVEL] = has_begun, level
            return code
        i, has_begun, state[LEVEL] = stops[piece], 0, 0
        if pieces.tails[piece] >= 0:
            out[p] = pieces.tails[piece]
            p += 1
        out_bounds[piece + 1] = p
    state[NUM_HARD] = num_hard
    return DONE
