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
import importlib
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

LIBRARY = "CRASH_LIBRARY"  # the variable with the path of the compiled calls.c
SOURCE = Path(__file__).with_name("calls.c")


def start_with_library() -> None:
    """Starts this program again with calls.c before the C library, and ends as it ends."""
    with tempfile.TemporaryDirectory(prefix="crash-") as folder:
        library = f"{folder}/calls.so"
        command = ["cc", "-shared", "-fPIC", "-O1", "-o", library, str(SOURCE), "-ldl", "-pthread"]
        subprocess.run(command, check=True)
        environment = os.environ | {
            "LD_PRELOAD": library,
            LIBRARY: library,
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONPATH": os.pathsep.join([str(SOURCE.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        sys.exit(subprocess.call([sys.executable, *sys.argv], env=environment))


if __name__ == "__main__" and LIBRARY not in os.environ:
    start_with_library()  # before anything is imported that takes time

from crash_commands import COMMANDS, Command, checked, load_kernels, make_inputs, put_dataset, server  # noqa: E402
from disk import LINK, Disk, read_events  # noqa: E402

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


class Ended(NamedTuple):
    """How a forked process ended."""

    code: int  # negative: the signal that ended it
    said: str
    answer: Any  # what its work returned


def forked(work: Callable[[], Any], said: Path) -> Ended:
    """Does work in a fork of this process, with its output in a file."""
    for _ in range(100):  # a thread that has ended is there for a moment
        if len(os.listdir("/proc/self/task")) == 1:
            break
        time.sleep(0.01)
    else:
        raise AssertionError("a process with threads cannot be forked safely")
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reads)
        code = 70
        with contextlib.suppress(BaseException):
            signal.alarm(LIMIT_S)
            gc.unfreeze = lambda: None  # what `Trial` has frozen stays so
            sys.stdout = sys.stderr = open(said, "w", buffering=1)  # noqa: SIM115
            for number in (1, 2):
                os.dup2(sys.stdout.fileno(), number)
            try:
                os.write(writes, json.dumps(work()).encode())
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1 if end.code else 0
                if isinstance(end.code, str):
                    print(end.code)
            except BaseException:
                calls().calls_off()
                traceback.print_exc()
        os._exit(code)
    os.close(writes)
    with open(reads, "rb") as pipe:
        answer = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return Ended(status, said.read_text(errors="replace"), json.loads(answer) if answer else None)


def calls() -> Any:
    return ctypes.CDLL(os.environ[LIBRARY])


def run(lines: tuple[str, ...]) -> None:
    """Runs command lines one after the other, to the end, and exits with the first code that is not 0."""
    codes = []
    for line in lines:
        program, *words = shlex.split(line)
        command = importlib.import_module("bertdata.cli" if program == "bertdata" else "bertrain.__main__").main
        try:
            command(words, prog_name=program)
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code)
            codes.append(end.code if isinstance(end.code, int) else 1 if end.code else 0)
    sys.exit(next(filter(None, codes), 0))


class Place:
    """Where commands run: in/ is what they read, out/ and cache/ are what they write. No process is elsewhere.

    only_first: whether a command is tried no more after its first finding.
    """

    def __init__(self, base: Path, seed: int, *, only_first: bool) -> None:
        self.base, self.work, self.seed, self.only_first = base, base / "work", seed, only_first
        self.out, self.said = self.work / "out", base / "said"
        self.work.mkdir()
        os.chdir(self.work)
        os.environ["BERTDATA_CACHE"] = str(self.work / "cache")

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
                found[str(path.relative_to(self.work))] = (
                    LINK + bytes(path.readlink()) if path.is_symlink() else content
                )
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
            self._require(forked(lambda: run(self.command.before), place.said))
        self.start = place.tree()
        if self.command.server:
            put_dataset(server(), self.place.work / "in" / "shards")
        self.warm()

    def serve(self) -> None:
        """Makes the server what it was."""
        if self.command.server == "writes":
            put_dataset(server(), self.place.work / "in" / "shards")

    def begin(self) -> None:
        self.place.put(self.start)
        self.serve()

    def warm(self) -> None:
        """Runs the command undisturbed and keeps its result. Then this process has what it imports, and its kernels."""

        def collect() -> list[str]:
            with contextlib.suppress(SystemExit):
                run(self.command.lines)
            return sorted(sys.modules)

        ended = forked(collect, self.place.said)
        self._require(ended)
        shutil.copytree(self.place.out, self.whole, symlinks=True)
        for module in ended.answer:
            if module not in sys.modules and module.partition(".")[0] in PACKAGES:
                with contextlib.suppress(ImportError):
                    importlib.import_module(module)
        if self.command.kernels:
            self.begin()
            with (
                open(os.devnull, "w") as nothing,
                contextlib.redirect_stdout(nothing),
                contextlib.redirect_stderr(nothing),
                contextlib.suppress(SystemExit),
            ):
                run(self.command.lines)
        elif self.command.lines[0].startswith("bertrain"):
            load_kernels(self.place.work / "in")
        self.begin()
        self._require(forked(lambda: run(self.command.lines), self.place.said))
        compared = forked(lambda: self.command.differences(self.whole, self.place.out), self.place.said)
        assert compared.answer == [], f"{self.name} does not give the same twice: {compared}"
        gc.collect()
        gc.freeze()

    def _require(self, ended: Ended) -> None:
        assert ended.code == 0, f"{self.name} ends with {ended.code}: {ended.said[-2000:]}"

    def again(self, *, is_done: bool) -> dict[str, Any]:
        """What a reader finds now, and what the command makes of it. is_done: whether it must be the whole result."""
        calls().calls_fail(str(self.place.work).encode(), -1, -1, 0, 0, 0)  # fails none, and waits for no disk
        finished, wrong = checked(self.command.finished, self.place.out, self.whole)
        unlike = self.command.differences(self.whole, self.place.out) if is_done and not wrong else []
        unlike = [line for line in unlike if not line.endswith("left over")]  # removals may be lost
        try:
            run(self.command.lines)
        except SystemExit as end:
            code = end.code
        lines = [wrong] if wrong else self.command.differences(self.whole, self.place.out)
        return {"finished": finished, "wrong": wrong, "unlike": unlike, "code": code, "lines": lines}

    def judge(self, what: str, *, is_done: bool) -> tuple[str, int]:
        """Runs the command on what is there. Returns how it went, in a word, and how much was finished before."""
        ended = forked(lambda: self.again(is_done=is_done), self.place.said)
        found = ended.answer
        if found is None:
            return self.finding("ends", what, f"{ended.code}: {ended.said[-600:]}"), 0
        if found["wrong"]:
            return self.finding("half", what, found["wrong"]), 0
        if found["unlike"]:
            return self.finding("lost after the end", what, "; ".join(found["unlike"][:4])), found["finished"]
        if fault := fault_of(found["code"], ended.said):
            return self.finding(fault, what, ended.said[-600:]), found["finished"]
        if not found["lines"]:
            return "same", found["finished"]
        if found["code"]:
            return self.finding("refused", what, ended.said.splitlines()[-1]), found["finished"]
        return self.finding("differs", what, "; ".join(found["lines"][:4])), found["finished"]

    @property
    def is_enough(self) -> bool:
        return self.place.only_first and bool(self.findings)

    def finding(self, kind: str, what: str, line: str) -> str:
        self.kinds[kind] += 1
        if self.kinds[kind] <= SHOWN:
            self.findings.append(f"{self.name}: {what}: {kind}: {' / '.join(line.strip().splitlines()[-6:])}")
        return kind


PACKAGES = {
    "bertdata",
    "bertrain",
    "torch",
    "transformers",
    "numba",
    "tokenizers",
    "safetensors",
    "click",
    "tqdm",
    "numpy",
    "concurrent",
    "obstore",
    "peft",
    "scipy",
    "sklearn",
    "csv",
    "asyncio",
}


def fault_of(code: int, said: str) -> str:
    """What is wrong with how a command ended, if something is."""
    if NOISE.search(said):
        return "traceback"
    if code < 0:
        return "killed"
    lines = said.strip().splitlines()
    if code and not any(map(SENTENCE.match, lines)):
        return "no sentence"
    return ""


# --------------------------------------------------------------------------------------------------------------- states


def recorded(trial: Trial) -> Any:
    """The changes of the disk of an undisturbed run. The same changes must give what is on disk."""
    place, log = trial.place, trial.place.base / "events"
    trial.begin()

    def work() -> None:
        fd = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        calls().calls_record(str(place.work).encode(), fd)
        try:
            run(trial.command.lines)
        finally:
            calls().calls_off()

    ended = forked(work, place.said)
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
    number, known = 0, dict[str, tuple[str, int]]()
    waiting: dict[str, Any] = {}
    progress = list[set[str]]()  # after each number of changes the digests of the states
    for end in range(len(disk.changes) + 1):
        progress.append(set())
        for state in disk.states(end, most, draw):
            digest = disk.digest(state) + " done" * (end == len(disk.changes))
            progress[-1].add(digest)
            waiting.setdefault(digest, (end, state))
        number += len(progress[-1])
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
    replayed = set(chosen)
    covered = sum(digest in replayed for digests in progress for digest in digests)
    return {
        "changes": len(disk.changes),
        "states": number,
        "covered": covered,
        "replays": len(chosen),
        "trees": len(waiting),
    }


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


def failing(trial: Trial, number: int, error: int, *, always: bool) -> tuple[Ended, str]:
    """Runs a command of which a call fails. Returns how it ended, and the call; "" if it made fewer calls."""
    place, log = trial.place, trial.place.base / "failed"
    trial.begin()

    def work() -> None:
        fd = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        kinds, _ = ERRORS[error]
        calls().calls_fail(str(place.work).encode(), fd, ctypes.c_long(number), error, int(always), kinds)
        try:
            run(trial.command.lines)
        finally:
            calls().calls_off()

    ended = forked(work, place.said)
    return ended, log.read_text().strip().partition(" ")[2]


def fail_all(trial: Trial, errors: list[int], every: int, end: float) -> dict[str, Any]:
    """Fails each call of a command in turn, once and from then on, and runs the command again."""
    failed, left_out, called = Counter[str](), 0, 0
    for error, always in itertools.product(errors, (False, True)):
        step = max(ERRORS[error][1], 3 if always else 1) * every
        for number in itertools.count(0, step):
            if trial.is_enough:
                break
            ended, call = failing(trial, number, error, always=always)
            if not call:
                called = max(called, number)
                break
            if time.monotonic() > end:
                left_out += 1
                break
            failed[errno.errorcode[error]] += 1
            call = call.replace(str(trial.place.work), "")
            what = f"{errno.errorcode[error]} {'from' if always else 'of'} call {number}, {call}"
            if fault := fault_of(ended.code, ended.said):
                trial.finding(fault, what, ended.said[-900:])
                continue
            trial.judge(what, is_done=ended.code == 0)
    return {"calls": called, "failed": sum(failed.values()), **failed} | ({"left_out": left_out} if left_out else {})


# -------------------------------------------------------------------------------------------------------------- command


@contextlib.contextmanager
def object_store(names: list[str]) -> Iterator[None]:
    """An S3 server in another process, if one of the commands needs it."""
    if not any(COMMANDS[name].server for name in names):
        yield
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [sys.executable, "-c", f"from moto.server import main; main(['-p', '{port}'])"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "no_proxy": "127.0.0.1",
    }
    try:
        for _ in range(600):
            with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(os.environ["AWS_ENDPOINT_URL"]):
                break
            time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait()


def make_place(base: Path, names: list[str], seed: int, *, only_first: bool) -> Place:
    """The directories of commands, with their inputs."""
    place = Place(base, seed, only_first=only_first)
    inputs = place.work / "in"
    inputs.mkdir()

    def work() -> None:
        os.chdir(inputs)
        make_inputs(inputs, names)

    ended = forked(work, place.said)
    assert ended.code == 0, ended.said[-2000:]
    return place


@click.command()
@click.argument("campaign", type=click.Choice(["states", "calls"]))
@click.option("--only", default=",".join(COMMANDS), help="Commands, with commas between.")
@click.option("--most", default=60, show_default=True, help="States after each change of the disk.")
@click.option("--replays", default=100_000, show_default=True, help="Different trees of a command that are run again.")
@click.option("--errors", default=",".join(errno.errorcode[error] for error in ERRORS), help="Errors, with commas.")
@click.option("--every", default=1, show_default=True, help="Fail each so many calls.")
@click.option("--minutes", type=float, default=1e6, help="Leave the rest of a command out after so long.")
@click.option("--seed", default=0, show_default=True)
@click.option("--first", is_flag=True, help="End a command at its first finding.")
def main(
    campaign: str,
    only: str,
    most: int,
    replays: int,
    errors: str,
    every: int,
    minutes: float,
    seed: int,
    first: bool,
) -> None:
    """Loses power, or fails a call to the system, at every moment of a command; then runs the command again."""
    names, num_findings = only.split(","), 0
    with tempfile.TemporaryDirectory(prefix="crash-") as folder, object_store(names):
        place = make_place(Path(folder), names, seed, only_first=first)
        for name in names:
            began, trial = time.monotonic(), Trial(place, name, COMMANDS[name])
            if campaign == "states":
                facts = states(trial, most, replays)
            else:
                numbers = [getattr(errno, error) for error in errors.split(",")]
                facts = fail_all(trial, numbers, every, began + 60 * minutes)
            num_findings += sum(trial.kinds.values())
            for line in trial.findings:
                click.echo(line)
            took = round(time.monotonic() - began, 1)
            click.echo(json.dumps({"command": name, **facts, "findings": dict(trial.kinds), "took_s": took}))
            gc.unfreeze()
    sys.exit(num_findings > 0)


if __name__ == "__main__":
    main()
