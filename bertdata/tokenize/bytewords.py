"""The engine of byte-level BPE that cuts text by the rule of GPT-2 or of Llama 3.

It encodes text that is its own normal form, as most is, and leaves other text to the engine for words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from bertdata.tokenize.cutting import GPT2_RULE
from bertdata.tokenize.engine import NUM_CODE_POINTS, PAGE, Engine, ids_by
from bertdata.tokenize.forms import Forms, flat
from bertdata.tokenize.kernels import records
from bertdata.tokenize.kernels.bytes import NUM_CARRIES, encode_bytes, find_changes
from bertdata.tokenize.kernels.records import ByteTables, Output, RunTables, Text
from bertdata.tokenize.models import byte_symbols, read_only
from bertdata.tokenize.rules import Rules, Unsupported, parse
from bertdata.tokenize.source import Source
from bertdata.tokenize.words import Words, inner_tokenizer
from bertdata.types import SpecialTokens

LLAMA3_RULE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
RULES = {GPT2_RULE: records.GPT2_WORDS, LLAMA3_RULE: records.LLAMA3_WORDS}
_MODELS = {  # a character of each class
    records.IS_LETTER: "é",
    records.IS_NUMBER: "²",
    records.IS_OTHER: "€",
    records.IS_BLANK: "\u00a0",
}


class ByteWords(Engine):
    """For byte-level BPE by a rule of RULES."""

    name = "byte-level BPE"
    takes_lines = False

    def __init__(self, source: Source, special: SpecialTokens) -> None:
        """Raises Unsupported if the kernel cannot encode for this tokenizer."""
        super().__init__(source, special)
        self._roles = special
        rule = _rule_of(source.outline)
        self._forms = forms = Forms(source.outline.get("normalizer"))
        if forms.strips or forms.prepended or forms.collapses or forms.clusters:
            raise Unsupported("its normalizer changes more than single characters and their marks")
        self._rules = Rules([parse(rule)])
        self._classes = _classes_of_leaves(self._rules)
        if not np.array_equal(self._page(0)[:128], _ascii_classes()):
            raise Unsupported("it takes an ASCII character for another kind than the kernel does, or changes one")
        self._inner: tokenizers.Tokenizer | None = None  # for single words
        self._words: Words | None = None  # for text that is not its own normal form
        model = source.kept("symbols", lambda: byte_symbols(source.content["model"], source.vocabulary()))
        masks = [(1 << 8 * length) - 1 for length in range(17)] + [0]
        halves = np.array([half for mask in masks for half in (mask & (1 << 64) - 1, mask >> 64)], np.uint64)
        self._constants = ByteTables(
            rule=RULES[rule],
            **dict.fromkeys(("classes", "bits", "carry", "places", "dead")),
            key_masks=read_only(halves),
            **{field: read_only(array) for field, array in model.items()},
            special=self._special,
            special_to=-1 if special.unk is None else special.unk,
        )
        self._warm()

    def _new_tables(self) -> ByteTables:
        tables = self._constants._replace(
            classes=np.zeros(NUM_CODE_POINTS, np.uint8),
            bits=np.zeros(6, np.uint64),
            carry=np.zeros(NUM_CARRIES, np.uint64),
            places=np.zeros(records.WINDOW + 72, np.uint16),
            dead=np.zeros(records.LONGEST_WORD // 64 + 1, np.uint64),
        )
        return self._with_page(tables, 0)

    def _with_page(self, tables: ByteTables, number: int) -> ByteTables:
        with self._probing:
            tables.classes[number * PAGE : (number + 1) * PAGE] = self._page(number)
        return tables

    def _entries(self, first: int) -> NDArray[Any]:
        """The classes of a page of code points: uint8 [PAGE]."""
        if 0xD800 <= first < 0xE000:  # surrogates occur in no valid UTF-8
            return np.full(PAGE, records.IS_OTHER)
        points = [chr(first + k) for k in range(PAGE)]
        forms = [self._forms.normal(point) for point in points]
        found = self._rules.matches("".join(points))
        kinds = [[kind for kind, leaves in self._classes.items() if matches & leaves] for matches in found]
        if any(len(kind) != 1 for kind in kinds):
            raise Unsupported("its rule tells more kinds of characters apart than the kernel does")
        changes = [form != point or self._forms.meets(point, form) for point, form in zip(points, forms, strict=True)]
        return np.where(changes, records.MAY_CHANGE, np.array(kinds, np.uint8).ravel())

    def encode(
        self, text: Text, left_out: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[Any], NDArray[np.int64], int] | None:
        changes = np.zeros(text.starts.size, np.bool_) if self._forms.is_identity else self._changes(text)
        if not changes.any():
            return super().encode(text, left_out)
        with self._probing:
            if self._words is None:
                self._words = Words(self._source, self._roles)
        stops, tails = np.where(changes, text.starts, text.stops), np.where(changes, -1, text.tails)
        own = super().encode(text._replace(stops=stops, tails=tails), left_out)
        others = self._words.encode(Text(text.data, *(field[changes] for field in text[1:])))
        if own is None or others is None:
            return None
        sizes = np.diff(own[1])
        sizes[changes] = np.diff(others[1])
        is_other = np.repeat(changes, sizes)
        ids = np.empty(is_other.size, self._dtype)
        ids[is_other], ids[~is_other] = others[0], own[0]
        return ids, np.append(0, np.cumsum(sizes)), own[2] + others[2]

    def _changes(self, text: Text) -> NDArray[np.bool_]:
        """Whether each piece may not be its own normal form: bool [num_pieces]."""
        tables, found, piece = self._thread().tables, np.zeros(text.starts.size, np.bool_), 0
        while piece < found.size:
            piece, point = find_changes(text, tables, piece, found)
            if piece < found.size:
                tables = self._with_page(tables, point // PAGE)
        return found

    def _run(self, text: Text, tables: ByteTables, runs: RunTables, output: Output) -> int:
        return encode_bytes(text, tables, runs, output)

    def _encode_hard(self, texts: Sequence[str], where: int) -> list[NDArray[np.int64]]:
        if where != records.ONE_WORD:
            return super()._encode_hard(texts, where)
        with self._probing:
            if self._inner is None:
                self._inner = inner_tokenizer(self._source, where=where, each_word=False)
        return ids_by(self._inner, texts)


def _rule_of(content: dict[str, Any]) -> str:
    """The rule by which a tokenizer cuts text, one of RULES. Raises Unsupported if it is another, or more is done."""
    parts = flat(content.get("pre_tokenizer"), "pretokenizers")
    last = parts[-1] if parts else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        raise Unsupported("its words are not bytes, or it puts a space before a text")
    rules = [GPT2_RULE] if last.get("use_regex", True) else []
    for part in parts[:-1]:
        if part["type"] != "Split" or "Regex" not in part["pattern"]:
            raise Unsupported("the kernel of byte-level BPE does not know its pre-tokenizer")
        is_cut = part["behavior"] == "Isolated" or (part["behavior"] == "Removed" and part["invert"])
        rules.append(part["pattern"]["Regex"] if is_cut else "")
    if len(rules) != 1 or rules[0] not in RULES:
        raise Unsupported("the kernel of byte-level BPE does not know its rule")
    return rules[0]


def _classes_of_leaves(rules: Rules) -> dict[np.uint8, int]:
    """Class → the leaves, as bits, that match its characters and those of no other class."""
    matches = dict(zip(_MODELS, rules.matches("".join(_MODELS.values())), strict=True))
    return {
        kind: own & ~sum(1 << bit for bit in range(64) if any(m >> bit & 1 for k, m in matches.items() if k != kind))
        for kind, own in matches.items()
    }


def _ascii_classes() -> NDArray[np.uint8]:
    """uint8 [128]: what the kernel takes each ASCII character for."""
    kinds = np.full(128, records.IS_OTHER)
    kinds[[*range(ord("a"), ord("z") + 1), *range(ord("A"), ord("Z") + 1)]] = records.IS_LETTER
    kinds[[*range(ord("0"), ord("9") + 1)]] = records.IS_NUMBER
    kinds[[*range(9, 14), ord(" ")]] = records.IS_BLANK
    return kinds
