"""TensorBoard, Weights & Biases and Trackio: with --log-to, the log is also sent to them.

An error of a library never ends a run: it is a warning, and the library gets no more entries. log.jsonl stays complete.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bertdata.support import UsageError, install, write_file

ID = "record-id"  # a file in a run directory: the name of its record in other programs
ANSWER_S = 20.0  # time limit for a server at the start and at the end of a run


def _tensorboard(out: Path, options: dict[str, Any], identity: str, step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(out / "tensorboard", purge_step=step + 1)

    def log(numbers: dict[str, float], *, step: int) -> None:
        for name, value in numbers.items():
            board.add_scalar(name, value, step)

    return SimpleNamespace(log=log, finish=board.close)


def _wandb(out: Path, options: dict[str, Any], identity: str, step: int) -> Any:
    import wandb

    is_offline = wandb.setup().settings.mode in ("offline", "dryrun", "disabled")
    if not is_offline and not wandb.login(prompt=False, verify=False):
        raise PermissionError("you are not logged in; run wandb login, or set WANDB_MODE=offline")
    return wandb.init(
        project=os.environ.get("WANDB_PROJECT", "bertrain"),
        name=os.environ.get("WANDB_NAME", out.resolve().name),
        id=identity,
        dir=str(out),
        config=options,
        settings=wandb.Settings(console="off", init_timeout=ANSWER_S, finish_timeout=ANSWER_S),
        resume=None if is_offline else "allow",
    )


def _trackio(out: Path, options: dict[str, Any], identity: str, step: int) -> Any:
    import trackio

    name, project = f"{out.resolve().name}-{identity}", os.environ.get("TRACKIO_PROJECT", "bertrain")
    return trackio.init(project=project, name=name, config=options, resume="allow", embed=False)


TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
"""(Library, the extra that installs it) → the function that starts the record of a run.

Its arguments: the run directory, the options, a name for the record, and the last step that the record may have. It
returns an object with `log(numbers, step=…)` and `finish()`.
"""


def require(names: Sequence[str]) -> None:
    """Raise UsageError for a library that is not installed. Does not import it."""
    for name in names:
        if sys.modules.get(name) is None and not find_spec(name):
            sentence = f"--log-to {name} needs {name}, which is not installed; {install(name)}"
            raise UsageError(sentence, "not-installed", option="log_to", given=name)


class Trackers:
    """The records of a run in the libraries of --log-to."""

    def __init__(
        self, names: Sequence[str], out: Path, options: dict[str, Any], *, step: int, warn: Callable[[str], None]
    ) -> None:
        """step: the last finished step; a resumed run continues its records. warn: prints a line."""
        self._records, self._warn = dict[str, Any](), warn
        identity = (out / ID).read_text().strip() if (out / ID).exists() else secrets.token_hex(4)
        write_file(out / ID, f"{identity}\n".encode())
        for name in dict.fromkeys(names):
            self._try(name, lambda: self._records.update({name: TRACKERS[name](out, options, identity, step)}))  # noqa: B023

    def write(self, entry: Mapping[str, Any]) -> None:
        """Send the numbers of a log entry."""
        numbers = {name: value for name, value in entry.items() if isinstance(value, int | float) and name != "step"}
        numbers = {name.replace("validation_", "validation/"): value for name, value in numbers.items()}
        for name, record in list(self._records.items()):
            self._try(name, lambda: record.log(numbers, step=entry["step"]))  # noqa: B023

    def close(self) -> None:
        """End all records."""
        for name, record in list(self._records.items()):
            self._try(name, record.finish)

    def _try(self, name: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # any error of a third-party library
            self._records.pop(name, None)
            reason = str(error).partition("\n")[0] or type(error).__name__
            self._warn(f"--log-to {name} failed and gets no more entries: {reason}")
