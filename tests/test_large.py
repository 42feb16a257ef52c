"""Datasets with many shards: their manifest has two arrays instead of a list, and a shard is opened when it is used."""

import json
import os
import pickle
import shutil
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.commands import refuses
from support.data import assert_same, build, faults_of
from support.disk import flip, published
from support.limits import limits

import bertdata
from bertdata import BertdataError, Loader
from bertdata.format import manifest
from bertdata.format.arrays import npy_header
from bertdata.format.records import read_record, write_record
from bertdata.format.shards import Split
from bertdata.remote.copies import pull, push

SMALL = {"shard_size": 8000, "validation": 0.2, "test": 0.1, "sentences": "line"}


@pytest.fixture(scope="module")
def kept(once, corpus, vocab):
    """The shared dataset with tables."""

    def make(folder):
        with limits(most_listed=3):
            build(corpus, folder / "out", tokenizer=vocab, **SMALL)

    return bertdata.open(once("large", make) / "out")


@pytest.fixture
def large(kept, tmp_path):
    shutil.copytree(kept.path, tmp_path / "large")
    return bertdata.open(tmp_path / "large")


def reseal(directory, change):
    """Writes a changed manifest with a right checksum."""
    record = read_record(directory / "manifest.json", versions=manifest.VERSIONS)
    change(record)
    write_record(directory / "manifest.json", record)


def put_table(directory, name, content):
    (directory / name).write_bytes(content)
    reseal(directory, lambda record: record["tables"].__setitem__(name, sha256(content).hexdigest()))


def test_the_tables_say_what_the_list_says(dataset, kept):
    assert json.loads((kept.path / "manifest.json").read_bytes())["format_version"] == 2
    assert json.loads((dataset.path / "manifest.json").read_bytes())["format_version"] == 1
    assert kept.dataset_id == dataset.dataset_id == kept.manifest.computed_id()
    assert len(kept.splits["train"]) > 2
    for name, split in dataset.splits.items():
        assert tuple(kept.splits[name]) == tuple(split)
        assert kept.splits[name][1:3] == split[1:3]
        assert kept.splits[name][-1] == split[-1]
        assert kept.splits[name].num_tokens == split.num_tokens == sum(each.num_tokens for each in split)
        assert kept.splits[name].num_documents == split.num_documents
        assert [kept.splits[name].stores(array) for array in ("tokens", "words")] == [True, False]
    numbers = np.load(kept.path / "shards.npy").reshape(-1, 4)
    every = [each for split in dataset.splits.values() for each in split]
    assert numbers[:, 1:].tolist() == [[each.num_documents, each.num_tokens, each.num_sentences] for each in every]
    digests = np.load(kept.path / "digests.npy").reshape(len(every), 3, 32)
    assert digests[3, 0].tobytes().hex() == every[3].arrays["documents"]["sha256"]
    others = {path.name for path in kept.path.iterdir()} - {"shards.npy", "digests.npy"}
    assert others == {path.name for path in dataset.path.iterdir()}
    assert faults_of(kept.path) == []


def test_a_dataset_that_is_replaced_while_it_is_read_is_never_mixed(large, corpus, vocab):
    pickled = pickle.dumps(Loader(large, length=20))
    with limits(most_listed=3):
        build(corpus, large.path, tokenizer=vocab, overwrite=True, **SMALL | {"test": 0.3})
    reads = [lambda: Loader(large, length=20).read(np.arange(999)), lambda: large.document(0)]
    for read in (*reads, lambda: pickle.loads(pickled)):
        with refuses("replaced"):
            read()
    assert faults_of(large.path) == []
    build(corpus, large.path, tokenizer=vocab, overwrite=True, **SMALL)
    assert not (large.path / "shards.npy").exists()
    assert faults_of(large.path) == []


def test_batches_in_blocks_are_those_of_the_listed_dataset(dataset, kept, tmp_path, monkeypatch):
    """Also where the path is relative to a directory that the process has left."""
    monkeypatch.chdir(kept.path.parent)
    opened = bertdata.open(kept.path.name)
    monkeypatch.chdir(tmp_path)
    options = {"length": 40, "samples": "packed", "shuffle": "blocks", "global_batch_size": 5}
    ours, theirs = Loader(opened, **options), Loader(dataset, **options)
    for _ in range(2 * theirs.num_samples // 5):
        assert_same(next(ours), next(theirs))
    ours.load_state_dict(theirs.state_dict())


def test_documents_and_counts_are_those_of_the_listed_dataset(dataset, kept):
    assert [each.tolist() for each in kept] == [each.tolist() for each in dataset]
    assert kept[-1].tolist() == dataset[-1].tolist()
    for sample in (100, 10_000_000):
        ours, theirs = (each.token_counts("train", sample_tokens=sample) for each in (kept, dataset))
        assert ours.tolist() == theirs.tolist()
    for name in SORTED:
        shard_name = kept.splits["train"][2].name
        assert np.array_equal(kept.array(shard_name, name), dataset.array(shard_name, name))
    for each, *names in ((kept, "train-99999", "tokens"), (kept, "one", "tokens"), (dataset, "train-00000", "empty")):
        with refuses("unknown", "name", given=names[1]):
            each.array(*names)
    assert pickle.loads(pickle.dumps(kept)).dataset_id == kept.dataset_id  # noqa: S301


def test_only_what_is_used_is_opened(large):
    def opened():
        maps = Path("/proc/self/maps").read_text().splitlines()
        return {Path(line.split()[-1]).name for line in maps if f"{large.path}/train" in line}

    loader = Loader(large, length=12, global_batch_size=2)
    assert opened() == set()
    next(loader)
    assert 1 <= len(opened()) <= 5
    for _ in range(loader.num_samples):
        next(loader)
    assert opened() == {f"{each.name}.tokens.npy" for each in large.splits["train"]}


def test_a_shard_that_is_missing_or_wrong_is_a_sentence_when_it_is_used(large):
    name = large.splits["train"][2].name
    loader = Loader(large, length=20, masking=None)
    for break_it in (lambda path: os.truncate(path, 150), os.unlink):
        break_it(large.path / f"{name}.tokens.npy")
        with refuses("damaged", says=name):
            loader.read(np.arange(loader.num_samples))
        assert any(name in fault for fault in faults_of(large.path))


def test_it_comes_back_from_a_bucket_as_it_went(bucket, large, tmp_path):
    assert push(large.path, f"{bucket.url}/large") == pull(f"{bucket.url}/large", tmp_path / "copy") == large.dataset_id
    assert published(large.path) == published(tmp_path / "copy")
    bucket.put("large/shards.npy", b"no")
    with refuses("damaged", says="large/shards.npy"):
        pull(f"{bucket.url}/large", tmp_path / "other")


def test_a_dataset_with_the_id_of_another_is_not_taken_for_it(bucket, large, cache, tmp_path):
    """A copy in the cache and an index have the id in their names."""
    push(large.path, f"{bucket.url}/large")
    reseal(large.path, lambda record: record.__setitem__("dataset_id", "0" * 64))
    bucket.put("large/manifest.json", (large.path / "manifest.json").read_bytes())
    for take in (
        lambda: push(large.path, f"{bucket.url}/b"),
        lambda: pull(f"{bucket.url}/large", tmp_path / "b"),
        lambda: Loader(bertdata.open(large.path), length=16, samples="packed"),
    ):
        with refuses("damaged"):
            take()
    assert not [*cache.glob("*.json")]


def test_damaged_tables_are_found(large):
    for name in ("shards.npy", "digests.npy"):
        content = (large.path / name).read_bytes()
        flip(large.path / name, -1)
        if name == "digests.npy":  # which opening does not read
            assert any(f"{large.path / name} is damaged" in fault for fault in faults_of(large.path))
        else:
            with refuses("damaged", says=name):
                bertdata.open(large.path)
        (large.path / name).unlink()
        with refuses("damaged", says=name):
            bertdata.open(large.path).splits["train"][0]  # noqa: B018
        (large.path / name).write_bytes(content)
    flip(large.path / "digests.npy", -1)
    put_table(large.path, "digests.npy", (large.path / "digests.npy").read_bytes())
    assert any("dataset_id" in fault for fault in faults_of(large.path))


SORTED = ["documents", "sentences", "tokens"]
WRONG = {
    "arrays": [SORTED[:2], SORTED[::-1], ["../x", *SORTED], 3],
    "tables": [{}, None],
    "splits": [*({"train": n} for n in (3, -1, True, 1 << 80, "3")), {"other": 3}, []],
    "token_dtype": ["<u8"],
    "tokenizer": [["a"], "abc", {"tokenizer.json": 5}],
}


def test_a_manifest_that_breaks_a_rule_is_refused(large):
    record = read_record(large.path / "manifest.json", versions=manifest.VERSIONS)
    assert record["arrays"] == SORTED
    for name, value in ((name, value) for name, values in WRONG.items() for value in values):
        reseal(large.path, lambda changed, more=record | {name: value}: changed.update(more))
        with refuses("damaged"):
            bertdata.open(large.path)


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 3), st.sampled_from([0, 1, 2**61, 2**62, 2**64 - 1]))))
def test_tables_of_any_numbers_give_a_sentence_or_a_dataset(kept, tmp_path_factory, changes):
    folder = tmp_path_factory.mktemp("any")
    numbers = np.load(kept.path / "shards.npy")
    for row, column, value in changes:
        numbers[4 * (row % (numbers.size // 4)) + column] = value
    for name in ("manifest.json", "digests.npy", "tokenizer.json"):
        shutil.copy(kept.path / name, folder)
    put_table(folder, "shards.npy", npy_header("<u8", numbers.size) + numbers.tobytes())
    try:
        read = manifest.read_manifest(folder)
    except BertdataError:
        return
    for split in read.splits.values():
        units = [int(each.name.rpartition("-")[2]) for each in split]
        assert units == sorted(set(units))
        again = Split.joined([Split.from_shards([each]) for each in split])
        assert again.num_tokens == split.num_tokens == sum(each.num_tokens for each in split)
