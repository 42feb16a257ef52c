"""docs/predecessors.md names commands, options and pages that exist, and leaves no capability out."""

import re
import shlex
from pathlib import Path

import click
import pytest

import bertdata
from bertdata.cli import main as bertdata_command
from bertrain.__main__ import main as bertrain_command

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "predecessors.md").read_text()
ROWS = re.findall(r"^\| (\d+) \|(.+)\|$", PAGE, re.MULTILINE)
CODE = [span for _, row in ROWS for span in re.findall(r"`([^`]+)`", row)]
COMMANDS = [span for span in CODE if span.startswith(("bertdata ", "bertrain "))]
LOOSE = [span for span in CODE if span.startswith("--") and span != "--yes"]  # options of pretrain


def unknown_in(span):
    """The words of a command that it does not know, the options that it requires, and all its words."""
    program, name, *words = shlex.split(span)
    group = {"bertdata": bertdata_command, "bertrain": bertrain_command}[program]
    command = group.get_command(click.Context(group), name)
    assert command is not None, f"{program} has no command {name}"
    known = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
    return unknown, {flag for option in command.params if option.required for flag in option.opts}, words


def test_there_are_sixty_capabilities_and_none_without_an_answer():
    assert [int(number) for number, _ in ROWS] == list(range(1, 61))
    assert all(len(cells := row.split("|")) == 3 and all(cell.strip() for cell in cells) for _, row in ROWS)


@pytest.mark.parametrize("span", COMMANDS)
def test_commands_and_their_options_exist(span):
    unknown, required, words = unknown_in(span)
    assert unknown == []
    if words and "--teacher" not in words:
        assert {flag for flag in required if flag.startswith("--")} <= {*words}, "lacks what it requires"


def test_options_without_a_command_are_those_of_pretrain():
    assert [span for span in LOOSE if unknown_in(f"bertrain pretrain {span}")[0]] == []


def test_classes_have_the_arguments_that_are_named():
    for span in CODE:
        for name, arguments in re.findall(r"(Loader|Masking)\(([^)]*)\)", span):
            parameters = getattr(bertdata, name).__init__.__code__.co_varnames
            assert all(given in parameters for given in re.findall(r"(\w+)=", arguments)), span


def test_pages_and_examples_exist():
    pages = re.findall(r"\]\(([^)#]+)", PAGE)
    assert len(pages) > 20
    assert [page for page in pages if not (ROOT / "docs" / page).is_file()] == []
    assert [path for path in re.findall(r"python (\S+\.py)", PAGE) if not (ROOT / path).is_file()] == []
