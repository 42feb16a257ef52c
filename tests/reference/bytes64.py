"""What the operations on 64 bytes at a time find, byte by byte."""

import string

LETTERS, SMALL = string.ascii_letters.encode(), string.ascii_lowercase.encode()
DIGITS, BLANKS = string.digits.encode(), b"\t\n\v\f\r "


def bits(are_set):
    """A number that has bit k if are_set[k]."""
    return sum(is_set << k for k, is_set in enumerate(are_set))


def words_at(data, place, ranges, byte, fold):
    """The 64 bytes from `place` on as test_kernels.words_at looks at them: numbers of 64 bits, in its order."""
    text, second, third = (bytes(data[place + k : place + k + 64]) for k in range(3))
    folded = [part.translate(bytes.maketrans(LETTERS, LETTERS.lower())) if fold else part for part in (second, third)]
    after = [bytes(pair) for pair in zip(*folded, strict=True)]
    found = [
        [b not in SMALL for b in text],
        [any((b - first) % 256 <= more for first, more in ranges.tolist()) for b in text],
        [b >= 0xC0 for b in text],
        [b in BLANKS for b in text],
        [b == byte for b in text],
        [b in LETTERS for b in text],
        [b in DIGITS for b in text],
        [b == 32 for b in text],
        [b in b"\r\n" for b in text],
        [b in BLANKS for b in text],
        [b >= 128 for b in text],
        [b == 39 for b in text],
        [b == 0 for b in text],
        [pair[0] in b"stmd" for pair in after],
        [pair in (b"ll", b"ve", b"re") or (fold and pair == "ſ".encode()) for pair in after],
    ]
    return int.from_bytes(text[:8], "little"), *map(bits, found)
