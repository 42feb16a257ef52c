"""Keys: every random choice is a function of a key, and a key of a few words. docs/determinism.md defines both."""

from __future__ import annotations

GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def purpose(name: str) -> int:
    """The word that stands for a purpose in a key: its ASCII bytes, little-endian."""
    return int.from_bytes(name.encode().ljust(8, b"\0"), "little")


def key(seed: int, purpose_name: str, *words: int) -> int:
    """A 64-bit number from a structured key. Use it wherever you need a seed of your own: key(seed, purpose, words…).

    >>> key(1, "init", 0) == key(0, "init", 1)
    False
    """
    return absorbed(seed, purpose(purpose_name), *words)


def absorbed(*words: int) -> int:
    """The key of a sequence of 64-bit words."""
    h = 0
    for word in words:
        h = ((h ^ word) + GOLDEN) & _MASK
        h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & _MASK
        h ^= h >> 31
    return h
