"""A build on a Ray cluster: nodes, processes and commands that are lost, and the sentences of users' mistakes."""

import gc
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.commands import invoke, refused, refuses, waited
from support.data import ROOT, build, make_text
from support.disk import published, put
from support.limits import limits
from support.sources import build_parts, made, parquet

from bertdata.cli import main
from bertdata.options import Shares, TextFormat
from bertdata.sources.inputs import local
from bertdata.sources.plan import Part, split
from bertdata.tokenize.load import load
from bertdata.write import finish, machines
from bertdata.write.encoding import TextEncoder
from bertdata.write.units import UnitWriter

# A segmenter that says where it runs, and waits while a file "hold" is there: for every text that has what it says.
HELD = """
import os, sys, time
from pathlib import Path
HERE = Path(__file__).parent

def words(text):
    import ray
    if ray.is_initialized():
        (HERE / f"at-{ray.get_runtime_context().get_node_id()}-{os.getpid()}").touch()
        while (HERE / "hold").exists() and (HERE / "hold").read_text() in text:
            time.sleep(0.02)
    return [text[at : at + 2] for at in range(0, len(text), 2)]
"""


# ---------------------------------------------------------------------------------------------------- without a cluster


def test_without_the_library_an_error_says_so(tmp_path, corpus, vocab, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    arguments = [corpus, "--out", tmp_path / "out", "--tokenizer", vocab, "--ray"]
    refused(main, "build", *arguments, kind="not-installed", option="ray")
    assert not (tmp_path / "out").exists()


def test_a_cluster_that_does_not_answer_is_one_sentence_at_once(tmp_path, corpus, vocab, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        monkeypatch.setattr("ray.init", Mock(side_effect=AssertionError))  # it would ask for a minute
        for value in ([], [address]):
            arguments = [corpus, "--out", tmp_path / "out", "--tokenizer", vocab, "--ray", *value]
            refused(main, "build", *arguments, kind="cluster-failed", option="ray", given=address)
    assert not (tmp_path / "out").exists()


ROWS = [f"the stone {number} under the river {number * 7919 % 10007}" for number in range(60)]
KINDS = ["text", "text", "gzip", "parquet", "jsonl", "text", "arrow", "parquet", "text"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A file of each kind; those of plain text and JSON lines that follow each other share units."""
    folder = tmp_path_factory.mktemp("inputs")
    return [local(made(folder, number, kind, ROWS)[0]) for number, kind in enumerate(KINDS)]


@given(st.integers(50, 5000), st.integers(1, 64), st.integers(1, 1 << 14))
def test_parts_have_every_unit_once_and_are_joined_as_a_whole(inputs, shard_size, cpus, part_bytes):
    plan = split(inputs, TextFormat(documents="line", shard_size=shard_size))
    with limits(part_bytes=part_bytes):
        parts = plan.parts(cpus)
    assert [unit for part in parts for unit in part.units] == list(plan.units)
    assert {part.units.start for part in parts} <= {part.units.start for part in plan.parts()}
    total = sum(file.size for file in inputs)
    assert sum(part.size for part in parts) == pytest.approx(total)
    assert all(part.size >= min(part_bytes, total / cpus / 8) * 0.999 for part in parts[:-1])
    assert len(parts) <= max(8 * cpus, total // part_bytes) + 1


@pytest.fixture
def job(tmp_path, corpus, vocab, monkeypatch):
    """What a task gets of an unfinished build of several units, none of which is made, the part, and `ray.get`."""
    staging, plan = tmp_path / "out" / ".build", split([local(corpus)], TextFormat(documents="line", shard_size=4000))
    (staging / "attempts-1").mkdir(parents=True)
    encoder = TextEncoder(load(vocab), Shares(), plan)
    get = Mock(side_effect=lambda reference: reference())
    monkeypatch.setattr("ray.get", get)
    return [lambda: (encoder, staging / "attempts-1", tmp_path, machines.versions(encoder))], Part(range(3), 0.0), get


def test_an_attempt_that_was_taken_for_lost_changes_nothing(job):
    """It stands still before a file is moved, another attempt makes all, and then it continues."""
    sent, part, get = job
    staging, real = sent[0]()[1].parent, os.replace
    records = machines.make_task(sent, part, set())
    expected = {path.name: path.read_bytes() for path in staging.iterdir() if path.is_file()}
    others = iter(range(1))

    def replace(source, target):
        if Path(target).parent == staging and next(others, None) is not None:
            assert machines.make_task(sent, part, set()) == records
        return real(source, target)

    with patch.object(os, "replace", replace):
        assert machines.make_task(sent, part, set()) == records
    assert {path.name: path.read_bytes() for path in staging.iterdir() if path.is_file()} == expected
    assert [record.unit for record in machines.make_task(sent, part, {0, 1})] == [2]
    assert get.call_count == 1  # a process loads the encoder and the plan once
    with patch.object(UnitWriter, "commit", side_effect=MemoryError), pytest.raises(MemoryError):
        machines.make_task(sent, part, set())
    assert not list((staging / "attempts-1").iterdir())


def test_what_a_node_does_not_see_is_one_sentence(job, tmp_path, corpus):
    [sent], part, _ = job
    encoder, attempts, *rest = sent()

    def with_input(**changes):
        plan = replace(encoder.plan, files=[replace(encoder.plan.files[0], **changes)])
        return TextEncoder(encoder.tokenizer, encoder.shares, plan), attempts, *rest

    other = put(tmp_path / "corpus.txt", corpus.read_bytes())
    os.utime(other, ns=(1, 1))
    for node, kind, option in (
        ((encoder, attempts.with_name("attempts-2"), *rest), "cluster-failed", "out"),
        ((encoder, attempts, rest[0], ["0.0"]), "cluster-failed", "ray"),
        (with_input(name=str(other)), "changed", "inputs"),
        (with_input(name=str(tmp_path / "absent.txt")), "not-found", "inputs"),
    ):
        with refuses(kind, option, says=f"node {platform.node()}"):
            machines.make_task([lambda node=node: node], part, set())
    remote = SimpleNamespace(open=partial(open, corpus, "rb"), now=Mock(side_effect=AssertionError))
    assert machines.make_task([lambda: with_input(remote=remote)], part, set())  # no request for each task


# ------------------------------------------------------------------------------------------------------- on two nodes


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Two nodes of one CPU: their address, the second node, how to add and remove one, where the segmenter is."""
    here = tmp_path_factory.mktemp("held")
    (here / "held.py").write_text(HELD)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join([str(here), str(ROOT)]))
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patched.syspath_prepend(str(here))
        from ray.cluster_utils import Cluster

        size = {"num_cpus": 1, "object_store_memory": 80 << 20}
        started = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
        try:
            second = started.add_node(**size)
            started.wait_for_nodes()
            yield SimpleNamespace(
                address=started.address,
                here=here,
                second=second,
                remove=started.remove_node,
                add=lambda: started.add_node(**size),
            )
        finally:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)  # some versions of Ray leave files open
                started.shutdown()
                gc.collect()


@pytest.fixture
def hold(nodes):
    """Makes the segmenter wait at texts that have some words. It goes on at the end of the test."""
    for path in nodes.here.glob("at-*"):
        path.unlink()

    @contextmanager
    def holding(words=""):
        put(nodes.here / "hold", words.encode())
        try:
            yield
        finally:
            (nodes.here / "hold").unlink(missing_ok=True)

    return holding


def at_work(nodes):
    """(node, process) of each that has begun a text."""
    return {tuple(path.name.split("-")[1:]) for path in nodes.here.glob("at-*")}


def command(*arguments):
    program = [sys.executable, "-m", "bertdata", "build", *map(str, arguments)]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Inputs of three kinds, of about 20 units together."""
    folder = tmp_path_factory.mktemp("text")
    lines = make_text(200).splitlines()
    rows = [f"{line} wait here" if number > 150 else line for number, line in enumerate(lines) if line.strip()]
    return [
        made(folder, 0, "gzip", rows[:100])[0],
        put(folder / "b.txt", make_text(150, seed=1).encode()),
        put(folder / "c.txt", "\n\n".join(rows[100:300]).encode()),
        parquet(folder / "d.parquet", rows[300:400], 10),
    ]


OPTIONS = {"words": "held:words", "shard_size": 4000, "documents": "line"}
FLAGS = ["--words", "held:words", "--shard-size", 4000, "--documents", "line"]


@pytest.fixture(scope="module")
def expected(nodes, text, vocab, tmp_path_factory):
    """The inputs built by threads."""
    return build(text, tmp_path_factory.mktemp("threads") / "out", tokenizer=vocab, **OPTIONS).dataset


@pytest.mark.slow
def test_a_node_lost_in_the_middle_changes_nothing(nodes, hold, text, expected, vocab, tmp_path):
    """Threads, four parts, and two nodes of which one is removed give the same bytes."""
    build_parts(text, tmp_path / "parts", 4, tokenizer=vocab, **OPTIONS)
    finish(tmp_path / "parts")
    assert published(tmp_path / "parts") == published(expected.path)

    def lose():
        lost.append(waited(lambda: len({node for node, _ in at_work(nodes)}) == 2))
        nodes.remove(nodes.second)
        (nodes.here / "hold").unlink()

    lost, lines, done = [], [], []
    losing = threading.Thread(target=lose)
    losing.start()
    with hold():
        build(
            text,
            tmp_path / "ray",
            tokenizer=vocab,
            ray=nodes.address,
            say=lines.append,
            progress=lambda *read: done.append(read),
            **OPTIONS,
        )
    losing.join()
    nodes.second = nodes.add()
    assert lost
    assert nodes.address in lines[0]
    assert published(tmp_path / "ray") == published(expected.path)
    total = sum(path.stat().st_size for path in text)
    assert done == sorted(done)
    assert done[-1] == (total, total)
    assert len(done) > 8


def ours(said):
    """The lines on standard error but those that Ray itself now and then writes: [2026-11-23 … task_manager.cc …"""
    return [line for line in said.splitlines() if not line.startswith("[20")]


@pytest.mark.slow
def test_an_error_of_the_user_is_the_sentence_of_a_build_by_threads(nodes, vocab, tmp_path):
    """The first fault in the order of the text, also if a task reports a later one first."""
    rows = [json.dumps({"text": f"the stone {number}"}) for number in range(300)]
    rows[150], rows[290] = '{"text": 5}', "{"
    path = put(tmp_path / "rows.jsonl", "\n".join(rows).encode())
    arguments = [path, "--tokenizer", vocab, "--shard-size", 500]
    alone = invoke(main, "build", *arguments, "--out", tmp_path / "threads")
    run = command(*arguments, "--out", tmp_path / "ray", "--ray", nodes.address)
    out, said = run.communicate()
    assert (run.returncode, alone.exit_code, out) == (1, 1, "")
    assert "rows.jsonl, line 151: " in alone.stderr
    assert ours(said)[1:] == alone.stderr.splitlines()


@pytest.mark.slow
def test_an_interrupted_or_killed_command_is_continued(nodes, hold, text, expected, vocab, tmp_path):
    arguments = [*text, "--out", tmp_path / "ray", "--tokenizer", vocab, *FLAGS, "--ray", nodes.address]
    with hold("wait here"):
        for sent, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
            run = command(*arguments)
            waited(lambda: at_work(nodes) and list((tmp_path / "ray" / ".build").glob("unit-*.json")))
            run.send_signal(sent)
            out, said = run.communicate()
            assert (run.returncode, out) == (code, ""), said
            for path in nodes.here.glob("at-*"):
                path.unlink()
    run = command(*arguments)
    out, said = run.communicate()
    assert run.returncode == 0, said
    assert f"{expected.num_documents:,}" in out
    assert out.endswith(f"{expected.dataset_id}\n")
    assert out.count("\n") == 2
    assert published(tmp_path / "ray") == published(expected.path)
    assert len(ours(said)) == 3  # the cluster, what is continued, and why `tokenizers` encodes the text
