"""Masked diffusion: the losses of an independent loop, and the example that fills in a text."""

import math
import runpy
import sys

import pytest
import torch
from support.data import ROOT
from support.runs import QUIET, last_checkpoint, run_of, train

import bertdata
from bertrain.config import Config
from bertrain.data import build_loader

OPTIONS = QUIET | {"objective": "diffusion", "masking": "uniform", "steps": 4}


def test_a_step_has_the_loss_and_the_gradient_of_transformers(dataset, tmp_path):
    entry = train(dataset.path, tmp_path / "run", **OPTIONS)[0]
    config = Config.make(data=str(dataset.path), out=str(tmp_path / "x"), length=32, global_batch_size=6, **OPTIONS)
    model, special = run_of(config).trainer.learner.model.train(), dataset.special_tokens
    batch = next(build_loader(config, dataset))
    ids, labels = torch.from_numpy(batch.input_ids), torch.from_numpy(batch.labels)
    is_masked = labels != bertdata.IGNORE_INDEX
    assert (ids[is_masked] == special.mask).all()
    may_be_masked = ~torch.isin(ids.where(~is_masked, labels), torch.tensor([*special.special_ids, special.unk]))
    total = right = torch.zeros(())
    for row, places in enumerate(may_be_masked.sum(1)):
        output = model(input_ids=ids[None, row], labels=labels[None, row])  # the mean over the masked tokens
        total = total + output.loss * places
        right = right + (output.logits[0].argmax(-1) == labels[row])[is_masked[row]].float().mean() * places
    (total / may_be_masked.sum()).backward()
    expected = [each.item() / may_be_masked.sum().item() for each in (total, right)]
    expected.append(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf).item())
    assert [entry[name] for name in ("loss", "accuracy", "grad_norm")] == pytest.approx(expected, rel=1e-4)


def test_the_example_fills_in_half_of_a_row(dataset, tmp_path, monkeypatch, capsys):
    train(dataset.path, tmp_path / "run", **OPTIONS | {"length": 64})
    monkeypatch.setattr(sys, "argv", ["denoise", str(last_checkpoint(tmp_path / "run")), str(dataset.path)])
    runpy.run_path(str(ROOT / "examples" / "denoise.py"), run_name="__main__")
    hidden = [line.count("[MASK]") for line in capsys.readouterr().out.splitlines() if line.startswith("round ")]
    assert hidden == sorted(hidden, reverse=True)
    assert (len(hidden), hidden[0] > 9, hidden[-1]) == (5, True, 0)
