"""A Python iterable of texts, or of ids, as an input: each item is a document.

Texts are read as the lines of the JSON-lines file that has them, and ids as rows of lists. So a build or an import of
an iterable gives the same dataset as one of such a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import InputError
from bertdata.sources import idfile
from bertdata.sources.idfile import Ids, IdsFile, item_of
from bertdata.sources.inputs import Input
from bertdata.sources.items import Items
from bertdata.sources.streams import CHUNK

NAME = "the iterable"


def names_of(inputs: Any) -> list[str] | None:
    """Return the names of files, directories and URLs that are given, or None for any other iterable."""
    named = [inputs] if isinstance(inputs, str | os.PathLike) else inputs
    is_names = isinstance(named, list | tuple) and all(isinstance(each, str | os.PathLike) for each in named)
    return [str(each) for each in named] if is_names else None


def open_texts(texts: Any, *, strict: bool) -> Input:
    """Return an input of an iterable of texts. Reading it raises InputError for an item that is not a text.

    strict: also for an item that is not valid UTF-8.
    """
    return Input(NAME, None, None, items=Items(texts, lambda numbered: _json_lines(numbered, strict)))


def _json_lines(texts: Iterator[tuple[int, Any]], strict: bool) -> Iterator[bytes]:
    """Yield lines of JSON, some at a time. Invalid bytes stay as they are, and lone surrogates are escaped."""
    lines, size = list[bytes](), 0
    for number, text in texts:
        if strict and isinstance(text, str | bytes):
            _require_utf8(number, text)
        if isinstance(text, bytes):
            text, errors = text.decode(errors="surrogateescape"), "surrogateescape"
        elif isinstance(text, str):
            errors = "backslashreplace"
        else:
            raise _wrong_item(number, text, "str or bytes")
        lines.append(json.dumps({"text": text}, ensure_ascii=False).encode(errors=errors))
        size += len(lines[-1])
        if size >= CHUNK:
            yield b"\n".join([*lines, b""])
            lines, size = [], 0
    yield b"\n".join([*lines, b""])


def _require_utf8(number: int, text: str | bytes) -> None:
    try:
        text.decode() if isinstance(text, bytes) else text.encode()
    except UnicodeError:
        problem = "is not valid UTF-8" if isinstance(text, bytes) else "has a lone surrogate"
        sentence = f"item {number} of the iterable {problem}; correct it, or build without strict"
        raise InputError(sentence, "not-text", option="inputs", given=number) from None


def open_arrays(arrays: Any) -> IdsFile:
    """Return an input of an iterable of lists or arrays of ids. Reading it raises InputError for any other item."""

    def documents(numbered: Iterator[tuple[int, Any]]) -> Iterator[Ids]:
        some, size, first = list[NDArray[Any]](), 0, 0
        for number, item in numbered:
            some.append(_ids_of(item, number))
            size += 1 + some[-1].size
            if size >= idfile.BLOCK_IDS:
                yield _joined(file, some, first)
                some, size, first = [], 0, number
        if some:
            yield _joined(file, some, first)

    items = Items(arrays, documents)
    file = Input(NAME, None, None, items=items)
    return IdsFile([file], 0, lambda: iter(items))


def _joined(file: Input, some: list[NDArray[Any]], first: int) -> Ids:
    """Return documents as one. first: how many come before them."""
    offsets = np.append(0, np.cumsum([ids.size for ids in some], dtype=np.int64))
    return Ids(np.concatenate(some), offsets, None, item_of(file, "item", first, offsets), 0)


def _ids_of(item: Any, number: int) -> NDArray[Any]:
    try:
        ids = np.asarray(item)
    except (TypeError, ValueError):  # it has lists of different lengths, or is no array of this machine
        raise _wrong_item(number, item, "a list or an array of ids") from None
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise _wrong_item(number, item, "a list or an array of ids")
    if ids.dtype == np.uint64 and ids.size and ids.max() > np.iinfo(np.int64).max:
        sentence = f"item {number} of the iterable has the id {ids.max()}; give the --tokenizer that made the ids"
        raise InputError(sentence, "id-outside-vocabulary", option="tokenizer", given=int(ids.max()))
    # An empty list has no dtype of integers, and int64 with uint64 would become float64.
    return ids.astype(np.uint8 if not ids.size else np.int64 if ids.dtype == np.uint64 else ids.dtype, copy=False)


def _wrong_item(number: int, item: Any, expected: str) -> InputError:
    advice = "give names of files as a list" if isinstance(item, os.PathLike) else "correct it"
    sentence = f"item {number} of the iterable is of type {type(item).__name__}, and must be {expected}; {advice}"
    return InputError(sentence, "bad-row", option="inputs", given=number)
