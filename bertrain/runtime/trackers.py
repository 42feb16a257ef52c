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
from typing import Any, NamedTuple

from bertdata.errors import UsageError, install
from bertdata.files import write_file

ID = "record-id"  # the file of a run directory with the name of its record elsewhere, and the trackers that have it
PROJECT = "bertrain"
ANSWER_S, END_S = 20.0, 60.0  # how long a server may take at the start of a run; how long the end of a run may wait
LEAVING_S = 5.0  # how long a run may wait that ends with an error


class Record(NamedTuple):
    """What a tracker gets of a run."""

    out: Path
    options: dict[str, Any]
    id: str
    step: int  # after which the run goes on

    @property
    def name(self) -> str:
        return self.out.resolve().name


class Writer(NamedTuple):
    """What a tracker does: writes numbers of a step, and ends. note: what the user should know."""

    write: Callable[[dict[str, float], int], object]
    close: Callable[[], object]
    note: str = ""


def _tensorboard(record: Record) -> Writer:
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(record.out / "tensorboard", purge_step=record.step + 1)

    def write(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            board.add_scalar(name, value, step)

    return Writer(write, board.close)


def _wandb(record: Record) -> Writer:
    import wandb

    options: dict[str, Any] = {
        "project": os.environ.get("WANDB_PROJECT", PROJECT),
        "name": os.environ.get("WANDB_NAME", record.name),
        "id": record.id,
        "dir": str(record.out),
        "config": record.options,
        "settings": wandb.Settings(console="off", init_timeout=ANSWER_S, finish_timeout=ANSWER_S),
    }
    note = ""
    if wandb.setup().settings.mode in ("offline", "dryrun", "disabled"):
        run = wandb.init(**options)
    else:
        try:
            if not wandb.login(prompt=False, verify=False):
                raise PermissionError("there is no account here: run wandb login")
            run = wandb.init(**options, resume="allow")
        except Exception as error:  # of the network, or of the account
            wandb.teardown()  # or the id would be in use
            run = wandb.init(**options, mode="offline")
            reason = str(error).partition("\n")[0]
            note = f"Weights & Biases does not take the log ({reason}); it is kept in {record.out / 'wandb'}, and "
            note += "wandb sync sends it later"
    return Writer(lambda numbers, step: run.log(numbers, step=step), run.finish, note)


def _trackio(record: Record) -> Writer:
    import trackio

    name, project = f"{record.name}-{record.id}", os.environ.get("TRACKIO_PROJECT", PROJECT)
    run = trackio.init(project=project, name=name, config=record.options, resume="allow", embed=False)
    return Writer(lambda numbers, step: run.log(numbers, step=step), run.finish)


TRACKERS: dict[str, Callable[[Record], Writer]] = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
"""A name for --log-to, which is that of a library, → what begins the record, in the thread of the tracker."""
EXTRAS = {"tensorboard": "train", "wandb": "wandb", "trackio": "trackio"}
"""The library of a tracker → the extra that installs it."""


def require(names: Sequence[str]) -> None:
    """Raises UsageError for a tracker whose library is not installed. Imports none."""
    for name in names:
        if sys.modules.get(name) is None and not find_spec(name):
            sentence = f"--log-to {name} needs {name}, which is not installed; {install(EXTRAS[name])}"
            raise UsageError(sentence, "not-installed", option="log_to", given=name)


class Tracker:
    """A tracker at work, in its thread."""

    def __init__(self, name: str, record: Record, *, has: range = range(0)) -> None:
        """has: steps that the record has already, which are not written again."""
        self._name, self._has = name, has
        self.fault = ""
        """What the user should know; it may change at any time."""
        self._entries: queue.SimpleQueue[tuple[dict[str, float], int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=[record], name=name, daemon=True)
        self._thread.start()

    def write(self, numbers: dict[str, float], step: int) -> None:
        """Hands numbers over, and waits for nothing."""
        if step not in self._has and self._thread.is_alive():
            self._entries.put((numbers, step))

    def end(self) -> None:
        """Lets the record end, once it has all entries. Waits for nothing."""
        self._entries.put(None)

    def wait(self, seconds: float) -> None:
        """Waits at most so long for the end."""
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self.fault = f"--log-to {self._name} has not taken all of the log in time; log.jsonl has it"

    def _work(self, record: Record) -> None:
        try:
            writer = TRACKERS[self._name](record)
            self.fault = writer.note
            while (entry := self._entries.get()) is not None:
                writer.write(*entry)
            writer.close()
        except Exception as error:  # of a library of others, which must not end a run
            reason = str(error).partition("\n")[0] or type(error).__name__
            self.fault = f"--log-to {self._name} has failed and takes no more entries: {reason}"


def start(names: Sequence[str], out: Path, options: dict[str, Any], *, step: int, logged: int) -> list[Tracker]:
    """Starts the trackers of a run, which goes on after `step`. logged: the last step that log.jsonl has had.

    Steps between the two are taken again. TensorBoard replaces them; the others have them, and do not get them again.
    """
    if not names:
        return []
    words = (out / ID).read_text(errors="replace").split() if (out / ID).exists() else []
    identity, *known = words or [secrets.token_hex(4)]
    write_file(out / ID, " ".join([identity, *sorted({*known, *names})]).encode())
    record = Record(out, options, identity, step)
    has = {name: range(step + 1, logged) for name in known if name != "tensorboard"}
    return [Tracker(name, record, has=has.get(name, range(0))) for name in names]


def close(running: Sequence[Tracker], seconds: float) -> None:
    """Ends all records at the same time. Waits at most so long for all of them together."""
    until = time.monotonic() + seconds
    for tracker in running:
        tracker.end()
    for tracker in running:
        tracker.wait(until - time.monotonic())
