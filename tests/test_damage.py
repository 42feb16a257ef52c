"""Damaged and hostile models where commands of bertrain read them: one sentence, and nothing that was finished is lost.

READERS has the files of checkpoints, which are sealed: checkpoint.json states the damaged bytes.
"""

import json
import shutil

import pytest
import torch
from support.commands import invoke, json_of, refused, succeeds, tuning
from support.data import write_labelled
from support.disk import damages, reseal, unsealed
from support.families import fast
from support.runs import QUIET, cannot_read, train, weights_in

from bertrain import checkpoint, state


def test_a_milestone_that_cannot_be_read_is_not_removed(finished, tmp_path, monkeypatch):
    for step in (1, 2, 3, 4):
        shutil.copytree(finished / "step-00000002", tmp_path / f"step-0000000{step}")
    cannot_read(monkeypatch, tmp_path / "step-00000001" / state.TRAINER)
    (tmp_path / "step-00000002" / state.TRAINER).write_bytes(b"{")
    checkpoint.Writer(1, None, print, ()).clear(tmp_path / "step-00000004")
    assert [path.name[-1] for path in sorted(tmp_path.glob("step-*"))] == ["1", "2", "4"]


@pytest.fixture
def model(bert_run, tmp_path):
    """A model without checkpoint.json, as others make it: a copy."""
    directory = shutil.copytree(bert_run / "step-00000002", tmp_path / "model")
    (directory / checkpoint.INDEX).unlink()
    return directory


def commands(model, dataset, out):
    """Commands that read a model: arguments."""
    data = write_labelled(out.parent / "data.tsv")
    few = ["--length", 32, "--steps", 1, "--global-batch-size", 6]
    return {
        "init": ["pretrain", "--data", dataset.path, "--out", out, "--init", model, *few],
        "pretrain": ["pretrain", "--data", dataset.path, "--out", out, "--model", model, *few],
        "evaluate": ["evaluate", "--checkpoint", model, "--data", dataset.path, "--max-samples", 6],
        "finetune": ["finetune", *tuning(model, data, out)],
        "augment": ["augment", "--checkpoint", model, "--train", data, "--out", out.with_suffix(".tsv")],
        "teacher": ["teacher", "--model", model, "--data", dataset.path, "--out", out, "--max-samples", 6],
        "merge": ["merge", model, f"{model}/../second", "--out", out],
    }


PARTS = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize("name", fast(PARTS, among=PARTS[:2]))
def test_a_damaged_model_is_one_sentence_in_every_command(dataset, model, tmp_path, name):
    shutil.copytree(model, tmp_path / "second")
    content = (model / name).read_bytes()
    before = sorted(path.name for path in tmp_path.iterdir())
    for command, arguments in commands(model, dataset, tmp_path / "out").items():
        if command == "pretrain" and name != "config.json":
            continue
        for what, damage in damages(content, tmp_path / "made").items():
            (model / name).write_bytes(damage)
            done = invoke("bertrain", *arguments)
            may_pass = name == "tokenizer_config.json" or (name == "config.json" and what == "object")
            assert done.exit_code or may_pass, (command, what, done.output)
            last = done.stderr.splitlines()[-1] if done.exit_code else "Error: "
            assert last.startswith("Error: "), (command, what, done.output)
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
            (tmp_path / "out.tsv").unlink(missing_ok=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "data.tsv"])


@pytest.mark.parametrize("command", ["init", "evaluate", "finetune"])
def test_weights_of_strangers_are_no_pickles(dataset, model, tmp_path, command):
    torch.save(weights_in(model), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    arguments = commands(model, dataset, tmp_path / "out")[command]
    option = {"init": "init", "evaluate": None, "finetune": "checkpoint"}[command]
    refused("bertrain", *arguments, kind="model-unreadable", option=option)


@pytest.mark.parametrize("command", ["init", "pretrain", "evaluate", "finetune"])
def test_the_attention_that_a_configuration_names_is_not_loaded(dataset, model, tmp_path, command):
    config = json.loads((model / "config.json").read_bytes())
    (model / "config.json").write_text(json.dumps(config | {"attn_implementation": "org/name"}))
    succeeds("bertrain", *commands(model, dataset, tmp_path / "out")[command])


@pytest.mark.parametrize("kind", ["own", "bert"])
@pytest.mark.parametrize("command", ["init", "pretrain", "evaluate", "finetune", "augment", "teacher"])
def test_code_that_a_model_brings_is_not_run(dataset, model, tmp_path, monkeypatch, command, kind):
    """transformers imports the modules of auto_map where it is told to trust them, or, of a model that it does not have
    itself, where somebody answers yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    own = f"from pathlib import Path\nPath({str(tmp_path / 'made')!r}).touch()\nConfig = Model = Tokenizer = object\n"
    (model / "own.py").write_text(own)
    names = {"AutoConfig": "own.Config", "AutoModel": "own.Model", "AutoModelForMaskedLM": "own.Model"}
    names["AutoModelForSequenceClassification"] = "own.Model"
    for file, auto in (("config.json", names), ("tokenizer_config.json", {"AutoTokenizer": ["own.Tokenizer", None]})):
        content = json.loads((model / file).read_bytes())
        (model / file).write_text(json.dumps(content | {"auto_map": auto, "model_type": kind}))
    done = invoke("bertrain", *commands(model, dataset, tmp_path / "out")[command])
    assert done.exit_code == 0 or done.stderr.splitlines()[-1].startswith("Error: "), done.output
    assert not (tmp_path / "made").exists()


def test_a_dataset_that_does_not_count_its_text_has_no_bits_per_byte(dataset, bert_run, tmp_path):
    shards = shutil.copytree(dataset.path, tmp_path / "shards")
    reseal(shards / "manifest.json", unsealed(shards / "manifest.json") | {"counts": {}})
    few = ["evaluate", "--checkpoint", bert_run, "--max-samples", 6, "--data"]
    assert json_of("bertrain", *few, shards) == json_of("bertrain", *few, dataset.path) | {"bits_per_byte": None}
    assert "not counted" in succeeds("bertrain", *few, shards).stdout
    assert "validation_loss" in train(shards, tmp_path / "run", steps=1, **QUIET)[-1]


@pytest.mark.parametrize("command", ["doctor", "pretrain"])
def test_ctrl_c_while_a_command_begins_is_one_sentence(dataset, tmp_path, monkeypatch, command):
    def interrupt(seed):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "manual_seed", interrupt)
    done = invoke("bertrain", command, "--data", dataset.path, "--out", tmp_path / "run")
    assert (done.exit_code, done.stderr.splitlines()[-1].split()[0]) == (130, "interrupted;")
