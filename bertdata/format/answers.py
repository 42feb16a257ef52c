"""A teacher cache: a teacher's answers for the masked places of a stream, written once and read beside its batches.

A row of the cache belongs to a position of the stream, so a student reads the cache from front to back. The rows are
stored in units of a fixed number of rows, which any rank can write. The cache is complete when cache.json is there.
docs/format.md defines it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import DatasetError, UsageError, damaged
from bertdata.files import fsync_directory, naming
from bertdata.format.arrays import HEADER_BYTES, ArrayWriter, array_path, open_array
from bertdata.format.records import FORMAT_VERSION, read_record, write_record

CACHE, PLAN = "cache.json", "plan.json"
FORMAT = "bertdata-teacher"
LEAST = -65504.0  # the smallest finite float16; stands for the log of 0
_LEAST_BITS = 0xFBFF  # the bits of LEAST; larger bits are infinite or not a number
_OPTIONS = {
    "seed": "--data-seed {}",
    "length": "--length {}",
    "shuffle": "--shuffle {}",
    "masking.policy": "--masking {}",
    "masking.probability": "--mlm-probability {}",
    "masking.mask_fraction": "--mask-fraction {}",
    "masking.random_fraction": "--random-fraction {}",
}
"""The options of bertrain pretrain that set a member of a stream."""
_SAMPLES = {"windows": "--no-isolate-documents", "packed": "--isolate-documents", "pairs": "--objective mlm+nsp"}
_HEADER = (
    "teacher",
    "tokenizer",
    "stream",
    "epoch_samples",
    "epoch_tokens",
    "samples",
    "slots",
    "vocab_size",
    "top_k",
    "id_dtype",
    "unit_samples",
    "batch_samples",
)


class Answers(NamedTuple):
    """A teacher's answers for B rows of K slots, as they are stored. Unused slots hold zeros."""

    ids: NDArray[Any]  # [B, K, k] uint16 or uint32: the most probable ids, in descending order
    logprobs: NDArray[np.float16]  # [B, K, k]: natural logs of their probabilities
    tails: NDArray[np.float16]  # [B, K]: log of the probability of all other tokens


def is_teacher_cache(path: str | Path) -> bool:
    """Whether a directory holds a teacher cache, complete or not."""
    return Path(path, CACHE).exists() or Path(path, PLAN).exists()


def unit_name(number: int) -> str:
    """What the names of the files of a unit begin with."""
    return f"unit-{number:05d}"


def num_units(header: Mapping[str, Any]) -> int:
    """The units of a complete cache, by its header."""
    return -(-header["samples"] // header["unit_samples"])


def rows_of(header: Mapping[str, Any], number: int) -> tuple[int, int]:
    """The positions [first, stop) of a unit."""
    size = header["unit_samples"]
    return number * size, min((number + 1) * size, header["samples"])


def shapes(header: Mapping[str, Any], rows: int) -> dict[str, tuple[str, int]]:
    """The dtype and length of each array of a unit with `rows` rows, by name."""
    slots = rows * header["slots"]
    entries = slots * header["top_k"]
    return {"ids": (header["id_dtype"], entries), "logprobs": ("<f2", entries), "tails": ("<f2", slots)}


def num_bytes(header: Mapping[str, Any], units: Iterable[int] | None = None) -> int:
    """The exact bytes that the array files of some units take; None: of all units."""
    total = 0
    for number in range(num_units(header)) if units is None else units:
        first, stop = rows_of(header, number)
        arrays = shapes(header, stop - first).values()
        total += sum(HEADER_BYTES + np.dtype(dtype).itemsize * length for dtype, length in arrays)
    return total


def begin(directory: Path, header: dict[str, Any]) -> None:
    """Writes plan.json for a new cache. It replaces a plan that has no unit, and leaves a complete cache as it is.

    Raises UsageError, which names both values, if the directory holds units or a cache with another header.
    """
    complete = (directory / CACHE).exists()
    if complete or next(directory.glob("unit-*"), None):
        old_header = read_header(directory, CACHE if complete else PLAN)
        if differing := _differing(old_header, header):
            sentence = f"{directory} holds another cache: {_both(differing)}; give the same options, or another --out"
            raise UsageError(sentence, "other-settings", option="out", given=directory)
    if complete:
        (directory / PLAN).unlink(missing_ok=True)  # a kill can leave it
    else:
        write_record(directory / PLAN, header)


def missing_units(directory: Path, header: Mapping[str, Any]) -> list[int]:
    """The numbers of the units that are missing or incomplete. O(units) system calls."""
    missing = []
    for number in range(num_units(header)):
        first, stop = rows_of(header, number)
        try:
            read_record(directory / f"{unit_name(number)}.json")
            for name, (dtype, length) in shapes(header, stop - first).items():
                open_array(array_path(directory, unit_name(number), name), dtype, length)
        except DatasetError:
            missing.append(number)
    return missing


def write_unit(
    directory: Path, header: Mapping[str, Any], number: int, pieces: Iterable[tuple[Answers, dict[str, Any]]]
) -> None:
    """Writes the answers of a unit, and its commit record last.

    pieces: in order of position, each with its counts: samples, targets, and the sums entropy and tail_mass. Raises
    OSError on a full disk; the unit is then missing, and the next run writes it again.
    """
    first, stop = rows_of(header, number)
    expected = shapes(header, stop - first)
    arrays = {
        name: ArrayWriter(array_path(directory, unit_name(number), name), dtype)
        for name, (dtype, _) in expected.items()
    }
    counts: dict[str, Any] = {"samples": 0, "targets": 0, "entropy": 0.0, "tail_mass": 0.0}
    try:
        with naming(directory):
            for answers, piece_counts in pieces:
                for name, values in answers._asdict().items():
                    arrays[name].append(values)
                counts = {name: counts[name] + piece_counts[name] for name in counts}
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
    """Writes cache.json, when all units are there, and removes the plan."""
    records = (read_record(directory / f"{unit_name(number)}.json") for number in range(num_units(header)))
    units = [without_crc32(record) for record in records]
    write_record(directory / CACHE, header | {"units": units})
    (directory / PLAN).unlink(missing_ok=True)
    fsync_directory(directory)


def without_crc32(record: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a unit in cache.json, from its commit record."""
    entries = record["arrays"].items()
    arrays = {name: {key: entry[key] for key in ("dtype", "length", "sha256")} for name, entry in entries}
    return {"arrays": arrays, "counts": record["counts"]}


def read_header(directory: Path, name: str = CACHE) -> dict[str, Any]:
    """Reads cache.json, header and units, or plan.json. Raises DatasetError if it is missing or damaged."""
    path = directory / name
    if name == CACHE and not path.exists():
        if (directory / PLAN).exists():
            sentence = (
                f"{directory} holds an unfinished teacher cache; run the same bertrain teacher again to finish it"
            )
            raise DatasetError(sentence, "unfinished", given=directory)
        sentence = f"{directory} is not a teacher cache: it has no {CACHE}; make one with bertrain teacher"
        raise DatasetError(sentence, "not-a-dataset", given=directory)
    header = read_record(path)
    with contextlib.suppress(KeyError, TypeError, AttributeError):
        header["stream"]["masking"] = {"rule": 1} | header["stream"]["masking"]  # earlier versions stored no rule
    try:
        if header["format"] != FORMAT or any(key not in header for key in _HEADER):
            raise ValueError("not the header of a cache")
        numbers = [header[key] for key in ("samples", "slots", "vocab_size", "top_k", "unit_samples", "epoch_samples")]
        if any(type(number) is not int or number < 1 for number in numbers) or header["id_dtype"] not in ("<u2", "<u4"):
            raise ValueError("a number is not one")
        if not header["top_k"] <= header["vocab_size"] <= 1 << 24 or header["slots"] > 1 << 16:
            raise ValueError("top_k, vocab_size or slots")
        variants = header["stream"].get("variants")
        if variants is not None and (type(variants) is not int or not 1 <= variants < 1 << 32):
            raise ValueError("variants")
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
        sentence = f"{path} is damaged: {type(error).__name__} {error}; copy or make it again"
        raise DatasetError(sentence, "damaged", given=path) from None
    return header


class TeacherCache:
    """A complete teacher cache. Opening reads cache.json alone; a unit is mapped when it is reached, one at a time.

    .header: the contents of cache.json. Raises DatasetError if the directory holds no complete cache.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self.header = Path(os.path.abspath(path)), read_header(Path(path))
        self._unit, self._arrays = -1, dict[str, Any]()

    @property
    def variants(self) -> int | None:
        """The variants of the stream that the answers belong to."""
        return self.header["stream"].get("variants")

    def check(self, stream: Mapping[str, Any], tokenizer: str) -> None:
        """Raises UsageError, which names both values and the options to give, if the answers belong to another stream.

        stream: the state of a loader without position. tokenizer: SHA-256 of the dataset's tokenizer.json.
        """
        cached = {"tokenizer": self.header["tokenizer"]} | self.header["stream"]
        if differing := _differing(cached, {"tokenizer": tokenizer} | dict(stream)):
            options = {**_OPTIONS, "samples": _SAMPLES.get(str(cached.get("samples")), "")}
            given = {name: old for name, (old, _) in differing.items() if old is not None}
            known = [options[name].format(old) for name, old in given.items() if options.get(name)]
            sentence = (
                f"the teacher cache {self.path} was made for other masked samples than those of this run: "
                f"{_both(differing)}; give the run {' '.join(known) or 'the same dataset and options'}, or make "
                "another cache with bertrain teacher"
            )
            raise UsageError(sentence, "other-stream", option="teacher_cache", given=self.path)

    def read(self, positions: NDArray[np.int64], vocab_size: int) -> Answers:
        """Copies the answers for positions of the stream, int64 [B]; ascending positions are read fastest.

        Raises UsageError for a position after the end of the cache, DatasetError for damage.
        """
        header = self.header
        slots, top_k = header["slots"], header["top_k"]
        shape = positions.size, slots, top_k
        out = Answers(np.empty(shape, header["id_dtype"]), np.empty(shape, "<f2"), np.empty(shape[:2], "<f2"))
        if positions.size and positions.max() >= header["samples"]:
            needed = int(positions.max()) + 1
            sentence = (
                f"the teacher cache {self.path} has answers for {header['samples']:,} samples, and the run reads "
                f"{needed:,}; run fewer steps, or make the cache with a larger --max-samples, or with --variants, "
                "after which the masks repeat"
            )
            raise UsageError(sentence, "not-stored", option="teacher_cache", given=needed)
        for first, stop in _runs(positions, header["unit_samples"]):
            arrays = self._unit_arrays(int(positions[first]) // header["unit_samples"])
            start = int(positions[first]) % header["unit_samples"] * slots
            end = start + (stop - first) * slots
            out.ids[first:stop] = arrays["ids"][start * top_k : end * top_k].reshape(-1, slots, top_k)
            out.logprobs[first:stop] = arrays["logprobs"][start * top_k : end * top_k].reshape(-1, slots, top_k)
            out.tails[first:stop] = arrays["tails"][start:end].reshape(-1, slots)
        if out.ids.size and (out.ids.max() >= vocab_size or not all(map(_are_logs, out[1:]))):
            raise damaged(self.path)
        return out

    def _unit_arrays(self, number: int) -> dict[str, Any]:
        """The arrays of a unit. Those of the unit before are closed."""
        if number != self._unit:
            first, stop = rows_of(self.header, number)
            self._arrays = {
                name: open_array(array_path(self.path, unit_name(number), name), dtype, length)
                for name, (dtype, length) in shapes(self.header, stop - first).items()
            }
            self._unit = number
        return self._arrays


def _are_logs(values: NDArray[np.float16]) -> bool:
    """Whether all are finite and at most 0. It compares bits, because comparing float16 is slow."""
    return bool(values.view(np.int16).max() <= 0 and values.view(np.uint16).max() <= _LEAST_BITS)


def _runs(positions: NDArray[np.int64], size: int) -> Iterator[tuple[int, int]]:
    """Where runs of consecutive positions of one unit begin and end in `positions`."""
    units = positions // size
    cuts = np.flatnonzero((np.diff(positions) != 1) | (np.diff(units) != 0)) + 1
    bounds = [0, *cuts.tolist(), positions.size]
    return zip(bounds, bounds[1:], strict=False) if positions.size else iter(())


def _differing(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the members in which two headers differ: name → (old, new)."""
    differing: dict[str, tuple[Any, Any]] = {}
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name), new.get(name)
        if name == "units" or before == after:
            continue
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            differing |= _differing(before, after, f"{prefix}{name}.")
        else:
            differing[f"{prefix}{name}"] = before, after
    return differing


def _both(differing: Mapping[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"{name} was {old!r} and is {new!r}" for name, (old, new) in differing.items())
