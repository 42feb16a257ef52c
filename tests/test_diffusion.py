"""Masked diffusion: losses of an independent loop, and the example that fills in a text."""

import runpy
import sys

import numpy as np
import torch
from support.data import ROOT
from support.runs import PLAIN, QUIET, last_checkpoint, plain_adamw, run_of, train

import bertdata
from bertrain.config import Config
from bertrain.data import build_loader

OPTIONS = QUIET | {"objective": "diffusion", "masking": "uniform", "steps": 4, "save_every": 2}


def test_ten_steps_have_the_losses_of_transformers(dataset, tmp_path):
    given = OPTIONS | PLAIN | {"steps": 10, "save_every": 100}
    log = train(dataset.path, tmp_path / "run", **given)
    ours = [(entry["loss"], entry["accuracy"]) for entry in log if "loss" in entry]
    config = Config.make(data=str(dataset.path), out=str(tmp_path / "again"), length=32, global_batch_size=6, **given)
    model, special = run_of(config).trainer.learner.model.train(), dataset.special_tokens
    adamw = plain_adamw(model.parameters())
    loader, expected = build_loader(config, dataset), []
    for _ in range(10):
        batch = next(loader)
        labels = torch.from_numpy(batch.labels)
        ids = torch.from_numpy(batch.input_ids)
        text = ids.where(labels == bertdata.IGNORE_INDEX, labels)
        may_be_masked = ~torch.isin(text, torch.tensor([*special.special_ids, special.unk]))
        assert (ids[labels != bertdata.IGNORE_INDEX] == special.mask).all()
        total, right = torch.zeros(()), torch.zeros(())
        for row in range(len(ids)):
            output = model(input_ids=ids[None, row], labels=labels[None, row])  # the mean over the masked tokens
            total = total + output.loss * may_be_masked[row].sum()
            is_masked = labels[row] != bertdata.IGNORE_INDEX
            is_right = (output.logits[0].argmax(-1) == labels[row])[is_masked].float()
            right = right + is_right.mean() * may_be_masked[row].sum()
        loss = total / may_be_masked.sum()
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        expected.append((loss.item(), (right / may_be_masked.sum()).item()))
    assert np.allclose(ours, expected, rtol=0, atol=1e-5)


def test_the_example_fills_in_half_of_a_row(dataset, tmp_path, monkeypatch, capsys):
    train(dataset.path, tmp_path / "run", **OPTIONS | {"length": 64})
    monkeypatch.setattr(sys, "argv", ["denoise", str(last_checkpoint(tmp_path / "run")), str(dataset.path)])
    runpy.run_path(str(ROOT / "examples" / "denoise.py"), run_name="__main__")
    hidden = [line.count("[MASK]") for line in capsys.readouterr().out.splitlines() if line.startswith("round ")]
    assert hidden == sorted(hidden, reverse=True)
    assert (len(hidden), hidden[0] > 9, hidden[-1]) == (5, True, 0)
