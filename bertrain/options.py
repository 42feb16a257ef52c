"""How options are declared: kinds of values, bounds, what an option needs, and help."""

from __future__ import annotations

import ast
import contextlib
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from decimal import Decimal
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import click

from bertdata.support import MOST_ROWS, UsageError, require_local_output

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


class Bounds(NamedTuple):
    """Which values an option may have."""

    expected: str  # what to give, for errors
    hold: Callable[[Any], bool]


class Needs(NamedTuple):
    """What an option means nothing without."""

    expected: str  # what to give, for errors
    is_given: Callable[[Any], bool]  # called with the options that the field is one of


class Excludes(NamedTuple):
    """Two options that do not go together, for any values."""

    option: str
    other: str
    why: str


COUNT = Bounds("at least 1", lambda value: value >= 1)
ABOVE_0 = Bounds("a number above 0", lambda value: 0 < value < math.inf)
FROM_0 = Bounds("0 or a number above it", lambda value: 0 <= value < math.inf)
DECAY = Bounds("a number from 0 to below 1, such as 0.9", lambda value: 0 <= value < 1)
WARMUP = Bounds("a share of the run below 1, such as 0.06, or --warmup-steps", lambda value: 0 <= value < 1)
SHARE = Bounds("a share above 0 and at most 1, such as 0.2", lambda value: 0 < value <= 1)
WEIGHT = Bounds("a number from 0 to 1", lambda value: 0 <= value <= 1)


def option(default: Any, *, resume: str = "never", **more: Any) -> Any:
    """A field of Options; its help is the docstring below it.

    resume: whether a resumed run may have another value. "never": no. "content": what the value names is compared, not
    the value, as a dataset may have moved. "told": yes, and the run says what changes. "free": yes.
    more: `bounds` of its value; what it `needs`; whether a `phase` may set it; whether it is `in_files` alone, and not
    on the command line; its `form`, if it is more than one plain value; and its `type` for click, if it is not that of
    the default.
    """
    return field(default=default, metadata={"resume": resume, **more})


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that belong together. Values are checked, and have their type afterwards."""

    def __post_init__(self) -> None:
        """Raises UsageError for a value of another type, an unknown choice, and what is out of bounds."""
        for each in fields(self):
            object.__setattr__(self, each.name, _parsed(each, getattr(self, each.name)))
            self._check_choice(each)
        for each in fields(self):
            bounds, value = each.metadata.get("bounds"), getattr(self, each.name)
            if bounds is not None and value is not None:
                is_right = all(map(bounds.hold, value if isinstance(value, tuple) else [value]))
                self.require(each.name, is_right, bounds.expected)
        for each in fields(self):
            self._check_needs(each)

    def require(self, name: str, is_right: bool, expected: str) -> None:
        """Raises UsageError for an option out of its range. expected: what to give instead."""
        value = getattr(self, name)
        if not is_right:
            raise UsageError(f"{flag(name)} is {value}; give {expected}", "out-of-range", option=name, given=value)

    def _check_choice(self, each: Field[Any]) -> None:
        choices, value = getattr(each.metadata.get("type"), "choices", ()), getattr(self, each.name)
        for given in (value if isinstance(value, tuple) else (value,)) if choices else ():
            if given not in choices:
                sentence = f"{flag(each.name)} {given} is unknown; give one of {', '.join(choices)}"
                raise UsageError(sentence, "unknown", option=each.name, given=given)

    def _check_needs(self, each: Field[Any]) -> None:
        """Raises UsageError for an option that is given and means nothing."""
        needs, value = each.metadata.get("needs"), getattr(self, each.name)
        if needs and value != each.default and not needs.is_given(self):
            given = flag(each.name)
            sentence = f"{given} {value} needs {needs.expected}; give that too, or leave {given} out"
            raise UsageError(sentence, "needs-option", option=each.name, given=value)

    @classmethod
    def names(cls, *, of_phases: bool = False) -> set[str]:
        """The names of the options; of_phases: of those that a phase may set."""
        return {each.name for each in fields(cls) if each.metadata.get("phase") or not of_phases}


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _kind(each: Field[Any]) -> type:
    """bool, int, float or str."""
    kind = each.metadata.get("type", type(each.default))
    return kind if kind in _KINDS else str  # a click.Choice


def _parsed(each: Field[Any], value: Any) -> Any:
    """The value of an option, from Python, a file or the command line. Raises UsageError for another type."""
    kind, form = _kind(each), each.metadata.get("form")
    if value is None and each.default is None:
        return value
    if form == "options":
        if isinstance(value, list | tuple) and all(isinstance(options, Options) for options in value):
            return tuple(value)
        expected = "a list of options of methods"
    elif form == "numbers":
        numbers = _numbers(value) if isinstance(value, str) and value else value or ()
        is_right = isinstance(numbers, list | tuple) and all(isinstance(number, int | float) for number in numbers)
        if is_right and (numbers or not value):
            return tuple(numbers)
        expected = "numbers with commas between"
    elif form == "many":
        texts = [value] * bool(value) if each.name == "data" and isinstance(value, str) else value
        if isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts):
            return tuple(texts)
        expected = "a list of texts"
    elif form == "tables":
        if isinstance(value, list | tuple) and all(isinstance(table, Mapping) for table in value):
            return tuple(value)
        expected = "a list of tables; write [[phase]] above each"
    elif form in ("rows", "amount") and value != "":
        with contextlib.suppress(ValueError, TypeError):
            if form == "amount":
                return str(value) if amount(value) else ""
            rows = ramp(value)
            return rows.first if rows.first == rows.last else str(rows)
        expected = "a number of tokens, such as 40M"
        if form == "rows":
            expected = "a number of rows to 2**24, such as 64 or 16..64"
    else:
        is_kind = isinstance(value, (int, float) if kind is float else kind)
        if is_kind and isinstance(value, bool) == (kind is bool):
            with contextlib.suppress(OverflowError):
                return float(value) if kind is float else value
        expected = _KINDS[kind]
    sentence = f"{flag(each.name)} is {value!r}; give {expected}"
    raise UsageError(sentence, "malformed", option=each.name, given=value)


def _numbers(given: str) -> list[float]:
    """Numbers with commas between; nothing for any other text."""
    try:
        return [float(part) for part in given.split(",")]
    except ValueError:
        return []


def flag(name: str) -> str:
    """An option as the command line has it."""
    return "--" + name.replace("_", "-")


@cache
def helps(kind: type) -> dict[str, str]:
    """The help of each option of a class: the docstring below its field. Empty where the source is not in a file."""
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):
        return {}
    body = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)).body
    found = {}
    for each, below in pairwise(body):
        match each, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found
