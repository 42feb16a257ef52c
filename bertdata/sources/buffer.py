"""The bytes of an input that are in memory: more of them are read behind, and complete documents leave in front."""

from __future__ import annotations

import codecs
import threading
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bertdata.sources import formats
from bertdata.sources.kernels import PADDING, Cuts
from bertdata.sources.texts import Documents, padded

MARK = codecs.BOM_UTF8
_NOTHING = np.zeros(0, np.uint8)


class _Read(Protocol):
    """Reads bytes into a buffer and returns how many; 0: there are no more. is_first: whether they begin the input."""

    def __call__(self, buffer: NDArray[np.uint8], *, is_first: bool) -> int: ...


class Buffer:
    """As much of an input as documents that are not complete need, and what was read behind them.

    It is a context, which takes the memory of an earlier one of this thread, if nobody uses it.
    """

    def __init__(self, begin: int) -> None:
        self.begin = begin  # offset of the first byte in the input
        self.is_end = False  # whether all of the input was read
        self._size = 0  # bytes that were read and have not left

    def __enter__(self) -> Buffer:
        size = formats.BLOCK_BYTES + formats.BLOCK_BYTES // 4
        self._scratch = vars(_kept()).pop("scratch", None) or _Scratch.of(size)
        return self

    def __exit__(self, *error: object) -> None:
        if not self._scratch.is_large:
            _kept().scratch = self._scratch

    def __len__(self) -> int:
        return self._size

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """[len] They change when more is read or leaves."""
        return self._scratch.buffer[: self._size]

    def has_line_end(self, first: int = 0) -> bool:
        """Whether a line ends at or behind a byte."""
        return bool((self.bytes[first:] == ord("\n")).any())

    def extend(self, wanted: int, read: _Read) -> None:
        """Reads at most `wanted` bytes more, at least 3, and drops a byte order mark at the start of the input."""
        size, is_first = self._size + max(wanted, len(MARK)), self.begin + self._size == 0
        if self._scratch.capacity < size:
            self._scratch = _Scratch.of(max(size, 2 * self._scratch.capacity), self.bytes)
        length = read(self._scratch.buffer[self._size : size], is_first=is_first)
        self._size, self.is_end = self._size + length, not length
        if is_first and self.bytes[: len(MARK)].tobytes() == MARK:
            self.drop(len(MARK))

    def cut(self, kernel: Any, how: bool) -> tuple[Documents, int, int]:
        """The complete documents, how many bytes they take, and where the first document begins, complete or not.

        kernel: `cut` or `cut_fasta`. how: by_line or is_at_head of the kernel. The place is one in the input, and less
        than 0 where no document begins.
        """
        documents, used = self._scratch.cut(kernel, self._size, self.begin, self.is_end, how)
        return documents, used, int(self._scratch.starts[0])

    def drop(self, used: int) -> None:
        """The first bytes leave."""
        left = self.bytes[used:]
        self.begin, self._size = self.begin + used, left.size
        if self._scratch.is_large and used > formats.BLOCK_BYTES:
            self._scratch = _Scratch.of(left.size + formats.BLOCK_BYTES, left)
        else:
            self.bytes[:] = left

    def skip(self) -> None:
        """All but a byte leaves of a document that is not needed: so what follows is not at its start."""
        self.begin, self._size = self.begin + self._size - 1, 1
        self.bytes[0] = ord(".")


class _Scratch(NamedTuple):
    """Memory in which text is read and cut. It is used again: under the interpreter's lock, new pages cost much."""

    buffer: NDArray[np.uint8]  # [capacity + PADDING]
    offsets: NDArray[np.int64]  # these three: enough for the documents of a full buffer
    starts: NDArray[np.int64]
    invalid: NDArray[np.int64]

    @classmethod
    def of(cls, capacity: int, first: NDArray[np.uint8] = _NOTHING) -> _Scratch:
        """first: what the buffer begins with."""
        buffer = np.empty(capacity + PADDING, np.uint8)
        buffer[: first.size] = first
        offsets, starts, invalid = (np.empty(capacity // 2 + 3, np.int64) for _ in range(3))
        return cls(buffer, offsets, starts, invalid)

    @property
    def capacity(self) -> int:
        return self.buffer.size - PADDING

    @property
    def is_large(self) -> bool:
        """Whether it was made for a long document."""
        return self.capacity > 2 * formats.BLOCK_BYTES

    def cut(self, kernel: Any, size: int, offset: int, is_end: bool, how: bool) -> tuple[Documents, int]:
        """The complete documents in the first `size` bytes, and where the first that is not complete begins.

        kernel: `cut` or `cut_fasta`. offset: of the buffer in the input. how: by_line or is_at_head of the kernel.
        """
        text, used = padded(size + 1), np.empty(1, np.int64)
        cuts = Cuts(text, self.offsets, self.starts, self.invalid, used)
        count = kernel(self.buffer, size, offset, is_end, how, cuts)
        offsets, starts, invalid = self.offsets[: count + 1], self.starts[:count], self.invalid[:count]
        none = np.zeros(count, np.int64)
        return Documents(text, offsets.copy(), starts.copy(), none, invalid.copy(), none, none), int(used[0])


@cache
def _kept() -> threading.local:
    """Has the scratch of a thread that none of its readers uses now."""
    return threading.local()
