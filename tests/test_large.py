"""Datasets with many shards: their manifest has two arrays instead of a list, and a shard is opened when it is used."""

import json
import os
import pickle
import shutil
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.commands import refuses
from support.data import assert_same, build
from support.disk import flip, published
from support.limits import limits

import bertdata
from bertdata import Loader
from bertdata.errors import DatasetError
from bertdata.files import Stage
from bertdata.format import manifest, shards
from bertdata.format.arrays import npy_header
from bertdata.format.manifest import read_manifest
from bertdata.format.records import read_record, write_record
from bertdata.format.shards import Split
from bertdata.format.verify import verify
from bertdata.remote.copies import pull, push
from bertrain.commands.trace import parts_of

SMALL = {"shard_size": 4000, "validation": 0.2, "test": 0.1, "sentences": "line", "words": "support.data:in_pairs"}


@pytest.fixture(scope="module")
def listed(once, corpus, vocab):
    """A dataset whose manifest lists its shards."""
    folder = once("listed", lambda folder: build(corpus, folder / "out", tokenizer=vocab, **SMALL))
    return bertdata.open(folder / "out")


@pytest.fixture(scope="module")
def kept(once, corpus, vocab):
    """The same dataset with tables."""

    def make(folder):
        with limits(most_listed=5):
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


def test_the_tables_say_what_the_list_says(listed, kept):
    assert json.loads((kept.path / "manifest.json").read_bytes())["format_version"] == 2
    assert json.loads((listed.path / "manifest.json").read_bytes())["format_version"] == 1
    assert kept.dataset_id == listed.dataset_id == kept.manifest.computed_id()
    assert len(kept.splits["train"]) > 4
    for name, split in listed.splits.items():
        assert tuple(kept.splits[name]) == tuple(split)
        assert kept.splits[name][1:3] == split[1:3]
        assert kept.splits[name][-1] == split[-1]
        assert kept.splits[name].num_tokens == split.num_tokens == sum(each.num_tokens for each in split)
        assert kept.splits[name].num_documents == split.num_documents
        assert [kept.splits[name].stores(array) for array in ("tokens", "words", "x")] == [True, True, False]
    numbers = np.load(kept.path / "shards.npy").reshape(-1, 4)
    every = [each for split in listed.splits.values() for each in split]
    assert numbers[:, 1:].tolist() == [[each.num_documents, each.num_tokens, each.num_sentences] for each in every]
    digests = np.load(kept.path / "digests.npy").reshape(len(every), 4, 32)
    assert digests[3, 0].tobytes().hex() == every[3].arrays["documents"]["sha256"]
    others = {path.name for path in kept.path.iterdir()} - {"shards.npy", "digests.npy"}
    assert others == {path.name for path in listed.path.iterdir()}
    assert verify(kept.path) == []


def test_tables_hold_shards_of_more_than_2_31_tokens(kept, tmp_path):
    large = replace(kept.splits["train"][0], num_documents=3 << 40, num_tokens=5 << 40, num_sentences=4 << 40)
    with Stage(tmp_path) as stage:
        record = shards.write_tables(stage, {"train": Split.from_shards([large])}) | {"token_dtype": "<u2"}
        stage.publish()
    (shard,) = shards.read_tables(record, lambda name, dtype, length: np.load(tmp_path / name))["train"]
    assert (shard.num_documents, shard.num_tokens, shard.num_sentences) == (3 << 40, 5 << 40, 4 << 40)
    split = Split.joined([Split.from_shards([large])] * 2)
    assert (split.num_documents, split.num_tokens) == (6 << 40, 10 << 40)


def test_a_dataset_that_is_replaced_while_it_is_read_is_never_mixed(large, corpus, vocab):
    with limits(most_listed=5):
        build(corpus, large.path, tokenizer=vocab, overwrite=True, **SMALL | {"test": 0.3})
    for read in (lambda: Loader(large, length=20).read(np.arange(999)), lambda: large.document(0)):
        with refuses("replaced"):
            read()
    assert verify(large.path) == []
    build(corpus, large.path, tokenizer=vocab, overwrite=True, **SMALL)
    assert not (large.path / "shards.npy").exists()
    assert verify(large.path) == []


@pytest.mark.parametrize(
    ("samples", "shuffle"), [("windows", "full"), ("documents", "blocks"), ("packed", "full"), ("pairs", "blocks")]
)
def test_batches_are_those_of_the_listed_dataset(listed, kept, tmp_path, monkeypatch, samples, shuffle):
    """Also where the path is relative to a directory that the process has left."""
    monkeypatch.chdir(kept.path.parent)
    opened = bertdata.open(kept.path.name)
    monkeypatch.chdir(tmp_path)
    options = {
        "length": 40,
        "samples": samples,
        "shuffle": shuffle,
        "global_batch_size": 5,
        "masking": bertdata.Masking(policy="whole_word"),
    }
    ours, theirs = Loader(opened, **options), Loader(listed, **options)
    for _ in range(2 * theirs.num_samples // 5):
        assert_same(next(ours), next(theirs))
    again = Loader(bertdata.open(kept.path), **options)
    again.load_state_dict(theirs.state_dict())
    assert np.array_equal(next(again).input_ids, next(theirs).input_ids)


def test_documents_and_counts_are_those_of_the_listed_dataset(listed, kept):
    assert [each.tolist() for each in kept] == [each.tolist() for each in listed]
    assert kept[-1].tolist() == listed[-1].tolist()
    for sample in (100, 10_000_000):
        ours, theirs = (each.token_counts("train", sample_tokens=sample) for each in (kept, listed))
        assert ours.tolist() == theirs.tolist()
    for name in ("tokens", "documents", "sentences", "words"):
        shard_name = kept.splits["train"][4].name
        assert np.array_equal(kept.array(shard_name, name), listed.array(shard_name, name))
    for dataset, *names in ((kept, "train-99999", "tokens"), (kept, "one", "tokens"), (listed, "train-00000", "empty")):
        with refuses("unknown", "name", given=names[1]):
            dataset.array(*names)
    loader = Loader(kept, length=30)
    assert [*parts_of(loader, np.arange(9))] == [*parts_of(Loader(listed, length=30), np.arange(9))]
    assert pickle.loads(pickle.dumps(kept)).dataset_id == kept.dataset_id  # noqa: S301


def test_only_what_is_used_is_opened(kept, monkeypatch):
    opened, real = [], shards.open_array
    monkeypatch.setattr(shards, "open_array", lambda path, *more: opened.append(path.name) or real(path, *more))
    dataset = bertdata.open(kept.path)
    assert opened == []
    loader = Loader(dataset, length=12, global_batch_size=2)
    next(loader)
    assert 1 <= len(opened) <= 5
    for _ in range(2 * loader.num_samples // 2):
        next(loader)
    assert sorted(opened) == sorted(f"{each.name}.tokens.npy" for each in kept.splits["train"])  # each once


def test_a_shard_that_is_missing_or_wrong_is_a_sentence_when_it_is_used(large):
    name = large.splits["train"][4].name
    os.truncate(large.path / f"{name}.tokens.npy", 150)
    dataset = bertdata.open(large.path)
    loader = Loader(dataset, length=20, masking=None)
    with refuses("damaged", says=name):
        loader.read(np.arange(loader.num_samples))
    (large.path / f"{name}.tokens.npy").unlink()
    with refuses("damaged", says=name):
        loader.read(np.arange(loader.num_samples))
    assert any(name in fault for fault in verify(large.path))


def test_it_comes_back_from_a_bucket_as_it_went(bucket, large, tmp_path):
    assert push(large.path, f"{bucket.url}/large") == large.dataset_id
    assert pull(f"{bucket.url}/large", tmp_path / "copy") == large.dataset_id
    assert verify(tmp_path / "copy") == []
    assert published(large.path) == published(tmp_path / "copy")
    bucket.put("large/shards.npy", b"no")
    with refuses("damaged", says="large/shards.npy"):
        pull(f"{bucket.url}/large", tmp_path / "other")
    # a dataset with the id of another is not taken for it: a copy in the cache has the name of the id
    bucket.put("large/shards.npy", (large.path / "shards.npy").read_bytes())
    reseal(large.path, lambda record: record.__setitem__("dataset_id", "0" * 64))
    with refuses("damaged"):
        push(large.path, f"{bucket.url}/other")
    bucket.put("large/manifest.json", (large.path / "manifest.json").read_bytes())
    with refuses("damaged"):
        pull(f"{bucket.url}/large", tmp_path / "third")


def test_damaged_tables_are_found(large):
    for name, opens in (("shards.npy", False), ("digests.npy", True)):
        content = (large.path / name).read_bytes()
        flip(large.path / name, -1)
        if opens:
            assert any(f"{large.path / name} is damaged" in fault for fault in verify(large.path))
        else:
            with refuses("damaged", says=name):
                bertdata.open(large.path)
        (large.path / name).unlink()
        with refuses("damaged", says=name):
            bertdata.open(large.path).splits["train"][0]  # noqa: B018
        (large.path / name).write_bytes(content)
    digests = bytearray((large.path / "digests.npy").read_bytes())
    digests[-1] ^= 1
    put_table(large.path, "digests.npy", bytes(digests))
    assert any("dataset_id" in fault for fault in verify(large.path))


WRONG = {
    "arrays": [
        ["documents", "sentences", "words"],
        ["tokens", "documents", "sentences", "words"],
        ["../x", "documents", "sentences", "tokens", "words"],
        3,
    ],
    "tables": [{}, None],
    "splits": [*({"train": n} for n in (3, -1, True, 1 << 80, "3")), {"other": 3}, []],
    "token_dtype": ["<u8"],
    "tokenizer": [["a"], "abc", {"tokenizer.json": 5}],
}


def test_an_id_of_another_dataset_gives_its_bearer_no_index(large, cache):
    """Opening takes the id as it is stated, and the index of a dataset has it in its name."""
    reseal(large.path, lambda record: record.update(dataset_id="0" * 64))
    with refuses("damaged"):
        Loader(bertdata.open(large.path), length=16, samples="packed")
    assert list(cache.iterdir()) == []


def test_a_manifest_that_breaks_a_rule_is_refused(large):
    record = read_record(large.path / "manifest.json", versions=manifest.VERSIONS)
    assert record["arrays"] == ["documents", "sentences", "tokens", "words"]
    for name, values in WRONG.items():
        for value in values:
            reseal(large.path, lambda changed, more=record | {name: value}: changed.update(more))
            with pytest.raises(DatasetError):
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
        read = read_manifest(folder)
    except DatasetError:
        return
    for split in read.splits.values():
        units = [int(each.name.rpartition("-")[2]) for each in split]
        assert units == sorted(set(units))
        assert split.num_tokens == sum(each.num_tokens for each in split)
