"""Every compiled loop of the read path, in one file, because numba's cache does not notice a change in another.

Contract: Python validates and allocates, kernels only loop. A kernel never raises. An offset that comes from a file is
clamped to the array it indexes and reported through the return value. Arithmetic of keys is uint64, modulo 2**64;
docs/determinism.md defines it and tests/reference/ holds a slow twin of each kernel.

Letters: B rows, T places of a row, K slots for masked places, S tokens of a split, C tokens of text in a row.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types, uint64
from numba.extending import intrinsic

from bertdata import keys
from bertdata.jit import jit
from bertdata.types import IGNORE_INDEX

_inline = functools.partial(jit, inline="always")
U0, U1, U32 = np.uint64(0), np.uint64(1), np.uint64(32)
LOW32 = np.uint64(0xFFFFFFFF)
SELECT = np.uint64(1 << 32)  # draws from here on select places; draw t < 2**32 decides what becomes of place t
ROUNDS = 8
GOLDEN = np.uint64(keys.GOLDEN)
PHASE, ORDER, MASK, BLOCKS, WINDOW, PAIRS = (
    np.uint64(keys.purpose(name)) for name in ("phase", "order", "mask", "blocks", "window", "pairs")
)
WINDOW_BLOCKS = 64


@_inline()
def mix(x):
    x = (x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
    return x ^ (x >> uint64(31))


@_inline()
def absorb(h, word):
    return mix((h ^ word) + GOLDEN)


@_inline()
def draw(key, index):
    return mix(key + (index + U1) * GOLDEN)


@_inline()
def below(x, n):
    """High half of the 128-bit product x * n."""
    x_lo, x_hi, n_lo, n_hi = x & LOW32, x >> U32, n & LOW32, n >> U32
    cross = x_hi * n_lo + ((x_lo * n_lo) >> U32)
    other = x_lo * n_hi + (cross & LOW32)
    return x_hi * n_hi + (cross >> U32) + (other >> U32)


@jit()
def key3(seed, what, variant):
    """key(seed, purpose, variant)."""
    return absorb(absorb(absorb(U0, seed), what), variant)


@jit()
def num_bits(n):
    """Of the smallest power of two that is no less than n, and 64."""
    bits = uint64(6)
    while bits < uint64(63) and (n - U1) >> bits != U0:
        bits += U1
    return bits


@jit()
def permuted(key, n, bits, x):
    """Where a keyed permutation of [0, n) takes x: a Feistel network of `bits` bits, walked back into range."""
    lo = bits // uint64(2)
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
def permute(positions, num_samples, seed, epochs, sample_ids):
    """Positions of the endless stream → their epoch and sample id. int64 [B] each; about 45 ns a sample."""
    n = uint64(num_samples)
    bits = num_bits(n)
    last_epoch, key = np.int64(-1), U0
    for i in range(positions.size):
        epoch = positions[i] // num_samples
        if epoch != last_epoch:
            key, last_epoch = key3(seed, ORDER, uint64(epoch)), epoch
        epochs[i] = epoch
        sample_ids[i] = np.int64(permuted(key, n, bits, uint64(positions[i] - epoch * num_samples)))


@jit()
def permute_blocks(positions, num_samples, block, seed, epochs, sample_ids):
    """As `permute`, but blocks of `block` samples stay within WINDOW_BLOCKS blocks of the order; twice the cost."""
    num_blocks = num_samples // block
    window = WINDOW_BLOCKS * block
    num_windows = max(1, num_blocks // WINDOW_BLOCKS)
    block_bits = num_bits(uint64(max(1, num_blocks)))
    last_epoch, last_window, block_key, window_key = np.int64(-1), np.int64(-1), U0, U0
    start, size, window_bits = np.int64(0), np.int64(1), U0
    for i in range(positions.size):
        epoch = positions[i] // num_samples
        x = positions[i] - epoch * num_samples
        j = min(x // window, num_windows - 1)
        if epoch != last_epoch or j != last_window:
            block_key = key3(seed, BLOCKS, uint64(epoch))
            window_key = absorb(key3(seed, WINDOW, uint64(epoch)), uint64(j))
            start = j * window
            size = num_samples - start if j == num_windows - 1 else window
            window_bits = num_bits(uint64(size))
            last_epoch, last_window = epoch, j
        y = np.int64(permuted(window_key, uint64(size), window_bits, uint64(x - start)))
        epochs[i] = epoch
        sample_ids[i] = start + y
        if start + y < num_blocks * block:
            number = uint64(j * WINDOW_BLOCKS + y // block)
            number = permuted(block_key, uint64(num_blocks), block_bits, number)
            sample_ids[i] = np.int64(number) * block + y % block


@intrinsic
def _pointer(typing: Any, address: Any, like: Any) -> Any:
    """A pointer to numbers of the type of `like`, for `carray`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(address, like), generate


@intrinsic
def _prefetch(typing: Any, address: Any) -> Any:
    """Asks for the 64 bytes at an address, which need not be there, without waiting for them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        builder.call(function, [builder.inttoptr(args[0], pointer), number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(address), generate


@intrinsic
def _trailing_zeros(typing: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


PREFETCHED = 1024  # bytes of a slice; the processor sees for itself that a longer one goes on


@jit()
def _add_span(spans, number, at, address, row, place, length, itemsize):
    """Notes that `length` tokens from an address belong at a place of a row, and asks memory for them.

    at: where the first of them is in the stream.
    """
    spans[number, 0] = address
    spans[number, 1] = row
    spans[number, 2] = place
    spans[number, 3] = length
    spans[number, 4] = at
    for line in range(address & ~63, address + min(length * itemsize, PREFETCHED), 64):
        _prefetch(line)
    return number + 1


@jit()
def _shard_at(starts, at):
    """The last shard that begins at or before a token of the stream."""
    lo, hi = 0, starts.size - 1
    while hi - lo > 1:
        middle = (lo + hi) // 2
        if starts[middle] <= at:
            lo = middle
        else:
            hi = middle
    return lo


@jit()
def phase(seed, epoch, total):
    """Where in a stream of `total` tokens the windows of an epoch begin."""
    return np.int64(below(key3(seed, PHASE, uint64(epoch)), uint64(total)))


@jit()
def window_rows(epochs, sample_ids, seed, text_length, starts, addresses, itemsize, cls, sep, ids, filled, spans):
    """Samples → the frames of their rows and what belongs between.

    starts int64 [num_shards + 1]: place of each shard in the split's stream; addresses int64 [num_shards]. ids int64
    [B, T] gets [CLS] and [SEP]; spans int64 [max_spans, 5] gets (address, row, place, length, place in the stream);
    filled int64 [B] the tokens of each row between its ends. Returns the number of spans.
    """
    total = starts[-1]
    last_epoch, first, num_spans = np.int64(-1), np.int64(0), 0
    for b in range(sample_ids.size):
        if epochs[b] != last_epoch:
            last_epoch = epochs[b]
            first = phase(seed, last_epoch, total)
        start = sample_ids[b] * text_length
        left = min(text_length, total - start)
        filled[b] = left
        ids[b, 0] = cls
        ids[b, left + 1] = sep
        at = first + start
        at = at - total if at >= total else at
        shard = _shard_at(starts, at)
        place = 1
        while left > 0:
            take = min(left, starts[shard + 1] - at)
            address = addresses[shard] + (at - starts[shard]) * itemsize
            num_spans = _add_span(spans, num_spans, at, address, b, place, take, itemsize)
            place += take
            left -= take
            at += take
            shard += 1
            if shard == starts.size - 1:
                shard, at = 0, 0
    return num_spans


@jit()
def _add_piece(spans, number, at, length, row, place, starts, addresses, itemsize):
    """Adds `length` tokens from `at` on, all of one shard; -1 if there are none such."""
    if not (0 <= at < starts[-1] and length > 0):
        return np.int64(-1)
    shard = _shard_at(starts, at)
    if length > starts[shard + 1] - at:
        return np.int64(-1)
    address = addresses[shard] + (at - starts[shard]) * itemsize
    return _add_span(spans, number, at, address, row, place, length, itemsize)


@jit()
def piece_rows(
    sample_ids, bounds, pieces, starts, addresses, itemsize, cls, sep, ids, filled, position_ids, spans
):  # fmt: skip
    """As window_rows, for rows of one or more pieces of documents, each between a [CLS] and a [SEP] of its own.

    pieces uint64: place in the stream << 16 | length. bounds uint64 [N + 1]: row k is pieces bounds[k] to
    bounds[k + 1]; empty: it is piece k. position_ids int64 [B, T], or [0, 0] if not wanted, counts from 0 in each piece
    and in the padding. Returns -1 if an index points out of its array.
    """
    num_spans, length = 0, ids.shape[1]
    for b in range(sample_ids.size):
        k = sample_ids[b]
        if bounds.size:
            first, last = np.int64(bounds[k]), np.int64(bounds[k + 1])
        else:
            first, last = k, k + 1
        if not 0 <= first < last <= pieces.size:
            return -1
        place = 0
        for piece in pieces[first:last]:
            size = np.int64(piece & uint64(0xFFFF))
            if place + size + 2 > length:
                return -1
            at = np.int64(piece >> uint64(16))
            num_spans = _add_piece(spans, num_spans, at, size, b, place + 1, starts, addresses, itemsize)
            if num_spans < 0:
                return -1
            ids[b, place] = cls
            ids[b, place + size + 1] = sep
            if position_ids.size:
                for t in range(size + 2):
                    position_ids[b, place + t] = t
            place += size + 2
        filled[b] = place - 2
        if position_ids.size:
            for t in range(length - place):
                position_ids[b, place + t] = t
    return num_spans


@jit()
def pack(sizes, order, capacity, rows):
    """Best fit: piece order[0], order[1], ... goes into the fullest row with room, of those the last one changed.

    sizes int64 [P], each at most capacity; rows int64 [P] gets the row of each piece. Returns the number of rows.
    """
    tops = np.full(capacity + 1, -1, np.int64)  # of the stack of rows with so much room
    under = np.empty(sizes.size, np.int64)
    with_room = np.zeros((capacity >> 6) + 1, np.uint64)  # bit r: there is a row with room r
    num_rows = 0
    for i in order:
        room = sizes[i]
        word = room >> 6
        bits = with_room[word] >> uint64(room & 63) << uint64(room & 63)
        while not bits and word + 1 < with_room.size:
            word += 1
            bits = with_room[word]
        if bits:
            room = (word << 6) + _trailing_zeros(bits)
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


@intrinsic
def _count_ones(typing: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), generate


@jit()
def segment(
    documents, sentences, first_document, first_sentence, start, separator, most, short_below, seed, pairs, flagged
):  # fmt: skip
    """Cuts the documents of a shard into pairs of segments as BERT does (Devlin et al., 2019).

    documents uint64 [D + 1], sentences uint64 [S + 1]: offsets of the shard. first_document, first_sentence, start: how
    many documents, sentences and tokens are before the shard; separator: whether documents end in one. most: tokens of
    a pair. pairs int64 [S, 5] gets (A's start, A's end = B's start, B's end or, if B is random, minus the tokens it
    should have, the document's first sentence, its number of sentences); flagged uint64 [S] gets
    start << 1 | whether a document begins. Returns the number of pairs, -1 if offsets do not fit each other.
    """
    num_pairs, s, num_sentences = 0, 0, sentences.size - 1
    for d in range(documents.size - 1):
        stop = documents[d + 1]
        before = s
        while s < num_sentences and sentences[s] < stop:
            if sentences[s + 1] <= sentences[s]:
                return np.int64(-1)
            flagged[s] = (uint64(start) + sentences[s]) << U1 | uint64(s == before)
            s += 1
        if s == before or sentences[before] != documents[d] or sentences[s] != stop:
            return np.int64(-1)
        key = absorb(key3(seed, PAIRS, U0), uint64(first_document + d))
        target = most
        if draw(key, U0) >> U32 < short_below:
            target = 2 + np.int64(below(draw(key, U1), uint64(most - 1)))
        drawn = uint64(2)
        i = first = before
        tokens = np.int64(0)
        while i < s:
            tokens += np.int64(sentences[i + 1] - sentences[i])
            if i == s - 1:
                tokens -= separator
            if i < s - 1 and tokens < target:
                i += 1
                continue
            size = i + 1 - first
            a_size = 1
            if size > 1:
                a_size += np.int64(below(draw(key, drawn), uint64(size - 1)))
            is_random = size == 1 or draw(key, drawn + U1) >> uint64(63) == U0
            drawn += uint64(2)
            a_stop = np.int64(sentences[first + a_size])
            if first + a_size == s:
                a_stop -= separator
            pairs[num_pairs, 0] = start + np.int64(sentences[first])
            pairs[num_pairs, 1] = start + a_stop
            if is_random:
                pairs[num_pairs, 2] = -max(1, target - (a_stop - np.int64(sentences[first])))
                i = first + a_size - 1  # what would have been B begins the next pair
            else:
                pairs[num_pairs, 2] = start + np.int64(sentences[i + 1]) - (separator if i == s - 1 else 0)
            pairs[num_pairs, 3] = first_sentence + before
            pairs[num_pairs, 4] = s - before
            num_pairs += 1
            i += 1
            first, tokens = i, np.int64(0)
    return num_pairs if s == num_sentences else np.int64(-1)


@jit()
def _cut(key, stream, start, excess):
    """The start of a segment that loses `excess` tokens, each from the front or the back."""
    front = 0
    for word in range((excess + 63) >> 6):
        bits = draw(key, (stream << U32) + uint64(word))
        if excess - (word << 6) < 64:
            bits &= (U1 << uint64(excess & 63)) - U1
        front += _count_ones(bits)
    return start + front


@jit()
def pair_rows(
    epochs, sample_ids, seed, pairs, flagged, separator, starts, addresses, itemsize, cls, sep, ids, filled,
    token_type_ids, labels, cropped, spans,
):  # fmt: skip
    """As window_rows, for [CLS] A [SEP] B [SEP].

    pairs and flagged are those of `segment`, flagged with the end of the stream, as a document, after it. filled counts
    A, [SEP] and B. token_type_ids int64 [B, T]: 1 for B and its [SEP]. labels int64 [B]: 1 where B is from another
    document. cropped int64 [B]: tokens cut off. Returns the number of spans, -1 if an index points out of its array.
    """
    num_spans, most = 0, ids.shape[1] - 3
    num_sentences = flagged.size - 1
    for b in range(sample_ids.size):
        pair = pairs[sample_ids[b]]
        a, a_stop, b_stop, first, size = pair[0], pair[1], pair[2], pair[3], pair[4]
        key = absorb(key3(seed, PAIRS, uint64(epochs[b]) + U1), uint64(sample_ids[b]))
        at = a_stop
        labels[b] = b_stop < 0
        if b_stop < 0:
            if not (first >= 0 and size > 0 and first + size <= num_sentences and size < num_sentences):
                return -1
            x = np.int64(below(draw(key, U0), uint64(num_sentences - size)))
            x += size if x >= first else 0
            at = np.int64(flagged[x] >> U1)
            while True:
                x += 1
                begins = np.int64(flagged[x] & U1)
                stop = np.int64(flagged[x] >> U1) - begins * separator
                if begins or stop - at >= -b_stop or x == num_sentences:
                    break
            b_stop = stop
        if not (0 <= a < a_stop <= starts[-1] and 0 <= at < b_stop <= starts[-1]):
            return -1
        a_length, b_length = a_stop - a, b_stop - at
        excess = cropped[b] = max(0, a_length + b_length - most)
        if excess:  # one by one from the longer, from B if they are equal
            from_a = min(excess, max(0, a_length - b_length))
            from_b = min(excess, max(0, b_length - a_length))
            rest = excess - from_a - from_b
            from_a, from_b = from_a + rest // 2, from_b + (rest + 1) // 2
            a, a_length = _cut(key, U1, a, from_a), a_length - from_a
            at, b_length = _cut(key, uint64(2), at, from_b), b_length - from_b
        place = a_length + 2
        filled[b] = a_length + b_length + 1
        num_spans = _add_piece(spans, num_spans, a, a_length, b, 1, starts, addresses, itemsize)
        if num_spans < 0:
            return -1
        num_spans = _add_piece(spans, num_spans, at, b_length, b, place, starts, addresses, itemsize)
        if num_spans < 0:
            return -1
        ids[b, 0] = cls
        ids[b, place - 1] = sep
        ids[b, place + b_length] = sep
        token_type_ids[b] = 0
        token_type_ids[b, place : place + b_length + 1] = 1
    return num_spans


@jit()
def fill_rows(spans, like, pad, filled, ids):
    """Copies spans into rows and pads the rows: tokens of the type of `like` → ids int64 [B, T].

    spans int64 [n, 5] are those of a kernel above: their addresses are not checked here. Returns the largest id.
    """
    largest = np.int64(0)
    for i in range(spans.shape[0]):
        row, place, length = spans[i, 1], spans[i, 2], spans[i, 3]
        tokens = carray(_pointer(spans[i, 0], like), length)
        out = ids[row, place : place + length]
        most = like
        for t in range(length):
            out[t] = tokens[t]
            most = max(most, tokens[t])
        largest = max(largest, np.int64(most))
    for b in range(ids.shape[0]):
        ids[b, filled[b] + 2 :] = pad
    return largest


@jit()
def word_flags(spans, starts, addresses, goes_on):
    """Where the tokens of spans do not begin a word: goes_on uint8 [B, T] gets 1 there.

    addresses int64 [num_shards]: of the bits that say so, one for each token of a shard, from the lowest of a byte on.
    """
    for i in range(spans.shape[0]):
        row, place, length, at = spans[i, 1], spans[i, 2], spans[i, 3], spans[i, 4]
        shard = _shard_at(starts, at)
        first = at - starts[shard]
        words = carray(_pointer(addresses[shard], np.uint8(0)), (first + length + 7) >> 3)
        for t in range(length):
            goes_on[row, place + t] = words[(first + t) >> 3] >> np.uint8((first + t) & 7) & 1 ^ 1


EXACT, BERNOULLI, WHOLE_WORD, SPAN = range(4)  # as types.MASKING_POLICIES lists them
MASKABLE, CONTINUES = np.uint8(1), np.uint8(2)  # what an id may be: a candidate, one that goes on with a word


@jit()
def _select_exact(key, m, c, selected):
    """c of [0, m), all subsets equally likely (Floyd's method)."""
    for j in range(c):
        last = uint64(m - c + j)
        t = ((draw(key, SELECT + uint64(j)) >> U32) * (last + U1)) >> U32
        if selected[t >> uint64(6)] >> (t & uint64(63)) & U1:
            t = last
        selected[t >> uint64(6)] |= U1 << (t & uint64(63))


@jit()
def _select_bernoulli(key, n, select_below, selected):
    """Each of the places [1, n - 1) by its own draw."""
    for word in range((n + 62) >> 6):
        bits = U0
        for t in range(max(1, word << 6), min(n - 1, (word + 1) << 6)):
            bits |= uint64((draw(key, uint64(t)) >> U32) < select_below) << uint64(t & 63)
        selected[word] = bits


@jit()
def _words(row, n, kinds, goes_on, starts, stops):
    """Where the words of a row begin and end, how many there are, and how many candidates."""
    num_words, m, before = 0, 0, np.uint8(0)
    for t in range(1, n - 1):
        kind = kinds[uint64(row[t])]
        if kind & MASKABLE:
            m += 1
            continues = kind & CONTINUES or (goes_on.size and goes_on[t])
            if not (continues and before & MASKABLE):
                starts[num_words] = t
                num_words += 1
            stops[num_words - 1] = t + 1
        before = kind
    return num_words, m


@jit()
def _add_places(start, stop, selected):
    for t in range(start, stop):
        selected[uint64(t) >> uint64(6)] |= U1 << uint64(t & 63)


@jit()
def _select_words(key, num_words, c, starts, stops, selected):
    """Words in random order, each if it still fits in c."""
    left = c
    for j in range(num_words):
        if left == 0:
            break
        r = j + np.int64(((draw(key, SELECT + uint64(j)) >> U32) * uint64(num_words - j)) >> U32)
        start, stop = starts[r], stops[r]
        starts[r], stops[r] = starts[j], stops[j]
        if stop - start <= left:
            _add_places(start, stop, selected)
            left -= stop - start


@jit()
def _select_spans(key, num_words, c, lengths_below, starts, stops, selected):
    """Stretches of neighbouring words of random length, the last one cut, until c places are selected."""
    left = c
    for attempt in range(64 + 16 * c):
        if left == 0:
            break
        u = draw(key, SELECT + uint64(2 * attempt)) >> U32
        w = np.int64(((draw(key, SELECT + uint64(2 * attempt + 1)) >> U32) * uint64(num_words)) >> U32)
        at, more = starts[w], 1
        for bound in lengths_below:
            more += u >= bound
        while more > 0 and w < num_words and starts[w] == at and left > 0:
            if selected[uint64(at) >> uint64(6)] >> uint64(at & 63) & U1:
                break
            at = min(stops[w], at + left)
            left -= at - starts[w]
            _add_places(starts[w], at, selected)
            more -= 1
            w += 1


@jit()
def mask(
    policy, ids, filled, epochs, sample_ids, seed, quota, select_below, lengths_below, kinds, mask_id, mask_below,
    random_below, pool, goes_on, masked_positions, targets, identity, starts, stops, selected,
):  # fmt: skip
    """Selects places of each row of ids [B, T] and changes them there.

    policy: EXACT, BERNOULLI, WHOLE_WORD or SPAN. quota int64 [T + 1]: how many places to select by how many are filled.
    lengths_below uint64: of a span. kinds uint8 [vocab_size]: by id, every id in range. goes_on uint8 [B, T], or
    [0, 0]: 1 where a place goes on with a word. masked_positions and targets int64 [B, K] are overwritten. identity
    int64 [T]: 0, 1, 2, ... Scratch: starts, stops int64 [T]; selected uint64 [T // 64 + 1], all 0 before and after.
    """
    num_slots = targets.shape[1]
    for b in range(ids.shape[0]):
        row = ids[b]
        key = absorb(key3(seed, MASK, uint64(epochs[b])), uint64(sample_ids[b]))
        n, places = filled[b] + 2, identity
        if policy == EXACT:
            m, places = n - 2, identity[1:]
            for t in range(1, n - 1):
                m -= np.int64(kinds[uint64(row[t])] & MASKABLE) ^ 1
            if m < n - 2:
                m, places = 0, starts
                for t in range(1, n - 1):
                    starts[m] = t
                    m += np.int64(kinds[uint64(row[t])] & MASKABLE)
            _select_exact(key, m, min(m, quota[n]), selected)
        elif policy == BERNOULLI:
            _select_bernoulli(key, n, select_below, selected)
        else:
            flags = goes_on[b] if goes_on.size else goes_on.ravel()
            num_words, m = _words(row, n, kinds, flags, starts, stops)
            if policy == WHOLE_WORD:
                _select_words(key, num_words, min(m, quota[n]), starts, stops, selected)
            else:
                _select_spans(key, num_words, min(m, quota[n]), lengths_below, starts, stops, selected)
        slot, before, fate = 0, np.int64(-2), U0
        for word in range((n + 63) >> 6):
            bits = selected[word]
            selected[word] = U0
            while bits:
                t = places[(word << 6) + _trailing_zeros(bits)]
                bits &= bits - U1
                old = row[t]
                if slot == num_slots or not kinds[uint64(old)] & MASKABLE:
                    continue
                masked_positions[b, slot] = t
                targets[b, slot] = old
                slot += 1
                bits_of_place = draw(key, uint64(t))
                y = bits_of_place & LOW32
                if policy != SPAN:
                    if y < mask_below:
                        row[t] = mask_id
                    elif y < random_below:
                        row[t] = pool[(y - mask_below) * uint64(pool.size) // (random_below - mask_below)]
                    continue
                if t != before + 1:
                    fate = y
                before = t
                if fate < mask_below:
                    row[t] = mask_id
                elif fate < random_below:
                    row[t] = pool[((bits_of_place >> U32) * uint64(pool.size)) >> U32]
        masked_positions[b, slot:] = 0
        targets[b, slot:] = IGNORE_INDEX
