"""What plot --html writes: one page about runs, which needs no network and no other file.

    log.jsonl, run.json ──► points, evaluations, events, options ──► JSON inside a page ──► a browser draws it

report.html has its sections; the style and the drawing are those of every page of bertdata.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from bertdata.support import UsageError, assemble_page, counted
from bertrain.report import entry_of

_NUMBERS = 128_000  # of entries that are drawn, over all runs; some ten bytes each
_POINTS = 1000  # entries of a run that are drawn
_EVALUATIONS = 400  # that are drawn, over all runs
_PREDICTIONS = 200  # evaluations whose predictions are shown, over all runs
_TEXT = 200  # characters of a value that are shown
_AXES = ("step", "tokens", "seconds")
_CLOCK = ("trained_s", "compiled_s", "evaluated_s", "waited_s")  # what the time of a run went to, in all its processes
_WAITING = 0.1  # share of the time, for data
_RISE = 0.02  # nats


def report(runs: Sequence[Path]) -> str:
    """The page, as HTML: below 2 MB up to some fifty runs. Reads log.jsonl and run.json of each run.

    Raises UsageError where a directory has no log.jsonl, or one without a step.
    """
    shown = [_run(run, len(runs)) for run in runs]
    for run, name in zip(shown, _names([run["name"] for run in shown]), strict=True):
        run["name"] = name
    has_one_tokenizer = all(len({run[kind] for run in shown} - {None}) < 2 for kind in ("tokenizer", "uniform"))
    warnings = (
        []
        if has_one_tokenizer
        else [
            "The runs have different tokenizers, so their losses do not compare: none of them is called the best. "
            "bertrain evaluate measures bits per byte, which compare."
        ]
    )
    data = {
        "runs": shown,
        "has_one_tokenizer": has_one_tokenizer,
        "options": _options(shown),
        "warnings": warnings + [f"{run['name']}: {line}" for run in shown for line in run.pop("warnings")],
    }
    for run in shown:
        for name in ("options", "tokenizer", "uniform"):
            del run[name]
    body = resources.files("bertrain.commands").joinpath("report.html").read_text(encoding="utf-8")
    return assemble_page(f"{', '.join(run['name'] for run in shown)[:_TEXT]}: training", body, data)


def _tokenizer(run: Path) -> str | None:
    """The SHA-256 of the tokenizer in the newest checkpoint of a run, if there is one."""
    for path in sorted(run.glob("step-*/tokenizer.json"), reverse=True)[:1]:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return None


def entries(run: Path) -> tuple[list[dict[str, Any]], int]:
    """The entries of a run's log.jsonl, and the number of its lines that are none, such as one that was cut off."""
    try:
        lines = (run / "log.jsonl").read_text(errors="replace").splitlines()
    except OSError as error:
        sentence = (
            f"{run} is not a run: its log.jsonl cannot be read ({error.strerror}); give the --out of bertrain pretrain"
        )
        raise UsageError(sentence, "not-a-run", option="runs", given=str(run)) from None
    log = [entry for line in lines if (entry := entry_of(line)) is not None]
    return log, len(lines) - len(log)


def _names(paths: list[str]) -> list[str]:
    """Paths without the directory that all of them are in."""
    parts = [Path(path).parts for path in paths]
    same = next((depth for depth, names in enumerate(zip(*parts, strict=False)) if len(set(names)) > 1), 0)
    shown = [str(Path(*names[same:])) if names[same:] else path for names, path in zip(parts, paths, strict=True)]
    return shown if len(set(paths)) > 1 else paths


def _run(path: Path, num_runs: int) -> dict[str, Any]:
    """All that the page knows of a run.

    points: for each name of a number its values, None where there is none. evaluations: their numbers, and predictions
    (around, target, predicted). events: what changed, and when.
    """
    log, num_left_out = entries(path)
    steps = [_timed(entry) for entry in log if "lr" in entry]
    if not steps:
        sentence = f"{path} has no entry of a step in log.jsonl yet; draw it after the first --log-every steps"
        raise UsageError(sentence, "empty", option="runs", given=str(path))
    about = _about(path)
    resolved, clock = about.get("resolved", {}), about.get("clock", {})
    evaluations = [entry for entry in log if "validation_loss" in entry]
    names = _numbers(steps)
    drawn = _thinned(steps, max(2, min(_POINTS, _NUMBERS // (num_runs * len(names)))))
    along = _along(steps)
    shown = _spread(evaluations, max(2, _EVALUATIONS // num_runs))
    with_predictions = _spread(
        [entry for entry in evaluations if entry.get("predictions")], max(1, _PREDICTIONS // num_runs)
    )
    events = list(_events(log))
    return {
        "name": str(path),
        "points": {name: [_finite(entry.get(name)) for entry in drawn] for name in names},
        "evaluations": [
            along(entry["step"])
            | {"loss": _finite(entry["validation_loss"]), "accuracy": _finite(entry.get("validation_accuracy"))}
            for entry in shown
        ],
        "predictions": [along(entry["step"]) | {"rows": entry["predictions"]} for entry in with_predictions],
        "events": [along(step) | {"text": text} for step, text in events],
        "steps": steps[-1]["step"],
        "tokens": _finite(steps[-1].get("tokens")),
        "seconds": _finite(steps[-1].get("seconds")),
        "parameters": resolved.get("parameters"),
        "loss": _last(steps, "loss"),
        "best": _best(_comparable(log)),
        "rate": _median(steps, "tokens_per_s"),
        "reference": _reference(resolved),
        "tokenizer": _tokenizer(path),
        "uniform": _reference(resolved).get("uniform"),
        "clock": {name.removesuffix("_s"): _finite(clock.get(name, steps[-1].get(name))) for name in _CLOCK},
        "options": _flat({"config": about.get("config", {}), "resolved": resolved}),
        "warnings": list(_warnings(steps, _comparable(log), about, num_left_out)),
    }


def _about(path: Path) -> dict[str, Any]:
    """run.json, as far as it is there and complete."""
    try:
        about = json.loads((path / "run.json").read_text(errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    about = about if isinstance(about, dict) else {}
    return {name: value for name, value in about.items() if isinstance(value, dict)}


def _finite(value: Any) -> float | int | None:
    """A number with six digits, which a page can hold; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _timed(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry with the seconds since the run began, as `seconds` of the log begin at 0 again in a resumed process."""
    parts = [_finite(entry.get(name)) for name in _CLOCK]
    return entry | {"seconds": None if None in parts else sum(part or 0 for part in parts)}


def _reference(resolved: dict[str, Any]) -> dict[str, float | int]:
    """The losses to compare with; none of them, unless both are known."""
    losses = resolved.get("reference_loss")
    losses = losses if isinstance(losses, dict) else {}
    known = {name: value for name in ("uniform", "unigram") if (value := _finite(losses.get(name))) is not None}
    return known if len(known) == 2 else {}


def _thinned(steps: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """At most so many entries: of equal parts of the run those with the lowest and the highest loss, and both ends.

    So a peak of the loss stays, however long the run is.
    """
    if len(steps) <= most:
        return steps
    chosen = {0, len(steps) - 1}
    for part in np.array_split(np.arange(len(steps)), max(1, most // 2 - 1)):
        losses = [(_finite(steps[index].get("loss")), index) for index in part.tolist()]
        known = [(loss, index) for loss, index in losses if loss is not None] or [(0.0, int(part[0]))]
        chosen |= {min(known)[1], max(known)[1]}
    return [steps[index] for index in sorted(chosen)]


def _spread(values: list[Any], most: int) -> list[Any]:
    """At most so many of a list, evenly spaced, with both ends."""
    if len(values) <= most:
        return values
    return [values[index] for index in np.unique(np.linspace(0, len(values) - 1, most).astype(int)).tolist()]


def _numbers(steps: list[dict[str, Any]]) -> list[str]:
    """The names of the numbers in entries."""
    names = (name for entry in steps for name, value in entry.items() if isinstance(value, (int, float)))
    return list(dict.fromkeys((*_AXES, *names)))


def _along(steps: list[dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
    """A function: a step → itself, and the tokens and seconds until then."""
    known = {}
    for name in _AXES[1:]:
        pairs = [(entry["step"], value) for entry in steps if (value := _finite(entry.get(name))) is not None]
        known[name] = np.array(pairs).T if pairs else None

    def position(step: int) -> dict[str, Any]:
        return {"step": step} | {
            name: None if pairs is None else _finite(float(np.interp(step, *pairs))) for name, pairs in known.items()
        }

    return position


def _events(log: list[dict[str, Any]]) -> Iterator[tuple[int, str]]:
    """What changed along a run: (after which step, what)."""
    for entry in log:
        change = entry.get("change")
        for name, pair in change.items() if isinstance(change, dict) else ():
            if isinstance(pair, list):
                yield entry["step"], f"{name} {' → '.join(map(str, pair))}"
    before: dict[str, Any] = {}
    for step, stream in _streams(log):
        for name in stream if before else ():
            if before.get(name) != stream[name]:
                yield step, f"{name} {before.get(name)} → {stream[name]}"
        before = stream


def _streams(log: list[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """What a run reads: (after which step, row length, batch size and masks from there on)."""
    for entry in log:
        if isinstance(stream := entry.get("stream"), dict):
            facts = {name: stream.get(name) for name in ("length", "global_batch_size")}
            masking = stream.get("masking")
            yield entry["step"], facts | (masking if isinstance(masking, dict) else {})


def _last(steps: list[dict[str, Any]], name: str) -> float | int | None:
    return next((value for entry in reversed(steps) if (value := _finite(entry.get(name))) is not None), None)


def _median(steps: list[dict[str, Any]], name: str) -> float | int | None:
    known = [value for entry in steps if (value := _finite(entry.get(name))) is not None]
    return _finite(float(np.median(known))) if known else None


def _comparable(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest evaluations on rows of one length and the same data: losses on others are not comparable."""
    found: list[dict[str, Any]] = []
    before, changed = None, False
    for entry in log:
        if isinstance(stream := entry.get("stream"), dict):
            now = [stream.get(name) for name in ("length", "dataset_id", "sources")]
            before, changed = now, changed or before not in (None, now)
        if "validation_loss" in entry:
            found, changed = [*([] if changed else found), entry], False
    return found


def _best(evaluations: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The evaluation with the lowest validation loss."""
    known = [(loss, entry["step"]) for entry in evaluations if (loss := _finite(entry["validation_loss"])) is not None]
    return dict(zip(("loss", "step"), min(known), strict=True)) if known else None


def _warnings(
    steps: list[dict[str, Any]], evaluations: list[dict[str, Any]], about: dict[str, Any], num_left_out: int
) -> Iterator[str]:
    """What a user should know about a run, each in one sentence."""
    if not about:
        yield "there is no complete run.json, so its options are not known."
    if num_left_out:
        lines = "line of log.jsonl is" if num_left_out == 1 else "lines of log.jsonl are"
        yield f"{num_left_out:,} {lines} not complete and left out."
    if skipped := sum(entry["skipped"] for entry in steps if type(entry.get("skipped")) is int):
        yield f"The run skipped {counted(skipped, 'step')}, as a loss or the gradient was not finite; lower --lr."
    best, last = _best(evaluations), _last(evaluations, "validation_loss")
    if not evaluations:
        yield "it was not evaluated; give --eval-every and a dataset with a validation split."
    elif best and last is not None and last > best["loss"] + _RISE:
        yield f"the validation loss rose from {best['loss']:.4f} at step {best['step']:,} to {last:.4f} at the end."
    planned = about.get("resolved", {}).get("steps")
    if isinstance(planned, int) and steps[-1]["step"] < planned:
        yield f"it is at step {steps[-1]['step']:,} of {planned:,}."
    waiting = _median(steps, "data_wait")
    if waiting and waiting > _WAITING:
        yield f"half of its steps waited for data {waiting:.0%} of the time or more."


def _flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {before + name: value}
    return flat


def _options(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each option, and each number that followed from it, with its value in each run, and whether they differ."""
    rows = []
    for name in dict.fromkeys(name for run in runs for name in run["options"]):
        kind, _, shown = name.partition(".")
        values = [_written(run["options"][name]) if name in run["options"] else "" for run in runs]
        if kind == "resolved" and any(f"config.{shown}" in run["options"] for run in runs):
            shown += ", in effect"  # such as steps, which may follow from --epochs
        if name != "config.out":
            rows.append({"name": shown, "values": values, "differs": len(set(values)) > 1})
    return rows


def _written(value: Any) -> str:
    if value is None or value == "" or value == []:
        return "–"
    return (value if isinstance(value, str) else json.dumps(value))[:_TEXT]
