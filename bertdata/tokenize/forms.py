"""The normal form of each code point, and which code points change each other.

The normalizer is run on code points one at a time. Most results do not depend on the neighbours. If they may (a letter
and the accent after it become one character), the normalizer is run on the pair. So a kernel can decide, without
`tokenizers`, that the normal form of a stretch of text is the concatenation of those of its code points; it leaves all
other stretches to `tokenizers`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import tokenizers
from tokenizers import normalizers

from bertdata.tokenize.kernels.records import STRIPS_LATE, STRIPS_LEFT, STRIPS_RIGHT
from bertdata.tokenize.rules import Leaf, Unsupported, parse

SPACE = "\u2581"  # represents a space in vocabularies of SentencePiece
# Normalizers whose result for a code point depends on others only through marks and similar characters.
_COMPOSING = ("NFC", "NFKC", "Precompiled")
_REORDERING = ("NFD", "NFKD", "BertNormalizer", *_COMPOSING)
_SIMPLE = ("Lowercase", "StripAccents", "Nmt")
# (regular expression, replacement) pairs that reduce several spaces to one. _SPACES_ONLY change nothing else.
_SPACES_ONLY = (" {2,}", " +")
_COLLAPSING = [(spaces, content) for spaces in _SPACES_ONLY for content in (" ", SPACE)]
_COLLAPSING += [(r"\s+", " "), (r"\s{2,}|[\n\r\t]", " ")]


Normalizing = Callable[[str], str]
_DECOMPOSES = normalizers.NFKD()
_sorted = normalizers.NFD().normalize_str


class Forms:
    """The normal forms of a tokenizer's normalizer."""

    strips = 0
    """The ends of a text where blank characters are removed: STRIPS_LEFT, STRIPS_RIGHT, or both; also STRIPS_LATE if
    the text is changed before that."""
    prepended = ""
    """Text to put before every text, in its normal form."""
    collapses = False
    """Whether several spaces are reduced to one."""
    collapses_to = " "
    """The replacement for several spaces."""
    normal: Normalizing
    """Returns the normal form of a text, before stripping, prepending and collapsing spaces."""
    is_identity: bool
    """Whether every text is its own normal form."""
    clusters: bool
    """Whether letters are replaced together with the marks after them."""
    composes: bool
    """Whether a letter and the marks after it may become a different letter."""
    reorders: bool
    """Whether the marks after a letter may change their order, or become part of the letter."""

    def __init__(self, normalizer: dict[str, Any] | None) -> None:
        """normalizer: its JSON.

        Raises Unsupported if the results for pairs of code points do not determine the result for a text.
        """
        kept: list[dict[str, Any]] = []
        # Whether text may be cut between two characters, in any context
        self.may_cut: Callable[[str, str], bool] = lambda _before, _after: True
        # Strings of several characters that are replaced, their replacements, and the normal form they occur in
        self.strings: list[tuple[str, str, Normalizing]] = []
        parts = flat(normalizer, "normalizers")
        for number, part in enumerate(parts):
            kind = part["type"]
            if kind == "Strip":
                self._strip(part, kept)
            elif kind == "Prepend":
                later = parts[number + 1 :]
                if kept or any(part["type"] != "Replace" or not part["content"] for part in later):
                    raise Unsupported("its normalizer prepends text in an unusual place")
                self.prepended = _normalizing(later)(part["prepend"])
            elif kind == "Replace":
                self._replace(part, kept)
            elif kind in _REORDERING or kind in _SIMPLE:
                kept.append(part)
            else:
                raise Unsupported(f"its normalizer has a {kind}")
        kinds = {part["type"] for part in kept}
        self.is_identity = not kept
        self.clusters = "Precompiled" in kinds
        self.composes = not kinds.isdisjoint(_COMPOSING)
        self.reorders = any(map(_reorders, kept))
        self.has_marks = self.composes or bool(self.strings)
        self.normal = _normalizing(kept)
        self._kept = kept
        if self.collapses and self.normal(" ") != " ":
            raise Unsupported("its normalizer joins spaces, and then replaces them")
        self._without_mark = normalizers.Replace(tokenizers.Regex(r"\p{M}"), "").normalize_str
        self._cluster = normalizers.Precompiled(_cluster_rules()).normalize_str

    def _strip(self, part: dict[str, Any], kept: list[dict[str, Any]]) -> None:
        ends = STRIPS_LEFT * part["strip_left"] | STRIPS_RIGHT * part["strip_right"]
        if not ends:
            return
        if self.strips or self.prepended or self.collapses_to != " ":
            raise Unsupported("its normalizer strips text in an unusual place")
        self.strips = ends | STRIPS_LATE * bool(kept)
        self._before_strip = _normalizing(kept)
        self._stripped = _normalizing([*kept, part | {"strip_left": True, "strip_right": True}])

    def _replace(self, part: dict[str, Any], kept: list[dict[str, Any]]) -> None:
        pattern, content = part["pattern"], part["content"]
        if "String" in pattern:
            self.strings += [(pattern["String"], content, _normalizing(kept))] * (len(pattern["String"]) > 1)
            kept.append(part)
        elif (pattern["Regex"], content) in _COLLAPSING:
            self.collapses, self.collapses_to = True, content
            kept += [part] * (pattern["Regex"] not in _SPACES_ONLY)
            self._with_spaces = _normalizing(kept)
        elif isinstance(parse(pattern["Regex"]), Leaf):
            kept.append(part)
        else:
            raise Unsupported(f"its normalizer replaces the regular expression {pattern['Regex']!r}")

    def removes(self, string: str) -> bool:
        """Return whether no normal form contains a string: it is replaced, and no later part makes it again."""
        patterns = [part.get("pattern", {}).get("String") for part in self._kept]
        later = self._kept[patterns.index(string) :] if string in patterns else [{}]
        return all(set(string).isdisjoint(part.get("content", string)) for part in later)

    def meets(self, point: str, form: str) -> bool:
        """Return whether a code point may change the previous one or be changed with it. form: its normal form."""
        for string, _, before in self.strings:
            ends = {string[0], string[1], string[-1]}
            if not ends.union(b for a, b in pairwise(string) if self.may_cut(a, b)).isdisjoint(before(point)):
                return True
        if not self.reorders:
            return False
        if not self.composes:  # Unicode sorts marks by class; U+0334 has the lowest class and U+0345 the highest
            return any(_sorted(text) != text for text in (f"{c}\u0334|\u0345{c}" for c in set(form)))
        # Hangul letters compose. Future versions of Unicode may add marks to sparsely used planes.
        rare = 0x10000 <= ord(point) < 0x1F000 or ord(point) >= 0x40000
        composed = any(0x1100 <= ord(c) < 0x1200 for c in form) or 0xD7B0 <= ord(point) < 0xD800
        # A later part of the normalizer may remove the mark that a code point becomes, as it does for the mark alone.
        firsts = point + form[:1] + _DECOMPOSES.normalize_str(point)[:1]
        if rare or composed or not all(map(self._without_mark, firsts)):
            return True
        return self.clusters and (
            any(self._cluster("a" + c) == "*" for c in point + form[:1])
            or (point == "\n" and self.normal("\r\n") != self.normal("\r") + form)
        )

    def is_hard(self, point: str, form: str) -> bool:
        """Return whether the form of a code point may depend on more than the previous one. form: its normal form."""
        if self.clusters and self._cluster(point + "a") == "*":
            return True
        if any(a + b in before(point) != point for string, _, before in self.strings for a, b in pairwise(string)):
            return True  # it consists of several characters of a replaced string
        if self.strips & STRIPS_LATE and self._stripped(point) not in ("", self._before_strip(point)):
            return True  # a part of the form is stripped
        if not self.collapses:
            return False
        # A space that is not joined with other spaces, or a character between two spaces when they are joined
        is_late = (not form or " " in form) and self._with_spaces(point) != form
        return is_late or (form != " " and self.normal(point + " ") != form + " ")

    def are_stable(self, before: str, point: str, *, ignore_spaces: bool) -> bool:
        """Return whether two adjacent code points have the same normal forms as alone.

        ignore_spaces: whether the number of adjacent spaces is irrelevant.
        """
        for string, _, earlier in self.strings:
            if len(string) > 2 and string[0] in earlier(before) and string[1] in earlier(point):
                return False
        forms = self.normal(before), self.normal(point)
        if ignore_spaces and not "".join(forms).strip(" "):
            return True
        return self.normal(before + point) == "".join(forms)

    def is_blank(self, point: str) -> bool:
        """Return whether stripping a text removes a code point at its ends."""
        return bool(self.strips) and self._stripped(point) == ""


def _reorders(part: dict[str, Any]) -> bool:
    """Return whether a normalizer decomposes letters, and so sorts the marks after them, like BERT's for accents."""
    if part["type"] != "BertNormalizer":
        return part["type"] in _REORDERING
    return bool(part["lowercase"] if part["strip_accents"] is None else part["strip_accents"])


def flat(part: dict[str, Any] | None, members: str) -> list[dict[str, Any]]:
    """Return the parts of a possibly nested sequence, in order."""
    if part is None:
        return []
    if part.get("type") != "Sequence":
        return [part]
    return [each for member in part[members] for each in flat(member, members)]


def _cluster_rules() -> bytes:
    """Return the rules of a Precompiled normalizer that replaces each character with the marks after it by "*".

    So the result shows which code points such a normalizer handles together, which depends on its version of Unicode.
    The rules are a trie of Darts (Yata, 2008), in which every first byte is a key, and the concatenated keys.
    """
    units = np.full(512, 1 << 31, "<u4")
    units[:256] = np.arange(256) | 1 << 8 | 256 << 10
    units[0] = 0
    return np.uint32(units.nbytes).tobytes() + units.tobytes() + b"*\0"


def _normalizing(parts: list[dict[str, Any]]) -> Normalizing:
    """Return the library's normalizer with these parts, as a function of a text."""
    if not parts:
        return str
    normalizer = library_tokenizer(normalizer={"type": "Sequence", "normalizers": parts}).normalizer
    return lambda text: normalizer.normalize_str(text) if text else text


def library_tokenizer(**parts: Any) -> Any:
    """Return a tokenizer of the library with these parts, given as JSON, and without a vocabulary."""
    content: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    return tokenizers.Tokenizer.from_str(json.dumps(content | parts))
