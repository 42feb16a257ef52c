"""Compile the rules by which a pre-tokenizer cuts text into words to the table of a finite automaton.

A rule is a regular expression in the syntax of Oniguruma, which `tokenizers` uses. Only its structure is parsed here.
Each of its single-character matchers, such as `\\p{L}` or `[^\\s\\p{N}]`, is a *leaf*: which characters it matches is
asked of `tokenizers`. Characters that the same leaves match form a *class*, and the automaton steps from class to
class. A search by backtracking takes the first alternative that matches, not the longest one. The automaton does the
same: its states are ordered lists of positions in the expression, the preferred one first (Cox, "Regular Expression
Matching in the Wild", 2010).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import normalizers

from bertdata.tokenize.kernels.records import CLASSES, ENDED, STATES

MAX_REPEATS = 16  # copies of x in `x{m,n}`, which is expanded
_REPEATS: dict[str, tuple[int, int | None]] = {"?": (0, 1), "*": (0, None), "+": (1, None)}
Matcher = str | Callable[[str], bool]
"""A single-character matcher: its source as a regular expression, or a function of the character."""


class Unsupported(Exception):  # noqa: N818  (not an error: `tokenizers` does the work instead)
    """An engine does not support a tokenizer. The message is the reason, as a clause."""


@dataclass(frozen=True)
class Leaf:
    """Matches one character."""

    matcher: Matcher


@dataclass(frozen=True)
class Look:
    """Matches the empty text if the next character matches (or, if `negative`, does not match)."""

    leaf: Leaf
    negative: bool


@dataclass(frozen=True)
class Chain:
    """Matches its parts one after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    """Matches the first part that matches."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """Matches `part` from `least` to `most` times (None: any number), as often as possible."""

    part: Node
    least: int
    most: int | None


Node = Leaf | Look | Chain | Choice | Repeat


def parse(pattern: str) -> Node:
    """Return the tree of a regular expression. Raises Unsupported for unsupported syntax."""
    reader = _Reader(pattern)
    node = reader.choice(ignore_case=False)
    if reader.place != len(pattern):
        raise Unsupported(f"its regular expression has an unexpected {pattern[reader.place]!r}")
    return node


class _Reader:
    def __init__(self, pattern: str) -> None:
        self.pattern, self.place = pattern, 0

    def _next_is(self, *texts: str) -> bool:
        return any(self.pattern.startswith(text, self.place) for text in texts)

    def _take(self, text: str) -> bool:
        if self._next_is(text):
            self.place += len(text)
            return True
        return False

    def choice(self, *, ignore_case: bool) -> Node:
        parts = [self._chain(ignore_case)]
        while self._take("|"):
            parts.append(self._chain(ignore_case))
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _chain(self, ignore_case: bool) -> Node:  # noqa: FBT001
        parts: list[Node] = []
        while self.place < len(self.pattern) and not self._next_is("|", ")"):
            parts.append(self._repeated(self._atom(ignore_case)))
        return parts[0] if len(parts) == 1 else Chain(tuple(parts))

    def _atom(self, ignore_case: bool) -> Node:  # noqa: FBT001
        for begin, negative in (("(?!", True), ("(?=", False)):
            if self._take(begin):
                leaf = self._closed(ignore_case=ignore_case)
                if not isinstance(leaf, Leaf):
                    raise Unsupported("its regular expression looks ahead by more than one character")
                return Look(leaf, negative)
        if self._take("(?i:"):
            return self._closed(ignore_case=True)
        if self._take("(?:"):
            return self._closed(ignore_case=ignore_case)
        if self._next_is("(?", "^", "$", "*", "+", "?"):
            raise Unsupported(f"its regular expression contains {self.pattern[self.place : self.place + 3]!r}")
        if self._take("("):
            return self._closed(ignore_case=ignore_case)
        source = self._source()
        return Leaf(f"(?i:{source})" if ignore_case else source)

    def _closed(self, *, ignore_case: bool) -> Node:
        node = self.choice(ignore_case=ignore_case)
        if not self._take(")"):
            raise Unsupported("its regular expression lacks a closing parenthesis")
        return node

    def _source(self) -> str:
        """Return the source of a leaf: a character, an escape, or a class in brackets."""
        start = self.place
        if self._take("\\"):
            kind = self.pattern[self.place : self.place + 1]
            self.place += 1
            if kind in ("p", "P", "x") and self._next_is("{"):
                self.place = self.pattern.find("}", self.place) + 1 or len(self.pattern)
            elif kind in ("x", "u"):
                self.place += 2 if kind == "x" else 4
            elif kind.isalnum() and kind not in "sSdDwWhHnrtvfae":
                raise Unsupported(f"its regular expression contains '\\{kind}'")
        elif self._take("["):
            depth = 1
            self._take("^")
            self._take("]")
            while depth and self.place < len(self.pattern):
                depth += self._next_is("[") - self._next_is("]")
                self.place += 2 if self._next_is("\\") else 1
        else:
            self.place += 1
        return self.pattern[start : self.place]

    def _repeated(self, node: Node) -> Node:
        mark = self.pattern[self.place : self.place + 1]
        if mark in _REPEATS:
            self.place += 1
            node = Repeat(node, *_REPEATS[mark])
        elif self._take("{"):
            counts, _, rest = self.pattern[self.place :].partition("}")
            least, comma, most = counts.partition(",")
            if not least.isdigit() or not (most.isdigit() or not most) or max(int(least), int(most or 0)) > MAX_REPEATS:
                raise Unsupported(f"its regular expression contains '{{{counts}}}'")
            node = Repeat(node, int(least), int(most) if most else None if comma else int(least))
            self.place = len(self.pattern) - len(rest)
        else:
            return node
        if self._next_is("?", "+", "*", "{"):
            raise Unsupported("its regular expression has a lazy or possessive repetition")
        return node


def _may_be_empty(node: Node) -> bool:
    """Return whether a node matches the empty text."""
    if isinstance(node, Chain):
        return all(map(_may_be_empty, node.parts))
    if isinstance(node, Choice):
        return any(map(_may_be_empty, node.parts))
    if isinstance(node, Repeat):
        return node.least == 0 or _may_be_empty(node.part)
    return isinstance(node, Look)


@dataclass
class _Program:
    """An expression as instructions. Each instruction is one of the following; `next` is the index of an instruction.

    ("leaf", number of the leaf, next), ("look", number of the leaf, negative, next), ("fork", next, next), ("match",)
    """

    leaves: list[Matcher]
    instructions: list[tuple] = field(default_factory=list)

    def add(self, node: Node, after: int) -> int:
        """Add the instructions of a node, followed by instruction `after`. Return the index of the first one."""
        if isinstance(node, Leaf):
            return self._put("leaf", self._number(node), after)
        if isinstance(node, Look):
            return self._put("look", self._number(node.leaf), node.negative, after)
        if isinstance(node, Chain):
            for part in reversed(node.parts):
                after = self.add(part, after)
            return after
        if isinstance(node, Choice):
            first = self.add(node.parts[-1], after)
            for part in reversed(node.parts[:-1]):
                first = self._put("fork", self.add(part, after), first)
            return first
        if node.most is None:
            fork = self._put("fork", 0, after)
            self.instructions[fork] = ("fork", self.add(node.part, fork), after)
            after = fork
        last = after
        for _ in range((node.most or node.least) - node.least):  # x(x(x)?)?: each repetition is optional
            after = self._put("fork", self.add(node.part, after), last)
        for _ in range(node.least):
            after = self.add(node.part, after)
        return after

    def _put(self, *instruction: object) -> int:
        self.instructions.append(instruction)
        return len(self.instructions) - 1

    def _number(self, leaf: Leaf) -> int:
        if leaf.matcher not in self.leaves:
            self.leaves.append(leaf.matcher)
        return self.leaves.index(leaf.matcher)

    def reach(self, start: int) -> tuple[int, ...]:
        """Return the instructions, except forks, reachable from one without reading a character, by preference."""
        found: dict[int, None] = {}
        seen: set[int] = set()

        def visit(number: int) -> None:
            if number not in seen:
                seen.add(number)
                instruction = self.instructions[number]
                if instruction[0] == "fork":
                    visit(instruction[1])
                    visit(instruction[2])
                else:
                    found[number] = None

        visit(start)
        return tuple(found)


def _matcher(leaf: Matcher) -> Callable[[str], list[bool]]:
    """Return a function that returns which characters of a text a leaf matches."""
    if callable(leaf):
        return lambda characters: [leaf(character) for character in characters]
    first, second = (normalizers.Replace(tokenizers.Regex(leaf), mark).normalize_str for mark in "xy")
    return lambda characters: [a != b for a, b in zip(first(characters), second(characters), strict=True)]


class Rules:
    """Rules that are applied in turn: the second one cuts the words of the first one, and so on.

    Classes of characters are numbered in the order of first use. `steps` is rebuilt when a class is added; existing
    classes keep their numbers. Not thread-safe.
    """

    steps: NDArray[np.uint16]
    """[num_states * CLASSES]: step k of state s is at s * CLASSES + k: the next state, and ENDED if a word ends before
    the character. State 0 is the end of the search. The flags of a class are in all its steps."""
    starts: NDArray[np.int64]
    """[num_rules]: the initial state of a search."""
    cuts: NDArray[np.bool_]
    """[CLASSES * CLASSES]: at a * CLASSES + b, whether no word contains a character of class a followed by class b, and
    the words before the border stay the same if the text ends there."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.leaves: list[Matcher] = []
        self._program = _Program(self.leaves)
        match = self._program._put("match")  # noqa: SLF001
        self._first = [self._program.reach(self._program.add(node, match)) for node in nodes]
        if any(map(_may_be_empty, nodes)):
            raise Unsupported("its regular expression matches the empty text")
        self._matchers = [_matcher(leaf) for leaf in self.leaves]
        self.class_keys: dict[tuple[int, int], int] = {}  # (leaves that match, as bits, flags) → class, from 1
        self._build()

    def matches(self, characters: str) -> list[int]:
        """Return a bit set for each character: bit n if leaf n matches."""
        bits = [0] * len(characters)
        for number, matcher in enumerate(self._matchers):
            for place, hit in enumerate(matcher(characters)):
                bits[place] |= hit << number
        return bits

    def classes(self, wanted: Sequence[tuple[int, int]]) -> list[int]:
        """Return the class of each (matching leaves, flags of the steps). Leaves -1: the state does not change.

        Raises Unsupported if there are too many.
        """
        known = dict(self.class_keys)
        numbers = [self.class_keys.setdefault(key, len(self.class_keys) + 1) for key in wanted]
        try:
            if len(self.class_keys) >= CLASSES:
                raise Unsupported("its regular expression tells too many classes of characters apart")
            if len(self.class_keys) > len(known):
                self._build()
        except Unsupported:
            self.class_keys = known
            raise
        return numbers

    def repeatable(self, matches: int) -> bool:
        """Return whether two characters in a row that these leaves match always act like one."""
        number = self.classes([(matches, 0)])[0]
        steps = self.steps.reshape(-1, CLASSES)
        used = len(self.class_keys) + 1
        after = {int(step) & int(STATES) for step in steps[1:, number]} - {0}
        return all(
            int(steps[state, number]) & int(STATES) == state and (steps[state, :used] & ENDED).all() for state in after
        )

    def covers(self, number: int) -> bool:
        """Return whether a word of the first rule begins with every character of a class, in any context."""
        steps = self.steps.reshape(-1, CLASSES)[:, : len(self.class_keys) + 1]
        states = [int(steps[self.starts[0], number]) & int(STATES)]
        for state in states:  # grows during the loop
            if state == 0:
                return False
            going_on = {int(step) & int(STATES) for step in steps[state] if not step & ENDED}
            states.extend(sorted(going_on.difference(states)))
        return True

    def _build(self) -> None:
        """Determinize the program for the known classes."""
        rows: dict[tuple[int, ...], int] = {(): 0}
        table: list[list[int]] = []
        waiting: list[tuple[int, ...]] = [()]
        self.starts = np.zeros(len(self._first), np.int64)
        for level, first in enumerate(self._first):
            if first not in rows:
                rows[first] = len(rows)
                waiting.append(first)
            self.starts[level] = rows[first]
        reach = {k: self._program.reach(k) for k in range(len(self._program.instructions))}
        keys = [None, *self.class_keys]
        for state in waiting:  # grows during the loop
            row = [0] * CLASSES
            for number, key in enumerate(keys):
                if key is not None and key[0] < 0:
                    row[number] = rows[state] | key[1]
                    continue
                after, ended = self._step(state, None if key is None else key[0], reach)
                if after not in rows:
                    rows[after] = len(rows)
                    waiting.append(after)
                row[number] = rows[after] | (int(ENDED) if ended else 0) | (key[1] if key else 0)
            table.append(row)
            if len(rows) > STATES:
                raise Unsupported("its regular expression needs too many states")
        self.steps = np.array(table, np.uint16).ravel()
        next_states, ends = np.array(table) & int(STATES), np.array(table) & int(ENDED)
        self.cuts = np.zeros((CLASSES, CLASSES), np.bool_)
        for a in range(1, len(keys)):
            states = np.unique(next_states[1:, a])
            self.cuts[a] = ((next_states[states] == 0) & (ends[states] == ends[states, :1])).all(axis=0)
        self.cuts = self.cuts.ravel()

    def _step(
        self, state: tuple[int, ...], matches: int | None, reach: dict[int, tuple[int, ...]]
    ) -> tuple[tuple[int, ...], bool]:
        """Return the state after a character that these leaves match (None: the end), and whether a word ends."""
        after: dict[int, None] = {}

        def visit(number: int) -> bool:
            """Return whether the search ends with this instruction, so that less preferred ones are irrelevant."""
            kind, *rest = self._program.instructions[number]
            if kind == "match":
                return True
            hit = matches is not None and bool(matches >> rest[0] & 1)
            if kind == "leaf":
                if hit:
                    after.update(dict.fromkeys(reach[rest[1]]))
                return False
            return hit != rest[1] and any(visit(each) for each in reach[rest[2]])

        ended = any(visit(number) for number in state)
        kept: list[int] = []
        for number in after:
            kept.append(number)
            if self._program.instructions[number][0] == "match":
                break
        return tuple(kept), ended
