"""Fine-tune a checkpoint for the tasks of a suite whose files are there, and put the medians in one table.

    bertrain suite glue --data glue/ --checkpoint run/ --out tuned/

The files are those that GLUE and SuperGLUE (Wang et al., 2019) and CLUE (Xu et al., 2020) give out, each task in its
own directory.
Test labels are secret, so all figures are of dev, which also chooses the epoch. docs/finetuning.md has the tables.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import click

from bertdata.support import OneSentence, UsageError, write_file
from bertrain import checkpoint
from bertrain.lab.finetune import RESULT, alone, check, common, refuse_results, show, tune
from bertrain.lab.seeds import Job, Settings
from bertrain.lab.tasks import Columns
from bertrain.ranks import LONGEST_WAIT, world


class Entry(NamedTuple):
    """A task of a suite: where its files are, and what stands in them."""

    task: str
    columns: Columns
    metrics: tuple[str, ...]  # those that the suite judges by; the first chooses the epoch
    directories: tuple[str, ...]  # names of its directory, one of which is there; letters may be small or capital
    train: str = "train.tsv"
    dev: str = "dev.tsv"
    test: str | None = None  # a second dev, reported at the epoch that dev chose


def _glue(task: str, text: str, other: str, label: str, metrics: str, directory: str, **files: str) -> Entry:
    return Entry(task, Columns(text, other, label, skip=True), tuple(metrics.split()), (directory,), **files)


def _clue(
    task: str, text: str, other: str, metrics: str, name: str, train: str = "train.json", dev: str = "dev.json"
) -> Entry:
    columns, directories = Columns(text, other, "label", skip=True), (f"{name}_public", name)
    return Entry(task, columns, tuple(metrics.split()), directories, train, dev)


def _superglue(task: str, text: str, other: str, metrics: str, directory: str) -> Entry:
    columns = Columns(text, other, "label", skip=True)
    return Entry(task, columns, tuple(metrics.split()), (directory,), "train.jsonl", "val.jsonl")


_MATCHED = {"dev": "dev_matched.tsv", "test": "dev_mismatched.tsv"}
SUITES: dict[str, dict[str, Entry]] = {
    "glue": {
        "cola": _glue("classification", "3", "", "1", "mcc", "CoLA"),
        "sst2": _glue("classification", "sentence", "", "label", "accuracy", "SST-2"),
        "mrpc": _glue("pairs", "#1 String", "#2 String", "Quality", "f1 accuracy", "MRPC"),
        "stsb": _glue("regression", "sentence1", "sentence2", "score", "pearson spearman", "STS-B"),
        "qqp": _glue("pairs", "question1", "question2", "is_duplicate", "f1 accuracy", "QQP"),
        "mnli": _glue("pairs", "sentence1", "sentence2", "gold_label", "accuracy", "MNLI", **_MATCHED),
        "qnli": _glue("pairs", "question", "sentence", "label", "accuracy", "QNLI"),
        "rte": _glue("pairs", "sentence1", "sentence2", "label", "accuracy", "RTE"),
        "wnli": _glue("pairs", "sentence1", "sentence2", "label", "accuracy", "WNLI"),
    },
    "superglue": {
        "boolq": _superglue("pairs", "question", "passage", "accuracy", "BoolQ"),
        "cb": _superglue("pairs", "premise", "hypothesis", "accuracy f1", "CB"),
        "copa": _superglue("copa", "", "", "accuracy", "COPA"),
        "multirc": _superglue("multirc", "", "", "f1 exact_match", "MultiRC"),
        "rte": _superglue("pairs", "premise", "hypothesis", "accuracy", "RTE"),
        "wic": _superglue("wic", "", "", "accuracy", "WiC"),
        "wsc": _superglue("coreference", "text", "", "accuracy", "WSC"),
    },
    "clue": {
        "afqmc": _clue("pairs", "sentence1", "sentence2", "accuracy", "afqmc"),
        "tnews": _clue("classification", "sentence", "", "accuracy", "tnews"),
        "iflytek": _clue("classification", "sentence", "", "accuracy", "iflytek"),
        "cmnli": _clue("pairs", "sentence1", "sentence2", "accuracy", "cmnli"),
        "ocnli": _clue("pairs", "sentence1", "sentence2", "accuracy", "ocnli", "train.50k.json"),
        "csl": _clue("pairs", "abst", "keyword", "accuracy", "csl"),
        "cluewsc2020": _clue("coreference", "text", "", "accuracy", "cluewsc2020"),
        "cmrc2018": _clue("qa", "", "", "exact_match f1", "cmrc2018"),
        "c3": _clue("choice", "", "", "accuracy", "c3", "d-train.json", "d-dev.json"),
    },
}
"""The tasks of each suite. Two are not here, as they are too many rows: ChID of CLUE, half a million blanks with ten
choices each, and ReCoRD of SuperGLUE, a hundred thousand with a dozen.
"""


def find(data: Path, entry: Entry) -> dict[str, str] | None:
    """The files of a task under a directory. Raises UsageError where some are there and others are not."""
    names = [name.lower() for name in entry.directories]
    directories = sorted(path for path in data.iterdir() if path.is_dir() and path.name.lower() in names)
    if not directories:
        return None
    directory = directories[0]
    files = {"train": entry.train, "dev": entry.dev} | ({"test": entry.test} if entry.test else {})
    missing = [name for name in files.values() if not (directory / name).is_file()]
    if missing:
        sentence = f"{directory} has no {' and no '.join(missing)}; put its files there, or move it away"
        raise UsageError(sentence, "not-found", option="data", given=str(directory))
    return {split: str(directory / name) for split, name in files.items()}


def _spreads(entries: dict[str, Entry], results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The measures that a suite judges by, over the seeds, by the names that its table gives them."""
    spreads = {}
    for task, result in results.items():
        for split in ("dev", "test") if entries[task].test else ("dev",):
            for metric in entries[task].metrics:
                where = {"dev": "", "test": " " + Path(str(entries[task].test)).stem.removeprefix("dev_")}[split]
                spreads[f"{task}{where} {metric.replace('_', ' ')}"] = result[f"{split}_{metric}"]
    return spreads


@click.command(
    cls=OneSentence, epilog="\b\nExample:\n  bertrain suite glue --data glue/ --checkpoint run/ --out tuned/"
)
@click.argument("name", metavar="SUITE", type=click.Choice(list(SUITES)))
@click.option("--data", required=True, help="Directory with a directory for each task, as the suite publishes them.")
@common
def main(name: str, data: str, start: str, out: str, seeds: int, as_json: bool, **settings: Any) -> None:
    """Fine-tune a checkpoint for the tasks of SUITE (glue, superglue or clue) that have files. Also under torchrun.

    Each task gets the same options. Figures are medians over the seeds, on dev, at the best epoch of each seed.
    """
    entries, results = SUITES[name], {}

    def find_all() -> dict[str, dict[str, str] | None]:
        if not Path(data).is_dir():
            sentence = f"--data {data} is not a directory; give the one that holds a directory for each task"
            raise UsageError(sentence, "not-found", option="data", given=data)
        refuse_results(Path(out), suite=name)
        files = {task: find(Path(data), entry) for task, entry in entries.items()}
        if not any(files.values()):
            names = ", ".join(entry.directories[0] for entry in entries.values())
            sentence = f"--data {data} holds no task of {name}; give a directory that holds some of {names}"
            raise UsageError(sentence, "empty", option="data", given=data)
        return files

    with world(LONGEST_WAIT) as ranks, alone(ranks, Path(out)):
        files = ranks.together(find_all)
        missing = [task for task, its_files in files.items() if its_files is None]
        start = ranks.from_first(lambda: checkpoint.resolved(start))  # once, as a running one has newer ones later
        jobs = {
            task: Job(
                start=start,
                task=entries[task].task,
                columns=entries[task].columns,
                files=its_files,
                out=Path(out, task),
                seeds=seeds,
                settings=Settings(**settings),
                main=entries[task].metrics[0],
            )
            for task, its_files in files.items()
            if its_files
        }
        for job in jobs.values():  # a fault of the last task is said before the first one is trained
            check(ranks, job)
        for task, job in jobs.items():
            if ranks.rank == 0:
                click.echo(f"{task}: {job.task}, {job.files['train']}", err=True)
            with alone(ranks, job.out):
                results[task] = tune(ranks, job)
        suite = {"suite": name, "checkpoint": start, "tasks": results, "missing": missing}
        ranks.on_first(lambda: write_file(Path(out, RESULT), json.dumps(suite, indent=1).encode()))
    if ranks.rank:
        return
    if as_json:
        click.echo(json.dumps(suite))
        return
    show(f"{start}: {name}", seeds, _spreads(entries, results), width=32)
    if missing:
        click.echo(f"no files in {data}: {', '.join(missing)}")
    click.echo(f"models and {RESULT} of each task are in {out}")


if __name__ == "__main__":
    main()
