"""Inputs → the units of a build, from sizes and footers alone: nothing of the text is read.

docs/format.md says which unit a document belongs to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from bertdata.errors import InputError
from bertdata.sources.documents import TextFormat
from bertdata.sources.inputs import Input, ending_of
from bertdata.sources.streams import UTF_8
from bertdata.sources.tables import TABLE_KINDS, group_units

UNIT_RULE = 2  # version of the rule in docs/format.md, by which an unfinished build goes on
UNITS_PER_SIZE = 16  # numbers kept for a file that unpacks to this many times its size
UNITS_OF_A_STREAM = 1 << 20
_NOT_PROSE = {".csv": "CSV", ".tsv": "TSV"}


@dataclass(frozen=True)
class Stretch:
    """Inputs whose bytes are one range that is cut into units, and the numbers of these units."""

    inputs: range  # numbers of the inputs
    first: int  # the first unit
    count: int  # how many numbers there are; what lies beyond belongs to the last
    is_divisible: bool  # whether a unit can be read without those before it
    first_section: int

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
class Plan:
    """The inputs of a build, and how their text is divided into units."""

    files: Sequence[Input]
    form: TextFormat
    stretches: Sequence[Stretch]

    def section(self, unit: int) -> int:
        """The number of what must be read together to make a unit: the unit alone, or the file that it lies in."""
        stretch = self.stretches[bisect_right(self.stretches, unit, key=lambda each: each.first) - 1]
        return stretch.first_section + (unit - stretch.first if stretch.is_divisible else 0)


def split(files: Sequence[Input], form: TextFormat) -> Plan:
    """Plans the units of inputs. Reads the footers of Parquet files, and nothing else.

    Raises InputError for a Parquet file that cannot be read or has no column for the text, and for a table of another
    kind, whose lines would be read as prose.
    """
    for file in files if form.kind is None else ():
        if (ending := ending_of(file.name)) in _NOT_PROSE:
            raise InputError(
                f"{file} is a table of {_NOT_PROSE[ending]}, which cannot be read; convert it to JSON lines or "
                "Parquet, or give --format text if it is prose",
                "unknown-format",
                option="inputs",
                given=file.name,
            )
    size, stretches = form.shard_size, list[Stretch]()

    def add(inputs: range, count: int, is_divisible: bool) -> None:
        first = stretches[-1].first + stretches[-1].count if stretches else 0
        section = stretches[-1].first_section + stretches[-1].num_sections if stretches else 0
        stretches.append(Stretch(inputs, first, max(1, count), is_divisible, section))

    number = 0
    while number < len(files):
        file, begin = files[number], number
        number += 1
        if _is_plain(file, form):
            while number < len(files) and _is_plain(files[number], form):
                number += 1
            total = sum(each.size or 0 for each in files[begin:number])
            add(range(begin, number), -(-total // size), is_divisible=True)
        elif (form.kind or file.kind) == "parquet":
            add(range(begin, number), 1 + max(group_units(file, form), default=0), is_divisible=True)
        elif file.size is None:
            add(range(begin, number), UNITS_OF_A_STREAM, is_divisible=False)
        else:
            add(range(begin, number), 1 + UNITS_PER_SIZE * file.size // size, is_divisible=False)
    return Plan(files, form, stretches)


def _is_plain(file: Input, form: TextFormat) -> bool:
    """Whether an offset in the text is an offset in the file."""
    is_table = (form.kind or file.kind) in TABLE_KINDS
    return not (is_table or file.compression or file.is_stream) and form.encoding == UTF_8
