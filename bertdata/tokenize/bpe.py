"""The engine of byte-level BPE."""

from __future__ import annotations

from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import normalizers

from bertdata.tokenize import kernels
from bertdata.tokenize.engine import NUM_CODE_POINTS, PAGE, Engine, added_tokens, read_only
from bertdata.tokenize.kernels import BpeTables, Output, RunTables, Text
from bertdata.types import SpecialTokens

MERGED_BYTES = 64  # of a word; `tokenizers` encodes a longer word, because the kernel's time grows with the square


class ByteLevelBPE(Engine):
    """For byte-level BPE with GPT-2's rule for words (Radford et al., 2019): GPT-2, RoBERTa, ModernBERT.

    `tokenizers` encodes documents that contain an added token, or that NFC may change.
    """

    name = "byte-level BPE"
    takes_lines = False  # line ends are part of tokens

    @classmethod
    def of(
        cls, tokenizer: tokenizers.Tokenizer, content: dict[str, Any], special: SpecialTokens
    ) -> ByteLevelBPE | None:
        """The engine of a tokenizer with its kernel loaded, or None if the kernel cannot encode for this tokenizer.

        content: the tokenizer's JSON.
        """
        normalizer, pre_tokenizer = (content.get(part) or {} for part in ("normalizer", "pre_tokenizer"))
        kinds = normalizer.get("type"), pre_tokenizer.get("type"), type(tokenizer.model).__name__
        if kinds not in ((None, "ByteLevel", "BPE"), ("NFC", "ByteLevel", "BPE")):
            return None
        options, vocabulary = content["model"], tokenizer.get_vocab(with_added_tokens=False)
        has_no_options = not any(
            options.get(name)
            for name in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
                         "byte_fallback", "ignore_merges")
        )  # fmt: skip
        byte_ids = [vocabulary.get(letter, -1) for letter in _letters_of_bytes()]
        is_gpt2_rule = not tokenizer.pre_tokenizer.add_prefix_space and pre_tokenizer.get("use_regex", True)
        if not has_no_options or not is_gpt2_rule or min(byte_ids) < 0 or max(vocabulary.values()) >= 1 << 20:
            return None
        pairs = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in options["merges"]]
        possible_ids = {vocabulary[left + right] for left, right in pairs} | set(byte_ids)
        if possible_ids & set(special.special_ids):
            return None  # a word of the text may give this special id; only the slow way counts and replaces it
        added = added_tokens(tokenizer)
        if any(normalizers.NFC().normalize_str(token) != token or not token for token in added):
            return None
        ranks = {pair: rank for rank, pair in enumerate(pairs)}
        return cls(tokenizer, ranks, byte_ids, added, kinds[0] == "NFC", special.vocab_size)

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, merges: dict[tuple[str, str], int], byte_ids: list[int],
        added: list[str], composes: bool, vocab_size: int,
    ) -> None:  # fmt: skip
        """merges: the rank of each pair. byte_ids [256]: the id of each byte. added: tokens that text may contain.

        composes: whether the tokenizer puts text into the normal form NFC first.
        """
        super().__init__(tokenizer, vocab_size)
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        ranked = sorted(merges, key=merges.__getitem__)
        columns = [(vocabulary[left], vocabulary[right], vocabulary[left + right]) for left, right in ranked]
        pairs = np.full(4 << len(columns).bit_length(), kernels.EMPTY)
        kernels.add_pairs(*np.array(columns, np.int64).reshape(-1, 3).T.copy(), pairs)
        self._constants = BpeTables(
            points=None,
            byte_ids=read_only(np.array(byte_ids, np.int64)),
            pairs=read_only(pairs),
            longest=MERGED_BYTES,
        )
        self._added, self._composes = kernels.literals(added), composes
        patterns = ((r"\p{L}", "L"), (r"\p{N}", "1"), (r"\s", " "), (r"\p{M}", "M"))
        self._classify = normalizers.Sequence(
            [normalizers.Replace(tokenizers.Regex(pattern), letter) for pattern, letter in patterns]
        )
        self._warm()

    def _new_tables(self) -> BpeTables:
        return self._constants._replace(points=np.zeros(NUM_CODE_POINTS, np.uint8))

    def _run(self, text: Text, tables: BpeTables, runs: RunTables, output: Output) -> int:
        left_out = np.zeros(text.separators.size, np.bool_)
        if self._added.bounds.size > 1:
            kernels.find_literals(text.data, text.bounds, self._added, left_out)
        return kernels.byte_level_bpe(text, left_out, tables, runs, output)  # type: ignore[no-any-return]

    def _entries(self, first: int) -> NDArray[np.uint8]:
        class_of = {"L": kernels.WORD, "1": kernels.NUMBER, " ": kernels.SPACE}
        if self._composes:
            class_of["M"] = kernels.COMPOSING
        if 0xD800 <= first < 0xE000:  # surrogates occur in no valid UTF-8
            return np.full(PAGE, kernels.OTHER, np.uint8)
        letters = self._classify.normalize_str("".join(chr(first + k) for k in range(PAGE)))
        classes = np.array([class_of.get(letter, kernels.OTHER) for letter in letters], np.uint8)
        if self._composes:
            # NFC changes these: code points that it changes alone, marks, and Hangul letters. For rare planes, where
            # new Unicode versions add such code points, all count as COMPOSING.
            nfc = normalizers.NFC()
            changes = [nfc.normalize_str(chr(first + k)) != chr(first + k) for k in range(PAGE)]
            classes[changes] = kernels.COMPOSING
            if first == 0x1100 or 0x10000 <= first < 0x1F000 or first >= 0x40000:
                classes[:] = kernels.COMPOSING
        return classes


def _letters_of_bytes() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (Radford et al., 2019).

    A printable byte stands for itself. The others are U+0100, U+0101, ... in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(substitutes)) for byte in range(256)]
