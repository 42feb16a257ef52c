"""An input file → a stream of its bytes, decompressed, as UTF-8."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bertdata.errors import InputError
from bertdata.sources.inputs import STANDARD_INPUT, Input

CHUNK = 1 << 17  # bytes read at a time
UTF_8 = "utf-8"
_FIRST_BYTES = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


def _mark_invalid(error: UnicodeError) -> tuple[str | bytes, int]:
    """An error handler: what cannot be decoded, and then cannot be encoded, becomes one byte that UTF-8 never has."""
    if isinstance(error, UnicodeDecodeError):
        return "\udcff", error.end
    assert isinstance(error, UnicodeEncodeError)  # noqa: S101  (there is no other kind here)
    return b"\xff" * (error.end - error.start), error.end


codecs.register_error("bertdata.mark_invalid", _mark_invalid)


class _AsUtf8(io.RawIOBase):
    """A file of text in another encoding as UTF-8. Each invalid sequence becomes the byte FF, so that it is counted."""

    def __init__(self, file: Any, encoding: str) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder(encoding)("bertdata.mark_invalid")
        self._pending = b""
        self._is_at_end = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._pending and not self._is_at_end:
            data = self._file.read(CHUNK)
            self._is_at_end = not data
            text = self._decoder.decode(data, final=self._is_at_end)
            self._pending = text.encode("utf-8", "bertdata.mark_invalid")
        piece = self._pending[: len(buffer)]
        self._pending = self._pending[len(buffer) :]
        buffer[: len(piece)] = piece
        return len(piece)


class _Members(io.RawIOBase):
    """The decompressed bytes of all members of a bzip2 or xz file.

    The readers of the standard library silently stop at a damaged member if it follows a sound one; this one raises.
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
                data = self._member.unused_data.lstrip(b"\0")  # xz files may be padded with zeros
                while not data:
                    if not (piece := self._file.read(CHUNK)):
                        return 0
                    data = piece.lstrip(b"\0")
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
    """A file, of which `first` was read already."""

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
    """The bytes of an input, decompressed, as UTF-8. `file` is the file object they are read from."""

    def __init__(self, source: Input, file: Any, compression: str, encoding: str) -> None:
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
        if encoding != UTF_8:
            self.file = io.BufferedReader(_AsUtf8(self.file, encoding), CHUNK)
        is_plain = not compression and encoding == UTF_8
        self.is_seekable = is_plain and source.name != STANDARD_INPUT and file.seekable()
        self._num_read = 0

    def read(self, size: int = -1) -> bytes:
        piece: bytes = self.file.read(size) if size >= 0 else self.file.read()
        self._num_read += len(piece)
        return piece

    def readinto(self, buffer: Any) -> int:
        """Fills a writable buffer as far as there are bytes. Returns how many; 0 at the end."""
        length: int = self.file.readinto(buffer)
        self._num_read += length
        return length

    def seek(self, offset: int) -> None:
        self.file.seek(offset)

    @property
    def bytes_read(self) -> int:
        """How many bytes of the file on disk are read; of a pipe, how many bytes were returned."""
        return int(self._file.tell()) if self._file.seekable() else self._num_read


@contextmanager
def opened(source: Input, encoding: str = UTF_8) -> Iterator[InputStream]:
    """Opens an input. The ending of its name tells how it is compressed; for standard input, its first bytes tell.

    Raises InputError, which names the file, if it cannot be read or decompressed.
    """
    compression = source.compression
    try:
        if source.name == STANDARD_INPUT:
            first = sys.stdin.buffer.read(max(map(len, _FIRST_BYTES)))
            compression = next((name for magic, name in _FIRST_BYTES.items() if first.startswith(magic)), "")
            yield InputStream(source, io.BufferedReader(_Rest(first, sys.stdin.buffer), CHUNK), compression, encoding)
        else:
            with source.open() as file:
                if compression and source.size == 0:
                    raise EOFError("it is empty")
                yield InputStream(source, file, compression, encoding)
    except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _cut_short(source, compression, error) from None
    except FileNotFoundError:
        sentence = f"{source} was removed while it was read; put it back, and run the same command again"
        raise InputError(sentence, "not-found", given=source.name) from None
    except OSError as error:
        if compression and error.errno is None:  # bz2 and pyarrow report damage like this
            raise _cut_short(source, compression, error) from None
        raise InputError(
            f"{source} cannot be read: {error.strerror or error}", "unreadable", given=source.name
        ) from None


def _cut_short(source: Input, compression: str, error: Exception) -> InputError:
    return InputError(
        f"{source} is not a complete {compression} file ({error}); get the file again", "cut-short", given=source.name
    )
