"""What docs/reliability.md says and no other file tests: what a disk, a power supply, a stranger or another process can
do to a build, a dataset or a run. tools/survive.py does the same at length."""

import errno
import gzip
import json
import os
import resource
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.commands import python, refuses
from support.data import build, built, faults_of, make_text, write_dataset
from support.disk import full_at, full_disk, recorded, syncing
from support.runs import at_step, entries, losses, train
from support.sources import counting_reads

import bertdata
from bertdata.format.records import read_record, write_record
from bertdata.sources.inputs import local
from bertdata.sources.tables import TableFile

ROOT = Path(bertdata.__file__).parents[1]
SMALL = {"shard_size": 900, "validation": 0.2}


@pytest.fixture
def small(tmp_path, vocab):
    """A text, and the dataset made of it."""
    return built(tmp_path, make_text(6, seed=1), tokenizer=vocab, sentences="line", **SMALL).path


# ------------------------------------------------------------------------------------------------------ loss of power


def test_checkpoints_and_the_log_up_to_them_survive_a_loss_of_power(dataset, bert_run, tmp_path):
    """Of adapters, which are in a directory of their own in each checkpoint."""
    log, synced, steps = tmp_path / "run" / "log.jsonl", [b""], []

    def note(path, step):
        if path == log:
            synced.append(log.read_bytes())
        elif step:
            steps.append(step)
            assert f'{{"step": {step}, "loss"' in synced[-1].decode()

    with recorded(tmp_path) as disk, syncing(note):
        train(dataset.path, tmp_path / "run", steps=2, keep=1, init=str(bert_run), lora="r=2,alpha=4")
    assert steps == [1, 2]
    assert not disk.pending
    files = [log, *(tmp_path / "run" / "step-00000002").rglob("*")]
    assert any(path.parent.name == "adapter" for path in files)
    assert all(map(disk.holds, files))


# ------------------------------------------------------------------------------------------------------ disks that fail


def test_more_shards_than_open_files(tmp_path, vocab):
    """A memory map keeps a descriptor; the soft limit is raised when it is reached, if the hard one allows it."""
    path = built(tmp_path, "the stone\n" * 60, tokenizer=vocab, documents="line", shard_size=10).path
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = sorted({*range(10_000)} - {*map(int, os.listdir("/proc/self/fd"))})[20]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
        with patch.object(resource, "getrlimit", lambda kind: (soft, soft)), refuses("too-many-files"):
            bertdata.open(path)
        assert len(bertdata.open(path)) == 60
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_full_disk_ends_no_training_that_has_steps_to_go(dataset, finished, tmp_path, capsys):
    with full_at(3, 4):
        log = train(dataset.path, tmp_path / "run", steps=6)
    assert losses(log) == losses(entries(finished))
    assert os.strerror(errno.ENOSPC) in capsys.readouterr().out
    names = [path.name for path in sorted((tmp_path / "run").glob("*step*"))]
    assert names == [f"step-{n:08d}" for n in (1, 2, 5, 6)]


def test_a_log_on_a_full_disk_is_written_when_the_disk_has_space(dataset, finished, tmp_path, monkeypatch, capsys):
    """The disk is full for three steps; two entries have more than 300 bytes."""
    disk = full_disk(300)
    at_step(monkeypatch, "next_batch", 2, disk.__enter__)
    at_step(monkeypatch, "next_batch", 5, lambda: disk.__exit__(None, None, None))
    train(dataset.path, tmp_path / "run", steps=6, save_every=100)
    assert losses(entries(tmp_path / "run")) == losses(entries(finished))
    assert capsys.readouterr().out.count("log.jsonl") == 1  # one warning


# ---------------------------------------------------------------------------------------------------- what strangers do


def test_links_and_pipes_in_a_dataset_are_refused(small, tmp_path):
    def is_refused(path):
        """Opening the dataset, or, as that does not read all files, verifying it, names what it does not follow."""
        try:
            bertdata.open(small)
            return str(path) in faults_of(small)[0]
        except bertdata.BertdataError as error:
            return error.kind == "wrong-file-type" and error.given == path

    for path in [*sorted(path for path in small.rglob("*") if path.is_file()), small / "origins"]:
        kept = tmp_path / "elsewhere"
        os.replace(path, kept)
        for put_there in (partial(path.symlink_to, kept), partial(os.mkfifo, path))[: 1 + kept.is_file()]:
            put_there()
            assert is_refused(path)
            path.unlink()
        os.replace(kept, path)
    assert faults_of(small) == []


def test_large_records_are_refused(tmp_path, limit):
    path = tmp_path / "record.json"
    write_record(path, {"format_version": 1})
    limit(record_bytes=path.stat().st_size)
    assert read_record(path) == {"format_version": 1}
    path.write_bytes(path.read_bytes() + b" ")
    with refuses("damaged"):
        read_record(path)


def test_a_vocabulary_that_would_take_all_memory_is_refused(tmp_path):
    special = bertdata.SpecialTokens(vocab_size=1 << 32, pad=0, unk=1, cls=2, sep=3, mask=4, special_ids=(0, 1, 2, 3))
    out = write_dataset(tmp_path / "shards", [([5, 3], [2], None)], special=special, dtype="<u4")
    with refuses("damaged"):
        bertdata.open(out)


def test_a_file_that_unpacks_to_no_end_is_one_sentence_in_bounded_memory(tmp_path, vocab, limit):
    limit(longest_document=4 << 20)
    path = tmp_path / "bomb.txt.gz"
    with gzip.open(path, "wb", 1) as file:
        file.write(b"the stone\n\n" * 10)
        for _ in range(16):
            file.write(b"a" * (1 << 20))
    for ends in ("blank", "line", "file"):
        with counting_reads() as sizes, refuses("too-large", "inputs"):
            build([path], tmp_path / "out", tokenizer=vocab, documents=ends)
        assert sum(sizes) < 3 * (4 << 20)
        assert not (tmp_path / "out").exists()
    (tmp_path / "text").write_bytes(b"stone" * 800_000)  # a longest document
    assert build([tmp_path / "text"], tmp_path / "out", tokenizer=vocab, validation=0).dataset.num_documents == 1


@pytest.mark.parametrize("is_stored_as_strings", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_text_that_is_stored_once_for_many_rows_is_read_in_bounded_memory(tmp_path, is_stored_as_strings):
    """The file has some hundred bytes, and the rows have 500 MB."""
    rows = pa.DictionaryArray.from_arrays(np.zeros(500, np.int32), ["the stone " * 100_000])
    table = pa.table({"text": rows.dictionary_decode() if is_stored_as_strings else rows})
    pq.write_table(table, tmp_path / "a", compression="zstd")
    assert (tmp_path / "a").stat().st_size < 3000
    file = TableFile(local(tmp_path / "a"), "parquet", bertdata.TextFormat())
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        sizes = [block.decode().num_bytes for block in file.blocks(0, lambda unit: True)]
    finally:
        pa.set_memory_pool(before)
    assert sum(sizes) == 500 * 1_000_001
    assert pool.max_memory() < 50_000_000


def test_published_files_follow_the_umask(dataset, tmp_path, corpus, vocab):
    before = os.umask(0o027)
    try:
        build([corpus], tmp_path / "out", tokenizer=vocab)
        train(dataset.path, tmp_path / "run", steps=1)
    finally:
        os.umask(before)
    for root in ("out", "run"):
        for path in (tmp_path / root).rglob("*"):
            assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path


# -------------------------------------------------------------------------------------------------------- beside others


def test_a_publication_that_was_stopped_is_said_after_a_while(small, limit):
    limit(wait_for_manifest_s=0.1)
    (small / ".build").mkdir()
    os.replace(small / "manifest.json", small / ".build" / "replaced.json")
    with refuses("busy"):
        bertdata.open(small)


PROGRAM = """
import sys, tempfile
def refused(*arguments, **options): raise PermissionError(13, "Permission denied")
if sys.argv[2] == "read-only": tempfile.TemporaryFile = refused  # how numba looks whether it may write
import bertdata
loader = bertdata.Loader(bertdata.open(sys.argv[1]), length=24, global_batch_size=8, masking=None)
print(next(loader).input_ids.tolist())
"""


@pytest.mark.slow
def test_processes_that_compile_at_once_agree_also_where_nothing_can_be_written(small, tmp_path):
    loader = bertdata.Loader(bertdata.open(small), length=24, global_batch_size=8, masking=None)
    expected = str(next(loader).input_ids.tolist())
    plain = {"HOME": "/nonexistent", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    for cache, count, disk in ((tmp_path / "cache", 4, "empty"), ("", 1, "read-only")):
        environment = plain | {"NUMBA_CACHE_DIR": str(cache)}
        with ThreadPoolExecutor(count) as pool:
            jobs = [pool.submit(python, "-c", PROGRAM, small, disk, environment=environment) for _ in range(count)]
        assert {job.result().strip() for job in jobs} == {expected}


@pytest.mark.slow
def test_names_that_are_not_ascii_in_a_plain_locale_without_a_terminal_or_a_home(tmp_path, vocab):
    folder = tmp_path / "Häuser und 水"
    folder.mkdir()
    (folder / "ein Text.txt").write_text(make_text(20), encoding="utf-8")
    out, plain = folder / "die Scherben", {"LANG": "C", "LC_ALL": "C", "HOME": "/nonexistent"}
    build_it = ["build", folder / "ein Text.txt", "--out", out, "--tokenizer", vocab, "--validation", 0]
    for arguments in (build_it, ["inspect", out], ["verify", out], ["show", out]):
        python("-m", "bertdata", *arguments, environment=plain, stdin=subprocess.DEVNULL)
    train(out, folder / "ein Lauf", steps=1)
    assert json.loads((folder / "ein Lauf" / "run.json").read_text())["config"]["data"] == [str(out)]
