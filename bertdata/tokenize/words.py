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
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from bertdata.tokenize.engine import NUM_CODE_POINTS, PAGE, Engine
from bertdata.tokenize.forms import SPACE, Forms, flat
from bertdata.tokenize.kernels import records
from bertdata.tokenize.kernels.records import Output, RunTables, Text, WordTables
from bertdata.tokenize.kernels.words import encode_words
from bertdata.tokenize.models import model_tables, read_only
from bertdata.tokenize.rules import Chain, Choice, Leaf, Node, Repeat, Rules, Unsupported, parse
from bertdata.types import SpecialTokens

GPT2_RULE = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
NEVER, EACH_PIECE, FIRST_PIECE, EACH_WORD = range(4)  # when a prefix is put before text
LETTERS = "abcdefghijklmnopqrstuvwxyz"
FORM_BYTES = 12  # that an entry has room for
_SILENT = -1  # in place of the leaves that match: the code point has an empty normal form


class Cutting:
    """What a pre-tokenizer does: rules, and a prefix."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.drops: list[bool] = []  # of each rule, whether text between its words is left out
        self.prefix, self.prefix_when, self.prefix_always = "", NEVER, False
        self.byte_level = False  # whether words reach the model as letters that stand for bytes
        self.marks_spaces = False  # whether a space reaches the model as SPACE
        self.joins_spaces = False  # whether several spaces are one

    def add(self, node: Node, *, drops: bool = False) -> None:
        self.nodes.append(node)
        self.drops.append(drops)


def cutting(pre_tokenizer: dict[str, Any] | None, forms: Forms, model: dict[str, Any]) -> Cutting:
    """What a pre-tokenizer, given as JSON, does with normal forms. Raises Unsupported if the rules cannot say it."""
    cut = Cutting()
    parts = flat(pre_tokenizer, "pretokenizers")
    kinds = [part["type"] for part in parts]
    if forms.replaces_spaces and kinds == ["Split"] and parts[0]["pattern"] == {"String": " "}:
        parts, kinds = [], []  # there is no space left to split at
    splits_nothing = kinds == ["Metaspace"] and not parts[0].get("split", True)
    adds_prefix = any(part["type"] == "Metaspace" or part.get("add_prefix_space") for part in parts)
    if forms.prepended and adds_prefix:
        raise Unsupported("two of its parts put a character before a text")
    if forms.prepended:
        cut.prefix, cut.prefix_when, cut.prefix_always = forms.prepended, EACH_PIECE, True
    if not parts or splits_nothing:
        if splits_nothing:
            _metaspace(parts[0], cut)
        cut.add(_uncut_words(model, SPACE + " " * splits_nothing))
        if forms.collapses:
            raise Unsupported("its normalizer joins spaces, and nothing cuts text into words")
        return cut
    for number, part in enumerate(parts):
        kind = part["type"]
        if kind == "ByteLevel" and number == len(parts) - 1:
            cut.byte_level = True
            if part.get("add_prefix_space", True):
                if number > 0:
                    raise Unsupported("it puts a space before each part of a text")
                cut.prefix, cut.prefix_when = " ", EACH_PIECE
            if part.get("use_regex", True):
                cut.add(parse(GPT2_RULE))
            elif number == 0:
                raise Unsupported("nothing cuts text into words")
        elif kind == "Metaspace" and kinds[:number] in ([], ["WhitespaceSplit"]) and number == len(parts) - 1:
            _metaspace(part, cut)
            _add_metaspace(cut, forms, splits_whitespace=number == 1)
        elif kind == "WhitespaceSplit" and kinds[number + 1 :] == ["Metaspace"]:
            continue
        elif kind == "Split":
            _add_split(part, cut)
        elif kind in _SPLITTERS:
            _SPLITTERS[kind](part, cut)
        else:
            raise Unsupported(f"its pre-tokenizer has a {kind}, which no engine knows here")
    if cut.prefix_when == FIRST_PIECE and forms.strips:
        raise Unsupported("it strips a text and treats its first word in another way")
    if forms.collapses and forms.collapses_to != " " and not cut.marks_spaces:
        raise Unsupported("its normalizer puts another character in place of several spaces")
    has_spaces = bool(Rules(cut.nodes[:1]).matches(" ")[0])
    if forms.collapses and has_spaces and not (cut.joins_spaces and forms.collapses_last):
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
        Choice((
            Chain((begin, Repeat(other, 0, None))), Chain((mark, Repeat(other, 0, None))), Repeat(other, 1, None),
        ))
    )  # fmt: skip


def _uncut_words(model: dict[str, Any], spaces: str) -> Node:
    """A rule for a BPE model that gets whole texts: words between which no merge of the vocabulary reaches.

    A merge that joins text on both sides of a place makes a token in which the two characters stand side by side. If no
    token holds another character before SPACE, text can be cut before SPACE; a character that stands beside no other
    in any token can be cut out. spaces: the characters that reach the model as SPACE.
    """
    if "merges" not in model or model.get("end_of_word_suffix"):
        raise Unsupported("nothing cuts text into words")
    if model.get("fuse_unk") and not model.get("byte_fallback") and SPACE not in model["vocab"]:
        raise Unsupported("nothing cuts text into words, and unknown characters side by side are one token")
    merges = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
    beside: set[tuple[str, str]] = set()
    for left, right in merges:
        beside.add((left[-1], right[0]))
    if any(after == SPACE != before for before, after in beside):
        raise Unsupported("nothing cuts text into words, and its tokens reach across spaces")
    joined = {c for pair in beside if pair[0] != pair[1] for c in pair} - {*spaces}
    mark, other = Leaf(lambda c: c in spaces), Leaf(lambda c: c in joined)
    alone = Leaf(lambda c: c not in spaces and c not in joined)
    return Choice((
        Chain((Repeat(mark, 0, None), Repeat(other, 1, None))), Repeat(mark, 1, None), Repeat(alone, 1, None),
    ))  # fmt: skip


def _add_split(part: dict[str, Any], cut: Cutting) -> None:
    pattern = part["pattern"]
    if "Regex" in pattern:
        node = parse(pattern["Regex"])
    else:
        node = parse("".join(f"\\{c}" if c in r"\.[]{}()*+?^$|-/" else c for c in pattern["String"]))
    if part["behavior"] == "Isolated" or (part["behavior"] == "Removed" and part["invert"]):
        cut.add(node, drops=part["behavior"] == "Removed")
    else:
        raise Unsupported(f"its pre-tokenizer splits with the behavior {part['behavior']}")


def _is_space(character: str) -> bool:
    return not pre_tokenizers.WhitespaceSplit().pre_tokenize_str(character)


def _kind(pre_tokenizer: Any) -> Callable[[str], str]:
    """A function that says what a pre-tokenizer does with a character between letters: drop it, cut around it, keep."""

    def kind(character: str) -> str:
        pieces = pre_tokenizer.pre_tokenize_str(f"x{character}x")
        return {1: "keep", 2: "drop"}.get(len(pieces), "cut")

    return kind


def _add_kinds(cut: Cutting, pre_tokenizer: Any, *, joins: bool) -> None:
    """A rule for pre-tokenizers that decide character by character. joins: whether cut out characters stay together."""
    kind = _kind(pre_tokenizer)
    alone = Leaf(lambda c: kind(c) == "cut")
    cut.add(
        Choice((Repeat(alone, 1, None) if joins else alone, Repeat(Leaf(lambda c: kind(c) == "keep"), 1, None))),
        drops=True,
    )


def _add_digits(part: dict[str, Any], cut: Cutting) -> None:
    _add_kinds(cut, pre_tokenizers.Digits(individual_digits=True), joins=not part["individual_digits"])


def _add_punctuation(part: dict[str, Any], cut: Cutting) -> None:
    if part.get("behavior", "Isolated") != "Isolated":
        raise Unsupported(f"its pre-tokenizer splits punctuation with the behavior {part['behavior']}")
    _add_kinds(cut, pre_tokenizers.Punctuation(), joins=False)


_SPLITTERS: dict[str, Callable[[dict[str, Any], Cutting], None]] = {
    "Digits": _add_digits,
    "Punctuation": _add_punctuation,
    "BertPreTokenizer": lambda _, cut: _add_kinds(cut, pre_tokenizers.BertPreTokenizer(), joins=False),
    "Whitespace": lambda _, cut: _add_kinds(cut, pre_tokenizers.Whitespace(), joins=True),
    "WhitespaceSplit": lambda _, cut: cut.add(Repeat(Leaf(lambda c: not _is_space(c)), 1, None), drops=True),
}


class Words(Engine):
    """For tokenizers whose parts the rules, the forms and the models can say."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, content: dict[str, Any], special: SpecialTokens) -> None:
        """content: the tokenizer's JSON. Raises Unsupported if the kernel cannot encode for this tokenizer."""
        super().__init__(tokenizer, special)
        self.forms = Forms(content.get("normalizer"))
        self._changes = not self.forms.is_identity or self.forms.collapses
        self._cut = cut = cutting(content.get("pre_tokenizer"), self.forms, content["model"])
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        if "unk_id" in content["model"]:  # the library reads scores from JSON with an error in the last bit
            content["model"] = json.loads(tokenizer.to_str())["model"]
        model = model_tables(content["model"], vocabulary, byte_level=cut.byte_level)
        if len(cut.nodes) > records.MOST_RULES:
            raise Unsupported("its pre-tokenizer has too many parts")
        self._rules = Rules(cut.nodes)
        self._content = content
        self._vocabulary = vocabulary
        self._of_rules: dict[str, Any] = {}  # fields of the kernel's tables that follow from the rules
        self._inner: dict[bool, tokenizers.Tokenizer] = {}  # for hard runs inside a text, and for single words
        self._prefix = prefix = cut.prefix
        if len(prefix) > 1:
            raise Unsupported("it puts more than one character before a text")
        if prefix and len(cut.nodes) > 1:
            raise Unsupported("it puts a character before a text that several rules cut")
        spelled = np.array([*self._prefix.encode()], np.uint8)
        constants: dict[str, Any] = {n: read_only(v) if isinstance(v, np.ndarray) else v for n, v in model.items()}
        self._constants = WordTables(
            **constants,
            points=None,
            ascii=None,
            quick=None,
            after=None,
            inside=records.NO_BYTES,
            letters=None,
            steps=None,
            skips=None,
            starts=None,
            keeps_gaps=read_only(np.array([not drops for drops in cut.drops])),
            cuts=None,
            meets=int(self._changes),
            strips=int(self.forms.strips),
            prefix=read_only(spelled),
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
        gives_bytes = cut.byte_level or (model["byte_ids"][0, 0] >= 0 and SPACE not in vocabulary)
        if gives_bytes and (cut.marks_spaces or SPACE in (self.forms.normal(" "), prefix)):
            raise Unsupported("its vocabulary does not have the character that stands for a space")
        # A newline that no leaf matches ends words as the end of a text does.
        ends_words = self.forms.normal("\n") != "" and not any(self._rules.matches(self.forms.normal("\n")))
        has_places = not self.forms.clusters  # else the library's places of tokens are not those of their text
        is_same_anywhere = cut.prefix_when in (NEVER, EACH_WORD) and not self.forms.strips
        self.takes_lines = ends_words and cut.drops[0] and is_same_anywhere and has_places
        named = {records.BYTE_BPE: "byte-level BPE", records.CHARACTER_BPE: "BPE", records.UNIGRAM: "Unigram",
                 records.WORD_PIECE: "WordPiece", records.WHOLE_WORD: "WordLevel"}  # fmt: skip
        self.name = named[model["model"]]
        self._warm()

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
            fields = {"ascii": ascii_classes, "quick": quick, "after": after, "letters": self._letters(quick),
                      "steps": rules.steps, "skips": self._skips(quick), "starts": rules.starts,
                      "cuts": rules.cuts}  # fmt: skip
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
        sets = {records.PRINTED: [*range(ord("!"), ord("~") + 1)], records.LOWER: [*LETTERS.encode()],
                records.LETTERS: [*LETTERS.encode(), *LETTERS.upper().encode()]}  # fmt: skip
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
            form, suffix = self._spelled(chr(byte)), self._content["model"].get("end_of_word_suffix") or ""
            if len(form) == 1:
                letters[:, byte] = [self._vocabulary.get(form + end, -1) for end in ("", suffix)]
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

    def _encode_hard(self, texts: Sequence[str], where: int) -> list[list[int]]:
        cut = self._cut
        is_word = where in (records.ONE_WORD, records.WITH_PREFIX)
        has_edges = cut.prefix_when in (EACH_PIECE, FIRST_PIECE) or self.forms.strips
        if not is_word and (where == records.AT_BEGIN or not has_edges):
            return super()._encode_hard(texts, where)
        if is_word:
            texts = [self._spelled(text) for text in texts]
        if where == records.WITH_PREFIX:
            texts = [
                self._prefix + text if cut.prefix_always or not text.startswith(self._prefix) else text
                for text in texts
            ]
        with self._probing:
            if is_word not in self._inner:
                self._inner[is_word] = inner_tokenizer(
                    self._content, is_word=is_word, each_word=cut.prefix_when == EACH_WORD
                )
        encodings = self._inner[is_word].encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

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
        forms = self.forms.of_page(points)
        meets = self.forms.meets(points, forms) if self._changes else [False] * PAGE
        characters = "".join(sorted(set("".join(forms))))
        matches = dict(zip(characters, self._rules.matches(characters), strict=True))
        step = [int(records.MEETS_STEP) if meet else 0 for meet in meets]
        keys = []
        for k, form in enumerate(forms):
            kinds = {matches[c] for c in form}
            if not form:
                keys.append((_SILENT, step[k]))
            elif self._is_hard(points[k], form, kinds):
                keys.append((0, step[k] | int(records.HARD_STEP)))
            else:
                keys.append((kinds.pop(), step[k]))
        classes = self._rules.classes(keys)
        hard = int(records.HARD_STEP)
        uncovered = self._changes and {  # text between words would have to be looked at together with its neighbours
            key
            for key, number in dict(zip(keys, classes, strict=True)).items()
            if key[0] != _SILENT and not key[1] & hard
            for rule, drops in enumerate(self._cut.drops)
            if not drops and not self._rules.covers(rule, number)
        }
        if uncovered:
            keys = [(0, key[1] | hard) if key in uncovered else key for key in keys]
            classes = self._rules.classes(keys)
        for k, (point, form, key, number) in enumerate(zip(points, forms, keys, classes, strict=True)):
            entries[k] = self._entry(point, form, number, meets[k], bool(key[1] & hard))
        return entries

    def _is_hard(self, point: str, form: str, kinds: set[int]) -> bool:
        """Whether a normal form that is not empty fits no entry. kinds: the leaves that match its characters."""
        longer = len(form.encode()) > len(point.encode())  # the room for ids is counted in bytes of text
        several = len(kinds) > 1 or (len(form) > 1 and not self._rules.repeatable(min(kinds)))
        return (longer and form != SPACE) or len(form.encode()) > FORM_BYTES or several or self.forms.attracts(point)

    def _entry(self, point: str, form: str, number: int, meets: bool, is_hard: bool) -> tuple[int, int]:  # noqa: FBT001
        """The entry of a code point, two uint64.

        First: the class in bits 0 to 7; the number of bytes of the normal form in bits 8 to 15, of its characters in
        bits 16 to 23; records.MEETS and so on from bit 24; bytes 8 to 11 in bits 32 to 63. Second: bytes 0 to 7.
        """
        spelled = form.replace(" ", SPACE) if self._cut.marks_spaces else form
        flags = [(meets, records.MEETS), (is_hard, records.HARD_FORM), (not form, records.SILENT_FORM),
                 (form == " ", records.SPACE_FORM), (self.forms.is_blank(point), records.BLANK),
                 (bool(self._prefix) and spelled.startswith(self._prefix), records.PREFIXED)]  # fmt: skip
        entry = number | sum(int(flag) for is_set, flag in flags if is_set)
        if is_hard:
            return entry, 0
        encoded = spelled.encode()
        entry |= len(encoded) << 8 | len(form) << 16
        return entry | int.from_bytes(encoded[8:], "little") << 32, int.from_bytes(encoded[:8], "little")


def inner_tokenizer(content: dict[str, Any], *, is_word: bool, each_word: bool) -> tokenizers.Tokenizer:
    """The tokenizer for text from the middle of a piece: it strips nothing and puts nothing before it.

    is_word: for a single word as it reaches the model; it does not normalize and cut it either. each_word: whether a
    prefix is put before each word; then it stays.
    """
    content = json.loads(json.dumps(content))
    parts = flat(content.get("normalizer"), "normalizers")
    parts = [part for part in parts if part["type"] not in ("Strip", "Prepend") and not is_word]
    content["normalizer"] = {"type": "Sequence", "normalizers": parts} if parts else None
    if is_word:
        content["added_tokens"] = []
    kept = []
    for part in flat(content.get("pre_tokenizer"), "pretokenizers"):
        if part["type"] == "ByteLevel":
            kept.append(part | {"add_prefix_space": False} | ({"use_regex": False} if is_word else {}))
        elif part["type"] == "Metaspace" and not is_word:
            part.pop("add_prefix_space", None)
            kept.append(part if each_word else part | {"prepend_scheme": "never"})
        elif not is_word:
            kept.append(part)
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": kept} if kept else None
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    tokenizer.encode_special_tokens = True
    return tokenizer
