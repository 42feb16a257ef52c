"""What a run leaves for people: the card of a checkpoint, the records of --log-to, and the page of plot --html.

Each says what run.json, trainer.json and log.jsonl say. wandb and trackio are stand-ins.
"""

import itertools
import json
import os
import re
import shlex
import shutil
import struct
import sys
from pathlib import Path
from unittest.mock import Mock, call

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects
from support.commands import refused, succeeds, tuning
from support.data import ROOT, data_of, write_labelled
from support.disk import put
from support.runs import QUIET, TINY, changing, entries, refused_run, remove_after, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoConfig, AutoModelForMaskedLM

from bertdata.errors import install
from bertrain import card, checkpoint, state, trackers
from bertrain.commands import report
from bertrain.config import Config

# ---------------------------------------------------------------------------------------------------------------- cards


OPTIONS = {"model": TINY, "elastic": "layers=1:2", "mlm_probability": 0.3}
OPTIONS |= {"steps": 4, "save_every": 2, "eval_every": 2}


@pytest.fixture(scope="module")
def trained(dataset, once):
    """A run of four steps with sub-networks. Tests must not change it."""
    return once("card", lambda folder: train(dataset.path, folder / "run", **OPTIONS)) / "run"


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
    assert {name: value for name, value in rows.items() if name[0] == "-"} == options | {"--model": "tiny.json"}
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
    assert Config.make(data="x", init="/home/me/removed since").differing()["--init"] == "removed since"
    text = (tmp_path / "run" / "step-00000008" / "README.md").read_text()
    assert "/" not in "".join(line for line in text.splitlines() if line.startswith("| phase"))
    assert text.count(f" | `{dataset.dataset_id}`, ") == 2


FULL, LOCAL = "full_attention", "sliding_attention"
READ_BY_4 = [  # type and settings of a model, and the settings that transformers 4 reads, if it does
    ("bert", {}, {}),
    ("bert", {"tie_word_embeddings": False}, None),
    ("eurobert", {}, None),
    ("luke", {}, None),
    ("deberta-v2", {"legacy": False}, None),
    ("modernbert", {}, {"global_attn_every_n_layers": 3, "global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0}),
    ("modernbert", {"layer_types": [FULL] * 2, "num_hidden_layers": 2}, {"global_attn_every_n_layers": 1}),
    ("modernbert", {"layer_types": [FULL, LOCAL, FULL], "num_hidden_layers": 3}, {"global_attn_every_n_layers": 2}),
    ("modernbert", {"layer_types": [FULL, FULL, LOCAL], "num_hidden_layers": 3}, None),
    ("modernbert", {"rope_parameters": {LOCAL: {"rope_type": "default", "rope_theta": 20}}}, {"local_rope_theta": 20}),
    ("modernbert", {"rope_parameters": {FULL: {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}}, None),
]


@pytest.mark.parametrize(("kind", "settings", "read"), READ_BY_4)
def test_a_card_says_which_transformers_read_a_model(kind, settings, read):
    config, bar = AutoConfig.for_model(kind, **settings), {"Options": {"--trains": "embeddings|head"}}
    text = card.content("x", "", config=config, parts=bar).decode()
    assert "\n| --trains | embeddings\\|head |\n" in text
    assert ("\ntransformers 4.57 and newer " in text) == (read is not None)
    assert config.to_dict() == config.to_dict() | (read or {})


def test_an_edited_card_is_kept_and_harms_no_checkpoint(trained, dataset, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    last = run / "step-00000004"
    (last / "README.md").write_text("mine\n")
    (last / "model.safetensors").write_bytes(b"damaged")
    train(dataset.path, run, **OPTIONS)
    assert (run / "damaged-00000004" / "README.md").read_text() == "mine\n"
    (last / "README.md").write_text("mine\n")
    train(dataset.path, run, **OPTIONS)
    assert (last / "README.md").read_text() == "mine\n"
    (last / "README.md").unlink()
    assert checkpoint.find(run) == last


def test_the_command_of_the_page_sends_the_model_and_not_the_state_of_the_run(trained):
    text = (ROOT / "docs" / "records.md").read_text()
    (command,) = re.findall(r"^    hf (upload .*)$", text, re.MULTILINE)
    words = shlex.split(command)
    left_out = [value for word, value in itertools.pairwise(words) if word == "--exclude"]
    names = [path.name for path in (trained / "step-00000004").iterdir()]
    sent = filter_repo_objects(names, ignore_patterns=left_out)
    assert sorted(sent) == ["README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def test_a_fine_tuned_model_has_a_card_which_may_be_edited(trained, tmp_path):
    data, path = write_labelled(tmp_path / "train.tsv"), tmp_path / "tuned" / "seed-0" / "README.md"
    command = ["finetune", *tuning(trained, data, tmp_path / "tuned")]
    succeeds("bertrain", *command)
    (run,) = json.loads((tmp_path / "tuned" / "result.json").read_bytes())["runs"]
    about, rows = ModelCard.load(path), cells(path.parent)
    assert (about.data.license, rows["rows"], rows["epochs"]) == ("other", "6", "1")
    assert rows["dev accuracy"] == f"{run['dev']['accuracy']:.4f}"
    assert " `step-00000004`" in about.text
    path.write_text("mine\n")
    succeeds("bertrain", *command)
    assert path.read_text() == "mine\n"


# -------------------------------------------------------------------------------------------------- records of trackers


TRACKED = QUIET | {"steps": 4, "eval_every": 2}


@pytest.fixture
def library(monkeypatch):
    """Stands for wandb and trackio: keeps what it gets."""
    library = Mock(begun=[], rows=[], Settings=dict)
    library.init.side_effect = lambda **options: library.begun.append(options) or library
    library.log.side_effect = lambda numbers, *, step: library.rows.append((step, numbers))
    library.setup.return_value.settings.mode = "offline"
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, library)
    return library


def expected(out):
    """(step, name) → number, of the entries of log.jsonl."""
    numbers = {}
    for entry in entries(out):
        step = entry.pop("step")
        for name, value in entry.items():
            if isinstance(value, (int, float)):
                numbers[step, name.replace("validation_", "validation/")] = value
    return pytest.approx(numbers, rel=1e-6)


def recorded(name, library, out):
    """(step, name) → number, of what a tracker got."""
    if name != "tensorboard":
        return {(step, name): value for step, numbers in library.rows for name, value in numbers.items()}
    board = EventAccumulator(str(out / "tensorboard"))
    board.Reload()
    events = [(event.step, tag, event.value) for tag in board.Tags()["scalars"] for event in board.Scalars(tag)]
    numbers = {(step, tag): value for step, tag, value in events}
    assert len(events) == len(numbers)
    return numbers


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_a_tracker_gets_the_numbers_of_the_log_and_a_run_continues_its_record(dataset, tmp_path, library, name):
    out, options = tmp_path / "run", TRACKED | {"log_to": (name,), "save_every": 1}
    train(dataset.path, out, **options | {"steps": 2})
    assert recorded(name, library, out) == expected(out)
    assert (2, "validation/loss") in recorded(name, library, out)
    remove_after(out, 1)
    train(dataset.path, out, **options)
    assert recorded(name, library, out) == expected(out)
    record = (out / "record-id").read_text().strip()
    assert re.fullmatch("[0-9a-f]{8}", record)
    if name != "tensorboard":
        assert library.finish.call_count == 2
        begun, again = library.begun
        assert (begun["config"]["steps"], begun["project"]) == (2, "bertrain")
        times = {"init_timeout": trackers.ANSWER_S, "finish_timeout": trackers.ANSWER_S}
        wandb = {"name": "run", "dir": str(out), "resume": None, "settings": {"console": "off"} | times}
        assert {"wandb": wandb, "trackio": {"resume": "allow", "embed": False}}[name].items() <= begun.items()
        assert {begun.get("id", begun["name"]), again.get("id", again["name"])} in ({record}, {f"run-{record}"})
    train(dataset.path, tmp_path / "other", **options | {"steps": 1})
    assert (tmp_path / "other" / "record-id").read_text().strip() != record


def test_a_tracker_without_an_account_or_that_fails_ends_no_run_and_is_a_warning(dataset, tmp_path, library, capsys):
    """Nobody is asked for an account, and the run is told what to do."""
    for name, mode, fault, said in (
        ("trackio", "offline", OSError("the disk is full\nof logs"), "more entries: the disk is full"),
        ("wandb", "run", None, "run wandb login, or set WANDB_MODE=offline"),
        ("wandb", "online", None, ""),
    ):
        library.setup.return_value.settings.mode, library.login.return_value = mode, mode == "online"
        library.log.side_effect, library.begun = fault, []
        assert train(dataset.path, tmp_path / mode, log_to=(name,), **TRACKED)[-1]["step"] == 4
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: --log-to ")]
        assert [line.endswith(said) for line in lines] == [True] * bool(said)
        assert [begun["resume"] for begun in library.begun] == ["allow"] * (mode != "run")
    assert library.login.call_args_list == [call(prompt=False, verify=False)] * 2


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_a_library_that_is_missing_is_one_sentence_before_the_run(dataset, tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    how = {"kind": "not-installed", "option": "log_to", "given": name, "says": install(name)}
    refused_run(dataset.path, tmp_path / "run", log_to=name, **how)
    assert not (tmp_path / "run" / "log.jsonl").exists()


# ----------------------------------------------------------------------------------------------------------------- page


GOLDEN = Path(__file__).parent / "golden" / "curves"


def page(*runs):
    return data_of(report.report([Path(run) for run in runs]))


def write(run, log, *, end=""):
    put(run / "log.jsonl", "".join(f"{json.dumps(entry)}\n" for entry in log) + end)
    return run


def step(number, loss, **more):
    return {"step": number, "loss": loss, "lr": 0.1, "tokens": 10 * number} | more


def test_the_page_has_the_numbers_and_predictions_of_the_log(finished):
    log, (found,) = entries(finished), page(finished)["runs"]
    steps, evaluations = ([entry for entry in log if name in entry] for name in ("lr", "validation_loss"))
    for name in ("step", "tokens", "loss", "accuracy", "lr", "tokens_per_s", "grad_norm"):
        assert found["points"][name] == pytest.approx([entry[name] for entry in steps], rel=1e-5)
    for name in ("loss", "accuracy"):
        expected = [entry[f"validation_{name}"] for entry in evaluations]
        assert [one[name] for one in found["evaluations"]] == pytest.approx(expected, rel=1e-5)
    kept = {entry["step"]: entry["predictions"] for entry in log if "predictions" in entry}
    assert {one["step"]: one["rows"] for one in found["predictions"]} == kept
    assert kept.keys() == {3, 6}


def test_the_page_of_three_runs_is_the_one_that_was_worked_out():
    """one: a change, a loss that rises, waits and skipped steps. two/b: numbers that are not finite, a process that was
    resumed and killed. odd: damaged lines. Of the warnings page.json has the numbers."""
    data = page(*(GOLDEN / name for name in ("one", "two/b", "odd")))
    data["warnings"] = [re.findall(r"[\d.]*\d%?", line) for line in data["warnings"]]
    assert data == json.loads((GOLDEN / "page.json").read_text())
    assert [run["name"] for run in page(GOLDEN / "one", GOLDEN / "one")["runs"]] == [str(GOLDEN / "one")] * 2


@pytest.mark.parametrize(
    ("names", "has_one"),
    [(["one", "one"], True), (["two/b", "odd"], True), (["one", "two/b"], False), (["one", "odd"], False)],
)
def test_losses_of_runs_with_different_tokenizers_are_not_ranked(names, has_one):
    """Their files differ, or the losses by guessing, where both are known."""
    runs = [GOLDEN / name for name in names]
    alone = sum(len(page(run)["warnings"]) for run in runs)
    assert (page(*runs)["has_one_tokenizer"], len(page(*runs)["warnings"])) == (has_one, alone + (not has_one))


def test_a_run_without_an_evaluation_or_options_is_drawn_and_one_without_a_step_is_refused(tmp_path):
    (found,) = (data := page(write(tmp_path / "run", [step(1, 3.0)])))["runs"]
    assert (found["evaluations"], found["best"], found["predictions"], data["options"]) == ([], None, [], [])
    assert len(data["warnings"]) == 2
    empty = write(tmp_path / "empty", [{"step": 0, "stream": {"length": 8}}])
    for wrong, kind in ((empty, "empty"), (tmp_path / "none", "not-a-run")):
        refused("bertrain", "plot", wrong, "--html", tmp_path / "x.html", kind=kind, option="runs", given=str(wrong))


def test_long_logs_keep_their_peaks_and_the_page_stays_small(tmp_path):
    log = [step(n, 3.0 + 1e-5 * n, grad_norm=n / 7, tokens_per_s=n / 3) for n in range(1, 4001)]
    log[3208]["loss"] = 99.0
    evaluated = {"validation_loss": 3.0, "predictions": [["a >b< c", "b", "c"]] * 8}
    log += [{"step": n} | evaluated for n in range(1, 4001, 4)]
    runs = [write(tmp_path / f"run{n}", log) for n in range(2)]
    data = page(*runs)
    for found in data["runs"]:
        points = found["points"]
        assert len(points["step"]) == 1000
        assert (points["step"][0], points["step"][-1]) == (1, 4000)
        assert points["loss"][points["step"].index(3209)] == 99.0
        assert sorted(points["step"]) == points["step"]
        assert [one["step"] for one in found["evaluations"]][::199] == [1, 3997]
    assert [len(found["predictions"]) for found in data["runs"]] == [100, 100]


def test_a_picture_and_a_page_are_both_written_of_any_path(tmp_path):
    """A path that is not UTF-8, and is markup; lines of a damaged log."""
    name = os.fsdecode(b"<img src=x onerror=alert(1)>\xff<!--")
    evaluated = {"step": 1, "validation_loss": 1.0, "predictions": [["</script>"] * 3]}
    odd = [{"loss": "x", "lr": [], "validation_loss": {}}, {"change": 5}, {"change": {"lr": 5}}]
    odd += [{"stream": {"masking": 5}}]
    log = [step(1, 3.0, tokens_per_s=5), evaluated, *({"step": 7} | entry for entry in odd)]
    run = write(tmp_path / name, log, end="[" * 100_000)
    picture, html = tmp_path / "curves.png", tmp_path / "runs.html"
    config = json.dumps({"config": {"data": name, "model": "long"}}).encode().replace(b"long", b"\xff" * 250)
    for about in (b"[" * 100_000, b"", b"5", config):
        (run / "run.json").write_bytes(about)
        assert succeeds("bertrain", "plot", run, "--out", picture, "--html", html).output == f"{html}\n{picture}\n"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert struct.unpack(">II", picture.read_bytes()[16:24]) == (1200, 800)  # two rows of two panels
    assert html.read_text().startswith("<!doctype html>")
    assert "<img" not in html.read_text()
    data = data_of(html.read_text())
    assert data["runs"][0]["name"].endswith("/<img src=x onerror=alert(1)>?<!--")
    assert [row["values"] for row in data["options"]] == [["<img src=x onerror=alert(1)>?<!--"], ["\ufffd" * 200]]
