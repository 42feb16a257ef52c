"""tools/campaign.py: a few of its runs, and faults of many kinds that it must find."""

import json
import random
import re
import subprocess
import sys
import time

import campaign
import pytest
import torch
from conftest import ROOT
from safetensors.torch import save_file

from bertdata.errors import UsageError
from bertrain.config import Config

TOOL = ROOT / "tools" / "campaign.py"


@pytest.mark.slow
def test_runs_of_any_options_end_as_if_nothing_had_happened(tmp_path):
    command = [sys.executable, str(TOOL), "--count", "8", "--minutes", "0.25", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^[1-9]\d* runs \(.*; 0 differ$", done.stdout, re.MULTILINE), done.stdout


def test_a_rank_that_hangs_is_ended_and_says_where(tmp_path, monkeypatch):
    monkeypatch.setattr(campaign, "LIMIT_S", 1)
    ranks = campaign.start(lambda: time.sleep(600), 2, tmp_path, tmp_path / "said")
    assert campaign.watched(ranks, tmp_path / "run", None, 0).hangs
    assert not any(rank.is_alive() for rank in ranks)
    assert "test_campaign.py" in (tmp_path / "said").read_text()


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


def test_a_run_that_was_asked_to_end_has_an_entry_more(tmp_path):
    """That entry, and the means of the next one, which is about the steps after it, are not compared."""
    log = [{"step": step, "lr": 0.1, "grad_norm": 2.0, "loss": float(step)} for step in (3, 6, 9)]
    early = [log[0], log[1] | {"step": 4, "loss": 8.0}, log[1] | {"loss": 7.0}, log[2]]
    whole = run_in(tmp_path / "whole", log)
    assert list(campaign.differences(whole, run_in(tmp_path / "early", early), is_asked=True)) == []
    assert list(campaign.differences(whole, run_in(tmp_path / "killed", early), is_asked=False)) != []
    for number, wrong in enumerate((log[1] | {"grad_norm": 3.0}, log[2] | {"loss": 8.0})):
        entries = [wrong if entry["step"] == wrong["step"] else entry for entry in early]
        other = run_in(tmp_path / f"wrong{number}", entries)
        assert len(list(campaign.differences(whole, other, is_asked=True))) == 1


# ------------------------------------------------------------------------------------------------------------- options


def test_each_alternative_is_drawn_and_few_are_refused():
    runs = [campaign.drawn(random.Random(f"0 {number}"), [1, 2, 3], 6) for number in range(400)]
    assert runs[7] == campaign.drawn(random.Random("0 7"), [1, 2, 3], 6)
    assert {run.ranks for run in runs} == {1, 2, 3}
    for alternative in (alternative for dimension in campaign.DIMENSIONS for alternative in dimension):
        assert any(alternative.items() <= run.options.items() for run in runs), alternative
    assert any("phase" in run.options for run in runs)
    refused = 0
    for run in runs:
        try:
            Config.of(**run.options)
        except UsageError:
            refused += 1
    assert refused < 60
