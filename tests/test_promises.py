"""What stops a run and what it leaves: Ctrl-C, signals, memory that is used up, a reader or another machine."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from support.commands import invoke, refuses, waited
from support.data import built
from support.runs import QUIET, at_step, changing, entries, flags, train
from transformers import AutoModelForMaskedLM, AutoTokenizer

from bertrain import checkpoint, pretrain


def interrupt(number=signal.SIGINT):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("signals", [("SIGINT",), ("SIGINT", "SIGINT"), ("SIGTERM",), ("SIGUSR1",)], ids=str)
def test_a_signal_saves_and_says_what_was_saved(dataset, tmp_path, monkeypatch, signals):
    """torchrun repeats a Ctrl-C at once, and the two are one."""
    at_step(monkeypatch, "next_batch", 1, lambda: [interrupt(getattr(signal, name)) for name in signals])
    options = {"steps": 9, "save_every": 100, "eval_every": 0, "model": "bert-tiny"}
    result = invoke(pretrain.main, *flags(dataset.path, tmp_path / "run", **options))
    assert result.exit_code == (130 if signals[0] == "SIGINT" else 0)
    last = result.stdout.splitlines()[-1]
    assert ("Ctrl-C" if signals[0] == "SIGINT" else signals[0]) in last
    assert last.count("tep 2") == 2  # where it stopped, and what is saved
    assert checkpoint.newest(tmp_path / "run")[0].name == "step-00000002"


def test_a_second_ctrl_c_leaves_at_once_and_says_what_is_lost(dataset, tmp_path, monkeypatch, limit, capsys):
    limit(repeat_s=0.0)
    monkeypatch.setattr(os, "_exit", sys.exit)
    saved = tmp_path / "run" / "step-00000002"
    at_step(monkeypatch, "next_batch", 3, lambda: (waited(saved.exists), interrupt(), time.sleep(0.01), interrupt()))
    with pytest.raises(SystemExit) as ended:
        train(dataset.path, tmp_path / "run", steps=9, save_every=2, eval_every=0, model="bert-tiny")
    assert ended.value.code == 130
    last = capsys.readouterr().out.splitlines()[-1]
    assert ("step 3" in last, "tep 2" in last) == (True, True)
    assert checkpoint.newest(tmp_path / "run")[0].name == "step-00000002"


@pytest.mark.parametrize("save_every", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_a_signal_during_an_evaluation_ends_it_and_the_checkpoint_is_there(dataset, tmp_path, monkeypatch, save_every):
    """Saved before the evaluation, or after it was left; the next start evaluates what was left out."""
    out, options = tmp_path / "run", {"steps": 4, "eval_every": 2, "save_every": save_every, "model": "bert-tiny"}
    with monkeypatch.context() as patched:
        at_step(patched, "evaluate", 2, lambda: interrupt(signal.SIGTERM))
        train(dataset.path, out, **options)
    assert checkpoint.newest(out)[0].name == "step-00000002"
    assert not any("validation_loss" in entry for entry in entries(out))
    again, complete = train(dataset.path, out, **options), train(dataset.path, tmp_path / "complete", **options)
    names = ("step", "loss", "validation_loss")
    assert [[e.get(name) for name in names] for e in again] == [[e.get(name) for name in names] for e in complete]


def cuda():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 9 GiB.")


@pytest.mark.parametrize(("fails", "size"), [(lambda: torch.empty(1 << 50), f"{1 << 52} bytes"), (cuda, "20.00 GiB")])
def test_a_checkpoint_that_was_begun_before_memory_is_used_up_is_there(
    dataset, tmp_path, monkeypatch, capsys, fails, size
):
    at_step(monkeypatch, "evaluate", 4, fails)
    with pytest.raises(SystemExit):
        train(dataset.path, tmp_path / "run", steps=4, eval_every=2, save_every=2, model="bert-tiny")
    last = capsys.readouterr().err.splitlines()[-1]
    assert (last.startswith("Error: not enough memory: "), size in last) == (True, True), last
    assert checkpoint.newest(tmp_path / "run")[0].name == "step-00000002"


def test_a_checkpoint_that_another_machine_sees_late_is_waited_for(bert_run, tmp_path, monkeypatch, limit):
    """As on a network file system, whose clients remember for up to a minute that a name does not exist."""
    path, _ = checkpoint.choose(shutil.copytree(bert_run, tmp_path / "run"))
    path.rename(tmp_path / "later")
    monkeypatch.setattr(time, "sleep", lambda seconds: (tmp_path / "later").rename(path))
    assert len(checkpoint.wait_until_seen(path)) == 64  # which ranks compare
    limit(stale_s=0)
    with refuses("other-stream", "out"):
        checkpoint.wait_until_seen(path.with_name("step-00000003"))


def test_a_model_takes_what_the_tokenizer_of_its_checkpoint_gives(bert_run, finished):
    """ModernBERT has no token types, whatever the tokenizer of the dataset names."""
    for directory, length in ((bert_run / "step-00000002", 512), (finished / "step-00000002", 8192)):
        tokenizer, model = AutoTokenizer.from_pretrained(directory), AutoModelForMaskedLM.from_pretrained(directory)
        assert tokenizer("river " * 9000, truncation=True, return_tensors="pt")["input_ids"].shape == (1, length)
        pair = tokenizer("the river", "the stone", return_tensors="pt")
        assert ("token_type_ids" in pair) == (length == 512)
        assert pair.get("token_type_ids", torch.tensor([0, 1])).unique().tolist() == [0, 1]
        model(**pair)


def test_a_corpus_without_a_validation_split_is_said_to_be_one_and_grows(tmp_path, vocab, capsys):
    """What it loses by growth is measured on what it is trained on."""
    built(tmp_path, "the stone under the river and the light of morning", tokenizer=vocab, validation=0)
    capsys.readouterr()
    phases = changing(0.5, layers=[1, None])
    log = train(tmp_path / "shards", tmp_path / "run", steps=2, model="bert-tiny", phase=phases)
    assert sum("--validation" in line for line in capsys.readouterr().out.splitlines()) == 1
    assert [entry["loss_before"] > 0 for entry in log if "change" in entry] == [True]
    assert not any("validation_loss" in entry for entry in log)


@pytest.mark.slow
def test_a_run_goes_on_when_the_reader_of_its_output_has_gone(dataset, tmp_path):
    """As `bertrain pretrain … | head` leaves it."""
    options = flags(dataset.path, tmp_path / "run", **QUIET, steps=4)
    words = [sys.executable, "-m", "bertrain.pretrain", *map(str, options)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0
    assert entries(tmp_path / "run")[-1]["step"] == 4
