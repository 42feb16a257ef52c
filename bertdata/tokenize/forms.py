"""What a normalizer makes of each code point, and which code points change each other.

A normalizer is asked about code points one at a time. Most results do not depend on the neighbours. Where they may (a
letter and the accent after it, which become one character), the pair is asked about. So a kernel can find out, without
`tokenizers`, that a stretch of text has the normal form its code points have one by one; it leaves other stretches to
`tokenizers`.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import tokenizers
from tokenizers import normalizers

from bertdata.tokenize.rules import Leaf, Unsupported, parse

SPACE = "\u2581"  # the character that stands for a space in vocabularies of SentencePiece
# Normalizers whose result for a code point depends on others only through marks and the like.
_COMPOSING = ("NFC", "NFKC", "Precompiled")
_REORDERING = ("NFD", "NFKD", "BertNormalizer", *_COMPOSING)
_SIMPLE = ("Lowercase", "StripAccents", "Nmt")


class Forms:
    """The normal forms that a tokenizer's normalizer gives."""

    strips = False
    """Whether blank characters at both ends of a text are removed."""
    prepended = ""
    """What is put before every text, in its normal form."""
    collapses = False
    """Whether one space is left of several."""
    collapses_to = " "
    """What is left of several spaces."""
    collapses_last = False
    """Whether that is the last change, so that no other change makes spaces afterwards."""
    replaces_spaces = False
    """Whether no space is left: each has become another character."""
    is_identity: bool
    """Whether every text is its own normal form."""
    clusters: bool
    """Whether letters are replaced together with the marks after them."""
    composes: bool
    """Whether a letter and the marks after it may become another letter."""
    reorders: bool
    """Whether the marks after a letter may change their order, or become part of it."""

    def __init__(self, normalizer: dict[str, Any] | None) -> None:
        """normalizer: its JSON.

        Raises Unsupported if the result for a text does not follow from the results for pairs of its code points.
        """
        kept: list[dict[str, Any]] = []
        self.pairs: list[tuple[str, str]] = []  # pairs of characters that are replaced, and by what
        self._followers: set[str] = set()  # the second characters of the pairs that are replaced
        for number, part in enumerate(flat(normalizer, "normalizers")):
            kind, self.collapses_last = part["type"], False
            if kind == "Strip":
                if number > 0 or not part["strip_left"] or not part["strip_right"]:
                    raise Unsupported("its normalizer strips text in an unusual place")
                self.strips = True
            elif kind == "Prepend":
                later = flat(normalizer, "normalizers")[number + 1 :]
                if kept or any(part["type"] != "Replace" or not part["content"] for part in later):
                    raise Unsupported("its normalizer prepends text in an unusual place")
                self.prepended = _normalizer(later).normalize_str(part["prepend"]) if later else part["prepend"]
            elif kind == "Replace":
                self._replace(part, kept)
            elif kind in _REORDERING or kind in _SIMPLE:
                kept.append(part)
            else:
                raise Unsupported(f"its normalizer has a {kind}")
        self.is_identity = not kept
        self.clusters = any(part["type"] == "Precompiled" for part in kept)
        self.composes = any(part["type"] in _COMPOSING for part in kept)
        self.reorders = any(part["type"] in _REORDERING for part in kept)
        for number, part in enumerate(kept):
            pair = part["pattern"].get("String", "") if part["type"] == "Replace" else ""
            later = _normalizer(kept[number + 1 :])
            if len(pair) == 2 and later and later.normalize_str(pair[1]) != pair[1]:
                raise Unsupported(f"its normalizer replaces {pair!r}, and later {pair[1]!r}")
        self._normalizer = _normalizer(kept)
        self.replaces_spaces = " " not in self.normal(" ")
        self._is_mark = normalizers.Replace(tokenizers.Regex(r"\p{M}"), "\uf8ff")
        self._cluster = normalizers.Precompiled(_cluster_rules())
        self._strip = normalizers.Strip()

    def _replace(self, part: dict[str, Any], kept: list[dict[str, Any]]) -> None:
        pattern, content = part["pattern"], part["content"]
        if "String" in pattern:
            if len(pattern["String"]) > 2:
                raise Unsupported(f"its normalizer replaces {pattern['String']!r}, which is longer than two characters")
            if len(pattern["String"]) == 2:
                self.pairs.append((pattern["String"], content))
            self._followers.update(pattern["String"][1:])
            kept.append(part)
        elif (pattern["Regex"] in (" {2,}", " +") and content in (" ", SPACE)) or (pattern["Regex"], content) == (
            r"\s+",
            " ",
        ):
            self.collapses, self.collapses_last, self.collapses_to = True, True, content
            if pattern["Regex"] == r"\s+":
                kept.append(part)
        elif isinstance(parse(pattern["Regex"]), Leaf):
            kept.append(part)
        else:
            raise Unsupported(f"its normalizer replaces the regular expression {pattern['Regex']!r}")

    def normal(self, text: str) -> str:
        """The normal form of a text, without what is stripped, prepended or collapsed."""
        return self._normalizer.normalize_str(text) if self._normalizer and text else text

    def of_page(self, points: list[str]) -> list[str]:
        """The normal form of each code point. A page that contains "|" takes longer."""
        if self._normalizer is None:
            return points
        if "|" not in points:
            forms = self.normal("|".join(points)).split("|")
            if len(forms) == len(points):
                return forms
        return [self.normal(point) for point in points]

    def meets(self, points: list[str], forms: list[str]) -> list[bool]:
        """Whether each code point may change the one before it, or be changed with it."""
        found = [not self._followers.isdisjoint(form) for form in forms]
        if not self.reorders:
            return found
        marks = self._is_mark.normalize_str("".join(points))
        for place, (point, form) in enumerate(zip(points, forms, strict=True)):
            # Hangul letters compose. Future versions of Unicode may add marks to the planes that are little in use.
            rare = 0x10000 <= ord(point) < 0x1F000 or ord(point) >= 0x40000
            composed = any(0x1100 <= ord(c) < 0x1200 for c in form) or 0xD7B0 <= ord(point) < 0xD800
            starts_with_mark = form != point and self._is_mark.normalize_str(form[:1]) == "\uf8ff"
            found[place] |= rare or composed or marks[place] == "\uf8ff" or point == "\uf8ff" or starts_with_mark
            if self.clusters and point == "\n" and self.normal("\r\n") != self.normal("\r") + form:
                found[place] = True
            if self.clusters and not found[place]:
                found[place] = self._cluster.normalize_str("a" + point) == "*"
        return found

    def attracts(self, point: str) -> bool:
        """Whether a code point may change the one after it."""
        return self.clusters and self._cluster.normalize_str(point + "a") == "*"

    def are_stable(self, before: str, point: str, *, ignore_spaces: bool) -> bool:
        """Whether two code points side by side have the normal forms that they have alone.

        ignore_spaces: whether the number of spaces side by side makes no difference.
        """
        forms = self.normal(before), self.normal(point)
        if ignore_spaces and not "".join(forms).strip(" "):
            return True
        return self.normal(before + point) == "".join(forms)

    def is_blank(self, point: str) -> bool:
        """Whether a code point is removed at the ends of a text, if the normalizer strips it."""
        return self.strips and self._strip.normalize_str(point) == ""


def flat(part: dict[str, Any] | None, members: str) -> list[dict[str, Any]]:
    """The parts of a sequence, which may hold sequences, in order."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [each for member in part[members] for each in flat(member, members)]


def _cluster_rules() -> bytes:
    """The rules of a Precompiled normalizer that replaces each character and the marks after it, together, by "*".

    So it says which code points such a normalizer takes together, which depends on its version of Unicode. The rules
    are a trie of Darts (Yata, 2008), in which every first byte is a key, and the text of all keys.
    """
    units = np.full(512, 1 << 31, "<u4")
    units[:256] = np.arange(256) | 1 << 8 | 256 << 10
    units[0] = 0
    return np.uint32(units.nbytes).tobytes() + units.tobytes() + b"*\0"


def _normalizer(parts: list[dict[str, Any]]) -> Any:
    """The library's normalizer of these parts, None if there are none."""
    if not parts:
        return None
    content: dict[str, Any] = {
               "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "pre_tokenizer": None,
               "normalizer": {"type": "Sequence", "normalizers": parts}, "post_processor": None, "decoder": None,
               "model": {"type": "BPE", "vocab": {}, "merges": []}}  # fmt: skip
    return tokenizers.Tokenizer.from_str(json.dumps(content)).normalizer
