"""Datasets of mosaicml-streaming in its format MDS → their documents. docs/format.md says what is taken."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import InputError, UsageError
from bertdata.sources.idfile import Ids, IdsFile, stated_dtype
from bertdata.sources.indexed import (
    COLUMNS,
    KNOWN_HASHES,
    Block,
    Index,
    SampleFile,
    count_of,
    documents_of,
    open_indices,
    require_size,
)
from bertdata.sources.inputs import Input

_DTYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 32: "uint32", 33: "int32", 64: "uint64", 65: "int64"}


def open_mds(name: str, dtype: str | None) -> IdsFile:
    """name: a directory or a URL with an index.json, or a directory of such directories. dtype: of ids as bytes."""
    shards, files = list[SampleFile](), list[Input]()
    for index in open_indices(name):
        with index.parsing():
            shards += [_shard(index, entry, dtype) for entry in index.content["shards"]]
        files.append(index.file)
    files += [shard.file for shard in shards]
    unchecked = {each for shard in shards if not shard.digests.keys() & KNOWN_HASHES for each in shard.digests}
    note = None
    if unchecked:
        note = f"note: the checksums of {name} are not checked, as there is no {' or '.join(sorted(unchecked))} here"
    num_bytes = sum(shard.file.size or 0 for shard in shards)
    return IdsFile(files, num_bytes, lambda: documents_of(shards), note=note)


def _shard(index: Index, entry: dict[str, Any], dtype: str | None) -> SampleFile:
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
    stored = _encoding(file, entry["column_encodings"][column], sizes[column], dtype)
    return SampleFile(
        file=file,
        num_samples=count_of(entry["samples"]),
        num_bytes=count_of(raw["bytes"]),
        ids_of=partial(_ids_of, sizes, column, *stored),
        is_zstd=is_packed,
        digests={str(key): str(each) for key, each in stated["hashes"].items()},
    )


def _encoding(file: Input, encoding: str, size: int | None, dtype: str | None) -> tuple[np.dtype[Any] | None, bool]:
    """Parses `bytes`, `ndarray`, `ndarray:DTYPE` or `ndarray:DTYPE:SHAPE`. size: of the column, if always the same.

    Returns the dtype of ids, None if each sample states it, and whether each sample states its shape.
    """
    kind, *parts = encoding.split(":")
    if encoding == "bytes":
        if dtype is None:
            sentence = f"{file} has ids as bytes, which do not say how wide an id is; give --dtype, such as int64"
            raise UsageError(sentence, "missing", option="dtype")
        return np.dtype(dtype), False
    if kind == "ndarray" and len(parts) < 3 and (not parts or parts[0] in _DTYPES.values()):
        shape = [int(axis) for axis in parts[1].split(",")] if len(parts) == 2 else []
        stated = np.dtype(parts[0]) if parts else None
        is_list = max(shape, default=1) == math.prod(shape) and min(shape, default=1) > 0
        if is_list and size == (math.prod(shape) * stated.itemsize if shape and stated else None):
            if dtype is not None:
                raise stated_dtype(file.name, dtype)
            return stated, not shape
    sentence = f"{file} has ids as {encoding}, which is no list of integers; write them as ndarray:uint32"
    raise InputError(sentence, "wrong-column-type", option="inputs", given=file.name)


def _ids_of(sizes: list[int | None], column: int, dtype: np.dtype[Any] | None, states_shape: bool, block: Block) -> Ids:
    """The ids of each sample. sizes: of the columns. dtype, states_shape: as `_encoding` returns them."""
    starts, stops = block.column(sizes, column)
    if dtype is None:
        _require_arrays(block, starts < stops)
        codes, starts = block.data[starts], starts + 1
        _require_arrays(block, (codes == codes[0]) & np.isin(codes, list(_DTYPES)))
        dtype = np.dtype(_DTYPES[int(codes[0])])
    if not states_shape:
        return block.ids(starts, stops, dtype)
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
    return block.ids(values, stops, dtype)


def _require_arrays(block: Block, is_array: NDArray[np.bool_]) -> None:
    """Raises InputError for the first sample whose ids are no array."""
    if not is_array.all():
        sentence = f"{block.name_of_first(~is_array)}: its ids are no list of integers; write the dataset again"
        raise InputError(sentence, "bad-row", option="inputs", given=block.file.name)
