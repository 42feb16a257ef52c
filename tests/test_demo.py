"""The demo: all its steps on a small text, what is there used again, and directories that it must not use."""

import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from transformers import AutoModelForMaskedLM

import bertdata
from bertdata import cli
from bertdata.errors import InputError
from bertdata.sources import docstrings
from bertrain import demo

ROOT = Path(__file__).parent.parent


@pytest.fixture
def quick(corpus, monkeypatch):
    """The demo with two steps of training on a small text. Gives how often the text was made."""
    made = []

    def write(path, num_bytes):
        made.append(num_bytes)
        path.write_bytes(corpus.read_bytes())
        return 1, path.stat().st_size

    monkeypatch.setattr(docstrings, "write", write)
    monkeypatch.setattr(demo, "BUILD", ("--vocab-size", "150", "--validation", "0.2"))
    monkeypatch.setattr(demo, "ROWS", ("--length", "16", "--global-batch-size", "4"))
    monkeypatch.setattr(demo, "STEPS", 2)
    monkeypatch.setattr(demo, "TRAIN", ("--steps", "2", "--save-every", "1", "--model", "bert-tiny"))
    return made


def run(out):
    result = CliRunner().invoke(demo.main, ["--out", str(out)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def commands(result):
    return [line.split()[1:3] for line in result.stdout.splitlines() if line.startswith("$ ")]


def test_the_demo_goes_the_whole_way_and_uses_again_what_is_there(quick, tmp_path):
    first = run(tmp_path / "demo")
    assert first.exit_code == 0, first.output
    steps = [["bertdata", "inspect"], ["bertdata", "verify"], ["bertrain", "pretrain"], ["bertrain", "evaluate"]]
    assert commands(first) == [["bertdata", "build"], *steps]
    for shown in ("sound", "done: ", "nats a token", "| Predicted"):
        assert shown in first.stdout
    assert first.stdout.splitlines()[-1].startswith('python -c "from transformers import AutoModelForMaskedLM')
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "demo" / "run" / "step-00000002")
    assert model.config.vocab_size == bertdata.open(tmp_path / "demo" / "shards").special_tokens.vocab_size == 150
    again = run(tmp_path / "demo")
    assert (again.exit_code, commands(again), quick) == (0, steps, [demo.CORPUS_BYTES])


def test_a_failed_step_ends_the_demo(quick, tmp_path):
    assert run(tmp_path / "demo").exit_code == 0
    next((tmp_path / "demo" / "shards").glob("train-*.tokens.npy")).write_bytes(b"damaged")
    result = run(tmp_path / "demo")
    assert result.exit_code == 1
    assert ["bertrain", "pretrain"] not in commands(result)


@pytest.mark.parametrize("kind", ["file", "below a file", "of others", "of mine", "read-only"])
def test_a_directory_that_the_demo_cannot_use_is_one_sentence(tmp_path, monkeypatch, kind):
    out = tmp_path / "demo"
    if kind in ("file", "below a file"):
        out.write_text("x")
        out = out / "below" if kind != "file" else out
    else:
        out.mkdir()
    if kind == "of others":
        (out / "thesis.tex").write_text("x")
    if kind == "of mine":  # as the README names it
        (out / "corpus.txt").write_text("x")
    if kind == "read-only":  # also for root, whom no mode of a directory stops
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    before = sorted(tmp_path.rglob("*"))
    result = run(out)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"Error: --out {out} ")
    assert line.endswith(("; give another directory", "; give a new directory"))
    assert sorted(tmp_path.rglob("*")) == before


def test_bertdata_becomes_the_process_that_trains(monkeypatch):
    """It does not import bertrain, and nothing of it stays in memory."""
    started = []
    monkeypatch.setattr(os, "execv", lambda path, words: started.append((path, words)))
    assert CliRunner().invoke(cli.main, ["demo", "--out", "x"]).exit_code == 0
    assert started == [(sys.executable, [sys.executable, "-m", "bertrain", "demo", "--out", "x"])]


def test_the_arguments_whose_loss_and_time_are_stated():
    assert demo.BUILD == ("--vocab-size", "2000")
    assert demo.ROWS == ("--length", "64", "--global-batch-size", "32")
    assert demo.TRAIN == ("--steps", "1600", "--eval-every", "400", "--save-every", "400")
    assert "\n\t$(BIN)/bertdata demo\n" in (ROOT / "Makefile").read_text()


def test_a_corpus_is_of_docstrings_without_blank_lines_and_without_repetition(tmp_path, monkeypatch):
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        words = f"{text} word " * 30
        (tmp_path / f"{name}.py").write_text(f'"""{words}\n\n    more\n    """\n\ndef f():\n    """short"""\n')
    monkeypatch.setattr(docstrings, "sources", lambda: sorted(tmp_path.glob("*.py")))
    assert docstrings.write(tmp_path / "all.txt", 10**6)[0] == 2
    documents = (tmp_path / "all.txt").read_text().rstrip("\n").split("\n\n")
    assert sorted(text.split()[0] for text in documents) == ["one", "two"]
    assert all(text.endswith("\nmore") for text in documents)
    assert docstrings.write(tmp_path / "some.txt", 1)[0] == 1
    assert (tmp_path / "some.txt").read_text().rstrip("\n") == documents[0]
    monkeypatch.setattr(docstrings, "sources", list)
    with pytest.raises(InputError, match="no docstrings"):
        docstrings.write(tmp_path / "none.txt", 1)
    assert not (tmp_path / "none.txt").exists()
