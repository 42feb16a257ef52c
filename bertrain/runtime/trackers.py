"""Programs that get the log as well: TensorBoard, Weights & Biases, Trackio.

None of them ends a run or makes a step wait, whatever the network does: each works in a thread of its own, and what
fails there is a warning. log.jsonl stays the record that everything else reads.
"""

from __future__ import annotations

import os
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bertdata.errors import UsageError, install
from bertdata.files import write_file

ID = "record-id"  # the file of a run directory that names its record elsewhere
PROJECT = "bertrain"
ANSWER_S, END_S = 20.0, 60.0  # how long a server may take at the start of a run; how long the end of a run may wait
LEAVING_S = 5.0  # how long a run may wait that ends with an error

Record = tuple[Callable[[dict[str, float], int], object], Callable[[], object]]
"""What writes the numbers of a step, and what ends the record."""
Entries = queue.SimpleQueue[tuple[dict[str, float], int] | None]
"""Numbers and their step; None at the end."""


def _tensorboard(out: Path, options: dict[str, Any], identity: str, step: int) -> Record:
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(out / "tensorboard", purge_step=step + 1)

    def write(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            board.add_scalar(name, value, step)

    return write, board.close


def _wandb(out: Path, options: dict[str, Any], identity: str, step: int) -> Record:
    import wandb

    is_offline = wandb.setup().settings.mode in ("offline", "dryrun", "disabled")
    if not is_offline and not wandb.login(prompt=False, verify=False):
        raise PermissionError("there is no account here; run wandb login, or set WANDB_MODE=offline")
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=os.environ.get("WANDB_NAME", out.resolve().name),
        id=identity,
        dir=str(out),
        config=options,
        settings=wandb.Settings(console="off", init_timeout=ANSWER_S, finish_timeout=ANSWER_S),
        resume=None if is_offline else "allow",
    )
    return lambda numbers, step: run.log(numbers, step=step), run.finish


def _trackio(out: Path, options: dict[str, Any], identity: str, step: int) -> Record:
    import trackio

    name, project = f"{out.resolve().name}-{identity}", os.environ.get("TRACKIO_PROJECT", PROJECT)
    run = trackio.init(project=project, name=name, config=options, resume="allow", embed=False)
    return lambda numbers, step: run.log(numbers, step=step), run.finish


TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
"""A name for --log-to, which is that of a library, → what begins the record of a run directory, in a thread.

It takes the directory, the options of the run, a name for the record, and the step after which the run goes on.
"""
EXTRAS = {"tensorboard": "train", "wandb": "wandb", "trackio": "trackio"}
"""The library of a tracker → the extra that installs it."""


def require(names: Sequence[str]) -> None:
    """Raises UsageError for a tracker whose library is not installed. Imports none."""
    for name in names:
        if sys.modules.get(name) is None and not find_spec(name):
            sentence = f"--log-to {name} needs {name}, which is not installed; {install(EXTRAS[name])}"
            raise UsageError(sentence, "not-installed", option="log_to", given=name)


class Trackers:
    """The trackers of a run at work, each in its thread."""

    def __init__(self, names: Sequence[str], out: Path, options: dict[str, Any], *, step: int) -> None:
        """step: after which the run goes on. A resumed run continues its record."""
        self.faults: list[str] = []
        """What the user should know; more may come at any time."""
        self._entries: dict[threading.Thread, Entries] = {}
        if not names:
            return
        words = (out / ID).read_text(errors="replace").split() if (out / ID).exists() else []
        identity = words[0] if words else secrets.token_hex(4)
        write_file(out / ID, f"{identity}\n".encode())
        for name in names:
            entries: Entries = queue.SimpleQueue()
            given = (name, entries, out, options, identity, step)
            thread = threading.Thread(target=self._work, args=given, name=name, daemon=True)
            self._entries[thread] = entries
            thread.start()

    def write(self, numbers: dict[str, float], step: int) -> None:
        """Hands the numbers of a step over, and waits for nothing."""
        for entries in self._entries.values():
            entries.put((numbers, step))

    def close(self, seconds: float) -> None:
        """Ends all records at the same time. Waits at most so long for all of them together."""
        until = time.monotonic() + seconds
        for entries in self._entries.values():
            entries.put(None)
        for thread in self._entries:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                self.faults.append(f"--log-to {thread.name} has not taken all of the log in time; log.jsonl has it")

    def _work(self, name: str, entries: Entries, *of_run: Any) -> None:
        try:
            write, close = TRACKERS[name](*of_run)
            while (entry := entries.get()) is not None:
                write(*entry)
            close()
        except Exception as error:  # of a library of others, which must not end a run
            reason = str(error).partition("\n")[0] or type(error).__name__
            self.faults.append(f"--log-to {name} has failed and takes no more entries: {reason}")
