"""The engine of BERT's WordPiece."""

from __future__ import annotations

import string
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import normalizers

from bertdata.tokenize.engine import NUM_CODE_POINTS, PAGE, Engine
from bertdata.tokenize.forms import library_tokenizer
from bertdata.tokenize.kernels import records
from bertdata.tokenize.kernels.records import Output, RunTables, Text, WordPieceTables
from bertdata.tokenize.kernels.wordpiece import encode_wordpiece
from bertdata.tokenize.models import kind_of, read_only, require_small_ids, wordpiece_trie
from bertdata.tokenize.rules import Unsupported
from bertdata.tokenize.source import Source
from bertdata.types import SpecialTokens


class WordPiece(Engine):
    """For tokenizers of a BertNormalizer, a BertPreTokenizer and a WordPiece model."""

    name = "WordPiece"
    takes_lines = True
    near_factor = 2

    def __init__(self, source: Source, special: SpecialTokens) -> None:
        """Raises Unsupported if the kernel cannot encode for this tokenizer."""
        normalizer, pre_tokenizer = (source.outline.get(part) or {} for part in ("normalizer", "pre_tokenizer"))
        model = source.outline["model"]
        kinds = normalizer.get("type"), pre_tokenizer.get("type"), kind_of(model)
        if kinds != ("BertNormalizer", "BertPreTokenizer", "WordPiece"):
            raise Unsupported("it is not BERT's kind of WordPiece")
        super().__init__(source, special)
        tables = source.kept("wordpiece", self._tables)
        if (self._special[: tables["is_word"].size] & tables["is_word"]).any():
            raise Unsupported("a word of the text may give the id of a special token")
        parts = library_tokenizer(normalizer=normalizer, pre_tokenizer=pre_tokenizer)
        self._normalizer, self._pre_tokenizer = parts.normalizer, parts.pre_tokenizer
        strip = normalizer["strip_accents"]
        self._reorders = normalizer["lowercase"] if strip is None else strip  # BERT uses NFD only to strip accents
        self._constants = WordPieceTables(
            points=None,
            stop_values=read_only(self._stop_values()),
            fold=records.FOLD if normalizer["lowercase"] else np.uint64(0),
            max_chars=min(model["max_input_chars_per_word"], 1 << 62),
            unk=tables["unk"],
            trie=tables["trie"],
        )
        self._warm()

    def _tables(self) -> dict[str, Any]:
        """The trie, the unknown id, and bool [largest id + 1]: whether one word of a text may give an id."""
        model, vocabulary = self._source.content["model"], self._source.vocabulary()
        if model["unk_token"] not in vocabulary:
            raise Unsupported("its unknown token is not in the vocabulary")
        require_small_ids(vocabulary)
        is_word = np.zeros(max(vocabulary.values()) + 1, np.bool_)
        for token, token_id in vocabulary.items():
            spelling = token.removeprefix(model["continuing_subword_prefix"])
            is_word[token_id] |= len(spelling) == 1 or set(spelling).isdisjoint(string.punctuation)
        is_word[unk := vocabulary[model["unk_token"]]] = True
        return {
            "is_word": is_word,
            "unk": unk,
            "trie": wordpiece_trie(vocabulary, model["continuing_subword_prefix"]),
        }

    def _stop_values(self) -> NDArray[np.uint64]:
        """uint64 [256]: what records.WordPieceTables says."""
        ascii_entries = self._page(0)[:128]
        classes = ascii_entries[:, 0] & np.uint64(7)
        letters = [ord(c) for c in string.ascii_letters + string.digits]
        # The kernel relies on both: a run of letters is part of one word, and a newline ends the last word.
        assert (classes[letters] == records.LETTER).all() and classes[ord("\n")] == records.BREAK  # noqa: S101, PT018
        ends_word = (classes == records.BREAK) | (classes == records.ALONE)
        values = np.full(256, records.EMPTY)
        values[:128][ends_word] = ascii_entries[ends_word, 1]
        return values

    def _new_tables(self) -> WordPieceTables:
        return self._constants._replace(points=np.zeros((NUM_CODE_POINTS, 2), np.uint64))

    def _run(self, text: Text, tables: WordPieceTables, runs: RunTables, output: Output) -> int:
        return encode_wordpiece(text, tables, runs, output)

    def _entries(self, first: int) -> NDArray[np.uint64]:
        entries = np.zeros((PAGE, 2), np.uint64)
        if 0xD800 <= first < 0xE000:  # surrogates occur in no valid UTF-8
            entries[:, 0] = records.SILENT
        else:
            entries[:] = list(map(self._entry, *self._normal_forms(first)))
        return entries

    def _normal_forms(self, first: int) -> tuple[list[str], list[str], list[str]]:
        """The code points of a page, the normal form of each, and the kinds of the characters of each normal form.

        The kind of a character is one letter: "l" is part of a word, "b" is a break, "a" is a word of its own, "h"
        depends on its neighbours.
        """
        # "|" is a word of its own whatever the options are, so it separates the code points.
        points = [chr(first + k) for k in range(PAGE)]
        normal = self._normalizer.normalize_str("|".join("" if c == "|" else c for c in points)).split("|")
        normal = ["|" if c == "|" else form for c, form in zip(points, normal, strict=True)]
        every = sorted(set("".join(normal)))
        kinds = dict.fromkeys(every, "b")
        for _, (start, stop) in self._pre_tokenizer.pre_tokenize_str("".join(f"x{c}x " for c in every)):
            for place in range(start, stop):
                if place % 4 == 1:
                    kinds[every[place // 4]] = "a" if stop - start == 1 else "l"
        if self._reorders:  # Unicode sorts marks by class; U+0334 has the lowest class and U+0345 the highest
            marks = [c for c in every if c != "|"]
            neighbours = "|".join(f"{c}\u0334|\u0345{c}" for c in marks)
            moved = zip(neighbours.split("|"), normalizers.NFD().normalize_str(neighbours).split("|"), strict=True)
            kinds |= {marks[k // 2]: "h" for k, (was, now) in enumerate(moved) if was != now}
        return points, normal, ["".join(map(kinds.__getitem__, form)) for form in normal]

    def _entry(self, point: str, normal: str, kinds: str) -> tuple[int, int]:
        """The entry of a code point, two uint64.

        First: the class in bits 0 to 2. For LETTER also the number of bytes of the normal form in bits 8 to 15, of its
        characters in bits 16 to 23, and bytes 8 to 11 in bits 32 to 63. Second: for LETTER bytes 0 to 7 of the normal
        form, for ALONE the value of the word.
        """
        encoded = normal.encode()
        if not kinds:
            return int(records.SILENT), 0
        if kinds.strip("l") == "" and len(encoded) <= 12 and len(normal) <= len(point.encode()):
            entry = int(records.LETTER) | len(encoded) << 8 | len(normal) << 16
            return entry | int.from_bytes(encoded[8:], "little") << 32, int.from_bytes(encoded[:8], "little")
        if kinds.strip("b") == "":
            return int(records.BREAK), 0
        if "h" not in kinds and kinds[0] != "l" and kinds[-1] != "l":
            ids = [
                token.id
                for word, _ in self._pre_tokenizer.pre_tokenize_str(normal)
                for token in self._source.library.model.tokenize(word)
            ]
            if len(ids) == 1:
                return int(records.ALONE), ids[0] | 1 << (48 if self._dtype == np.uint16 else 60)
        return int(records.HARD), 0
