"""The engine of tokenizers that cut text into words by rules: byte-level BPE, SentencePiece's BPE, Unigram, and others.

Every such tokenizer works in the same steps, and this file puts together what the kernel must know of each:

    added tokens   added.py    are cut out of the text
    normalizer     forms.py    gives each code point its normal form
    pre-tokenizer  rules.py    cuts the text into words
    model          models.py   gives the ids of a word
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from bertdata.tokenize.engine import NUM_CODE_POINTS, PAGE, Engine, ids_by
from bertdata.tokenize.forms import SPACE, Forms, flat, library_tokenizer
from bertdata.tokenize.kernels import records
from bertdata.tokenize.kernels.records import (
    EACH_PIECE,
    EACH_WORD,
    FIRST_PIECE,
    NEVER,
    Output,
    RunTables,
    Text,
    WordTables,
)
from bertdata.tokenize.kernels.words import encode_words
from bertdata.tokenize.models import byte_letters, kind_of, merges_of, model_tables, read_only
from bertdata.tokenize.rules import Chain, Choice, Leaf, Node, Repeat, Rules, Unsupported, parse
from bertdata.tokenize.source import Source
from bertdata.types import SpecialTokens

GPT2_RULE = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
LETTERS_OF_BYTES = byte_letters()
_SILENT = -1  # in place of the leaves that match: the code point has an empty normal form


class Cutting:
    """What a pre-tokenizer does: rules, and a prefix."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.drops: list[bool] = []  # of each rule, whether text between its words is left out
        self.prefix, self.prefix_when, self.prefix_always = "", NEVER, False
        self.byte_level = False  # whether words reach the model as letters that stand for bytes
        self.cut_bytes: list[Node] = []  # of the rules that cut words of such letters: what cuts
        self.marks_spaces = False  # whether a space reaches the model as SPACE
        self.joins_spaces = False  # whether the rules take several spaces for one
        self.collapses = False  # whether the normalizer leaves one of several spaces that a word may have

    def add(self, node: Node, *, drops: bool = False, cutting: Node | None = None) -> None:
        """cutting: the part of the rule that decides where words end, if not all of it."""
        self.cut_bytes += [cutting or node] * self.byte_level
        self.nodes.append(node)
        self.drops.append(drops)


def cutting(pre_tokenizer: dict[str, Any] | None, forms: Forms, source: Source) -> Cutting:
    """What a pre-tokenizer, given as JSON, does with normal forms. Raises Unsupported if the rules cannot say it."""
    cut = Cutting()
    parts = flat(pre_tokenizer, "pretokenizers")
    kinds = [part["type"] for part in parts]
    if kinds == ["Split"] and "String" in parts[0]["pattern"] and forms.removes(parts[0]["pattern"]["String"]):
        parts, kinds = [], []  # there is nothing left to split at
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
                cut.add(parse(GPT2_RULE))
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
    """Words begin at a space, or at the character that stands for one."""
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
    """A rule for a BPE model that gets whole texts: words between which no merge of the vocabulary reaches.

    A merge that joins text on both sides of a place makes a token in which the two characters stand side by side. If no
    token holds another character before SPACE, text can be cut before SPACE; a character that stands beside no other
    in any token can be cut out. spaces: the characters that reach the model as SPACE.
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
        cut.add(node, drops=part["behavior"] == "Removed")
    else:
        raise Unsupported(f"its pre-tokenizer splits with the behavior {part['behavior']}")


def _is_space(character: str) -> bool:
    return not pre_tokenizers.WhitespaceSplit().pre_tokenize_str(character)


def _add_kinds(part: dict[str, Any], cut: Cutting) -> None:
    """A rule for a pre-tokenizer that drops a character, cuts around it, or keeps it, whatever its neighbours are."""
    if part.get("behavior", "").startswith("Merged"):
        raise Unsupported(f"its pre-tokenizer splits punctuation with the behavior {part['behavior']}")
    pieces = library_tokenizer(pre_tokenizer=part).pre_tokenizer.pre_tokenize_str

    def kind(character: str) -> str:
        return {1: "keep", 2: "drop"}.get(len(pieces(f"x{character}x")), "cut")

    joins = any(kind(c) == "cut" and len(pieces(c + c)) == 1 for c in "!1")
    alone, kept = Leaf(lambda c: kind(c) == "cut"), Leaf(lambda c: kind(c) == "keep")
    rule = Choice((Repeat(alone, 1, None) if joins else alone, Repeat(kept, 1, None)))
    cut.add(rule, drops=True, cutting=alone)


NAMES = {
    records.BYTE_BPE: "byte-level BPE",
    records.CHARACTER_BPE: "BPE",
    records.UNIGRAM: "Unigram",
    records.WORD_PIECE: "WordPiece",
    records.WHOLE_WORD: "WordLevel",
}
"""What engines are called, by their model."""


class Words(Engine):
    """For tokenizers whose parts the rules, the forms and the models can say."""

    def __init__(self, source: Source, special: SpecialTokens) -> None:
        """Raises Unsupported if the kernel cannot encode for this tokenizer."""
        super().__init__(source, special)
        self.forms = Forms(source.outline.get("normalizer"))
        self._changes = not self.forms.is_identity or self.forms.collapses
        self._cut = cut = cutting(source.outline.get("pre_tokenizer"), self.forms, source)
        self.forms.collapses = cut.collapses
        self._looks = self._changes or bool(cut.cut_bytes)  # whether code points may be hard
        model = (
            source.kept(
                f"model {cut.byte_level}",
                lambda: model_tables(source.model(), source.vocabulary(), byte_level=cut.byte_level),
            )
            | {}
        )
        if len(cut.nodes) > records.MOST_RULES:
            raise Unsupported("its pre-tokenizer has too many parts")
        self._rules = Rules(cut.nodes)
        self._cut_bytes = Rules(cut.cut_bytes)
        self.forms.may_cut = self._may_cut
        self._of_rules: dict[str, Any] = {}  # fields of the kernel's tables that follow from the rules
        self._inner: dict[int, tokenizers.Tokenizer] = {}  # for hard runs inside a text, and for single words
        self._prefix = prefix = cut.prefix
        if len(prefix) > 1:
            raise Unsupported("it puts more than one character before a text")
        if self.forms.prepended and flat(source.outline.get("pre_tokenizer"), "pretokenizers"):
            raise Unsupported("its normalizer puts a character before a text, and its pre-tokenizer cuts the text")
        if prefix and len(cut.nodes) > 1:
            raise Unsupported("it puts a character before a text that several rules cut")
        self._characters, has_space = model.pop("characters"), model.pop("has_space")
        constants = model | dict.fromkeys(
            ("points", "ascii", "quick", "after", "letters", "steps", "skips", "starts", "cuts")
        )
        self._constants = WordTables(
            **constants,
            inside=records.NO_BYTES,
            keeps_gaps=read_only(np.array([not drops for drops in cut.drops])),
            meets=int(self._looks),
            strips=self.forms.strips,
            prefix=read_only(np.array([*prefix.encode()], np.uint8)),
            prefix_class=0,
            prefix_when=cut.prefix_when,
            prefix_always=int(cut.prefix_always),
            collapses=int(self.forms.collapses),
            special=self._special,
            special_to=-1 if special.unk is None else special.unk,
        )
        if cut.prefix:
            number = self._rules.classes([(self._rules.matches(prefix)[0], 0)])[0]
            self._constants = self._constants._replace(prefix_class=number)
        gives_bytes = cut.byte_level or (model["byte_ids"][0, 0] >= 0 and not has_space)
        if gives_bytes and (cut.marks_spaces or SPACE in (self.forms.normal(" "), prefix)):
            raise Unsupported("its vocabulary does not have the character that stands for a space")
        # A newline that no leaf matches ends words as the end of a text does.
        ends_words = self.forms.normal("\n") != "" and not any(self._rules.matches(self.forms.normal("\n")))
        has_places = not self.forms.clusters  # else the library's places of tokens are not those of their text
        is_same_anywhere = cut.prefix_when in (NEVER, EACH_WORD) and not self.forms.strips
        self.takes_lines = ends_words and cut.drops[0] and is_same_anywhere and has_places
        self.name = NAMES[model["model"]]
        self._warm()
        if hard := [chr(c) for c in range(ord(" "), 127) if self._page(0)[c, 0] & records.HARD_FORM]:
            self.why_slow = f"its normalizer changes {''.join(hard)!r} in ways that fit no table"

    def _with_rules(self, tables: WordTables) -> WordTables:
        """The tables with the rules as they are now. The caller holds the lock."""
        rules = self._rules
        if self._of_rules.get("steps") is not rules.steps:
            entries = self._page(0)[:128, 0]
            ascii_classes = (entries & np.uint64(0xFF)).astype(np.uint8)
            is_quick = entries & (records.MEETS | records.HARD_FORM | records.SILENT_FORM) == 0
            is_quick[0] = False  # a run with a zero byte has no key
            quick = np.append(np.where(is_quick, ascii_classes, 0), np.zeros(128)).astype(np.uint8)
            inside, after = self._quick_words(quick)
            fields: dict[str, NDArray[Any]]
            fields = {
                "ascii": ascii_classes,
                "quick": quick,
                "after": after,
                "letters": self._letters(quick),
                "steps": rules.steps,
                "skips": self._skips(quick),
                "starts": rules.starts,
                "cuts": rules.cuts,
            }
            self._of_rules = {name: read_only(array) for name, array in fields.items()} | {"inside": inside}
        return tables._replace(**self._of_rules)

    def _skips(self, quick: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """The field `skips` of records.WordTables. quick: the field of that name."""
        steps, classes = self._rules.steps.reshape(-1, records.CLASSES), quick[[*LETTERS.encode()]]
        loops = np.arange(steps.shape[0]) | int(records.ENDED)
        return np.logical_and((steps[:, classes] == loops[:, None]).all(axis=1), classes.all())

    def _quick_words(self, quick: NDArray[np.uint8]) -> tuple[int, NDArray[np.uint8]]:
        """The fields `inside` and `after` of records.WordTables. quick: the field of that name.

        A word of bytes of one set, perhaps with a space before them, needs no automaton if these bytes never end it and
        the byte after them always does.
        """
        none = records.NO_BYTES, np.zeros(256, np.uint8)
        if len(self._cut.nodes) > 1:
            return none
        steps = self._rules.steps.reshape(-1, records.CLASSES)
        states, ends = steps & records.STATES, steps == records.ENDED
        start, drops = int(self._rules.starts[0]), self._cut.drops[0]
        sets = {
            records.PRINTED: [*range(ord("!"), ord("~") + 1)],
            records.LOWER: [*LETTERS.encode()],
            records.LETTERS: [*LETTERS.encode(), *LETTERS.upper().encode()],
        }
        for inside in (records.PRINTED, records.LETTERS, records.LOWER):
            classes = np.unique(quick[sets[inside]])
            reached = {int(states[start, number]) for number in classes}
            space = int(states[start, quick[ord(" ")]])
            begins = space != 0 and quick[ord(" ")] != 0
            spaced = {int(states[space, number]) for number in classes} if begins else set()
            begins = begins and 0 not in spaced
            waiting = sorted(reached | (spaced if begins else set()))
            for state in waiting:  # grows while it is read
                following = {int(states[state, number]) for number in classes}
                waiting.extend(sorted(following.difference(waiting)))
            if 0 in waiting or 0 in classes:
                continue
            after = np.zeros(256, np.uint8)
            for byte in np.flatnonzero(quick).tolist():
                number = quick[byte]
                if number in classes or not ends[waiting, number].all():
                    continue
                if number == quick[ord(" ")] and begins:
                    after[byte] = records.NEXT_BEGINS
                elif steps[start, number] == 0 and drops:
                    after[byte] = records.GAP
                elif ends[states[start, number], quick[ord(" ")]] and states[start, number] != 0:
                    after[byte] = records.OWN_WORD
            if after[ord(" ")] in (records.NEXT_BEGINS, records.GAP):
                return inside, after
        return none

    def _letters(self, quick: NDArray[np.uint8]) -> NDArray[np.int32]:
        """int32 [2, 256]: what records.WordTables says. quick: its field of that name."""
        letters, byte_ids = np.full((2, 256), -1, np.int32), self._constants.byte_ids
        if self._cut.byte_level and not self._changes and not self._cut.marks_spaces:
            return byte_ids.astype(np.int32)
        if self._cut.byte_level or self.forms.collapses:  # the whole word, or several spaces, must be seen first
            return letters
        for byte in np.flatnonzero(quick).tolist():
            form, suffix = self._spelled(chr(byte)), self._source.outline["model"].get("end_of_word_suffix") or ""
            if len(form) == 1:
                letters[:, byte] = [self._characters.get(form + end, -1) for end in ("", suffix)]
        return letters

    def _new_tables(self) -> WordTables:
        # The kernel takes the classes of ASCII from an array of their own, so it does not ask for their entries.
        return self._with_page(self._constants._replace(points=np.zeros((NUM_CODE_POINTS, 2), np.uint64)), 0)

    def _with_page(self, tables: WordTables, number: int) -> WordTables:
        tables = super()._with_page(tables, number)
        with self._probing:
            return self._with_rules(tables)

    def _run(self, text: Text, tables: WordTables, runs: RunTables, output: Output) -> int:
        return encode_words(text, tables, runs, output)

    def _is_stable(self, before: int, point: int) -> bool:
        ignores = self.forms.collapses or self._cut.drops[0]
        return self.forms.are_stable(chr(before), chr(point), ignore_spaces=ignores)

    def _encode_hard(self, texts: Sequence[str], where: int) -> list[NDArray[np.int64]]:
        cut = self._cut
        is_word = where in (records.ONE_WORD, records.WITH_PREFIX)
        has_edges = cut.prefix_when in (EACH_PIECE, FIRST_PIECE) or self.forms.strips
        if not is_word and (where == records.AT_BEGIN or not has_edges):
            return super()._encode_hard(texts, where)
        if is_word:
            texts = [self._spelled(text) for text in texts]
        if where == records.WITH_PREFIX:
            has_it = self._prefix if not cut.prefix_always else None
            texts = [text if has_it and text.startswith(has_it) else self._prefix + text for text in texts]
        kind = records.ONE_WORD if is_word else where
        with self._probing:
            if kind not in self._inner:
                self._inner[kind] = inner_tokenizer(self._source, where=kind, each_word=cut.prefix_when == EACH_WORD)
        return ids_by(self._inner[kind], texts)

    def _may_cut(self, before: str, after: str) -> bool:
        forms = self.forms.normal(before), self.forms.normal(after)
        a, b = self._rules.classes([(matches, 0) for matches in self._rules.matches("".join(forms))][:2])
        return forms != (before, after) or bool(self._rules.cuts[a * records.CLASSES + b])

    def _spelled(self, text: str) -> str:
        """A text as it reaches the model."""
        form = self.forms.normal(text)
        if self.forms.collapses:
            form = re.sub(" +", " ", form)
        return form.replace(" ", SPACE) if self._cut.marks_spaces else form

    def _entries(self, first: int) -> NDArray[np.uint64]:
        entries = np.zeros((PAGE, 2), np.uint64)
        if 0xD800 <= first < 0xE000:  # surrogates occur in no valid UTF-8
            entries[:, 0] = self._rules.classes([(_SILENT, 0)])[0] | int(records.SILENT_FORM)
            return entries
        points = [chr(first + k) for k in range(PAGE)]
        forms = [self.forms.normal(point) for point in points]
        meets = [self.forms.meets(point, form) for point, form in zip(points, forms, strict=True)]
        characters = "".join(sorted(set("".join(forms))))
        matches = dict(zip(characters, self._rules.matches(characters), strict=True))
        hard, keys = int(records.HARD_STEP), []
        for point, form, meet in zip(points, forms, meets, strict=True):
            kinds, step = {matches[c] for c in form}, meet * int(records.MEETS_STEP)
            if self._is_hard(point, form, kinds):
                keys.append((0, step | hard))
            else:
                keys.append((kinds.pop() if form else _SILENT, step))
        classes = self._rules.classes(keys)
        uncovered = {  # text between words would have to be looked at together with its neighbours
            key
            for key, number in dict(zip(keys, classes, strict=True)).items()
            if self._looks and not self._cut.drops[0] and key[0] != _SILENT and not key[1] & hard
            if not self._rules.covers(number)
        }
        if uncovered:
            keys = [(0, key[1] | hard) if key in uncovered else key for key in keys]
            classes = self._rules.classes(keys)
        for k, (point, form, key, number) in enumerate(zip(points, forms, keys, classes, strict=True)):
            entries[k] = self._entry(point, form, number, meets[k], bool(key[1] & hard))
        return entries

    def _is_hard(self, point: str, form: str, kinds: set[int]) -> bool:
        """Whether a normal form fits no entry. kinds: the leaves that match its characters."""
        longer = len(form.encode()) > len(point.encode())  # the room for ids is counted in bytes of text: at most 4
        several = len(kinds) > 1 or (len(form) > 1 and not self._rules.repeatable(min(kinds)))
        if (longer and form != SPACE) or several or self.forms.is_hard(point, form):
            return True
        letters = "".join(map(LETTERS_OF_BYTES.__getitem__, form.encode()))
        return letters != form and any(self._cut_bytes.matches(form + letters))

    def _entry(self, point: str, form: str, number: int, meets: bool, is_hard: bool) -> tuple[int, int]:  # noqa: FBT001
        """The entry of a code point, two uint64.

        First: the class in bits 0 to 7; the number of bytes of the normal form in bits 8 to 15, of its characters in
        bits 16 to 23; records.MEETS and so on from bit 24; bytes 8 to 11 in bits 32 to 63. Second: bytes 0 to 7.
        """
        spelled = form.replace(" ", SPACE) if self._cut.marks_spaces else form
        flags = [
            (meets, records.MEETS),
            (is_hard, records.HARD_FORM),
            (not form and not is_hard, records.SILENT_FORM),
            (form == " ", records.SPACE_FORM),
            (self.forms.is_blank(point), records.BLANK),
            (bool(self._prefix) and spelled.startswith(self._prefix), records.PREFIXED),
        ]
        entry = number | sum(int(flag) for is_set, flag in flags if is_set)
        if is_hard:
            return entry, 0
        encoded = spelled.encode()
        entry |= len(encoded) << 8 | len(form) << 16
        return entry | int.from_bytes(encoded[8:], "little") << 32, int.from_bytes(encoded[:8], "little")


def inner_tokenizer(source: Source, *, where: int, each_word: bool) -> tokenizers.Tokenizer:
    """The tokenizer for text that does not begin a text: it puts nothing before it.

    where: IN_MIDDLE: it strips nothing. LATER_PIECE: it strips. ONE_WORD: for a single word as it reaches the model; it
    does not normalize and cut it either. each_word: whether a prefix is put before each word; then it stays.
    """
    content = source.outline | {"model": source.content["model"]}
    is_word, left_out = where == records.ONE_WORD, ["Prepend", *["Strip"] * (where == records.IN_MIDDLE)]
    parts = flat(source.outline.get("normalizer"), "normalizers")
    parts = [part for part in parts if part["type"] not in left_out and not is_word]
    content["normalizer"] = {"type": "Sequence", "normalizers": parts} if parts else None
    if is_word:
        content["added_tokens"] = []
    kept = []
    for part in flat(source.outline.get("pre_tokenizer"), "pretokenizers"):
        if part["type"] == "ByteLevel":
            kept.append(part | {"add_prefix_space": False} | ({"use_regex": False} if is_word else {}))
        elif not is_word:
            is_prefixed = part["type"] == "Metaspace" and not each_word
            kept.append(part | ({"prepend_scheme": "never"} if is_prefixed else {}))
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": kept} if kept else None
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    tokenizer.encode_special_tokens = True
    return tokenizer
