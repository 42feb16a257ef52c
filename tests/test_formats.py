"""Formats of text that other programs write give the documents that those programs see in them."""

import csv
import gzip
import itertools
from unittest.mock import patch

import pytest
from helpers import refuses
from hypothesis import given
from hypothesis import strategies as st
from reference import documents as reference
from sources import FEW, as_csv, read, write

from bertdata.sources import documents


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("formats")


# -------------------------------------------------------------------------------------------------------- CSV and TSV


FIELDS = st.lists(
    st.one_of(st.sampled_from(['"', ",", "\t", "\r\n", "a", '""', "é", "\0"]), st.text(max_size=3)), max_size=5
)
TEXTS = st.lists(FIELDS.map("".join), max_size=6)
PIECES = [b'"', b'""', b",", b"\n", b"\r", b"\r\n", b"\n\n", b"a", b" ", b'"x"', b"\xff", b"\xc3\xa9", b"\xe2\x82",
          b"\0", b",b\n", b'"c"\n']  # fmt: skip


@FEW
@given(TEXTS, st.sampled_from(["\n", "\r\n"]), st.sampled_from([1, 5, 64]), st.integers(1, 40))
def test_texts_that_csv_wrote_are_read(folder, texts, line_end, block_bytes, shard_size):
    """In units of their bytes, and compressed."""
    raw = [text.encode() for text in texts]
    units = [start // shard_size for start in itertools.accumulate((len(each) + 1 for each in raw), initial=0)]
    paths = []
    for separator, ending in ((",", ".csv"), ("\t", ".tsv")):
        content = as_csv(texts, delimiter=separator, lineterminator=line_end, quoting=csv.QUOTE_ALL)
        paths += [write(folder / f"a{ending}", content), write(folder / f"a{ending}.gz", gzip.compress(content))]
    with patch.object(documents, "BLOCK_BYTES", block_bytes):
        for path in paths:
            found = read([path], shard_size=shard_size)
            assert [each[1:] for each in found] == [(each, 0) for each in raw]
            most = 16 * path.stat().st_size // shard_size
            assert [unit for unit, *_ in found] == [min(unit, most) for unit in units[:-1]]


@FEW
@given(st.lists(st.sampled_from(PIECES), max_size=20).map(b"".join), st.sampled_from([1, 5, 64]))
def test_rows_are_those_of_csv(folder, content, block_bytes):
    """Whatever the bytes are: rows with as many fields as the header have a text, and others are skipped."""
    path = write(folder / "any.csv", b"a,text\r\n" + content)
    rows = reference.delimited(content, 2)
    with patch.object(documents, "BLOCK_BYTES", block_bytes):
        if rows is None:
            with refuses("not-of-format", "inputs", given=str(path)):
                read([path], on_error="skip")
        else:
            assert [each[1:] for each in read([path], on_error="skip")] == [
                reference.decode(row) for row in rows if row is not None
            ]


def test_columns_of_a_header(folder):
    path = write(folder / "a.csv", b'\xef\xbb\xbf"body, of it",n\r\n\r\n"a\r\nb",1\r\nc,2\r\n')
    assert read([path], text_key="body, of it") == [(0, b"a\r\nb", 0), (0, b"c", 0)]
    assert read([path], text_key="n") == [(0, b"1", 0), (0, b"2", 0)]
    with refuses("no-column", "text_key", given="text", says=f"{path} "):
        read([path])
    with refuses("not-of-format", "inputs", given=str(path)):
        read([write(path, b"text,text\na,b\n")])
    for content in (b"", b"\n\r\n\n", b'text,"a"b\n', b'text,"a'):
        with refuses("not-of-format", "inputs", given=str(path)):
            read([write(path, content)])


@pytest.mark.parametrize("bad", [b"1", b"1,b,c", b'1,"b"c'])
def test_a_bad_row_is_named_by_its_number(folder, bad):
    path = write(folder / "bad.csv", b'n,text\n1,"a\n\nb"\n\n' + bad + b"\n2,c\n")
    with refuses("bad-row", "inputs", says=f"{path}, row 2: "):
        read([path])
    assert read([path], on_error="skip") == [(0, b"a\n\nb", 0), (0, b"c", 0)]
    assert read([path], max_documents=1) == [(0, b"a\n\nb", 0)]  # what comes after is not judged


def test_a_field_without_an_end_is_named_and_never_swallows_the_rest(folder):
    path = write(folder / "open.csv", b'n,text\n1,a\n2,"b\n3,c\n4,d\n')
    for on_error in ("fail", "skip"):
        with refuses("not-of-format", "inputs", says=f"{path}, row 2: "):
            read([path], on_error=on_error)
    with patch.object(documents, "LONGEST_DOCUMENT", 8), refuses("too-large", "inputs", says=f"{path}, row 2 "):
        read([path])
    with patch.object(documents, "LONGEST_DOCUMENT", 8), refuses("too-large", "inputs", says=f"{path}, row 1 "):
        read([write(path, b"n,text\n1,123456789")])


def test_bytes_of_a_table_that_are_not_text(folder):
    path = write(folder / "bytes.csv", b"text\na\n\xe2\x82b\xff\n")
    assert read([path]) == [(0, b"a", 0), (0, "\ufffdb\ufffd".encode(), 2)]
    with refuses("not-text", "inputs", says=f"{path}, row 2 "):
        read([path], strict=True)
    western = write(folder / "western.tsv", "n\ttext\n1\tnaïve\n".encode("cp1252"))
    assert read([western], encoding="cp1252") == [(0, "naïve".encode(), 0)]
    for content in (bytes(range(256)) * 8, bytes(4096), b"PAR1" + bytes(1200)):
        for name, packed in (("junk.csv", content), ("junk.tsv.gz", gzip.compress(content))):
            with refuses("not-text", "inputs", given=str(folder / name)):
                read([write(folder / name, packed)])
