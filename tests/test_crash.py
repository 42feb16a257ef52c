"""Short runs of the campaigns of tools/crash.py. Its injected faults test its model of a disk."""

import json

import pytest
from support.commands import python
from support.data import ROOT

TOOL = ROOT / "tools" / "crash.py"


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
    """A missing sync. `mutate.py faults crash` injects all."""
    words = ("faults", "crash", "--only", "the last name of a stage comes first")
    assert python(TOOL.with_name("mutate.py"), *words).endswith("1 of 1 faults are found\n")
