"""tools/capabilities.py: a line of docs/howto/migrate.md without a trial, a trial that fails, and all trials."""

import re
import subprocess
import sys

import capabilities
import pytest
import trials
from conftest import ROOT

TABLE = capabilities.TABLE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(trials, "INPUTS", {"shards": trials.INPUTS["shards"]})  # the quick trials need no run
        trials.make_inputs(folder)
    return folder


def test_each_line_has_a_trial():
    lines = capabilities.lines_of(TABLE)
    assert [*lines] == [*trials.TRIALS] == [*range(1, 61)]
    assert lines[60] == "Checking the setup"
    assert capabilities.untried(lines) == []


@pytest.mark.parametrize("number", [4, 9, 16])
def test_a_quick_line_comes_true(inputs, tmp_path, number):
    assert capabilities.attempt(number, inputs, tmp_path / "trial") == ""


@pytest.mark.slow
def test_every_sixth_line_comes_true():
    """`make capabilities` tries all."""
    numbers = ",".join(map(str, range(1, 61, 6)))
    command = [sys.executable, str(ROOT / "tools" / "capabilities.py"), "--jobs", "2", "--only", numbers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^10 capabilities, 0 failed; ", done.stdout, re.MULTILINE), done.stdout
