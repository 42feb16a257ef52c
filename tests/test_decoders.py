"""A decoder becomes an encoder: tokens of its own are masks."""

import json

import numpy as np
import pytest
from conftest import byte_level_bpe, make_text
from helpers import refused, succeeds, write
from transformers import AutoTokenizer

import bertdata
from bertdata.cli import main as command_line

TOKENS = ["<|begin|>", "<|end|>", "<|unused 1|>", "<|unused 2|>"]
ROLES = {"cls": TOKENS[0], "sep": TOKENS[1], "mask": TOKENS[2], "pad": TOKENS[3]}
SPELLED = ",".join(f"{role}={token}" for role, token in ROLES.items())


@pytest.fixture(scope="module")
def tokenizer(once):
    """The directory of a tokenizer as decoders have them, with an end token and no others."""

    def make(folder):
        byte_level_bpe(320, TOKENS).save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))

    return once("tokenizer of a decoder", make)


@pytest.fixture(scope="module")
def dataset(once, tokenizer):
    """Short documents, in a tokenizer whose roles were given."""

    def make(folder):
        text, shares = write(folder / "text.txt", make_text(60)), ("--documents", "line", "--validation", 0.2)
        given = ("build", text, "--out", folder / "shards", "--tokenizer", tokenizer, "--roles", SPELLED, *shares)
        succeeds(command_line, *given)

    return bertdata.open(once("rows of a decoder", make) / "shards")


def test_tokens_of_a_tokenizer_take_roles_and_texts_get_them_as_rows_do(dataset, tokenizer, tmp_path):
    row = bertdata.Loader(dataset, length=64, samples="documents", masking=None).read(np.arange(1))
    ids = row.input_ids[0, : int(row.attention_mask.sum())].tolist()
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (dataset.path, tokenizer))
    text = ours.decode(ids[1:-1])
    assert ours(text)["input_ids"] == ids
    assert theirs(text)["input_ids"] == ids[1:-1]
    assert [getattr(ours, f"{role}_token") for role in ROLES] == list(ROLES.values())
    text = write(tmp_path / "text.txt", text)
    given = ("build", text, "--out", tmp_path / "out", "--tokenizer", tokenizer, "--validation", "0", "--roles")
    for roles in ("mask=<|unknown|>", "bos=<|begin|>", "mask", "cls=<|begin|>,sep="):
        refused(command_line, *given, roles, kind="unknown", option="roles")
    refused(command_line, *given[:4], "--roles", SPELLED, kind="needs-option", option="roles")
    assert "the padding token <|end|> has another role" in succeeds(command_line, *given, "pad=<|end|>").stderr
