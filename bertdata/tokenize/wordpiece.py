"""The engine of BERT's WordPiece."""

from __future__ import annotations

import string
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import normalizers, pre_tokenizers

from bertdata.tokenize import kernels
from bertdata.tokenize.engine import PAGE, Engine, added_tokens
from bertdata.types import SpecialTokens


class WordPiece(Engine):
    """BertNormalizer, BertPreTokenizer and WordPiece."""

    takes_lines = True

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer, content: dict[str, Any], special: SpecialTokens) -> WordPiece | None:
        """The engine of a tokenizer, from it and its JSON, with its kernel loaded; None if it is of another kind."""
        normalizer, pre_tokenizer = (content.get(part) or {} for part in ("normalizer", "pre_tokenizer"))
        model, vocabulary = tokenizer.model, tokenizer.get_vocab(with_added_tokens=False)
        kinds = normalizer.get("type"), pre_tokenizer.get("type"), type(model).__name__
        if kinds != ("BertNormalizer", "BertPreTokenizer", "WordPiece") or added_tokens(tokenizer):
            return None
        if model.unk_token not in vocabulary or max(vocabulary.values()) >= 1 << 20:
            return None
        forbidden = set(special.special_ids) - {special.unk}
        if vocabulary[model.unk_token] in forbidden:
            return None
        for token, token_id in vocabulary.items():
            spelling = token.removeprefix(model.continuing_subword_prefix)
            if token_id in forbidden and (len(spelling) == 1 or not set(spelling) & set(string.punctuation)):
                return None  # a word of the text may spell this special token, and the build must count that
        names = ("clean_text", "handle_chinese_chars", "strip_accents", "lowercase")
        flags = {name: getattr(tokenizer.normalizer, name) for name in names}
        return cls(tokenizer, flags, model, special.vocab_size)

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, normalizer: dict[str, Any], model: Any, vocab_size: int
    ) -> None:
        """normalizer: the flags of BertNormalizer."""
        super().__init__(tokenizer, vocab_size)
        self._normalizer = normalizers.BertNormalizer(**normalizer)
        self._pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        strip = normalizer["strip_accents"]
        self._reorders = normalizer["lowercase"] if strip is None else strip  # the only normal form that BERT applies
        self._fold = kernels.FOLD if normalizer["lowercase"] else np.uint64(0)
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        self._unk = vocabulary[model.unk_token]
        self._model = model
        self._max_chars = min(model.max_input_chars_per_word, 1 << 62)
        self._edges, self._node_ids = _trie(vocabulary, model.continuing_subword_prefix)
        self._points = np.zeros((0x110000, 2), np.uint64)
        self._probe(0)
        self._stop_values = np.full(256, kernels.EMPTY)
        whats = self._points[:128, 0] & np.uint64(7)
        ends_word = (whats == kernels.BREAK) | (whats == kernels.ALONE)
        self._stop_values[:128][ends_word] = self._points[:128, 1][ends_word]
        letters = [ord(c) for c in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"]
        assert (whats[letters] == kernels.LETTER).all() and whats[ord("\n")] == kernels.BREAK  # noqa: S101, PT018
        self._warm()

    def _run(self, text: Any, bounds: Any, separators: Any, separator: int, tables: Any, results: Any) -> int:
        short, long, used, word, ids = tables
        return kernels.wordpiece(  # type: ignore[no-any-return]
            text, bounds, separators, separator, self._points, self._stop_values, self._fold, self._max_chars,
            self._unk, self._edges, self._node_ids, short, long, used, word, ids, *results,
        )  # fmt: skip

    def _is_probed(self, first: int) -> bool:
        return bool(self._points[first + PAGE - 1, 0])

    def _fill(self, first: int) -> None:
        if 0xD800 <= first < 0xE000:  # surrogates are in no valid UTF-8
            self._points[first : first + PAGE, 0] = kernels.SILENT
            return
        whats, values = zip(*map(self._entry, *self._normal_forms(first)), strict=True)
        self._points[first : first + PAGE, 1] = values
        self._points[first : first + PAGE, 0] = whats  # last: it tells kernels in other threads to go on

    def _normal_forms(self, first: int) -> tuple[list[str], list[str], list[str]]:
        """A page's code points, what the normalizer makes of each, and what the pre-tokenizer makes of that.

        The last is a letter for each character: "l" a part of words, "b" a break, "a" a word alone, "h" a character
        whose place depends on its neighbours.
        """
        # "|" is a word of its own under every flag, and keeps neighbours apart
        points = [chr(first + k) for k in range(PAGE)]
        normal = self._normalizer.normalize_str("|".join("" if c == "|" else c for c in points)).split("|")
        normal = ["|" if c == "|" else form for c, form in zip(points, normal, strict=True)]
        every = sorted(set("".join(normal)))
        kinds = dict.fromkeys(every, "b")
        for _, (start, stop) in self._pre_tokenizer.pre_tokenize_str("".join(f"x{c}x " for c in every)):
            for place in range(start, stop):
                if place % 4 == 1:
                    kinds[every[place // 4]] = "a" if stop - start == 1 else "l"
        if self._reorders:  # U+0334 and U+0345 have the lowest and highest class that Unicode sorts marks by
            marks = [c for c in every if c != "|"]
            neighbours = "|".join(f"{c}\u0334|\u0345{c}" for c in marks)
            moved = zip(neighbours.split("|"), normalizers.NFD().normalize_str(neighbours).split("|"), strict=True)
            kinds |= {marks[k // 2]: "h" for k, (was, now) in enumerate(moved) if was != now}
        return points, normal, ["".join(map(kinds.__getitem__, form)) for form in normal]

    def _entry(self, point: str, normal: str, kinds: str) -> tuple[int, int]:
        """What a code point does, and its bytes or its value, as kernels.wordpiece reads them."""
        encoded = normal.encode()
        if not kinds:
            return int(kernels.SILENT), 0
        if kinds.strip("l") == "" and len(encoded) <= 12 and len(normal) <= len(point.encode()):
            what = int(kernels.LETTER) | len(encoded) << 8 | len(normal) << 16
            return what | int.from_bytes(encoded[8:], "little") << 32, int.from_bytes(encoded[:8], "little")
        if kinds.strip("b") == "":
            return int(kernels.BREAK), 0
        if "h" not in kinds and kinds[0] != "l" and kinds[-1] != "l":
            found = [
                token.id
                for word, _ in self._pre_tokenizer.pre_tokenize_str(normal)
                for token in self._model.tokenize(word)
            ]
            if len(found) == 1:
                return int(kernels.ALONE), found[0] | 1 << (48 if self._dtype == np.uint16 else 60)
        return int(kernels.HARD), 0


def _trie(vocabulary: dict[str, int], prefix: str) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """Edges and ids of the trie of a vocabulary: root 0 of what begins a word, root 1 of what continues one."""
    begins = [(token.encode(), 0, token_id) for token, token_id in vocabulary.items() if token]
    goes_on = [(t.removeprefix(prefix).encode(), 1, n) for t, n in vocabulary.items() if t.startswith(prefix)]
    tokens = sorted(entry for entry in begins + goes_on if entry[0])
    text = np.frombuffer(b"".join(token for token, _, _ in tokens) or b"\0", np.uint8)
    bounds = np.append(0, np.cumsum([len(token) for token, _, _ in tokens], dtype=np.int64))
    roots = np.array([root for _, root, _ in tokens], np.uint8)
    ids = np.array([token_id for _, _, token_id in tokens], np.int32)
    num_nodes, size = int(bounds[-1]), 0
    while size != (size := 2 << num_nodes.bit_length()):  # once for the most there can be, once for what there is
        edges = np.full(size, kernels.EMPTY)
        node_ids = np.full(int(bounds[-1]) + 2, -1, np.int32)
        num_nodes = int(kernels.grow_trie(text, bounds, roots, ids, edges, node_ids))
    return edges, node_ids[:num_nodes].copy()
