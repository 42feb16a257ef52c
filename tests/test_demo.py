"""The demo: all its steps on a small text, what is there used again, and directories that it must not use."""

import os
import sys

import pytest
from support.commands import invoke, refused, succeeds
from support.disk import write
from transformers import AutoModelForMaskedLM

import bertdata
from bertdata import cli
from bertrain.commands import demo, docstrings


@pytest.fixture
def quick(corpus, monkeypatch):
    """The demo with two steps of training on a small text. Gives how often the text was made."""
    sizes = []

    def write(path, num_bytes):
        sizes.append(num_bytes)
        path.write_bytes(corpus.read_bytes())
        return 1, path.stat().st_size

    monkeypatch.setattr(docstrings, "write", write)
    monkeypatch.setattr(demo, "BUILD", ("--vocab-size", "150", "--validation", "0.2"))
    monkeypatch.setattr(demo, "ROWS", ("--length", "16", "--global-batch-size", "4"))
    monkeypatch.setattr(demo, "STEPS", 2)
    monkeypatch.setattr(demo, "TRAIN", ("--steps", "2", "--save-every", "1", "--model", "bert-tiny"))
    return sizes


def commands(result):
    return [line.split()[1:3] for line in result.stdout.splitlines() if line.startswith("$ ")]


def test_the_demo_goes_the_whole_way_and_uses_again_what_is_there(quick, tmp_path):
    first = succeeds(demo.main, "--out", tmp_path / "demo")
    steps = [["bertdata", "inspect"], ["bertdata", "verify"], ["bertrain", "pretrain"], ["bertrain", "evaluate"]]
    assert commands(first) == [["bertdata", "build"], *steps]
    newest = tmp_path / "demo" / "run" / "step-00000002"
    assert f"done: {newest}" in first.stdout
    assert first.stdout.splitlines()[-1].startswith('python -c "from transformers import AutoModelForMaskedLM')
    model = AutoModelForMaskedLM.from_pretrained(newest)
    assert model.config.vocab_size == bertdata.open(tmp_path / "demo" / "shards").special_tokens.vocab_size == 150
    assert commands(succeeds(demo.main, "--out", tmp_path / "demo")) == steps
    assert quick == [demo.CORPUS_BYTES]
    next((tmp_path / "demo" / "shards").glob("train-*.tokens.npy")).write_bytes(b"damaged")
    result = invoke(demo.main, "--out", tmp_path / "demo")  # a failed step ends the demo
    assert result.exit_code == 1
    assert ["bertrain", "pretrain"] not in commands(result)


def test_a_directory_that_the_demo_cannot_use_is_one_sentence(tmp_path):
    file = write(tmp_path / "others" / "corpus.txt", "x")  # as the README names it
    for out, kind in ((file, "unwritable"), (file / "below", "unwritable"), (file.parent, "out-exists")):
        refused(demo.main, "--out", out, kind=kind, option="out")
        assert sorted(tmp_path.rglob("*")) == [file.parent, file]


def test_bertdata_becomes_the_process_that_trains(monkeypatch):
    """It does not import bertrain, and nothing of it stays in memory."""
    started = []
    monkeypatch.setattr(os, "execv", lambda path, words: started.append((path, words)))
    succeeds(cli.main, "demo", "--out", "x")
    assert started == [(sys.executable, [sys.executable, "-m", "bertrain", "demo", "--out", "x"])]


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
    with pytest.raises(bertdata.BertdataError):
        docstrings.write(tmp_path / "none.txt", 1)
    assert not (tmp_path / "none.txt").exists()
