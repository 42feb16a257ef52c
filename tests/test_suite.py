"""Suites: tasks whose files are there run, in the layouts that GLUE, SuperGLUE and CLUE give out; others are listed."""

import json
import os

import pytest
from support.commands import json_of, refused, succeeds
from support.data import BAD, GOOD
from support.disk import write

from bertrain.lab import suite
from bertrain.lab.tasks import TASKS, Columns


def common(checkpoint, data, out):
    return ["--checkpoint", checkpoint, "--data", data, "--out", out, "--seeds", 1, "--epochs", 1]


def test_a_suite_runs_what_is_there_in_its_own_layout(bert_run, tmp_path):
    data = tmp_path / "glue"
    for split in ("train", "dev"):
        write(data / "cola" / f"{split}.tsv", *(f"gj04\t{int(text in GOOD)}\t\t{text}" for text in GOOD + BAD))
        rows = (f"{number}\tlight\t{text}\t{text in GOOD}" for number, text in enumerate(GOOD + BAD))
        write(data / "RTE" / f"{split}.tsv", "index\tsentence1\tsentence2\tlabel", *rows)
    rows = "0\tlight\tsalt\tx\tneutral", "1\tsalt\tsalt\tx\tno", "2\tsalt"
    write(data / "MNLI" / "train.tsv", "index\tsentence1\tsentence2\tlabel1\tgold_label", *rows)
    for part in ("matched", "mismatched"):
        rows = "0\tlight\tsalt\tneutral", "1\tlight\tsalt\t-"
        write(data / "MNLI" / f"dev_{part}.tsv", "index\tsentence1\tsentence2\tgold_label", *rows)
    write(data / "wnli", "a file of this name is no task")
    arguments = common(bert_run, data, tmp_path / "out")
    done = succeeds(suite.main, "glue", *arguments)
    for name in ("cola mcc", "rte accuracy", "mnli accuracy", "mnli mismatched accuracy", "sst2, mrpc, stsb, qqp"):
        assert name in done.output
    for name in ("MNLI/train.tsv", "dev_matched.tsv"):
        assert any(f"{name}: 1 row" in line for line in done.stderr.splitlines())
    result = json_of(suite.main, "glue", *arguments)
    assert list(result["tasks"]) == ["cola", "mnli", "rte"]
    assert result["missing"] == ["sst2", "mrpc", "stsb", "qqp", "qnli", "wnli"]
    assert set(result["tasks"]["cola"]["dev_mcc"]) == {"median", "min", "max"}
    refused(suite.main, "clue", *arguments, kind="out-exists", option="out")
    seed = json.loads((tmp_path / "out" / "cola" / "seed-0" / "seed.json").read_text())
    assert seed["of"]["the measure"] == "mcc"
    config = json.loads((tmp_path / "out" / "cola" / "seed-0" / "config.json").read_text())
    assert set(config["label2id"]) == {"0", "1"}


@pytest.mark.slow
def test_a_suite_of_chinese_files(bert_run, tmp_path):
    data = tmp_path / "clue"
    for split in ("train", "dev"):
        rows = [{"id": i, "abst": "river light", "keyword": ["salt", "水"], "label": str(i % 2)} for i in range(4)]
        write(data / "csl_public" / f"{split}.json", *map(json.dumps, rows))
        wsc = [
            {
                "target": {"span1_index": 0, "span1_text": "床", "span2_index": 2, "span2_text": "它"},
                "idx": i,
                "label": label,
                "text": "床，它很软",
            }
            for i, label in enumerate(("true", "false"))
        ]
        write(data / "cluewsc2020" / f"{split}.json", *map(json.dumps, wsc))
        question = {"question": "river", "choice": ["salt", "light"], "answer": "light"}
        for kind in "dm":
            write(data / "c3" / f"{kind}-{split}.json", json.dumps([[["the river"], [question], "1-1"]]))
    result = json_of(suite.main, "clue", *common(bert_run, data, tmp_path / "out"))
    assert list(result["tasks"]) == ["csl", "cluewsc2020", "c3"]
    assert all("dev_accuracy" in task for task in result["tasks"].values())
    pairs = TASKS["pairs"](Columns("abst", "keyword", "label"))
    assert [example.other for example in pairs.read(str(data / "csl_public" / "dev.json"))[0]] == ["salt 水"] * 4


@pytest.mark.slow
def test_a_suite_of_json_lines(bert_run, tmp_path):
    data, word = tmp_path / "superglue", {"start1": 0, "end1": 5, "start2": 4, "end2": 9}
    answers = [{"text": "salt", "label": 1}, {"text": "light", "label": 0}]
    passage = {"text": "the river", "questions": [{"question": "what", "answers": answers}]}
    target = {"span1_index": 1, "span1_text": "river", "span2_index": 3, "span2_text": "It"}
    rows = {
        "BoolQ": {"question": "is it", "passage": "the river", "label": True},
        "CB": {"premise": "the river", "hypothesis": "a river", "label": "neutral"},
        "COPA": {"premise": "salt", "choice1": "river", "choice2": "light", "question": "effect", "label": 1},
        "MultiRC": {"idx": 0, "passage": passage},
        "RTE": {"premise": "the river", "hypothesis": "a river", "label": "entailment"},
        "WiC": {"sentence1": "light it", "sentence2": "the light", "word": "light", "label": False, **word},
        "WSC": {"text": "The river rose. it fell", "target": target, "label": True},
    }
    for name, row in rows.items():
        for split in ("train", "val"):
            write(data / name / f"{split}.jsonl", *[json.dumps(row)] * 2)
    result = json_of(suite.main, "superglue", *common(bert_run, data, tmp_path / "out"))
    assert list(result["tasks"]) == ["boolq", "cb", "copa", "multirc", "rte", "wic", "wsc"]
    for name, task in result["tasks"].items():
        assert all(f"dev_{metric}" in task for metric in suite.SUITES["superglue"][name].metrics.split())


def test_a_suite_holds_its_directory_until_its_results_are_written(bert_run, tmp_path, monkeypatch):
    data, out, refusals = tmp_path / "glue", tmp_path / "out", []
    for split in ("train", "dev"):
        write(data / "CoLA" / f"{split}.tsv", *(f"gj04\t{int(text in GOOD)}\t\t{text}" for text in GOOD + BAD))
    arguments, write_file = ["glue", *common(bert_run, data, out)], suite.write_file

    def written(path, content):
        refusals.append(refused(suite.main, *arguments, kind="busy", given=str(os.getpid())))
        write_file(path, content)

    monkeypatch.setattr(suite, "write_file", written)
    result = json_of(suite.main, *arguments)
    assert [refusal.sentence.partition(" by ")[0] for refusal in refusals] == [f"{out} is in use"]
    assert json.loads((out / "result.json").read_bytes()) == result
    monkeypatch.undo()
    assert json_of(suite.main, *arguments) == result


def test_files_of_a_suite_that_are_not_there_are_named(tmp_path):
    arguments = ["glue", "--checkpoint", tmp_path, "--out", tmp_path / "out", "--data"]
    refused(suite.main, *arguments, tmp_path / "none", kind="empty", option="data")
    (tmp_path / "MRPC").mkdir()
    refusal = refused(suite.main, *arguments, tmp_path, kind="not-found", option="data")
    assert all(name in refusal.sentence for name in ("MRPC", "train.tsv", "dev.tsv"))


def test_files_of_which_no_row_fits_are_refused(bert_run, tmp_path):
    for folder, row, kind in (
        ("COPA", {"premise": "a", "choice1": "b", "choice2": "c", "question": "why", "label": 1}, "bad-row"),
        ("RTE", {"premise": "a", "hypothesis": "b", "label": ""}, "bad-row"),
        ("MultiRC", {"idx": 0, "passage": {"text": "a", "questions": []}}, "empty"),
    ):
        (tmp_path / folder / folder).mkdir(parents=True)
        for name in ("train.jsonl", "val.jsonl"):
            write(tmp_path / folder / folder / name, *[json.dumps(row)] * 2)
        arguments = common(bert_run, tmp_path / folder, tmp_path / folder / "out")
        assert "train.jsonl" in refused(suite.main, "superglue", *arguments, kind=kind).sentence


def test_a_fault_of_a_later_task_ends_a_suite_before_the_first_is_trained(bert_run, tmp_path):
    data, rows = tmp_path / "glue", ["0\tlight\tsalt\tno", "1\tsalt\tsalt\tyes"]
    for split in ("train", "dev"):
        write(data / "RTE" / f"{split}.tsv", "index\tsentence1\tsentence2\tlabel", *rows)
        write(data / "WNLI" / f"{split}.tsv", "index\tsentence1\tsentence2\tanswer", *rows)
    refusal = refused(suite.main, "glue", *common(bert_run, data, tmp_path / "out"), kind="no-column", option="label")
    assert "WNLI" in refusal.sentence
    assert not (tmp_path / "out" / "rte").exists()
