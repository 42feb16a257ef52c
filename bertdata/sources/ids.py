"""Files of token ids that other libraries wrote → their documents, and ids → Parquet.

The documents of a file are read some at a time, and not mapped into memory: a map of a file that is cut short meanwhile
would end the process.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import InputError
from bertdata.sources.inputs import Input, ending_of, local
from bertdata.sources.kernels import find_token
from bertdata.sources.saved import SPLITS, STATE, files_of_saved
from bertdata.sources.tables import readable

COLUMN = "input_ids"
MEGATRON_HEADER = "<9sQBQQ"  # magic, version, dtype, number of sequences, number of document indices
MEGATRON_MAGIC = b"MMIDIDX\0\0"
MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}  # 6 and 7 are no integers
_LLM_C_HEADER_BYTES = 1024
_LLM_C_DTYPES = {(20240520, 1): "uint16", (20240801, 7): "uint32"}  # magic and version → ids
_BLOCK_IDS = 1 << 19  # ids that are given at a time, unless a document has more
_JUDGED_IDS = 1 << 20  # of a file without a header, for the width of its ids
_FEWEST_JUDGED = 32
_DOCUMENTS, _ROWS = 1 << 16, 1024  # documents, rows of Parquet that are looked at at a time


class Ids(NamedTuple):
    """Some documents of an input, in order."""

    ids: NDArray[Any]  # [n] integers of any kind
    documents: NDArray[np.int64]  # [num_documents + 1] half-open offsets into ids; a document may have no id
    sentences: NDArray[np.int64] | None  # where sentences begin in ids, strictly ascending; None: not known
    place: Callable[[int], str]  # index of an id → 'file, byte n' or 'file, row n'
    bytes_read: int  # of num_bytes of the input, up to the end of these documents


@dataclass(frozen=True)
class IdsFile:
    """An input of ids, whose header and index were checked."""

    files: list[Input]  # all that are read
    num_bytes: int  # of the files of ids
    documents: Callable[[], Iterator[Ids]]
    """Raises InputError for a row that holds no list of integers."""
    dtype: str | None = None  # of the ids of Megatron
    has_sentences: bool = False  # whether a document has several
    empty_sentences: int = 0  # how many sentences without an id are left out


def format_of(name: str) -> str:
    """One of choices.IDS_FORMATS, by the name. Raises InputError for a name that says nothing."""
    path = Path(name)
    if ending_of(name) == ".idx" or path.with_name(path.name.removesuffix(".bin") + ".idx").exists():
        return "megatron"
    formats = {".bin": "nanogpt", ".ds": "datatrove", ".parquet": "rows", ".arrow": "rows"}
    format = "rows" if path.is_dir() else formats.get(ending_of(name))
    if format is None:
        raise InputError(
            f"{name} has no known ending (.idx .bin .ds .parquet .arrow); say what it is with --format",
            "unknown-format",
            option="inputs",
            given=name,
        )
    return format


def open_ids(name: str, format: str, end_token: int | None) -> IdsFile:
    """Opens an input of ids. format: one of choices.IDS_FORMATS. end_token: the id that ends a document of nanoGPT.

    Raises InputError if a file cannot be read, is not of this format, or contradicts itself.
    """
    if format == "megatron":
        return _megatron(name)
    if format == "nanogpt":
        assert end_token is not None  # noqa: S101  (only the other formats have none)
        return _nanogpt(name, end_token)
    return _datatrove(name) if format == "datatrove" else _rows(name)


class _FileArray:
    """Numbers in a file, one after the other, that are read where they are used."""

    def __init__(self, file: Input, dtype: Any, size: int, offset: int = 0) -> None:
        """offset: of the first of `size` numbers, in bytes."""
        self.dtype, self.size, self._file, self._offset = np.dtype(dtype), size, file, offset
        self._fd = os.open(file.name, os.O_RDONLY)
        weakref.finalize(self, os.close, self._fd)

    def __getitem__(self, part: slice) -> NDArray[Any]:
        """A copy of the numbers of a slice without a step. Raises InputError if the file has become shorter."""
        start, stop, _ = part.indices(self.size)
        numbers = np.empty(max(0, stop - start), self.dtype)
        place, left = self._offset + start * self.dtype.itemsize, numbers.view(np.uint8).data
        while left:
            count = os.preadv(self._fd, [left], place)
            if count == 0:
                raise InputError(
                    f"{self._file} was cut short at byte {place} while it was read; get the file again",
                    "cut-short",
                    option="inputs",
                    given=self._file.name,
                )
            place, left = place + count, left[count:]
        return numbers

    def at(self, index: int) -> int:
        """One number; a negative index counts from the end."""
        index += self.size * (index < 0)
        return int(self[index : index + 1][0])


class _Index(NamedTuple):
    """What a .idx of Megatron says."""

    lengths: _FileArray  # int32 [num_sequences] in ids
    pointers: _FileArray  # int64 [num_sequences] byte of the .bin at which each begins
    documents: _FileArray  # int64 [num_documents + 1] half-open offsets into sequences
    dtype: np.dtype[Any]


def _megatron_index(index: Input) -> _Index:
    """Raises InputError for a header that cannot be read, or does not fit the size of the file."""
    size, begin = index.size or 0, struct.calcsize(MEGATRON_HEADER)
    content = _FileArray(index, np.uint8, min(size, begin))[:].tobytes()
    if content[:9] != MEGATRON_MAGIC or size < begin:
        raise InputError(
            f"{index} is not the index of a Megatron dataset: its first bytes are not MMIDIDX; give the .idx of one",
            "not-of-format",
            option="inputs",
            given=index.name,
        )
    _, version, code, num_sequences, num_documents = struct.unpack(MEGATRON_HEADER, content)
    if version != 1:
        raise InputError(
            f"{index} has version {version}, and only version 1 can be read; write the dataset again with Megatron",
            "other-version",
            option="inputs",
            given=index.name,
        )
    if code not in MEGATRON_DTYPES:
        raise InputError(
            f"{index} has dtype {code}, which is no kind of integer, so its .bin does not hold ids; give files of ids",
            "not-of-format",
            option="inputs",
            given=index.name,
        )
    expected = begin + 12 * num_sequences + 8 * num_documents
    if num_sequences and size == expected + num_sequences:
        raise InputError(
            f"{index} gives each sequence a mode, as for images among text, and only text can be imported; write the "
            "text alone with Megatron's tools",
            "unsupported",
            option="inputs",
            given=index.name,
        )
    if size != expected:
        raise InputError(
            f"{index} has {size:,} bytes, and by its header (sequences: {num_sequences:,}, document indices: "
            f"{num_documents:,}) it has {expected:,}; get the file again",
            "cut-short",
            option="inputs",
            given=index.name,
        )
    return _Index(
        _FileArray(index, "<i4", num_sequences, begin),
        _FileArray(index, "<i8", num_sequences, begin + 4 * num_sequences),
        _FileArray(index, "<i8", num_documents, begin + 12 * num_sequences),
        np.dtype(MEGATRON_DTYPES[code]),
    )


def _megatron(name: str) -> IdsFile:
    """name: PREFIX, PREFIX.bin or PREFIX.idx."""
    prefix = name.removesuffix(".bin") if name.endswith(".bin") else name.removesuffix(".idx")
    index, data = local(f"{prefix}.idx"), local(f"{prefix}.bin")
    lengths, pointers, documents, dtype = _megatron_index(index)
    num_sequences, end, empty_sentences = lengths.size, 0, 0
    for start in range(0, num_sequences, _DOCUMENTS):
        some = lengths[start : start + _DOCUMENTS].astype(np.int64)
        ends = end + np.cumsum(some) * dtype.itemsize
        wrong = np.flatnonzero((some < 0) | (pointers[start : start + _DOCUMENTS] != ends - some * dtype.itemsize))
        if wrong.size:
            raise InputError(
                f"{index}: sequence {start + int(wrong[0])} does not begin where the one before it ends; write the "
                "dataset again with Megatron's own tools",
                "not-of-format",
                option="inputs",
                given=index.name,
            )
        end, empty_sentences = int(ends[-1]), empty_sentences + int((some == 0).sum())
    if end != data.size:
        raise InputError(
            f"{data} has {data.size:,} bytes, and {index} describes {end:,}; get both files again",
            "cut-short",
            option="inputs",
            given=data.name,
        )
    smallest, largest = _steps(documents)
    if not documents.size or documents.at(0) != 0 or documents.at(-1) != num_sequences or smallest < 0:
        raise InputError(
            f"{index}: its document indices do not ascend from 0 to {num_sequences:,}; write the dataset again with "
            "Megatron's own tools",
            "not-of-format",
            option="inputs",
            given=index.name,
        )
    ids, has_sentences = _FileArray(data, dtype, end // dtype.itemsize), largest > 1

    def first_ids(sequences: NDArray[Any]) -> NDArray[np.int64]:
        """The index of the first id of ascending sequences; `num_sequences` is the end."""
        starts, first = np.full(sequences.size, ids.size), int(sequences[0])
        inside = sequences < num_sequences
        known = pointers[first : int(sequences[-1]) + 1]
        starts[inside] = known[sequences[inside] - first] // dtype.itemsize
        return starts

    def some_documents() -> Iterator[Ids]:
        for first, offsets in in_blocks(documents.size - 1, lambda first, stop: first_ids(documents[first:stop])):
            start, stop = int(offsets[0]), int(offsets[-1])
            sentences = None
            if has_sentences:
                several = slice(documents.at(first), documents.at(first + offsets.size - 1))
                sentences = pointers[several][lengths[several] > 0] // dtype.itemsize - start
            place = _byte_of(data, dtype.itemsize, start)
            yield Ids(ids[start:stop], offsets - start, sentences, place, stop * dtype.itemsize)

    return IdsFile([index, data], end, some_documents, dtype.name, has_sentences, empty_sentences)


def _nanogpt(name: str, end_token: int) -> IdsFile:
    """Raw uint16, or the file of llm.c: 256 int32, of which the first three are magic, version and number of ids."""
    data = local(name)
    size, offset, dtype = data.size or 0, 0, np.dtype("<u2")
    if size >= _LLM_C_HEADER_BYTES:
        magic, version, count = _FileArray(data, "<i4", 3)[:].tolist()
        if (magic, version) in _LLM_C_DTYPES:
            offset, dtype = _LLM_C_HEADER_BYTES, np.dtype(_LLM_C_DTYPES[magic, version])
            if size != offset + count * dtype.itemsize:
                raise InputError(
                    f"{data} has {size:,} bytes, and its header says {count:,} ids of {dtype.itemsize} bytes after "
                    f"{offset:,}; get the file again",
                    "cut-short",
                    option="inputs",
                    given=name,
                )
    if size % dtype.itemsize:
        raise InputError(
            f"{data} has {size:,} bytes, which is no multiple of the 2 bytes of an id; get the file again, or name its "
            "--format",
            "not-of-format",
            option="inputs",
            given=name,
        )
    if end_token > np.iinfo(dtype).max:
        raise InputError(
            f"{data} has ids of {dtype.itemsize} bytes, and the token that ends a document is {end_token}, which needs "
            "more; give the --tokenizer that made the ids",
            "id-outside-vocabulary",
            option="tokenizer",
        )
    ids, token = _FileArray(data, dtype, (size - offset) // dtype.itemsize, offset), dtype.type(end_token)
    if not offset and _are_halves(ids[:_JUDGED_IDS]):
        raise InputError(
            f"{data} holds ids of 4 or 8 bytes, as most of every second 2 bytes are 0, and without a header ids have 2 "
            "bytes; write it again as uint16, or as Parquet with a column input_ids",
            "not-of-format",
            option="inputs",
            given=name,
        )

    def some_documents() -> Iterator[Ids]:
        start, window = 0, _BLOCK_IDS
        while start < ids.size:
            stop = min(start + window, ids.size)
            some, ends = ids[start:stop], np.empty(stop - start + 1, np.int64)
            ends = ends[: find_token(some, token, ends)]
            if stop == ids.size and not (ends.size and ends[-1] == stop - start):
                ends = np.append(ends, stop - start)  # the end of the file ends its last document
            if not ends.size:  # a long document
                window *= 2
                continue
            part, place = some[: int(ends[-1])], _byte_of(data, dtype.itemsize, start, offset)
            start, window = start + part.size, _BLOCK_IDS
            yield Ids(part, np.append(0, ends), None, place, start * dtype.itemsize)

    return IdsFile([data], size - offset, some_documents)


def _are_halves(ids: NDArray[np.uint16]) -> bool:
    """Whether these are rather wider ids, little-endian: every second one is mostly 0, and the others are not."""
    lower, upper = (int(np.count_nonzero(ids[first::2] == 0)) for first in (0, 1))
    return ids.size >= _FEWEST_JUDGED and 5 * (upper - lower) >= ids.size


def _datatrove(name: str) -> IdsFile:
    """Raw ids of 2 or 4 bytes, and beside them `.index`: uint64, where each document ends in ids."""
    data, index = local(name), local(f"{name}.index")
    if (index.size or 0) % 8:
        raise InputError(
            f"{index} has {index.size:,} bytes, which is no multiple of the 8 bytes of an offset; get the file again",
            "cut-short",
            option="inputs",
            given=index.name,
        )
    size, ends = data.size or 0, _FileArray(index, "<i8", (index.size or 0) // 8)
    total = ends.at(-1) if ends.size else 0
    width = next((width for width in (2, 4) if size == total * width), None)
    if width is None or _steps(ends)[0] < 0 or (ends.size and ends.at(0) < 0):
        raise InputError(
            f"{index} does not fit {name}: its offsets must ascend to the number of ids, and end at {total:,}, while "
            f"{name} has {size:,} bytes, with 2 or 4 for an id; get both files again",
            "not-of-format",
            option="inputs",
            given=index.name,
        )
    ids = _FileArray(data, f"<u{width}", size // width)

    def starts_of(first: int, stop: int) -> NDArray[np.int64]:
        return ends[first - 1 : stop - 1] if first else np.append(0, ends[: stop - 1])

    def some_documents() -> Iterator[Ids]:
        for _, offsets in in_blocks(ends.size, starts_of):
            start, stop = int(offsets[0]), int(offsets[-1])
            yield Ids(ids[start:stop], offsets - start, None, _byte_of(data, width, start), stop * width)

    return IdsFile([data, index], size, some_documents)


def _steps(offsets: _FileArray) -> tuple[int, int]:
    """The smallest and the largest difference of two offsets side by side; 0 and 0 if there are none."""
    smallest, largest = [0], [0]
    for start in range(0, offsets.size - 1, _DOCUMENTS):
        steps = np.diff(offsets[start : start + _DOCUMENTS + 1])
        smallest.append(int(steps.min()))
        largest.append(int(steps.max()))
    return min(smallest), max(largest)


def in_blocks(
    count: int, starts_of: Callable[[int, int], NDArray[np.int64]]
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yields the number of a document and the offsets of it and of some after it, together about a block of ids.

    count: of all documents. starts_of: (first, stop) → the offsets of documents first to stop - 1, where `count` is the
    end of the last one.
    """
    first, ahead = 0, _DOCUMENTS
    while first < count:
        starts = starts_of(first, min(first + ahead, count) + 1)
        num = max(1, int(np.searchsorted(starts, starts[0] + _BLOCK_IDS, side="right")) - 1)
        yield first, starts[: num + 1]
        first, ahead = first + num, min(2 * num, _DOCUMENTS)  # looks at few documents in vain


def slices_of(offsets: NDArray[np.int64]) -> Callable[[int, int], NDArray[np.int64]]:
    """What `in_blocks` takes, of offsets that are in memory."""
    return lambda first, stop: offsets[first:stop]


def _byte_of(file: Input, width: int, start: int, offset: int = 0) -> Callable[[int], str]:
    return lambda index: f"{file}, byte {offset + (start + index) * width}"


def _rows(name: str) -> IdsFile:
    """Parquet, Arrow, or a directory of either, with a column of lists."""
    path = Path(name)
    files = [local(file) for file in _files_of(path)] if path.is_dir() else [local(name)]
    size = sum(file.size or 0 for file in files)

    def some_documents() -> Iterator[Ids]:
        before = 0
        for file in files:
            row = 0
            with readable(file, "arrow" if _is_arrow(file) else "parquet"):
                for column, bytes_read in _columns(file):
                    ids, offsets = _lists(file, column, row)
                    for first, some in in_blocks(offsets.size - 1, slices_of(offsets)):
                        place = _row_of(file, row + first, some)
                        part = ids[int(some[0]) : int(some[-1])]
                        yield Ids(part, some - some[0], None, place, before + bytes_read)
                    row += len(column)
            before += file.size or 0

    return IdsFile(files, size, some_documents)


def _row_of(file: Input, first: int, offsets: NDArray[np.int64]) -> Callable[[int], str]:
    def place(index: int) -> str:
        return f"{file}, row {first + int(np.searchsorted(offsets - offsets[0], index, side='right'))}"

    return place


def _files_of(directory: Path) -> list[Path]:
    """The files of a directory that `save_to_disk` of the library datasets wrote, or the Parquet files of another."""
    if any((directory / name).is_file() for name in (SPLITS, STATE)):
        return files_of_saved(directory)
    files = sorted(directory.glob("*.parquet"), key=lambda path: (len(path.name), path.name))
    if not files:
        raise InputError(
            f"{directory} holds neither Parquet files nor the state.json of save_to_disk; name files of ids",
            "empty",
            option="inputs",
            given=str(directory),
        )
    return files


def _is_arrow(file: Input) -> bool:
    return ending_of(file.name) != ".parquet"


def _columns(file: Input) -> Iterator[tuple[Any, int]]:
    """The column of ids, some rows at a time, and how many bytes of the file that took, with those before."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not _is_arrow(file):
        with pq.ParquetFile(file.name) as table:
            _check_column(file, table.schema_arrow)
            num_done, num_rows = 0, table.metadata.num_rows
            for batch in table.iter_batches(_ROWS, columns=[COLUMN]):
                num_done += batch.num_rows
                yield batch.column(0), (file.size or 0) * num_done // max(1, num_rows)
        return
    with pa.OSFile(file.name) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        with pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source) as reader:
            _check_column(file, reader.schema)
            num_batches = reader.num_record_batches if is_file else 0
            for number, batch in enumerate(map(reader.get_batch, range(num_batches)) if is_file else reader):
                column = batch.column(COLUMN)
                column.validate(full=True)  # a file may say anything
                yield column, (file.size or 0) * (number + 1) // num_batches if is_file else source.tell()


def _check_column(file: Input, schema: Any) -> None:
    import pyarrow as pa

    if COLUMN not in schema.names:
        columns = ", ".join(schema.names)
        raise InputError(
            f"{file} has no column {COLUMN!r}, only {columns}; rename the one of ids",
            "no-column",
            option="inputs",
            given=file.name,
        )
    kind, types = schema.field(COLUMN).type, pa.types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not (is_list and types.is_integer(kind.value_type)):
        raise InputError(
            f"{file}: column {COLUMN!r} is {kind}, not a list of integers; write lists of ids there",
            "wrong-column-type",
            option="inputs",
            given=file.name,
        )


def _lists(file: Input, column: Any, first: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The ids of some rows, one after the other, and offsets [num_rows + 1]. first: number of the first row, from 0."""
    import pyarrow.compute as pc

    flat = column.flatten()
    if column.null_count or flat.null_count:
        nulls = column.is_null().to_numpy(zero_copy_only=False)
        rows = np.flatnonzero(nulls) if nulls.any() else [
            row for row in range(len(column)) if column[row].values.null_count
        ]  # fmt: skip
        raise InputError(
            f"{file}, row {first + int(rows[0]) + 1}: the ids, or one of them, are null; leave the row out",
            "bad-row",
            option="inputs",
            given=file.name,
        )
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
