"""Slow, simple reference implementations, written from docs/ and not from the fast code. Tests compare the two."""
