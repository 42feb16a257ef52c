"""The engine of byte-level BPE."""

from __future__ import annotations

from typing import Any

import numpy as np
import tokenizers
from tokenizers import normalizers

from bertdata.tokenize import kernels
from bertdata.tokenize.engine import PAGE, Engine, added_tokens
from bertdata.types import SpecialTokens

MERGED_BYTES = 64  # of a word of BPE; merging takes their square, so a longer one is left to the tokenizer


class ByteLevelBPE(Engine):
    """Byte-level BPE with GPT-2's rule for words (Radford et al., 2019), of GPT-2, RoBERTa and ModernBERT.

    Documents that spell an added token, or that NFC may change, are left to the tokenizer.
    """

    takes_lines = False  # line ends are tokens

    @classmethod
    def of(
        cls, tokenizer: tokenizers.Tokenizer, content: dict[str, Any], special: SpecialTokens
    ) -> ByteLevelBPE | None:
        """The engine of a tokenizer, from it and its JSON, with its kernel loaded; None if it is of another kind."""
        normalizer, pre_tokenizer = (content.get(part) or {} for part in ("normalizer", "pre_tokenizer"))
        kinds = normalizer.get("type"), pre_tokenizer.get("type"), type(tokenizer.model).__name__
        if kinds not in ((None, "ByteLevel", "BPE"), ("NFC", "ByteLevel", "BPE")):
            return None
        options, vocabulary = content["model"], tokenizer.get_vocab(with_added_tokens=False)
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
            return None  # a word of the text may spell this special token, and the build must count that
        added = added_tokens(tokenizer)
        if any(normalizers.NFC().normalize_str(token) != token or not token for token in added):
            return None
        ranks = {pair: rank for rank, pair in enumerate(pairs)}
        return cls(tokenizer, ranks, byte_ids, added, kinds[0] == "NFC", special.vocab_size)

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


def _letters_of_bytes() -> list[str]:
    """The characters that stand for bytes in byte-level vocabularies: themselves if they print, else from U+0100 on."""
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in prints else chr(next(others)) for byte in range(256)]
