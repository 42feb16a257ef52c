"""The other libraries, each in an environment of its own: their versions, how these are made, how one is asked.

    python benchmarks/environments.py [DIRECTORY]        makes those that are not there; default: .bench

An environment sees the packages of the Python that runs this, and has those beside that its library needs or wants in
another version. So torch and transformers are there once, and are the same for all. Delete
the directory at any time. What cannot be installed is left out of a measurement, and pip's last word is the reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

PINS = {
    "gigatoken": ["gigatoken==0.10.0", "awkward==2.14.0"],
    "tokenizers": ["tokenizers==1.0.0rc3"],
    "nanotoken": ["nanotoken==0.1.0"],
    "tokie": ["tokie==0.1.4"],
    "datasets": ["datasets==5.2.0"],
    "datatrove": ["datatrove==0.10.1", "orjson==3.13.0"],
    "litdata": ["litdata==0.2.76"],
    "streaming": [
        "mosaicml-streaming==0.13.0", "Brotli==1.2.1", "catalogue==2.0.10", "python-snappy==0.7.3", "cramjam==2.14.0",
        "xxhash==4.1.0", "zstd==1.5.7.2",
    ],
    "megatron": ["megatron-core==0.16.1"],
    "py-spy": ["py-spy==0.4.3"],
}  # fmt: skip
# Installed without what they require: the packages above suffice for local files, and torchvision would need another
# build of torch.
ALONE = ("streaming",)
ROOT = Path(__file__).parent.parent
Found = TypeVar("Found")


class LeftOut(Exception):
    """A library that cannot be measured; says why, in one line."""


def python_of(name: str, directory: Path) -> str:
    """The Python of an environment, which is made if it is not there. Raises LeftOut if that fails."""
    place = directory.absolute() / name
    python, made = place / "bin" / "python", place / "made.json"
    if made.exists() and json.loads(made.read_text()) == PINS[name]:
        return str(python)
    shutil.rmtree(place, ignore_errors=True)
    print(f"making {place}: {' '.join(PINS[name])}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    torch = next(line for line in (ROOT / "constraints.txt").read_text().split() if line.startswith("torch=="))
    (place / "torch.txt").write_text(torch + "\n")
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(place / "torch.txt")]
    install += ["--no-deps"] * (name in ALONE)
    found = subprocess.run([str(python), *install, *PINS[name]], capture_output=True, text=True)
    if found.returncode:
        lines = [line for line in found.stderr.splitlines() if line.startswith("ERROR: ")] or ["pip failed"]
        raise LeftOut(f"not installed: {short(lines[-1].removeprefix('ERROR: '))}")
    made.write_text(json.dumps(PINS[name]))
    return str(python)


def command_of(python: str, script: str, *arguments: object) -> list[str]:
    """A script of this directory, run by an environment: without PYTHONPATH and the user's own packages."""
    return [python, "-s", "-E", str(Path(__file__).parent / script), *map(str, arguments)]


def one_core() -> set[int]:
    """The core that every pass in one thread runs on, ours as theirs."""
    return {max(os.sched_getaffinity(0))}


def without_pictures() -> None:
    """Lets `streaming` be imported beside a torch without CUDA, for which PyPI has no torchvision that loads.

    It imports torchvision for data sets of pictures alone. Where torchvision loads, nothing is changed.
    """
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        names = {"": {}, ".datasets": {"VisionDataset": object}, ".transforms": {}}
        for name, content in (names | {".transforms.functional": {"to_tensor": None}}).items():
            module = ModuleType(f"torchvision{name}")
            module.__dict__.update(content, __spec__=ModuleSpec(module.__name__, None))
            sys.modules[module.__name__] = module


def run(command: list[str], *, seconds: float) -> str:
    """What a command prints. Raises LeftOut if it fails or takes longer; nothing that it started goes on."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            out, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise LeftOut(f"not done after {seconds:.0f} s") from None
        finally:
            stop(process)
    if process.returncode:
        raise LeftOut(reason(errors) or f"ended with status {process.returncode}")
    return out


def last_line(command: list[str], *, seconds: float) -> Any:
    """Runs a command that prints JSON last, and returns it. Raises LeftOut as `run` does."""
    try:
        return json.loads(run(command, seconds=seconds).strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise LeftOut("printed no result") from None


def in_turns(
    turns: dict[str, Callable[[], Found]], rounds: int, library_of: dict[str, str], left_out: dict[str, str]
) -> dict[str, list[Found]]:
    """What each turn gave in each round. If one turn of a library raises LeftOut, the result has none of its turns.

    library_of: the libraries of turns; a failure of any other turn is raised. left_out: gets the reasons.
    """
    found: dict[str, list[Found]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            library = library_of.get(name, "")
            if library in left_out:
                continue
            try:
                found[name].append(turn())
            except LeftOut as why:
                if not library:
                    raise
                left_out[library] = str(why)
                print(f"without {library}: {why}", flush=True)
    return {name: each for name, each in found.items() if library_of.get(name) not in left_out}


def seconds_of(command: list[str], limit: float) -> float:
    """Seconds that a command takes. Raises LeftOut as `run` does."""
    start = time.perf_counter()
    run(command, seconds=limit)
    return time.perf_counter() - start


def stop(process: subprocess.Popen[Any]) -> None:
    """Ends a process that has a session of its own, and all that it started: it may end its own first."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def reason(errors: str) -> str:
    """The last line of what a failed program printed that says something."""
    lines = [line.strip() for line in errors.splitlines() if line.strip() and not line.startswith(" ")]
    named = [line for line in lines if "Error" in line.split(":")[0]]
    return short((named or lines or [""])[-1])


def short(line: str) -> str:
    """At most 150 characters, files without their directories, and nothing that ends a cell of a table."""
    return re.sub(r"/(?:[\w.+-]+/)+", "", line).replace("|", "/")[:150]


if __name__ == "__main__":
    where = Path(sys.argv[1] if len(sys.argv) > 1 else ".bench")
    for each in PINS:
        try:
            print(each, python_of(each, where))
        except LeftOut as why:
            print(each, why)
