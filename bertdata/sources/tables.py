"""A Parquet or Arrow file → its documents: the rows of one column of strings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bertdata.errors import InputError
from bertdata.sources.documents import Row, TextFormat
from bertdata.sources.find import is_compressed, is_stream
from bertdata.sources.streams import opened

TABLE_KINDS = ("parquet", "arrow")
_ROWS = 1024  # of a Parquet file that are decoded at a time


class Table:
    """One input of rows. Its range of bytes is that of the texts, each with one byte more."""

    def __init__(self, path: Path, kind: str, form: TextFormat) -> None:
        """kind: one of TABLE_KINDS."""
        self.path, self.kind, self.form = path, kind, form
        self.size = 0  # bytes of the rows so far
        self.bytes_read = 0  # of the file on disk so far
        self._row = 0  # number of the current row, from 1

    def documents(self, base: int, is_wanted: Callable[[int], bool]) -> Iterator[Row]:
        """The documents of the units that are wanted. base: place of this input in the range of all inputs."""
        import pyarrow as pa

        for batch in self._batches():
            column = batch.column(0)
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            for value in column.cast(pa.large_binary()).to_pylist():
                self._row += 1
                if is_wanted((base + self.size) // self.form.shard_size):
                    yield Row(self.size, value)
                self.size += len(value or b"") + 1

    def text(self, raw: bytes) -> tuple[bytes, int]:
        """The text of a document from its raw bytes, and 0: no surrogate was replaced."""
        return raw, 0

    def place(self, start: int) -> str:
        """'file, row n' of the current row."""
        return f"{self.path}, row {self._row}"

    def _batches(self) -> Iterator[Any]:
        """Record batches of the text's column."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        key = self.form.text_key
        try:
            if self.kind == "parquet":
                if is_compressed(self.path) or is_stream(self.path):
                    raise InputError(
                        f"{self.path}: Parquet cannot be read from a pipe or a compressed file; write it to a plain "
                        "file first"
                    )
                table, disk = pq.ParquetFile(self.path), self.path.stat().st_size
                self._check_column(table.schema_arrow)
                for batch in table.iter_batches(batch_size=_ROWS, columns=[key]):
                    self.bytes_read = disk * (self._row + batch.num_rows) // table.metadata.num_rows
                    yield batch
                return
            with opened(self.path) as stream:
                if stream.is_seekable and stream.read(6) == b"ARROW1":
                    stream.seek(0)
                    with pa.ipc.open_file(stream.file) as reader:
                        self._check_column(reader.schema)
                        for number in range(reader.num_record_batches):
                            batch = reader.get_batch(number).select([key])
                            self.bytes_read = stream.bytes_read
                            yield batch
                    return
                if stream.is_seekable:
                    stream.seek(0)
                with pa.ipc.open_stream(stream.file) as reader:
                    self._check_column(reader.schema)
                    for batch in reader:
                        self.bytes_read = stream.bytes_read
                        yield batch.select([key])
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            reason = str(error).partition("\n")[0]
            raise InputError(f"{self.path} is not readable {self.kind.capitalize()}: {reason}") from None

    def _check_column(self, schema: Any) -> None:
        import pyarrow as pa

        key = self.form.text_key
        if key not in schema.names:
            columns = ", ".join(schema.names)
            raise InputError(f"{self.path} has no column {key!r}, only {columns}; name the column with --text-key")
        kind = schema.field(key).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise InputError(f"{self.path}: column {key!r} is {kind}, not a string; name another with --text-key")
