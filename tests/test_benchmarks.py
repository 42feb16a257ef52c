"""The tables of measurements say what was measured, in the docs too."""

import importlib
import json
import re
import shlex
import sys

import numpy as np
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


def test_both_pages_hold_the_table_of_what_was_measured(table, data):
    _, _, rest = (ROOT / "docs" / "benchmarks.md").read_text().partition(f"{table.BEGIN}\n")
    assert rest.partition(f"\n{table.END}")[0] == table.page(data)
    assert (RESULTS / "comparison.md").read_text() == table.markdown(data)
    assert data["rows"] == table.rows_of(data["measured"])
    assert data["notes"] == table.notes(data["measured"])
    assert {row["question"] for row in data["rows"]} == {*table.ROWS}
    assert {row["library"] for row in data["rows"]} >= {*table.NAMES.values()}


def test_plain_numpy_masks_as_bert_does(table, tmp_path):
    import other_read
    from tokenizers import Tokenizer, models

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(5, 90))]
    vocabulary = {name: number for number, name in enumerate(names)}
    Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    rows = np.random.default_rng(0).integers(5, 90, (1024, 128))
    rows[:, 0], rows[:, -1] = 2, 3
    np.save(tmp_path / "rows.npy", rows)
    engine = other_read.Memmap(tmp_path / "rows.npy", str(tmp_path / "tokenizer.json"), str(tmp_path))
    engine.write()
    engine.prepare()
    batches = list(engine.batches())
    ids, labels = (np.concatenate([batch[name] for batch in batches]) for name in ("input_ids", "labels"))
    chosen = labels != -100
    restored = np.where(chosen, labels, ids)
    assert sorted(map(bytes, restored)) == sorted(map(bytes, rows))
    assert not chosen[:, [0, -1]].any()
    assert chosen[:, 1:-1].mean() == pytest.approx(0.15, abs=0.005)
    assert (ids[chosen] == engine.mask).mean() == pytest.approx(0.8, abs=0.02)
    assert (ids[chosen] == labels[chosen]).mean() == pytest.approx(0.1, abs=0.02)
    engine.masked = False
    assert set(map(bytes, next(engine.batches())["input_ids"].numpy())) <= set(map(bytes, rows))


def test_the_commands_of_the_page_are_ones_that_make_bench_takes(table):
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    commands = [shlex.split(line, comments=True) for line in page.splitlines() if line.startswith("    make bench")]
    variables = [variable.split("=", 1) for command in commands for variable in command[2:]]
    assert len(commands) == 5
    for name, value in variables:
        assert f"$({name})" in (ROOT / "Makefile").read_text()
        if name == "BENCH_OPTIONS":
            table.main.make_context("table", shlex.split(value))
    named = set(re.findall(r"--[a-z-]+", page.partition("| `BENCH_OPTIONS`")[2].splitlines()[0]))
    assert named < {option for parameter in table.main.params for option in parameter.opts}


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
        assert (ROOT / one["page"]).is_file(), one
        if "again" in one:
            assert (ROOT / one["again"].split()[1]).is_file(), one
