"""--log-to: what a tracker gets, a record that goes on, and trackers that fail. wandb and trackio are stand-ins."""

import re
import shlex
import sys
from types import SimpleNamespace

import pytest
from support.commands import succeeds
from support.data import ROOT
from support.runs import QUIET, TINY, entries, refused_run, train

from bertdata.errors import install
from bertrain import trackers
from bertrain.pretrain import main as pretrain_command

OPTIONS = QUIET | {"steps": 4, "eval_every": 2}


class Library:
    """Stands for wandb and trackio: keeps what it gets."""

    def __init__(self, mode="offline"):
        self.mode, self.begun, self.rows, self.ended = mode, [], [], 0
        self.fault = None  # raised at what is sent
        self.Settings = lambda **settings: settings

    def setup(self):
        return SimpleNamespace(settings=SimpleNamespace(mode=self.mode))

    def login(self, *, prompt, verify):
        assert (prompt, verify) == (False, False)
        return self.mode == "online"

    def init(self, **options):
        self.begun.append(options)
        return self

    def log(self, numbers, *, step):
        if self.fault:
            raise self.fault
        self.rows.append((step, numbers))

    def finish(self):
        self.ended += 1


@pytest.fixture
def library(monkeypatch):
    library = Library()
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, library)
    return library


def expected(out):
    """What a tracker gets of the entries of log.jsonl."""
    rows = []
    for entry in entries(out):
        numbers = {name: value for name, value in entry.items() if isinstance(value, (int, float)) and name != "step"}
        rows.append((entry["step"], {name.replace("validation_", "validation/"): v for name, v in numbers.items()}))
    return rows


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_the_numbers_of_the_log_and_a_run_continues_its_record(dataset, tmp_path, library, name):
    out = tmp_path / "run"
    train(dataset.path, out, log_to=(name,), **OPTIONS | {"steps": 2})
    first = expected(out)
    assert library.rows == first
    assert any("validation/loss" in numbers for _, numbers in first)
    (begun,) = library.begun
    assert begun["config"]["steps"] == 2
    assert begun["project"] == "bertrain"
    assert library.ended == 1
    times = {"init_timeout": trackers.ANSWER_S, "finish_timeout": trackers.ANSWER_S}
    wandb = {"name": "run", "dir": str(out), "resume": None, "settings": {"console": "off"} | times}
    assert {"wandb": wandb, "trackio": {"resume": "allow", "embed": False}}[name].items() <= begun.items()
    train(dataset.path, out, log_to=(name,), **OPTIONS)
    assert library.rows == expected(out)
    again = library.begun[1]
    record = (out / "record-id").read_text().strip()
    assert re.fullmatch("[0-9a-f]{8}", record)
    assert {begun.get("id", begun["name"]), again.get("id", again["name"])} in ({record}, {f"run-{record}"})
    train(dataset.path, tmp_path / "other", log_to=(name,), **OPTIONS | {"steps": 1})
    assert (tmp_path / "other" / "record-id").read_text().strip() != record


def test_without_an_account_the_run_is_told_what_to_do_and_nobody_is_asked(tmp_path, library):
    library.mode, faults = "run", []
    record = trackers.Trackers(["wandb"], tmp_path, {}, step=0, warn=faults.append)
    record.write({"step": 1, "loss": 1.0})
    record.close()
    assert ["wandb login" in fault and "WANDB_MODE=offline" in fault for fault in faults] == [True]
    assert library.begun == library.rows == []
    library.mode = "online"
    trackers.Trackers(["wandb"], tmp_path, {}, step=0, warn=faults.append).close()
    assert ([begun["resume"] for begun in library.begun], len(faults)) == (["allow"], 1)


def test_a_tracker_that_fails_ends_no_run_and_is_a_warning(dataset, tmp_path, library, capsys):
    library.fault = OSError("the disk is full\nof logs")
    log = train(dataset.path, tmp_path / "run", log_to=("trackio",), **OPTIONS)
    assert log[-1]["step"] == 4
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "--log-to" in line)
    assert line.startswith("warning: --log-to trackio ")
    assert line.endswith(": the disk is full")


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_a_library_that_is_missing_is_one_sentence_before_the_run(dataset, tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    refusal = refused_run(dataset.path, tmp_path / "run", log_to=name, kind="not-installed", option="log_to")
    assert (refusal.given, install(name) in refusal.sentence) == (name, True)
    assert not (tmp_path / "run" / "log.jsonl").exists()


def test_the_commands_of_the_page_run(dataset, tmp_path, library, monkeypatch):
    page = (ROOT / "docs" / "records.md").read_text()
    lines = re.findall(r"^    bertrain pretrain (.* --log-to .*)$", page, re.MULTILINE)
    assert len(lines) == 2
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shards").symlink_to(dataset.path)
    small = ["--model", TINY, "--global-batch-size", "4", "--length", "16"]
    for number, line in enumerate(lines):
        succeeds(pretrain_command, *shlex.split(line), *small, "--steps", number + 1)
    assert len(library.begun) == 2
    assert list((tmp_path / "run" / "tensorboard").iterdir())
