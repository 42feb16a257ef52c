"""Checkpoints: ordinary Hugging Face directories that are either complete or absent.

    run/run.json                    the options and their resolved values
    run/log.jsonl                   losses, rates, speed, changes
    run/last                        a link to the newest checkpoint
    run/step-00000020/              config.json, model.safetensors, tokenizer: AutoModelForMaskedLM loads it
        optimizer.pt  trainer.json  read only by this library: the optimizer's moments; the state (`state`)
        beside.pt                   parameters of objectives; often absent
        …                           exported files of methods
        README.md                   a model card; no other file depends on it, so it may be edited
        checkpoint.json             written last: size and SHA-256 of every other file

A checkpoint is written under a temporary name, fsynced and renamed, in a thread while training continues. Seeds of a
fine-tuning are written and checked in the same way.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.staging import StateDictStager
from transformers import PreTrainedModel

from bertdata import BertdataError
from bertdata.support import (
    TEMPORARY,
    BuildError,
    DatasetError,
    UsageError,
    digest,
    fsync_directory,
    is_out_of_memory,
    locked,
    make_directory,
    naming,
    write_file,
)
from bertrain import card, state
from bertrain.config import Config, default_out
from bertrain.methods import Method
from bertrain.models.families import add_names_of_4
from bertrain.objectives import Learner

INDEX, OPTIMIZER, BESIDE = "checkpoint.json", "optimizer.pt", "beside.pt"


class Content(NamedTuple):
    """The content of a checkpoint besides the model's configuration: live tensors, or copies of them."""

    weights: Mapping[str, torch.Tensor]  # the state dict of a model
    objects: Mapping[str, Any]  # file name → the object that torch.save writes
    files: Mapping[str, bytes]


def write(target: Path, model: PreTrainedModel, content: Content, *, methods: Sequence[Method] = ()) -> None:
    """Write a directory that AutoModelForMaskedLM loads, with `publish`.

    model: provides the configuration. methods: each may convert the weights to those of an ordinary model, and write
    more files.
    """
    with publish(target) as temporary:
        weights = content.weights
        for method in methods:
            weights = method.export(model, weights, content.objects.get(BESIDE, {}), temporary)
        add_names_of_4(model.config)
        model.save_pretrained(temporary, state_dict=dict(weights))
        for name, saved in content.objects.items():
            torch.save(saved, temporary / name)
        for name, data in content.files.items():
            (temporary / name).write_bytes(data)


@contextmanager
def publish(target: Path) -> Iterator[Path]:
    """Yield a temporary directory for a model. On exit, sync it, add the index, and rename it to `target`.

    Raises OSError or BuildError if there is no room. If an error occurs before the renaming, an existing `target` is
    unchanged.
    """
    temporary = target.with_name(f".{target.name}{TEMPORARY}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with naming(target):
            make_directory(target.parent)  # and the directory of the run, if somebody removed it
            temporary.mkdir()
            yield temporary
            _seal(temporary)
            shutil.rmtree(target, ignore_errors=True)
            os.replace(temporary, target)
            fsync_directory(target.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not (isinstance(error, SafetensorError | RuntimeError) or type(error) is Exception):
            raise  # safetensors, torch and tokenizers report a failing disk like this
        reason = str(error).partition("\n")[0]
        sentence = f"{target} cannot be written ({reason}); make room and run the same command again with --out DIR"
        raise BuildError(sentence, "unwritable", option="out", given=str(target)) from None


def _seal(directory: Path) -> None:
    """Sync all files of a directory, then write the index: the size and the SHA-256 of each file."""

    def fail(error: OSError) -> None:
        raise error  # os.walk would ignore it

    files = {}
    mode = (directory / "config.json").stat().st_mode  # safetensors writes files that only the owner can read
    for root, _, names in os.walk(directory, topdown=False, onerror=fail):
        for path in sorted(Path(root, name) for name in names):
            path.chmod(mode)
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            if path != directory / card.CARD:
                name = path.relative_to(directory).as_posix()
                files[name] = {"bytes": path.stat().st_size, "sha256": digest(path)[0]}
        fsync_directory(Path(root))
    write_file(directory / INDEX, json.dumps({"files": files}, indent=1).encode())


def fault_of(path: Path) -> str | None:
    """Return why a checkpoint is damaged or incomplete, or None. Raises DatasetError if it cannot be read now."""
    try:
        files = json.loads((path / INDEX).read_bytes())["files"]
        if "config.json" not in files or not any(name.endswith(".safetensors") for name in files):
            return f"{INDEX} lists no weights"
        for name, stated in files.items():
            if (path / name).stat().st_size != stated["bytes"] or digest(path / name)[0] != stated["sha256"]:
                return f"{name} does not match {INDEX}"
    except (DatasetError, FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        return str(error)
    except OSError as error:
        sentence = f"checkpoint {path} cannot be read: {error.strerror}; run the same command again when it can be read"
        raise DatasetError(sentence, "unreadable", given=str(path)) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{INDEX} is not readable"
    return None


def objective_tensors(learner: Learner) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of the objectives, by name."""
    return {name: tensor for name, tensor in learner.state_dict().items() if name.startswith("objectives.")}


def read_optimizer(path: Path, optimizer: torch.optim.Optimizer, learner: Learner) -> None:
    """Load the optimizer's moments and the parameters of objectives. The settings of this run stay unchanged.

    Never unpickles (weights_only). Raises DatasetError if the files are damaged or belong to other parameters.
    """
    try:
        if names := objective_tensors(learner).keys():
            beside = torch.load(path / BESIDE, map_location="cpu", weights_only=True)
            if beside.keys() != names:
                raise ValueError(f"objectives had {', '.join(beside)}")
            learner.load_state_dict(beside, strict=False)
        saved = torch.load(path / OPTIMIZER, map_location="cpu", weights_only=True)
        for old, group in zip(saved["param_groups"], optimizer.param_groups, strict=False):
            old |= {name: value for name, value in group.items() if name != "params"}
        optimizer.load_state_dict(saved)
    except Exception as error:  # for damaged bytes, torch raises any exception
        if is_out_of_memory(error) or (isinstance(error, OSError) and not isinstance(error, FileNotFoundError)):
            raise
        reason = " ".join(str(error).split()[:30])
        sentence = (
            f"{path} has no optimizer state of these parameters ({reason}); give the same --objective and methods, "
            "a different checkpoint, or only its weights with --init"
        )
        raise DatasetError(sentence, "other-settings", option="objective", given=str(path)) from None


STEP, LAST, DAMAGED = "step-", "last", "damaged-"
STALE_S = 65.0  # seconds until a machine sees new files of a different machine (NFS: 60)
LAUNCH = ".launch"  # a file in a run directory: the id of torchrun's launch that made the directory
_RUN_FILES = r"\..*|.*\.(out|log|toml|tmp)|run\.json|log\.jsonl|record-id|tensorboard|wandb|last|(step|damaged)-.*"
"""The files that a run directory without a checkpoint may have."""


def directory_of(config: Config) -> Path:
    """Return the directory of a run: --out, or a new one in runs/. Called on rank 0.

    If torchrun restarts its processes, they get the same directory again.
    """
    if config.out:
        return Path(config.out)
    first, launch = Path(default_out(config)).absolute(), os.environ.get("TORCHELASTIC_RUN_ID", "")
    launch += f" of process {os.getppid()}" * (launch == "none")  # the same for all launches without --rdzv-id
    if launch and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        runs = [path for path in first.parent.glob(f"*/{LAUNCH}") if path.read_text() == launch]
        if runs:
            return max(runs, key=lambda path: path.stat().st_mtime).parent
    make_directory(first.parent)
    while True:
        with suppress(FileExistsError):  # a different launch just made this directory
            (run := free(first)).mkdir()
            write_file(run / LAUNCH, launch.encode())
            return run


def remove_unused(run: Path, made: bool) -> None:
    """Remove the lock of a run without a log, and its directory if the run has made it."""
    with suppress(OSError):
        if not (run / "log.jsonl").exists():
            (run / ".lock").unlink(missing_ok=True)
            (run / LAUNCH).unlink(missing_ok=True)
            if made:
                run.rmdir()


def free(path: Path) -> Path:
    """Return the first path of NAME, NAME-2, NAME-3 and so on that does not exist."""
    paths = chain([path], (path.with_name(f"{path.name}-{number}") for number in count(2)))
    return next(each for each in paths if not each.exists())


@contextmanager
def lock(run: Path) -> Iterator[None]:
    """Keep other jobs out of a run directory until the context ends or the process dies."""
    if not next(path for path in (run.absolute(), *run.absolute().parents) if path.exists()).is_dir():
        sentence = f"--out {run} is a file, or below one; give a directory"
        raise UsageError(sentence, "out-exists", option="out", given=str(run))
    make_directory(run)
    with locked(run / ".lock", f"{run} is in use", "give a different --out"):
        yield


def require_new(out: str) -> Path:
    """Return the directory of --out. Raises UsageError if it is a file or not empty."""
    target = Path(out).resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        sentence = f"--out {out} is not an empty directory; give a new one"
        raise UsageError(sentence, "out-exists", option="out", given=out)
    return target


def _checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run, newest first. Raises OSError if they cannot be listed."""
    try:
        names = os.listdir(run)
    except (FileNotFoundError, NotADirectoryError):
        return []
    paths = [run / name for name in names if re.fullmatch(STEP + r"\d+", name)]
    return sorted((path for path in paths if path.is_dir()), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(path.name.removeprefix(STEP))


def newest(run: Path) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint of a run, or None, and a warning for each newer one that is damaged.

    Raises DatasetError if all are damaged or one cannot be read now, and OSError if the directory cannot be listed.
    """
    return _first_complete(_checkpoints(run), "out")


def _first_complete(paths: Sequence[Path], option: str) -> tuple[Path | None, list[str]]:
    warnings: list[str] = []
    for path in paths:
        if (fault := fault_of(path)) is None:
            return path, warnings
        warnings.append(f"checkpoint {path} is damaged: {fault}")
    if warnings:
        sentence = f"{warnings[0]}, and no older one is complete; remove the damaged ones, or give a new directory"
        raise DatasetError(sentence, "damaged", option=option, given=str(paths[0]))
    return None, []


def wait_until_seen(path: Path) -> str:
    """Return the SHA-256 of a checkpoint's index, once this machine sees it. Raises DatasetError after a time limit."""
    run, end = path.parent, time.monotonic() + STALE_S
    while not (run.is_dir() and os.listdir(run) and (path / INDEX).is_file()):  # listing makes NFS query its server
        if time.monotonic() > end:
            sentence = f"this rank does not see {path}, but rank 0 does; give an --out that all machines share"
            raise DatasetError(sentence, "other-stream", option="out", given=str(run))
        time.sleep(1)
    return hashlib.sha256((path / INDEX).read_bytes()).hexdigest()


def choose(run: Path) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint of a run, and warnings. Reads every byte of it. The caller holds the lock.

    Damaged newer checkpoints are renamed, and unfinished ones are removed. Raises DatasetError if no checkpoint is
    complete, or if one cannot be read now: a run never starts from the beginning in a directory with checkpoints.
    Raises UsageError if the run is new and its directory has files that do not belong to a run.
    """
    path, warnings = newest(run)
    others = sorted(name for name in os.listdir(run) if not re.fullmatch(_RUN_FILES, name))
    if others and path is None:
        sentence = f"--out {run} has files that do not belong to a run ({', '.join(others[:3])}); give a new directory"
        raise UsageError(sentence, "out-exists", option="out", given=str(run))
    named = zip(warnings, _checkpoints(run), strict=False)
    warnings = [f"{warning}; renamed to {set_aside(damaged)}" for warning, damaged in named]
    for unfinished in run.glob(f".{STEP}*{TEMPORARY}"):
        shutil.rmtree(unfinished, ignore_errors=True)
    return path, warnings


def set_aside(damaged: Path) -> Path:
    """Rename a checkpoint to damaged-XXXXXXXX, or damaged-XXXXXXXX-2 and so on, and return the new path.

    seed-0 of a fine-tuning becomes damaged-seed-0.
    """
    renamed = damaged.rename(free(damaged.with_name(DAMAGED + damaged.name.removeprefix(STEP))))
    fsync_directory(renamed.parent)
    return renamed


def _stays(path: Path) -> bool:
    """Return whether a checkpoint is a milestone of --save-at, or may be one, as its state cannot be read."""
    try:
        return bool(state.read(path).milestones)
    except (OSError, DatasetError) as error:
        return not isinstance(error, FileNotFoundError)


def find(path: Path, option: str = "checkpoint") -> Path:
    """Return the directory of a model: the path itself, or the newest complete checkpoint of a run.

    option: the option that names it, for errors. Raises UsageError if there is no model, DatasetError if it is damaged.
    """
    is_model = (path / "config.json").is_file()
    if is_model and not (path / INDEX).exists():  # written by a different program
        return path
    complete, _ = _first_complete([path] if is_model else _checkpoints(path), option)
    if not complete:
        sentence = f"{path} has no checkpoint; give the directory of a run or of a model"
        raise UsageError(sentence, "not-a-run", option=option, given=str(path))
    return complete


def resolved(spec: str, option: str = "checkpoint") -> str:
    """Return the directory of a model: the newest checkpoint if `name` is a run, else `name` unchanged.

    option: the option that names it. Raises the errors of `find`.
    """
    return str(find(Path(spec), option)) if spec and Path(spec).is_dir() else spec


class Writer:
    """A writer of a run's checkpoints, one at a time. Only rank 0 saves."""

    def __init__(self, keep: int, saved: Path | None, warn: Callable[[str], None], methods: Sequence[Method]) -> None:
        """saved: the checkpoint to resume from. warn: prints a line, from any thread. methods: those of the run."""
        self.keep, self.saved, self.warn, self._methods = keep, saved, warn, methods
        self._stager = StateDictStager(pin_memory=torch.cuda.is_available())
        self._thread, self._writing = ThreadPoolExecutor(1), Future[None]()
        self._writing.set_result(None)

    @property
    def saved_step(self) -> int | None:
        """The step of the newest checkpoint on disk."""
        return step_of(self.saved) if self.saved else None

    def describe(self) -> str:
        """Return a sentence about the newest checkpoint of a stopped run."""
        if not self.saved:
            return "Nothing is saved yet; run the same command again."
        return f"Step {self.saved_step} is saved; run the same command with --out {self.saved.parent} to continue."

    def save(self, target: Path, model: PreTrainedModel, content: Content, *, required: bool) -> None:
        """Copy the content of a checkpoint, and start writing it to the directory `target`.

        Waits for the previous write first. If the disk is full, prints a warning and keeps the earlier checkpoints.
        required: wait for the end of the write, and raise OSError or BertdataError if it fails.
        """
        self.wait()
        copied = Content(*self._stager.stage([dict(content.weights), dict(content.objects), dict(content.files)]))
        self._writing = self._thread.submit(self._write, target, model, copied, required)
        if required:
            self.wait()

    def _write(self, target: Path, model: PreTrainedModel, content: Content, required: bool) -> None:
        try:
            log = target.with_name("log.jsonl")  # synced first: it must not lack entries of the checkpoint
            with suppress(FileNotFoundError), naming(log), open(log, "rb") as file:  # the next entry writes it
                os.fsync(file.fileno())
            write(target, model, content, methods=self._methods)
            self.saved = target
            self.clear(target)
        except (OSError, BertdataError) as error:
            if required:
                raise
            self.warn(f"no checkpoint of step {step_of(target)} was written, and training continues: {error}")

    def clear(self, saved: Path) -> None:
        """Make `last` point to a checkpoint, and remove old checkpoints except milestones and the newest `keep`.

        Prints a warning if this fails. `last` is a directory if the run was copied and the copy replaced the link.
        """
        link, temporary = saved.with_name(LAST), saved.with_name(f".{LAST}{TEMPORARY}")
        try:
            if not link.is_symlink():
                shutil.rmtree(link, ignore_errors=True)
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(saved.name)
            os.replace(temporary, link)
            fsync_directory(saved.parent)
        except OSError as error:  # a file system without links
            self.warn(f"{link} cannot be made: {error.strerror}")
        try:
            others = [path for path in _checkpoints(saved.parent) if path != saved and not _stays(path)]
            for old in others[self.keep - 1 :]:
                shutil.rmtree(old)
        except OSError as error:
            self.warn(f"{error.filename} cannot be removed: {error.strerror}")

    def wait(self) -> None:
        """Wait until nothing is being written. Raises the error of a required write."""
        self._writing.result()
