"""The table says what was measured, in the docs too; a run that was stopped goes on; a library may fail."""

import copy
import importlib
import json
import re
import runpy
import shlex
import sys
import tomllib

import numpy as np
import pytest
from conftest import ROOT
from helpers import write

from bertrain import recipes
from bertrain.commands import docstrings
from bertrain.options.config import Config
from bertrain.run.phases import resolve

RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def table():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import table

    yield table
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def environments(table):
    return importlib.import_module("environments")


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


def test_a_reason_stands_in_the_place_of_a_figure(table, data):
    changed = copy.deepcopy(data)
    changed["measured"]["building"] = {"reason": "not done after 900 s"}
    row = next(row for row in changed["rows"] if row["what"] == "reading" and row["library"] == "litdata")
    row |= {"theirs": None, "times": None, "reason": "its wheel is not for this Python"}
    changed["stamp"]["other programs ran"] = False
    changed["rows"] = [row for row in changed["rows"] if row["question"] != "building"]
    changed["rows"] += [row for row in table.rows_of(changed["measured"]) if row["question"] == "building"]
    for made in (table.markdown(changed), table.page(changed)):
        assert "its wheel is not for this Python" in made
        assert "not done after 900 s" in made


def test_a_reason_of_ours_is_not_shown_as_that_of_others(table, data):
    changed = copy.deepcopy(data)
    changed["stamp"]["other programs ran"] = False
    changed["measured"]["building"]["result"]["MB/s by slope"]["ours"] = -1.0
    result = changed["measured"]["reading"]["result"]
    for figures in ({"ours": {"warm": {"reason": "no room"}}}, {}):
        result["figures"] = {name: each for name, each in result["figures"].items() if name != "ours"} | figures
        result["left out"]["ours"] = "" if figures else "not done"
        changed |= {"rows": table.rows_of(changed["measured"]), "notes": table.notes(changed["measured"])}
        cells = dict(line.split(" | ")[:2] for line in table.page(changed).splitlines() if line.startswith("| "))
        assert cells["| reading"] == ("ours: no room" if figures else "ours: not done")
        assert cells["| building, each further MB"] == "ours: the larger text took no longer: noise"
        assert "ours: " in table.markdown(changed)


def test_slopes_are_of_the_further_text(table):
    import bench_build

    medians = {"ours, one": 3.0, "ours, a quarter": 1.0, "least": 0.1, "litdata": 5.0, "litdata, a quarter": 5.0}
    assert bench_build.slopes(medians, 12.0) == {"ours": 6.0, "litdata": 0.0}


def test_the_time_to_a_loss_is_the_measured_one_on_both_sides(table):
    result = {
        "regime": "2.0 minutes, 1 processes",
        "ours": {"until training": 3.0, "seeds": [{"loss": 4.0, "seconds to the loss of run_mlm": 20.0}]},
        "ours, same recipe": {"until training": 3.0, "seeds": [{"loss": 5.1, "trained_s": 67.0, "step": 90}]},
        "run_mlm": {"until training": 10.0, "seeds": [{"loss": 5.0, "trained_s": 130.0}]},
    }
    equal, losses, time, _ = table.time_to_loss(result)
    assert (equal["ours"], equal["theirs"], equal["times"]) == (70.0, 140.0, 2.0)
    assert (losses["ours"], losses["theirs"], losses["times"]) == (5.1, 5.0, None)
    assert (time["ours"], time["theirs"]) == (23.0, 140.0)
    result["ours"]["seeds"][0]["seconds to the loss of run_mlm"] = None
    assert table.time_to_loss(result)[2]["reason"] == "ours: has not reached it"


def test_the_page_has_ratios_only_of_a_run_that_had_the_machine_to_itself(table, data):
    data["stamp"]["other programs ran"] = True
    busy = table.page(data)
    assert "**" not in busy
    assert "|" not in busy
    assert data["stamp"]["date"] in busy
    assert "`benchmarks/results/comparison.md`" in busy
    data["stamp"]["other programs ran"] = False
    first, *rest = table.page(data).splitlines()
    for name in ("date", "commit"):
        assert data["stamp"][name] in first
    assert "MB of text" in first
    assert "round" in first
    assert any("**" in line for line in rest)


@pytest.mark.slow
def test_writing_changes_the_page_only_between_the_comments(table, data, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "ROOT", tmp_path)
    monkeypatch.setattr(table, "OUT", tmp_path / "comparison")
    text = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "benchmarks.md"
    page.write_text(text)
    table.write(data)
    first = page.read_text()
    assert first == text.replace("old", table.page(data))
    table.write(json.loads((tmp_path / "comparison.json").read_text()))
    assert page.read_text() == first
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_a_tokenizer_that_a_library_does_not_take_is_said_once(table):
    rates = {"cold": 2.0, "warm": 3.0, "encode_batch_fast": 1.0, "tokie cold": 4.0, "tokie warm": 6.0}
    others = dict.fromkeys(("tokenizers 1.0", "gigatoken", "nanotoken"), "takes no Unigram")
    rows = table.tokenizing("T5", {"MB/s median": rates, "left out": others})
    assert [row["what"] for row in rows if row["reason"]] == ["tokenizing, T5, cold"] * 3
    expected = [("tokenizing, T5, cold", 0.5), ("tokenizing, T5, warm", 0.5)]
    assert [(row["what"], row["times"]) for row in rows if row["library"] == "tokie"] == expected


def test_only_tokenizers_that_are_there_are_measured(table, tmp_path):
    trained = tmp_path / "trained.json"
    assert table.files_of(None, trained) == {"BERT": trained}
    write(tmp_path / "gpt2" / "tokenizer.json", "{}")
    assert table.files_of(tmp_path, trained) == {"GPT-2": tmp_path / "gpt2" / "tokenizer.json"}


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


def test_the_three_phases_of_the_study_are_those_of_the_recipe(table):
    names = ("mlm_probability", "lr", "lr_end", "schedule", "rope_base", "rope_base_local")
    study = runpy.run_path(str(ROOT / "benchmarks" / "phases.py"), run_name="read")
    options = {name: tomllib.loads(row) for name, row in study["ROWS"].items()}
    recipe = tomllib.loads(recipes.file_of("ettin-17m").read_text())
    three, one = (
        resolve(Config.of(data="d", out="o", model="m", steps=1200, **options[name]), None)
        for name in ("three phases", "one phase")
    )
    parts = zip(options["three phases"]["phase"], recipe["phase"], strict=True)
    assert all((recipe | theirs).get(name) == ours.get(name) for ours, theirs in parts for name in names)
    tokens = [float(phase["tokens"][:-1]) * {"B": 1, "T": 1000}[phase["tokens"][-1]] for phase in recipe["phase"]]
    steps = [phase.stop - phase.start for phase in three]
    assert steps == pytest.approx([1200 * part / sum(tokens) for part in tokens])
    assert {phase.length * rows for phase in (*three, *one) for rows in phase.rows} == {study["TOKENS_OF_A_STEP"]}
    assert three[-1].stop == one[-1].stop
    assert three[-1].rate.peak * three[-1].rate.end == pytest.approx(one[0].rate.peak * one[0].rate.end)


def test_preparing_makes_text_vocabulary_and_shards_once(table, tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr(table, "run", lambda *arguments: runs.append(arguments[2]))
    files = [ROOT / "benchmarks" / name for name in ("table.py", "distil.py")]
    monkeypatch.setattr(docstrings, "sources", lambda: files)
    text = table.prepare(tmp_path, None, 0.1)
    assert "Our engine and trainer beside other libraries" in text.read_text()
    table.prepare(tmp_path, None, 0.1)
    assert runs == ["train-tokenizer", "build"]


def test_preparing_takes_out_documents_that_spell_a_special_token(table, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "run", lambda *arguments: None)
    (tmp_path / "corpus.txt").write_text("one\n\na [MASK] b\n\ntwo\n")
    assert table.prepare(tmp_path, tmp_path / "corpus.txt", 16.0).read_text() == "one\n\ntwo\n"


def test_what_was_measured_is_not_measured_again(table, environments, tmp_path):
    calls = []

    def measure():
        calls.append(len(calls))
        if len(calls) == 1:
            raise environments.LeftOut("no room")
        return {"value": len(calls)}

    def ask(settings):
        measurements = table.Measurements(tmp_path / "measured.jsonl", settings)
        measurements.ask("reading", measure)
        return measurements.found("reading")

    assert ask({"commit": "abc", "rounds": 3})["reason"] == "no room"
    assert ask({"commit": "abc", "rounds": 3})["result"] == {"value": 2}  # a failure is measured again,
    assert ask({"commit": "abc", "rounds": 3})["result"] == {"value": 2}  # a figure is not
    with open(tmp_path / "measured.jsonl", "a") as file:
        file.write('{"question": "rea')  # a line that was cut off
    assert ask({"commit": "abc", "rounds": 1})["result"] == {"value": 3}  # other settings are another measurement
    for number, commit in enumerate(("abc+", "abc+", "unknown", "unknown"), 4):  # nor is code that has no name
        assert ask({"commit": commit})["result"] == {"value": number}
    assert len(calls) == 7


def test_a_library_that_fails_or_hangs_is_one_line(environments):
    fail = "import sys; print('noise'); sys.exit('first\\n  File x\\nValueError: what is wrong\\n')"
    with pytest.raises(environments.LeftOut, match="^ValueError: what is wrong$"):
        environments.last_line([sys.executable, "-c", fail], seconds=20)
    with pytest.raises(environments.LeftOut, match="^not done after 0 s$"):
        environments.last_line([sys.executable, "-c", "import time; time.sleep(60)"], seconds=0.2)
    with pytest.raises(environments.LeftOut, match="^printed no result$"):
        environments.last_line([sys.executable, "-c", "print('nothing')"], seconds=20)
    assert environments.last_line([sys.executable, "-c", "print('x'); print('[1]')"], seconds=20) == [1]


def test_a_library_that_fails_in_a_round_is_left_out_alone(environments):
    def fails():
        raise environments.LeftOut("not done after 240 s")

    again = iter([1, 2])
    turns = {"ours": lambda: 5, "a, all": lambda: next(again), "a, a quarter": lambda: 0, "b, all": fails}
    turns["b, a quarter"] = lambda: 0
    library_of = {name: name[0] for name in turns if name != "ours"}
    left_out: dict[str, str] = {}
    found = environments.in_turns(turns, 2, library_of, left_out)
    assert found == {"ours": [5, 5], "a, all": [1, 2], "a, a quarter": [0, 0]}
    assert left_out == {"b": "not done after 240 s"}
    with pytest.raises(environments.LeftOut):
        environments.in_turns({"ours": fails}, 1, library_of, {})


def test_a_library_that_does_not_answer_is_left_out(environments, tmp_path, monkeypatch):
    import other_tokenize

    monkeypatch.setattr(other_tokenize, "ANSWER_S", 0.2)
    monkeypatch.setattr(other_tokenize, "python_of", lambda name, directory: sys.executable)
    hangs = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(other_tokenize, "command_of", lambda *arguments: hangs)
    other = other_tokenize.Other("tokie", tmp_path, "", tmp_path)
    with pytest.raises(environments.LeftOut, match="^no answer after 0 s$"):
        other.encode(0, 1, cold=True)
    assert other.process.wait(10) < 0  # it has the core no longer
    other.close()


@pytest.mark.slow
def test_what_cannot_be_installed_is_left_out(environments, tmp_path, monkeypatch):
    monkeypatch.setitem(environments.PINS, "litdata", ["litdata @ file:///nowhere.whl"])
    with pytest.raises(environments.LeftOut, match="^not installed: .*nowhere"):
        environments.python_of("litdata", tmp_path)


def test_an_environment_that_is_there_is_used_as_it_is(environments, tmp_path, monkeypatch):
    write(tmp_path / "tokie" / "made.json", json.dumps(environments.PINS["tokie"]))
    monkeypatch.setattr(environments.subprocess, "run", None)
    assert environments.python_of("tokie", tmp_path) == str(tmp_path / "tokie" / "bin" / "python")


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
