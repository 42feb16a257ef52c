"""Keys, and random numbers from keys."""

from __future__ import annotations

import numpy as np

from bertdata import keys
from bertdata.jit import inline, part

U0, U1, U2, U6, U32, U63 = (np.uint64(number) for number in (0, 1, 2, 6, 32, 63))
LOW32 = np.uint64(0xFFFFFFFF)
GOLDEN = keys.GOLDEN


mix = inline()(keys.mix)


@inline()
def absorb(h, word):
    """Return the key of h and one more word (docs/determinism.md)."""
    return mix((h ^ word) + GOLDEN)


@inline()
def draw(key, index):
    """Return random number `index` of a key: 64 bits."""
    return mix(key + (index + U1) * GOLDEN)


@inline()
def below(x, n):
    """Return x scaled to [0, n): the high half of the 128-bit product x * n."""
    x_lo, x_hi, n_lo, n_hi = x & LOW32, x >> U32, n & LOW32, n >> U32
    cross = x_hi * n_lo + ((x_lo * n_lo) >> U32)
    other = x_lo * n_hi + (cross & LOW32)
    return x_hi * n_hi + (cross >> U32) + (other >> U32)


@inline()
def below32(x, n):
    """Return the high half of x scaled to [0, n), for n up to 2**32."""
    return ((x >> U32) * n) >> U32


@part()
def key3(seed, purpose, variant):
    """Return key(seed, purpose, variant) (docs/determinism.md)."""
    return absorb(absorb(absorb(U0, seed), purpose), variant)
