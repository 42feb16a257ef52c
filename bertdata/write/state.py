"""What the directory of an unfinished build says: the plan of the build, and a record of each finished unit."""

from __future__ import annotations

import json
import threading
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertdata.errors import BuildError
from bertdata.files import write_file
from bertdata.format.manifest import SPLITS, Shard, Split
from bertdata.format.records import FORMAT_VERSION, read_record, write_record
from bertdata.format.table import shard_name
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
    """What is counted of documents, beside what is stored of each. `a + b` is that of the documents of both."""

    counts: Mapping[str, int] = field(default_factory=dict)  # name → number; one that is not there is 0
    special: Mapping[str, int] = field(default_factory=dict)  # special token → how often text spells it, or ids have it
    first_replaced: tuple[int, int] | None = None  # invalid bytes: number of the input, offset or row in it
    first_skipped: tuple[int, int, str] | None = None  # row without text: the same, and the reason
    last_ids: frozenset[int] = frozenset()  # of imports: ids with which documents end; one if all end with the same

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            _sums(self.counts, other.counts),
            _sums(self.special, other.special),
            min(filter(None, (self.first_replaced, other.first_replaced)), default=None),
            min(filter(None, (self.first_skipped, other.first_skipped)), default=None),
            self.last_ids | other.last_ids,
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
        record = vars(self) | {"format_version": FORMAT_VERSION, "tally": tally, "shards": shards}
        write_record(path, record, indent=None)

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


_Packed = tuple[tuple[tuple[str, str], ...], bytes]
"""A shard as `_pack` makes it."""


class FinishedUnits:
    """The finished units of a build. Threads may add some at the same time.

    A record takes 3 KB. Here a unit takes 0.3 KB: its shards are packed, and what it counted is added to the rest.
    """

    def __init__(self, records: Iterable[UnitRecord] = ()) -> None:
        self.numbers, self.tally = set[int](), Tally()
        self._packed: dict[str, dict[int, _Packed]] = {split: {} for split in SPLITS}
        self._kinds = dict[Any, Any]()  # so that shards share the names of their arrays
        self._lock = threading.Lock()
        for record in records:
            self.add(record)

    def add(self, record: UnitRecord) -> None:
        """Adds a unit that is not there yet."""
        with self._lock:
            for split, shard in record.shards.items():
                kinds, content = _pack(shard, record.origins.get(shard.name, ""))
                self._packed[split][record.unit] = self._kinds.setdefault(kinds, kinds), content
            self.tally += record.tally
            self.numbers.add(record.unit)

    def splits(self) -> dict[str, Split]:
        """The splits that have a shard, each with its shards in the order of the units."""
        return {split: Split(_PackedShards(split, packed)) for split, packed in self._packed.items() if packed}

    def origins(self) -> dict[str, str]:
        """Name of a shard → SHA-256 of the origins of its documents, in the order of `splits`. Imports have none."""
        return {
            shard_name(split, unit): sha256
            for split, packed in self._packed.items()
            for unit in sorted(packed)
            if (sha256 := _origins_of(packed[unit]))
        }


def finished_units(staging: Path) -> FinishedUnits:
    """Those of an unfinished build. Raises DatasetError if a record is damaged."""
    return FinishedUnits(map(UnitRecord.read, staging.glob("unit-*.json")))


class _PackedShards(Sequence[Shard]):
    """The shards of a split. A Shard is made when it is asked for."""

    def __init__(self, split: str, packed: Mapping[int, _Packed]) -> None:
        self._split, self._packed, self._units = split, packed, sorted(packed)

    def __len__(self) -> int:
        return len(self._units)

    def __getitem__(self, index: Any) -> Any:
        unit = self._units[index]
        return _unpacked(shard_name(self._split, unit), self._packed[unit])


def _pack(shard: Shard, origins: str) -> _Packed:
    """Name and dtype of each array, which many shards share; numbers and digests. origins: SHA-256, or ""."""
    entries = shard.arrays.values()
    numbers = [shard.num_documents, shard.num_tokens, shard.num_sentences or 0, *(each["length"] for each in entries)]
    digests = "".join([*(each["sha256"] for each in entries), origins])
    kinds = tuple((name, each["dtype"]) for name, each in shard.arrays.items())
    return kinds, array("q", numbers).tobytes() + bytes.fromhex(digests)


def _origins_of(packed: _Packed) -> str:
    kinds, content = packed
    return content[8 * (3 + len(kinds)) + 32 * len(kinds) :].hex()


def _unpacked(name: str, packed: _Packed) -> Shard:
    kinds, content = packed
    num_bytes = 8 * (3 + len(kinds))
    documents, tokens, sentences, *lengths = array("q", content[:num_bytes])
    digests = content[num_bytes:].hex()
    arrays = {
        array_name: {"dtype": dtype, "length": length, "sha256": digests[64 * number : 64 * (number + 1)]}
        for number, ((array_name, dtype), length) in enumerate(zip(kinds, lengths, strict=True))
    }
    return Shard(name, documents, tokens, sentences if "sentences" in arrays else None, arrays)
