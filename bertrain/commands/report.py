"""The page of plot --html: one file about runs, which needs no network.

    log.jsonl, run.json ──► points, evaluations, events, options ──► JSON inside a page ──► a browser draws it

report.html has the sections of the page; bertdata has the style and the drawing functions.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from bertdata.support import UsageError, assemble_page, counted
from bertrain.report import entry_of

Entry = dict[str, Any]
_NUMBERS = 128_000  # numbers to draw, over all runs; about ten bytes each
_POINTS = 1000  # entries to draw per run
_EVALUATIONS = 400  # evaluations to draw, over all runs
_PREDICTIONS = 200  # evaluations with visible predictions, over all runs
_TEXT = 200  # visible characters of a value
_AXES = ("step", "tokens", "seconds")
_CLOCK = ("trained_s", "compiled_s", "evaluated_s", "waited_s")  # time of a run by kind of work, in all its processes
_WAITING = 0.1  # share of the time spent waiting for data
_RISE = 0.02  # nats
_TOKENIZERS = (
    "The runs have different tokenizers, so their losses cannot be compared, and no best loss is shown. bertrain "
    "evaluate measures bits per byte, which can be compared."
)


def report(runs: Sequence[Path]) -> str:
    """Return the page as HTML, below 2 MB for up to about fifty runs. Reads log.jsonl and run.json of each run.

    Raises UsageError for a directory without log.jsonl, or if it has no step.
    """
    shown = [_run(run, len(runs)) for run in runs]
    for run, name in zip(shown, _names([run["name"] for run in shown]), strict=True):
        run["name"] = name
    has_one_tokenizer = all(len({run[kind] for run in shown} - {None}) < 2 for kind in ("tokenizer", "uniform"))
    warnings = [] if has_one_tokenizer else [_TOKENIZERS]
    data = {
        "runs": shown,
        "has_one_tokenizer": has_one_tokenizer,
        "options": _options([run.pop("options") for run in shown]),
        "warnings": warnings + [f"{run['name']}: {line}" for run in shown for line in run.pop("warnings")],
    }
    body = resources.files("bertrain.commands").joinpath("report.html").read_text(encoding="utf-8")
    return assemble_page(f"{', '.join(run['name'] for run in shown)[:_TEXT]}: training", body, data)


def entries(run: Path) -> tuple[list[Entry], int]:
    """Return the entries in a run's log.jsonl, and the number of invalid lines, such as truncated ones."""
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
    """Return paths without their common directory."""
    parts = [Path(path).parts for path in paths]
    same = next((depth for depth, names in enumerate(zip(*parts, strict=False)) if len(set(names)) > 1), 0)
    shown = [str(Path(*names[same:])) if names[same:] else path for names, path in zip(parts, paths, strict=True)]
    return shown if len(set(paths)) > 1 else paths


def _run(path: Path, num_runs: int) -> dict[str, Any]:
    """Return the data of a run for the page.

    points: name → values of the entries; None if an entry lacks one. evaluations: their numbers, and predictions
    (around, target, predicted). events: changes, and their steps.
    """
    log, num_invalid = entries(path)
    steps = [_timed(entry) for entry in log if "lr" in entry]
    if not steps:
        sentence = f"{path} has no entry of a step in log.jsonl yet; plot it after the first --log-every steps"
        raise UsageError(sentence, "empty", option="runs", given=str(path))
    about = _about(path)
    resolved, clock, last = about.get("resolved", {}), about.get("clock", {}), steps[-1]
    names = list(dict.fromkeys([*_AXES, *(name for each in steps for name in each if _is_number(each[name]))]))
    drawn = _thinned(steps, max(2, min(_POINTS, _NUMBERS // (num_runs * len(names)))))
    numbers = [entry["step"] for entry in steps]

    def at(step: int) -> dict[str, Any]:
        """Return a step, and the tokens and seconds up to it."""
        entry = steps[max(0, bisect_right(numbers, step) - 1)]
        return {name: _finite(entry.get(name)) for name in _AXES} | {"step": step}

    evaluations = [entry for entry in log if "validation_loss" in entry]
    comparable = _comparable(log)
    return {
        "name": str(path),
        "points": {name: [_finite(entry.get(name)) for entry in drawn] for name in names},
        "evaluations": [
            at(entry["step"]) | {name: _finite(entry.get(f"validation_{name}")) for name in ("loss", "accuracy")}
            for entry in _spread(evaluations, _EVALUATIONS // num_runs)
        ],
        "predictions": [
            at(entry["step"]) | {"rows": entry["predictions"]}
            for entry in _spread([each for each in evaluations if each.get("predictions")], _PREDICTIONS // num_runs)
        ],
        "events": [at(step) | {"text": text} for step, text in _events(log)],
        "steps": last["step"],
        "tokens": _finite(last.get("tokens")),
        "seconds": _finite(last.get("seconds")),
        "parameters": resolved.get("parameters"),
        "loss": next((value for entry in reversed(steps) if (value := _finite(entry.get("loss"))) is not None), None),
        "best": _best(comparable),
        "rate": _median(steps, "tokens_per_s"),
        "reference": (reference := _reference(resolved)),
        "uniform": reference.get("uniform"),
        "tokenizer": _tokenizer(path),
        "clock": {name.removesuffix("_s"): _finite(clock.get(name, last.get(name))) for name in _CLOCK},
        "options": _flat({"config": about.get("config", {}), "resolved": resolved}),
        "warnings": list(_warnings(steps, comparable, about, num_invalid)),
    }


def _about(path: Path) -> dict[str, Any]:
    """Return the tables of run.json; none if it is missing or damaged."""
    try:
        about = json.loads((path / "run.json").read_text(errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return {name: each for name, each in about.items() if isinstance(each, dict)} if isinstance(about, dict) else {}


def _tokenizer(run: Path) -> str | None:
    """Return the SHA-256 of the tokenizer in the newest checkpoint of a run, or None."""
    files = sorted(run.glob("step-*/tokenizer.json"))
    return hashlib.sha256(files[-1].read_bytes()).hexdigest() if files else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _finite(value: Any) -> float | int | None:
    """Return a number with six digits, which the page can contain; None for anything else."""
    if isinstance(value, bool) or not _is_number(value) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _timed(entry: Entry) -> Entry:
    """Return an entry with the seconds since the run began: `seconds` in the log restart at 0 in a resumed process."""
    parts = [_finite(entry.get(name)) for name in _CLOCK]
    return entry | {"seconds": None if None in parts else sum(part or 0 for part in parts)}


def _reference(resolved: dict[str, Any]) -> dict[str, float | int]:
    """Return the reference losses, or an empty dictionary unless both are known."""
    losses = resolved.get("reference_loss")
    losses = losses if isinstance(losses, dict) else {}
    known = {name: value for name in ("uniform", "unigram") if (value := _finite(losses.get(name))) is not None}
    return known if len(known) == 2 else {}


def _thinned(steps: list[Entry], most: int) -> list[Entry]:
    """Return at most `most` entries, evenly spaced, and always the one with the highest loss."""
    if len(steps) <= most:
        return steps
    peak = max(range(len(steps)), key=lambda number: _finite(steps[number].get("loss")) or 0)
    return [steps[number] for number in sorted({peak, *_spread(range(len(steps)), most - 1)})]


def _spread(values: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` values of a list, but at least two, evenly spaced, with both ends."""
    if len(values) <= most:
        return list(values)
    return [values[number] for number in np.unique(np.linspace(0, len(values) - 1, max(2, most)).astype(int)).tolist()]


def _events(log: list[Entry]) -> Iterator[tuple[int, str]]:
    """Yield the changes in a run: (after which step, description)."""
    before: dict[str, Any] = {}
    for entry in log:
        change, stream = entry.get("change"), entry.get("stream")
        for name, pair in change.items() if isinstance(change, dict) else ():
            if isinstance(pair, list):
                yield entry["step"], f"{name} {' → '.join(map(str, pair))}"
        if isinstance(stream, dict):
            now = {name: stream.get(name) for name in ("length", "global_batch_size")}
            now |= masking if isinstance(masking := stream.get("masking"), dict) else {}
            for name in now if before else ():
                if before.get(name) != now[name]:
                    yield entry["step"], f"{name} {before.get(name)} → {now[name]}"
            before = now


def _comparable(log: list[Entry]) -> list[Entry]:
    """Return the newest evaluations with the same row length and data; older losses are not comparable."""
    found: list[Entry] = []
    evaluated = now = None
    for entry in log:
        if isinstance(stream := entry.get("stream"), dict):
            now = [stream.get(name) for name in ("length", "dataset_id", "sources")]
        if "validation_loss" in entry:
            found, evaluated = [*(found if evaluated == now else []), entry], now
    return found


def _best(evaluations: list[Entry]) -> dict[str, Any] | None:
    """Return the lowest validation loss and its step."""
    known = [(loss, entry["step"]) for entry in evaluations if (loss := _finite(entry["validation_loss"])) is not None]
    return dict(zip(("loss", "step"), min(known), strict=True)) if known else None


def _median(steps: list[Entry], name: str) -> float | int | None:
    known = [value for entry in steps if (value := _finite(entry.get(name))) is not None]
    return _finite(float(np.median(known))) if known else None


def _warnings(steps: list[Entry], evaluations: list[Entry], about: dict[str, Any], num_invalid: int) -> Iterator[str]:
    """Yield warnings about a run, each a sentence."""
    if not about:
        yield "there is no complete run.json, so its options are not known."
    if num_invalid:
        yield f"{counted(num_invalid, 'invalid line')} of log.jsonl left out."
    if skipped := sum(entry["skipped"] for entry in steps if type(entry.get("skipped")) is int):
        yield f"The run skipped {counted(skipped, 'step')}, as a loss or the gradient was not finite; lower --lr."
    best, last = _best(evaluations), _best(evaluations[-1:])
    if not evaluations:
        yield "it was not evaluated; give --eval-every and a dataset with a validation split."
    elif best and last and last["loss"] > best["loss"] + _RISE:
        rose = f"from {best['loss']:.4f} at step {best['step']:,} to {last['loss']:.4f}"
        yield f"the validation loss rose {rose} at the end."
    planned = about.get("resolved", {}).get("steps")
    if isinstance(planned, int) and steps[-1]["step"] < planned:
        yield f"it is at step {steps[-1]['step']:,} of {planned:,}."
    waiting = _median(steps, "data_wait")
    if waiting and waiting > _WAITING:
        yield f"half of its steps waited for data {waiting:.0%} of the time or more."


def _flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one dictionary with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {before + name: value}
    return flat


def _options(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each option, and each number derived from it: its value in each run, and whether the values differ."""
    rows = []
    for name in dict.fromkeys(name for run in runs for name in run if name != "config.out"):
        kind, _, shown = name.partition(".")
        values = [_written(run[name]) if name in run else "" for run in runs]
        if kind == "resolved" and any(f"config.{shown}" in run for run in runs):
            shown += ", in effect"  # such as steps, which may be derived from --epochs
        rows.append({"name": shown, "values": values, "differs": len(set(values)) > 1})
    return rows


def _written(value: Any) -> str:
    if value is None or value == "" or value == []:
        return "–"
    return (value if isinstance(value, str) else json.dumps(value))[:_TEXT]
