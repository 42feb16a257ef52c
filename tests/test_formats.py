"""Formats of text that other programs write give the documents that those programs see in them."""

import gzip
import json
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from reference import documents as reference
from support.commands import refuses
from support.data import word_list
from support.disk import put
from support.limits import limits
from support.sources import FEW, as_arrow, as_arrow_file, as_parquet, blocks_of, read

from bertdata.sources.inputs import find_inputs

# -------------------------------------------------------------------------------------------------------- CSV and TSV


BLOCKS = st.sampled_from([1, 5, 64])
PIECES = word_list("csv", "latin-1")


@FEW
@given(st.lists(st.sampled_from(PIECES), max_size=20).map(b"".join), BLOCKS)
def test_rows_are_those_of_csv(folder, content, block_bytes):
    """Whatever the bytes are: rows with as many fields as the header have a text, and others are skipped."""
    path = put(folder / "any.csv", b"a,text\r\n" + content)
    rows = reference.delimited(content, 2)
    with limits(block_bytes=block_bytes):
        if rows is None:
            with refuses("not-of-format", "inputs", given=str(path)):
                read([path], on_error="skip")
        else:
            assert [each[1:] for each in read([path], on_error="skip")] == [
                reference.decode(row) for row in rows if row is not None
            ]


def test_a_field_without_an_end_is_named_and_never_swallows_the_rest(folder):
    path = put(folder / "open.csv", b'n,text\n1,a\n2,"b\n3,c\n4,d\n')
    for on_error in ("fail", "skip"):
        with refuses("not-of-format", "inputs", says=f"{path}, row 2: "):
            read([path], on_error=on_error)
    with limits(longest_row=8), refuses("too-large", "inputs", says=f"{path}, row 2 "):
        read([path])
    with limits(longest_row=8), refuses("too-large", "inputs", says=f"{path}, row 1 "):
        read([put(path, b"n,text\n1,123456789")])
    with limits(longest_row=8):  # blank lines are no part of a row
        assert read([put(path, b"n,text\n1,a\n" + b"\n" * 20 + b"2,b\n")]) == [(0, b"a", 0), (0, b"b", 0)]


def test_a_long_line_of_json_is_read_by_pyarrow_alone_or_is_a_bad_row(folder):
    """Python's json takes 24 times the memory of a line. A line of more than LONGEST_ROW bytes is refused."""
    rows = [b'{"text": "stone"}', b'{"a": [' + b"[]," * 30 + b'0], "text": "river"}', b'{"a": [' + b"[]," * 30 + b"0]}"]
    path = put(folder / "long.jsonl", b"\n".join(rows) + b"\n")
    with limits(longest_json=50), patch("json.loads", side_effect=json.loads) as parsed:
        assert [row[1] for row in read([path], on_error="skip")] == [b"stone", b"river"]
        assert all(len(call.args[0]) <= 50 for call in parsed.call_args_list)
        with refuses("bad-row", "inputs", says=f"{path}, line 3: not JSON (longer than"):
            read([path])
    with limits(longest_row=50, block_bytes=20):
        with refuses("too-large", "inputs", given=str(path)):
            read([path])
        assert len(read([put(folder / "long.txt", rows[1])])) == 1


@pytest.mark.parametrize(("name", "make"), [("a.parquet", as_parquet), ("a.arrow", as_arrow_file)])
def test_a_text_of_a_table_that_is_too_long_is_named(folder, name, make):
    path = put(folder / name, make(["stone", "x" * 1000, "y" * 1001]))
    with limits(longest_document=1000, block_bytes=100):
        assert len(read([path], max_documents=2)) == 2
        with refuses("too-large", "inputs", given=str(path), says=f"{path}, row 3: "):
            read([path])


# -------------------------------------------------------------------------------------------------------------- FASTA


LINES_OF_FASTA = word_list("fasta", "latin-1")
FASTA = st.lists(st.sampled_from(LINES_OF_FASTA), max_size=12).map(b"\n".join)


@FEW
@given(
    st.lists(FASTA, min_size=1, max_size=3), st.sampled_from([1, 3, 64]), st.integers(1, 40), st.integers(0, 2**16 - 1)
)
@example([b">a\nAC\n>b\nGT"], 1, 3, 2)
@example([b"\n>\n;x\n\xc3\n;y\n\xa9\xff\n>", b">c\n"], 1, 4, 0xFFFF)
@example([b">a\n ;AC\nACGT"], 1, 2, 0x5555)
def test_records_of_fasta(folder, contents, block_bytes, shard_size, mask):
    """In units of their bytes, of which some are not wanted, and compressed; and which input has an invalid byte."""
    contents = [b"\n \r\n;what\n>first\n" + content for content in contents]
    expected, base = [], 0
    for number, content in enumerate(contents):
        for start, places in reference.fasta(content):
            raw = bytes(content[place] for place in places)
            expected.append(((base + start) // shard_size, *reference.decode(raw), number))
        base += len(content)
    paths = [put(folder / f"{number}.fa", content) for number, content in enumerate(contents)]
    packed = [put(folder / f"{number}.fna.gz", gzip.compress(content)) for number, content in enumerate(contents)]
    with limits(block_bytes=block_bytes):
        assert read(paths, shard_size=shard_size) == [each[:3] for each in expected]
        some = read(paths, lambda unit: bool(mask >> unit % 16 & 1), shard_size=shard_size)
        assert some == [each[:3] for each in expected if mask >> each[0] % 16 & 1]
        assert [each[1:] for each in read(packed)] == [each[1:3] for each in expected]
        bad = [some.first_replaced[0] for _, some in blocks_of(paths) if some.first_replaced]
    assert bad[:1] == [number for *_, num_replaced, number in expected if num_replaced][:1]


@FEW
@given(FASTA, st.sampled_from([1, 3, 1 << 20]))
def test_text_before_the_first_record_is_named(folder, content, block_bytes):
    path = put(folder / "head.fasta", b"\n" + content)
    records = reference.fasta(b"\n" + content)
    with limits(block_bytes=block_bytes):
        if records is None:
            with refuses("not-of-format", "inputs", given=str(path), says=f"{path}, line "):
                read([path], on_error="skip")
        else:
            assert len(read([path])) == len(records)


# ------------------------------------------------------------------------------------------------------ save_to_disk


def test_row_groups_are_cut_by_the_bytes_of_the_field(folder):
    path = folder / "groups.parquet"
    struct = pa.StructArray.from_arrays(
        [pa.array(["short"] * 8), pa.array([f"{n} " * 99 for n in range(8)])], ["c", "b"]
    )
    pq.write_table(pa.table({"a": struct}), path, row_group_size=1)
    units = [[unit for unit, *_ in read([path], text_key=key, shard_size=300)] for key in ("a.b", "a.c")]
    assert units[0][-1] > units[1][-1] > 0


def save(directory, rows, *, shards=2, **state):
    """What save_to_disk of datasets writes, with the shards in the reverse order of their names."""
    put(directory / "dataset_info.json", "{}")
    names = [f"data-{number:05}.arrow" for number in reversed(range(shards))]
    for number, name in enumerate(names):
        put(directory / name, as_arrow(rows[number::shards]))
    put(directory / "state.json", json.dumps({"_data_files": [{"filename": name} for name in names]} | state))
    return names


def test_a_directory_of_save_to_disk_stands_for_its_files_in_their_order(tmp_path):
    directory = tmp_path / "saved"
    names = save(directory, ["a", "b", "c", "d", "e", "f"], shards=3, _indices_data_files=None)
    put(directory / "cache-1.arrow", as_arrow(["no"]))
    found = lambda **selection: [Path(str(file)) for file in find_inputs([directory], **selection).files]  # noqa: E731
    assert found() == [directory / name for name in names]
    assert [text for _, text, _ in read(found())] == [b"a", b"d", b"b", b"e", b"c", b"f"]
    assert found(exclude=[names[1]]) == [directory / names[0], directory / names[2]]
    assert found(include=[names[1]]) == [directory / names[1]]
    (directory / names[1]).unlink()
    with refuses("not-found", given=str(directory / names[1])):
        found()
    for content, kind in (
        ({"_indices_data_files": [{"filename": "i.arrow"}]}, "unsupported"),
        ({"_data_files": [{"filename": "../a.arrow"}]}, "not-of-format"),
        ({"_data_files": [{"filename": "a\0.arrow"}]}, "not-of-format"),
        ({"_data_files": None}, "not-of-format"),
    ):
        save(directory, ["a"], **content)
        with refuses(kind, "inputs", given=str(directory)):
            found()


def test_of_a_directory_of_several_saved_datasets_one_is_named(tmp_path):
    put(tmp_path / "dataset_dict.json", "{}")
    for name in ("train", "test"):
        save(tmp_path / name, ["a"], shards=1)
    with refuses("wrong-file-type", "inputs", given=str(tmp_path), says=f"{tmp_path / 'test'}, {tmp_path / 'train'}"):
        find_inputs([tmp_path])
    for inputs, selection in (([tmp_path / "train"], {}), ([tmp_path], {"include": ["train/*.arrow"]})):
        files = [str(file) for file in find_inputs(inputs, **selection).files]
        assert files == [str(tmp_path / "train" / "data-00000.arrow")]


def test_a_saved_dataset_under_a_url_is_refused(bucket, tmp_path):
    """Its order stands in a file, and files that are not its own may be beside it."""
    save(tmp_path / "saved", ["a", "b", "c"])
    for path in (tmp_path / "saved").iterdir():
        bucket.put(f"saved/{path.name}", path.read_bytes())
    url = f"{bucket.url}/saved/"
    with refuses("unsupported", "inputs", given=url):
        find_inputs([url])
    assert len(find_inputs([url], include=["*.arrow"]).files) == 2
