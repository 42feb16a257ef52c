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

from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import int64, types, uint64
from numba.core import cgutils
from numba.extending import intrinsic

from bertdata.jit import jit


@intrinsic
def _trailing_zeros(typing: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


PADDING = 80  # bytes that must be readable after the text
EMPTY = np.uint64(0xFFFFFFFFFFFFFFFF)  # of a table of runs: it has no such run; of a table of merges: a free slot
UNPACKED = np.uint64(15)  # count of a value whose ids do not fit into it
FOLD = np.uint64(0x2020202020202020)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
NO_BYTE = np.uint64(256)  # of an entry of a trie; see `_child`
OPEN_BLOCKS, MOST_TRIES = 16, 512  # where and how often a place for the children of a trie's node is searched for
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
# WordTables.inside: the sets of bytes of which a quick word consists
NO_BYTES, LETTERS, PRINTED, LOWER = range(4)
# WordTables.after: what a byte is that follows a quick word. NOT_QUICK: the automaton must be asked; NEXT_BEGINS: the
# next word begins with it; GAP: it is in no word; OWN_WORD: it is a word of its own if a space follows
NOT_QUICK, NEXT_BEGINS, GAP, OWN_WORD = range(4)
MOST_FOLLOWERS = 8  # code points in a row that may change others; more are left to `tokenizers`
LONGEST_KEY = 64  # bytes of a run that has a place in the tables
RANGES = 4  # of bytes, in Added
LANES, NO_LANE = 32, np.int32(0x7FFFFFFF)  # of `_merge_short`; a place takes 5 bits, and `_least32` takes 32 lanes


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
    trie: Any  # uint64 [n]: the tokens that begin a word (root 0) and that continue one (root 1); see `_child`


class WordTables(NamedTuple):
    """What the kernel for words knows about a tokenizer."""

    points: Any  # uint64 [0x110000, 2]: an entry for each code point (words.py packs them); 0: not known yet
    ascii: Any  # uint8 [128]: class of each ASCII character
    quick: Any  # uint8 [256]: class of each ASCII character that is not hard and changes no other; 0 for other bytes
    steps: Any  # uint16 [num_states * CLASSES]: see rules.Rules
    skips: Any  # bool [num_states]: whether the letters a to z leave a state as it is, and a word may end before each
    inside: int  # LETTERS, ...: what a quick word consists of, after a byte that NEXT_BEGINS or none
    after: Any  # uint8 [256]: NEXT_BEGINS, ...
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
    letters: Any  # int32 [2, 256]: for BPE the id of a byte that is a whole character, else -1; [1] as in byte_ids
    pairs: Any  # uint64 [power of two]: hash table of the merges, with their ranks; see `add_pairs`
    merged: Any  # int32 [num_ranks]: the id that each merge gives
    whole: int  # 1 for BYTE_BPE: a word that is a token of `trie` is not merged, else 0
    trie: Any  # uint64 [n]: the tokens or characters of the model; see `_child`
    scores: Any  # float64 [vocab_size]: score of each token of a Unigram model
    unk_score: float  # score of an unknown character in a Unigram model
    unk: int  # id of the unknown token, -1 if there is none
    fuse_unk: int  # 1: unknown characters side by side are one token, else 0
    max_chars: int  # WORD_PIECE: a word with more characters is unknown
    special: Any  # bool [vocab_size]: whether text may not give the id
    special_to: int  # id that is written in place of such an id, -1 if there is none


class RunTables(NamedTuple):
    """Hash tables of the runs a thread has met, with the value of each, and scratch memory of that thread.

    Both tables consist of sets of two slots of 32 bytes; a free slot is zeros. A run that is met again moves to the
    first slot of its set, and a new one takes the place of the run in the second slot. So frequent runs stay. Only when
    `spelled` or `pool` is full, everything is forgotten.
    """

    near: Any  # uint64 [num_sets * 8]: (first 8 bytes, bytes 8 to 15, value, unused), for runs of up to 16 bytes
    far: Any  # uint64 [num_sets * 8]: (hash, place in `spelled` and length, value, unused), for longer runs
    used: Any  # int64 [2]: bytes of `spelled` and ids of `pool` in use
    spelled: Any  # uint8 [n]: the runs of `far`
    pool: Any  # uint32 [n]: the ids of values that have more than three
    stable: Any  # int64 [slots]: hash table of pairs of code points: (pair, whether the two leave each other alone)
    word: Any  # uint8 [m]: the bytes of a word
    ids: Any  # int64 [m]: the ids of a word
    lanes: Any  # int32 [LANES]: see `_merge_short`
    links: Any  # int64 [2, LANES + 1]
    ranks: Any  # int64 [2, m]: for BPE of long words the merges; for Unigram where the best token begins, and its id
    best: Any  # float64 [m]: for Unigram the score of the best way to each place


class Output(NamedTuple):
    """What a kernel writes."""

    ids: Any  # uint16 or uint32 [n]: the ids; a store may write up to three places too many
    bounds: Any  # int64 [num_pieces + 1]: the ids of piece i are ids[bounds[i] : bounds[i + 1]]
    hard: Any  # int64 [h, 4]: runs that `tokenizers` must encode: (start, stop, place in ids, IN_MIDDLE or another)
    state: Any  # int64 [NUM_STATES]: where the kernel stands, so that it can continue; zeros at the start


class Added(NamedTuple):
    """Added tokens to search a text for."""

    trie: Any  # uint64 [n]: their spellings, each with its number; see `_child`
    ids: Any  # int64 [num_tokens]: the id of each; -1: the token is passed over
    begins: Any  # bool [65536]: whether a token begins with two bytes, the first times 256 plus the second
    first: Any  # uint8 [RANGES, 2]: ranges (least, most - least) that hold all first bytes of tokens
    second: Any  # uint8 [RANGES, 2]: the same for all second bytes
    watched: Any  # uint8 [RANGES, 2]: ranges that hold the first bytes of all code points that `AddedTokens` asks about


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


def _bits64(context: Any, builder: Any, signature: Any, args: Any, is_set: Any) -> Any:
    """Code for a bit for each of the 64 bytes at an offset of an array, by a test of a vector of them."""
    byte, vector = ir.IntType(8), ir.VectorType(ir.IntType(8), 64)
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    place = builder.gep(builder.bitcast(data, byte.as_pointer()), [args[1]])
    text = builder.load(builder.bitcast(place, vector.as_pointer()))
    text.align = 1
    return builder.bitcast(is_set(builder, text), ir.IntType(64))


def _among(builder: Any, text: Any, first: str, count: int) -> Any:
    """Code for which bytes of a vector are among `count` characters from `first` on."""
    lowest, number = (ir.Constant(text.type, [value] * 64) for value in (ord(first), count))
    return builder.icmp_unsigned("<", builder.sub(text, lowest), number)


def _is_stop(builder: Any, text: Any) -> Any:
    folded = builder.or_(text, ir.Constant(text.type, [0x20] * 64))
    return builder.not_(builder.or_(_among(builder, folded, "a", 26), _among(builder, text, "0", 10)))


@intrinsic
def _least32(typing: Any, lanes: Any) -> Any:
    """The least of 32 int32. Compiles to vector instructions."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.IntType(32), 32)
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        numbers = builder.load(builder.bitcast(data, vector.as_pointer()))
        numbers.align = 4
        kind = ir.FunctionType(ir.IntType(32), [vector])
        least = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.smin.v32i32")
        return builder.call(least, [numbers])

    return types.int32(lanes), generate


@intrinsic
def _stops64(typing: Any, array: Any, offset: Any) -> Any:
    """A bit for each of the 64 bytes at an offset: 1 where the byte is a stop. Compiles to vector instructions."""
    return types.uint64(array, types.int64), lambda *code: _bits64(*code, _is_stop)


@intrinsic
def _ascii_stops64(typing: Any, array: Any, offset: Any) -> Any:
    """A bit for each of the 64 bytes at an offset: 1 where the byte is an ASCII character, no letter and no digit."""

    def is_set(builder: Any, text: Any) -> Any:
        return builder.and_(_is_stop(builder, text), _among(builder, text, "\0", 128))

    return types.uint64(array, types.int64), lambda *code: _bits64(*code, is_set)


@intrinsic
def _in_ranges64(typing: Any, array: Any, offset: Any, ranges: Any) -> Any:
    """A bit for each of the 64 bytes at an offset: 1 where the byte is in one of RANGES ranges."""

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

        return _bits64(context, builder, signature, args, is_set)

    return types.uint64(array, types.int64, ranges), generate


@intrinsic
def _not_lower64(typing: Any, array: Any, offset: Any) -> Any:
    """A bit for each of the 64 bytes at an offset: 1 where the byte is none of the letters a to z."""

    def is_set(builder: Any, text: Any) -> Any:
        return builder.not_(_among(builder, text, "a", 26))

    return types.uint64(array, types.int64), lambda *code: _bits64(*code, is_set)


@intrinsic
def _not_print64(typing: Any, array: Any, offset: Any) -> Any:
    """A bit for each of the 64 bytes at an offset: 1 where the byte is none of the characters ! to ~."""

    def is_set(builder: Any, text: Any) -> Any:
        return builder.not_(_among(builder, text, "!", 94))

    return types.uint64(array, types.int64), lambda *code: _bits64(*code, is_set)


@intrinsic
def _not_letter64(typing: Any, array: Any, offset: Any) -> Any:
    """A bit for each of the 64 bytes at an offset: 1 where the byte is no ASCII letter."""

    def is_set(builder: Any, text: Any) -> Any:
        return builder.not_(_among(builder, builder.or_(text, ir.Constant(text.type, [0x20] * 64)), "a", 26))

    return types.uint64(array, types.int64), lambda *code: _bits64(*code, is_set)


@jit(forceinline=True, _nrt=False)
def _outside64(text, i, inside):
    """A bit for each of the 64 bytes from byte i on: 1 where the byte is not of the set `inside`."""
    if inside == LETTERS:
        return _not_letter64(text, i)
    return _not_print64(text, i) if inside == PRINTED else _not_lower64(text, i)


@jit(forceinline=True, _nrt=False)
def _put(out, p, value):
    """Writes the ids of a value at out[p:] and returns how many they are. Always writes three places."""
    if out.itemsize == 2:
        _store64(out, 2 * p, value)
        return int64(value >> uint64(48))
    _store64(out, 4 * p, (value & uint64(0xFFFFF)) | ((value & uint64(0xFFFFF00000)) << uint64(12)))
    out[p + 2] = (value >> uint64(40)) & uint64(0xFFFFF)
    return int64(value >> uint64(60))


@jit(forceinline=True, _nrt=False)
def _count(out, value):
    """How many ids a value holds, UNPACKED if they are in the pool."""
    return value >> uint64(48) if out.itemsize == 2 else value >> uint64(60)


@jit(forceinline=True, _nrt=False)
def _pack(out, ids, count):
    """The value of ids[:count]."""
    bits, top = (uint64(16), uint64(48)) if out.itemsize == 2 else (uint64(20), uint64(60))
    if count > 3:
        return UNPACKED << top
    value = uint64(count) << top
    for k in range(count):
        value |= uint64(ids[k]) << (uint64(k) * bits)
    return value


@jit(forceinline=True, _nrt=False)
def _child(trie, entry, byte):
    """The entry of the child along a byte of a trie's node, given by its entry. 0 if there is none.

    The trie is a double array (Aoe, 1989): the child of a node along a byte is the entry at the place (base ^ byte).
    An entry holds the byte that leads to it in bits 0 to 8 (NO_BYTE: the entry is free, or a root), its base in bits 16
    to 39 (no two nodes have the same; 0 if it has no child), and from bit 40 the id of the token that ends there, plus
    one (0 if none does). The roots are entries 0 and 1.
    """
    child = trie[((entry >> uint64(16)) & uint64(0xFFFFFF)) ^ uint64(byte)]
    return child if child & uint64(0x1FF) == uint64(byte) else uint64(0)


@jit(forceinline=True, _nrt=False)
def _token(entry):
    """The id of the token that ends at an entry of a trie, -1 if none does."""
    return int64(entry >> uint64(40)) - 1


@jit(_nrt=False)
def _clear_runs(runs):
    """Empties the tables of runs."""
    for table in (runs.near, runs.far):
        table[:] = uint64(0)
    runs.used[:] = 0


@jit(forceinline=True, _nrt=False)
def _first_bytes(word, count):
    """The first `count` bytes of a word, 0 to 8, and zeros."""
    half = uint64(32 - 4 * count)  # a shift by 64 would have no result
    return word & ((~uint64(0) >> half) >> half)


@jit(forceinline=True, _nrt=False)
def _near_key(text, start, length):
    """The first 8 bytes of a run of up to 16 bytes, and the others. Zeros fill both up."""
    key = _first_bytes(_load64(text, start), min(length, 8))
    return key, _first_bytes(_load64(text, start + 8), max(length, 8) - 8)


@jit(forceinline=True, _nrt=False)
def _near_set(near, key, rest):
    """Where the set of a run begins in RunTables.near."""
    return (((key ^ (rest * uint64(0xBF58476D1CE4E5B9))) * GOLDEN) >> uint64(42)) & uint64(near.size - 8)


@jit(forceinline=True, _nrt=False)
def _far_set(far, run_hash):
    """Where the set of a longer run begins in RunTables.far."""
    return (run_hash >> uint64(42)) & uint64(far.size - 8)


@jit(forceinline=True, _nrt=False)
def _find_near(near, j, key, rest):
    """The value of a run of up to 16 bytes, EMPTY if the table does not have it. j: where its set begins."""
    if near[j] == key and near[j + uint64(1)] == rest:
        return near[j + uint64(2)]
    if near[j + uint64(4)] != key or near[j + uint64(5)] != rest:
        return EMPTY
    return _swapped(near, j)


@jit(forceinline=True, _nrt=False)
def _swapped(table, j):
    """Exchanges the slots of the set at j. Returns the value in the first."""
    for k in range(3):
        first, second = j + uint64(k), j + uint64(k + 4)
        table[first], table[second] = table[second], table[first]
    return table[j + uint64(2)]


@jit(forceinline=True, _nrt=False)
def _set_run(table, j, first, second, value):
    """Writes a new run to the set at j."""
    slot = j if table[j] == uint64(0) else j + uint64(4)
    table[slot], table[slot + uint64(1)], table[slot + uint64(2)] = first, second, value


@jit()
def grow_trie(text, bounds, roots, ids, trie):
    """Fills a trie with tokens: token t is text[bounds[t] : bounds[t + 1]] under root roots[t], with id ids[t].

    The tokens are sorted by root and spelling, and none is empty. trie: uint64, all NO_BYTE, a multiple of 256 and at
    least 512. Returns how many entries are in use; 0 if there are too few.
    """
    most = bounds[-1] + 2
    first_child, next_sibling, last_child = np.zeros(most, np.int32), np.zeros(most, np.int32), np.zeros(most, np.int32)
    byte_of, id_of, place_of = np.zeros(most, np.uint8), np.full(most, -1, np.int32), np.zeros(most, np.int32)
    path, num_nodes, previous = np.zeros(most, np.int32), 2, -1
    for t in range(ids.size):
        length, shared = bounds[t + 1] - bounds[t], 0
        if previous >= 0 and roots[previous] == roots[t]:
            start, width = bounds[previous], bounds[previous + 1] - bounds[previous]
            while shared < min(length, width) and text[start + shared] == text[bounds[t] + shared]:
                shared += 1
        path[0] = roots[t]
        for depth in range(shared, length):
            parent, node = path[depth], num_nodes
            if last_child[parent] == 0:
                first_child[parent] = node
            else:
                next_sibling[last_child[parent]] = node
            last_child[parent], byte_of[node], path[depth + 1] = node, text[bounds[t] + depth], node
            num_nodes += 1
        id_of[path[length]] = ids[t]
        previous = t
    # A list of the free entries of the last blocks: after[e] and before[e] are the free entries around e.
    after, before = np.zeros(trie.size, np.int32), np.zeros(trie.size, np.int32)
    has_base, bytes_of_node = np.zeros(trie.size, np.bool_), np.zeros(256, np.int64)
    size, place_of[1] = 256, 1  # no node has its children in the first block
    for node in range(num_nodes):
        count, child = 0, first_child[node]
        while child != 0:
            bytes_of_node[count] = byte_of[child]
            count += 1
            child = next_sibling[child]
        base, free, tries = 0, after[0], 0
        while count > 0 and base == 0 and free != 0 and tries < MOST_TRIES:
            base = free ^ bytes_of_node[0]
            is_free = not has_base[base]
            for k in range(1, count):
                is_free = is_free and trie[base ^ bytes_of_node[k]] == NO_BYTE
            if not is_free:
                base, free, tries = 0, after[free], tries + 1
        if count > 0 and base == 0:  # a new block; the free entries of an old one are given up
            if size + 256 > trie.size:
                return 0
            base = size
            for e in range(max(size - 256 * OPEN_BLOCKS, 256), max(size - 256 * OPEN_BLOCKS, 256) + 256):
                if size > 256 * OPEN_BLOCKS and trie[e] == NO_BYTE:
                    after[before[e]], before[after[e]] = after[e], before[e]
            for e in range(size, size + 256):
                before[e], after[e] = before[0], 0
                after[before[0]], before[0] = e, e
            size += 256
        has_base[base] = True
        entry = uint64(id_of[node] + 1) << uint64(40) | uint64(base) << uint64(16)
        trie[place_of[node]] = entry | (uint64(byte_of[node]) if node > 1 else NO_BYTE)
        child = first_child[node]
        for k in range(count):
            e = base ^ bytes_of_node[k]
            trie[e] = uint64(bytes_of_node[k])  # no longer free; completed at the child's turn
            after[before[e]], before[after[e]] = after[e], before[e]
            place_of[child] = e
            child = next_sibling[child]
    return size


@jit(_nrt=False)
def _wordpiece(word, size, num_chars, tables, ids):
    """Writes the ids of a normalized word of `size` bytes to `ids`, longest match first. Returns how many.

    A word that the vocabulary cannot spell is one unknown token.
    """
    if num_chars > tables.max_chars:
        ids[0] = tables.unk
        return 1
    trie, count, start = tables.trie, 0, 0
    while start < size:
        entry, best, stop = trie[int64(start > 0)], int64(-1), start
        for b in range(start, size):
            entry = _child(trie, entry, word[b])
            if entry == uint64(0):
                break
            if _token(entry) >= 0:
                best, stop = _token(entry), b + 1
        if best < 0:
            ids[0] = tables.unk
            return 1
        ids[count] = best
        count += 1
        start = stop
    return count


@jit(_nrt=False)
def _pool(ids, count, runs):
    """Adds ids[:count] to the pool. Returns where they are, as a value holds it. The caller has made room."""
    first = runs.used[1]
    for k in range(count):
        runs.pool[first + k] = ids[k]
    runs.used[1] += count
    return uint64(first) | (uint64(count) << uint64(32))


@jit(_nrt=False)
def _learn(text, start, length, tables, runs, out):
    """The value of an ASCII run that the tables do not have. Empties the tables if there is no room for its ids."""
    if runs.used[1] + length > runs.pool.size:
        _clear_runs(runs)
    for k in range(length):
        byte = text[start + k]
        runs.word[k] = byte | ((byte >> 1) & 0x20) if tables.fold != 0 else byte
    count = _wordpiece(runs.word, length, length, tables, runs.ids)
    value = _pack(out, runs.ids, count)
    return value if count <= 3 else value | _pool(runs.ids, count, runs)


@jit(forceinline=True, _nrt=False)
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


@jit(_nrt=False)
def find_added(text, starts, stops, added, seen, found):
    """Finds added tokens in the pieces text[starts[i] : stops[i]]: the leftmost, there the longest, then the next.

    added: Added. seen: uint64 [0x110000 / 64], gets a bit for each code point that begins with a watched byte, or is
    empty. found: int64 [n, 4], gets rows (piece, start, stop, id). Returns the number of tokens found; the rows beyond
    n were not written.
    """
    trie, ids, begins = added.trie, added.ids, added.begins
    count = 0
    for piece in range(starts.size):
        stop = stops[piece]
        free = starts[piece]  # where the last token that was found ends
        for base in range(starts[piece], stop, 64):
            in_piece = ~uint64(0) if stop - base >= 64 else (uint64(1) << uint64(stop - base)) - uint64(1)
            mask = _in_ranges64(text, base, added.first) & _in_ranges64(text, base + 1, added.second) & in_piece
            while mask != uint64(0):
                i = base + _trailing_zeros(mask)
                mask &= mask - uint64(1)
                if i < free or not begins[int64(text[i]) << 8 | int64(text[i + 1])]:
                    continue
                entry, token = trie[0], int64(-1)
                for k in range(i, stop):
                    entry = _child(trie, entry, text[k])
                    if entry == uint64(0):
                        break
                    if _token(entry) >= 0:
                        token, free = _token(entry), k + 1
                if token >= 0 and ids[token] != -1:
                    if count < found.shape[0]:
                        found[count, 0], found[count, 1] = piece, i
                        found[count, 2], found[count, 3] = free, ids[token]
                    count += 1
            mask = _in_ranges64(text, base, added.watched) & in_piece if seen.size > 0 else uint64(0)
            while mask != uint64(0):
                point = _decode(text, base + _trailing_zeros(mask))[0]
                seen[point >> 6] |= uint64(1) << uint64(point & 63)
                mask &= mask - uint64(1)
    return count


@jit(_nrt=False)
def find_hazards(text, starts, stops, hazards, adjacent, watched, is_harmed):
    """Sets is_harmed[i] where piece i may get an added token by its normal form alone.

    hazards: uint8 [0x110000]. 2: the normal form of a code point has characters of a token. 1: it is empty; then the
    piece is harmed if what stands before and after it (other such code points do not count) are adjacent in a token.
    From 3 on: the number of a character of a token. adjacent: bool [256, 256], by these numbers. watched: as in Added;
    all code points of hazard 1 and 2 begin with a watched byte.
    """
    for piece in range(starts.size):
        start, stop = starts[piece], stops[piece]
        for base in range(start, stop, 64):
            mask = _in_ranges64(text, base, watched)
            while mask != uint64(0) and not is_harmed[piece]:
                i = base + _trailing_zeros(mask)
                mask &= mask - uint64(1)
                if i >= stop:
                    break
                point, width = _decode(text, i)
                hazard, after, before = hazards[point], np.uint8(1), np.uint8(1)
                k = i + width
                while hazard == 1 and after == 1 and k < stop:
                    point, width = _decode(text, k)
                    after = hazards[point]
                    k += width
                while hazard == 1 and before == 1 and i > start:
                    i -= 1
                    while i > start and text[i] & 0xC0 == 0x80:
                        i -= 1
                    before = hazards[_decode(text, i)[0]]
                is_harmed[piece] = hazard == 2 or (hazard == 1 and adjacent[before, after])


@jit(forceinline=True, _nrt=False)
def _rank(pairs, left, right):
    """The rank of the merge of two ids, NO_RANK if they are not merged."""
    mask = uint64(pairs.size - 1)
    key = (uint64(left) << uint64(20)) | uint64(right)
    j = ((key * GOLDEN) >> uint64(40)) & mask
    while pairs[j] >> uint64(24) != key:
        if pairs[j] == EMPTY:
            return NO_RANK
        j = (j + uint64(1)) & mask
    return int64(pairs[j] & uint64(0xFFFFFF))


@jit(_nrt=False)
def _merge(size, tables, ids, ranks):
    """Merges ids[:size] in place. Returns how many ids are left.

    Merges the pair of lowest rank first, and the leftmost of equal pairs, until no pair can be merged (Sennrich et al.,
    2016). ranks: int64 [at least size]. Takes time in the square of `size`, with a small factor.
    """
    for k in range(size - 1):
        ranks[k] = _rank(tables.pairs, ids[k], ids[k + 1])
    while size > 1:
        best, place = NO_RANK, 0
        for k in range(size - 1):
            best = min(best, ranks[k])
        if best == NO_RANK:
            break
        while ranks[place] != best:
            place += 1
        ids[place] = tables.merged[best]
        size -= 1
        for k in range(place + 1, size):
            ids[k], ranks[k] = ids[k + 1], ranks[k + 1]
        if place > 0:
            ranks[place - 1] = _rank(tables.pairs, ids[place - 1], ids[place])
        if place < size - 1:
            ranks[place] = _rank(tables.pairs, ids[place], ids[place + 1])
    return size


@jit(forceinline=True, _nrt=False)
def _lane(rank, place):
    """An entry of the lanes of `_merge_short`."""
    return np.int32(rank << 5 | place) if rank != NO_RANK else NO_LANE


@jit(_nrt=False)
def _merge_short(size, pairs, merged, ids, lanes, links):
    """Does what `_merge` does, for at most LANES ids, with one vector instruction for each search of the lowest rank.

    pairs, merged: as in WordTables. lanes: int32 [LANES]: (rank << 5 | place) of the pair that begins at a place.
    links: int64 [2, LANES + 1]: of each place the next one and the one before.
    """
    after, before = links[0], links[1]
    for k in range(LANES):
        lanes[k] = NO_LANE
    for k in range(size):
        after[k], before[k] = k + 1, k - 1
        if k + 1 < size:
            lanes[k] = _lane(_rank(pairs, ids[k], ids[k + 1]), k)
    best = _least32(lanes)
    while best != NO_LANE:
        k = int64(best) & 31
        gone = after[k]
        following, previous = after[gone], before[k]
        ids[k], after[k], before[following], lanes[gone] = merged[best >> 5], following, k, NO_LANE
        lanes[k] = _lane(_rank(pairs, ids[k], ids[following]), k) if following < size else NO_LANE
        if previous >= 0:
            lanes[previous] = _lane(_rank(pairs, ids[previous], ids[k]), previous)
        best = _least32(lanes)
    count, k = 0, 0
    while k < size:
        ids[count] = ids[k]
        count += 1
        k = after[k]
    return count


@jit(_nrt=False)
def _merge_any(size, tables, runs):
    """Merges runs.ids[:size] in place. Returns how many ids are left."""
    if size <= LANES:
        return _merge_short(size, tables.pairs, tables.merged, runs.ids, runs.lanes, runs.links)
    return _merge(size, tables, runs.ids, runs.ranks[0])


@jit()
def keep_whole(text, bounds, byte_ids, ids, pairs, merged, is_whole):
    """Sets is_whole[t] where merging the bytes text[bounds[t] : bounds[t + 1]] of a token gives its id ids[t].

    byte_ids, pairs, merged: as in WordTables. is_whole: bool [num_tokens].
    """
    found, lanes, links = np.zeros(LANES, np.int64), np.zeros(LANES, np.int32), np.zeros((2, LANES + 1), np.int64)
    for t in range(ids.size):
        size = bounds[t + 1] - bounds[t]
        has_ids = 0 < size <= LANES
        for k in range(size if has_ids else 0):
            found[k] = byte_ids[int64(k == size - 1), text[bounds[t] + k]]
            has_ids = has_ids and found[k] >= 0
        is_whole[t] = has_ids and _merge_short(size, pairs, merged, found, lanes, links) == 1 and found[0] == ids[t]


@jit(_nrt=False)
def add_pairs(lefts, rights, ranks, pairs):
    """Fills the hash table of merges. The merge of rank ranks[r] joins ids lefts[r] and rights[r].

    pairs: uint64 [power of two], all EMPTY: left in bits 44 to 63, right in bits 24 to 43, rank below.
    """
    mask = uint64(pairs.size - 1)
    for r in range(lefts.size):
        key = (uint64(lefts[r]) << uint64(20)) | uint64(rights[r])
        j = ((key * GOLDEN) >> uint64(40)) & mask
        while pairs[j] != EMPTY:
            j = (j + uint64(1)) & mask
        pairs[j] = (key << uint64(24)) | uint64(ranks[r])


@jit(forceinline=True, _nrt=False)
def _has_zero(word):
    """Whether one of the 8 bytes of a word is zero."""
    return ((word - uint64(0x0101010101010101)) & ~word & uint64(0x8080808080808080)) != uint64(0)


@jit(_nrt=False)
def _hash(text, start, length):
    """The hash of a run of 9 bytes or more."""
    h = uint64(length)
    for k in range(0, length - 8, 8):
        h = (h ^ _load64(text, start + k)) * GOLDEN
        h ^= h >> uint64(32)
    h = (h ^ _load64(text, start + length - 8)) * GOLDEN
    return h ^ (h >> uint64(32))


@jit(forceinline=True, _nrt=False)
def _find(text, start, length, near, far, spelled):
    """The value of a run, EMPTY if the tables do not have it. length: 1 to LONGEST_KEY.

    A run of up to 16 bytes that contains a zero byte is never found, as a key does not say where it ends.
    """
    if length > 16:
        return _find_far(text, start, length, far, spelled)
    key, rest = _near_key(text, start, length)
    has_zero = _has_zero(key | ~_first_bytes(~uint64(0), min(length, 8)))
    if has_zero or _has_zero(rest | ~_first_bytes(~uint64(0), max(length, 8) - 8)):
        return EMPTY
    return _find_near(near, _near_set(near, key, rest), key, rest)


@jit(_nrt=False)
def _find_far(text, start, length, far, spelled):
    """The value of a run of 17 to LONGEST_KEY bytes, EMPTY if the table does not have it."""
    h = _hash(text, start, length)
    j = _far_set(far, h)
    for slot in (j, j + uint64(4)):
        where = far[slot + uint64(1)]
        if far[slot] == h and where & uint64(0xFF) == uint64(length):
            place, k = int64(where >> uint64(8)), 0
            while k < length and spelled[place + k] == text[start + k]:
                k += 1
            if k == length:
                return far[slot + uint64(2)] if slot == j else _swapped(far, j)
    return EMPTY


@jit(forceinline=True, _nrt=False)
def _keep(text, start, length, ids, count, out, runs):
    """Adds a run that the tables do not have, with its ids. If there is no room, all tables are emptied first.

    A run of up to 16 bytes that contains a zero byte is left out.
    """
    near, far, used = runs.near, runs.far, runs.used
    if count > runs.pool.size:
        return
    if length <= 16:
        for k in range(start, start + length):
            if text[k] == 0:
                return
    if used[0] + length > runs.spelled.size or used[1] + count > runs.pool.size:
        _clear_runs(runs)
    value = _pack(out, ids, count)
    if count > 3:
        value |= _pool(ids, count, runs)
    if length <= 16:
        key, rest = _near_key(text, start, length)
        _set_run(near, _near_set(near, key, rest), key, rest, value)
    else:
        h = _hash(text, start, length)
        for k in range(length):
            runs.spelled[used[0] + k] = text[start + k]
        _set_run(far, _far_set(far, h), h, (uint64(used[0]) << uint64(8)) | uint64(length), value)
        used[0] += length


@jit(_nrt=False)
def keep_runs(text, runs_of_text, ids, bounds, out, runs):
    """Adds runs that `tokenizers` has encoded to the tables.

    runs_of_text: int64, rows of Output.hard; run i is text[runs_of_text[i, 0] : runs_of_text[i, 1]]. Its ids are
    ids[bounds[i] : bounds[i + 1]], int64. out: an array of the dtype of ids as they are stored. A run with more ids
    than bytes is left out, as an output has no room for it.
    """
    for i in range(runs_of_text.shape[0]):
        start, length = runs_of_text[i, 0], runs_of_text[i, 1] - runs_of_text[i, 0]
        if length == 0 or length > LONGEST_KEY or bounds[i + 1] - bounds[i] > length:
            continue
        if _find(text, start, length, runs.near, runs.far, runs.spelled) == EMPTY:
            _keep(text, start, length, ids[bounds[i] :], bounds[i + 1] - bounds[i], out, runs)


@jit(_nrt=False)
def _stable_place(stable, key):
    """The slot of a pair of code points in RunTables.stable, or the free slot where it belongs."""
    mask = uint64(stable.size - 1)
    j = ((uint64(key) * GOLDEN) >> uint64(40)) & mask
    while stable[j] != 0 and stable[j] >> 1 != key:
        j = (j + uint64(1)) & mask
    return j


@jit(_nrt=False)
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


@jit(_nrt=False)
def _is_unstable(text, begin, start, stop, points, stable, state):
    """1 if a code point in text[start:stop] may change another one, else 0. Below 0: minus the code of what is missing.

    begin: where the piece begins. Each code point that may change others is tested against all before it, back to the
    last that changes none. Many of them in a row, or two after an ASCII character, count as unstable untested.
    """
    i = start
    while i > begin:  # back to a code point that changes none
        i -= 1
        while i > begin and text[i] & 0xC0 == 0x80:
            i -= 1
        point, width = _decode(text, i)
        if points[point, 0] & (MEETS | SILENT_FORM) == uint64(0):
            break
    chain, base, followers = i, int64(-1), 0
    while i < stop:
        point, width = _decode(text, i)
        entry = points[point, 0]
        if entry == uint64(0):
            state[CODE_POINT] = point
            return -UNKNOWN_CODE_POINT
        if entry & HARD_FORM != uint64(0) and i >= start:
            return 1
        if entry & HARD_FORM == uint64(0) and entry & MEETS != uint64(0):
            followers += 1
            if followers > MOST_FOLLOWERS or (base < 0x80 and followers > 1):
                return 1
            k = chain
            while k < i:
                other, other_width = _decode(text, k)
                k += other_width
                if points[other, 0] & SILENT_FORM != uint64(0):
                    continue  # what stands on both sides of it may meet
                found = stable[_stable_place(stable, (other << 21) | point)]
                if found == 0:
                    state[BEFORE], state[CODE_POINT] = other, point
                    return -UNKNOWN_PAIR
                if found & 1 == 0:
                    return 1
        elif entry & SILENT_FORM == uint64(0):
            chain, base, followers = i, point, 0
        i += width
    return 0


@jit(_nrt=False)
def _cut_after(text, i, stop, points, cuts, state):
    """The first place after byte i where the text can be cut, whatever `tokenizers` makes of the text before.

    -1: an entry is missing. Before and after the place stand code points that change nothing, and no word contains
    both. The one before is not stripped at the end of a text.
    """
    previous = uint64(0)  # class of the code point before, 0 if it may change something
    while i < stop:
        point, width = _decode(text, i)
        entry = points[point, 0]
        if entry == uint64(0):
            state[CODE_POINT] = point
            return -1
        kind = entry & uint64(0xFF)
        if entry & (MEETS | HARD_FORM | SILENT_FORM) != uint64(0):
            kind = uint64(0)
        if previous != uint64(0) and kind != uint64(0) and cuts[previous * uint64(CLASSES) + kind]:
            if i + width >= stop:
                return i
            following = points[_decode(text, i + width)[0], 0]
            if following == uint64(0):
                state[CODE_POINT] = _decode(text, i + width)[0]
                return -1
            if following & (MEETS | HARD_FORM | SILENT_FORM) == uint64(0):
                return i
        previous = kind if entry & BLANK == uint64(0) else uint64(0)
        i += width
    return stop


@jit(_nrt=False)
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


@jit(_nrt=False)
def _whole_word(word, start, stop, trie):
    """The id of word[start:stop] if that is a token, else -1."""
    entry = trie[0]
    for k in range(start, stop):
        entry = _child(trie, entry, word[k])
        if entry == uint64(0):
            return int64(-1)
    return _token(entry)


@jit(_nrt=False)
def _unigram(word, size, tables, ids, ranks, best):
    """Writes the ids of the most probable way to cut word[:size] (Kudo, 2018) to `ids`. Returns how many.

    Of equally probable ways the one is taken that was found first, from the left and with short tokens first, as
    `tokenizers` does.
    """
    trie, scores = tables.trie, tables.scores
    came_from, token = ranks[0], ranks[1]
    for k in range(size + 1):
        came_from[k], best[k] = -1, 0.0
    i = 0
    while i < size:
        width = 1 if word[i] < 0x80 else 2 if word[i] < 0xE0 else 3 if word[i] < 0xF0 else 4
        so_far, entry, is_known, k = best[i], trie[0], False, i
        while k < size:
            entry = _child(trie, entry, word[k])
            if entry == uint64(0):
                break
            k += 1
            found = _token(entry)
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
                found = _whole_word(word, i, unknown_stop, trie)
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


@jit(_nrt=False)
def _characters(word, size, tables, ids):
    """Writes the ids of the characters of a word to `ids`, for BPE. Returns how many."""
    count, i, in_unknown = 0, 0, False
    while i < size:
        width = 1 if word[i] < 0x80 else 2 if word[i] < 0xE0 else 3 if word[i] < 0xF0 else 4
        entry = tables.trie[int64(i + width == size)]  # under root 1 are the characters that end a word
        for k in range(i, i + width):
            entry = _child(tables.trie, entry, word[k])
            if entry == uint64(0):
                break
        found = _token(entry)
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


@jit(forceinline=True, _nrt=False)
def _emit(out, p, value, pool):
    """Writes the ids of a value at out[p:] and returns how many they are."""
    if _count(out, value) == UNPACKED:
        return _emit_pooled(out, p, value, pool)
    return _put(out, p, value)


@jit(_nrt=False)
def _emit_pooled(out, p, value, pool):
    """Does what `_emit` does, for a value that says where its ids are in the pool."""
    first, count = int64(value & LOW32), int64((value >> uint64(32)) & uint64(0xFFFF))
    for k in range(count):
        out[p + k] = pool[first + k]
    return count


@jit(_nrt=False)
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
    near, far, spelled, pool = runs.near, runs.far, runs.spelled, runs.pool
    word, ids = runs.word, runs.ids
    out, out_bounds, hard, state = output.ids, output.bounds, output.hard, output.state
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
                key, rest = _near_key(text, i, length)
                key |= (key >> uint64(1)) & fold
                rest |= (rest >> uint64(1)) & fold
                j = _near_set(near, key, rest)
                value = _find_near(near, j, key, rest)
                if value == EMPTY:
                    value = _learn(text, i, length, tables, runs, out)
                    _set_run(near, j, key, rest, value)
                p += _emit(out, p, value, pool)
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
                    value = _find(text, i, run_stop - i, near, far, spelled)
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


@jit(forceinline=True, _nrt=False)
def _encode_word(text, start, stop, prefixed, tables, runs):
    """Writes the ids of the word text[start:stop] to runs.ids. Returns how many.

    prefixed: whether the prefix is put before the word. Where each word gets one, a word that begins with it does not.
    """
    word, ids, size, num_chars, after_space = runs.word, runs.ids, 0, 0, False
    is_bpe = tables.model == BYTE_BPE or tables.model == CHARACTER_BPE  # noqa: PLR1714
    if is_bpe and not prefixed:
        while start + size < stop:
            ids[size] = tables.letters[int64(start + size == stop - 1), text[start + size]]
            if ids[size] < 0:
                break
            size += 1
        if start + size == stop:
            found = _whole_word(text, start, stop, tables.trie) if tables.whole != 0 else int64(-1)
            if found >= 0:
                ids[0] = found
                return 1
            return _merge_any(size, tables, runs)
        size = 0
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
    if is_bpe:
        if tables.whole != 0:
            found = _whole_word(word, 0, size, tables.trie)
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
        return _merge_any(count, tables, runs)
    if tables.model == UNIGRAM:
        return _unigram(word, size, tables, ids, runs.ranks, runs.best)
    if tables.model == WORD_PIECE:
        return _wordpiece(word, size, num_chars, tables, ids)
    found = _whole_word(word, 0, size, tables.trie)
    ids[0] = found if found >= 0 else tables.unk
    return 1


@jit(_nrt=False)
def words(pieces, tables, runs, output):
    """Encodes pieces of text by the rules and the model of `tables`. Returns one of the codes above.

    pieces: Text. tables: WordTables. runs: RunTables. output: Output. After a code other than DONE the caller supplies
    what is missing and calls the kernel again; it continues from output.state. After GIVES_SPECIAL it gives up.

    The automaton finds where the next word ends. Most words are in the tables of runs and are copied from there. A
    stretch whose code points change each other is hard: it begins and ends where text can be cut, whatever it holds.
    """
    text, starts, stops = pieces.data, pieces.starts, pieces.stops
    points, ascii_classes, steps, cuts = tables.points, tables.ascii, tables.steps, tables.cuts
    quick, skips, after = tables.quick, tables.skips, tables.after
    near, far, spelled, pool = runs.near, runs.far, runs.spelled, runs.pool
    out, out_bounds, hard, state = output.ids, output.bounds, output.hard, output.state
    limits = state[LIMITS:]  # where the text ends that each rule is cutting
    num_rules, first_state = tables.starts.size, uint64(tables.starts[0])
    longest = runs.word.size // 4 - 16
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
            is_quick, word_stop, value, mask, base = False, int64(-1), EMPTY, uint64(0), i
            while tables.inside != NO_BYTES and not is_first:  # words that need no automaton
                if mask == uint64(0):
                    base, mask = i, _outside64(text, i, tables.inside)
                    if mask & uint64(1) != uint64(0) and after[text[uint64(i)]] == NEXT_BEGINS:
                        mask &= mask - uint64(1)  # the space that begins this word does not end it
                    if mask == uint64(0):
                        break
                s = base + _trailing_zeros(mask)
                what, length = after[text[uint64(s)]], s - i
                # a mark at s + 1 would change the byte that ends the word
                if s >= end or what == NOT_QUICK or (tables.meets != 0 and quick[text[uint64(s + 1)]] == 0):
                    break
                mask &= mask - uint64(1)
                if length == 0 and what == GAP:
                    i = s + 1
                    continue
                if length == 0 or (length == 1 and after[text[uint64(i)]] == NEXT_BEGINS):
                    break  # nothing, or nothing but a space: what follows decides what this is
                if length <= 16:
                    key, rest = _near_key(text, i, length)
                    value = _find_near(near, _near_set(near, key, rest), key, rest)
                else:
                    value = _find_far(text, i, length, far, spelled)
                if value == EMPTY:
                    is_quick, word_stop = True, s
                    break
                p += _emit(out, p, value, pool)
                i, has_begun = s, 1
                if what == GAP:
                    i += 1
                elif what == OWN_WORD:
                    if s + 1 >= end or text[uint64(s + 1)] != ord(" "):
                        break
                    if tables.meets != 0 and quick[text[uint64(s + 2)]] == 0:
                        break
                    key = uint64(text[uint64(s)])
                    value = _find_near(near, _near_set(near, key, uint64(0)), key, uint64(0))
                    if value == EMPTY:
                        break
                    p += _emit(out, p, value, pool)
                    i, mask = s + 1 + int64(after[ord(" ")] == GAP), mask & (mask - uint64(1))
            if i >= end:
                break
            if not is_quick:
                value = EMPTY
            if level == 0 and not is_quick:
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
                    if skips[automaton]:
                        mask = _not_lower64(text, place)
                        skipped = min(_trailing_zeros(mask) if mask != uint64(0) else 64, end - place)
                        if skipped > 0:
                            place += skipped
                            word_stop = place - 1
                if code != DONE:
                    break
                region_stop = int64(-1)
                if tables.meets != 0:
                    place = min(place + width, end)
                    while place < end:  # the automaton has seen the code point before; do these change it?
                        point, width = _decode(text, place)
                        entry = points[point, 0]
                        if entry == uint64(0):
                            code, state[CODE_POINT] = UNKNOWN_CODE_POINT, point
                        if entry & (MEETS | SILENT_FORM) == uint64(0):
                            break
                        if entry & MEETS != uint64(0):
                            flags |= MEETS_STEP
                        place += width
                    if code != DONE:
                        break
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
                        value = _find(text, i, region_stop - i, near, far, spelled)
                    if value != EMPTY:
                        p += _emit(out, p, value, pool)
                    elif num_hard == hard.shape[0]:
                        code = TOO_MANY_HARD
                        break
                    else:
                        hard[num_hard, 0], hard[num_hard, 1], hard[num_hard, 2] = i, region_stop, p
                        hard[num_hard, 3] = IN_MIDDLE
                        if is_first:  # with what was passed over, as it may keep a blank from being stripped
                            hard[num_hard, 0], hard[num_hard, 3] = begin, AT_BEGIN
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
                if is_key and not is_quick:
                    value = _find(text, i, length, near, far, spelled)
                if value != EMPTY:
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
            state[PIECE], state[PLACE], state[NUM_HARD] = piece, p, num_hard
            state[HAS_BEGUN], state[BYTE], state[LEVEL] = has_begun, i, level
            if has_begun == 0:  # what begins a text is looked at anew
                state[BYTE], state[LEVEL] = begin, 0
            return code
        i, has_begun, state[LEVEL] = stops[piece], 0, 0
        if pieces.tails[piece] >= 0:
            out[p] = pieces.tails[piece]
            p += 1
        out_bounds[piece + 1] = p
    state[NUM_HARD] = num_hard
    return DONE
