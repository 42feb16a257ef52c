"""Ids from other libraries → their documents: Megatron's .bin and .idx, files of nanoGPT and llm.c, and rows.

Documents are read in blocks, not through memory maps: if a file is truncated while it is mapped, the process dies.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import InputError, UsageError, refused
from bertdata.sources.inputs import SAVED, STATE, Input, extension_of, files_of_saved, local
from bertdata.sources.tables import open_by_pyarrow, open_parquet, readable, record_batches

BLOCK_IDS = 1 << 19  # ids per block, unless a document has more
COLUMN = "input_ids"
_FORMAT_OF = {".bin": "nanogpt", ".parquet": "rows", ".arrow": "rows"}  # by file extension
_ROWS = 1024  # rows of Parquet read at a time, unless their ids exceed a block
_HEADER = "<9sQBQQ"  # of .idx: magic, version, dtype, number of sequences, number of document indices
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}  # 6 and 7 are not integers
_LLM_C_HEADER_BYTES = 1024
_LLM_C_DTYPES = {(20240520, 1): "uint16", (20240801, 7): "uint32"}  # magic and version → dtype of the ids
_JUDGED_BYTES = 1 << 21  # bytes of headerless ids that are read to guess the width of an id
_FEWEST_JUDGED = 16  # pairs of halves


class Ids(NamedTuple):
    """Some documents of an input, in order."""

    ids: NDArray[Any]  # [n] integers of any kind
    documents: NDArray[np.int64]  # [num_documents + 1] half-open offsets into ids; documents may be empty
    sentences: NDArray[np.int64] | None  # starts of sentences in ids, strictly ascending; None: unknown
    place: Callable[[int], str]  # index of an id → 'file, byte n' or 'file, row n'
    bytes_read: int  # bytes read so far, of num_bytes of the input
    first: int | None = None  # number of ids before these in the input; None: these follow the previous ones
    unit: int = 0  # unit of the documents, after the division into units

    @property
    def num_bytes(self) -> int:
        return self.ids.nbytes

    def between(self, first: int, stop: int) -> Ids:
        """Return the documents `first` to `stop` - 1."""
        if stop - first == self.documents.size - 1:
            return self
        start, end = int(self.documents[first]), int(self.documents[stop])
        sentences = self.sentences
        if sentences is not None:
            sentences = sentences[np.searchsorted(sentences, start) : np.searchsorted(sentences, end)] - start
        return self._replace(
            ids=self.ids[start:end],
            documents=self.documents[first : stop + 1] - start,
            sentences=sentences,
            place=lambda index: self.place(start + index),
        )


@dataclass(frozen=True)
class IdsFile:
    """An input of ids, with a checked header and index."""

    files: list[Input]  # paths of all its files
    num_bytes: int  # bytes of the files of ids
    documents: Callable[[int], Iterator[Ids]]
    """Called with a number of ids at the start of the input to skip: documents that begin there need not be read.

    Raises InputError for a row that is not a list of integers.
    """
    num_ids: int = 0  # 0: unknown
    dtype: str | None = None  # dtype of the ids of Megatron
    has_sentences: bool = False  # whether a document has several sentences
    empty_sentences: int = 0  # number of empty sentences, which are left out
    note: str | None = None  # a line to print for the user


class FileArray:
    """Array in a file, read on use by slices. Keeps no file open."""

    def __init__(self, file: Input, dtype: Any, size: int, offset: int = 0) -> None:
        """offset: of the first of `size` elements, in bytes."""
        self.dtype, self.size, self._file, self._offset = np.dtype(dtype), size, file, offset

    def __getitem__(self, part: slice) -> NDArray[Any]:
        """Return the elements of a slice without a step. Raises InputError if the file was changed or removed."""
        start, stop, _ = part.indices(self.size)
        count, offset = max(0, stop - start), self._offset + start * self.dtype.itemsize
        if self._file.refreshed() == self._file:
            numbers = np.fromfile(self._file.name, self.dtype, count, offset=offset)
            if numbers.size == count:
                return numbers
        raise refused(self._file, "changed", " changed while it was read; run again when nobody changes it")

    def place(self, start: int, index: int) -> str:
        """Return 'file, byte n' for an element, counted from the element at `start`."""
        return f"{self._file}, byte {self._offset + (start + index) * self.dtype.itemsize}"


def format_of(name: str) -> str:
    """Return one of choices.IDS_FORMATS, by the file name. Raises InputError if the name does not show the format."""
    path = Path(name)
    if extension_of(name) == ".idx" or Path(f"{str(path).removesuffix('.bin')}.idx").exists():
        return "megatron"
    format = "rows" if path.is_dir() else _FORMAT_OF.get(extension_of(name))
    if format is None:
        raise refused(name, "unknown-format", " is not .idx, .bin, .parquet or .arrow; give its --format")
    return format


def open_ids(name: str, format: str, end_token: int | None, dtype: str | None = None) -> IdsFile:
    """Open an input of ids. format: one of choices.IDS_FORMATS.

    end_token: the id that ends a document of nanoGPT. dtype: the dtype of headerless ids; None: guess it.

    Raises UsageError for `dtype` if the file stores its dtype, and InputError if a file cannot be read, is not of this
    format, or contradicts itself.
    """
    if format == "nanogpt":
        assert end_token is not None  # noqa: S101  (the caller gives one)
        return _open_nanogpt(name, end_token, dtype)
    if dtype is not None:
        raise _stated_dtype(name, dtype)
    return _open_megatron(name) if format == "megatron" else _open_rows(name)


def _stated_dtype(name: str, dtype: str) -> UsageError:
    sentence = f"--dtype is for ids whose file does not say how wide they are, and {name} says it; leave it out"
    return UsageError(sentence, "conflict", option="dtype", given=dtype)


def _file_of_ids(path: str | Path) -> Input:
    """Return the Input of a local file. Raises InputError if it cannot be read, is a pipe, or is compressed."""
    file = local(path)
    if file.is_stream or file.compression:
        sentence = f"{file} is {'a pipe' if file.is_stream else 'compressed'}; write its ids to a plain file first"
        raise InputError(sentence, "read-once" if file.is_stream else "unsupported", option="inputs", given=file.name)
    return file


def in_blocks(offsets: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield (index of a document, offsets of this and the next documents), for about a block of ids."""
    first = 0
    while first < offsets.size - 1:
        stop = max(first + 1, int(np.searchsorted(offsets, offsets[first] + BLOCK_IDS, side="right")) - 1)
        yield first, offsets[first : stop + 1]
        first = stop


def place_of_item(file: Input, noun: str, first: int, offsets: NDArray[np.int64], index: int) -> str:
    """Return 'file, row n' of an id in documents that are rows of a file. first: index of the first row."""
    return f"{file}, {noun} {first + int(np.searchsorted(offsets - offsets[0], index, side='right'))}"


# --------------------------------------------------------------------------------------------------- nanoGPT and llm.c


def _open_nanogpt(name: str, end_token: int, given: str | None) -> IdsFile:
    """Open headerless ids, or a file of llm.c: its header is 256 int32, first the magic, version and number of ids.

    given: the dtype of headerless ids; None: guess it.
    """
    data = _file_of_ids(name)
    size, offset, dtype, note = data.size or 0, 0, np.dtype(given or "uint16"), None
    if size >= _LLM_C_HEADER_BYTES:
        magic, version, count = FileArray(data, "<i4", 3)[:].tolist()
        if (magic, version) in _LLM_C_DTYPES:
            if given is not None:
                raise _stated_dtype(name, given)
            offset, dtype = _LLM_C_HEADER_BYTES, np.dtype(_LLM_C_DTYPES[magic, version])
            if size != (expected := offset + count * dtype.itemsize):
                raise refused(
                    data, "cut-short", f" has {size:,} bytes, not the {expected:,} of its header; get it again"
                )
    if not offset and given is None:
        dtype, reason = _guess(FileArray(data, np.uint8, min(size, _JUDGED_BYTES))[:])
        note = f"reads {data} as {dtype.name}, {reason}; --dtype names another"
    if size % dtype.itemsize:
        raise refused(data, "not-of-format", f" has {size:,} bytes, no multiple of a {dtype.name}; give its --dtype")
    if end_token > np.iinfo(dtype).max:
        sentence = f"{data}: {dtype.name} cannot hold the end token {end_token}; give the --tokenizer that made the ids"
        raise InputError(sentence, "id-outside-vocabulary", option="tokenizer")
    ids = FileArray(data, dtype, (size - offset) // dtype.itemsize, offset)
    return IdsFile([data], size - offset, partial(_ended_by, end_token, ids), ids.size, note=note)


def _guess(start: NDArray[np.uint8]) -> tuple[np.dtype[Any], str]:
    """Guess the dtype of ids from the first bytes of their file. Return it with the reason.

    If little-endian ids are wider than necessary, every second half is mostly 0, and the first halves are not. Pairs of
    zeros may be padding and are ignored.
    """
    for dtype, half in (("int64", 4), ("uint32", 2)):
        pairs = start[: start.size // (2 * half) * (2 * half)].view(f"<u{half}").reshape(-1, 2)
        pairs = pairs[pairs.any(1)]
        lower, upper = (pairs == 0).sum(0).tolist()
        if len(pairs) >= _FEWEST_JUDGED and 5 * (upper - lower) >= 2 * len(pairs):
            return np.dtype(dtype), f"as most of every second {half} bytes are 0"
    return np.dtype("uint16"), "as nanoGPT writes ids"


def _ended_by(token: int, ids: FileArray, skipped: int) -> Iterator[Ids]:
    """Yield documents, which end after each `token` and at the end of the ids. The dtype must be able to hold it."""
    start, count = max(0, skipped - 1), BLOCK_IDS  # the last skipped id may end the previous document
    while max(start, skipped) < ids.size:
        some = ids[start : start + count]
        ends = np.flatnonzero(some == token) + 1
        if start + some.size == ids.size and (not ends.size or ends[-1] < some.size):
            ends = np.append(ends, some.size)
        count *= 2  # for a longer document
        if ends.size:
            stop, count = int(ends[-1]), BLOCK_IDS
            bytes_read = (start + stop) * ids.dtype.itemsize
            yield Ids(some[:stop], np.append(0, ends), None, partial(ids.place, start), bytes_read, start)
            start += stop


# ------------------------------------------------------------------------------------------------------------ Megatron


def prefix_of(name: str) -> str:
    """Return PREFIX for PREFIX, PREFIX.bin or PREFIX.idx."""
    return name.removesuffix(".bin") if name.endswith(".bin") else name.removesuffix(".idx")


def _open_megatron(name: str) -> IdsFile:
    """Open PREFIX.bin, and load PREFIX.idx: 20 bytes a sequence, 8 bytes a document. name: either file, or PREFIX."""
    prefix = prefix_of(name)
    index, data = _file_of_ids(f"{prefix}.idx"), _file_of_ids(f"{prefix}.bin")
    size, begin = index.size or 0, struct.calcsize(_HEADER)
    header = FileArray(index, np.uint8, min(size, begin))[:].tobytes().ljust(begin, b"\0")
    magic, version, code, num_sequences, num_documents = struct.unpack(_HEADER, header)
    if magic != b"MMIDIDX\0\0" or version != 1 or code not in _DTYPES:
        raise refused(index, "not-of-format", " is not an index of version 1 for ids; give one that Megatron wrote")
    expected = begin + 12 * num_sequences + 8 * num_documents
    if size != expected:
        raise refused(index, "cut-short", f" has {size:,} bytes, not the {expected:,} of its header; get it again")
    dtype, lengths = np.dtype(_DTYPES[code]), FileArray(index, "<i4", num_sequences, begin)[:]
    pointers = FileArray(index, "<i8", num_sequences, begin + 4 * num_sequences)[:]  # bytes of the .bin file
    documents = FileArray(index, "<i8", num_documents, begin + 12 * num_sequences)[:]  # half-open, into sequences
    starts = np.append(0, np.cumsum(lengths, dtype=np.int64))  # in ids
    are_sequences = lengths.min(initial=0) >= 0 and (pointers == starts[:-1] * dtype.itemsize).all()
    if not are_sequences or [*documents[:1], *documents[-1:]] != [0, num_sequences] or (np.diff(documents) < 0).any():
        raise refused(index, "not-of-format", ": sequences or documents are not contiguous; write it again")
    if data.size != (expected := int(starts[-1]) * dtype.itemsize):
        raise refused(data, "cut-short", f" has {data.size:,} bytes, not the {expected:,} of its .idx; get both again")
    ids, has_sentences = FileArray(data, dtype, int(starts[-1])), bool((np.diff(documents) > 1).any())
    offsets, begins = starts[documents], starts[:-1][lengths > 0]

    def some_documents(skipped: int) -> Iterator[Ids]:
        for _, some in in_blocks(offsets[offsets.searchsorted(skipped) :]):
            start, stop = int(some[0]), int(some[-1])
            sentences = begins[slice(*begins.searchsorted((start, stop)))] - start if has_sentences else None
            yield Ids(ids[start:stop], some - start, sentences, partial(ids.place, start), stop * dtype.itemsize, start)

    empty_sentences = int((lengths == 0).sum())
    return IdsFile([index, data], expected, some_documents, ids.size, dtype.name, has_sentences, empty_sentences)


# ---------------------------------------------------------------------------------------------------------------- rows


def _open_rows(name: str) -> IdsFile:
    """Open a Parquet or Arrow file, or a directory of such files, with a column of lists."""
    path = Path(name)
    files = [_file_of_ids(file) for file in _files_of(path)] if path.is_dir() else [_file_of_ids(name)]
    size = sum(file.size or 0 for file in files)

    def some_documents(skipped: int) -> Iterator[Ids]:
        before = 0
        for file in files:
            row, kind = 0, "parquet" if extension_of(file.name) == ".parquet" else "arrow"
            with readable(file, kind):
                for column, bytes_read in (_columns_of_parquet if kind == "parquet" else _columns_of_arrow)(file):
                    ids, offsets = _lists(file, column, row)
                    for first, some in in_blocks(offsets):
                        place = partial(place_of_item, file, "row", row + first, some)
                        part = ids[int(some[0]) : int(some[-1])]
                        yield Ids(part, some - some[0], None, place, before + bytes_read)
                    row += len(column)
            before += file.size or 0

    return IdsFile(files, size, some_documents)


def _files_of(directory: Path) -> list[Path]:
    """Return the files that `save_to_disk` of Hugging Face datasets wrote, or the Parquet files of a directory."""
    if any((directory / name).is_file() for name in (SAVED, STATE)):
        return files_of_saved(directory)
    files = sorted(directory.glob("*.parquet"), key=lambda path: (len(path.name), path.name))
    if not files:
        raise refused(directory, "empty", " has no Parquet files, and is not of save_to_disk; name files of ids")
    return files


def _columns_of_parquet(file: Input) -> Iterator[tuple[Any, int]]:
    """Yield some rows of the column of ids at a time, with the bytes of the file read so far."""
    with open_parquet(file) as table:
        _check_column(file, table.schema_arrow)
        meta, num_done = table.metadata, 0
        names = [meta.schema.column(number).path.partition(".")[0] for number in range(meta.num_columns)]
        for group in range(meta.num_row_groups):
            num_rows = meta.row_group(group).num_rows
            num_ids = meta.row_group(group).column(names.index(COLUMN)).num_values
            rows = max(1, min(_ROWS, BLOCK_IDS * num_rows // max(1, num_ids)))
            for batch in table.iter_batches(rows, row_groups=[group], columns=[COLUMN]):
                num_done += batch.num_rows
                yield batch.column(0), (file.size or 0) * num_done // meta.num_rows


def _columns_of_arrow(file: Input) -> Iterator[tuple[Any, int]]:
    with open_by_pyarrow(file) as source:
        for batch in record_batches(source, partial(_check_column, file)):
            column = batch.column(COLUMN)
            column.validate(full=True)  # a damaged file may have any values
            yield column, source.tell()


def _check_column(file: Input, schema: Any) -> None:
    import pyarrow as pa

    if (count := schema.names.count(COLUMN)) != 1:
        columns = ", ".join(schema.names)
        raise refused(file, "no-column", f" has {count} columns {COLUMN!r}, not one; rename its columns: {columns}")
    kind, types = schema.field(COLUMN).type, pa.types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not (is_list and types.is_integer(kind.value_type)):
        raise refused(file, "wrong-column-type", f": column {COLUMN!r} is {kind}; write lists of integers there")


def _lists(file: Input, column: Any, first: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the concatenated ids of rows, and offsets [num_rows + 1]. first: index of the first row."""
    import pyarrow.compute as pc

    flat = column.flatten()
    if column.null_count or flat.null_count:
        row = next(row for row, ids in enumerate(column) if ids.values is None or ids.values.null_count)
        raise refused(file, "bad-row", f", row {first + row + 1}: an id, or all, are null; leave the row out")
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    return flat.to_numpy(), np.append(0, np.cumsum(lengths, dtype=np.int64))


def write_parquet(file: IO[bytes], documents: Iterable[tuple[NDArray[Any], NDArray[np.int64]]]) -> None:
    """Write a Parquet file with the column `input_ids`, a list of int32 for each document.

    documents: pairs of ids [n] and half-open offsets into them; each pair becomes a row group.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([pa.field(COLUMN, pa.list_(pa.int32()))])
    with pq.ParquetWriter(file, schema) as writer:
        for ids, offsets in documents:
            if offsets[-1] >= 2**31:
                sentence = f"a document has {offsets[-1]:,} ids, and a list of Parquet holds fewer than 2**31"
                raise InputError(f"{sentence}; import shorter documents, with an end token", "too-large")
            lists = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(ids.astype(np.int32)))
            writer.write_table(pa.table([lists], schema=schema), row_group_size=max(1, len(lists)))
