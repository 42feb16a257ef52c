"""Plot loss, accuracy, learning rate and throughput of runs, or the curves of fine-tunings, as a PNG or a page.

bertrain plot run/ run2/ --out curves.png
bertrain plot run/ run2/ --html runs.html
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from bertdata.support import OneSentence, UsageError, install, naming, write_page
from bertrain.commands.report import entries, report
from bertrain.options import Output

PANELS = {
    "loss (nats a token)": ("loss", "validation_loss"),
    "accuracy": ("accuracy", "validation_accuracy"),
    "learning rate": ("lr",),
    "tokens a second": ("tokens_per_s",),
}


@click.command(cls=OneSentence, epilog="\b\nExample:\n  bertrain plot run/ run2/ --html runs.html")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--out", type=Output(), help="PNG file to write. Default: curves.png without --html, none with it.")
@click.option("--html", help="Write a page about runs to this file.")
def main(runs: tuple[str, ...], out: str | None, html: str | None) -> None:
    """Draw the curves of runs (log.jsonl) or of fine-tunings (result.json)."""
    if html:
        write_page(Path(html), report([Path(run) for run in runs]).encode())
        click.echo(html)
    if out or not html:
        _draw(runs, out or "curves.png")


def drawing() -> Any:
    """Return matplotlib.pyplot with a backend for files. Raises UsageError if it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError(f"drawing needs matplotlib; {install('plot')}", "not-installed") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _draw(runs: tuple[str, ...], out: str) -> None:
    pyplot = drawing()
    curves = [curve for run in runs for curve in (_tuning if Path(run, "result.json").is_file() else _run)(Path(run))]
    panels = list(dict.fromkeys((title, along) for title, along, *_ in curves))
    rows = max(1, -(-len(panels) // 2))
    figure, axes = pyplot.subplots(rows, 2, figsize=(12, 4 * rows), layout="constrained", squeeze=False)
    for title, along, label, points in curves:
        axis = axes.flat[panels.index((title, along))]
        label = label.encode(errors="replace").decode()  # bytes of a path that are not UTF-8 become ?
        axis.plot(*zip(*points, strict=True), ".-" if label.endswith("validation") else "-", linewidth=1, label=label)
        axis.set(title=title, xlabel=along)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    try:
        with naming(Path(out)):
            figure.savefig(out, dpi=100)
    except ValueError:
        sentence = f"--out {out} has no file extension of a picture; give a name that ends in .png"
        raise UsageError(sentence, "unknown-format", option="out", given=out) from None
    click.echo(out)


Curve = tuple[str, str, str, list[tuple[int, float]]]  # (title and x axis of the panel, label, points)


def _run(directory: Path) -> Iterator[Curve]:
    """Yield the curves of a run."""
    log, _ = entries(directory)
    for title, names in PANELS.items():
        for name in names:
            label = f"{directory}, validation" if name.startswith("validation") else str(directory)
            points = [(entry["step"], entry[name]) for entry in log if isinstance(entry.get(name), int | float)]
            if points:
                yield title, "step", label, points


def _tuning(directory: Path) -> Iterator[Curve]:
    """Yield the curves of the seeds of a fine-tuning."""
    path = directory / "result.json"
    try:
        for run in json.loads(path.read_bytes())["runs"]:
            name, label = next(iter(run["dev"])), f"{directory}, seed {run['seed']}"
            losses = [(int(point["epoch"]), float(point["train_loss"])) for point in run["curve"]]
            yield "training loss", "epoch", label, losses
            scores = [(int(point["epoch"]), float(point["dev"][name])) for point in run["curve"]]
            yield f"{name} on dev", "epoch", label, scores
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration, RecursionError):
        sentence = f"{path} is not the result of one task of bertrain finetune; give the directory of a task"
        raise UsageError(sentence, "not-a-run", option="runs", given=str(directory)) from None


if __name__ == "__main__":
    main()
