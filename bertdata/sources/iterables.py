"""A Python iterable of texts, or of ids, as an input: each item is a document.

Texts are read like lines of a JSON-lines file, and ids like rows of lists. So a build or an import gives the same
dataset from an iterable and from such a file.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import InputError, UsageError
from bertdata.sources import ids as ids_module
from bertdata.sources.ids import Ids, IdsFile, place_of_item
from bertdata.sources.inputs import Input
from bertdata.sources.streams import CHUNK

NAME = "the iterable"
_REMEMBERED = 1 << 20  # number of last read items that an error can name by number


def names_of(inputs: Any) -> list[str] | None:
    """Return the names of files, directories and URLs, or None for any other iterable."""
    named = [inputs] if isinstance(inputs, str | os.PathLike) else inputs
    is_names = isinstance(named, list | tuple) and all(isinstance(each, str | os.PathLike) for each in named)
    return [str(each) for each in named] if is_names else None


def open_texts(texts: Any, *, strict: bool) -> Input:
    """Return an iterable of texts as an input. Reading it raises InputError for an item that is not a text.

    strict: also raise it for an item that is not valid UTF-8.
    """
    return Input(NAME, None, None, items=Items(texts, partial(_json_lines, strict=strict)))


def _json_lines(texts: Iterator[tuple[int, Any]], *, strict: bool) -> Iterator[bytes]:
    """Yield lines of JSON, some at a time. Invalid bytes stay as they are, and lone surrogates are escaped."""
    lines, size = list[bytes](), 0
    for number, text in texts:
        if not isinstance(text, str | bytes):
            raise _wrong_item(number, text, "str or bytes")
        errors = "strict" if strict else "surrogateescape" if isinstance(text, bytes) else "backslashreplace"
        try:
            decoded = text if isinstance(text, str) else text.decode(errors=errors)
            lines.append(json.dumps({"text": decoded}, ensure_ascii=False).encode(errors=errors))
        except UnicodeError:
            sentence = f"item {number} of the iterable is not valid UTF-8; correct it, or build without strict"
            raise InputError(sentence, "not-text", option="inputs", given=number) from None
        size += len(lines[-1])
        if size >= CHUNK:
            yield b"\n".join([*lines, b""])
            lines, size = [], 0
    yield b"\n".join([*lines, b""])


def open_arrays(arrays: Any) -> IdsFile:
    """Return an iterable of lists or arrays of ids as an input. Reading it raises InputError for any other item."""

    def documents(numbered: Iterator[tuple[int, Any]]) -> Iterator[Ids]:
        some, size, first = list[NDArray[Any]](), 0, 0
        for number, item in numbered:
            some.append(_ids_of(item, number))
            size += 1 + some[-1].size
            if size >= ids_module.BLOCK_IDS:
                yield _joined(file, some, first)
                some, size, first = [], 0, number
        if some:
            yield _joined(file, some, first)

    items = Items(arrays, documents)
    file = Input(NAME, None, None, items=items)
    return IdsFile([file], 0, lambda skipped: iter(items))


def _joined(file: Input, some: list[NDArray[Any]], first: int) -> Ids:
    """Return the concatenation of documents. first: number of documents before them."""
    offsets = np.append(0, np.cumsum([ids.size for ids in some], dtype=np.int64))
    return Ids(np.concatenate(some), offsets, None, partial(place_of_item, file, "item", first, offsets), 0)


def _ids_of(item: Any, number: int) -> NDArray[Any]:
    try:
        ids = np.asarray(item)
    except (TypeError, ValueError):  # nested lists of different lengths, or not an array in host memory
        raise _wrong_item(number, item, "a list or an array of ids") from None
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise _wrong_item(number, item, "a list or an array of ids")
    # An empty list has no dtype of integers, and int64 with uint64 would become float64.
    return ids.astype(np.uint8 if not ids.size else np.int64 if ids.dtype == np.uint64 else ids.dtype, copy=False)


def _wrong_item(number: int, item: Any, expected: str) -> InputError:
    advice = "give names of files as a list" if isinstance(item, os.PathLike) else "correct it"
    sentence = f"item {number} of the iterable is of type {type(item).__name__}, and must be {expected}; {advice}"
    return InputError(sentence, "bad-row", option="inputs", given=number)


class Items:
    """A Python iterable, read once.

    Computes a checksum of the items of each unit. The record of a finished unit stores the checksum, and a later call
    compares it with the checksum of its items.
    """

    def __init__(self, items: Any, pieces_of: Callable[[Iterator[tuple[int, Any]]], Iterator[Any]]) -> None:
        """pieces_of: all (index, item) → pieces. Raises UsageError if `items` is not iterable."""
        if not (hasattr(items, "__iter__") or hasattr(items, "__getitem__")):
            sentence = f"inputs is of type {type(items).__name__}; give names of files, or an iterable of documents"
            raise UsageError(sentence, "malformed", option="inputs", given=items)
        self.checksums = dict[int, int]()  # checksums of the units read so far
        self._items, self._pieces_of = items, pieces_of
        self._unit, self._finished = -1, deque[tuple[int, int]]()
        self._num_items, self._recent = 0, deque[tuple[int, NDArray[np.int64]]]()

    def __iter__(self) -> Iterator[Any]:
        """Yield the pieces. Exceptions of the iterable pass unchanged."""
        try:
            yield from self._pieces_of(enumerate(self._items, 1))
        except BaseException as error:
            vars(error)["is_of_iterable"] = True  # files.naming does not change it
            raise

    def expect(self, finished: Mapping[int, int]) -> None:
        """Set the checksums of finished units, to compare with."""
        self._finished = deque(sorted(finished.items()))

    def add(self, unit: int, *contents: Any) -> None:
        """Add contents of a unit to its checksum. Units come in order. Raises InputError like `end_unit`."""
        if unit != self._unit and self._unit >= 0:
            self.end_unit()
        self._unit = unit
        for content in contents:
            self.checksums[unit] = zlib.crc32(content, self.checksums.get(unit, 0))

    def remember(self, starts: NDArray[np.int64]) -> None:
        """Store the offsets of the next items in their JSON lines, int64 [n], for `place`."""
        self._recent.append((self._num_items, starts))
        self._num_items += starts.size
        while self._num_items - self._recent[0][0] > _REMEMBERED + starts.size:
            self._recent.popleft()

    def place(self, start: int) -> str:
        """Return 'item n of the iterable' for an offset in the JSON lines; only the last 2**20 items have numbers."""
        for number, starts in reversed([*self._recent]):
            if starts[0] <= start:
                return f"item {number + starts.searchsorted(start, side='right')} of {NAME}"
        return NAME

    def end_unit(self, *, is_last: bool = False) -> None:
        """Raise InputError if a finished unit was made from different items."""
        expected = self._finished.popleft() if self._finished else None
        if (expected and expected != (self._unit, self.checksums.get(self._unit))) or (is_last and self._finished):
            sentence = "the items are not those of the interrupted call; repeat them, or give overwrite=True"
            raise InputError(sentence, "other-settings", option="inputs")
