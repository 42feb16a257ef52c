"""An input file → a stream of its bytes, decompressed, as UTF-8."""

from __future__ import annotations

import bz2
import codecs
import io
import lzma
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from bertdata.errors import InputError
from bertdata.sources.inputs import HEAD_BYTES, STANDARD_INPUT, Input, magic_of

CHUNK = 1 << 17  # bytes read at a time
UTF_8 = "utf-8"


def _mark_invalid(error: UnicodeError) -> tuple[str | bytes, int]:
    """Handle codec errors: a sequence that cannot be decoded or encoded becomes a byte that never occurs in UTF-8."""
    if isinstance(error, UnicodeDecodeError):
        return "\udcff", error.end
    assert isinstance(error, UnicodeEncodeError)  # noqa: S101  (there is no other kind here)
    return b"\xff" * (error.end - error.start), error.end


codecs.register_error("bertdata.mark_invalid", _mark_invalid)


class PieceReader(io.RawIOBase):
    """Pieces of bytes as a file object. Errors of the pieces pass unchanged; io.BufferedReader retries after EINTR."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest = pieces, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = 0
        while size < len(buffer) and (piece := self._rest or next(self._pieces, None)) is not None:
            length = min(len(piece), len(buffer) - size)
            buffer[size : size + length] = piece[:length]
            self._rest, size = piece[length:], size + length
        return size


def _as_utf8(file: Any, encoding: str) -> Iterator[bytes]:
    """Convert a text from a different encoding to UTF-8. Invalid sequences become the byte FF and are counted."""
    decoder, data = codecs.getincrementaldecoder(encoding)("bertdata.mark_invalid"), b"begin"
    while data:
        data = file.read(CHUNK)
        yield decoder.decode(data, final=not data).encode("utf-8", "bertdata.mark_invalid")


def _members(file: Any, new: Callable[[], Any]) -> Iterator[bytes]:
    """Yield the decompressed bytes of all members of a bzip2 or xz file. Zeros may follow a member.

    The standard library silently stops at a damaged member after an intact one; this function raises.
    """
    data = file.read(CHUNK)
    while data:
        member = new()
        while not member.eof:
            yield member.decompress(data, CHUNK)
            data = file.read(CHUNK) if member.needs_input else b""
            if member.needs_input and not data:
                raise EOFError("it ends before its end-of-stream marker")
        data = member.unused_data.lstrip(b"\0")
        while not data and (piece := file.read(CHUNK)):
            data = piece.lstrip(b"\0")


class InputStream:
    """The bytes of an input, decompressed, as UTF-8. `file` is the underlying file object."""

    def __init__(self, file: Any, compression: str, encoding: str) -> None:
        self._on_disk = self.file = file
        if compression in ("bzip2", "xz"):
            self._unpack(_members(file, bz2.BZ2Decompressor if compression == "bzip2" else lzma.LZMADecompressor))
        elif compression:
            import pyarrow as pa

            self.file = self._kept = pa.CompressedInputStream(pa.PythonFile(file, "r"), compression)  # closes `file`
        if encoding != UTF_8:
            self._unpack(_as_utf8(self.file, encoding))
        self.is_seekable = not compression and encoding == UTF_8 and file.seekable()

    def _unpack(self, pieces: Iterator[bytes]) -> None:
        self.file = io.BufferedReader(PieceReader(pieces), CHUNK)

    def read(self, size: int = -1) -> bytes:
        return bytes(self.file.read(size) if size >= 0 else self.file.read())

    @property
    def bytes_read(self) -> int:
        """Number of bytes read from the file on disk; 0 for a pipe."""
        return int(self._on_disk.tell()) if self._on_disk.seekable() else 0


def _after(first: bytes, file: Any) -> Iterator[bytes]:
    """Yield `first`, which was read already, and the rest of the file."""
    yield first
    while piece := file.read1(CHUNK):
        yield piece


@contextmanager
def opened(source: Input, encoding: str = UTF_8) -> Iterator[InputStream]:
    """Open an input. Detects its compression by magic bytes.

    Raises InputError, with the file name, if the input cannot be read or decompressed.
    """
    if source.items:  # errors of the iterable pass unchanged
        yield InputStream(PieceReader(iter(source.items)), "", encoding)
        return
    compression = source.compression
    try:
        with nullcontext(sys.stdin.buffer) if source.name == STANDARD_INPUT else source.open() as file:
            if compression or not source.remote:
                first = file.read(HEAD_BYTES)
                if compression and not magic_of(first):
                    why = "it does not begin as one: if it is not compressed, correct its name"
                    raise EOFError(why if first else "it is empty")
                compression = magic_of(first)
                if source.is_stream:
                    file = io.BufferedReader(PieceReader(_after(first, file)), CHUNK)
                else:
                    file.seek(0)
            yield InputStream(file, compression, encoding)
    except (EOFError, lzma.LZMAError) as error:
        raise _cut_short(source, compression, error) from None
    except FileNotFoundError:
        sentence = f"{source} was removed while it was read; put it back, and run the same command again"
        raise InputError(sentence, "not-found", given=source.name) from None
    except OSError as error:
        if compression and error.errno is None:  # the errors of the libraries for damaged files
            raise _cut_short(source, compression, error) from None
        sentence = f"{source} cannot be read: {error.strerror or error}"
        raise InputError(sentence, "unreadable", given=source.name) from None


def _cut_short(source: Input, compression: str, error: Exception) -> InputError:
    larger = "larger window than can be used here" if "memory" in str(error) else ""
    if needs := "dictionary" if "ictionary" in str(error) else larger:
        advice = "decompress it first by zstd -d, with --long=31 or -D DICTIONARY"
        return InputError(f"{source} needs a {needs} ({error}); {advice}", "unsupported", given=source.name)
    sentence = f"{source} is not a complete {compression} file, or other bytes follow it ({error}); get the file again"
    return InputError(sentence, "cut-short", given=source.name)
