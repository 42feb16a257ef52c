"""Byte-level BPE of our own gives the ids of the `tokenizers` library, and takes only what it can."""

import json
from unittest.mock import patch

import numpy as np
import pytest
import tokenizers
from conftest import code_points, make_text
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from bertdata.errors import TokenizerError
from bertdata.tokenize import engine
from bertdata.tokenize.bpe import ByteLevelBPE
from bertdata.tokenize.tokenizer import TOKENIZER, Tokenizer

PIECES = [
    "a", "b", " ", "  ", "\n", "\n\n", "'", "'s", "'re", "'ll", "'S", "!", "1", "é", "水", "\u00a0", "\u2003", "\t",
    "\0", "²", "\u0301", "\U0001f600", "don't", "river" * 2, "x" * 63, "x" * 65, "\u2028", "٣", "Ⅷ", "\x85",
    "\r\n", "the ", "ing",
]  # fmt: skip
TEXTS = st.one_of(st.text(max_size=30), st.lists(st.sampled_from(PIECES), max_size=14).map("".join))


def trained(**options):
    """The JSON of a byte-level BPE with one special token, as GPT-2 is made."""
    tokenizer = tokenizers.Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<|endoftext|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    tokenizer.train_from_iterator([make_text(60)], trainer)
    return json.loads(tokenizer.to_str())


@pytest.fixture(scope="module")
def content():
    return trained()


@pytest.fixture(scope="module")
def bpe(content):
    tokenizer = Tokenizer(json.dumps(content))
    tokenizer.prepare()
    assert isinstance(tokenizer._engine, ByteLevelBPE)
    return tokenizer


def both(tokenizer, texts):
    encoded = [text.encode() for text in texts]
    offsets = np.append(0, np.cumsum([len(text) + 1 for text in encoded])).astype(np.int64)
    data = b"".join(text + b"\n" for text in encoded)
    return (
        tokenizer.encode(data, offsets, sentences=False),
        tokenizer._encode_by_library(data, offsets, sentences=False),
    )


def assert_exact(tokenizer, texts):
    ours, theirs = both(tokenizer, texts)
    assert ours.ids.tolist() == theirs.ids.tolist()
    assert ours.documents.tolist() == theirs.documents.tolist()
    assert ours.ids.dtype == theirs.ids.dtype


@given(st.lists(TEXTS, min_size=1, max_size=6))
@example(["   a", " a  ", "\n\n a", "a \n", "'re're", " 's", "a\u00a0\u00a0b", "\0a\0", ""])
def test_ids_are_those_of_the_library(bpe, texts):
    assert_exact(bpe, texts)


@pytest.fixture(scope="module")
def modern(content):
    """As ModernBERT's: text is composed first (NFC), and runs of spaces and some other strings are tokens."""
    added = [
        {"id": 500 + k, "content": token, "single_word": False, "lstrip": k == 3, "rstrip": False,
         "normalized": k != 2, "special": False}
        for k, token in enumerate(["  ", "    ", "|||IP|||", "qu"])
    ]  # fmt: skip
    changes = {"normalizer": {"type": "NFC"}, "added_tokens": content["added_tokens"] + added}
    tokenizer = Tokenizer(json.dumps(content | changes))
    tokenizer.prepare()
    assert isinstance(tokenizer._engine, ByteLevelBPE)
    return tokenizer


@settings(max_examples=200)
@given(st.lists(st.one_of(TEXTS, st.lists(st.sampled_from(
    ["a", "é", "e\u0301", "\u0301", "q", "u", " ", "|||", "IP", "\u1100", "\u1161", "\u11a8", "가", "\u09c7", "\u09be",
     "\u0344", "\u212b", "\U00016d67", "\U0001d15e", "\U0001f600", "\u0345\u0334", "x" * 70, "\n"]), max_size=9,
).map("".join)), max_size=5))  # fmt: skip
@example(["a  b", "|||IP||| the", "e\u0301t\u00e9", "quite", "", "a b", "x" * 70 + "e\u0301" + "x" * 70, "x" * 70])
def test_composed_text_and_added_tokens(modern, texts):
    with patch.object(engine, "HARD_SHARE", 1):
        assert_exact(modern, texts)


def test_code_points_that_compose(modern):
    with patch.object(engine, "HARD_SHARE", 1):
        assert_exact(modern, [f"a{c} {c}{c}b\u1100{c}\u0301" for c in code_points()[::3]])


def test_an_added_token_that_is_not_composed_is_left_to_the_library(content):
    token = content["added_tokens"][0] | {"id": 500, "content": "e\u0301", "special": False}
    tokenizer = Tokenizer(json.dumps(content | {"added_tokens": [*content["added_tokens"], token]}))
    tokenizer.prepare()
    assert tokenizer._engine is False


def test_code_points_alone_and_among_others(bpe):
    points = code_points()
    assert_exact(bpe, ["".join(f"{c} {c}a1{c}" for c in points[k : k + 4096]) for k in range(0, len(points), 4096)])


def test_words_that_do_not_fit_the_tables(bpe, monkeypatch):
    monkeypatch.setattr(engine, "SHORT_SLOTS", 16)
    monkeypatch.setattr(engine, "LONG_SLOTS", 16)
    small = Tokenizer(bpe.files[TOKENIZER].decode())
    for length in (1, 7, 8, 9, 15, 16, 17, 64, 65, 300):
        texts = [" ".join(chr(97 + (k * j + length) % 26) * length for k in range(60)) for j in range(5)]
        assert_exact(small, texts)


@pytest.mark.parametrize(
    "change",
    [
        {"dropout": 0.1}, {"fuse_unk": True, "unk_token": "a"}, {"ignore_merges": True}, {"end_of_word_suffix": "</w>"},
    ],
)  # fmt: skip
def test_models_of_another_rule_are_left_to_the_library(content, change):
    changed = content | {"model": content["model"] | change}
    try:
        tokenizer = Tokenizer(json.dumps(changed))
    except TokenizerError:
        pytest.fail("the library reads such a model")
    tokenizer.prepare()
    assert tokenizer._engine is False


def test_other_rules_for_words_are_left_to_the_library(content):
    for part, value in (
        ("pre_tokenizer", content["pre_tokenizer"] | {"add_prefix_space": True}),
        ("pre_tokenizer", content["pre_tokenizer"] | {"use_regex": False}),
        ("normalizer", {"type": "NFKC"}),
    ):
        tokenizer = Tokenizer(json.dumps(content | {part: value}))
        tokenizer.prepare()
        assert tokenizer._engine is False
