"""What a build, a lock and an export must not lose, and must not touch."""

import fcntl
import json
import shutil
import sys

import pytest
from support.commands import refused, refuses
from support.data import build, make_text
from support.disk import published
from support.sources import stopped

from bertdata import files
from bertdata.cli import main
from bertdata.errors import BuildError
from bertdata.tokenize.load import load


def test_a_link_in_place_of_the_staging_directory_is_not_followed(corpus, vocab, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for name in ("unit-00000.json", "plan.json", "notes.txt"):
        (other / name).write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".build").symlink_to(other)
    for more in ([], ["--overwrite"]):
        arguments = ["build", corpus, "--out", tmp_path / "out", "--tokenizer", vocab, *more]
        refused(main, *arguments, kind="out-exists", option="out")
    assert {path.read_text() for path in other.iterdir()} == {"mine"}
    assert len(list(other.iterdir())) == 3


def test_a_staging_directory_of_another_program_is_left_alone(corpus, vocab, tmp_path):
    """Other programs call a directory .build, too."""
    mine = tmp_path / "out" / ".build"
    for name in ("notes.txt", "debug/main.o", "train-1.txt"):
        (mine / name).parent.mkdir(parents=True, exist_ok=True)
        (mine / name).write_text("mine")
        for more in ([], ["--overwrite"]):
            arguments = ["build", corpus, "--out", tmp_path / "out", "--tokenizer", vocab, *more]
            refused(main, *arguments, kind="out-exists", option="out")
            assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == [mine / name]
        shutil.rmtree(mine)


def test_hashes_of_dedup_are_not_written_through_links(corpus, vocab, tmp_path):
    stopped(corpus, tmp_path / "out", 0, tokenizer=vocab, dedup=True)
    kept = tmp_path / "kept"
    kept.write_text("mine")
    for number in range(256):
        path = tmp_path / "out" / ".build" / f"hashes-{number:03d}"
        path.unlink(missing_ok=True)
        path.symlink_to(kept)
    (tmp_path / "out" / ".build" / "duplicates").unlink(missing_ok=True)
    with refuses("wrong-file-type"):
        build(corpus, tmp_path / "out", tokenizer=vocab, dedup=True)
    assert kept.read_text() == "mine"


def test_units_of_other_code_are_not_mixed(vocab, tmp_path, monkeypatch):
    """The functions of --map and --words may be edited between a Ctrl-C and the same command."""
    (tmp_path / "corpus.txt").write_text(make_text(60))
    monkeypatch.syspath_prepend(tmp_path)
    module, package = tmp_path / "edited_later" / "code.py", tmp_path / "edited_later" / "__init__.py"
    package.parent.mkdir()
    package.write_text("__version__ = 1\n")
    module.write_text("def change(text):\n    return text\n\ndef words(text):\n    return [text]\n")
    options = {"tokenizer": vocab, "shard_size": 2000, "map": ["edited_later.code:change"]}
    options["words"] = "edited_later.code:words"
    stopped(tmp_path / "corpus.txt", tmp_path / "out", 1, **options)
    for change in ("version", "code"):
        with monkeypatch.context() as patch:
            if change == "version":  # a module that it imports may be another one
                patch.setattr(sys.modules["edited_later"], "__version__", 2)
            else:
                module.write_text(module.read_text().replace("return text", "return text.upper()"))
            with refuses("other-settings", "out", error=BuildError):
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
    with refuses("out-exists", "out", error=BuildError):
        build(corpus, out, tokenizer=vocab, validation=0.5)
    assert published(out) == before != {}
    assert not (out / ".build").exists()


def test_added_special_tokens_keep_the_names_of_the_inputs(tmp_path, vocab):
    tokenizer = load(vocab)
    changed = type(tokenizer)(tokenizer.files["tokenizer.json"].decode(), None, ["input_ids", "attention_mask"])
    content = changed.files["tokenizer.json"].decode().replace("[MASK]", "[nothing]")
    without = type(tokenizer)(content, None, ["input_ids", "attention_mask"])
    assert without.missing_roles == ["mask"]
    config = json.loads(without.with_special_tokens().files["tokenizer_config.json"])
    assert config["model_input_names"] == ["input_ids", "attention_mask"]
