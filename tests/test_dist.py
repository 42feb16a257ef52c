"""Runs of two processes: the same losses as one, resumed to the same bits, and never a hang or an orphan."""

import json
import os
import shutil
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner
from training import entries, flags, launch, losses, on_ranks, train

from bertdata.write import build
from bertrain import evaluate
from bertrain.runtime import checkpoint

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def two(dataset, tmp_path_factory):
    """A run of five steps on two ranks, seven rows a step: four on one rank and three on the other, two at a time."""
    out = tmp_path_factory.mktemp("two") / "run"
    code, said, err = on_ranks(2, "bertrain.pretrain", flags(dataset.path, out, **SEVEN))
    assert code == 0, err
    assert "done: " in said
    return out


SEVEN = {"steps": 5, "global_batch_size": 7, "micro_batch_size": 2, "eval_every": 2}


def test_two_processes_give_the_losses_of_one(two, dataset, tmp_path):
    alone = train(dataset.path, tmp_path / "run", **SEVEN)
    assert len(alone) == len(entries(two))
    for ours, theirs in zip(losses(alone), losses(entries(two)), strict=True):
        assert [x or 0 for x in ours] == pytest.approx([x or 0 for x in theirs], rel=2e-5)


def test_two_processes_resume_to_the_same_bits(two, dataset, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(two, out)
    for later in (3, 4, 5):
        shutil.rmtree(out / f"step-{later:08d}")
    code, said, err = on_ranks(2, "bertrain.pretrain", flags(dataset.path, out, **SEVEN))
    assert code == 0, err
    assert "resumed after step 2" in said
    assert losses(entries(out)) == losses(entries(two))


@pytest.mark.slow
def test_another_number_of_ranks_goes_on_with_the_same_batches(two, dataset, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(two, out)
    for later in (3, 4, 5):
        shutil.rmtree(out / f"step-{later:08d}")
    train(dataset.path, out, **SEVEN)
    alone = losses(entries(out))
    for later in (4, 5):
        shutil.rmtree(out / f"step-{later:08d}")
    code, said, err = on_ranks(3, "bertrain.pretrain", flags(dataset.path, out, **SEVEN))
    assert code == 0, err
    assert "resumed after step 3" in said
    for found in (alone, losses(entries(out))):
        for ours, theirs in zip(found, losses(entries(two)), strict=True):
            assert [x or 0 for x in ours] == pytest.approx([x or 0 for x in theirs], rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "text"), [(1, "the stone under the river and the light of morning"), (6, "stone")])
def test_one_document_on_two_ranks_trains_or_ends_with_a_sentence(tmp_path, vocab, batch, text):
    (tmp_path / "corpus.txt").write_text(text + "\n")
    build([tmp_path / "corpus.txt"], tmp_path / "shards", tokenizer=vocab, validation=0)
    options = {"steps": 3, "global_batch_size": batch, "mlm_probability": 0.1}
    code, said, err = on_ranks(2, "bertrain.pretrain", flags(tmp_path / "shards", tmp_path / "run", **options))
    if text == "stone":
        assert code == 1
        assert err.count("Error: nothing to predict: the 1 samples") == 1
        assert "ranks 2, batch 6" in err
        assert "bertrain/" not in err  # no frame of ours in what torchrun has to say
    else:
        assert code == 0, err
        assert "2 ranks share 1 rows a step" in said
        assert [entry["step"] for entry in entries(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.slow
def test_an_error_before_the_first_step_is_said_once(dataset, tmp_path):
    code, _, err = on_ranks(2, "bertrain.pretrain", flags(dataset.path, tmp_path / "run", model="bert-huge"))
    assert code != 0
    assert err.count("bert-huge is neither a preset") == 1
    assert "bertrain/" not in err  # no frame of ours in what torchrun has to say


@pytest.mark.slow
def test_evaluation_on_two_ranks_is_that_of_one(two, dataset):
    """Also of samples that are no whole batches."""
    arguments = ["--checkpoint", str(two), "--data", str(dataset.path), "--split", "train", "--length", "16"]
    arguments += ["--max-samples", "129", "--json"]
    code, said, err = on_ranks(2, "bertrain.evaluate", arguments)
    assert code == 0, err
    stated = json.loads(said.strip().splitlines()[-1])
    alone = json.loads(CliRunner().invoke(evaluate.main, arguments).stdout.strip().splitlines()[-1])
    assert stated["samples"] == alone["samples"] == 129
    assert stated["targets"] == alone["targets"]
    assert stated["loss"] == pytest.approx(alone["loss"], rel=1e-6)


def children_of(pid):
    """Every process below a process."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *children_of(int(child))]
    return found


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank", "launcher"])
def test_a_killed_job_leaves_no_process_and_a_checkpoint_to_go_on_from(dataset, tmp_path, victim):
    out = tmp_path / "run"
    arguments = flags(dataset.path, out, steps=100_000, save_every=5, keep=2, eval_every=0)
    with launch(2, "bertrain.pretrain", arguments) as process:
        wait_for(lambda: any(out.glob("step-*")))
        ranks = children_of(process.pid)
        assert len(ranks) >= 2
        os.kill(ranks[-1] if victim == "rank" else process.pid, signal.SIGKILL)
        process.communicate(timeout=120)
    assert process.returncode != 0
    wait_for(lambda: not any(alive(pid) for pid in ranks))
    assert checkpoint.newest(out)[0] is not None
    with checkpoint.locked(out):
        pass


def _listens(port):
    with socket.socket() as asking:
        return asking.connect_ex(("localhost", port)) == 0


@pytest.mark.slow
def test_a_node_that_is_lost_and_comes_back_ends_in_the_same_losses(dataset, tmp_path, monkeypatch):
    """Two agents of torchrun on one machine. One is killed with its rank, and another takes its place."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # docs/scale.md
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    out, node = tmp_path / "run", ["--nnodes", "2", "--max-restarts", "2", "--rdzv-id", "job"]
    # more rows a step, so that it is killed before the end
    options = {"steps": 30, "global_batch_size": 64, "eval_every": 0, "save_every": 5}
    arguments = flags(dataset.path, out, **options)
    with ExitStack() as stack:

        def agent():
            with open(tmp_path / "said", "a") as said:
                process = launch(1, "bertrain.pretrain", arguments, before=node, port=port, stdout=said, stderr=said)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        first = agent()
        wait_for(lambda: _listens(port))  # the agent at which all meet must live
        second = agent()
        wait_for(lambda: checkpoint.newest(out)[0] is not None)
        second.kill()
        third = agent()
        wait_for(lambda: first.poll() is not None and third.poll() is not None, 240)
    said = (tmp_path / "said").read_text()
    assert (first.returncode, third.returncode) == (0, 0), said
    assert "resumed after step" in said
    code, _, err = on_ranks(2, "bertrain.pretrain", flags(dataset.path, tmp_path / "undisturbed", **options))
    assert code == 0, err
    assert losses(entries(out)) == losses(entries(tmp_path / "undisturbed"))
