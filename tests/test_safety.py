"""What a build, a lock and an export must not lose, and must not touch."""

import fcntl
import shutil
import sys

import pytest
from support.commands import refused, refuses
from support.data import build, make_text
from support.disk import contents, published, put, write_all
from support.sources import stopped

from bertdata import files


@pytest.mark.parametrize("name", ["notes.txt", "debug/main.o", "train-1.txt", "a link"])
def test_a_staging_directory_of_another_program_is_left_alone(corpus, vocab, tmp_path, name):
    """Other programs call a directory .build, too. A link in its place is not followed."""
    staging = tmp_path / "out" / ".build"
    if name == "a link":
        write_all(tmp_path / "other", dict.fromkeys(["unit-00000.json", "plan.json"], "mine"))
        staging.parent.mkdir()
        staging.symlink_to(tmp_path / "other")
    else:
        put(staging / name, "mine")
    before = sorted(tmp_path.rglob("*")), contents(tmp_path)
    for more in ([], ["--overwrite"]):
        arguments = ["build", corpus, "--out", tmp_path / "out", "--tokenizer", vocab, *more]
        refused("bertdata", *arguments, kind="out-exists", option="out")
        assert (sorted(tmp_path.rglob("*")), contents(tmp_path)) == before


@pytest.mark.parametrize("name", ["lock", "tokenizer.json.tmp", "train-00000.tokens.npy.tmp", "hashes of dedup"])
def test_nothing_is_written_through_a_link_in_the_output(corpus, vocab, tmp_path, name):
    staging, precious = tmp_path / "out" / ".build", put(tmp_path / "precious", "mine")
    options = {"tokenizer": vocab, "dedup": name == "hashes of dedup"}
    stopped(corpus, tmp_path / "out", 0, **options)  # else what is in .build is removed
    (staging / "duplicates").unlink(missing_ok=True)
    for each in [f"hashes-{number:03d}" for number in range(256)] if options["dedup"] else [name]:
        (staging / each).unlink(missing_ok=True)
        (staging / each).symlink_to(precious)
    with refuses("wrong-file-type"):
        build(corpus, tmp_path / "out", **options)
    assert precious.read_text() == "mine"


def test_units_of_other_code_are_not_mixed(vocab, tmp_path, monkeypatch):
    """The functions of --map and --words may be edited between a Ctrl-C and the same command."""
    code, name = "def change(text):\n    return text\n\ndef words(text):\n    return [text]\n", "edited_later/code.py"
    write_all(tmp_path, {"corpus.txt": make_text(60), "edited_later/__init__.py": "__version__ = 1\n", name: code})
    monkeypatch.syspath_prepend(tmp_path)
    options = {"map": ["edited_later.code:change"], "words": "edited_later.code:words"}
    options |= {"tokenizer": vocab, "shard_size": 2000}
    stopped(tmp_path / "corpus.txt", tmp_path / "out", 1, **options)
    for version, changed in ((2, code), (1, code.replace("return text", "return text.upper()"))):
        monkeypatch.setattr(sys.modules["edited_later"], "__version__", version)  # a module that it imports
        put(tmp_path / name, changed)
        with refuses("other-settings", "out"):
            build(tmp_path / "corpus.txt", tmp_path / "out", **options)


def test_a_lock_on_a_removed_file_holds_nobody_off_and_is_not_taken(tmp_path, monkeypatch):
    """Between opening and locking the file, its holder ended and removed it."""
    flock = fcntl.flock

    def late(fd, how):
        shutil.rmtree(tmp_path / "build")
        return flock(fd, how)

    (tmp_path / "build").mkdir()
    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(FileNotFoundError), files.locked(tmp_path / "build" / "lock", "busy", "wait"):
        pytest.fail("the lock was taken")


def test_a_build_that_waited_for_a_lock_does_not_replace_what_was_published_meanwhile(
    corpus, vocab, tmp_path, monkeypatch
):
    """Another build ends between the first look at the directory and the lock."""
    out, flock, before = tmp_path / "out", fcntl.flock, {}

    def late(fd, how):
        if (out / ".build").exists() and not (out / "manifest.json").exists():
            monkeypatch.setattr(fcntl, "flock", flock)
            shutil.rmtree(out / ".build")
            before.update(published(build(corpus, out, tokenizer=vocab, validation=0).dataset.path))
        return flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with refuses("out-exists", "out"):
        build(corpus, out, tokenizer=vocab, validation=0.5)
    assert published(out) == before != {}
    assert not (out / ".build").exists()
