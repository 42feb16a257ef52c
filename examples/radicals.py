"""A table for structured_embeddings.py: the radical of each Chinese character of a tokenizer, from Python alone.

    python examples/radicals.py shards/ radicals.tsv
    python examples/structured_embeddings.py --data shards/ --out run/ --structures radicals.tsv

Unicode put the characters U+4E00 to U+9FA5 in the order of the Kangxi dictionary: by radical, then by strokes. Each of
its 214 radicals begins with a character that is the radical itself, and Unicode names these characters in the block of
Kangxi radicals, U+2F00 to U+2FD5. So the radical of a character is the last one of the 214 that is not behind it. The
radicals are those of the dictionary: 好 has 女, and 说 has 言; but 为 has 丶, and 来 has 木 while 來 has 人.
"""

from __future__ import annotations

import bisect
import sys
import unicodedata

from tokenizers import Tokenizer

from bertdata.tokenize.load import load
from bertdata.tokenize.tokenizer import TOKENIZER

FIRST, LAST = "\u4e00", "\u9fa5"
RADICALS = [unicodedata.normalize("NFKC", chr(code)) for code in range(0x2F00, 0x2FD6)]


def radical(character: str) -> str | None:
    """The Kangxi radical of a character; None for what is not among the 20,902 of the dictionary's order."""
    return RADICALS[bisect.bisect_right(RADICALS, character) - 1] if FIRST <= character <= LAST else None


def main(tokenizer: str, out: str) -> None:
    """Writes a line for each token that is one character with a radical, also where it continues a word (##好)."""
    vocabulary = Tokenizer.from_str(load(tokenizer).files[TOKENIZER].decode()).get_vocab()
    rows = []
    for token in sorted(vocabulary, key=vocabulary.__getitem__):
        character = token.removeprefix("##")
        if len(character) == 1 and (found := radical(character)):
            rows.append(f"{token}\t{found}\n")
    with open(out, "w", encoding="utf-8") as file:
        file.writelines(rows)
    print(f"{len(rows):,} of {len(vocabulary):,} tokens have one of {len({row[-2] for row in rows})} radicals: {out}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python examples/radicals.py TOKENIZER TABLE (TOKENIZER: as for bertdata build, or shards)")
    main(sys.argv[1], sys.argv[2])
