"""One-dimensional arrays as .npy files, and their digests. np.load opens these files without this library."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import DatasetError, damaged, unreadable
from bertdata.files import Stage, open_plain

HEADER_BYTES = 128
CRC_BYTES = 1 << 20  # bytes of a file that share one CRC-32
_PIECE_BYTES = 4 * CRC_BYTES  # bytes per read


def npy_header(dtype: str, length: int) -> bytes:
    """Return the 128 bytes before the data, for any length below 10**60."""
    fields = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({length},), }}"
    return b"\x93NUMPY\x01\x00\x76\x00" + fields.encode().ljust(117) + b"\n"


def file_bytes(dtype: str, length: int, **more: object) -> int:
    """Return the size of an array file in bytes. more: further members of its entry in a record, ignored."""
    return HEADER_BYTES + np.dtype(dtype).itemsize * length


def array_file(shard: str, array: str) -> str:
    """Return the file name of an array, such as train-00000.tokens.npy."""
    return f"{shard}.{array}.npy"


def array_path(directory: Path, shard: str, array: str) -> Path:
    return directory / array_file(shard, array)


def digest(path: Path) -> tuple[str, list[int]]:
    """Return the SHA-256 of a file in hex, and the CRC-32 of each 1 MiB block, in one pass at about 1.5 GB/s."""
    with open_plain(path, "rb") as file:
        return _digest(file)


def _digest(file: Any) -> tuple[str, list[int]]:
    """Return both digests of an open file, computed in two threads."""
    sha256, crcs, piece = hashlib.sha256(), list[int](), np.empty(_PIECE_BYTES, np.uint8).data

    def checksums(size: int) -> list[int]:
        return [zlib.crc32(piece[at : min(at + CRC_BYTES, size)]) for at in range(0, size, CRC_BYTES)]

    file.seek(0)
    with ThreadPoolExecutor(1) as beside:
        while size := file.readinto(piece):
            of_piece = beside.submit(checksums, size)
            sha256.update(piece[:size])
            crcs += of_piece.result()
    return sha256.hexdigest(), crcs


class ArrayWriter:
    """Write an array file of a `Stage`."""

    def __init__(self, stage: Stage, name: str, dtype: str) -> None:
        """name: the file name."""
        self.dtype, self.length, self._file = dtype, 0, stage.open(name)
        self._file.write(bytes(HEADER_BYTES))

    def append(self, values: NDArray[Any]) -> None:
        """Append numbers, cast to the dtype of the array."""
        self._file.write(np.ascontiguousarray(values, self.dtype).data)
        self.length += values.size

    def finish(self) -> dict[str, Any]:
        """Write the header, sync and close the file, and return its entry in the commit record."""
        self._file.seek(0)
        self._file.write(npy_header(self.dtype, self.length))
        self._file.flush()
        with ThreadPoolExecutor(1) as beside:  # the disk and the processor work at the same time
            synced = beside.submit(os.fsync, self._file.fileno())
            sha256, crc32 = _digest(self._file)
            synced.result()
        self._file.close()
        return {"dtype": self.dtype, "length": self.length, "sha256": sha256, "crc32": crc32}


def open_array(path: Path, dtype: str, length: int) -> NDArray[Any]:
    """Open an array file as a read-only memory map. Checks its size and header.

    Raises DatasetError if the file cannot be opened, or does not have the size and header of `length` numbers of
    `dtype`.
    """
    expected = file_bytes(dtype, length)
    try:
        with open_plain(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected:
                raise damaged(path, f"it has {size:,} bytes and should have {expected:,}")
            if file.read(HEADER_BYTES) != npy_header(dtype, length):
                raise damaged(path, f"its header is not that of {length} numbers of {dtype}")
            pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except FileNotFoundError:
        raise damaged(path, "it is missing") from None
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENOMEM):  # ENOMEM: there are too many maps
            raise unreadable(path, error) from None
        import resource  # not on Windows

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:  # each map keeps a descriptor open
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            return open_array(path, dtype, length)
        advice = "raise ulimit -n and vm.max_map_count, or build with a larger --shard-size"
        sentence = f"{path} cannot be opened: {error.strerror}; {advice}"
        raise DatasetError(sentence, "too-many-files", given=hard) from None
    return np.frombuffer(pages, dtype, offset=HEADER_BYTES)


def pages_of(array: NDArray[Any]) -> mmap.mmap:
    """Return the memory map of an array from `open_array`, header included."""
    base = array.base
    pages: Any = base.obj if isinstance(base, memoryview) else base
    return pages
