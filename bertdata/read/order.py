"""Position in the endless stream of samples → which sample that is, and which positions a rank takes.

Both are arithmetic: no table, no shuffle buffer, the same answer on every rank. A billion samples cost what ten do.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bertdata.keys import key
from bertdata.read import kernels

BLOCK_TOKENS = 1 << 19  # of a block of samples: 1 MiB of uint16


def sample_ids(
    positions: NDArray[np.int64], *, num_samples: int, seed: int, block: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Epochs and sample ids of positions, int64 [B] each: a keyed permutation of [0, num_samples) in every epoch.

    An 8-round Feistel network on the smallest power of two (Luby and Rackoff, 1988), walked back into range
    (Black and Rogaway, 2002); docs/determinism.md has the definition. About 45 ns a sample, no memory.

    block: samples, at most 2**40, that lie side by side and come up within the same 64 blocks of an epoch, so that a
    disk is read once and in order where the dataset does not fit in memory. None: any sample anywhere.
    """
    epochs = np.empty_like(positions)
    ids = np.empty_like(positions)
    if block is None:
        kernels.permute(positions, num_samples, np.uint64(seed), epochs, ids)
    else:
        kernels.permute_blocks(positions, num_samples, min(block, num_samples), np.uint64(seed), epochs, ids)
    return epochs, ids


def window(position: int, *, num_samples: int, block: int) -> tuple[int, int]:
    """Of an order in blocks: the epoch of a position and the number of its window in that epoch."""
    epoch, x = divmod(position, num_samples)
    block = min(block, num_samples)
    num_windows = max(1, num_samples // block // kernels.WINDOW_BLOCKS)
    return epoch, min(x // (block * kernels.WINDOW_BLOCKS), num_windows - 1)


def blocks(epoch: int, window: int, *, num_samples: int, seed: int, block: int) -> list[tuple[int, int]]:
    """The samples of a window as ranges [first, stop), a block each, in no particular order."""
    block = min(block, num_samples)
    num_blocks, size = num_samples // block, kernels.WINDOW_BLOCKS
    is_last = window == max(1, num_blocks // size) - 1
    k, n = np.uint64(key(seed, "blocks", epoch)), np.uint64(num_blocks)
    bits = kernels.num_bits(n)
    numbers = range(window * size, num_blocks if is_last else (window + 1) * size)
    firsts = [int(kernels.permuted(k, n, bits, np.uint64(number))) * block for number in numbers]
    rest = [(num_blocks * block, num_samples)] if is_last and num_blocks * block < num_samples else []
    return [(first, first + block) for first in firsts] + rest


def rank_slice(start: int, stop: int, *, rank: int, world_size: int) -> tuple[int, int]:
    """This rank's part of positions [start, stop): contiguous, and sizes differ by at most one.

    >>> [rank_slice(0, 7, rank=r, world_size=2) for r in (0, 1)]
    [(0, 3), (3, 7)]
    """
    size = stop - start
    return start + size * rank // world_size, start + size * (rank + 1) // world_size
