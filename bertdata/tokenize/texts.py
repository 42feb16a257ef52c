"""A stand-alone tokenizer: texts → arrays of ids at the speed of a build."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import UsageError, require
from bertdata.tokenize.engine import Engine, ids_by
from bertdata.tokenize.kernels.records import PADDING
from bertdata.tokenize.load import load
from bertdata.tokenize.source import Source
from bertdata.tokenize.tokenizer import LoadedTokenizer, naming_texts

Texts = Sequence[str] | Sequence[bytes] | Any
"""Texts as str, as bytes in UTF-8, or as a pyarrow array of strings."""
_PROBES = ("a", "A", "0", "the", "水")  # texts; every tokenizer has an id for at least one of them


class Tokenizer:
    """Texts → ids, identical to those of the `tokenizers` library, and many times faster if an engine supports it.

        tokenizer = bertdata.Tokenizer.load("bert-base-uncased")
        ids, offsets = tokenizer.encode_batch(texts)   # the ids of text i are ids[offsets[i] : offsets[i + 1]]

    Thread-safe, and can be pickled.
    """

    def __init__(self, loaded: LoadedTokenizer) -> None:
        self.loaded = loaded
        """Its files and special tokens."""
        self._pools: dict[tuple[int, int], ThreadPoolExecutor] = {}
        """Process, which has no threads of the one that was forked, and workers → threads, whose caches stay warm."""

    @classmethod
    def load(cls, path_or_name: str) -> Tokenizer:
        """Load a tokenizer from a tokenizer.json, a vocab.txt, a SentencePiece model, a directory with one, or the hub.

        Raises TokenizerError, which lists the searched names, if nothing is found.
        """
        return cls(load(str(path_or_name)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer, (self.loaded,)

    @property
    def engine(self) -> str | None:
        """Kind of tokenizer that the engine supports; None: `tokenizers` itself computes the ids."""
        return self._engine.name

    @property
    def why_slow(self) -> str | None:
        """The reason, as a clause, why `tokenizers` encodes all text or typical text; None: an engine encodes it."""
        return self._engine.why_slow

    def encode_batch(
        self,
        texts: Texts,
        *,
        workers: int = 1,
        add_special_tokens: bool = False,
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the ids of texts, uint16 or uint32 [N], and the offsets of each text's ids, int64 [num_texts + 1].

        texts: a list of str or UTF-8 bytes, or a pyarrow array of strings (copied if its buffer ends with its last
            text).
        workers: number of threads that share the texts.
        add_special_tokens: whether to add special tokens around each text, such as [CLS] and [SEP].

        A special token that a text spells becomes that token, as in transformers. Raises UsageError for a value that is
        not text, LongTextError if `tokenizers` needs too much memory for a text, and FailedTextError if it fails.
        """
        require(workers >= 1, "workers", workers, "1 or more threads")
        data, offsets = _joined(texts)
        ids, bounds = self._encoded(data, offsets, workers)
        if add_special_tokens:
            before, after = self._special_tokens
            places = np.repeat(np.stack([bounds[:-1], bounds[1:]], 1), [len(before), len(after)], axis=1)
            ids = np.insert(ids, places.ravel(), [*before, *after] * len(places))
            bounds = bounds + np.arange(bounds.size) * places.shape[1]
        return ids, bounds

    def count(self, texts: Texts, *, workers: int = 1) -> NDArray[np.int64]:
        """Count the ids of each text, without special tokens around it: int64 [num_texts]. See `encode_batch`."""
        return np.diff(self.encode_batch(texts, workers=workers)[1])

    @cached_property
    def _source(self) -> Source:
        return self.loaded.source.allowing_special()

    @cached_property
    def _engine(self) -> Engine:
        return Engine(self._source, replace(self.loaded.special, special_ids=()))

    def _encoded(
        self, data: NDArray[np.uint8], offsets: NDArray[np.int64], workers: int
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        edges = np.searchsorted(offsets, np.linspace(offsets[0], offsets[-1], workers + 1))  # equal shares of bytes
        edges[0], edges[-1] = 0, offsets.size - 1

        def part(first: int, stop: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
            bounds = offsets[first : stop + 1]
            with naming_texts(bounds, lambda number: f"text {first + number}"):
                encoded = self._engine.encode(data, bounds[:-1], bounds[1:], np.full(bounds.size - 1, -1))
                return encoded[:2] if encoded else self._by_library(data, bounds)

        if workers == 1:
            ids, bounds = part(0, offsets.size - 1)
            return np.ascontiguousarray(ids), bounds
        pool = self._pools.setdefault((os.getpid(), workers), ThreadPoolExecutor(workers, "tokenizer"))
        parts = [*pool.map(lambda edge: part(*edge), pairwise(edges.tolist()))]
        counts = np.concatenate([np.diff(bounds) for _, bounds in parts])
        return np.concatenate([ids for ids, _ in parts]), np.append(0, np.cumsum(counts))

    def _by_library(self, data: NDArray[np.uint8], bounds: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        texts = [str(data[start:stop].data, "utf-8") for start, stop in pairwise(bounds.tolist())]
        encoded = ids_by(self._source.library, texts)
        bounds = np.append(0, np.cumsum([each.size for each in encoded], dtype=np.int64))
        ids = np.concatenate([np.zeros(0, np.int64), *encoded])
        return ids.astype(self.loaded.token_dtype), bounds

    @cached_property
    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text. Raises UsageError if the tokenizer does more than add them."""

        def ask() -> dict[str, Any]:
            encode = self._source.library.encode
            probe = next(text for text in _PROBES if encode(text, add_special_tokens=False).ids)
            alone, found = encode(probe, add_special_tokens=False).ids, encode(probe).ids
            first = encode(probe).sequence_ids.index(0)
            before, after = found[:first], found[first + len(alone) :]
            return {"before": before, "after": after, "only_adds": found == [*before, *alone, *after]}

        facts = self._source.kept("around", ask)
        if not facts["only_adds"]:
            sentence = "this tokenizer changes texts when it adds special tokens; leave add_special_tokens out"
            raise UsageError(sentence, "unsupported", option="add_special_tokens", given=True)
        return facts["before"], facts["after"]


def _joined(texts: Texts) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the concatenated texts in UTF-8, followed by PADDING bytes, and their offsets."""
    is_list = hasattr(texts, "__len__") and not isinstance(texts, str | bytes)
    require(is_list, "texts", type(texts).__name__, "a list of texts", "malformed")
    if type(texts).__module__.partition(".")[0] == "pyarrow":
        return _arrow_parts(texts)
    encoded = [*map(_bytes_of, texts, range(len(texts)))]
    offsets = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(each) for each in encoded], out=offsets[1:])
    data = np.frombuffer(b"".join([*encoded, bytes(PADDING)]), np.uint8)
    if not all(isinstance(text, str) for text in texts):
        _require_text(data, offsets)
    return data, offsets


def _bytes_of(text: Any, number: int) -> bytes:
    if isinstance(text, bytes):
        return text
    if isinstance(text, str):
        try:
            return text.encode()
        except UnicodeEncodeError:
            problem = "has half of a surrogate pair, which is not a character"
    else:
        problem = f"is a {type(text).__name__}"
    sentence = f"text {number} {problem}; give texts as str, or as bytes in UTF-8"
    raise UsageError(sentence, "not-text", option="texts", given=number)


def _require_text(data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> None:
    """Raise UsageError if a text is not UTF-8."""
    for number, (start, stop) in enumerate(pairwise(offsets.tolist())):
        try:
            str(data[start:stop].data, "utf-8")
        except UnicodeDecodeError as error:
            sentence = f"text {number} is not UTF-8 at byte {error.start}; decode it, or leave it out"
            raise UsageError(sentence, "not-text", option="texts", given=number) from None


def _arrow_parts(array: Any) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    if hasattr(array, "combine_chunks"):
        array = array.combine_chunks() if array.num_chunks != 1 else array.chunk(0)
    kind = {"string": np.int32, "large_string": np.int64}.get(str(array.type))
    if kind is None or array.null_count:
        problem = f"{array.null_count} null values" if array.null_count else f"the type {array.type}"
        sentence = f"texts is a pyarrow array with {problem}; give one of strings, none of them null"
        raise UsageError(sentence, "wrong-column-type", option="texts", given=str(array.type))
    _, bounds, values = array.buffers()
    if len(array) == 0 or values is None:
        return np.zeros(PADDING, np.uint8), np.zeros(len(array) + 1, np.int64)
    offsets = np.frombuffer(bounds, kind, len(array) + 1, array.offset * np.dtype(kind).itemsize).astype(np.int64)
    try:
        array.validate(full=True)
    except ValueError:  # from pyarrow, for invalid UTF-8 or offsets
        _require_text(np.frombuffer(values, np.uint8), offsets)
        raise
    return np.frombuffer(values, np.uint8), offsets
