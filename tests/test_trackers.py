"""--log-to: what a tracker gets, a record that goes on, and trackers that fail. wandb and trackio are stand-ins."""

import re
import sys
from unittest.mock import Mock, call

import pytest
from support.runs import QUIET, entries, refused_run, remove_after, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bertdata.errors import install
from bertrain import trackers

OPTIONS = QUIET | {"steps": 4, "eval_every": 2}


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
    out, options = tmp_path / "run", OPTIONS | {"log_to": (name,), "save_every": 1}
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
        assert train(dataset.path, tmp_path / mode, log_to=(name,), **OPTIONS)[-1]["step"] == 4
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
