"""tools/capabilities.py: a line of docs/howto/migrate.md without a trial, a trial that fails, and all trials."""

import re
import subprocess
import sys
from unittest.mock import Mock

import capabilities
import pytest
import trials
from click.testing import CliRunner
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


def test_a_line_without_a_trial_and_a_trial_without_a_line_are_errors(tmp_path, monkeypatch):
    page = tmp_path / "migrate.md"
    page.write_text(TABLE.replace("| 60 |", "| 61 |"), encoding="utf-8")
    monkeypatch.setattr(capabilities, "TABLE", page)
    done = CliRunner().invoke(capabilities.main, [])
    assert done.exit_code == 1
    assert "61: Checking the setup: has no trial; 60: is not in" in done.output


@pytest.mark.parametrize("only", ["61", "7,x"])
def test_a_number_that_no_line_has_is_refused(only):
    assert CliRunner().invoke(capabilities.main, ["--only", only]).exit_code == 2


def test_what_is_not_run_names_a_test():
    for number, left_out in capabilities.NOT_RUN.items():
        assert number in trials.TRIALS
        names = re.findall(r"test_\w+\.py::test_\w+", left_out)
        assert names
        assert all(map(trials.is_test, names))


@pytest.mark.parametrize("number", [4, 9, 16])
def test_a_quick_line_comes_true(inputs, tmp_path, number):
    assert capabilities.attempt(number, inputs, tmp_path / "trial") == ""


def test_a_line_that_does_not_come_true_is_said(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(trials.bertdata, "Loader", lambda *shards, **options: [1] * (options["rank"] + 1))
    failed = capabilities.attempt(9, inputs, tmp_path / "trial")
    assert "AssertionError: assert len(set(steps)) == 1" in failed
    monkeypatch.setattr(trials, "run", Mock(side_effect=RuntimeError("two\nlines")))
    assert "RuntimeError: two / lines" in capabilities.attempt(9, inputs, tmp_path / "another")


@pytest.mark.slow
def test_every_sixth_line_comes_true():
    """`make capabilities` tries all."""
    numbers = ",".join(map(str, range(1, 61, 6)))
    command = [sys.executable, str(ROOT / "tools" / "capabilities.py"), "--jobs", "2", "--only", numbers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^10 capabilities, 0 failed; ", done.stdout, re.MULTILINE), done.stdout
