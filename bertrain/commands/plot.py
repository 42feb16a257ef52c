"""Draw loss, accuracy, learning rate and throughput of runs, or the curves of a fine-tuning, to a PNG or a page.

bertrain plot run/ run2/ --out curves.png
bertrain plot run/ run2/ --html runs.html
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from bertdata.support import OneSentence, UsageError, install, naming, write_page
from bertrain.commands.report import entries, report
from bertrain.options import Output

PANELS = (
    ("loss (nats a token)", "loss", "validation_loss"),
    ("accuracy", "accuracy", "validation_accuracy"),
    ("learning rate", "lr", None),
    ("tokens a second", "tokens_per_s", None),
)


@click.command(cls=OneSentence, epilog="\b\nExample:\n  bertrain plot run/ run2/ --html runs.html")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--out", type=Output(), help="PNG file to write. Default: curves.png without --html, none with it.")
@click.option("--html", help="Write a page about runs to this file.")
def main(runs: tuple[str, ...], out: str | None, html: str | None) -> None:
    """Draw the curves of runs (log.jsonl) or of fine-tunings (result.json)."""
    tuned = [Path(run, "result.json").is_file() for run in runs]
    if html:
        if any(tuned):
            tuning = runs[tuned.index(True)]
            sentence = f"{tuning} is a fine-tuning, and --html is for runs of pretrain; draw it with --out"
            raise UsageError(sentence, "unsupported", option="html", given=tuning)
        write_page(Path(html), report([Path(run) for run in runs]).encode())
        click.echo(html)
    if out or not html:
        _picture(runs, tuned, out or "curves.png")


def drawing() -> Any:
    """matplotlib.pyplot, which draws to files. Raises UsageError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError(f"drawing needs matplotlib; {install('train')}", "not-installed") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _picture(runs: tuple[str, ...], tuned: list[bool], out: str) -> None:
    pyplot = drawing()
    if any(tuned) and not all(tuned):
        raise UsageError("runs and fine-tunings were given; draw them in two calls", "conflict", option="runs")
    figure, axes = pyplot.subplots(
        1 if all(tuned) else 2, 2, figsize=(12, 4 if all(tuned) else 8), layout="constrained"
    )
    for run in map(Path, runs):
        if all(tuned):
            _draw_tuning(axes, run)
            continue
        (log, _), label = entries(run), _drawable(run)
        for axis, (title, name, held_out) in zip(axes.flat, PANELS, strict=True):
            points = [(e["step"], e[name]) for e in log if _is_number(e.get(name))]
            line = axis.plot(*zip(*points, strict=True), label=label, linewidth=1)[0] if points else None
            points = [(e["step"], e[held_out]) for e in log if held_out and _is_number(e.get(held_out))]
            if points:
                color = line.get_color() if line else None
                axis.plot(*zip(*points, strict=True), "o-", markersize=3, color=color, label=f"{label}, validation")
            axis.set(title=title, xlabel="step")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    try:
        with naming(Path(out)):
            figure.savefig(out, dpi=100)
    except ValueError as error:
        sentence = f"--out {out} cannot be drawn ({error}); give a name that ends in .png"
        raise UsageError(sentence, "unknown-format", option="out", given=out) from None
    click.echo(out)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _drawable(path: Path) -> str:
    """A path as matplotlib can draw it; a byte that is not UTF-8 is a ?."""
    return str(path).encode(errors="replace").decode()


def _draw_tuning(axes: Any, directory: Path) -> None:
    path, curves = directory / "result.json", []
    try:
        result = json.loads(path.read_bytes())
        is_suite = "suite" in result
        for run in [] if is_suite else result["runs"]:
            name = next(iter(run["dev"]))
            points = [
                (int(point["epoch"]), float(point["train_loss"]), float(point["dev"][name])) for point in run["curve"]
            ]
            epochs, losses, scores = zip(*points, strict=True)
            curves.append((name, f"{_drawable(directory)}, seed {run['seed']}", epochs, losses, scores))
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration, RecursionError):
        sentence = f"{path} is not as bertrain finetune writes it; run finetune again"
        raise UsageError(sentence, "not-a-run", option="runs", given=str(directory)) from None
    if is_suite:
        sentence = f"{directory} holds a suite of tasks; give the directory of one, such as {directory}/cola"
        raise UsageError(sentence, "not-a-run", option="runs", given=str(directory))
    for name, label, epochs, losses, scores in curves:
        axes[0].plot(epochs, losses, label=label)
        axes[1].plot(epochs, scores, label=label)
        axes[0].set(title="training loss", xlabel="epoch")
        axes[1].set(title=f"{name} on dev", xlabel="epoch")


if __name__ == "__main__":
    main()
