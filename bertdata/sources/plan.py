"""Inputs → the units of a build, from sizes and footers alone, and their text in blocks of about 4 MiB.

docs/format.md defines the unit of each document. Memory: two blocks, and a few copies of the longest document, of at
most 256 MiB. The kernel that cuts a plain file into documents makes the only copy of its text.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from bertdata.errors import BertdataError
from bertdata.options import TextFormat
from bertdata.sources import formats
from bertdata.sources.blocks import Block, Source
from bertdata.sources.inputs import Input
from bertdata.sources.streams import UTF_8
from bertdata.sources.tables import TABLE_KINDS, TableFile, group_units
from bertdata.sources.text import TextFile

UNIT_RULE = 3
"""Version of the rule of units in docs/format.md and of their records: a build or import that was begun with a
different version cannot continue.
"""
UNITS_PER_SIZE = 16  # unit numbers reserved for a file that decompresses to this many times its size
UNITS_OF_A_STREAM = 1 << 20
PART_BYTES = 1 << 24  # minimum bytes of input on disk in a part, if there is enough for PARTS_A_WORKER
PARTS_A_WORKER = 8
MOST_INPUTS = 1 << 12  # inputs in a block: each needs 2 KB in addition to its text


class Part(NamedTuple):
    """Consecutive units that one thread or process makes from beginning to end."""

    units: range
    size: float  # approximate bytes of their input on disk
    is_divisible: bool = False  # whether a unit can be read without the units before it


class Place(NamedTuple):
    """The units of an input. Consecutive plain files form one range of bytes, which is cut into units."""

    base: int  # offset of the input in its range
    first: int  # the first unit of the range
    units: range  # units that may hold text of the input; text beyond them belongs to the last one

    def unit(self, number: int) -> int:
        """Return the unit at an index, from 0, in the range."""
        return min(self.first + number, self.units[-1])


@dataclass(frozen=True)
class Plan:
    """The inputs of a build, and how their text is divided into units."""

    files: Sequence[Input]
    form: TextFormat
    places: Sequence[Place]  # one for each input
    ranges: Sequence[Part]  # all units, undivided

    @property
    def units(self) -> range:
        return range(self.ranges[-1].units.stop)

    def parts(self, workers: int | None = None) -> list[Part]:
        """Return all units in order, in parts that are as small as possible. With max_documents there is one part.

        workers: the number of parts made at the same time; joins consecutive small parts accordingly.
        """
        total = sum(file.size or 0 for file in self.files)
        if self.form.max_documents is not None:
            return [Part(self.units, total)]
        enough = min(PART_BYTES, total / (workers * PARTS_A_WORKER)) if workers else 0
        parts, begin, size = list[Part](), 0, 0.0
        for whole in self.ranges:
            step = 1 if whole.is_divisible else len(whole.units)
            for first in whole.units[::step]:
                size += whole.size * step / len(whole.units)
                if size >= enough:
                    parts.append(Part(range(begin, first + step), size))
                    begin, size = first + step, 0.0
        return parts if begin == self.units.stop else [*parts, Part(range(begin, self.units.stop), size)]

    def inputs_of(self, units: range) -> range:
        """Return the indices of the inputs that may hold text of some units.

        With max_documents these are all inputs, because documents are counted from the first on.
        """
        if self.form.max_documents is not None:
            return range(len(self.files))
        first = bisect_right(self.places, units.start, key=lambda place: place.units.stop)
        return range(first, bisect_left(self.places, units.stop, key=lambda place: place.units.start))


def split(files: Sequence[Input], form: TextFormat) -> Plan:
    """Plan the units of inputs. Reads only the footers of Parquet files.

    Raises InputError for a Parquet file that cannot be read or has no column for the text.
    """
    places, ranges, unit, of_unit = list[Place](), list[Part](), 0, form.shard_size
    # Consecutive plain files form one range; every other file has its own.
    for key, group in groupby(range(len(files)), lambda index: -1 if _is_plain(files[index], form) else index):
        numbers = list(group)
        bounds, file = [0, *accumulate(files[index].size or 0 for index in numbers)], files[numbers[0]]
        is_parquet = key >= 0 and (form.kind or file.kind) == "parquet"
        if key < 0:
            count = max(1, -(-bounds[-1] // of_unit))
        elif is_parquet:
            count = 1 + max(group_units(file, form), default=0)
        else:
            count = UNITS_OF_A_STREAM if file.size is None else 1 + UNITS_PER_SIZE * bounds[-1] // of_unit
        units = range(unit, unit + count)
        for index, (base, stop) in zip(numbers, pairwise(bounds), strict=True):
            if source_of(files[index], form).is_one_document:  # the document belongs to one unit
                stop = min(stop, base + 1)  # noqa: PLW2901
            own = range(unit + base // of_unit, unit - -stop // of_unit) if key < 0 else units
            places.append(Place(base, unit, own))
        ranges.append(Part(units, bounds[-1], is_divisible=key < 0 or is_parquet))
        unit = units.stop
    return Plan(files, form, places, ranges)


def source_of(file: Input, form: TextFormat, number: int = 0) -> Source:
    """Return the Source of an input. number: the index of the input."""
    kind = form.kind or file.kind
    return (TableFile if kind in TABLE_KINDS else TextFile)(file, kind, form, number)


def _is_plain(file: Input, form: TextFormat) -> bool:
    """Return whether an offset in the text is an offset in the file."""
    is_table = (form.kind or file.kind) in TABLE_KINDS
    return not (is_table or file.compression or file.is_stream) and form.encoding == UTF_8


def find_blocks(
    plan: Plan, is_wanted: Callable[[int], bool] = lambda unit: True, units: range | None = None
) -> Iterator[Block]:
    """Yield the text of all inputs in order, in blocks of one unit each.

    is_wanted: unit → whether to yield it. units: the units to consider; None: all. Skips unwanted units of plain files
    and of Parquet without reading them, and any other file without wanted units.

    Raises InputError for unreadable input, like `Block.decode`, with the file and its line, byte or row.
    """
    limit, every = plan.form.max_documents, plan.units if units is None else units

    def wanted(unit: int) -> bool:
        return unit in every and is_wanted(unit)

    # With max_documents every document counts, including documents of unwanted units.
    blocks = _read(plan, plan.inputs_of(every), wanted if limit is None else lambda unit: True)
    if limit is not None:
        blocks = (block for block in _first(blocks, limit) if wanted(block.unit))
    return _together(blocks)


def _read(plan: Plan, inputs: range, is_wanted: Callable[[int], bool]) -> Iterator[Block]:
    """Yield blocks of one input each. Does not open a file without wanted units."""
    before = 0  # bytes of the previous inputs
    for index in inputs:
        source, place, read = source_of(plan.files[index], plan.form, index), plan.places[index], 0
        if any(map(is_wanted, place.units)):

            def wanted(number: int, place: Place = place) -> bool:
                return is_wanted(place.unit(number))

            for block in source.blocks(place.base, wanted):
                read = block.bytes_read
                yield block._replace(unit=place.unit(block.unit), bytes_read=before + read)
                del block  # a long document is freed before the next one is read
        before += read if source.file.size is None else source.file.size


def _first(blocks: Iterable[Block], limit: int) -> Iterator[Block]:
    """Yield the first documents, up to a number, and the rows without a text before the last of them."""
    for block in blocks:
        source, raw = block.raw[0]
        found = source.decode(raw)
        if found.starts.size >= limit:
            found = found.between(0, limit)
            found = replace(found, bad=[each for each in found.bad if each.place < found.starts[-1]])
        yield block._replace(raw=[(source, found)], is_decoded=True)
        limit -= found.starts.size
        if not limit:
            return


def _together(blocks: Iterable[Block]) -> Iterator[Block]:
    """Yield consecutive blocks of a unit as one block. Yields the text before an error before raising the error."""
    pending: Block | None = None
    try:
        for block in blocks:
            if pending and (pending.unit != block.unit or pending.num_bytes + block.num_bytes > formats.BLOCK_BYTES):
                yield pending
                pending = None
            if pending:
                pending.raw.extend(block.raw)
                block = block._replace(num_bytes=pending.num_bytes + block.num_bytes, raw=pending.raw)  # noqa: PLW2901
            pending = block
            del block  # a long document is freed before the next one is read
            if pending.num_bytes >= formats.BLOCK_BYTES or len(pending.raw) >= MOST_INPUTS:
                yield pending
                pending = None
    except BertdataError:
        if pending:
            yield pending
        raise
    if pending:
        yield pending
