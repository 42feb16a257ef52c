"""What a fine-tuning is, and which of its seeds are finished.

A seed is a directory that `checkpoint.publish` wrote: a model, and seed.json, which says what the seed was made of and
what it gave. A seed that is finished is not trained again, and one that was made of something else is never replaced.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from bertdata.support import UsageError, fsync_directory
from bertrain import checkpoint
from bertrain.lab.tasks import Columns, Task
from bertrain.options import flag

SEED = "seed.json"
_CONTENT = "the content of "
_LABELS = "the order of labels"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a seed is trained: options that `finetune` and `suite` share."""

    epochs: int
    patience: int | None
    batch_size: int
    lr: float
    length: int | None  # None until the model is known
    dropout: float
    precision: str
    lora: str | None
    freeze: str | None
    from_scratch: bool


@dataclass(frozen=True, kw_only=True)
class Job:
    """A fine-tuning: what is trained for what, and into which directory."""

    start: str  # the directory of a checkpoint, or a name on the hub
    task: str  # a name of TASKS
    columns: Columns
    files: dict[str, str]  # "train", "dev", and perhaps "test" → a path
    out: Path
    seeds: int
    settings: Settings
    main: str | None = None  # the measure that chooses the epoch, if not the task's own
    teacher: str | None = None  # the directory of a fine-tuned model that gives the labels to train on

    @property
    def held_out(self) -> list[str]:
        """Return the names of the files that models are measured on."""
        return [name for name in self.files if name != "train"]


def made_of(job: Job, task: Task) -> dict[str, Any]:
    """Return all that decides what a seed becomes, by its name in messages. Of a file, its digest."""
    columns = job.columns._asdict()
    options = {"checkpoint": job.start, "task": job.task, **asdict(job.settings), **columns}
    named: dict[str, Any] = {flag(name): value for name, value in options.items() if name != "skip"}
    named |= {"the measure": task.main, "skipping of damaged rows": columns["skip"]}
    named |= {_LABELS: ", ".join(task.names)} if task.names else {}
    contents = {split: [Path(file) for file in task.files(path)] for split, path in job.files.items()}
    contents["checkpoint"] = _files_of_model(job.start)
    if job.teacher:
        contents["teacher"] = _files_of_model(job.teacher)
        named |= {} if contents["teacher"] else {"--teacher": job.teacher}  # a name on the hub
    return named | {f"{_CONTENT}--{name}": _digest(files) for name, files in contents.items()}


def _files_of_model(directory: str) -> list[Path]:
    """Return the files of a model: weights, configuration and tokenizer. None for a name on the hub."""
    kinds = (".safetensors", ".json", ".txt", ".model")
    return sorted(path for path in Path(directory).glob("*") if path.suffix in kinds)


def _digest(files: list[Path]) -> str:
    """Return the SHA-256 of the bytes of files, one after the other."""
    digest = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def place(out: Path, seed: int) -> Path:
    """Return the directory of a seed."""
    return out / f"seed-{seed}"


def finished(out: Path, seed: int) -> dict[str, Any] | None:
    """Return what an earlier start wrote of a finished seed. A damaged one gets a new name, which is printed.

    Raises DatasetError or OSError for an error of reading that may pass, and changes nothing then.
    """
    directory = place(out, seed)
    if not directory.exists():
        return None
    fault, kept = checkpoint.fault_of(directory), _kept(directory)
    if kept and not fault:
        click.echo(f"seed {seed}: finished before, in {directory}", err=True)
        return kept["run"]
    aside, what = checkpoint.set_aside(directory), fault or f"{SEED} is not readable"
    fsync_directory(out)
    click.echo(f"seed {seed}: {directory} is damaged: {what}; it is now {aside}, and is trained again", err=True)
    return None


def _kept(directory: Path) -> dict[str, Any] | None:
    """Return the content of seed.json; None if it is damaged or missing. Raises OSError if it cannot be read now."""
    damaged = ValueError, KeyError, TypeError, AttributeError, RecursionError
    try:
        kept = json.loads((directory / SEED).read_bytes())
        is_whole = kept["of"][f"{_CONTENT}--checkpoint"] and kept["run"]["best_epoch"] and kept["run"]["dev"]
        config = json.loads((directory / "config.json").read_bytes())
        names = config.get("id2label", {"0": "LABEL_0", "1": "LABEL_1"})  # as transformers leaves these out
        kept["labels"] = ", ".join(map(str, names.values()))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, *damaged):
        return None
    return kept if is_whole else None


def task_of(directory: Path) -> str | None:
    """Return the task that a seed was trained for; None if there is no seed."""
    kept = _kept(directory)
    return kept["of"].get("--task") if kept else None


def refuse_others(out: Path, wanted: dict[str, Any]) -> None:
    """Raise UsageError, which names what differs, if a seed was trained differently. wanted: as `made_of`."""
    for directory in sorted(out.glob("seed-*")):
        kept = _kept(directory)
        before = kept["of"] if kept else wanted
        if kept and _LABELS in wanted:  # version 0.1.0 had other orders, and seed.json did not have them
            before = {_LABELS: kept["labels"]} | before
        differ = [name for name in before | wanted if before.get(name) != wanted.get(name)]
        if Path(wanted["--checkpoint"]).is_dir() and f"{_CONTENT}--checkpoint" not in differ:
            differ = [name for name in differ if name != "--checkpoint"]  # the same one by another path
        if differ:
            words = ", ".join(f"{name} {before.get(name)} → {wanted.get(name)}" for name in differ)
            sentence = f"{directory} was trained differently (old → new): {words}; give the same, or another --out"
            raise UsageError(sentence, "other-settings", option="out", given=str(out))
