"""What the directory of an unfinished build says: the plan of the build, and a record of each finished unit."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertdata.errors import BuildError
from bertdata.files import write_file
from bertdata.format.manifest import SPLITS, Shard, Split
from bertdata.format.records import FORMAT_VERSION, read_record, sealed_record
from bertdata.sources.inputs import Input
from bertdata.sources.plan import UNIT_RULE

PLAN = "plan.json"
_ROWS_JOINED = 256  # shards that are joined together, as one alone takes 1 KB


@dataclass(frozen=True)
class BuildPlan:
    """What decides the bytes of a dataset. An unfinished build goes on only with the same plan."""

    settings: Mapping[str, Any]  # by the names of options
    published: Mapping[str, Any]  # those of them that the manifest has
    inputs: tuple[Input, ...]
    tokenizer_name: str | None  # of its directory or on the hub
    unit_rule: int = UNIT_RULE

    @classmethod
    def read(cls, staging: Path) -> BuildPlan | None:
        """That of an unfinished build; None if there is none. Raises BuildError for one that cannot be read."""
        try:
            members = json.loads((staging / PLAN).read_bytes())
            plan = cls(**members | {"inputs": tuple(Input(*each) for each in members["inputs"])})
            if plan.unit_rule != UNIT_RULE:
                raise ValueError(plan.unit_rule)
            return plan
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, RecursionError):
            sentence = f"{staging / PLAN} is of another version of bertdata; use that version, or --overwrite"
            raise BuildError(sentence, "other-version", option="out", given=staging.parent) from None

    def write(self, staging: Path) -> None:
        write_file(staging / PLAN, json.dumps(self.as_json()).encode())

    def as_json(self) -> dict[str, Any]:
        return vars(self) | {"inputs": [[file.name, file.size, file.version] for file in self.inputs]}


@dataclass(frozen=True)
class Tally:
    """What is counted of documents, in addition to what is stored of each."""

    counts: Counter[str] = field(default_factory=Counter)
    """"[SEP] inside" is how often text spells a special token, or ids have it; an import has "ends with 3", which is
    not 0 if documents end with id 3. If they end with several ids, it has at least two of them."""
    first: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Kind of problem → number of the input, offset or row in it, and more, of the first document with it:

    "replaced": invalid bytes, "skipped": a skipped row, with the reason.
    """

    def add(self, other: Tally) -> None:
        """Add what was counted of other documents."""
        self.counts.update(other.counts)
        for name, place in other.first.items():
            self.first[name] = min(place, self.first.get(name, place))


@dataclass(frozen=True)
class UnitRecord:
    """A finished unit."""

    unit: int
    tally: Tally
    shards: Mapping[str, Shard]  # split → its shard; a split without documents has none
    origins: Mapping[str, str]  # name of a shard → SHA-256 of the origins of its documents; imports have none
    crc32: int | None = None  # of the items of an iterable from which it was made

    def sealed(self) -> bytes:
        """Return the file of the record."""
        shards = {split: vars(shard) for split, shard in self.shards.items()}
        record = {**vars(self), "format_version": FORMAT_VERSION, "tally": vars(self.tally), "shards": shards}
        return sealed_record(record, indent=None)

    @classmethod
    def read(cls, path: Path) -> UnitRecord:
        """Read a record. Raises DatasetError if the file is missing or damaged."""
        record = read_record(path)
        counts, first = record["tally"]["counts"], record["tally"]["first"]
        tally = Tally(Counter(counts), {name: tuple(place) for name, place in first.items()})
        shards = {split: Shard(**entry) for split, entry in record["shards"].items()}
        return cls(record["unit"], tally, shards, record["origins"], record.get("crc32"))


def record_name(unit: int) -> str:
    """The file that says what the shards of a unit are. It is there if the unit is finished."""
    return f"unit-{unit:05d}.json"


class FinishedUnits:
    """The finished units of a build. Threads may add some at the same time.

    A record takes 3 KB. Here a unit takes 0.4 KB, because what it counted is added to the rest.
    """

    def __init__(self, records: Iterable[UnitRecord] = ()) -> None:
        self.numbers, self.tally = set[int](), Tally()
        self.origins = dict[str, str]()  # name of a shard → SHA-256 of the origins of its documents
        self.checksums = dict[int, int]()  # of units that were made from an iterable
        self._shards = {split: list[Split]() for split in SPLITS}
        self._lock = threading.Lock()
        for record in records:
            self.add(record)

    def add(self, record: UnitRecord) -> None:
        """Adds a unit that is not there yet."""
        with self._lock:
            for split, shard in record.shards.items():
                parts = self._shards[split]
                parts.append(Split.from_shards([shard]))
                if len(parts) > _ROWS_JOINED:
                    parts[:] = [Split.joined(parts)]
            self.origins |= record.origins
            self.tally.add(record.tally)
            self.numbers.add(record.unit)
            if record.crc32 is not None:
                self.checksums[record.unit] = record.crc32

    def splits(self) -> dict[str, Split]:
        """The splits that have a shard, each with its shards in the order of the units."""
        return {split: Split.joined(parts) for split, parts in self._shards.items() if parts}


def finished_units(staging: Path) -> FinishedUnits:
    """Those of an unfinished build. Raises DatasetError if a record is damaged."""
    return FinishedUnits(map(UnitRecord.read, staging.glob("unit-*.json")))
