"""The same documents give the same dataset, whatever they come in, wherever they come from, in however many runs."""

import fcntl
import gzip
import importlib
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import writers
from support.commands import refuses, succeeds
from support.data import ROOT, build, import_ids, make_text, stored
from support.disk import put, write_all
from support.disk import without_origins as published
from support.sources import (
    COMPRESSED,
    ENDING,
    MAKE,
    PACK,
    ROWS,
    as_arrow,
    as_jsonl,
    as_parquet,
    as_text,
    read,
    stop_after_units,
    stopped,
    units_in,
    zstd,
)

import bertdata
from bertdata import finish
from bertdata.sources.inputs import find_inputs

SPLIT = {"validation": 0.2, "test": 0.1, "sentences": "line"}

# ----------------------------------------------------------------------------------------- files and their compression

EVERY = "d/10.txt d/9.txt d/AA/wiki_00 d/D.TXT.BZ2 d/a.txt d/b.txt d/c.jsonl.gz d/sub/0.txt"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Directories as people have them: files of text, others, hidden ones, links, and odd names."""
    monkeypatch.chdir(tmp_path)
    others = "README.md AA/notes.md table.xml news.2007.en .hidden _SUCCESS .git/x _tmp/x sub/.x/y"
    names = [*EVERY.split(), *(f"d/{name}" for name in others.split())]
    names += ["e/c.txt", "o/[ab].txt", "o/a*", "w?/x", "z.txt"]
    write_all(tmp_path, {name: name.encode() for name in reversed(names)})
    for name, target in {"far": "d", "gone.txt": "nowhere", "one.jsonl": "z.txt"}.items():
        Path("e", name).symlink_to(tmp_path / target)
    return tmp_path


SELECTED = [
    ("z.txt d/ e", {}, f"z.txt {EVERY} e/c.txt e/one.jsonl"),
    ("d/.git d/_SUCCESS d/.hidden", {}, "d/.git/x d/_SUCCESS d/.hidden"),
    ("o/[ab].txt o/a* w?", {}, "o/[ab].txt o/a* w?/x"),
    ("d/*.txt -", {}, "d/10.txt d/9.txt d/a.txt d/b.txt -"),
    ("d/**/*.txt", {}, "d/10.txt d/9.txt d/a.txt d/b.txt d/sub/0.txt"),
    ("[de]/[bc].txt d/?.txt", {}, "d/b.txt e/c.txt d/9.txt d/a.txt d/b.txt"),
    ("z.txt d", {"include": ["**/*.md"]}, "z.txt d/AA/notes.md d/README.md"),
    ("d", {"include": ["*.md", "a.*"], "exclude": ["AA/*"]}, "d/README.md d/a.txt"),
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
    assert all((file.kind == "jsonl") == (".jsonl" in file.name) for file in found.files)  # a link's own name tells it
    below = [path for each in inputs if Path(each).is_dir() for path in Path(each).rglob("*")]
    inside = {str(path) for path in below if path.is_file() or path.is_symlink()}
    assert {name for names in found.left_out.values() for name in names} == inside - {*files}
    absolute = find_inputs([tree / each for each in inputs if each != "-"], **selection).files
    assert [str(file) for file in absolute] == [str(tree / file) for file in files if file != "-"]


@pytest.mark.parametrize(("mode", "name"), [(mode, name) for mode in (0, 0o444) for name in ("d", ".", "*/*/*", "**")])
def test_a_directory_without_permissions_is_named_unless_it_is_left_out(tree, mode, name):
    for path, mode_of in ((tree, 0o755), (Path("d/AA"), mode), (Path("d/.git"), mode)):
        path.chmod(mode_of)
    user = os.geteuid()
    os.seteuid(user or 65534)  # root may do all
    try:
        with refuses("unreadable", says="d/AA"):
            find_inputs([name])
        assert find_inputs([name], exclude=["*AA/*"]).files
    finally:
        os.seteuid(user)


@pytest.mark.parametrize(("ending", "kind"), [*zip(COMPRESSED, ["jsonl", "arrow", "csv", "tsv"], strict=True)])
def test_a_truncated_or_corrupted_file_is_named(folder, ending, kind):
    """Alone, and as a later member: in its magic bytes, in its middle, at its end, or replaced by something else."""
    texts, pack = [random.Random(n).randbytes(1000).hex() for n in range(150)], PACK[ending]
    bad = [b""]
    for before, number in ((b"", 1), (b"", 150), (pack(as_text(texts[:5])), 5)):
        whole = pack(as_text(texts[-number:]))
        cuts = [1, 2, 5, 11, 15, len(whole) // 3, len(whole) // 2, *(len(whole) - left for left in (9, 4, 1))]
        bad += [before + whole[:cut] for cut in cuts] + [before + b"plain text\n" * 9]
        flips = [0] if ending == ".zst" else [0, len(whole) // 2, len(whole) - 5]  # its frames have no checksum
        bad += [before + whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in flips]
    rows = pack(MAKE[kind]([f"{number * 7919} stone" for number in range(2000)]))
    files = [(f"cut{ending}", content) for content in bad]
    files += [(f"cut{ENDING[kind]}{ending}", rows[:cut]) for cut in (5, len(rows) // 2, len(rows) * 9 // 10)]
    for name, content in files:
        with refuses("cut-short", given=str(folder / name)):
            read([put(folder / "sound.txt", b"the stone\n"), put(folder / name, content)])


# ------------------------------------------------------------------------------------------------- pipes and iterables

TEXTS = [
    *make_text(150, seed=3).split("\n\n"),
    "",
    "é水\n\n\ttwo\r\nlines",
    'a "quoted"\0\\',
    "river " * 50_000,
    "salt",
    "an invalid byte \udcff in bytes",
    "a lone surrogate \ud800 in a string",
]
DOCUMENTS = [[], [10, 11, 3], [], [12], [13, 14, 15, 16, 17, 3], [], *([20 + number % 60, 3] for number in range(90))]


def test_an_interrupted_build_from_a_pipe_starts_again(tmp_path, vocab, monkeypatch):
    options, first, second = SPLIT | {"tokenizer": vocab, "shard_size": 2000}, as_text(ROWS), as_text(ROWS[::-1])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(first)))
    assert len(stopped("-", tmp_path / "out", 2, **options)) == 2
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(second)))
    assert build("-", tmp_path / "out", **options).reused_units == 0
    build(put(tmp_path / "text", second), tmp_path / "straight", **options)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    threading.Thread(target=pipe.write_bytes, args=[second], daemon=True).start()
    build(pipe, tmp_path / "named", **options)
    assert published(tmp_path / "out") == published(tmp_path / "straight") == published(tmp_path / "named")


@pytest.mark.parametrize(
    "options",
    [
        {"words": "support.data:in_pairs", "sentences": "line"},
        {"map": ["bertdata.prepare:length(20, 200)"], "workers": 3},
        {"max_documents": 60},
    ],
)
def test_texts_give_the_dataset_of_a_file_of_json_lines(tmp_path, vocab, options):
    lines = (json.dumps({"text": text}, ensure_ascii="\ud800" in text) + "\n" for text in TEXTS)
    path = put(tmp_path / "texts.jsonl", "".join(lines).encode(errors="surrogateescape"))
    given = (text.encode(errors="surrogateescape") if number % 2 else text for number, text in enumerate(TEXTS))
    options |= {"tokenizer": vocab, "shard_size": 4000, "validation": 0.2, "test": 0.1}
    expected, report = build(path, tmp_path / "file", **options), build(given, tmp_path / "out", **options)
    assert published(tmp_path / "out") == published(tmp_path / "file")
    for origins in (tmp_path / "file" / "origins").glob("*.npy"):
        assert (tmp_path / "out" / "origins" / origins.name).read_bytes() == origins.read_bytes()
    assert report.first_replaced == ("item 156 of the iterable" if "max_documents" not in options else None)
    assert len(expected.dataset.splits["train"]) > 2


@pytest.mark.parametrize("function", [build, import_ids])
def test_other_items_do_not_continue_a_build_that_was_stopped(tmp_path, vocab, limit, function):
    limit(block_ids=7)
    items, size = (TEXTS, 4000) if function is build else (DOCUMENTS, 40)
    call = lambda given, name, **more: function(given, tmp_path / name, tokenizer=vocab, shard_size=size, **more)  # noqa: E731
    one = iter(items)
    with pytest.raises(KeyboardInterrupt, match="continue" if function is build else None):
        call(one, "out", progress=stop_after_units(tmp_path / "out", 2))
    kept = units_in(tmp_path / "out")
    for given in (one, iter([]), items[:2], items[2:], [items[-1], *items[1:]]):
        with refuses("other-settings", "inputs"):
            call(iter(given), "out")
        assert units_in(tmp_path / "out") == kept
    shutil.copytree(tmp_path / "out", tmp_path / "again")
    call(iter(items[2:]), "out", overwrite=True)
    again = call(iter(items), "again")
    assert function is import_ids or again.reused_units == len(kept) > 1
    for name, given in (("out", items[2:]), ("again", items)):
        call(iter(given), "whole", overwrite=True)
        assert published(tmp_path / name) == published(tmp_path / "whole")


@pytest.mark.parametrize(
    "error", [ValueError(), OSError(5, ""), InterruptedError(4, ""), EOFError(), KeyboardInterrupt()]
)
@pytest.mark.parametrize("function", [build, import_ids])
@pytest.mark.parametrize("after", [0, 120])
def test_an_error_of_the_iterable_passes_and_publishes_nothing(tmp_path, vocab, error, function, after):
    items = TEXTS if function is build else DOCUMENTS * 2

    def failing():
        yield from items[:after]
        raise error

    with pytest.raises(type(error)) as caught:
        function(failing(), tmp_path / "out", tokenizer=vocab, shard_size=2000)
    assert caught.value is error or isinstance(error, KeyboardInterrupt)
    assert getattr(error, "filename", None) is None
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert function(iter(items), tmp_path / "out", tokenizer=vocab, shard_size=2000)


@pytest.mark.outside
@pytest.mark.parametrize("library", ["streaming", "litdata"])
def test_the_blocks_of_the_page_import_what_the_library_writes(tmp_path, vocab, library, monkeypatch):
    """The version of benchmarks/environments.py, in an environment that is made if it is not there."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    python = importlib.import_module("environments").python_of(library, ROOT / ".bench")
    (block,) = re.findall(rf"```python\n(from {library} .*?)```", (ROOT / "docs" / "import.md").read_text(), re.DOTALL)
    documents = [ids for ids in DOCUMENTS if ids]
    put(tmp_path / "block.py", block.replace("tokenizer/", str(vocab)))
    run = "import environments; environments.without_pictures(); import block"
    for words, given in (([writers.__file__, library], json.dumps(documents)), (["-c", run], "")):
        around = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}:{tmp_path}"}
        command = [python, "-s", *words]
        subprocess.run(command, input=given, cwd=tmp_path, env=around, text=True, check=True, capture_output=True)
    (out,) = tmp_path.glob("from-*")
    assert sorted(stored(bertdata.open(out))) == sorted(documents)


# --------------------------------------------------------------------------------------------------------------- parts


def test_a_build_with_bad_rows_can_be_interrupted_and_made_in_parts(tmp_path, vocab):
    """Some units have nothing but bad rows. The end tells what parts found, without inputs."""
    rows, desert = as_jsonl(ROWS).replace(b"stone", b"st\xffone"), b'{"body": "nothing at all"}\n' * 250
    contents = {
        "a.jsonl": rows + desert + rows,
        "b.jsonl.gz": gzip.compress(desert),
        "c.parquet": as_parquet([*ROWS[:9], *[None] * 300, *ROWS[9:]]),
        "d.arrow.zst": zstd(as_arrow(ROWS)),
    }
    paths = [put(tmp_path / name, content) for name, content in contents.items()]
    options = SPLIT | {"tokenizer": vocab, "shard_size": 3000, "on_error": "skip"}
    expected = build(paths, tmp_path / "straight", **options)
    assert expected.dataset.manifest.counts["skipped_rows"] == 800
    assert expected.first_skipped.startswith(f"{paths[0]}, line {len(ROWS) + 1}: ")
    assert 0 < len(stopped(paths, tmp_path / "out", 1, **options)) <= 1
    assert len(stopped(paths, tmp_path / "out", 5, **options)) > 1
    report = build(paths, tmp_path / "out", **options)
    assert report.reused_units > 1
    assert report.first_skipped == expected.first_skipped
    for number in (2, 0, 1):
        assert build(paths, tmp_path / "parts", part=(number, 3), **options) is None
    for path in paths:
        path.unlink()
    replaced, skipped = succeeds("bertdata", "build", "--finish", "--out", tmp_path / "parts").stderr.splitlines()[:2]
    assert " 800 " in skipped
    assert all(f" {paths[0]}, byte " in line for line in (replaced, skipped))
    for name in ("out", "parts"):
        assert published(tmp_path / name) == published(tmp_path / "straight")


def test_a_part_is_made_by_one_process_at_a_time_and_missing_ones_are_told(tmp_path, corpus):
    """Not beside an undivided build. All parts of one division are enough, and they share one trained vocabulary."""
    out, said, options = tmp_path / "out", [], SPLIT | {"vocab_size": 120, "shard_size": 3000}
    for total in (3, 2):
        build(corpus, out, part=(0, total), say=said.append, **options)
    assert sum("training" in line for line in said) == 1
    with refuses("parts-missing", "out", given={2: ["2/2"], 3: ["2/3", "3/3"]}):
        finish(out)
    build(corpus, out, part=(1, 2), **options)
    for name, kind, call, *says in (
        ("part-2-of-3.lock", fcntl.LOCK_EX, lambda: build(corpus, out, part=(1, 3), **options), "part 2/3 of "),
        ("lock", fcntl.LOCK_EX, lambda: build(corpus, out, part=(1, 3), **options)),
        ("lock", fcntl.LOCK_SH, lambda: build(corpus, out, **options)),
        ("lock", fcntl.LOCK_SH, lambda: build(corpus, out, overwrite=True, **options)),
        ("lock", fcntl.LOCK_SH, lambda: finish(out)),
    ):
        put(out / ".build" / name, "12345")
        with open(out / ".build" / name) as lock:
            fcntl.flock(lock, kind)
            with refuses("busy", given="12345", says="".join(says)):
                call()
    (out / ".build" / "unit-00003.json").unlink()
    with refuses("parts-missing", "out", given=["unit-00003.json"]):
        finish(out)
    for number in (0, 1):
        build(corpus, out, part=(number, 2), **options)
    finish(out)
    build(corpus, tmp_path / "straight", **options)
    assert published(out) == published(tmp_path / "straight")
