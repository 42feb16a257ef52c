"""Damaged files where commands of bertrain read them: each ends in one sentence, and nothing that was finished is lost.

Most are sealed: checkpoint.json states the damaged bytes, as a hostile checkpoint would.
"""

import errno
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from helpers import refused, refuses
from training import QUIET, flags, train

from bertdata.format.arrays import digest
from bertrain import pretrain
from bertrain.__main__ import main
from bertrain.run import checkpoint, state


class Touch:
    """What a pickle would run."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def damages(content, path):
    """What a file may hold in place of its content. path: what a pickle would make."""
    return {
        "empty": b"",
        "cut": content[: len(content) // 2],
        "noise": bytes(range(255, 0, -1)) * 9,
        "list": b"[1]",
        "number": b"5",
        "object": b"{}",
        "deep": b"[" * 100_000,
        "pickle": pickle.dumps(Touch(path)),
    }


def seal(directory):
    """Makes checkpoint.json state what the files are."""
    index = directory / checkpoint.INDEX
    files = json.loads(index.read_bytes())["files"]
    for name in files:
        files[name] = {"bytes": (directory / name).stat().st_size, "sha256": digest(directory / name)[0]}
    index.write_text(json.dumps({"files": files}))


@pytest.fixture(scope="module")
def averaged(dataset, once):
    """A run of two steps whose last checkpoint has all files that there can be. Tests must not change it."""
    options = QUIET | {"steps": 2, "average": 0.9}
    return once("averaged", lambda folder: train(dataset.path, folder / "run", **options)) / "run"


@pytest.mark.parametrize("name", ["optimizer.pt", "average.pt", "trainer.json"])
def test_a_damaged_state_ends_a_run_and_is_not_unpickled(dataset, averaged, tmp_path, name):
    out = shutil.copytree(averaged, tmp_path / "run")
    path = out / "step-00000002" / name
    made = damages(path.read_bytes(), tmp_path / "made")
    for what, damage in made.items():
        path.write_bytes(damage)
        seal(path.parent)
        kind = "other-version" if name == "trainer.json" and what in ("list", "number", "object") else "damaged"
        given = ... if kind == "other-version" or name == "trainer.json" else str(path)
        refused(pretrain.main, *flags(dataset.path, out, steps=3, average=0.9, **QUIET), kind=kind, given=given)
    for value in ([1], 5, {}):
        torch.save(value, path)
        seal(path.parent)
        refused(pretrain.main, *flags(dataset.path, out, steps=3, average=0.9, **QUIET), kind="damaged")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run"]
    assert path.parent.is_dir()


def test_a_state_with_a_member_of_another_type_is_damaged(averaged, tmp_path):
    directory = shutil.copytree(averaged / "step-00000002", tmp_path / "step")
    saved = json.loads((directory / state.TRAINER).read_bytes())
    for name in saved:
        (directory / state.TRAINER).write_text(json.dumps(saved | {name: "x" if name != "version" else 2}))
        with refuses("damaged" if name != "version" else "other-version"):
            state.read(directory)
    refused(
        main, "extract", "--checkpoint", directory, "--out", tmp_path / "small", kind="damaged", option="checkpoint"
    )


def test_a_milestone_that_cannot_be_read_is_not_removed(averaged, tmp_path, monkeypatch):
    for step in (1, 2, 3, 4):
        shutil.copytree(averaged / "step-00000002", tmp_path / f"step-0000000{step}")
    path, read = tmp_path / "step-00000001" / state.TRAINER, Path.read_bytes

    def failing(file):
        if file == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))
        return read(file)

    monkeypatch.setattr(Path, "read_bytes", failing)
    (tmp_path / "step-00000002" / state.TRAINER).write_bytes(b"{")
    checkpoint.remove_others(tmp_path / "step-00000004", keep=1)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step-00000001", "step-00000002", "step-00000004"]
