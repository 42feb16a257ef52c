"""Formats of text that other programs write give the documents that those programs see in them.

They are divided into units by their sizes and footers alone, and a part opens only what it makes.
"""

import gzip
import json
from dataclasses import replace
from types import SimpleNamespace
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
from support.sources import FEW, GROUP, PACK, as_arrow_file, as_parquet, blocks_of, made, read, saved

from bertdata import TextFormat
from bertdata.sources.inputs import find_inputs, local
from bertdata.sources.plan import find_blocks, split

# -------------------------------------------------------------------------------------------------------- CSV and TSV


PIECES = word_list("csv", "latin-1")
TABLES = {"a.parquet": as_parquet, "a.arrow": as_arrow_file}
LONG = [b'{"text": "stone"}', *(b'{"a": [' + b"[]," * 30 + b"0]%b}" % more for more in (b', "text": "river"', b""))]


@FEW
@given(st.lists(st.sampled_from(PIECES), max_size=20).map(b"".join), st.sampled_from([1, 5, 64]))
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


def test_a_long_line_of_json_is_read_by_pyarrow_alone_or_is_a_bad_row(folder):
    """Python's json takes 24 times the memory of a line."""
    path = put(folder / "long.jsonl", b"\n".join(LONG))
    with limits(longest_json=50), patch("json.loads", side_effect=json.loads) as parsed:
        assert [row[1] for row in read([path], on_error="skip")] == [b"stone", b"river"]
        assert all(len(call.args[0]) <= 50 for call in parsed.call_args_list)
        with refuses("bad-row", "inputs", says=f"{path}, line 3: not JSON (longer than"):
            read([path])


A_ROW, A_DOCUMENT = {"longest_row": 8}, {"longest_document": 1000, "block_bytes": 100}
LENGTHS = [  # constants, name, content, and what is read, or what is named as too long
    (A_ROW, "a.csv", b'n,text\n1,a\n2,"b\n3,c\n4,d\n', ", row 2 "),  # a field without an end
    (A_ROW, "a.csv", b"n,text\n1,123456789", ", row 1 "),
    (A_ROW, "a.csv", b"n,text\n1,a\n" + b"\n" * 20 + b"2,b\n", [b"a", b"b"]),  # blank lines are not rows
    ({"longest_row": 50, "block_bytes": 20}, "a.jsonl", b"\n".join(LONG), ": the document "),
    ({"longest_row": 50, "block_bytes": 20}, "a.txt", LONG[1], [LONG[1]]),
    *[(A_DOCUMENT, name, make(["a", "x" * 1001]), ", row 2: ") for name, make in TABLES.items()],
    *[(A_DOCUMENT, name, make(["a", "x" * 1000]), [b"a", b"x" * 1000]) for name, make in TABLES.items()],
]


@pytest.mark.parametrize(("constants", "name", "content", "expected"), LENGTHS)
def test_what_is_too_long_is_named(folder, limit, constants, name, content, expected):
    path = put(folder / name, content)
    limit(**constants)
    if isinstance(expected, str):
        with refuses("too-large", "inputs", given=str(path), says=f"{path}{expected}"):
            read([path])
    else:
        assert [text for _, text, _ in read([path])] == expected


# -------------------------------------------------------------------------------------------------------------- FASTA


LINES_OF_FASTA = word_list("fasta", "latin-1")
FASTA = st.lists(st.sampled_from(LINES_OF_FASTA), max_size=12).map(b"\n".join)
HEAD = b"\n \r\n;what\n>first\n"


@FEW
@given(
    st.lists(FASTA, min_size=1, max_size=3),
    st.sampled_from([1, 3, 64]),
    st.integers(1, 40),
    st.integers(0, 2**16 - 1),
    st.sampled_from([HEAD, HEAD, b"\n"]),
)
@example([b">a\nAC\n>b\nGT"], 1, 3, 2, HEAD)
@example([b"\n>\n;x\n\xc3\n;y\n\xa9\xff\n>", b">c\n"], 1, 4, 0xFFFF, HEAD)
@example([b">a\n ;AC\nACGT"], 1, 2, 0x5555, HEAD)
@example([b">a\nAC", b"AC\n>a"], 3, 40, 1, b"\n")
@example([b";a\n \nAC\n"], 1, 40, 1, b"\n")
def test_records_of_fasta(folder, contents, block_bytes, shard_size, mask, head):
    """In units of their bytes, of which some are not wanted, and compressed; and which input has an invalid byte."""
    contents = [head + content for content in contents]
    expected, base = [], 0
    for number, content in enumerate(contents):
        for start, places in reference.fasta(content) or ():
            raw = bytes(content[place] for place in places)
            expected.append(((base + start) // shard_size, *reference.decode(raw), number))
        base += len(content)
    paths = [put(folder / f"{number}.fa", content) for number, content in enumerate(contents)]
    packed = [put(folder / f"{number}.fna.gz", gzip.compress(content)) for number, content in enumerate(contents)]
    headless = [path for path, each in zip(paths, contents, strict=True) if reference.fasta(each) is None]
    with limits(block_bytes=block_bytes):
        if headless:
            with refuses("not-of-format", "inputs", given=str(headless[0]), says=f"{headless[0]}, line "):
                read(paths, on_error="skip")
            return
        assert read(paths, shard_size=shard_size) == [each[:3] for each in expected]
        some = read(paths, lambda unit: bool(mask >> unit % 16 & 1), shard_size=shard_size, documents="file")
        assert some == [each[:3] for each in expected if mask >> each[0] % 16 & 1]
        assert [each[1:] for each in read(packed)] == [each[1:3] for each in expected]
        bad = [some.first_replaced[0] for _, some in blocks_of(paths) if some.first_replaced]
    assert bad[:1] == [number for *_, num_replaced, number in expected if num_replaced][:1]


# ------------------------------------------------------------------------------------------------ Parquet, save_to_disk


def test_row_groups_are_cut_by_the_bytes_of_the_field(folder):
    path = folder / "groups.parquet"
    rows = [{"c": "short", "b": f"{number} " * 99} for number in range(8)]
    pq.write_table(pa.table({"a": rows}), path, row_group_size=1)
    units = [[unit for unit, *_ in read([path], text_key=key, shard_size=300)] for key in ("a.b", "a.c")]
    assert units[0][-1] > units[1][-1] > 0


def test_a_saved_dataset_under_a_url_is_refused(bucket):
    """Its order stands in a file, and files that are not its own may be beside it."""
    for name, content in saved("abc").items():
        bucket.put(name, content)
    url = f"{bucket.url}/d/"
    with refuses("unsupported", "inputs", given=url):
        find_inputs([url])
    assert len(find_inputs([url], include=["*.arrow"]).files) == 2


# --------------------------------------------------------------------------------------------------------------- units

WORDS = st.text("ab é\n", max_size=12)
FILES = st.lists(
    st.tuples(st.sampled_from(["text", "jsonl", "gzip", "parquet", "arrow", "csv"]), st.lists(WORDS, max_size=9)),
    min_size=1,
    max_size=5,
)


def expected(inputs, kinds, size):
    """(unit, text) by the rule in docs/format.md, one input after the other."""
    result, first, before, is_open = [], 0, 0, False
    for (path, starts), kind in zip(inputs, kinds, strict=True):
        on_disk = path.stat().st_size
        is_plain = kind in ("text", "jsonl")
        if is_open and not is_plain:
            first, before, is_open = first + max(1, -(-before // size)), 0, False
        count = 1 + 16 * on_disk // size
        units = [(before + start) // size for start, _ in starts]
        if kind == "parquet":
            footer = pq.ParquetFile(path).metadata
            of_group, count, passed, sizes = [], 0, None, 0
            for number in range(footer.num_row_groups):
                count += passed != (passed := sizes // size)
                of_group.append(count - 1)
                sizes += footer.row_group(number).column(1).total_uncompressed_size
            units, count = [of_group[row // GROUP] for row, _ in starts], max(1, count)
        elif not is_plain:
            units = [min(unit, count - 1) for unit in units]
        result += [(first + unit, text) for unit, (_, text) in zip(units, starts, strict=True)]
        if is_plain:
            before, is_open = before + on_disk, True
        else:
            first += count
    return result


def units_and_texts(paths, *wanted, **form):
    return [each[:2] for each in read(paths, *wanted, documents="line", **form)]


@FEW
@given(FILES, st.integers(1, 60), st.sampled_from([1, 7, 1 << 20]), st.integers(0, 2**16 - 1))
@example([("text", ["a"]), ("gzip", ["b"] * 9), ("text", ["c"]), ("jsonl", ["d"])], 3, 1 << 20, 7)
@example([("parquet", ["ab"] * 9), ("parquet", []), ("arrow", ["é"] * 9)], 20, 1, 5)
@example([("csv", ["é\n"] * 9), ("csv", []), ("tsv", ["", "a", ""]), ("text", ["b"])], 3, 1, 5)
@example([("gzip", ["a" * 3000] * 9), ("text", ["b"])], 1, 1 << 20, 7)  # it unpacks to more than was thought
@example([("text", []), ("text", []), ("gzip", ["a", "b"])], 60, 7, 7)  # the first part has no text
def test_documents_are_in_the_units_of_the_rule(folder, files, size, block_bytes, mask):
    """As a whole, without some units, and in parts, which have every unit once and are joined as a whole."""
    inputs = [made(folder, number, kind, rows) for number, (kind, rows) in enumerate(files)]
    paths, kinds, cpus = [path for path, _ in inputs], [kind for kind, _ in files], 1 + mask % 16
    with limits(block_bytes=block_bytes, part_bytes=block_bytes):
        every = units_and_texts(paths, shard_size=size)
        assert every == expected(inputs, kinds, size)
        some = units_and_texts(paths, lambda unit: bool(mask >> unit % 16 & 1), shard_size=size)
        plan = split([local(path) for path in paths], TextFormat(documents="line", shard_size=size))
        parts = plan.parts(cpus)
        blocks = [block for part in parts for block in find_blocks(plan, units=part.units)]
    assert some == [each for each in every if mask >> each[0] % 16 & 1]
    assert [block.unit for block in blocks for _ in block.decode().starts] == [unit for unit, _ in every]
    assert [unit for part in parts for unit in part.units] == list(plan.units)
    assert {part.units.start for part in parts} <= {part.units.start for part in plan.parts()}
    total = sum(path.stat().st_size for path in paths)
    assert sum(part.size for part in parts) == pytest.approx(total)
    assert all(part.size >= min(block_bytes, total / cpus / 8) * 0.999 for part in parts[:-1])
    assert len(parts) <= max(8 * cpus, total // block_bytes) + 1


def test_a_table_is_read_together_whatever_its_name(folder):
    """Where a row begins is known only from the first row on: text in quotation marks may have lines."""
    paths = [put(folder / name, b'text\n"a\nb"\n' * 9) for name in ("a.csv", "a.txt")]
    plans = [split([local(path)], TextFormat(kind="csv", shard_size=10)) for path in paths]
    assert plans[0].places == split([local(paths[0])], TextFormat(shard_size=10)).places == plans[1].places
    assert [part.units for part in plans[1].parts()] == [plans[1].units]


def test_a_parquet_file_that_loses_its_column_after_the_plan_is_refused(folder):
    path = put(folder / "a.parquet", as_parquet(["the stone"]))
    plan = split([local(path)], TextFormat())
    pq.write_table(pa.table({"other": ["river"]}), path)
    with refuses("no-column", "text_key", given="text"):
        list(find_blocks(plan))


@pytest.mark.parametrize("kind", ["files of zstd", "files", "files, each a document"])
def test_a_part_of_four_reads_a_quarter(folder, kind):
    """Of the text on disk, in 16 files. It opens no other file."""
    rows, opened = [f"the stone {number} under the river {number * 7919 % 10007}\n" * 15 for number in range(160)], []
    size, ending = (1 << 30, ".zst") if "zstd" in kind else (len("\n".join(rows[:10])), "")
    texts = ["\n".join(rows[first : first + 10]).encode()[:size] for first in range(0, 160, 10)]
    paths = [put(folder / f"{number:02}.txt{ending}", PACK[ending](text)) for number, text in enumerate(texts)]
    sources = [SimpleNamespace(open=lambda path=path: opened.append(path) or path.open("rb")) for path in paths]
    files = [replace(local(path), remote=source) for path, source in zip(paths, sources, strict=True)]
    plan = split(files, TextFormat(shard_size=size, documents="file" if "each" in kind else "blank"))
    shares = []
    for number in range(4):
        opened.clear()
        for part in plan.parts()[number::4]:
            assert list(find_blocks(plan, units=part.units))
        shares.append(sum(path.stat().st_size for path in opened))
    assert sum(shares) == sum(file.size for file in files)
    assert all(0.2 < share / sum(shares) < 0.3 for share in shares)
