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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertdata.choices import DOCUMENT_ENDS, INPUT_FORMATS, ON_ERROR
from bertdata.errors import InputError, UsageError
from bertdata.sources.find import is_stream
from bertdata.sources.kernels import ROOM, Cuts, cut
from bertdata.sources.streams import UTF_8, InputStream, opened

BLOCK_BYTES = 1 << 21
LONGEST_DOCUMENT = 1 << 30  # bytes; a longer one comes from a wrong --documents, or from a file that unpacks endlessly
JUNK_SHARE = 0.3  # a file is not text if a larger share of its first _JUDGED bytes is invalid or NUL
_JUDGED = 1 << 20
_LONGEST_READ = 1 << 26  # bytes that are read at a time where a document is longer than a block
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


class Row(NamedTuple):
    """A row of JSON lines or of a table, or a file that is one document."""

    start: int  # place of the first byte in the input
    raw: bytes | None  # before `text` of its input takes the text out of it; None: null

    @property
    def num_bytes(self) -> int:
        return len(self.raw or b"")


class Documents(NamedTuple):
    """Documents of one unit of plain text. Document i is text[offsets[i] : offsets[i + 1] - 1]."""

    text: bytearray  # valid UTF-8, a newline after each document; then at least ROOM bytes
    offsets: NDArray[np.int64]  # [n + 1]
    starts: NDArray[np.int64]  # [n] place of the first byte in the input
    replaced: NDArray[np.int64]  # [n] how many invalid byte sequences became U+FFFD
    invalid: NDArray[np.int64]  # [n] place of the first of them in the input; -1: there is none

    @property
    def start(self) -> int:
        """Place of the first byte of the first document in the input."""
        return int(self.starts[0])

    @property
    def num_bytes(self) -> int:
        """Bytes of the documents with the newline after each."""
        return int(self.offsets[-1])

    def part(self, first: int, stop: int) -> Documents:
        """The documents first to stop - 1. Takes no copy if these are all."""
        if (first, stop) == (0, self.starts.size):
            return self
        offsets, chosen = self.offsets[first : stop + 1], slice(first, stop)
        text = self.text[offsets[0] : offsets[-1]] + bytes(ROOM)
        return Documents(text, offsets - offsets[0], self.starts[chosen], self.replaced[chosen], self.invalid[chosen])

    def repaired(self) -> Documents:
        """The same with U+FFFD for invalid bytes, counted in `replaced`."""
        bad = np.flatnonzero(self.invalid >= 0).tolist()
        if not bad:
            return self
        done, lengths, replaced = 0, np.diff(self.offsets), self.replaced.copy()
        pieces: list[bytes | bytearray] = []
        for number in bad:
            start, stop = int(self.offsets[number]), int(self.offsets[number + 1]) - 1
            fixed, replaced[number], _ = valid_utf8(bytes(self.text[start:stop]))
            pieces += [self.text[done:start], fixed]
            done, lengths[number] = stop, len(fixed) + 1
        text = bytearray().join([*pieces, self.text[done:]])
        return self._replace(text=text, offsets=np.append(0, np.cumsum(lengths)), replaced=replaced)


class TextFile:
    """One input of plain text or JSON lines."""

    def __init__(self, path: Path, kind: str, form: TextFormat) -> None:
        """kind: "text" or "jsonl"."""
        self.path, self.kind, self.form = path, kind, form
        self.size = 0  # decompressed bytes so far; the size of the input when all documents are read
        self.bytes_read = 0  # of the file on disk so far

    def documents(self, base: int, is_wanted: Callable[[int], bool]) -> Iterator[Row | Documents]:
        """The documents of the units that are wanted. base: place of this input in the range of all."""
        size = self.form.shard_size
        with opened(self.path, self.form.encoding) as stream:
            if self.kind == "text" and self.form.documents == "file":
                buffer = bytearray()
                chunk = np.empty(BLOCK_BYTES, np.uint8)
                while length := self._read(stream, chunk):
                    buffer += chunk[:length].data
                    self._require_short(len(buffer), 0)
                raw = bytes(buffer)
                if raw.strip(b" \t\r\n") and is_wanted(base // size):
                    yield Row(0, raw.removesuffix(b"\n").removesuffix(b"\r") if raw.endswith(b"\n") else raw)
                return
            if not stream.is_seekable:
                for found in self._found(stream, 0, None):
                    yield from self._pieces(found, base, is_wanted)
                return
            total, first = self.path.stat().st_size, base // size
            last = (base + total - 1) // size
            while first <= last:
                stop = first
                while stop <= last and is_wanted(stop):
                    stop += 1
                if first < stop:
                    for found in self._found(stream, max(0, first * size - base), stop * size - base):
                        yield from self._pieces(found, base, is_wanted)
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

    def _read(self, stream: InputStream, buffer: NDArray[np.uint8]) -> int:
        """Reads bytes into `buffer`; 0: there are no more. Raises InputError if the first ones cannot be text."""
        length = stream.readinto(buffer.data)
        if self.size == 0 and length >= 1024:
            piece = buffer[: min(length, _JUDGED)].tobytes()
            num_bad = valid_utf8(piece)[1] + piece.count(0)
            if num_bad > JUNK_SHARE * len(piece):
                raise InputError(
                    f"{self.path} is not {self.form.encoding.upper()} text: {num_bad:,} of its first {len(piece):,} "
                    "bytes are invalid or NUL; leave the file out, or name its encoding with --encoding (Parquet, "
                    "Arrow and compressed files must have their usual ending: .parquet, .arrow, .gz, .zst, ...)"
                )
        self.size += length
        self.bytes_read = stream.bytes_read
        return length

    def _found(self, stream: InputStream, first: int, stop: int | None) -> Iterator[Documents]:
        """The documents that start in [first, stop), before they are repaired. stop None: no limit."""
        by_line = self.kind == "jsonl" or self.form.documents == "line"
        begin = self._before(stream, first)  # place of buffer[0]: inside an earlier document, or 0
        self.size = begin
        filled, is_end = 0, False
        buffer = np.empty(0, np.uint8)  # its first `filled` bytes are read and not yet given out
        while not is_end:
            # A document that is not complete is looked at again with at least as many bytes more.
            room = filled + max(BLOCK_BYTES, min(filled, _LONGEST_READ))
            if buffer.size < room + ROOM:
                buffer = np.concatenate([buffer[:filled], np.empty(room + ROOM - filled, np.uint8)])
                offsets, starts, invalid, used = (np.empty(room // 2 + 3, np.int64) for _ in range(4))
            length = self._read(stream, buffer[filled:room])
            filled, is_end = filled + length, not length
            text = bytearray(filled + 1 + ROOM)
            cuts = Cuts(np.frombuffer(text, np.uint8), offsets, starts, invalid, used)
            count = cut(buffer, filled, begin, is_end, by_line, cuts)
            found = Documents(
                text, offsets[: count + 1].copy(), starts[:count].copy(), np.zeros(count, np.int64),
                invalid[:count].copy(),
            )  # fmt: skip
            last = count if stop is None else int(np.searchsorted(found.starts, stop))
            chosen = found.part(min(last, int(np.searchsorted(found.starts, first))), last)
            if chosen.starts.size:
                yield chosen
            done = int(used[0])
            begin, filled = begin + done, filled - done
            buffer[:filled] = buffer[done : done + filled]
            self._require_short(filled, begin)
            if stop is not None and begin >= stop:
                return
            if stop is not None and begin < first and (buffer[stop - begin : filled] == ord("\n")).any():
                return  # a document that started before `first` ends after `stop`

    def _require_short(self, size: int, start: int) -> None:
        if size > LONGEST_DOCUMENT:
            raise InputError(
                f"{self.path}: the document at byte {start} is longer than {LONGEST_DOCUMENT >> 20:,} MiB; choose what "
                "ends a document with --documents, or split the document"
            )

    def _pieces(self, found: Documents, base: int, is_wanted: Callable[[int], bool]) -> Iterator[Row | Documents]:
        """The documents of each unit that is wanted; of JSON lines, the lines."""
        units = (base + found.starts) // self.form.shard_size
        cuts = [0, *(np.flatnonzero(np.diff(units)) + 1).tolist(), units.size]
        for first, stop in pairwise(cuts):
            if not is_wanted(int(units[first])):
                continue
            documents = found.part(first, stop)
            if self.kind == "text":
                yield documents.repaired()
                continue
            offsets, lines = documents.offsets.tolist(), memoryview(documents.text)
            for start, a, b in zip(documents.starts.tolist(), offsets, offsets[1:], strict=False):
                yield Row(start, bytes(lines[a : b - 1]))

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
