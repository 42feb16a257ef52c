"""WRITERS: what bertdata and bertrain write × a call that fails, a full disk and a loss of power.

A writer that fails publishes nothing, and the same call then ends in the same bytes. tools/crash.py fails every call;
pretrain, whose log has times, is in test_reliability.py and test_promises.py.
"""

import errno
import os
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import pytest
from reference import ids
from support.commands import invoke, tuning
from support.data import build, import_ids, make_text, train_tokenizer, write_labelled
from support.disk import failing, full_disk, put, recorded, visible
from support.limits import limits
from support.servers import directory_as_store

from bertdata import BertdataError, Loader, export, finish
from bertdata.remote.copies import pull, push

SMALL = {"shard_size": 900, "validation": 0.2, "workers": 1}
"""Of two threads each may rename what the other does not name."""
DOCUMENTS = [[10, 11, 12, 3], [13, 3], [14, 15, 16, 17, 18, 19, 20, 3], [], [21, 3]]


class Writer(NamedTuple):
    """run: (given, out) → writes below out. last: the name that makes it visible. before: makes what is there."""

    name: str
    run: object
    last: str
    before: object = lambda given, out: None
    calls: int = 10  # that fail, about


@pytest.fixture
def given(tmp_path, vocab, dataset, bert_run):
    text, prefix = put(tmp_path / "in" / "text", make_text(4, seed=1)), tmp_path / "in" / "ids"
    for ending, content in zip((".bin", ".idx"), ids.megatron([[each] for each in DOCUMENTS], "uint16"), strict=True):
        prefix.with_suffix(ending).write_bytes(content)
    rows = write_labelled(tmp_path / "in" / "rows.tsv")
    no_cache = patch.dict(os.environ, BERTDATA_CACHE=str(text / "no"))  # whose failures are not errors
    with directory_as_store(tmp_path), limits(threads_of_copies=1), no_cache:
        push(dataset.path, "s3://a/shards")
        model = bert_run / "step-00000002"
        yield SimpleNamespace(text=text, ids=prefix, vocab=vocab, dataset=dataset, model=model, rows=rows)


def building(**more):
    return lambda given, out: build(given.text, out, tokenizer=given.vocab, **SMALL | more)


def build_with_tables(given, out):
    with limits(most_listed=1):
        building()(given, out)


def build_parts(given, out):
    for part in ((1, 2), (0, 2)):
        building(part=part)(given, out)
    finish(out)


def import_megatron(given, out):
    import_ids(given.ids, out, tokenizer=given.vocab, format="megatron", validation=0, shard_size=15)


def index(given, out):
    with patch.dict(os.environ, BERTDATA_CACHE=str(out / "cache")):
        Loader(given.dataset, length=32, samples="packed")


def command(name, last, arguments, calls=3):
    """A command of bertrain that writes to out/out.tsv, a file or a directory. Its error is raised as it was."""

    def run(given, out):
        done = invoke("bertrain", name, *arguments(given), "--out", out / "out.tsv")
        error = done.exception
        while error and not isinstance(error, BertdataError | OSError | KeyboardInterrupt):
            error = error.__context__
        if done.exit_code:
            assert isinstance(error, KeyboardInterrupt) == (done.exit_code == 130), done.output
            raise error

    return Writer(name, run, last, calls=calls)


ANSWERS = ["--max-samples", 9, "--length", 32, "--top-k", 4, "--unit-samples", 4]
WRITERS = [
    Writer("build", building(), "manifest.json"),
    Writer("build, tables of shards", build_with_tables, "manifest.json"),
    Writer("build, in place of another", building(overwrite=True), "manifest.json", building(test=0.3)),
    Writer("build, in parts", build_parts, "manifest.json"),
    Writer("import", import_megatron, "manifest.json"),
    Writer("export", lambda given, out: export(given.dataset, out), ".parquet"),
    Writer("train-tokenizer", lambda given, out: train_tokenizer(given.text, out, vocab_size=120), "tokenizer.json"),
    Writer("push", lambda given, out: push(given.dataset.path, f"s3://{out.name}/x"), "manifest.json"),
    Writer("pull", lambda given, out: pull("s3://a/shards", out), "manifest.json"),
    Writer("index", index, ".json", calls=20),
    command("finetune", "result.json", lambda given: tuning(given.model, given.rows, "x", "--seeds", 2)),
    command("teacher", "cache.json", lambda given: ["--model", given.model, "--data", given.dataset.path, *ANSWERS]),
    command("augment", "out.tsv", lambda given: ["--checkpoint", given.model, "--train", given.rows], calls=2),
    command("merge", "out.tsv", lambda given: [given.model, given.model.with_name("step-00000001")]),
    command("extract", "out.tsv", lambda given: ["--checkpoint", given.model, "--layers", 1]),
    command("transplant", "out.tsv", lambda given: ["--checkpoint", given.model, "--tokenizer", given.vocab]),
]
every_writer = pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.name)


@every_writer
def test_a_name_is_visible_after_what_it_names_is_on_disk(writer, given, tmp_path):
    with recorded(tmp_path) as disk:
        writer.before(given, tmp_path / "new" / "out")
        writer.run(given, tmp_path / "new" / "out")
    assert disk.renames[-1].name.endswith(writer.last)
    assert not disk.pending or writer.name in ("index", "augment")  # whose files are made again, or may come back


ERRORS = [KeyboardInterrupt, lambda: OSError(errno.EIO, os.strerror(errno.EIO))]
SIZES = [50, 500, 1500]  # bytes of a file on a full disk


@every_writer
def test_a_writer_that_fails_publishes_nothing_and_the_next_run_continues(writer, given, tmp_path):
    """Of a full disk its error names the file."""
    for name in ("whole", "counted"):  # in the first one kernels are compiled
        writer.before(given, tmp_path / name)
        with failing(-1, None) as calls:
            writer.run(given, tmp_path / name)
    expected = visible(tmp_path / "whole")
    assert len(calls) > 3
    numbers = enumerate(range(0, len(calls), 1 + len(calls) // writer.calls))
    ways = [(failing(number, ERRORS[turn % 2]), None) for turn, number in numbers]
    sizes = [size for size in SIZES if size < max(map(len, expected.values()))]
    for turn, (fails, says) in enumerate([*ways, *((full_disk(size), f"{tmp_path}/out") for size in sizes)]):
        out = tmp_path / f"out{turn}"
        writer.before(given, out)
        old = visible(out) if out.exists() else {}
        with fails, pytest.raises((KeyboardInterrupt, OSError, BertdataError), match=says):
            writer.run(given, out)
        found = visible(out)
        if any(part.endswith(writer.last) for name in found for part in name.split("/")):
            assert found == expected or found.items() >= old.items() > set(), turn  # the new files, or still the old
        try:
            writer.run(given, out)
        except BertdataError as error:  # it had ended
            assert error.kind == "out-exists"  # noqa: PT017
        assert visible(out) == expected, turn
