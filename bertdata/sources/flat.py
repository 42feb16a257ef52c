"""Ids one after the other, without a description: the files of nanoGPT and llm.c → their documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import InputError
from bertdata.sources import idfile
from bertdata.sources.idfile import FileArray, Ids, IdsFile, byte_of, ended_by, file_of_ids, require_room, stated_dtype

_LLM_C_HEADER_BYTES = 1024
_LLM_C_DTYPES = {(20240520, 1): "uint16", (20240801, 7): "uint32"}  # magic and version → ids
_JUDGED_BYTES = 1 << 21  # of ids alone, for the width of an id
_FEWEST_JUDGED = 16  # pairs of halves


def open_nanogpt(name: str, end_token: int, given: str | None) -> IdsFile:
    """Ids alone, or the file of llm.c: 256 int32, of which the first three are magic, version and number of ids.

    given: the dtype of ids alone; None: it is guessed.
    """
    data = file_of_ids(name)
    size, offset, dtype, note = data.size or 0, 0, np.dtype(given or "uint16"), None
    if size >= _LLM_C_HEADER_BYTES:
        magic, version, count = FileArray(data, "<i4", 3)[:].tolist()
        if (magic, version) in _LLM_C_DTYPES:
            if given is not None:
                raise stated_dtype(name, given)
            offset, dtype = _LLM_C_HEADER_BYTES, np.dtype(_LLM_C_DTYPES[magic, version])
            if size != (expected := offset + count * dtype.itemsize):
                sentence = f"{data} has {size:,} bytes, and by its header {expected:,}; get the file again"
                raise InputError(sentence, "cut-short", option="inputs", given=name)
    if not offset and given is None:
        dtype, reason = _guess(FileArray(data, np.uint8, min(size, _JUDGED_BYTES))[:])
        note = f"reads {data} as {dtype.name}, {reason}; --dtype names another"
    if size % dtype.itemsize:
        sentence = f"{data} has {size:,} bytes, no multiple of an id of {dtype.name}; name its --dtype or --format"
        raise InputError(sentence, "not-of-format", option="inputs", given=name)
    require_room(data, dtype, end_token)
    ids = FileArray(data, dtype, (size - offset) // dtype.itemsize, offset)

    def blocks() -> Iterator[Ids]:
        for start in range(0, ids.size, idfile.BLOCK_IDS):
            some, width = ids[start : start + idfile.BLOCK_IDS], dtype.itemsize
            documents = np.array([0, some.size])
            yield Ids(some, documents, None, byte_of(data, width, start, offset), (start + some.size) * width)

    return IdsFile([data], size - offset, lambda: ended_by(end_token, blocks()), note=note)


def _guess(start: NDArray[np.uint8]) -> tuple[np.dtype[Any], str]:
    """The dtype of ids by the first bytes of their file, and why it is that.

    In ids that are wider than they must be, little-endian, every second half is mostly 0, and the others are not. Pairs
    of zeros, which may be padding, say nothing.
    """
    for dtype, half in (("int64", 4), ("uint32", 2)):
        pairs = start[: start.size // (2 * half) * (2 * half)].view(f"<u{half}").reshape(-1, 2)
        pairs = pairs[pairs.any(1)]
        lower, upper = (pairs == 0).sum(0).tolist()
        if len(pairs) >= _FEWEST_JUDGED and 5 * (upper - lower) >= 2 * len(pairs):
            return np.dtype(dtype), f"as most of every second {half} bytes are 0"
    return np.dtype("uint16"), "as nanoGPT writes ids"
