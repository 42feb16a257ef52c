"""Sentence embeddings that mteb rates, and checkpoints that transformers 4 reads.

Both libraries are in environments of their own, which are made in .bench if they are not there.
"""

import importlib
import os
import re
import subprocess
from functools import partial

import pytest
from support.commands import python
from support.data import ROOT
from support.families import model_of

from bertrain import checkpoint
from bertrain.models.load import tokenizer_files

PAGE = (ROOT / "docs" / "finetuning.md").read_text()
PINS = {"mteb": ["mteb==2.26.24"], "transformers": ["transformers==4.57.3"]}


def script(name):
    """A script of the page, with few and small steps."""
    (text,) = re.findall(rf'```python\n("""python {name}\.py.*?)```', PAGE, re.DOTALL)
    return text.replace("STEPS, ROWS, RATE = 500, 32, 5e-5", "STEPS, ROWS, RATE = 50, 4, 1e-3")


@pytest.fixture
def outside(monkeypatch):
    """outside(library, directory, *words): what a command of an environment prints there."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    environments = importlib.import_module("environments")

    def run(library, directory, *words):
        monkeypatch.setitem(environments.PINS, library, PINS[library])
        python = environments.python_of(library, ROOT / ".bench")
        around = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([python, "-s", *words], cwd=directory, env=around, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.outside
def test_mteb_gives_a_tuned_model_the_figure_that_was_printed(dataset, bert_run, outside, tmp_path):
    """So it was saved, too."""
    for name in ("embeddings", "search_task"):
        (tmp_path / f"{name}.py").write_text(script(name))
    given = dataset.path, bert_run / "step-00000002", tmp_path / "embeddings"
    printed = python(tmp_path / "embeddings.py", *given, environment={"PYTHONPATH": str(ROOT)})
    _, score = re.findall(r"ndcg@10 ([\d.]+)", printed)
    rated = outside("mteb", tmp_path, "search_task.py", dataset.path, "embeddings").split()[-1]
    assert float(rated) == pytest.approx(float(score), abs=1e-4)


LOSSES = """if True:
    import sys, torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer, __version__

    ids = torch.arange(64).view(2, 32) % 70 + 5
    for path in sys.argv[1:]:
        loss = AutoModelForMaskedLM.from_pretrained(path)(input_ids=ids, labels=ids).loss.item()
        print(__version__[0], f"{loss:.5f}", AutoTokenizer.from_pretrained(path)("river light")["input_ids"])
"""


@pytest.mark.outside
def test_transformers_4_gives_the_same_losses(dataset, configs, outside, tmp_path):
    """Also of a ModernBERT with a local layer. Weights are large, so that attention counts."""
    for name in ("modernbert-tiny", "modernbert", "bert"):
        model = model_of(configs.get(name, name), dataset)
        for weight in model.state_dict().values():
            weight *= 8 if weight.ndim > 1 else 1
        files = tokenizer_files(dataset.tokenizer_file, model, 32)
        checkpoint.write(tmp_path / name, model, checkpoint.Content(model.state_dict(), {}, files))
    paths = sorted(map(str, tmp_path.glob("*")))
    old, new = (run("-c", LOSSES, *paths) for run in (partial(outside, "transformers", tmp_path), python))
    assert [line[1:] for line in old.splitlines()] == [line[1:] for line in new.splitlines()]
    assert [line[0] for line in old.splitlines()] == ["4"] * 3
