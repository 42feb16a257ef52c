"""Stream position → sample, and the stream positions of each rank.

Both are computed without a table or a shuffle buffer. So every rank computes the same order, and the cost does not
depend on the number of samples.

An order in blocks reads a dataset larger than memory in few large pieces. A **block** is a range of samples. The blocks
of an epoch are permuted. Each 64 consecutive blocks of the permuted order are a **group**, and the samples of a group
are permuted:

    samples    0 1 2 3 4 5 6 7 8 9 10 11            blocks of 2, groups of 3 (here; 64 really)
    blocks     [8 9] [2 3] [10 11] | [4 5] [0 1] [6 7]        permuted
    order      3 11 8 2 9 10       | 6 0 5 4 1 7              permuted in each group
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bertdata.keys import key
from bertdata.read.kernels import order as kernels

BLOCK_TOKENS = 1 << 19  # tokens of a block of samples: 1 MiB of uint16


def sample_ids(
    positions: NDArray[np.int64],
    *,
    num_samples: int | NDArray[np.int64],
    seed: int,
    block: int | None = None,
    which: NDArray[np.int64] | None = None,
    bounds: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the epochs and the sample ids of positions, int64 [B] each. Each epoch is a keyed permutation.

    num_samples: the samples of an epoch; in a mix int64 [S], for each source. block: samples of a block, at most 2**40;
    None: no blocks. which, bounds: as in mix.Places; None for a single source. About 45 ns per sample without blocks,
    twice that with blocks.

    The permutation is an 8-round Feistel network on the smallest power of two (Luby and Rackoff, 1988), repeated until
    it is in range (Black and Rogaway, 2002). docs/determinism.md defines it.
    """
    which = np.arange(positions.size) if which is None else which
    bounds = np.array([0, positions.size]) if bounds is None else bounds
    epochs, ids = np.empty_like(positions), np.empty_like(positions)
    sizes = num_samples if isinstance(num_samples, np.ndarray) else np.array([num_samples])
    if block is None:
        kernels.permute(positions, sizes, which, bounds, np.uint64(seed), epochs, ids)
    else:
        kernels.permute_blocks(positions, sizes, which, bounds, block, np.uint64(seed), epochs, ids)
    return epochs, ids


def group_of(position: int, *, num_samples: int, block: int) -> tuple[int, int]:
    """Return the epoch of a position, and the index of its group of blocks in the epoch."""
    epoch, x = divmod(position, num_samples)
    block = min(block, num_samples)
    num_groups = max(1, num_samples // block // kernels.GROUP_BLOCKS)
    return epoch, min(x // (block * kernels.GROUP_BLOCKS), num_groups - 1)


def blocks_of(epoch: int, group: int, *, num_samples: int, seed: int, block: int) -> list[tuple[int, int]]:
    """Return the samples of a group of blocks as ranges [first, stop), one for each block."""
    block = min(block, num_samples)
    num_blocks, size = num_samples // block, kernels.GROUP_BLOCKS
    is_last = group == max(1, num_blocks // size) - 1
    block_key, n = np.uint64(key(seed, "blocks", epoch)), np.uint64(num_blocks)
    bits = kernels.num_bits(n)
    numbers = range(group * size, num_blocks if is_last else (group + 1) * size)
    firsts = [int(kernels.permuted(block_key, n, bits, np.uint64(number))) * block for number in numbers]
    rest = [(num_blocks * block, num_samples)] if is_last and num_blocks * block < num_samples else []
    return [(first, first + block) for first in firsts] + rest


def rank_slice(start: int, stop: int, *, rank: int, world_size: int) -> tuple[int, int]:
    """Return the range of positions [start, stop) of a rank. The sizes of ranks differ by at most one.

    >>> [rank_slice(0, 7, rank=r, world_size=2) for r in (0, 1)]
    [(0, 3), (3, 7)]
    """
    size = stop - start
    return start + size * rank // world_size, start + size * (rank + 1) // world_size
