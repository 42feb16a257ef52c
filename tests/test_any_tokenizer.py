"""Tokenizers put together at random, as tools/any_tokenizer.py does it for thousands."""

import random

import any_tokenizer
import pytest

from bertdata.tokenize.tokenizer import LoadedTokenizer


@pytest.mark.slow
def test_tokenizers_of_any_parts_give_the_ids_of_the_library():
    num_taken = 0
    for number in range(60):
        draw = random.Random(f"test {number}")
        if spelled := any_tokenizer.made(draw):
            texts = [any_tokenizer.nasty_text(draw) for _ in range(10)]
            assert [*any_tokenizer.differences(spelled, texts)] == []
            ours = LoadedTokenizer(spelled)
            ours.prepare()
            num_taken += ours.engine is not None
    assert num_taken > 8  # the parts of most do not go together in an engine
