"""Which ids continue a word, for masking policies and for scores of sentences."""

from __future__ import annotations

import json

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
