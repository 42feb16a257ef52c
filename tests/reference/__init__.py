"""Slow, simple twins of the fast code, written from docs/ and not from that code. Tests compare the two."""
