"""bertrain transplant: what a vocabulary keeps, what it begins with, and that nothing else of the model changes."""

import json
import random
from pathlib import Path

import pytest
import torch
from support.commands import succeeds
from support.data import SPECIALS, byte_level_bpe
from support.disk import write, write_all
from support.encoding import load, loaded
from support.families import LISTED, VARIANTS
from support.runs import QUIET, train, weights_in
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer

from bertrain.lab import transplant

KINDS = [(kind, 0) for kind in ("bert", "modernbert", "albert", "deberta-v2", "bert untied")]
KINDS += [("roberta", place) for place in (0, 1, 3)]


@pytest.fixture
def ordinary(vocab):
    """The tokens of the vocabulary of the tests that are not special."""
    return Path(vocab).read_text().splitlines()[len(SPECIALS) :]


def specials(place=0):
    """The special tokens with the padding at a place."""
    others = [token for token in SPECIALS if token != "[PAD]"]
    return [*others[:place], "[PAD]", *others[place:]]


@pytest.fixture
def checkpoint(ordinary, tmp_path):
    """A function: a kind of model → a directory with one at random, and the vocabulary of the tests."""

    def make(kind, pad=0):
        tokenizer = load(write(tmp_path / "old.txt", *specials(pad), *ordinary))
        settings = {"vocab_size": len(SPECIALS + ordinary), "pad_token_id": pad} | (LISTED.get(kind) or VARIANTS[kind])
        model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(kind.split()[0], **settings))
        for parameter in model.parameters():  # biases and padding too
            torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(tmp_path / "old")
        return write_all(tmp_path / "old", tokenizer.files)

    return make


def moved(directory, tokenizer, out):
    return succeeds("bertrain", "transplant", "--checkpoint", directory, "--tokenizer", tokenizer, "--out", out).stdout


@torch.no_grad()
def logits(model, ids):
    return model(input_ids=torch.tensor([ids])).logits[0]


@pytest.mark.parametrize(("kind", "place"), KINDS)
def test_a_permuted_vocabulary_permutes_the_logits(checkpoint, ordinary, tmp_path, kind, place):
    """Also where the padding, which decides where positions begin, gets another place."""
    pad = int(kind == "roberta")
    directory, before = checkpoint(kind, pad), specials(pad) + ordinary
    old = AutoModelForMaskedLM.from_pretrained(directory).eval()
    shuffled = random.Random(1).sample(ordinary, len(ordinary))
    for tokens in (ordinary, shuffled):
        out, after = tmp_path / str(tokens is shuffled), specials(place) + tokens
        moved(directory, write(tmp_path / "new.txt", *after), out)
        new = AutoModelForMaskedLM.from_pretrained(out).eval()
        ids = [after.index(token) for token in ("[CLS]", *ordinary[4:8], "[SEP]")]
        old_id = [before.index(token) for token in after]
        expected = logits(old, [old_id[number] for number in ids])[:, old_id]
        assert torch.allclose(logits(new, ids), expected, atol=1e-5)
        same = [torch.equal(a, b) for a, b in zip(old.parameters(), new.parameters(), strict=True)]
        assert all(same) == (tokens is ordinary) or kind == "roberta"  # whose first positions are of no token
        has_types = "token_type_ids" in AutoTokenizer.from_pretrained(out).model_input_names
        assert has_types == (kind not in ("modernbert", "deberta-v2"))


def test_a_new_token_begins_as_the_mean_of_what_spells_it(checkpoint, ordinary, tmp_path):
    directory = checkpoint("bert untied")
    word = next(token for token in ordinary if not token.startswith("##") and len(token) > 2)
    letter = next(token for token in ordinary if token.startswith("##"))
    tokens = [word + letter[2:], word, "Ω", "##Ω"]
    said = moved(directory, write(tmp_path / "new.txt", *SPECIALS, *tokens), tmp_path / "new")
    assert "6 tokens copied, 1 means of tokens, 2 at random" in said
    assert len(AutoTokenizer.from_pretrained(tmp_path / "new")) == 9
    before, after = weights_in(directory), weights_in(tmp_path / "new")
    ids = [(SPECIALS + ordinary).index(token) for token in (word, letter)]
    changed = [name for name, tensor in before.items() if tensor.shape != after[name].shape]
    assert {name.split(".")[-1] for name in changed} == {"weight", "bias"}
    for name, tensor in before.items():
        if name in changed:
            assert torch.equal(after[name][5], tensor[ids].mean(0)), name
            assert torch.equal(after[name][6], tensor[ids[0]]), name
        else:
            assert torch.equal(after[name], tensor), name
    moved(directory, tmp_path / "new.txt", tmp_path / "again")
    again = weights_in(tmp_path / "again")
    assert all(torch.equal(again[name], tensor) for name, tensor in after.items())


GEMMA = {"decoder": {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}}
SPELLED = [  # part of a tokenizer, tokens, their text, and each with the space at its beginning
    (GEMMA | {"model": {}}, "▁the ▁ri ver", "the river", [b" the", b" ri", b"ver"]),
    ({"model": {"end_of_word_suffix": "</w>"}}, "the</w> ri ver</w>", "the river", [b" the", b"ri", b" ver"]),
]


@pytest.mark.parametrize(("content", "tokens", "text", "each"), SPELLED)
def test_a_token_has_the_space_of_its_word(content, tokens, text, each):
    spelling = transplant.Spelling(json.dumps(content).encode())
    assert (spelling.text(tokens.split()), [*map(spelling.text_after_space, tokens.split())]) == (text, each)


def test_between_kinds_of_tokenizers_the_text_of_a_token_counts(vocab):
    byte_level = byte_level_bpe(400, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    bpe, wordpiece = loaded(byte_level), load(vocab)
    origins, copied = transplant.pieces(wordpiece, bpe)
    roles = {bpe.special.roles()[role]: number for role, number in wordpiece.special.roles().items()}
    assert all(origins[number] == [old] for number, old in roles.items())
    shared = 0
    for number in {*range(400)} - {*roles}:
        spelled = [wordpiece.spell(old) for old in origins[number]]
        joined = "".join(token[2:] if token.startswith("##") else f" {token}" for token in spelled)
        if spelled:
            assert joined.removeprefix(" ") == bpe.spell(number).replace("Ġ", " ").removeprefix(" ")
        shared += len(spelled) == 1
    assert len(roles) + 30 < copied <= len(roles) + shared


def test_a_head_for_next_sentences_is_kept_and_the_tokenizer_is_as_the_model_takes_it(dataset, vocab, tmp_path):
    """Also by extract."""
    train(dataset.path, tmp_path / "run", **QUIET, objective="mlm+nsp", steps=1)
    moved(tmp_path / "run", vocab, tmp_path / "moved")
    cut = ["--layers", 1, "--width", 16, "--heads", 1, "--out", tmp_path / "small"]
    succeeds("bertrain", "extract", "--checkpoint", tmp_path / "run", *cut)
    before, after, small = (weights_in(tmp_path / name) for name in ("run/last", "moved", "small"))
    for name, size in (("cls.seq_relationship.weight", 2), ("bert.pooler.dense.weight", 16)):
        assert torch.equal(before[name], after[name])
        assert torch.equal(before[name][:size, :16], small[name])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "moved")
    assert tokenizer.model_input_names == ["input_ids", "token_type_ids", "attention_mask"]
    assert tokenizer.model_max_length == AutoConfig.from_pretrained(tmp_path / "moved").max_position_embeddings
