"""Which ids continue a word, for masking policies and for scores of sentences; and tokens as people read them."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import DatasetError
from bertdata.format.dataset import Dataset

BEGINS = ("Ġ", "▁", "Ċ", "ĉ")  # what tokens that begin a word begin with: a space (Ġ, ▁), a line end or a tab
_TOKENIZER = "tokenizer.json"


def continuing(tokenizer_json: bytes, vocab_size: int) -> NDArray[np.bool_]:
    """Tells for each id, bool [vocab_size], whether its token continues the word before it, by the token's spelling.

    - A vocabulary with a continuing prefix (WordPiece: "##"): a token continues a word if it begins with the prefix.
    - Any other vocabulary in which some token begins with a mark of BEGINS: a token continues a word if it begins with
      no mark.
    - Any other vocabulary: no token continues a word, so each token is a word.

    An id that the model of the tokenizer does not have, such as an added token, continues no word. tokenizer_json: of a
    tokenizer that could be loaded; the error for any other is of no certain kind.
    """
    continues = np.zeros(vocab_size, np.bool_)
    model = json.loads(tokenizer_json)["model"]
    vocabulary = model["vocab"]  # token → id, or a list of [token, score]
    if not isinstance(vocabulary, dict):
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    prefix = model.get("continuing_subword_prefix")
    has_marks = any(token.startswith(BEGINS) for token in vocabulary)
    for token, token_id in vocabulary.items():
        continues[token_id] = token.startswith(prefix) if prefix else has_marks and not token.startswith(BEGINS)
    return continues


def continuing_ids(dataset: Dataset) -> NDArray[np.bool_]:
    """What `continuing` says of the tokenizer of a dataset. Raises DatasetError if that cannot be read."""
    try:
        return continuing(dataset.tokenizer_file(_TOKENIZER), dataset.special_tokens.vocab_size)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise DatasetError(
            f"{dataset.path / _TOKENIZER} is not a tokenizer ({type(error).__name__}: {error}); build it again",
            "damaged",
        ) from None


_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHER_BYTES = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHER_BYTES)}
"""A character in the tokens of a byte-level tokenizer → the byte that it stands for, as in GPT-2: "Ġ" is a space."""


class Spelling:
    """Tokens as people read them: "Ã¤" of a byte-level tokenizer is "ä", and a space is a space.

    tokenizer_json: of a tokenizer that could be loaded. Tokens come as the vocabulary spells them.
    """

    def __init__(self, tokenizer_json: bytes) -> None:
        content = json.loads(tokenizer_json)
        kinds = json.dumps([content.get("pre_tokenizer"), content.get("decoder")])
        self._is_byte_level = '"ByteLevel"' in kinds
        self._has_spaces = self._is_byte_level or '"Metaspace"' in kinds or content["model"].get("type") == "Unigram"
        self._prefix = content["model"].get("continuing_subword_prefix") or ""
        self._special = {token["content"] for token in content.get("added_tokens", []) if token.get("special")}

    def token(self, token: str) -> str:
        r"""One token alone. Its spaces are ␣, and bytes that are no complete character are like \xe6."""
        if token in self._special:
            return token
        text = self._bytes(token).decode(errors="backslashreplace") if self._has_spaces else token
        return text.replace("\n", "\\n").replace("\t", "\\t").replace(" ", "␣")

    def text(self, tokens: Sequence[str], marked: Collection[int] = ()) -> str:
        """Tokens one after the other, those whose indices are marked between > and <, in one line."""
        parts = []
        for index, token in enumerate(tokens):
            part = self._bytes(token)
            if index in marked:
                plain, begin = part.strip(), b" " * part[:1].isspace()
                part = begin + b">" + (plain or "␣".encode()) + b"<" + b" " * (plain != b"" and part[-1:].isspace())
            parts.append(part)
        return " ".join(b"".join(parts).decode(errors="replace").split())

    def _bytes(self, token: str) -> bytes:
        """What a token adds to a text, with the space before a word."""
        if token in self._special:
            return f" {token} ".encode()
        if self._is_byte_level and all(character in _BYTES for character in token):
            return bytes(_BYTES[character] for character in token)
        if self._has_spaces:
            return token.replace("▁", " ").encode()
        is_inside = self._prefix and token.startswith(self._prefix)
        return token.removeprefix(self._prefix).encode() if is_inside else f" {token}".encode()
