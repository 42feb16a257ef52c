"""Functions for `bertdata build --map`: text → changed text, or None to leave the document out.

    bertdata build zh.txt --out shards/ --tokenizer bert-base-chinese \\
        --map bertdata.prepare:clean --map bertdata.prepare:nfkc \\
        --map 'bertdata.prepare:length(10, 512)' --map 'bertdata.prepare:cjk(0.5)'
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

__all__ = ["cjk", "clean", "length", "nfc", "nfkc"]
Map = Callable[[str], str | None]
_CONTROL = re.compile(
    r"[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f]"
)  # characters of Unicode's category Cc that are not white space
_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]+")


def nfc(text: str) -> str:
    """Return Unicode's composed form: a letter with accents becomes one character where Unicode has one."""
    return unicodedata.normalize("NFC", text)


def nfkc(text: str) -> str:
    """Return Unicode's compatibility composed form, which also makes full-width letters and ligatures plain."""
    return unicodedata.normalize("NFKC", text)


def clean(text: str) -> str:
    """Remove control characters and empty lines, and make each run of white space in a line one space."""
    lines = (" ".join(line.split()) for line in _CONTROL.sub("", text).split("\n"))
    return "\n".join(filter(None, lines))


def length(least: int, most: int | None = None) -> Map:
    """Leave out texts of fewer than `least` or more than `most` characters."""
    return lambda text: text if least <= len(text) and (most is None or len(text) <= most) else None


def cjk(least: float) -> Map:
    """Leave out texts with a smaller share of Chinese, Japanese or Korean characters.

    White space is not counted, and punctuation counts as none of these languages.
    """

    def kept(text: str) -> str | None:
        num_characters = sum(len(word) for word in text.split())
        return text if sum(len(run) for run in _CJK.findall(text)) >= least * num_characters else None

    return kept
