"""The directory of a run: its lock, and which of its checkpoints are read, kept, set aside and removed.

A run resumes from the newest checkpoint whose files are what its checkpoint.json says. Newer ones are damaged: they
become damaged-XXXXXXXX, of which the newest two are kept. An error of reading that may pass, such as one of a network
file system, ends the run instead, and changes nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

from bertdata.errors import DatasetError, UsageError, counted
from bertdata.files import TEMPORARY, fsync_directory, locked, make_directory
from bertrain.options.config import Config
from bertrain.run import card, state
from bertrain.run.checkpoint import INDEX, fault_of

STEP = "step-"  # what the name of a directory to resume from begins with; the number of the step follows
DAMAGED, KEPT_DAMAGED = "damaged-", 2  # what a directory that cannot be used is called; how many of them stay
STALE_S = 65.0  # for so long a machine may not see what another wrote to a directory that they share (NFS: 60)


class Lock:
    """Keeps a second job out of a run directory, from entering until leaving, for as long as this process lives."""

    def __init__(self, run: Path) -> None:
        self._run, self._held = run, ExitStack()
        self._file: os.stat_result | None = None

    def __enter__(self) -> Lock:
        run = self._run
        try:
            if run.exists() and not run.is_dir():
                raise FileExistsError
            make_directory(run)
        except (FileExistsError, NotADirectoryError):
            sentence = f"--out {run} cannot be made, because a file has this name; give another --out"
            raise UsageError(sentence, "out-exists", option="out", given=str(run)) from None
        self._held.enter_context(locked(run / ".lock", f"{run} is in use", "give another --out"))
        self._file = (run / ".lock").stat()
        return self

    def require(self) -> None:
        """Takes the lock again if somebody removed its file. Raises BuildError if another job has taken it since."""
        with suppress(FileNotFoundError):
            if self._file and os.path.samestat((self._run / ".lock").stat(), self._file):
                return
        self._held.close()
        self.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._held.close()


def require_new(out: str) -> Path:
    """The directory of --out. Raises UsageError if there is anything in it, or if it is a file."""
    target = Path(out).resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        sentence = f"--out {out} is not an empty directory; give a new one"
        raise UsageError(sentence, "out-exists", option="out", given=out)
    return target


def _checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, the newest first. Raises OSError if they cannot be listed."""
    try:
        names = os.listdir(run)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [run / name for name in names if re.fullmatch(STEP + r"\d{8}", name)]
    return sorted((path for path in found if path.is_dir()), reverse=True)


def newest(run: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint of a run, if there is one, and a warning for each newer one that is damaged.

    Raises DatasetError if one cannot be read now, and OSError if the directory cannot be listed.
    """
    warnings: list[str] = []
    for path in _checkpoints(run):
        fault = fault_of(path)
        if fault is None:
            return path, warnings
        warnings.append(f"checkpoint {path} is damaged: {fault}")
    return None, warnings


class Choice(NamedTuple):
    """The checkpoint that a run resumes from, as rank 0 chose it for all ranks."""

    path: Path | None  # None: the run is new
    index_sha256: str  # of its checkpoint.json
    warnings: tuple[str, ...]

    def check(self) -> None:
        """Raises DatasetError unless this rank sees the same checkpoint, or sees it after a while."""
        if self.path is None:
            return
        end = time.monotonic() + STALE_S
        while (seen := self._seen(self.path)) != self.index_sha256:
            if time.monotonic() > end:
                sentence = (
                    f"rank 0 resumes from {self.path}, and another rank does not see the same checkpoint there "
                    f"({seen[:40]}); give an --out that all machines share"
                )
                raise DatasetError(sentence, "other-stream", option="out", given=str(self.path.parent))
            time.sleep(1)

    @staticmethod
    def _seen(path: Path) -> str:
        """The digest of a checkpoint's index, or why it cannot be read."""
        try:
            os.listdir(path.parent)  # a network file system then asks its server what is there
            return hashlib.sha256((path / INDEX).read_bytes()).hexdigest()
        except OSError as error:
            return str(error.strerror)


def choose(run: Path, say: Callable[[str], None]) -> Choice:
    """The newest complete checkpoint of a run, whose lock is held. Reads every byte of it. Removes unfinished ones.

    Newer ones, which are damaged, get another name. say: is told of those that are removed, before. Raises DatasetError
    if no checkpoint is complete, or one cannot be read now: a run never starts anew beside checkpoints.
    """
    path, warnings = newest(run)
    if warnings and path is None:
        raise DatasetError(
            f"{warnings[0]}, and --out has no other that is complete; move its step-* directories away to begin again, "
            "or give another --out",
            "damaged",
            option="out",
            given=str(run),
        )
    named = zip(warnings, _checkpoints(run), strict=False)
    warnings = [f"{warning}; it is now {set_aside(damaged)}" for warning, damaged in named]
    if warnings:
        fsync_directory(run)
        _remove_damaged(run, say)
    _remove_unfinished(run)
    index = hashlib.sha256((path / INDEX).read_bytes()).hexdigest() if path else ""
    return Choice(path, index, tuple(warnings))


def set_aside(damaged: Path) -> Path:
    """Renames a checkpoint to damaged-XXXXXXXX, or damaged-XXXXXXXX-2 and so on, and returns the new path.

    seed-0 of a fine-tuning becomes damaged-seed-0.
    """
    first = damaged.with_name(DAMAGED + damaged.name.removeprefix(STEP))
    paths = chain([first], (first.with_name(f"{first.name}-{number}") for number in count(2)))
    return damaged.rename(next(path for path in paths if not path.exists()))


def _remove_damaged(run: Path, say: Callable[[str], None]) -> None:
    """Removes all but the newest KEPT_DAMAGED of what `set_aside` has made. say: is told of each before."""
    found = [match for name in os.listdir(run) if (match := re.fullmatch(DAMAGED + r"(\d{8})(?:-(\d+))?", name))]
    for old in sorted(found, key=lambda match: (match[1], int(match[2] or 1)))[:-KEPT_DAMAGED]:
        say(f"{run / old[0]}, a damaged checkpoint, is removed; the newest {KEPT_DAMAGED} stay")
        shutil.rmtree(run / old[0])


def _remove_unfinished(run: Path) -> None:
    """Removes what a killed process was writing, also a card: the run may never save this step again."""
    for path in run.glob(f"{STEP}*/{card.CARD}{TEMPORARY}"):
        with suppress(OSError):
            path.unlink()
    for path in run.glob(".*.tmp"):
        if re.fullmatch(rf"\.{STEP}\d{{8}}\.tmp", path.name):
            shutil.rmtree(path, ignore_errors=True)


def remove_others(target: Path, *, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints of a run, of which `target` stays, and milestones.

    Raises the first OSError, after it has tried all.
    """
    others = [path for path in _checkpoints(target.parent) if path != target and not _stays(path)]
    failures = []
    for old in others[keep - 1 :]:
        try:
            shutil.rmtree(old)
        except OSError as error:
            failures.append(error)
    if failures:
        raise failures[0]


def _stays(path: Path) -> bool:
    """Whether a checkpoint is a milestone of --save-at, or may be one, as its state cannot be read."""
    try:
        return bool(state.read(path).milestones)
    except FileNotFoundError:
        return False
    except (OSError, DatasetError):
        return True


def needed_space(config: Config, parameters: int, trained: int) -> tuple[str, int]:
    """The checkpoints that a run may have at one time, for people, and how many bytes they take at most.

    parameters, trained: of the model, all and those that are trained. Each checkpoint has the weights, and two moments
    of what is trained.
    """
    milestones = sum(map(len, config.milestones.values()))
    names = [counted(config.keep, "checkpoint")] + [counted(milestones, "milestone")] * bool(milestones)
    needed = (4 * parameters + 8 * trained) * (config.keep + milestones + 1)
    return f"{', '.join(names)} and one being written", needed


def find(path: Path, option: str = "checkpoint") -> Path:
    """A directory with a model in it: the path itself, or the newest complete checkpoint of a run.

    option: the option that names it, for errors. Raises UsageError if there is none, DatasetError if it is damaged.
    """
    if (path / "config.json").is_file():
        if (path / INDEX).exists() and (fault := fault_of(path)):
            sentence = f"checkpoint {path} is damaged: {fault}; give the run's directory to use another"
            raise DatasetError(sentence, "damaged", option=option, given=str(path))
        return path
    checkpoint, warnings = newest(path)
    if checkpoint is None:
        if warnings:
            sentence = f"{warnings[0]}, and {path} has no other that is complete; give another run, or a checkpoint"
            raise DatasetError(sentence, "damaged", option=option, given=str(path))
        if not path.exists():
            sentence = f"{path} does not exist; give the directory of a run or of a checkpoint"
            raise UsageError(sentence, "not-found", option=option, given=str(path))
        sentence = f"{path} holds no checkpoint; give the directory of a run, or one with config.json and weights"
        raise UsageError(sentence, "not-a-run", option=option, given=str(path))
    return checkpoint


def resolved(spec: str, option: str = "checkpoint") -> str:
    """The directory of a model, and of a run that of its newest checkpoint; a name on the hub, or none, as it is.

    option: as `find` has it, which raises the same errors.
    """
    return str(find(Path(spec), option)) if spec and Path(spec).is_dir() else spec
