"""Short runs of crash.py and campaign.py, the faults of injected.py, and the results that freeze.py keeps."""

import contextlib
import json
import re
import shutil
import subprocess
import sys

import campaign
import freeze
import injected
import pytest
import torch
from support.commands import python
from support.data import ROOT
from support.disk import flip

# -------------------------------------------------------------------------------------------------------------- crashes


CRASH = ROOT / "tools" / "crash.py"


def findings(*arguments):
    """The objects that a campaign prints, one for each command; it must find nothing."""
    printed = python(CRASH, *arguments, timeout=300).splitlines()
    return {found["command"]: found for found in map(json.loads, printed)}


@pytest.mark.slow
@pytest.mark.parametrize("commands", ["export", "build,merge"])
def test_neither_a_crash_nor_a_call_that_failed_loses_anything(commands):
    is_export = commands == "export"
    found = findings("states", "--only", commands, "--most", 8, "--replays", 1000 if is_export else 10)
    failed = findings("calls", "--only", commands, "--errors", "EIO,ENOSPC", "--every", 13 if is_export else 101)
    assert found.keys() == failed.keys() == {*commands.split(",")}
    assert all(facts["states"] > 30 for facts in found.values())
    assert not is_export or found["export"]["covered"] == found["export"]["states"]
    assert all(facts["failed"] > 5 for facts in failed.values())


# ----------------------------------------------------------------------------------------------------- campaign of runs


TOOL = ROOT / "tools" / "campaign.py"


@pytest.mark.slow
def test_runs_of_any_options_end_as_if_nothing_had_happened(tmp_path):
    command = [sys.executable, str(TOOL), "--count", "2", "--minutes", "0.1", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^[1-9]\d* runs \(.*; 0 differ$", done.stdout, re.MULTILINE), done.stdout


# --------------------------------------------------------------------------------------------------------- differences


def replaced(old, new):
    return lambda path: path.write_text(path.read_text().replace(old, new, 1))


CHANGES = {  # file of a run → what changes it
    "step-00000006/model.safetensors": lambda path: flip(path, -1),
    "step-00000006/optimizer.pt": lambda path: torch.save({"state": {}}, path),
    "step-00000006/trainer.json": replaced('"position": ', '"position": 1'),
    "log.jsonl": replaced('"loss": ', '"loss": 1'),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_differs_is_named(finished, tmp_path, name):
    stopped = shutil.copytree(finished, tmp_path / "run")
    (stopped / "step-00000006" / "README.md").write_text("it has times")
    assert [*campaign.differences(finished, stopped, is_asked=False)] == []
    CHANGES[name](stopped / name)
    (line,) = campaign.differences(finished, stopped, is_asked=False)
    assert line.startswith("step 1: loss " if name == "log.jsonl" else f"{name}: ")


# ------------------------------------------------------------------------------------------------------ injected faults


@pytest.mark.parametrize("fault", [*injected.CRASH, *injected.GPU], ids=lambda fault: fault.what)
def test_every_fault_changes_the_source_and_something_should_find_it(fault):
    source = (ROOT / fault.file).read_text()
    changed = fault.inject(source)
    assert changed != source
    compile(changed, fault.file, "exec")
    if "::" in fault.finder:
        file, function = fault.finder.split("[")[0].split("::")
        assert f"def {function}(" in (ROOT / file).read_text()
    with pytest.raises(AssertionError, match="correct tools/injected.py"):
        fault.inject("")


# ------------------------------------------------------------------------------------------------------- frozen results


def beyond(folder, *names, before=()):
    """Runs scenarios by name, in a folder, after others that they read; how their results differ from what was kept."""
    freeze.prepare(folder)
    lines = {name: line for stage in freeze.scenarios() for name, line in stage.items()}
    with contextlib.chdir(folder):
        results = {name: freeze.scenario(lines[name]) for name in (*before, *names)}
    return freeze.beyond({name: results[name] for name in names})


def test_builds_give_the_same_arrays_as_ever(tmp_path):
    assert beyond(tmp_path, "wordpiece", "bpe", "chinese") == []


@pytest.mark.slow
def test_runs_give_the_same_figures_as_ever_but_for_rounding(tmp_path):
    names = ["bert", "nsp", "packed", "lengths", "mix", "muon-bert", "grow", "elastic", "lora", "relations", "logits"]
    assert beyond(tmp_path, *names, before=["wordpiece", "jsonl", "dedup", "modernbert"]) == []
