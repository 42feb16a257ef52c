"""The options of a fine-tuning, and its finished seeds.

A seed is a directory that `checkpoint.publish` wrote: a model, and seed.json, with the settings and the results of the
seed. A finished seed is not trained again, and a seed with other settings is never replaced.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from bertdata.support import UsageError, fsync_directory
from bertrain import checkpoint
from bertrain.config import DIRECTORY
from bertrain.lab.options import LORA, differences
from bertrain.lab.tasks import Task
from bertrain.options import ABOVE_0, BELOW_1, COUNT, FLAG, TEXT, Check, Either, Options, choice, flag, option

SEED = "seed.json"
TASK, TRAINING = "Task", "Training"  # groups of options; a suite has no options of a task
_CONTENT, _LABELS = "the content of ", "the order of labels"


@dataclass(frozen=True, kw_only=True)
class Job(Options):
    """Options of a fine-tuning: the checkpoint, the task and its files, the training, and the output directory."""

    checkpoint: str = option("", TEXT, required=True)
    """A run directory, a checkpoint, or a hub name."""
    out: str = option("", DIRECTORY, required=True)
    """Directory for result.json and a model for each seed."""
    seeds: int = option(3, COUNT)
    """Number of runs, with seeds 0, 1, ..."""
    train: str = option("", TEXT, TASK, required=True)
    """Examples to train on: TSV, CSV, JSON lines or Parquet."""
    dev: str = option("", TEXT, TASK, required=True)
    """Examples for choosing the best epoch, in the same formats."""
    test: str = option("", TEXT, TASK)
    """Examples for the final result, with the best epoch."""
    task: str = option("classification", TEXT, TASK)
    """What labels are. classification: classes. regression: numbers. multilabel: several labels of a text. token: tags
    of words. qa: answers (SQuAD). pairs: classes of pairs. choice: one of several choices. coreference: whether a
    pronoun means a noun. copa, multirc, wic: files of these tasks of SuperGLUE.
    """
    text: str = option("0", TEXT, TASK)
    """Column of the text: its name, or its number from 0. The first row is a header if it has one of the names, or
    label.
    """
    other: str = option("", TEXT, TASK)
    """Column of the second text of a pair, or of the list of choices. Default: none; 1 for pairs."""
    label: str = option("-1", TEXT, TASK)
    """Column of the label: its name or number; -1 is the last."""
    separator: str = option(",", TEXT, TASK)
    """Separator of the labels of a text, for multilabel."""
    teacher: str = option("", TEXT, TASK)
    """Directory of a model that finetune made for this task, such as tuned/seed-0. Its predictions are then the labels
    to train on; those of --train are not used.
    """
    skip: bool = option(False, FLAG, TASK, in_files=True)
    """Leave out rows that do not fit, as official files of suites have some."""
    measure: str = option("", TEXT, TASK, in_files=True)
    """The measure that chooses the epoch. Default: that of the task."""
    epochs: int = option(3, COUNT, TRAINING)
    """Number of epochs."""
    patience: int | None = option(None, COUNT, TRAINING)
    """End a seed after this number of epochs without a better result on dev."""
    batch_size: int = option(32, COUNT, TRAINING)
    """Rows in one optimizer step."""
    lr: float = option(5e-5, ABOVE_0, TRAINING)
    """Peak learning rate."""
    length: int | None = option(None, COUNT, TRAINING)
    """Longest row in tokens; longer texts are cut. Default: 128, or the positions of a smaller model."""
    dropout: float = option(0.1, BELOW_1, TRAINING)
    """Dropout probability, also for models that were pre-trained without dropout."""
    precision: str = option("auto", choice("auto", "fp32", "bf16"), TRAINING)
    """Number format of matrix products. auto: bf16 on GPUs since Ampere, else fp32."""
    lora: str | None = option(None, LORA, TRAINING)
    """Train only an adapter and the head, such as r=8,alpha=16 (docs/adapters.md)."""
    freeze: str | None = option(None, choice("all"), TRAINING)
    """all: train only the head, on frozen weights (a linear probe); it needs a higher --lr."""
    from_scratch: bool = option(False, FLAG, TRAINING)
    """Start from random weights, for comparison."""
    rules = (
        Check("separator", lambda c: c.separator, "what stands between the labels of a text, such as a comma"),
        Check("length", lambda c: c.length is None or c.length > 2, "at least 3"),
        Either(("lora", "from_scratch"), "an adapter needs trained weights below it"),
        Either(("lora", "freeze"), "an adapter has frozen weights below it"),
    )

    @property
    def files(self) -> dict[str, str]:
        """The paths of the files by "train", "dev" and, if it is given, "test"."""
        return {split: path for split in ("train", "dev", "test") if (path := getattr(self, split))}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the training of a seed."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.metadata["group"] == TRAINING}


def settings_key(job: Job, task: Task) -> dict[str, Any]:
    """Return all settings that affect the result of a seed, by their name in messages. Files count by their digest."""
    names = "checkpoint", "task", *job.settings, "text", "other", "label", "separator"
    named: dict[str, Any] = {flag(name): getattr(job, name) for name in names}
    named |= {"the measure": task.main, "skipping of damaged rows": job.skip}
    named |= {_LABELS: ", ".join(task.names)} if task.names else {}
    contents = {split: [Path(file) for file in task.files(path)] for split, path in job.files.items()}
    for name in ("checkpoint", "teacher") if job.teacher else ("checkpoint",):
        kinds, directory = (".safetensors", ".json", ".txt", ".model"), getattr(job, name)
        contents[name] = sorted(path for path in Path(directory).glob("*") if path.suffix in kinds)
        named |= {} if contents[name] else {flag(name): directory}  # a model on the hub
    texts = {name: b"".join(map(Path.read_bytes, files)) for name, files in contents.items()}
    return named | {f"{_CONTENT}--{name}": hashlib.sha256(text).hexdigest() for name, text in texts.items()}


def finished(directory: Path) -> dict[str, Any] | None:
    """Return the saved result of a finished seed. A damaged seed is renamed, with a message.

    Raises DatasetError or OSError, without any change, for a read error that may be temporary.
    """
    if not directory.exists():
        return None
    fault, kept = checkpoint.fault_of(directory), _kept(directory)
    if kept and not fault:
        return kept["run"]
    aside, what = checkpoint.set_aside(directory), fault or f"{SEED} is not readable"
    fsync_directory(directory.parent)
    click.echo(f"{directory} is damaged: {what}; it is now {aside}, and is trained again", err=True)
    return None


def _kept(directory: Path) -> dict[str, Any]:
    """Return the content of seed.json and the labels; {} if it is damaged or missing. May raise OSError."""
    try:
        kept = json.loads((directory / SEED).read_bytes())
        config = json.loads((directory / "config.json").read_bytes())
        names = config.get("id2label", {"0": "LABEL_0", "1": "LABEL_1"})  # transformers does not write these defaults
        labels = ", ".join(map(str, names.values()))
        return {name: dict(kept[name]) for name in ("of", "run")} | {_LABELS: labels}
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def refuse_others(out: Path, wanted: dict[str, Any]) -> None:
    """Raise UsageError, which names the differences, if a seed has other settings. wanted: from `settings_key`."""
    for directory in sorted(out.glob("seed-*")):
        kept = _kept(directory)
        before = kept.get("of", wanted)  # version 0.1.0 saved no labels, and ordered them differently
        before = {_LABELS: kept.get(_LABELS)} | before if _LABELS in wanted else before
        name, content = "--checkpoint", f"{_CONTENT}--checkpoint"
        if Path(wanted[name]).is_dir() and before.get(content) == wanted.get(content):
            before = before | {name: wanted[name]}  # the same checkpoint under a different path
        if differing := differences(before, wanted):
            sentence = f"{directory} was trained differently (old → new): {differing}; give the same, or a new --out"
            raise UsageError(sentence, "other-settings", option="out", given=str(out))
