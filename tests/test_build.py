"""A build is a pure function of text, tokenizer and settings; whatever stops it, it publishes all or nothing."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import tokenizers
from reference import documents as reference
from reference import keys
from support.commands import refuses
from support.data import build, make_text
from support.disk import before_rename, failing, published, put
from support.limits import limits
from support.sources import stop_after_units, stopped

import bertdata
from bertdata.errors import InputError
from bertdata.format.verify import verify
from bertdata.tokenize.load import load as load_tokenizer
from bertdata.write.staging import BuildPlan, continue_or_start

pytestmark = pytest.mark.usefixtures("dataset")  # so that kernels are compiled before calls are counted

SMALL = {"shard_size": 8000, "validation": 0.2, "test": 0.1, "sentences": "line"}


@pytest.fixture(scope="module")
def expected(dataset):
    """The files of the corpus built at once with SMALL."""
    return published(dataset.path)


@pytest.fixture
def text(tmp_path):
    """A file of twelve documents."""
    return put(tmp_path / "text", make_text(12, seed=1))


# ----------------------------------------------------------------------------------------------------------- contents


@pytest.mark.parametrize("sentences", ["line", "none"])
@pytest.mark.parametrize(("kind", "shard_size"), [("blank", 900), ("line", 1 << 30), ("file", 900)])
def test_a_dataset_equals_the_reference(tmp_path, vocab, kind, shard_size, sentences):
    """Every shard, array and count, from text with invalid bytes, blank lines and documents that give no id."""
    body = make_text(25, seed=8).encode()
    contents = [
        body.replace(b"stone", b"st\xffone"),
        b"\n\xe2\x80\x8d\n\n[MASK] \n\n" + body[:900],
        b"\x01\n\n\r\n",
        body.replace(b"\n", b"\r\n"),
    ]
    paths = [put(tmp_path / f"{number}.txt", content) for number, content in enumerate(contents)]
    options = {"tokenizer": vocab, "documents": kind, "sentences": sentences, "shard_size": shard_size, "test": 0.1}
    progress = []
    report = build(paths, tmp_path / "out", validation=0.2, progress=lambda *done: progress.append(done), **options)

    library = tokenizers.Tokenizer.from_str(load_tokenizer(vocab).files["tokenizer.json"].decode())
    library.encode_special_tokens = True
    shards, counts, words, base = {}, Counter(), Counter(), 0
    for content in contents:
        for start, raw in reference.documents(content, kind):
            data, replaced = reference.decode(raw)
            ids = library.encode(data.decode(), add_special_tokens=False).ids
            split = keys.split(data, validation=0.2, test=0.1)
            counts["replaced_characters"] += replaced
            counts["text_bytes"] += len(data)
            words[split] += reference.num_words(data)
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

    dataset, counted = report.dataset, report.dataset.manifest.counts
    names = [shard.name for split in dataset.splits.values() for shard in split]
    assert names == sorted(shards, key=lambda name: (["train", "validation", "test"].index(name.split("-")[0]), name))
    for name, (stored, ends, lines) in shards.items():
        assert dataset.array(name, "tokens").tolist() == stored
        assert dataset.array(name, "documents").tolist() == ends
        if sentences == "line":
            assert dataset.array(name, "sentences").tolist() == lines
    for name in ("documents", "dropped_documents", "replaced_characters", "text_bytes"):
        assert counted[name] == counts[name], name
    assert counted["special_literals"] == {"[MASK]": counts["[MASK]"]}
    assert counted["words"] == {split: words[split] for split in dataset.splits}
    assert counted["dropped_documents"] > 0
    assert progress == sorted(progress)
    assert progress[-1] == (base, base)
    assert verify(dataset.path) == []


# ------------------------------------------------------------------------------------------------------------- splits


def test_a_share_ends_below_its_bound(tmp_path, vocab):
    """A document whose hash is just the bound of validation is not in it; with the next share it is."""
    path = put(tmp_path / "text", "stone")
    u = keys.text_hash(b"stone") >> 32
    for share, split in ((u / 2**32, "train"), ((u + 1) / 2**32, "validation")):
        dataset = build(path, tmp_path / split, tokenizer=vocab, validation=share).dataset
        assert list(dataset.splits) == [split]


# ---------------------------------------------------------------------------------------------------------- invariance


@pytest.mark.parametrize(("workers", "block_bytes"), [(1, 300), (2, 5000), (5, 300)])
def test_workers_and_blocks_do_not_change_a_byte(tmp_path, corpus, vocab, expected, workers, block_bytes):
    progress = []
    options = {"tokenizer": vocab, "workers": workers, "progress": lambda *done: progress.append(done), **SMALL}
    with limits(block_bytes=block_bytes):
        build([corpus], tmp_path / "out", **options)
    assert published(tmp_path / "out") == expected
    assert len(progress) >= corpus.stat().st_size / block_bytes / 2


# ------------------------------------------------------------------------------------------------- stopped and resumed


@pytest.mark.parametrize("num_units", [0, 2])
def test_an_interrupted_build_continues_without_redoing_shards(tmp_path, corpus, vocab, expected, num_units):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt) as caught:
        build([corpus], out, tokenizer=vocab, workers=1, progress=stop_after_units(out, num_units), **SMALL)
    with refuses("unfinished"):
        bertdata.open(out)
    units = list((out / ".build").glob("unit-*.json"))
    assert len(units) == num_units
    num_bytes = sum(json.loads(unit.read_bytes())["tally"]["counts"]["text_bytes"] for unit in units)
    assert (f"{num_units} finished unit" in str(caught.value)) == (num_units > 0)
    assert (f"({num_bytes / 1e6:,.1f} MB" in str(caught.value)) == (num_units > 0)
    finished = [shard["name"] for unit in units for shard in json.loads(unit.read_bytes())["shards"].values()]
    before = {path.name: path.stat() for name in finished for path in (out / ".build").glob(f"{name}.*")}

    said = []
    report = build([corpus], out, tokenizer=vocab, workers=2, say=said.append, **SMALL)
    assert report.reused_units == num_units
    assert len(said) == (num_units > 0)
    assert published(out) == expected
    for name, status in before.items():
        is_origins = name.endswith(".origins.npy")
        after = (out / "origins" / name.replace(".origins", "") if is_origins else out / name).stat()
        assert (after.st_ino, after.st_mtime_ns) == (status.st_ino, status.st_mtime_ns)


def test_an_unfinished_build_whose_removal_is_stopped_anywhere_is_not_continued(tmp_path, text, vocab, monkeypatch):
    options = {"shard_size": 900, "tokenizer": vocab, "overwrite": True}
    assert stopped(text, tmp_path / "left", 2, **options)
    build([text], tmp_path / "complete", **options)
    in_any_order = Path.iterdir
    arrays_first = lambda path: sorted(in_any_order(path), key=lambda each: each.suffix != ".npy")  # noqa: E731
    monkeypatch.setattr(Path, "iterdir", arrays_first)

    def discard(name):
        shutil.copytree(tmp_path / "left", tmp_path / name)
        continue_or_start(tmp_path / name / ".build", BuildPlan({}, {}, (), None), overwrite=True)

    with failing(-1, None) as calls:
        discard("removed")
    for number in range(len(calls)):
        with failing(number, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            discard(f"out{number}")
        build([text], tmp_path / f"out{number}", **options)
        assert published(tmp_path / f"out{number}") == published(tmp_path / "complete")


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


def test_another_process_may_begin_while_a_build_removes_its_directory(tmp_path, text, vocab):
    unlink, lock, left = os.unlink, tmp_path / "out" / ".build" / "lock", []

    def begin(path, **options):
        unlink(path, **options)
        if os.path.basename(path) == "lock":
            left.extend(os.listdir(lock.parent))
            lock.touch()

    with patch.object(os, "unlink", begin):
        build(text, tmp_path / "out", tokenizer=vocab)
    assert left == []
    assert lock.exists()
    assert verify(tmp_path / "out") == []


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


@pytest.mark.parametrize("parallel", ["true", None])
def test_a_build_leaves_tokenizers_as_it_was(tmp_path, text, vocab, monkeypatch, parallel):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    if parallel is not None:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
    build([text] * 3, tmp_path / "out", tokenizer=vocab, workers=2)
    assert os.environ.get("TOKENIZERS_PARALLELISM") == parallel


def test_an_unfinished_build_is_not_continued_with_other_settings(tmp_path, corpus, vocab, bert):
    out, changing = tmp_path / "out", tmp_path / "text"
    shutil.copy(corpus, changing)
    options = {"tokenizer": vocab} | SMALL
    stopped([changing], out, 1, **options)
    for change, values in (
        ({"shard_size": 9000}, ("8000", "9000")),
        ({"validation": 0.25}, ("0.2", "0.25")),
        ({"sentences": "none"}, ("line", "none")),
        ({"documents": "line"}, ("blank", "line")),
        ({"max_documents": 5}, ("None", "5")),
        ({"strict": True}, ("False", "True")),
        ({"encoding": "latin-1"}, ("utf-8", "iso8859-1")),
        ({"tokenizer": str(bert)}, ("SHA-256", "SHA-256")),
        ({"tokenizer": None}, ("SHA-256", "trained, 30522")),
        ({"tokenizer": None, "type": "bpe"}, ("SHA-256", "trained, 30522 tokens, bpe")),
        ({"tokenizer": None, "cased": True}, ("SHA-256", "trained, 30522 tokens, cased")),
    ):
        with refuses("other-settings", "out") as caught:
            build([changing], out, **options | change)
        ((name, before),) = re.findall(r"(\w+) was '?(.+?)'? and is ", str(caught.value))
        assert name == next(iter(change))
        assert before.startswith(values[0])
        assert values[1] in str(caught.value).partition(" and is ")[2]
    os.utime(changing, (1, 1))
    for path in (changing, corpus):
        with refuses("other-settings", "out", says=str(path)):
            build([path], out, **options)
    assert build([corpus], out, overwrite=True, **options).reused_units == 0


# --------------------------------------------------------------------------------------------------- in the way of it


def test_a_size_that_makes_too_many_units_is_refused_at_once(tmp_path, corpus, vocab, limit):
    limit(most_units=50)
    with refuses("out-of-range", "shard_size", given=1, says="1GiB"):
        build([corpus], tmp_path / "out", tokenizer=vocab, shard_size=1)
    assert not (tmp_path / "out").exists()
    build([corpus], tmp_path / "out", tokenizer=vocab, shard_size=-(-corpus.stat().st_size // 50))


@pytest.mark.parametrize("kind", ["changed", "not-found"])
def test_an_input_that_changes_or_vanishes_meanwhile_is_named_and_can_come_back(tmp_path, vocab, kind):
    path, content = tmp_path / "text", make_text(20)
    put(path, content)
    status, options = path.stat(), {"tokenizer": vocab, "shard_size": 900}

    def progress(done, total):
        path.write_text(content + "more") if kind == "changed" else path.unlink(missing_ok=True)

    with refuses(kind, "inputs" if kind == "changed" else None, error=InputError):
        build([path], tmp_path / "out", progress=progress, **options)
    assert not (tmp_path / "out" / "manifest.json").exists()
    if kind == "not-found":
        put(path, content)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    report = build([path], tmp_path / "out", overwrite=kind == "changed", **options)
    assert (report.reused_units > 0) == (kind == "not-found")
    assert verify(tmp_path / "out") == []


# ------------------------------------------------------------------------------------------------------------ the disk


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
    assert verify(out) == []
    assert second.dataset_id != first.dataset_id
