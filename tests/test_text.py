"""Text is cut into documents as docs/format.md says, wherever blocks, units and files happen to end."""

import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from reference import documents as reference
from support.commands import refuses
from support.disk import put
from support.limits import limits
from support.sources import BYTES, CONTENTS, blocks_of, read

from bertdata.sources.documents import Documents
from bertdata.sources.jsonl import texts_of
from bertdata.sources.kernels import TEXT_PADDING, first_invalid

KINDS, BLOCK_BYTES = st.sampled_from(["blank", "line", "file"]), st.sampled_from([1, 3, 64, 1 << 20])
FAR = 2**33  # bytes from one line to the next
LONG = [  # with what ends a document, or is invalid, where words of 64 bytes end
    [b"a" * 64 + b"\n" + b"b" * 63 + b"\xe2\x82\n\n" + b"c" * 128 + b"\r"],
    [b"\xff" + b"a" * 70 + b"\n" + b"\xc3\xa9" * 70 + b"\n\n"],
]
MASKS = st.integers(0, 2**16 - 1) | st.just(2**15)  # of units that are wanted, a bit for each of 16


def files(folder, contents, ending=".txt"):
    return [put(folder / f"{number}{ending}", content) for number, content in enumerate(contents)]


def wanted(mask):
    return lambda unit: bool(mask >> unit % 16 & 1)


def expected(contents, kind, shard_size):
    """What `read` gives, and (unit, (input, place)) of the first invalid byte of documents, by the reference."""
    documents, invalid, base = [], [], 0
    for number, content in enumerate(contents):
        for start, raw in reference.documents(content, kind):
            documents.append(((base + start) // shard_size, *reference.decode(raw)))
            if documents[-1][2]:
                invalid.append((documents[-1][0], (number, reference.first_invalid(content, start))))
        base += len(content)
    return documents, invalid


@given(CONTENTS, KINDS, BLOCK_BYTES, st.integers(1, 40), st.sampled_from([None, 1, 2, 5]), MASKS)
@example(LONG[0], "line", 3, 300, None, 1)
@example(LONG[1], "blank", 1 << 20, 300, None, 1)
@example([b"a\r", b"b\r\r\n\r\nc"], "blank", 1, 7, None, 1)
@example([b"a\r\n\r\n\r", b"\r\n", b" \na"], "blank", 3, 1, None, 2)
@example([b"a\r\nb\r"], "line", 3, 4, None, 2)
@example([b"a\n\n\r\n", b"\n \n"], "file", 1, 4, None, 0)
@example([b"a\n\nb", b"c\n\nd\n\ne"], "blank", 5, 2, 3, 2)
@example([b"\n\n\na\n\nb\r\n\r\n \n\n\n\nc"], "blank", 1, 2, None, 1 << 1 | 1 << 6)
@example([b"ab\ncd\nef", b"\n\ngh\n"], "line", 64, 4, None, 1 << 1)
@example([b" \n" * 9 + b"a"], "line", 3, 4, None, 1 << 4)
@example([b"a\nb\nc\nd\n"], "line", 1 << 20, 2, None, 0xAAAA)
@example([b"a\nb\nc\n", b"d\ne\n"], "line", 1 << 20, 2, 3, 0xAAAA)
def test_documents_equal_those_of_the_reference(folder, contents, kind, block_bytes, shard_size, limit, mask):
    """The first of them, too, and those of gzip with two members.

    Units that are wanted are read as if all were, also if max_documents, which counts those of others, ends it.
    """
    packed = [gzip.compress(content[:9]) + gzip.compress(content[9:]) for content in contents]
    form = {"documents": kind, "shard_size": shard_size, "max_documents": limit}
    with limits(block_bytes=block_bytes):
        plain = read(files(folder, contents), **form)
        unpacked = read(files(folder, packed, ".txt.gz"), **form)
        for paths, every in ((files(folder, contents), plain), (files(folder, packed, ".txt.gz"), unpacked)):
            assert read(paths, wanted(mask), **form) == [each for each in every if wanted(mask)(each[0])]
    assert plain == expected(contents, kind, shard_size)[0][:limit]
    assert [each[1:] for each in unpacked] == [each[1:] for each in plain]


@given(CONTENTS, KINDS, BLOCK_BYTES, st.integers(1, 40), MASKS)
@example(LONG[0], "line", 3, 300, 1)
@example(LONG[1], "blank", 1 << 20, 300, 1)
@example([b"\xffa\n\xff"], "blank", 1 << 20, 300, 1)
def test_the_first_invalid_byte_is_placed(folder, contents, kind, block_bytes, shard_size, mask):
    """Blocks say where that of each unit is, whichever units are wanted, and strict refuses it."""
    paths, (_, invalid) = files(folder, contents), expected(contents, kind, shard_size)
    with limits(block_bytes=block_bytes):
        blocks = [*blocks_of(paths, wanted(mask), documents=kind, shard_size=shard_size)]
    found = {block.unit: some.first_replaced for block, some in reversed(blocks) if some.first_replaced}
    assert found == {unit: place for unit, place in reversed(invalid) if wanted(mask)(unit)}
    if invalid:
        number, byte = invalid[0][1]
        with refuses("not-text", "inputs", says=f"{paths[number]}, byte {byte} "):
            read(paths, documents=kind, strict=True)
    else:
        assert read(paths, documents=kind, strict=True) == read(paths, documents=kind)


LEADS = (0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xED, 0xEF, 0xF0, 0xF1, 0xF4, 0xF5, 0xFF)
AFTER_LEADS = [
    bytes([lead, second]) + rest
    for lead in LEADS
    for second in range(256)
    for rest in (b"", b"\x80", b"\x80\x80", b"\xbf\xbf", b"\x80\x7f", b"\xc0\x80")
]


@given(st.lists(st.one_of(st.binary(max_size=12), BYTES, st.text().map(str.encode))))
@example(AFTER_LEADS)
def test_invalid_bytes_are_found_where_python_finds_them(contents):
    for content in contents:
        index = first_invalid(np.frombuffer(content + bytes(TEXT_PADDING), np.uint8), 0, len(content))
        assert (None if index < 0 else index) == reference.first_invalid(content, 0), content


HERE = Path(__file__).parent
NESTED = (HERE / "nested.jsonl").read_bytes().splitlines()
ROWS = [
    *(HERE / "rows.jsonl").read_bytes().splitlines(),
    b'{"text": "m\x00"}',
    b'{"text": "n"\x00}',
    b'{"text": "\xff"}',
    b'{"\xff": 1, "text": "p"}',
    b'\xef\xbb\xbf{"text": "v"}',
    b'{"text": "w", "n": ' + b"[" * 60 + b"]" * 60 + b"}",
    b'{"text": "ae", "n": ' + b"9" * 5000 + b"}",
]


def lines_of(rows):
    """Documents of these lines, which begin at multiples of FAR."""
    starts, ends = np.arange(len(rows)) * FAR, np.append(0, np.cumsum([len(row) + 1 for row in rows]))
    bad = [reference.first_invalid(row, 0) for row in rows]
    invalid = np.array([-1 if index is None else FAR * n + index for n, index in enumerate(bad)])
    text = np.frombuffer(b"\n".join([*rows, bytes(TEXT_PADDING)]), np.uint8)
    none = np.zeros(len(rows), np.int64)
    return Documents(text, ends, starts, none, invalid, none, none)


def rows_for(key, rows):
    some = st.lists(st.one_of(st.sampled_from(rows), st.sampled_from(rows[:2])), min_size=1, max_size=6)
    return st.tuples(st.just(key), some)


@given(rows_for("text", ROWS) | rows_for("a.b", NESTED))
@example(("text", ROWS))
@example(("text", [b'{"text": "a"} {"text": "b"}', b'{"text":', b'"c"}']))
@example(("text", [b'{"text": "a"} {"text": "b"}', b"{\x00}"]))
@example(("text", [b'{"a": [{}', b'{}], "text": "e"}', b'{"text": "a"} {"text": "b"}']))
def test_a_block_of_json_lines_is_what_its_lines_are(key_and_rows):
    """pyarrow takes a block at once, and must see in it what Python's json sees in each line; also in each alone."""
    key, every = key_and_rows
    for rows in (every, *([row] for row in every)):
        some = texts_of(lines_of(rows), key)
        texts = dict.fromkeys(range(0, FAR * len(rows), FAR))
        for number, start in enumerate(some.starts.tolist()):
            a, b = some.offsets[number : number + 2]
            texts[start] = some.text[a : b - 1].tobytes(), int(some.replaced[number])
            assert (some.invalid[number] >= 0) == (some.replaced[number] > 0)
        assert list(texts.values()) == [reference.json_text(row, key) for row in rows]
        assert [each.place for each in some.bad] == [start for start, text in texts.items() if text is None]


@pytest.mark.parametrize("encoding", ["PLAIN", "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY", None])
def test_parquet_of_any_encoding_is_read(folder, limit, encoding):
    """Also of a dictionary and a struct, with nulls; some texts are longer than may be decoded together."""
    limit(decoded_bytes=50)
    texts = [None, "a" * 100, "stone", "", "river", "stone", "stone", "b" * 60, "stone"]
    for key, column in (("text", pa.array(texts)), ("a.b", pa.array([{"b": text} for text in texts]))):
        path, how = folder / f"{key}.parquet", {"column_encoding": {key: encoding}} if encoding else {}
        table = pa.table({key.split(".")[0]: column})
        pq.write_table(table, path, row_group_size=4, use_dictionary=encoding is None, **how)
        found = [text for _, text, _ in read([path], text_key=key, on_error="skip")]
        assert found == [text.encode() for text in texts if text is not None]


@pytest.mark.parametrize("content", [bytes(range(256)) * 8, bytes(4096), b"\x80" * 1024, b"ab\0" * 1000])
@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".txt.gz", ".csv", ".tsv.gz", ".fa", ".fna.gz"])
def test_junk_is_refused(folder, content, ending):
    path = put(folder / f"junk{ending}", gzip.compress(content) if ending.endswith(".gz") else content)
    with refuses("not-text", "inputs", given=str(path)):
        read([path])


def test_documents_behind_4_gib_are_found(tmp_path):
    with open(tmp_path / "sparse.txt", "wb") as file:
        file.seek((5 << 30) - 1)
        file.write(b"\nthe stone\nriver\n")
    found = read([tmp_path / "sparse.txt"], lambda unit: unit == 5, documents="line", shard_size=1 << 30)
    assert found == [(5, b"the stone", 0), (5, b"river", 0)]
