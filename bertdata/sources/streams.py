"""An input file → a stream of its bytes, decompressed, as UTF-8."""

from __future__ import annotations

import bz2
import codecs
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


class Pieces(io.RawIOBase):
    """Bytes in pieces as a file. An error of the pieces passes as it is; io.BufferedReader retries after EINTR."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest = pieces, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = 0
        while size < len(buffer):
            piece = self._rest or next(self._pieces, None)
            if piece is None:
                break
            length = min(len(piece), len(buffer) - size)
            buffer[size : size + length] = piece[:length]
            self._rest, size = piece[length:], size + length
        return size


def as_file(pieces: Iterator[bytes]) -> io.BufferedReader:
    """Return the bytes of some pieces, one after the other, as a file."""
    return io.BufferedReader(Pieces(pieces), CHUNK)


def _as_utf8(file: Any, encoding: str) -> Iterator[bytes]:
    """A text in another encoding as UTF-8. Each invalid sequence becomes the byte FF, so that it is counted."""
    decoder, data = codecs.getincrementaldecoder(encoding)("bertdata.mark_invalid"), b"begin"
    while data:
        data = file.read(CHUNK)
        yield decoder.decode(data, final=not data).encode("utf-8", "bertdata.mark_invalid")


class _GzipMember:
    """A decompressor of one member of a gzip file, as bz2 and lzma have them. It checks the member's sum and length."""

    def __init__(self) -> None:
        self._inflater = zlib.decompressobj(16 + zlib.MAX_WBITS)  # 16: with the header and the end of gzip

    def decompress(self, data: bytes, most: int) -> bytes:
        return self._inflater.decompress(self._inflater.unconsumed_tail + data, most)

    @property
    def needs_input(self) -> bool:
        return not self._inflater.unconsumed_tail and not self.eof

    @property
    def eof(self) -> bool:
        return self._inflater.eof

    @property
    def unused_data(self) -> bytes:
        return self._inflater.unused_data


def _members(file: Any, new: Callable[[], Any]) -> Iterator[bytes]:
    """The decompressed bytes of all members of a gzip, bzip2 or xz file.

    The readers of the standard library for bzip2 and xz silently stop at a damaged member if it follows a sound one;
    this one raises. That for gzip reads 8 KiB at a time, which takes a third of the CPU time more.
    """
    member, data = new(), file.read(CHUNK)
    while True:
        if not data and member.needs_input:
            raise EOFError("it ends before its end-of-stream marker")
        yield member.decompress(data, CHUNK)
        data = b""
        if member.eof:
            data = member.unused_data.lstrip(b"\0")  # a file may be padded with zeros
            while not data:
                if not (piece := file.read(CHUNK)):
                    return
                data = piece.lstrip(b"\0")
            member = new()
        elif member.needs_input:
            data = file.read(CHUNK)


def _after(first: bytes, file: Any) -> Iterator[bytes]:
    """A file, of which `first` was read already."""
    yield first
    while piece := file.read1(CHUNK):
        yield piece


class InputStream:
    """The bytes of an input, decompressed, as UTF-8. `file` is the file object they are read from."""

    def __init__(self, source: Input, file: Any, compression: str, encoding: str) -> None:
        self._file = file
        if compression == "zstd":
            import pyarrow as pa

            self.file: Any = pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")
        else:
            decompressors = {"gzip": _GzipMember, "bzip2": bz2.BZ2Decompressor, "xz": lzma.LZMADecompressor}
            self.file = as_file(_members(file, decompressors[compression])) if compression else file
        if encoding != UTF_8:
            self.file = as_file(_as_utf8(self.file, encoding))
        is_plain = not compression and encoding == UTF_8
        self.is_seekable = is_plain and source.name != STANDARD_INPUT and file.seekable()

    def read(self, size: int = -1) -> bytes:
        return bytes(self.file.read(size) if size >= 0 else self.file.read())

    @property
    def bytes_read(self) -> int:
        """How many bytes of the file on disk are read; 0 of a pipe."""
        return int(self._file.tell()) if self._file.seekable() else 0


@contextmanager
def opened(source: Input, encoding: str = UTF_8) -> Iterator[InputStream]:
    """Open an input. The ending of its name tells its compression, and for standard input its first bytes.

    Raises InputError, which names the file, if it cannot be read or decompressed.
    """
    if source.items:  # whose own errors pass as they are
        yield InputStream(source, Pieces(iter(source.items)), "", encoding)
        return
    compression = source.compression
    try:
        if source.name == STANDARD_INPUT:
            first = sys.stdin.buffer.read(max(map(len, _FIRST_BYTES)))
            compression = next((name for magic, name in _FIRST_BYTES.items() if first.startswith(magic)), "")
            yield InputStream(source, as_file(_after(first, sys.stdin.buffer)), compression, encoding)
        else:
            with source.open() as file:
                if compression and source.size == 0:
                    raise EOFError("it is empty")
                yield InputStream(source, file, compression, encoding)
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise _cut_short(source, compression, error) from None
    except FileNotFoundError:
        sentence = f"{source} was removed while it was read; put it back, and run the same command again"
        raise InputError(sentence, "not-found", given=source.name) from None
    except OSError as error:
        if compression and error.errno is None:  # bz2 and pyarrow report damage like this
            raise _cut_short(source, compression, error) from None
        sentence = f"{source} cannot be read: {error.strerror or error}"
        raise InputError(sentence, "unreadable", given=source.name) from None


def _cut_short(source: Input, compression: str, error: Exception) -> InputError:
    return InputError(
        f"{source} is not a complete {compression} file ({error}); get the file again", "cut-short", given=source.name
    )
