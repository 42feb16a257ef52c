"""The bytes of one shard: arrays ⇄ .npy files, digests, sealed JSON records. docs/format.md is the contract.

A file appears under its name only when all of it is on disk: temporary name, fsync, rename, fsync of the directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import mmap
import os
import resource
import stat
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import BuildError, DatasetError

FORMAT_VERSION = 1
HEADER_BYTES = 128
BLOCK_BYTES = 1 << 20  # of a CRC-32
MOST_RECORD_BYTES = 1 << 27  # of a JSON record: about 100,000 shards
TEMPORARY = ".tmp"


def npy_header(dtype: str, length: int) -> bytes:
    """The 128 bytes before the data. Works for any length below 10**60."""
    fields = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({length},), }}"
    return b"\x93NUMPY\x01\x00\x76\x00" + fields.encode().ljust(117) + b"\n"


def array_path(directory: Path, shard: str, array: str) -> Path:
    return directory / f"{shard}.{array}.npy"


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


def canonical(record: Any) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Writes a JSON object sealed with its own checksum."""
    sealed = record | {"checksum": hashlib.sha256(canonical(record)).hexdigest()}
    write_file(path, json.dumps(sealed, indent=1).encode() + b"\n")


def read_record(path: Path) -> dict[str, Any]:
    """The object written by write_record. Raises DatasetError if the file is missing, damaged or of another version."""
    try:
        with open_plain(path, "rb") as file:
            content = file.read(MOST_RECORD_BYTES + 1)
        if len(content) > MOST_RECORD_BYTES:
            raise DatasetError(f"{path} is damaged: it has more than {MOST_RECORD_BYTES:,} bytes")
        record = json.loads(content)
        checksum = record.pop("checksum")
        if hashlib.sha256(canonical(record)).hexdigest() != checksum:
            raise DatasetError(f"{path} is damaged: its contents do not give the checksum it states")
        version = record["format_version"]
    except FileNotFoundError:
        raise DatasetError(f"{path} is missing") from None
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DatasetError(f"{path} is damaged: it is not a record of ours") from None
    if version != FORMAT_VERSION:
        raise DatasetError(
            f"{path} has format version {version!r} and this library reads {FORMAT_VERSION}; upgrade bertdata"
        )
    return record


def digest(path: Path) -> tuple[str, list[int]]:
    """SHA-256 of a file in hex, and the CRC-32 of each of its 1 MiB blocks. One pass, about 0.4 GB/s."""
    sha256, crcs = hashlib.sha256(), []
    with open_plain(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            sha256.update(block)
            crcs.append(zlib.crc32(block))
    return sha256.hexdigest(), crcs


class ArrayWriter:
    """Appends to one array file under its temporary name; `commit` makes it appear."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.path, self.dtype, self.length = path, dtype, 0
        self._file = open_plain(path.with_name(path.name + TEMPORARY), "wb")
        self._file.write(bytes(HEADER_BYTES))

    def append(self, values: NDArray[Any]) -> None:
        self._file.write(np.ascontiguousarray(values, self.dtype).data)
        self.length += values.size

    def commit(self) -> dict[str, Any]:
        """Returns the array's entry in the commit record."""
        self._file.seek(0)
        self._file.write(npy_header(self.dtype, self.length))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        sha256, crc32 = digest(Path(self._file.name))
        os.replace(self._file.name, self.path)
        return {"dtype": self.dtype, "length": self.length, "sha256": sha256, "crc32": crc32}

    def discard(self) -> None:
        """Removes the temporary file of an array that will not be finished."""
        with contextlib.suppress(OSError):  # a full disk fails again as the buffer is flushed
            self._file.close()
        Path(self._file.name).unlink(missing_ok=True)


class ShardWriter:
    """Appends documents to the arrays of one shard; `commit` makes it appear, its record last."""

    def __init__(
        self, directory: Path, name: str, *, split: str, token_dtype: str, sentences: bool, words: bool = False
    ) -> None:
        self.directory, self.name, self.split = directory, name, split
        dtypes = {"tokens": token_dtype, "documents": "<u8"} | ({"sentences": "<u8"} if sentences else {})
        dtypes |= {"words": "|u1"} if words else {}
        self._arrays = {array: ArrayWriter(array_path(directory, name, array), dtypes[array]) for array in dtypes}
        for array in dtypes.keys() - {"tokens", "words"}:
            self._arrays[array].append(np.zeros(1, np.uint64))
        self._word_starts = np.zeros(0, np.bool_)  # fewer than 8, which do not fill a byte yet

    def append(
        self,
        tokens: NDArray[Any],
        documents: NDArray[np.uint64],
        sentences: NDArray[np.uint64] | None = None,
        word_starts: NDArray[np.bool_] | None = None,
    ) -> None:
        """tokens [n]; documents and sentences: where each ends in `tokens`, ascending, the last one n.

        word_starts bool [n]: whether each token begins a word.
        """
        before = np.uint64(self._arrays["tokens"].length)
        self._arrays["tokens"].append(tokens)
        self._arrays["documents"].append(documents + before)
        if sentences is not None:
            self._arrays["sentences"].append(sentences + before)
        if word_starts is not None:
            waiting = np.concatenate([self._word_starts, word_starts])
            whole = waiting.size // 8 * 8
            self._arrays["words"].append(np.packbits(waiting[:whole], bitorder="little"))
            self._word_starts = waiting[whole:]

    def commit(self, *, input_range: tuple[int, int], counts: dict[str, int]) -> dict[str, Any]:
        if "words" in self._arrays:
            self._arrays["words"].append(np.packbits(self._word_starts, bitorder="little"))
        record = {
            "format_version": FORMAT_VERSION,
            "split": self.split,
            "arrays": {name: array.commit() for name, array in self._arrays.items()},
            "input": {"start": input_range[0], "stop": input_range[1]},
            "counts": counts,
        }
        fsync_directory(self.directory)
        write_record(self.directory / f"{self.name}.json", record)
        return record

    def discard(self) -> None:
        for array in self._arrays.values():
            array.discard()


class Unmapped:
    """The numbers of an array file on a file system that maps no files, read (pread) at each use.

    As an array of one dimension: size, dtype, slices, and arrays of indices. Raises DatasetError if the file fails.
    """

    def __init__(self, path: Path, file: IO[Any], dtype: str, length: int) -> None:
        self.path, self.dtype, self.size = path, np.dtype(dtype), length
        self.itemsize, self.nbytes = self.dtype.itemsize, self.dtype.itemsize * length
        self._fd = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._fd)

    def read(self, start: int, out: NDArray[Any]) -> None:
        """The numbers from `start` on → out, contiguous and of this dtype."""
        place, rest = HEADER_BYTES + start * self.itemsize, memoryview(out.data).cast("B")
        while rest:
            try:
                count = os.preadv(self._fd, [rest], place)
            except OSError as error:
                raise DatasetError(f"{self.path} cannot be read: {error.strerror}") from None
            if count == 0:
                raise DatasetError(f"{self.path} ends at byte {place}: it was cut short")
            place, rest = place + count, rest[count:]

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            start, stop, step = key.indices(self.size)
            out = np.empty(max(0, stop - start), self.dtype)
            self.read(start, out)
            return out[::step]
        places = np.asarray(key)
        out = np.empty((places.size, 1), self.dtype)
        for place, row in zip(places.flat, out, strict=True):
            self.read(int(place), row)
        return out.reshape(places.shape)[()]


def open_array(path: Path, dtype: str, length: int) -> Any:
    """A read-only memory map of an array file, checked for size and header: O(1), a handful of system calls.

    An Unmapped where the file system maps none. Raises DatasetError, naming the byte counts, if the file is not exactly
    what its record says.
    """
    expected = HEADER_BYTES + np.dtype(dtype).itemsize * length
    try:
        with open_plain(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected:
                raise DatasetError(f"{path} has {size} bytes and should have {expected}: it was cut short or replaced")
            if file.read(HEADER_BYTES) != npy_header(dtype, length):
                raise DatasetError(f"{path}: its first {HEADER_BYTES} bytes do not say {length} numbers of {dtype}")
            try:
                pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            except OSError as error:
                if error.errno not in (errno.ENODEV, errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                return Unmapped(path, file, dtype, length)
    except OSError as error:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if error.errno == errno.EMFILE and soft < hard:  # a map keeps a descriptor
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            return open_array(path, dtype, length)
        advice = "; raise ulimit -n, or build with a larger --shard-size" * (error.errno == errno.EMFILE)
        raise DatasetError(f"{path} cannot be opened: {error.strerror}{advice}") from None
    return np.frombuffer(pages, dtype, offset=HEADER_BYTES)


def pages_of(array: NDArray[Any]) -> mmap.mmap:
    """The memory map under an array of `open_array`, header included."""
    base = array.base
    pages: Any = base.obj if isinstance(base, memoryview) else base
    return pages  # type: ignore[no-any-return]
