"""Stream position → sample, and stream position → source of a mix."""

from __future__ import annotations

import numpy as np
from numba import uint64

from bertdata import keys
from bertdata.jit import jit, part
from bertdata.read.kernels.draws import U0, U1, U2, U32, U63, absorb, below32, draw, key3

# The purposes of keys. "window" is used for groups of blocks: it must not change.
ORDER, BLOCKS, GROUP, MIX = (np.uint64(keys.purpose(name)) for name in ("order", "blocks", "window", "mix"))
ROUNDS = 8
GROUP_BLOCKS = 64  # blocks of a group; the last group of an epoch may have up to 127 blocks and a partial one
MIX_BLOCK = 100  # positions of a mix in a block, in which each source has its share


@jit()
def num_bits(n):
    """Return b such that 2**b is the smallest power of two that is at least n and at least 64."""
    bits = uint64(6)
    while bits < U63 and (n - U1) >> bits != U0:
        bits += U1
    return bits


@jit()
def permuted(key, n, bits, x):
    """Return the image of x under a keyed permutation of [0, n).

    The permutation is a Feistel network on numbers of `bits` bits, repeated until the result is below n.
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


@part()
def _scramble(key, bits, numbers):
    """Apply the network of `permuted` once to each number, uint64 [n], in vector instructions."""
    lo = bits // U2
    hi = bits - lo
    lo_mask = (U1 << lo) - U1
    for r in range(0, ROUNDS, 2):
        even, odd = uint64(r) << U32, uint64(r + 1) << U32
        for i in range(numbers.size):
            left, right = numbers[i] >> lo, numbers[i] & lo_mask
            left ^= draw(key, even + right) >> (uint64(64) - hi)
            right ^= draw(key, odd + left) >> (uint64(64) - lo)
            numbers[i] = (left << lo) | right


@jit(arrays=True)
def permute(positions, num_samples, which, bounds, seed, epochs, sample_ids):
    """Write the epoch and the sample id of each stream position, int64 [B] each. 15 ns a sample.

    num_samples int64 [S]: the samples of an epoch of each source. which int64 [B], bounds int64 [S + 1]: positions
    which[bounds[s]] to which[bounds[s + 1] - 1] belong to source s.
    """
    numbers = np.empty(which.size, np.uint64)
    for s in range(num_samples.size):
        n, bits = uint64(num_samples[s]), num_bits(uint64(num_samples[s]))
        first = bounds[s]
        while first < bounds[s + 1]:
            epoch = positions[which[first]] // num_samples[s]
            start, stop = epoch * num_samples[s], first
            while stop < bounds[s + 1] and 0 <= positions[which[stop]] - start < num_samples[s]:
                numbers[stop] = positions[which[stop]] - start
                stop += 1
            key = key3(seed, ORDER, uint64(epoch))
            _scramble(key, bits, numbers[first:stop])
            for i in range(first, stop):
                number = numbers[i] if numbers[i] < n else permuted(key, n, bits, numbers[i])
                epochs[which[i]], sample_ids[which[i]] = epoch, np.int64(number)
            first = stop


@jit()
def permute_blocks(positions, num_samples, which, bounds, most, seed, epochs, sample_ids):
    """Like `permute`, for an order in blocks of at most `most` samples, at twice the cost.

    Permutes whole blocks. Each GROUP_BLOCKS consecutive blocks of this order form a group, with permuted samples.
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
    """Write the number of samples of each source before a block of a mix. weights, counts int64 [S].

    The sum of the weights is below 2**31, so nothing overflows.
    """
    left, total = block * MIX_BLOCK, weights.sum()
    for s in range(weights.size):
        whole, part = left // total, left % total
        counts[s] = whole * weights[s] + (2 * part * weights[s] + total) // (2 * total)
        left -= counts[s]
        total -= weights[s]


@jit(arrays=True)
def mix_sources(positions, weights, seed, sources, inner, which, bounds):
    """Write the source of each position of a mix, and the position in the stream of the source.

    positions, sources, inner int64 [B]. which int64 [B]: output, the rows of source 0, then of source 1, and so on; the
    rows of source s start at bounds[s], int64 [S + 1]. 10 ns per position, if positions are consecutive.
    """
    before, after = np.empty_like(weights), np.empty_like(weights)
    # Zeros, because counts of invalid positions may overflow, and elements are used as indexes.
    source_at, number_at = np.zeros(MIX_BLOCK, np.int64), np.empty(MIX_BLOCK, np.int64)
    block_start = np.int64(-(1 << 62))
    bounds[:] = 0
    for i in range(positions.size):
        if not 0 <= positions[i] - block_start < MIX_BLOCK:
            block = positions[i] // MIX_BLOCK  # slow, so once for each block
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
