"""Short runs of crash.py and campaign.py, the faults of injected.py, and the results that freeze.py keeps."""

import contextlib
import json
import re
import subprocess
import sys

import campaign
import freeze
import injected
import pytest
import torch
from safetensors.torch import save_file
from support.commands import python
from support.data import ROOT

# -------------------------------------------------------------------------------------------------------------- crashes


CRASH = ROOT / "tools" / "crash.py"


def findings(*arguments):
    """The objects that a campaign prints, one for each command; it must find nothing."""
    printed = python(CRASH, *arguments, timeout=300).splitlines()
    return {found["command"]: found for found in map(json.loads, printed)}


@pytest.mark.parametrize("commands", ["export", pytest.param("build,merge", marks=pytest.mark.slow)])
def test_neither_a_crash_nor_a_call_that_failed_loses_anything(commands):
    is_export = commands == "export"
    found = findings("states", "--only", commands, "--most", 12, "--replays", 1000 if is_export else 10)
    failed = findings("calls", "--only", commands, "--errors", "EIO,ENOSPC", "--every", 9 if is_export else 67)
    assert found.keys() == failed.keys() == {*commands.split(",")}
    assert all(facts["states"] > 30 for facts in found.values())
    assert not is_export or found["export"]["covered"] == found["export"]["states"]
    assert all(facts["failed"] > 5 for facts in failed.values())


@pytest.mark.slow
def test_injected_faults_are_found():
    """A missing sync. `mutate.py faults crash` injects all."""
    words = ("faults", "crash", "--only", "the last name of a stage comes first")
    assert python(CRASH.with_name("mutate.py"), *words).endswith("1 of 1 faults are found\n")


# ----------------------------------------------------------------------------------------------------- campaign of runs


TOOL = ROOT / "tools" / "campaign.py"


@pytest.mark.slow
def test_runs_of_any_options_end_as_if_nothing_had_happened(tmp_path):
    command = [sys.executable, str(TOOL), "--count", "8", "--minutes", "0.25", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^[1-9]\d* runs \(.*; 0 differ$", done.stdout, re.MULTILINE), done.stdout


# --------------------------------------------------------------------------------------------------------- differences


def run_in(folder, log, *, weight=0.0, moment=0.5, loader=4, seconds=1.0):
    """What a run of two steps leaves, as far as it is compared."""
    saved = folder / "step-00000002"
    saved.mkdir(parents=True)
    entries = [{"step": 0, "stream": {"position": seconds}}, *({"seconds": seconds} | entry for entry in log)]
    (folder / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (folder / "run.json").write_text(json.dumps({"config": {"keep": 1}}))
    (saved / "README.md").write_text(f"trained {seconds} s")
    (saved / "trainer.json").write_text(json.dumps({"loader": {"position": loader}, "seconds": {"trained": seconds}}))
    save_file({"weight": torch.tensor([1.0, weight])}, saved / "model.safetensors")
    torch.save({"state": {0: {"exp_avg": torch.tensor(moment)}}}, saved / "optimizer.pt")
    return folder


LOG = [{"step": step, "lr": 0.1, "loss": float(step)} for step in (1, 2)]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seconds": 2.0}, ""),
        ({"weight": -0.0}, "model.safetensors: weight"),
        ({"moment": 0.25}, "optimizer.pt: state.0.exp_avg"),
        ({"loader": 5}, "trainer.json: loader.position"),
        ({"log": LOG[1:]}, "step 1: "),
        ({"log": [*LOG, LOG[1]]}, "[1, 2] -> [1, 2, 2]"),
        ({"log": [LOG[0], LOG[1] | {"loss": 2.0000000000000004}]}, "step 2: loss 2.0 -> 2.0000000000000004"),
    ],
)
def test_what_differs_is_named(tmp_path, changes, named):
    whole = run_in(tmp_path / "whole", LOG)
    stopped = run_in(tmp_path / "stopped", **{"log": LOG} | changes)
    lines = list(campaign.differences(whole, stopped, is_asked=False))
    assert (lines == []) if not named else any(named in line for line in lines), lines


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


BUILDS = "wordpiece", "bpe", "chinese"
RUNS = "bert", "nsp", "packed", "lengths", "mix", "muon-bert", "grow", "elastic", "lora", "relations", "logits"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs scenarios by name, once each, in one folder; returns their results, name → result."""
    folder, results = tmp_path_factory.mktemp("frozen"), {}
    freeze.prepare(folder)
    lines = {name: line for stage in freeze.scenarios() for name, line in stage.items()}

    def results_of(*names):
        with contextlib.chdir(folder):
            for name in names:
                results[name] = results.get(name) or freeze.scenario(lines[name])
        return {name: results[name] for name in names}

    return results_of


@pytest.mark.parametrize("build", BUILDS)
def test_a_build_gives_the_same_arrays_as_ever(run, build):
    assert freeze.beyond(run(build)) == []


@pytest.mark.slow
def test_runs_give_the_same_figures_as_ever_but_for_rounding(run):
    run("wordpiece", "jsonl", "dedup", "bert", "modernbert")  # what the others read
    assert freeze.beyond(run(*RUNS)) == []
