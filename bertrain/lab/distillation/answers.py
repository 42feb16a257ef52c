"""A teacher cache: a teacher's answers for the masked tokens of a stream, written once and read with its batches.

A row of the cache belongs to a stream position, so a student reads the cache from front to back. The rows are stored in
units of a fixed number of rows, which any rank can write. The cache is complete when cache.json exists. docs/format.md
defines it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

import bertdata
from bertdata.support import (
    FORMAT_VERSION,
    HEADER_BYTES,
    ArrayWriter,
    DatasetError,
    Stage,
    UsageError,
    array_faults,
    array_file,
    array_path,
    fsync_directory,
    open_array,
    read_record,
    sealed_record,
    write_record,
)
from bertrain.lab.options import differences

CACHE, PLAN = "cache.json", "plan.json"
FORMAT = "bertdata-teacher"
LEAST = -65504.0  # the smallest finite float16, which replaces the log of 0
_LEAST_BITS = 0xFBFF  # the bits of LEAST; larger values are infinite or NaN
_COUNTS = ("epoch_samples", "samples", "slots", "vocab_size", "top_k", "unit_samples")
HEADER = ("teacher", "tokenizer", "stream", "epoch_tokens", "id_dtype", "batch_samples", *_COUNTS)


class Answers(NamedTuple):
    """A teacher's answers for B rows of K slots, in the stored form. Unused slots are zeros."""

    ids: NDArray[Any]  # [B, K, k] uint16 or uint32: the most probable ids, in descending order
    logprobs: NDArray[np.float16]  # [B, K, k]: natural logs of their probabilities
    tails: NDArray[np.float16]  # [B, K]: log of the probability of all other tokens


def unit_name(number: int) -> str:
    """Return the prefix of the file names of a unit."""
    return f"unit-{number:05d}"


def num_units(header: Mapping[str, Any]) -> int:
    """Return the number of units of a complete cache."""
    return -(-header["samples"] // header["unit_samples"])


def rows_of(header: Mapping[str, Any], number: int) -> tuple[int, int]:
    """Return the stream positions [first, stop) of a unit."""
    size = header["unit_samples"]
    return number * size, min((number + 1) * size, header["samples"])


def shapes(header: Mapping[str, Any], number: int) -> dict[str, tuple[str, int]]:
    """Return the dtype and the length of each array of a unit."""
    first, stop = rows_of(header, number)
    slots = (stop - first) * header["slots"]
    entries = slots * header["top_k"]
    return {"ids": (header["id_dtype"], entries), "logprobs": ("<f2", entries), "tails": ("<f2", slots)}


def num_bytes(header: Mapping[str, Any], units: Iterable[int] | None = None) -> int:
    """Return the exact size in bytes of the array files of some units; None: of all units."""
    arrays = (shapes(header, number).values() for number in (range(num_units(header)) if units is None else units))
    return sum(HEADER_BYTES + np.dtype(dtype).itemsize * length for unit in arrays for dtype, length in unit)


def _opened(directory: Path, header: Mapping[str, Any], number: int) -> dict[str, NDArray[Any]]:
    """Map the arrays of a unit into memory. Raises DatasetError if a size or a header is wrong."""
    known, unit = shapes(header, number), unit_name(number)
    return {name: open_array(array_path(directory, unit, name), *expected) for name, expected in known.items()}


def begun(directory: Path) -> dict[str, Any] | None:
    """Return the header of a complete or incomplete cache; None if there is none. Raises DatasetError if damaged."""
    if (directory / CACHE).exists():
        return read_header(directory)
    return read_header(directory, PLAN) if next(directory.glob("unit-*"), None) else None


def begin(directory: Path, header: dict[str, Any]) -> list[int]:
    """Begin or continue a cache. Return the numbers of the missing units. O(units) system calls.

    Raises UsageError, which names both values, if the directory has units or a cache with a different header.
    """
    if (old := begun(directory)) and (differing := differences(_flat(old), _flat(header))):
        sentence = f"{directory} has a different cache (old → new): {differing}; give its options, or a new --out"
        raise UsageError(sentence, "other-settings", option="out", given=directory)
    if (directory / CACHE).exists():
        (directory / PLAN).unlink(missing_ok=True)  # left by a killed process
        return []
    write_record(directory / PLAN, header)
    missing = []
    for number in range(num_units(header)):
        try:
            read_record(directory / f"{unit_name(number)}.json")
            _opened(directory, header, number)
        except DatasetError:
            missing.append(number)
    return missing


def write_unit(
    directory: Path, header: Mapping[str, Any], number: int, pieces: Iterable[tuple[Answers, dict[str, Any]]]
) -> None:
    """Write the answers of a unit, and its commit record last.

    pieces: in order of position, each with its counts: samples, targets, and the sums entropy and tail_mass. Raises
    OSError on a full disk; the unit is then missing, and the next run writes it again.
    """
    expected, unit = shapes(header, number), unit_name(number)
    counts: dict[str, Any] = {"samples": 0, "targets": 0, "entropy": 0.0, "tail_mass": 0.0}
    with Stage(directory) as stage:
        arrays = {name: ArrayWriter(stage, array_file(unit, name), dtype) for name, (dtype, _) in expected.items()}
        for answers, piece_counts in pieces:
            for name, values in answers._asdict().items():
                arrays[name].append(values)
            counts = {name: counts[name] + piece_counts[name] for name in counts}
        entries = {name: array.finish() for name, array in arrays.items()}
        record = {"format_version": FORMAT_VERSION, "arrays": entries, "counts": counts}
        stage.write(f"{unit}.json", sealed_record(record))
        stage.publish()


def publish(directory: Path, header: dict[str, Any]) -> None:
    """Write cache.json after all units, and remove the plan."""
    records = (read_record(directory / f"{unit_name(number)}.json") for number in range(num_units(header)))
    write_record(directory / CACHE, header | {"units": [_without_crc32(record) for record in records]})
    (directory / PLAN).unlink(missing_ok=True)
    fsync_directory(directory)


def _without_crc32(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cache.json entry of a unit from its commit record."""
    entries = record["arrays"].items()
    arrays = {name: {key: entry[key] for key in ("dtype", "length", "sha256")} for name, entry in entries}
    return {"arrays": arrays, "counts": record["counts"]}


def read_header(directory: Path, name: str = CACHE) -> dict[str, Any]:
    """Read cache.json or plan.json, with header and units. Raises DatasetError if it is missing or damaged."""
    path = directory / name
    if name == CACHE and not path.exists():
        sentence = f"{directory} is not a complete teacher cache: it has no {CACHE}; run bertrain teacher to its end"
        raise DatasetError(sentence, "not-a-dataset", given=directory)
    header = read_record(path)
    with contextlib.suppress(KeyError, TypeError, AttributeError):
        header["stream"]["masking"] = {"rule": 1} | header["stream"]["masking"]  # earlier versions stored no rule
    try:
        counts = [*(header[key] for key in _COUNTS), header["stream"].get("variants", 1)]
        is_sound = header["format"] == FORMAT and header.keys() >= {*HEADER} and header["id_dtype"] in ("<u2", "<u4")
        is_sound &= all(type(number) is int and number >= 1 for number in counts) and counts[-1] < 1 << 32
        is_sound &= header["top_k"] <= header["vocab_size"] <= 1 << 24 and header["slots"] <= 1 << 16
        if is_sound and name == CACHE:
            number = num_units(header)
            made = [
                {array: (entry["dtype"], entry["length"]) for array, entry in unit["arrays"].items()}
                for unit in header["units"]
            ]
            is_sound = len(made) == number and made == [shapes(header, each) for each in range(number)]
    except (KeyError, TypeError, ValueError, AttributeError):
        is_sound = False
    if not is_sound:
        sentence = f"{path} is damaged: it is not the header of a teacher cache; copy or make it again"
        raise DatasetError(sentence, "damaged", given=path)
    return header


class TeacherCache:
    """A complete teacher cache. Opening it reads only cache.json; units are mapped on access, one at a time.

    .header: the contents of cache.json. Raises DatasetError if the directory has no complete cache.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self.header = Path(os.path.abspath(path)), read_header(Path(path))
        self._unit, self._arrays = -1, dict[str, Any]()

    def check(self, loader: bertdata.Loader) -> None:
        """Raise UsageError, which names both values, if a loader reads a different stream."""
        tokenizer = loader.sources[0].dataset.manifest.tokenizer.get("tokenizer.json", "")
        cached = {"tokenizer": self.header["tokenizer"]} | self.header["stream"]
        now = {"tokenizer": tokenizer} | loader.state_dict()
        del now["position"]
        if differing := differences(_flat(cached), _flat(now)):
            sentence = (
                f"{self.path} has other masked samples (cache → run): {differing}; give the same data and options"
            )
            raise UsageError(sentence, "other-stream", option="teacher_cache", given=self.path)

    def read(self, positions: NDArray[np.int64], vocab_size: int) -> Answers:
        """Copy the answers for stream positions, int64 [B]; ascending positions are the fastest.

        Raises UsageError for a position after the end of the cache, DatasetError for damage.
        """
        header = self.header
        size, slots, top_k = header["unit_samples"], header["slots"], header["top_k"]
        shape = positions.size, slots, top_k
        out = Answers(np.empty(shape, header["id_dtype"]), np.empty(shape, "<f2"), np.empty(shape[:2], "<f2"))
        needed = int(positions.max(initial=-1)) + 1
        if needed > header["samples"]:
            sentence = (
                f"the teacher cache {self.path} has answers for {header['samples']:,} samples, and the run reads "
                f"{needed:,}; run fewer steps, or make the cache with a larger --max-samples"
            )
            raise UsageError(sentence, "not-stored", option="teacher_cache", given=needed)
        for unit in np.unique(positions // size).tolist():
            if unit != self._unit:
                self._unit, self._arrays = unit, _opened(self.path, header, unit)
            here = positions // size == unit
            for name, array in out._asdict().items():
                array[here] = self._arrays[name].reshape(-1, *array.shape[1:])[positions[here] % size]
        if out.ids.size and (out.ids.max() >= vocab_size or not all(map(_are_logs, out[1:]))):
            sentence = f"{self.path} is damaged; copy it, or make it again"
            raise DatasetError(sentence, "damaged", given=self.path)
        return out


@dataclass(frozen=True, kw_only=True)
class TaughtBatch(bertdata.Batch):
    """A batch with the answers to its masked tokens."""

    teacher_ids: NDArray[Any]
    teacher_logprobs: NDArray[np.float16]
    teacher_tails: NDArray[np.float16]


class TaughtLoader(bertdata.Loader):
    """A Loader whose batches include a teacher's answers.

    teacher_cache: directory of the cache. It sets the mask rule, and the number of epochs after which the masks repeat.
    Raises UsageError if the cache belongs to a different stream.
    """

    def __init__(self, shards: Any, *, teacher_cache: str, masking: bertdata.Masking, **options: Any) -> None:
        self.teacher_cache, self._cache = os.path.abspath(teacher_cache), TeacherCache(teacher_cache)
        stream = self._cache.header["stream"]
        masking = masking.with_rule_of(stream.get("masking") or {})
        super().__init__(shards, masking=masking, **options | {"variants": stream.get("variants")})
        self._cache.check(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._cache.check(self)  # a state includes its mask rule

    def read(self, positions: np.ndarray) -> TaughtBatch:
        batch = super().read(positions)
        repeated = positions if self.variants is None else positions % (self.variants * self.num_samples)
        answers = self._cache.read(repeated, self.sources[0].dataset.special_tokens.vocab_size)
        taught = {f"teacher_{name}": array for name, array in answers._asdict().items()}
        return TaughtBatch(**vars(batch), **taught)


def verify(directory: Path) -> Iterator[str]:
    """Read every byte of a cache. Yield a sentence for each error. Raises DatasetError for a damaged cache.json."""
    units = tqdm(read_header(directory)["units"], unit="unit", leave=False, disable=None)
    for number, unit in enumerate(units):
        path, crc32_of = directory / f"{unit_name(number)}.json", dict[str, Any]()
        try:
            record = read_record(path)
            crc32_of = {array: entry["crc32"] for array, entry in record["arrays"].items()}
            if unit != _without_crc32(record):
                yield f"{path} and {CACHE} disagree"
        except (DatasetError, LookupError, TypeError, AttributeError) as error:
            yield str(error) if isinstance(error, DatasetError) else f"{path} is damaged: it is not that of this unit"
        for array, entry in unit["arrays"].items():
            yield from array_faults(array_path(directory, path.stem, array), entry, crc32_of.get(array))


def _are_logs(values: NDArray[np.float16]) -> bool:
    """Return whether all values are finite and at most 0. Compares bits, because comparing float16 is slow."""
    return bool(values.view(np.int16).max() <= 0 and values.view(np.uint16).max() <= _LEAST_BITS)


def _flat(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a header without its units; members of objects get dotted names."""
    flat: dict[str, Any] = {}
    for name, value in header.items():
        nested = {f"{name}.{key}": each for key, each in _flat(value).items()} if isinstance(value, Mapping) else {}
        flat |= nested or {name: value}
    flat.pop("units", None)
    return flat
