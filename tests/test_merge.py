"""bertrain merge: the mean of weights is right to the bit, loads everywhere, and is whole or not there at all."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from support.commands import json_of, refused, succeeds, tuning
from support.data import write_labelled
from support.disk import write
from support.runs import QUIET, last_checkpoint, train, weights_in
from transformers import AutoModelForMaskedLM, AutoTokenizer

from bertrain import checkpoint
from bertrain.commands import evaluate, merge
from bertrain.lab import finetune


@pytest.fixture(scope="module")
def runs(dataset, tmp_path_factory):
    """Three runs of one model with other seeds, of one step each. Tests must not change them."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(3):
        train(dataset.path, folder / f"{seed}", **QUIET, steps=1, seed=seed)
    return [folder / f"{seed}" for seed in range(3)]


def test_the_mean_of_runs_is_exact_in_any_order(runs, tmp_path):
    succeeds(merge.main, *runs, "--out", tmp_path / "one")
    succeeds(merge.main, *reversed(runs), "--out", tmp_path / "two")
    merged, parts = weights_in(tmp_path / "one"), [weights_in(last_checkpoint(run)) for run in runs]
    assert merged.keys() == parts[0].keys()
    for name, weight in merged.items():
        values = zip(*(part[name].flatten().tolist() for part in parts), strict=True)
        exact = np.array([np.float32(math.fsum(some) / 3) for some in values])
        assert np.array_equal(weight.flatten().numpy(), exact), name
    assert all(torch.equal(weight, weights_in(tmp_path / "two")[name]) for name, weight in merged.items())


def test_the_mean_loads_is_evaluated_and_is_trained_further(runs, dataset, tmp_path):
    merged = tmp_path / "new" / "merged"
    assert succeeds(merge.main, *runs, "--out", merged).stderr == ""
    assert checkpoint.fault_of(merged) is None
    assert AutoModelForMaskedLM.from_pretrained(merged).config.model_type == "bert"
    before, after = map(AutoTokenizer.from_pretrained, (last_checkpoint(runs[0]), merged))
    assert after("the stone")["input_ids"] == before("the stone")["input_ids"]
    assert after.model_max_length == before.model_max_length
    loss = json_of(evaluate.main, "--checkpoint", merged, "--data", dataset.path, "--length", 32)["loss"]
    log = train(dataset.path, tmp_path / "on", init=str(merged), **QUIET, steps=1)
    assert log[0]["loss"] == pytest.approx(loss, abs=0.5)


def test_checkpoints_of_one_run_and_its_mean(finished, tmp_path):
    steps = [finished / f"step-{step:08d}" for step in (2, 4, 6)]
    succeeds(merge.main, *steps[1:], "--out", tmp_path / "two")
    succeeds(merge.main, steps[0], tmp_path / "two", "--out", tmp_path / "three")
    about = ModelCard.load(tmp_path / "two" / "README.md")
    assert about.data.license == "other"
    assert all(f"`run/{step.name}`" in about.text for step in steps[1:])
    refused(merge.main, finished, steps[-1], "--out", tmp_path / "none", kind="conflict", option="checkpoints")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"objective": "mlm+nsp"}, "cls.seq_relationship.weight"),
        ({"init": "0", "lora": "r=2,alpha=4"}, "bert.encoder.layer.0.attention.self.query.weight"),
    ],
)
def test_the_mean_has_a_head_for_next_sentences_and_the_effect_of_adapters(runs, dataset, tmp_path, options, name):
    options = QUIET | options | ({"init": str(runs[0])} if "init" in options else {})
    for seed in (0, 1):
        train(dataset.path, tmp_path / f"{seed}", **options, steps=1, seed=seed)
    succeeds(merge.main, tmp_path / "0", tmp_path / "1", "--out", tmp_path / "merged")
    one, two = (weights_in(last_checkpoint(tmp_path / run))[name].double() for run in "01")
    assert not torch.equal(one, two)
    assert torch.equal(weights_in(tmp_path / "merged")[name], ((one + two) / 2).float())
    assert not (tmp_path / "merged" / "adapter").exists()


def changed(source, target, name, **values):
    """A copy of a checkpoint that transformers wrote, with other values in a file of JSON."""
    shutil.copytree(source, target)
    (target / checkpoint.INDEX).unlink()
    content = json.loads((target / name).read_bytes())
    (target / name).write_text(json.dumps(content | values))
    return target


def test_models_that_differ_are_refused(runs, dataset, bert_run, finished, tmp_path):
    first = last_checkpoint(runs[0])

    def refuse(*given, kind, option="checkpoints", says=""):
        return refused(merge.main, *given, "--out", tmp_path / "none", kind=kind, option=option, says=says)

    refuse(first, kind="missing")
    refuse(first, bert_run, kind="conflict", says="hidden_size")
    refuse(first, finished, kind="conflict", says="model_type")
    refuse(first, changed(first, tmp_path / "dropout", "config.json", layer_norm_eps=1e-6), kind="conflict")
    refuse(first, tmp_path / "gone", kind="not-a-run")
    content = json.loads((first / "tokenizer.json").read_bytes())
    model = content["model"] | {"unk_token": "[PAD]"}
    other = changed(first, tmp_path / "other", "tokenizer.json", model=model)
    refuse(first, other, kind="tokenizer-differs")
    (other / "tokenizer.json").unlink()
    refuse(first, other, kind="tokenizer-not-found", option="tokenizer")
    data = write_labelled(tmp_path / "train.tsv")
    succeeds(finetune.main, *tuning(runs[0], data, tmp_path / "tuned", "--length", 16, "--seeds", 2))
    seeds = [tmp_path / "tuned" / f"seed-{seed}" for seed in (0, 1)]
    refuse(*seeds, kind="weights-missing", option=None)
    assert not (tmp_path / "none").exists()


def test_what_is_in_the_way_or_damaged_is_refused(runs, tmp_path):
    write(tmp_path / "full" / "notes.txt", "mine")
    refused(merge.main, *runs, "--out", tmp_path / "full", kind="out-exists", option="out")
    write(shutil.copytree(last_checkpoint(runs[0]), tmp_path / "damaged") / "model.safetensors", "damaged")
    arguments = [tmp_path / "damaged", runs[1], "--out", tmp_path / "merged"]
    refused(merge.main, *arguments, kind="damaged", option="checkpoints")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "full"]
