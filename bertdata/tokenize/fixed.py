"""Tokenizers with a fixed vocabulary, for sequences that are not text, such as proteins and DNA."""

from __future__ import annotations

from collections.abc import Callable

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from bertdata.tokenize.load import SPECIALS, add_roles, esm_tokenizer
from bertdata.tokenize.models import BYTE_LETTERS
from bertdata.tokenize.tokenizer import LoadedTokenizer


def residues() -> LoadedTokenizer:
    """Return the tokenizer of ESM-2 (Lin et al., 2023): 33 tokens in its order, so that its weights can be used.

    Each letter is a token: the 20 amino acids, B, O, U, X and Z, and `.` and `-` of alignments. White space is dropped,
    as in ESM's own tokenizer. Every other character, including lower-case letters, is <unk>.
    """
    return LoadedTokenizer(esm_tokenizer().to_str())


def single_bytes() -> LoadedTokenizer:
    """Return a tokenizer that makes each byte of the text a token: 261 tokens, for DNA or bytes of any kind.

    The first five ids are the special tokens; byte b has the id 5 + b. All text is kept, including white space, so
    [UNK] never occurs. Caduceus and HyenaDNA also have a token for each base, in different vocabularies.
    """
    vocabulary = {token: number for number, token in enumerate([*SPECIALS, *BYTE_LETTERS])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    # Each character is a word, because otherwise a chromosome would be a single word.
    characters = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([characters, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    add_roles(tokenizer)
    return LoadedTokenizer(tokenizer.to_str())


FIXED: dict[str, Callable[[], LoadedTokenizer]] = {"residues": residues, "bytes": single_bytes}
"""By type, one of choices.FIXED_TOKENIZERS."""
