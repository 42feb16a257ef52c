"""Files that appear whole or not at all: temporary name, fsync, rename, fsync of the directory; and locks."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from bertdata.errors import BuildError, DatasetError

TEMPORARY = ".tmp"


def open_plain(path: Path, mode: str) -> IO[Any]:
    """open() of a file of ours: never through a symbolic link, never a pipe or device, which might not answer.

    Raises DatasetError for these, OSError as open() does.
    """

    def opener(name: str, flags: int) -> int:
        try:
            fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP and path.is_symlink():
                raise DatasetError(f"{path} is a symbolic link; put the file itself in its place") from None
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise DatasetError(f"{path} is no ordinary file; put the file itself in its place")
        return fd

    return open(path, mode, opener=opener)


def make_directory(directory: Path) -> None:
    """With all its parents, so that they are still there after a loss of power."""
    if not directory.exists():
        make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        fsync_directory(directory.parent)


def fsync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def locked(path: Path, busy: str, advice: str, *, shared: bool = False) -> Iterator[None]:
    """Holds a lock file for as long as the context, or this process, lives. shared: beside others that share it.

    Raises BuildError, "`busy` by process N; `advice`", if another process has it.
    """
    with open_plain(path, "a+") as lock:
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise BuildError(f"{busy} by process {lock.read().strip() or '?'}; {advice}") from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def write_file(path: Path, content: bytes) -> None:
    """Writes a small file whole or not at all."""
    temporary = path.with_name(path.name + TEMPORARY)
    with open_plain(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_directory(path.parent)
