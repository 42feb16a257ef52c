"""Tables of a tokenizer for the kernels: byte-level BPE, SentencePiece's BPE, Unigram, WordPiece or WordLevel.

Every such tokenizer works in the same steps, and this file combines the tables of all steps:

    added tokens   added.py    are cut out of the text
    normalizer     forms.py    maps each code point to its normal form
    pre-tokenizer  rules.py    cuts the text into words
    model          models.py   maps a word to its ids
"""

from __future__ import annotations

import json
import re
import string
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from bertdata.tokenize.added import ranges_of
from bertdata.tokenize.cutting import GPT2_RULE, LLAMA3_RULE, cutting
from bertdata.tokenize.forms import SPACE, Forms, flat
from bertdata.tokenize.kernels import records
from bertdata.tokenize.kernels.records import EACH_PIECE, EACH_WORD, FIRST_PIECE, NEVER, WordTables
from bertdata.tokenize.models import BYTE_LETTERS, kind_of, model_tables, read_only
from bertdata.tokenize.rules import Rules, Unsupported
from bertdata.tokenize.source import Source
from bertdata.types import SpecialTokens

_FOUND_BY_BITS = {GPT2_RULE: records.GPT2_WORDS, LLAMA3_RULE: records.LLAMA3_WORDS}
_KINDS = {"é": records.IS_LETTER, "²": records.IS_NUMBER, "€": records.IS_OTHER, "\u00a0": records.IS_BLANK}
"""A character of each kind, and all characters that a rule treats like it."""
PAGE = 256  # code points that the tokenizer is probed with at a time
NUM_CODE_POINTS = 0x110000
WORD_BYTES = 1 << 14  # most bytes of a normalized word; a word of a quarter of this or more is hard
MOST_FORM_BYTES = 12  # of a normal form in an entry
_MOST_CHARS = "max_input_chars_per_word"
_SILENT = -1  # instead of the matching leaves: the code point has an empty normal form


def forbidden_ids(special: SpecialTokens) -> NDArray[np.bool_]:
    """Return which ids text must not become: bool [vocab_size], read-only. The unknown id replaces them."""
    forbidden = np.zeros(special.vocab_size, np.bool_)
    forbidden[list(set(special.special_ids) - {special.unk})] = True
    return read_only(forbidden)


def replace_special(ids: NDArray[Any], special: NDArray[np.bool_], unk: int | None) -> NDArray[np.int64]:
    """Replace special ids by the unknown id, if there is one, and return their indices. special: bool [vocab_size]."""
    places = np.flatnonzero(special[ids])
    if unk is not None:
        ids[places] = unk
    return places


class Words:
    """Tables of a tokenizer for the kernels. All public methods are thread-safe."""

    name: str
    """Kind of the tokenizer."""
    takes_lines: bool
    """Whether the ids of a text are the concatenated ids of its lines."""
    why_slow: str | None = None
    """The reason, as a clause, why typical text is hard."""
    near_factor: int
    """Size of the tables of runs, as a multiple of NEAR_LINES lines."""

    def __init__(self, source: Source, special: SpecialTokens) -> None:
        """Raises Unsupported if the kernel does not support this tokenizer."""
        self._source, self.special, self.unk = source, forbidden_ids(special), special.unk
        self.dtype = np.uint16 if special.vocab_size <= 1 << 16 else np.uint32
        self._pages: dict[int, NDArray[Any]] = {}  # index of a page → entries of its code points, read-only
        self._kept, self._num_kept = f"pages: {special}", 0  # name in the cache, and number of pages there
        self._probing = threading.Lock()  # held while the tokenizer is probed, and while _pages is read or written
        self.forms = forms = Forms(source.outline.get("normalizer"))
        self._changes = not forms.is_identity or forms.collapses
        self._cut = cut = cutting(source.outline.get("pre_tokenizer"), forms, source)
        changes_more = forms.has_marks or forms.strips or forms.prepended or forms.collapses
        model_json = source.outline["model"]
        has_characters = kind_of(model_json) in ("WordPiece", "WordLevel") and model_json.get(_MOST_CHARS, 1) > 0
        self._kind = cut.kind if has_characters and not changes_more else None
        forms.collapses = cut.collapses
        self._looks = self._changes or bool(cut.cut_bytes)  # whether code points may be hard
        ask = lambda: model_tables(source.model(), source.vocabulary(), byte_level=cut.byte_level)  # noqa: E731
        model = dict(source.kept(f"model {cut.byte_level}", ask))
        if len(cut.nodes) > records.MOST_RULES:
            raise Unsupported("its pre-tokenizer has too many parts")
        self._rules = Rules(cut.nodes)
        self._finds = _FOUND_BY_BITS.get(cut.pattern)
        self._kinds = np.full(256, records.MAY_CHANGE)  # classes of characters
        if self._finds:
            self._kinds[self._classes("".join(_KINDS))] = [*_KINDS.values()]
        self._cut_bytes = Rules(cut.cut_bytes)
        forms.may_cut = self._may_cut
        self._rule_fields: dict[str, Any] = {}  # fields of the kernel's tables that follow from the rules
        self._inner: dict[int, tokenizers.Tokenizer] = {}  # for hard runs inside a text, and for single words
        if len(cut.prefix) > 1:
            raise Unsupported("it puts more than one character before a text")
        if forms.prepended and flat(source.outline.get("pre_tokenizer"), "pretokenizers"):
            raise Unsupported("its normalizer puts a character before a text, and its pre-tokenizer cuts the text")
        if cut.prefix and len(cut.nodes) > 1:
            raise Unsupported("it puts a character before a text that several rules cut")
        self._characters, has_space = model.pop("characters"), model.pop("has_space")
        self._constants = self._constant_fields(model)
        gives_bytes = cut.byte_level or (model["byte_ids"][0, 0] >= 0 and not has_space)
        if gives_bytes and (cut.marks_spaces or SPACE in (forms.normal(" "), cut.prefix)):
            raise Unsupported("its vocabulary does not have the character that stands for a space")
        # A newline that no leaf matches ends words like the end of a text.
        ends_words = forms.normal("\n") != "" and not any(self._rules.matches(forms.normal("\n")))
        has_places = not forms.clusters  # else the library's offsets of tokens are not those of their text
        is_same_anywhere = cut.prefix_when in (NEVER, EACH_WORD) and not forms.strips
        self.takes_lines = ends_words and cut.drops[0] and is_same_anywhere and has_places
        self.name = "byte-level BPE" if cut.byte_level else kind_of(model_json)
        self.near_factor = 2 if model["model"] == records.WORD_PIECE else 1
        if hard := [chr(c) for c in range(ord(" "), 127) if self._page(0)[c, 0] & records.HARD_FORM]:
            self.why_slow = f"its normalizer changes {''.join(hard)!r} in ways that fit no table"

    def _classes(self, characters: str) -> list[int]:
        """Return the class of each character."""
        return self._rules.classes([(matches, 0) for matches in self._rules.matches(characters)])

    def _constant_fields(self, model: dict[str, Any]) -> dict[str, Any]:
        """Return the constant fields of the kernel's tables. model: the fields from `model_tables`."""
        cut, prefix = self._cut, self._cut.prefix
        # Words of more characters are unknown, and shorter words fit the memory of a thread. The search for words by
        # bits stops at the longest.
        is_short = 0 < model["max_chars"] <= 1 << 10 and not prefix and not self._finds
        return model | {
            "longest": 1 << 62 if is_short else WORD_BYTES // 4 - 16,
            "keeps_gaps": read_only(np.array([not drops for drops in cut.drops])),
            "meets": int(self._looks),
            "is_plain": int(cut.byte_level and not self._changes and not cut.marks_spaces),
            "strips": self.forms.strips,
            "prefix": read_only(np.array([*prefix.encode()], np.uint8)),
            "prefix_class": self._classes(prefix)[0] if prefix else 0,
            "prefix_when": cut.prefix_when,
            "prefix_always": int(cut.prefix_always),
            "collapses": int(self.forms.collapses),
            "special": self.special,
            "special_to": -1 if self.unk is None else self.unk,
        }

    def _fields_of_rules(self) -> dict[str, Any]:
        """Return the fields of the kernel's tables that follow from the rules. The caller holds the lock."""
        rules = self._rules
        if self._rule_fields.get("steps") is not rules.steps:
            points, quick = self._page(0)[:128], np.zeros(256, np.uint8)
            is_quick = points[:, 0] & (records.MEETS | records.HARD_FORM | records.SILENT_FORM) == 0
            is_quick[0] = False  # runs with a zero byte have no key
            quick[:128] = np.where(is_quick, points[:, 0] & np.uint64(0xFF), 0)
            finds, is_inside, stops = self._quick_words(quick)
            folds = finds == records.RUNS and bool(stops[ord("@")] != records.NOT_QUICK)
            folds = folds and np.array_equal(points[65:91], points[97:123])
            arrays: dict[str, NDArray[Any]] = {"quick": quick, "stops": stops, "ends": ranges_of(~is_inside)}
            arrays |= {"skips": self._skips(quick), "steps": rules.steps, "starts": rules.starts, "cuts": rules.cuts}
            self._rule_fields = {name: read_only(array) for name, array in arrays.items()} | {
                "finds": finds,
                "has_marks": int(self.forms.composes if finds == records.RUNS else self._looks),
                "fold": records.FOLD if folds else np.uint64(0),
            }
        return self._rule_fields

    def _skips(self, quick: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Return the field `skips` of records.WordTables. quick: the field `quick`."""
        steps, classes = self._rules.steps.reshape(-1, records.CLASSES), quick[[*string.ascii_lowercase.encode()]]
        loops = np.arange(steps.shape[0]) | int(records.ENDED)
        return np.logical_and((steps[:, classes] == loops[:, None]).all(axis=1), classes.all())

    def _quick_words(self, quick: NDArray[np.uint8]) -> tuple[int, NDArray[np.bool_], NDArray[np.uint64]]:
        """Return the fields `finds` and `stops` of records.WordTables, and the bytes of `ends`, bool [256].

        quick: the field `quick`. A word of bytes from one set, perhaps after a space, needs no automaton if these bytes
        never end it and the byte after it always does.
        """
        stops, known, is_inside = np.full(256, records.NOT_QUICK), np.flatnonzero(quick), np.zeros(256, np.bool_)
        if len(self._cut.nodes) > 1:
            return records.NOTHING, is_inside, stops
        if self._finds and quick[1:128].all() and (self._page(0)[:128, 1] == np.arange(128)).all():
            return self._finds, is_inside, stops
        letters, digits = [*string.ascii_letters.encode()], [*string.digits.encode()]
        if self._kind:
            values = [self._lone(chr(byte), self.forms.normal(chr(byte))) for byte in known.tolist()]
            stops[known] = [records.NOT_QUICK if value is None else value for value in values]
        if not self._kind or {*letters, *digits} != {*known[stops[known] == records.NOT_QUICK].tolist()}:
            stops[:] = records.NOT_QUICK
        steps = self._rules.steps.reshape(-1, records.CLASSES)
        states, ends = steps & records.STATES, steps == records.ENDED
        start, num_classes = int(self._rules.starts[0]), len(self._rules.class_keys) + 1
        if self._cut.drops[0]:
            cuts = self._rules.cuts.reshape(-1, records.CLASSES)[1:num_classes, quick].all(axis=0)
            stops[cuts & (quick != 0) & (steps[start, quick] == 0)] = 0
            if stops[ord(" ")] == 0:
                return records.RUNS, (stops == records.NOT_QUICK) & (np.arange(256) > 0), stops
        blank = int(quick[ord(" ")])
        space = int(states[start, blank])
        for inside in ([*range(ord("!"), ord("~") + 1)], letters, letters[:26]):
            classes = np.unique(quick[inside])
            waiting = sorted({int(state) for state in states[[[start], [space]], classes].ravel()})
            for state in waiting:  # grows during the loop
                waiting.extend(sorted({int(after) for after in states[state, classes]}.difference(waiting)))
            if 0 in (space, *waiting, *classes) or not ends[waiting, 0].all():
                continue
            stops[:], is_inside[:] = records.NOT_QUICK, False
            is_inside[inside] = True
            for byte in known.tolist():
                number = quick[byte]
                if number not in classes and ends[waiting, number].all():
                    after = states[start, number]
                    if number == blank:
                        stops[byte] = records.NEXT_BEGINS
                    elif ends[after, blank] and after != 0:
                        stops[byte] = records.OWN_WORD
            if stops[ord(" ")] == records.NEXT_BEGINS:
                return records.WORDS, is_inside, stops
        return records.NOTHING, is_inside, stops

    def _lone(self, point: str, form: str) -> int | None:
        """Return the value of the ids of a code point that is a word by itself or ends words, in any context.

        form: its normal form. Returns None for any other code point.
        """
        if self._kind is None or not form:
            return None
        kinds = [*map(self._kind, form)]
        if "keep" in (kinds[0], kinds[-1]) or ("keep", "keep") in pairwise(kinds):
            return None  # the code point may be part of a longer word
        ids = [self._characters.get(c, self._constants["unk"]) for c in form if self._kind(c) != "drop"]
        if len(ids) > min(len(point.encode()), 3) or self.special[ids].any():
            return None
        id_bits, count_place = (20, 60) if self.dtype == np.uint32 else (16, 48)
        value = len(ids) << count_place
        for k, token_id in enumerate(ids):
            value |= token_id << id_bits * k
        return value

    def with_page(self, number: int, tables: WordTables | None = None) -> WordTables:
        """Return the tables of a thread with the entries of a page of code points. None: new tables, for page 0."""
        with self._probing:
            points = tables.points if tables else np.zeros((NUM_CODE_POINTS, 2), np.uint64)
            kinds = tables.kinds if tables else np.zeros(NUM_CODE_POINTS, np.uint8)
            page = slice(number * PAGE, (number + 1) * PAGE)
            points[page] = self._page(number)
            kinds[page] = self._kinds[points[page, 0] & np.uint64(0xFF)]
            kinds[1:128] = _ascii_kinds()
            return WordTables(**self._constants, **self._fields_of_rules(), points=points, kinds=kinds)

    def _page(self, number: int) -> NDArray[Any]:
        """Return the constant entries of 256 code points. The caller holds the lock."""
        if not self._pages and (kept := self._source.read(self._kept)):
            self._rules.classes([(int(matches), flags) for matches, flags in kept["classes"]])
            self._pages |= zip(kept["numbers"].tolist(), kept["entries"], strict=True)
            self._num_kept = len(self._pages)
        if number not in self._pages:
            self._pages[number] = read_only(self._entries(number * PAGE))
        return self._pages[number]

    def keep_pages(self) -> None:
        """Write the pages to the cache, if there are many new ones."""
        if len(self._pages) <= self._num_kept * 9 // 8:
            return
        with self._probing:
            self._num_kept, classes = len(self._pages), [[str(m), flags] for m, flags in self._rules.class_keys]
            values = {"numbers": np.array([*self._pages]), "entries": np.stack([*self._pages.values()])}
            self._source.keep(self._kept, values | {"classes": classes})

    def is_stable(self, before: int, point: int) -> bool:
        """Return whether two adjacent code points do not change each other."""
        ignores = self.forms.collapses or self._cut.drops[0]
        with self._probing:
            return self.forms.are_stable(chr(before), chr(point), ignore_spaces=ignores)

    def for_library(self, texts: Sequence[str], where: int) -> tuple[tokenizers.Tokenizer, Sequence[str]]:
        """Return the tokenizer for hard runs, and the texts to pass to it. where: a value of records.Output.hard."""
        cut = self._cut
        is_word = where in (records.ONE_WORD, records.WITH_PREFIX)
        has_edges = cut.prefix_when in (EACH_PIECE, FIRST_PIECE) or self.forms.strips
        if not is_word and (where == records.AT_BEGIN or not has_edges):
            return self._source.library, texts
        if is_word:
            texts = [self._spelled(text) for text in texts]
        if where == records.WITH_PREFIX:
            has_it = not cut.prefix_always
            texts = [text if has_it and text.startswith(cut.prefix) else cut.prefix + text for text in texts]
        kind = records.ONE_WORD if is_word else where
        with self._probing:
            if kind not in self._inner:
                self._inner[kind] = inner_tokenizer(self._source, where=kind, each_word=cut.prefix_when == EACH_WORD)
        return self._inner[kind], texts

    def _may_cut(self, before: str, after: str) -> bool:
        forms = self.forms.normal(before), self.forms.normal(after)
        a, b = self._classes("".join(forms)[:2])
        return forms != (before, after) or bool(self._rules.cuts[a * records.CLASSES + b])

    def _spelled(self, text: str) -> str:
        """Return a text in the form that the model gets."""
        form = self.forms.normal(text)
        if self.forms.collapses:
            form = re.sub(" +", " ", form)
        return form.replace(" ", SPACE) if self._cut.marks_spaces else form

    def _entries(self, first: int) -> NDArray[np.uint64]:
        """Probe the tokenizer with the page of code points that begins with `first`. Return the entries."""
        entries = np.zeros((PAGE, 2), np.uint64)
        if 0xD800 <= first < 0xE000:  # surrogates never occur in valid UTF-8
            entries[:, 0] = self._rules.classes([(_SILENT, 0)])[0] | int(records.SILENT_FORM)
            return entries
        points = [chr(first + k) for k in range(PAGE)]
        forms = [self.forms.normal(point) for point in points]
        meets = [self.forms.meets(point, form) for point, form in zip(points, forms, strict=True)]
        lones = [
            None if meet or point.isascii() else self._lone(point, form)
            for point, form, meet in zip(points, forms, meets, strict=True)
        ]
        characters = "".join(sorted({c for form, lone in zip(forms, lones, strict=True) if lone is None for c in form}))
        matches = dict(zip(characters, self._rules.matches(characters), strict=True))
        hard, keys = int(records.HARD_STEP), []
        for point, form, meet, lone in zip(points, forms, meets, lones, strict=True):
            kinds, step = {matches[c] for c in form if lone is None}, meet * int(records.MEETS_STEP)
            if lone is not None:
                keys.append((0, 0))
            elif self._is_hard(point, form, kinds):
                keys.append((0, step | hard))
            else:
                keys.append((kinds.pop() if form else _SILENT, step))
        classes = self._rules.classes(keys)
        uncovered = {  # text between words would depend on its neighbours
            key
            for key, number in dict(zip(keys, classes, strict=True)).items()
            if self._looks and not self._cut.drops[0] and key[0] != _SILENT and not key[1] & hard
            if not self._rules.covers(number)
        }
        if uncovered:
            keys = [(0, key[1] | hard) if key in uncovered else key for key in keys]
            classes = self._rules.classes(keys)
        for k, (key, number, lone) in enumerate(zip(keys, classes, lones, strict=True)):
            if lone is not None:
                entries[k] = number | int(records.LONE), lone
            else:
                entries[k] = self._entry(points[k], forms[k], number, meets[k], bool(key[1] & hard))
        return entries

    def _is_hard(self, point: str, form: str, kinds: set[int]) -> bool:
        """Return whether a normal form does not fit an entry. kinds: the leaves that match its characters."""
        size = len(form) if self._constants["max_chars"] else len(form.encode())  # maximum number of ids
        longer = size > len(point.encode())  # the room for ids equals the bytes of the text, at most 4
        longer = longer or len(form.encode()) > MOST_FORM_BYTES
        several = len(kinds) > 1 or (len(form) > 1 and not self._rules.repeatable(min(kinds)))
        if (longer and form != SPACE) or several or self.forms.is_hard(point, form):
            return True
        letters = "".join(map(BYTE_LETTERS.__getitem__, form.encode()))
        return letters != form and any(self._cut_bytes.matches(form + letters))

    def _entry(self, point: str, form: str, number: int, meets: bool, is_hard: bool) -> tuple[int, int]:  # noqa: FBT001
        """Return the entry of a code point, two uint64.

        First: the class in bits 0 to 7; the normal form's number of bytes in bits 8 to 15, and of characters in bits 16
        to 23; records.MEETS and other flags from bit 24; its bytes 8 to 11 in bits 32 to 63. Second: its bytes 0 to 7.
        """
        spelled = form.replace(" ", SPACE) if self._cut.marks_spaces else form
        flags = [
            (meets, records.MEETS),
            (is_hard, records.HARD_FORM),
            (not form and not is_hard, records.SILENT_FORM),
            (form == " ", records.SPACE_FORM),
            (self.forms.is_blank(point), records.BLANK),
            (self._cut.prefix != "" and spelled.startswith(self._cut.prefix), records.PREFIXED),
        ]
        entry = number | sum(int(flag) for is_set, flag in flags if is_set)
        if is_hard:
            return entry, 0
        encoded = spelled.encode()
        entry |= len(encoded) << 8 | len(form) << 16
        return entry | int.from_bytes(encoded[8:], "little") << 32, int.from_bytes(encoded[:8], "little")


def _ascii_kinds() -> NDArray[np.uint8]:
    """Return the kinds of the ASCII characters from 1 on: uint8 [127]; see records.WordTables."""
    kinds = np.full(128, records.IS_OTHER)
    kinds[[*string.ascii_letters.encode()]] = records.IS_LETTER
    kinds[[*string.digits.encode()]] = records.IS_NUMBER
    kinds[[*b"\t\n\v\f\r "]] = records.IS_BLANK
    return kinds[1:]


def inner_tokenizer(source: Source, *, where: int, each_word: bool) -> tokenizers.Tokenizer:
    """Return the tokenizer for text inside a text: without a prefix.

    where: IN_MIDDLE: no stripping. LATER_PIECE: with stripping. ONE_WORD: for a single word in the form that the model
    gets, also without normalizing and cutting. each_word: whether each word gets a prefix; then it stays.
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
