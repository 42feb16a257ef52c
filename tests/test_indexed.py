"""Datasets with an index.json, MDS and litdata: their documents, what is wrong with them, and the real libraries."""

import importlib
import itertools
import json
import random
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
import writers
from conftest import ROOT
from helpers import refused, refuses, stored, succeeds, with_member, write_all
from hypothesis import given
from hypothesis import strategies as st
from reference import ids as reference
from sources import FEW, zstd

import bertdata
from bertdata.cli import main
from bertdata.errors import InputError
from bertdata.sources import idfile, mds
from bertdata.sources.idfile import Ids
from bertdata.sources.ids import format_of, open_ids
from bertdata.write import import_ids

SEP = 3
DOCUMENTS = [[10, 11, 12, SEP], [13, SEP], [14, 15, 16, 17, 18, 19, 20, SEP], [21, SEP], [10, 11, 12, SEP]]
LONG = st.lists(st.sampled_from([SEP, 10, 11, 81]), max_size=300)
CORPORA = st.lists(st.one_of(LONG, st.lists(st.sampled_from([SEP, 10, 81]), max_size=5)), min_size=1, max_size=12)


def documents_of(name, format=None, end_token=None, dtype=None, ends_with_ids=True):
    """All documents of an input, in order; their bytes add up."""
    opened, documents, before = open_ids(str(name), format or format_of(str(name)), end_token, dtype), [], 0
    for some in opened.documents():
        assert before <= some.bytes_read <= opened.num_bytes
        before = some.bytes_read
        documents += [some.ids[a:b].tolist() for a, b in zip(some.documents, some.documents[1:], strict=False)]
    assert before == opened.num_bytes or not ends_with_ids
    return documents


# ----------------------------------------------------------------------------------------------------- what is read


@FEW
@given(
    CORPORA,
    st.sampled_from(["ndarray", "ndarray:uint8", "ndarray:int16", "ndarray:uint64", "bytes"]),
    st.integers(1, 5),
    st.sampled_from([None, zstd]),
    st.sampled_from([(), ("md5", "sha1"), ("xxh64",)]),
    st.booleans(),
    st.sampled_from([1, 100, 1 << 19]),
)
def test_samples_of_mds_are_documents(corpus, encoding, per_shard, pack, hashes, others, block):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        patched.setattr(idfile, "BLOCK_IDS", block)
        known = [each for each in hashes if each != "xxh64"]
        files = reference.mds(corpus, encoding, per_shard=per_shard, pack=pack, hashes=known, others=others)
        if "xxh64" in hashes:
            files["index.json"] = files["index.json"].replace(b'"hashes": {}', b'"hashes": {"xxh64": "0123"}')
        directory = write_all(Path(name) / "in", files)
        dtype = "int64" if encoding == "bytes" else None
        assert documents_of(directory, dtype=dtype) == corpus
        assert bool(open_ids(str(directory), "mds", None, dtype).note) == ("xxh64" in hashes)


@pytest.mark.parametrize("others", [False, True])
def test_samples_of_equal_size_state_no_size(tmp_path, others):
    documents = [[number, number + 1, SEP] for number in range(10, 30)]
    files = reference.mds(documents, "ndarray:uint16:3", others=others, name="tokens")
    assert documents_of(write_all(tmp_path / "in", files)) == documents
    nested = files["index.json"].replace(b"ndarray:uint16:3", b"ndarray:uint16:1,3")
    assert documents_of(write_all(tmp_path / "in", {"index.json": nested})) == documents


@FEW
@given(
    CORPORA,
    st.sampled_from(
        [
            ("no_header_tensor:20", "uint16"),
            ("no_header_tensor:16", "int32"),
            ("no_header_numpy:6", "uint32"),
            ("no_header_numpy:3", "int64"),
        ]
    ),
    st.integers(1, 5),
    st.sampled_from([("TokensLoader", None), ("PyTreeLoader", None), ("PyTreeLoader", "tokens")]),
    st.booleans(),
    st.sampled_from([1, 100, 1 << 19]),
)
def test_items_of_litdata_are_documents_or_blocks_of_them(corpus, kind, per_chunk, how, ended, block):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        patched.setattr(idfile, "BLOCK_IDS", block)
        loader, column = how
        files = reference.litdata(corpus, *kind, per_chunk=per_chunk, loader=loader, name=column)
        directory = write_all(Path(name) / "in", files)
        expected = reference.split_at(sum(corpus, []), SEP) if ended else corpus
        ends_with_ids = not ended or bool(corpus[-1])
        assert documents_of(directory, end_token=SEP if ended else None, ends_with_ids=ends_with_ids) == expected


def test_several_streams_are_one_input(tmp_path, vocab):
    """Directly below a directory, or named one by one."""
    names = ["9", "10", "2"]
    for name, document in zip(names, DOCUMENTS, strict=False):
        write_all(tmp_path / "in" / name, reference.mds([document], "ndarray:int32"))
    assert documents_of(tmp_path / "in") == [DOCUMENTS[2], DOCUMENTS[0], DOCUMENTS[1]]
    options = {"tokenizer": vocab, "validation": 0}
    below = import_ids(tmp_path / "in", tmp_path / "out", **options)
    named = import_ids([tmp_path / "in" / name for name in ("2", "9", "10")], tmp_path / "named", **options)
    assert below.dataset_id == named.dataset_id
    assert below.manifest.settings["imported"] == "mds"


def test_a_shard_that_was_decompressed_is_read_whatever_its_compression_was(tmp_path):
    files = reference.mds(DOCUMENTS, "ndarray:uint16", pack=zstd, hashes=["sha1"])
    raw = reference.mds(DOCUMENTS, "ndarray:uint16", hashes=["sha1"])
    raw = {name: content for name, content in raw.items() if name.endswith(".mds")}
    other = files["index.json"].replace(b'"compression": "zstd:3"', b'"compression": "br:11"')
    with refuses("unsupported", "inputs"):
        documents_of(write_all(tmp_path / "in", files | {"index.json": other}))
    # The description in a shard is not read, and has another length here.
    index = json.loads(other)
    for shard in index["shards"]:
        content = raw[shard["raw_data"]["basename"]]
        shard["raw_data"] |= {"bytes": len(content), "hashes": {}}
    assert documents_of(write_all(tmp_path / "in", raw | {"index.json": json.dumps(index).encode()})) == DOCUMENTS


@given(blocks=st.lists(st.lists(st.sampled_from([SEP, 10, 11]), max_size=6), max_size=6))
def test_documents_end_after_a_token_wherever_blocks_do(blocks):
    """A document may have its ids in several blocks, and a block several documents."""
    whole, found = [each for block in blocks for each in block], []
    given_ids = (np.array(block, "<u2") for block in blocks)
    for some in idfile.ended_by(SEP, (Ids(ids, np.array([0, ids.size]), None, str, 0) for ids in given_ids)):
        found += [some.ids[a:b].tolist() for a, b in itertools.pairwise(some.documents)]
    ends = [0, *(number + 1 for number, each in enumerate(whole) if each == SEP), len(whole)]
    assert found == [whole[a:b] for a, b in itertools.pairwise(dict.fromkeys(ends))]


def test_the_commands_read_both(tmp_path, vocab):
    for name, files in (
        ("mds", reference.mds(DOCUMENTS, "bytes")),
        ("litdata", reference.litdata(DOCUMENTS, "no_header_tensor:20", "uint16")),
    ):
        source = write_all(tmp_path / name, files)
        arguments = ["import", source, "--tokenizer", vocab, "--out", tmp_path / f"out-{name}"]
        kind, option = ("missing", "dtype") if name == "mds" else ("conflict", "dtype")
        refused(main, *arguments, *["--dtype", "int64"] * (name == "litdata"), kind=kind, option=option)
        succeeds(main, *arguments, "--validation", 0, *["--dtype", "int64"] * (name == "mds"))
        assert stored(bertdata.open(tmp_path / f"out-{name}")) == [ids for ids in DOCUMENTS if ids]
    (tmp_path / "mds" / "index.json").write_text("[")
    refused(
        main,
        "import",
        tmp_path / "mds",
        "--tokenizer",
        vocab,
        "--out",
        tmp_path / "o",
        kind="not-of-format",
        option="inputs",
    )
    refused(
        main,
        "import",
        tmp_path / "litdata",
        "--tokenizer",
        vocab,
        "--out",
        tmp_path / "o",
        "--end-token",
        "</s>",
        kind="unknown",
        option="end_token",
    )


def test_an_id_outside_the_vocabulary_is_named_with_its_sample(tmp_path, vocab):
    corpus = [*DOCUMENTS, [10, 999]]
    chunks, place = reference.litdata(corpus, "no_header_tensor:16", "int32"), "chunk-0-1.bin, sample 3: id 999"
    places = {
        "mds": (reference.mds(corpus, "ndarray:int32"), None, "shard.00001.mds, sample 3: id 999"),
        "litdata": (chunks, None, place),
        "ended": (chunks, "[SEP]", place),
    }
    for name, (files, end_token, place) in places.items():
        with refuses("id-outside-vocabulary", "tokenizer", says=place):
            import_ids(write_all(tmp_path / name, files), tmp_path / "out", tokenizer=vocab, end_token=end_token)


@pytest.mark.parametrize("format", ["mds", "litdata", "megatron", "nanogpt", "datatrove"])
def test_a_file_that_is_cut_short_or_removed_while_it_is_read_is_an_error(tmp_path, monkeypatch, format):
    """Not the end of the process, as if it were mapped into memory."""
    monkeypatch.setattr(idfile, "BLOCK_IDS", 4)
    megatron, datatrove = (
        reference.megatron([[ids] for ids in DOCUMENTS], "uint16"),
        reference.datatrove(DOCUMENTS, "uint16"),
    )
    name, files = {
        "mds": ("shard.00001.mds", plain(MDS)),
        "litdata": ("chunk-0-1.bin", LITDATA),
        "megatron": ("a.bin", {"a.bin": megatron[0], "a.idx": megatron[1]}),
        "nanogpt": ("a.bin", {"a.bin": reference.packed(sum(DOCUMENTS, []), "uint16")}),
        "datatrove": ("a.ds", {"a.ds": datatrove[0], "a.ds.index": datatrove[1]}),
    }[format]
    directory = write_all(tmp_path / "in", files)
    path, is_directory = directory / name, "index.json" in files
    opened = open_ids(str(directory if is_directory else path), format, SEP)
    path.write_bytes(path.read_bytes()[:-2])
    with refuses("cut-short" if is_directory else "changed", "inputs", given=str(path)):
        list(opened.documents())
    path.unlink()
    with refuses("not-found", given=str(path)):
        list(opened.documents())


def test_a_chunk_alone_is_not_taken_for_ids(tmp_path):
    """Its offsets would be ids."""
    chunk = write_all(tmp_path / "in", LITDATA) / "chunk-0-0.bin"
    with refuses("unknown-format", "inputs", given=str(chunk)):
        format_of(str(chunk))
    (tmp_path / "in" / "index.json").unlink()
    assert format_of(str(chunk)) == "nanogpt"


def test_an_end_token_that_the_ids_cannot_hold_is_refused(tmp_path):
    directory = write_all(tmp_path / "in", reference.litdata(DOCUMENTS, "no_header_tensor:20", "uint16"))
    with refuses("id-outside-vocabulary", "tokenizer"):
        documents_of(directory, end_token=70_000)


@pytest.mark.parametrize("format", ["mds", "litdata"])
def test_a_url_stands_for_a_directory(bucket, tmp_path, vocab, format):
    files = (
        reference.mds(DOCUMENTS, "ndarray:uint16", pack=zstd, hashes=["sha1"])
        if format == "mds"
        else reference.litdata(DOCUMENTS, "no_header_tensor:20", "uint16")
    )
    for name, content in files.items():
        bucket.put(f"data/{name}", content)
    options = {"tokenizer": vocab, "validation": 0}
    remote = import_ids(f"{bucket.url}/data/", tmp_path / "remote", format=format, **options)
    local = import_ids(write_all(tmp_path / "in", files), tmp_path / "local", **options)
    assert remote.dataset_id == local.dataset_id
    with refuses("bad-url", "inputs"):
        import_ids(f"{bucket.url}/data", tmp_path / "auto", **options)
    last = max(name for name in files if name != "index.json")
    bucket.put(f"data/{last}", files[last][:-1])
    with refuses("cut-short", "inputs"):
        import_ids(f"{bucket.url}/data", tmp_path / "short", format=format, **options)


# -------------------------------------------------------------------------------------------------- what is refused


MDS = reference.mds(DOCUMENTS, "ndarray:uint16", hashes=["sha1"])
PACKED = reference.mds(DOCUMENTS, "ndarray:uint16", pack=zstd)
LITDATA = reference.litdata(DOCUMENTS, "no_header_tensor:20", "uint16")
DICT = reference.litdata(DOCUMENTS, "no_header_tensor:20", "uint16", loader="PyTreeLoader", name="input_ids")
FIRST = ("shards", 0)
HUGE = 2**70


def at(offset, *numbers):
    """Replaces uint32 of a file."""
    new = reference.packed(numbers, "uint32")
    return lambda content: content[:offset] + new + content[offset + len(new) :]


def plain(files):
    """MDS without digests, whose shards can be edited."""
    index = json.loads(files["index.json"])
    for shard in index["shards"]:
        shard["raw_data"]["hashes"] = {}
    return files | {"index.json": json.dumps(index).encode()}


def beginning(number):
    """Where a sample of the first shard begins."""
    return int(np.frombuffer(MDS["shard.00000.mds"], "<u4", 1, 4 + 4 * number)[0])


MEMBERS = [  # kind of error, files, the place of a member of their index, wrong values of it
    ("not-of-format", MDS, ("shards",), 3, [3], [{}]),
    ("unsupported", MDS, (*FIRST, "format"), "json"),
    ("unsupported", MDS, (*FIRST, "version"), 3),
    ("no-column", MDS, (*FIRST, "column_names"), ["a", "ids", "n"], []),
    ("not-of-format", MDS, (*FIRST, "column_encodings"), ["str"]),
    (
        "wrong-column-type",
        MDS,
        (*FIRST, "column_encodings", 1),
        "ndarray:float32",
        "ndarray:uint16:2,3",
        "ndarray:uint16:0",
        "ndarray:uint16:9",
        "pkl",
    ),
    ("not-of-format", MDS, (*FIRST, "column_encodings", 1), "ndarray:uint16:x", None),
    ("bad-row", MDS, (*FIRST, "column_encodings", 1), "ndarray", "ndarray:uint64"),
    ("bad-row", MDS, (*FIRST, "column_sizes", 2), 9, 2**39),
    ("not-of-format", MDS, (*FIRST, "column_sizes", 2), -8, HUGE),
    ("not-of-format", MDS, (*FIRST, "samples"), 4, 2**31, HUGE, True),
    ("not-of-format", MDS, (*FIRST, "raw_data", "bytes"), HUGE),
    ("cut-short", MDS, (*FIRST, "raw_data", "bytes"), 1),
    ("not-of-format", MDS, (*FIRST, "raw_data", "hashes"), 7),
    ("damaged", MDS, (*FIRST, "raw_data", "hashes", "sha1"), "00", None),
    (
        "not-of-format",
        MDS,
        (*FIRST, "raw_data", "basename"),
        "../shard.00000.mds",
        "/etc/passwd",
        "a\0b",
        "\ud800",
        "",
        5,
    ),
    ("not-found", MDS, (*FIRST, "raw_data", "basename"), "gone.mds"),
    ("unsupported", PACKED, (*FIRST, "compression"), "br", None),
    ("cut-short", PACKED, (*FIRST, "zip_data", "bytes"), 5),
    ("not-of-format", PACKED, (*FIRST, "raw_data", "bytes"), 2**32, 2**32 - 1),
    ("not-of-format", PACKED, (*FIRST, "zip_data", "basename"), "../x"),
    ("not-of-format", LITDATA, ("config",), None),
    ("unsupported", LITDATA, ("config", "compression"), "zstd"),
    ("unsupported", LITDATA, ("config", "encryption"), {"algorithm": "fernet"}),
    ("unsupported", LITDATA, ("config", "item_loader"), "ParquetLoader", "TemporalArrayLoader"),
    ("wrong-column-type", LITDATA, ("config", "data_format"), ["no_header_tensor:0"], ["json"], [3]),
    ("no-column", LITDATA, ("config", "data_format"), ["int", "int"]),
    ("not-of-format", LITDATA, ("config", "data_format"), []),
    ("not-of-format", LITDATA, ("config", "data_spec"), "{"),
    ("empty", LITDATA, ("chunks",), {}),
    ("not-of-format", LITDATA, ("chunks", 0, "filename"), "../chunk-0-0.bin"),
    ("not-found", LITDATA, ("chunks", 0, "filename"), "gone.bin"),
    ("not-of-format", LITDATA, ("chunks", 0, "chunk_size"), 2, HUGE),
    ("cut-short", LITDATA, ("chunks", 0, "chunk_bytes"), 2**31),
    ("no-column", DICT, ("config", "data_spec"), None),
    ("wrong-column-type", DICT, ("config", "data_format"), ["int", "no_header_tensor:20"]),
    ("bad-row", DICT, ("config", "data_format"), ["no_header_tensor:18", "int"]),
]
CONTENTS = [  # kind of error, files, the name of one, changes of its content
    (
        "not-of-format",
        MDS,
        "index.json",
        lambda content: content[:-1],
        lambda content: b"[" * 100_000,
        lambda content: b"\xff",
    ),
    ("cut-short", MDS, "shard.00000.mds", lambda content: content[:-1]),
    ("damaged", MDS, "shard.00000.mds", lambda content: content[:-1] + b"\xff"),
    ("not-of-format", plain(MDS), "shard.00000.mds", at(0, 4), at(4, 0), at(8, 2**32 - 1), at(16, 2**32 - 1)),
    (
        "bad-row",
        plain(MDS),
        "shard.00000.mds",
        at(8, beginning(0)),
        at(8, beginning(0) + 3),
        at(beginning(0), 2**32 - 1),
        at(beginning(1), 0, 1),
    ),
    ("cut-short", PACKED, "shard.00000.mds.zstd", lambda content: content[:-9] + bytes(9), bytes.upper),
    ("cut-short", LITDATA, "chunk-0-0.bin", lambda content: content[:-1]),
    ("bad-row", LITDATA, "chunk-0-0.bin", at(8, 23)),
]
WRONG = [
    pytest.param(files | {"index.json": json.dumps(index).encode()}, kind, id=f"{'.'.join(map(str, path))}: {value!a}")
    for kind, files, path, *values in MEMBERS
    for value in values
    for index in [with_member(json.loads(files["index.json"]), path, value)]
]
WRONG += [
    pytest.param(files | {name: change(files[name])}, kind, id=f"{name}, change {number}")
    for kind, files, name, *changes in CONTENTS
    for number, change in enumerate(changes)
]


@pytest.mark.parametrize(("files", "kind"), WRONG)
def test_what_contradicts_itself_is_one_sentence(tmp_path, vocab, files, kind):
    is_stream = kind == "not-found" or (kind == "cut-short" and files["index.json"] == PACKED["index.json"])
    with refuses(kind, None if is_stream else "inputs", error=InputError, says=str(tmp_path / "in")):
        import_ids(write_all(tmp_path / "in", files), tmp_path / "out", tokenizer=vocab)
    assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------------------------------------- the libraries


@pytest.mark.outside
@pytest.mark.parametrize("library", ["streaming", "litdata"])
def test_what_the_library_writes_is_read_equal(tmp_path, library, monkeypatch):
    """The version of benchmarks/environments.py, in an environment that is made if it is not there."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    python = importlib.import_module("environments").python_of(library, ROOT / ".bench")
    rng = random.Random(0)
    documents = [[*(rng.randrange(5, 82) for _ in range(rng.choice([1, 5, 6, 20, 300, 900]))), SEP] for _ in range(120)]
    command = [python, "-s", "-E", writers.__file__, library, tmp_path]
    subprocess.run(command, input=json.dumps(documents), text=True, check=True, capture_output=True)
    directories = sorted(tmp_path.iterdir())
    assert len(directories) == {"streaming": len(writers.MDS) + 5, "litdata": len(writers.LITDATA)}[library]
    for directory in directories:
        name, expected = directory.name, documents
        if name == "gzip":
            with refuses("unsupported", "inputs"):
                documents_of(directory)
            continue
        if name.startswith("equal"):
            expected = [ids[: writers.LENGTH] for ids in documents if len(ids) >= writers.LENGTH]
        read = documents_of(directory, dtype="int64" if name.startswith("bytes") else None)
        if name == "streams":
            expected = [document for number in range(12) for document in documents[number::12]]
        if name == "merged":  # in the order of the merged index
            read, expected = sorted(read), sorted(expected)
        assert read == expected, name
        assert len(list(directory.rglob("*.mds*" if library == "streaming" else "*.bin"))) > 1


def test_dtypes_have_the_numbers_of_the_libraries(tmp_path):
    assert {code: dtype for dtype, code in reference.MDS_CODES.items()} == mds._DTYPES
    torch = ["uint8", "int8", "int16", "int16", "int32", "int32", "int64", "int64"]
    numpy = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
    kinds = {f"no_header_tensor:{number}": dtype for number, dtype in enumerate(torch, 11)}
    kinds |= {f"no_header_numpy:{number}": dtype for number, dtype in enumerate(numpy)}
    for kind, dtype in kinds.items():
        assert documents_of(write_all(tmp_path / kind, reference.litdata(DOCUMENTS, kind, dtype))) == DOCUMENTS
