"""What does a model gain on a new text when it is trained further on it, and what does it forget of the old one?

    python benchmarks/adapting.py books.txt --out study/

The new text is the docstrings of the installed packages. Its task is to tell which of six packages a line of a
docstring is from; the lines of dev and test are of files that the new text does not have. A modernbert-tiny is trained
on the first text. From its weights every other row trains as many steps, with the options that ROWS names. Each is
measured on held-out text of both kinds, and fine-tuned for the task. One thread, float32, rows of 64 tokens, masks of
15 %. What is done is not run again.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import click
from common import report
from study import answer, evaluated, shards_of, train

from bertrain.commands.docstrings import docstrings, sources

OPTIONS = "--length 64 --precision fp32 --eval-every 0 --save-every 1000000"
FURTHER = "--global-batch-size 64 --mlm-probability 0.15 --warmup 0.1 --optimizer adamw"
ROWS = {  # what begins on the trained weights, and further options; NEW and OLD stand for the datasets
    "new text": "--lr 1e-3 --data NEW",
    "90 % new, 10 % old": "--lr 1e-3 --data NEW --data OLD --weights 0.9,0.1",
    "new text, a tenth of the rate": "--lr 1e-4 --data NEW",
    "new text, word embeddings kept": "--lr 1e-3 --data NEW --lr-scale embeddings=0",
}
PACKAGES = ("torch", "transformers", "sympy", "numpy", "matplotlib", "networkx")
MOST = {"train": 400, "dev": 100, "test": 150}  # lines of a package


def part_of(path: Path) -> str:
    """train, dev or test, by the name of a file."""
    return {0: "dev", 1: "test"}.get(sha256(path.name.encode()).digest()[0] % 8, "train")


def write_texts(out: Path) -> None:
    """new.txt, the docstrings of the files of train; and train.tsv, dev.tsv and test.tsv, lines with their package."""
    texts: set[str] = set()
    lines: dict[tuple[str, str], set[str]] = {(part, name): set() for part in MOST for name in PACKAGES}
    for path in sources():
        part = part_of(path)
        package = next((name for name in PACKAGES if f"/site-packages/{name}/" in str(path)), None)
        for text in docstrings(path):
            if part == "train":
                texts.add(text)
            if package:
                lines[part, package] |= {line.strip() for line in text.splitlines()}
    chosen = sorted(texts, key=lambda text: sha256(text.encode()).digest())
    (out / "new.txt").write_text("\n\n".join(chosen)[:10_000_000] + "\n", encoding="utf-8")
    for part, most in MOST.items():
        with open(out / f"{part}.tsv", "w", encoding="utf-8") as file:
            for name in PACKAGES:
                good = [s for s in lines[part, name] if 40 < len(s) < 200 and s[0].isalpha() and "\t" not in s]
                good = [s for s in good if not any(other in s.lower() for other in PACKAGES)]
                good.sort(key=lambda s: sha256(s.encode()).digest())
                file.writelines(f"{s}\t{name}\n" for s in good[:most])


def measured(model: Path, old: Path, new: Path, out: Path, seeds: int) -> dict[str, Any]:
    """Bits a byte on both texts, and the accuracy on the test part of the task: median, least and most of the seeds."""
    found: dict[str, Any] = {}
    for name, data in (("old", old), ("new", new)):
        found[name] = evaluated(model, data, 64)["bits_per_byte"]
    files = " ".join(f"--{part} {out / f'{part}.tsv'}" for part in MOST)
    options = f"--out {out / f'task-{model.name}'} --length 64 --lr 5e-4 --epochs 4 --seeds {seeds}"
    return found | {"task": answer(f"finetune --checkpoint {model} {files} {options}", out)["test_accuracy"]}


@click.command(help=__doc__)
@click.argument("corpus", type=click.Path(exists=True, path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Directory for texts, runs and results.")
@click.option("--steps", default=1500, show_default=True, help="Steps on the first text.")
@click.option("--further", default=300, show_default=True, help="Steps from there.")
@click.option("--seeds", default=3, show_default=True, help="Seeds of the task.")
def main(corpus: Path, out: Path, steps: int, further: int, seeds: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "new.txt").exists():
        write_texts(out)
    old = shards_of(corpus, out / "old-shards", "--validation", "0.05", "--vocab-size", "4096")
    new = shards_of(out / "new.txt", out / "new-shards", "--validation", "0.05", "--tokenizer", str(old))
    train(out / "before", steps, f"{OPTIONS} --recipe tiny --global-batch-size 32 --data {old}")
    names = {"before": "before"}
    for number, (name, options) in enumerate(ROWS.items()):
        given = options.replace("NEW", str(new)).replace("OLD", str(old))
        train(out / f"after-{number}", further, f"{OPTIONS} {FURTHER} --init {out / 'before'} {given}")
        names[f"after-{number}"] = name
    results = {}
    print("| | old text, bits a byte | new text | task, test: median (least to most) |\n|---|---|---|---|")
    for place, name in names.items():
        results[name] = found = measured(out / place, old, new, out, seeds)
        task = "{median:.3f} ({min:.3f} to {max:.3f})".format_map(found["task"])
        print(f"| {name} | {found['old']:.3f} | {found['new']:.3f} | {task} |", flush=True)
    report("adaptation", f"{steps} steps on {corpus.name}, then {further} on docstrings; {seeds} seeds", results)


if __name__ == "__main__":
    main()
