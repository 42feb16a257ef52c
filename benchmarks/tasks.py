"""Does a checkpoint, fine-tuned, do better than a bag of words?

    python benchmarks/tasks.py --checkpoint run/ --out tasks/ --sst2 sst2/ --cola cola/ --rte rte/ --ewt ewt/
    python benchmarks/tasks.py --out tasks/ --sst2 sst2/                      # the baselines alone

Each directory holds train.tsv and dev.tsv in GLUE's layouts (SST-2: a text and a label, no header, and test.tsv too);
--ewt holds train.conllu.gz and test.conllu.gz of Universal Dependencies. Baselines: the most frequent label; naive
Bayes and logistic regression on the counts of words and pairs of neighbouring words (of two texts, each for itself);
for tags, the most frequent tag of each word. All are scored on the same rows as the checkpoint: on test where there is
one, else on dev. bertrain finetune chooses the epoch on dev, so its figures on dev are a little too good; of EWT the
last tenth of the sentences of train becomes dev. Seeds that are finished stand in OUT and are not run again. It ends
with one table and a JSON line.
"""

from __future__ import annotations

import collections
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from common import report

from bertrain.lab import tables
from bertrain.lab.tasks import metrics


class Entry(NamedTuple):
    """A task: what bertrain finetune calls it, where texts and labels stand, and the measure that is shown."""

    kind: str
    text: str
    other: str
    label: str
    measure: str
    test: str  # the split that is scored


TASKS = {
    "sst2": Entry("classification", "0", "", "-1", "accuracy", "test"),
    "cola": Entry("classification", "3", "", "1", "mcc", "dev"),
    "rte": Entry("pairs", "sentence1", "sentence2", "label", "accuracy", "dev"),
    "wnli": Entry("pairs", "sentence1", "sentence2", "label", "accuracy", "dev"),
    "ewt": Entry("token", "1", "", "3", "accuracy", "test"),
}
BASELINES = ("majority", "naive Bayes", "logistic", "tag of word")


def files_of(name: str, directory: Path, out: Path) -> dict[str, str]:
    """The files of a task by split. Those of EWT are written to `out`."""
    if name != "ewt":
        splits = ["train", "dev", "test"] if TASKS[name].test == "test" else ["train", "dev"]
        return {split: str(directory / f"{split}.tsv") for split in splits}
    with gzip.open(directory / "train.conllu.gz", "rt", encoding="utf-8") as file:
        sentences = file.read().strip().split("\n\n")
    first = len(sentences) * 9 // 10
    for split, some in (("train", sentences[:first]), ("dev", sentences[first:])):
        (out / f"{split}.conllu").write_text("\n\n".join(some) + "\n\n", encoding="utf-8")
    with gzip.open(directory / "test.conllu.gz", "rt", encoding="utf-8") as file:
        (out / "test.conllu").write_text(file.read(), encoding="utf-8")
    return {split: str(out / f"{split}.conllu") for split in ("train", "dev", "test")}


def bags(entry: Entry, files: dict[str, str]) -> dict[str, float]:
    """Majority, naive Bayes and logistic regression on words and pairs of words."""
    from scipy.sparse import hstack
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.naive_bayes import MultinomialNB

    parts = [tables.read(files[split], text=entry.text, other=entry.other, label=entry.label)
             for split in ("train", entry.test)]  # fmt: skip
    names = sorted({str(label) for label in parts[0].labels})
    labels = [np.array([names.index(str(label)) for label in part.labels]) for part in parts]
    sides: list[list[Any]] = [[], []]
    for texts in ("texts", "others") if entry.other else ("texts",):
        counter = CountVectorizer(ngram_range=(1, 2), token_pattern=r"(?u)\w+|[^\w\s]")
        sides[0].append(counter.fit_transform(getattr(parts[0], texts)))
        sides[1].append(counter.transform(getattr(parts[1], texts)))
    train, test = (hstack(side).tocsr() for side in sides)
    found = {"majority": np.full(len(labels[1]), np.bincount(labels[0]).argmax())}
    for name, model in (("naive Bayes", MultinomialNB()), ("logistic", LogisticRegression(max_iter=1000))):
        found[name] = model.fit(train, labels[0]).predict(test)
    return {
        name: metrics.classification(answer, labels[1], len(names))[entry.measure] for name, answer in found.items()
    }


def tagged(path: str) -> list[tuple[str, str]]:
    """Word and tag of each line of a .conllu file, without ranges of words and empty words."""
    with open(path, encoding="utf-8") as file:
        rows = (line.split("\t") for line in file)
        return [(cells[1], cells[3]) for cells in rows if cells[0].isdigit()]


def tags(files: dict[str, str]) -> dict[str, float]:
    """Accuracy of the most frequent tag, and of each word's own; unknown words have that of words seen once."""
    train, test = tagged(files["train"]), tagged(files["test"])
    by_word: dict[str, collections.Counter[str]] = {}
    for word, tag in train:
        by_word.setdefault(word, collections.Counter())[tag] += 1
    most = collections.Counter(tag for _, tag in train).most_common(1)[0][0]
    rare = collections.Counter(tag for found in by_word.values() if found.total() == 1 for tag in found)
    unknown = rare.most_common(1)[0][0] if rare else most
    best = {word: found.most_common(1)[0][0] for word, found in by_word.items()}
    return {
        "majority": float(np.mean([tag == most for _, tag in test])),
        "tag of word": float(np.mean([best.get(word, unknown) == tag for word, tag in test])),
    }


def finetuned(entry: Entry, files: dict[str, str], checkpoint: str, out: Path, options: list[str]) -> dict[str, float]:
    """Median, min and max of the measure over the seeds. A seed that is finished is not run again."""
    columns = ["--task", entry.kind, "--text", entry.text, "--label", entry.label]
    columns += ["--other", entry.other] if entry.other else []
    named = [word for split, path in files.items() for word in (f"--{split}", path)]
    command = [sys.executable, "-m", "bertrain", "finetune", "--checkpoint", checkpoint, "--out", str(out), "--json"]
    done = subprocess.run([*command, *columns, *named, *options], stdout=subprocess.PIPE, text=True, env=os.environ)
    if done.returncode:
        sys.exit(f"bertrain finetune failed for {out}")
    return json.loads(done.stdout.splitlines()[-1])[f"{entry.test}_{entry.measure}"]


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown, a line for each task."""
    lines = ["| task | measure | " + " | ".join(BASELINES) + " | fine-tuned, median (min to max) |",
             "|---|---|" + "---|" * (len(BASELINES) + 1)]  # fmt: skip
    for name, result in results.items():
        entry, tuned = TASKS[name], result.get("finetuned")
        cells = [f"{result[of]:.3f}" if of in result else "" for of in BASELINES]
        cells.append(f"{tuned['median']:.3f} ({tuned['min']:.3f} to {tuned['max']:.3f})" if tuned else "")
        lines.append(f"| {name} | {entry.measure}, {entry.test} | {' | '.join(cells)} |")
    return "\n".join(lines)


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--checkpoint", help="A run or a checkpoint. Default: the baselines alone.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Directory for models and results.")
@click.option("--sst2", type=click.Path(path_type=Path), help="Directory of SST-2.")
@click.option("--cola", type=click.Path(path_type=Path), help="Directory of CoLA.")
@click.option("--rte", type=click.Path(path_type=Path), help="Directory of RTE.")
@click.option("--wnli", type=click.Path(path_type=Path), help="Directory of WNLI.")
@click.option("--ewt", type=click.Path(path_type=Path), help="Directory of UD English EWT.")
@click.option("--seeds", default=3, help="Number of seeds.")
@click.option("--epochs", default=3, help="Passes over the examples.")
@click.option("--lr", default=5e-5, help="Peak learning rate.")
@click.option("--length", default=128, help="Longest row in tokens.")
def main(checkpoint: str | None, out: Path, seeds: int, epochs: int, lr: float, length: int, **places: Path) -> None:
    options = [f"--{name}={value}" for name, value in
               {"seeds": seeds, "epochs": epochs, "lr": lr, "length": length}.items()]  # fmt: skip
    results: dict[str, dict[str, Any]] = {}
    for name, place in places.items():
        if not place:
            continue
        entry, directory = TASKS[name], out / name
        directory.mkdir(parents=True, exist_ok=True)
        files = files_of(name, place, directory)
        results[name] = dict(tags(files) if entry.kind == "token" else bags(entry, files))
        if checkpoint:
            results[name]["finetuned"] = finetuned(entry, files, checkpoint, directory, options)
        print(name, results[name], flush=True)
    if not results:
        raise click.UsageError("no task was named; give the directory of one, such as --sst2 sst2/")
    print(table(results))
    report("tasks above baselines", f"{checkpoint}, {' '.join(options)}" if checkpoint else "baselines alone", results)


if __name__ == "__main__":
    main()
