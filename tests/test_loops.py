"""The examples of loops: they are short, and a run that goes on gets the batches that follow."""

import inspect
import json
import runpy
import sys

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from support.data import ROOT
from transformers import BertForMaskedLM

import bertdata
from bertdata.torch import tensors

EXAMPLES = ROOT / "examples"


@pytest.fixture
def seen(monkeypatch):
    """The ids that models are given, a batch each."""
    ids = []
    forward = BertForMaskedLM.forward

    def remembered(self, *arguments, **named):
        ids.append(named["input_ids"].clone())
        return forward(self, *arguments, **named)

    remembered.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(BertForMaskedLM, "forward", remembered)
    return ids


def run(name, shards, out, steps, monkeypatch):
    for kind in (AcceleratorState, GradientState, PartialState):
        kind._reset_state()
    monkeypatch.setattr(sys, "argv", [name, str(shards), str(out), str(steps)])
    with monkeypatch.context() as patched:
        patched.setenv("ACCELERATE_USE_CPU", "true")
        return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["trainer", "accelerate_loop"])
@pytest.mark.slow
def test_an_example_trains_and_goes_on_with_the_batches_that_follow(dataset, tmp_path, monkeypatch, seen, name):
    threads = torch.get_num_threads()
    run(name, dataset.path, tmp_path / "out", 3, monkeypatch)
    if name == "trainer":
        (tmp_path / "out" / "checkpoint-4").mkdir()  # that a kill has left unfinished
    run(name, dataset.path, tmp_path / "out", 5, monkeypatch)
    torch.set_num_threads(threads)
    loader = bertdata.Loader(bertdata.open(dataset.path), length=64, global_batch_size=32)
    expected = [tensors(next(loader))["input_ids"] for _ in range(5)]
    assert all(torch.equal(ids.cpu(), batch) for ids, batch in zip(seen, expected, strict=True))
    checkpoints = {"trainer": "checkpoint-5", "accelerate_loop": "step-00000005"}
    assert (tmp_path / "out" / checkpoints[name]).is_dir()
    if name == "trainer":
        state = json.loads((tmp_path / "out" / "checkpoint-5" / "loader.json").read_text())
        assert state["position"] == 5 * 32
