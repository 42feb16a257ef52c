"""WRITERS: what bertdata writes × a call that fails, a full disk and a loss of power.

A writer that fails publishes nothing, and the same call then ends in the same bytes. tools/crash.py fails every call.
"""

import errno
import os
from contextlib import ExitStack
from typing import NamedTuple
from unittest.mock import patch

import pytest
from reference import ids
from support.data import build, import_ids, make_text, train_tokenizer
from support.disk import contents, failing, recorded
from support.limits import limits
from support.servers import Store

from bertdata import Loader
from bertdata.errors import BuildError
from bertdata.remote import stores
from bertdata.remote.copies import pull, push
from bertdata.write import export, finish

SMALL = {
    "shard_size": 900,
    "validation": 0.2,
    "workers": 1,
}  # of two threads each may rename what the other does not name
DOCUMENTS = [[10, 11, 12, 3], [13, 3], [14, 15, 16, 17, 18, 19, 20, 3], [], [21, 3]]


class Writer(NamedTuple):
    """run: (given, out) → writes below out. last: the name that makes it visible. before: makes what is there."""

    name: str
    run: object
    last: str
    before: object = lambda given, out: None


class Given(NamedTuple):
    text: object
    ids: object
    vocab: str
    dataset: object


@pytest.fixture
def given(tmp_path, vocab, dataset):
    (tmp_path / "in").mkdir()
    text, prefix = tmp_path / "in" / "text", tmp_path / "in" / "ids"
    text.write_text(make_text(4, seed=1), encoding="utf-8")
    for ending, content in zip((".bin", ".idx"), ids.megatron([[each] for each in DOCUMENTS], "uint16"), strict=True):
        prefix.with_suffix(ending).write_bytes(content)
    with ExitStack() as stack:
        for name in ("file_at", "files_below", "write"):
            stack.enter_context(patch.object(stores, name, getattr(Store(tmp_path), name)))
        stack.enter_context(limits(threads_of_copies=1))
        stack.enter_context(patch("bertdata.tokenize.source._keep"))  # whose failures are no errors
        push(dataset.path, "s3://a/shards")
        yield Given(text, prefix, vocab, dataset)


def build_with_tables(given, out):
    with limits(most_listed=1):
        build(given.text, out, tokenizer=given.vocab, **SMALL)


def build_another(given, out):
    build(given.text, out, tokenizer=given.vocab, test=0.3, **SMALL)


def build_in_place(given, out):
    build(given.text, out, tokenizer=given.vocab, overwrite=True, **SMALL)


def build_parts(given, out):
    for part in ((1, 2), (0, 2)):
        build(given.text, out, tokenizer=given.vocab, part=part, **SMALL)
    finish(out)


def import_megatron(given, out):
    import_ids(given.ids, out, tokenizer=given.vocab, format="megatron", validation=0, shard_size=15)


def index(given, out):
    with patch.dict(os.environ, BERTDATA_CACHE=str(out / "cache")):
        Loader(given.dataset, length=32, samples="packed")


WRITERS = [
    Writer("build", lambda given, out: build(given.text, out, tokenizer=given.vocab, **SMALL), "manifest.json"),
    Writer("build, tables of shards", build_with_tables, "manifest.json"),
    Writer("build, in place of another", build_in_place, "manifest.json", build_another),
    Writer("build, in parts", build_parts, "manifest.json"),
    Writer("import", import_megatron, "manifest.json"),
    Writer("export", lambda given, out: export(given.dataset, out), ".parquet"),
    Writer("train-tokenizer", lambda given, out: train_tokenizer(given.text, out, vocab_size=120), "tokenizer.json"),
    Writer("pull", lambda given, out: pull("s3://a/shards", out), "manifest.json"),
    Writer("index", index, ".json"),
]
every_writer = pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.name)


def written(out):
    """Name → bytes of what is visible below a directory, without what an unfinished build has."""
    return {name: content for name, content in contents(out).items() if not name.startswith(".build")}


@every_writer
def test_a_name_is_visible_after_what_it_names_is_on_disk(writer, given, tmp_path):
    with recorded(tmp_path) as disk:
        writer.before(given, tmp_path / "new" / "out")
        writer.run(given, tmp_path / "new" / "out")
    assert disk.renames[-1].name.endswith(writer.last)
    assert not disk.pending or writer.run is index  # which is made again where it is lost


ERRORS = [KeyboardInterrupt, lambda: OSError(errno.EIO, os.strerror(errno.EIO))]


@every_writer
def test_a_call_that_fails_publishes_nothing_and_the_next_run_continues(writer, given, tmp_path):
    for name in ("whole", "counted"):
        writer.before(given, tmp_path / name)
    writer.run(given, tmp_path / "whole")
    with failing(-1, None) as calls:
        writer.run(given, tmp_path / "counted")
    expected = written(tmp_path / "whole")
    assert len(calls) > 3
    for turn, number in enumerate(range(0, len(calls), 1 + len(calls) // 20)):
        out = tmp_path / f"out{number}"
        writer.before(given, out)
        old = written(out) if out.exists() else {}
        with failing(number, ERRORS[turn % 2]), pytest.raises((KeyboardInterrupt, OSError, BuildError)):
            writer.run(given, out)
        found = written(out)
        if any(name.endswith(writer.last) for name in found):  # the new files, or still the old ones
            assert found == expected or found.items() >= old.items() > set(), calls[number]
        try:
            writer.run(given, out)
        except BuildError as error:  # it had ended
            assert error.kind == "out-exists"  # noqa: PT017
        assert written(out) == expected, calls[number]


@every_writer
@pytest.mark.parametrize("num_bytes", [50, 500, 1500])
def test_a_full_disk_is_named_with_the_file_and_the_next_run_continues(writer, given, tmp_path, full_disk, num_bytes):
    writer.before(given, tmp_path / "whole")
    writer.run(given, tmp_path / "whole")
    expected = written(tmp_path / "whole")
    writer.before(given, tmp_path / "out")
    if max(map(len, expected.values())) > num_bytes:
        with full_disk(num_bytes), pytest.raises((OSError, BuildError), match=os.strerror(errno.EFBIG)) as caught:
            writer.run(given, tmp_path / "out")
        named = str(getattr(caught.value, "filename", None) or caught.value)
        assert str(tmp_path / "out") in named
        assert ".tmp" not in named
    writer.run(given, tmp_path / "out")
    assert written(tmp_path / "out") == expected
