"""A build on a Ray cluster: nodes, processes and commands that are lost, and the sentences of users' mistakes."""

import gc
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
from support.commands import invoke, refused, refuses, waited
from support.data import ROOT, build, make_text
from support.disk import before_rename, published, put, write
from support.encoding import load
from support.sources import made, plan_of

from bertdata import Shares
from bertdata.sources.plan import Part
from bertdata.write import machines
from bertdata.write.encoding import TextEncoder

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


def test_without_the_library_or_a_cluster_one_sentence_says_so_at_once(tmp_path, corpus, vocab, monkeypatch):
    arguments = [corpus, "--out", tmp_path / "out", "--tokenizer", vocab, "--ray"]
    with monkeypatch.context() as hidden:
        hidden.setitem(sys.modules, "ray", None)
        refused("bertdata", "build", *arguments, kind="not-installed", option="ray")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        monkeypatch.setattr("ray.init", Mock(side_effect=AssertionError))  # it would ask for a minute
        for value in ([], [address]):
            refused("bertdata", "build", *arguments, *value, kind="cluster-failed", option="ray", given=address)
    assert not (tmp_path / "out").exists()


ROWS = [f"the stone {number} under the river {number * 7919 % 10007}" for number in range(60)]
KINDS = ["text", "text", "gzip", "parquet", "jsonl", "text", "arrow", "parquet", "text"]


@pytest.fixture
def job(tmp_path, vocab, monkeypatch):
    """What a task gets of an unfinished build of several units, none of which is made; the part; text and attempts."""
    text, attempts = put(tmp_path / "text", "\r" * 2000 + make_text(120)), tmp_path / "out" / ".build" / "attempts-1"
    attempts.mkdir(parents=True)
    encoder = TextEncoder(load(vocab), Shares(), plan_of([text], documents="line", shard_size=4000))
    monkeypatch.setattr("ray.get", lambda reference: reference())
    return [lambda: (encoder, attempts, tmp_path, machines.versions(encoder))], Part(range(3), 0.0), text, attempts


def test_an_attempt_that_was_taken_for_lost_changes_nothing(job):
    """It stands still before a file is moved, another attempt makes all, and then it continues."""
    sent, part, _, attempts = job
    staging, real = attempts.parent, os.replace
    records, [_] = machines.make_task(sent, part, set())  # with a warning: most lines end with CR
    expected = {path.name: path.read_bytes() for path in staging.iterdir() if path.is_file()}
    others = iter(range(1))

    def replace(source, target):
        if Path(target).parent == staging and next(others, None) is not None:
            assert machines.make_task(sent, part, set())[0] == records
        return real(source, target)

    with patch.object(os, "replace", replace):
        assert machines.make_task(sent, part, set())[0] == records
    assert {path.name: path.read_bytes() for path in staging.iterdir() if path.is_file()} == expected
    assert [record.unit for record in machines.make_task(sent, part, {0, 1})[0]] == [2]
    with before_rename(".json", Mock(side_effect=MemoryError)), pytest.raises(MemoryError):
        machines.make_task(sent, part, set())
    assert not list(attempts.iterdir())


def test_what_a_node_does_not_see_is_one_sentence(job):
    [sent], part, text, attempts = job
    *known, _ = sent()
    with refuses("cluster-failed", "ray", says=f"node {platform.node()}"):
        machines.make_task([lambda: (*known, ["another version"])], part, set())
    for lose, kind, option in (
        (lambda: os.utime(text, ns=(1, 1)), "changed", "inputs"),
        (text.unlink, "not-found", "inputs"),
        (attempts.rmdir, "cluster-failed", "out"),
    ):
        lose()
        with refuses(kind, option, says=f"node {platform.node()}"):
            machines.make_task([partial(sent)], part, set())  # a new object is a new job


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Two nodes of one CPU: their address, how to lose the second one, and where the segmenter is."""
    here = tmp_path_factory.mktemp("held")
    (here / "held.py").write_text(HELD)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join([str(here), str(ROOT)]))
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patched.syspath_prepend(str(here))
        from ray.cluster_utils import Cluster

        size, handler = {"num_cpus": 1, "object_store_memory": 80 << 20}, signal.getsignal(signal.SIGTERM)
        started = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
        try:
            second = started.add_node(**size)
            started.wait_for_nodes()
            signal.signal(signal.SIGTERM, handler)  # Ray's would stay, and processes that a later test forks would hang
            yield SimpleNamespace(address=started.address, here=here, lose=lambda: started.remove_node(second))
        finally:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)  # some versions of Ray leave files open
                started.shutdown()
                gc.collect()


def command(*arguments):
    program = [sys.executable, "-m", "bertdata", "build", *map(str, arguments)]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_an_error_of_the_user_is_the_sentence_of_a_build_by_threads(nodes, vocab, tmp_path):
    """The first fault in the order of the text, also if a task reports a later one first."""
    rows = [json.dumps({"text": f"the stone {number}"}) for number in range(300)]
    rows[150], rows[290] = '{"text": 5}', "{"
    arguments = [put(tmp_path / "rows.jsonl", "\n".join(rows)), "--tokenizer", vocab, "--shard-size", 500]
    alone = invoke("bertdata", "build", *arguments, "--out", tmp_path / "threads")
    run = command(*arguments, "--out", tmp_path / "ray", "--ray", nodes.address)
    out, said = run.communicate()
    assert (run.returncode, alone.exit_code, out) == (1, 1, "")
    assert "rows.jsonl, line 151: " in alone.stderr
    # Ray itself now and then writes lines: [2026-11-23 … task_manager.cc …
    assert [line for line in said.splitlines() if not line.startswith("[20")][1:] == alone.stderr.splitlines()


@pytest.mark.slow
def test_killed_commands_and_a_lost_node_change_nothing(nodes, vocab, tmp_path):
    """The build is continued after each, and threads give the same bytes. Texts of the last input wait at first."""
    out, hold, done = tmp_path / "ray", nodes.here / "hold", []
    text = [made(tmp_path, number, kind, ROWS)[0] for number, kind in enumerate(KINDS)]
    text.append(write(tmp_path / "last.txt", *(f"{row} wait here" for row in ROWS)))
    options = {"words": "held:words", "shard_size": 1000, "documents": "line", "tokenizer": vocab}
    expected = published(build(text, tmp_path / "threads", **options).dataset.path)
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]

    def at_work():
        return {path.name.split("-")[1] for path in nodes.here.glob("at-*")}

    put(hold, "wait here")
    for sent, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        run = command(*text, "--out", out, "--ray", nodes.address, *flags)
        waited(lambda: at_work() and list((out / ".build").glob("unit-*.json")))
        run.send_signal(sent)
        printed, said = run.communicate()
        assert (run.returncode, printed) == (code, ""), said
        for path in nodes.here.glob("at-*"):
            path.unlink()

    def lose():
        waited(lambda: len(at_work()) == 2)
        nodes.lose()
        hold.unlink()

    put(hold, "")
    with ThreadPoolExecutor() as beside:
        lost = beside.submit(lose)
        report = build(text, out, ray=nodes.address, progress=lambda *read: done.append(read), **options)
        lost.result()
    assert report.reused_units > 0
    assert published(out) == expected
    assert done[-1] == (sum(os.stat(path).st_size for path in text),) * 2
