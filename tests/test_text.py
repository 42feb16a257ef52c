"""Text is cut into documents as docs/format.md says, wherever blocks, units and files happen to end."""

import gzip
import itertools
import json
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from reference import documents as twin

from bertdata.errors import InputError, UsageError
from bertdata.sources import documents
from bertdata.sources.blocks import read_blocks
from bertdata.sources.documents import TextFormat
from bertdata.sources.find import find_inputs
from bertdata.sources.inputs import local
from bertdata.sources.jsonl import texts_of
from bertdata.sources.kernels import ROOM, Cuts, cut, first_invalid
from bertdata.sources.split import split
from bertdata.sources.texts import Documents

PIECES = [
    b"a", b"bc ", b" ", b"\t", b"\n", b"\n\n", b"\r\n", b"\r", b"\0", b"\xff", b"\xe2\x82", b"\xc3\xa9",
    b"\xf0\x9f\x98\x80", b"\xf0\x9f", b"\xef\xbf\xbd", b"\xed\xa0\x80", b"\x0b", b"\x0c", b"\xe2\x80\xa8",
]  # fmt: skip
BYTES = st.one_of(st.lists(st.sampled_from(PIECES), max_size=30).map(b"".join), st.binary(max_size=30))
KINDS = st.sampled_from(["blank", "line", "file"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("text")


def write(folder, *contents, ending=".txt"):
    paths = [folder / f"{number}{ending}" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths


def read(paths, **form):
    """(unit, text, replaced) of each document, after checking that the blocks themselves are well made."""
    found = []
    for block in read_blocks(split([local(path) for path in paths], TextFormat(**form))):
        assert block.num_documents > 0
        assert block.offsets[0] == 0
        assert block.offsets[-1] == block.num_bytes <= len(block.data) - ROOM
        assert block.replaced.size == block.num_documents
        assert (block.first_replaced is None) == (not block.replaced.any())
        block.data[: block.num_bytes].decode()
        for start, stop, replaced in zip(block.offsets, block.offsets[1:], block.replaced, strict=False):
            assert block.data[stop - 1 : stop] == b"\n"
            found.append((block.unit, block.data[start : stop - 1], int(replaced)))
    return found


def expected(contents, kind, shard_size=1 << 30):
    """The same by the twin."""
    found, base = [], 0
    for content in contents:
        for start, raw in twin.documents(content, kind):
            found.append(((base + start) // shard_size, *twin.decode(raw)))
        base += len(content)
    return found


# -------------------------------------------------------------------------------------------------------- plain text


@given(st.lists(BYTES, min_size=1, max_size=3), KINDS, st.sampled_from([1, 3, 64, 1 << 20]), st.integers(1, 40))
@example([b"a\r", b"b\r\r\n\r\nc"], "blank", 1, 7)
@example([b"a\r\n\r\n\r", b"\r\n", b" \na"], "blank", 3, 1)
@example([b"a\r\nb\r"], "line", 3, 4)
@example([b"a\n\n\r\n", b"\n \n"], "file", 1, 4)
def test_documents_equal_their_twin(folder, contents, kind, block_bytes, shard_size):
    with patch.object(documents, "BLOCK_BYTES", block_bytes):
        found = read(write(folder, *contents), documents=kind, shard_size=shard_size)
    assert found == expected(contents, kind, shard_size)


@given(st.lists(BYTES, min_size=1, max_size=3), KINDS, st.integers(1, 5))
def test_max_documents_takes_the_first(folder, contents, kind, limit):
    with patch.object(documents, "BLOCK_BYTES", 5):
        assert read(write(folder, *contents), documents=kind, max_documents=limit) == expected(contents, kind)[:limit]


@given(st.lists(BYTES, min_size=1, max_size=3), KINDS)
def test_the_first_invalid_byte_is_placed(folder, contents, kind):
    """Blocks say where it is, and strict refuses it."""
    places = [
        (number, twin.first_invalid(content, start))
        for number, content in enumerate(contents)
        for start, raw in twin.documents(content, kind)
        if twin.decode(raw)[1]
    ]
    paths = write(folder, *contents)
    blocks = list(read_blocks(split([local(path) for path in paths], TextFormat(documents=kind))))
    assert [block.first_replaced for block in blocks if block.first_replaced] == places[:1]
    if places:
        path, place = paths[places[0][0]], places[0][1]
        with pytest.raises(InputError, match=f"{path}, byte {place} is not valid UTF-8"):
            read(paths, documents=kind, strict=True)
    else:
        assert read(paths, documents=kind, strict=True) == read(paths, documents=kind)


@given(BYTES, st.booleans(), st.booleans(), st.integers(0, 1 << 40))
@example(b"a" * 64 + b"\n" + b"b" * 63 + b"\xe2\x82\n\n" + b"c" * 128 + b"\r", False, True, 7)
@example(b"\xff" + b"a" * 70 + b"\n" + b"\xc3\xa9" * 70 + b"\n\n", False, False, 0)
def test_cut_equals_its_twin(content, by_line, is_end, place):
    """Documents, and where each has its first invalid byte. What is not complete is left for the next call."""
    data = np.frombuffer(content + bytes(ROOM), np.uint8)
    numbers = [np.empty(len(content) + 2, np.int64) for _ in range(4)]
    cuts = Cuts(np.zeros(len(content) + 1 + ROOM, np.uint8), *numbers)
    count = cut(data, len(content), place, is_end, by_line, cuts)
    used = int(cuts.used[0])
    bounds = cuts.offsets[: count + 1].tolist()
    found = [
        (start, cuts.text[a : b - 1].tobytes(), at)
        for start, a, b, at in zip(cuts.starts.tolist(), bounds, bounds[1:], cuts.invalid.tolist(), strict=False)
    ]
    kind = "line" if by_line else "blank"
    whole = twin.documents(content[:used], kind)
    places = [twin.first_invalid(raw, 0) for _, raw in whole]
    assert [(start - place, text) for start, text, _ in found] == whole
    for (start, raw), (_, _, at), bad in zip(whole, found, places, strict=True):
        assert (at == -1) == (bad is None)
        if bad is not None:  # `raw` lacks the carriage returns before newlines, which the input has
            assert content[at - place : at - place + 1] == raw[bad : bad + 1]
            assert content[start : at - place].replace(b"\r\n", b"\n") == raw[:bad]
    if is_end:
        assert used == len(content) or not content[used:].strip(b" \t\r\n")
    else:
        assert whole + [(used + start, raw) for start, raw in twin.documents(content[used:], kind)] == twin.documents(
            content, kind
        )


@given(st.one_of(st.binary(max_size=12), BYTES, st.text().map(str.encode)))
def test_invalid_bytes_are_found_where_python_finds_them(content):
    place = first_invalid(np.frombuffer(content + bytes(ROOM), np.uint8), 0, len(content))
    assert (None if place < 0 else place) == twin.first_invalid(content, 0)


@pytest.mark.parametrize("lead", [0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xED, 0xEF, 0xF0, 0xF1, 0xF4, 0xF5, 0xFF])
def test_every_second_byte_after_a_lead_is_judged_as_python_judges_it(lead):
    for second in range(256):
        for rest in (b"", b"\x80", b"\x80\x80", b"\xbf\xbf", b"\x80\x7f", b"\xc0\x80"):
            content = bytes([lead, second]) + rest
            place = first_invalid(np.frombuffer(content + bytes(ROOM), np.uint8), 0, len(content))
            assert (None if place < 0 else place) == twin.first_invalid(content, 0), content


def test_ordinary_text_in_blocks_of_a_mebibyte(folder):
    """Documents of many sizes around the real block size, one of them larger than two blocks."""
    sizes = [10, 1 << 20, (1 << 20) - 1, 2_500_000, 3, 77_777] + [9_000] * 200
    content = b"\r\n\r\n".join(b"x" * (size // 2) + b"\r\n" + b"y" * (size // 2) for size in sizes)
    blocks = list(read_blocks(split([local(path) for path in write(folder, content)], TextFormat())))
    assert len(blocks) > 3
    found = [block.data[a:b] for block in blocks for a, b in itertools.pairwise(block.offsets)]
    assert found == [b"x" * (size // 2) + b"\n" + b"y" * (size // 2) + b"\n" for size in sizes]
    read_so_far = [block.bytes_read for block in blocks]
    assert read_so_far == sorted(read_so_far)
    assert read_so_far[-1] == len(content)


# -------------------------------------------------------------------------------------------------------- compressed


@given(st.lists(BYTES, min_size=1, max_size=3), KINDS, st.sampled_from([3, 1 << 20]), st.integers(1, 40))
def test_gzip_is_read_as_what_it_holds(folder, contents, kind, block_bytes, shard_size):
    packed = [gzip.compress(content[:9]) + gzip.compress(content[9:]) for content in contents]  # two members
    with patch.object(documents, "BLOCK_BYTES", block_bytes):
        found = read(write(folder, *packed, ending=".txt.gz"), documents=kind, shard_size=shard_size)
    assert [each[1:] for each in found] == [each[1:] for each in expected(contents, kind)]


def test_damaged_gzip_is_named(folder):
    packed = gzip.compress("\n\n".join(f"document {number * 7919}" for number in range(3000)).encode())
    flipped = bytearray(packed)
    flipped[-6] ^= 1
    for content in (packed[:-1], packed[:5000], packed[:11], bytes(flipped), b"plain text", packed[:2] + b"\x09" * 99):
        (path,) = write(folder, content, ending=".gz")
        with pytest.raises(InputError, match=f"{path} is not a complete gzip file"):
            read([path])


# -------------------------------------------------------------------------------------------------------- JSON lines


@given(
    st.lists(st.text(st.characters(exclude_categories=())), max_size=6),
    st.booleans(),
    st.sampled_from([b"\n", b"\r\n", b"\n\n \n"]),
    st.sampled_from([1, 3, 64]),
    st.integers(1, 60),
)
def test_json_lines(folder, texts, ascii_only, line_end, block_bytes, shard_size):
    """Strings come out as they are, a lone surrogate as one U+FFFD."""
    lines = []
    for number, each in enumerate(texts):
        spell = json.dumps if ascii_only or not each.isprintable() else lambda s: json.dumps(s, ensure_ascii=False)
        lines.append(f'{{"id": {number}, "body": {spell(each)}}}'.encode() + line_end)
    starts = [0, *itertools.accumulate(len(line) for line in lines)]
    with patch.object(documents, "BLOCK_BYTES", block_bytes):
        paths = write(folder, b"".join(lines), ending=".jsonl")
        found = read(paths, text_key="body", shard_size=shard_size)
    fixed = ["".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in each) for each in texts]
    lone = [sum("\ud800" <= c <= "\udfff" for c in each) for each in texts]
    units = [start // shard_size for start in starts[:-1]]
    assert found == [(u, t.encode(), n) for u, t, n in zip(units, fixed, lone, strict=True)]
    packed = write(folder, gzip.compress(b"".join(lines)), ending=".ndjson.gz")
    assert read(packed, text_key="body", shard_size=shard_size) == found


def test_invalid_bytes_and_surrogates_in_json_are_counted_and_refused_by_strict(folder):
    content = b'{"text": "a"}\n{"text": "\xff\\ud800b"}\n'
    paths = write(folder, content, ending=".jsonl")
    assert read(paths) == [(0, b"a", 0), (0, "\ufffd\ufffdb".encode(), 2)]
    with pytest.raises(InputError, match="byte 24 is not valid UTF-8"):
        read(paths, strict=True)
    with pytest.raises(InputError, match="byte 0 is not valid UTF-8"):
        read(write(folder, b'{"text": "\\ud800"}', ending=".jsonl"), strict=True)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": "a"', "not JSON"),
        (b"plain words", "not JSON"),
        (b"[" * 200_000, "not JSON"),
        (b'{"body": "a"}', "no key 'text' in this row; give --text-key, fix the row, or use --on-error skip"),
        (b'["text"]', "no key 'text'"),
        (b'"text"', "no key 'text'"),
        (b"7", "no key 'text'"),
        (b'{"text": 7}', "the value of key 'text' is not a string"),
        (b'{"text": null}', "the value of key 'text' is not a string"),
    ],
)
@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_a_bad_line_of_json_is_named_by_its_number(folder, line, said, ending):
    content = b'{"text": "a"}\n\n  \n{"text": "b"}\r\n' + line + b'\n{"text": "c"}\n'
    (path,) = write(folder, gzip.compress(content) if ending.endswith("gz") else content, ending=ending)
    with pytest.raises(InputError, match=f"{path}, line 5: {said}"):
        read([path])


ROWS = [
    b'{"text": "a"}',
    b'{"n": 1, "text": "\\u00e9 \\ud83d\\ude00 \\n"}',
    b'{"text": "b", "text": "c"}',
    b'{"text": "\\ud800"}',
    b'{"text": "\\udc00x"}',
    b'{"text": null}',
    b'{"text": 7}',
    b'{"body": "a"}',
    b'{"text": "a"} {"text": "b"}',
    b'{"text":',
    b'"d"}',
    b'{"a": [{}',
    b'{}], "text": "e"}',
    b'[{"text": "f"}]',
    b'{"text": "g", "n": NaN}',
    b'{"text": "h", "n": 1e99999}',
    b'{"text": "i", "n": 01}',
    b'{"text": "j",}',
    b'{"text": "k"} ',
    b' {"text": "l"}',
    b'{"text": "m\0"}',
    b'{"text": "n"\0}',
    b'{"te\\u0078t": "o"}',
    b'{"text": "\xff"}',
    b'{"\xff": 1, "text": "p"}',
    b'{"n": {"text": "q"}, "text": "r"}',
    b"{",
    b"}",
    b'{"text": "s\\x"}',
    b'{"text": "t\tu"}',
    b'\xef\xbb\xbf{"text": "v"}',
    b'{"text": "w", "n": ' + b"[" * 60 + b"]" * 60 + b"}",
    b'{"text": "Inf", "n": Inf}',
    b'{"text": "aa", "n": -Inf }',
    b'{"text": "ab", "n": -NaN}',
    b'{"text": "ac", "n": [Inf]}',
    b'{"text": "ad Inf", "n": -Infinity}',
    b'{"text": "ae", "n": ' + b"9" * 5000 + b"}",
    b'{"n": 1, "n": "x", "text": ""}',
    b'{"text": "y"} // z',
    b'{"text": {"text": "z"}}',
    b'{"text": "\\u0000"}',
]


@given(st.lists(st.one_of(st.sampled_from(ROWS), st.sampled_from(ROWS[:2])), min_size=1, max_size=6))
@example([b'{"text": "a"} {"text": "b"}', b'{"text":', b'"c"}'])
@example([b'{"a": [{}', b'{}], "text": "e"}', b'{"text": "a"} {"text": "b"}'])
def test_a_block_of_json_lines_is_what_its_lines_are(rows):
    """pyarrow takes a block at once, and must see in it what Python's json sees in each line."""
    starts, ends = np.arange(len(rows)) * 1000, np.append(0, np.cumsum([len(row) + 1 for row in rows]))
    bad = [twin.first_invalid(row, 0) for row in rows]
    invalid = np.array([-1 if place is None else 1000 * n + place for n, place in enumerate(bad)])
    lines = Documents(bytearray(b"\n".join([*rows, bytes(ROOM)])), ends, starts, np.zeros(len(rows), np.int64), invalid)
    decoded = texts_of(lines, "text")
    found = dict.fromkeys(starts.tolist())
    for number, start in enumerate(decoded.documents.starts.tolist()):
        a, b = decoded.documents.offsets[number : number + 2]
        found[start] = bytes(decoded.documents.text[a : b - 1]), int(decoded.documents.replaced[number])
        assert (decoded.documents.invalid[number] >= 0) == (decoded.documents.replaced[number] > 0)
    assert list(found.values()) == [twin.json_text(row, "text") for row in rows]
    assert [place for place, _ in decoded.bad] == [start for start, text in found.items() if text is None]


@pytest.mark.parametrize("others", [[], [b'{"text": "a", "text": "b"}']])
def test_json_of_any_depth_is_json(others):
    """Alone, beside lines that pyarrow takes, and beside one that it does not."""
    deep = b'{"n": ' + b"[" * 100_000 + b"]" * 100_000 + b', "text": "deep"}'
    rows = [b'{"text": "a"}', deep, *others]
    ends = np.append(0, np.cumsum([len(row) + 1 for row in rows]))
    nothing = np.full(len(rows), -1)
    lines = Documents(bytearray(b"\n".join([*rows, bytes(ROOM)])), ends, np.arange(len(rows)), nothing * 0, nothing)
    documents, bad, *_ = texts_of(lines, "text")
    assert bytes(documents.text[: documents.num_bytes]) == b"a\ndeep\n" + b"b\n" * len(others)
    assert bad == []


# ----------------------------------------------------------------------------------------------------------- Parquet


@given(st.lists(st.text(max_size=20), max_size=12), st.integers(1, 4), st.integers(1, 60))
def test_parquet_rows(folder, texts, group, shard_size):
    path = folder / "rows.parquet"
    pq.write_table(pa.table({"n": range(len(texts)), "body": texts}, pa.schema([("n", "int64"), ("body", "string")])),
                   path, row_group_size=group)  # fmt: skip
    found = read([path], text_key="body", shard_size=shard_size)
    assert [(text, replaced) for _, text, replaced in found] == [(text.encode(), 0) for text in texts]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_parquet_of_many_rows_is_followed_by_other_inputs(folder, kind):
    rows = [f"row {number}\r\n" for number in range(5000)]
    path = folder / "rows.parquet"
    pq.write_table(pa.table({"text": pa.array(rows, kind)}), path)
    (after,) = write(folder, b"last\n", ending=".text")
    found = read([path, after], shard_size=1000)
    assert [each for _, each, _ in found] == [row.encode() for row in rows] + [b"last"]
    assert found[-1][0] == 1  # the table has one row group


def test_invalid_utf8_in_parquet_is_counted(folder):
    data = pa.py_buffer(b"ab\xffc")
    column = pa.StringArray.from_buffers(2, pa.py_buffer(np.array([0, 2, 4], np.int32)), data)
    path = folder / "rows.parquet"
    pq.write_table(pa.table({"text": column}), path)
    assert read([path]) == [(0, b"ab", 0), (0, "\ufffdc".encode(), 1)]


def test_unusable_parquet_is_named(folder):
    path = folder / "bad.parquet"
    pq.write_table(pa.table({"text": ["a", None], "number": [1, 2]}), path)
    with pytest.raises(InputError, match=f"{path}, row 2: the text is null"):
        read([path])
    with pytest.raises(
        InputError, match=f"{path} has no column 'body', only text, number; name the column with --text-key"
    ):
        read([path], text_key="body")
    with pytest.raises(InputError, match=f"{path}: column 'number' is int64, not a string"):
        read([path], text_key="number")
    whole = path.read_bytes()
    for content in (b"plain text", whole[:-1], whole[: len(whole) // 2], b"PAR1" + bytes(60) + b"PAR1"):
        path.write_bytes(content)
        with pytest.raises(InputError, match=f"{path} is not readable Parquet"):
            read([path])


# ------------------------------------------------------------------------------------------------------- not text


@pytest.mark.parametrize("content", [bytes(range(256)) * 8, bytes(4096), b"\x80" * 1024, b"ab\0" * 1000])
@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".txt.gz"])
def test_junk_is_refused(folder, content, ending):
    (path,) = write(folder, gzip.compress(content) if ending.endswith("gz") else content, ending=ending)
    with pytest.raises(InputError, match=f"{path} is not UTF-8 text"):
        read([path])


def test_text_in_an_old_encoding_is_not_junk(folder):
    content = "naïve façades, Häuser am Fluß\n".encode("latin-1") * 100
    (found,) = read(write(folder, content))
    assert found[2] == 400


def test_inputs_that_no_build_could_read(folder, tmp_path):
    (empty,) = write(folder, b"", ending=".empty")
    (text_file,) = write(folder, b"a")
    for path, said in (
        (tmp_path / "no", f"{tmp_path}/no cannot be read: No such file"),
        (tmp_path, f"{tmp_path} is neither a file nor a named pipe"),
        (Path("/dev/null"), "/dev/null is neither a file nor a named pipe"),
        (text_file / "no", "cannot be read: Not a directory"),
    ):
        with pytest.raises(InputError, match=said):
            local(path)
    with pytest.raises(InputError, match=f"{empty}, {empty}: empty file"):
        find_inputs([empty, empty])
    assert [file.size for file in find_inputs([empty, text_file]).files] == [0, 1]


@pytest.mark.parametrize(
    "wrong", [{"documents": "paragraph"}, {"shard_size": 0}, {"max_documents": 0}, {"max_documents": -1}]
)
def test_wrong_formats_are_named(wrong):
    with pytest.raises(UsageError):
        TextFormat(**wrong)
