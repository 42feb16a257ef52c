"""Runs of two processes: the same losses as one, resumed to the same bits, and never a hang or an orphan."""

import json
import os
import shutil
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.commands import json_of, waited
from support.runs import QUIET, assert_near, entries, flags, launch, losses, on_ranks, remove_after, resumed_from, train

from bertrain import checkpoint


@pytest.fixture(scope="module")
def two(dataset, once):
    """A run of five steps on two ranks, seven rows a step: four on one rank and three on the other, two at a time."""
    return once("two", lambda folder: train(dataset.path, folder / "run", ranks=2, **SEVEN)) / "run"


SEVEN = {"steps": 5, "global_batch_size": 7, "micro_batch_size": 2, "eval_every": 2}


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one(two, dataset, tmp_path):
    """The speed in the log is of all, the operations are of one rank."""
    alone, both = train(dataset.path, tmp_path / "run", **SEVEN), entries(two)
    assert_near(alone, both, rel=2e-5)
    tokens_per_operation = [log[0]["tokens_per_s"] / log[0]["flops_per_s"] for log in (alone, both)]
    assert tokens_per_operation[1] == pytest.approx(2 * tokens_per_operation[0], rel=0.01)


@pytest.mark.slow
def test_a_run_of_two_processes_resumes_on_any_number(two, dataset, tmp_path):
    """On two it is bitwise identical."""
    out = shutil.copytree(two, tmp_path / "run")
    for ranks, step in ((2, 2), (None, 2), (3, 3)):
        remove_after(out, step)
        log = train(dataset.path, out, ranks=ranks, **SEVEN)
        assert_near(log, entries(two), rel=2e-5)
        assert losses(log) == losses(entries(two)) or ranks != 2
        assert resumed_from(out) == f"step-{step:08d}"


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_process_and_a_checkpoint_to_go_on_from(dataset, tmp_path):
    out = tmp_path / "run"
    arguments = flags(dataset.path, out, steps=100_000, save_every=5, keep=2, eval_every=0)
    with launch(2, "bertrain.pretrain", arguments) as process:
        waited(lambda: any(out.glob("step-*")))
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) >= 2
        process.kill()
        process.communicate(timeout=120)
    assert process.returncode != 0
    waited(lambda: not any(Path(f"/proc/{child}/exe").exists() for child in children))  # a zombie has none
    assert checkpoint.newest(out)[0] is not None
    with checkpoint.lock(out):
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
    node += ["--rdzv-conf", "keep_alive_interval=1"]  # seconds: a node is taken for lost after three
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
        waited(lambda: _listens(port))  # the agent at which all meet must live
        second = agent()
        waited(lambda: checkpoint.newest(out)[0] is not None)
        second.kill()
        third = agent()
        waited(lambda: first.poll() is not None and third.poll() is not None, 240)
    assert (first.returncode, third.returncode) == (0, 0), (tmp_path / "said").read_text()
    assert resumed_from(out) != "none"
    assert losses(entries(out)) == losses(train(dataset.path, tmp_path / "undisturbed", ranks=2, **options))


@pytest.mark.slow
def test_the_shortest_command_trains_on_all_ranks_in_one_directory(dataset, tmp_path):
    with launch(2, "bertrain.pretrain", ["--data", str(dataset.path), "--steps", "1"], cwd=tmp_path) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    (run,) = (tmp_path / "runs").iterdir()
    assert f"runs/{run.name}" in out
    assert json.loads((run / "run.json").read_text())["resolved"]["world_size"] == 2


@pytest.mark.slow
def test_all_ranks_use_the_checkpoint_that_rank_0_sees_or_end(dataset, tmp_path, monkeypatch):
    """Of a run that others see late, as a file system may. Also samples that do not fill batches are evaluated."""
    late, listed = tmp_path / "late", os.listdir
    train(dataset.path, late, **QUIET | {"steps": 4, "lr": 1e-2, "save_every": 1})

    def seen(path):
        return ["step-00000001"] if path == late and os.environ.get("RANK", "0") != "0" else listed(path)

    monkeypatch.setattr(os, "listdir", seen)
    given = ["--checkpoint", late, "--data", dataset.path, "--split", "train", "--length", 16, "--max-samples", 129]
    stated = json.loads(on_ranks(2, "bertrain.commands.evaluate", [*given, "--json"])[0].splitlines()[-1])
    alone = json_of("bertrain", "evaluate", *given)
    assert stated["samples"] == alone["samples"] == 129
    assert stated["targets"] == alone["targets"]
    assert stated["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    taught = flags(dataset.path, tmp_path / "run", **QUIET | {"steps": 3, "teacher": str(late)})
    _, err = on_ranks(2, "bertrain.pretrain", taught, code=2)
    assert err.count("Error: ") == err.count("Error: teacher is ") == err.count("on rank 1") == 1
