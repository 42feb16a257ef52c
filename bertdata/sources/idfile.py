"""An opened input of ids: its documents, some at a time. Each format has a file of its own.

The documents of a file are read some at a time, and not mapped into memory: a map of a file that is cut short meanwhile
would end the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import InputError, UsageError
from bertdata.sources.inputs import Input, local
from bertdata.sources.kernels import find_token

BLOCK_IDS = 1 << 19  # ids that are given at a time, unless a document has more
_DOCUMENTS = 1 << 16  # documents that are looked at at a time


class Ids(NamedTuple):
    """Some documents of an input, in order."""

    ids: NDArray[Any]  # [n] integers of any kind
    documents: NDArray[np.int64]  # [num_documents + 1] half-open offsets into ids; a document may have no id
    sentences: NDArray[np.int64] | None  # where sentences begin in ids, strictly ascending; None: not known
    place: Callable[[int], str]  # index of an id → 'file, byte n' or 'file, row n'
    bytes_read: int  # of num_bytes of the input
    unit: int = 0  # to which the documents belong, where they were divided into units

    def part(self, first: int, stop: int) -> Ids:
        """Documents `first` to `stop` - 1."""
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
    """An input of ids, whose header and index were checked."""

    files: list[Input]  # all that are read
    num_bytes: int  # of the files of ids
    documents: Callable[[], Iterator[Ids]]
    """Raises InputError for a row that holds no list of integers."""
    dtype: str | None = None  # of the ids of Megatron
    has_sentences: bool = False  # whether a document has several
    empty_sentences: int = 0  # how many sentences without an id are left out
    note: str | None = None  # a line that the user should read


class FileArray:
    """Numbers in a file, one after the other, that are read where they are used. Holds no file open."""

    def __init__(self, file: Input, dtype: Any, size: int, offset: int = 0) -> None:
        """offset: of the first of `size` numbers, in bytes."""
        self.dtype, self.size, self._file, self._offset = np.dtype(dtype), size, file, offset

    def __getitem__(self, part: slice) -> NDArray[Any]:
        """A copy of the numbers of a slice without a step. Raises InputError if the file was changed or removed."""
        start, stop, _ = part.indices(self.size)
        count, offset = max(0, stop - start), self._offset + start * self.dtype.itemsize
        if self._file.now() == self._file:
            numbers = np.fromfile(self._file.name, self.dtype, count, offset=offset)
            if numbers.size == count:
                return numbers
        sentence = f"{self._file} changed while it was read; run again when nobody changes it"
        raise InputError(sentence, "changed", option="inputs", given=self._file.name)

    def at(self, index: int) -> int:
        """One number; a negative index counts from the end."""
        index += self.size * (index < 0)
        return int(self[index : index + 1][0])


def file_of_ids(path: str | Path) -> Input:
    """Describe a file of this machine. Raises InputError if it cannot be read, is a pipe, or is compressed."""
    file = local(path)
    if file.is_stream:
        sentence = f"{file} is a pipe, and ids are read from files; write them to a file first"
        raise InputError(sentence, "read-once", option="inputs", given=file.name)
    if file.compression:
        sentence = f"{file} is compressed, and ids are read as they are; decompress it first"
        raise InputError(sentence, "unsupported", option="inputs", given=file.name)
    return file


def steps_of(offsets: FileArray) -> tuple[int, int]:
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
        num = max(1, int(np.searchsorted(starts, starts[0] + BLOCK_IDS, side="right")) - 1)
        yield first, starts[: num + 1]
        first, ahead = first + num, min(2 * num, _DOCUMENTS)  # looks at few documents in vain


def slices_of(offsets: NDArray[np.int64]) -> Callable[[int, int], NDArray[np.int64]]:
    """What `in_blocks` takes, of offsets that are in memory."""
    return lambda first, stop: offsets[first:stop]


def ended_by(token: int, blocks: Iterable[Ids]) -> Iterator[Ids]:
    """The same ids in documents that end after each `token`, which their dtype can hold, and at the end of the ids."""
    begun = list[Ids]()  # the beginning of a document whose end was not seen yet
    for some in blocks:
        ends = np.empty(some.ids.size + 1, np.int64)
        ends = ends[: find_token(some.ids, some.ids.dtype.type(token), ends)]
        if ends.size:
            cut, before = int(ends[-1]), sum(each.ids.size for each in begun)
            yield _joined([*begun, some], before + cut, before + ends)
            begun, some = [], _after(some, cut)
        if some.ids.size:
            begun.append(some)
    if begun:
        size = sum(each.ids.size for each in begun)
        yield _joined(begun, size, np.array([size]))


def _joined(parts: list[Ids], size: int, ends: NDArray[np.int64]) -> Ids:
    """The first `size` ids of all parts, with documents that end there."""
    ids = parts[0].ids if len(parts) == 1 else np.concatenate([part.ids for part in parts])
    starts = np.cumsum([0, *(part.ids.size for part in parts)])

    def place(index: int) -> str:
        number = int(np.searchsorted(starts, index, side="right")) - 1
        return parts[number].place(index - int(starts[number]))

    return Ids(ids[:size], np.append(0, ends), None, place, parts[-1].bytes_read)


def _after(some: Ids, start: int) -> Ids:
    return some._replace(ids=some.ids[start:], place=lambda index: some.place(start + index))


def byte_of(file: Input, width: int, start: int, offset: int = 0) -> Callable[[int], str]:
    return lambda index: f"{file}, byte {offset + (start + index) * width}"


def item_of(file: Input, noun: str, first: int, offsets: NDArray[np.int64]) -> Callable[[int], str]:
    """The `place` of Ids whose documents are items of a file. first: index of the first one."""

    def place(index: int) -> str:
        return f"{file}, {noun} {first + int(np.searchsorted(offsets - offsets[0], index, side='right'))}"

    return place


def stated_dtype(name: str, dtype: str) -> UsageError:
    """The error for a dtype that was given although the file says it."""
    sentence = f"--dtype is for ids whose file does not say how wide they are, and {name} says it; leave it out"
    return UsageError(sentence, "conflict", option="dtype", given=dtype)


def require_room(file: Input, dtype: np.dtype[Any], end_token: int) -> None:
    """Raises InputError if the ids of a file cannot hold the token that ends a document."""
    if end_token > np.iinfo(dtype).max:
        sentence = f"{file}: {dtype.name} cannot hold the end token {end_token}; give the --tokenizer that made the ids"
        raise InputError(sentence, "id-outside-vocabulary", option="tokenizer")
