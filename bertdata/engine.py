"""Our own tokenizing, exact for the tokenizers it takes: BERT's WordPiece and byte-level BPE.

An engine knows a tokenizer by asking it: `tokenizers` normalizes and splits every code point once, 256 at a time, when
one first occurs in the text, and kernels go by those answers. What no table can answer (characters that change with
their neighbours) is left to `tokenizers` itself, run by run.
"""

from __future__ import annotations

import string
import threading
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import normalizers, pre_tokenizers

from bertdata import _kernels_text as kernels
from bertdata.types import SpecialTokens

PAGE = 256  # code points probed at a time
SHORT_SLOTS, LONG_SLOTS = 1 << 18, 1 << 17  # of the run tables; 4 MB each
WORD_BYTES = 4096  # of a normalized word; a longer one that is no unknown is left to the tokenizer
MERGED_BYTES = 64  # of a word of BPE; merging takes their square, so a longer one is left to the tokenizer
HARD_SHARE = 256  # bytes of text for each run that is left to the tokenizer, before all of it is


def of(tokenizer: tokenizers.Tokenizer, content: dict[str, Any], special: SpecialTokens) -> Engine | None:
    """The engine of a tokenizer, from it and its JSON, its kernels loaded; None if there is none for its kind."""
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values() if not token.special]
    normalizer, pre_tokenizer = (content.get(part) or {} for part in ("normalizer", "pre_tokenizer"))
    model, vocabulary = tokenizer.model, tokenizer.get_vocab(with_added_tokens=False)
    kinds = normalizer.get("type"), pre_tokenizer.get("type"), type(model).__name__
    if kinds == ("BertNormalizer", "BertPreTokenizer", "WordPiece") and not added:
        if model.unk_token not in vocabulary or max(vocabulary.values()) >= 1 << 20:
            return None
        forbidden = set(special.special_ids) - {special.unk}
        if vocabulary[model.unk_token] in forbidden:
            return None
        for token, token_id in vocabulary.items():
            spelling = token.removeprefix(model.continuing_subword_prefix)
            if token_id in forbidden and (len(spelling) == 1 or not set(spelling) & set(string.punctuation)):
                return None  # a word may spell it, which must be counted
        names = ("clean_text", "handle_chinese_chars", "strip_accents", "lowercase")
        flags = {name: getattr(tokenizer.normalizer, name) for name in names}
        return WordPiece(tokenizer, flags, model, special.vocab_size)
    if kinds in ((None, "ByteLevel", "BPE"), ("NFC", "ByteLevel", "BPE")):
        options = content["model"]
        plain = not any(
            options.get(name)
            for name in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
                         "byte_fallback", "ignore_merges")
        )  # fmt: skip
        byte_ids = [vocabulary.get(letter, -1) for letter in _letters_of_bytes()]
        words = not tokenizer.pre_tokenizer.add_prefix_space and pre_tokenizer.get("use_regex", True)
        if not plain or not words or min(byte_ids) < 0 or max(vocabulary.values()) >= 1 << 20:
            return None
        pairs = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in options["merges"]]
        given = {vocabulary[left + right] for left, right in pairs} | set(byte_ids)
        if given & set(special.special_ids):
            return None  # a word may spell it, which must be counted
        if any(normalizers.NFC().normalize_str(token) != token or not token for token in added):
            return None
        ranks = {pair: rank for rank, pair in enumerate(pairs)}
        return ByteLevelBPE(tokenizer, ranks, byte_ids, added, kinds[0] == "NFC", special.vocab_size)
    return None


def _letters_of_bytes() -> list[str]:
    """The characters that stand for bytes in byte-level vocabularies: themselves if they print, else from U+0100 on."""
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in prints else chr(next(others)) for byte in range(256)]


class Engine:
    """What engines share. Thread-safe; each thread has run tables of its own."""

    takes_lines: bool  # whether the ids of a text are those of its lines one after the other

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
        self._probing = threading.Lock()
        self._of_thread = threading.local()

    def _run(self, text: Any, bounds: Any, separators: Any, separator: int, tables: Any, results: Any) -> int:
        """The kernel's answer."""
        raise NotImplementedError

    def _is_probed(self, first: int) -> bool:
        raise NotImplementedError

    def _fill(self, first: int) -> None:
        """Asks the tokenizer about code points first, first + 1, ..., first + PAGE - 1."""
        raise NotImplementedError

    def _warm(self) -> None:
        """Loads the kernel."""
        self.encode(np.zeros(kernels.PADDING, np.uint8), np.zeros(1, np.int64), np.zeros(0, np.bool_), 0)

    def encode(
        self, text: NDArray[np.uint8], bounds: NDArray[np.int64], separators: NDArray[np.bool_], separator: int
    ) -> tuple[NDArray[Any], NDArray[np.int64]] | None:
        """The ids of pieces of text and their offsets, as kernels.wordpiece has them; None: ask the tokenizer."""
        if text.size < bounds[-1] + kernels.PADDING:
            text = np.concatenate([text[: bounds[-1]], np.zeros(kernels.PADDING, np.uint8)])
        tables = self._tables()
        out = np.empty(bounds[-1] + 4, self._dtype)
        out_bounds = np.zeros(bounds.size, np.int64)
        hard = np.empty((16 + int(bounds[-1]) // HARD_SHARE, 3), np.int64)
        state = np.zeros(5, np.int64)
        state[1] = bounds[0]
        while True:
            answer = self._run(text, bounds, separators, separator, tables, (out, out_bounds, hard, state))
            if answer == kernels.TOO_MANY_HARD:
                return None
            if answer == kernels.DONE:
                break
            self._probe(int(state[4]) // PAGE)
        out = out[: out_bounds[-1]]
        return self._with_hard(text, bounds, out, out_bounds, hard[: state[3]]) if state[3] else (out, out_bounds)

    def _probe(self, page: int) -> None:
        """Fills the tables for 256 code points."""
        with self._probing:
            if not self._is_probed(page * PAGE):
                self._fill(page * PAGE)

    def _tables(self) -> tuple[Any, ...]:
        if not hasattr(self._of_thread, "tables"):
            short = np.full(2 * SHORT_SLOTS, kernels.EMPTY)
            long = np.full(4 * LONG_SLOTS, kernels.EMPTY)
            word = np.empty(WORD_BYTES, np.uint8)
            self._of_thread.tables = short, long, np.zeros(2, np.int64), word, np.empty(WORD_BYTES, np.int64)
        return self._of_thread.tables  # type: ignore[no-any-return]

    def _with_hard(self, text: Any, bounds: Any, out: Any, out_bounds: Any, hard: Any) -> tuple[Any, Any]:
        """Puts the ids of hard runs where they belong."""
        runs = [text[start:stop].tobytes().decode() for start, stop in hard[:, :2].tolist()]
        found = [np.array(e.ids, out.dtype) for e in self._tokenizer.encode_batch_fast(runs, add_special_tokens=False)]
        out = np.insert(out, np.repeat(hard[:, 2], [ids.size for ids in found]), np.concatenate(found))
        pieces = np.searchsorted(bounds, hard[:, 0], side="right") - 1
        more = np.bincount(pieces, [ids.size for ids in found], bounds.size - 1).astype(np.int64)
        return out, out_bounds + np.append(0, np.cumsum(more))


class WordPiece(Engine):
    """BertNormalizer, BertPreTokenizer and WordPiece."""

    takes_lines = True

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


class ByteLevelBPE(Engine):
    """Byte-level BPE with GPT-2's rule for words (Radford et al., 2019), of GPT-2, RoBERTa and ModernBERT.

    Documents that spell an added token, or that NFC may change, are left to the tokenizer.
    """

    takes_lines = False  # line ends are tokens

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, merges: dict[tuple[str, str], int], byte_ids: list[int],
        added: list[str], composes: bool, vocab_size: int,
    ) -> None:  # fmt: skip
        """merges: rank by pair. byte_ids [256]: the id of each byte. added: tokens that text may spell.

        composes: whether text is put in the normal form NFC first.
        """
        super().__init__(tokenizer, vocab_size)
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        ranked = sorted(merges, key=merges.__getitem__)
        columns = [(vocabulary[left], vocabulary[right], vocabulary[left + right]) for left, right in ranked]
        self._pairs = np.full(4 << len(columns).bit_length(), kernels.EMPTY)
        kernels.add_pairs(*np.array(columns, np.int64).reshape(-1, 3).T.copy(), self._pairs)
        self._byte_ids = np.array(byte_ids, np.int64)
        self._added, self._composes = kernels.literals(added), composes
        self._classes = np.zeros(0x110000, np.uint8)
        patterns = ((r"\p{L}", "L"), (r"\p{N}", "1"), (r"\s", " "), (r"\p{M}", "M"))
        self._classify = normalizers.Sequence(
            [normalizers.Replace(tokenizers.Regex(pattern), instead) for pattern, instead in patterns]
        )
        self._probe(0)
        self._warm()

    def _run(self, text: Any, bounds: Any, separators: Any, separator: int, tables: Any, results: Any) -> int:
        short, long, used, _, ids = tables
        left = np.zeros(separators.size, np.bool_)
        if self._added[1].size > 1:
            kernels.find_literals(text, bounds, *self._added, left)
        return kernels.byte_level_bpe(  # type: ignore[no-any-return]
            text, bounds, separators, separator, left, self._classes, self._byte_ids, self._pairs, MERGED_BYTES, short,
            long, used, ids, *results,
        )  # fmt: skip

    def _is_probed(self, first: int) -> bool:
        return bool(self._classes[first + PAGE - 1])

    def _fill(self, first: int) -> None:
        kinds = {"L": kernels.WORD, "1": kernels.NUMBER, " ": kernels.SPACE}
        if self._composes:
            kinds["M"] = kernels.COMPOSING
        if 0xD800 <= first < 0xE000:  # surrogates are in no valid UTF-8
            self._classes[first : first + PAGE] = kernels.OTHER
            return
        classes = self._classify.normalize_str("".join(chr(first + k) for k in range(PAGE)))
        found = np.array([kinds.get(c, kernels.OTHER) for c in classes], np.uint8)
        if self._composes:  # what changes alone, or with its neighbours: marks, Hangul, and who knows in rare planes
            composed = normalizers.NFC()
            changes = [composed.normalize_str(chr(first + k)) != chr(first + k) for k in range(PAGE)]
            found[changes] = kernels.COMPOSING
            if first == 0x1100 or 0x10000 <= first < 0x1F000 or first >= 0x40000:
                found[:] = kernels.COMPOSING
        self._classes[first : first + PAGE] = found


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
