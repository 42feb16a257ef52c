"""Does a checkpoint, fine-tuned, do better than a bag of words?

    python benchmarks/tasks.py --checkpoint run/ --out tasks/ --sst2 sst2/ --ewt ewt/
    python benchmarks/tasks.py --out tasks/ --sst2 sst2/                      # the baselines alone

--sst2 has train.tsv, dev.tsv and test.tsv (a text and a label, no header), --ewt train.conllu.gz and test.conllu.gz of
Universal Dependencies; the last tenth of its sentences for training becomes dev. Baselines: the most frequent label;
naive Bayes and logistic regression on the counts of words and pairs of words; for tags, the most frequent tag of each
word. All numbers are accuracies on test. Finished seeds stay in OUT and are not run again. It ends with one table and a
JSON line.
"""

from __future__ import annotations

import collections
import gzip
from pathlib import Path
from typing import Any

import click
import numpy as np
from common import report
from study import answer

from bertrain.lab.tasks import TASKS

COLUMNS = {
    "sst2": "--task classification --text 0 --label -1",
    "ewt": "--task token --text 1 --label 3",
}
BASELINES = ("majority", "naive Bayes", "logistic", "tag of word")


def files_of(name: str, directory: Path, out: Path) -> dict[str, str]:
    """The files of a task by split. Those of EWT are written to `out`."""
    if name == "sst2":
        return {split: str(directory / f"{split}.tsv") for split in ("train", "dev", "test")}
    with gzip.open(directory / "train.conllu.gz", "rt", encoding="utf-8") as file:
        sentences = file.read().strip().split("\n\n")
    first = len(sentences) * 9 // 10
    for split, some in (("train", sentences[:first]), ("dev", sentences[first:])):
        (out / f"{split}.conllu").write_text("\n\n".join(some) + "\n\n", encoding="utf-8")
    with gzip.open(directory / "test.conllu.gz", "rt", encoding="utf-8") as file:
        (out / "test.conllu").write_text(file.read(), encoding="utf-8")
    return {split: str(out / f"{split}.conllu") for split in ("train", "dev", "test")}


def bags(files: dict[str, str]) -> dict[str, float]:
    """Majority, naive Bayes and logistic regression on words and pairs of words."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.naive_bayes import MultinomialNB

    task = TASKS["classification"]()
    train, test = (task.read(files[split])[0] for split in ("train", "test"))
    texts = [example.text for example in train]
    counter = CountVectorizer(ngram_range=(1, 2), token_pattern=r"(?u)\w+|[^\w\s]")
    labels, truth = (np.array([row.label for row in rows]) for rows in (train, test))
    counts = counter.fit_transform(texts)
    names, frequency = np.unique(labels, return_counts=True)
    found = {"majority": float((truth == names[frequency.argmax()]).mean())}
    for name, model in (("naive Bayes", MultinomialNB()), ("logistic", LogisticRegression(max_iter=1000))):
        found[name] = float(model.fit(counts, labels).score(counter.transform([row.text for row in test]), truth))
    return found


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


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown, a line for each task."""
    heads = " | ".join(BASELINES)
    lines = [f"| task | {heads} | fine-tuned, median (min to max) |", "|---|" + "---|" * (len(BASELINES) + 1)]
    for name, result in results.items():
        tuned = result.get("finetuned")
        cells = [f"{result[of]:.3f}" if of in result else "" for of in BASELINES]
        cells.append(f"{tuned['median']:.3f} ({tuned['min']:.3f} to {tuned['max']:.3f})" if tuned else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--checkpoint", help="A run or a checkpoint. Default: the baselines alone.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Directory for models and results.")
@click.option("--sst2", type=click.Path(path_type=Path), help="Directory of SST-2.")
@click.option("--ewt", type=click.Path(path_type=Path), help="Directory of UD English EWT.")
@click.option("--seeds", default=3, help="Number of seeds.")
@click.option("--epochs", default=3, help="Passes over the examples.")
@click.option("--lr", default=5e-5, help="Peak learning rate.")
@click.option("--length", default=128, help="Longest row in tokens.")
def main(checkpoint: str | None, out: Path, seeds: int, epochs: int, lr: float, length: int, **places: Path) -> None:
    options = f"--seeds {seeds} --epochs {epochs} --lr {lr} --length {length}"
    results: dict[str, dict[str, Any]] = {}
    for name, place in places.items():
        if not place:
            continue
        directory = out / name
        directory.mkdir(parents=True, exist_ok=True)
        files = files_of(name, place, directory)
        results[name] = dict(tags(files) if name == "ewt" else bags(files))
        if checkpoint:
            given = " ".join(f"--{split} {path}" for split, path in files.items())
            command = f"finetune --checkpoint {checkpoint} --out {directory} {COLUMNS[name]} {given} {options}"
            results[name]["finetuned"] = answer(command, out)["test_accuracy"]
        print(name, results[name], flush=True)
    if not results:
        raise click.UsageError("no task was named; give the directory of one, such as --sst2 sst2/")
    print(table(results))
    report("tasks above baselines", f"{checkpoint}, {options}" if checkpoint else "baselines alone", results)


if __name__ == "__main__":
    main()
