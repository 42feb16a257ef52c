"""A Parquet, Arrow, CSV or TSV file → its documents: the rows of one column of strings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import InputError
from bertdata.sources import documents
from bertdata.sources.delimited import SEPARATORS, texts_of_column
from bertdata.sources.documents import TextFormat
from bertdata.sources.inputs import Input
from bertdata.sources.streams import opened
from bertdata.sources.texts import BadRow, Decoded, Documents, offsets_of

TABLE_KINDS = ("parquet", "arrow", *SEPARATORS)
_MOST_ROWS = 1 << 10  # of a Parquet file that are decoded at a time
_BUFFER_BYTES = 1 << 20  # of a column of Parquet that are read at a time


class Rows(NamedTuple):
    """Some rows of one unit."""

    column: Any  # pyarrow.LargeBinaryArray
    first: int  # number of the first row, from 1
    reasons: Mapping[int, BadRow] = {}  # number of a row → why its text is null

    @property
    def num_bytes(self) -> int:
        """Bytes of the texts with one more for each."""
        offsets = offsets_of(self.column)
        return int(offsets[-1] - offsets[0]) + len(self.column)


class TableFile:
    """One input of rows. Its range of bytes is that of the texts, each with one byte more."""

    def __init__(self, file: Input, kind: str, form: TextFormat) -> None:
        """kind: one of TABLE_KINDS."""
        self.file, self.kind, self.form = file, kind, form
        self.size = 0  # of the inputs after this one in a range; nothing comes after a table
        self.bytes_read = 0  # of the file on disk so far

    def documents(self, base: int, is_wanted: Callable[[int], bool]) -> Iterator[tuple[int, Rows]]:
        """The rows of the units that are wanted, each with the number of its unit in this input."""
        with readable(self.file, self.kind):
            yield from (self._of_groups if self.kind == "parquet" else self._of_batches)(is_wanted)

    def at(self, rows: Sequence[int]) -> Iterator[Documents]:
        """The rows with some numbers, one at a time, in the order of the input. Reads no other row group of Parquet.

        A number that no row has, or one without a text, is left out.
        """
        wanted = np.unique(rows)
        with readable(self.file, self.kind):
            for first, column in self._columns_with(wanted):
                for row in wanted[(wanted >= first) & (wanted < first + len(column))].tolist():
                    yield self.decoded(Rows(_binary(column.slice(row - first, 1)), row)).documents

    def _columns_with(self, wanted: NDArray[np.int64]) -> Iterator[tuple[int, Any]]:
        """Pieces of the text's column that hold at least the wanted rows, with the number of the first row of each."""
        first = 1
        if self.kind != "parquet":
            for column, _ in self._batches():
                yield first, column
                first += len(column)
            return
        with self._parquet() as table:
            _check_column(self.file, table.schema_arrow, self.form.text_key)
            for group in range(table.num_row_groups):
                stop = first + table.metadata.row_group(group).num_rows
                if ((wanted >= first) & (wanted < stop)).any():
                    for column in self._columns_of(table, group):
                        yield first, column
                        first += len(column)
                first = stop

    def decoded(self, piece: Rows) -> Decoded:
        """The documents of a piece that `documents` gave."""
        column, rows = piece.column, np.arange(piece.first, piece.first + len(piece.column))
        bad = []
        if column.null_count:
            is_null = column.is_null().to_numpy(zero_copy_only=False)
            bad = [(row, piece.reasons.get(row) or BadRow("the text is null")) for row in rows[is_null].tolist()]
            column, rows = column.drop_null(), rows[~is_null]
        return Decoded(Documents.of_column(column, rows).repaired(), bad)

    def place(self, row: int) -> str:
        """'file, row n'."""
        return f"{self.file}, row {row}"

    invalid_place = place

    def _of_groups(self, is_wanted: Callable[[int], bool]) -> Iterator[tuple[int, Rows]]:
        """Rows of Parquet. A unit has complete row groups; those of others are not read."""
        size, row = self.file.size or 0, 0
        with self._parquet() as table:
            meta = table.metadata
            units = enumerate(_group_units(meta, self.form))
            for unit, numbered in groupby(units, key=lambda pair: pair[1]):
                groups = [number for number, _ in numbered]
                stop = row + sum(meta.row_group(number).num_rows for number in groups)
                for group in groups if is_wanted(unit) else ():
                    for column in self._columns_of(table, group):
                        self.bytes_read = size * (row + len(column)) // max(1, meta.num_rows)
                        for rows in _cut(_binary(column), row + 1):
                            yield unit, rows
                        row += len(column)
                row, self.bytes_read = stop, size * stop // max(1, meta.num_rows)

    def _parquet(self) -> Any:
        """Opens a Parquet file. Without these options pyarrow holds a complete row group of the column in memory.

        Texts stay in dictionaries until `_decoded`: a file of some hundred bytes can have one long text in each of its
        rows.
        """
        import pyarrow.parquet as pq

        options = {"pre_buffer": False, "buffer_size": _BUFFER_BYTES, "read_dictionary": [self.form.text_key]}
        return pq.ParquetFile(_for_pyarrow(self.file), **options)

    def _columns_of(self, table: Any, group: int) -> Iterator[Any]:
        """The text's column of a row group in pieces of a block at most, more or less."""
        meta, key = table.metadata.row_group(group), self.form.text_key
        size = meta.column(_leaf(table.metadata, key)).total_uncompressed_size
        rows = documents.BLOCK_BYTES * meta.num_rows // max(1, size)
        for batch in table.iter_batches(min(max(rows, 1), _MOST_ROWS), row_groups=[group], columns=[key]):
            yield from _decoded(_text_column(batch, key))

    def _of_batches(self, is_wanted: Callable[[int], bool]) -> Iterator[tuple[int, Rows]]:
        """Rows of any other table. A row belongs to the unit in which its text begins."""
        row, offset = 0, 0
        for column, reasons in ((column, why) for batch, why in self._batches() for column in _decoded(batch)):
            lengths = np.diff(offsets_of(column))
            lengths[column.is_null().to_numpy(zero_copy_only=False)] = 0
            ends = offset + np.cumsum(lengths + 1)
            units = (ends - lengths - 1) // self.form.shard_size
            cuts = [0, *(np.flatnonzero(np.diff(units)) + 1).tolist(), units.size]
            for first, stop in pairwise(cuts):
                if first < stop and is_wanted(unit := int(units[first])):
                    for rows in _cut(column.slice(first, stop - first), row + first + 1, reasons):
                        yield unit, rows
            row, offset = row + len(column), int(ends[-1]) if ends.size else offset

    def _batches(self) -> Iterator[tuple[Any, Mapping[int, BadRow]]]:
        """Pieces of the text's column, and the reasons for nulls in them: of Arrow the record batches."""
        import pyarrow as pa

        key = self.form.text_key
        if self.kind in SEPARATORS:
            with opened(self.file, self.form.encoding) as stream:
                for texts, reasons in texts_of_column(self.file, stream, self.kind, self.form):
                    self.bytes_read = stream.bytes_read
                    yield pa.array(texts, pa.large_binary()), reasons
            return
        with opened(self.file) as stream:
            if stream.is_seekable and stream.read(6) == b"ARROW1":
                stream.seek(0)
                with pa.ipc.open_file(stream.file) as reader:
                    _check_column(self.file, reader.schema, key)
                    for number in range(reader.num_record_batches):
                        column = _text_column(reader.get_batch(number), key)
                        self.bytes_read = stream.bytes_read
                        yield column, {}
                return
            if stream.is_seekable:
                stream.seek(0)
            with pa.ipc.open_stream(stream.file) as reader:
                _check_column(self.file, reader.schema, key)
                for batch in reader:
                    self.bytes_read = stream.bytes_read
                    yield _text_column(batch, key), {}


def group_units(file: Input, form: TextFormat) -> list[int]:
    """The unit of each row group of a Parquet file, from its footer.

    Raises InputError if the file cannot be read, or has no column of strings for the text.
    """
    import pyarrow.parquet as pq

    if file.is_stream:
        sentence = f"{file} is a pipe, and Parquet cannot be read from one; write it to a file first"
        raise InputError(sentence, "read-once", option="inputs", given=file.name)
    if file.compression:
        sentence = f"{file} is compressed, and Parquet can only be read from a plain file; decompress it first"
        raise InputError(sentence, "unsupported", option="inputs", given=file.name)
    with readable(file, "parquet"):
        meta = pq.read_metadata(_for_pyarrow(file))
        _check_column(file, meta.schema.to_arrow_schema(), form.text_key)
        return _group_units(meta, form)


def _group_units(meta: Any, form: TextFormat) -> list[int]:
    """A group begins a unit where the bytes of the text's column before it pass a multiple of the size of a unit."""
    passed, done, column = list[int](), 0, _leaf(meta, form.text_key)
    for number in range(meta.num_row_groups):
        passed.append(done // form.shard_size)
        done += meta.row_group(number).column(column).total_uncompressed_size
    return [0, *np.cumsum(np.diff(passed) > 0).tolist()][: len(passed)]


def _leaf(meta: Any, key: str) -> int:
    """The number of the text's column in a row group."""
    fits = [each for each in range(meta.num_columns) if meta.schema.column(each).path == key]
    return next((each for each in fits if meta.schema.column(each).name == key), fits[0])


def _for_pyarrow(file: Input) -> Any:
    """A path, which pyarrow reads without Python, or a file object."""
    return file.open() if file.remote else file.name


def _text_column(batch: Any, key: str) -> Any:
    """The column with this name, or, if there is none, a field of a column of structs: "a.b" is field b of column a."""
    if key in batch.schema.names:
        return batch.column(key)
    from pyarrow import compute  # takes 0.03 s

    root, *names = key.split(".")
    return compute.struct_field(batch.column(root), names)


def _field(schema: Any, key: str) -> Any:
    """The field of `_text_column`, or None."""
    import pyarrow as pa

    if key in schema.names:
        return schema.field(key)
    fields, field = schema, None
    for name in key.split("."):
        names = [each.name for each in fields]
        if name not in names:
            return None
        field = fields[names.index(name)]
        fields = field.type if pa.types.is_struct(field.type) else ()
    return field


def _check_column(file: Input, schema: Any, key: str) -> None:
    """Raises InputError if there is no column of strings with this name."""
    import pyarrow as pa

    field = _field(schema, key)
    if field is None:
        columns = ", ".join(schema.names)
        sentence = f"{file} has no column {key!r}, only {columns}; name the column with --text-key"
        raise InputError(sentence, "no-column", option="text_key", given=key)
    kind = field.type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        sentence = f"{file}: column {key!r} is {kind}, not a string; name another with --text-key"
        raise InputError(sentence, "wrong-column-type", option="text_key", given=key)


@contextmanager
def readable(file: Input, kind: str) -> Iterator[None]:
    """Turns what pyarrow says of a damaged file into an InputError."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0]
        sentence = f"{file} is not readable {kind.capitalize()}: {reason}; write it again"
        raise InputError(sentence, "not-of-format", option="inputs", given=file.name) from None


def _binary(column: Any) -> Any:
    """A column of strings as a pyarrow.LargeBinaryArray. Raises pyarrow.ArrowInvalid if its offsets lie outside it."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = pa.DictionaryArray.from_arrays(column.indices, _binary(column.dictionary)).dictionary_decode()
    elif pa.types.is_string_view(column.type):
        column = column.cast(pa.binary_view())
        column.validate(full=True)
    column = column.cast(pa.large_binary())
    column.validate(full=True)  # a file may say anything, and what is UTF-8 is judged later
    return column


def _decoded(column: Any) -> Iterator[Any]:
    """A column of strings, of which a dictionary is decoded a block or a row at a time, as pyarrow.LargeBinaryArrays.

    Raises pyarrow.ArrowInvalid as `_binary` does, and for an index outside of the dictionary.
    """
    import pyarrow as pa

    if not pa.types.is_dictionary(column.type):
        yield _binary(column)
        return
    texts, indices = _binary(column.dictionary), column.indices.drop_null().to_numpy()
    if indices.size and not 0 <= indices.min() <= indices.max() < len(texts):
        raise pa.ArrowInvalid("an index lies outside of the dictionary")
    lengths = np.zeros(len(column), np.int64)
    lengths[column.is_valid().to_numpy(zero_copy_only=False)] = np.diff(offsets_of(texts))[indices]
    ends, row = np.cumsum(lengths), 0
    while row < len(column):
        stop = int(np.searchsorted(ends, ends[row] - lengths[row] + documents.BLOCK_BYTES, side="right"))
        stop = max(row + 1, stop)
        yield texts.take(column.indices[row:stop])
        row = stop


def _cut(column: Any, first: int, reasons: Mapping[int, BadRow] = {}) -> Iterator[Rows]:
    """Pieces of about a block. first: number of the first row. reasons: those of Rows."""
    offsets, row = offsets_of(column), 0
    while row < len(column):
        stop = int(np.searchsorted(offsets, offsets[row] + documents.BLOCK_BYTES, side="right")) - 1
        stop = min(max(stop, row + 1), len(column))
        yield Rows(column.slice(row, stop - row), first + row, reasons)
        row = stop
