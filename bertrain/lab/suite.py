"""Fine-tune a checkpoint for all tasks of a suite that have files, and collect the medians in one table.

    bertrain suite glue --data glue/ --checkpoint run/ --out tuned/

The files are the published files of GLUE and SuperGLUE (Wang et al., 2019) and of CLUE (Xu et al., 2020), with one
directory for each task.
Test labels are secret, so all results are on dev, which also chooses the epoch. docs/tasks.md has the tables.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click

from bertdata.support import OneSentence, UsageError, write_file
from bertrain import checkpoint
from bertrain.cli import flags_of
from bertrain.lab import seeds
from bertrain.lab.finetune import RESULT, alone, read, show, tune
from bertrain.lab.options import JSON, from_flags
from bertrain.lab.seeds import Job
from bertrain.ranks import LONGEST_WAIT, world

GLUE = "train.tsv", "dev.tsv"
SUPERGLUE = "train.jsonl", "val.jsonl"
CLUE = "train.json", "dev.json"
MNLI = "train.tsv", "dev_matched.tsv", "dev_mismatched.tsv"


class Entry(NamedTuple):
    """A task of a suite: its files, and their columns."""

    files: tuple[str, ...]  # train, dev, and perhaps a second dev, whose result is for the epoch that dev chose
    task: str
    columns: str  # columns of the text, the other text, and the label
    metrics: str  # official measures of the task; the first chooses the epoch


SUITES: dict[str, dict[str, Entry]] = {
    "glue": {
        "cola": Entry(GLUE, "classification", "3,,1", "mcc"),
        "sst2": Entry(GLUE, "classification", "sentence,,label", "accuracy"),
        "mrpc": Entry(GLUE, "pairs", "#1 String,#2 String,Quality", "f1 accuracy"),
        "stsb": Entry(GLUE, "regression", "sentence1,sentence2,score", "pearson spearman"),
        "qqp": Entry(GLUE, "pairs", "question1,question2,is_duplicate", "f1 accuracy"),
        "mnli": Entry(MNLI, "pairs", "sentence1,sentence2,gold_label", "accuracy"),
        "qnli": Entry(GLUE, "pairs", "question,sentence,label", "accuracy"),
        "rte": Entry(GLUE, "pairs", "sentence1,sentence2,label", "accuracy"),
        "wnli": Entry(GLUE, "pairs", "sentence1,sentence2,label", "accuracy"),
    },
    "superglue": {
        "boolq": Entry(SUPERGLUE, "pairs", "question,passage,label", "accuracy"),
        "cb": Entry(SUPERGLUE, "pairs", "premise,hypothesis,label", "accuracy f1"),
        "copa": Entry(SUPERGLUE, "copa", ",,label", "accuracy"),
        "multirc": Entry(SUPERGLUE, "multirc", ",,label", "f1 exact_match"),
        "rte": Entry(SUPERGLUE, "pairs", "premise,hypothesis,label", "accuracy"),
        "wic": Entry(SUPERGLUE, "wic", ",,label", "accuracy"),
        "wsc": Entry(SUPERGLUE, "coreference", "text,,label", "accuracy"),
    },
    "clue": {
        "afqmc": Entry(CLUE, "pairs", "sentence1,sentence2,label", "accuracy"),
        "tnews": Entry(CLUE, "classification", "sentence,,label", "accuracy"),
        "iflytek": Entry(CLUE, "classification", "sentence,,label", "accuracy"),
        "cmnli": Entry(CLUE, "pairs", "sentence1,sentence2,label", "accuracy"),
        "ocnli": Entry(("train.50k.json", "dev.json"), "pairs", "sentence1,sentence2,label", "accuracy"),
        "csl": Entry(CLUE, "pairs", "abst,keyword,label", "accuracy"),
        "cluewsc2020": Entry(CLUE, "coreference", "text,,label", "accuracy"),
        "cmrc2018": Entry(CLUE, "qa", ",,label", "exact_match f1"),
        "c3": Entry(("d-train.json", "d-dev.json"), "choice", ",,label", "accuracy"),
    },
}
"""The tasks of each suite. Two are omitted, as they have too many rows: ChID of CLUE, half a million blanks with ten
choices each, and ReCoRD of SuperGLUE, a hundred thousand with a dozen.
"""


def find(data: str, suite: str) -> dict[str, list[str]]:
    """Return the files of each task that has a directory. Raises UsageError if only some of its files are there."""
    files: dict[str, list[str]] = {}
    tasks = {path: path.name.lower().replace("-", "").removesuffix("_public") for path in sorted(Path(data).glob("*/"))}
    for task, entry in SUITES[suite].items():
        for directory in (path for path, name in tasks.items() if name == task):
            missing = [name for name in entry.files if not (directory / name).is_file()]
            if missing:
                sentence = f"{directory} has no {' and no '.join(missing)}; put its files there, or move it away"
                raise UsageError(sentence, "not-found", option="data", given=str(directory))
            files.setdefault(task, [str(directory / name) for name in entry.files])
    if not files:
        sentence = f"--data {data} holds no task of {suite}; give a directory of some of {', '.join(SUITES[suite])}"
        raise UsageError(sentence, "empty", option="data", given=data)
    return files


def _job(base: Job, name: str, entry: Entry, files: list[str]) -> Job:
    options: dict[str, Any] = {"task": entry.task, "measure": entry.metrics.split()[0], "skip": True}
    options |= zip(("train", "dev", "test"), files)  # noqa: B905  (test may be missing)
    options |= zip(("text", "other", "label"), entry.columns.split(","), strict=True)
    return replace(base, out=str(Path(base.out, name)), **options)


def _spreads(suite: str, results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the spreads over seeds of the official measures of a suite, by their names in the table."""
    spreads: dict[str, dict[str, float]] = {}
    for task, result in results.items():
        entry = SUITES[suite][task]
        for split, file in zip(("dev", "test"), entry.files[1:]):  # noqa: B905  (as above)
            part = f" {Path(file).stem.removeprefix('dev_')}" if split == "test" else ""
            spreads |= {f"{task}{part} {metric}": result[f"{split}_{metric}"] for metric in entry.metrics.split()}
    return spreads


@click.command(
    cls=OneSentence,
    params=[
        click.Argument(["name"], metavar="SUITE", type=click.Choice(list(SUITES))),
        click.Option(["--data"], required=True, help="Directory with a directory for each task, as it is published."),
        *flags_of(Job, without=seeds.TASK),
        JSON,
    ],
    epilog="\b\nExample:\n  bertrain suite glue --data glue/ --checkpoint run/ --out tuned/",
)
def main(*, name: str, data: str, as_json: bool, **flags: Any) -> None:
    """Fine-tune a checkpoint for the tasks of SUITE (glue, superglue or clue) that have files. Also under torchrun.

    Each task gets the same options. Results are medians over the seeds, on dev, at the best epoch of each seed.
    """
    with world(LONGEST_WAIT) as ranks:
        base = ranks.together(lambda: from_flags(Job, flags))
        with alone(ranks, base.out, name):
            files = ranks.together(lambda: find(data, name))
            start = ranks.from_first(lambda: checkpoint.resolved(base.checkpoint))  # a running one later has newer ones
            base = replace(base, checkpoint=start)
            jobs = {task: _job(base, task, SUITES[name][task], its_files) for task, its_files in files.items()}
            for job in jobs.values():  # report errors of all tasks before the first training
                read(ranks, job)
            results = {}
            for task, job in jobs.items():
                with alone(ranks, job.out):
                    results[task] = tune(ranks, job)
            missing = [task for task in SUITES[name] if task not in files]
            suite = {"suite": name, "checkpoint": start, "tasks": results, "missing": missing}
            ranks.on_first(lambda: write_file(Path(base.out, RESULT), json.dumps(suite, indent=1).encode()))
    if ranks.rank == 0 and as_json:
        click.echo(json.dumps(suite))
    elif ranks.rank == 0:
        absent = f"no files in {data}: {', '.join(missing)}; " if missing else ""
        line = f"{absent}models and {RESULT} of each task are in {base.out}"
        show(f"{start}, {name}", base.seeds, _spreads(name, results), line)
