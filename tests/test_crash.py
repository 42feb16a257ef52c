"""tools/crash.py: its model of a disk, and short runs of its campaigns."""

import json
import random

import pytest
from conftest import ROOT
from disk import Disk, Event
from helpers import python

TOOL = ROOT / "tools" / "crash.py"


def trees(events, start=None, most=1000):
    """All states after the last of these changes, as trees."""
    disk = Disk("/r", start or {}, [Event(op, *event) for op, *event in events])
    states = disk.states(len(disk.changes), most, random.Random(0))
    return [disk.tree(state) for state in states]


def opened(path, truncated=0):
    return "o", truncated, 0, f"/r/{path}", "", b""


def written(path, data, at=0):
    return "w", 0, at, f"/r/{path}", "", data


def synced(path):
    return "s", 0, 0, f"/r/{path}".rstrip("/"), "", b""


def renamed(one, two):
    return "r", 0, 0, f"/r/{one}", f"/r/{two}", b""


def made(path):
    return "d", 0, 0, f"/r/{path}", "", b""


def removed(path):
    return "u", 0, 0, f"/r/{path}", "", b""


WRITE = [opened("a.tmp"), written("a.tmp", b"1234"), written("a.tmp", b"5678", 4)]


UNORDERED = [b"", b"1234", b"123456", b"\0" * 8, b"\0\0\0\0" + b"5678", b"12345678"]
KEPT = [*WRITE, synced("a.tmp"), renamed("a.tmp", "a")]
REMOVED = [removed("b/one"), removed("b/two"), removed("b")]
TWO = {"b": None, "b/one": b"1", "b/two": b"2"}
DISK = {  # what happened → its events, what was there before, states that there may be, and whether these are all
    "not synced": (
        [*WRITE, renamed("a.tmp", "a")],
        {},
        [{}, {"a.tmp": b""}, {"a.tmp": b"12345678"}, *({"a": content} for content in UNORDERED)],
        False,
    ),
    "a synced file": (KEPT, {}, [{}, {"a.tmp": b"12345678"}, {"a": b"12345678"}], True),
    "a synced file and name": ([*KEPT, synced("")], {}, [{"a": b"12345678"}], True),
    "replaced": (KEPT, {"a": b"old"}, [{"a": b"old"}, {"a": b"old", "a.tmp": b"12345678"}, {"a": b"12345678"}], True),
    "cut and written again": (
        [opened("a", 1), written("a", b"new")],
        {"a": b"old"},
        [{"a": content} for content in (b"old", b"", b"n", b"\0\0\0", b"new")],
        True,
    ),
    "a name without its directory": (
        [made("b"), opened("b/a"), written("b/a", b"1"), synced("b/a"), synced("b")],
        {},
        [{}, {"b": None, "b/a": b"1"}],
        True,
    ),
    "removals": (REMOVED, TWO, [{}, {"b": None, "b/one": b"1"}, {"b": None, "b/two": b"2"}, TWO], False),
    "synced removals": ([*REMOVED[:2], synced("b")], TWO, [{"b": None}], True),
}


@pytest.mark.parametrize("case", DISK)
def test_a_disk_keeps_what_was_synced_and_any_part_of_the_rest(case):
    events, start, expected, is_all = DISK[case]
    found = trees(events, start)
    assert [tree for tree in expected if tree not in found] == []
    assert not is_all or [tree for tree in found if tree not in expected] == []


def campaign(*arguments):
    """The objects that a campaign prints, one for each command; it must find nothing."""
    printed = python(TOOL, *arguments, timeout=300).splitlines()
    return {found["command"]: found for found in map(json.loads, printed)}


SOME = pytest.mark.parametrize("commands", ["export", pytest.param("build,merge", marks=pytest.mark.slow)])


@SOME
def test_a_crash_loses_nothing(commands):
    is_export = commands == "export"
    found = campaign("states", "--only", commands, "--most", 12, "--replays", 1000 if is_export else 10)
    assert found.keys() == {*commands.split(",")}
    assert all(facts["states"] > 30 for facts in found.values())
    assert not is_export or found["export"]["covered"] == found["export"]["states"]


@SOME
def test_commands_go_on_after_a_call_that_failed(commands):
    found = campaign(
        "calls", "--only", commands, "--errors", "EIO,ENOSPC", "--every", 9 if commands == "export" else 67
    )
    assert found.keys() == {*commands.split(",")}
    assert all(facts["failed"] > 5 for facts in found.values())


@pytest.mark.slow
def test_injected_faults_are_found():
    """A missing sync. `crash.py faults` injects all."""
    assert python(TOOL, "faults", "--injected", 8).endswith("1 of 1 injected faults are found\n")
