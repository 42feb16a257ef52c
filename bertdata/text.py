"""Files → documents, in blocks of about 1 MiB, in bounded memory.

Nothing here knows a tokenizer. docs/format.md says what a line, a document and a unit are. JSON lines (`.jsonl`,
`.ndjson`) and Parquet (`.parquet`) are known by the file's ending, anything else is plain text; `.gz` may follow the
first two and plain text. Memory: the longest document and two blocks.
"""

from __future__ import annotations

import gzip
import json
import re
import stat
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import InputError, UsageError

BLOCK_BYTES = 1 << 20
JUNK_SHARE = 0.3  # of a file's first block invalid or NUL: it is no text
_BLANK_LINES = re.compile(rb"(?:[ \t\r]*\n)+")
_SEPARATORS = {"blank": re.compile(rb"\n(?:[ \t\r]*\n)+"), "line": re.compile(rb"\n(?:[ \t\r]*\n)*")}
_REPLACEMENT = "\ufffd".encode()
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Block:
    """Some documents of one unit. Document i is data[offsets[i] : offsets[i + 1] - 1]: each is followed by one \\n."""

    data: bytes  # valid UTF-8
    offsets: NDArray[np.int64]  # [num_documents + 1]
    unit: int
    replaced: NDArray[np.int64]  # [num_documents] invalid byte sequences that became U+FFFD
    first_replaced: tuple[int, int] | None  # number of the input, byte in it
    bytes_read: int  # of the input files up to here, as they lie on disk

    @property
    def num_documents(self) -> int:
        return self.offsets.size - 1


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """How documents are found in the inputs."""

    documents: str = "blank"  # what ends one: a "blank" line, every "line", or the end of the "file"
    text_key: str = "text"  # member or column that holds the text in JSON lines and Parquet
    strict: bool = False  # refuse invalid UTF-8 instead of replacing it
    shard_size: int = 1 << 30  # bytes of a unit
    max_documents: int | None = None

    def __post_init__(self) -> None:
        if self.documents not in ("blank", "line", "file"):
            raise UsageError(f"documents is {self.documents!r}; give 'blank', 'line' or 'file'")
        for name in ("shard_size", "max_documents"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}; give at least 1")


def check_inputs(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Path, size and modification time of each input. Raises InputError for what no build could read."""
    described = []
    for path in paths:
        try:
            status = path.stat()
            if stat.S_ISDIR(status.st_mode):
                raise InputError(f"{path} is a directory; name the text files in it, such as {path}/*.txt")
            if not stat.S_ISREG(status.st_mode):
                raise InputError(f"{path} is no ordinary file; inputs are read more than once, so write it to a file")
            open(path, "rb").close()
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        described.append({"path": str(path), "bytes": status.st_size, "modified_ns": status.st_mtime_ns})
    if not any(entry["bytes"] for entry in described):
        names = ", ".join(str(path) for path in paths)
        raise InputError(f"{names}: empty file, so there is no document to build from; give a file with text in it")
    return described


def read_blocks(paths: Sequence[Path], form: TextFormat) -> Iterator[Block]:
    """The documents of all inputs in order, each block within one unit and with at least one document.

    Raises InputError, naming file and byte or line, for input that cannot be read.
    """
    texts: list[bytes] = []
    replaced: list[int] = []
    unit = size = count = base = bytes_before = 0
    first_replaced: tuple[int, int] | None = None

    def block() -> Block:
        offsets = np.zeros(len(texts) + 1, np.int64)
        np.cumsum([len(text) + 1 for text in texts], out=offsets[1:])
        data = b"\n".join(texts) + b"\n"
        return Block(data, offsets, unit, np.array(replaced), first_replaced, bytes_before + source.bytes_read)

    for index, path in enumerate(paths):
        source = _Source(path, form)
        for start, raw in source.documents():
            if texts and (size >= BLOCK_BYTES or (base + start) // form.shard_size != unit):
                yield block()
                texts, size, replaced, first_replaced = [], 0, [], None
            unit = (base + start) // form.shard_size
            raw, num_bad, bad_at = _valid_utf8(raw)
            text, num_surrogates = source.text(raw, start)
            if num_bad or num_surrogates:
                num_bad, bad_at = num_bad + num_surrogates, max(bad_at, 0)
                if form.strict:
                    raise InputError(
                        f"{path}: byte {start + bad_at} is not valid UTF-8; mend the file, or build without --strict "
                        "to have such bytes replaced and counted"
                    )
                first_replaced = first_replaced or (index, start + bad_at)
            texts.append(text)
            replaced.append(num_bad)
            size += len(text) + 1
            count += 1
            if count == form.max_documents:
                yield block()
                return
        base += source.size
        bytes_before += source.bytes_read
    if texts:
        source.bytes_read = 0  # already in bytes_before
        yield block()


def _valid_utf8(raw: bytes) -> tuple[bytes, int, int]:
    """raw as valid UTF-8, how many replacements that took, and where the first one was needed."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        fixed = raw.decode("utf-8", "replace").encode()
        return fixed, fixed.count(_REPLACEMENT) - raw.count(_REPLACEMENT), error.start
    return raw, 0, -1


class _Source:
    """One input: its documents as raw bytes with their places, then their text."""

    def __init__(self, path: Path, form: TextFormat) -> None:
        self.path, self.form = path, form
        self.size = 0  # decompressed bytes so far
        self.bytes_read = 0  # on disk so far
        name = path.name.lower()
        self._gzip = name.endswith(".gz")
        suffix = Path(name.removesuffix(".gz")).suffix
        self._kind = {".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}.get(suffix, "text")

    def documents(self) -> Iterator[tuple[int, bytes]]:
        """(place of the first byte, raw bytes) of each document."""
        try:
            if self._kind == "parquet":
                yield from self._rows()
                return
            with open(self.path, "rb") as file:
                stream = gzip.GzipFile(fileobj=file) if self._gzip else file
                if self._kind == "text" and self.form.documents == "file":
                    yield from self._whole(stream, file)
                else:
                    yield from self._slices(stream, file)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise InputError(f"{self.path} is no whole gzip file: {error}; fetch it again") from None
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error.strerror or error}") from None

    def text(self, raw: bytes, start: int) -> tuple[bytes, int]:
        """The text of a document from its raw bytes, and how many lone surrogates (only JSON can spell them) it had."""
        if self._kind == "text":
            return raw.replace(b"\r\n", b"\n"), 0
        if self._kind == "parquet":
            return raw, 0
        key = self.form.text_key
        try:
            text = json.loads(raw)[key]
        except (ValueError, RecursionError) as error:
            raise InputError(f"{self._line(start)}: not JSON ({error})") from None
        except (KeyError, TypeError, IndexError):
            raise InputError(f"{self._line(start)}: no member {key!r}; name the text's with --text-key") from None
        if not isinstance(text, str):
            raise InputError(f"{self._line(start)}: member {key!r} is not a string")
        try:
            return text.encode(), 0
        except UnicodeEncodeError:
            text, num_surrogates = _SURROGATE.subn("\ufffd", text)
            return text.encode(), num_surrogates

    def _line(self, start: int) -> str:
        """'file, line n' of a place in this input; reads it again."""
        with open(self.path, "rb") as file:
            stream = gzip.GzipFile(fileobj=file) if self._gzip else file
            number = 1
            while start > 0 and (piece := stream.read(min(BLOCK_BYTES, start))):
                number += piece.count(b"\n")
                start -= len(piece)
        return f"{self.path}, line {number}"

    def _read(self, stream: IO[bytes] | gzip.GzipFile, file: IO[bytes]) -> bytes:
        piece = stream.read(BLOCK_BYTES)
        if self.size == 0 and len(piece) >= 1024:
            num_bad = _valid_utf8(piece)[1] + piece.count(0)
            if num_bad > JUNK_SHARE * len(piece):
                raise InputError(
                    f"{self.path} is not UTF-8 text: {num_bad:,} of its first {len(piece):,} bytes are invalid or NUL; "
                    "give UTF-8 text (a file's ending tells .gz, .jsonl and .parquet)"
                )
        self.size += len(piece)
        self.bytes_read = file.tell()
        return piece

    def _whole(self, stream: IO[bytes] | gzip.GzipFile, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
        raw = b"".join(iter(lambda: self._read(stream, file), b""))
        if raw.strip(b" \t\r\n"):
            yield 0, raw.removesuffix(b"\n").removesuffix(b"\r") if raw.endswith(b"\n") else raw

    def _slices(self, stream: IO[bytes] | gzip.GzipFile, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
        """Documents as what lies between separators. The buffer holds what is not given out yet."""
        separator = _SEPARATORS["line" if self._kind == "json" else self.form.documents]
        buffer, begin, scan = bytearray(), 0, 0  # begin: place of buffer[0]; scan: no separator starts before it
        while True:
            piece = self._read(stream, file)
            unterminated = not piece and buffer and not buffer.endswith(b"\n")
            buffer += piece or b"\n\n"
            at = 0
            for match in separator.finditer(buffer, scan):
                blank = _BLANK_LINES.match(buffer, at)  # only before the first document can there be any
                at = blank.end() if blank else at
                stop = match.start()
                if at < stop:
                    last = unterminated and match.end() == len(buffer) and stop + 2 == len(buffer)
                    raw = bytes(buffer[at:stop])
                    yield begin + at, raw if last else raw.removesuffix(b"\r")
                at = max(at, match.end())
            if not piece:
                return
            del buffer[:at]
            begin += at
            scan = max(0, buffer.rfind(b"\n"))

    def _rows(self) -> Iterator[tuple[int, bytes]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        key = self.form.text_key
        try:
            table = pq.ParquetFile(self.path)
            if key not in table.schema_arrow.names:
                columns = ", ".join(table.schema_arrow.names)
                raise InputError(f"{self.path} has no column {key!r}, only {columns}; name one with --text-key")
            if not (pa.types.is_string(kind := table.schema_arrow.field(key).type) or pa.types.is_large_string(kind)):
                raise InputError(f"{self.path}: column {key!r} is {kind}, not a string; name another with --text-key")
            row, disk = 1, self.path.stat().st_size
            for batch in table.iter_batches(batch_size=1024, columns=[key]):
                for value in batch.column(0).cast(pa.large_binary()).to_pylist():
                    if value is None:
                        raise InputError(f"{self.path}, row {row}: column {key!r} is null; remove such rows first")
                    yield self.size, value
                    self.size += len(value) + 1
                    row += 1
                self.bytes_read = disk * row // table.metadata.num_rows
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            reason = str(error).partition("\n")[0]
            raise InputError(f"{self.path} is not readable Parquet: {reason}") from None
