"""What the directory of an unfinished build says: the plan of the build, and a record of each finished unit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from bertdata.errors import BuildError
from bertdata.files import write_file
from bertdata.format.manifest import SPLITS, Shard, Split
from bertdata.format.records import FORMAT_VERSION, read_record, write_record
from bertdata.sources.inputs import Input
from bertdata.sources.split import UNIT_RULE

PLAN = "plan.json"


@dataclass(frozen=True)
class BuildPlan:
    """What decides the bytes of a dataset. An unfinished build goes on only with the same plan."""

    settings: Mapping[str, Any]  # by the names of options
    published: Mapping[str, Any]  # those of them that the manifest has
    inputs: tuple[Input, ...]
    unit_rule: int = UNIT_RULE

    @classmethod
    def of(cls, files: Iterable[Input], published: Mapping[str, Any], **more: Any) -> BuildPlan:
        """more: settings that are not published."""
        return cls({**published, **more}, published, tuple(files))

    @classmethod
    def read(cls, staging: Path) -> BuildPlan | None:
        """That of an unfinished build; None if there is none, or none that can be read."""
        try:
            members = json.loads((staging / PLAN).read_bytes())
            return cls(**members | {"inputs": tuple(Input(*each) for each in members["inputs"])})
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def write(self, staging: Path) -> None:
        write_file(staging / PLAN, json.dumps(self.as_json()).encode())

    def as_json(self) -> dict[str, Any]:
        return vars(self) | {"inputs": [[file.name, file.size, file.version] for file in self.inputs]}

    def require_rule(self, directory: Path) -> None:
        """Raises BuildError if the units of this plan follow another rule than ours."""
        if self.unit_rule != UNIT_RULE:
            sentence = (
                f"{directory} holds an unfinished build of another version of bertdata, which divides inputs into "
                "units by another rule; finish it with that version, or use --overwrite to discard it"
            )
            raise BuildError(sentence, "other-version", option="out", given=self.unit_rule)


@dataclass(frozen=True)
class Tally:
    """What is counted of documents, beside what is stored of each. `a + b` is that of a's documents and then b's."""

    counts: Mapping[str, int] = field(default_factory=dict)  # name → number; one that is not there is 0
    special: Mapping[str, int] = field(default_factory=dict)  # special token → how often text spells it, or ids have it
    first_replaced: tuple[int, int] | None = None  # invalid bytes: number of the input, offset or row in it
    first_skipped: tuple[int, int, str] | None = None  # row without text: the same, and the reason
    last_ids: frozenset[int] = frozenset()  # of imports: ids with which documents end; one if all end with the same

    def __add__(self, later: Tally) -> Tally:
        return Tally(
            _sums(self.counts, later.counts),
            _sums(self.special, later.special),
            self.first_replaced or later.first_replaced,
            self.first_skipped or later.first_skipped,
            self.last_ids | later.last_ids,
        )


def _sums(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


@dataclass(frozen=True)
class UnitRecord:
    """A finished unit."""

    unit: int
    tally: Tally
    shards: Mapping[str, Shard]  # split → its shard; a split without documents has none
    origins: Mapping[str, str]  # name of a shard → SHA-256 of the origins of its documents; imports have none

    def write(self, path: Path) -> None:
        """Writes the record to a file, completely or not at all."""
        tally = vars(self.tally) | {"last_ids": sorted(self.tally.last_ids)}
        shards = {split: vars(shard) for split, shard in self.shards.items()}
        write_record(path, vars(self) | {"format_version": FORMAT_VERSION, "tally": tally, "shards": shards})

    @classmethod
    def read(cls, path: Path) -> UnitRecord:
        """Raises DatasetError if the file is missing or damaged."""
        record = read_record(path)
        tally: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in record["tally"].items()
        }
        tally["last_ids"] = frozenset(tally["last_ids"])
        shards = {split: Shard(**entry) for split, entry in record["shards"].items()}
        return cls(record["unit"], Tally(**tally), shards, record["origins"])


def unit_name(unit: int) -> str:
    """The file that says what the shards of a unit are. It is there if the unit is finished."""
    return f"unit-{unit:05d}.json"


def finished_units(staging: Path) -> dict[int, UnitRecord]:
    """Number → record of each finished unit. Raises DatasetError if a record is damaged."""
    records = map(UnitRecord.read, staging.glob("unit-*.json"))
    return {record.unit: record for record in records}


def tally_of(units: Mapping[int, UnitRecord]) -> Tally:
    """That of all units together."""
    return reduce(Tally.__add__, (record.tally for _, record in sorted(units.items())), Tally())


def splits_of(units: Mapping[int, UnitRecord]) -> dict[str, Split]:
    """The splits that have a shard, each with its shards in the order of the units."""
    in_order = [record for _, record in sorted(units.items())]
    shards = {split: tuple(each.shards[split] for each in in_order if split in each.shards) for split in SPLITS}
    return {split: Split(those) for split, those in shards.items() if those}
