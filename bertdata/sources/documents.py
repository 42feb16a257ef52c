"""One input → its documents: what lies between separators of text, lines of JSON, rows of Parquet and Arrow."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.choices import DOCUMENT_ENDS, INPUT_FORMATS, ON_ERROR
from bertdata.errors import InputError, UsageError
from bertdata.sources.find import is_compressed, is_stream, kind_of
from bertdata.sources.streams import InputStream, opened

BLOCK_BYTES = 1 << 20
LONGEST_DOCUMENT = 1 << 30  # bytes; more is a wrong --documents, or a file that unpacks to no end
JUNK_SHARE = 0.3  # of a file's first block invalid or NUL: it is no text
_BLANK_LINES = re.compile(rb"(?:[ \t\r]*\n)+")
_SEPARATORS = {"blank": re.compile(rb"\n(?:[ \t\r]*\n)+"), "line": re.compile(rb"\n(?:[ \t\r]*\n)*")}
_REPLACEMENT = "\ufffd".encode()
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """How documents are found in the inputs."""

    documents: str = "blank"  # what ends one: a "blank" line, every "line", or the end of the "file"
    kind: str | None = None  # of every input, one of INPUT_FORMATS; None: as each one's ending tells
    text_key: str = "text"  # member or column that holds the text in JSON lines, Parquet and Arrow
    strict: bool = False  # refuse invalid UTF-8 instead of replacing it
    on_error: str = "fail"  # or "skip": what a row without text in its place does
    shard_size: int = 1 << 30  # bytes of a unit
    max_documents: int | None = None

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


class BadRow(Exception):
    """A row of a container that holds no text where it should."""


def valid_utf8(raw: bytes | None) -> tuple[bytes, int, int]:
    """raw as valid UTF-8, how many replacements that took, and where the first one was needed."""
    if raw is None:
        raise BadRow("the text is null")
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        fixed = raw.decode("utf-8", "replace").encode()
        return fixed, fixed.count(_REPLACEMENT) - raw.count(_REPLACEMENT), error.start
    return raw, 0, -1


_Found = tuple[int, bytes | None, NDArray[np.int64] | None]
"""Place of the first byte, raw bytes, and None for a document; or, for whole lines, where in the bytes each starts."""


class Source:
    """One input: its documents as raw bytes with their places, then their text."""

    def __init__(self, path: Path, form: TextFormat) -> None:
        self.path, self.form = path, form
        self.size = 0  # decompressed bytes so far; all of them in the end
        self.bytes_read = 0  # on disk so far
        self.kind = form.kind or kind_of(path)
        self._row = 0

    def documents(self, base: int, wanted: Callable[[int], bool]) -> Iterator[_Found]:
        """The documents of wanted units, this input being at `base` of all."""
        size = self.form.shard_size
        if self.kind in ("parquet", "arrow"):
            for start, value in self._rows():
                if wanted((base + start) // size):
                    yield start, value, None
            return
        with opened(self.path) as stream:
            if self.kind == "text" and self.form.documents == "file":
                buffer = bytearray()
                while piece := self._read(stream):
                    buffer += piece
                    self._require_short(len(buffer), 0)
                raw = bytes(buffer)
                if raw.strip(b" \t\r\n") and wanted(base // size):
                    yield 0, raw.removesuffix(b"\n").removesuffix(b"\r") if raw.endswith(b"\n") else raw, None
                return
            if not stream.is_seekable:
                for found in self._slices(stream, base, 0, None):
                    if wanted((base + found[0]) // size):
                        yield found
                return
            total, first = self.path.stat().st_size, base // size
            last = (base + total - 1) // size
            while first <= last:
                stop = first
                while stop <= last and wanted(stop):
                    stop += 1
                if first < stop:
                    yield from self._slices(stream, base, max(0, first * size - base), stop * size - base)
                first = max(stop, first + 1)
            self.size, self.bytes_read = total, total

    def text(self, raw: bytes) -> tuple[bytes, int]:
        """The text of a document from its raw bytes, and how many lone surrogates (only JSON can spell them) it had."""
        if self.kind == "text":
            return raw.replace(b"\r\n", b"\n"), 0
        if self.kind != "jsonl":
            return raw, 0
        key = self.form.text_key
        try:
            text = json.loads(raw)[key]
        except (ValueError, RecursionError) as error:
            raise BadRow(f"not JSON ({error})") from None
        except (KeyError, TypeError, IndexError):
            raise BadRow(f"no member {key!r}; name the text's with --text-key") from None
        if not isinstance(text, str):
            raise BadRow(f"member {key!r} is not a string")
        try:
            return text.encode(), 0
        except UnicodeEncodeError:
            text, num_surrogates = _SURROGATE.subn("\ufffd", text)
            return text.encode(), num_surrogates

    def place(self, start: int) -> str:
        """'file, line n' of a byte of this input, which is read again for it; 'file, row n' of the current row."""
        if self.kind in ("parquet", "arrow"):
            return f"{self.path}, row {self._row}"
        if is_stream(self.path):
            return f"{self.path}, byte {start}"
        with opened(self.path) as stream:
            number = 1
            while start > 0 and (piece := stream.read(min(BLOCK_BYTES, start))):
                number += piece.count(b"\n")
                start -= len(piece)
        return f"{self.path}, line {number}"

    def _read(self, stream: InputStream) -> bytes:
        piece = stream.read(BLOCK_BYTES)
        if self.size == 0 and len(piece) >= 1024:
            num_bad = valid_utf8(piece)[1] + piece.count(0)
            if num_bad > JUNK_SHARE * len(piece):
                raise InputError(
                    f"{self.path} is not UTF-8 text: {num_bad:,} of its first {len(piece):,} bytes are invalid or NUL; "
                    "give UTF-8 text (a file's ending tells what else it is: .jsonl, .parquet, .arrow, .gz, .zst ...)"
                )
        self.size += len(piece)
        self.bytes_read = stream.bytes_read
        return piece

    def _slices(self, stream: InputStream, base: int, first: int, stop: int | None) -> Iterator[_Found]:
        """Documents as what lies between separators, if they start in [first, stop).

        The buffer holds what is not given out yet.
        """
        lines = self.kind == "text" and self.form.documents == "line"
        separator = _SEPARATORS["line" if self.kind == "jsonl" else self.form.documents]
        begin = self._before(stream, first)  # place of buffer[0]: within a document that started earlier, or 0
        buffer, scan = bytearray(), 0  # scan: no separator starts before it
        self.size = begin
        while True:
            piece = self._read(stream)
            unterminated = not piece and buffer and not buffer.endswith(b"\n")
            buffer += piece or b"\n\n"
            at = 0
            if lines and piece and begin >= first:
                whole = bytes(buffer[: buffer.rfind(b"\n") + 1])
                if _is_regular(whole):
                    yield from self._by_unit(base, begin, whole, stop)
                    at = len(whole)
            for match in separator.finditer(buffer, max(scan, at)):
                blank = _BLANK_LINES.match(buffer, at)  # only before the first document can there be any
                at = blank.end() if blank else at
                end = match.start()
                if at < end:
                    if stop is not None and begin + at >= stop:
                        return
                    last = unterminated and match.end() == len(buffer) and end + 2 == len(buffer)
                    raw = bytes(buffer[at:end])
                    if begin + at >= first:
                        yield begin + at, raw if last else raw.removesuffix(b"\r"), None
                at = max(at, match.end())
            if not piece or (stop is not None and begin + at >= stop):
                return
            del buffer[:at]
            begin += at
            self._require_short(len(buffer), begin)
            scan = max(0, buffer.rfind(b"\n"))
            if stop is not None and begin < first and begin + scan >= stop:
                start = begin + len(buffer) - len(buffer.lstrip(b" \t\r\n"))
                if start < first:
                    return  # one document that started earlier goes on beyond

    def _require_short(self, size: int, start: int) -> None:
        if size > LONGEST_DOCUMENT:
            raise InputError(
                f"{self.path}: the document at byte {start} has more than {LONGEST_DOCUMENT >> 20:,} MiB; say "
                "what ends one with --documents, or cut it"
            )

    def _by_unit(self, base: int, begin: int, lines: bytes, stop: int | None) -> Iterator[_Found]:
        starts = np.append(0, np.flatnonzero(np.frombuffer(lines, np.uint8) == ord("\n")) + 1)
        if stop is not None:
            starts = starts[: np.searchsorted(starts[:-1], stop - begin) + 1]
        units = (base + begin + starts[:-1]) // self.form.shard_size
        cuts = [0, *(np.flatnonzero(np.diff(units)) + 1).tolist(), units.size]
        for a, b in pairwise(cuts):
            if a < b:
                at, end = int(starts[a]), int(starts[b])
                yield begin + at, lines[at:end], starts[a : b + 1] - at

    def _before(self, stream: InputStream, place: int) -> int:
        """Moves the stream to the last byte before `place` that is no blank, or to the start."""
        stop = place
        while stop > 0:
            start = max(0, stop - BLOCK_BYTES)
            stream.seek(start)
            found = len(stream.read(stop - start).rstrip(b" \t\r\n"))
            if found:
                stop = start + found
                break
            stop = start
        if place > 0:
            stream.seek(max(0, stop - 1))
        return max(0, stop - 1)

    def _rows(self) -> Iterator[tuple[int, bytes | None]]:
        """The values of the text's column."""
        import pyarrow as pa

        for batch in self._batches():
            column = batch.column(0)
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            for value in column.cast(pa.large_binary()).to_pylist():
                self._row += 1
                yield self.size, value
                self.size += len(value or b"") + 1

    def _batches(self) -> Iterator[Any]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        key = self.form.text_key
        try:
            if self.kind == "parquet":
                if is_compressed(self.path) or is_stream(self.path):
                    raise InputError(f"{self.path}: Parquet is read from a file as it is; write it to one first")
                table, disk = pq.ParquetFile(self.path), self.path.stat().st_size
                self._check_column(table.schema_arrow)
                for batch in table.iter_batches(batch_size=1024, columns=[key]):
                    yield batch
                    self.bytes_read = disk * self._row // table.metadata.num_rows
                return
            with opened(self.path) as stream:
                if stream.is_seekable and stream.read(6) == b"ARROW1":
                    stream.seek(0)
                    with pa.ipc.open_file(stream.file) as reader:
                        self._check_column(reader.schema)
                        for number in range(reader.num_record_batches):
                            yield reader.get_batch(number).select([key])
                            self.bytes_read = stream.bytes_read
                    return
                if stream.is_seekable:
                    stream.seek(0)
                with pa.ipc.open_stream(stream.file) as reader:
                    self._check_column(reader.schema)
                    for batch in reader:
                        yield batch.select([key])
                        self.bytes_read = stream.bytes_read
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            reason = str(error).partition("\n")[0]
            raise InputError(f"{self.path} is not readable {self.kind.capitalize()}: {reason}") from None

    def _check_column(self, schema: Any) -> None:
        import pyarrow as pa

        key = self.form.text_key
        if key not in schema.names:
            columns = ", ".join(schema.names)
            raise InputError(f"{self.path} has no column {key!r}, only {columns}; name one with --text-key")
        kind = schema.field(key).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise InputError(f"{self.path}: column {key!r} is {kind}, not a string; name another with --text-key")


def _is_regular(lines: bytes) -> bool:
    """Whether every line is a document as it stands: valid, none blank, no carriage returns."""
    if not lines or lines[0] in b" \t\n" or any(odd in lines for odd in (b"\r", b"\n\n", b"\n ", b"\n\t")):
        return False
    try:
        lines.decode()
    except UnicodeDecodeError:
        return False
    return True
