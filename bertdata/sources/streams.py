"""An input file → a stream of its bytes, decompressed."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bertdata.errors import InputError
from bertdata.sources.find import COMPRESSION_OF, STANDARD_INPUT, is_stream

CHUNK = 1 << 17  # bytes read at a time
_FIRST_BYTES = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class _Members(io.RawIOBase):
    """The decompressed bytes of all members of a bzip2 or xz file.

    The standard library's own readers take a damaged member after a whole one for the end of the file.
    """

    def __init__(self, file: Any, new: Callable[[], Any]) -> None:
        self._file, self._new = file, new
        self._member = new()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            data = b""
            if self._member.eof:
                data = self._member.unused_data or self._file.read(CHUNK)
                while data and not data.strip(b"\0"):  # xz files may be padded with zeros
                    data = self._file.read(CHUNK)
                if not data:
                    return 0
                self._member = self._new()
            elif self._member.needs_input:
                data = self._file.read(CHUNK)
                if not data:
                    raise EOFError("it ends before its end-of-stream marker")
            piece = self._member.decompress(data, len(buffer))
            if piece:
                buffer[: len(piece)] = piece
                return len(piece)


class _Rest(io.RawIOBase):
    """A file of which the first bytes were read already."""

    def __init__(self, first: bytes, file: Any) -> None:
        self._first, self._file = first, file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._first[: len(buffer)] or self._file.read1(len(buffer))
        self._first = self._first[len(piece) :]
        buffer[: len(piece)] = piece
        return len(piece)


class InputStream:
    """An input's bytes, decompressed."""

    def __init__(self, path: Path, file: Any, compression: str) -> None:
        self._file = file
        if compression == "zstd":
            import pyarrow as pa

            self.file: Any = pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")
        else:
            openers: dict[str, Any] = {
                "gzip": gzip.open,
                "bzip2": lambda file: io.BufferedReader(_Members(file, bz2.BZ2Decompressor), CHUNK),
                "xz": lambda file: io.BufferedReader(_Members(file, lzma.LZMADecompressor), CHUNK),
                "": lambda file: file,
            }
            self.file = openers[compression](file)
        self.is_seekable = not compression and path != STANDARD_INPUT and file.seekable()
        self._num_read = 0

    def read(self, size: int = -1) -> bytes:
        piece: bytes = self.file.read(size) if size >= 0 else self.file.read()
        self._num_read += len(piece)
        return piece

    def seek(self, place: int) -> None:
        self.file.seek(place)

    @property
    def bytes_read(self) -> int:
        """As they lie on disk; of a pipe, as they came out."""
        return int(self._file.tell()) if self._file.seekable() else self._num_read


@contextmanager
def opened(path: Path) -> Iterator[InputStream]:
    """A stream of the file's bytes. Raises InputError, naming the file, for what cannot be read or decompressed."""
    compression = COMPRESSION_OF.get(path.suffix.lower(), "")
    try:
        if path == STANDARD_INPUT:
            first = sys.stdin.buffer.read(max(map(len, _FIRST_BYTES)))
            compression = next((name for magic, name in _FIRST_BYTES.items() if first.startswith(magic)), "")
            yield InputStream(path, io.BufferedReader(_Rest(first, sys.stdin.buffer), CHUNK), compression)
        else:
            with open(path, "rb") as file:
                if compression and not is_stream(path) and path.stat().st_size == 0:
                    raise EOFError("it is empty")
                yield InputStream(path, file, compression)
    except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError) as error:
        raise InputError(f"{path} is no whole {compression} file: {error}; fetch it again") from None
    except OSError as error:
        if compression and error.errno is None:  # how bz2 and pyarrow say it
            raise InputError(f"{path} is no whole {compression} file: {error}; fetch it again") from None
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
