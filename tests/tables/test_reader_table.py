"""READERS: every kind of file that the product reads × what may be there in its place.

Each damaged file is one error of a known kind, never a traceback, or it is read as it is.
"""

import io
import json
import shutil
from functools import partial
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import Result
from support.commands import invoke, succeeds
from support.disk import damages
from support.families import model_of
from support.runs import flags, seal

import bertdata
from bertdata import BertdataError
from bertdata.format.records import read_record
from bertrain.cli import command
from bertrain.commands import pairs
from bertrain.lab.distillation.answers import TeacherCache
from bertrain.lab.tasks import TASKS, Columns

QUESTION = {"id": "q", "question": "Of?", "answers": [{"text": "river", "answer_start": 2}]}
SQUAD = {"context": "A river.", "qas": [QUESTION]}
RESULT = {"runs": [{"seed": 0, "dev": {"a": 1.0}, "curve": [{"epoch": 1, "train_loss": 2.0, "dev": {"a": 1.0}}]}]}
BERT = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TABLE = b"text,label\nriver,1\nsalt,0\n"


def dumps(value):
    return json.dumps(value).encode()


class Reader(NamedTuple):
    """name: of a file, in a directory of its own or below it. good: its bytes, or a function (folder, given) that makes
    it, where given(name) is a fixture. read: (path, given) → raises, or a result of click. kinds: of errors that may
    come. harmless: damage that changes nothing that is read. more: wrong contents, or functions of the good bytes.
    """

    name: str
    good: object
    read: object
    kinds: str
    harmless: str = ""
    more: tuple = ()


def as_parquet(folder, given):
    pq.write_table(pa.table({"text": ["river", "salt"], "label": [1, 0]}), folder / "a.parquet")


def shards(folder, given):
    shutil.copytree(given("dataset").path, folder / "shards")


def trained(folder, given):
    shutil.copytree(given("bert_run"), folder / "run")


def answered(folder, given):
    """A teacher's cache."""
    model, dataset = given("bert_run") / "step-00000002", given("dataset").path
    options = ["--max-samples", 6, "--length", 32, "--top-k", 4, "--variants", 1]
    ask = ["teacher", "--model", model, "--data", dataset, *options]
    made = given("once")("teacher", lambda place: succeeds("bertrain", *ask, "--out", place / "logits"))
    shutil.copytree(made / "logits", folder / "logits")


def table(path, given):
    TASKS["classification"](Columns("text", label="label")).read(str(path))


def task(name, path, given):
    TASKS[name](Columns(other="choices" if name == "choice" else "")).read(str(path))


def from_saved(path, given):
    (path.parent / "dataset_info.json").write_text("{}")
    return build_of(path.parent, path.parent.parent / "out")


def build_of(inputs, out):
    return invoke("bertdata", "build", inputs, "--out", out, "--type", "bytes", "--workers", 1)


def with_members(**members):
    return lambda good: dumps(json.loads(good) | members)


def pickled(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def resumed(path, given):
    """checkpoint.json states the damaged bytes, as a hostile checkpoint would."""
    seal(path.parent)
    return invoke("bertrain", "pretrain", *flags(given("dataset").path, path.parent.parent, steps=3, model="bert-tiny"))


def opened(path, given=None):
    return bertdata.open(path.parent)


def configured(path, given):
    return invoke(command(print), "--data", "d", "--out", "o", "--config", path)


def modelled(path, given):
    model_of(str(path), given("dataset"))


def plotted(path, given):
    return invoke("bertrain", "plot", path.parent, "--out", path.parent / "x.png")


UNREADABLE, LINES = "model-unreadable unsupported", "not-of-format not-text bad-row empty no-column"
OTHER, NUMBERS = "other-version", "list number object"
NO_RESULTS = (
    b'{"runs": [{"seed": 0, "dev": {}, "curve": []}]}',
    b'{"runs": [{"seed": 0, "dev": {"a": 1}, "curve": [{"epoch": [], "train_loss": {}, "dev": {"a": null}}]}]}',
)
NO_RECORDS = b'{"a":' * 100_000, b"9" * 5000, b"1e999999", b'"\\ud800"'
NO_BERT = [BERT | wrong for wrong in ({"num_attention_heads": 3}, {"hidden_act": "geluu"}, {"hidden_size": "wide"})]
NO_OPTIONS = b'{"config": {"log": "tensorboard"}}', b'{"config": null}', b'{"config": {"steps": "three"}}'
NO_STATES = with_members(version=3), with_members(unknown=1), lambda good: b"[%b]" % good
PLAN = b'{"settings": {}, "published": {}, "inputs": []}'
READERS = [
    Reader("a.json", b'{"format_version": 1}', lambda path, given: read_record(path), "damaged", NUMBERS, NO_RECORDS),
    Reader("shards/manifest.json", shards, opened, "damaged other-version"),
    Reader("shards/tokenizer.json", shards, lambda path, given: opened(path).tokenizer_file(path.name), "damaged"),
    Reader("shards/train-00000.tokens.npy", shards, opened, "damaged"),
    Reader("saved/state.json", b'{"_data_files": [{"filename": "a.arrow"}]}', from_saved, "not-of-format"),
    Reader("out/.build/plan.json", PLAN, lambda path, given: build_of(given("corpus"), path.parent.parent), OTHER),
    Reader("logits/cache.json", answered, lambda path, given: TeacherCache(path.parent), f"damaged {OTHER}"),
    Reader("config.json", dumps(BERT), modelled, UNREADABLE, more=(*map(dumps, NO_BERT), b'{"model_type": "berd"}')),
    Reader("run.toml", b"lr = 0.5", configured, f"malformed unknown {OTHER}", "empty list", (b"lrr = 1",)),
    Reader("run.json", b'{"config": {"lr": 0.5}}', configured, f"malformed unknown {OTHER}", more=NO_OPTIONS),
    Reader(
        "run/run.json", trained, lambda path, given: invoke("bertrain", "trace", path.parent, "--step", 1), "not-a-run"
    ),
    Reader("run/step-00000002/trainer.json", trained, resumed, "damaged", more=NO_STATES),
    Reader("run/step-00000002/optimizer.pt", trained, resumed, "other-settings", more=(*map(pickled, ([1], 5, {})),)),
    Reader("result.json", dumps(RESULT), plotted, "not-a-run", more=NO_RESULTS),
    Reader("pairs.jsonl", b'{"good": "a", "bad": "b"}\n', lambda path, given: pairs.read(path), LINES),
    Reader("a.csv", TABLE, table, LINES),
    Reader("a.tsv", TABLE.replace(b",", b"\t"), table, LINES),
    Reader("a.jsonl", b'{"text": "river", "label": 1}\n', table, LINES),
    Reader("a.json", b'{"text": "river", "label": 1}\n', table, LINES),
    Reader("a.parquet", as_parquet, table, LINES),
    Reader("squad.json", dumps({"data": [{"paragraphs": [SQUAD]}]}), partial(task, "qa"), LINES),
    Reader("choices.json", b'[[["a"], []]]', partial(task, "choice"), LINES),
    Reader("words.txt", b"river NN\nlight JJ\n", partial(task, "token"), LINES, "cut"),
]


def error_of(read, path, given):
    """The error that reading ends in; None if there is none. Anything else than an error of ours is raised."""
    try:
        done = read(path, given)
    except BertdataError as error:
        return error
    if not isinstance(done, Result) or not done.exit_code:
        return None
    error = done.exception.__context__
    assert isinstance(error, BertdataError), done.output
    assert done.stderr.splitlines()[-1] == f"Error: {error}"
    return error


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_a_damaged_file_is_one_sentence(reader, tmp_path, request):
    made = tmp_path / "made"  # by what a pickle would run
    for what in [*damages(b"", made), *range(len(reader.more))]:
        folder = tmp_path / str(what)
        folder.mkdir()
        path = folder / reader.name
        if callable(reader.good):
            reader.good(folder, request.getfixturevalue)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(reader.good)
        content = (damages(good := path.read_bytes(), made) | dict(enumerate(reader.more)))[what]
        path.write_bytes(content(good) if callable(content) else content)
        error = error_of(reader.read, path, request.getfixturevalue)
        assert error.kind in reader.kinds.split() if error else what in reader.harmless.split(), (what, error)
        shutil.rmtree(folder)
    assert not made.exists()
