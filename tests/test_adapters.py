"""--lora: what is frozen and what is trained, what is written, and who can read it."""

import json
import shutil
import sys

import pytest
import torch
from peft import AutoPeftModel, AutoPeftModelForSequenceClassification, PeftModel
from safetensors.torch import load_file
from support.commands import json_of, refuses, succeeds, tuning
from support.data import write_labelled
from support.disk import damages
from support.families import fast, model_of
from support.runs import last_checkpoint, losses, refused_run, remove_after, seal, train, weights_in
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from bertrain.lab import adapters
from bertrain.lab.options import parse_lora

NUMBER = {"bert": 12, "modernbert": 8, "bert untied": 12, "albert": 6}  # linear maps in the layers
LORA = {"lora": "r=2,alpha=6", "steps": 4, "eval_every": 0, "save_every": 2, "lr": 2e-2}
# in PeftModel
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def runs(dataset, configs, once):
    """name → a run that trained all weights, and one that trained an adapter on its last checkpoint."""

    def runs_of(name):
        def make(folder):
            train(dataset.path, folder / "start", model=configs[name], steps=2, eval_every=0)
            train(dataset.path, folder / "adapted", init=str(folder / "start"), **LORA)

        folder = once(name.replace(" ", "-"), make)
        return folder / "start", folder / "adapted"

    return runs_of


def logits(model):
    """float32 [2, 16, V] of one batch of ids."""
    ids = torch.arange(32).view(2, 16) % 80 + 5
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def maps_of(start, adapted, kind, auto):
    """The names of the linear maps of an adapter.

    Their weights alone are others than at the start, and so are modules that are trained in full. peft gives the logits
    of the merged weights.
    """
    before, after, path = weights_in(start), weights_in(adapted), adapted / "adapter"
    trained = {key.removeprefix("base_model.model.") for key in load_file(path / "adapter_model.safetensors")}
    maps = {key.partition(".lora_")[0] for key in trained if ".lora_" in key}
    shared = before.keys() & after.keys()
    changed = {key for key in shared if not torch.equal(before[key], after[key])}
    assert changed == shared & (trained | {f"{name}.weight" for name in maps})
    merged, plain = (kind.from_pretrained(step) for step in (adapted, start))
    assert (logits(merged) - logits(plain)).abs().max() > 1e-2
    for beside in (PeftModel.from_pretrained(plain, path), auto.from_pretrained(path)):
        torch.testing.assert_close(logits(merged), logits(beside), rtol=0, atol=1e-6)
    return maps


@pytest.mark.parametrize("name", fast(NUMBER, among=["bert untied"]))
def test_a_merged_checkpoint_is_an_ordinary_one_with_the_logits_that_peft_gives(runs, name):
    start, adapted = (last_checkpoint(run) for run in runs(name))
    assert len(maps_of(start, adapted, AutoModelForMaskedLM, AutoPeftModel)) == NUMBER[name]
    assert weights_in(start).keys() == weights_in(adapted).keys()
    given = json.loads((adapted / "adapter" / "adapter_config.json").read_bytes())
    assert (given["r"], given["lora_alpha"]) == (2, 6)


def test_a_run_goes_on_on_the_checkpoint_that_it_began_with(dataset, configs, tmp_path):
    start, out = tmp_path / "start", tmp_path / "run"
    train(dataset.path, start, model=configs["bert untied"], steps=2, eval_every=0)
    straight = losses(train(dataset.path, out, init=str(start), **LORA))
    remove_after(out, 2)
    train(dataset.path, start, model=configs["bert untied"], steps=3, eval_every=0)
    assert losses(train(dataset.path, out, init=str(start), **LORA)) == straight  # and not on the newest


def test_a_run_goes_on_with_the_same_adapter_and_weights_alone(dataset, runs, tmp_path):
    start, adapted = runs("modernbert")[0], shutil.copytree(runs("modernbert")[1], tmp_path / "run")
    options = LORA | {"steps": 5, "init": str(start)}
    alone = options | {"init": last_checkpoint(adapted) / "adapter"}
    refused_run(dataset.path, tmp_path / "alone", **alone, kind="not-a-run", option="init")
    refused_run(dataset.path, adapted, **options | {"lora": "r=2,alpha=8"}, kind="other-settings", option="lora")
    path = last_checkpoint(adapted) / "adapter" / "adapter_config.json"
    model_of("modernbert-tiny", dataset).save_pretrained(tmp_path / "larger")
    first = min(start.glob("step-*"))
    for other, kind, option in ((first, "other-settings", "init"), (tmp_path / "larger", "damaged", None)):
        path.write_text(json.dumps(json.loads(path.read_bytes()) | {"base_model_name_or_path": str(other)}))
        seal(last_checkpoint(adapted))
        refused_run(dataset.path, adapted, **options, kind=kind, option=option, says="adapter")


@pytest.mark.parametrize(("library", "lora"), [("peft", "r=2,alpha=4"), ("bitsandbytes", "r=2,alpha=4,bits=4")])
def test_a_missing_library_is_one_sentence(configs, dataset, monkeypatch, library, lora):
    monkeypatch.setitem(sys.modules, library, None)
    with refuses("not-installed", "lora", says=library):
        adapters.add(model_of(configs["bert"], dataset), parse_lora(lora), seed=0)


@pytest.mark.parametrize("name", fast(["bert", "modernbert"], among=["modernbert"]))
def test_fine_tuning_trains_an_adapter_and_the_head(runs, tmp_path, name):
    start, data = last_checkpoint(runs(name)[0]), write_labelled(tmp_path / "train.tsv", repeat=4)
    options = ["--lr", 2e-2, "--batch-size", 4, "--epochs", 10, "--lora", "r=4,alpha=8"]
    command = ["finetune", *tuning(start, data, tmp_path / "out", *options)]
    result = json_of("bertrain", *command)
    assert result["lora"] == "r=4,alpha=8"
    assert result["dev_accuracy"]["min"] > 0.8
    succeeds("bertrain", *command, "--seeds", 2)
    one, other = (tmp_path / "out" / f"seed-{seed}" for seed in (0, 1))
    assert maps_of(start, one, AutoModelForSequenceClassification, AutoPeftModelForSequenceClassification)
    assert not torch.equal(weights_in(one)["classifier.weight"], weights_in(other)["classifier.weight"])


def test_a_damaged_adapter_is_one_sentence(dataset, runs, tmp_path):
    start, adapted = runs("modernbert")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        out = shutil.copytree(adapted, tmp_path / name)
        path = last_checkpoint(out) / "adapter" / name
        content = path.read_bytes()
        for damage in damages(content, tmp_path / "made").values():
            path.write_bytes(damage)
            seal(last_checkpoint(out))
            refused_run(dataset.path, out, init=str(start), **LORA | {"steps": 5}, kind="damaged", given=str(path))
