"""Inputs → the units of a build, from sizes and footers alone: nothing of the text is read.

docs/format.md says which unit a document belongs to.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from bertdata.sources.formats import TextFormat
from bertdata.sources.inputs import Input
from bertdata.sources.streams import UTF_8
from bertdata.sources.tables import TABLE_KINDS, group_units

UNIT_RULE = 2  # version of the rule in docs/format.md, by which an unfinished build goes on
UNITS_PER_SIZE = 16  # numbers kept for a file that unpacks to this many times its size
UNITS_OF_A_STREAM = 1 << 20
TASK_BYTES = 1 << 24  # of input on disk that one task reads at least, where there is enough for TASKS_A_WORKER
TASKS_A_WORKER = 8


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


def _is_plain(file: Input, form: TextFormat) -> bool:
    """Whether an offset in the text is an offset in the file."""
    is_table = (form.kind or file.kind) in TABLE_KINDS
    return not (is_table or file.compression or file.is_stream) and form.encoding == UTF_8
