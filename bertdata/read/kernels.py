"""Every compiled loop of the read path.

All are in one file, because numba's cache does not notice a change in an imported kernel.

Python checks the arguments and allocates the arrays; a kernel only loops, and never raises. What a kernel reads from a
file is checked against the array that it points into, and damage is reported through the return value. Keys are uint64,
and their arithmetic is modulo 2**64; docs/determinism.md defines it, and tests/reference/ holds a slow, plain
reference implementation of each kernel.

Kernels take their arguments as records. A NamedTuple groups arrays and numbers that belong together; it is passed as a
plain tuple, which takes half the time to start a kernel, and the kernel names its members again. A structured dtype
(SPAN, PAIR) is a row of a table with named columns.

Letters in shapes: B rows, T places of a row, K slots for masked places, V ids of the vocabulary, S sources of a mix.
Several datasets can fill rows of one batch. So kernels that lay out rows take `which`, int64 [n]: the rows that they
write, and whose entries they read of the other arrays.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, types, uint64
from numba.extending import intrinsic
from numpy.typing import NDArray

from bertdata import keys
from bertdata.bits import count_ones, request, trailing_zeros
from bertdata.jit import jit, part
from bertdata.types import IGNORE_INDEX

_inline = functools.partial(jit, inline="always")
U0, U1, U2, U6, U32, U63 = (np.uint64(number) for number in (0, 1, 2, 6, 32, 63))
LOW32 = np.uint64(0xFFFFFFFF)
ROUNDS = 8
GOLDEN = np.uint64(keys.GOLDEN)
# The words of a key that say what it is for. "window" names groups of blocks: the word may not change any more.
PHASE, ORDER, MASK, BLOCKS, GROUP, PAIRS, MIX = (
    np.uint64(keys.purpose(name)) for name in ("phase", "order", "mask", "blocks", "window", "pairs", "mix")
)
GROUP_BLOCKS = 64  # blocks of a group; the last group of an epoch may have up to 127 and a part
MIX_BLOCK = 100  # positions of a mix that together have each source's share


# ------------------------------------------------------------------------------------------------------- keys and draws


@_inline()
def mix(x):
    """The last step of SplitMix64: 64 bits → 64 bits, one to one."""
    x = (x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
    return x ^ (x >> uint64(31))


@_inline()
def absorb(h, word):
    """A key that has taken in one more word (docs/determinism.md)."""
    return mix((h ^ word) + GOLDEN)


@_inline()
def draw(key, index):
    """64 random bits: number `index` of a key."""
    return mix(key + (index + U1) * GOLDEN)


@_inline()
def below(x, n):
    """x scaled to [0, n): the high half of the 128-bit product x * n."""
    x_lo, x_hi, n_lo, n_hi = x & LOW32, x >> U32, n & LOW32, n >> U32
    cross = x_hi * n_lo + ((x_lo * n_lo) >> U32)
    other = x_lo * n_hi + (cross & LOW32)
    return x_hi * n_hi + (cross >> U32) + (other >> U32)


@_inline()
def below32(x, n):
    """The high half of x scaled to [0, n), for n up to 2**32."""
    return ((x >> U32) * n) >> U32


@part()
def key3(seed, purpose, variant):
    """key(seed, purpose, variant) of docs/determinism.md."""
    return absorb(absorb(absorb(U0, seed), purpose), variant)


# ---------------------------------------------------------------------------------------------------------------- order


@jit()
def num_bits(n):
    """b such that 2**b is the smallest power of two that is at least n and at least 64."""
    bits = uint64(6)
    while bits < U63 and (n - U1) >> bits != U0:
        bits += U1
    return bits


@jit()
def permuted(key, n, bits, x):
    """Where a keyed permutation of [0, n) takes x.

    It is a Feistel network on numbers of `bits` bits, repeated until the result is below n.
    """
    lo = bits // U2
    hi = bits - lo
    lo_mask = (U1 << lo) - U1
    while True:
        left, right = x >> lo, x & lo_mask
        for r in range(ROUNDS):
            counter = uint64(r) << U32
            if r & 1 == 0:
                left ^= draw(key, counter + right) >> (uint64(64) - hi)
            else:
                right ^= draw(key, counter + left) >> (uint64(64) - lo)
        x = (left << lo) | right
        if x < n:
            return x


@jit()
def permute(positions, num_samples, which, bounds, seed, epochs, sample_ids):
    """Writes the epoch and the sample id of each position of the endless stream. int64 [B] each; 45 ns a sample.

    num_samples int64 [S]: of the epochs of each source. which int64 [B], bounds int64 [S + 1]: positions
    which[bounds[s]] to which[bounds[s + 1] - 1] are of source s.
    """
    for s in range(num_samples.size):
        size = num_samples[s]
        n = uint64(size)
        bits = num_bits(n)
        epoch, start, key = np.int64(0), np.int64(0), key3(seed, ORDER, U0)
        for i in which[bounds[s] : bounds[s + 1]]:
            if not 0 <= positions[i] - start < size:
                epoch = positions[i] // size
                start, key = epoch * size, key3(seed, ORDER, uint64(epoch))
            epochs[i] = epoch
            sample_ids[i] = np.int64(permuted(key, n, bits, uint64(positions[i] - start)))


@jit()
def permute_blocks(positions, num_samples, which, bounds, most, seed, epochs, sample_ids):
    """As `permute`, for an order in blocks of `most` samples, or of all if a source has less; twice the cost.

    Whole blocks are permuted. Each GROUP_BLOCKS of them that then follow one another are a group, and the samples of a
    group are permuted.
    """
    for s in range(num_samples.size):
        total, block = num_samples[s], min(most, num_samples[s])
        num_blocks = total // block
        group_samples = GROUP_BLOCKS * block
        num_groups = max(1, num_blocks // GROUP_BLOCKS)
        block_bits = num_bits(uint64(max(1, num_blocks)))
        last_epoch, last_group, block_key, group_key = np.int64(-1), np.int64(-1), U0, U0
        start, size, group_bits = np.int64(0), np.int64(1), U0
        for i in which[bounds[s] : bounds[s + 1]]:
            epoch = positions[i] // total
            x = positions[i] - epoch * total
            group = min(x // group_samples, num_groups - 1)
            if epoch != last_epoch or group != last_group:
                block_key = key3(seed, BLOCKS, uint64(epoch))
                group_key = absorb(key3(seed, GROUP, uint64(epoch)), uint64(group))
                start = group * group_samples
                size = total - start if group == num_groups - 1 else group_samples
                group_bits = num_bits(uint64(size))
                last_epoch, last_group = epoch, group
            y = np.int64(permuted(group_key, uint64(size), group_bits, uint64(x - start)))
            epochs[i] = epoch
            sample_ids[i] = start + y
            if start + y < num_blocks * block:
                number = uint64(group * GROUP_BLOCKS + y // block)
                number = permuted(block_key, uint64(num_blocks), block_bits, number)
                sample_ids[i] = np.int64(number) * block + y % block


@jit()
def counts_before(weights, block, counts):
    """Writes how many samples of each source come before a block of a mix. weights, counts int64 [S].

    The sum of the weights is below 2**31, so that nothing here overflows.
    """
    left, total = block * MIX_BLOCK, weights.sum()
    for s in range(weights.size):
        whole, part = left // total, left % total
        counts[s] = whole * weights[s] + (2 * part * weights[s] + total) // (2 * total)
        left -= counts[s]
        total -= weights[s]


@jit()
def mix_sources(positions, weights, seed, sources, inner, which, bounds):
    """Writes the source of each position of a mix, and which position of the source's own stream it is.

    positions, sources, inner int64 [B]. which int64 [B] gets the rows of source 0, then those of source 1, and so on;
    those of source s begin at bounds[s], int64 [S + 1]. 10 ns a position, if positions follow one another.
    """
    before, after = np.empty_like(weights), np.empty_like(weights)
    # Zeros, because for a position that does not exist the counts may overflow, and entries are used as indices.
    source_at, number_at = np.zeros(MIX_BLOCK, np.int64), np.empty(MIX_BLOCK, np.int64)
    block_start = np.int64(-(1 << 62))
    bounds[:] = 0
    for i in range(positions.size):
        if not 0 <= positions[i] - block_start < MIX_BLOCK:
            block = positions[i] // MIX_BLOCK  # slow, so not for each position
            block_start = block * MIX_BLOCK
            counts_before(weights, block, before)
            counts_before(weights, block + 1, after)
            place = 0
            for s in range(weights.size):
                stop = place + after[s] - before[s]
                source_at[place:stop] = s
                place = stop
            key = key3(seed, MIX, uint64(block))
            bits = U0
            for place in range(MIX_BLOCK - 1, 0, -1):
                bits = bits << U32 if place & 1 == 0 else draw(key, uint64(place >> 1))
                other = np.int64(below32(bits, uint64(place + 1)))
                source_at[place], source_at[other] = source_at[other], source_at[place]
            for place in range(MIX_BLOCK):
                number_at[place] = before[source_at[place]]
                before[source_at[place]] += 1
        place = positions[i] - block_start
        sources[i], inner[i] = source_at[place], number_at[place]
        bounds[sources[i] + 1] += 1
    for s in range(weights.size):
        bounds[s + 1] += bounds[s]
        before[s] = bounds[s]
    for i in range(positions.size):
        which[before[sources[i]]] = i
        before[sources[i]] += 1


# --------------------------------------------------------------------------------------------------- machine primitives


@intrinsic
def _pointer(typing: Any, address: Any, like: Any) -> Any:
    """A pointer to numbers of the type of `like`, for `carray`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(address, like), generate


@intrinsic
def _prefetch(typing: Any, address: Any) -> Any:
    """Asks the processor to load the 64 bytes at an address, and does not wait. The address may be invalid."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        request(builder, builder.inttoptr(args[0], ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(address), generate


@_inline()
def _is_set(bits, place):
    """Whether bit `place` of a uint64 array is set."""
    return bits[uint64(place) >> U6] >> (uint64(place) & U63) & U1


@_inline()
def _set(bits, place):
    bits[uint64(place) >> U6] |= U1 << (uint64(place) & U63)


# -------------------------------------------------------------------------------------- samples: where tokens come from


class TokenTable(NamedTuple):
    """The tokens of a split in memory: its shards end to end are one stream. One for each Loader."""

    starts: NDArray[np.int64]  # [num_shards + 1]: where each shard begins in the stream, then the length of the stream
    addresses: NDArray[np.int64]  # [num_shards]: memory address of the first token of each shard, 0 if it is not mapped
    itemsize: int  # bytes of a token: 2 or 4
    separator: int  # tokens after the text of each document: 1, or 0 if the dataset has no separator
    cls: int  # id of [CLS]
    sep: int  # id of [SEP]


SPAN = np.dtype(
    [
        ("address", np.int64),  # memory address of the first token
        ("row", np.int64),  # row of the batch
        ("place", np.int64),  # place in the row of the first token
        ("length", np.int64),  # tokens
        ("start", np.int64),  # where the first token is in the stream
    ]
)
"""Tokens that lie side by side in one shard and belong side by side in one row."""


class Frames(NamedTuple):
    """The rows of a batch before their text is copied: special tokens are there, spans say what belongs between."""

    ids: NDArray[np.int64]  # [B, T]
    text_places: NDArray[np.int64]  # [B]: places between the first [CLS] and the last [SEP]
    spans: NDArray[Any]  # SPAN [at least as many as the rows can have]


PREFETCHED = 1024  # bytes of a span that are prefetched; the processor itself continues a longer one


@_inline()
def _add_span(table, frames, number, shard, start, length, row, place):
    """Writes span `number` and prefetches its tokens. Returns number + 1."""
    address = table.addresses[shard] + (start - table.starts[shard]) * table.itemsize
    span = frames.spans[number]
    span["address"] = address
    span["row"] = row
    span["place"] = place
    span["length"] = length
    span["start"] = start
    for line in range(address & ~63, address + min(length * table.itemsize, PREFETCHED), 64):
        _prefetch(line)
    return number + 1


@part()
def _shard_of(starts, start):
    """The number of the shard that holds token `start` of the stream, by bisection."""
    lo, hi = 0, starts.size - 1
    while hi - lo > 1:
        middle = (lo + hi) // 2
        if starts[middle] <= start:
            lo = middle
        else:
            hi = middle
    return lo


@jit()
def phase(seed, epoch, total):
    """Where in a stream of `total` tokens the windows of an epoch begin."""
    return np.int64(below(key3(seed, PHASE, uint64(epoch)), uint64(total)))


@jit()
def window_rows(which, epochs, sample_ids, seed, table, frames, num_spans):
    """Lays out samples that are windows. epochs, sample_ids int64 [B]. num_spans: as in Samples.lay_out."""
    table, frames = TokenTable(*table), Frames(*frames)
    total, text_length = table.starts[-1], frames.ids.shape[1] - 2
    last_epoch, first = np.int64(-1), np.int64(0)
    for b in which:
        if epochs[b] != last_epoch:
            last_epoch = epochs[b]
            first = phase(seed, last_epoch, total)
        start = sample_ids[b] * text_length
        left = min(text_length, total - start)
        frames.text_places[b] = left
        frames.ids[b, 0] = table.cls
        frames.ids[b, left + 1] = table.sep
        start += first
        start = start - total if start >= total else start
        shard = _shard_of(table.starts, start)
        place = 1
        while left > 0:
            length = min(left, table.starts[shard + 1] - start)
            num_spans = _add_span(table, frames, num_spans, shard, start, length, b, place)
            place += length
            left -= length
            start += length
            shard += 1
            if shard == table.starts.size - 1:
                shard, start = 0, 0
    return num_spans


@_inline()
def _add_piece(table, frames, number, start, length, row, place):
    """Adds a span whose place in the stream comes from an index: -1 if no shard holds all of it."""
    if not (0 <= start < table.starts[-1] and length > 0):
        return np.int64(-1)
    shard = _shard_of(table.starts, start)
    if length > table.starts[shard + 1] - start:
        return np.int64(-1)
    return _add_span(table, frames, number, shard, start, length, row, place)


def pack_pieces(starts, lengths):
    """Pieces as an index stores them, uint64: where the first token is in the stream, then 16 bits of length."""
    return (starts << 16 | lengths).astype(np.uint64)


def piece_start(piece):
    """Where a piece begins in the stream; piece is a number or an array, uint64."""
    return piece >> np.uint64(16)


def piece_length(piece):
    """The tokens of a piece; piece is a number or an array, uint64."""
    return piece & np.uint64(0xFFFF)


_piece_start, _piece_length = _inline()(piece_start), _inline()(piece_length)


@jit()
def piece_rows(which, sample_ids, pieces, bounds, table, frames, position_ids, num_spans):
    """Lays out rows of one or more pieces of documents, each between a [CLS] and a [SEP] of its own.

    pieces uint64 [P]: see `pack_pieces`. bounds uint64 [N + 1]: row k holds pieces bounds[k] to bounds[k + 1]; if it is
    empty, row k holds piece k. position_ids int64 [B, T], or [0, 0] if they are not wanted: they count from 0 in each
    piece, and from 0 again in the padding. num_spans: as in Samples.lay_out; -1 if the index points out of its array.
    """
    table, frames = TokenTable(*table), Frames(*frames)
    length = frames.ids.shape[1]
    for b in which:
        k = sample_ids[b]
        if bounds.size:
            first, stop = np.int64(bounds[k]), np.int64(bounds[k + 1])
        else:
            first, stop = k, k + 1
        if not 0 <= first < stop <= pieces.size or num_spans + stop - first > frames.spans.size:
            return -1
        place = 0
        for piece in pieces[first:stop]:
            size = np.int64(_piece_length(piece))
            if place + size + 2 > length:
                return -1
            start = np.int64(_piece_start(piece))
            num_spans = _add_piece(table, frames, num_spans, start, size, b, place + 1)
            if num_spans < 0:
                return -1
            frames.ids[b, place] = table.cls
            frames.ids[b, place + size + 1] = table.sep
            if position_ids.size:
                for t in range(size + 2):
                    position_ids[b, place + t] = t
            place += size + 2
        frames.text_places[b] = place - 2
        if position_ids.size:
            for t in range(length - place):
                position_ids[b, place + t] = t
    return num_spans


@jit()
def pack(sizes, order, capacity, rows):
    """Puts pieces into rows by best fit.

    Pieces come in the order order[0], order[1], ... Each goes into the row with the least room that is enough; of
    several such rows into the one that was changed last; if there is none, it begins a row.

    sizes, order int64 [P]: places of each piece, at most `capacity`, and the order. rows int64 [P] gets the row of each
    piece. Returns the number of rows. O(P · capacity / 64) at worst.
    """
    tops = np.full(capacity + 1, -1, np.int64)  # by room: the row on top of the stack of rows with that much room
    under = np.empty(sizes.size, np.int64)  # by row: the row under it in its stack
    with_room = np.zeros((capacity >> 6) + 1, np.uint64)  # bit r: the stack of room r is not empty
    num_rows = 0
    for i in order:
        room = sizes[i]
        word = room >> 6
        bits = with_room[word] >> uint64(room & 63) << uint64(room & 63)
        while not bits and word + 1 < with_room.size:
            word += 1
            bits = with_room[word]
        if bits:
            room = (word << 6) + trailing_zeros(bits)
            row = tops[room]
            tops[room] = under[row]
            if tops[room] < 0:
                with_room[word] &= ~(U1 << uint64(room & 63))
        else:
            room, row = capacity, num_rows
            num_rows += 1
        rows[i] = row
        room -= sizes[i]
        under[row], tops[room] = tops[room], row
        with_room[room >> 6] |= U1 << uint64(room & 63)
    return num_rows


# ----------------------------------------------------------------------------------------------- samples that are pairs


PAIR = np.dtype(
    [
        ("a_start", np.int64),  # where segment A begins in the stream
        ("a_stop", np.int64),  # where A ends; a B that is not random begins here
        ("b_stop", np.int64),  # where B ends; 0 if B is random
        ("b_wanted", np.int64),  # tokens that a random B should have; 0 if B is not random
        ("first_sentence", np.int64),  # the first sentence of A's document, counted over the split
        ("num_sentences", np.int64),  # sentences of A's document
    ]
)
"""A sample of `pairs` as its index stores it: all but which other document a random B comes from."""


class DocumentRange(NamedTuple):
    """Documents of one shard that follow one another, and what comes before them in the split."""

    documents: NDArray[np.uint64]  # [D + 1]: offsets of the shard
    sentences: NDArray[np.uint64]  # [S + 1]: offsets of the shard, from documents[0] to documents[-1]
    first_document: int  # documents before these
    first_sentence: int  # sentences before these
    shard_start: int  # tokens before the shard
    separator: int  # as in TokenTable


class PairRules(NamedTuple):
    """How documents are cut into pairs; docs/determinism.md, pairs."""

    max_tokens: int  # text of a pair: T - 3
    short_below: np.uint64  # a document gets a shorter target if the high 32 bits of its draw are below this
    seed: np.uint64


class PairIndex(NamedTuple):
    """What `segment` made of a split."""

    pairs: NDArray[Any]  # PAIR [N]
    sentences: NDArray[np.uint64]  # [Q + 1]: see `pack_sentence`; the last is the end of the stream, as a document


class PairColumns(NamedTuple):
    """The arrays that only a batch of pairs has. int64."""

    token_type_ids: NDArray[np.int64]  # [B, T]: 1 for B and the [SEP] after it
    next_sentence_label: NDArray[np.int64]  # [B]: 1 where B is from another document
    cropped: NDArray[np.int64]  # [B]: tokens that were cut off, because A and B did not fit


def pack_sentence(start, begins_document):
    """A sentence as an index stores it, uint64: where it begins in the stream, then whether a document begins there."""
    return np.uint64(start) << U1 | np.uint64(begins_document)


_pack_sentence = _inline()(pack_sentence)


@_inline()
def _sentence_start(sentence):
    return np.int64(sentence >> U1)


@_inline()
def _begins_document(sentence):
    return np.int64(sentence & U1)


@jit()
def segment(part, rules, pairs, sentences):
    """Cuts documents into pairs of segments as BERT does (Devlin et al., 2019).

    part: a DocumentRange of S sentences. rules: PairRules. pairs PAIR [S] and sentences uint64 [S] are overwritten.
    Returns the number of pairs, or -1 if offsets do not fit each other.
    """
    num_pairs, s, num_sentences = 0, 0, part.sentences.size - 1
    for d in range(part.documents.size - 1):
        document_stop = part.documents[d + 1]
        document_first = s
        while s < num_sentences and part.sentences[s] < document_stop:
            if part.sentences[s + 1] <= part.sentences[s]:
                return np.int64(-1)
            sentences[s] = _pack_sentence(uint64(part.shard_start) + part.sentences[s], s == document_first)
            s += 1
        if (
            s == document_first
            or part.sentences[document_first] != part.documents[d]
            or part.sentences[s] != document_stop
        ):
            return np.int64(-1)
        key = absorb(key3(rules.seed, PAIRS, U0), uint64(part.first_document + d))
        target = rules.max_tokens
        if draw(key, U0) >> U32 < rules.short_below:
            target = 2 + np.int64(below(draw(key, U1), uint64(rules.max_tokens - 1)))
        drawn = U2
        i = first = document_first  # sentences first to i are taken
        num_tokens = np.int64(0)
        while i < s:
            num_tokens += np.int64(part.sentences[i + 1] - part.sentences[i])
            if i == s - 1:
                num_tokens -= part.separator
            if i < s - 1 and num_tokens < target:
                i += 1
                continue
            pair_sentences = i + 1 - first
            a_sentences = 1
            if pair_sentences > 1:
                a_sentences += np.int64(below(draw(key, drawn), uint64(pair_sentences - 1)))
            is_random = pair_sentences == 1 or draw(key, drawn + U1) >> U63 == U0
            drawn += U2
            a_start = np.int64(part.sentences[first])
            a_stop = np.int64(part.sentences[first + a_sentences])
            if first + a_sentences == s:
                a_stop -= part.separator
            pair = pairs[num_pairs]
            pair["a_start"] = part.shard_start + a_start
            pair["a_stop"] = part.shard_start + a_stop
            if is_random:
                pair["b_stop"] = 0
                pair["b_wanted"] = max(1, target - (a_stop - a_start))
                i = first + a_sentences - 1  # what would have been B begins the next pair
            else:
                b_stop = np.int64(part.sentences[i + 1]) - (part.separator if i == s - 1 else 0)
                pair["b_stop"] = part.shard_start + b_stop
                pair["b_wanted"] = 0
            pair["first_sentence"] = part.first_sentence + document_first
            pair["num_sentences"] = s - document_first
            num_pairs += 1
            i += 1
            first, num_tokens = i, np.int64(0)
    return num_pairs if s == num_sentences else np.int64(-1)


@part()
def _cut_front(key, segment, excess):
    """How many of `excess` tokens that a segment (1: A, 2: B) loses are at its front; the others are at its end."""
    front = 0
    for word in range((excess + 63) >> 6):
        bits = draw(key, (segment << U32) + uint64(word))
        if excess - (word << 6) < 64:
            bits &= (U1 << uint64(excess & 63)) - U1
        front += count_ones(bits)
    return front


@jit()
def pair_rows(which, epochs, sample_ids, seed, index, table, frames, columns, num_spans):
    """Lays out rows [CLS] A [SEP] B [SEP]; text_places counts A, [SEP] and B.

    index: PairIndex. columns: PairColumns, overwritten. num_spans: as in Samples.lay_out; -1 if the index points out
    of its array.
    """
    index, table, frames, columns = PairIndex(*index), TokenTable(*table), Frames(*frames), PairColumns(*columns)
    pairs, sentences, ids = index.pairs, index.sentences, frames.ids
    token_type_ids, next_sentence_label, cropped = columns.token_type_ids, columns.next_sentence_label, columns.cropped
    max_tokens, total = ids.shape[1] - 3, table.starts[-1]
    num_sentences = sentences.size - 1
    for b in which:
        pair = pairs[sample_ids[b]]
        a_start, a_stop, b_stop, b_wanted = pair["a_start"], pair["a_stop"], pair["b_stop"], pair["b_wanted"]
        key = absorb(key3(seed, PAIRS, uint64(epochs[b]) + U1), uint64(sample_ids[b]))
        b_start = a_stop
        next_sentence_label[b] = b_wanted > 0
        if b_wanted > 0:
            first, size = pair["first_sentence"], pair["num_sentences"]
            if not (first >= 0 and size > 0 and first + size <= num_sentences and size < num_sentences):
                return -1
            x = np.int64(below(draw(key, U0), uint64(num_sentences - size)))
            x += size if x >= first else 0
            b_start = _sentence_start(sentences[x])
            while True:
                x += 1
                begins = _begins_document(sentences[x])
                b_stop = _sentence_start(sentences[x]) - begins * table.separator
                if begins or b_stop - b_start >= b_wanted or x == num_sentences:
                    break
        if not (0 <= a_start < a_stop <= total and 0 <= b_start < b_stop <= total):
            return -1
        a_length, b_length = a_stop - a_start, b_stop - b_start
        excess = cropped[b] = max(0, a_length + b_length - max_tokens)
        if excess:  # tokens are taken one by one from the longer segment, from B if they are equal
            from_a = min(excess, max(0, a_length - b_length))
            from_b = min(excess, max(0, b_length - a_length))
            rest = excess - from_a - from_b
            from_a, from_b = from_a + rest // 2, from_b + (rest + 1) // 2
            a_start, a_length = a_start + _cut_front(key, U1, from_a), a_length - from_a
            b_start, b_length = b_start + _cut_front(key, U2, from_b), b_length - from_b
        place = a_length + 2
        frames.text_places[b] = a_length + b_length + 1
        num_spans = _add_piece(table, frames, num_spans, a_start, a_length, b, 1)
        if num_spans < 0:
            return -1
        num_spans = _add_piece(table, frames, num_spans, b_start, b_length, b, place)
        if num_spans < 0:
            return -1
        ids[b, 0] = table.cls
        ids[b, place - 1] = table.sep
        ids[b, place + b_length] = table.sep
        token_type_ids[b] = 0
        token_type_ids[b, place : place + b_length + 1] = 1
    return num_spans


# ---------------------------------------------------------------------------------------------------------- rows of ids


@jit()
def fill_rows(frames, num_spans, like, pad):
    """Copies the tokens of the first `num_spans` spans into their rows, and pads the rows.

    like: a number of the dtype of the tokens. The addresses of spans are not checked here. Returns the largest id, and
    how many places of all rows are padding.
    """
    frames = Frames(*frames)
    ids = frames.ids
    largest, padding = np.int64(0), np.int64(0)
    for i in range(num_spans):
        span = frames.spans[i]
        place, length = span["place"], span["length"]
        tokens = carray(_pointer(span["address"], like), length)
        out = ids[span["row"], place : place + length]
        largest_of_span = like
        for t in range(length):
            out[t] = tokens[t]
            largest_of_span = max(largest_of_span, tokens[t])
        largest = max(largest, np.int64(largest_of_span))
    for b in range(ids.shape[0]):
        stop = frames.text_places[b] + 2
        ids[b, stop:] = pad
        padding += ids.shape[1] - stop
    return largest, padding


@jit()
def attend(text_places, attention_mask):
    """Writes 1 to attention_mask, int64 [B, T], at the filled places of each row, and 0 at the padding."""
    for b in range(text_places.size):
        attention_mask[b, : text_places[b] + 2] = 1
        attention_mask[b, text_places[b] + 2 :] = 0


@jit()
def mark_inside_words(spans, starts, word_addresses, inside_word):
    """Writes 1 to inside_word, uint8 [B, T], where a token of a span continues the word before it.

    spans: SPAN [n], of one dataset. starts: as in TokenTable. word_addresses int64 [num_shards]: memory address of the
    words array of each shard, with one bit for each token, from the lowest bit of a byte on: 1 where a word begins.
    """
    for i in range(spans.size):
        span = spans[i]
        row, place, length = span["row"], span["place"], span["length"]
        shard = _shard_of(starts, span["start"])
        first = span["start"] - starts[shard]
        words = carray(_pointer(word_addresses[shard], np.uint8(0)), (first + length + 7) >> 3)
        for t in range(length):
            inside_word[row, place + t] = words[(first + t) >> 3] >> np.uint8((first + t) & 7) & 1 ^ 1


# ---------------------------------------------------------------------------------------------------------------- masks


EXACT, BERNOULLI, WHOLE_WORD, SPANS, UNIFORM = range(5)  # as choices.MASKING_POLICIES lists them
MASKABLE, CONTINUES = np.uint8(1), np.uint8(2)  # bits of an id: it may be selected; it continues a word
SELECT, AMOUNT = np.uint64(1 << 32), np.uint64(1 << 33)
"""Draws from index 2**32 on select places, except with BERNOULLI.

Draw AMOUNT says how many places UNIFORM selects.

Draw t: its low half decides what replaces place t; its high half selects it (BERNOULLI) or picks the random id (SPANS).
"""


class MaskRules(NamedTuple):
    """A masking policy for one vocabulary and row length. One for each Loader."""

    policy: int  # EXACT, BERNOULLI, WHOLE_WORD, SPANS or UNIFORM
    seed: np.uint64
    quota: NDArray[np.int64]  # [T + 1]: places to select, by the number of filled places of the row
    select_below: np.uint64  # BERNOULLI: a place is selected if the high 32 bits of its draw are below this
    lengths_below: NDArray[np.uint64]  # SPANS, [9]: one word more for each bound that the high 32 bits of a draw reach
    kinds: NDArray[np.uint8]  # [V]: MASKABLE and CONTINUES of each id
    mask_id: int
    mask_below: np.uint64  # a selected place becomes [MASK] if the low 32 bits of its draw are below this
    random_below: np.uint64  # else a random id if they are below this, else it keeps its id
    pool: NDArray[np.int64]  # ids to draw a random one from
    every_place: NDArray[np.int64]  # [T]: 0, 1, 2, ...


class MaskRows(NamedTuple):
    """The rows of a batch to mask. ids change in place; the last three are overwritten."""

    ids: NDArray[np.int64]  # [B, T], each below V
    text_places: NDArray[np.int64]  # [B], as in Frames
    epochs: NDArray[np.int64]  # [B]
    sample_ids: NDArray[np.int64]  # [B]
    inside_word: NDArray[np.uint8]  # [B, T]: 1 where a place continues a word whatever its id; [0, 0]: nowhere
    masked_positions: NDArray[np.int64]  # [B, K]
    targets: NDArray[np.int64]  # [B, K]
    weights: NDArray[np.float32]  # [B] with UNIFORM, else [0]


@part()
def _select_exact(key, num_candidates, quota, selected):
    """Selects `quota` of the numbers [0, num_candidates), all subsets equally likely (Floyd's method)."""
    for j in range(quota):
        last = uint64(num_candidates - quota + j)
        t = below32(draw(key, SELECT + uint64(j)), last + U1)
        if _is_set(selected, t):
            t = last
        _set(selected, t)


@part()
def _select_bernoulli(key, n, select_below, selected):
    """Selects each of the places [1, n - 1) by its own draw."""
    for word in range((n + 62) >> 6):
        bits = U0
        for t in range(max(1, word << 6), min(n - 1, (word + 1) << 6)):
            bits |= uint64((draw(key, uint64(t)) >> U32) < select_below) << uint64(t & 63)
        selected[word] = bits


@part()
def _find_words(row, n, kinds, inside_word, starts, stops):
    """Writes where the words of a row begin and end. Returns the number of words, and of candidates."""
    num_words, num_candidates, kind_before = 0, 0, np.uint8(0)
    for t in range(1, n - 1):
        kind = kinds[uint64(row[t])]
        if kind & MASKABLE:
            num_candidates += 1
            continues = kind & CONTINUES or (inside_word.size and inside_word[t])
            if not (continues and kind_before & MASKABLE):
                starts[num_words] = t
                num_words += 1
            stops[num_words - 1] = t + 1
        kind_before = kind
    return num_words, num_candidates


@part()
def _select_range(start, stop, selected):
    for t in range(start, stop):
        _set(selected, t)


@part()
def _select_words(key, num_words, quota, starts, stops, selected):
    """Goes through the words in random order, and selects each that still fits into the quota of places."""
    left = quota
    for j in range(num_words):
        if left == 0:
            break
        r = j + np.int64(below32(draw(key, SELECT + uint64(j)), uint64(num_words - j)))
        start, stop = starts[r], stops[r]
        starts[r], stops[r] = starts[j], stops[j]
        if stop - start <= left:
            _select_range(start, stop, selected)
            left -= stop - start


@part()
def _select_spans(key, num_words, quota, lengths_below, starts, stops, selected):
    """Selects spans of neighbouring words, of random length, until the quota of places is full; the last is cut."""
    left = quota
    for attempt in range(64 + 16 * quota):
        if left == 0:
            break
        bits = draw(key, SELECT + uint64(2 * attempt)) >> U32
        w = np.int64(below32(draw(key, SELECT + uint64(2 * attempt + 1)), uint64(num_words)))
        words_left = 1
        for bound in lengths_below:
            words_left += bits >= bound
        place = starts[w]
        while words_left > 0 and w < num_words and starts[w] == place and left > 0:
            if _is_set(selected, place):
                break
            place = min(stops[w], place + left)
            left -= place - starts[w]
            _select_range(starts[w], place, selected)
            words_left -= 1
            w += 1


@jit()
def mask(rules, rows):
    """Selects places of each row, notes their ids as targets, and changes them in the row."""
    rules, rows = MaskRules(*rules), MaskRows(*rows)
    policy, kinds, pool = rules.policy, rules.kinds, rules.pool  # local names are faster in the inner loop
    masked_positions, targets = rows.masked_positions, rows.targets
    length = rules.every_place.size
    # starts and stops of words; with EXACT and UNIFORM, `starts` holds the candidates
    starts, stops = np.empty(length, np.int64), np.empty(length, np.int64)
    selected = np.zeros((length >> 6) + 1, np.uint64)  # a bit for each place or candidate; all 0 between rows
    num_slots, pool_size = targets.shape[1], uint64(pool.size)
    for b in range(rows.ids.shape[0]):
        row = rows.ids[b]
        key = absorb(key3(rules.seed, MASK, uint64(rows.epochs[b])), uint64(rows.sample_ids[b]))
        n = rows.text_places[b] + 2
        quota = rules.quota[n]

        candidates = rules.every_place  # bit i of `selected` is place candidates[i]
        if policy in (EXACT, UNIFORM):
            m, candidates = n - 2, rules.every_place[1:]
            for t in range(1, n - 1):
                m -= np.int64(kinds[uint64(row[t])] & MASKABLE) ^ 1
            if m < n - 2:
                m, candidates = 0, starts
                for t in range(1, n - 1):
                    starts[m] = t
                    m += np.int64(kinds[uint64(row[t])] & MASKABLE)
            quota = min(m, quota)
            if policy == UNIFORM:
                rows.weights[b] = 0
                if quota:
                    quota = 1 + np.int64(below32(draw(key, AMOUNT), uint64(quota)))
                    rows.weights[b] = m / quota
            _select_exact(key, m, quota, selected)
        elif policy == BERNOULLI:
            _select_bernoulli(key, n, rules.select_below, selected)
        else:
            inside_word = rows.inside_word[b] if rows.inside_word.size else rows.inside_word.ravel()
            num_words, m = _find_words(row, n, kinds, inside_word, starts, stops)
            if policy == WHOLE_WORD:
                _select_words(key, num_words, min(m, quota), starts, stops, selected)
            else:
                _select_spans(key, num_words, min(m, quota), rules.lengths_below, starts, stops, selected)

        slot, place_before, span_low_bits = 0, np.int64(-2), U0
        for word in range((n + 63) >> 6):
            bits = selected[word]
            selected[word] = U0
            while bits:
                t = candidates[(word << 6) + trailing_zeros(bits)]
                bits &= bits - U1
                old = row[t]
                if slot == num_slots or not kinds[uint64(old)] & MASKABLE:
                    continue
                masked_positions[b, slot] = t
                targets[b, slot] = old
                slot += 1
                drawn = draw(key, uint64(t))
                low_bits = drawn & LOW32
                if policy != SPANS:
                    if low_bits < rules.mask_below:
                        row[t] = rules.mask_id
                    elif low_bits < rules.random_below:
                        width = rules.random_below - rules.mask_below
                        row[t] = pool[(low_bits - rules.mask_below) * pool_size // width]
                    continue
                if t != place_before + 1:
                    span_low_bits = low_bits
                place_before = t
                if span_low_bits < rules.mask_below:
                    row[t] = rules.mask_id
                elif span_low_bits < rules.random_below:
                    row[t] = pool[below32(drawn, pool_size)]
        masked_positions[b, slot:] = 0
        targets[b, slot:] = IGNORE_INDEX
