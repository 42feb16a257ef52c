"""Keys: every random choice is computed from a key, and every key from a few integers, called words.

docs/determinism.md defines both.
"""

from __future__ import annotations

import numpy as np

from bertdata.errors import require, require_integer

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(x: np.uint64) -> np.uint64:
    """Return the last step of SplitMix64, a bijection of 64-bit integers. Kernels compile this function."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def purpose(name: str) -> int:
    """Return the word for the purpose of a key: the bytes of the name, little-endian.

    Raises UsageError for a name that is not 1 to 8 ASCII characters.
    """
    is_name = name.isascii() and 1 <= len(name) <= 8
    require(is_name, "purpose_name", name, "a purpose of 1 to 8 ASCII characters")
    return int.from_bytes(name.encode().ljust(8, b"\0"), "little")


def key(seed: int, purpose_name: str, *words: int) -> int:
    """Return a 64-bit integer from a seed, a purpose and further words. Use it to derive seeds of your own.

    seed, words: from 0 to 2**64 - 1. purpose_name: 1 to 8 ASCII characters that name the use of the key. Raises
    UsageError for other values.

    >>> key(1, "init", 0) == key(0, "init", 1)
    False
    """
    seed, *others = (require_integer("seed", word) for word in (seed, *words))
    for word in (seed, *others):
        require(0 <= word < 1 << 64, "seed", word, "a seed and words from 0 to 2**64 - 1")
    return absorbed(seed, purpose(purpose_name), *others)


def absorbed(*words: int) -> int:
    """Return the key of a sequence of words, each from 0 to 2**64 - 1."""
    h = np.uint64(0)
    with np.errstate(over="ignore"):
        for word in words:
            h = mix((h ^ np.uint64(word)) + GOLDEN)
    return int(h)
