"""An input of plain text or JSON lines → its documents. tables.py does the same for Parquet and Arrow.

docs/format.md says what a line, a document and a unit are.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bertdata.choices import DOCUMENT_ENDS, INPUT_FORMATS, ON_ERROR
from bertdata.errors import InputError, UsageError
from bertdata.sources.find import is_stream
from bertdata.sources.streams import UTF_8, InputStream, opened

BLOCK_BYTES = 1 << 20
LONGEST_DOCUMENT = 1 << 30  # bytes; a longer one comes from a wrong --documents, or from a file that unpacks endlessly
JUNK_SHARE = 0.3  # a file is not text if a larger share of the bytes in its first block is invalid or NUL
_BLANK_LINES = re.compile(rb"(?:[ \t\r]*\n)+")
_SEPARATORS = {"blank": re.compile(rb"\n(?:[ \t\r]*\n)+"), "line": re.compile(rb"\n(?:[ \t\r]*\n)*")}
_REPLACEMENT = "\ufffd".encode()
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """How documents are found in the inputs. Raises UsageError for values that are not possible."""

    documents: str = "blank"  # what ends a document of plain text, one of DOCUMENT_ENDS
    kind: str | None = None  # of every input, one of INPUT_FORMATS; None: the ending of each input tells
    text_key: str = "text"  # name of the JSON key, or of the column of Parquet and Arrow, that holds the text
    encoding: str = UTF_8  # of plain text and JSON lines; any text encoding that Python knows
    strict: bool = False  # whether an invalid byte is an error; else it becomes U+FFFD and is counted
    on_error: str = "fail"  # one of ON_ERROR: whether a row without text is an error, or is skipped and counted
    shard_size: int = 1 << 30  # bytes of text in a unit
    max_documents: int | None = None  # None: no limit

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("documents", self.documents, DOCUMENT_ENDS),
            ("format", self.kind, (None, *INPUT_FORMATS)),
            ("on_error", self.on_error, ON_ERROR),
        ):
            if value not in choices:
                raise UsageError(f"{name} is {value!r}; give one of {', '.join(filter(None, choices))}")
        for name in ("shard_size", "max_documents"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}; give at least 1")
        object.__setattr__(self, "encoding", _canonical(self.encoding))


def _canonical(encoding: str) -> str:
    """Python's name for a text encoding, such as iso8859-1 for latin-1. Raises UsageError for an unknown one."""
    try:
        "a".encode(encoding)  # refuses codecs that are not text encodings, such as base64
        codecs.getincrementaldecoder(encoding)
        return codecs.lookup(encoding).name
    except (LookupError, UnicodeError, ValueError):
        raise UsageError(
            f"encoding is {encoding!r}, which is not a text encoding that Python knows; give one such as utf-8, "
            "latin-1, cp1252 or gb18030"
        ) from None


class BadRow(Exception):
    """A row has no text where it should have one. str() is the reason; `advice` says what the user can do."""

    def __init__(self, reason: str, advice: str = "fix the row") -> None:
        super().__init__(reason)
        self.advice = advice


def valid_utf8(raw: bytes | None) -> tuple[bytes, int, int]:
    """The bytes as valid UTF-8, how many sequences were replaced for that, and where the first one was, or -1."""
    if raw is None:
        raise BadRow("the text is null")
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        fixed = raw.decode("utf-8", "replace").encode()
        return fixed, fixed.count(_REPLACEMENT) - raw.count(_REPLACEMENT), error.start
    return raw, 0, -1


Piece = tuple[int, bytes | None, NDArray[np.int64] | None]
"""(start, raw bytes, None) is a document. (start, raw bytes, starts) are whole lines of one unit, each a document that
begins at raw[starts[i]]. `start` is the place of the first byte in the input."""


class TextFile:
    """One input of plain text or JSON lines."""

    def __init__(self, path: Path, kind: str, form: TextFormat) -> None:
        """kind: "text" or "jsonl"."""
        self.path, self.kind, self.form = path, kind, form
        self.size = 0  # decompressed bytes so far; the size of the input when all documents are read
        self.bytes_read = 0  # of the file on disk so far

    def documents(self, base: int, is_wanted: Callable[[int], bool]) -> Iterator[Piece]:
        """The documents of the units that are wanted, as raw bytes. base: place of this input in the range of all."""
        size = self.form.shard_size
        with opened(self.path, self.form.encoding) as stream:
            if self.kind == "text" and self.form.documents == "file":
                buffer = bytearray()
                while chunk := self._read(stream):
                    buffer += chunk
                    self._require_short(len(buffer), 0)
                raw = bytes(buffer)
                if raw.strip(b" \t\r\n") and is_wanted(base // size):
                    yield 0, raw.removesuffix(b"\n").removesuffix(b"\r") if raw.endswith(b"\n") else raw, None
                return
            if not stream.is_seekable:
                for piece in self._slices(stream, base, 0, None):
                    if is_wanted((base + piece[0]) // size):
                        yield piece
                return
            total, first = self.path.stat().st_size, base // size
            last = (base + total - 1) // size
            while first <= last:
                stop = first
                while stop <= last and is_wanted(stop):
                    stop += 1
                if first < stop:
                    yield from self._slices(stream, base, max(0, first * size - base), stop * size - base)
                first = max(stop, first + 1)
            self.size, self.bytes_read = total, total

    def text(self, raw: bytes) -> tuple[bytes, int]:
        """The text of a document from its raw bytes, and how many lone surrogates, which only JSON has, were replaced.

        Raises BadRow for a JSON line without a text.
        """
        if self.kind == "text":
            return raw.replace(b"\r\n", b"\n"), 0
        key = self.form.text_key
        try:
            text = json.loads(raw)[key]
        except (ValueError, RecursionError) as error:
            raise BadRow(f"not JSON ({error})") from None
        except (KeyError, TypeError, IndexError):
            raise BadRow(f"no key {key!r} in this row", "give --text-key, fix the row") from None
        if not isinstance(text, str):
            raise BadRow(f"the value of key {key!r} is not a string", "give --text-key, fix the row")
        try:
            return text.encode(), 0
        except UnicodeEncodeError:
            text, num_surrogates = _SURROGATE.subn("\ufffd", text)
            return text.encode(), num_surrogates

    def place(self, start: int) -> str:
        """'file, line n' of a byte of this input. Reads the file up to this byte again; of a pipe, 'pipe, byte n'."""
        if is_stream(self.path):
            return f"{self.path}, byte {start}"
        with opened(self.path, self.form.encoding) as stream:
            number = 1
            while start > 0 and (piece := stream.read(min(BLOCK_BYTES, start))):
                number += piece.count(b"\n")
                start -= len(piece)
        return f"{self.path}, line {number}"

    def _read(self, stream: InputStream) -> bytes:
        """About BLOCK_BYTES more bytes. Raises InputError if the first ones cannot be text."""
        piece = stream.read(BLOCK_BYTES)
        if self.size == 0 and len(piece) >= 1024:
            num_bad = valid_utf8(piece)[1] + piece.count(0)
            if num_bad > JUNK_SHARE * len(piece):
                raise InputError(
                    f"{self.path} is not {self.form.encoding.upper()} text: {num_bad:,} of its first {len(piece):,} "
                    "bytes are invalid or NUL; leave the file out, or name its encoding with --encoding (Parquet, "
                    "Arrow and compressed files must have their usual ending: .parquet, .arrow, .gz, .zst, ...)"
                )
        self.size += len(piece)
        self.bytes_read = stream.bytes_read
        return piece

    def _slices(self, stream: InputStream, base: int, first: int, stop: int | None) -> Iterator[Piece]:
        """The documents that start in [first, stop): the text between two separators. stop None: no limit.

        A buffer holds the bytes that were read and are not yet given out.
        """
        lines = self.kind == "text" and self.form.documents == "line"
        separator = _SEPARATORS["line" if self.kind == "jsonl" else self.form.documents]
        begin = self._before(stream, first)  # place of buffer[0]: inside an earlier document, or 0
        buffer, scan = bytearray(), 0  # no separator starts before buffer[scan]
        self.size = begin
        while True:
            piece = self._read(stream)
            unterminated = not piece and buffer and not buffer.endswith(b"\n")
            buffer += piece or b"\n\n"
            document_start = 0  # in the buffer; of the next document
            if lines and piece and begin >= first:
                whole_lines = bytes(buffer[: buffer.rfind(b"\n") + 1])
                if _is_regular(whole_lines):
                    yield from self._by_unit(base, begin, whole_lines, stop)
                    document_start = len(whole_lines)
            for match in separator.finditer(buffer, max(scan, document_start)):
                # There can be blank lines only before the first document.
                blank = _BLANK_LINES.match(buffer, document_start)
                document_start = blank.end() if blank else document_start
                end = match.start()
                if document_start < end:
                    if stop is not None and begin + document_start >= stop:
                        return
                    last = unterminated and match.end() == len(buffer) and end + 2 == len(buffer)
                    raw = bytes(buffer[document_start:end])
                    if begin + document_start >= first:
                        yield begin + document_start, raw if last else raw.removesuffix(b"\r"), None
                document_start = max(document_start, match.end())
            if not piece or (stop is not None and begin + document_start >= stop):
                return
            del buffer[:document_start]
            begin += document_start
            self._require_short(len(buffer), begin)
            scan = max(0, buffer.rfind(b"\n"))
            if stop is not None and begin < first and begin + scan >= stop:
                start = begin + len(buffer) - len(buffer.lstrip(b" \t\r\n"))
                if start < first:
                    return  # a document that started before `first` ends after `stop`

    def _require_short(self, size: int, start: int) -> None:
        if size > LONGEST_DOCUMENT:
            raise InputError(
                f"{self.path}: the document at byte {start} is longer than {LONGEST_DOCUMENT >> 20:,} MiB; choose what "
                "ends a document with --documents, or split the document"
            )

    def _by_unit(self, base: int, begin: int, lines: bytes, stop: int | None) -> Iterator[Piece]:
        """Whole lines that begin at byte `begin` of the input, cut where a new unit begins."""
        starts = np.append(0, np.flatnonzero(np.frombuffer(lines, np.uint8) == ord("\n")) + 1)
        if stop is not None:
            starts = starts[: np.searchsorted(starts[:-1], stop - begin) + 1]
        units = (base + begin + starts[:-1]) // self.form.shard_size
        cuts = [0, *(np.flatnonzero(np.diff(units)) + 1).tolist(), units.size]
        for a, b in pairwise(cuts):
            if a < b:
                unit_start, unit_stop = int(starts[a]), int(starts[b])
                yield begin + unit_start, lines[unit_start:unit_stop], starts[a : b + 1] - unit_start

    def _before(self, stream: InputStream, place: int) -> int:
        """Moves the stream to the last byte before `place` that is not white space, or to byte 0. Returns where."""
        stop = place
        while stop > 0:
            start = max(0, stop - BLOCK_BYTES)
            stream.seek(start)
            length = len(stream.read(stop - start).rstrip(b" \t\r\n"))
            if length:
                stop = start + length
                break
            stop = start
        if place > 0:
            stream.seek(max(0, stop - 1))
        return max(0, stop - 1)


def _is_regular(lines: bytes) -> bool:
    """Whether every line is a document without any change: valid, not blank, without carriage returns."""
    if not lines or lines[0] in b" \t\n" or any(odd in lines for odd in (b"\r", b"\n\n", b"\n ", b"\n\t")):
        return False
    try:
        lines.decode()
    except UnicodeDecodeError:
        return False
    return True
