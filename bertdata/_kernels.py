"""Every compiled loop of the read path, in one file, because numba's cache does not notice a change in another.

Contract: Python validates and allocates, kernels only loop. A kernel never raises. An offset that comes from a file is
clamped to the array it indexes and reported through the return value. Arithmetic of keys is uint64, modulo 2**64;
docs/determinism.md defines it and tests/reference/ holds a slow twin of each kernel.

Letters: B rows, T places of a row, K slots for masked places, S tokens of a split, C tokens of text in a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numba import njit, uint64
from numba.core import event


def _jit(**options: Any) -> Any:
    """njit, compiled at first use and cached on disk where that is possible, else once per process."""

    def decorate(function: Any) -> Any:
        try:
            return njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:  # numba found no directory it may write its cache to
            return njit(nogil=True, **options)(function)

    return decorate


class _Told(event.Listener):
    def __init__(self, say: Callable[[str], None]) -> None:
        self.say: Callable[[str], None] | None = say

    def on_start(self, event: Any) -> None:
        if self.say:
            self.say("compiling for this machine, which is done once and takes some seconds ...")
            self.say = None

    def on_end(self, event: Any) -> None:
        pass


def compiling_told(say: Callable[[str], None]) -> AbstractContextManager[None]:
    """`say` is told if a kernel must be compiled within the context, instead of being found in the cache."""
    return event.install_listener("numba:compile", _Told(say))


_inline = functools.partial(_jit, inline="always")

U0, U1, U32 = np.uint64(0), np.uint64(1), np.uint64(32)
LOW32 = np.uint64(0xFFFFFFFF)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
SELECT = np.uint64(1 << 32)  # draws from here on select places; draw t < 2**32 decides what becomes of place t
ROUNDS = 8


def purpose(name: str) -> np.uint64:
    """The word that stands for a purpose in a key: its ASCII bytes, little-endian."""
    return np.uint64(int.from_bytes(name.encode().ljust(8, b"\0"), "little"))


PHASE, ORDER, MASK, SPLIT = purpose("phase"), purpose("order"), purpose("mask"), purpose("split")
BLOCKS, WINDOW = purpose("blocks"), purpose("window")
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


@_jit()
def key3(seed, what, variant):
    """key(seed, purpose, variant)."""
    return absorb(absorb(absorb(U0, seed), what), variant)


@_jit()
def _num_bits(n):
    """Of the smallest power of two that is no less than n, and 64."""
    bits = uint64(6)
    while bits < uint64(63) and (n - U1) >> bits != U0:
        bits += U1
    return bits


@_jit()
def _permuted(key, n, bits, x):
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


@_jit()
def permute(positions, num_samples, seed, epochs, sample_ids):
    """Positions of the endless stream → their epoch and sample id. int64 [B] each; about 45 ns a sample."""
    n = uint64(num_samples)
    bits = _num_bits(n)
    last_epoch, key = np.int64(-1), U0
    for i in range(positions.size):
        epoch = positions[i] // num_samples
        if epoch != last_epoch:
            key, last_epoch = key3(seed, ORDER, uint64(epoch)), epoch
        epochs[i] = epoch
        sample_ids[i] = np.int64(_permuted(key, n, bits, uint64(positions[i] - epoch * num_samples)))


@_jit()
def permute_blocks(positions, num_samples, block, seed, epochs, sample_ids):
    """As `permute`, but blocks of `block` samples stay within WINDOW_BLOCKS blocks of the order; twice the cost."""
    num_blocks = num_samples // block
    window = WINDOW_BLOCKS * block
    num_windows = max(1, num_blocks // WINDOW_BLOCKS)
    block_bits = _num_bits(uint64(max(1, num_blocks)))
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
            window_bits = _num_bits(uint64(size))
            last_epoch, last_window = epoch, j
        y = np.int64(_permuted(window_key, uint64(size), window_bits, uint64(x - start)))
        epochs[i] = epoch
        sample_ids[i] = start + y
        if start + y < num_blocks * block:
            number = uint64(j * WINDOW_BLOCKS + y // block)
            number = _permuted(block_key, uint64(num_blocks), block_bits, number)
            sample_ids[i] = np.int64(number) * block + y % block


@_jit()
def window_spans(epochs, sample_ids, seed, text_length, shard_starts, spans, filled):
    """Samples → slices of shards.

    shard_starts int64 [num_shards + 1]: place of each shard in the split's stream. spans int64 [max_spans, 5] gets
    (shard, start, row, place in the row, length); filled int64 [B] the tokens of each row. Returns the number of spans.
    """
    total = shard_starts[-1]
    num_shards = shard_starts.size - 1
    last_epoch, phase, num_spans = np.int64(-1), np.int64(0), 0
    for b in range(sample_ids.size):
        if epochs[b] != last_epoch:
            last_epoch = epochs[b]
            phase = np.int64(below(key3(seed, PHASE, uint64(last_epoch)), uint64(total)))
        start = sample_ids[b] * text_length
        left = min(text_length, total - start)
        filled[b] = left
        at = phase + start
        at = at - total if at >= total else at
        lo, hi = 0, num_shards  # the shard that holds `at`
        while hi - lo > 1:
            middle = (lo + hi) // 2
            if shard_starts[middle] <= at:
                lo = middle
            else:
                hi = middle
        place = 1
        while left > 0:
            take = min(left, shard_starts[lo + 1] - at)
            spans[num_spans, 0] = lo
            spans[num_spans, 1] = at - shard_starts[lo]
            spans[num_spans, 2] = b
            spans[num_spans, 3] = place
            spans[num_spans, 4] = take
            num_spans += 1
            place += take
            left -= take
            at += take
            lo += 1
            if lo == num_shards:
                lo, at = 0, 0
    return num_spans


@_jit()
def gather(tokens, shard, spans, out):
    """Copies the spans of one shard: uint16 or uint32 [num_tokens] → out int64 [B, T].

    Returns the largest id copied, or -1 if a span left its arrays, in which case it was not copied.
    """
    largest, whole = np.int64(0), True
    for i in range(spans.shape[0]):
        if spans[i, 0] != shard:
            continue
        start, row, place, length = spans[i, 1], spans[i, 2], spans[i, 3], spans[i, 4]
        fits = 0 <= length <= tokens.size and 0 <= start <= tokens.size - length
        if not (fits and 0 <= row < out.shape[0] and 0 <= place <= out.shape[1] - length):
            whole = False
            continue
        for t in range(length):
            token = np.int64(tokens[start + t])
            out[row, place + t] = token
            largest = max(largest, token)
    return largest if whole else np.int64(-1)


@_inline()
def _replace(old, y, mask_id, mask_below, random_below, pool):
    """What a selected place becomes; y is 32 random bits."""
    if y < mask_below:
        return mask_id
    if y < random_below:
        return pool[np.int64((y - mask_below) * uint64(pool.size) // (random_below - mask_below))]
    return old


@_jit()
def mask_exact(
    ids, filled, epochs, sample_ids, seed, probability, maskable, mask_id, mask_below, random_below, pool,
    masked_positions, targets, candidates, chosen,
):  # fmt: skip
    """Selects floor(p * n + 0.5) of each row's n filled places and changes ids [B, T] in place.

    maskable bool [vocab_size]: by id, every id in range. masked_positions, targets int64 [B, K] come filled with 0
    and IGNORE_INDEX. Scratch: candidates int64 [T], chosen bool [T], all False before and after.
    """
    for b in range(ids.shape[0]):
        key = absorb(key3(seed, MASK, uint64(epochs[b])), uint64(sample_ids[b]))
        n = filled[b] + 2
        m = 0
        for t in range(1, n - 1):
            candidates[m] = t
            m += maskable[ids[b, t]]
        c = min(m, np.int64(np.floor(probability * n + 0.5)), masked_positions.shape[1])
        for j in range(c):
            last = m - c + j
            t = np.int64(((draw(key, SELECT + uint64(j)) >> U32) * uint64(last + 1)) >> U32)
            chosen[last if chosen[t] else t] = True
        slot = 0
        for i in range(m):
            if chosen[i]:
                chosen[i] = False
                t = candidates[i]
                masked_positions[b, slot] = t
                targets[b, slot] = ids[b, t]
                slot += 1
                y = draw(key, uint64(t)) & LOW32
                ids[b, t] = _replace(ids[b, t], y, mask_id, mask_below, random_below, pool)


@_jit()
def mask_bernoulli(
    ids, filled, epochs, sample_ids, seed, select_below, maskable, mask_id, mask_below, random_below, pool,
    masked_positions, targets,
):  # fmt: skip
    """Selects each candidate place by its own draw, at most K a row; otherwise as mask_exact."""
    for b in range(ids.shape[0]):
        key = absorb(key3(seed, MASK, uint64(epochs[b])), uint64(sample_ids[b]))
        slot = 0
        for t in range(1, filled[b] + 1):
            bits = draw(key, uint64(t))
            if (bits >> U32) < select_below and maskable[ids[b, t]] and slot < targets.shape[1]:
                masked_positions[b, slot] = t
                targets[b, slot] = ids[b, t]
                slot += 1
                ids[b, t] = _replace(ids[b, t], bits & LOW32, mask_id, mask_below, random_below, pool)


@_jit()
def hash_documents(data, offsets, out):
    """data uint8, offsets int64 [N + 1]: document i is data[offsets[i] : offsets[i + 1] - 1]. out uint64 [N]."""
    start_key = absorb(U0, SPLIT)
    for i in range(out.size):
        h = start_key
        start = min(max(offsets[i], 0), data.size)
        stop = min(max(offsets[i + 1] - 1, start), data.size)
        at = start
        while at < stop:
            word = U0
            for k in range(min(8, stop - at)):
                word |= uint64(data[at + k]) << uint64(8 * k)
            h = (h ^ word) * GOLDEN
            h ^= h >> U32
            at += 8
        out[i] = mix(h ^ uint64(stop - start))


__all__ = ["gather", "hash_documents", "mask_bernoulli", "mask_exact", "permute", "permute_blocks", "window_spans"]
