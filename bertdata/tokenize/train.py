"""Texts → a vocabulary, with the trainers of `tokenizers`. The same texts give the same tokenizer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from bertdata.errors import UsageError, require
from bertdata.tokenize.load import SPECIALS, add_roles, bert_tokenizer
from bertdata.tokenize.tokenizer import LoadedTokenizer

_NUM_BYTES = 256
_PENALTY = 1e-4  # the unigram trainer adds multiples of this to the scores of characters
_DIGITS = 3  # decimals of a unigram score


def train_wordpiece(texts: list[str], vocab_size: int, *, cased: bool = False) -> LoadedTokenizer:
    """Return a tokenizer like BERT's with a WordPiece vocabulary of at most `vocab_size` tokens, trained like BPE.

    cased: keep case and accents. Characters get tokens in the order of their frequency, as long as there is room. The
    first five ids are the special tokens; all other tokens follow in the order of their UTF-8 bytes. Processes about 2
    MB/s. Raises UsageError if vocab_size leaves no room for letters.
    """
    _require(vocab_size, 2 * len(SPECIALS), "words")
    blank = bert_tokenizer({"[UNK]": 0}, lowercase=not cased)
    # The trainer breaks ties by the numbers of symbols, and it numbers "##x" symbols in the order of a hash table. For
    # a reproducible result we number them first: frequent characters, then "##x" for characters inside words.

    def joins(c: str) -> bool:
        return len(blank.pre_tokenizer.pre_tokenize_str(blank.normalizer.normalize_str("a" + c))) == 1

    room = vocab_size - len(SPECIALS)
    effect = "a word with one of them becomes [UNK]; a larger --vocab-size keeps them"
    alphabet, notes = _alphabet(texts, blank.normalizer, room, effect, tokens_of=lambda c: 1 + joins(c))
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIALS, *alphabet, *("##" + c for c in alphabet if joins(c))],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    blank.train_from_iterator(texts, trainer)
    learned = sorted(blank.get_vocab(with_added_tokens=False).keys() - set(SPECIALS), key=lambda token: token.encode())
    vocabulary = {token: number for number, token in enumerate([*SPECIALS, *learned])}
    singles = len(alphabet) + sum(map(joins, alphabet))
    if 2 * singles > vocab_size == len(vocabulary):
        notes.append(f"warning: single characters take {singles:,} of {vocab_size:,} tokens; use a larger --vocab-size")
    return LoadedTokenizer(bert_tokenizer(vocabulary, lowercase=not cased).to_str(), notes=notes)


def train_bpe(texts: list[str], vocab_size: int, *, cased: bool = False) -> LoadedTokenizer:
    """Return a tokenizer like ModernBERT's: byte-level BPE (Radford et al., 2019) of at most `vocab_size` tokens.

    Normalizes text to NFC and, unless `cased`, to lower case. Every text can be encoded, so [UNK] never occurs. The
    first ids are the five special tokens and the 256 bytes; all other tokens follow in the order of their merges.
    Processes about 3 MB/s. Raises UsageError if vocab_size leaves no room for merges.
    """
    _require(vocab_size, len(SPECIALS) + _NUM_BYTES + 1, "pairs of bytes")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    nfc = normalizers.NFC()
    tokenizer.normalizer = nfc if cased else normalizers.Sequence([nfc, normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return LoadedTokenizer(_with_roles(json.loads(tokenizer.to_str())))


def train_unigram(texts: list[str], vocab_size: int, *, cased: bool = False) -> LoadedTokenizer:
    """Return a tokenizer like those of ALBERT and XLM-R: a unigram model (Kudo, 2018) of at most `vocab_size` tokens.

    Normalizes text to NFKC and, unless `cased`, removes accents and converts to lower case. The first five ids are the
    special tokens; all other tokens follow by descending probability, with ties in the order of their UTF-8 bytes.
    Processes about 0.5 MB/s. Raises UsageError if vocab_size leaves no room for letters.
    """
    _require(vocab_size, 2 * len(SPECIALS), "words")
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    lowers = [] if cased else [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    tokenizer.normalizer = normalizers.Sequence([*lowers, normalizers.NFKC()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    # The trainer keeps every character of the text, so the text may have only as many as there is room for.
    room = max(1, (vocab_size - len(SPECIALS)) // 2 - 1)
    effect = (
        "they become [UNK], as at most half of a unigram vocabulary is single characters; give a larger --vocab-size"
    )
    alphabet, notes = _alphabet(texts, tokenizer.normalizer, room, effect)
    if len(alphabet) >= room:
        kept = _OnlyThese({ord(c): c for c in alphabet})
        texts = [tokenizer.normalizer.normalize_str(text).translate(kept) for text in texts]
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIALS), unk_token="[UNK]", show_progress=False
    )
    try:
        tokenizer.train_from_iterator(texts, trainer)
    except Exception as error:  # the library raises plain Exception
        sentence = f"no unigram vocabulary of {vocab_size} tokens can be trained on this text: {error}"
        raise UsageError(sentence, "out-of-range", option="vocab_size", given=vocab_size) from None
    content = json.loads(tokenizer.to_str())
    content["model"]["vocab"] = _reproducible(content["model"]["vocab"])
    return LoadedTokenizer(_with_roles(content), notes=notes)


def _with_roles(content: dict[str, Any]) -> str:
    """Return a trained tokenizer, given as JSON, with its special tokens added again: [MASK] includes its space."""
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content | {"added_tokens": []}))
    add_roles(tokenizer, mask_takes_space=True)
    return tokenizer.to_str()


TRAINERS: dict[str, Callable[..., LoadedTokenizer]] = {
    "wordpiece": train_wordpiece,
    "bpe": train_bpe,
    "unigram": train_unigram,
}
"""Trainers by type, one of choices.TOKENIZER_TYPES; called with texts, vocab_size and cased."""


def _require(vocab_size: int, least: int, what: str) -> None:
    require(vocab_size >= least, "vocab_size", vocab_size, f"at least {least}, to have room for {what}")


def _alphabet(
    texts: list[str], normalizer: Any, room: int, effect: str, tokens_of: Callable[[str], int] = lambda c: 1
) -> tuple[list[str], list[str]]:
    """Return the most frequent characters of the normalized texts that fit, ascending, and a note about the rest.

    room: number of tokens that fit. effect: the effect on the remaining characters, for the note. tokens_of: a
    character → its number of tokens.
    """
    characters: Counter[str] = Counter()
    for text in texts:
        characters.update(normalizer.normalize_str(text))
    ranked = sorted((c for c in characters if not c.isspace()), key=lambda c: (-characters[c], c))
    num_kept = sum(end <= room for end in accumulate(map(tokens_of, ranked)))
    notes, lost = [], sum(characters[c] for c in ranked[num_kept:])
    if lost:
        share = lost / sum(characters[c] for c in ranked)
        notes.append(
            f"warning: {len(ranked) - num_kept:,} of the {len(ranked):,} different characters of the text have "
            f"no token ({share:.2%} of all characters); {effect}"
        )
    return sorted(ranked[:num_kept]), notes


class _OnlyThese(dict[int, str]):
    """A table for str.translate that replaces every other character with a space."""

    def __missing__(self, point: int) -> str:
        return " "


def _reproducible(pieces: list[list[Any]]) -> list[list[Any]]:
    """Return the pieces (token, score) of the unigram trainer without differences between runs.

    The trainer sums scores in the order of a hash table, so they differ by up to 4e-11; they are rounded here. It also
    scores the characters that training removed: the lowest score plus 0, 1, 2, ... times _PENALTY, in the order of a
    hash table. Here these scores follow the order of the characters.
    """
    learned = {token: score for token, score in pieces if token not in SPECIALS}
    least = min(learned.values(), default=0.0)

    def is_put_back(token: str, score: float) -> bool:
        steps = (score - least) / _PENALTY
        return len(token) == 1 and round(steps) < len(learned) and abs(steps - round(steps)) < 1e-3

    put_back = sorted(token for token, score in learned.items() if is_put_back(token, score))
    learned |= {token: round(least, _DIGITS) + number * _PENALTY for number, token in enumerate(put_back)}
    rounded = [[token, round(score, _DIGITS)] for token, score in learned.items()]
    return [[token, 0.0] for token in SPECIALS] + sorted(rounded, key=lambda piece: (-piece[1], piece[0].encode()))
