"""Ids that others made: none is added, left out or changed."""

import json
import os
import struct
import tempfile
from contextlib import suppress
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from reference import ids as reference
from reference import keys
from support.commands import refuses, succeeds
from support.data import faults_of, import_ids, stored
from support.disk import contents, put, write_all
from support.limits import limits
from support.sources import FEW, as_tables, stop_after_units

import bertdata
from bertdata import export

SEP, MASK, PAD = 3, 4, 0
SMALL = {"validation": 0, "shard_size": 40}
DOCUMENTS = [[10, 11, 12, SEP], [13, SEP], [14, 15, 16, 17, 18, 19, 20, SEP], [21, SEP], [10, 11, 12, SEP]]


def megatron(documents, dtype="uint16", name="a"):
    return dict(zip((f"{name}.bin", f"{name}.idx"), reference.megatron(documents, dtype), strict=True))


def each_one_sequence(documents):
    return [[document] for document in documents]


def exported(dataset, directory):
    """The rows of the files of an export."""
    progress, size = [], 2 * dataset.splits["train"].num_tokens
    files = export(dataset, directory, progress=lambda *done: progress.append(done))
    assert (progress, progress[-1]) == (sorted(progress), (size, size))
    return [row for file in files for row in pq.read_table(file)["input_ids"].to_pylist()]


@pytest.fixture
def take(tmp_path, vocab):
    """Imports into a directory of the test, of that name, without a validation split."""
    return lambda inputs, out="out", **options: import_ids(
        inputs, tmp_path / out, **{"tokenizer": vocab, "validation": 0} | options
    )


# ----------------------------------------------------------------------------------------------------------- megatron

SEQUENCES = st.lists(st.sampled_from([0, 1, 2, SEP, MASK, 10, 11, 12, 80]), min_size=1, max_size=9)
CORPORA = st.lists(st.lists(SEQUENCES, max_size=4), max_size=12).filter(any)
LISTS_OF_IDS = st.lists(st.lists(st.sampled_from([SEP, SEP, 10, 11]), max_size=9), min_size=1, max_size=9)
DTYPES = st.sampled_from(sorted(reference.CODES))


@FEW
@given(
    CORPORA,
    DTYPES,
    st.sampled_from([2, 7, 12, 40, 1 << 20]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([4, 1 << 19]),
)
@example([[], [], [[10, SEP]], []], "uint16", 2, False, False, 4)
@example([[[10]], [[11, SEP]], [], [[12], [13, SEP]]], "int64", 2, True, False, 4)
@example([[[SEP]], [[11, SEP]]], "uint8", 7, True, True, 4)
@example([[[10, 11, 12], [13, 14, 15]], [], [[16, 17], [18]]], "uint16", 12, False, False, 4)
@example([[[5 + n % 70] * (n % 11)] for n in range(50)], "int32", 40, True, False, 4)
@example([[[*[80, 4] * 32, *[5] * 63, 81, 4, 4, SEP]], [[*[5] * 64, SEP]]], "int8", 40, True, False, 99)
def test_megatron_gives_all_documents_and_sentences(vocab, corpus, dtype, shard_size, join, end, block):
    """Any documents, in two inputs: without ids, of several sentences, with special ids inside, with and without a
    separator. What a unit stores of sentences does not depend on where the blocks end.
    """
    if join:
        corpus = [[sum(document, [])] if document else [] for document in corpus]
    if end:
        corpus = [[*document[:-1], [*document[-1], SEP]] if document else [] for document in corpus]
    with tempfile.TemporaryDirectory() as name, limits(block_ids=block):
        cut, folder, out = shard_size % (len(corpus) + 1), Path(name), Path(name) / "shards"
        write_all(folder, megatron(corpus[:cut], dtype, "a") | megatron(corpus[cut:], dtype, "b"))
        inputs = [folder / "a.bin", folder / "a.idx", folder / "b"]  # the first two are one
        dataset = import_ids(inputs, out, tokenizer=vocab, format="megatron", validation=0, shard_size=shard_size)
        assert faults_of(out) == []
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
        every, found = [sequence for document in corpus for sequence in document], []
        for shard in dataset.splits["train"]:
            ends = dataset.array(shard.name, "sentences" if several else "documents")
            found += [dataset.array(shard.name, "tokens")[start:stop].tolist() for start, stop in pairwise(ends)]
        assert found == [sequence for sequence in every if sequence]
        assert dataset.manifest.counts["empty_sentences"] == every.count([])
        assert exported(dataset, Path(name) / "back") == [sum(document, []) for document in corpus]


# ------------------------------------------------------------------------------------------------- files of any format


def nanogpt(ids, dtype="uint16"):
    return {"a.bin": reference.packed(ids, dtype)}


EACH = megatron(each_one_sequence(DOCUMENTS))
LONG_INDEX = struct.pack("<9sQBQQ2i2q3q", b"MMIDIDX\0\0", 1, 8, 2, 3, *[2**31 - 1] * 2, 0, 2**32 - 2, 0, 1, 2)
INDEX, ROWS = EACH["a.idx"], [[], *DOCUMENTS, []]
LLM_C = [
    reference.llm_c([SEP, 10, 11, SEP, 12], 20240520, 1, "uint16"),
    reference.llm_c([10, 11, SEP, 12, SEP], 20240801, 7, "uint32"),
]
OUTSIDE = "id-outside-vocabulary", "tokenizer"  # the vocabulary has 82 ids


def of_any_width():
    """Rows for ids alone: their dtype is guessed, or given. Padding zeros do not count as upper halves."""
    for dtype, guess in {"uint16": "uint16", "uint32": "uint32", "int32": "uint32", "int64": "int64"}.items():
        for end in ([], [PAD] * 999):
            files, documents = nanogpt([10, 11, SEP] * 40 + end, dtype), [[10, 11, SEP]] * 40 + [end] * bool(end)
            yield files, {}, documents, f"a.bin as {guess}, "
            yield files, {"dtype": dtype}, documents
    yield nanogpt([10] * 16, "uint32"), {}, [[10] * 16], "a.bin as uint32, "
    yield nanogpt([10] * 15, "uint32"), {}, [[10, 0] * 15], "a.bin as uint16, "  # too few to tell
    yield nanogpt([10, 11] * 13 + [10, 0] * 7), {}, [[10, 11] * 13 + [10, 0] * 7], "a.bin as uint16, "
    yield nanogpt([10, 11] * 12 + [10, 0] * 8), {}, (*OUTSIDE, "byte 0: id 720906 ")  # 40 % of the pairs
    for dtype, at in {"uint32": 32, "int64": 64}.items():
        yield nanogpt([*[10] * 8, 70_000, SEP] * 40, dtype), {}, (*OUTSIDE, f"a.bin, byte {at}: id 70000 ")


def of_rows():
    """Rows for lists of ids in tables, some with invalid UTF-8 in their names."""
    kinds = [kind(of) for kind in (pa.list_, pa.large_list) for of in (pa.uint16(), pa.int32(), pa.int64())]
    tables = [pa.table({"text": ["?"] * 7, "input_ids": pa.array(ROWS, kind)}) for kind in kinds]
    for rows in tables:
        for name, content in as_tables(rows).items():
            yield {os.fsdecode(b"\xff") + name: content}, {}, ROWS
    fixed = pa.array([[10, 11], [12, 13], [14, 15]], pa.list_(pa.int32(), 2)).slice(1)
    for name, content in as_tables(pa.table({"input_ids": fixed})).items():
        yield {name: content}, {"inputs": name if "arrow" in name else "."}, [[12, 13], [14, 15]]
    streams = [as_tables(each)["stream.arrow"] for each in (tables[0].slice(0, 4), tables[0].slice(4))]
    state = json.dumps({"_data_files": [{"filename": "b.arrow"}, {"filename": "a.arrow"}]}).encode()
    for name, content in as_tables(pa.table({"input_ids": [[10], [11], [12], [99]]})).items():
        yield {name: content}, {}, (*OUTSIDE, f"{name}, row 4: id 99 ")
    yield {"d/b.arrow": streams[0], "d/a.arrow": streams[1], "d/state.json": state}, {"inputs": "d"}, ROWS
    nine, ten = (as_tables(each)["a.parquet"] for each in (tables[0].slice(0, 4), tables[0].slice(4)))
    yield {"d/10.parquet": ten, "d/9.parquet": nine}, {"inputs": "d"}, ROWS


IMPORTS = [  # files, options, documents or an error with its option and what it says, and what is noted
    *of_any_width(),
    *of_rows(),
    (nanogpt([10, 2, SEP, 2]), {"end_token": "[CLS]"}, [[10, 2], [SEP, 2]], " as uint16, "),
    (nanogpt([10] * 600 + [SEP]), {}, [[10] * 600 + [SEP]], " as uint16, "),  # as long as a header
    ({"a.bin": LLM_C[0]}, {}, [[SEP], [10, 11, SEP], [12]]),
    ({"a.bin": LLM_C[1]}, {}, [[10, 11, SEP], [12, SEP]]),
    *[({"a.bin": content[:-1]}, {}, ("cut-short", "inputs", "a.bin")) for content in LLM_C],
    ({"a.bin": LLM_C[0][:-2] + b"\x52\0"}, {}, (*OUTSIDE, "a.bin, byte 1032: id 82 ")),
    (megatron([[[10, 11]], [[12, 81, 82]]], "int32"), {}, (*OUTSIDE, "a.bin, byte 16: id 82 ")),
    (megatron([[[10, 2**32 + 10]]], "int64"), {}, (*OUTSIDE, "a.bin, byte 8: id 4294967306 ")),
    ({"a.bin": b"", "a.idx": LONG_INDEX}, {}, ("cut-short", "inputs", "the 8,589,934,588 of its .idx")),
    (megatron([[[*[10] * 63, 82]]]), {}, (*OUTSIDE, "a.bin, byte 126: id 82 ")),  # as 64 ids are looked at together
    (megatron([[[*[10] * 70, -2]]], "int8"), {}, (*OUTSIDE, "a.bin, byte 70: id -2 ")),
    *[(EACH | {"a.idx": new}, {}, ("cut-short", "inputs", "a.idx")) for new in (INDEX[:20], INDEX[:-1], INDEX + b"5")],
    *[  # bytes 18 to 33 say how many follow, and the last length (50 to 53) how many ids
        (EACH | {"a.idx": flipped}, {}, ("cut-short" if 18 <= at < 34 else "not-of-format", "inputs", "a.idx"))
        for at in range(len(INDEX))
        if not 50 <= at < 54
        for flipped in [(int.from_bytes(INDEX, "little") ^ 128 << 8 * at).to_bytes(len(INDEX), "little")]
    ],
    *[  # real numbers of 8 and of 4 bytes
        ({"a.bin": data, "a.idx": index[:17] + code + index[18:]}, {}, ("not-of-format", "inputs", "a.idx"))
        for code, dtype in ((b"\6", "int64"), (b"\7", "int32"))
        for data, index in [reference.megatron([[[0, 0]]], dtype)]
    ],
    *[  # the first document begins behind a sequence; the last ends before one
        (EACH | {"a.idx": INDEX[:-at] + new + INDEX[1 - at :]}, {}, ("not-of-format", "inputs", "a.idx"))
        for at, new in ((48, b"\1"), (8, b"\4"))
    ],
    (EACH | {"a.bin": EACH["a.bin"][:-2]}, {}, ("cut-short", "inputs", "a.bin")),
]


@pytest.mark.parametrize("row", IMPORTS, ids=range(len(IMPORTS)))
def test_files_give_these_documents(tmp_path, monkeypatch, take, limit, row):
    files, options, expected, *said = row
    limit(block_ids=5, rows_of_ids=2, most_listed=0)  # no tables of shards with documents of no ids
    monkeypatch.chdir(write_all(tmp_path, files))
    notes, progress = [], []
    options = {"inputs": next(iter(files)), "say": notes.append} | SMALL | options
    options["progress"] = lambda *done: progress.append(done)
    if isinstance(expected, tuple):
        with refuses(*expected[:2], says=expected[2]):
            take(**options)
        assert not (tmp_path / "out").exists() or expected[:2] == OUTSIDE
        return
    dataset = take(**options)
    assert exported(dataset, tmp_path / "back") == expected
    assert stored(dataset) == [document for document in expected if document]
    assert (progress, progress[-1][0]) == (sorted(progress), progress[-1][1])
    assert len({*progress}) > len(expected) / 3 or any("arrow" in name for name in files)  # Arrow reads to the end
    notes = [note for note in notes if note.startswith("reads ")]  # and not that kernels are compiled
    assert all(part in note for part, note in zip(said, notes, strict=True))
    kind, end_token = ("nanogpt", options.get("end_token", "[SEP]")) if "a.bin" in files else ("rows", None)
    assert (dataset.manifest.settings["imported"], dataset.manifest.settings.get("end_token")) == (kind, end_token)
    assert faults_of(dataset.path) == []
    if kind == "rows":  # which an iterable gives, too
        types = [list, tuple, *(partial(np.array, dtype=dtype) for dtype in (np.uint16, np.int64, np.uint64))]
        items = [make(ids) for make, ids in zip(cycle(types), expected, strict=False)]
        for given_ids in (iter(items), items):
            assert take(given_ids, "given", overwrite=True, **SMALL).dataset_id == dataset.dataset_id


@FEW
@given(
    st.lists(LISTS_OF_IDS, min_size=2, max_size=3),
    st.booleans(),
    st.sampled_from([1, 2, 5, 1 << 19]),
    st.integers(0, 9),
)
def test_an_import_that_was_stopped_ends_in_the_same_documents(vocab, files, is_nanogpt, block, num_units):
    """After any number of units. Documents of nanoGPT end after the end token, and at the end of a file."""
    files = [[*documents, [10, SEP]] for documents in files]
    with tempfile.TemporaryDirectory() as name, limits(block_ids=block):
        out, options = Path(name, "out"), {"tokenizer": vocab, "validation": 0, "shard_size": 6}
        for n, each in enumerate(files):
            packed = {f"{n}.bin": reference.packed(sum(each, []), "uint16")}
            write_all(name, packed if is_nanogpt else megatron(each_one_sequence(each), name=f"{n}"))
        inputs = [Path(name, f"{n}.bin") for n in range(len(files))]
        with suppress(KeyboardInterrupt):
            import_ids(inputs, out, progress=stop_after_units(out, num_units), **options)
        if not (out / "manifest.json").exists():
            import_ids(inputs, out, **options)
        documents = [reference.split_at(sum(each, []), SEP) if is_nanogpt else each for each in files]
        assert stored(bertdata.open(out)) == [ids for ids in sum(documents, []) if ids]
        assert contents(out) == contents(import_ids(inputs, Path(name, "whole"), **options).path)


def test_the_hash_of_the_ids_decides_the_split(tmp_path, take):
    """Whatever the dtype of the input is, and where the document is. With several splits none without ids is kept."""
    documents = [[5 + n % 70, 5 + n // 7 % 70, *[6] * (n % 5), SEP] for n in range(120)]
    shares = {"validation": 0.2, "test": 0.1, "shard_size": 300}
    for dtype, some in (("uint16", documents), ("int32", documents[::-1])):
        write_all(tmp_path, megatron(each_one_sequence([[], *some, []]), dtype))
        dataset = take(tmp_path / "a.bin", dtype, **shares)
        splits = {"train": [], "validation": [], "test": []}
        for document in some:
            splits[keys.split(reference.packed(document, "uint16"), validation=0.2, test=0.1)].append(document)
        assert all(splits.values())
        assert stored(dataset) == [*splits["train"], *splits["validation"], *splits["test"]]
        assert stored(take(iter(some), f"given {dtype}", **shares)) == stored(dataset)
        assert dataset.manifest.counts["dropped_documents"] == 2
        assert not any("empty" in shard.arrays for split in dataset.splits.values() for shard in split)
        assert faults_of(dataset.path) == []


def test_units_of_another_dtype_are_not_mixed(tmp_path, take):
    path = put(tmp_path / "ids.bin", reference.packed([10, 11, SEP] * 40, "uint32"))
    with pytest.raises(KeyboardInterrupt):
        take(path, dtype="uint16", progress=Mock(side_effect=KeyboardInterrupt))
    with refuses("other-settings", "out"):
        take(path)
    guessed, given_it = take(path, overwrite=True), take(path, "given", dtype="uint32")
    assert stored(guessed) == [[10, 11, SEP]] * 40
    assert guessed.dataset_id == given_it.dataset_id


# ------------------------------------------------------------------------------------------------------------ export


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_dataset_of_text_is_exported(tmp_path, dataset, split):
    """Rows are documents with their separators."""
    first = 0 if split == "train" else dataset.splits["train"].num_documents
    expected = stored(dataset)[first:][: dataset.splits[split].num_documents]
    succeeds("bertdata", "export", dataset.path, "--split", split, "--out", tmp_path / "new" / "rows")
    rows = pq.read_table(tmp_path / "new" / "rows")["input_ids"]
    assert (rows.to_pylist(), rows.type.value_type) == (expected, pa.int32())


def test_an_export_replaces_nothing_but_what_a_kill_left(tmp_path, dataset, monkeypatch):
    names = [f"{shard.name}.parquet" for shard in dataset.splits["train"]]
    put(tmp_path / "a" / names[-1], "mine")
    with refuses("out-exists", "out", given=str(tmp_path / "a" / names[-1])):
        export(dataset, tmp_path / "a")
    out = tmp_path / "b"
    export(dataset, out)
    os.replace(out / names[-1], out / f"{names[-1]}.tmp")  # as a kill between the first and the last name leaves them
    order, replace = [], os.replace
    monkeypatch.setattr(os, "fsync", lambda file: order.append(os.readlink(f"/proc/self/fd/{file}")))
    monkeypatch.setattr(os, "replace", lambda *paths: order.append("name") or replace(*paths))
    export(dataset, out)
    assert (order[0], order[order.index("name") - 1]) == (str(out), str(out))  # old names are gone, new files are there
    with refuses("out-exists", "out", given=str(out / names[0])):
        export(dataset, out)


def test_a_damaged_dataset_is_not_exported(tmp_path, take):
    write_all(tmp_path, megatron([[], *each_one_sequence(DOCUMENTS)]))
    for name, wrong in (("empty", [6]), ("empty", [2**32]), ("documents", [0, 4, 2**32 + 6, 14, 16, 20])):
        take(tmp_path / "a.idx", overwrite=True)
        path = tmp_path / "out" / f"train-00000.{name}.npy"
        put(path, path.read_bytes()[:128] + np.array(wrong, np.uint64).tobytes())
        with refuses("damaged"):
            export(bertdata.open(tmp_path / "out"), tmp_path / "back")
        assert any(path.name in fault for fault in faults_of(tmp_path / "out"))
