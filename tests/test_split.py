"""Inputs are divided into units by their sizes and footers alone, and a part opens only what it makes."""

import gzip
import itertools
import json
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from reference import documents as twin
from test_build import published

from bertdata.errors import BuildError
from bertdata.sources import documents
from bertdata.sources.blocks import read_blocks
from bertdata.sources.documents import TextFormat
from bertdata.sources.inputs import local
from bertdata.sources.split import UNITS_PER_SIZE, split
from bertdata.write import build, finish

WORDS = st.text("ab é\n", max_size=12)
FILES = st.lists(
    st.tuples(st.sampled_from(["text", "jsonl", "gzip", "parquet", "arrow"]), st.lists(WORDS, max_size=9)),
    min_size=1, max_size=5,
)  # fmt: skip
GROUP = 3  # rows of a row group


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("split")


def write(path, content):
    path.write_bytes(content)
    return path


def parquet(path, rows, group=GROUP):
    pq.write_table(pa.table({"n": range(len(rows)), "text": pa.array(rows, pa.string())}), path, row_group_size=group)
    return path


def made(folder, number, kind, rows):
    """An input of these rows, and its documents with the place of each."""
    lines, name = "\n".join(row.replace("\n", " ") for row in rows).encode(), folder / str(number)
    if kind in ("text", "gzip"):
        found = twin.documents(lines, "line")
        if kind == "text":
            return write(Path(f"{name}.txt"), lines), found
        return write(Path(f"{name}.txt.gz"), gzip.compress(lines)), found
    if kind == "jsonl":
        lines = [json.dumps({"text": row}).encode() + b"\n" for row in rows]
        places = [0, *itertools.accumulate(map(len, lines))]
        path = write(Path(f"{name}.jsonl"), b"".join(lines))
        return path, list(zip(places, (row.encode() for row in rows), strict=False))
    raw = [row.encode() for row in rows]
    places = [0, *itertools.accumulate(len(each) + 1 for each in raw)]
    if kind == "parquet":
        return parquet(Path(f"{name}.parquet"), rows), list(enumerate(raw))
    with pa.OSFile(f"{name}.arrow", "wb") as file, pa.ipc.new_file(file, pa.schema([("text", pa.string())])) as writer:
        for start in range(0, len(rows), 4):
            writer.write_table(pa.table({"text": pa.array(rows[start : start + 4], pa.string())}))
    return Path(f"{name}.arrow"), list(zip(places, raw, strict=False))


def expected(inputs, kinds, size):
    """(unit, text) by the rule in docs/format.md, one input after the other."""
    found, first, before, is_open = [], 0, 0, False
    for (path, places), kind in zip(inputs, kinds, strict=True):
        on_disk = path.stat().st_size
        is_plain = kind in ("text", "jsonl")
        if is_open and not is_plain:
            first, before, is_open = first + max(1, -(-before // size)), 0, False
        count = 1 + UNITS_PER_SIZE * on_disk // size
        units = [(before + place) // size for place, _ in places]
        if kind == "parquet":
            footer = pq.ParquetFile(path).metadata
            of_group, count, passed, sizes = [], 0, None, 0
            for number in range(footer.num_row_groups):
                count += passed != (passed := sizes // size)
                of_group.append(count - 1)
                sizes += footer.row_group(number).column(1).total_uncompressed_size
            units, count = [of_group[row // GROUP] for row, _ in places], max(1, count)
        elif not is_plain:
            units = [min(unit, count - 1) for unit in units]
        found += [(first + unit, text) for unit, (_, text) in zip(units, places, strict=True)]
        if is_plain:
            before, is_open = before + on_disk, True
        else:
            first += count
    return found


def read(paths, wanted=lambda unit: True, **form):
    found = []
    for block in read_blocks(split([local(path) for path in paths], TextFormat(documents="line", **form)), wanted):
        for start, stop in itertools.pairwise(block.offsets.tolist()):
            found.append((block.unit, bytes(block.data[start : stop - 1])))
    return found


@given(FILES, st.integers(1, 60), st.sampled_from([1, 7, 1 << 20]), st.integers(0, 2**16 - 1))
@example([("text", ["a"]), ("gzip", ["b"] * 9), ("text", ["c"]), ("jsonl", ["d"])], 3, 1 << 20, 7)
@example([("parquet", ["ab"] * 9), ("parquet", []), ("arrow", ["é"] * 9)], 20, 1, 5)
def test_documents_are_in_the_units_of_the_rule(folder, files, size, block_bytes, mask):
    inputs = [made(folder, number, kind, rows) for number, (kind, rows) in enumerate(files)]
    paths, kinds = [path for path, _ in inputs], [kind for kind, _ in files]
    with patch.object(documents, "BLOCK_BYTES", block_bytes):
        found = read(paths, shard_size=size)
        assert found == expected(inputs, kinds, size)
        some = read(paths, lambda unit: bool(mask >> unit % 16 & 1), shard_size=size)
    assert some == [each for each in found if mask >> each[0] % 16 & 1]


def test_what_unpacks_to_more_than_was_thought_is_in_the_last_unit(folder):
    (path,) = [write(folder / "dense.txt.gz", gzip.compress(b"the stone\n" * 100_000))]
    units = [unit for unit, _ in read([path, write(folder / "after.txt", b"river")], shard_size=1000)]
    count = 1 + UNITS_PER_SIZE * path.stat().st_size // 1000
    assert count < 1000  # else it does not unpack to more
    assert units[:-1] == sorted([min(place // 1000, count - 1) for place in range(0, 1_000_000, 10)])
    assert units[-1] == count


@pytest.mark.parametrize("kind", ["64 files of zstd", "64 row groups", "64 files", "64 files, each a document"])
def test_a_part_of_four_reads_a_quarter(tmp_path, vocab, kind):
    """Of what is on disk. It opens no other file."""
    rows = [f"the stone {number} under the river {number * 7919 % 10007}\n" * 300 for number in range(640)]
    if kind == "64 row groups":
        paths, size = [parquet(tmp_path / "a.parquet", rows, 10)], 1
    else:
        paths, size = [], 1 << 30 if "zstd" in kind else len("\n".join(rows[:10]))
        for number in range(64):
            text = "\n".join(rows[10 * number : 10 * number + 10]).encode()[:size]
            packed = pa.compress(text, "zstd", asbytes=True) if "zstd" in kind else text
            paths.append(write(tmp_path / f"{number:02}.txt{'.zst' * ('zstd' in kind)}", packed))
    form = "file" if "document" in kind else "blank"
    options = {"tokenizer": vocab, "shard_size": size, "workers": 1, "documents": form}
    build(paths, tmp_path / "whole", **options)
    on_disk, asked = sum(path.stat().st_size for path in paths), []
    real, real_parquet = documents.opened, pq.ParquetFile.iter_batches

    def opened(path, *arguments):
        asked.append(path.size)
        return real(path, *arguments)

    def groups(self, *rows, **given):
        asked.append(sum(self.metadata.row_group(g).column(1).total_compressed_size for g in given["row_groups"]))
        return real_parquet(self, *rows, **given)

    for number in range(4):
        asked.clear()
        with patch.object(documents, "opened", opened), patch.object(pq.ParquetFile, "iter_batches", groups):
            assert build(paths, tmp_path / "parts", part=(number, 4), **options) is None
        assert 0.2 * on_disk < sum(asked) < 0.27 * on_disk
    finish(tmp_path / "parts")
    assert published(tmp_path / "parts") == published(tmp_path / "whole")


def test_an_unfinished_build_of_the_older_rule_is_refused(tmp_path, corpus, vocab):
    def stop(done, total):
        raise KeyboardInterrupt

    options = {"tokenizer": vocab, "shard_size": 900}
    with pytest.raises(KeyboardInterrupt):
        build(corpus, tmp_path / "out", progress=stop, **options)
    plan = tmp_path / "out" / ".build" / "plan.json"
    older = json.loads(plan.read_bytes())
    del older["unit_rule"]
    plan.write_text(json.dumps(older))
    with pytest.raises(BuildError, match="unfinished build of another version of bertdata, which divides inputs"):
        build(corpus, tmp_path / "out", **options)
    assert build(corpus, tmp_path / "out", overwrite=True, **options)


def test_parts_of_the_older_rule_are_not_published(tmp_path, corpus, vocab):
    build(corpus, tmp_path / "out", tokenizer=vocab, part=(0, 1))
    plan = tmp_path / "out" / ".build" / "plan.json"
    older = json.loads(plan.read_bytes())
    del older["unit_rule"]
    plan.write_text(json.dumps(older))
    with pytest.raises(BuildError, match="unfinished build of another version of bertdata"):
        finish(tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()
