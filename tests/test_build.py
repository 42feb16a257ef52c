"""A build is a pure function of text, tokenizer and settings; whatever stops it, it publishes all or nothing."""

import errno
import fcntl
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import tokenizers
from conftest import make_text
from reference import documents as twin
from reference import keys

import bertdata
from bertdata.errors import BertdataError, BuildError, DatasetError, InputError, TokenizerError, UsageError
from bertdata.format.verify import verify
from bertdata.sources import documents
from bertdata.tokenize.load import load as load_tokenizer
from bertdata.write import build, publish
from bertdata.write.staging import continue_or_start

SMALL = {"shard_size": 8000, "validation": 0.2, "test": 0.1, "sentences": "line"}


def published(out):
    """Name → bytes of every file of a directory; everything a dataset is."""
    assert [path.name for path in out.iterdir() if path.is_dir()] in ([], ["origins"])
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus, vocab):
    """The files of the corpus built in one go with SMALL."""
    out = tmp_path_factory.mktemp("whole") / "shards"
    build([corpus], out, tokenizer=vocab, **SMALL)
    return published(out)


def documents_of(dataset):
    return Counter(tuple(document.tolist()) for document in dataset)


# ----------------------------------------------------------------------------------------------------------- contents


@pytest.mark.parametrize("kind", ["blank", "line", "file"])
@pytest.mark.parametrize("shard_size", [900, 1 << 30])
@pytest.mark.parametrize("sentences", ["none", "line"])
def test_a_dataset_equals_its_twin(tmp_path, vocab, kind, shard_size, sentences):
    """Every shard, array and count, from text with invalid bytes, blank lines and documents that give no id."""
    body = make_text(25, seed=8).encode()
    contents = [body.replace(b"stone", b"st\xffone"), b"\n\xe2\x80\x8d\n\n[MASK] \n\n" + body[:900], b"\x01\n\n\r\n",
                body.replace(b"\n", b"\r\n")]  # fmt: skip
    paths = [tmp_path / f"{number}.txt" for number in range(4)]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    report = build(paths, tmp_path / "out", tokenizer=vocab, documents=kind, sentences=sentences, shard_size=shard_size,
                   validation=0.2, test=0.1)  # fmt: skip

    library = tokenizers.Tokenizer.from_str(load_tokenizer(vocab).files["tokenizer.json"].decode())
    library.encode_special_tokens = True
    shards, counts, base = {}, Counter(), 0
    for content in contents:
        for start, raw in twin.documents(content, kind):
            data, replaced = twin.decode(raw)
            ids = library.encode(data.decode(), add_special_tokens=False).ids
            split = keys.split(data, validation=0.2, test=0.1)
            counts["replaced_characters"] += replaced
            counts["text_bytes"] += len(data)
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

    dataset, found = report.dataset, report.dataset.manifest.counts
    assert list(dataset.splits) == [s for s in ("train", "validation", "test") if any(n.startswith(s) for n in shards)]
    names = [shard.name for split in dataset.splits.values() for shard in split.shards]
    assert sorted(names) == sorted(shards)
    for split in dataset.splits.values():
        assert [shard.name for shard in split.shards] == sorted(shard.name for shard in split.shards)
    for name, (stored, ends, lines) in shards.items():
        assert dataset.array(name, "tokens").tolist() == stored
        assert dataset.array(name, "documents").tolist() == ends
        if sentences == "line":
            assert dataset.array(name, "sentences").tolist() == lines
    for name in ("documents", "dropped_documents", "replaced_characters", "text_bytes"):
        assert found[name] == counts[name], name
    assert found["special_literals"] == {"[MASK]": counts["[MASK]"]}
    assert found["dropped_documents"] > 0
    assert verify(dataset.path) == []


def test_a_bigger_unit_than_the_text_gives_the_same_documents(tmp_path, corpus, vocab, dataset):
    one = build([corpus], tmp_path / "one", tokenizer=vocab, validation=0.2, test=0.1).dataset
    for split in ("train", "validation", "test"):
        joined = [int(t) for n in range(len(dataset.splits[split].shards)) for t in dataset.tokens(split, n)]
        assert one.tokens(split, 0).tolist() == joined
    assert len(dataset.splits["train"].shards) > 2
    assert one.dataset_id != dataset.dataset_id


def test_unit_numbers_are_places_in_the_text(tmp_path, vocab):
    """A document of three units, then one in the fourth: numbers 1 and 2 are missing, and no shard is empty."""
    (tmp_path / "text").write_text("stone " * 500 + "\n\nriver")
    dataset = build([tmp_path / "text"], tmp_path / "out", tokenizer=vocab, validation=0.0, shard_size=1000).dataset
    assert [shard.name for shard in dataset.splits["train"].shards] == ["train-00000", "train-00003"]
    record = json.loads((tmp_path / "out" / "train-00003.json").read_bytes())
    assert record["input"] == {"start": 3000, "stop": 4000}
    assert record["counts"] == {"documents": 1, "dropped_documents": 0, "replaced_characters": 0}


def test_commit_records_add_up_to_the_manifest(whole):
    manifest = json.loads(whole["manifest.json"])
    records = [json.loads(whole[f"{shard['name']}.json"]) for shards in manifest["splits"].values() for shard in shards]
    assert len(records) > 4
    for name in ("documents", "dropped_documents", "replaced_characters"):
        assert sum(record["counts"][name] for record in records) == manifest["counts"][name]
    assert manifest["counts"]["documents"] == 120


def test_documents_are_as_many_as_the_text_has(tmp_path, corpus, vocab):
    for limit in (1, 7, 120, 121):
        dataset = build([corpus], tmp_path / str(limit), tokenizer=vocab, max_documents=limit, shard_size=2000).dataset
        assert dataset.num_documents == min(limit, 120)


def test_kinds_of_input_agree(tmp_path, corpus, vocab):
    """The same documents as text, compressed text, JSON lines and Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [raw.decode() for _, raw in twin.documents(corpus.read_bytes(), "blank")]
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(corpus.read_bytes()))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    pq.write_table(pa.table({"text": rows}), tmp_path / "a.parquet")
    datasets = [
        build([path], tmp_path / f"{path.name}.out", tokenizer=vocab, sentences="line").dataset
        for path in (corpus, tmp_path / "a.txt.gz", tmp_path / "a.jsonl", tmp_path / "a.parquet")
    ]
    assert len({dataset.dataset_id for dataset in datasets}) == 1


# ------------------------------------------------------------------------------------------------------------- splits


def test_splits_are_stable_and_keep_duplicates_together(tmp_path, vocab):
    rows = ["stone " + " ".join(str(number)) for number in range(300)]
    (tmp_path / "few").write_text("\n".join(rows))
    (tmp_path / "more").write_text("\n".join(["the light", *rows[::-1], *rows[:150], "salt"]))
    shares = {"documents": "line", "validation": 0.2, "test": 0.3}
    few = build([tmp_path / "few"], tmp_path / "f", tokenizer=vocab, **shares).dataset
    more = build([tmp_path / "more"], tmp_path / "m", tokenizer=vocab, **shares).dataset

    def by_split(dataset):
        firsts = np.cumsum([0] + [split.num_documents for split in dataset.splits.values()])
        parts = zip(dataset.splits, firsts, firsts[1:], strict=False)
        return {name: {tuple(dataset[i].tolist()) for i in range(a, b)} for name, a, b in parts}

    before, after = by_split(few), by_split(more)
    for split, texts in before.items():
        assert texts <= after[split]
        assert not any(texts & after[other] for other in after if other != split)


def test_shares_are_kept(tmp_path, vocab):
    (tmp_path / "text").write_text("\n".join(f"{number}" for number in range(10_000)))
    dataset = build([tmp_path / "text"], tmp_path / "out", tokenizer=vocab, documents="line", validation=0.1,
                    test=0.05).dataset  # fmt: skip
    counts = np.array([split.num_documents for split in dataset.splits.values()])
    expected = np.array([8500, 1000, 500])
    assert ((counts - expected) ** 2 / expected).sum() < 13.8  # chi-square, 2 degrees: p > 0.001


def test_a_share_ends_below_its_bound(tmp_path, vocab):
    """A document whose hash is just the bound of validation is not in it; with the next share it is."""
    (tmp_path / "text").write_text("stone")
    u = keys.text_hash(b"stone") >> 32
    for share, split in ((u / 2**32, "train"), ((u + 1) / 2**32, "validation")):
        dataset = build([tmp_path / "text"], tmp_path / split, tokenizer=vocab, validation=share).dataset
        assert list(dataset.splits) == [split]


def test_a_share_of_zero_written_either_way_is_the_same_dataset(tmp_path, corpus, vocab):
    as_int = build([corpus], tmp_path / "a", tokenizer=vocab, validation=0).dataset
    as_float = build([corpus], tmp_path / "b", tokenizer=vocab, validation=0.0).dataset
    assert list(as_int.splits) == ["train"]
    assert as_int.dataset_id == as_float.dataset_id


# ---------------------------------------------------------------------------------------------------------- invariance


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("block_bytes", [300, 5000])
def test_workers_and_blocks_do_not_change_a_byte(tmp_path, corpus, vocab, whole, workers, block_bytes):
    with patch.object(documents, "BLOCK_BYTES", block_bytes):
        build([corpus], tmp_path / "out", tokenizer=vocab, workers=workers, **SMALL)
    assert published(tmp_path / "out") == whole


def test_place_name_and_time_change_no_byte_but_in_the_list_of_inputs(tmp_path, corpus, vocab, whole):
    elsewhere = tmp_path / "some" / "other" / "name.txt"
    elsewhere.parent.mkdir(parents=True)
    shutil.copy(corpus, elsewhere)
    os.utime(elsewhere, (1, 1))
    shutil.copy(vocab, tmp_path / "v")
    build([elsewhere], tmp_path / "some" / "out", tokenizer=str(tmp_path / "v"), **SMALL)
    found = published(tmp_path / "some" / "out")
    assert found.keys() == whole.keys()
    lists = ("origins/inputs.jsonl", "origins/origins.json")
    assert {name for name in whole if found[name] != whole[name]} == {*lists}
    for name, content in whole.items():
        assert name in lists or str(tmp_path).encode() not in content
        assert name in lists or str(corpus.parent).encode() not in content


def test_progress_ends_at_all_bytes(tmp_path, corpus, vocab):
    told = []
    with patch.object(documents, "BLOCK_BYTES", 500):
        build([corpus, corpus], tmp_path / "out", tokenizer=vocab, progress=lambda *done: told.append(done))
    total = 2 * corpus.stat().st_size
    assert told == sorted(told)
    assert told[-1] == (total, total)
    assert len(told) > 20


# ------------------------------------------------------------------------------------------------- stopped and resumed


def stop_after(blocks):
    """A progress callback that is a Ctrl-C after some blocks."""
    left = iter(range(blocks))

    def progress(done, total):
        if next(left, None) is None:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("blocks", [0, 1, 2, 3])
def test_an_interrupted_build_continues_without_redoing_shards(tmp_path, corpus, vocab, whole, blocks):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        build([corpus], out, tokenizer=vocab, workers=1, progress=stop_after(blocks), **SMALL)
    with pytest.raises(DatasetError, match="unfinished build"):
        bertdata.open(out)
    units = list((out / ".build").glob("unit-*.json"))
    assert len(units) == blocks
    finished = [shard["name"] for unit in units for shard in json.loads(unit.read_bytes())["shards"].values()]
    before = {path.name: path.stat() for name in finished for path in (out / ".build").glob(f"{name}.*")}

    said = []
    report = build([corpus], out, tokenizer=vocab, workers=2, say=said.append, **SMALL)
    assert report.reused_units == blocks
    assert any("continuing" in line for line in said) == (blocks > 0)
    assert published(out) == whole
    for name, status in before.items():
        is_origins = name.endswith(".origins.npy")
        after = (out / "origins" / name.replace(".origins", "") if is_origins else out / name).stat()
        assert (after.st_ino, after.st_mtime_ns) == (status.st_ino, status.st_mtime_ns)


def test_a_killed_build_continues(tmp_path, corpus, vocab, whole):
    program = f"""
import os, signal
from bertdata.write import build, publish
left = iter(range(2))
def progress(done, total):
    if next(left, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
build([{str(corpus)!r}], {str(tmp_path / "out")!r}, tokenizer={vocab!r}, progress=progress, **{SMALL!r})
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    assert len(list((tmp_path / "out" / ".build").glob("unit-*.json"))) == 2
    assert build([corpus], tmp_path / "out", tokenizer=vocab, **SMALL).reused_units == 2
    assert published(tmp_path / "out") == whole


@contextmanager
def failing(number, error):
    """Raises `error()` instead of the given call of those that change the disk; yields the calls so far."""
    calls = []

    def watched(function):
        def call(*args, **kwargs):
            calls.append(function)
            if len(calls) - 1 == number:
                raise error()
            return function(*args, **kwargs)

        return call

    places = ((os, "replace", os.replace), (os, "fsync", os.fsync), (Path, "unlink", Path.unlink),
              (shutil, "rmtree", shutil.rmtree))  # fmt: skip
    patches = [patch.object(place, name, watched(function)) for place, name, function in places]
    for each in patches:
        each.start()
    try:
        yield calls
    finally:
        for each in patches:
            each.stop()


def full_disk():
    return OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.usefixtures("whole")  # so that numba has compiled, and its cache does not count
@pytest.mark.parametrize(("tokenizer", "error"), [("given", KeyboardInterrupt), ("trained", full_disk)])
def test_a_build_stopped_anywhere_publishes_nothing_and_continues(tmp_path, vocab, tokenizer, error):
    """Every rename, sync, removal and record of a build fails in turn; running it again ends in the same bytes."""
    (tmp_path / "text").write_text(make_text(12, seed=1))
    options = {"shard_size": 900, "tokenizer": vocab if tokenizer == "given" else None, "vocab_size": 120}
    with failing(-1, None) as calls:
        build([tmp_path / "text"], tmp_path / "whole", **options)
    expected = published(tmp_path / "whole")
    assert len(calls) > 40
    for number in range(len(calls)):
        out = tmp_path / f"out{number}"
        with failing(number, error), pytest.raises((KeyboardInterrupt, OSError)):
            build([tmp_path / "text"], out, **options)
        if (out / "manifest.json").exists():  # at most the removal of .build is missing
            assert bertdata.open(out).num_documents == 12
        if not (out / "manifest.json").exists() or (out / ".build" / "plan.json").exists():
            with failing(-1, None):
                build([tmp_path / "text"], out, **options)
        shutil.rmtree(out / ".build", ignore_errors=True)  # where nothing is left to continue
        assert published(out) == expected
        shutil.rmtree(out)


@pytest.mark.usefixtures("whole")
def test_an_overwriting_build_stopped_anywhere_keeps_the_old_or_continues(tmp_path, vocab, monkeypatch):
    monkeypatch.setattr("bertdata.format.dataset.PATIENCE_S", 0.1)  # nobody goes on with the publication meanwhile
    (tmp_path / "text").write_text(make_text(12, seed=1))
    options = {"shard_size": 900, "tokenizer": vocab, "overwrite": True}
    with failing(-1, None) as calls:
        new = build([tmp_path / "text"], tmp_path / "whole", **options).dataset
    old = build([tmp_path / "text"], tmp_path / "old", tokenizer=vocab, shard_size=700).dataset
    kept = 0
    for number in range(len(calls)):
        out = tmp_path / f"out{number}"
        shutil.copytree(old.path, out)
        with failing(number, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            build([tmp_path / "text"], out, **options)
        try:
            dataset = bertdata.open(out)
            assert dataset.dataset_id in (old.dataset_id, new.dataset_id)
            assert verify(out) == []
            kept += dataset.dataset_id == old.dataset_id
        except DatasetError as refused:
            assert "unfinished build" in str(refused)  # noqa: PT017  (the other outcome is as good)
        with failing(-1, None):
            build([tmp_path / "text"], out, **options)
        assert published(out) == published(tmp_path / "whole")
        shutil.rmtree(out)
    assert kept > len(calls) // 2


@pytest.mark.usefixtures("whole")
def test_an_unfinished_build_whose_removal_is_stopped_anywhere_is_not_continued(tmp_path, vocab, monkeypatch):
    (tmp_path / "text").write_text(make_text(12, seed=1))
    options = {"shard_size": 900, "tokenizer": vocab, "workers": 1, "overwrite": True}
    with pytest.raises(KeyboardInterrupt):
        build([tmp_path / "text"], tmp_path / "left", progress=stop_after(2), **options)
    assert [*(tmp_path / "left" / ".build").glob("unit-*")]
    build([tmp_path / "text"], tmp_path / "whole", **options)
    in_any_order = Path.iterdir
    monkeypatch.setattr(
        Path, "iterdir", lambda path: sorted(in_any_order(path), key=lambda each: each.suffix != ".npy")
    )

    def discard(name):
        shutil.copytree(tmp_path / "left", tmp_path / name)
        continue_or_start(tmp_path / name / ".build", {}, overwrite=True, start_over=False)

    with failing(-1, None) as calls:
        discard("removed")
    for number in range(len(calls)):
        with failing(number, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            discard(f"out{number}")
        build([tmp_path / "text"], tmp_path / f"out{number}", **options)
        assert published(tmp_path / f"out{number}") == published(tmp_path / "whole")


def test_a_build_that_lost_a_file_leaves_the_old_dataset_alone(tmp_path, vocab):
    (tmp_path / "text").write_text(make_text(12, seed=1))
    options = {"shard_size": 900, "tokenizer": vocab, "workers": 1, "overwrite": True}
    old = build([tmp_path / "text"], tmp_path / "out", tokenizer=vocab).dataset
    move_up = publish.move_up

    def lose_one(directory, staging, *arguments):
        (staging / "train-00001.tokens.npy").unlink()
        move_up(directory, staging, *arguments)

    with patch.object(publish, "move_up", lose_one), pytest.raises(BuildError, match="lost train-00001.tokens.npy"):
        build([tmp_path / "text"], tmp_path / "out", **options)
    assert bertdata.open(tmp_path / "out").dataset_id == old.dataset_id
    assert verify(tmp_path / "out") == []


def test_an_unfinished_build_is_not_continued_with_other_settings(tmp_path, corpus, vocab, bert):
    out, changing = tmp_path / "out", tmp_path / "text"
    shutil.copy(corpus, changing)
    options = {"tokenizer": vocab} | SMALL
    with pytest.raises(KeyboardInterrupt):
        build([changing], out, workers=1, progress=stop_after(1), **options)
    for change, said in (
        ({"shard_size": 9000}, "shard_size was 8000 and is now 9000"),
        ({"validation": 0.25}, "validation was 0.2 and is now 0.25"),
        ({"sentences": "none"}, "sentences was 'line' and is now 'none'"),
        ({"documents": "line"}, "documents was 'blank' and is now 'line'"),
        ({"max_documents": 5}, "max_documents was None and is now 5"),
        ({"strict": True}, "strict was False and is now True"),
        ({"tokenizer": str(bert)}, "tokenizer was 'SHA-256 .*' and is now 'SHA-256 .*'"),
        ({"tokenizer": None}, "tokenizer was 'SHA-256 .*' and is now 'trained, 30522 tokens'"),
    ):
        with pytest.raises(BuildError, match=f"unfinished build with other settings: {said}"):
            build([changing], out, **options | change)
    os.utime(changing, (1, 1))
    with pytest.raises(BuildError, match=rf"{changing} \([\d,]+ bytes\) was changed since"):
        build([changing], out, **options)
    with pytest.raises(BuildError, match=rf"the input was {changing} .* and is now {corpus}"):
        build([corpus], out, **options)
    assert build([corpus], out, overwrite=True, **options).reused_units == 0


# --------------------------------------------------------------------------------------------------- in the way of it


def test_a_dataset_is_replaced_only_by_overwriting(tmp_path, corpus, vocab, whole):
    out = tmp_path / "out"
    build([corpus], out, tokenizer=vocab, shard_size=2000)
    before = published(out)
    with pytest.raises(BuildError, match=f"{out} already holds a dataset; use --overwrite"):
        build([corpus], out, tokenizer=vocab, **SMALL)
    assert published(out) == before
    build([corpus], out, tokenizer=vocab, overwrite=True, **SMALL)
    assert published(out) == whole


def test_an_error_while_overwriting_keeps_the_old_dataset(tmp_path, corpus, vocab):
    out = tmp_path / "out"
    build([corpus], out, tokenizer=vocab, **SMALL)
    before = published(out)
    (tmp_path / "bad.jsonl").write_text('{"text": "the stone"}\n{"body": 1}\n')
    (tmp_path / "blank").write_text("\n\n \n")
    for path, error in ((tmp_path / "bad.jsonl", InputError), (tmp_path / "blank", InputError)):
        with pytest.raises(error):
            build([path], out, tokenizer=vocab, overwrite=True)
        assert published(out) == before
    with pytest.raises(TokenizerError):
        build([corpus], out, tokenizer=str(tmp_path / "no.json"), overwrite=True)
    assert published(out) == before


def test_a_failure_leaves_nothing_behind(tmp_path, corpus, vocab):
    (tmp_path / "bad.jsonl").write_text('{"text": "the stone"}\n{"body": 1}\n')
    (tmp_path / "blank").write_text("\n\n \n")
    (tmp_path / "empty_documents.jsonl").write_text('{"text": ""}\n{"text": " "}\n')
    (tmp_path / "invalid").write_bytes(b"a\xff")
    out = tmp_path / "out"
    for name, options, said in (
        ("bad.jsonl", {}, "line 2: no key 'text' in this row"),
        ("blank", {}, "nothing but blank lines"),
        ("blank", {"tokenizer": None}, "nothing but blank lines"),
        ("empty_documents.jsonl", {}, "2 documents gave no token"),
        ("invalid", {"strict": True}, "byte 1 is not valid UTF-8"),
        ("corpus", {"tokenizer": None, "vocab_size": 3}, "no room for words"),
    ):
        path = corpus if name == "corpus" else tmp_path / name
        with pytest.raises(BertdataError, match=said):
            build([path], out, **{"tokenizer": vocab} | options)
        assert not out.exists()
        out.mkdir()
        with pytest.raises(BertdataError, match=said):
            build([path], out, **{"tokenizer": vocab} | options)
        assert list(out.iterdir()) == []
        out.rmdir()


def test_a_directory_with_other_files_is_left_alone(tmp_path, corpus, vocab):
    (tmp_path / "thesis.tex").write_text("x")
    for overwrite in (False, True):
        with pytest.raises(BuildError, match="holds other files and no dataset"):
            build([corpus], tmp_path, tokenizer=vocab, overwrite=overwrite)
        with pytest.raises(BuildError, match="is a file"):
            build([corpus], tmp_path / "thesis.tex", tokenizer=vocab, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_two_builds_do_not_share_a_directory(tmp_path, corpus, vocab):
    staging = tmp_path / "out" / ".build"
    staging.mkdir(parents=True)
    with open(staging / "lock", "w") as lock:
        lock.write("12345")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        for overwrite in (False, True):
            with pytest.raises(BuildError, match="is being built by process 12345"):
                build([corpus], tmp_path / "out", tokenizer=vocab, overwrite=overwrite)
        assert [path.name for path in staging.iterdir()] == ["lock"]
    build([corpus], tmp_path / "out", tokenizer=vocab)


def test_an_input_that_changes_meanwhile_is_refused(tmp_path, vocab):
    path = tmp_path / "text"
    path.write_text(make_text(20))

    def progress(done, total):
        with open(path, "a") as file:
            file.write("more")

    with pytest.raises(InputError, match="text changed while it was read; run again with --overwrite when"):
        build([path], tmp_path / "out", tokenizer=vocab, progress=progress)
    assert not (tmp_path / "out" / "manifest.json").exists()
    build([path], tmp_path / "out", tokenizer=vocab, overwrite=True)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"sentences": "dot"}, "sentences is 'dot'"),
        ({"documents": "page"}, "documents is 'page'"),
        ({"validation": -0.1}, "validation -0.1"),
        ({"validation": 0.6, "test": 0.4}, "test 0.4"),
        ({"validation": float("nan")}, "validation nan"),
        ({"test": float("nan")}, "test nan"),
        ({"workers": 0}, "workers is 0"),
        ({"shard_size": 0}, "shard_size is"),
        ({"max_documents": 0}, "max_documents is"),
    ],
)
def test_wrong_arguments_are_named_and_nothing_is_touched(tmp_path, corpus, vocab, wrong, said):
    with pytest.raises(UsageError, match=said):
        build([corpus], tmp_path / "out", tokenizer=vocab, **wrong)
    assert not (tmp_path / "out").exists()


def test_the_first_invalid_byte_is_reported(tmp_path, vocab):
    (tmp_path / "good").write_text("stone\n\n" * 400)
    (tmp_path / "bad").write_bytes(b"the\n\nriv\xe9r \xff\xff\n\n\xff")
    report = build([tmp_path / "good", tmp_path / "bad"], tmp_path / "out", tokenizer=vocab, shard_size=900)
    assert report.first_replaced == f"{tmp_path / 'bad'}, byte 8"
    assert report.dataset.manifest.counts["replaced_characters"] == 4
    assert build([tmp_path / "good"], tmp_path / "out2", tokenizer=vocab).first_replaced is None


# ------------------------------------------------------------------------------------------------------------ the disk


def run_build(corpus, out, vocab, *, before="", **environment):
    """Builds in a process of its own through the command line, after some Python; returns the finished process."""
    arguments = [str(corpus), "--out", str(out), "--tokenizer", vocab, "--shard-size", "8000"]
    program = f"{before}\nfrom bertdata.cli import main\nmain({['build', *arguments]!r})"
    return subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environment, cwd=corpus.parent, capture_output=True, text=True
    )


def test_nothing_is_written_outside_the_output(tmp_path, corpus, vocab):
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    temporary.mkdir()
    beside = {path: path.stat().st_mtime_ns for path in corpus.parent.rglob("*")}
    done = run_build(corpus, tmp_path / "out", vocab, HOME=str(home), TMPDIR=str(temporary))
    assert done.returncode == 0, done.stderr
    assert list(home.iterdir()) == list(temporary.iterdir()) == []
    assert {path: path.stat().st_mtime_ns for path in corpus.parent.rglob("*")} == beside


def test_a_full_disk_is_one_sentence_and_can_be_continued(tmp_path, corpus, vocab):
    """No file may grow above 9,000 bytes: the tokenizer fits and a shard of 8,000 bytes of text does not."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))"
    (tmp_path / "long").write_text(make_text(150).replace("\n\n", "\n"))
    out = tmp_path / "out"
    done = run_build(tmp_path / "long", out, vocab, before=limit)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert "File too large; make room and run the same command again" in done.stderr
    assert not (out / "manifest.json").exists()
    assert run_build(tmp_path / "long", out, vocab).returncode == 0
    assert verify(out) == []


def test_what_is_not_ours_is_left_alone(tmp_path, corpus, vocab):
    """A stray .build does not open the way to a published dataset, and --overwrite removes only shards."""
    out = tmp_path / "shards"
    first = build(str(corpus), out, tokenizer=vocab).dataset
    (out / "test-notes.md").write_text("mine")
    (out / ".build").mkdir()
    with pytest.raises(BuildError, match="already holds a dataset"):
        build([corpus], out, tokenizer=vocab, validation=0)
    assert bertdata.open(out).dataset_id == first.dataset_id
    second = build([corpus], out, tokenizer=vocab, validation=0, overwrite=True).dataset
    assert not list(out.glob("validation-*"))
    assert (out / "test-notes.md").read_text() == "mine"
    assert verify(out) == []
    assert second.dataset_id != first.dataset_id


def test_more_shards_than_open_files(tmp_path, vocab):
    """A memory map keeps a descriptor; the soft limit is raised when it is reached."""
    (tmp_path / "corpus.txt").write_text("the stone\n" * 100)
    program = (
        "import resource, sys\nfrom bertdata.write import build\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (60, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "built = build([sys.argv[1]], sys.argv[2], tokenizer=sys.argv[3], documents='line', shard_size=10)\n"
        "print(len(built.dataset))"
    )
    arguments = [str(tmp_path / "corpus.txt"), str(tmp_path / "shards"), vocab]
    result = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert result.stdout == "100\n", result.stderr
