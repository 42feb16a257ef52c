"""Tokenizers put together at random, as tools/any_tokenizer.py does it for thousands."""

import random

import any_tokenizer
import pytest


@pytest.mark.slow
def test_tokenizers_of_any_parts_give_the_ids_of_the_library():
    num_compared = 0
    for number in range(60):
        draw = random.Random(f"test {number}")
        if spelled := any_tokenizer.made(draw):
            texts = [any_tokenizer.nasty_text(draw) for _ in range(10)]
            assert [*any_tokenizer.differences(spelled, texts)] == []
            num_compared += 1
    assert num_compared > 30
