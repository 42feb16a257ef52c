"""bertrain merge: the mean of weights is right to the bit, loads everywhere, and is whole or not there at all."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from support.commands import json_of, refused, succeeds, tuning
from support.data import write_labelled
from support.disk import write
from support.runs import QUIET, last_checkpoint, train, weights_in
from transformers import AutoModelForMaskedLM, AutoTokenizer

from bertrain import checkpoint


@pytest.fixture(scope="module")
def runs(dataset, tmp_path_factory):
    """Three runs of one model with other seeds, of one step each. Tests must not change them."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(3):
        train(dataset.path, folder / f"{seed}", **QUIET, steps=1, seed=seed)
    return [folder / f"{seed}" for seed in range(3)]


def test_the_mean_is_exact_in_any_order_loads_is_evaluated_and_is_trained_further(runs, dataset, tmp_path):
    one = tmp_path / "new" / "one"
    assert succeeds("bertrain", "merge", *runs, "--out", one).stderr == ""
    succeeds("bertrain", "merge", *reversed(runs), "--out", tmp_path / "two")
    merged, parts = weights_in(one), [weights_in(last_checkpoint(run)) for run in runs]
    assert merged.keys() == parts[0].keys()
    for name, weight in merged.items():
        values = zip(*(part[name].flatten().tolist() for part in parts), strict=True)
        exact = np.array([np.float32(math.fsum(some) / 3) for some in values])
        assert np.array_equal(weight.flatten().numpy(), exact), name
    assert all(torch.equal(weight, weights_in(tmp_path / "two")[name]) for name, weight in merged.items())
    assert checkpoint.fault_of(one) is None
    assert AutoModelForMaskedLM.from_pretrained(one).config.model_type == "bert"
    before, after = map(AutoTokenizer.from_pretrained, (last_checkpoint(runs[0]), one))
    assert after("the stone")["input_ids"] == before("the stone")["input_ids"]
    assert after.model_max_length == before.model_max_length
    loss = json_of("bertrain", "evaluate", "--checkpoint", one, "--data", dataset.path, "--length", 32)["loss"]
    log = train(dataset.path, tmp_path / "on", init=str(one), **QUIET, steps=1)
    assert log[0]["loss"] == pytest.approx(loss, abs=0.5)


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
    succeeds("bertrain", "merge", tmp_path / "0", tmp_path / "1", "--out", tmp_path / "merged")
    one, two = (weights_in(last_checkpoint(tmp_path / run))[name].double() for run in "01")
    assert not torch.equal(one, two)
    assert torch.equal(weights_in(tmp_path / "merged")[name], ((one + two) / 2).float())
    assert not (tmp_path / "merged" / "adapter").exists()


def test_what_cannot_be_merged_is_refused(runs, bert_run, finished, tmp_path):
    first, out = last_checkpoint(runs[0]), tmp_path / "none"
    other = shutil.copytree(first, tmp_path / "other")
    (other / checkpoint.INDEX).unlink()  # as transformers writes a checkpoint
    content = json.loads((other / "tokenizer.json").read_bytes())
    content["model"]["unk_token"] = "[PAD]"
    write(other / "tokenizer.json", json.dumps(content))
    write(shutil.copytree(first, tmp_path / "damaged") / "model.safetensors", "damaged")
    tune = tuning(runs[0], write_labelled(tmp_path / "train.tsv"), tmp_path / "tuned", "--length", 16, "--seeds", 2)
    succeeds("bertrain", "finetune", *tune)
    for given, kind, option, says in (
        ([first], "missing", "checkpoints", ""),
        ([finished, last_checkpoint(finished)], "conflict", "checkpoints", ""),
        ([first, bert_run], "conflict", "checkpoints", "hidden_size"),
        ([first, finished], "conflict", "checkpoints", "model_type"),
        ([tmp_path / "damaged", runs[1]], "damaged", "checkpoints", ""),
        ([first, other], "tokenizer-differs", "checkpoints", ""),
        ([tmp_path / "tuned" / f"seed-{seed}" for seed in (0, 1)], "weights-missing", None, ""),
    ):
        refused("bertrain", "merge", *given, "--out", out, kind=kind, option=option, says=says)
    assert not out.exists()
    write(out / "notes.txt", "mine")
    refused("bertrain", "merge", *runs, "--out", out, kind="out-exists", option="out")
