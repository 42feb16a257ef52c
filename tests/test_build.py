"""A build is a pure function of text, tokenizer and settings; whatever stops it, it publishes all or nothing."""

import json
import os
import pkgutil
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
import tokenizers
from reference import documents as reference
from reference import keys
from support.commands import refuses
from support.data import build, faults_of, import_ids, make_text
from support.disk import before_rename, contents, failing, published, put
from support.limits import CONSTANTS
from support.sources import stopped, units_in

import bertdata
from bertdata import finish

pytestmark = pytest.mark.usefixtures("dataset")  # so that kernels are compiled before calls are counted

SMALL = {"shard_size": 8000, "validation": 0.2, "test": 0.1, "sentences": "line"}


@pytest.fixture
def text(tmp_path):
    """A file of twelve documents."""
    return put(tmp_path / "text", make_text(12, seed=1))


# ----------------------------------------------------------------------------------------------------------- contents


@pytest.mark.parametrize("sentences", ["line", "none"])
@pytest.mark.parametrize(
    ("kind", "shard_size", "workers", "block_bytes"),
    [("blank", 900, 1, 300), ("line", 1 << 30, 5, 300), ("file", 900, 2, 5000), ("blank", 2000, 5, 300)],
)
def test_a_dataset_equals_the_reference(tmp_path, vocab, limit, kind, shard_size, workers, block_bytes, sentences):
    """Every shard, array and count, from text with invalid bytes, blank lines and documents that give no id."""
    limit(block_bytes=block_bytes)
    body = make_text(25, seed=8).encode()
    contents = [
        body.replace(b"stone", b"st\xffone"),
        b"\n\xe2\x80\x8d\n\n[MASK] \n\n" + body[:900],
        b"\x01\n\n\r\n",
        body.replace(b"\n", b"\r\n"),
    ]
    paths = [put(tmp_path / f"{number}.txt", content) for number, content in enumerate(contents)]
    options = {"documents": kind, "sentences": sentences, "shard_size": shard_size, "workers": workers, "test": 0.1}
    progress = []
    options |= {"tokenizer": vocab, "validation": 0.2, "progress": lambda *done: progress.append(done)}
    dataset = build(paths, tmp_path / "out", **options).dataset

    library = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    library.encode_special_tokens = True
    shards, counts, words, base = {}, Counter(), Counter(), 0
    for content in contents:
        for start, raw in reference.documents(content, kind):
            data, replaced = reference.decode(raw)
            ids = library.encode(data.decode(), add_special_tokens=False).ids
            split = keys.split(data, validation=0.2, test=0.1)
            counts["replaced_characters"] += replaced
            counts["text_bytes"] += len(data)
            words[split] += len(data.split())
            counts["documents" if ids else "dropped_documents"] += 1
            counts["[MASK]"] += data.count(b"[MASK]")
            if not ids:
                continue
            name = f"{split}-{(base + start) // shard_size:05d}"
            stored, ends, lines = shards.setdefault(name, ([], [0], [0]))
            for line in data.decode().split("\n"):
                of_line = library.encode(line, add_special_tokens=False).ids
                stored += of_line
                lines += [len(stored)] * bool(of_line)
            stored.append(3)
            ends.append(len(stored))
            lines[-1] = len(stored)
        base += len(content)

    counted, names = dataset.manifest.counts, [shard.name for split in dataset.splits.values() for shard in split]
    assert names == sorted(shards, key=lambda name: (["train", "validation", "test"].index(name.split("-")[0]), name))
    for name, (stored, ends, lines) in shards.items():
        assert dataset.array(name, "tokens").tolist() == stored
        assert dataset.array(name, "documents").tolist() == ends
        record, unit = json.loads((dataset.path / f"{name}.json").read_bytes()), int(name[-5:])
        assert record["input"] == {"start": unit * shard_size, "stop": (unit + 1) * shard_size}
        if sentences == "line":
            assert dataset.array(name, "sentences").tolist() == lines
    for name in ("documents", "dropped_documents", "replaced_characters", "text_bytes"):
        assert counted[name] == counts[name], name
    assert counted["special_literals"] == {"[MASK]": counts["[MASK]"]}
    assert counted["words"] == {split: words[split] for split in dataset.splits}
    assert counted["dropped_documents"] > 0
    assert progress == sorted(progress)
    assert progress[-1] == (base, base)
    assert len(progress) >= base / block_bytes / 2 or kind == "file"
    assert faults_of(dataset.path) == []


def test_limits_are_those_of_the_documentation(tmp_path, text):
    build(text, tmp_path / "out", vocab_size=90, dedup=True)
    limits = {"block_bytes": 4 << 20, "longest_document": 256 << 20, "longest_row": 64 << 20, "part_bytes": 16 << 20}
    limits |= {"sample_bytes": 100 << 20, "stretch_bytes": 1 << 20, "hashes_together": 1 << 20, "chunk": 1 << 17}
    assert {name: pkgutil.resolve_name(CONSTANTS[name]) for name in limits} == limits


# ------------------------------------------------------------------------------------------------- stopped and resumed


@pytest.mark.parametrize("num_units", [0, 2])
def test_an_interrupted_build_continues_without_redoing_shards(tmp_path, corpus, vocab, dataset, num_units):
    out, said, options = tmp_path / "out", [], {"tokenizer": vocab} | SMALL
    kept = stopped([corpus], out, num_units, **options)
    with refuses("unfinished"):
        bertdata.open(out)
    before = {path.name: path.stat() for unit in kept for path in (out / ".build").glob(f"*-{unit:05d}.tokens.npy")}
    assert build([corpus], out, workers=2, say=said.append, **options).reused_units == num_units == len(kept)
    assert len(said) == (num_units > 0)
    assert published(out) == published(dataset.path)
    for name, status in before.items():
        after = (out / name).stat()
        assert (after.st_ino, after.st_mtime_ns) == (status.st_ino, status.st_mtime_ns)


def test_an_unfinished_build_whose_removal_is_stopped_anywhere_is_not_continued(tmp_path, text, vocab, monkeypatch):
    options = {"shard_size": 900, "tokenizer": vocab, "overwrite": True}
    assert stopped(text, tmp_path / "left", 2, **options)
    build([text], tmp_path / "complete", **options)
    in_any_order = Path.iterdir
    arrays_first = lambda path: sorted(in_any_order(path), key=lambda each: each.suffix != ".npy")  # noqa: E731
    monkeypatch.setattr(Path, "iterdir", arrays_first)
    number, left = 0, {0}
    while left:
        out = shutil.copytree(tmp_path / "left", tmp_path / f"out{number}")
        with failing(number, KeyboardInterrupt):
            stopped(text, out, 0, **options | {"shard_size": 700})
        left, number = units_in(out), number + 1
        build([text], out, **options)
        assert published(out) == published(tmp_path / "complete")
    assert number > 9


def test_a_failure_after_a_publication_that_was_killed_leaves_a_directory_that_a_build_takes(tmp_path, text, vocab):
    """Of files that were moved, nothing but .build says whose they are."""
    options = {"tokenizer": vocab, "overwrite": True}
    expected = published(build(text, tmp_path / "complete", **options).dataset.path)
    with before_rename("manifest.json", Mock(side_effect=KeyboardInterrupt)), pytest.raises(KeyboardInterrupt):
        build(text, tmp_path / "out", **options)
    with refuses("empty", "inputs"):
        build(put(tmp_path / "blank", b"\n"), tmp_path / "out", **options)
    build(text, tmp_path / "out", **options)
    assert published(tmp_path / "out") == expected
    for name in ("bare", "complete"):  # nothing is moved
        (tmp_path / name / ".build").mkdir(parents=True)
        with refuses("empty", "inputs"):
            build(tmp_path / "blank", tmp_path / name, **options)
        assert not (tmp_path / name / ".build").exists()


def test_a_lost_file_of_an_unfinished_build_is_made_again_by_the_same_command(tmp_path, text, vocab):
    """An array of an older dataset with its name is not taken for it."""
    options = {"tokenizer": vocab, "shard_size": 900, "workers": 1, "overwrite": True}
    build(text, tmp_path / "complete", **options)
    build(text, tmp_path / "out", tokenizer=vocab, shard_size=700)
    assert stopped(text, tmp_path / "out", 2, **options)
    (tmp_path / "out" / ".build" / "train-00001.tokens.npy").unlink()
    with refuses("parts-missing", "out", given="train-00001.tokens.npy"):
        build(text, tmp_path / "out", **options)
    build(text, tmp_path / "out", **options)
    assert published(tmp_path / "out") == published(tmp_path / "complete")


def test_an_unfinished_build_is_not_continued_with_other_settings(tmp_path, corpus, vocab, bert):
    out, changing = tmp_path / "out", tmp_path / "text"
    shutil.copy(corpus, changing)
    options = {"tokenizer": vocab} | SMALL
    stopped([changing], out, 0, **options)
    changes = {"shard_size": 9000, "validation": 0.25, "sentences": "none", "documents": "line", "max_documents": 5}
    changes |= {"strict": True, "encoding": "latin-1", "tokenizer": str(bert)}
    for name, value in (*changes.items(), ("tokenizer", None)):
        with refuses("other-settings", "out", says=f": {name} was "):
            build([changing], out, **options | {name: value})
    os.utime(changing, (1, 1))
    for path in (changing, corpus):
        with refuses("other-settings", "out", says=str(path)):
            build([path], out, **options)
    plan, planned = out / ".build" / "plan.json", json.loads((out / ".build" / "plan.json").read_bytes())
    put(out / ".build" / "part-1-of-1.json", '{"format_version": 1, "units": []}')
    for of_another_version in ({"unit_rule": 2}, {"of_a_later_version": 1}):
        put(plan, json.dumps(planned | of_another_version))
        before = contents(tmp_path)
        for call in (lambda: build([changing], out, **options), lambda: finish(out)):
            with refuses("other-version", "out"):
                call()
            assert contents(tmp_path) == before
    assert build([corpus], out, overwrite=True, **options).reused_units == 0


@pytest.mark.parametrize("kind", ["changed", "not-found"])
@pytest.mark.parametrize("function", [build, import_ids])
def test_an_input_that_changes_or_vanishes_meanwhile_is_named_and_can_come_back(tmp_path, vocab, limit, function, kind):
    limit(block_ids=100)
    path, content = tmp_path / "in.bin", make_text(20) if function is build else bytes([10, 0, 11, 0, 3, 0]) * 1000
    status, options = put(path, content).stat(), {"tokenizer": vocab, "shard_size": 900, "out": tmp_path / "out"}

    def progress(done, total):
        path.write_bytes(path.read_bytes()[:600]) if kind == "changed" else path.unlink(missing_ok=True)

    with refuses(kind, "inputs" if kind == "changed" else None, given=str(path)):
        function([path], progress=progress, **options)
    assert not (tmp_path / "out" / "manifest.json").exists()
    put(path, content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    kept = units_in(tmp_path / "out")
    report = function([path], overwrite=kind == "changed", **options)
    assert function is import_ids or report.reused_units == (len(kept) if kind == "not-found" else 0)
    assert faults_of(tmp_path / "out") == []


def test_nothing_is_written_outside_the_output(tmp_path, corpus, vocab):
    elsewhere = {name: tmp_path / name for name in ("HOME", "TMPDIR", "BERTDATA_CACHE")}
    for directory in elsewhere.values():
        directory.mkdir()
    beside = {path: path.stat().st_mtime_ns for path in corpus.parent.rglob("*")}
    command = [sys.executable, "-m", "bertdata", "build", corpus, "--out", tmp_path / "out", "--tokenizer", vocab]
    environment = os.environ | {name: str(directory) for name, directory in elsewhere.items()}
    subprocess.run(command, env=environment, cwd=corpus.parent, check=True)
    assert [path.name for directory in elsewhere.values() for path in directory.iterdir()] in ([], ["tokenizers"])
    assert {path: path.stat().st_mtime_ns for path in corpus.parent.rglob("*")} == beside


def test_what_is_not_ours_is_left_alone(tmp_path, corpus, vocab):
    """A stray .build does not open the way to a published dataset, and --overwrite removes only shards."""
    out = tmp_path / "shards"
    first = build(str(corpus), out, tokenizer=vocab).dataset
    (out / "test-notes.md").write_text("mine")
    (out / "train-00009.array-2.npy").touch()  # an array of a kind that is not known here
    (out / ".build").mkdir()
    with refuses("out-exists", "out"):
        build([corpus], out, tokenizer=vocab, validation=0)
    assert bertdata.open(out).dataset_id == first.dataset_id
    second = build([corpus], out, tokenizer=vocab, validation=0, overwrite=True).dataset
    assert not [*out.glob("validation-*"), *out.glob("train-00009*")]
    assert (out / "test-notes.md").read_text() == "mine"
    assert faults_of(out) == []
    assert second.dataset_id != first.dataset_id
