"""README.md of a checkpoint: what it says is what run.json, trainer.json and the log say, and a user's own is kept."""

import itertools
import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects
from support.commands import succeeds, tuning
from support.data import ROOT, write_labelled
from support.runs import TINY, changing, entries, train
from transformers import AutoConfig, AutoModelForMaskedLM

from bertrain import card, checkpoint, state
from bertrain.__main__ import main

BERT = json.loads(Path(TINY).read_bytes()) | {"num_hidden_layers": 3}
OPTIONS = {"steps": 4, "save_every": 2, "eval_every": 2, "mlm_probability": 0.3}


@pytest.fixture(scope="module")
def trained(dataset, once):
    """A run of four steps with sub-networks. Tests must not change it."""

    def make(folder):
        (folder / "bert.json").write_text(json.dumps(BERT))
        train(dataset.path, folder / "run", model=str(folder / "bert.json"), elastic="layers=1:3", **OPTIONS)

    return once("card", make) / "run"


def cells(directory):
    """The rows of two cells of a card's tables."""
    return dict(re.findall(r"^\| ([-a-z, ]+) \| (.*) \|$", (directory / "README.md").read_text(), re.MULTILINE))


def test_a_card_has_what_the_hub_reads_and_the_numbers_of_the_run(trained, dataset, monkeypatch):
    about = json.loads((trained / "run.json").read_bytes())
    path = trained / "step-00000002"
    measured = next(entry for entry in entries(trained) if entry["step"] == 2 and "validation_loss" in entry)
    card, rows, saved = ModelCard.load(path / "README.md"), cells(path), state.read(path)
    assert card.data.to_dict() == {"library_name": "transformers", "tags": ["bertrain", "bert"], "license": "other"}
    assert card.text.lstrip().startswith("# run after step 2\n")
    assert f" {about['resolved']['parameters']:,} parameters" in card.text
    amounts = f"{dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens, all rows"
    assert f"| `{dataset.dataset_id}` | {amounts} |" in card.text
    assert rows == rows | {
        "steps": "2 of 4",
        "tokens read, with padding": f"{saved.tokens:,}",
        "validation loss": f"{measured['validation_loss']:.4f} nats a token",
        "right": f"{measured['validation_accuracy']:.2%}",
        "after step": "2",
    }
    wanted = ["elastic", "length", "steps", "global_batch_size", "lr", "mlm_probability"]
    options = {"--" + name.replace("_", "-"): str(about["config"][name]) for name in wanted}
    assert {name: value for name, value in rows.items() if name[0] == "-"} == options | {"--model": "bert.json"}
    monkeypatch.chdir(trained)
    (code,), names = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL), {}
    exec(code, names)
    assert isinstance(names["model"], type(AutoModelForMaskedLM.from_pretrained(path)))
    assert len(names["tokenizer"]) == dataset.special_tokens.vocab_size


def test_a_card_says_on_which_rows_its_loss_was_measured_and_names_no_directories(
    dataset, bert_run, tmp_path, monkeypatch
):
    """Also of a checkpoint in a phase with other rows than the phase that was evaluated."""
    monkeypatch.chdir(tmp_path)
    data, start = (os.path.relpath(path) for path in (dataset.path, bert_run))
    options = {"init": start, "steps": 8, "eval_every": 3, "eval_masking": 0.2, "phase": changing(0.5, length=[16, 32])}
    train(data, tmp_path / "run", **options)
    for step, evaluated, length in ((5, 3, 16), (8, 8, 32)):
        rows = cells(tmp_path / "run" / f"step-{step:08d}")
        assert rows["after step"] == str(evaluated)
        assert f" rows of {length} tokens of the validation split, 20% " in rows["measured on"]
    assert rows["--init"] == "run"
    text = (tmp_path / "run" / "step-00000008" / "README.md").read_text()
    assert "/" not in "".join(line for line in text.splitlines() if line.startswith("| phase"))
    assert text.count(f" | `{dataset.dataset_id}`, ") == 2


FULL, LOCAL = "full_attention", "sliding_attention"
READ_BY_4 = [  # type and settings of a model, and the names that transformers 4 reads, if it does
    ("bert", {}, {}),
    ("bert", {"tie_word_embeddings": False}, None),
    ("eurobert", {}, None),
    ("luke", {}, None),
    ("deberta-v2", {"legacy": False}, None),
    ("modernbert", {}, {"every_n_layers": 3, "global": 160_000.0, "local": 10_000.0}),
    ("modernbert", {"layer_types": [FULL] * 2, "num_hidden_layers": 2}, {"every_n_layers": 1}),
    ("modernbert", {"layer_types": [FULL, LOCAL, FULL], "num_hidden_layers": 3}, {"every_n_layers": 2}),
    ("modernbert", {"layer_types": [FULL, FULL, LOCAL], "num_hidden_layers": 3}, None),
    ("modernbert", {"rope_parameters": {LOCAL: {"rope_type": "default", "rope_theta": 20.0}}}, {"local": 20.0}),
    ("modernbert", {"rope_parameters": {FULL: {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}}, None),
]


@pytest.mark.parametrize(("kind", "settings", "names"), READ_BY_4)
def test_a_card_says_which_transformers_read_a_model(kind, settings, names):
    config, bar = AutoConfig.for_model(kind, **settings), {"Options": {"--trains": "embeddings|head"}}
    text = card.content("x", "", config=config, parts=bar).decode()
    assert "\n| --trains | embeddings\\|head |\n" in text
    assert ("\ntransformers 4.57 and newer " in text) == (names is not None)
    found = {"every_n_layers": "global_attn_every_n_layers", "global": "global_rope_theta", "local": "local_rope_theta"}
    assert names is None or {name: config.to_dict()[found[name]] for name in names} == names


def test_an_edited_card_is_kept_and_harms_no_checkpoint(trained, dataset, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    options = OPTIONS | {"model": json.loads((run / "run.json").read_bytes())["config"]["model"]}
    last = run / "step-00000004"
    (last / "README.md").write_text("mine\n")
    (last / "model.safetensors").write_bytes(b"damaged")
    train(dataset.path, run, elastic="layers=1:3", **options)
    assert (run / "damaged-00000004" / "README.md").read_text() == "mine\n"
    (last / "README.md").write_text("mine\n")
    train(dataset.path, run, elastic="layers=1:3", **options)
    assert (last / "README.md").read_text() == "mine\n"
    (last / "README.md").unlink()
    assert checkpoint.find(run) == last


def test_the_command_of_the_page_sends_the_model_and_not_the_state_of_the_run(trained):
    page = (ROOT / "docs" / "records.md").read_text()
    (command,) = re.findall(r"^    hf (upload .*)$", page, re.MULTILINE)
    words = shlex.split(command)
    left_out = [value for word, value in itertools.pairwise(words) if word == "--exclude"]
    names = [path.name for path in (trained / "step-00000004").iterdir()]
    sent = filter_repo_objects(names, ignore_patterns=left_out)
    assert sorted(sent) == ["README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def test_a_fine_tuned_model_has_a_card_which_may_be_edited(trained, tmp_path):
    data, path = write_labelled(tmp_path / "train.tsv"), tmp_path / "tuned" / "seed-0" / "README.md"
    command = ["finetune", *tuning(trained, data, tmp_path / "tuned")]
    succeeds(main, *command)
    (run,) = json.loads((tmp_path / "tuned" / "result.json").read_bytes())["runs"]
    about, rows = ModelCard.load(path), cells(path.parent)
    assert (about.data.license, rows["rows"], rows["epochs"]) == ("other", "6", "1")
    assert rows["dev accuracy"] == f"{run['dev']['accuracy']:.4f}"
    assert " `step-00000004`" in about.text
    path.write_text("mine\n")
    succeeds(main, *command)
    assert path.read_text() == "mine\n"
