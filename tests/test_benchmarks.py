"""The tables of measurements say what was measured, in the docs too."""

import importlib
import json
import re
import sys

import pytest
from support.data import ROOT

RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def table():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import table

    yield table
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture
def data():
    return json.loads((RESULTS / "comparison.json").read_text())


def test_the_page_holds_the_table_of_what_was_measured(table, data):
    _, _, rest = (ROOT / "docs" / "benchmarks.md").read_text().partition(f"{table.BEGIN}\n")
    assert rest.partition(f"\n{table.END}")[0] == table.page(data)
    assert data["rows"] == table.rows_of(data["measured"])
    assert data["notes"] == table.notes(data["measured"])
    assert {row["question"] for row in data["rows"]} == {*table.ROWS}
    assert {row["library"] for row in data["rows"]} >= {*table.NAMES.values()}


# ---------------------------------------------------------------------------------------------------- README's table


@pytest.fixture(scope="module")
def proof(table):
    return importlib.import_module("proof")


def test_readme_has_the_table_of_committed_results(proof):
    text = (ROOT / "README.md").read_text()
    assert text.partition(f"{proof.BEGIN}\n")[2].partition(f"\n{proof.END}")[0] == proof.table(*proof.read())
    assert len(text.splitlines()) <= 120


def test_each_other_row_names_a_section_of_a_page(proof):
    for one in proof.read()[1]:
        page, _, section = one["page"].partition("#")
        headings = re.findall(r"^## (.*)$", (ROOT / page).read_text(), re.MULTILINE)
        assert section in {re.sub(r"[^\w -]", "", text).replace(" ", "-").lower() for text in headings}
