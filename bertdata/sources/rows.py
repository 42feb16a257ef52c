"""Rows of Parquet and Arrow with a column of lists → their documents, and documents → Parquet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import InputError
from bertdata.sources import idfile
from bertdata.sources.idfile import Ids, IdsFile, file_of_ids, in_blocks, item_of, slices_of
from bertdata.sources.inputs import Input, ending_of
from bertdata.sources.saved import SPLITS, STATE, files_of_saved
from bertdata.sources.tables import open_by_pyarrow, open_parquet, readable, record_batches

COLUMN = "input_ids"
_ROWS = 1024  # of Parquet that are looked at at a time, unless their ids are more than a block


def open_rows(name: str) -> IdsFile:
    """Parquet, Arrow, or a directory of either, with a column of lists."""
    path = Path(name)
    files = [file_of_ids(file) for file in _files_of(path)] if path.is_dir() else [file_of_ids(name)]
    size = sum(file.size or 0 for file in files)

    def some_documents() -> Iterator[Ids]:
        before = 0
        for file in files:
            row = 0
            with readable(file, "arrow" if _is_arrow(file) else "parquet"):
                for column, bytes_read in _columns(file):
                    ids, offsets = _lists(file, column, row)
                    for first, some in in_blocks(offsets.size - 1, slices_of(offsets)):
                        place = item_of(file, "row", row + first, some)
                        part = ids[int(some[0]) : int(some[-1])]
                        yield Ids(part, some - some[0], None, place, before + bytes_read)
                    row += len(column)
            before += file.size or 0

    return IdsFile(files, size, some_documents)


def _files_of(directory: Path) -> list[Path]:
    """The files of a directory that `save_to_disk` of the library datasets wrote, or the Parquet files of another."""
    if any((directory / name).is_file() for name in (SPLITS, STATE)):
        return files_of_saved(directory)
    files = sorted(directory.glob("*.parquet"), key=lambda path: (len(path.name), path.name))
    if not files:
        sentence = f"{directory} holds neither Parquet files nor the state.json of save_to_disk; name files of ids"
        raise InputError(sentence, "empty", option="inputs", given=str(directory))
    return files


def _is_arrow(file: Input) -> bool:
    return ending_of(file.name) != ".parquet"


def _columns(file: Input) -> Iterator[tuple[Any, int]]:
    """The column of ids, some rows at a time, and how many bytes of the file that took, with those before."""
    if not _is_arrow(file):
        with open_parquet(file) as table:
            _check_column(file, table.schema_arrow)
            meta, num_done = table.metadata, 0
            names = [meta.schema.column(number).path.partition(".")[0] for number in range(meta.num_columns)]
            for group in range(meta.num_row_groups):
                num_rows = meta.row_group(group).num_rows
                num_ids = meta.row_group(group).column(names.index(COLUMN)).num_values
                rows = max(1, min(_ROWS, idfile.BLOCK_IDS * num_rows // max(1, num_ids)))
                for batch in table.iter_batches(rows, row_groups=[group], columns=[COLUMN]):
                    num_done += batch.num_rows
                    yield batch.column(0), (file.size or 0) * num_done // meta.num_rows
        return
    with open_by_pyarrow(file) as source:
        for batch, share in record_batches(source, partial(_check_column, file)):
            column = batch.column(COLUMN)
            column.validate(full=True)  # a file may say anything
            yield column, source.tell() if share is None else int(share * (file.size or 0))


def _check_column(file: Input, schema: Any) -> None:
    import pyarrow as pa

    if COLUMN not in schema.names:
        columns = ", ".join(schema.names)
        sentence = f"{file} has no column {COLUMN!r}, only {columns}; rename the one of ids"
        raise InputError(sentence, "no-column", option="inputs", given=file.name)
    if schema.names.count(COLUMN) > 1:
        sentence = f"{file} has {schema.names.count(COLUMN)} columns {COLUMN!r}; rename all but one of them"
        raise InputError(sentence, "not-of-format", option="inputs", given=file.name)
    kind, types = schema.field(COLUMN).type, pa.types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not (is_list and types.is_integer(kind.value_type)):
        sentence = f"{file}: column {COLUMN!r} is {kind}, not a list of integers; write lists of ids there"
        raise InputError(sentence, "wrong-column-type", option="inputs", given=file.name)


def _lists(file: Input, column: Any, first: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The ids of some rows, one after the other, and offsets [num_rows + 1]. first: number of the first row, from 0."""
    import pyarrow.compute as pc

    flat = column.flatten()
    if column.null_count or flat.null_count:
        row = next(row for row, ids in enumerate(column) if ids.values is None or ids.values.null_count)
        sentence = f"{file}, row {first + row + 1}: the ids, or one of them, are null; leave the row out"
        raise InputError(sentence, "bad-row", option="inputs", given=file.name)
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    return flat.to_numpy(), np.append(0, np.cumsum(lengths, dtype=np.int64))


def write_parquet(file: IO[bytes], documents: Iterable[tuple[NDArray[Any], NDArray[np.int64]]]) -> None:
    """Writes a Parquet file with the column `input_ids`, a list of int32 for each document.

    documents: pairs of ids [n] and half-open offsets into them; each pair gives a row group.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([pa.field(COLUMN, pa.list_(pa.int32()))])
    with pq.ParquetWriter(file, schema) as writer:
        for ids, offsets in documents:
            lists = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(ids.astype(np.int32)))
            writer.write_table(pa.table([lists], schema=schema), row_group_size=max(1, len(lists)))
