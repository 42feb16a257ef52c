"""Formats of text that other programs write give the documents that those programs see in them.

They are divided into units by their sizes and footers alone, and a part reads only what it makes.
"""

import gzip

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
from support.sources import (
    FEW,
    GROUP,
    PACK,
    as_arrow_file,
    as_parquet,
    blocks_of,
    counting_reads,
    made,
    plan_of,
    read,
    saved,
)

from bertdata.sources.inputs import find_inputs
from bertdata.sources.plan import find_blocks

# -------------------------------------------------------------------------------------------------------- CSV and TSV


PIECES = word_list("csv", "latin-1")


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


# ------------------------------------------------------------------------------- tables, save_to_disk, and what is long


def test_the_bytes_of_null_rows_do_not_count(folder):
    """A null row may hide bytes; those after it are in the units that docs/format.md says."""
    buffers = [pa.py_buffer(bytes([0b110])), *pa.array(["hidden", "a", "b"]).buffers()[1:]]
    path = put(folder / "null.arrow", as_arrow_file(pa.Array.from_buffers(pa.string(), 3, buffers)))
    assert read([path], on_error="skip", shard_size=2) == [(0, b"a", 0), (1, b"b", 0)]


def test_a_parquet_file_that_loses_its_column_after_the_plan_is_refused(folder):
    plan = plan_of([put(folder / "a.parquet", as_parquet(["the stone"]))])
    put(folder / "a.parquet", as_parquet(pa.table({"other": ["river"]})))
    with refuses("no-column", "text_key", given="text"):
        list(find_blocks(plan))


def test_a_saved_dataset_under_a_url_is_refused(bucket):
    """Its order stands in a file, and files that are not its own may be beside it."""
    for name, content in saved("abc").items():
        bucket.put(name, content)
    with refuses("unsupported", "inputs", given=f"{bucket.url}/d/"):
        find_inputs([f"{bucket.url}/d/"])
    assert len(find_inputs([f"{bucket.url}/d/"], include=["*.arrow"]).files) == 2


LONG = [b'{"text": "stone"}', *(b'{"a": [' + b"[]," * 30 + b"0]%b}" % more for more in (b', "text": "river"', b""))]
TABLES = {"a.parquet": as_parquet, "a.arrow": as_arrow_file}
A_ROW, A_DOCUMENT, A_LINE = {"longest_row": 8}, {"longest_document": 1000, "block_bytes": 100}, {"longest_json": 50}
LENGTHS = [  # constants, name, content, and what is read, or the error
    (A_ROW, "a.csv", b'n,text\n1,a\n2,"b\n3,c\n4,d\n', ("too-large", ", row 2 ")),  # a field without an end
    (A_ROW, "a.csv", b"n,text\n1,123456789", ("too-large", ", row 1 ")),
    (A_ROW, "a.csv", b"n,text\n1,a\n" + b"\n" * 20 + b"2,b\n", [b"a", b"b"]),  # blank lines are not rows
    ({"longest_row": 50, "block_bytes": 20}, "a.jsonl", b"\n".join(LONG), ("too-large", ": the document ")),
    ({"longest_row": 50, "block_bytes": 20}, "a.txt", LONG[1], [LONG[1]]),
    (A_LINE, "a.jsonl", b"\n".join(LONG[:2]), [b"stone", b"river"]),  # by pyarrow; Python's json takes 24 times as much
    (A_LINE, "a.jsonl", b"\n".join(LONG), ("bad-row", ", line 3: not JSON (longer than")),
    *[(A_DOCUMENT, name, make(["a", "x" * 1001]), ("too-large", ", row 2: ")) for name, make in TABLES.items()],
    *[(A_DOCUMENT, name, make(["a", "x" * 1000]), [b"a", b"x" * 1000]) for name, make in TABLES.items()],
]


@pytest.mark.parametrize(("constants", "name", "content", "expected"), LENGTHS)
def test_what_is_too_long_is_named(folder, limit, constants, name, content, expected):
    path = put(folder / name, content)
    limit(**constants)
    if isinstance(expected, tuple):
        with refuses(expected[0], "inputs", says=f"{path}{expected[1]}"):
            read([path])
    else:
        assert [text for _, text, _ in read([path])] == expected


# --------------------------------------------------------------------------------------------------------------- units

WORDS = st.text("ab é\n", max_size=12)
FILES = st.lists(
    st.tuples(st.sampled_from(["text", "jsonl", "gzip", "parquet", "arrow", "csv"]), st.lists(WORDS, max_size=9)),
    min_size=1,
    max_size=5,
)


def expected(inputs, kinds, size):
    """(unit, byte or row, text) by the rule in docs/format.md, one input after the other."""
    result, first, before, is_open = [], 0, 0, False
    for (path, starts), kind in zip(inputs, kinds, strict=True):
        on_disk = path.stat().st_size
        is_plain, is_table = kind in ("text", "jsonl"), kind not in ("text", "jsonl", "gzip")
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
        places = range(1, len(starts) + 1) if is_table else [start for start, _ in starts]
        result += [(first + unit, place, text) for unit, place, (_, text) in zip(units, places, starts, strict=True)]
        if is_plain:
            before, is_open = before + on_disk, True
        else:
            first += count
    return result


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
    form, every = {"documents": "line", "shard_size": size}, expected(inputs, kinds, size)
    with limits(block_bytes=block_bytes, part_bytes=block_bytes):
        assert [(unit, text) for unit, text, _ in read(paths, **form)] == [(unit, text) for unit, _, text in every]
        some = read(paths, lambda unit: bool(mask >> unit % 16 & 1), **form)
        plan = plan_of(paths, **form)
        parts = plan.parts(cpus)
        blocks = [each for part in parts for each in blocks_of(paths, lambda unit: True, part.units, **form)]
    assert [each[:2] for each in some] == [(unit, text) for unit, _, text in every if mask >> unit % 16 & 1]
    assert [(block.unit, start) for block, some in blocks for start in some.starts] == [each[:2] for each in every]
    assert [unit for part in parts for unit in part.units] == list(plan.units)
    assert {part.units.start for part in parts} <= {part.units.start for part in plan.parts()}
    total = sum(path.stat().st_size for path in paths)
    assert sum(part.size for part in parts) == pytest.approx(total)
    assert all(part.size >= min(block_bytes, total / cpus / 8) * 0.999 for part in parts[:-1])
    assert len(parts) <= max(8 * cpus, total // block_bytes) + 1


LINE = b"stone " * 100
ALONE = [  # name, options, what a file repeats, and how often its bytes are read at most
    ("a.txt", {"documents": "line"}, b"%b\n", 1.5),
    ("a.txt", {"documents": "line"}, b" %b\r\n", 1.5),
    ("a.txt", {}, b"%b\n\n", 1.5),
    ("a.jsonl", {}, b'{"text": "%b"}\n', 1.5),
    ("a.txt.zst", {}, b"%b\n\n", 1),
    ("a.txt", {}, b"%b\n", 2.5),  # a document of many units, of which all but one are searched for a start
]


@pytest.mark.parametrize(("name", "form", "piece", "times"), ALONE)
def test_a_part_alone_reads_little_more_than_its_own_bytes(folder, name, form, piece, times):
    content, form = piece % LINE * 200, form | {"shard_size": 30_000}
    paths = [put(folder / f"{number}{name}", PACK.get(name[-4:], bytes)(content)) for number in range(9)]
    parts = plan_of(paths, **form).parts()
    with limits(block_bytes=10_000):
        whole = read(paths, **form)
        with counting_reads() as sizes:
            alone = [each for part in parts for each in read(paths, part.units.__contains__, **form)]
    assert alone == whole
    assert len(parts) >= 9
    assert sum(sizes) <= times * 9 * len(content)
