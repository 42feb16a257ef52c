"""Translate a pre-tokenizer, which cuts normal forms into words, to rules for the kernel."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tokenizers import pre_tokenizers

from bertdata.tokenize.forms import SPACE, Forms, flat, library_tokenizer
from bertdata.tokenize.kernels.records import EACH_PIECE, EACH_WORD, FIRST_PIECE, NEVER
from bertdata.tokenize.models import kind_of, merges_of
from bertdata.tokenize.rules import Chain, Choice, Leaf, Node, Repeat, Rules, Unsupported, parse
from bertdata.tokenize.source import Source

GPT2_RULE = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_RULE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Cutting:
    """A pre-tokenizer as rules and a prefix."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.pattern = ""  # the regular expression of the last rule, if it is one
        self.drops: list[bool] = []  # for each rule, whether text between its words is dropped
        self.prefix, self.prefix_when, self.prefix_always = "", NEVER, False
        self.byte_level = False  # whether the model gets words as letters that represent bytes
        self.cut_bytes: list[Node] = []  # for the rules that cut words of such letters: the name of the cutter
        self.marks_spaces = False  # whether the model gets a space as SPACE
        self.kind: Callable[[str], str] | None = None  # of a character, if one rule handles each alone; see _add_kinds
        self.joins_spaces = False  # whether the rules treat several spaces like one
        self.collapses = False  # whether the normalizer reduces several spaces, which a word may have, to one

    def add(self, node: Node, *, drops: bool = False, cutting: Node | None = None, pattern: str = "") -> None:
        """cutting: the part of the rule that determines where words end, if it is not the whole rule."""
        self.cut_bytes += [cutting or node] * self.byte_level
        self.nodes.append(node)
        self.pattern = pattern
        self.drops.append(drops)


def cutting(pre_tokenizer: dict[str, Any] | None, forms: Forms, source: Source) -> Cutting:
    """Return the Cutting of a pre-tokenizer, given as JSON. Raises Unsupported if no rules express it."""
    cut = Cutting()
    parts = flat(pre_tokenizer, "pretokenizers")
    kinds = [part["type"] for part in parts]
    if kinds == ["Split"] and "String" in parts[0]["pattern"] and forms.removes(parts[0]["pattern"]["String"]):
        parts, kinds = [], []  # no character is left to split at
    splits_nothing = kinds == ["Metaspace"] and not parts[0].get("split", True)
    adds_prefix = any(part["type"] == "Metaspace" or part.get("add_prefix_space") for part in parts)
    if forms.prepended and adds_prefix:
        raise Unsupported("two of its parts put a character before a text")
    if forms.prepended:
        cut.prefix, cut.prefix_when, cut.prefix_always = forms.prepended, EACH_PIECE, True
    if not parts or splits_nothing:
        if splits_nothing:
            _metaspace(parts[0], cut)
        cut.add(_uncut_words(source, SPACE + " " * splits_nothing))
        if forms.collapses:
            raise Unsupported("its normalizer joins spaces, and nothing cuts text into words")
        return cut
    for number, part in enumerate(parts):
        kind = part["type"]
        if cut.byte_level and kind not in ("Digits", "Punctuation", "Split"):
            raise Unsupported(f"its pre-tokenizer has a {kind} after ByteLevel")
        if kind == "ByteLevel":
            if part.get("add_prefix_space", True):
                if number > 0:
                    raise Unsupported("it puts a space before each part of a text")
                cut.prefix, cut.prefix_when = " ", EACH_PIECE
            if part.get("use_regex", True):
                cut.add(parse(GPT2_RULE), pattern=GPT2_RULE)
            elif number == 0:
                raise Unsupported("nothing cuts text into words")
            cut.byte_level = True
        elif kind == "Metaspace" and kinds[:number] in ([], ["WhitespaceSplit"]) and number == len(parts) - 1:
            _metaspace(part, cut)
            _add_metaspace(cut, forms, splits_whitespace=number == 1)
        elif kind == "WhitespaceSplit" and kinds[number + 1 :] == ["Metaspace"]:
            continue
        elif kind == "Split":
            _add_split(part, cut)
        elif kind in ("BertPreTokenizer", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"):
            _add_kinds(part, cut)
        else:
            raise Unsupported(f"its pre-tokenizer has a {kind}, which no engine knows here")
    if forms.collapses and forms.collapses_to != " " and not cut.marks_spaces:
        raise Unsupported("its normalizer puts another character in place of several spaces")
    cut.collapses = forms.collapses and bool(Rules(cut.nodes[:1]).matches(" ")[0])  # else no word has a space
    if cut.collapses and not cut.joins_spaces:
        raise Unsupported("its normalizer joins spaces that its rules tell apart")
    return cut


def _metaspace(part: dict[str, Any], cut: Cutting) -> None:
    if part["replacement"] != SPACE:
        raise Unsupported(f"it puts {part['replacement']!r} in place of spaces")
    scheme = part.get("prepend_scheme") or ("always" if part.get("add_prefix_space", True) else "never")
    cut.marks_spaces = True
    if scheme != "never":
        cut.prefix, cut.prefix_when = SPACE, EACH_PIECE if scheme == "always" else FIRST_PIECE


def _add_metaspace(cut: Cutting, forms: Forms, *, splits_whitespace: bool) -> None:
    """Add a rule by which words begin at a space, or at the character that represents a space."""
    mark = Leaf(lambda c: c == SPACE)
    if splits_whitespace:
        other = Leaf(lambda c: c != SPACE and not _is_space(c))
        if cut.prefix_when == FIRST_PIECE:
            raise Unsupported("it treats the first word of a text alone in another way")
        cut.prefix_when = EACH_WORD if cut.prefix else NEVER
        cut.add(Choice((Chain((Repeat(mark, 0, 1), Repeat(other, 1, None))), mark)), drops=True)
        return
    space, other = Leaf(lambda c: c == " "), Leaf(lambda c: c not in (" ", SPACE))
    begin = Repeat(space, 1, None) if forms.collapses else space
    cut.joins_spaces = forms.collapses
    cut.add(
        Choice(
            (
                Chain((begin, Repeat(other, 0, None))),
                Chain((mark, Repeat(other, 0, None))),
                Repeat(other, 1, None),
            )
        )
    )


def _uncut_words(source: Source, spaces: str) -> Node:
    """Return a rule for a BPE model that gets whole texts. No merge of the vocabulary crosses the ends of its words.

    A merge across a border makes a token in which the two characters at the border are adjacent. So if no token has a
    different character before SPACE, text can be cut before SPACE; a character that is not adjacent to any other in any
    token can be cut out. spaces: the characters that the model gets as SPACE.
    """
    model = source.outline["model"]
    if kind_of(model) != "BPE" or model.get("end_of_word_suffix"):
        raise Unsupported("nothing cuts text into words")

    def ask() -> dict[str, Any]:
        beside = {left[-1] + right[0] for left, right in merges_of(source.content["model"])}
        return {"beside": sorted(beside), "has_space": SPACE in source.vocabulary()}

    facts = source.kept("beside", ask)
    if model.get("fuse_unk") and not model.get("byte_fallback") and not facts["has_space"]:
        raise Unsupported("nothing cuts text into words, and unknown characters side by side are one token")
    beside = facts["beside"]
    if any(after == SPACE != before for before, after in beside):
        raise Unsupported("nothing cuts text into words, and its tokens reach across spaces")
    joined = {c for pair in beside if pair[0] != pair[1] for c in pair} - {*spaces}
    mark, other = Leaf(lambda c: c in spaces), Leaf(lambda c: c in joined)
    alone = Leaf(lambda c: c not in spaces and c not in joined)
    return Choice(
        (
            Chain((Repeat(mark, 0, None), Repeat(other, 1, None))),
            Repeat(mark, 1, None),
            Repeat(alone, 1, None),
        )
    )


def _add_split(part: dict[str, Any], cut: Cutting) -> None:
    pattern = part["pattern"]
    node = parse(pattern["Regex"] if "Regex" in pattern else re.escape(pattern["String"]))
    if part["behavior"] == "Isolated" or (part["behavior"] == "Removed" and part["invert"]):
        cut.add(node, drops=part["behavior"] == "Removed", pattern=pattern.get("Regex", ""))
    else:
        raise Unsupported(f"its pre-tokenizer splits with the behavior {part['behavior']}")


def _is_space(character: str) -> bool:
    return not pre_tokenizers.WhitespaceSplit().pre_tokenize_str(character)


def _add_kinds(part: dict[str, Any], cut: Cutting) -> None:
    """Add a rule for a pre-tokenizer that drops, isolates or keeps each character independently of its neighbours."""
    if part.get("behavior", "").startswith("Merged"):
        raise Unsupported(f"its pre-tokenizer splits punctuation with the behavior {part['behavior']}")
    pieces = library_tokenizer(pre_tokenizer=part).pre_tokenizer.pre_tokenize_str

    known: dict[str, str] = {}

    def kind(character: str) -> str:
        if character not in known:  # then the characters of the same page of 256 are next
            page = range(ord(character) & ~0xFF, (ord(character) | 0xFF) + 1)
            characters = [chr(c) for c in page if not 0xD800 <= c < 0xE000]
            known.update(dict.fromkeys(characters, "drop"))
            for text, (start, _) in pieces(f"x{'x'.join(characters)}x"):
                known.update(dict.fromkeys(text[start % 2 == 0 :: 2], "cut" if len(text) == 1 else "keep"))
        return known[character]

    joins = any(kind(c) == "cut" and len(pieces(c + c)) == 1 for c in "!1")
    alone, kept = Leaf(lambda c: kind(c) == "cut"), Leaf(lambda c: kind(c) == "keep")
    rule = Choice((Repeat(alone, 1, None) if joins else alone, Repeat(kept, 1, None)))
    cut.add(rule, drops=True, cutting=alone)
    cut.kind = None if joins or len(cut.nodes) > 1 else kind
