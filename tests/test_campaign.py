"""tools/campaign.py: a few of its runs, and faults of many kinds that it must find."""

import json
import re
import subprocess
import sys

import campaign
import pytest
import torch
from safetensors.torch import save_file
from support.data import ROOT

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
