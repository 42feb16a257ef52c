"""Ids that others made: none is added, left out or changed."""

import json
import os
import struct
import tempfile
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from reference import ids as reference
from support.commands import refuses, succeeds
from support.data import SPECIALS, build, import_ids, stored
from support.disk import put
from support.limits import limits
from support.sources import FEW

import bertdata
from bertdata.cli import main
from bertdata.format.verify import verify
from bertdata.options import Shares
from bertdata.sources import ids as ids_module
from bertdata.sources.ids import open_ids
from bertdata.sources.inputs import local
from bertdata.tokenize.load import load
from bertdata.write import export
from bertdata.write import kernels as build_kernels
from bertdata.write.exchange import IdsEncoder

SEP, MASK, PAD = 3, 4, 0
SMALL = {"validation": 0, "shard_size": 40}
DOCUMENTS = [[10, 11, 12, SEP], [13, SEP], [14, 15, 16, 17, 18, 19, 20, SEP], [21, SEP], [10, 11, 12, SEP]]


def written(directory, name, *contents):
    """Files `name` of the contents, by ending; returns the first."""
    return [put(directory / f"{name}{ending}", content) for ending, content in contents][0]


def of_megatron(directory, documents, dtype="uint16", name="corpus"):
    data, index = reference.megatron(documents, dtype)
    written(directory, name, (".bin", data), (".idx", index))
    return directory / name


def each_one_sequence(documents):
    return [[document] for document in documents]


def exported(dataset, directory):
    """The rows of the files of an export."""
    return [row for file in export(dataset, directory) for row in pq.read_table(file)["input_ids"].to_pylist()]


def sequences(dataset):
    """The ids of each sentence of train, one for each document of a dataset without sentences."""
    found = []
    for shard in dataset.splits["train"]:
        name = "sentences" if "sentences" in shard.arrays else "documents"
        tokens, offsets = (dataset.array(shard.name, array) for array in ("tokens", name))
        found += [tokens[start:stop].tolist() for start, stop in pairwise(offsets)]
    return found


@pytest.fixture
def take(tmp_path, vocab):
    """Imports into a directory of the test, of that name, without a validation split."""
    return lambda inputs, out="out", **options: import_ids(
        inputs, tmp_path / out, **{"tokenizer": vocab, "validation": 0} | options
    )


# ----------------------------------------------------------------------------------------------------------- megatron

SEQUENCES = st.lists(st.sampled_from([0, 1, 2, SEP, MASK, 10, 11, 12, 80]), min_size=1, max_size=9)
CORPORA = st.lists(st.lists(SEQUENCES, max_size=4), max_size=12).filter(any)


IDS, DTYPES, BLOCKS = (
    st.sampled_from([SEP, SEP, 10, 11]),
    st.sampled_from(sorted(reference.CODES)),
    st.sampled_from([4, 1 << 19]),
)


@FEW
@given(CORPORA, DTYPES, st.sampled_from([2, 7, 12, 40, 1 << 20]), st.booleans(), st.booleans(), BLOCKS)
@example([[], [], [[10, SEP]], []], "uint16", 2, False, False, 4)
@example([[[10]], [[11, SEP]], [], [[12], [13, SEP]]], "int64", 2, True, False, 4)
@example([[[SEP]], [[11, SEP]]], "uint8", 7, True, True, 4)
@example([[[10, 11, 12], [13, 14, 15]], [], [[16, 17], [18]]], "uint16", 12, False, False, 4)
@example([[[5 + n % 70] * (n % 11)] for n in range(50)], "int32", 40, True, False, 4)
def test_megatron_gives_all_documents_and_sentences(vocab, corpus, dtype, shard_size, join, end, block):
    """Any documents: without ids, of several sentences, with special ids inside, with and without a separator.

    What a unit stores of sentences does not depend on where the blocks end.
    """
    if join:
        corpus = [[sum(document, [])] if document else [] for document in corpus]
    if end:
        corpus = [[*document[:-1], [*document[-1], SEP]] if document else [] for document in corpus]
    with tempfile.TemporaryDirectory() as name, limits(block_ids=block):
        prefix = of_megatron(Path(name), corpus, dtype)
        out = Path(name) / "shards"
        dataset = import_ids(prefix, out, tokenizer=vocab, format="megatron", validation=0, shard_size=shard_size)
        assert verify(out) == []
        documents = [ids for document in corpus if (ids := sum(document, []))]
        assert stored(dataset) == documents
        assert dataset.manifest.counts["dropped_documents"] == len(corpus) - len(documents)
        numbers = [int(shard.name.removeprefix("train-")) for shard in dataset.splits["train"]]
        assert numbers == sorted(set(reference.units([sum(d, []) for d in corpus], shard_size, 2)))
        several = any(len(document) > 1 for document in corpus)
        assert all((shard.num_sentences is not None) == several for shard in dataset.splits["train"])
        ends = {document[-1] for document in documents}
        bare = any(len(document[-1] if several else sum(document, [])) == 1 for document in corpus if document)
        separator = ends.pop() if len(ends) == 1 and ends <= {0, 2, SEP, MASK} and not bare else None
        assert dataset.special_tokens.separator == separator
        names = {0: "[PAD]", 2: "[CLS]", SEP: "[SEP]", MASK: "[MASK]"}
        inside = {token: sum(d.count(each) - (each == separator) for d in documents) for each, token in names.items()}
        assert dataset.manifest.counts["special_ids_inside"] == {k: v for k, v in inside.items() if v}
        every = [sequence for document in corpus for sequence in document]
        assert sequences(dataset) == [sequence for sequence in every if sequence]
        assert dataset.manifest.counts["empty_sentences"] == every.count([])
        assert exported(dataset, Path(name) / "back") == [sum(document, []) for document in corpus]


def test_several_inputs_follow_each_other(tmp_path, take):
    """One of them has sentences; a document of the other is one sentence."""
    first, second = [[[10, 11], [12, SEP]]], [[[13, 14, SEP]], []]
    names = [of_megatron(tmp_path / "in", each, name=name) for each, name in ((first, "a"), (second, "b"))]
    both_files = [names[0].with_suffix(".bin"), names[0].with_suffix(".idx")]  # one input
    dataset = take([*both_files, names[1]], format="megatron", **SMALL)
    assert sequences(dataset) == [[10, 11], [12, SEP], [13, 14, SEP]]
    assert exported(dataset, tmp_path / "back") == [[10, 11, 12, SEP], [13, 14, SEP], []]


INDEX = reference.megatron(each_one_sequence(DOCUMENTS), "uint16")[1]
DAMAGED = [  # kind of error, index
    *[("cut-short", index) for index in (INDEX[:20], INDEX[:-1], INDEX + bytes(5))],
    ("not-of-format", b"x" + INDEX[1:]),
    *[
        (kind, INDEX[:place] + change + INDEX[place + len(change) :])
        for kind, place, change in (
            ("not-of-format", 9, b"\2"),  # version
            ("not-of-format", 17, b"\7"),  # dtype
            ("cut-short", 18, b"\x09"),  # number of sequences
            ("cut-short", 18, (2**63).to_bytes(8, "little")),
            ("not-of-format", 34, b"\5"),  # sizes
            ("not-of-format", 34, b"\xff" * 4),
            ("not-of-format", len(INDEX) - 8, b"\4"),  # documents
            ("not-of-format", len(INDEX) - 48, b"\1"),
        )
    ],
]


@pytest.mark.parametrize(("kind", "index"), [*DAMAGED, ("cut-short", None)])
def test_a_damaged_megatron_dataset_is_refused(tmp_path, take, kind, index):
    path = of_megatron(tmp_path / "in", each_one_sequence(DOCUMENTS))
    damaged = path.with_suffix(".bin" if index is None else ".idx")
    put(damaged, damaged.read_bytes()[:-2] if index is None else index)
    with refuses(kind, "inputs", given=str(damaged)):
        take(path)
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------ the other formats


@FEW
@given(st.lists(IDS, min_size=1, max_size=40), st.integers(1, 5))
def test_documents_of_nanogpt_end_after_the_end_token(vocab, ids, block):
    with tempfile.TemporaryDirectory() as name, limits(block_ids=block):
        path = written(Path(name), "train", (".bin", reference.packed(ids, "uint16")))
        dataset = import_ids(path, Path(name) / "out", tokenizer=vocab, **SMALL)
        assert stored(dataset) == reference.split_at(ids, SEP)
        assert dataset.manifest.settings["end_token"] == "[SEP]"


@FEW
@given(st.lists(st.lists(st.lists(IDS, max_size=9), min_size=1, max_size=9), min_size=2, max_size=3), st.booleans())
def test_finished_units_are_not_read_again(vocab, files, is_nanogpt):
    """Of any number of units that are finished, the others get the same documents, and no file of theirs is opened."""
    files = [[*documents, [10, SEP]] for documents in files]
    with tempfile.TemporaryDirectory() as name:
        paths = [of_megatron(Path(name), each_one_sequence(each), name=f"{n}") for n, each in enumerate(files)]
        if is_nanogpt:
            packed = [reference.packed([token for ids in each for token in ids], "uint16") for each in files]
            paths = [written(Path(name), f"n{n}", (".bin", content)) for n, content in enumerate(packed)]
        opened = [
            open_ids(str(path), "nanogpt" if is_nanogpt else "megatron", SEP if is_nanogpt else None) for path in paths
        ]
        encoder = IdsEncoder(load(vocab), Shares(), opened, 6)

        def found(num_finished):
            parts = encoder.find(range(999), range(num_finished))
            return [
                (some.unit, some.ids[start:stop].tolist())
                for some in parts
                for start, stop in pairwise(some.documents.tolist())
            ]

        every = found(0)
        for number in range(every[-1][0] + 2):
            if number * 6 >= 2 * opened[0].num_ids:
                paths[0].with_suffix(".bin").unlink(missing_ok=True)
            assert found(number) == [each for each in every if each[0] >= number]


def test_an_end_token_that_the_ids_cannot_hold_is_refused(tmp_path):
    """A file of 2 bytes an id is not from a vocabulary whose end token is 70,000."""
    path = written(tmp_path, "train", (".bin", reference.packed([10, 11], "uint16")))
    with refuses("id-outside-vocabulary", "tokenizer"):
        open_ids(str(path), "nanogpt", 70_000)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
def test_the_width_of_ids_alone_is_guessed_and_said_or_given(tmp_path, take, dtype):
    """Zeros of padding are no upper halves."""
    notes = []
    path = written(tmp_path, "ids", (".bin", np.array([10, 11, SEP] * 40, dtype).tobytes()))
    guessed = take(path, say=notes.append, **SMALL)
    assert stored(guessed) == [[10, 11, SEP]] * 40
    assert f"reads {path} as {'uint32' if dtype == 'int32' else dtype}, " in notes[0]
    given = take(path, "given", dtype=dtype, say=notes.append, **SMALL)
    assert [str(path) in note for note in notes].count(True) == 1
    assert given.dataset_id == guessed.dataset_id
    padded = written(tmp_path, "padded", (".bin", np.array([10, 11, SEP] * 40 + [PAD] * 999, dtype).tobytes()))
    assert stored(take(padded, "padded", **SMALL)) == [*[[10, 11, SEP]] * 40, [PAD] * 999]
    ids = [*[10] * 8, 70_000 if dtype in ("uint32", "int64") else 11, SEP] * 40  # a few wide ones
    wide = written(tmp_path, "wide", (".bin", np.array(ids, dtype).tobytes()))
    read = list(open_ids(str(wide), "nanogpt", SEP).documents(0))
    assert sum((some.ids.tolist() for some in read), []) == ids
    assert read[-1].bytes_read == wide.stat().st_size


@pytest.mark.parametrize(
    ("content", "documents"),
    [
        (reference.llm_c([50, 10, 11, 50, 12], 20240520, 1, "uint16"), [[50], [10, 11, 50], [12]]),
        (reference.llm_c([10, 11, 50, 12, 50], 20240801, 7, "uint32"), [[10, 11, 50], [12, 50]]),
        (reference.packed([10] * 600 + [50], "uint16"), [[10] * 600 + [50]]),
    ],
)
def test_files_of_llm_c_have_a_header(tmp_path, content, documents, take):
    """With a tokenizer whose end token is 50, as --end-token says."""
    put(tmp_path / "vocab.txt", "\n".join([*SPECIALS, *(f"w{n}" for n in range(5, 50)), "[EOS]", ""]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[EOS]"}))
    path = written(tmp_path / "in", "train", (".bin", content))
    dataset = take(path, tokenizer=str(tmp_path), end_token="[EOS]", **SMALL)
    assert stored(dataset) == documents
    assert dataset.special_tokens.separator == (50 if all(d[-1] == 50 and len(d) > 1 for d in documents) else None)
    assert verify(tmp_path / "out") == []
    truncated = written(tmp_path / "in", "short", (".bin", content[:-1]))
    with refuses("not-of-format" if len(documents) == 1 else "cut-short", "inputs"):
        take(truncated, "out2", tokenizer=str(tmp_path), **SMALL)


def as_arrow(path, table, *, stream):
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(str(path), table.schema) as writer:
        for batch in table.to_batches(max_chunksize=2):
            writer.write_batch(batch)


@pytest.mark.parametrize("kind", ["parquet", "stream", "file", "saved"])
def test_rows_of_lists(tmp_path, take, kind, limit):
    limit(block_ids=5, rows_of_ids=2)
    documents = [[], *DOCUMENTS, []]
    of = {"parquet": pa.int64(), "stream": pa.uint16(), "file": pa.int32(), "saved": pa.int64()}[kind]
    lists = pa.large_list(of) if kind == "file" else pa.list_(of)
    table = pa.table({"text": ["?"] * 7, "input_ids": pa.array(documents, lists)})
    if kind == "parquet":
        path = tmp_path / "rows.parquet"
        pq.write_table(table, path, row_group_size=3)
    elif kind == "saved":
        path = tmp_path / "saved"
        path.mkdir()
        names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
        as_arrow(path / names[0], table.slice(0, 4), stream=True)
        as_arrow(path / names[1], table.slice(4), stream=True)
        (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    else:
        path = tmp_path / "rows.arrow"
        as_arrow(path, table, stream=kind == "stream")
    seen = []
    dataset = take(path, progress=lambda *done: seen.append(done), **SMALL)
    assert stored(dataset) == DOCUMENTS
    assert dataset.manifest.settings["imported"] == "rows"
    size = sum(each.stat().st_size for each in (path.glob("*.arrow") if kind == "saved" else [path]))
    assert seen == sorted(seen)
    assert 0 <= seen[0][0] < seen[-1][0] == size
    assert exported(dataset, tmp_path / "back") == documents
    again = take(tmp_path / "back", "again", **SMALL)
    assert again.dataset_id == dataset.dataset_id


def test_rows_of_parquet_are_decoded_a_block_at_a_time(tmp_path):
    """Rows of 128 KiB, and all of them in one row group, whose bytes are not held either."""
    ids = np.random.default_rng(0).integers(0, 1 << 31, 1 << 22).astype("<i4")
    offsets = np.arange(0, ids.size + 1, 1 << 15, dtype="<i4")
    path, before, most = tmp_path / "rows.parquet", pa.total_allocated_bytes(), 0
    pq.write_table(pa.table({"input_ids": pa.ListArray.from_arrays(offsets, ids)}), path)
    for number, some in enumerate(open_ids(str(path), "rows", None).documents(0)):
        assert (some.ids[:9] == ids[number * some.ids.size :][:9]).all()
        most = max(most, pa.total_allocated_bytes() - before)
    assert 0 < most < 0.75 * ids.nbytes


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_the_name_of_a_table_may_be_no_utf_8(tmp_path, vocab, take, kind):
    table = pa.table({"input_ids": DOCUMENTS, "text": ["the stone"] * len(DOCUMENTS)})
    plain, path = tmp_path / "a", tmp_path / os.fsdecode(b"a\xff." + kind.encode())
    pq.write_table(table, plain) if kind == "parquet" else as_arrow(plain, table, stream=False)
    plain.rename(path)
    assert stored(take(path)) == DOCUMENTS
    assert len(build(path, tmp_path / "of text", tokenizer=vocab, validation=0).dataset) == len(DOCUMENTS)


# --------------------------------------------------------------------------------------------------- ids and splits


def test_rows_of_fixed_size_in_the_directory_of_the_command(tmp_path, take, monkeypatch):
    column = pa.array([[10, 11], [12, 13], [14, 15]], pa.list_(pa.int32(), 2))
    pq.write_table(pa.table({"input_ids": column}).slice(1), tmp_path / "rows.parquet")
    monkeypatch.chdir(tmp_path)
    assert stored(take(".", **SMALL)) == [[12, 13], [14, 15]]
    as_arrow(tmp_path / "rows.arrow", pa.table({"input_ids": column}).slice(1), stream=True)
    assert stored(take(tmp_path / "rows.arrow", "arrow", **SMALL)) == [[12, 13], [14, 15]]


@given(
    st.lists(st.one_of(st.integers(-2, 12), st.just(5)), max_size=20),
    st.integers(0, 200),
    st.sampled_from([np.int64, np.int32, np.int8, np.uint16]),
)
def test_the_kernel_counts_special_ids_as_its_reference(ids, plain_before, dtype):
    """Blocks of 64 ids without a special one, which it passes over, lie before the drawn ids."""
    special, counts = [1, 3, 9], np.zeros(3, np.int64)
    ids = (np.array([5, 8] * plain_before + ids, np.int64) % 2**16).astype(dtype).tolist()
    number_of = np.array([special.index(token) if token in special else -1 for token in range(10)], np.int32)
    wrong = build_kernels.count_special(np.array(ids, dtype), number_of, (4, 9), counts)
    assert (counts.tolist(), wrong) == reference.special_counts(ids, special, 10)


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_the_hash_of_the_ids_decides_the_split(tmp_path, vocab, dtype):
    """Whatever the dtype of the input is, and where the document is."""
    documents = [[5 + n % 70, 5 + n // 7 % 70, *[6] * (n % 5), SEP] for n in range(120)]
    if dtype == "int32":
        documents.reverse()
    prefix = of_megatron(tmp_path / "in", each_one_sequence(documents), dtype)
    shares = {"validation": 0.2, "test": 0.1, "shard_size": 300}
    dataset = import_ids(f"{prefix}.bin", tmp_path / "out", tokenizer=vocab, **shares)
    splits = {"train": [], "validation": [], "test": []}
    for document in documents:
        splits[reference.split_of(document, 0.2, 0.1)].append(document)
    assert all(splits.values())
    assert stored(dataset) == [*splits["train"], *splits["validation"], *splits["test"]]
    assert verify(dataset.path) == []


def test_documents_without_ids_are_not_kept_where_there_are_several_splits(tmp_path, take):
    dataset = take(of_megatron(tmp_path / "in", [[], [[10, SEP]], []]), format="megatron", validation=0.5)
    assert dataset.manifest.counts["dropped_documents"] == 2
    assert not any("empty" in shard.arrays for split in dataset.splits.values() for shard in split)


def test_an_id_outside_the_vocabulary_is_named_with_its_byte(tmp_path, take):
    """The vocabulary has 82 ids."""
    prefix = of_megatron(tmp_path / "in", each_one_sequence([[10, 11], [12, 81, 82, 13]]), "int32")
    llm_c = written(tmp_path / "in", "train", (".bin", reference.llm_c([3, 10, 999], 20240520, 1, "uint16")))
    for path, value in ((f"{prefix}.bin", "byte 16: id 82"), (llm_c, "byte 1028: id 999")):
        with refuses("id-outside-vocabulary", "tokenizer", says=f"{path}, {value} "):
            take(path)


# ---------------------------------------------------------------------------------------------- killed, continued


def test_units_of_another_dtype_are_not_mixed(tmp_path, take):
    path = written(tmp_path, "ids", (".bin", np.array([10, 11, SEP] * 40, "<u4").tobytes()))
    with pytest.raises(KeyboardInterrupt):
        take(path, dtype="uint16", progress=Mock(side_effect=KeyboardInterrupt))
    with refuses("other-settings", "out"):
        take(path)
    assert stored(take(path, overwrite=True, **SMALL)) == [[10, 11, SEP]] * 40


@pytest.mark.parametrize("content", [bytes(10), bytes(11), b"", None])
def test_an_input_that_is_replaced_between_two_reads_is_refused(tmp_path, content):
    path = put(tmp_path / "ids", bytes(10))
    numbers, was = ids_module.FileArray(local(path), "<u2", 5), path.stat().st_mtime_ns
    assert numbers[1:3].tolist() == [0, 0]
    path.unlink()
    if content is not None:  # of another size, or of another time
        put(path, content)
        os.utime(path, ns=(1, 1) if len(content) == 10 else (was, was))
    kind = ("not-found", None) if content is None else ("changed", "inputs")
    with refuses(*kind, given=str(path)):
        numbers[3:]


# ------------------------------------------------------------------------------------------------------------ export


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_dataset_of_text_is_exported(tmp_path, dataset, split):
    """Rows are documents with their separators."""
    expected, total, seen = [], 2 * dataset.splits[split].num_tokens, []
    for shard in dataset.splits[split]:
        tokens, documents = (dataset.array(shard.name, name) for name in ("tokens", "documents"))
        expected += [tokens[start:stop].tolist() for start, stop in pairwise(documents)]
    succeeds(main, "export", dataset.path, "--split", split, "--out", tmp_path / "rows")
    rows = pq.read_table(tmp_path / "rows")["input_ids"]
    assert rows.to_pylist() == expected
    assert rows.type.value_type == pa.int32()
    export(dataset, tmp_path / "new" / "rows", split=split, progress=lambda *at: seen.append(at))
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


def test_an_export_replaces_nothing_and_leaves_nothing_half(tmp_path, dataset):
    names = [f"{shard.name}.parquet" for shard in dataset.splits["train"]]
    put(tmp_path / "a" / names[-1], "mine")
    with refuses("out-exists", "out", given=str(tmp_path / "a" / names[-1])):
        export(dataset, tmp_path / "a")
    out = tmp_path / "b"
    export(dataset, out)
    os.replace(out / names[-1], out / f"{names[-1]}.tmp")  # as a kill between the first and the last name leaves them
    export(dataset, out)
    put(out / f"{names[0]}.tmp", "of a kill before the first name")
    os.replace(out / names[-1], out / f"{names[-1]}.tmp")
    with refuses("out-exists", "out", given=str(out / names[0])):
        export(dataset, out)


def test_a_damaged_dataset_is_not_exported(tmp_path, take):
    take(of_megatron(tmp_path / "in", [[], *each_one_sequence(DOCUMENTS)]), format="megatron")
    path = tmp_path / "out" / "train-00000.empty.npy"
    put(path, path.read_bytes()[:128] + struct.pack("<Q", 77))
    with refuses("damaged"):
        export(bertdata.open(tmp_path / "out"), tmp_path / "back")
    assert any("train-00000.empty.npy" in fault for fault in verify(tmp_path / "out"))
