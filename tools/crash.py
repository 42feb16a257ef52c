"""Loses power, or fails a call to the system, at every moment of a command; then runs the command again.

    python tools/crash.py states                      what may be on disk after a crash, for each command
    python tools/crash.py calls                       each call on a file fails in turn
    python tools/crash.py calls --only build,pull     some commands

A second run must end in the bytes of an undisturbed one, or say in one sentence what to do. Nothing that was finished
may be lost, nothing unfinished may be taken for whole, and no traceback may be seen. It prints a JSON object for each
command, and each finding with what repeats it. Exit code 1 if there is one.

states: the calls that change the disk are recorded. After each of them, tools/disk.py computes what a file system may
have kept, at most --most states. States that are one tree are run again once. calls: each call of the kinds that can
give an error fails with it, until a run reaches no more calls. So every call fails once with EIO, and with ENOSPC if it
writes. Each third fails with EACCES, ESTALE and EMFILE, and from then on with any.

calls.c says which calls are reached. It is compiled by cc. The recorded changes are made again and compared with what
is on disk, so a write that it does not reach ends this tool with an error. A process of one thread has all imported and
is forked for each run. Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from forks import QUIET, Ended, fork, forked, free_port, load, run, succeeds

LIBRARY = "CRASH_LIBRARY"  # the variable with the path of the compiled calls.c
SOURCE = Path(__file__).with_name("calls.c")


def start_with_library() -> None:
    """Starts this program again with calls.c before the C library, and ends as it ends."""
    with tempfile.TemporaryDirectory(prefix="crash-") as folder:
        library = f"{folder}/calls.so"
        command = ["cc", "-shared", "-fPIC", "-O1", "-o", library, str(SOURCE), "-ldl", "-pthread"]
        subprocess.run(command, check=True)
        path = os.pathsep.join([str(SOURCE.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | QUIET | {"LD_PRELOAD": library, LIBRARY: library, "PYTHONPATH": path}
        sys.exit(subprocess.call([sys.executable, *sys.argv], env=environment))


if __name__ == "__main__" and LIBRARY not in os.environ:
    start_with_library()  # before anything is imported that takes time

from crash_commands import COMMANDS, Command, Half, load_kernels, make_inputs, put_dataset  # noqa: E402
from disk import LINK, Disk, read_events  # noqa: E402

from bertdata.errors import BertdataError  # noqa: E402

LIMIT_S = 60  # of a command; one that takes longer hangs
OPEN, CREATE, READ, WRITE, SYNC, CLOSE, NAME, REMOVE, MAP, LOCK, LIST = (1 << bit for bit in range(11))
EVERY = (1 << 11) - 1
ERRORS = {  # error → the calls that can give it, and each how many of them is failed
    errno.EIO: (EVERY, 1),
    errno.ENOSPC: (CREATE | WRITE | SYNC | CLOSE | NAME, 1),
    errno.EACCES: (OPEN | CREATE | NAME | REMOVE | LIST, 3),
    errno.ESTALE: (EVERY, 3),
    errno.EMFILE: (OPEN | CREATE | LIST, 3),
}
SENTENCE = re.compile(r"(Error: |interrupted; ).*[^\s]")
NOISE = re.compile(r"Traceback \(most recent call last\)|Exception ignored in|Fatal Python error|\bpanicked at\b")
SHOWN = 12  # findings of a command that are printed


def calls() -> Any:
    return ctypes.CDLL(os.environ[LIBRARY])


class Place:
    """Where commands run: in/ is what they read, out/ and cache/ are what they write. No process is elsewhere.

    names: of the commands. only_first: whether a command is tried no more after its first finding.
    """

    def __init__(self, base: Path, names: list[str], seed: int, *, only_first: bool) -> None:
        self.base, self.work, self.seed, self.only_first = base, base / "work", seed, only_first
        self.out, self.said = self.work / "out", base / "said"
        (self.work / "in").mkdir(parents=True)
        os.chdir(self.work)
        os.environ["BERTDATA_CACHE"] = str(self.work / "cache")
        succeeds(lambda: make_inputs(names), self.said)

    def clear(self) -> None:
        for name in ("out", "cache"):
            shutil.rmtree(self.work / name, ignore_errors=True)
            (self.work / name).mkdir()

    def put(self, tree: dict[str, bytes | None]) -> None:
        """Makes out/ and cache/ what a tree says."""
        self.clear()
        for path, content in sorted(tree.items()):
            if content is None:
                (self.work / path).mkdir(exist_ok=True)
            elif content.startswith(LINK):
                (self.work / path).symlink_to(content.removeprefix(LINK).decode())
            else:
                (self.work / path).write_bytes(content)

    def tree(self) -> dict[str, bytes | None]:
        found = {}
        for name in ("out", "cache"):
            for path in [self.work / name, *(self.work / name).rglob("*")]:
                content = path.read_bytes() if path.is_file() else None
                content = LINK + bytes(path.readlink()) if path.is_symlink() else content
                found[str(path.relative_to(self.work))] = content
        return found


class Trial:
    """A command, its beginning, and its undisturbed end."""

    def __init__(self, place: Place, name: str, command: Command) -> None:
        self.place, self.name, self.command = place, name, command
        self.whole = place.base / f"whole-{name}"
        self.findings: list[str] = []
        self.kinds = Counter[str]()
        place.clear()
        if self.command.before:
            succeeds(lambda: run(self.command.before), place.said)
        self.start = place.tree()
        if self.command.server:
            put_dataset(place.work / "in" / "shards")
        self.warm()

    def serve(self) -> None:
        """Makes the server what it was."""
        if self.command.server == "writes":
            put_dataset(self.place.work / "in" / "shards")

    def begin(self) -> None:
        self.place.put(self.start)
        self.serve()

    def warm(self) -> None:
        """Load what the command needs into this process, run it undisturbed, and keep its result."""
        if self.command.kernels:
            self.begin()
            with open(os.devnull, "w") as no, contextlib.redirect_stdout(no), contextlib.redirect_stderr(no):
                run(self.command.lines)
        elif self.command.lines.startswith("bertrain"):
            load_kernels(self.place.work / "in")
        self.begin()
        load(lambda: run(self.command.lines), self.place.said)
        shutil.copytree(self.place.out, self.whole, symlinks=True)
        self.begin()
        succeeds(lambda: run(self.command.lines), self.place.said)
        lines = succeeds(lambda: self.command.differences(self.whole, self.place.out), self.place.said)
        assert lines == [], f"{self.name} does not give the same twice: {lines}"

    def again(self, *, is_done: bool) -> tuple[str, str, int, int]:
        """What a reader finds now, and what the command makes of it: how that went in a word, and in words, how much
        was finished before, and the exit code. is_done: whether it must be the whole result.
        """
        calls().calls_fail(str(self.place.work).encode(), -1, 0, 0, 0, 0)  # fails none, and waits for no disk
        try:
            finished = self.command.finished(self.place.out, self.whole)
        except (Half, BertdataError, json.JSONDecodeError) as error:
            return "half", str(error), 0, 0
        unlike = self.command.differences(self.whole, self.place.out) if is_done else []
        unlike = [line for line in unlike if not line.endswith("left over")]  # removals may be lost
        if unlike:
            return "lost after the end", "; ".join(unlike[:4]), finished, 0
        code = run(self.command.lines)
        lines = self.command.differences(self.whole, self.place.out)
        return "same" if not lines else "refused" if code else "differs", "; ".join(lines[:4]), finished, code

    def judge(self, what: str, *, is_done: bool) -> tuple[str, int]:
        """Runs the command on what is there. Returns how it went, in a word, and how much was finished before."""
        ended = forked(lambda: self.again(is_done=is_done), self.place.said, LIMIT_S)
        if ended.answer is None:
            return self.finding("ends", what, f"{ended.code}: {ended.said[-600:]}"), 0
        kind, line, finished, code = ended.answer
        if kind in ("same", "refused", "differs") and (fault := fault_of(code, ended.said)):
            kind, line = fault, ended.said[-600:]
        elif kind == "refused":
            line = ended.said.splitlines()[-1]
        return kind if kind == "same" else self.finding(kind, what, line), finished

    @property
    def is_enough(self) -> bool:
        return self.place.only_first and bool(self.findings)

    def finding(self, kind: str, what: str, line: str) -> str:
        self.kinds[kind] += 1
        if self.kinds[kind] <= SHOWN:
            self.findings.append(f"{self.name}: {what}: {kind}: {' / '.join(line.strip().splitlines()[-6:])}")
        return kind


def fault_of(code: int, said: str) -> str:
    """What is wrong with how a command ended, if something is."""
    if NOISE.search(said):
        return "traceback"
    has_sentence = any(map(SENTENCE.match, said.strip().splitlines()))
    return "killed" if code < 0 else "" if not code or has_sentence else "no sentence"


# --------------------------------------------------------------------------------------------------------------- states


def armed(trial: Trial, arm: Callable[[bytes, int], None]) -> tuple[Ended, Path]:
    """Runs a command from its beginning while calls are recorded or fail. Returns its end, and the file of calls."""
    place, log = trial.place, trial.place.base / "log"
    trial.begin()

    def work() -> int:
        arm(str(place.work).encode(), os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY))
        try:
            return run(trial.command.lines)
        finally:
            calls().calls_off()

    return forked(work, place.said, LIMIT_S), log


def recorded(trial: Trial) -> Disk:
    """The changes of the disk of an undisturbed run. The same changes must give what is on disk."""
    place, (ended, log) = trial.place, armed(trial, calls().calls_record)
    assert ended.code == 0, ended.said
    events = [event for event in read_events(log) if not event.first.startswith(f"{place.work}/in/")]
    disk = Disk(str(place.work), trial.start, events)
    last = disk.tree(disk.state(len(disk.changes), frozenset(), {}, {}))
    assert not disk.maps, f"files are written through maps: {disk.maps}"
    assert last == place.tree(), f"calls were not seen: {sorted(last.items() ^ place.tree().items())[:4]}"
    return disk


def states(trial: Trial, most: int, most_replays: int) -> dict[str, Any]:
    """Runs a command again on all states of the disk that a crash during it may leave."""
    disk, draw = recorded(trial), random.Random(f"{trial.place.seed} {trial.name}")
    known, waiting = dict[str, tuple[str, int]](), dict[str, Any]()
    progress = list[set[str]]()  # after each number of changes the digests of the states
    for end in range(len(disk.changes) + 1):
        progress.append(set())
        for state in disk.states(end, most, draw):
            digest = disk.digest(state) + " done" * (end == len(disk.changes))
            progress[-1].add(digest)
            waiting.setdefault(digest, (end, state))
    chosen = [*waiting]
    if len(chosen) > most_replays:
        ends = [digest for digest in chosen if digest.endswith("done")][: most_replays // 4]
        chosen = ends + draw.sample([digest for digest in chosen if digest not in ends], most_replays - len(ends))
    for digest in chosen:
        end, state = waiting[digest]
        trial.place.put(disk.tree(state))
        if not digest.endswith("done"):
            trial.serve()
        known[digest] = trial.judge(f"after {end} of {len(disk.changes)} changes", is_done=digest.endswith("done"))
        if trial.is_enough:
            break
    _require_progress(trial, progress, known)
    every = [digest for digests in progress for digest in digests]
    covered = sum(digest in known for digest in every)
    return {"changes": len(disk.changes), "states": len(every), "covered": covered, "replays": len(known)}


def _require_progress(trial: Trial, progress: list[set[str]], known: dict[str, tuple[str, int]]) -> None:
    """What is finished in every state after some changes must be finished in all states after more changes."""
    certain = 0
    for end, digests in enumerate(progress):
        finished = [known[digest][1] for digest in digests if digest in known and known[digest][0] == "same"]
        if finished and min(finished) < certain:
            trial.finding("lost", f"after {end} changes", f"{certain} were finished, and then {min(finished)}")
            return
        if finished:
            certain = max(certain, min(finished))


# ---------------------------------------------------------------------------------------------------------------- calls


def fail_all(trial: Trial, errors: list[int], every: int) -> dict[str, Any]:
    """Fails each call of a command in turn, once and from then on, and runs the command again."""
    failed, called = Counter[str](), 0
    for error, always in itertools.product(errors, (False, True)):
        kinds, step = ERRORS[error]
        for number in itertools.count(0, max(step, 3 if always else 1) * every):
            if trial.is_enough:
                break
            given = ctypes.c_long(number), error, int(always), kinds
            ended, log = armed(trial, lambda root, fd, given=given: calls().calls_fail(root, fd, *given))
            call = log.read_text().strip().partition(" ")[2].replace(str(trial.place.work), "")
            if not call:  # it makes fewer calls
                called = max(called, number)
                break
            failed[errno.errorcode[error]] += 1
            what = f"{errno.errorcode[error]} {'from' if always else 'of'} call {number}, {call}"
            if fault := fault_of(ended.code, ended.said):
                trial.finding(fault, what, ended.said[-900:])
                continue
            trial.judge(what, is_done=ended.code == 0)
    return {"calls": called, "failed": sum(failed.values()), **failed}


# -------------------------------------------------------------------------------------------------------------- command


def start_object_store(said: Path) -> None:
    """Starts an S3 server in a fork."""

    def serve() -> None:
        from moto.server import main

        main(["-p", str(port)])

    port = free_port()
    fork(serve, said)
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "no_proxy": "127.0.0.1",
    }
    for _ in range(600):
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(os.environ["AWS_ENDPOINT_URL"]):
            return
        time.sleep(0.1)


@click.command()
@click.argument("campaign", type=click.Choice(["states", "calls"]))
@click.option("--only", default=",".join(COMMANDS), help="Commands, with commas between.")
@click.option("--most", default=60, show_default=True, help="States after each change of the disk.")
@click.option("--replays", default=100_000, show_default=True, help="Different trees of a command that are run again.")
@click.option("--errors", default=",".join(errno.errorcode[error] for error in ERRORS), help="Errors, with commas.")
@click.option("--every", default=1, show_default=True, help="Fail each so many calls.")
@click.option("--seed", default=0, show_default=True)
@click.option("--first", is_flag=True, help="End a command at its first finding.")
def main(campaign: str, only: str, most: int, replays: int, errors: str, every: int, seed: int, first: bool) -> None:
    """Loses power, or fails a call to the system, at every moment of a command; then runs the command again."""
    names, num_findings = only.split(","), 0
    with tempfile.TemporaryDirectory(prefix="crash-") as folder:
        if any(COMMANDS[name].server for name in names):
            start_object_store(Path(folder) / "store")
        place = Place(Path(folder), names, seed, only_first=first)
        for name in names:
            began, trial = time.monotonic(), Trial(place, name, COMMANDS[name])
            if campaign == "states":
                facts = states(trial, most, replays)
            else:
                numbers = [getattr(errno, error) for error in errors.split(",")]
                facts = fail_all(trial, numbers, every)
            num_findings += sum(trial.kinds.values())
            for line in trial.findings:
                click.echo(line)
            took = round(time.monotonic() - began, 1)
            click.echo(json.dumps({"command": name, **facts, "findings": dict(trial.kinds), "took_s": took}))
            gc.unfreeze()
    sys.exit(num_findings > 0)


if __name__ == "__main__":
    main()
