"""Suites: tasks whose files are there run, in the layouts that GLUE, SuperGLUE and CLUE give out; others are listed."""

import json
import os

import pytest
from support.commands import json_of, refused, succeeds
from support.data import BAD, GOOD
from support.disk import before_rename, write

from bertrain.__main__ import main
from bertrain.lab.suite import SUITES


def common(checkpoint, data, out):
    return ["--checkpoint", checkpoint, "--data", data, "--out", out, "--seeds", 1, "--epochs", 1]


PASSAGE = {"question": "what", "answers": [{"text": "salt", "label": 1}, {"text": "light", "label": 0}]}
PLACES = {"span1_index": 1, "span1_text": "river", "span2_index": 3, "span2_text": "It"}
WORD = {"start1": 0, "end1": 5, "start2": 4, "end2": 9}
SUPERGLUE = {
    "BoolQ": {"question": "is it", "passage": "the river", "label": True},
    "CB": {"premise": "the river", "hypothesis": "a river", "label": "neutral"},
    "COPA": {"premise": "salt", "choice1": "river", "choice2": "light", "question": "effect", "label": 1},
    "MultiRC": {"idx": 0, "passage": {"text": "the river", "questions": [PASSAGE]}},
    "RTE": {"premise": "the river", "hypothesis": "a river", "label": "entailment"},
    "WiC": {"sentence1": "light it", "sentence2": "the light", "word": "light", "label": False, **WORD},
    "WSC": {"text": "The river rose. it fell", "target": PLACES, "label": True},
}
NOUN = {"span1_index": 0, "span1_text": "床", "span2_index": 2, "span2_text": "它"}
CHOICE = {"question": "river", "choice": ["salt", "light"], "answer": "light"}
CLUE = {
    "csl_public": {"id": 1, "abst": "river light", "keyword": ["salt", "水"], "label": "1"},
    "cluewsc2020": {"target": NOUN, "idx": 1, "label": "true", "text": "床，它很软"},
    "c3": [[["the river"], [CHOICE], "1-1"]],
}
NAMES = {"superglue": ("train.jsonl", "val.jsonl"), "clue": ("train.json", "dev.json")}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows"), [("superglue", SUPERGLUE), ("clue", CLUE)])
def test_a_suite_of_json_runs_in_its_own_layout(bert_run, tmp_path, name, rows):
    data = tmp_path / name
    for folder, row in rows.items():
        for file in NAMES[name]:
            for start in ("d-", "m-") if folder == "c3" else ("",):
                write(data / folder / f"{start}{file}", *[json.dumps(row)] * (1 if folder == "c3" else 2))
    result = json_of(main, "suite", name, *common(bert_run, data, tmp_path / "out"))
    assert list(result["tasks"]) == [folder.lower().removesuffix("_public") for folder in rows]
    for task, measures in result["tasks"].items():
        assert all(f"dev_{metric}" in measures for metric in SUITES[name][task].metrics.split())


def test_a_suite_runs_what_is_there_in_its_own_layout(bert_run, tmp_path):
    """And holds its directory until its results are written."""
    data, out, busy = tmp_path / "glue", tmp_path / "out", {"kind": "busy", "given": str(os.getpid())}
    for split in ("train", "dev"):
        write(data / "cola" / f"{split}.tsv", *[f"gj04\t{int(text in GOOD)}\t\t{text}" for text in GOOD + BAD])
        rows = [f"{number}\tlight\t{text}\t{text in GOOD}" for number, text in enumerate(GOOD + BAD)]
        write(data / "RTE" / f"{split}.tsv", "index\tsentence1\tsentence2\tlabel", *rows)
    rows = "0\tlight\tsalt\tx\tneutral", "1\tsalt\tsalt\tx\tno", "2\tsalt"
    write(data / "MNLI" / "train.tsv", "index\tsentence1\tsentence2\tlabel1\tgold_label", *rows)
    for part in ("matched", "mismatched"):
        rows = "0\tlight\tsalt\tneutral", "1\tlight\tsalt\t-"
        write(data / "MNLI" / f"dev_{part}.tsv", "index\tsentence1\tsentence2\tgold_label", *rows)
    write(data / "wnli", "a file of this name is no task")
    arguments, refusals = ["suite", "glue", *common(bert_run, data, out)], []
    with before_rename("out/result.json", lambda: refusals.append(refused(main, *arguments, **busy))):
        done = succeeds(main, *arguments)
    assert [refusal.sentence.partition(" by ")[0] for refusal in refusals] == [f"{out} is in use"]
    for name in ("cola mcc", "rte accuracy", "mnli accuracy", "mnli mismatched accuracy", "sst2, mrpc, stsb, qqp"):
        assert name in done.output
    assert all(f"{name}: 1 row" in done.stderr for name in ("MNLI/train.tsv", "dev_matched.tsv"))
    result = json_of(main, *arguments)
    assert json.loads((out / "result.json").read_bytes()) == result
    assert list(result["tasks"]) == ["cola", "mnli", "rte"]
    assert result["missing"] == ["sst2", "mrpc", "stsb", "qqp", "qnli", "wnli"]
    assert set(result["tasks"]["cola"]["dev_mcc"]) == {"median", "min", "max"}
    refused(main, "suite", "clue", *arguments[2:], kind="out-exists", option="out")
    seed = out / "cola" / "seed-0"
    assert json.loads((seed / "seed.json").read_text())["of"]["the measure"] == "mcc"
    assert set(json.loads((seed / "config.json").read_text())["label2id"]) == {"0", "1"}
