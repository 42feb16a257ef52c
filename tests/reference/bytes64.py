"""What the operations on 64 bytes at a time find, byte by byte."""


def bits(are_set):
    """A number that has bit k if are_set[k]."""
    return sum(is_set << k for k, is_set in enumerate(are_set))


def words_at(data, place, ranges, byte):
    """The 64 bytes from `place` on as test_kernels.words_at looks at them: numbers of 64 bits, in its order."""
    text = bytes(data[place : place + 64])
    found = [
        [any((b - first) % 256 <= more for first, more in ranges.tolist()) for b in text],
        [b in b"\t\n\v\f\r " for b in text],
        [b == byte for b in text],
    ]
    return int.from_bytes(text[:8], "little"), *map(bits, found)
