"""Suites: the tasks whose files are there run, in the layouts that GLUE and CLUE give out; the others are said."""

import json

import pytest
from test_tasks import BAD, GOOD, invoke, tuned, write
from training import train

from bertrain import suite, tables


@pytest.fixture(scope="module")
def checkpoint(dataset, tmp_path_factory):
    run = tmp_path_factory.mktemp("suite") / "run"
    train(dataset.path, run, model="bert-tiny", steps=2)
    return run


def test_a_suite_runs_what_is_there_in_its_own_layout(checkpoint, tmp_path):
    data = tmp_path / "glue"
    for name in ("cola", "RTE", "MNLI"):
        (data / name).mkdir(parents=True)
    lines = [f"gj04\t{int(text in GOOD)}\t\t{text}" for text in GOOD + BAD]
    for split in ("train", "dev"):
        write(data / "cola" / f"{split}.tsv", *lines)
        header = "index\tsentence1\tsentence2\tlabel"
        write(
            data / "RTE" / f"{split}.tsv", header, *(f"{i}\tlight\t{t}\t{t in GOOD}" for i, t in enumerate(GOOD + BAD))
        )
    header = "index\tsentence1\tsentence2\t{}gold_label"
    write(
        data / "MNLI" / "train.tsv",
        header.format("label1\t"),
        "0\tlight\tsalt\tx\tneutral",
        "1\tsalt\tsalt\tx\tno",
        "2\tsalt",
    )
    for part in ("matched", "mismatched"):
        write(data / "MNLI" / f"dev_{part}.tsv", header.format(""), "0\tlight\tsalt\tneutral", "1\tlight\tsalt\t-")
    common = [
        "glue",
        "--checkpoint",
        checkpoint,
        "--data",
        data,
        "--out",
        tmp_path / "out",
        "--seeds",
        1,
        "--epochs",
        1,
    ]
    done = invoke(*common, command=suite.main)
    assert done.exit_code == 0, done.output
    for said in ("cola mcc", "rte accuracy", "mnli accuracy", "mnli mismatched accuracy",
                 "no files in", ": sst2, mrpc, stsb, qqp, qnli, wnli",
                 "MNLI/train.tsv: 1 rows were left out", "dev_matched.tsv: 1 rows were left out"):  # fmt: skip
        assert said in done.output
    result = tuned(*common, command=suite.main)
    assert list(result["tasks"]) == ["cola", "mnli", "rte"]
    done = invoke("clue", *common[1:], command=suite.main)
    assert (done.exit_code, "out holds results of bertrain suite glue; give another" in done.output) == (2, True)
    assert set(result["tasks"]["cola"]["dev_mcc"]) == {"median", "min", "max"}


def test_a_suite_of_chinese_files(tmp_path, checkpoint):
    data = tmp_path / "clue"
    (data / "csl_public").mkdir(parents=True)
    for split in ("train", "dev"):
        rows = [{"id": i, "abst": "river light", "keyword": ["salt", "水"], "label": str(i % 2)} for i in range(4)]
        write(data / "csl_public" / f"{split}.json", *map(json.dumps, rows))
    (data / "cluewsc2020").mkdir()
    (data / "c3").mkdir()
    for split in ("train", "dev"):
        wsc = [{"target": {"span1_index": 0, "span1_text": "床", "span2_index": 2, "span2_text": "它"}, "idx": i,
                "label": label, "text": "床，它很软"} for i, label in enumerate(("true", "false"))]  # fmt: skip
        write(data / "cluewsc2020" / f"{split}.json", *map(json.dumps, wsc))
        question = {"question": "river", "choice": ["salt", "light"], "answer": "light"}
        for kind in "dm":
            (data / "c3" / f"{kind}-{split}.json").write_text(json.dumps([[["the river"], [question], "1-1"]]))
    done = invoke("clue", "--checkpoint", checkpoint, "--data", data, "--out", tmp_path / "out", "--seeds", 1,
                  "--epochs", 1, command=suite.main)  # fmt: skip
    assert done.exit_code == 0, done.output
    for said in ("csl accuracy", "cluewsc2020 accuracy", "c3 accuracy", "cmrc2018"):
        assert said in done.output
    read = tables.read(str(data / "csl_public" / "dev.json"), text="abst", other="keyword", label="label")
    assert read.others == ["salt 水"] * 4


def test_files_of_a_suite_that_are_not_there_are_named(tmp_path):
    common = ["glue", "--checkpoint", tmp_path, "--out", tmp_path / "out", "--data"]
    for data, said in ((tmp_path / "none", "is not a directory"), (tmp_path, "holds no task of glue; give a")):
        done = invoke(*common, data, command=suite.main)
        assert (done.exit_code, said in done.output) == (2, True), done.output
    (tmp_path / "MRPC").mkdir()
    done = invoke(*common, tmp_path, command=suite.main)
    assert (done.exit_code, "MRPC has no train.tsv and no dev.tsv" in done.output) == (2, True), done.output
