"""Ids one after the other, without a description: the files of nanoGPT, llm.c and datatrove → their documents."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import InputError
from bertdata.sources.idfile import FileArray, Ids, IdsFile, byte_of, in_blocks, steps_of
from bertdata.sources.inputs import local
from bertdata.sources.kernels import find_token

_LLM_C_HEADER_BYTES = 1024
_LLM_C_DTYPES = {(20240520, 1): "uint16", (20240801, 7): "uint32"}  # magic and version → ids
_BLOCK_IDS = 1 << 19  # ids that are given at a time, unless a document has more
_JUDGED_IDS = 1 << 20  # of a file without a header, for the width of its ids
_FEWEST_JUDGED = 32


def open_nanogpt(name: str, end_token: int) -> IdsFile:
    """Raw uint16, or the file of llm.c: 256 int32, of which the first three are magic, version and number of ids."""
    data = local(name)
    size, offset, dtype = data.size or 0, 0, np.dtype("<u2")
    if size >= _LLM_C_HEADER_BYTES:
        magic, version, count = FileArray(data, "<i4", 3)[:].tolist()
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
    ids, token = FileArray(data, dtype, (size - offset) // dtype.itemsize, offset), dtype.type(end_token)
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
            part, place = some[: int(ends[-1])], byte_of(data, dtype.itemsize, start, offset)
            start, window = start + part.size, _BLOCK_IDS
            yield Ids(part, np.append(0, ends), None, place, start * dtype.itemsize)

    return IdsFile([data], size - offset, some_documents)


def _are_halves(ids: NDArray[np.uint16]) -> bool:
    """Whether these are rather wider ids, little-endian: every second one is mostly 0, and the others are not."""
    lower, upper = (int(np.count_nonzero(ids[first::2] == 0)) for first in (0, 1))
    return ids.size >= _FEWEST_JUDGED and 5 * (upper - lower) >= ids.size


def open_datatrove(name: str) -> IdsFile:
    """Raw ids of 2 or 4 bytes, and beside them `.index`: uint64, where each document ends in ids."""
    data, index = local(name), local(f"{name}.index")
    if (index.size or 0) % 8:
        raise InputError(
            f"{index} has {index.size:,} bytes, which is no multiple of the 8 bytes of an offset; get the file again",
            "cut-short",
            option="inputs",
            given=index.name,
        )
    size, ends = data.size or 0, FileArray(index, "<i8", (index.size or 0) // 8)
    total = ends.at(-1) if ends.size else 0
    width = next((width for width in (2, 4) if size == total * width), None)
    if width is None or steps_of(ends)[0] < 0 or (ends.size and ends.at(0) < 0):
        raise InputError(
            f"{index} does not fit {name}: its offsets must ascend to the number of ids, and end at {total:,}, while "
            f"{name} has {size:,} bytes, with 2 or 4 for an id; get both files again",
            "not-of-format",
            option="inputs",
            given=index.name,
        )
    ids = FileArray(data, f"<u{width}", size // width)

    def starts_of(first: int, stop: int) -> NDArray[np.int64]:
        return ends[first - 1 : stop - 1] if first else np.append(0, ends[: stop - 1])

    def some_documents() -> Iterator[Ids]:
        for _, offsets in in_blocks(ends.size, starts_of):
            start, stop = int(offsets[0]), int(offsets[-1])
            yield Ids(ids[start:stop], offsets - start, None, byte_of(data, width, start), stop * width)

    return IdsFile([data, index], size, some_documents)
