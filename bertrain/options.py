"""Options: kinds of values, rules between options, and layers that override each other."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from dataclasses import Field, dataclass, field, fields
from decimal import Decimal
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

import click

from bertdata.support import UsageError, require_local_output

LONGEST = 1 << 62  # durations of a run, in any unit, and its rows


class Output(click.ParamType):
    """A path that a command writes to on this machine."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        require_local_output(str(value))
        return str(value)


def exact(number: float) -> Fraction:
    """Return the decimal number that Python prints for a number."""
    return Fraction(str(number))


def amount(given: int | str) -> int:
    """Return 40000000 for 40000000 and for "40M": K, M, B and T are 10³, 10⁶, 10⁹ and 10¹². Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", str(given))
    number = Decimal(match[1]).scaleb(3 * " KMBT".find(match[2] or " ")) if match else Decimal(0)
    if number < 1 or number != number.to_integral_value():
        raise ValueError
    if number > LONGEST:
        raise ValueError("out-of-range")
    return int(number)


# --------------------------------------------------------------------------------------------------------------- kinds


class Kind(NamedTuple):
    """The values that an option accepts."""

    expected: str  # for errors, after "give"
    parse: Callable[[Any], Any]
    """Parses a value from Python, a file or the command line. Raises ValueError, TypeError or re.error;
    ValueError("out-of-range") and ValueError("unknown") set a different kind of error than "malformed".
    """
    metavar: str = "TEXT"
    choices: tuple[str, ...] = ()
    many: bool = False  # whether the command line may repeat the option


_GIVEN: dict[type, Any] = {str: str, bool: bool, int: (int, str), float: (int, float, str)}
"""Type of an option → the types of a value from Python, a file or the command line."""


def _kind(expected: str, of: type, holds: Callable[[Any], bool] = lambda value: True) -> Kind:
    def parse(given: Any) -> Any:
        if not isinstance(given, _GIVEN[of]) or (isinstance(given, bool) and of is not bool):
            raise TypeError
        value = of(given)
        if not holds(value):
            raise ValueError("unknown" if of is str else "out-of-range")
        return value

    return Kind(expected, parse, {int: "INTEGER", float: "FLOAT"}.get(of, "TEXT"))


def choice(*choices: str) -> Kind:
    """Return a kind that accepts one of several texts."""
    kind = _kind(f"one of {', '.join(choices)}", str, choices.__contains__)
    return kind._replace(metavar=f"[{'|'.join(choices)}]", choices=choices)


def several(kind: Kind, expected: str, *, separator: str = "") -> Kind:
    """Return a kind of tuples: it accepts a list, a single value, or a text with a separator between the values."""

    def parse(given: Any) -> tuple[Any, ...]:
        if isinstance(given, str):
            given = given.split(separator) if separator else [given]
        if not isinstance(given, list | tuple):
            raise TypeError
        return tuple(map(kind.parse, given))

    return Kind(expected, parse, "TEXT" if separator else kind.metavar, kind.choices, many=not separator)


TEXT = _kind("a text", str)
FLAG = _kind("true or false", bool)
INTEGER = _kind("a whole number", int)
COUNT = _kind("a whole number of at least 1", int, lambda value: 1 <= value <= LONGEST)
COUNT_OR_0 = _kind("0 or a whole number above it", int, lambda value: value >= 0)
ABOVE_0 = _kind("a number above 0", float, lambda value: 0 < value < math.inf)
FROM_0 = _kind("0 or a number above it", float, lambda value: 0 <= value < math.inf)
BELOW_1 = _kind("a number from 0 to below 1, such as 0.9", float, lambda value: 0 <= value < 1)
SHARE = _kind("a share above 0 and at most 1, such as 0.2", float, lambda value: 0 < value <= 1)
WEIGHT = _kind("a number from 0 to 1", float, lambda value: 0 <= value <= 1)


# --------------------------------------------------------------------------------------------------------------- rules


class Either(NamedTuple):
    """A rule: at most one of these options is set.

    Without `why`, they are alternatives, and one in a later layer replaces the others.
    """

    names: tuple[str, ...]
    why: str = ""

    def require(self, values: Any, given: Collection[str]) -> None:
        if len(both := [name for name in self.names if name in given]) > 1:
            sentence = f"{' and '.join(map(named, both))} were given{self.why and ': '}{self.why}; give one of them"
            raise UsageError(sentence, "conflict", option=both[0], given=getattr(values, both[0]))


class Needs(NamedTuple):
    """A rule: these options have an effect only if other options have certain values."""

    names: tuple[str, ...]
    holds: Callable[[Any], Any]  # its argument has the values of all options as attributes
    expected: str

    def require(self, values: Any, given: Collection[str]) -> None:
        for name in self.names:
            if name in given and not self.holds(values):
                value = getattr(values, name)
                sentence = f"{named(name)} {value} needs {self.expected}; give that too, or omit {named(name)}"
                raise UsageError(sentence, "needs-option", option=name, given=value)


class Check(NamedTuple):
    """A rule on the value of an option. `expected` may contain names of options in braces."""

    name: str
    holds: Callable[[Any], Any]
    expected: str

    def require(self, values: Any, given: Collection[str]) -> None:
        if not self.holds(values):
            value = getattr(values, self.name)
            sentence = f"{named(self.name)} is {_shown(value)}; give {self.expected.format_map(vars(values))}"
            raise UsageError(sentence, "missing" if is_empty(value) else "conflict", option=self.name, given=value)


def texts(value: Any) -> tuple[str, ...]:
    """Return a value as texts, to compare it: a file has a list or one text where the command line has a tuple."""
    return tuple(map(str, value if isinstance(value, list | tuple) else [value]))


Rule = Either | Needs | Check
_IN_FILES: set[str] = set()  # names of options that only files can set


# --------------------------------------------------------------------------------------------------------- declarations


def option(default: Any, kind: Kind, group: str = "", **more: Any) -> Any:
    """Return a field of Options; its help is the docstring below it.

    group: heading in --help.
    phase: whether a [[phase]] may set it.
    in_files: whether only files can set it, and not the command line.
    of: the option that this one belongs to. If a later layer changes that option, this one is dropped.
    required: whether the command line must set it.
    resume: whether a resumed run may have a different value. "never": no. "content": no, but the files that the value
    names may have moved, so their content is compared. "told": yes, and the run prints the change. "free": yes.
    """
    usual = {"phase": False, "in_files": False, "of": "", "required": False, "resume": "never"}
    return field(default=default, metadata={"kind": kind, "group": group, **usual, **more})


@dataclass(frozen=True, kw_only=True)
class Options:
    """A group of options. Their values are parsed once, when an object is created."""

    rules: ClassVar[tuple[Rule, ...]] = ()

    def __init_subclass__(cls) -> None:
        options = {name: each for name, each in vars(cls).items() if isinstance(each, Field)}
        _IN_FILES.update(name for name, each in options.items() if each.metadata["in_files"])

    def __post_init__(self) -> None:
        """Parse all values. Raises UsageError for an invalid one."""
        for each in fields(self):
            kind, given = each.metadata["kind"], getattr(self, each.name)
            try:
                value = each.default if is_empty(given) and is_empty(each.default) else kind.parse(given)
            except UsageError:
                raise
            except (ValueError, TypeError, ArithmeticError, re.error) as error:
                fault, about = str(error), {"option": each.name, "given": given}
                sentence = f"{named(each.name)} is {_shown(given)}; give {kind.expected}"
                raise UsageError(
                    sentence, fault if fault in ("out-of-range", "unknown") else "malformed", **about
                ) from None
            object.__setattr__(self, each.name, value)

    @classmethod
    def names(cls, *, of_phases: bool = False) -> set[str]:
        """Return the names of the options. of_phases: only those that a phase may set."""
        return {each.name for each in fields(cls) if each.metadata["phase"] or not of_phases}


def is_empty(value: Any) -> bool:
    """Return whether a value means that an option is not set."""
    return value is None or value in ("", (), [])


def _shown(value: Any) -> str:
    return ", ".join(map(repr, value if isinstance(value, list | tuple) else [value])) or "missing"


def flag(name: str) -> str:
    """Return the flag of an option."""
    return "--" + name.replace("_", "-")


def named(name: str) -> str:
    """Return the name of an option in messages: without dashes if only files can set it."""
    return name if name in _IN_FILES else flag(name)
