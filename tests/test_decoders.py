"""A decoder becomes an encoder: tokens of its own are masks, and its checkpoints attend to both sides.

Losses, gradients, packed rows, windows and resuming of each family are in test_families.
"""

import json
import shutil

import numpy as np
import pytest
import torch
from support.commands import refused, refuses, succeeds, tuning
from support.data import built, byte_level_bpe, make_text, write_labelled
from support.disk import write
from support.families import DECODERS, VARIANTS, fast, model_of
from support.runs import last_checkpoint, learner, train
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

import bertdata
from bertrain.models.load import check_runs, load_model, start_from

TOKENS = ["<|begin|>", "<|end|>", "<|unused 1|>", "<|unused 2|>"]
ROLES = {"cls": TOKENS[0], "sep": TOKENS[1], "mask": TOKENS[2], "pad": TOKENS[3]}
SPELLED = ",".join(f"{role}={token}" for role, token in ROLES.items())
OPTIONS = {"steps": 2, "eval_every": 0, "isolate_documents": True}
BOTH = [*DECODERS, *(name for name in VARIANTS if name.split()[0] in DECODERS)]


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
    options = {"tokenizer": str(tokenizer), "roles": SPELLED, "documents": "line", "validation": 0.2}
    folder = once("rows of a decoder", lambda folder: built(folder, make_text(60), **options))
    return bertdata.open(folder / "shards")


@pytest.fixture(scope="module")
def decoder(once, configs, dataset, tokenizer):
    """decoder(name): the directory of a decoder with random weights, as its makers publish one. Do not change it."""

    def of(name):
        def make(folder):
            weights = model_of(configs[name], dataset)
            weights.save_pretrained(folder)
            values = json.loads((folder / "config.json").read_bytes()) | {"pad_token_id": None}
            values = {key: value for key, value in values.items() if key not in ("is_causal", "use_cache")}
            shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
            write(folder / "config.json", json.dumps(values))

        return once(f"decoder {name}", make)

    return of


def test_tokens_of_a_tokenizer_take_roles_and_texts_get_them_as_rows_do(dataset, tokenizer):
    row = bertdata.Loader(dataset, length=64, samples="documents", masking=None).read(np.arange(1))
    ids = row.input_ids[0, : int(row.attention_mask.sum())].tolist()
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (dataset.path, tokenizer))
    text = ours.decode(ids[1:-1])
    assert ours(text)["input_ids"] == ids
    assert theirs(text)["input_ids"] == ids[1:-1]
    assert [getattr(ours, f"{role}_token") for role in ROLES] == list(ROLES.values())


@pytest.mark.parametrize("name", fast(BOTH, among=["llama"]))
def test_a_decoder_attends_to_both_sides_wherever_its_checkpoint_is_loaded(decoder, dataset, tmp_path, name, capsys):
    from sentence_transformers import SentenceTransformer

    train(dataset.path, tmp_path / "run", init=str(decoder(name)), lora="r=2,alpha=2", **OPTIONS)
    last = last_checkpoint(tmp_path / "run")
    assert f"AutoModelForCausalLM.from_pretrained({str(last)!r})" in capsys.readouterr().out
    assert "transformers 5.2 and newer versions read it; in older" in (last / "README.md").read_text()
    notes = ["config.is_causal = False" in path.read_text() for path in last.glob("adapter/README.md")]
    assert notes == [True] * ("without" not in name)
    text = "a dog sees the old tree by the river, and a cat"
    rows = AutoTokenizer.from_pretrained(last)(text, return_tensors="pt")
    encoder, positions = learner(load_model(last), isolate=True).eval(), torch.arange(rows["input_ids"].shape[1])[None]
    theirs = {head: head.from_pretrained(last).eval() for head in (AutoModel, AutoModelForCausalLM)}
    sentences = SentenceTransformer(str(last), device="cpu")
    assert theirs[AutoModel].config.pad_token_id == dataset.special_tokens.pad
    with torch.no_grad():
        ours = encoder.encode(rows["input_ids"], position_ids=positions)
        torch.testing.assert_close(theirs[AutoModel](**rows).last_hidden_state, ours, rtol=0, atol=1e-5)
        (states,) = sentences.encode([text], output_value="token_embeddings")
        torch.testing.assert_close(states, ours[0], rtol=0, atol=1e-5)
        for model in theirs.values():
            changed, place = rows["input_ids"].clone(), positions.shape[1] // 2
            changed[0, place] += 1
            both = [model(ids, output_hidden_states=True) for ids in (rows["input_ids"], changed)]
            differs = (both[0].hidden_states[-1] != both[1].hidden_states[-1]).any(-1)[0]
            assert differs[place - 1]
            assert differs[place + 1]


def test_a_decoder_is_fine_tuned_for_what_transformers_has_a_head_for(decoder, dataset, tmp_path):
    train(dataset.path, tmp_path / "run", init=str(decoder("gemma3_text")), **OPTIONS)
    labelled = write_labelled(tmp_path / "train.tsv")
    succeeds("bertrain", "finetune", *tuning(tmp_path / "run", labelled, tmp_path / "tuned"))
    assert AutoConfig.from_pretrained(tmp_path / "tuned" / "seed-0").is_causal is False
    words = write(tmp_path / "words.txt", "a X", "dog Y", "", "a X", "cat Y")
    given = tuning(tmp_path / "run", words, tmp_path / "tags", "--task", "token")
    refused("bertrain", "finetune", *given, kind="model-unreadable", option="checkpoint", says="gemma3_text")


def test_a_decoder_that_was_not_adapted_is_no_encoder_in_silence(decoder, dataset, tmp_path):
    given = "--checkpoint", decoder("llama"), "--data", dataset.path, "--length", 32
    assert "was not trained to attend to both sides" in succeeds("bertrain", "evaluate", *given).stderr
    raw = shutil.copytree(decoder("llama"), tmp_path / "raw")
    write(raw / "tokenizer_config.json", json.dumps({"eos_token": "<|end|>", "pad_token": TOKENS[3]}))
    given = tuning(raw, write_labelled(tmp_path / "train.tsv"), tmp_path / "tuned", "--lora", "r=2,alpha=4")
    assert "attend to the left only" in succeeds("bertrain", "finetune", *given).stderr
    assert not [*(tmp_path / "tuned" / "seed-0" / "adapter").glob("README.md")]


def test_a_transformers_that_lets_a_decoder_attend_to_one_side_is_refused(decoder, dataset):
    weights, _ = start_from(str(decoder("llama")), dataset, length=32)
    assert check_runs(weights, length=32) == []
    weights.config.is_causal = True
    with refuses("model-unreadable", says="both sides"):
        check_runs(weights, length=32)
