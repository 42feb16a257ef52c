"""What plot --html writes: one page about runs, which needs no network and no other file.

    log.jsonl, run.json ──► points, evaluations, events, options ──► JSON inside a page ──► a browser draws it

report.html has its sections; the style and the drawing are those of every page of bertdata.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from bertdata.errors import UsageError
from bertdata.look import page

_POINTS, _POINTS_OF_A_RUN = 16_000, 1000  # entries that are drawn
_EVALUATIONS = 400  # that are drawn, over all runs
_PREDICTIONS = 200  # evaluations whose predictions are shown, over all runs
_TEXT = 200  # characters of a value that are shown
_AXES = ("step", "tokens", "seconds")
_WAITING = 0.1  # share of the time, for data
_RISE = 0.02  # nats


def report(runs: Sequence[Path]) -> str:
    """The page, as HTML below 2 MB for up to some fifty runs. Reads log.jsonl and run.json of each run.

    Raises UsageError where a directory has no log.jsonl, or one without a step.
    """
    found = [_run(run, len(runs)) for run in runs]
    for run, name in zip(found, _names([run["name"] for run in found]), strict=True):
        run["name"] = name
    data = {
        "runs": found,
        "options": _options(found),
        "warnings": [f"{run['name']}: {line}" for run in found for line in run.pop("warnings")],
    }
    for run in found:
        del run["options"]
    body = resources.files("bertrain").joinpath("report.html").read_text(encoding="utf-8")
    return page.assemble(f"{', '.join(run['name'] for run in found)[:_TEXT]}: training", body, data)


def entries(run: Path) -> list[dict[str, Any]]:
    """The entries of a run's log.jsonl, without a line that was cut off."""
    try:
        lines = (run / "log.jsonl").read_text(errors="replace").splitlines()
    except OSError as error:
        raise UsageError(f"{run} is not a run directory: log.jsonl: {error.strerror}") from None
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            found.append(entry)
    return found


def _names(paths: list[str]) -> list[str]:
    """Paths without the directory that all of them are in."""
    parts = [Path(path).parts for path in paths]
    same = next((at for at, names in enumerate(zip(*parts, strict=False)) if len(set(names)) > 1), 0)
    shown = ["/".join(names[same:]) or path for names, path in zip(parts, paths, strict=True)]
    return shown if len(set(paths)) > 1 else paths


def _run(path: Path, num_runs: int) -> dict[str, Any]:
    """All that the page knows of a run.

    points: for each name of a number its values, None where there is none. evaluations: their numbers, and predictions
    (around, target, predicted). events: what changed, and when.
    """
    log = entries(path)
    steps = [entry for entry in log if "lr" in entry]
    if not steps:
        raise UsageError(f"{path} has no entry of a step in log.jsonl yet; draw it after the first --log-every steps")
    about = _about(path)
    resolved, clock = about.get("resolved", {}), about.get("clock", {})
    evaluations = [entry for entry in log if "validation_loss" in entry]
    points = _points(_thinned(steps, max(2, min(_POINTS_OF_A_RUN, _POINTS // num_runs))))
    along = _along(steps)
    shown = _spread(evaluations, max(2, _EVALUATIONS // num_runs))
    told = _spread([entry for entry in evaluations if entry.get("predictions")], max(1, _PREDICTIONS // num_runs))
    events = list(_events(log, about))
    return {
        "name": str(path),
        "points": points,
        "evaluations": [
            along(entry["step"])
            | {"loss": _finite(entry["validation_loss"]), "accuracy": _finite(entry.get("validation_accuracy"))}
            for entry in shown
        ],
        "predictions": [along(entry["step"]) | {"rows": entry["predictions"]} for entry in told],
        "events": [along(step) | {"text": text} for step, text in events],
        "steps": steps[-1]["step"],
        "tokens": _finite(steps[-1].get("tokens")),
        "seconds": _finite(steps[-1].get("seconds")),
        "parameters": resolved.get("parameters"),
        "loss": _last(steps, "loss"),
        "best": _best(evaluations),
        "rate": _median(steps, "tokens_per_s"),
        "reference": {
            name: value for name, value in resolved.get("reference_loss", {}).items() if _finite(value) is not None
        },
        "clock": {
            name.removesuffix("_s"): _finite(clock.get(name, steps[-1].get(name)))
            for name in ("trained_s", "compiled_s", "evaluated_s", "waited_s")
        },
        "options": _flat({"config": about.get("config", {}), "resolved": resolved}),
        "warnings": list(_warnings(path, steps, evaluations, about)),
    }


def _about(path: Path) -> dict[str, Any]:
    """run.json, as far as it is there and whole."""
    try:
        about = json.loads((path / "run.json").read_text(errors="replace"))
    except (OSError, ValueError):
        return {}
    about = about if isinstance(about, dict) else {}
    return {name: value for name, value in about.items() if isinstance(value, list if name == "history" else dict)}


def _finite(value: Any) -> float | int | None:
    """A number with six digits, which a page can hold; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _thinned(steps: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """At most so many entries: of equal parts of the run those with the lowest and the highest loss, and both ends.

    So a peak of the loss stays, however long the run is.
    """
    if len(steps) <= most:
        return steps
    chosen = {0, len(steps) - 1}
    for part in np.array_split(np.arange(len(steps)), max(1, most // 2 - 1)):
        losses = [(_finite(steps[at].get("loss")), at) for at in part.tolist()]
        known = [(loss, at) for loss, at in losses if loss is not None] or [(0.0, int(part[0]))]
        chosen |= {min(known)[1], max(known)[1]}
    return [steps[at] for at in sorted(chosen)]


def _spread(found: list[Any], most: int) -> list[Any]:
    """At most so many of a list, evenly spaced, with both ends."""
    if len(found) <= most:
        return found
    return [found[at] for at in np.unique(np.linspace(0, len(found) - 1, most).astype(int)).tolist()]


def _points(steps: list[dict[str, Any]]) -> dict[str, list[float | int | None]]:
    """The numbers of entries by name."""
    found = (name for entry in steps for name, value in entry.items() if isinstance(value, (int, float)))
    return {name: [_finite(entry.get(name)) for entry in steps] for name in dict.fromkeys((*_AXES, *found))}


def _along(steps: list[dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
    """A function: a step → itself, and the tokens and seconds until then."""
    known = {}
    for name in _AXES[1:]:
        pairs = [(entry["step"], value) for entry in steps if (value := _finite(entry.get(name))) is not None]
        known[name] = np.array(pairs).T if pairs else None

    def at(step: int) -> dict[str, Any]:
        return {"step": step} | {
            name: None if pairs is None else _finite(float(np.interp(step, *pairs))) for name, pairs in known.items()
        }

    return at


def _events(log: list[dict[str, Any]], about: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """What changed along a run: (after which step, what)."""
    before: dict[str, Any] = {}
    for entry in log:
        if "layers_before" in entry:
            yield entry["step"], f"{entry['layers_before']} → {entry.get('layers')} layers"
        stream = entry.get("stream")
        if isinstance(stream, dict):
            now = _flat({name: stream.get(name) for name in ("length", "global_batch_size", "masking")})
            for name in now if before else ():
                if before.get(name) != now[name]:
                    yield entry["step"], f"{name.removeprefix('masking.')} {before.get(name)} → {now[name]}"
            before = now
    for change in about.get("history", []):
        if isinstance(change, dict) and isinstance(change.get("after_step"), int):
            changed = change.get("changed") or {}
            for name, pair in changed.items() if isinstance(changed, dict) else ():
                if not isinstance(pair, list):
                    continue
                yield change["after_step"], f"{name} {' → '.join(map(_written, pair))}"


def _last(steps: list[dict[str, Any]], name: str) -> float | int | None:
    return next((value for entry in reversed(steps) if (value := _finite(entry.get(name))) is not None), None)


def _median(steps: list[dict[str, Any]], name: str) -> float | int | None:
    known = [value for entry in steps if (value := _finite(entry.get(name))) is not None]
    return _finite(float(np.median(known))) if known else None


def _best(evaluations: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The evaluation with the lowest validation loss."""
    known = [(loss, entry["step"]) for entry in evaluations if (loss := _finite(entry["validation_loss"])) is not None]
    return dict(zip(("loss", "step"), min(known), strict=True)) if known else None


def _warnings(
    path: Path, steps: list[dict[str, Any]], evaluations: list[dict[str, Any]], about: dict[str, Any]
) -> Iterator[str]:
    """What a user should know about a run, each in one sentence."""
    if not about:
        yield "there is no whole run.json, so its options are not known."
    with open(path / "log.jsonl", "rb") as file:
        if not file.read().endswith(b"\n"):
            yield "the last line of log.jsonl was cut off and is left out."
    wild = [entry["step"] for entry in steps if isinstance(entry.get("loss"), float) and _finite(entry["loss"]) is None]
    if wild:
        yield f"the loss is not finite at {len(wild):,} of {len(steps):,} entries, first at step {wild[0]:,}."
    best, last = _best(evaluations), _last(evaluations, "validation_loss")
    if not evaluations:
        yield "it was not evaluated; give --eval-every and a dataset with a validation split."
    elif best and last is not None and last > best["loss"] + _RISE:
        yield f"the validation loss rose from {best['loss']:.4f} at step {best['step']:,} to {last:.4f} at the end."
    planned = about.get("resolved", {}).get("steps")
    if isinstance(planned, int) and steps[-1]["step"] < planned and not about.get("config", {}).get("budget"):
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
