"""Files and damage to them, and fakes of a disk that fails or notes what is synced."""

import errno
import hashlib
import json
import os
import re
import resource
import shutil
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch


def damages(content, path):
    """What a file may hold in place of its content. path: a directory that a pickle would make."""
    return {
        "empty": b"",
        "cut": content[: len(content) // 2],
        "noise": bytes(range(255, 0, -1)) * 9,
        "list": b"[1]",
        "number": b"5",
        "object": b"{}",
        "deep": b"[" * 100_000,
        "pickle": b"cos\nmkdir\n(V%b\ntR." % os.fsencode(path),  # calls os.mkdir(path)
    }


def published(out):
    """Name → bytes of every file of a dataset, in whose directory nothing else is left."""
    assert [path.name for path in out.iterdir() if path.is_dir()] in ([], ["origins"])
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def without_origins(out):
    """The same without the numbers of the inputs, which depend on how many these are."""
    return {name: content for name, content in published(out).items() if not name.startswith("origins/")}


@contextmanager
def failing(number, error):
    """Raises `error()` instead of the given call of those that change the disk; gives the calls so far."""
    calls = []

    def watched(function):
        def call(*args, **kwargs):
            calls.append(function)
            if len(calls) - 1 == number:
                raise error()
            return function(*args, **kwargs)

        return call

    with ExitStack() as patched:
        for owner, name in ((os, "replace"), (os, "fsync"), (Path, "unlink"), (Path, "rmdir"), (shutil, "rmtree")):
            patched.enter_context(patch.object(owner, name, watched(getattr(owner, name))))
        yield calls


def syncing(called):
    """A context that calls `called(path, step)` before a file or a directory is synced; it may raise or wait.

    step: of the checkpoint whose index the file is, or None.
    """
    real = os.fsync

    def fsync(fd):
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        called(path, int(path.parent.name[6:14]) if path.name == "checkpoint.json.tmp" else None)
        real(fd)

    return patch.object(os, "fsync", fsync)


@contextmanager
def full_disk(num_bytes):
    """A context in which files have so many bytes at most, as on a disk that has no more room.

    A module that is imported in it leaves no .pyc: Python 3.11 does not notice that one was cut short.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with patch.object(sys, "dont_write_bytecode", True):
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_at(*steps):
    """A context in which the disk is full once a checkpoint of one of these steps is nearly written."""

    def full(path, step):
        if step in steps:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    return syncing(full)


def before_rename(name, action):
    """A context that calls an action before a file whose path ends with a name gets it."""
    replace = os.replace

    def replaced(source, target):
        if str(target).endswith(name):
            action()
        replace(source, target)

    return patch.object(os, "replace", replaced)


@contextmanager
def recorded(root):
    """Checks changes of names below `root` as they happen: a rename makes visible what is on disk, with what came
    before it, and nothing is removed or replaced before that is safe.

    Yields an object with `renames`, the new names; `pending`, the directories whose newest names would not survive a
    loss of power, those of locks apart; and `holds(path)`, whether all of a file is on disk.
    """
    synced, renames, renamed, pending, unpublished = set(), [], set(), set(), set()
    fsync, replace, rename, mkdir, rmdir = os.fsync, os.replace, os.rename, Path.mkdir, Path.rmdir
    records = re.compile(r"(manifest|cache|unit-\d+)\.json")

    def state(path):
        status = os.stat(path)
        return status.st_ino, status.st_size, status.st_mtime_ns

    def holds(path):
        return state(path) in synced

    def on_fsync(fd):
        fsync(fd)
        path = os.readlink(f"/proc/self/fd/{fd}")
        for directories in (renamed, pending, unpublished):
            directories.discard(path)
        synced.add(state(path))

    def on_replace(source, target):
        source, target = Path(source), Path(target)
        if not target.resolve().is_relative_to(root):  # numba's cache
            replace(source, target)
            return
        for path in () if source.is_symlink() else (source, *source.rglob("*")):
            assert holds(path), f"{path} is renamed before all of it is on disk"
        directory = str(target.parent.resolve())
        assert directory not in unpublished, f"{directory} may have its old manifest and this {target.name}"
        if records.fullmatch(target.name) or (target.suffix == ".json" and target.parent.name == "cache"):
            assert directory not in renamed, f"{target} would survive a loss of power and what it names would not"
        replace(source, target)
        renamed.add(directory)
        pending.add(directory)
        if source.name == "manifest.json":
            unpublished.add(str(source.parent.resolve()))
        renames.append(target)

    def on_rename(source, target):
        rename(source, target)
        if Path(target).resolve().is_relative_to(root):
            pending.add(str(Path(target).parent.resolve()))

    def on_mkdir(path, *args, **kwargs):
        existed = path.exists()
        mkdir(path, *args, **kwargs)
        if not existed:
            pending.add(str(path.parent.resolve()))

    def removing(function):
        def call(path, *args, **kwargs):
            directory = str(Path(path).parent.resolve())
            if Path(path).exists() and not str(path).endswith("lock"):
                assert directory not in unpublished, f"{directory} may have its old manifest and no {path}"
                is_checkpoint = path in renames and Path(path).is_dir()
                assert not is_checkpoint or directory not in renamed, f"{path} is removed before the next is on disk"
                is_known_empty = function is rmdir and str(Path(path).resolve()) not in pending
                if not is_known_empty:  # an empty directory that comes back does no harm
                    pending.add(directory)
                for directories in (renamed, pending, unpublished):  # what was inside may be lost
                    directories.difference_update({each for each in directories if Path(each).is_relative_to(path)})
            function(path, *args, **kwargs)

        return call

    with (
        patch.multiple(os, fsync=on_fsync, replace=on_replace, rename=on_rename),
        patch.multiple(Path, mkdir=on_mkdir, unlink=removing(Path.unlink), rmdir=removing(rmdir)),
        patch.multiple(shutil, rmtree=removing(shutil.rmtree)),
    ):
        yield SimpleNamespace(renames=renames, pending=pending, holds=holds)


def flip(path, at, bits=1):
    """Flips bits of a byte of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= bits
    path.write_bytes(content)


def contents(folder):
    """Name → bytes of all files below a folder but locks, in which processes write their numbers."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name not in (".lock", "lock"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def visible(folder):
    """The same without what an unfinished build has."""
    return {name: content for name, content in contents(folder).items() if not name.startswith(".build")}


def write_all(directory, contents):
    """Writes the bytes of files by name, also in directories that are not there yet; returns the directory."""
    for name, content in contents.items():
        put(Path(directory, name), content)
    return directory


def write(path, *lines):
    """Writes lines of text as `put` does."""
    return put(Path(path), "".join(f"{line}\n" for line in lines))


def put(path, content):
    """Write bytes or text to a file, also in a directory that is not there yet; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def unsealed(path):
    """A JSON record without its checksum, which is right."""
    record = json.loads(path.read_bytes())
    assert record.pop("checksum") == sha256(canonical(record))
    return record


def reseal(path, record):
    """Makes a JSON record, with its checksum, the content of a file."""
    put(path, json.dumps(record | {"checksum": sha256(canonical(record))}))


def canonical(record):
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def sha256(content):
    return hashlib.sha256(content).hexdigest()
