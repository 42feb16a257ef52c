"""What a file system may hold after a crash, computed from the calls that calls.c recorded.

A file has its newest bytes for certain only if it was synced after they were written, and a directory its newest names
only if the directory was synced after they were given. Of what was not synced, any part may be there: names in any
order, and of the bytes of a file all, none, the first ones, or zeros in their place. A rename happens or does not: one
between two directories is certain if either was synced.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

EVENT = struct.Struct("=iiqqii")
VARIANTS = ("all", "none", "cut", "torn", "zeros", "last")
"""Of the writes to a file since it was synced: all; none; the first half of them; these and half of the next one; the
size, but zeros; the same, but the last write is there. No synced byte is lost."""
LINK = b"\0symbolic link to "
Content = tuple[int, int, int, str]
"""Of a file: its number, how many writes are certain, how many there are, and which of VARIANTS the others are."""
State = dict[str, Content | None]
Tree = dict[str, bytes | None]
"""Path below the root → bytes of a file, or LINK and what a symbolic link names; None: a directory."""


class Event(NamedTuple):
    """A call that changed the disk. op: o(pen), w(rite), t(runcate), s(ync), r(ename), l(ink), s(y)mlink, u(nlink),
    d(irectory) or m(ap).
    """

    op: str
    flags: int
    offset: int
    first: str
    second: str
    data: bytes


def read_events(path: Path) -> list[Event]:
    raw, at, events = path.read_bytes(), 0, list[Event]()
    while at < len(raw):
        op, flags, offset, size, first, second = EVENT.unpack_from(raw, at)
        at += EVENT.size
        names = [raw[at : at + first].decode(), raw[at + first : at + first + second].decode()]
        at += first + second
        events.append(Event(chr(op), flags, offset, *names, raw[at : at + size]))
        at += size
    return events


class Change(NamedTuple):
    """One change of a name or of bytes, in terms of files and directories themselves, which have numbers.

    A name: `node` becomes what `name` in directory `place` is, or nothing does (None); `gone` is the name that it had
    before, if it was renamed. Bytes: of `node`, `data` at `offset`; if `data` is None, the size becomes `offset`.
    """

    kind: str  # "name" or "bytes"
    node: int | None
    place: int = 0
    name: str = ""
    gone: tuple[int, str] | None = None
    offset: int = 0
    data: bytes | None = None


class Disk:
    """The changes of a recorded run, from a tree that was all on disk, and when each was synced."""

    def __init__(self, root: str, start: Tree, events: list[Event]) -> None:
        self.root, self.changes = root, list[Change | int]()  # a number: this file or directory was synced
        self.starts: dict[int, bytes] = {}  # of files
        self.names: dict[int, dict[str, int]] = {0: {}}  # of directories, at the start
        self._live: dict[int, dict[str, int]] = {0: {}}
        for path, content in sorted(start.items()):
            place, name = self._parent(f"{root}/{path}")
            node = self._new(is_directory=content is None, content=content or b"")
            self._live[place][name] = node
        self.names = {place: dict(names) for place, names in self._live.items()}
        self.maps = [event.first for event in events if event.op == "m"]
        for event in events:
            self._take(event)
        self._contents: dict[Content, bytes] = {}
        self._digests: dict[Content, bytes] = {}

    def _new(self, *, is_directory: bool, content: bytes = b"") -> int:
        node = len(self.starts) + len(self._live)
        if is_directory:
            self._live[node] = {}
            self.names.setdefault(node, {})
        else:
            self.starts[node] = content
        return node

    def _parent(self, path: str) -> tuple[int, str]:
        """The directory of a path, and the name in it."""
        *parts, name = path.removeprefix(self.root).strip("/").split("/")
        place = 0
        for part in parts:
            place = self._live[place][part]
        return place, name

    def _node(self, path: str) -> int | None:
        if path.rstrip("/") == self.root:
            return 0
        place, name = self._parent(path)
        return self._live[place].get(name)

    def _give(self, place: int, name: str, node: int | None, gone: tuple[int, str] | None = None) -> None:
        if gone:
            del self._live[gone[0]][gone[1]]
        if node is None:
            del self._live[place][name]
        else:
            self._live[place][name] = node
        self.changes.append(Change("name", node, place, name, gone))

    def _take(self, event: Event) -> None:
        """Follows a call in the present names, and notes what it changes."""
        if event.op == "m" or event.first.endswith(" (deleted)"):
            return
        if event.op in "rl":
            gone, node = self._parent(event.first), self._node(event.first)
            self._give(*self._parent(event.second), node, gone if event.op == "r" else None)
        elif event.op == "y":
            self._give(*self._parent(event.first), self._new(is_directory=False, content=LINK + event.second.encode()))
        elif event.op == "d":
            self._give(*self._parent(event.first), self._new(is_directory=True))
        elif event.op == "u":
            self._give(*self._parent(event.first), None)
        else:
            node = self._node(event.first)
            if event.op == "o" and node is None:
                node = self._new(is_directory=False)
                self._give(*self._parent(event.first), node)
            elif event.op == "o" and event.flags:
                self.changes.append(Change("bytes", node, offset=0))
            elif event.op == "s":
                assert node is not None, event.first
                self.changes.append(node)
            elif event.op in "wt":
                self.changes.append(
                    Change("bytes", node, offset=event.offset, data=event.data if event.op == "w" else None)
                )

    # ------------------------------------------------------------------------------------------------------- states

    def pending(self, end: int) -> tuple[list[int], list[int], Counter[int]]:
        """What no sync has made certain after the first `end` changes: of these those of names, and files with bytes.

        And how many writes to each file are certain.
        """
        names, written, synced = list[int](), Counter[int](), Counter[int]()
        for at, change in enumerate(self.changes[:end]):
            if isinstance(change, int):
                names = [other for other in names if change not in self._places(other)]
                synced[change] = written[change]
            elif change.kind == "name":
                names.append(at)
            elif change.node is not None:
                written[change.node] += 1
        return names, [node for node, number in written.items() if number > synced[node]], synced

    def _places(self, at: int) -> set[int]:
        change = self.changes[at]
        assert isinstance(change, Change)
        return {change.place, change.gone[0] if change.gone else change.place}

    def state(self, end: int, lost: frozenset[int], variants: dict[int, str], synced: dict[int, int]) -> State:
        """Path → which bytes a file has; None: a directory. lost: changes of names that are not there.

        variants: of files with pending bytes. synced: file → how many of its writes are certain.
        """
        names = {place: dict(entries) for place, entries in self.names.items()}
        written = Counter[int]()
        for at, change in enumerate(self.changes[:end]):
            if isinstance(change, int):
                continue
            if change.kind == "bytes":
                written[change.node or 0] += 1
            elif at not in lost:
                if change.gone and names[change.gone[0]].get(change.gone[1]) == change.node:
                    del names[change.gone[0]][change.gone[1]]
                if change.node is None:
                    names[change.place].pop(change.name, None)
                else:
                    names[change.place][change.name] = change.node
        found: State = {}
        stack = [("", 0)]
        while stack:
            path, place = stack.pop()
            for name, node in names[place].items():
                if node in names:
                    found[f"{path}{name}"] = None
                    stack.append((f"{path}{name}/", node))
                else:
                    certain = synced.get(node, 0)
                    how = variants.get(node, "all") if certain < written[node] else "all"
                    found[f"{path}{name}"] = node, written[node] if how == "all" else certain, written[node], how
        return found

    def content(self, key: Content) -> bytes:
        if key not in self._contents:
            node, certain, written, how = key
            content = bytearray(self.starts[node])
            changes = [change for change in self.changes if isinstance(change, Change) and change.kind == "bytes"]
            writes = [change for change in changes if change.node == node][:written]
            pending = len(writes) - certain
            for number, change in enumerate(writes):
                data, is_pending = change.data, number >= certain
                later = number - certain - pending // 2  # than the first half
                if is_pending and (how == "none" or (how == "cut" and later >= 0) or (how == "torn" and later > 0)):
                    break
                if data is None:
                    del content[change.offset :]
                    content.extend(bytes(change.offset - len(content)))
                    continue
                if is_pending and how == "torn" and later == 0:
                    data = data[: len(data) // 2]
                if is_pending and (how == "zeros" or (how == "last" and number + 1 < len(writes))):
                    data = bytes(len(data))
                content.extend(bytes(max(0, change.offset - len(content))))
                content[change.offset : change.offset + len(data)] = data
            self._contents[key] = bytes(content)
        return self._contents[key]

    def digest(self, state: State) -> str:
        whole = hashlib.sha256()
        for path, key in sorted(state.items()):
            if key is not None and key not in self._digests:
                self._digests[key] = hashlib.sha256(self.content(key)).digest()
            whole.update(path.encode() + b"\0" + (b"directory" if key is None else self._digests[key]))
        return whole.hexdigest()

    def tree(self, state: State) -> Tree:
        return {path: None if key is None else self.content(key) for path, key in state.items()}

    def states(self, end: int, most: int, draw: random.Random) -> Iterator[State]:
        """At most so many different choices of what is lost, after the first `end` changes.

        First those in which nothing, all, or one thing is lost or kept, and in which the newest names are lost; then
        others at random.
        """
        names, files, synced = self.pending(end)
        choices = dict.fromkeys(self._simple(names, files))
        if len(choices) > most:
            first = [*choices]
            choices = dict.fromkeys(first[:8] + draw.sample(first[8:], max(0, most - 8)))
        tries = 3 * most if len(names) > 1 or len(files) > 1 else 0
        while len(choices) < most and (tries := tries - 1) > 0:
            lost = frozenset(at for at in names if draw.random() < 0.5)
            choices[lost, tuple((file, draw.choice(VARIANTS)) for file in files)] = None
        for lost, variants in choices:
            yield self.state(end, lost, dict(variants), synced)

    @staticmethod
    def _simple(names: list[int], files: list[int]) -> Iterator[tuple[frozenset[int], tuple[tuple[int, str], ...]]]:
        every, nothing = frozenset(names), frozenset[int]()
        for how in VARIANTS:
            yield nothing, tuple((file, how) for file in files)
        for how in ("all", "none"):
            yield every, tuple((file, how) for file in files)
        for file in reversed(files):
            for how in VARIANTS[1:]:
                yield nothing, ((file, how),)
        for number, at in reversed([*enumerate(names)]):
            yield frozenset([at]), ()
            yield frozenset(names[number:]), ()
            yield every - {at}, ()
            yield every - {at}, tuple((file, "none") for file in files)
