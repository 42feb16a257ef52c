"""An input file → a stream of its bytes, decompressed, as UTF-8."""

from __future__ import annotations

import bz2
import codecs
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from bertdata.errors import InputError
from bertdata.sources import zstd
from bertdata.sources.inputs import HEAD_BYTES, STANDARD_INPUT, Input, magic_of

CHUNK = 1 << 17  # bytes read at a time
UTF_8 = "utf-8"


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


_inflater = partial(zlib.decompressobj, 16 + zlib.MAX_WBITS)  # 16: with the header and the end of gzip


def _members(file: Any, new: Callable[[], Any]) -> Iterator[bytes]:
    """The decompressed bytes of all members of a gzip, bzip2 or xz file.

    The readers of the standard library for bzip2 and xz silently stop at a damaged member if it follows a sound one;
    this one raises. That for gzip reads 8 KiB at a time, which takes a third of the CPU time more.
    """
    member, data = new(), file.read(CHUNK)
    while True:
        if not data and getattr(member, "needs_input", True):
            raise EOFError("it ends before its end-of-stream marker")
        yield member.decompress(data, CHUNK)
        data = getattr(member, "unconsumed_tail", b"")  # zlib gives back what it did not take
        if member.eof:
            data = member.unused_data.lstrip(b"\0")  # a file may be padded with zeros
            while not data:
                if not (piece := file.read(CHUNK)):
                    return
                data = piece.lstrip(b"\0")
            member = new()
        elif not data and getattr(member, "needs_input", True):
            data = file.read(CHUNK)


def _after(first: bytes, file: Any) -> Iterator[bytes]:
    """A file, of which `first` was read already."""
    yield first
    while piece := file.read1(CHUNK):
        yield piece


class InputStream:
    """The bytes of an input, decompressed, as UTF-8. `file` is the file object they are read from."""

    def __init__(self, file: Any, compression: str, encoding: str) -> None:
        self._file = self.file = file
        if compression == "zstd" and (library := zstd.library()):
            self.file = as_file(zstd.frames(file, library))
        elif compression == "zstd":
            import pyarrow as pa

            self.file = pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")
        elif compression:
            decompressors: dict[str, Callable[[], Any]] = {
                "gzip": _inflater,
                "bzip2": bz2.BZ2Decompressor,
                "xz": lzma.LZMADecompressor,
            }
            self.file = as_file(_members(file, decompressors[compression]))
        if encoding != UTF_8:
            self.file = as_file(_as_utf8(self.file, encoding))
        self.is_seekable = not compression and encoding == UTF_8 and file.seekable()

    def read(self, size: int = -1) -> bytes:
        return bytes(self.file.read(size) if size >= 0 else self.file.read())

    @property
    def bytes_read(self) -> int:
        """How many bytes of the file on disk are read; 0 of a pipe."""
        return int(self._file.tell()) if self._file.seekable() else 0


@contextmanager
def opened(source: Input, encoding: str = UTF_8) -> Iterator[InputStream]:
    """Open an input. Its first bytes tell its compression.

    Raises InputError, which names the file, if it cannot be read or decompressed.
    """
    if source.items:  # whose own errors pass as they are
        yield InputStream(Pieces(iter(source.items)), "", encoding)
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
                file = as_file(_after(first, file)) if source.is_stream else file
                if not source.is_stream:
                    file.seek(0)
            yield InputStream(file, compression, encoding)
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise _cut_short(source, compression, error) from None
    except FileNotFoundError:
        sentence = f"{source} was removed while it was read; put it back, and run the same command again"
        raise InputError(sentence, "not-found", given=source.name) from None
    except OSError as error:
        if compression and error.errno is None:  # bz2 and zstd report damage like this
            raise _cut_short(source, compression, error) from None
        sentence = f"{source} cannot be read: {error.strerror or error}"
        raise InputError(sentence, "unreadable", given=source.name) from None


def _cut_short(source: Input, compression: str, error: Exception) -> InputError:
    # pyarrow speaks of memory where a window is large, and libzstd where there is none for it
    larger = "larger window than can be used here" if "memory" in str(error) else ""
    if needs := "dictionary" if "ictionary" in str(error) else larger:
        library = "" if zstd.library() else "install libzstd, or "
        advice = f"{library}decompress it first by zstd -d, with --long=31 or -D DICTIONARY"
        return InputError(f"{source} needs a {needs} ({error}); {advice}", "unsupported", given=source.name)
    return InputError(
        f"{source} is not a complete {compression} file ({error}); get the file again", "cut-short", given=source.name
    )
