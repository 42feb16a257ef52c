"""Texts → a WordPiece vocabulary."""

from __future__ import annotations

from collections import Counter

from tokenizers import trainers

from bertdata.errors import UsageError
from bertdata.tokenize.load import SPECIALS, bert_tokenizer
from bertdata.tokenize.tokenizer import Tokenizer


def train_wordpiece(texts: list[str], vocab_size: int) -> Tokenizer:
    """A tokenizer with a lower-casing WordPiece vocabulary of at most `vocab_size` tokens, trained like BPE.

    The same texts give the same vocabulary. The first ids are those of the five special tokens; the other tokens follow
    in the order of their UTF-8 bytes. Reads about 2 MB/s. Raises UsageError if vocab_size leaves no room for letters.
    """
    if vocab_size < 2 * len(SPECIALS):
        raise UsageError(f"a vocabulary of {vocab_size} has no room for words; give at least {2 * len(SPECIALS)}")
    blank = bert_tokenizer({"[UNK]": 0}, lowercase=True)
    characters: Counter[str] = Counter()
    for text in texts:
        characters.update(blank.normalizer.normalize_str(text))
    # The trainer breaks ties by the numbers of symbols, and it numbers "##x" symbols in the order of a hash table. So
    # that the result is always the same, we number them first: frequent characters, then "##x" for those inside words.
    ranked = sorted((c for c in characters if not c.isspace()), key=lambda c: (-characters[c], c))
    alphabet = sorted(ranked[: min(1000, max(1, (vocab_size - len(SPECIALS)) // 2))])
    joins = [
        c for c in alphabet if len(blank.pre_tokenizer.pre_tokenize_str(blank.normalizer.normalize_str("a" + c))) == 1
    ]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIALS, *alphabet, *("##" + c for c in joins)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    scratch = bert_tokenizer({"[UNK]": 0}, lowercase=True)
    scratch.train_from_iterator(texts, trainer)
    learned = sorted(
        scratch.get_vocab(with_added_tokens=False).keys() - set(SPECIALS), key=lambda token: token.encode()
    )
    vocabulary = {token: number for number, token in enumerate([*SPECIALS, *learned])}
    return Tokenizer(bert_tokenizer(vocabulary, lowercase=True).to_str())
