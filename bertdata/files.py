"""Write files atomically, and hold locks.

A file is written under a temporary name, synced and renamed; then its directory is synced.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Self

from bertdata.errors import BuildError, DatasetError, UsageError

TEMPORARY = ".tmp"


def open_plain(path: Path, mode: str) -> IO[Any]:
    """Open a regular file like open(), but no symbolic link, pipe or device, which could block or lead elsewhere.

    Raises DatasetError for these, and OSError like open().
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
    """Add a file name to system errors that lack one, such as the error for a full disk during a write.

    The error has the final name of a temporary file. Errors of a user's iterable do not change.
    """
    try:
        yield
    except OSError as error:
        _name(error, path)
        raise


def _name(error: OSError, path: Path) -> None:
    if error.errno is not None and "is_of_iterable" not in vars(error):
        error.filename = str(path if error.filename is None else error.filename).removesuffix(TEMPORARY)


def make_directory(directory: Path) -> None:
    """Make a directory and its parents, and sync them, so that they survive a loss of power."""
    if not directory.exists():
        make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        fsync_directory(directory.parent)


def fsync_directory(directory: Path) -> None:
    """Sync a directory, so that new and renamed files survive a loss of power."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def cache_directory() -> Path:
    """Return $BERTDATA_CACHE, else bertdata/ in $XDG_CACHE_HOME, else ~/.cache/bertdata."""
    if directory := os.environ.get("BERTDATA_CACHE"):
        return Path(directory)
    if not (above := os.environ.get("XDG_CACHE_HOME")):
        above = os.path.expanduser("~/.cache")
        if above.startswith("~"):  # this user has no home directory
            raise UsageError("there is no home directory for the cache; set BERTDATA_CACHE to a directory", "missing")
    return Path(above) / "bertdata"


@contextmanager
def locked(path: Path, busy: str = "", advice: str = "", *, shared: bool = False, wait: bool = False) -> Iterator[None]:
    """Hold the lock file `path` until the context, or this process, ends.

    shared: other processes may share the lock. wait: wait until no other process holds it. Without `wait`, raises
    BuildError "{busy} by process {N}; {advice}" if another process holds it. Raises FileNotFoundError if the file was
    removed before it was locked: such a lock has no effect.
    """
    import fcntl  # not on Windows

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
    """Write a file like `write_file`, or write the bytes to a pipe or a device, such as /dev/stdout."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)
    else:
        write_file(path, content)


def write_file(path: Path, content: bytes) -> None:
    """Write a small file atomically."""
    with Stage(path.parent) as stage:
        stage.write(path.name, content)
        stage.publish()


class Stage:
    """Files of a directory that get their final names together, after all of them are complete and on disk.

        with Stage(directory) as stage:
            stage.open("a.npy").write(content)
            stage.write("a.json", record)
            stage.publish()

    Each file has a temporary name until `publish`, which replaces files of the same names. The last opened file is
    renamed after all others are on disk under their final names. So a reader that finds the last name finds all files,
    even after a kill or a loss of power. Without `publish`, the end of the context removes all files. An OSError
    without a file name is raised again with the name of the last file.
    """

    def __init__(self, directory: Path, apart: Path | None = None) -> None:
        """apart: parent of a new directory for the temporary files, if other processes may write the same names."""
        self.directory, self._files = directory, dict[str, IO[bytes]]()
        self._temporary = Path(tempfile.mkdtemp(prefix=".stage-", dir=apart)) if apart else directory

    def __enter__(self) -> Self:
        return self

    def open(self, name: str) -> IO[bytes]:
        """Open a new file for writing and reading. Close it only after `sync`."""
        self._files[name] = open_plain(self._path(name), "w+b")
        return self._files[name]

    def write(self, name: str, content: bytes) -> None:
        """Write a small file."""
        self.open(name).write(content)

    def publish(self) -> None:
        """Sync the files and rename them to their final names, in the order of opening."""
        *names, last = self._files
        for file in self._files.values():
            if not file.closed:
                sync(file)
                file.close()
        for name in names:
            os.replace(self._path(name), self.directory / name)
        if names:
            fsync_directory(self.directory)
        os.replace(self._path(last), self.directory / last)
        fsync_directory(self.directory)
        self._files = {}

    def discard(self, names: Iterable[str]) -> None:
        """Remove some of the files."""
        for name in [*names]:
            with suppress(OSError):  # closing writes buffered bytes, which fails again on a full disk
                self._files.pop(name).close()
            self._path(name).unlink(missing_ok=True)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            _name(error, self.directory / next(reversed(self._files), ""))
        with suppress(OSError):
            self.discard(self._files)
            if self._temporary != self.directory:
                shutil.rmtree(self._temporary, ignore_errors=True)

    def _path(self, name: str) -> Path:
        return self._temporary / (name + TEMPORARY)


def sync(file: IO[bytes]) -> None:
    """Flush a file, and sync it to the disk."""
    file.flush()
    os.fsync(file.fileno())
