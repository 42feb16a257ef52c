"""Megatron's indexed datasets, .bin and .idx → their documents."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import InputError
from bertdata.sources.idfile import FileArray, Ids, IdsFile, byte_of, file_of_ids, in_blocks, steps_of
from bertdata.sources.inputs import Input

_HEADER = "<9sQBQQ"  # magic, version, dtype, number of sequences, number of document indices
_MAGIC = b"MMIDIDX\0\0"
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}  # 6 and 7 are no integers
_SEQUENCES = 1 << 16  # that are checked at a time


def _arrays_of(index: Input) -> tuple[FileArray, FileArray, FileArray, np.dtype[Any]]:
    """The three arrays of a .idx of Megatron, and the dtype of ids.

    These are int32 [num_sequences], their lengths in ids; int64 [num_sequences], the byte of the .bin at which each
    begins; and int64 [num_documents + 1], half-open offsets of documents into sequences. Raises InputError for a header
    that cannot be read, or does not fit the size of the file.
    """
    size, begin = index.size or 0, struct.calcsize(_HEADER)
    content = FileArray(index, np.uint8, min(size, begin))[:].tobytes()
    if content[:9] != _MAGIC or size < begin:
        sentence = f"{index} is no index of a Megatron dataset, as it does not begin with MMIDIDX; give the .idx of one"
        raise InputError(sentence, "not-of-format", option="inputs", given=index.name)
    _, version, code, num_sequences, num_documents = struct.unpack(_HEADER, content)
    if version != 1:
        sentence = f"{index} has version {version}, and only 1 can be read; write the dataset again with Megatron"
        raise InputError(sentence, "other-version", option="inputs", given=index.name)
    if code not in _DTYPES:
        sentence = f"{index} has dtype {code}, which is no kind of integer, so it is not for ids; give files of ids"
        raise InputError(sentence, "not-of-format", option="inputs", given=index.name)
    expected = begin + 12 * num_sequences + 8 * num_documents
    if num_sequences and size == expected + num_sequences:
        sentence = f"{index} gives each sequence a mode, as for images among text; write the text alone with Megatron"
        raise InputError(sentence, "unsupported", option="inputs", given=index.name)
    if size != expected:
        sentence = f"{index} has {size:,} bytes, and by its header {expected:,}; get the file again"
        raise InputError(sentence, "cut-short", option="inputs", given=index.name)
    return (
        FileArray(index, "<i4", num_sequences, begin),
        FileArray(index, "<i8", num_sequences, begin + 4 * num_sequences),
        FileArray(index, "<i8", num_documents, begin + 12 * num_sequences),
        np.dtype(_DTYPES[code]),
    )


def prefix_of(name: str) -> str:
    """PREFIX of PREFIX, PREFIX.bin or PREFIX.idx."""
    return name.removesuffix(".bin") if name.endswith(".bin") else name.removesuffix(".idx")


def open_megatron(name: str) -> IdsFile:
    """name: PREFIX, PREFIX.bin or PREFIX.idx."""
    prefix = prefix_of(name)
    index, data = file_of_ids(f"{prefix}.idx"), file_of_ids(f"{prefix}.bin")
    lengths, pointers, documents, dtype = _arrays_of(index)
    num_sequences, end, empty_sentences = lengths.size, 0, 0
    for start in range(0, num_sequences, _SEQUENCES):
        some = lengths[start : start + _SEQUENCES].astype(np.int64)
        ends = end + np.cumsum(some) * dtype.itemsize
        wrong = np.flatnonzero((some < 0) | (pointers[start : start + _SEQUENCES] != ends - some * dtype.itemsize))
        if wrong.size:
            number = start + int(wrong[0])
            sentence = f"{index}: sequence {number} does not begin where the one before it ends; write it again"
            raise InputError(sentence, "not-of-format", option="inputs", given=index.name)
        end, empty_sentences = int(ends[-1]), empty_sentences + int((some == 0).sum())
    if end != data.size:
        sentence = f"{data} has {data.size:,} bytes, and {index} describes {end:,}; get both files again"
        raise InputError(sentence, "cut-short", option="inputs", given=data.name)
    smallest, largest = steps_of(documents)
    if not documents.size or documents.at(0) != 0 or documents.at(-1) != num_sequences or smallest < 0:
        sentence = f"{index}: its document indices do not ascend from 0 to {num_sequences:,}; write it again"
        raise InputError(sentence, "not-of-format", option="inputs", given=index.name)
    ids, has_sentences = FileArray(data, dtype, end // dtype.itemsize), largest > 1

    def first_ids(sequences: NDArray[Any]) -> NDArray[np.int64]:
        """The index of the first id of ascending sequences; `num_sequences` is the end."""
        first, last = int(sequences[0]), int(sequences[-1])
        return np.append(pointers[first : last + 1], end)[sequences - first] // dtype.itemsize

    def some_documents() -> Iterator[Ids]:
        for first, offsets in in_blocks(documents.size - 1, lambda first, stop: first_ids(documents[first:stop])):
            start, stop = int(offsets[0]), int(offsets[-1])
            sentences = None
            if has_sentences:
                several = slice(documents.at(first), documents.at(first + offsets.size - 1))
                sentences = pointers[several][lengths[several] > 0] // dtype.itemsize - start
            place = byte_of(data, dtype.itemsize, start)
            yield Ids(ids[start:stop], offsets - start, sentences, place, stop * dtype.itemsize)

    return IdsFile([index, data], end, some_documents, dtype.name, has_sentences, empty_sentences)
