"""A teacher's answers for the masked places of a stream: written once, in units, and read beside its batches.

docs/format.md is the contract. A row of the cache belongs to a position of the stream, so a student reads it front to
back; a unit is a fixed number of rows, made by any rank, and the cache is complete when cache.json is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import DatasetError, UsageError, damaged
from bertdata.files import fsync_directory
from bertdata.format.arrays import (
    HEADER_BYTES,
    ArrayWriter,
    array_path,
    open_array,
)
from bertdata.format.records import FORMAT_VERSION, read_record, write_record

CACHE, PLAN = "cache.json", "plan.json"
FORMAT = "bertdata-teacher"
LEAST = -65504.0  # of a float16; stands for the log of 0
_LEAST_BITS = 0xFBFF  # its bits; what is above is infinite or no number
_HEADER = ("teacher", "tokenizer", "stream", "epoch_samples", "epoch_tokens", "samples", "slots", "vocab_size", "top_k",
           "id_dtype", "unit_samples", "batch_samples")  # fmt: skip


class Answers(NamedTuple):
    """What a teacher says to B rows of K slots, as it is stored. Zeros in unused slots."""

    ids: NDArray[Any]  # [B, K, k] uint16 or uint32, the most probable first
    logprobs: NDArray[np.float16]  # [B, K, k]
    tails: NDArray[np.float16]  # [B, K]: log of the probability of all other tokens


def is_teacher_cache(path: str | Path) -> bool:
    return Path(path, CACHE).exists() or Path(path, PLAN).exists()


def unit_name(number: int) -> str:
    return f"unit-{number:05d}"


def num_units(header: Mapping[str, Any]) -> int:
    return -(-header["samples"] // header["unit_samples"])


def rows_of(header: Mapping[str, Any], number: int) -> tuple[int, int]:
    """The positions [first, stop) of a unit."""
    size = header["unit_samples"]
    return number * size, min((number + 1) * size, header["samples"])


def shapes(header: Mapping[str, Any], rows: int) -> dict[str, tuple[str, int]]:
    """dtype and length of each array of so many rows."""
    slots = rows * header["slots"]
    entries = slots * header["top_k"]
    return {"ids": (header["id_dtype"], entries), "logprobs": ("<f2", entries), "tails": ("<f2", slots)}


def num_bytes(header: Mapping[str, Any], units: Iterable[int] | None = None) -> int:
    """What the array files of some units take, or of all, to the byte."""
    total = 0
    for number in range(num_units(header)) if units is None else units:
        first, stop = rows_of(header, number)
        arrays = shapes(header, stop - first).values()
        total += sum(HEADER_BYTES + np.dtype(dtype).itemsize * length for dtype, length in arrays)
    return total


def begin(directory: Path, header: dict[str, Any]) -> None:
    """Writes the plan of a new cache, also over one that nothing came of; a complete one stays as it is.

    Raises UsageError, naming both values, if the directory holds a cache, or a part of one, with another header.
    """
    complete = (directory / CACHE).exists()
    if complete or next(directory.glob("unit-*"), None):
        known = read_header(directory, CACHE if complete else PLAN)
        if differing := _differing(known, header):
            raise UsageError(f"{directory} holds another cache: {differing}; give another --out")
    if complete:
        (directory / PLAN).unlink(missing_ok=True)  # a kill may have come between
    else:
        write_record(directory / PLAN, header)


def missing_units(directory: Path, header: Mapping[str, Any]) -> list[int]:
    """The units that are not there whole; a commit record is written after its arrays. O(units) system calls."""
    found = []
    for number in range(num_units(header)):
        first, stop = rows_of(header, number)
        try:
            read_record(directory / f"{unit_name(number)}.json")
            for name, (dtype, length) in shapes(header, stop - first).items():
                open_array(array_path(directory, unit_name(number), name), dtype, length)
        except DatasetError:
            found.append(number)
    return found


def write_unit(
    directory: Path, header: Mapping[str, Any], number: int, pieces: Iterable[tuple[Answers, dict[str, Any]]]
) -> None:
    """Writes the answers of a unit, piece after piece in order of position, and its commit record last.

    With each piece come its counts: samples, targets, and the sums entropy and tail_mass. Raises OSError on a full
    disk; what is left of the unit is written again.
    """
    first, stop = rows_of(header, number)
    expected = shapes(header, stop - first)
    arrays = {
        name: ArrayWriter(array_path(directory, unit_name(number), name), dtype)
        for name, (dtype, _) in expected.items()
    }
    counts: dict[str, Any] = {"samples": 0, "targets": 0, "entropy": 0.0, "tail_mass": 0.0}
    try:
        for answers, seen in pieces:
            for name, values in answers._asdict().items():
                arrays[name].append(values)
            counts = {name: counts[name] + seen[name] for name in counts}
        assert all(arrays[name].length == length for name, (_, length) in expected.items())  # noqa: S101
        entries = {name: array.commit() for name, array in arrays.items()}
    except BaseException:
        for array in arrays.values():
            array.discard()
        raise
    fsync_directory(directory)
    record = {"format_version": FORMAT_VERSION, "arrays": entries, "counts": counts}
    write_record(directory / f"{unit_name(number)}.json", record)


def publish(directory: Path, header: dict[str, Any]) -> None:
    """Writes cache.json over the units, all of which must be there, and removes the plan."""
    records = (read_record(directory / f"{unit_name(number)}.json") for number in range(num_units(header)))
    units = [without_crc32(record) for record in records]
    write_record(directory / CACHE, header | {"units": units})
    (directory / PLAN).unlink(missing_ok=True)
    fsync_directory(directory)


def without_crc32(record: Mapping[str, Any]) -> dict[str, Any]:
    """What cache.json says of a unit whose commit record this is."""
    entries = record["arrays"].items()
    arrays = {name: {key: entry[key] for key in ("dtype", "length", "sha256")} for name, entry in entries}
    return {"arrays": arrays, "counts": record["counts"]}


def read_header(directory: Path, name: str = CACHE) -> dict[str, Any]:
    """A header, and in cache.json the units. Raises DatasetError unless it is whole and of a known kind."""
    path = directory / name
    if name == CACHE and not path.exists():
        if (directory / PLAN).exists():
            raise DatasetError(f"{directory} holds an unfinished cache; the same bertrain.teacher finishes it")
        raise DatasetError(f"{directory} is not a teacher's cache: it has no {CACHE}; bertrain.teacher makes one")
    header = read_record(path)
    try:
        if header["format"] != FORMAT or any(key not in header for key in _HEADER):
            raise ValueError("not the header of a cache")
        numbers = [header[key] for key in ("samples", "slots", "vocab_size", "top_k", "unit_samples", "epoch_samples")]
        if any(type(number) is not int or number < 1 for number in numbers) or header["id_dtype"] not in ("<u2", "<u4"):
            raise ValueError("a number is not one")
        if not header["top_k"] <= header["vocab_size"] <= 1 << 24 or header["slots"] > 1 << 16:
            raise ValueError("top_k, vocab_size or slots")
        for number, unit in enumerate(header["units"] if name == CACHE else []):
            first, stop = rows_of(header, number)
            for array, (dtype, length) in shapes(header, stop - first).items():
                if (unit["arrays"][array]["dtype"], unit["arrays"][array]["length"]) != (dtype, length):
                    raise ValueError(f"array {array} of unit {number}")
            if unit["counts"]["samples"] != stop - first:
                raise ValueError(f"samples of unit {number}")
        if name == CACHE and len(header["units"]) != num_units(header):
            raise ValueError("units")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DatasetError(f"{path} is damaged: {type(error).__name__} {error}") from None
    return header


class TeacherCache:
    """A complete cache, opened: one small file is read. Units are mapped as they are reached, one at a time.

    .header is what cache.json says. Raises DatasetError if the directory holds no complete cache.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self.header = Path(path), read_header(Path(path))
        self._unit, self._arrays = -1, dict[str, Any]()

    @property
    def variants(self) -> int | None:
        return self.header["stream"].get("variants")

    def check(self, stream: Mapping[str, Any], tokenizer: str) -> None:
        """Raises UsageError, naming both values, if the answers are not those to this stream.

        stream: a loader's state without position. tokenizer: SHA-256 of the dataset's tokenizer.json.
        """
        kept = {"tokenizer": self.header["tokenizer"]} | self.header["stream"]
        if differing := _differing(kept, {"tokenizer": tokenizer} | dict(stream)):
            raise UsageError(
                f"the answers in {self.path} are to other masked samples than this run's: {differing}; give the run "
                "what they were made with, or make others with bertrain.teacher"
            )

    def read(self, positions: NDArray[np.int64], vocab_size: int) -> Answers:
        """The answers for positions of the stream, int64 [B], best ascending: copies, O(k) a slot.

        Raises UsageError past the end of the cache, DatasetError for damage that is in the way.
        """
        header = self.header
        slots, top_k = header["slots"], header["top_k"]
        shape = positions.size, slots, top_k
        found = Answers(np.empty(shape, header["id_dtype"]), np.empty(shape, "<f2"), np.empty(shape[:2], "<f2"))
        if positions.size and positions.max() >= header["samples"]:
            raise UsageError(
                f"{self.path} holds the answers to {header['samples']:,} samples, and the run reads "
                f"{int(positions.max()) + 1:,}; take fewer steps, or make the cache with more --max-samples, or with "
                "--variants, after which masks come round"
            )
        for first, stop in _stretches(positions, header["unit_samples"]):
            arrays = self._of(int(positions[first]) // header["unit_samples"])
            start = int(positions[first]) % header["unit_samples"] * slots
            end = start + (stop - first) * slots
            found.ids[first:stop] = arrays["ids"][start * top_k : end * top_k].reshape(-1, slots, top_k)
            found.logprobs[first:stop] = arrays["logprobs"][start * top_k : end * top_k].reshape(-1, slots, top_k)
            found.tails[first:stop] = arrays["tails"][start:end].reshape(-1, slots)
        if found.ids.size and (found.ids.max() >= vocab_size or not all(map(_are_logs, found[1:]))):
            raise damaged(self.path)
        return found

    def _of(self, number: int) -> dict[str, Any]:
        """The arrays of a unit; those of the one before are let go."""
        if number != self._unit:
            first, stop = rows_of(self.header, number)
            self._arrays = {
                name: open_array(array_path(self.path, unit_name(number), name), dtype, length)
                for name, (dtype, length) in shapes(self.header, stop - first).items()
            }
            self._unit = number
        return self._arrays


def _are_logs(values: NDArray[np.float16]) -> bool:
    """Whether all are finite and none is above 0; by their bits, as float16 is slow to compare."""
    return bool(values.view(np.int16).max() <= 0 and values.view(np.uint16).max() <= _LEAST_BITS)


def _stretches(positions: NDArray[np.int64], size: int) -> Iterator[tuple[int, int]]:
    """Where in `positions` stretches of neighbours that lie in one unit begin and end."""
    units = positions // size
    cuts = np.flatnonzero((np.diff(positions) != 1) | (np.diff(units) != 0)) + 1
    bounds = [0, *cuts.tolist(), positions.size]
    return zip(bounds, bounds[1:], strict=False) if positions.size else iter(())


def _differing(known: Mapping[str, Any], given: Mapping[str, Any], prefix: str = "") -> str:
    """What two headers do not agree about, both values named; empty if they agree."""
    found = []
    for name in dict.fromkeys([*known, *given]):
        was, now = known.get(name), given.get(name)
        if name == "units" or was == now:
            continue
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            found.append(_differing(was, now, f"{prefix}{name}."))
        else:
            found.append(f"{prefix}{name} was {was!r} and is {now!r}")
    return "; ".join(found)
