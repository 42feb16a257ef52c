"""Keys: every random choice is computed from a key, and a key from a few numbers, called words.

docs/determinism.md defines both.
"""

from __future__ import annotations

GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def purpose(name: str) -> int:
    """The word of a key that says what it is for: the ASCII bytes of the name, little-endian."""
    return int.from_bytes(name.encode().ljust(8, b"\0"), "little")


def key(seed: int, purpose_name: str, *words: int) -> int:
    """A 64-bit number from a seed, a purpose and other words. Use it where you need a seed of your own.

    >>> key(1, "init", 0) == key(0, "init", 1)
    False
    """
    return absorbed(seed, purpose(purpose_name), *words)


def absorbed(*words: int) -> int:
    """The key of a sequence of words, each from 0 to 2**64 - 1."""
    h = 0
    for word in words:
        h = ((h ^ word) + GOLDEN) & _MASK
        h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & _MASK
        h ^= h >> 31
    return h
