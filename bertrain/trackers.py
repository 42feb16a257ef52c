"""Programs that get the log as well: TensorBoard, Weights & Biases, Trackio.

None of them ends a run: what fails is a warning, and the tracker gets no more. log.jsonl stays the record that
everything else reads.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bertdata.support import UsageError, install, write_file

ID = "record-id"  # the file of a run directory that names its record elsewhere
PROJECT = "bertrain"
ANSWER_S = 20.0  # how long a server may take at the start and at the end of a run

Record = tuple[Callable[[dict[str, float], int], object], Callable[[], object]]
"""What writes the numbers of a step, and what ends the record."""


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
"""A name for --log-to, which is that of a library, → what begins the record of a run directory.

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
    """The trackers of a run at work."""

    def __init__(
        self, names: Sequence[str], out: Path, options: dict[str, Any], *, step: int, warn: Callable[[str], None]
    ) -> None:
        """step: the last finished step. A resumed run continues its record. warn: shows a line."""
        self._records: dict[str, Record] = {}
        self._warn = warn
        if not names:
            return
        words = (out / ID).read_text(errors="replace").split() if (out / ID).exists() else []
        identity = words[0] if words else secrets.token_hex(4)
        write_file(out / ID, f"{identity}\n".encode())
        for name in names:
            with self._ended_by_error(name):
                self._records[name] = TRACKERS[name](out, options, identity, step)

    def write(self, numbers: dict[str, float], step: int) -> None:
        """Send the numbers of a step."""
        for name, (write, _) in list(self._records.items()):
            with self._ended_by_error(name):
                write(numbers, step)

    def close(self) -> None:
        """End all records."""
        for name, (_, close) in list(self._records.items()):
            with self._ended_by_error(name):
                close()

    @contextmanager
    def _ended_by_error(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of a third-party library, which must not end a run
            self._records.pop(name, None)
            reason = str(error).partition("\n")[0] or type(error).__name__
            self._warn(f"--log-to {name} has failed and takes no more entries: {reason}")
