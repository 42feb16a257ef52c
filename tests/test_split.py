"""Inputs are divided into units by their sizes and footers alone, and a part opens only what it makes."""

import gzip
import json
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.commands import refuses
from support.data import build
from support.disk import contents, published, put
from support.limits import limits
from support.sources import FEW, GROUP, as_jsonl, as_parquet, build_parts, made, read

from bertdata.options import TextFormat
from bertdata.sources import text as text_module
from bertdata.sources.inputs import local
from bertdata.sources.plan import UNITS_PER_SIZE, find_blocks, split
from bertdata.write import finish

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
        count = 1 + UNITS_PER_SIZE * on_disk // size
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
def test_documents_are_in_the_units_of_the_rule(folder, files, size, block_bytes, mask):
    inputs = [made(folder, number, kind, rows) for number, (kind, rows) in enumerate(files)]
    paths, kinds = [path for path, _ in inputs], [kind for kind, _ in files]
    with limits(block_bytes=block_bytes):
        every = units_and_texts(paths, shard_size=size)
        assert every == expected(inputs, kinds, size)
        some = units_and_texts(paths, lambda unit: bool(mask >> unit % 16 & 1), shard_size=size)
    assert some == [each for each in every if mask >> each[0] % 16 & 1]


def test_a_table_is_read_together_whatever_its_name(folder):
    """Where a row begins is known only from the first row on: text in quotation marks may have lines."""
    paths = [put(folder / name, b'text\n"a\nb"\n' * 9) for name in ("a.csv", "a.txt")]
    plans = [split([local(path)], TextFormat(kind="csv", shard_size=10)) for path in paths]
    assert plans[0].places == split([local(paths[0])], TextFormat(shard_size=10)).places == plans[1].places
    assert [part.units for part in plans[1].parts()] == [plans[1].units]


def test_a_part_of_empty_files_is_made_alone(folder):
    names = [put(folder / name, b"") for name in ("a.txt", "b.txt")]
    names.append(put(folder / "c.jsonl.gz", gzip.compress(as_jsonl(["stone", "river"]))))
    plan = split([local(name) for name in names], TextFormat())
    blocks = []
    for part in plan.parts(2):
        blocks += find_blocks(plan, units=part.units)
    assert sum(block.decode().starts.size for block in blocks) == 2


def test_a_parquet_file_that_loses_its_column_after_the_plan_is_refused(folder):
    path = put(folder / "a.parquet", as_parquet(["the stone"]))
    plan = split([local(path)], TextFormat())
    pq.write_table(pa.table({"other": ["river"]}), path)
    with refuses("no-column", "text_key", given="text"):
        list(find_blocks(plan))


def test_what_unpacks_to_more_than_was_thought_is_in_the_last_unit(folder):
    path = put(folder / "dense.txt.gz", gzip.compress(b"the stone\n" * 40_000))
    after = put(folder / "after.txt", b"river")
    units = [unit for unit, _ in units_and_texts([path, after], shard_size=1000)]
    count = 1 + UNITS_PER_SIZE * path.stat().st_size // 1000
    assert count < 400  # else it does not unpack to more
    assert units[:-1] == sorted([min(start // 1000, count - 1) for start in range(0, 400_000, 10)])
    assert units[-1] == count


@pytest.mark.parametrize("kind", ["files of zstd", "files", "files, each a document"])
def test_a_part_of_four_reads_a_quarter(tmp_path, vocab, kind):
    """Of the text on disk, in 16 files. It opens no other file."""
    rows = [f"the stone {number} under the river {number * 7919 % 10007}\n" * 15 for number in range(160)]
    paths, size = [], 1 << 30 if "zstd" in kind else len("\n".join(rows[:10]))
    for number in range(16):
        text = "\n".join(rows[10 * number : 10 * number + 10]).encode()[:size]
        packed = pa.compress(text, "zstd", asbytes=True) if "zstd" in kind else text
        paths.append(put(tmp_path / f"{number:02}.txt{'.zst' * ('zstd' in kind)}", packed))
    form = "file" if "document" in kind else "blank"
    options = {"tokenizer": vocab, "shard_size": size, "workers": 1, "documents": form}
    build(paths, tmp_path / "straight", **options)
    shares, real = [], text_module.opened
    for number in range(4):
        asked = []
        opened = lambda path, *more, asked=asked: asked.append(path.size) or real(path, *more)  # noqa: E731
        with patch.object(text_module, "opened", opened):
            build_parts(paths, tmp_path / "parts", 4, [number], **options)
        shares.append(sum(asked))
    assert sum(shares) == sum(path.stat().st_size for path in paths)
    assert all(0.2 < share / sum(shares) < 0.3 for share in shares)
    finish(tmp_path / "parts")
    assert published(tmp_path / "parts") == published(tmp_path / "straight")


@pytest.mark.parametrize("change", [{"unit_rule": 2}, {"of_a_later_version": 1}])
def test_an_unfinished_build_of_another_version_is_kept_and_refused(tmp_path, corpus, vocab, change):
    options = {"tokenizer": vocab, "shard_size": 900}
    build(corpus, tmp_path / "out", part=(0, 1), **options)
    plan = tmp_path / "out" / ".build" / "plan.json"
    plan.write_text(json.dumps(json.loads(plan.read_bytes()) | change))
    before = contents(tmp_path)
    for call in (lambda: build(corpus, tmp_path / "out", **options), lambda: finish(tmp_path / "out")):
        with refuses("other-version", "out"):
            call()
        assert contents(tmp_path) == before
    assert build(corpus, tmp_path / "out", overwrite=True, **options)
