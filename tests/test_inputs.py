"""The same documents give the same dataset, whatever they come in, wherever they come from, in however many runs."""

import fcntl
import gzip
import io
import os
import random
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
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
    counting_reads,
    read,
    stopped,
    zstd,
)

from bertdata import finish
from bertdata.cli import main
from bertdata.sources.inputs import find_inputs

SPLIT = {"validation": 0.2, "test": 0.1, "sentences": "line"}
SMALL = SPLIT | {"shard_size": 3000}


@contextmanager
def standard_input(path):
    with open(path, "rb") as file, io.TextIOWrapper(file) as wrapper, patch.object(sys, "stdin", wrapper):
        yield "-"


def test_an_interrupted_build_from_a_pipe_starts_again(tmp_path, vocab):
    """The pipe may be removed while it is read."""
    options, pipe = SPLIT | {"tokenizer": vocab, "shard_size": 2000}, tmp_path / "pipe"

    def piped(content):
        def write_and_remove():
            with open(pipe, "wb") as file:
                pipe.unlink()
                file.write(content)

        os.mkfifo(pipe)
        threading.Thread(target=write_and_remove, daemon=True).start()
        return pipe

    assert len(stopped(piped(as_text(ROWS)), tmp_path / "out", 2, **options)) == 2
    assert build(piped(as_text(ROWS[::-1])), tmp_path / "out", **options).reused_units == 0
    build(put(tmp_path / "text", as_text(ROWS[::-1])), tmp_path / "straight", **options)
    assert published(tmp_path / "out") == published(tmp_path / "straight")


EVERY = "d/10.txt d/9.txt d/AA/wiki_00 d/D.TXT.BZ2 d/a.txt d/b.txt d/c.jsonl.gz d/sub/0.txt"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A directory as people have them: files of text, others, and hidden ones."""
    monkeypatch.chdir(tmp_path)
    others = "README.md AA/notes.md table.xml news.2007.en .hidden _SUCCESS .git/x _tmp/x sub/.x/y"
    names = [*EVERY.split(), *(f"d/{name}" for name in others.split()), "e/c.txt", "f/.only", "z.txt"]
    return write_all(tmp_path, {name: name.encode() for name in reversed(names)})


SELECTED = [
    ("d", {}, EVERY),
    ("d/", {}, EVERY),
    ("z.txt d e", {}, f"z.txt {EVERY} e/c.txt"),
    ("e/c.txt e", {}, "e/c.txt e/c.txt"),
    ("d/.git", {}, "d/.git/x"),
    ("d/_SUCCESS d/.hidden", {}, "d/_SUCCESS d/.hidden"),
    ("d/*.txt", {}, "d/10.txt d/9.txt d/a.txt d/b.txt"),
    ("d/**/*.txt", {}, "d/10.txt d/9.txt d/a.txt d/b.txt d/sub/0.txt"),
    ("[de]/[bc].txt d/?.txt", {}, "d/b.txt e/c.txt d/9.txt d/a.txt d/b.txt"),
    ("z.txt -", {}, "z.txt -"),
    ("d", {"include": ["*.md"]}, "d/AA/notes.md d/README.md"),
    ("z.txt d", {"include": ["**/*.md"]}, "z.txt d/AA/notes.md d/README.md"),
    ("d", {"include": ["*.md", "a.*"], "exclude": ["AA/*"]}, "d/README.md d/a.txt"),
    ("d", {"include": ["AA/wiki_*"]}, "d/AA/wiki_00"),
    ("d", {"exclude": ["*.gz", "AA/*", "*.txt"]}, "d/D.TXT.BZ2"),
    ("d", {"include": ["*"], "exclude": ["*.md", "*.gz", "?.*", "*.txt"]}, "d/AA/wiki_00 d/news.2007.en d/table.xml"),
    ("d", {"any_kind": True, "exclude": ["*.xml", "*.md", "?.*", "*.txt"]}, "d/AA/wiki_00 d/news.2007.en"),
]


@pytest.mark.parametrize(("inputs", "selection", "files"), SELECTED)
def test_names_stand_for_files_in_order(tree, inputs, selection, files):
    """Of a directory without hidden and underscored ones, unless these are named. What is left out is listed."""
    inputs, files = inputs.split(), files.split()
    found = find_inputs(inputs, **selection)
    assert [str(file) for file in found.files] == files
    inside = {str(path) for each in inputs if Path(each).is_dir() for path in Path(each).rglob("*") if path.is_file()}
    assert {name for names in found.left_out.values() for name in names} == inside - {*files}
    absolute = find_inputs([tree / each for each in inputs if each != "-"], **selection).files
    assert [str(file) for file in absolute] == [str(tree / file) for file in files if file != "-"]


def test_links_to_files_are_files_and_those_that_are_not_followed_are_named(tree):
    put(tree / "real", as_jsonl(ROWS[:3]))
    links = {"far": "d", "gone.txt": "nowhere", "one.txt": "z.txt", "rows.jsonl": "real", ".git": "d"}
    for name, target in links.items():
        (tree / "e" / name).symlink_to(tree / target)
    inputs = find_inputs(["e"])
    assert [str(file) for file in inputs.files] == ["e/c.txt", "e/one.txt", "e/rows.jsonl"]
    assert len(read(["e/rows.jsonl"])) == 3  # the name of the link tells the kind
    assert list(inputs.left_out.values()) == [["e/far", "e/gone.txt"]]
    for name in ("c.txt", "one.txt", "rows.jsonl"):
        (tree / "e" / name).unlink()
    with refuses("empty", "inputs", says="(e/far, e/gone.txt)"):
        find_inputs(["e"])


def test_files_with_odd_names_are_those_files(tree):
    names = ["d/[ab].txt", "d/a*", "what?/x"]
    write_all(tree, dict.fromkeys(names, b"x"))
    assert [str(file) for file in find_inputs([*names[:2], "what?"]).files] == names
    put(tree / "-", "the stone")
    with standard_input(put(tree / "other", b"river\n\nwind")):
        for name in (tree / "-", "./-"):
            assert [text for _, text, _ in read(find_inputs([name]).files)] == [b"the stone"]


@pytest.mark.parametrize(("ending", "kind"), [*zip(COMPRESSED, ["jsonl", "arrow", "csv", "tsv"], strict=True)])
def test_a_truncated_or_corrupted_file_is_named(folder, ending, kind):
    """Alone, and as a later member: in its magic bytes, in its middle, at its end, or replaced by something else."""
    texts, pack, bad = [random.Random(n).randbytes(1000).hex() for n in range(150)], PACK[ending], [b""]
    for before, number in ((b"", 1), (b"", 150), (pack(as_text(texts[:5])), 5)):
        whole = pack(as_text(texts[-number:]))
        cuts = [1, 2, 5, 11, 15, len(whole) // 3, len(whole) // 2, *(len(whole) - left for left in (9, 4, 1))]
        bad += [before + whole[:cut] for cut in cuts] + [before + b"plain text\n" * 9]
        has_check = ending != ".zst"
        flips = [0, *[len(whole) // 2] * has_check, *[2, len(whole) - 5] * (has_check and not before)]
        bad += [before + whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in flips]
    rows = pack(MAKE[kind]([f"{number * 7919} stone" for number in range(2000)]))
    files = [(f"cut{ending}", content) for content in bad]
    files += [(f"cut{ENDING[kind]}{ending}", rows[:cut]) for cut in (5, len(rows) // 2, len(rows) * 9 // 10)]
    for name, content in files:
        with refuses("cut-short", given=str(folder / name)):
            read([put(folder / "sound.txt", b"the stone\n"), put(folder / name, content)])


def test_a_build_with_bad_rows_can_be_interrupted_and_made_in_parts(tmp_path, vocab):
    """In small units, of which some are complete units of bad rows. The end tells what parts found, without inputs."""
    lines = as_jsonl(ROWS).replace(b"stone", b"st\xffone").splitlines(keepends=True)
    lines[3::4] = [b"{\n" + line for line in lines[3::4]]
    content, count = b"".join(lines), len(lines[3::4])
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
    for number in (2, 0, 1):
        assert build(paths, tmp_path / "parts", part=(number, 3), **options) is None
    report = build(paths, tmp_path / "out", **options)
    assert report.reused_units > 1
    assert report.first_skipped == expected.first_skipped
    for path in paths:
        path.unlink()
    replaced, skipped = succeeds(main, "build", "--finish", "--out", tmp_path / "parts").stderr.splitlines()[:2]
    assert f" {2 * count + 800} " in skipped
    assert all(f" {paths[0]}, byte " in line for line in (replaced, skipped))
    for name in ("out", "parts"):
        assert published(tmp_path / name) == published(expected.dataset.path)


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
        total, every = bytes_asked_for(path, lambda unit: True, **form)
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


def test_parts_share_one_trained_vocabulary(tmp_path, corpus):
    options, said, seen = SMALL | {"vocab_size": 120}, [], []
    build(corpus, tmp_path / "straight", **options)
    for part in ((0, 2), (1, 2)):
        build(corpus, tmp_path / "out", part=part, say=said.append, progress=lambda *at: seen.append(at), **options)
    assert seen[-2][0] >= seen[-1][1] - 1
    assert sum("training" in line for line in said) == 1
    finish(tmp_path / "out")
    assert published(tmp_path / "out") == published(tmp_path / "straight")


def test_a_part_is_made_by_one_process_at_a_time_and_missing_ones_are_told(tmp_path, corpus, vocab):
    """Not beside an undivided build. All parts of one division are enough."""
    out, options = tmp_path / "out", SMALL | {"tokenizer": vocab}

    def require_busy(lock_name, kind, call):
        with open(out / ".build" / lock_name, "r+") as lock:
            lock.write("12345")
            lock.truncate()
            lock.flush()
            fcntl.flock(lock, kind)
            with refuses("busy", given="12345"):
                call()

    for total in (3, 2):
        build(corpus, out, part=(0, total), **options)
    with refuses("parts-missing", "out", given={2: ["2/2"], 3: ["2/3", "3/3"]}):
        finish(out)
    require_busy("part-1-of-3.lock", fcntl.LOCK_EX, lambda: build(corpus, out, part=(0, 3), **options))
    require_busy("lock", fcntl.LOCK_EX, lambda: build(corpus, out, part=(1, 3), **options))
    require_busy("lock", fcntl.LOCK_SH, lambda: build(corpus, out, **options))
    require_busy("lock", fcntl.LOCK_SH, lambda: build(corpus, out, overwrite=True, **options))
    build(corpus, out, part=(1, 2), **options)
    require_busy("lock", fcntl.LOCK_SH, lambda: finish(out))
    (out / ".build" / "unit-00003.json").unlink()
    with refuses("parts-missing", "out", given=["unit-00003.json"]):
        finish(out)
    build(corpus, out, part=(0, 2), **options)
    build(corpus, out, part=(1, 2), **options)
    finish(out)
    build(corpus, tmp_path / "straight", **options)
    assert published(out) == published(tmp_path / "straight")


def test_the_bytes_of_null_rows_do_not_count(folder):
    """A null slot may hide bytes; later rows are in the units that docs/format.md says."""
    data, valid = pa.py_buffer(b"hiddenab"), pa.py_buffer(bytes([0b110]))
    column = pa.StringArray.from_buffers(3, pa.py_buffer(np.array([0, 6, 7, 8], np.int32)), data, valid, 1)
    path = put(folder / "null.arrow", as_arrow_file(column))
    assert read([path], on_error="skip", shard_size=2) == [(0, b"a", 0), (1, b"b", 0)]
    rows = put(folder / "rows.csv", b"text\na\nb\nc\n")  # one batch of three units
    assert [row for _, some in blocks_of([rows], shard_size=2) for row in some.starts.tolist()] == [1, 2, 3]
