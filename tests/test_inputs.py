"""The same documents give the same dataset, whatever they come in, wherever they come from, in however many runs."""

import bz2
import codecs
import fcntl
import gzip
import io
import itertools
import json
import lzma
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from conftest import make_text
from hypothesis import example, given
from hypothesis import strategies as st
from reference import documents as twin

import bertdata
from bertdata.cli import main
from bertdata.errors import BuildError, InputError, UsageError
from bertdata.format.verify import verify
from bertdata.sources import documents, streams
from bertdata.sources.blocks import read_blocks
from bertdata.sources.documents import TextFormat
from bertdata.sources.find import find_inputs
from bertdata.sources.inputs import local
from bertdata.sources.split import split
from bertdata.write import build, finish

SMALL = {"shard_size": 3000, "validation": 0.2, "test": 0.1, "sentences": "line"}
SPLIT = {"validation": 0.2, "test": 0.1, "sentences": "line"}
ROWS = [raw.decode() for _, raw in twin.documents(make_text(40, seed=5).encode(), "blank")]


def zstd(data):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


PACK = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": partial(lzma.compress, preset=0), ".zst": zstd}
COMPRESSED = [ending for ending in PACK if ending]


def as_text(rows):
    return "\n\n".join(rows).encode() + b"\n"


def as_jsonl(rows):
    return "".join(json.dumps({"n": number, "text": row}) + "\n" for number, row in enumerate(rows)).encode()


def table(rows, kind=None):
    return pa.table({"n": range(len(rows)), "text": pa.array(rows, kind or pa.string())})


def as_arrow(rows, kind=None, new=pa.ipc.new_stream):
    sink, rows = pa.BufferOutputStream(), table(rows, kind)
    with new(sink, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=7)
    return sink.getvalue().to_pybytes()


def as_arrow_file(rows, kind=None):
    return as_arrow(rows, kind, pa.ipc.new_file)


def as_parquet(rows, kind=None):
    sink = pa.BufferOutputStream()
    pq.write_table(table(rows, kind), sink, row_group_size=9)
    return sink.getvalue().to_pybytes()


MAKE = {"text": as_text, "jsonl": as_jsonl, "arrow": as_arrow}
ENDING = {"text": ".txt", "jsonl": ".jsonl", "arrow": ".arrow", "parquet": ".parquet"}


def published(out):
    assert [path.name for path in out.iterdir() if path.is_dir()] == ["origins"]
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}


def documents_of(dataset):
    return {
        name: [int(t) for n in range(len(split.shards)) for t in dataset.tokens(name, n)]
        for name, split in dataset.splits.items()
    }


def write(path, content):
    path.write_bytes(content)
    return path


def stop_after(blocks):
    """A progress callback that is a Ctrl-C after some blocks."""
    left = iter(range(blocks))

    def progress(done, total):
        if next(left, None) is None:
            raise KeyboardInterrupt

    return progress


@contextmanager
def written_to(pipe, content):
    """Makes a named pipe that a thread writes the content to."""
    os.mkfifo(pipe)
    thread = threading.Thread(target=lambda: pipe.write_bytes(content), daemon=True)
    thread.start()
    yield pipe
    thread.join(30)
    assert not thread.is_alive()


@contextmanager
def standard_input(path):
    with open(path, "rb") as file, io.TextIOWrapper(file) as wrapper, patch.object(sys, "stdin", wrapper):
        yield "-"


def invoke(*arguments):
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def command(*arguments, **options):
    """The command line in a process of its own."""
    arguments = [sys.executable, "-m", "bertdata", *map(str, arguments)]
    return subprocess.run(arguments, capture_output=True, text="input" not in options, timeout=120, **options)


def units_in(out):
    return {int(path.stem[5:]) for path in (out / ".build").glob("unit-*.json")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("inputs")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, vocab):
    """The files of ROWS built from plain text, in one shard per split."""
    out = tmp_path_factory.mktemp("whole") / "shards"
    build([write(out.parent / "text", as_text(ROWS))], out, tokenizer=vocab, **SPLIT)
    return published(out)


@pytest.fixture(scope="module")
def whole_tokens(tmp_path_factory, vocab):
    """The tokens of ROWS built from plain text, by split."""
    out = tmp_path_factory.mktemp("tokens") / "shards"
    return documents_of(build([write(out.parent / "text", as_text(ROWS))], out, tokenizer=vocab, **SPLIT).dataset)


@pytest.fixture(scope="module")
def whole_small(tmp_path_factory, corpus, vocab):
    """The files of the corpus built in one go with SMALL."""
    out = tmp_path_factory.mktemp("small") / "shards"
    build([corpus], out, tokenizer=vocab, **SMALL)
    return published(out)


# --------------------------------------------------------------------------------- the same, whatever it comes in


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("way", ["file", "members", "pipe", "standard input"])
def test_every_kind_and_way_gives_the_same_bytes(tmp_path, vocab, whole, way, kind, ending):
    pack, data, path = PACK[ending], MAKE[kind](ROWS), tmp_path / f"rows{ENDING[kind]}{ending}"
    options = SPLIT | {"tokenizer": vocab}
    content = pack(data[:1000]) + pack(data[1000:]) if way == "members" else pack(data)
    if way == "pipe":
        with written_to(path, content):
            build(path, tmp_path / "out", **options)
    elif way == "standard input":
        with standard_input(write(tmp_path / "any", content)) as named:
            build(named, tmp_path / "out", format=kind, **options)
    else:
        build(write(path, content), tmp_path / "out", **options)
    assert published(tmp_path / "out") == whole


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("way", ["files", "directory", "pattern"])
def test_files_of_every_compression_give_the_same_tokens(tmp_path, vocab, whole_tokens, way, kind):
    folder, cuts = tmp_path / "in", (0, 1, 9, 20, 33, 40)
    folder.mkdir()
    paths = [folder / f"{number}{ENDING[kind]}{ending}" for number, ending in enumerate(PACK)]
    for path, pack, (a, b) in zip(paths, PACK.values(), itertools.pairwise(cuts), strict=True):
        path.write_bytes(pack(MAKE[kind](ROWS[a:b])))
    named = {"files": paths, "directory": folder, "pattern": f"{tmp_path}/i?/*{ENDING[kind]}*"}[way]
    assert documents_of(build(named, tmp_path / "out", tokenizer=vocab, **SPLIT).dataset) == whole_tokens


@pytest.mark.parametrize("way", ["file", "files", "directory"])
@pytest.mark.parametrize("make", [as_parquet, as_arrow_file])
def test_parquet_and_arrow_files_give_the_same_tokens(tmp_path, vocab, whole_tokens, make, way):
    ending = ".parquet" if make is as_parquet else ".feather"
    folder = tmp_path / "in"
    folder.mkdir()
    cuts = (0, 40) if way == "file" else (0, 1, 25, 40)
    paths = [
        write(folder / f"{number}{ending}", make(ROWS[a:b])) for number, (a, b) in enumerate(itertools.pairwise(cuts))
    ]
    report = build(folder if way == "directory" else paths, tmp_path / "out", tokenizer=vocab, **SPLIT)
    assert documents_of(report.dataset) == whole_tokens


def test_kinds_can_be_mixed(tmp_path, vocab, whole_tokens):
    made = [("0.txt.xz", lzma.compress(as_text(ROWS[:9]))), ("1.json", as_jsonl(ROWS[9:20])),
            ("2.parquet", as_parquet(ROWS[20:28])), ("3.ARROW.ZST", zstd(as_arrow(ROWS[28:33]))),
            ("4", as_text(ROWS[33:36])), ("5.ndjson.bz2", bz2.compress(as_jsonl(ROWS[36:])))]  # fmt: skip
    for name, content in made:
        (tmp_path / name).write_bytes(content)
    report = build([tmp_path / name for name, _ in made], tmp_path / "out", tokenizer=vocab, **SPLIT)
    assert documents_of(report.dataset) == whole_tokens


def test_the_named_format_goes_before_the_ending(tmp_path, vocab, whole):
    for kind, content in (("jsonl", as_jsonl(ROWS)), ("parquet", as_parquet(ROWS)), ("text", as_text(ROWS))):
        path = write(tmp_path / f"rows.{'jsonl' if kind == 'text' else 'txt'}", content)
        build(path, tmp_path / kind, tokenizer=vocab, format=kind, **SPLIT)
        assert published(tmp_path / kind) == whole


@pytest.mark.parametrize("kind", MAKE)
def test_shards_are_cut_at_decompressed_bytes(tmp_path, vocab, kind):
    """Small shards have the same bytes however they are packed, and the same ids in whatever kind."""
    content, options = MAKE[kind](ROWS), SPLIT | {"tokenizer": vocab, "shard_size": 2000}
    build(write(tmp_path / f"a{ENDING[kind]}", content), tmp_path / "plain", **options)
    for ending in COMPRESSED:
        path = write(tmp_path / f"a{ENDING[kind]}{ending}", PACK[ending](content))
        build(path, tmp_path / ending, **options)
        assert published(tmp_path / ending) == published(tmp_path / "plain")
    with written_to(tmp_path / f"pipe{ENDING[kind]}", content) as pipe:
        build(pipe, tmp_path / "piped", **options)
    assert published(tmp_path / "piped") == published(tmp_path / "plain")
    dataset = bertdata.open(tmp_path / "plain")
    assert len(dataset.splits["train"].shards) > 2
    one = build(write(tmp_path / "text", as_text(ROWS)), tmp_path / "one", tokenizer=vocab, **SPLIT).dataset
    assert documents_of(dataset) == documents_of(one)


@pytest.mark.parametrize("documents", ["line", "file"])
def test_lines_and_files_are_documents_however_they_are_packed(tmp_path, vocab, documents):
    content, options = as_text(ROWS).replace(b"\n\n", b"\r\n"), SPLIT | {"tokenizer": vocab, "documents": documents}
    build(write(tmp_path / "a.txt", content), tmp_path / "plain", shard_size=2000, **options)
    for ending in COMPRESSED:
        path = write(tmp_path / f"a{ending}", PACK[ending](content[:5000]) + PACK[ending](content[5000:]))
        build(path, tmp_path / ending, shard_size=2000, **options)
        assert published(tmp_path / ending) == published(tmp_path / "plain")


def test_zstd_frames_that_are_to_be_skipped_are(folder):
    frame = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"notes"
    for number, content in enumerate([frame + zstd(b"a\n\nb"), zstd(b"a\n\nb") + frame,
                                      zstd(b"a\n") + frame + zstd(b"\nb")]):  # fmt: skip
        path = write(folder / f"skip{number}.zst", content)
        assert [document for _, document, _ in read([path])] == [b"a", b"b"]


# ------------------------------------------------------------------------------------------------- standard input


def test_the_command_reads_standard_input(tmp_path, vocab, whole):
    """From a file, through a pipe, and compressed; what it is must be said, how it is compressed not."""
    options = ["--tokenizer", vocab, "--validation", "0.2", "--test", "0.1", "--sentences", "line"]
    write(tmp_path / "a", as_jsonl(ROWS))
    with open(tmp_path / "a", "rb") as file:
        done = command("build", "-", "--format", "jsonl", "--out", tmp_path / "1", *options, stdin=file)
    assert (done.returncode, done.stderr) == (0, "")
    write(tmp_path / "b", zstd(as_arrow(ROWS)))
    with open(tmp_path / "b", "rb") as file:
        done = command("build", "-", "--format", "arrow", "--out", tmp_path / "2", *options, stdin=file)
    assert (done.returncode, done.stderr) == (0, "")
    with subprocess.Popen(["cat", write(tmp_path / "c", gzip.compress(as_text(ROWS)))], stdout=subprocess.PIPE) as cat:
        done = command("build", "-", "--out", tmp_path / "3", *options, stdin=cat.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    for number in "123":
        assert published(tmp_path / number) == whole


@pytest.mark.parametrize("ending", COMPRESSED)
def test_compression_is_known_though_the_first_bytes_come_one_by_one(ending):
    receiver, sender = os.pipe()
    content = PACK[ending](b"the stone\n\nriver")

    def slowly():
        with suppress(BrokenPipeError), open(sender, "wb", buffering=0) as file:
            for byte in content[:6]:
                file.write(bytes([byte]))
                time.sleep(0.02)
            file.write(content[6:])

    thread = threading.Thread(target=slowly)
    thread.start()
    try:
        with standard_input(receiver):
            assert [document for _, document, _ in read([Path("-")])] == [b"the stone", b"river"]
    finally:
        thread.join()


def test_standard_input_needs_a_tokenizer(tmp_path, vocab):
    result = invoke("build", "-", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "Error: - can be read only once, so it cannot also train a vocabulary; give a --tok"
    )
    os.mkfifo(tmp_path / "pipe")
    result = invoke("build", tmp_path / "pipe", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {tmp_path / 'pipe'} can be read only once")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("second", ["the same", "other text"])
def test_an_interrupted_build_from_standard_input_starts_anew(tmp_path, vocab, whole, second):
    options = SPLIT | {"tokenizer": vocab, "shard_size": 2000}
    rows = ROWS if second == "the same" else ROWS[::-1]
    path = write(tmp_path / "text", as_text(ROWS))
    with standard_input(path), pytest.raises(KeyboardInterrupt):
        build("-", tmp_path / "out", workers=1, progress=stop_after(2), **options)
    assert len(units_in(tmp_path / "out")) == 2
    said = []
    with standard_input(write(tmp_path / "text", as_text(rows))):
        report = build("-", tmp_path / "out", say=said.append, **options)
    assert report.reused_units == 0
    assert said == []
    build(path, tmp_path / "straight", **options)
    assert published(tmp_path / "out") == published(tmp_path / "straight")


def test_empty_standard_input_is_one_sentence(tmp_path, vocab):
    with standard_input(write(tmp_path / "empty", b"")), pytest.raises(InputError, match="nothing but blank lines"):
        build("-", tmp_path / "out", tokenizer=vocab)
    assert not (tmp_path / "out").exists()


def test_a_bad_row_of_standard_input_is_named(tmp_path, vocab):
    content = b'{"text": "a"}\n{"body": "a"}\n{"text": "b"}\n'
    with (
        standard_input(write(tmp_path / "rows", content)),
        pytest.raises(InputError, match="^-, byte 14: no key 'text' in this row; give --text-key, fix"),
    ):
        build("-", tmp_path / "out", tokenizer=vocab, format="jsonl")
    with standard_input(write(tmp_path / "rows", gzip.compress(content))):
        report = build("-", tmp_path / "out", tokenizer=vocab, format="jsonl", on_error="skip")
    assert report.first_skipped.startswith("-, byte 14: no key 'text'")


@pytest.mark.parametrize("ending", COMPRESSED)
def test_truncated_standard_input_is_one_sentence(tmp_path, vocab, ending):
    content = PACK[ending](as_text(ROWS))[:-9]
    with standard_input(write(tmp_path / "cut", content)), pytest.raises(InputError, match="^- is not a complete"):
        build("-", tmp_path / "out", tokenizer=vocab)


# ------------------------------------------------------------------------------------------------ finding the inputs


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("d/b.txt", "d/a.txt", "d/sub/0.txt", "d/.hidden", "d/_SUCCESS", "d/.git/x", "d/_tmp/x", "d/10.txt",
                 "d/9.txt", "d/sub/.x/y", "e/c.txt", "f/.only", "z.txt"):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def names(*named):
    return [str(path) for path in find_inputs(named).files]


def test_a_directory_is_its_files_in_order_without_hidden_and_underscored_ones(tree):
    files = ["d/10.txt", "d/9.txt", "d/a.txt", "d/b.txt", "d/sub/0.txt"]
    assert names("d") == names("d/") == files
    assert names(tree / "d") == [str(tree / name) for name in files]
    assert names("z.txt", "d", "e") == ["z.txt", *files, "e/c.txt"]
    assert names("e/c.txt", "e") == ["e/c.txt", "e/c.txt"]


def test_a_directory_below_a_hidden_one_can_be_named(tree):
    assert names("d/.git") == ["d/.git/x"]
    assert names("d/_SUCCESS", "d/.hidden") == ["d/_SUCCESS", "d/.hidden"]


def test_links_that_are_not_followed_are_named(tree):
    (tree / "e" / "far").symlink_to(tree / "d")
    (tree / "e" / "gone.txt").symlink_to("nowhere")
    (tree / "e" / "one.txt").symlink_to(tree / "z.txt")
    (tree / "e" / ".git").symlink_to(tree / "d")
    found = find_inputs(["e"])
    assert [str(file) for file in found.files] == ["e/c.txt", "e/one.txt"]
    assert found.notes()[1:] == ["note: left out 2 files: 2 linked to a directory or to nothing (e/far, e/gone.txt)"]
    for name in ("c.txt", "one.txt"):
        (tree / "e" / name).unlink()
    with pytest.raises(InputError, match=r"without files; its links are not followed \(e/far, e/gone.txt\); name"):
        find_inputs(["e"])


@pytest.fixture
def mixed(tmp_path, monkeypatch):
    """A directory as people have them: text of several kinds, and files that are not."""
    monkeypatch.chdir(tmp_path)
    contents = {
        "d/a.txt": b"the stone\n", "d/b.jsonl.gz": gzip.compress(as_jsonl(["river"])), "d/AA/wiki_00": b"light\n",
        "d/c.TXT.BZ2": bz2.compress(b"wind\n"), "d/README.md": b"# notes\n", "d/logo.png": bytes(range(256)) * 9,
        "d/AA/notes.md": b"more\n", "d/.git/config": b"x", "d/_SUCCESS": b"", "d/news.2007.en": b"salt\n",
    }  # fmt: skip
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_of_a_directory_files_of_text_are_read_and_the_others_are_named(mixed, vocab):
    result = invoke("build", "d", "--out", "out", "--tokenizer", vocab, "--validation", 0)
    assert result.exit_code == 0, result.stderr
    assert bertdata.open("out").num_documents == 4
    reading, left_out = result.stderr.splitlines()
    size = sum((mixed / "d" / name).stat().st_size for name in ("a.txt", "b.jsonl.gz", "AA/wiki_00", "c.TXT.BZ2"))
    assert reading == f"reading 4 files: 3 text, 1 jsonl; {size} bytes on disk"
    assert left_out == (
        "note: left out 6 files: 4 with an unknown ending (d/AA/notes.md, d/README.md, d/logo.png, ...); 2 hidden "
        "(d/.git/config, d/_SUCCESS); --include PATTERN reads files with other endings"
    )
    assert invoke("build", "d/a.txt", "--out", "out2", "--tokenizer", vocab, "--validation", 0).stderr == ""


@pytest.mark.parametrize(
    ("options", "files"),
    [
        ({"include": ["*.md"]}, ["AA/notes.md", "README.md"]),
        ({"include": ["*.md", "a.*"], "exclude": ["AA/*"]}, ["README.md", "a.txt"]),
        ({"include": ["**/*.md"]}, ["AA/notes.md", "README.md"]),
        ({"include": ["AA/wiki_*"]}, ["AA/wiki_00"]),
        ({"exclude": ["*.gz", "AA/*"]}, ["a.txt", "c.TXT.BZ2"]),
        ({"include": ["*"], "exclude": ["*.png"]},
         ["AA/notes.md", "AA/wiki_00", "README.md", "a.txt", "b.jsonl.gz", "c.TXT.BZ2", "news.2007.en"]),
        ({"any_ending": True, "exclude": ["*.png", "*.md"]},
         ["AA/wiki_00", "a.txt", "b.jsonl.gz", "c.TXT.BZ2", "news.2007.en"]),
    ],
)  # fmt: skip
def test_patterns_select_files_of_a_directory(mixed, options, files):
    found = find_inputs(["d"], **options)
    assert [str(path) for path in found.files] == [f"d/{name}" for name in files]
    every = {str(path) for path in Path("d").rglob("*") if path.is_file()}
    assert every - {f"d/{name}" for name in files} == {name for names in found.left_out.values() for name in names}
    by_name = find_inputs(["d/logo.png", "d"], **options).files
    assert [str(path) for path in by_name] == ["d/logo.png", *(f"d/{name}" for name in files)]


def test_patterns_select_files_of_a_pattern(mixed):
    assert names("d/*") == [f"d/{name}" for name in ("README.md", "_SUCCESS", "a.txt", "b.jsonl.gz", "c.TXT.BZ2",
                                                     "logo.png", "news.2007.en")]  # fmt: skip
    found = find_inputs(["d/**/*"], include=["*.md"], exclude=["AA/*"])
    assert [str(path) for path in found.files] == ["d/README.md"]


def test_selecting_nothing_or_from_nothing_is_an_error(mixed):
    with pytest.raises(InputError, match=r"d: none of its 10 files is read \(.*\); select files with --include, for"):
        find_inputs(["d"], include=["*.rst"])
    with pytest.raises(UsageError, match="--include and --exclude select files of a directory or a pattern, and no IN"):
        find_inputs(["d/a.txt"], exclude=["*.md"])
    result = invoke("train-tokenizer", "d", "--include", "*.md", "--exclude", "AA/*", "--out", "t", "--vocab-size", 40)
    assert result.exit_code == 0, result.stderr
    assert "reading 1 file: 1 text; 8 bytes on disk" in result.stderr
    assert "9 files: 7 not selected by --include and --exclude (" in result.stderr


@pytest.mark.parametrize("url", ["hdfs://n:9/d/", "file:///x"])
def test_a_url_of_another_kind_is_one_sentence(tmp_path, monkeypatch, vocab, url):
    monkeypatch.chdir(tmp_path)
    kind = url.partition(":")[0]
    said = f"an input is a URL of the kind {kind}; give a path, or a URL of s3, gs, az, hf, http or https"
    with pytest.raises(UsageError, match=said):
        find_inputs([Path(url)])
    result = invoke("build", url, "--out", "out", "--tokenizer", vocab)
    assert (result.exit_code, result.stderr) == (2, f"Error: {said}\n")
    assert os.listdir() == []


def test_a_dataset_is_not_written_to_a_url_of_another_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("the stone\n")
    for command, url in (("build", "hdfs://n:9/d/"), ("train-tokenizer", "s3://bucket/x")):
        assert (
            invoke(command, "text", "--out", url).stderr == "Error: --out is a URL; give a directory of this machine\n"
        )
    assert invoke("build", "--finish", "--out", "s3://b/x").stderr.startswith("Error: --out is a URL; give a directory")
    said = "Error: https://host/x is no place for a dataset; give a URL of s3, gs, az or hf, such as s3://bucket/name\n"
    assert invoke("build", "text", "--out", "https://u:secret@host/x?y=secret").stderr == said
    with pytest.raises(UsageError, match="an input has s3:/ where a URL has s3://; give it as text, not as a Path"):
        find_inputs([Path("s3://bucket/x")])
    assert os.listdir() == ["text"]


def test_a_pattern_is_the_files_that_match_in_order(tree):
    assert names("d/*.txt") == ["d/10.txt", "d/9.txt", "d/a.txt", "d/b.txt"]
    assert names("d/**/*.txt") == ["d/10.txt", "d/9.txt", "d/a.txt", "d/b.txt", "d/sub/0.txt"]
    assert names("[de]/[bc].txt", "d/?.txt") == ["d/b.txt", "e/c.txt", "d/9.txt", "d/a.txt", "d/b.txt"]


def test_what_gives_no_file_is_named(tree):
    (tree / "g").mkdir()
    for name, said in (
        ("d/*.gz", r"d/\*.gz matches no file; check the pattern"),
        ("?", r"\? matches no file"),
        ("g", "g is a directory without files"),
        ("f", "f: none of its 1 file is read .f/.only.; select files with --include, for example"),
    ):
        with pytest.raises(InputError, match=said):
            find_inputs(["z.txt", name])
    with pytest.raises(UsageError, match="empty string"):
        find_inputs([""])


def test_standard_input_can_be_named_once(tree):
    assert names("z.txt", "-") == ["z.txt", "-"]
    with pytest.raises(UsageError, match="named twice"):
        find_inputs(["-", "z.txt", "-"])
    assert invoke("build", "-", "-", "--out", "out").exit_code == 2


def test_a_file_whose_name_is_a_pattern_is_that_file(tree):
    (tree / "d" / "[ab].txt").write_text("x")
    (tree / "d" / "a*").write_text("x")
    assert names("d/[ab].txt", "d/a*") == ["d/[ab].txt", "d/a*"]
    (tree / "what?").mkdir()
    (tree / "what?" / "x").write_text("x")
    assert names("what?") == ["what?/x"]


def test_a_file_called_dash_is_not_standard_input(tree, vocab):
    (tree / "-").write_text("the stone")
    with standard_input(write(tree / "other", b"river\n\nwind")):
        dataset = build(tree / "-", tree / "out", tokenizer=vocab, validation=0).dataset
        assert dataset.num_documents == 1
        dataset = build("./-", tree / "out2", tokenizer=vocab, validation=0).dataset
        assert dataset.num_documents == 1


def test_links_to_files_are_files_and_the_kinds_are_told_by_the_link(tree, vocab):
    (tree / "real").write_bytes(as_jsonl(ROWS[:3]))
    (tree / "e" / "link.jsonl").symlink_to(tree / "real")
    dataset = build("e/link.jsonl", tree / "out", tokenizer=vocab).dataset
    assert dataset.num_documents == 3
    assert names("e") == ["e/c.txt", "e/link.jsonl"]


# ------------------------------------------------------------------------------------------------------- encodings

WESTERN = ["Häuser im Grünen", "naïve café – “quoted” €5", "plain"]


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "gb18030", "utf-8-sig"])
@pytest.mark.parametrize("kind", ["text", "jsonl"])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_text_in_other_encodings_gives_the_ids_of_utf8(tmp_path, vocab, encoding, kind, ending):
    text = MAKE[kind](WESTERN).decode()
    if kind == "jsonl":
        text = "".join(json.dumps({"text": row}, ensure_ascii=False) + "\n" for row in WESTERN)
    options = {"tokenizer": vocab, "validation": 0, "shard_size": 40}
    plain = build(write(tmp_path / f"a{ENDING[kind]}", text.encode()), tmp_path / "plain", **options).dataset
    path = write(tmp_path / f"b{ENDING[kind]}{ending}", PACK[ending](text.encode(encoding)))
    other = build(path, tmp_path / "other", encoding=encoding, **options).dataset
    assert {name: content for name, content in published(tmp_path / "other").items() if name != "manifest.json"} == {
        name: content for name, content in published(tmp_path / "plain").items() if name != "manifest.json"
    }
    assert other.manifest.counts == plain.manifest.counts
    assert other.manifest.settings == plain.manifest.settings | {"encoding": codecs.lookup(encoding).name}
    assert verify(other.path) == []


def test_utf8_by_any_name_is_the_default(tmp_path, vocab, whole):
    for number, name in enumerate(("utf-8", "UTF8", "u8")):
        out = tmp_path / str(number)
        build(write(tmp_path / "text", as_text(ROWS)), out, tokenizer=vocab, encoding=name, **SPLIT)
        assert published(out) == whole


def test_bytes_that_an_encoding_does_not_have_are_counted_or_refused(tmp_path, vocab):
    path = write(tmp_path / "text", b"the st\x81ne\n\nriver \x8d\x8f\n")
    report = build(path, tmp_path / "out", tokenizer=vocab, encoding="cp1252", validation=0)
    assert report.dataset.manifest.counts["replaced_characters"] == 3
    assert report.first_replaced == f"{path}, line 1"
    with pytest.raises(InputError, match=f"^{path}, line 1 is not valid cp1252; fix the file"):
        build(path, tmp_path / "strict", tokenizer=vocab, encoding="cp1252", strict=True)
    result = invoke("build", path, "--out", tmp_path / "cli", "--tokenizer", vocab, "--encoding", "cp1252")
    assert "warning: 3 invalid cp1252 sequences were replaced by U+FFFD" in result.stderr
    assert "name its encoding" not in result.stderr


@pytest.mark.parametrize("name", ["latin-99", "base64", "rot13", "", "utf-8\0"])
def test_an_unknown_encoding_is_one_sentence(tmp_path, corpus, name):
    with pytest.raises(UsageError, match="which is not a text encoding that Python knows; give one such as utf-8, lat"):
        build(corpus, tmp_path / "out", encoding=name)
    result = invoke("train-tokenizer", corpus, "--out", tmp_path / "out", f"--encoding={name}")
    assert result.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_the_warning_of_many_invalid_bytes_names_the_option(tmp_path, vocab):
    write(tmp_path / "german", "Häuser und Bäume\n".encode("latin-1") * 100)
    write(tmp_path / "english", b"the stone\n" * 5000 + b"\xff\n")
    for name, is_told in (("german", True), ("english", False)):
        result = invoke(
            "build", tmp_path / name, "--out", tmp_path / f"{name}.out", "--tokenizer", vocab, "--validation", 0
        )
        assert (
            "; if the text is not UTF-8, name its encoding, for example --encoding latin-1" in result.stderr
        ) == is_told
        assert "--strict fails instead" in result.stderr


def test_an_interrupted_build_of_another_encoding_is_not_continued_as_utf8(tmp_path, vocab):
    path = write(tmp_path / "text", as_text(ROWS))
    options = SPLIT | {"tokenizer": vocab, "shard_size": 1000}
    build(path, tmp_path / "straight", encoding="latin-1", **options)
    with pytest.raises(KeyboardInterrupt):
        build(path, tmp_path / "out", workers=1, progress=stop_after(2), encoding="latin-1", **options)
    with pytest.raises(
        BuildError, match="unfinished build with other settings: encoding was 'iso8859-1' and is now None"
    ):
        build(path, tmp_path / "out", **options)
    assert build(path, tmp_path / "out", encoding="iso-8859-1", **options).reused_units == 2
    assert published(tmp_path / "out") == published(tmp_path / "straight")


# ------------------------------------------------------------------------------------------- damaged compressed files


def lines_of(size, seed=0):
    """Documents of 2 KB that do not compress well."""
    rng = random.Random(seed)
    return "".join(f"{rng.randbytes(1000).hex()}\n\n" for _ in range(size)).encode()


def refused(path, content, ending):
    """Reading the damaged file beside a sound one is one sentence that names it."""
    sound = write(path.parent / "sound.txt", b"the stone\n")
    write(path, content)
    name = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}[ending]
    with pytest.raises(
        InputError, match=f"^{re.escape(str(path))} is not a complete {name} file .*; get the file again$"
    ):
        read([sound, path])


@pytest.mark.parametrize("ending", COMPRESSED)
@pytest.mark.parametrize("size", [1, 40, 600])
def test_a_truncated_file_is_named(folder, ending, size):
    content = PACK[ending](lines_of(size))
    for cut in {1, 2, 5, 11, len(content) // 3, len(content) // 2, len(content) - 9, len(content) - 4,
                len(content) - 1}:  # fmt: skip
        if cut > 0:
            refused(folder / f"cut{ending}", content[:cut], ending)


@pytest.mark.parametrize("ending", COMPRESSED)
def test_a_file_truncated_to_nothing_is_named(folder, ending):
    refused(folder / f"nothing{ending}", b"", ending)


@pytest.mark.parametrize("ending", COMPRESSED)
def test_a_file_truncated_in_a_later_member_is_named(folder, ending):
    first, second = PACK[ending](lines_of(20)), PACK[ending](lines_of(20, seed=1))
    for cut in (1, 3, 7, 15, len(second) // 2, len(second) - 4, len(second) - 1):
        refused(folder / f"later{ending}", first + second[:cut], ending)


@pytest.mark.parametrize("ending", COMPRESSED)
@pytest.mark.parametrize("size", [1, 40])
def test_a_later_member_that_is_damaged_is_named(folder, ending, size):
    """In its magic bytes, in its middle (zstd has no check there), or replaced by something else."""
    first, second = PACK[ending](lines_of(size)), PACK[ending](lines_of(size, seed=1))
    damaged = [bytes([second[0] ^ 1]) + second[1:], b"junk" * 100]
    if ending != ".zst":
        middle = len(second) // 2
        damaged.append(second[:middle] + bytes([second[middle] ^ 1]) + second[middle + 1 :])
    for member in damaged:
        refused(folder / f"damaged{ending}", first + member, ending)


@pytest.mark.parametrize("ending", COMPRESSED)
def test_a_corrupted_file_is_named(folder, ending):
    content = PACK[ending](lines_of(40))
    places = [0, 2] if ending == ".zst" else [0, 2, len(content) // 2, len(content) - 5]  # the last: a checksum
    for place in places:
        refused(folder / f"bad{ending}", content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :], ending)
    refused(folder / f"bad{ending}", b"plain text\n" * 9, ending)


@pytest.mark.parametrize("ending", COMPRESSED)
@pytest.mark.parametrize("kind", ["jsonl", "arrow"])
def test_truncated_rows_are_named(folder, ending, kind):
    content = PACK[ending](MAKE[kind]([f"{number * 7919} stone" for number in range(5000)]))
    for cut in (5, len(content) // 2, len(content) * 9 // 10):
        path = write(folder / f"cut{ENDING[kind]}{ending}", content[:cut])
        with pytest.raises(InputError, match=re.escape(str(path))):
            read([path])


@pytest.mark.parametrize("ending", COMPRESSED)
def test_a_truncated_file_publishes_nothing(tmp_path, vocab, ending):
    path = write(tmp_path / f"cut.txt{ending}", PACK[ending](lines_of(40))[:-9])
    result = invoke("build", path, "--out", tmp_path / "out", "--tokenizer", vocab)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {path} is not a complete ")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------------- bad rows

BAD = [
    (b'{"text": "a"', "not JSON"),
    (b'{"body": "a"}', "no key 'text' in this row"),
    (b'{"text": 7}', "the value of key 'text' is not a string"),
    (b'{"text": null}', "the value of key 'text' is not a string"),
    (b"plain words", "not JSON"),
    (b'["text"]', "no key 'text' in this row"),
]


def bad_jsonl(bad):
    """ROWS with bad lines at line 4 and every fifth one after."""
    lines, left = [], itertools.cycle(bad)
    for number, line in enumerate(as_jsonl(ROWS).splitlines()):
        lines += [next(left), line] if number % 4 == 3 else [line]
    return b"\n".join(lines) + b"\n", len(lines) - len(ROWS)


@pytest.mark.parametrize(("bad", "said"), BAD)
@pytest.mark.parametrize("ending", ["", ".zst"])
def test_bad_json_lines_are_left_out_counted_and_the_first_is_named(tmp_path, vocab, whole, bad, said, ending):
    content, count = bad_jsonl([bad, b"{"])
    path = write(tmp_path / f"rows.jsonl{ending}", PACK[ending](content))
    options = ["--tokenizer", vocab, "--validation", "0.2", "--test", "0.1", "--sentences", "line"]
    failed = invoke("build", path, "--out", tmp_path / "out", *options)
    assert failed.exit_code == 1
    assert failed.stderr.startswith(f"Error: {path}, line 4: {said}")
    assert failed.stderr.endswith("fix the row, or use --on-error skip\n")
    assert not (tmp_path / "out").exists()
    done = invoke("build", path, "--out", tmp_path / "out", *options, "--on-error", "skip")
    assert done.exit_code == 0, done.stderr
    assert f"warning: {count} rows without text were skipped, the first: {path}, line 4: {said}" in done.stderr
    dataset = bertdata.open(tmp_path / "out")
    assert dataset.manifest.counts["skipped_rows"] == count
    assert verify(tmp_path / "out") == []
    assert {k: v for k, v in published(tmp_path / "out").items() if k != "manifest.json"} == {
        k: v for k, v in whole.items() if k != "manifest.json"
    }
    assert dataset.dataset_id == json.loads(whole["manifest.json"])["dataset_id"]


@pytest.mark.parametrize("make", [as_parquet, as_arrow, as_arrow_file])
@pytest.mark.parametrize("kind", [pa.string(), pa.dictionary(pa.int8(), pa.string())])
def test_null_rows_are_left_out_counted_and_the_first_is_named(tmp_path, vocab, whole, make, kind):
    rows = [*ROWS[:24], None, *ROWS[24:30], None, None, *ROWS[30:], None]
    path = write(tmp_path / ("a.parquet" if make is as_parquet else "a.arrow"), make(rows, kind))
    options = SPLIT | {"tokenizer": vocab}
    with pytest.raises(InputError, match=f"^{path}, row 25: the text is null; fix the row, or use --on-error skip$"):
        build(path, tmp_path / "out", **options)
    report = build(path, tmp_path / "out", on_error="skip", **options)
    assert report.first_skipped == f"{path}, row 25: the text is null"
    assert report.dataset.manifest.counts["skipped_rows"] == 4
    assert report.dataset.dataset_id == json.loads(whole["manifest.json"])["dataset_id"]


def test_the_first_bad_row_of_a_later_file_is_named(tmp_path, vocab):
    good = write(tmp_path / "a.jsonl", as_jsonl(ROWS))
    bad = write(tmp_path / "b.jsonl", b'\n\n{"text": "a"}\r\n \n7\n8\n')
    report = build([good, bad], tmp_path / "out", tokenizer=vocab, on_error="skip")
    assert report.first_skipped == f"{bad}, line 5: no key 'text' in this row"
    assert report.dataset.manifest.counts["skipped_rows"] == 2


@pytest.fixture(scope="module")
def skipping(tmp_path_factory, vocab):
    """Options and inputs of a build in small units with many bad rows, whole units of them too, and what it gives."""
    folder = tmp_path_factory.mktemp("skipping")
    content, count = bad_jsonl([bad for bad, _ in BAD])
    desert = b'{"body": "nothing at all"}\n' * 100
    paths = [write(folder / "a.jsonl", content + desert + content), write(folder / "b.jsonl.gz", gzip.compress(desert))]
    rows = [*ROWS[:9], *[None] * 1500, *ROWS[9:]]
    paths.append(write(folder / "c.parquet", as_parquet(rows)))
    options = SPLIT | {"tokenizer": vocab, "shard_size": 1000, "on_error": "skip"}
    report = build(paths, folder / "out", **options)
    assert report.dataset.manifest.counts["skipped_rows"] == 2 * count + 200 + 1500
    assert report.first_skipped.startswith(f"{paths[0]}, line 4: not JSON")
    return paths, options, published(folder / "out"), report.first_skipped


@pytest.mark.parametrize("blocks", [1, 4, 15])
def test_a_build_with_bad_rows_can_be_interrupted(tmp_path, skipping, blocks):
    paths, options, expected, first = skipping
    with pytest.raises(KeyboardInterrupt):
        build(paths, tmp_path / "out", workers=1, progress=stop_after(blocks), **options)
    assert 0 < len(units_in(tmp_path / "out")) <= blocks
    with pytest.raises(KeyboardInterrupt):
        build(paths, tmp_path / "out", workers=1, progress=stop_after(5), **options)
    report = build(paths, tmp_path / "out", **options)
    assert report.reused_units > blocks
    assert published(tmp_path / "out") == expected
    assert report.first_skipped == first


def test_a_build_with_bad_rows_can_be_made_in_parts(tmp_path, skipping):
    paths, options, expected, first = skipping
    for number in (2, 0, 1):
        assert build(paths, tmp_path / "out", part=(number, 3), **options) is None
    report = finish(tmp_path / "out")
    assert published(tmp_path / "out") == expected
    assert report.first_skipped == first


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_nothing_but_bad_rows_is_one_sentence(tmp_path, vocab, name):
    content = {"a.jsonl": b"{\n7\n", "a.parquet": as_parquet([None] * 9), "a.arrow": as_arrow([None] * 9)}[name]
    path = write(tmp_path / name, content)
    for size in ("1", "1GiB"):
        result = invoke("build", path, "--out", tmp_path / "out", "--tokenizer", vocab, "--on-error", "skip",
                        "--shard-size", size)  # fmt: skip
        assert result.exit_code == 1
        assert result.stderr.startswith("Error: no document to build from: ")
        assert "rows without text were skipped" in result.stderr
        assert result.stderr.count("\n") == 1
        assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------- units, and seeking over them

PIECES = [
    b"a", b"bc ", b" ", b"\t", b"\n", b"\n\n", b"\r\n", b"\r", b"\0", b"\xff", b"\xe2\x82", b"\xc3\xa9",
    b"\xf0\x9f\x98\x80", b"\xf0\x9f", b"\xed\xa0\x80", b"\x0b", b"\n \t\r\n", b"abc\nabc\nabc\n",
]  # fmt: skip
BYTES = st.lists(st.sampled_from(PIECES), max_size=30).map(b"".join)
LINE = st.sampled_from([b"a", b"bcd", b"\xc3\xa9 x", b" y", b"", b"z\r", b"\xff"])
LINES = st.lists(LINE, max_size=30).map(b"\n".join)
SIZES = st.one_of(st.sampled_from([1, 2, 7]), st.integers(1, 40))
BLOCKS = st.sampled_from([1, 3, 64, 1 << 20])
WANTED = st.one_of(st.integers(0, 2**16 - 1), st.just(2**15)).map(lambda mask: lambda unit: bool(mask >> unit % 16 & 1))


def read(paths, wanted=lambda unit: True, **form):
    """(unit, text, replaced) of each document."""
    found = []
    for block in read_blocks(split([local(path) for path in paths], TextFormat(**form)), wanted):
        for a, b, replaced in zip(block.offsets, block.offsets[1:], block.replaced, strict=False):
            found.append((block.unit, block.data[a : b - 1], int(replaced)))
    return found


def first_replaced(paths, wanted=lambda unit: True, **form):
    """Unit → place of its first invalid byte."""
    found = {}
    for block in read_blocks(split([local(path) for path in paths], TextFormat(**form)), wanted):
        if block.first_replaced:
            found.setdefault(block.unit, block.first_replaced)
    return found


@given(st.lists(BYTES, min_size=1, max_size=3), st.sampled_from(["blank", "line", "file"]), BLOCKS, SIZES, WANTED)
@example([b"\n\n\na\n\nb\r\n\r\n \n\n\n\nc"], "blank", 1, 2, lambda unit: unit in (1, 6))
@example([b"ab\ncd\nef", b"\n\ngh\n"], "line", 64, 4, lambda unit: unit == 1)
@example([b" \n" * 9 + b"a"], "line", 3, 4, lambda unit: unit == 4)
def test_wanted_units_are_read_as_if_all_were(folder, contents, kind, block_bytes, shard_size, wanted):
    for ending, pack in ((".txt", bytes), (".txt.gz", gzip.compress)):
        paths = [write(folder / f"{n}{ending}", pack(content)) for n, content in enumerate(contents)]
        form = {"documents": kind, "shard_size": shard_size}
        with patch.object(documents, "BLOCK_BYTES", block_bytes):
            assert read(paths, wanted, **form) == [each for each in read(paths, **form) if wanted(each[0])]
            every = first_replaced(paths, **form)
            assert first_replaced(paths, wanted, **form) == {u: place for u, place in every.items() if wanted(u)}


@given(st.lists(st.sampled_from(["", "a", "\ud800", "bc\n", None]), max_size=12), st.sampled_from([b"\n", b"\r\n \n"]),
       BLOCKS, st.integers(1, 60), WANTED)  # fmt: skip
def test_wanted_units_of_json_lines_are_read_as_if_all_were(folder, rows, line_end, block_bytes, shard_size, wanted):
    content = b"".join(json.dumps({"text": row}).encode() + line_end for row in rows)
    paths = [write(folder / "0.jsonl", content), write(folder / "1.jsonl", content[:-1])]
    form = {"on_error": "skip", "shard_size": shard_size}
    with patch.object(documents, "BLOCK_BYTES", block_bytes):
        assert read(paths, wanted, **form) == [each for each in read(paths, **form) if wanted(each[0])]
        plan = split([local(path) for path in paths], TextFormat(**form))
        skipped = sum(block.skipped for block in read_blocks(plan, wanted))
        rest = sum(block.skipped for block in read_blocks(plan, lambda unit: not wanted(unit)))
    assert skipped + rest == 2 * rows.count(None)


@given(st.lists(st.one_of(LINES, BYTES), min_size=1, max_size=3), BLOCKS, SIZES, WANTED,
       st.one_of(st.none(), st.integers(1, 20)))  # fmt: skip
@example([b"a\nb\nc\nd\n"], 1 << 20, 2, lambda unit: unit % 2 == 1, None)
@example([b"a\nb\nc\n", b"d\ne\n"], 1 << 20, 100, lambda unit: True, 3)
@example([b"a\nb\nc\n", b"d\ne\n"], 1 << 20, 2, lambda unit: True, 4)
def test_max_documents_counts_those_of_units_that_are_not_wanted(
    folder, contents, block_bytes, shard_size, wanted, limit
):
    paths = [write(folder / f"{n}.txt", content) for n, content in enumerate(contents)]
    form = {"documents": "line", "shard_size": shard_size, "max_documents": limit}
    with patch.object(documents, "BLOCK_BYTES", block_bytes):
        found, whole = read(paths, wanted, **form), read(paths, **form)
        everything = read(paths, documents="line", shard_size=shard_size)
    assert whole == everything[:limit]
    assert found == [each for each in whole if wanted(each[0])]


def test_valid_lines_are_never_decoded(folder):
    path = write(folder / "regular.txt", b"the stone\n" * 1000)
    with patch.object(documents, "valid_utf8", side_effect=AssertionError), patch.object(documents, "BLOCK_BYTES", 999):
        assert len(read([path], documents="line", shard_size=777)) == 1000


def bytes_asked_for(paths, wanted, **form):
    sizes, read_into = [], streams.InputStream.readinto

    def counted(self, buffer):
        sizes.append(read_into(self, buffer))
        return sizes[-1]

    with patch.object(streams.InputStream, "readinto", counted):
        found = read(paths, wanted, **form)
    return sum(sizes), found


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
    path, form = write(folder / name, content), form | {"shard_size": 1_000_000}
    total, every = bytes_asked_for([path], lambda unit: True, **form)
    assert 8_000_000 - 2000 < total <= 8_000_000
    for unit, most in ((7, 3_000_000), (0, 3_000_000), (4, 3_500_000)):
        asked, found = bytes_asked_for([path], lambda each, unit=unit: each == unit, **form)
        assert asked < most
        assert found == [each for each in every if each[0] == unit]
    assert bytes_asked_for([path], lambda unit: False, **form) == (0, [])


def test_an_input_of_units_that_are_not_wanted_is_not_opened(folder):
    path, after = write(folder / "big.txt", b"the stone\n\n" * 1000), write(folder / "after.txt", b"river")
    asked, found = bytes_asked_for([path, after], lambda unit: unit == 11, shard_size=1000)
    assert found == [(11, b"river", 0)]
    assert asked < 100


def test_a_document_of_many_units_is_not_read_once_for_each(folder):
    """Only the bytes at which a document could start decide; those of a unit without a start need no end."""
    path = write(folder / "long.txt", b"the stone under the river\n" * 40_000)  # one document of 1 MB
    with patch.object(documents, "BLOCK_BYTES", 1000):
        asked, found = bytes_asked_for([path], lambda unit: unit % 2 == 1, shard_size=10_000)
    assert found == []
    assert asked < 4 * path.stat().st_size


# ----------------------------------------------------------------------------------------------- stopped and resumed


@pytest.mark.parametrize("limit", [35, 60])
def test_an_interrupted_build_of_the_first_documents_has_as_many(tmp_path, corpus, vocab, limit):
    options = SMALL | {"tokenizer": vocab, "max_documents": limit}
    build(corpus, tmp_path / "straight", **options)
    with pytest.raises(KeyboardInterrupt):
        build(corpus, tmp_path / "out", workers=1, progress=stop_after(2), **options)
    assert len(units_in(tmp_path / "out")) == 2
    report = build(corpus, tmp_path / "out", **options)
    assert report.dataset.num_documents == limit
    assert published(tmp_path / "out") == published(tmp_path / "straight")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.xz", "a.parquet", "a.arrow", "a.arrow.gz", "a.txt.bz2"])
def test_an_interrupted_build_of_any_kind_continues(tmp_path, vocab, name):
    make = {"jsonl": as_jsonl, "parquet": as_parquet, "arrow": as_arrow_file, "txt": as_text}[name.split(".")[1]]
    make = as_arrow if name == "a.arrow.gz" else make
    path = write(tmp_path / name, PACK[Path(name).suffix if Path(name).suffix in PACK else ""](make(ROWS)))
    options = SPLIT | {"tokenizer": vocab, "shard_size": 2000}
    build(path, tmp_path / "straight", **options)
    with pytest.raises(KeyboardInterrupt):
        build(path, tmp_path / "out", workers=1, progress=stop_after(2), **options)
    assert build(path, tmp_path / "out", **options).reused_units == 2
    assert published(tmp_path / "out") == published(tmp_path / "straight")


# -------------------------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize("total", [1, 3, 15])
def test_parts_give_the_bytes_of_a_whole_build(tmp_path, corpus, vocab, whole_small, total):
    """In any order, more of them than there are units too."""
    out = tmp_path / "out"
    for number in random.Random(total).sample(range(total), total):
        assert build(corpus, out, tokenizer=vocab, part=(number, total), **SMALL) is None
        assert not (out / "manifest.json").exists()
    report = finish(out)
    assert report.reused_units == 0
    assert published(out) == whole_small
    assert verify(out) == []


def test_a_part_makes_its_units_only(tmp_path, corpus, vocab, whole_small):
    every = {int(name.split("-")[1][:5]) for name in whole_small if name.startswith("train-")}
    assert len(every) > 6
    for number in range(3):
        build(corpus, tmp_path / str(number), tokenizer=vocab, part=(number, 3), **SMALL)
        assert units_in(tmp_path / str(number)) == {unit for unit in every if unit % 3 == number}


def test_parts_of_compressed_rows_and_several_inputs(tmp_path, vocab):
    paths = [write(tmp_path / "a.jsonl.zst", zstd(as_jsonl(ROWS))), write(tmp_path / "b.txt", as_text(ROWS)),
             write(tmp_path / "c.parquet", as_parquet(ROWS)), write(tmp_path / "d.arrow", as_arrow(ROWS))]  # fmt: skip
    options = SPLIT | {"tokenizer": vocab, "shard_size": 2500}
    build(paths, tmp_path / "straight", **options)
    for number in range(3):
        build(paths, tmp_path / "out", part=(number, 3), **options)
    finish(tmp_path / "out")
    assert published(tmp_path / "out") == published(tmp_path / "straight")


def test_parts_share_one_trained_vocabulary(tmp_path, corpus):
    options = SMALL | {"vocab_size": 120}
    build(corpus, tmp_path / "straight", **options)
    said = []
    for number in range(2):
        build(corpus, tmp_path / "out", part=(number, 2), say=said.append, **options)
    assert sum("training a" in line for line in said) == 1
    finish(tmp_path / "out")
    assert published(tmp_path / "out") == published(tmp_path / "straight")


def test_three_processes_make_the_parts_at_once(tmp_path, corpus, vocab, whole_small):
    out = tmp_path / "out"
    settings = ["--shard-size", "3000", "--validation", "0.2", "--test", "0.1", "--sentences", "line"]
    arguments = [sys.executable, "-m", "bertdata", "build", corpus, "--out", out, "--tokenizer", vocab, *settings]
    parts = [
        subprocess.Popen([*arguments, "--part", f"{n}/3"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for n in (1, 2, 3)
    ]
    for number, part in enumerate(parts, 1):
        told, errors = part.communicate(timeout=120)
        assert (part.returncode, errors) == (0, "")
        assert told == f"{out}: made part {number}/3; when all are made, run bertdata build --finish --out {out}\n"
    done = invoke("build", "--finish", "--out", out)
    assert done.exit_code == 0, done.stderr
    dataset = bertdata.open(out)
    assert done.stdout == (
        f"{out}: {dataset.num_documents} documents, {dataset.num_tokens:,} tokens\ndataset_id {dataset.dataset_id}\n"
    )
    assert published(out) == whole_small


def test_a_part_that_is_not_made_is_named(tmp_path, corpus, vocab, whole_small):
    out = tmp_path / "out"
    with pytest.raises(BuildError, match=f"^{out} has no finished part; run bertdata build --part 1/n"):
        finish(out)
    assert not out.exists()
    build(corpus, out, tokenizer=vocab, part=(1, 3), **SMALL)
    before = sorted(path.name for path in (out / ".build").iterdir())
    with pytest.raises(BuildError, match=f"^{out} lacks part 1/3, 3/3; run bertdata build --part for each of them"):
        finish(out)
    assert sorted(path.name for path in (out / ".build").iterdir()) == before
    for number in (0, 2):
        build(corpus, out, tokenizer=vocab, part=(number, 3), **SMALL)
    finish(out)
    assert published(out) == whole_small
    with pytest.raises(BuildError, match="has no finished part"):
        finish(out)
    with pytest.raises(BuildError, match="already holds a dataset"):
        build(corpus, out, tokenizer=vocab, part=(0, 3), **SMALL)
    assert published(out) == whole_small


def test_finishing_where_there_is_nothing_is_one_sentence(tmp_path):
    for out in (tmp_path, tmp_path / "no"):
        result = invoke("build", "--finish", "--out", out)
        assert result.exit_code == 1
        assert result.stderr.startswith(f"Error: {out} has no finished part")
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_undivided_build_is_not_finished_as_parts(tmp_path, corpus, vocab):
    with pytest.raises(KeyboardInterrupt):
        build(corpus, tmp_path / "out", tokenizer=vocab, workers=1, progress=stop_after(3), **SMALL)
    with pytest.raises(BuildError, match="has no finished part"):
        finish(tmp_path / "out")
    assert len(units_in(tmp_path / "out")) == 3


def test_parts_of_different_numbers_are_told_and_those_that_are_whole_are_enough(tmp_path, corpus, vocab, whole_small):
    out = tmp_path / "out"
    build(corpus, out, tokenizer=vocab, part=(0, 3), **SMALL)
    build(corpus, out, tokenizer=vocab, part=(0, 2), **SMALL)
    with pytest.raises(BuildError, match="parts of 2 and of 3, and none of these is complete"):
        finish(out)
    build(corpus, out, tokenizer=vocab, part=(1, 2), **SMALL)
    finish(out)
    assert published(out) == whole_small


@pytest.mark.parametrize("part", [(3, 3), (-1, 3), (0, 0)])
def test_parts_that_cannot_be_are_refused(tmp_path, corpus, vocab, part):
    with pytest.raises(UsageError, match="part is .*; give"):
        build(corpus, tmp_path / "out", tokenizer=vocab, part=part)
    assert not (tmp_path / "out").exists()


def test_what_does_not_go_with_parts_is_refused(tmp_path, corpus, vocab):
    out = tmp_path / "out"
    os.mkfifo(tmp_path / "pipe")
    for path, options, said in (
        (tmp_path / "pipe", {}, "a pipe"),
        ("-", {}, "a pipe"),
        (corpus, {"overwrite": True}, "--overwrite"),
        (corpus, {"max_documents": 5}, "--max-documents"),
    ):
        with pytest.raises(UsageError, match=f"--part does not go with {said}"):
            build(path, out, tokenizer=vocab, part=(0, 3), **options)
        assert not out.exists()


def test_parts_have_the_same_settings_and_inputs(tmp_path, corpus, vocab):
    out = tmp_path / "out"
    build(corpus, out, tokenizer=vocab, part=(0, 2), **SMALL)
    for change in ({"shard_size": 4000}, {"validation": 0.0}, {"documents": "line"}, {"on_error": "skip"}):
        with pytest.raises(BuildError, match=f"unfinished build with other settings: {next(iter(change))} was"):
            build(corpus, out, part=(1, 2), **SMALL | {"tokenizer": vocab} | change)
    with pytest.raises(BuildError, match="the input was"):
        build([corpus, corpus], out, tokenizer=vocab, part=(1, 2), **SMALL)
    with pytest.raises(BuildError, match="lacks part 2/2"):
        finish(out)


def test_a_part_that_fails_is_not_made_and_keeps_what_others_did(tmp_path, vocab):
    rows = as_jsonl(ROWS).splitlines(keepends=True)
    place = sum(len(row) for row in rows[:20])
    path = write(tmp_path / "a.jsonl", b"".join([*rows[:20], b"{\n", *rows[20:]]))
    size = 1000
    bad = place // size % 2
    options = {"tokenizer": vocab, "shard_size": size}
    build(path, tmp_path / "out", part=(1 - bad, 2), **options)
    with pytest.raises(InputError, match="line 21: not JSON"):
        build(path, tmp_path / "out", part=(bad, 2), **options)
    with pytest.raises(BuildError, match=f"lacks part {bad + 1}/2"):
        finish(tmp_path / "out")
    assert {unit for unit in units_in(tmp_path / "out") if unit % 2 != bad}


def test_a_part_is_made_by_one_process_at_a_time_and_not_beside_a_whole_build(tmp_path, corpus, vocab, whole_small):
    out = tmp_path / "out"
    build(corpus, out, tokenizer=vocab, part=(0, 3), **SMALL)

    def refused_with(said, lock_name, kind, **options):
        with open(out / ".build" / lock_name, "r+") as lock:
            lock.write("12345")
            lock.truncate()
            lock.flush()
            fcntl.flock(lock, kind)
            with pytest.raises(BuildError, match=said):
                options.pop("call", build)(*options.pop("given", [corpus]), out, **options)

    whole = SMALL | {"tokenizer": vocab}
    refused_with(f"part 1/3 of {out} is being built by process 12345; wait", "part-1-of-3.lock", fcntl.LOCK_EX,
                 part=(0, 3), **whole)  # fmt: skip
    refused_with(f"{out} is being built by process 12345", "lock", fcntl.LOCK_EX, part=(1, 3), **whole)
    refused_with(f"{out} is being built by process 12345", "lock", fcntl.LOCK_SH, **whole)
    for number in (1, 2):
        build(corpus, out, part=(number, 3), **whole)
    refused_with(f"{out} is being built by process 12345", "lock", fcntl.LOCK_SH, call=finish, given=[])
    finish(out)
    assert published(out) == whole_small


def test_a_killed_part_keeps_its_finished_units(tmp_path, corpus, vocab, whole_small):
    out = tmp_path / "out"
    program = f"""
import os, signal
from bertdata.write import build
left = iter(range(2))
def progress(done, total):
    if next(left, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
build([{str(corpus)!r}], {str(out)!r}, tokenizer={vocab!r}, progress=progress, part=(1, 2), **{SMALL!r})
"""
    build(corpus, out, tokenizer=vocab, part=(0, 2), **SMALL)
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == -signal.SIGKILL
    kept = {path: path.stat().st_ino for path in (out / ".build").glob("unit-*.json")}
    assert {unit for unit in units_in(out) if unit % 2} == {1, 3}
    with pytest.raises(BuildError, match="lacks part 2/2"):
        finish(out)
    assert {path: path.stat().st_ino for path in (out / ".build").glob("unit-*.json")} == kept
    build(corpus, out, tokenizer=vocab, part=(1, 2), **SMALL)
    assert {path: path.stat().st_ino for path in kept} == kept
    assert finish(out).reused_units == 0
    assert published(out) == whole_small


def test_a_part_made_again_redoes_nothing(tmp_path, corpus, vocab, whole_small):
    out = tmp_path / "out"
    for number in (0, 1):
        build(corpus, out, tokenizer=vocab, part=(number, 2), **SMALL)
    kept = {path: path.stat().st_ino for path in (out / ".build").glob("unit-*.json")}
    asked = []
    with patch.object(streams.InputStream, "read", side_effect=asked.append):
        build(corpus, out, tokenizer=vocab, part=(1, 2), **SMALL)
    assert asked == []
    assert {path: path.stat().st_ino for path in kept} == kept
    finish(out)
    assert published(out) == whole_small


def test_a_whole_build_takes_what_parts_made_and_the_other_way_round(tmp_path, corpus, vocab, whole_small):
    options, said = SMALL | {"tokenizer": vocab}, []
    for number in (0, 2):
        build(corpus, tmp_path / "a", part=(number, 3), **options)
    made = len(units_in(tmp_path / "a"))
    report = build(corpus, tmp_path / "a", say=said.append, **options)
    assert report.reused_units == made > 3
    assert said == [f"continuing: keeping {made} finished units of an earlier run"]
    assert published(tmp_path / "a") == whole_small

    with pytest.raises(KeyboardInterrupt):
        build(corpus, tmp_path / "b", workers=1, progress=stop_after(4), **options)
    kept = {path: path.stat().st_ino for path in (tmp_path / "b" / ".build").glob("unit-*.json")}
    assert len(kept) == 4
    for number in (0, 1):
        build(corpus, tmp_path / "b", part=(number, 2), **options)
    assert {path: path.stat().st_ino for path in kept} == kept
    finish(tmp_path / "b")
    assert published(tmp_path / "b") == whole_small


def test_parts_without_a_document_publish_nothing(tmp_path, vocab):
    path = write(tmp_path / "blank", b" \n" * 500)
    for number in (0, 1):
        build(path, tmp_path / "out", tokenizer=vocab, part=(number, 2), shard_size=300)
    with pytest.raises(InputError, match="no document to build from: there is nothing but blank lines"):
        finish(tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_lost_unit_is_told(tmp_path, corpus, vocab, whole_small):
    out = tmp_path / "out"
    for number in (0, 1):
        build(corpus, out, tokenizer=vocab, part=(number, 2), **SMALL)
    (out / ".build" / "unit-00003.json").unlink()
    with pytest.raises(BuildError, match=r"lost the records of units \[3\]; make the parts again"):
        finish(out)
    for number in (0, 1):
        build(corpus, out, tokenizer=vocab, part=(number, 2), **SMALL)
    finish(out)
    assert published(out) == whole_small


def test_the_warnings_of_parts_are_told_at_the_end(tmp_path, vocab):
    content, count = bad_jsonl([b"{"])
    path = write(tmp_path / "a.jsonl", content.replace(b"stone", b"st\xffone"))
    arguments = ["--out", tmp_path / "out"]
    for number in (2, 1):
        done = invoke("build", path, "--tokenizer", vocab, "--shard-size", "1000", "--on-error", "skip", "--part",
                      f"{number}/2", *arguments)  # fmt: skip
        assert done.exit_code == 0, done.stderr
    done = invoke("build", "--finish", *arguments)
    assert f"warning: {count} rows without text were skipped, the first: {path}, line 4: not JSON" in done.stderr
    assert f"invalid UTF-8 sequences were replaced by U+FFFD, the first at {path}, byte" in done.stderr


@pytest.mark.parametrize("part", ["0/3", "4/3", "1", "1/0", "a/b", "-1/3", "1/3/5", ""])
def test_a_part_that_is_written_wrong_is_wrong_usage(tmp_path, corpus, part):
    result = invoke("build", corpus, "--out", tmp_path / "out", f"--part={part}")
    assert result.exit_code == 2
    assert "is not a part; write 1/4 for the first of four parts" in result.stderr
    assert not (tmp_path / "out").exists()


def test_finishing_goes_with_nothing_else_and_building_needs_an_input(tmp_path, corpus, vocab):
    out = tmp_path / "out"
    for arguments in ([corpus, "--finish"], ["--part", "1/2", "--finish"], []):
        result = invoke("build", *arguments, "--out", out)
        assert result.exit_code == 2
        assert result.stderr.startswith("Error: ")
        assert result.stderr.count("\n") == 1
    for arguments in (["--overwrite"], ["--max-documents", "3"], ["--tokenizer", vocab]):  # so its help says
        assert invoke("build", "--finish", *arguments, "--out", out).exit_code == 2, arguments
    for arguments in ([corpus, "--overwrite"], [corpus, "--max-documents", "3"], ["-"]):
        result = invoke("build", *arguments, "--part", "1/2", "--out", out, "--tokenizer", vocab)
        assert result.exit_code == 2
        assert "--part does not go with" in result.stderr
    assert not out.exists()


# ------------------------------------------------------------------------------------------------------ columns

KINDS = [pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string()),
         pa.dictionary(pa.int32(), pa.large_string())]  # fmt: skip


@pytest.mark.parametrize("make", [as_parquet, as_arrow, as_arrow_file])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind_of_string_column_is_read(tmp_path, vocab, whole, kind, make):
    path = write(tmp_path / ("a.parquet" if make is as_parquet else "a.arrow"), make(ROWS, kind))
    build(path, tmp_path / "out", tokenizer=vocab, **SPLIT)
    assert published(tmp_path / "out") == whole


def test_invalid_utf8_in_arrow_is_counted(folder):
    data = pa.py_buffer(b"ab\xffc")
    column = pa.StringArray.from_buffers(2, pa.py_buffer(np.array([0, 2, 4], np.int32)), data)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("text", pa.string())])) as writer:
        writer.write_batch(pa.record_batch([column], names=["text"]))
    assert read([write(folder / "bad.arrow", sink.getvalue().to_pybytes())]) == [
        (0, b"ab", 0),
        (0, "\ufffdc".encode(), 1),
    ]


def test_columns_that_hold_no_text_are_named(folder):
    for name, make in (("a.parquet", as_parquet), ("a.arrow", as_arrow), ("b.arrow", as_arrow_file)):
        path = write(folder / name, make(ROWS))
        with pytest.raises(InputError, match=f"{path} has no column 'body', only n, text; name the column"):
            read([path], text_key="body")
        with pytest.raises(InputError, match=f"{path}: column 'n' is int64, not a string; name another"):
            read([path], text_key="n")
        path = write(folder / name, make(["1", "2"], pa.dictionary(pa.int8(), pa.string()))[:-40])
        with pytest.raises(InputError, match=f"{path} is not readable"):
            read([path])


@pytest.mark.parametrize("content", [b"plain text\n", b"", b"ARROW1", b"\xff\xff\xff\xff\x10\0\0\0", bytes(500)])
def test_what_is_not_arrow_is_named(folder, content):
    for path in (write(folder / "no.arrow", content), write(folder / "no.arrow.gz", gzip.compress(content))):
        with pytest.raises(InputError, match=f"{path} is not readable Arrow"):
            read([path])


@pytest.mark.parametrize("ending", COMPRESSED)
def test_compressed_parquet_is_refused(tmp_path, vocab, ending):
    path = write(tmp_path / f"a.parquet{ending}", PACK[ending](as_parquet(ROWS)))
    result = invoke("build", path, "--out", tmp_path / "out", "--tokenizer", vocab)
    assert result.exit_code == 1
    assert result.stderr.endswith(
        f"Error: {path}: Parquet cannot be read from a pipe or a compressed file; write it to a plain file first\n"
    )
    assert not (tmp_path / "out").exists()


def test_parquet_from_a_pipe_is_refused(tmp_path, vocab):
    said = "Parquet cannot be read from a pipe or a compressed file; write it to a plain file first"
    with standard_input(write(tmp_path / "a", as_parquet(ROWS))), pytest.raises(InputError, match=f"^-: {said}$"):
        build("-", tmp_path / "out", tokenizer=vocab, format="parquet")
    os.mkfifo(tmp_path / "p.parquet")
    with pytest.raises(InputError, match=f"p.parquet: {said}$"):
        build(tmp_path / "p.parquet", tmp_path / "out", tokenizer=vocab)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("way", ["compressed", "standard input"])
def test_an_arrow_file_that_cannot_be_read_in_order_is_refused_with_a_sentence(tmp_path, vocab, way):
    content = as_arrow_file(ROWS)
    if way == "compressed":
        path = write(tmp_path / "a.arrow.gz", gzip.compress(content))
        with pytest.raises(InputError, match=f"^{path} is not readable Arrow"):
            build(path, tmp_path / "out", tokenizer=vocab)
    else:
        said = "^- is not readable Arrow"
        with standard_input(write(tmp_path / "a", content)), pytest.raises(InputError, match=said):
            build("-", tmp_path / "out", tokenizer=vocab, format="arrow")
    assert not (tmp_path / "out").exists()


def test_an_arrow_file_whose_offsets_lie_outside_its_data_is_refused(tmp_path, vocab):
    """pyarrow believes what such a file says, and the kernel would write outside its array."""
    content = bytearray(as_arrow_file(["abcd", "efgh", "ijkl"]))
    offsets = np.array([0, 4, 8, 12], np.int32).tobytes()
    assert content.count(offsets) == 1
    wrong = np.array([0, 1_000_000, 8, 12], np.int32).tobytes()
    path = write(tmp_path / "a.arrow", bytes(content).replace(offsets, wrong))
    with pytest.raises(InputError, match=f"^{path} is not readable Arrow: "):
        build(path, tmp_path / "out", tokenizer=vocab)


def test_the_bytes_of_null_rows_do_not_count(folder):
    """A null slot may hide bytes; later rows are in the units that docs/format.md says."""
    data = pa.py_buffer(b"hiddenab")
    valid = pa.py_buffer(bytes([0b110]))
    column = pa.StringArray.from_buffers(3, pa.py_buffer(np.array([0, 6, 7, 8], np.int32)), data, valid, 1)
    with (
        pa.OSFile(str(folder / "null.arrow"), "wb") as file,
        pa.ipc.new_file(file, pa.schema([("text", "string")])) as w,
    ):
        w.write_batch(pa.record_batch({"text": column}))
    found = read([folder / "null.arrow"], on_error="skip", shard_size=2)
    assert found == [(0, b"a", 0), (1, b"b", 0)]


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_the_first_of_two_kinds_of_errors_is_named(folder, size):
    path = write(folder / "two.jsonl", b'{"text": "\xff"}\n{"text": 7}\n')
    other = write(folder / "other.jsonl", b'{"text": 7}\n{"text": "\xff"}\n')
    with patch.object(documents, "BLOCK_BYTES", size):
        with pytest.raises(InputError, match=f"^{path}, byte 10 is not valid UTF-8"):
            read([path], strict=True)
        with pytest.raises(InputError, match=f"^{other}, line 1: the value of key"):
            read([other], strict=True)


@pytest.mark.parametrize("workers", [1, 4])
def test_an_error_in_the_text_goes_before_one_that_is_read_later(tmp_path, vocab, workers):
    first = write(tmp_path / "a.jsonl", b'{"text": 7}\n')
    write(tmp_path / "b.txt.gz", gzip.compress(as_text(ROWS))[:-20])
    with pytest.raises(InputError, match=f"^{first}, line 1: "):
        build([first, tmp_path / "b.txt.gz"], tmp_path / "out", tokenizer=vocab, workers=workers)


def test_parts_can_be_published_where_the_inputs_are_not(tmp_path, vocab):
    path = write(tmp_path / "a.jsonl", b'{"text": "the stone"}\n7\n')
    build(path, tmp_path / "out", tokenizer=vocab, on_error="skip", part=(0, 1))
    path.unlink()
    assert finish(tmp_path / "out").first_skipped == f"{path}, byte 22: no key 'text' in this row"
