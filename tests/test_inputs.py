"""The same documents give the same dataset, whatever they come in, wherever they come from, in however many runs."""

import bz2
import fcntl
import gzip
import io
import os
import random
import sys
import threading
import zlib
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.commands import refuses, succeeds
from support.data import build
from support.disk import put, write_all
from support.disk import without_origins as published
from support.limits import limits
from support.sources import (
    COMPRESSED,
    ENDING,
    MAKE,
    PACK,
    ROWS,
    as_arrow,
    as_arrow_file,
    as_jsonl,
    as_parquet,
    as_text,
    blocks_of,
    build_parts,
    counting_reads,
    every_unit,
    read,
    stopped,
    zstd,
)

import bertdata
from bertdata.cli import main
from bertdata.sources.inputs import Input, find_inputs
from bertdata.sources.streams import opened
from bertdata.write import finish

SMALL = {"shard_size": 3000, "validation": 0.2, "test": 0.1, "sentences": "line"}
SPLIT = {"validation": 0.2, "test": 0.1, "sentences": "line"}


@contextmanager
def standard_input(path):
    with open(path, "rb") as file, io.TextIOWrapper(file) as wrapper, patch.object(sys, "stdin", wrapper):
        yield "-"


@pytest.fixture(scope="module")
def straight(tmp_path_factory, corpus, vocab):
    """The files of the corpus built in one go with SMALL."""
    out = tmp_path_factory.mktemp("small") / "shards"
    build([corpus], out, tokenizer=vocab, **SMALL)
    return published(out)


def texts_of(*paths, **form):
    return [text for _, text, _ in read(paths, **form)]


# ------------------------------------------------------------------------------------------------- standard input


class OneByOne(io.BytesIO):
    """Bytes that come one by one, as through a pipe of a slow program."""

    def readinto(self, buffer):
        return super().readinto(memoryview(buffer)[:1])


@pytest.mark.parametrize("ending", COMPRESSED)
def test_compression_is_known_though_the_first_bytes_come_one_by_one(ending):
    stdin = io.TextIOWrapper(io.BufferedReader(OneByOne(PACK[ending](b"the stone\n\nriver"))))
    with patch.object(sys, "stdin", stdin):
        assert texts_of(Path("-")) == [b"the stone", b"river"]


def test_an_interrupted_build_from_standard_input_starts_anew(tmp_path, vocab):
    options = SPLIT | {"tokenizer": vocab, "shard_size": 2000}
    path = put(tmp_path / "text", as_text(ROWS))
    with standard_input(path):
        assert len(stopped("-", tmp_path / "out", 2, **options)) == 2
    with standard_input(put(tmp_path / "text", as_text(ROWS[::-1]))):
        assert build("-", tmp_path / "out", **options).reused_units == 0
    build(path, tmp_path / "straight", **options)
    assert published(tmp_path / "out") == published(tmp_path / "straight")


# ------------------------------------------------------------------------------------------------ finding the inputs


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = "d/b.txt d/a.txt d/sub/0.txt d/.hidden d/_SUCCESS d/.git/x d/_tmp/x d/10.txt d/9.txt d/sub/.x/y e/c.txt"
    for name in (*names.split(), "f/.only", "z.txt"):
        put(tmp_path / name, name)
    return tmp_path


def names(*inputs, **selection):
    return [str(file) for file in find_inputs(inputs, **selection).files]


FILES = ["d/10.txt", "d/9.txt", "d/a.txt", "d/b.txt", "d/sub/0.txt"]


@pytest.mark.parametrize(
    ("inputs", "files"),
    [
        (["d"], FILES),
        (["d/"], FILES),
        (["z.txt", "d", "e"], ["z.txt", *FILES, "e/c.txt"]),
        (["e/c.txt", "e"], ["e/c.txt", "e/c.txt"]),
        (["d/.git"], ["d/.git/x"]),
        (["d/_SUCCESS", "d/.hidden"], ["d/_SUCCESS", "d/.hidden"]),
        (["d/*.txt"], FILES[:4]),
        (["d/**/*.txt"], FILES),
        (["[de]/[bc].txt", "d/?.txt"], ["d/b.txt", "e/c.txt", "d/9.txt", "d/a.txt", "d/b.txt"]),
        (["z.txt", "-"], ["z.txt", "-"]),
    ],
)
def test_names_stand_for_files_in_order(tree, inputs, files):
    """Of a directory without hidden and underscored ones, unless these are named."""
    assert names(*inputs) == files
    assert names(*(tree / each for each in inputs if each != "-")) == [str(tree / f) for f in files if f != "-"]


def test_links_to_files_are_files_and_those_that_are_not_followed_are_named(tree):
    (tree / "e" / "far").symlink_to(tree / "d")
    (tree / "e" / "gone.txt").symlink_to("nowhere")
    (tree / "e" / "one.txt").symlink_to(tree / "z.txt")
    (tree / "e" / "rows.jsonl").symlink_to(put(tree / "real", as_jsonl(ROWS[:3])))
    (tree / "e" / ".git").symlink_to(tree / "d")
    inputs = find_inputs(["e"])
    assert [str(file) for file in inputs.files] == ["e/c.txt", "e/one.txt", "e/rows.jsonl"]
    assert texts_of("e/rows.jsonl") == [row.encode() for row in ROWS[:3]]  # the name of the link tells the kind
    assert list(inputs.left_out.values()) == [["e/far", "e/gone.txt"]]
    for name in ("c.txt", "one.txt", "rows.jsonl"):
        (tree / "e" / name).unlink()
    with refuses("empty", "inputs", says="(e/far, e/gone.txt)"):
        find_inputs(["e"])


EN = "news.2007.en"


@pytest.fixture
def mixed(tmp_path, monkeypatch):
    """A directory as people have them: text of several kinds, and files that are not."""
    monkeypatch.chdir(tmp_path)
    names = "a.txt AA/wiki_00 README.md table.xml AA/notes.md .git/config _SUCCESS news.2007.en"
    packed = {"d/b.jsonl.gz": gzip.compress(as_jsonl(["river"])), "d/c.TXT.BZ2": bz2.compress(b"wind\n")}
    return write_all(tmp_path, packed | {f"d/{name}": b"stone\n" for name in names.split()})


def test_of_a_directory_files_of_text_are_read_and_the_others_are_named(mixed, vocab):
    options = ["--tokenizer", vocab, "--validation", 0]
    reading, left_out = succeeds(main, "build", "d", "--out", "out", *options).stderr.splitlines()
    assert bertdata.open("out").num_documents == 4
    size = sum((mixed / "d" / name).stat().st_size for name in ("a.txt", "b.jsonl.gz", "AA/wiki_00", "c.TXT.BZ2"))
    assert "4 files: 3 text, 1 jsonl; " in reading
    assert str(size) in reading
    assert "6 files: 4 " in left_out
    assert "(d/AA/notes.md, d/README.md, d/news.2007.en, ...); 2 " in left_out
    assert "(d/.git/config, d/_SUCCESS)" in left_out
    assert succeeds(main, "build", "d/a.txt", "--out", "out2", *options).stderr == ""


@pytest.mark.parametrize(
    ("options", "files"),
    [
        ({"include": ["*.md"]}, ["AA/notes.md", "README.md"]),
        ({"include": ["*.md", "a.*"], "exclude": ["AA/*"]}, ["README.md", "a.txt"]),
        ({"include": ["**/*.md"]}, ["AA/notes.md", "README.md"]),
        ({"include": ["AA/wiki_*"]}, ["AA/wiki_00"]),
        ({"exclude": ["*.gz", "AA/*"]}, ["a.txt", "c.TXT.BZ2"]),
        ({"include": ["*"], "exclude": ["*.xml", "*.gz", "?.*"]}, ["AA/notes.md", "AA/wiki_00", "README.md", EN]),
        ({"any_kind": True, "exclude": ["*.xml", "*.md", "?.*"]}, ["AA/wiki_00", EN]),
    ],
)
def test_patterns_select_files_of_a_directory(mixed, options, files):
    inputs = find_inputs(["d"], **options)
    assert [str(file) for file in inputs.files] == [f"d/{name}" for name in files]
    every = {str(path) for path in Path("d").rglob("*") if path.is_file()}
    assert every - {f"d/{name}" for name in files} == {name for left in inputs.left_out.values() for name in left}
    assert names("d/table.xml", "d", **options) == ["d/table.xml", *(f"d/{name}" for name in files)]


def test_a_file_whose_name_is_a_pattern_is_that_file(tree):
    for name in ("[ab].txt", "a*"):
        put(tree / "d" / name, "x")
    assert names("d/[ab].txt", "d/a*") == ["d/[ab].txt", "d/a*"]
    put(tree / "what?" / "x", "x")
    assert names("what?") == ["what?/x"]


def test_a_file_called_dash_is_not_standard_input(tree):
    (tree / "-").write_text("the stone")
    with standard_input(put(tree / "other", b"river\n\nwind")):
        for name in (tree / "-", "./-"):
            assert texts_of(*names(name)) == [b"the stone"]


# ------------------------------------------------------------------------------------------- damaged compressed files


def lines_of(size, seed=0):
    """Documents of 2 KB that do not compress well."""
    rng = random.Random(seed)
    return "".join(f"{rng.randbytes(1000).hex()}\n\n" for _ in range(size)).encode()


def require_cut_short(path, content):
    """Reading the damaged file beside a sound one is one sentence that names it."""
    sound = put(path.parent / "sound.txt", b"the stone\n")
    with refuses("cut-short", given=str(path)):
        read([sound, put(path, content)])


@pytest.mark.parametrize(("ending", "kind"), [*zip(COMPRESSED, ["jsonl", "arrow", "csv", "tsv"], strict=True)])
def test_a_truncated_or_corrupted_file_is_named(folder, ending, kind):
    """Alone, and as a later member: in its magic bytes, in its middle, at its end, or replaced by something else."""
    path, has_no_check = folder / f"cut{ending}", ending == ".zst"
    for before, size in ((b"", 1), (b"", 150), (PACK[ending](lines_of(5)), 5)):
        content = PACK[ending](lines_of(size, seed=1))
        cuts = {1, 2, 5, 11, 15, len(content) // 3, len(content) // 2, *(len(content) - n for n in (9, 4, 1))}
        for cut in cuts | ({0} if not before else set()):
            require_cut_short(path, before + content[:cut])
        for index in [0] if has_no_check else [0, len(content) // 2, *[2, len(content) - 5] * (not before)]:
            flipped = content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :]
            require_cut_short(path, before + flipped)
        require_cut_short(path, before + b"plain text\n" * 9)
    content = PACK[ending](MAKE[kind]([f"{number * 7919} stone" for number in range(2000)]))
    for cut in (5, len(content) // 2, len(content) * 9 // 10):
        require_cut_short(folder / f"cut{ENDING[kind]}{ending}", content[:cut])


@given(
    members=st.lists(st.binary(max_size=300) | st.just(b"stone " * 40_000), min_size=1, max_size=4),
    tail=st.sampled_from([b"", b"x", b"\x1f\x8b"]),
    cut=st.integers(0, 400),
)
def test_a_gzip_file_of_members_is_read_as_python_reads_it(members, tail, cut):
    packed = b"".join(map(gzip.compress, members)) + tail
    packed = packed[: max(1, len(packed) - cut)]
    source = Input("text.txt.gz", len(packed), 1, SimpleNamespace(open=lambda: io.BytesIO(packed)))
    try:
        expected = gzip.decompress(packed)
    except (gzip.BadGzipFile, EOFError, zlib.error):
        with refuses("cut-short", given="text.txt.gz"), opened(source) as stream:
            stream.read()
        return
    with opened(source) as stream:
        assert stream.read() == expected


# ------------------------------------------------------------------------------------------------------- bad rows


def bad_jsonl():
    """ROWS with bad lines at line 4 and every fifth one after, and how many these are."""
    lines = as_jsonl(ROWS).splitlines(keepends=True)
    bad = lines[3::4]
    lines[3::4] = [b"{\n" + line for line in bad]
    return b"".join(lines), len(bad)


def test_a_build_with_bad_rows_can_be_interrupted_and_made_in_parts(tmp_path, vocab):
    """In small units, of which some are complete units of bad rows."""
    content, count = bad_jsonl()
    desert = b'{"body": "nothing at all"}\n' * 250
    rows = [*ROWS[:9], *[None] * 300, *ROWS[9:]]
    contents = {
        "a.jsonl": content + desert + content,
        "b.jsonl.gz": gzip.compress(desert),
        "c.parquet": as_parquet(rows),
        "d.arrow.zst": zstd(as_arrow(ROWS)),
    }
    paths = [put(tmp_path / name, content) for name, content in contents.items()]
    options = SPLIT | {"tokenizer": vocab, "shard_size": 3000, "on_error": "skip"}
    expected = build(paths, tmp_path / "straight", **options)
    assert expected.dataset.manifest.counts["skipped_rows"] == 2 * count + 500 + 300
    assert expected.first_skipped.startswith(f"{paths[0]}, line 4: ")
    assert 0 < len(stopped(paths, tmp_path / "out", 1, **options)) <= 1
    assert len(stopped(paths, tmp_path / "out", 5, **options)) > 1
    build_parts(paths, tmp_path / "parts", 3, (2, 0, 1), **options)
    for report in (build(paths, tmp_path / "out", **options), finish(tmp_path / "parts")):
        assert (report.reused_units > 1) == (report.dataset.path == tmp_path / "out")
        assert published(report.dataset.path) == published(expected.dataset.path)
        assert report.first_skipped == expected.first_skipped


# ------------------------------------------------------------------------------------- units, and seeking over them


def test_a_block_has_few_of_many_small_files(folder):
    paths = [put(folder / f"{number:02d}.txt", b"river") for number in range(20)]
    with limits(most_inputs=8):
        sizes = [some.starts.size for _, some in blocks_of(paths)]
    assert sizes == [8, 8, 4]


def bytes_asked_for(path, wanted, **form):
    with counting_reads() as sizes:
        texts = read([path], wanted, **form)
    return sum(sizes), texts


@pytest.mark.parametrize(
    ("name", "form", "line"),
    [
        ("big.txt", {"documents": "line"}, b"%s"),
        ("big.txt", {"documents": "line"}, b" %s\r"),
        ("big.txt", {"documents": "blank"}, b"%s\n"),
        ("big.jsonl", {}, b'{"text": "%s"}'),
    ],
)
def test_units_that_are_not_wanted_are_not_read(folder, name, form, line):
    line = line % (b"stone " * 300) + b"\n"
    content = line * (8_000_000 // len(line))
    path, form = put(folder / name, content), form | {"shard_size": 1_000_000}
    with limits(block_bytes=2_000_000):
        total, every = bytes_asked_for(path, every_unit, **form)
        assert 8_000_000 - 2000 < total <= 8_000_000
        for unit, most in ((7, 3_000_000), (0, 3_000_000), (4, 3_500_000)):
            asked, texts = bytes_asked_for(path, lambda each, unit=unit: each == unit, **form)
            assert asked < most
            assert texts == [each for each in every if each[0] == unit]
        assert bytes_asked_for(path, lambda unit: False, **form) == (0, [])


def test_a_document_of_many_units_is_not_read_once_for_each(folder):
    """Only the bytes at which a document could start decide; those of a unit without a start need no end."""
    path = put(folder / "long.txt", b"the stone under the river\n" * 40_000)  # one document of 1 MB
    with limits(block_bytes=1000):
        asked, texts = bytes_asked_for(path, lambda unit: unit % 2 == 1, shard_size=10_000)
    assert texts == []
    assert asked < 4 * path.stat().st_size


# -------------------------------------------------------------------------------------------------------------- parts


def test_parts_share_one_trained_vocabulary(tmp_path, corpus):
    options, said, seen = SMALL | {"vocab_size": 120}, [], []
    build(corpus, tmp_path / "straight", **options)
    build_parts(corpus, tmp_path / "out", 2, say=said.append, progress=lambda *at: seen.append(at), **options)
    assert seen[-2][0] >= seen[-1][1] - 1
    assert sum("training" in line for line in said) == 1
    finish(tmp_path / "out")
    assert published(tmp_path / "out") == published(tmp_path / "straight")


def test_missing_parts_and_units_are_told_and_complete_parts_are_enough(tmp_path, corpus, vocab, straight):
    out = tmp_path / "out"
    build_parts(corpus, out, 3, [0], tokenizer=vocab, **SMALL)
    build_parts(corpus, out, 2, [0], tokenizer=vocab, **SMALL)
    with refuses("parts-missing", "out", given={2: ["2/2"], 3: ["2/3", "3/3"]}):
        finish(out)
    build_parts(corpus, out, 2, [1], tokenizer=vocab, **SMALL)
    (out / ".build" / "unit-00003.json").unlink()
    with refuses("parts-missing", "out", given=["unit-00003.json"]):
        finish(out)
    build_parts(corpus, out, 2, tokenizer=vocab, **SMALL)
    finish(out)
    assert published(out) == straight


def test_a_part_is_made_by_one_process_at_a_time_and_not_beside_an_undivided_build(tmp_path, corpus, vocab, straight):
    out, options = tmp_path / "out", SMALL | {"tokenizer": vocab}
    build_parts(corpus, out, 3, [0], **options)

    def require_busy(lock_name, kind, call):
        with open(out / ".build" / lock_name, "r+") as lock:
            lock.write("12345")
            lock.truncate()
            lock.flush()
            fcntl.flock(lock, kind)
            with refuses("busy", given="12345"):
                call()

    require_busy("part-1-of-3.lock", fcntl.LOCK_EX, lambda: build(corpus, out, part=(0, 3), **options))
    require_busy("lock", fcntl.LOCK_EX, lambda: build(corpus, out, part=(1, 3), **options))
    require_busy("lock", fcntl.LOCK_SH, lambda: build(corpus, out, **options))
    require_busy("lock", fcntl.LOCK_SH, lambda: build(corpus, out, overwrite=True, **options))
    build_parts(corpus, out, 3, (1, 2), **options)
    require_busy("lock", fcntl.LOCK_SH, lambda: finish(out))
    finish(out)
    assert published(out) == straight


def test_the_warnings_of_parts_are_told_at_the_end_where_the_inputs_may_not_be(tmp_path, vocab):
    content, count = bad_jsonl()
    path = put(tmp_path / "a.jsonl", content.replace(b"stone", b"st\xffone"))
    build_parts(path, tmp_path / "out", 2, (1, 0), tokenizer=vocab, shard_size=2000, on_error="skip")
    path.unlink()
    replaced, skipped = succeeds(main, "build", "--finish", "--out", tmp_path / "out").stderr.splitlines()[:2]
    assert f" {path}, byte " in skipped
    assert f" {count} " in skipped
    assert f" {path}, byte " in replaced


# ------------------------------------------------------------------------------------------------------ columns


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", as_jsonl(ROWS)), ("a.fasta", b">a\nACGT\n" * 40)])
def test_rows_are_in_all_units_where_a_file_of_text_is_a_document(folder, name, content):
    path = put(folder / name, content)
    every = read([path], documents="file", shard_size=100)
    assert every == read([path], shard_size=100)
    assert len(numbers := {unit for unit, *_ in every}) > 2
    for number in numbers:
        some = read([path], lambda unit, number=number: unit == number, documents="file", shard_size=100)
        assert some == [each for each in every if each[0] == number]


def test_the_bytes_of_null_rows_do_not_count(folder):
    """A null slot may hide bytes; later rows are in the units that docs/format.md says."""
    data, valid = pa.py_buffer(b"hiddenab"), pa.py_buffer(bytes([0b110]))
    column = pa.StringArray.from_buffers(3, pa.py_buffer(np.array([0, 6, 7, 8], np.int32)), data, valid, 1)
    path = put(folder / "null.arrow", as_arrow_file(column))
    assert read([path], on_error="skip", shard_size=2) == [(0, b"a", 0), (1, b"b", 0)]


def test_a_pipe_that_is_removed_while_it_is_read_is_no_error(tmp_path, vocab):
    os.mkfifo(pipe := tmp_path / "pipe")

    def write_and_remove():
        with open(pipe, "wb") as file:
            pipe.unlink()
            file.write(as_text(ROWS))

    threading.Thread(target=write_and_remove, daemon=True).start()
    assert build(pipe, tmp_path / "out", tokenizer=vocab).dataset.num_documents == len(ROWS)
