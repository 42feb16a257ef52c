"""Tables of a tokenizer for masking: tokens that continue a word, and ids that may be random ids."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import damaged
from bertdata.format.dataset import Dataset
from bertdata.types import Masking

BEGINS = ("Ġ", "▁", "Ċ", "ĉ")  # marks of tokens that start a word: a space (Ġ, ▁), a line feed or a tab
UNSPACED = (  # first and last code point of scripts without spaces between words
    (0x0E00, 0x109F),  # Thai, Lao, Tibetan, Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x2E80, 0xA4CF),  # Chinese and Japanese, Yi
    (0xF900, 0xFAFF),  # Chinese characters
    (0xFE30, 0xFE4F),  # vertical marks
    (0xFF00, 0xFFEF),  # characters of full and half width
    (0x20000, 0x3FFFF),  # Chinese characters
)
_TOKENIZER = "tokenizer.json"
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a byte in a SentencePiece vocabulary
_UNUSED = re.compile(r"[\[<]unused[ _-]?\d+[\]>]", re.IGNORECASE)


def continuing(content: Mapping[str, Any], vocab_size: int, *, rule: int) -> NDArray[np.bool_]:
    """Return for each id, bool [vocab_size], whether its token, by its spelling, continues the previous word.

    False for an id outside the tokenizer's model, such as an added token. rule: 1 or 2; docs/determinism.md ("Words")
    defines both. content: the JSON of a valid tokenizer; for invalid JSON the type of the error is undefined.
    """
    continues = np.zeros(vocab_size, np.bool_)
    model = content["model"]
    vocabulary = _ids(model)
    prefix = model.get("continuing_subword_prefix")
    least = 1 if rule == 1 else 2  # minimum length of a token that counts as marked
    has_marks = any(len(token) >= least and token.startswith(BEGINS) for token in vocabulary)
    if rule == 2 and model.get("end_of_word_suffix"):
        has_marks = False
    utf8 = _utf8(content)
    for token, token_id in vocabulary.items():
        is_inside = token.startswith(prefix) if prefix else has_marks and not token.startswith(BEGINS)
        if is_inside:
            continues[token_id] = rule == 1 or not _is_unspaced(utf8(token.removeprefix(prefix or "")))
    return continues


def replacing(content: Mapping[str, Any], vocab_size: int) -> NDArray[np.bool_]:
    """Return for each id, bool [vocab_size], whether it has a token, except unused ones such as [unused7]."""
    named = np.zeros(vocab_size, np.bool_)
    added = {token["content"]: token["id"] for token in content.get("added_tokens", ())}
    for token, token_id in (_ids(content["model"]) | added).items():
        named[token_id] = not _UNUSED.fullmatch(token)
    return named


_tables: dict[tuple[Any, ...], dict[str, NDArray[np.bool_]]] = {}
"""A cache, because parsing a large tokenizer.json takes a second."""


def tables(dataset: Dataset, masking: Masking) -> dict[str, NDArray[np.bool_]]:
    """Return the arguments of a Masker that depend on the tokenizer of a dataset; do not change the arrays.

    Raises DatasetError if that tokenizer cannot be read.
    """
    size, words = dataset.special_tokens.vocab_size, masking.policy in ("whole_word", "span")
    tokens = masking.random_from == "tokens" and bool(dataset.manifest.tokenizer)
    key = dataset.manifest.tokenizer.get(_TOKENIZER), size, words and masking.rule, tokens
    if key in _tables or not (words or tokens):
        return _tables.get(key, {})
    found = {}
    try:
        content = json.loads(dataset.tokenizer_file(_TOKENIZER))
        if words:
            found["continuing_ids"] = continuing(content, size, rule=masking.rule)
        if tokens:
            found["replacing_ids"] = replacing(content, size)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        why = f"it is not a tokenizer ({type(error).__name__}: {error})"
        raise damaged(dataset.path / _TOKENIZER, why) from None
    if len(_tables) == 4:
        _tables.clear()
    _tables[key] = found
    return found


def _ids(model: Any) -> dict[str, int]:
    """Return the id of each token of a model."""
    vocabulary = model["vocab"]  # token → id, or a list of [token, score]
    return vocabulary if isinstance(vocabulary, dict) else {token: n for n, (token, _) in enumerate(vocabulary)}


def _utf8(content: Mapping[str, Any]) -> Callable[[str], bytes]:
    """Return a function: token → its text in UTF-8, which may be a part of a character."""
    if '"ByteLevel"' in json.dumps([content.get("pre_tokenizer"), content.get("decoder")]):
        from bertdata.tokenize.models import BYTE_LETTERS

        table = {ord(letter): byte for byte, letter in enumerate(BYTE_LETTERS)}
        return lambda token: token.translate(table).encode("latin-1", "replace")
    return lambda token: bytes([int(byte[1], 16)]) if (byte := _BYTE.fullmatch(token)) else token.encode()


def _is_unspaced(text: bytes) -> bool:
    """Return whether the first character of a text is in UNSPACED, even if the character is incomplete."""
    if text[:1] < b"\xe0":  # the usual case
        return False
    codes = [ord((text[:4] + 4 * byte).decode(errors="replace")[0]) for byte in (b"\x80", b"\xbf")]
    return all(any(first <= code <= last for first, last in UNSPACED) for code in codes)
