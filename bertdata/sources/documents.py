"""Some documents of an input in memory, and how their text becomes valid UTF-8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertdata.sources.kernels import TEXT_PADDING

_REPLACEMENT = "\ufffd".encode()


class BadRow(Exception):
    """A row has no text where it should have one. str() is the reason; `advice` is the remedy."""

    def __init__(self, reason: str, advice: str = "fix the row") -> None:
        super().__init__(reason)
        self.advice = advice


def valid_utf8(raw: bytes) -> tuple[bytes, int, int]:
    """Return the bytes as valid UTF-8, the number of replaced sequences, and the offset of the first one, or -1."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        fixed = raw.decode("utf-8", "replace").encode()
        return fixed, fixed.count(_REPLACEMENT) - raw.count(_REPLACEMENT), error.start
    return raw, 0, -1


def padded(size: int) -> NDArray[np.uint8]:
    """Return memory for `size` bytes of text, followed by TEXT_PADDING zeros."""
    text = np.empty(size + TEXT_PADDING, np.uint8)
    text[size:] = 0
    return text


def joined(parts: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Return the concatenation of texts, with TEXT_PADDING."""
    text = padded(sum(part.size for part in parts))
    np.concatenate(parts, out=text[: text.size - TEXT_PADDING])  # without the GIL
    return text


class Skipped(NamedTuple):
    """A row without a usable text."""

    input: int  # number of the input; 0 if a single input is read by itself
    place: int  # offset or row in the input
    why: BadRow


@dataclass(frozen=True)
class Documents:
    """Documents of one unit, concatenated. Document i is text[offsets[i] : offsets[i + 1] - 1].

    Also records the rows before or between them that are left out.
    """

    text: NDArray[np.uint8]  # UTF-8, a newline after each document; then at least TEXT_PADDING bytes
    offsets: NDArray[np.int64]  # [n + 1]
    starts: NDArray[np.int64]  # [n] offset of the first byte in the input; in a table, number of the row from 1
    replaced: NDArray[np.int64]  # [n] how many invalid byte sequences and lone surrogates became U+FFFD
    invalid: NDArray[np.int64]  # [n] offset or row of the first replaced one; -1: none
    inputs: NDArray[np.int64]  # [n] number of the input; 0 if a single input is read by itself
    bad: Sequence[Skipped] = ()
    num_removed: int = 0  # documents that --map left out
    num_duplicates: int = 0  # documents left out as duplicates

    @property
    def num_bytes(self) -> int:
        """Bytes of the documents, each including its newline."""
        return int(self.offsets[-1])

    @property
    def first_replaced(self) -> tuple[int, int] | None:
        """Number of the input, and offset or row in it, of the first replaced sequence."""
        number = int((self.invalid >= 0).argmax()) if self.invalid.size else 0
        return (int(self.inputs[number]), int(self.invalid[number])) if (self.invalid >= 0).any() else None

    def between(self, first: int, stop: int) -> Documents:
        """Return the documents first to stop - 1. Does not copy if these are all."""
        if (first, stop) == (0, self.starts.size):
            return self
        offsets = self.offsets[first : stop + 1]
        return self._chosen(slice(first, stop), [self.text[offsets[0] : offsets[-1]]], offsets - offsets[0])

    def chosen(self, kept: NDArray[np.int64]) -> Documents:
        """Return the documents with these indices, int64 [m], ascending. Does not copy if these are all."""
        if kept.size == self.starts.size:
            return self
        bounds = zip(self.offsets[kept].tolist(), self.offsets[kept + 1].tolist(), strict=True)
        texts = [self.text[:0], *(self.text[start:stop] for start, stop in bounds)]
        return self._chosen(kept, texts, np.append(0, np.cumsum(np.diff(self.offsets)[kept])))

    def _chosen(self, chosen: Any, texts: Sequence[NDArray[np.uint8]], offsets: NDArray[np.int64]) -> Documents:
        columns = {name: getattr(self, name)[chosen] for name in _COLUMNS}
        return replace(self, text=joined(texts), offsets=offsets, **columns)

    def repaired(self) -> Documents:
        """Return the documents with U+FFFD in place of invalid bytes, counted in `replaced`."""
        if (self.invalid < 0).all():
            return self
        bounds = pairwise(self.offsets.tolist())
        fixed = [valid_utf8(self.text[start : stop - 1].tobytes()) for start, stop in bounds]
        replaced = [num_replaced for _, num_replaced, _ in fixed]
        return Documents.from_texts([text for text, _, _ in fixed], self.starts, replaced, self.invalid)

    @classmethod
    def joined(cls, parts: Sequence[Documents]) -> Documents:
        """Return all documents of these parts. Does not copy a single part, the usual case."""
        if len(parts) < 2:
            return parts[0] if parts else cls.from_texts([], [], [], [])
        columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS}
        return cls(
            text=joined([part.text[: part.num_bytes] for part in parts]),
            offsets=np.append(0, np.cumsum(np.concatenate([np.diff(part.offsets) for part in parts]))),
            bad=[each for part in parts for each in part.bad],
            num_removed=sum(part.num_removed for part in parts),
            **columns,
        )

    @classmethod
    def from_texts(cls, texts: list[bytes], *columns: Sequence[int] | NDArray[np.int64]) -> Documents:
        """Return the documents for these texts. columns: `starts`, `replaced` and `invalid`."""
        offsets = np.append(0, np.cumsum([len(text) + 1 for text in texts], dtype=np.int64))
        text = np.frombuffer(bytearray(b"\n").join([*texts, bytes(TEXT_PADDING)]), np.uint8)
        return cls(text, offsets, *np.array([*columns, [0] * len(texts)], np.int64))

    @classmethod
    def from_column(cls, column: Any, starts: NDArray[np.int64]) -> Documents:
        """Return the documents of a pyarrow.LargeBinaryArray without nulls, valid UTF-8 or not. starts: int64 [n]."""
        import pyarrow as pa
        from pyarrow import compute

        ended = compute.binary_join_element_wise(column, pa.scalar(b"", column.type), pa.scalar(b"\n", column.type))
        # A copy can be written to, as the offsets of all other sources: kernels are compiled for one type of array.
        offsets, data, none = offsets_of(ended).copy(), ended.buffers()[2], np.zeros(len(column), np.int64)
        text, invalid = joined([np.frombuffer(data or b"", np.uint8)[: offsets[-1]]]), none - 1
        try:
            ended.cast(pa.large_string())
        except pa.ArrowInvalid:  # the error lacks the place
            bounds = pairwise(offsets.tolist())
            is_invalid = [valid_utf8(text[start:stop].tobytes())[2] >= 0 for start, stop in bounds]
            invalid = np.where(is_invalid, starts, -1)
        return cls(text, offsets, starts, none, invalid, none)


_COLUMNS = ("starts", "replaced", "invalid", "inputs")
"""Members of Documents that hold a number for each document."""


def offsets_of(column: Any) -> NDArray[np.int64]:
    """Return the offsets of the values of a pyarrow.LargeBinaryArray in its data: int64 [n + 1]."""
    buffer = column.buffers()[1] or bytes(8)
    offsets = np.frombuffer(buffer, np.int64)[column.offset : column.offset + len(column) + 1]
    offsets.setflags(write=False)
    return offsets
