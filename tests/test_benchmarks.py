"""The tables of measurements say what was measured, in the docs too."""

import importlib
import json
import re
import sys

import pytest
from conftest import ROOT

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
    _, _, rest = (ROOT / "README.md").read_text().partition(f"{proof.BEGIN}\n")
    data, proofs = proof.read()
    assert rest.partition(f"\n{proof.END}")[0] == proof.table(data, proofs)
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert (ROOT / proof.PICTURE).read_bytes().startswith(b"\x89PNG")


def test_each_line_of_the_table_names_a_page_and_a_command_that_are_there(proof):
    data, proofs = proof.read()
    assert all("**" in found for _, found in proof.speeds(data))
    for one in proofs:
        page, _, section = one["page"].partition("#")
        headings = re.findall(r"^## (.*)$", (ROOT / page).read_text(), re.MULTILINE)
        assert not section or section in {re.sub(r"[^\w -]", "", text).replace(" ", "-").lower() for text in headings}
        if "again" in one:
            assert (ROOT / one["again"].split()[1]).is_file(), one
