"""Inputs → the units of a build, from sizes and footers alone, and their text in blocks of about 4 MiB.

docs/format.md says which unit a document belongs to. Memory: two blocks, and a few copies of the longest document,
which has at most 256 MiB. The text of a plain file is copied once, by the kernel that cuts it.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from bertdata.errors import BertdataError
from bertdata.sources import formats
from bertdata.sources.blocks import Block, Source
from bertdata.sources.formats import TextFormat
from bertdata.sources.inputs import Input
from bertdata.sources.streams import UTF_8
from bertdata.sources.tables import TABLE_KINDS, TableFile, group_units
from bertdata.sources.text import TextFile

UNIT_RULE = 2  # version of the rule in docs/format.md, by which an unfinished build goes on
UNITS_PER_SIZE = 16  # numbers kept for a file that unpacks to this many times its size
UNITS_OF_A_STREAM = 1 << 20
TASK_BYTES = 1 << 24  # of input on disk that one task reads at least, where there is enough for TASKS_A_WORKER
TASKS_A_WORKER = 8
MOST_INPUTS = 1 << 12  # in a block: each takes 2 KB in addition to its text


@dataclass(frozen=True)
class Stretch:
    """Inputs whose bytes are one range that is cut into units, and the numbers of these units."""

    inputs: range  # numbers of the inputs
    ends: tuple[int, ...]  # where each input ends in the range; of what is not plain, as if it were its size on disk
    first: int  # the first unit
    count: int  # how many numbers there are; what lies beyond belongs to the last
    is_divisible: bool  # whether a unit can be read without those before it
    first_section: int
    base: int = 0  # where the first of the inputs begins in the range

    def unit(self, number: int) -> int:
        """The unit with a number from 0 in this stretch."""
        return self.first + min(number, self.count - 1)

    @property
    def units(self) -> range:
        return range(self.first, self.first + self.count)

    @property
    def num_sections(self) -> int:
        return self.count if self.is_divisible else 1


@dataclass(frozen=True)
class Task:
    """Sections that follow each other, and that one thread or process makes."""

    units: range
    size: float  # bytes of their input on disk, more or less


@dataclass(frozen=True)
class Plan:
    """The inputs of a build, and how their text is divided into units."""

    files: Sequence[Input]
    form: TextFormat
    stretches: Sequence[Stretch]

    def section(self, unit: int) -> int:
        """The number of what must be read together to make a unit: the unit alone, or the file that it lies in."""
        stretch = self.stretches[self._stretch_of(unit)]
        return stretch.first_section + (unit - stretch.first if stretch.is_divisible else 0)

    def _stretch_of(self, unit: int) -> int:
        return bisect_right(self.stretches, unit, key=lambda each: each.first) - 1

    def narrowed(self, units: range) -> Plan:
        """The plan without the inputs that have nothing of some units. Takes no time for those.

        With max_documents all remain, because the documents are counted from the first on.
        """
        if self.form.max_documents is not None:
            return self
        near = list(self.stretches[self._stretch_of(units[0]) : self._stretch_of(units[-1]) + 1])
        for number, stretch in enumerate(near):
            if len(stretch.inputs) > 1:
                size = self.form.shard_size
                start = max(0, units[0] - stretch.first) * size
                stop = sys.maxsize if units[-1] >= stretch.units[-1] else (units[-1] + 1 - stretch.first) * size
                first = min(bisect_right(stretch.ends, start), len(stretch.ends) - 1)  # also where all are empty
                last = bisect_left(stretch.ends, stop) + 1
                near[number] = replace(
                    stretch,
                    inputs=stretch.inputs[first:last],
                    ends=stretch.ends[first:last],
                    base=stretch.ends[first - 1] if first else stretch.base,
                )
        return replace(self, stretches=near)

    def tasks(self, workers: int) -> list[Task]:
        """All sections in order. A task has one, or several that are small; with max_documents, all.

        workers: how many do tasks at the same time.
        """
        total = sum(file.size or 0 for file in self.files)
        if self.form.max_documents is not None:
            return [Task(range(self.stretches[-1].units.stop), total)]
        enough = min(TASK_BYTES, total / (workers * TASKS_A_WORKER))
        tasks, begin, size = list[Task](), -1, 0.0
        for stretch in self.stretches:
            step = stretch.count // stretch.num_sections
            share = (stretch.ends[-1] - stretch.base) / stretch.num_sections
            for section in range(stretch.num_sections):
                first = stretch.first + section * step
                begin, end, size = first if begin < 0 else begin, first + step, size + share
                if size >= enough:
                    tasks.append(Task(range(begin, end), size))
                    begin, size = -1, 0.0
        return tasks if begin < 0 else [*tasks, Task(range(begin, end), size)]


def split(files: Sequence[Input], form: TextFormat) -> Plan:
    """Plans the units of inputs. Reads the footers of Parquet files, and nothing else.

    Raises InputError for a Parquet file that cannot be read or has no column for the text.
    """
    stretches, unit, section = list[Stretch](), 0, 0
    # Plain files side by side are one stretch, and each other file is one.
    for key, group in groupby(range(len(files)), lambda index: -1 if _is_plain(files[index], form) else index):
        inputs = list(group)
        ends, file = tuple(accumulate(files[index].size or 0 for index in inputs)), files[inputs[0]]
        is_parquet = key >= 0 and (form.kind or file.kind) == "parquet"
        if key < 0:
            count = -(-ends[-1] // form.shard_size)
        elif is_parquet:
            count = 1 + max(group_units(file, form), default=0)
        else:
            is_pipe = file.size is None
            count = UNITS_OF_A_STREAM if is_pipe else 1 + UNITS_PER_SIZE * ends[-1] // form.shard_size
        is_divisible = key < 0 or is_parquet
        stretches.append(Stretch(range(inputs[0], inputs[-1] + 1), ends, unit, max(1, count), is_divisible, section))
        unit, section = stretches[-1].units.stop, section + stretches[-1].num_sections
    return Plan(files, form, stretches)


def source_of(file: Input, form: TextFormat, number: int = 0) -> Source:
    """Return what reads an input. number: of the input."""
    kind = form.kind or file.kind
    return (TableFile if kind in TABLE_KINDS else TextFile)(file, kind, form, number)


def _is_plain(file: Input, form: TextFormat) -> bool:
    """Whether an offset in the text is an offset in the file."""
    is_table = (form.kind or file.kind) in TABLE_KINDS
    return not (is_table or file.compression or file.is_stream) and form.encoding == UTF_8


def find_blocks(plan: Plan, is_wanted: Callable[[int], bool] = lambda unit: True) -> Iterator[Block]:
    """Yield the text of all inputs in order, in blocks of one unit each.

    is_wanted: which units to give. What is not wanted is not read: units of plain files and of Parquet, and other files
    of which no unit is wanted.

    Raises InputError for input that cannot be read, as `Block.decode` does. It names file and line, byte or row.
    """
    limit = plan.form.max_documents
    # With max_documents every document counts, also those of units that are not wanted.
    blocks = _read(plan, is_wanted if limit is None else lambda unit: True)
    if limit is not None:
        blocks = (block for block in _first(blocks, limit) if is_wanted(block.unit))
    return _together(blocks)


def _read(plan: Plan, is_wanted: Callable[[int], bool]) -> Iterator[Block]:
    """Yield blocks of one input each. A file that has nothing of the units that are wanted is not opened."""
    before = 0  # bytes of the inputs before
    for stretch in plan.stretches:
        base = stretch.base
        for index in stretch.inputs:
            source, read = source_of(plan.files[index], plan.form, index), 0
            if any(map(is_wanted, _units_of(source, stretch, base))):

                def wanted(number: int, stretch: Stretch = stretch) -> bool:
                    return is_wanted(stretch.unit(number))

                for block in source.blocks(base, wanted):
                    read = block.bytes_read
                    yield block._replace(unit=stretch.unit(block.unit), bytes_read=before + read)
                    del block  # a long document goes before the next one is read
            base += source.file.size or 0
            before += read if source.file.size is None else source.file.size


def _units_of(source: Source, stretch: Stretch, base: int) -> Iterable[int]:
    """Return the units that an input may have text of. base: where it begins in the stretch."""
    if not (stretch.is_divisible and isinstance(source, TextFile)):
        return stretch.units
    size, of_unit = source.file.size or 0, source.form.shard_size
    stop = base + (min(size, 1) if source.is_one_document else size)  # one document belongs to one unit
    return (stretch.unit(number) for number in range(base // of_unit, -(-stop // of_unit)))


def _first(blocks: Iterable[Block], limit: int) -> Iterator[Block]:
    """Yield so many documents, and the rows without a text before the last of them."""
    for block in blocks:
        source, raw = block.raw[0]
        found = source.decode(raw)
        if found.starts.size >= limit:
            found = found.part(0, limit)
            found = replace(found, bad=[each for each in found.bad if each.place < found.starts[-1]])
        yield block._replace(raw=[(source, found)], is_decoded=True)
        limit -= found.starts.size
        if not limit:
            return


def _together(blocks: Iterable[Block]) -> Iterator[Block]:
    """Yield blocks of a unit that follow each other as one. What was read before an error comes before it."""
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
            del block  # a long document goes before the next one is read
            if pending.num_bytes >= formats.BLOCK_BYTES or len(pending.raw) >= MOST_INPUTS:
                yield pending
                pending = None
    except BertdataError:
        if pending:
            yield pending
        raise
    if pending:
        yield pending
