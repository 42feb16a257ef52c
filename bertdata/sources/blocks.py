"""Inputs → documents, in blocks of about 2 MiB.

docs/format.md says what a line, a document and a unit are. Memory: two blocks, and a few copies of the longest
document, which has at most 1 GiB. The text of a plain file is copied once, by the kernel that cuts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import InputError
from bertdata.sources import documents
from bertdata.sources.documents import BadRow, Documents, TextFile, TextFormat, valid_utf8
from bertdata.sources.find import kind_of
from bertdata.sources.kernels import ROOM
from bertdata.sources.streams import UTF_8
from bertdata.sources.tables import TABLE_KINDS, Table


@dataclass(frozen=True)
class Block:
    """Some documents of one unit. Document i is data[offsets[i] : offsets[i + 1] - 1]; a newline follows each."""

    data: Any  # bytes or bytearray: valid UTF-8 up to offsets[-1], then at least ROOM bytes
    offsets: NDArray[np.int64]  # [num_documents + 1]
    unit: int
    replaced: NDArray[np.int64]  # [num_documents] how many invalid byte sequences became U+FFFD
    first_replaced: tuple[int, int] | None  # the first of them: number of the input, byte in it
    bytes_read: int  # of all inputs on disk, up to the end of this block
    skipped: int = 0  # rows without text before or between these documents
    first_skipped: str | None = None  # the first of them: place and reason

    @classmethod
    def empty(cls) -> Block:
        return cls(bytes(ROOM), np.zeros(1, np.int64), 0, np.zeros(0, np.int64), None, 0)

    @property
    def num_documents(self) -> int:
        return self.offsets.size - 1

    @property
    def num_bytes(self) -> int:
        """Bytes of the documents with the newline after each."""
        return int(self.offsets[-1])


def read_blocks(
    paths: Sequence[Path], form: TextFormat, is_wanted: Callable[[int], bool] = lambda unit: True
) -> Iterator[Block]:
    """The documents of all inputs in order, in blocks. A block has documents of one unit, or only skipped rows.

    is_wanted: which units to give. Plain files of text and JSON lines are not even read where no unit is wanted; other
    inputs must be read in order. Raises InputError, which names file and line or byte, for input that cannot be read.
    """
    block, count, base, bytes_before, has_named_skipped = _Collector(0), 0, 0, 0, False
    for index, path in enumerate(paths):
        source = _source(path, form)
        # With max_documents every document counts, also those of units that are not wanted.
        for piece in source.documents(base, is_wanted if form.max_documents is None else _every_unit):
            unit = (base + piece.start) // form.shard_size
            if unit != block.unit or (block.size and block.size + piece.num_bytes > documents.BLOCK_BYTES):
                if not block.is_empty and is_wanted(block.unit):
                    yield block.finished(bytes_before + source.bytes_read)
                block = _Collector(unit)
            if isinstance(piece, Documents):
                if form.max_documents is not None:
                    piece = piece.part(0, min(form.max_documents - count, piece.starts.size))
                bad = np.flatnonzero(piece.invalid >= 0)
                if bad.size:
                    block.note_replaced(source, form, index, int(piece.invalid[bad[0]]))
                block.add_text(piece)
                count += piece.starts.size
            else:
                try:
                    raw, num_bad, bad_at = valid_utf8(piece.raw)
                    text, num_surrogates = source.text(raw)
                except BadRow as error:
                    if form.on_error == "fail":
                        raise InputError(
                            f"{source.place(piece.start)}: {error}; {error.advice}, or use --on-error skip"
                        ) from None
                    block.skipped += 1
                    if not has_named_skipped:  # only once, as counting the lines reads the file again
                        has_named_skipped, block.first_skipped = True, f"{source.place(piece.start)}: {error}"
                    continue
                if num_bad or num_surrogates:
                    block.note_replaced(source, form, index, piece.start + max(bad_at, 0))
                block.add_row(text, num_bad + num_surrogates)
                count += 1
            if count == form.max_documents:
                if is_wanted(block.unit):
                    yield block.finished(bytes_before + source.bytes_read)
                return
        base += source.size
        bytes_before += source.bytes_read
    if not block.is_empty and is_wanted(block.unit):
        yield block.finished(bytes_before)


class _Collector:
    """A block that is being made."""

    def __init__(self, unit: int) -> None:
        self.unit, self.size, self.skipped = unit, 0, 0
        self.first_skipped: str | None = None
        self._first_replaced: tuple[int, int] | None = None
        self._texts: list[bytes | memoryview] = []  # documents, each followed by a newline
        self._lengths: list[Any] = []
        self._replaced: list[Any] = []
        self._alone: Documents | None = None  # the only piece, if it is plain text

    @property
    def is_empty(self) -> bool:
        return not (self._texts or self.skipped)

    def add_text(self, piece: Documents) -> None:
        self._alone = None if self._texts else piece
        self._texts.append(memoryview(piece.text)[: piece.num_bytes])
        self._lengths.append(np.diff(piece.offsets))
        self._replaced.append(piece.replaced)
        self.size += piece.num_bytes

    def add_row(self, text: bytes, num_replaced: int) -> None:
        self._alone = None
        self._texts += [text, b"\n"]
        self._lengths.append([len(text) + 1])
        self._replaced.append([num_replaced])
        self.size += len(text) + 1

    def note_replaced(self, source: TextFile | Table, form: TextFormat, index: int, place: int) -> None:
        """An invalid byte sequence becomes U+FFFD. index: of the input. place: of the first invalid byte in it."""
        if form.strict:
            where = f"{source.path}: byte {place} is not valid UTF-8"
            if form.encoding != UTF_8:
                where = f"{source.place(place)} is not valid {form.encoding}"
            raise InputError(
                f"{where}; fix the file, name its encoding with --encoding, or build without --strict to replace and "
                "count such bytes"
            )
        self._first_replaced = self._first_replaced or (index, place)

    def finished(self, bytes_read: int) -> Block:
        none = np.zeros(0, np.int64)
        data: bytes | bytearray
        if self._alone:  # the usual case, without a copy
            data, offsets = self._alone.text, self._alone.offsets
        else:
            data = b"".join([*self._texts, bytes(ROOM)])
            offsets = np.append(0, np.cumsum(np.concatenate([none, *self._lengths])))
        return Block(
            data, offsets, self.unit, np.concatenate([none, *self._replaced]), self._first_replaced, bytes_read,
            self.skipped, self.first_skipped,
        )  # fmt: skip


def _every_unit(unit: int) -> bool:
    return True


def _source(path: Path, form: TextFormat) -> TextFile | Table:
    kind = form.kind or kind_of(path)
    return Table(path, kind, form) if kind in TABLE_KINDS else TextFile(path, kind, form)
