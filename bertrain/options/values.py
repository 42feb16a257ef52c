"""Values of options that are more than a number or a text: rows of a step, amounts of tokens."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import click

from bertdata.choices import MOST_ROWS
from bertdata.urls import require_local_output

_THOUSANDS = {"": 0, "K": 1, "M": 2, "B": 3, "T": 4}


class Output(click.ParamType):
    """A file or a directory of this machine that a command writes."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        require_local_output(str(value))
        return str(value)


class Ramp(NamedTuple):
    """The rows of a step along a phase: from `first` to `last`, in multiples of their greatest common divisor.

    Each of these numbers of rows has as many steps as the others, but for rounding.
    """

    first: int
    last: int

    @property
    def mean(self) -> Fraction:
        return Fraction(self.first + self.last, 2)

    def at(self, step: int, steps: int) -> int:
        """The rows of step number `step` of `steps`."""
        unit, sizes = self._parts()
        return self.first + unit * (step * sizes // steps)

    def total(self, steps: int) -> int:
        """The rows of all steps: of (step · sizes) // steps, the sum over `steps` steps has a closed form."""
        unit, sizes = self._parts()
        return self.first * steps + unit * (((sizes - 1) * (steps - 1) + math.gcd(sizes, steps) - 1) // 2)

    def _parts(self) -> tuple[int, int]:
        """What each number of rows adds to the one before it, below 0 for a ramp that falls; how many there are."""
        unit = math.gcd(self.first, self.last)
        sizes = abs(self.last - self.first) // unit + 1
        return unit if self.last > self.first else -unit, sizes

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}..{self.last}"


def ramp(given: int | str) -> Ramp:
    """64 and "64" are the same rows in every step, "16..64" a ramp. Raises ValueError for anything else."""
    parts = [int(part) for part in str(given).split("..")]
    if not 1 <= len(parts) <= 2 or min(parts) < 1 or max(parts) > MOST_ROWS:
        raise ValueError(f"rows are numbers from 1 to {MOST_ROWS}")
    return Ramp(parts[0], parts[-1])


def exact(number: float) -> Fraction:
    """The decimal that Python prints for a number."""
    return Fraction(str(number))


def amount(given: int | str) -> int:
    """40000000 and "40M" are the same. K, M, B and T stand for 10³, 10⁶, 10⁹ and 10¹². Raises ValueError for others."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", str(given))
    number = Decimal(match[1]).scaleb(3 * _THOUSANDS[match[2]]) if match else Decimal(0)
    if number < 1 or number != number.to_integral_value():
        raise ValueError("not an amount")
    return int(number)
