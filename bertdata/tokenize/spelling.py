"""Tokens in readable form."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence

from bertdata.tokenize.models import BYTE_LETTERS
from bertdata.tokenize.tokenizer import TOKENIZER, LoadedTokenizer

_BYTES = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}
"""A character in the tokens of a byte-level tokenizer → the byte that it represents, as in GPT-2: "Ġ" is a space."""


class Spelling:
    """Tokens in readable form: "Ã¤" of a byte-level tokenizer is "ä", and "Ġ" is a space.

    tokenizer_json: of a valid tokenizer. Tokens are given as the vocabulary spells them.
    """

    def __init__(self, tokenizer_json: bytes) -> None:
        content = json.loads(tokenizer_json)
        kinds = json.dumps([content.get("pre_tokenizer"), content.get("decoder")], ensure_ascii=False)
        self._is_byte_level = '"ByteLevel"' in kinds
        self._has_spaces = self._is_byte_level or '"Metaspace"' in kinds or content["model"].get("type") == "Unigram"
        self._has_spaces |= '"▁"' in kinds  # a decoder that replaces it, as Gemma's
        self._prefix: str | None = content["model"].get("continuing_subword_prefix")
        self._suffix: str | None = content["model"].get("end_of_word_suffix")
        self._special = {token["content"] for token in content.get("added_tokens", []) if token.get("special")}

    def text_of(self, token: str) -> bytes:
        """Return the UTF-8 bytes that a token adds to a text, with a word's space; perhaps a part of a character."""
        if token in self._special:
            return f" {token} ".encode()
        if self._is_byte_level and all(character in _BYTES for character in token):
            return bytes(_BYTES[character] for character in token)
        if self._has_spaces:
            return token.replace("▁", " ").encode()
        if self._suffix:
            return token.removesuffix(self._suffix).encode() + b" " * token.endswith(self._suffix)
        if self._prefix and token.startswith(self._prefix):
            return token.removeprefix(self._prefix).encode()
        return f" {token}".encode()

    def text_after_space(self, token: str) -> bytes:
        """Return the text of a token as `text_of`, but with the space of a word in front of it, also for CLIP."""
        text = self.text_of(token)
        return b" " + text[:-1] if self._suffix and token not in self._special and text.endswith(b" ") else text

    def token(self, token: str) -> str:
        r"""Return a single token. Spaces become ␣, and bytes of incomplete characters are written like \xe6."""
        if token in self._special:
            return token
        text = self.text_of(token).decode(errors="backslashreplace") if self._has_spaces else token
        return text.replace("\n", "\\n").replace("\t", "\\t").replace(" ", "␣")

    def text(self, tokens: Sequence[str], marked: Collection[int] = ()) -> str:
        """Return tokens in one line, with the tokens at the marked indices between > and <."""
        parts = []
        for index, token in enumerate(tokens):
            part = self.text_of(token)
            if index in marked:
                plain, begin = part.strip(), b" " * part[:1].isspace()
                part = begin + b">" + (plain or "␣".encode()) + b"<" + b" " * (plain != b"" and part[-1:].isspace())
            parts.append(part)
        return " ".join(b"".join(parts).decode(errors="replace").split())


def spelled(tokenizer: LoadedTokenizer) -> Callable[[int], str]:
    """Return a function: id → readable token."""
    spelling = Spelling(tokenizer.files[TOKENIZER])
    return lambda token: spelling.token(tokenizer.spell(token))
