"""SECURITY.md and docs/reliability.md name tests that exist. The tests themselves are where these pages say."""

import ast
import re

import pytest
from conftest import ROOT

TESTS = ROOT / "tests"


def named(text):
    """(file, test) for each test that a text names as `file.py::test`."""
    return re.findall(r"`((?:tables/)?test_\w+\.py)::(test_\w+)`", text)


def test_each_line_of_the_page_of_security_names_tests_that_exist():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    last_cells = [line.split("|")[-2].strip() for line in text.splitlines() if line.startswith("|")]
    cells = [cell for cell in last_cells if cell not in ("tests", "---")]
    assert len(cells) > 24
    for cell in cells:
        assert named(cell), cell
        assert re.sub(r"`[\w.:/]+`", "", cell).strip(" ,") == "", cell  # nothing but tests
    assert sum(len(named(cell)) for cell in cells) == text.count("::")
    for file, test in named(text):
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert test in found, f"{file} has no {test}"


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/reliability.md"])
def test_files_of_tests_that_are_named_exist(page):
    files = {*re.findall(r"`((?:tables/)?test_\w+\.py)\b", (ROOT / page).read_text(encoding="utf-8"))}
    assert len(files) > 10
    assert [file for file in files if not (TESTS / file).is_file()] == []
