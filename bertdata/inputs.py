"""What the user names → the files to read, their kinds, and streams of their bytes, decompressed.

A file's ending tells its kind (`.jsonl`, `.ndjson` and `.json`: a JSON object a line; `.parquet`; `.arrow` and
`.feather`; anything else: text) and, after it, how it is compressed: `.gz`, `.bz2`, `.xz`, `.zst`. "-" is standard
input: its compression is known by its first bytes, its kind must be named unless it is text.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import io
import lzma
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bertdata.errors import InputError, UsageError

KINDS = ("text", "jsonl", "parquet", "arrow")
STANDARD_INPUT = Path("-")
CHUNK = 1 << 17  # bytes read at a time
_KIND_OF = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".arrow": "arrow",
            ".feather": "arrow"}  # fmt: skip
_COMPRESSION_OF = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
_FIRST_BYTES = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


def find_inputs(named: Sequence[str | Path]) -> list[Path]:
    """Files as named; for a directory all files below it, for a pattern all that match, both in order of their names.

    Names that begin with "." or "_" are left out of directories. Raises InputError if a name gives no file.
    """
    found: list[Path] = []
    for name in map(str, named):
        path = Path(name)
        if path == STANDARD_INPUT and name != "-":
            path = path.absolute()  # a file of that name
        if not name:
            raise UsageError("an input is the empty string; name a file")
        if path.is_dir():
            inside = (p for p in path.rglob("*") if not any(part[0] in "._" for part in p.relative_to(path).parts))
            files = sorted(p for p in inside if p.is_file())
            if not files:
                raise InputError(f"{path} is a directory without files; name the text files or their directory")
            found += files
        elif glob.has_magic(name) and not os.path.lexists(name):
            files = sorted(Path(match) for match in glob.glob(name, recursive=True) if os.path.isfile(match))
            if not files:
                raise InputError(f"{name} matches no file; check the pattern")
            found += files
        else:
            found.append(path)
    if found.count(STANDARD_INPUT) > 1:
        raise UsageError("standard input (-) is named twice; it can be read once")
    return found


def kind_of(path: Path) -> str:
    return _KIND_OF.get(Path(path.name.lower().removesuffix(_compression_ending(path))).suffix, "text")


def _compression_ending(path: Path) -> str:
    suffix = path.suffix.lower()
    return suffix if suffix in _COMPRESSION_OF else ""


def is_compressed(path: Path) -> bool:
    return bool(_compression_ending(path))


def is_stream(path: Path) -> bool:
    """Whether it can be read only once: standard input or a named pipe."""
    return path == STANDARD_INPUT or stat.S_ISFIFO(path.stat().st_mode)


def describe(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Path, size and modification time of each input, as far as it has them. Raises InputError for the unreadable."""
    described: list[dict[str, Any]] = []
    for path in paths:
        if path == STANDARD_INPUT:
            described.append({"path": "-", "bytes": None, "modified_ns": None})
            continue
        try:
            status = path.stat()
            if stat.S_ISFIFO(status.st_mode):
                described.append({"path": str(path), "bytes": None, "modified_ns": None})
                continue
            if not stat.S_ISREG(status.st_mode):
                raise InputError(f"{path} is neither a file nor a named pipe; write its text to a file")
            open(path, "rb").close()
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        described.append({"path": str(path), "bytes": status.st_size, "modified_ns": status.st_mtime_ns})
    if all(entry["bytes"] == 0 for entry in described):
        names = ", ".join(str(path) for path in paths)
        raise InputError(f"{names}: empty file, so there is no document to build from; give a file with text in it")
    return described


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


class Stream:
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
def opened(path: Path) -> Iterator[Stream]:
    """A stream of the file's bytes. Raises InputError, naming the file, for what cannot be read or decompressed."""
    compression = _COMPRESSION_OF.get(path.suffix.lower(), "")
    try:
        if path == STANDARD_INPUT:
            first = sys.stdin.buffer.read(max(map(len, _FIRST_BYTES)))
            compression = next((name for magic, name in _FIRST_BYTES.items() if first.startswith(magic)), "")
            yield Stream(path, io.BufferedReader(_Rest(first, sys.stdin.buffer), CHUNK), compression)
        else:
            with open(path, "rb") as file:
                if compression and not is_stream(path) and path.stat().st_size == 0:
                    raise EOFError("it is empty")
                yield Stream(path, file, compression)
    except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError) as error:
        raise InputError(f"{path} is no whole {compression} file: {error}; fetch it again") from None
    except OSError as error:
        if compression and error.errno is None:  # how bz2 and pyarrow say it
            raise InputError(f"{path} is no whole {compression} file: {error}; fetch it again") from None
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
