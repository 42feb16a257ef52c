"""What tools share that run commands thousands of times: commands in this process, and forks of it.

A process of one thread imports everything once, and is forked for each command, which then starts in no time. Linux.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

QUIET = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""The environment of commands: CPUs alone, one thread each, no network."""
FORKS = multiprocessing.get_context("fork")
IMPORTED = re.compile(
    r"(bertdata|bertrain|torch|transformers|numba|tokenizers|safetensors|click|tqdm|numpy|concurrent|obstore|peft|scipy"
    r"|sklearn|csv|asyncio)(\..*)?"
)
LOCKS = re.compile(r"(.*\.)?lock")  # names of files that say nothing
TIMES = re.compile(r".*_s|seconds|data_wait|memory_bytes|mfu|apart_s")
"""Numbers in log.jsonl and trainer.json that depend on time or on the machine."""


def run(lines: str) -> int:
    """Run command lines, joined by " ; ", in this process, each to its end. Return the first exit code but 0."""
    return next(filter(None, [_run(line) for line in lines.split(" ; ") if line]), 0)


def _run(line: str) -> int:
    program, *words = shlex.split(line)
    command = importlib.import_module("bertdata.cli" if program == "bertdata" else "bertrain.__main__").main
    try:
        command(words, prog_name=program)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code)
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    return 0


class Ended(NamedTuple):
    """How a fork ended."""

    code: int  # negative: the signal that ended it
    said: str
    answer: Any  # what its work returned


def fork(work: Callable[[], object], said: Path, answers: Any = None) -> BaseProcess:
    """Start a fork that does work, and appends its output to a file. It ends with this process."""
    for _ in range(100):  # a thread that has ended is there for a moment
        if len(os.listdir("/proc/self/task")) == 1:
            break
        time.sleep(0.01)
    else:
        raise AssertionError("a process with threads cannot be forked safely")
    process = FORKS.Process(target=_inside, args=(work, said, answers), daemon=True)
    process.start()
    return process


def _inside(work: Callable[[], object], said: Path, answers: Any) -> None:
    sys.stdout = sys.stderr = open(said, "a", buffering=1)  # noqa: SIM115
    for number in (1, 2):
        os.dup2(sys.stdout.fileno(), number)
    faulthandler.enable(sys.stderr)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.unfreeze = lambda: None  # what `load` has frozen stays so
    answer = work()
    if answers and not isinstance(answer, int):
        answers.send(answer)
    sys.exit(answer if isinstance(answer, int) else 0)


def forked(work: Callable[[], object], said: Path, limit_s: int = 600) -> Ended:
    """Do work in a fork, to its end; SIGALRM ends it after so long. An int that work returns is the exit code."""

    def limited() -> object:
        signal.alarm(limit_s)
        return work()

    said.unlink(missing_ok=True)
    reads, writes = FORKS.Pipe(duplex=False)
    process, answer = fork(limited, said, writes), None
    writes.close()
    with reads, contextlib.suppress(EOFError):
        answer = reads.recv()
    process.join()
    return Ended(process.exitcode or 0, said.read_text(errors="replace"), answer)


def succeeds(work: Callable[[], object], said: Path) -> Any:
    """Do work in a fork, which must end well, and return its answer."""
    ended = forked(work, said)
    assert ended.code == 0, f"a process ends with {ended.code}: {ended.said[-2000:]}"
    return ended.answer


def load(work: Callable[[], int], said: Path) -> None:
    """Import what work imports in a fork, and freeze it: to look at all of it takes long."""
    for name in succeeds(lambda: work() or sorted(sys.modules), said):
        if name not in sys.modules and IMPORTED.fullmatch(name):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()


def free_port() -> int:
    """Return a port below those that the system gives to connections, so that none takes it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as asking, contextlib.suppress(OSError):
            asking.bind(("127.0.0.1", port))
            return port


def rank_environments(number: int) -> list[dict[str, str]]:
    """Return what torchrun would add to the environment of each rank of a new group."""
    shared = {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_RUN_ID": "tools"}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)]


# ------------------------------------------------------------------------------------------------- what commands wrote


def digests(directory: Path) -> dict[str, str]:
    """Return path → SHA-256 of each file below a directory; "" for a directory. Without locks."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(directory.rglob("*"))
        if not LOCKS.fullmatch(path.name)
    }


def flat(value: Any, where: str = "") -> dict[str, Any]:
    """Return what is in nested dicts and lists, by where it is."""
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: leaf for key, part in pairs for name, leaf in flat(part, f"{where}{key}.").items()}
    return {where.rstrip("."): value}


def parts(path: Path) -> dict[str, str]:
    """Return the tensors and values in a file of a checkpoint, by where they are; nothing for a file of another kind.

    Two are equal only if all bits are.
    """
    import torch
    from safetensors.torch import load_file

    content: Any = {}
    if path.suffix == ".safetensors":
        content = load_file(path)
    elif path.suffix == ".pt":
        content = torch.load(path, weights_only=True)
    elif path.name == "trainer.json":
        content = without_times(json.loads(path.read_bytes()))

    def exactly(value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            return repr(value)
        content = value.contiguous().flatten().view(torch.uint8).numpy() if value.numel() else b""
        return f"{value.dtype} {list(value.shape)} {hashlib.sha256(content).hexdigest()}"

    return {name: exactly(value) for name, value in flat(content).items()}


def without_times(value: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in value.items() if not TIMES.fullmatch(name)}


def differing_entries(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> str:
    """Return the first step of two logs that differs, and in what; nothing if they are the same to the bit."""
    for at, (first, second) in enumerate(zip(one, two, strict=False), 1):
        if apart := [name for name in first | second if repr(first.get(name)) != repr(second.get(name))]:
            shown = ", ".join(f"{name} {first.get(name)} -> {second.get(name)}" for name in apart)
            return f"step {first.get('step', at)}: {shown}"
    steps = [[entry.get("step") for entry in entries] for entries in (one, two)]
    return f"entries of the log: {steps[0]} -> {steps[1]}" if len(one) != len(two) else ""
