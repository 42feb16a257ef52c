"""The state of a run: what a killed run needs to go on as if nothing had happened.

It has nothing that follows from the options. trainer.json of a checkpoint holds it; docs/checkpoint.md is its contract.
The weights and the optimizer's moments are in files beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import bertdata
from bertdata.support import DatasetError, UsageError
from bertrain.config import without_removed


class TrainingError(bertdata.BertdataError):
    """A run cannot continue."""


TRAINER = "trainer.json"
VERSION = 1
OF_BRANCH = "that of "
"""How the model in `made_with` of earlier versions begins, for a run that began from a checkpoint of another one."""
OLD = ("read", "methods")  # members of earlier versions that nothing reads


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """After a step. All values are those of JSON."""

    version: int = VERSION
    step: int = 0
    tokens: int = 0  # places of all rows read
    seconds: Mapping[str, float] = field(default_factory=dict)  # by what they went to, as Clock has them
    phase: int = 1  # the number of the phase of this step
    phases: Sequence[Mapping[str, Any]] = ()  # those of the run; earlier versions left them out without [[phase]]
    loader: Mapping[str, Any] = field(default_factory=dict)  # the state of the phase's Loader
    streams: Mapping[str, int] = field(default_factory=dict)  # "dataset_id length" → samples read
    since_entry: Mapping[str, Sequence[float]] = field(default_factory=dict)  # sums since the last entry of the log
    scaler: Mapping[str, Any] = field(default_factory=dict)  # of fp16
    milestones: Sequence[str] = ()  # those of --save-at that this step passed
    made_with: Mapping[str, str | None] = field(default_factory=dict)  # what a resumed run must have again
    world_size: int = 1
    versions: Mapping[str, str] = field(default_factory=dict)  # of libraries, for people

    def content(self) -> bytes:
        """trainer.json."""
        return json.dumps(asdict(self), indent=1).encode()

    def require_made_with(self, path: Path, given: Mapping[str, str | None]) -> None:
        """Raises UsageError if this state, of the checkpoint `path`, was made with other settings than `given`."""
        for option, value in given.items():
            was = self.made_with.get(option)
            if was != value and not str(was).startswith(OF_BRANCH):
                before = f"--{option} {was}" if was else f"no --{option}"
                now = f"--{option} {value}" if value else "none"
                sentence = f"{path} was trained with {before}, and this run has {now}; give the same, or another --out"
                raise UsageError(sentence, "other-settings", option=option.replace("-", "_"), given=value)


def read(path: Path) -> TrainState:
    """The state in a checkpoint. Raises DatasetError for one that is damaged or of another version."""

    def damaged(reason: str) -> DatasetError:
        sentence = f"{path / TRAINER} is damaged: {reason}; give another checkpoint, or its weights alone with --init"
        return DatasetError(sentence, "damaged", given=str(path))

    try:
        saved = json.loads((path / TRAINER).read_bytes())
    except (ValueError, RecursionError) as error:
        raise damaged(f"it is not JSON ({error})") from None
    if isinstance(saved, dict):
        saved = {name: value for name, value in saved.items() if name not in OLD}
    names = {each.name for each in fields(TrainState)}
    if not isinstance(saved, dict) or saved.get("version") != VERSION or saved.keys() != names:
        version = saved.get("version") if isinstance(saved, dict) else None
        others = f" and other members ({', '.join(sorted(saved.keys() ^ names))})" if version == VERSION else ""
        sentence = (
            f"{path} was written by another version of bertrain: its {TRAINER} has the version {version}{others}, and "
            f"this one reads {VERSION}; use that version, or start from its weights with --init and another --out"
        )
        raise DatasetError(sentence, "other-version", given=str(path))
    for member, usual in asdict(TrainState()).items():
        if type(saved[member]) is not (list if isinstance(usual, tuple) else type(usual)):
            raise damaged(f"its {member} is {saved[member]!r:.40}")
    if not _is_sound(saved):
        raise damaged("it holds what no run writes")
    return TrainState(**saved)


def read_to_resume(path: Path) -> TrainState:
    """Return the state in a checkpoint of a run without removed options.

    A state that earlier versions wrote without phases gets one. Raises the errors of `read`, and UsageError if the run
    used a removed option.
    """
    saved, used = read(path), dict[str, Any]()
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):  # run.json may be damaged
        config = json.loads((path.parent / "run.json").read_bytes())["config"]
        for table in (config, *config["phase"], {"branch": ""}):  # branched runs may resume
            used.update(table)
    first = {"stop": saved.step, "methods": {"layers": used.get("layers")}}
    used |= {name.replace("-", "_"): value for name, value in saved.made_with.items() if value}
    if (path / "average.pt").exists():
        used["average"] = "average.pt"
    without_removed(used, path)
    phases = [_with_rule(phase) for phase in saved.phases] or [first]
    return replace(saved, loader=_with_rule(saved.loader), phases=phases)


def _with_rule(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved loader or phase with the rule of its masks; without one it is rule 1."""
    return {**saved, "masking": {"rule": 1, **(saved.get("masking") or {})}}


def _is_sound(saved: Mapping[str, Any]) -> bool:
    """Whether what is read of the members of a state is there, and of the right type."""
    counts = [saved["step"], saved["tokens"], saved["phase"] - 1, *saved["streams"].values()]
    return (
        all(type(number) is int and number >= 0 for number in counts)
        and all(type(number) in (int, float) for number in saved["seconds"].values())
        and "trained" in saved["seconds"]
        and all(isinstance(sums, list) and len(sums) > 1 for sums in saved["since_entry"].values())
        and all(type(number) in (int, float) for sums in saved["since_entry"].values() for number in sums)
        and saved["loader"].keys() >= {"length", "samples", "seed", "short_seq_prob", "shuffle"}
        and isinstance(saved["loader"].get("starts", []), list)
        and saved["phase"] <= max(1, len(saved["phases"]))
        and all(isinstance(phase, dict) and phase.keys() >= {"stop", "methods"} for phase in saved["phases"])
        and all(type(phase["stop"]) is int and isinstance(phase["methods"], dict) for phase in saved["phases"])
        and all(isinstance(each.get("masking") or {}, dict) for each in (saved["loader"], *saved["phases"]))
    )
