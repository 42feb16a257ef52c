"""Datasets of mosaicml-streaming in its format MDS → their documents. docs/format.md says what is taken."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import InputError, UsageError
from bertdata.sources.idfile import Ids, IdsFile, stated_dtype
from bertdata.sources.indexed import COLUMNS, Block, Index, SampleFile, count_of, open_indices, require_size
from bertdata.sources.inputs import Input

_DTYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 32: "uint32", 33: "int32", 64: "uint64", 65: "int64"}
_CHECKED = {name for name in hashlib.algorithms_guaranteed if not name.startswith("shake_")}


class _Encoding(NamedTuple):
    """How a column stores ids. A sample states what the encoding does not, in bytes before the ids."""

    dtype: np.dtype[Any] | None  # None: each sample states it
    states_shape: bool  # whether each sample states it


@dataclass(frozen=True)
class _Shard:
    samples: SampleFile
    sizes: list[int | None]  # of the columns; None: each sample states it
    column: int
    encoding: _Encoding
    digests: dict[str, str]  # name of a hash → hex digest of the file

    def documents(self) -> Iterator[Ids]:
        _check_digests(self.samples.file, self.digests)
        for block in self.samples.blocks():
            starts, stops = block.column(self.sizes, self.column)
            starts, dtype = _values(block, starts, stops, self.encoding)
            yield block.ids(starts, stops, dtype)


def open_mds(name: str, dtype: str | None) -> IdsFile:
    """name: a directory or a URL with an index.json, or a directory of such directories. dtype: of ids as bytes."""
    shards, files = list[_Shard](), list[Input]()
    for index in open_indices(name):
        with index.parsing():
            shards += [_shard(index, entry, dtype) for entry in index.content["shards"]]
        files.append(index.file)
    files += [shard.samples.file for shard in shards]
    unchecked = {
        each for shard in shards if shard.digests and not shard.digests.keys() & _CHECKED for each in shard.digests
    }
    note = None
    if unchecked:
        note = f"note: the checksums of {name} are not checked, as there is no {' or '.join(sorted(unchecked))} here"

    def some_documents() -> Iterator[Ids]:
        before = 0
        for shard in shards:
            for some in shard.documents():
                yield some._replace(bytes_read=before + some.bytes_read)
            before += shard.samples.file.size or 0

    return IdsFile(files, sum(shard.samples.file.size or 0 for shard in shards), some_documents, note=note)


def _shard(index: Index, entry: dict[str, Any], dtype: str | None) -> _Shard:
    """What an index says of a shard. Raises InputError if that cannot be, or cannot be read."""
    version, format, compression = entry["version"], entry["format"], entry["compression"]
    if format != "mds" or version != 2:
        sentence = f"{index.file} has a shard of the format {format} {version}, and only mds 2 is read; write MDS"
        raise InputError(sentence, "unsupported", option="inputs", given=index.file.name)
    raw, packed = entry["raw_data"], entry["zip_data"]
    is_packed = packed is not None and not index.has(raw["basename"])
    if is_packed and str(compression).partition(":")[0] != "zstd":
        sentence = f"{index.file} has shards of {compression}, and only zstd is read; put decompressed ones beside them"
        raise InputError(sentence, "unsupported", option="inputs", given=index.file.name)
    stated = packed if is_packed else raw
    file = index.named(stated["basename"])
    require_size(file, count_of(stated["bytes"]))
    names, sizes = entry["column_names"], [count_of(size or 0) or None for size in entry["column_sizes"]]
    column = next((names.index(each) for each in COLUMNS if each in names), None)
    if column is None:
        sentence = f"{file} has no column {COLUMNS[0]!r}, only {', '.join(names)}; write ids to a column of this name"
        raise InputError(sentence, "no-column", option="inputs", given=file.name)
    encoding = _encoding(file, entry["column_encodings"][column], sizes[column], dtype)
    samples = SampleFile(file, count_of(entry["samples"]), count_of(raw["bytes"]), is_packed)
    return _Shard(samples, sizes, column, encoding, {str(key): str(each) for key, each in stated["hashes"].items()})


def _encoding(file: Input, encoding: str, size: int | None, dtype: str | None) -> _Encoding:
    """Parses `bytes`, `ndarray`, `ndarray:DTYPE` or `ndarray:DTYPE:SHAPE`. size: of the column, if always the same."""
    kind, *parts = encoding.split(":")
    if encoding == "bytes":
        if dtype is None:
            sentence = f"{file} has ids as bytes, which do not say how wide an id is; give --dtype, such as int64"
            raise UsageError(sentence, "missing", option="dtype")
        return _Encoding(np.dtype(dtype), states_shape=False)
    if kind == "ndarray" and len(parts) < 3 and (not parts or parts[0] in _DTYPES.values()):
        shape = [int(axis) for axis in parts[1].split(",")] if len(parts) == 2 else []
        stated = np.dtype(parts[0]) if parts else None
        is_list = max(shape, default=1) == math.prod(shape) and min(shape, default=1) > 0
        if is_list and size == (math.prod(shape) * stated.itemsize if shape and stated else None):
            if dtype is not None:
                raise stated_dtype(file.name, dtype)
            return _Encoding(stated, not shape)
    sentence = f"{file} has ids as {encoding}, which is no list of integers; write them as ndarray:uint32"
    raise InputError(sentence, "wrong-column-type", option="inputs", given=file.name)


def _values(
    block: Block, starts: NDArray[np.int64], stops: NDArray[np.int64], encoding: _Encoding
) -> tuple[NDArray[np.int64], np.dtype[Any]]:
    """Where the ids of each sample begin, behind its dtype and shape, and their dtype."""
    dtype = encoding.dtype
    if dtype is None:
        _require_arrays(block, starts < stops)
        codes, starts = block.data[starts], starts + 1
        _require_arrays(block, (codes == codes[0]) & np.isin(codes, list(_DTYPES)))
        dtype = np.dtype(_DTYPES[int(codes[0])])
    if not encoding.states_shape:
        return starts, dtype
    _require_arrays(block, starts < stops)
    codes, begins = block.data[starts], starts + 1
    num_axes, widths = (codes >> 2).astype(np.int64), 1 << (codes & 3).astype(np.int64)
    values = begins + num_axes * widths
    _require_arrays(block, (values <= stops) & (num_axes > 0))
    counts = ((stops - values) // dtype.itemsize).astype(np.uint64)
    is_array = np.zeros(starts.size, np.bool_)
    for code in np.unique(codes).tolist():
        chosen = codes == code
        shapes = block.gather(begins[chosen], (code >> 2) << (code & 3)).view(f"<u{1 << (code & 3)}").astype(np.uint64)
        is_array[chosen] = (shapes.max(1) == counts[chosen]) & ((shapes != 1).sum(1) <= 1)
    _require_arrays(block, is_array)
    return values, dtype


def _require_arrays(block: Block, is_array: NDArray[np.bool_]) -> None:
    """Raises InputError for the first sample whose ids are no array."""
    if not is_array.all():
        sentence = f"{block.name_of_first(~is_array)}: its ids are no list of integers; write the dataset again"
        raise InputError(sentence, "bad-row", option="inputs", given=block.file.name)


def _check_digests(file: Input, digests: dict[str, str]) -> None:
    """Raises InputError if a file has another digest than is stated. Those of unknown hashes are not checked."""
    for name in digests.keys() & _CHECKED:
        with file.open() as stream:
            found = hashlib.file_digest(stream, partial(hashlib.new, name, usedforsecurity=False)).hexdigest()
        if found != digests[name].lower():
            sentence = f"{file} has another {name} than its index states; get the file again"
            raise InputError(sentence, "damaged", option="inputs", given=file.name)
