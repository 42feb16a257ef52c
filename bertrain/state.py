"""The state of a run: everything in a checkpoint besides the weights and the optimizer.

A checkpoint stores it in trainer.json; docs/checkpoint.md specifies it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import bertdata
from bertdata.support import DatasetError, UsageError
from bertrain.config import REMOVED, all_options
from bertrain.options import named


class TrainingError(bertdata.BertdataError):
    """An error that ends a run."""


TRAINER = "trainer.json"
VERSION = 2


@dataclass(kw_only=True)
class TrainState:
    """The state after a step. All values are JSON values."""

    version: int = VERSION
    step: int = 0
    tokens: int = 0  # token positions in all rows read, padding included
    seconds: dict[str, float] = field(default_factory=dict)  # seconds by kind of work, as in Clock
    phase: int = 1  # the number of the phase of this step
    phases: list[dict[str, Any]] = field(default_factory=list)  # all phases; [] in version 0.1.0 without [[phase]]
    loader: dict[str, Any] = field(default_factory=dict)  # the state of the phase's Loader
    streams: dict[str, int] = field(default_factory=dict)  # "dataset_id length" → samples read
    scaler: dict[str, Any] = field(default_factory=dict)  # state of the fp16 scaler
    milestones: list[str] = field(default_factory=list)  # of --save-at, since the previous checkpoint
    made_with: dict[str, Any] = field(default_factory=dict)  # the model, the teacher and other inputs, by content
    options: dict[str, Any] = field(default_factory=dict)  # the result of `kept_options`; {} if unknown
    world_size: int = 1
    versions: dict[str, str] = field(default_factory=dict)  # versions of libraries, for users

    def content(self) -> bytes:
        """Return the content of trainer.json."""
        return json.dumps(asdict(self), indent=1).encode()


_TOLD = {"rate", "masking", "methods", "number", "start", "steps", "schedule", "decay_share", "warmup_steps", "asked"}
_OPTIONS = {
    "sources": "data",
    "rows": "global_batch_size",
    "probability": "mlm_probability",
    "policy": "masking",
    "peak": "lr",
    "end": "lr_end",
    "stop": "steps",
}
"""Member of a phase → the option that sets it, if its name differs."""


def kept_options(options: Mapping[str, Any], *, of_phases: bool = False) -> dict[str, Any]:
    """Return the options that must not change. A missing option has its default.

    of_phases: whether to include those that a phase may set.
    """
    kept = {
        name: options.get(name, each.default)
        for name, each in all_options().items()
        if each.metadata["resume"] == "never" and (of_phases or not each.metadata["phase"])
    }
    return dict(json.loads(json.dumps(kept)))


def _kept_phases(phases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings of phases that must not change, as "phase N option" → value."""
    kept: dict[str, Any] = {}
    for number, phase in enumerate(phases, 1):
        flat = phase | phase.get("rate", {}) | phase.get("masking", {}) | phase.get("methods", {})
        told = _TOLD | ({"stop"} if number == len(phases) else set())
        kept |= {f"phase {number} {_OPTIONS.get(name, name)}": flat[name] for name in sorted(flat.keys() - told)}
    return kept


def require_same(saved: TrainState, now: TrainState, path: Path) -> None:
    """Raise UsageError that lists the values of a checkpoint that differ in the resuming run but must not.

    now: the `made_with`, `options` and `phases` of the run. path: the path of the checkpoint.
    """
    begun = min(saved.phase, len(now.phases))
    stop = now.phases[begun - 1]["stop"]
    before = saved.made_with | saved.options | _kept_phases(saved.phases[:begun])
    after = now.made_with | now.options | _kept_phases(now.phases[:begun])
    before |= {"phase": saved.phase, "steps": max(stop, saved.step)}
    after |= {"phase": begun, "steps": stop}
    for options in (before, after):
        if options.get("data_seed") is None:
            options["data_seed"] = options.get("seed")
    usual = json.loads(json.dumps({name: each.default for name, each in all_options().items()}))
    names = dict.fromkeys([*before, *after])  # an option that is missing has its default
    pairs = {name: [each.get(name, usual.get(name.split()[-1])) for each in (before, after)] for name in names}
    if differing := [(name, old, new) for name, (old, new) in pairs.items() if old != new]:
        listed = ", ".join(f"{name if ' ' in name else named(name)} {old} → {new}" for name, old, new in differing)
        if max(len(saved.phases), len(now.phases)) < 2:  # a run without [[phase]]
            listed = listed.replace("phase 1 ", "")
        sentence = f"{path} was trained with different options (old → new): {listed}; give the old ones or a new --out"
        option = differing[0][0].split()[-1].replace("-", "_")
        raise UsageError(sentence, "other-settings", option=option, given=differing[0][2])


def read(path: Path) -> TrainState:
    """Return the state in a checkpoint of version 1 or 2. Raises DatasetError if it cannot be read."""
    try:
        saved = json.loads((path / TRAINER).read_bytes())
        if saved["version"] not in (1, VERSION):
            raise ValueError(f"its version is {saved['version']}, but this bertrain reads 1 and {VERSION}")
        state = TrainState(**(_from_version_1(saved, path) if saved["version"] == 1 else saved))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        sentence = f"{path / TRAINER} is damaged: {error}; give a different checkpoint, or only its weights with --init"
        raise DatasetError(sentence, "damaged", given=str(path)) from None
    return state


def _from_version_1(saved: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a state of version 1 in the present version. The options are read from run.json in the directory above."""
    options: dict[str, Any] = {}
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        given = json.loads((path.parent / "run.json").read_bytes())["config"]
        removed = {name: given[name] for name in REMOVED.keys() & given if given[name] != REMOVED[name]}
        options = kept_options(given, of_phases=not saved["phases"]) | removed  # a run without [[phase]] saved none
        options.pop("branch", None)
    for each in (saved["loader"], *saved["phases"]):  # masks of a state without a rule follow rule 1
        each["masking"] = {"rule": 1, **(each.get("masking") or {})}
    made_with = {name: value for name, value in saved["made_with"].items() if not str(value).startswith("that of ")}
    optimizer, scales, seed = (made_with.pop(name, None) for name in ("optimizer", "lr-scale", "seed"))
    if optimizer and seed and not options:  # a checkpoint that was copied out of its run
        options = {"optimizer": optimizer, "lr_scale": (scales or "").split(), "seed": int(seed)}
    members = {name: value for name, value in saved.items() if name not in ("read", "methods", "since_entry")}
    return members | {"version": VERSION, "options": options, "made_with": made_with}
