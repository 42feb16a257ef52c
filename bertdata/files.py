"""Writes files completely or not at all, and holds locks.

A file is written under a temporary name, synced and renamed; then its directory is synced.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from bertdata.errors import BuildError, DatasetError, UsageError

TEMPORARY = ".tmp"


def open_plain(path: Path, mode: str) -> IO[Any]:
    """open() that takes only ordinary files: no symbolic link, pipe or device, which could block or lead elsewhere.

    Raises DatasetError for these, and OSError as open() does.
    """

    def opener(name: str, flags: int) -> int:
        try:
            fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP and path.is_symlink():
                sentence = f"{path} is a symbolic link; replace it by the file itself"
                raise DatasetError(sentence, "wrong-file-type", given=path) from None
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise DatasetError(f"{path} is not an ordinary file; replace it by one", "wrong-file-type", given=path)
        return fd

    return open(path, mode, opener=opener)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Names a file in errors of the system that name none, as those of a full disk while a file is written.

    An error that names a temporary file then names the file that it was to become. One of a user's iterable stays.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and "is_of_iterable" not in vars(error):
            error.filename = str(path if error.filename is None else error.filename).removesuffix(TEMPORARY)
        raise


def make_directory(directory: Path) -> None:
    """Makes a directory and its parents, and syncs them, so that they survive a loss of power."""
    if not directory.exists():
        make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        fsync_directory(directory.parent)


def fsync_directory(directory: Path) -> None:
    """Makes the names of new and renamed files survive a loss of power."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def cache_directory() -> Path:
    """$BERTDATA_CACHE, else bertdata/ in $XDG_CACHE_HOME, else ~/.cache/bertdata."""
    if directory := os.environ.get("BERTDATA_CACHE"):
        return Path(directory)
    if not (above := os.environ.get("XDG_CACHE_HOME")):
        above = os.path.expanduser("~/.cache")
        if above.startswith("~"):  # this user has no home
            raise UsageError("there is no home directory for the cache; set BERTDATA_CACHE to a directory", "missing")
    return Path(above) / "bertdata"


@contextmanager
def locked(path: Path, busy: str = "", advice: str = "", *, shared: bool = False, wait: bool = False) -> Iterator[None]:
    """Holds the lock file `path` until the context, or this process, ends.

    shared: other processes may share the lock. wait: until no other process holds it. Else raises BuildError with the
    text "{busy} by process {N}; {advice}" if another process holds it. Raises FileNotFoundError if the file was removed
    before the lock was taken: such a lock holds nobody off.
    """
    with open_plain(path, "a+") as lock:
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
            if not os.path.samestat(os.fstat(lock.fileno()), os.stat(path)):
                raise FileNotFoundError(errno.ENOENT, "was removed by the process that held it", str(path))
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "?"
            raise BuildError(f"{busy} by process {holder}; {advice}", "busy", given=holder) from None
        with naming(path):
            os.ftruncate(lock.fileno(), 0)
            os.write(lock.fileno(), str(os.getpid()).encode())
        yield


def write_page(path: Path, content: bytes) -> None:
    """As `write_file`; a pipe or a device, such as /dev/stdout, gets the bytes and stays what it is."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)
    else:
        write_file(path, content)


def write_file(path: Path, content: bytes) -> None:
    """Writes a small file completely or not at all."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with naming(path):
            with open_plain(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    fsync_directory(path.parent)
