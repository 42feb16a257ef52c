"""A Parquet, Arrow, CSV or TSV file → its documents: the rows of one column of strings, or of bytes in UTF-8."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from bertdata.errors import InputError, refused
from bertdata.options import TextFormat
from bertdata.sources import formats
from bertdata.sources.blocks import Block, Source, runs_of
from bertdata.sources.documents import BadRow, Documents, Skipped, offsets_of
from bertdata.sources.formats import require_text, skipped, without_column
from bertdata.sources.inputs import Input
from bertdata.sources.streams import CHUNK, UTF_8, InputStream, opened

SEPARATORS = {"csv": ",", "tsv": "\t"}
TABLE_KINDS = ("parquet", "arrow", *SEPARATORS)
_MOST_ROWS = 1 << 10  # rows of a Parquet file decoded at a time
_BUFFER_BYTES = 1 << 20  # bytes of a Parquet column read at a time
_DECODED_BYTES = 1 << 24  # most bytes of Parquet texts decoded together, unless a single row has more


class TableFile(Source):
    """One input of rows. Its range of bytes is the concatenation of its texts, each with one byte more."""

    def blocks(self, base: int, is_wanted: Callable[[int], bool]) -> Iterator[Block]:
        """Yield the rows of the requested units, some at a time. base: 0, because a table has its own range."""
        with readable(self.file, self.kind):
            yield from (self._of_parquet if self.kind == "parquet" else self._of_batches)(is_wanted)

    def decode(self, raw: _Rows) -> Documents:
        """Return the texts of rows, and the rows without one."""
        column, bad = raw.column, list[Skipped]()
        rows = np.arange(raw.first, raw.first + len(column))
        if column.null_count:
            is_null = column.is_null().to_numpy(zero_copy_only=False)
            otherwise = raw.reasons.get(0) or BadRow("the text is null")
            bad = [Skipped(0, row, raw.reasons.get(row, otherwise)) for row in rows[is_null].tolist()]
            column, rows = column.drop_null(), rows[~is_null]
        return replace(Documents.from_column(column, rows).repaired(), bad=bad)

    def place(self, start: int) -> str:
        """Return 'file, row n'."""
        return f"{self.file}, row {start}"

    def _of_parquet(self, is_wanted: Callable[[int], bool]) -> Iterator[Block]:
        """Yield rows of Parquet. A unit has complete row groups; row groups of other units are not read."""
        with open_parquet(self.file) as table:
            meta, why, first = table.metadata, _why_none(self.file, self.form, table.schema_arrow), 1
            for group, unit in enumerate(_group_units(meta, self.form, why)):
                row, stop = first, first + meta.row_group(group).num_rows
                if is_wanted(unit):
                    for column in _nulls(stop - first) if why else self._columns_of(table, group):
                        bytes_read = (self.file.size or 0) * (row - 1 + len(column)) // meta.num_rows
                        yield from self._cut(_Rows(column, row, {0: why} if why else {}), unit, bytes_read)
                        row += len(column)
                first = stop

    def _columns_of(self, table: Any, group: int) -> Iterator[Any]:
        """Yield the text column of a row group in pieces of about a block."""
        import pyarrow as pa

        meta, key = table.metadata.row_group(group), self.form.text_key
        size = meta.column(_leaf(table.metadata, key)).total_uncompressed_size
        planned = min(max(formats.BLOCK_BYTES * meta.num_rows // max(1, size), 1), _MOST_ROWS)
        rows, pieces, num_bytes = planned, list[Any](), 0
        if min(rows, meta.num_rows) > 1:
            rows = max(1, min(rows, _DECODED_BYTES // max(1, self._longest_repeated(table.metadata, group))))
        for batch in table.iter_batches(rows, row_groups=[group], columns=[key]):
            for column in self._texts(batch):
                pieces.append(column)
                num_bytes += column.nbytes
                if rows == planned or num_bytes >= formats.BLOCK_BYTES:
                    yield pa.concat_arrays(pieces) if len(pieces) > 1 else column
                    pieces, num_bytes = [], 0
        if pieces:
            yield pa.concat_arrays(pieces)

    def _longest_repeated(self, metadata: Any, group: int) -> int:
        """Return the bytes of the longest text in a row group's dictionary, which every row of a small file may repeat.

        Returns 0 if the first rows have no dictionary or cannot be read. Reads only one row: pyarrow adds every plain
        text to the dictionary, so later batches would hold all texts of the row group.
        """
        import pyarrow as pa

        key = self.form.text_key
        try:
            with open_parquet(self.file, metadata=metadata, read_dictionary=[key]) as table:
                batch = next(table.iter_batches(1, row_groups=[group], columns=[key]), None)
            column = pa.nulls(0, pa.string()) if batch is None else _text_column(batch, key)
            texts = _binary(column.dictionary if pa.types.is_dictionary(column.type) else column)
        except (pa.ArrowException, OSError):  # reading the rows themselves raises the error, if there is one
            return 0
        return int(np.diff(offsets_of(texts)).max(initial=0))

    def _of_batches(self, is_wanted: Callable[[int], bool]) -> Iterator[Block]:
        """Yield rows of any other table. A row belongs to the unit where its text begins."""
        row, offset = 1, 0
        for column, reasons, bytes_read in self._batches():
            lengths = np.diff(offsets_of(column))
            lengths[column.is_null().to_numpy(zero_copy_only=False)] = 0
            ends = offset + np.cumsum(lengths + 1)
            for unit, first, stop in runs_of((ends - lengths - 1) // self.form.shard_size):
                if is_wanted(unit):
                    rows = _Rows(column.slice(first, stop - first), row + first, reasons)
                    yield from self._cut(rows, unit, bytes_read)
            row, offset = row + len(column), int(ends[-1]) if ends.size else offset

    def _batches(self) -> Iterator[tuple[Any, Mapping[int, BadRow], int]]:
        """Yield texts as pyarrow.LargeBinaryArrays, with the reasons for their nulls and the bytes read so far."""
        import pyarrow as pa

        with opened(self.file, self.form.encoding if self.kind in SEPARATORS else UTF_8) as stream:
            if self.kind in SEPARATORS:
                for texts, reasons in self._texts_of_csv(stream):
                    yield pa.array(texts, pa.large_binary()), reasons, stream.bytes_read
                return
            why_none = partial(_why_none, self.file, self.form)
            for batch in record_batches(stream.file, why_none, is_seekable=stream.is_seekable):
                why = why_none(batch.schema)
                for column in _nulls(batch.num_rows) if why else self._texts(batch):
                    yield column, {0: why} if why else {}, stream.bytes_read

    def _texts(self, batch: Any) -> Iterator[Any]:
        """Yield the texts of a batch, in the form of `_decoded`. Raises InputError for bytes that cannot be text."""
        key = self.form.text_key
        column = _text_column(batch, key)
        for texts in _decoded(column):
            if "binary" in str(column.type):
                begin = int(offsets_of(texts)[0])
                data = np.frombuffer(texts.buffers()[2] or b"", np.uint8)
                if formats.num_not_text(data[begin : begin + formats.JUDGED_BYTES].tobytes()):
                    sentence = f"{self.file}: the bytes in column {key!r} are not UTF-8; name another with --text-key"
                    raise InputError(sentence, "wrong-column-type", option="text_key", given=key)
            yield texts

    def _cut(self, rows: _Rows, unit: int, bytes_read: int) -> Iterator[Block]:
        """Yield rows of a unit, about a block at a time. Raises InputError for a text that is too long."""
        offsets, row = offsets_of(rows.column), 0
        while row < len(rows.column):
            stop = int(np.searchsorted(offsets, offsets[row] + formats.BLOCK_BYTES, side="right")) - 1
            stop = min(max(stop, row + 1), len(rows.column))
            if offsets[stop] - offsets[row] > formats.LONGEST_DOCUMENT:
                what = f"the text is longer than {formats.LONGEST_DOCUMENT >> 20:,} MiB; split it"
                raise refused(self.file, "too-large", f", row {rows.first + row}: {what}")
            some = rows._replace(column=rows.column.slice(row, stop - row), first=rows.first + row)
            # 64: the reason why a row is skipped
            num_bytes = int(offsets[stop] - offsets[row]) + stop - row + 64 * some.column.null_count
            yield Block(unit, num_bytes, bytes_read, [(self, some)])
            row = stop

    def _texts_of_csv(self, stream: InputStream) -> Iterator[tuple[list[bytes | None], dict[int, BadRow]]]:
        """Yield the texts of the column, about a block at a time, with None for bad rows, and {number of row: reason}.

        Rows are counted from 1, without the header and blank lines. A text may be invalid UTF-8. Uses Python's csv,
        because pyarrow does not report an unclosed quoted field, which swallows the rest of the file. Set the longest
        field of the module csv. Raise InputError for bytes that cannot be text, a header without the column, and an
        unclosed quoted field.
        """
        csv.field_size_limit(formats.LONGEST_ROW)
        content = io.BufferedReader(stream.file, CHUNK)
        require_text(self.file, content.peek(), self.form.encoding)
        texts, reasons, size, number, left = list[bytes | None](), dict[int, BadRow](), 0, 0, 0
        header: list[str] = []
        column: int | BadRow = 0
        with io.TextIOWrapper(content, "utf-8-sig", "surrogateescape", newline="") as decoded:

            def lines() -> Iterator[str]:
                nonlocal left
                while line := decoded.readline(left + 1):
                    left -= len(line)
                    if left < 0:
                        raise csv.Error("field larger than field limit")  # like csv's message about a field
                    yield line

            rows = csv.reader(lines(), delimiter=SEPARATORS[self.kind], strict=True)
            while True:
                text, why, left = None, None, formats.LONGEST_ROW  # characters left for the row
                try:
                    if (row := next(rows, None)) is None:
                        break
                    if not row:
                        continue
                    if not header:
                        header, (column, is_header) = row, self._column_in(row)
                        if is_header:
                            continue
                    if isinstance(column, BadRow):
                        why = column
                    elif len(row) == len(header):
                        text = row[column].encode("utf-8", "surrogateescape")
                    else:
                        why = BadRow(f"the row has {len(row)} fields and the first line {len(header)}")
                except csv.Error as error:
                    is_row = header or _is_number(self.form.text_key)
                    self._require_end(f"row {number + 1}" if is_row else "header", str(error))
                    if not is_row:
                        break
                    why = BadRow(f"quotation marks are misplaced for CSV ({error})")
                number += 1
                texts.append(text)
                reasons |= {number: why} if why else {}
                size += len(text or b"") + 1
                if size >= formats.BLOCK_BYTES:
                    yield texts, reasons
                    texts, reasons, size = [], {}, 0
            if not header and not number:
                what = " has no header; name its columns in a first line, or give --format text"
                raise refused(self.file, "not-of-format", what)
            if texts:
                yield texts, reasons

    def _require_end(self, place: str, error: str) -> None:
        """Raise InputError for an error of csv after which it cannot continue."""
        if error == "unexpected end of data":
            what = f", {place}: a quotation mark opens a field, and is never closed; write the file as CSV again"
            raise refused(self.file, "not-of-format", what) from None
        if error.startswith("field larger"):
            most = f"{formats.LONGEST_ROW >> 20} Mi characters"
            long = f", {place} is longer than {most}; split it, or end its quotes"
            raise refused(self.file, "too-large", long) from None

    def _column_in(self, header: list[str]) -> tuple[int | BadRow, bool]:
        """Return the index of the text column, or the reason why there is none, and whether the first row is a header.

        The first row is not a header if the key is the number of a column and not all fields are numbers: a label in
        the first row may be a number. Raise InputError if there is no such column, unless bad rows are skipped.
        """
        key = self.form.text_key
        is_number = _is_number(key) and -len(header) <= int(key) < len(header)
        if is_number and not (key in header and all(name.isdecimal() for name in header if name)):
            return int(key), False
        if header.count(key) == 1:
            return header.index(key), True
        return without_column(self.file, self.form, header.count(key), header), True


class _Rows(NamedTuple):
    """Some rows of a table."""

    column: Any  # texts as a pyarrow.LargeBinaryArray, valid UTF-8 or not
    first: int  # number of the first row, from 1
    reasons: Mapping[int, BadRow]  # row → reason why its text is null; 0 → reason for all other rows


def _is_number(key: str) -> bool:
    """Return whether a key may be the number of a column in a file without a header."""
    return key.removeprefix("-").isdecimal() and len(key) < 10


def _nulls(num_rows: int) -> Iterator[Any]:
    """Yield columns of nulls with `num_rows` nulls in total."""
    import pyarrow as pa

    for first in range(0, num_rows, _MOST_ROWS):
        yield pa.nulls(min(_MOST_ROWS, num_rows - first), pa.large_binary())


def record_batches(file: Any, check: Callable[[Any], object], *, is_seekable: bool = True) -> Iterator[Any]:
    """Yield the record batches of an open Arrow file or stream. check: called with its schema."""
    import pyarrow as pa

    is_file = is_seekable and file.read(6) == b"ARROW1"
    if is_seekable:
        file.seek(0)
    with pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file) as reader:
        check(reader.schema)
        yield from map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader


def group_units(file: Input, form: TextFormat) -> list[int]:
    """Return the unit of each row group of a Parquet file, from its footer.

    Raises InputError if the file cannot be read, or has no column of strings for the text.
    """
    if file.is_stream:
        raise refused(file, "read-once", " is a pipe, from which Parquet cannot be read; write it to a file first")
    if file.compression:
        raise refused(file, "unsupported", " is compressed, and Parquet must not be; decompress it first")
    with readable(file, "parquet"), open_parquet(file) as table:
        return _group_units(table.metadata, form, _why_none(file, form, table.schema_arrow))


def _group_units(meta: Any, form: TextFormat, why: BadRow | None) -> list[int]:
    """Return the unit of each row group. A unit begins where the column's bytes pass a multiple of the unit size.

    why: the reason why there is no such column; then all groups are in one unit.
    """
    if why:
        return [0] * meta.num_row_groups
    passed, done, column = list[int](), 0, _leaf(meta, form.text_key)
    for number in range(meta.num_row_groups):
        passed.append(done // form.shard_size)
        done += meta.row_group(number).column(column).total_uncompressed_size
    return [0, *np.cumsum(np.diff(passed) > 0).tolist()][: len(passed)]


def _leaf(meta: Any, key: str) -> int:
    """Return the index of the text column in a row group."""
    fits = [each for each in range(meta.num_columns) if meta.schema.column(each).path == key]
    return next((each for each in fits if meta.schema.column(each).name == key), fits[0])


@contextmanager
def open_parquet(file: Input, **more: Any) -> Iterator[Any]:
    """Return a pyarrow.parquet.ParquetFile with options that avoid holding a complete row group in memory."""
    import pyarrow.parquet as pq

    with (
        file.open() if file.remote else open_by_pyarrow(file) as source,
        pq.ParquetFile(source, pre_buffer=False, buffer_size=_BUFFER_BYTES, **more) as table,
    ):
        yield table


def open_by_pyarrow(file: Input) -> Any:
    """Open a local file that pyarrow reads without Python. Its name may be invalid UTF-8."""
    import pyarrow as pa

    return pa.OSFile(os.fsencode(file.name))


def _text_column(batch: Any, key: str) -> Any:
    """Return the text column, the only column of this name."""
    _, (root, *fields) = _named(batch.schema, key)[0]
    if not fields:
        return batch.column(root)
    from pyarrow import compute  # takes 0.03 s

    return compute.struct_field(batch.column(root), fields)


def _named(schema: Any, key: str) -> list[tuple[Any, list[int]]]:
    """Return the columns with this name, or else the struct fields with it: "a.b" is field b of column a.

    Returns the type of each, and its index path: the column, then nested fields.
    """
    import pyarrow as pa

    def fields_of(fields: Any, name: str) -> list[tuple[Any, list[int]]]:
        return [(field.type, [number]) for number, field in enumerate(fields) if field.name == name]

    root, *names = key.split(".")
    if names and (columns := fields_of(schema, key)):
        return columns
    found = fields_of(schema, root)
    for name in names:
        structs = [(kind, path) for kind, path in found if pa.types.is_struct(kind)]
        found = [(inner, path + number) for kind, path in structs for inner, number in fields_of(kind, name)]
    return found


def _why_none(file: Input, form: TextFormat, schema: Any) -> BadRow | None:
    """Return the reason why no row of a table can have a text. Raises InputError unless bad rows are skipped."""
    import pyarrow as pa

    key, found = form.text_key, _named(schema, form.text_key)
    if len(found) != 1:
        return without_column(file, form, len(found), schema.names)
    kind, types = found[0][0], pa.types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if str(kind).removeprefix("large_").removesuffix("_view") not in ("string", "binary", "null"):
        sentence = f"{file}: column {key!r} is {kind}, not a string; give a different --text-key, or --on-error skip"
        return skipped(form, InputError(sentence, "wrong-column-type", option="text_key", given=key))
    return None


@contextmanager
def readable(file: Input, kind: str) -> Iterator[None]:
    """Turn pyarrow's error for a damaged file into an InputError."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0]
        what = f" is not readable {kind.capitalize()}: {reason}; write it again"
        raise refused(file, "not-of-format", what) from None


def _binary(column: Any) -> Any:
    """Return a column of strings as a pyarrow.LargeBinaryArray. Raises pyarrow.ArrowInvalid for invalid offsets."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = pa.DictionaryArray.from_arrays(column.indices, _binary(column.dictionary)).dictionary_decode()
    elif pa.types.is_string_view(column.type) or pa.types.is_binary_view(column.type):
        column = column.cast(pa.binary_view())
        column.validate(full=True)
    column = column.cast(pa.large_binary())
    column.validate(full=True)  # a file may hold any bytes, and UTF-8 is checked later
    return column


def _decoded(column: Any) -> Iterator[Any]:
    """Yield a column of strings as pyarrow.LargeBinaryArrays. Decodes a dictionary by blocks or rows.

    Raises pyarrow.ArrowInvalid like `_binary`, and for an index outside the dictionary.
    """
    import pyarrow as pa

    if not pa.types.is_dictionary(column.type):
        yield _binary(column)
        return
    texts, indices = _binary(column.dictionary), column.indices.drop_null().to_numpy()
    if indices.size and not 0 <= indices.min() <= indices.max() < len(texts):
        raise pa.ArrowInvalid("an index lies outside of the dictionary")
    lengths = np.zeros(len(column), np.int64)
    lengths[column.indices.is_valid().to_numpy(zero_copy_only=False)] = np.diff(offsets_of(texts))[indices]
    ends, row = np.cumsum(lengths), 0
    while row < len(column):
        stop = int(np.searchsorted(ends, ends[row] - lengths[row] + formats.BLOCK_BYTES, side="right"))
        stop = max(row + 1, stop)
        yield texts.take(column.indices[row:stop])
        row = stop
