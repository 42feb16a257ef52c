"""SECURITY.md and docs/reliability.md name tests that exist. The tests themselves are where these pages say."""

import re

import pytest
from support.data import ROOT

NAMED = re.compile(r"`((?:tables/)?test_\w+\.py)(?:::(test_\w+))?`")


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/reliability.md"])
def test_tests_that_a_page_names_exist(page):
    named = NAMED.findall((ROOT / page).read_text(encoding="utf-8"))
    assert len({file for file, _ in named}) > 10
    for file, test in named:
        source = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert not test or f"\ndef {test}(" in source, f"{file} has no {test}"


def test_each_line_of_the_page_of_security_names_tests_and_nothing_else():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    last_cells = [line.split("|")[-2].strip() for line in text.splitlines() if line.startswith("|")]
    cells = [cell for cell in last_cells if cell not in ("tests", "---")]
    assert len(cells) > 24
    for cell in cells:
        assert any(test for _, test in NAMED.findall(cell)), cell
        assert re.sub(r"`[\w.:/]+`", "", cell).strip(" ,") == "", cell
    assert sum(cell.count("::") for cell in cells) == text.count("::")
