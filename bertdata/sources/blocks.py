"""Inputs → documents, in blocks of about 1 MiB.

docs/format.md says what a line, a document and a unit are. Memory: two blocks, and a few copies of the longest
document, which has at most 1 GiB.
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
from bertdata.sources.documents import BadRow, TextFile, TextFormat, valid_utf8
from bertdata.sources.find import kind_of
from bertdata.sources.streams import UTF_8
from bertdata.sources.tables import TABLE_KINDS, Table


@dataclass(frozen=True)
class Block:
    """Some documents of one unit. Document i is data[offsets[i] : offsets[i + 1] - 1]; a newline follows each."""

    data: bytes  # valid UTF-8
    offsets: NDArray[np.int64]  # [num_documents + 1]
    unit: int
    replaced: NDArray[np.int64]  # [num_documents] how many invalid byte sequences became U+FFFD
    first_replaced: tuple[int, int] | None  # the first of them: number of the input, byte in it
    bytes_read: int  # of all inputs on disk, up to the end of this block
    skipped: int = 0  # rows without text before or between these documents
    first_skipped: str | None = None  # the first of them: place and reason

    @classmethod
    def empty(cls) -> Block:
        return cls(b"", np.zeros(1, np.int64), 0, np.zeros(0, np.int64), None, 0)

    @property
    def num_documents(self) -> int:
        return self.offsets.size - 1


def read_blocks(
    paths: Sequence[Path], form: TextFormat, is_wanted: Callable[[int], bool] = lambda unit: True
) -> Iterator[Block]:
    """The documents of all inputs in order, in blocks. A block has documents of one unit, or only skipped rows.

    is_wanted: which units to give. Plain files of text and JSON lines are not even read where no unit is wanted; other
    inputs must be read in order. Raises InputError, which names file and line or byte, for input that cannot be read.
    """
    pieces: list[bytes] = []  # documents, each followed by a newline
    lengths: list[Any] = []
    replaced: list[Any] = []
    unit = size = count = base = bytes_before = skipped = 0
    first_replaced: tuple[int, int] | None = None
    first_skipped: str | None = None
    has_named_skipped = False

    def blocks() -> Iterator[Block]:
        """The block of what was collected, if its unit is wanted; then starts a new one."""
        nonlocal pieces, lengths, replaced, size, skipped, first_replaced, first_skipped
        none = np.zeros(0, np.int64)
        offsets = np.append(0, np.cumsum(np.concatenate([none, *lengths])))
        block = Block(
            b"".join(pieces), offsets, unit, np.concatenate([none, *replaced]), first_replaced,
            bytes_before + source.bytes_read, skipped, first_skipped,
        )  # fmt: skip
        pieces, lengths, replaced, size, skipped, first_replaced, first_skipped = [], [], [], 0, 0, None, None
        if is_wanted(unit):
            yield block

    for index, path in enumerate(paths):
        source = _source(path, form)
        # With max_documents every document counts, also those of units that are not wanted.
        for start, raw, starts in source.documents(base, is_wanted if form.max_documents is None else _every_unit):
            if (base + start) // form.shard_size != unit or size >= documents.BLOCK_BYTES:
                if pieces or skipped:
                    yield from blocks()
                unit = (base + start) // form.shard_size
            if raw is not None and starts is not None:  # whole lines of one unit, each a document
                if form.max_documents is not None:
                    starts = starts[: form.max_documents - count + 1]
                    raw = raw[: int(starts[-1])]
                pieces.append(raw)
                lengths.append(np.diff(starts))
                replaced.append(np.zeros(starts.size - 1, np.int64))
                count += starts.size - 1
                size += len(raw)
            else:
                try:
                    raw, num_bad, bad_at = valid_utf8(raw)
                    text, num_surrogates = source.text(raw)
                except BadRow as error:
                    if form.on_error == "fail":
                        raise InputError(
                            f"{source.place(start)}: {error}; {error.advice}, or use --on-error skip"
                        ) from None
                    skipped += 1
                    if not has_named_skipped:  # only once, as counting the lines reads the file again
                        has_named_skipped, first_skipped = True, f"{source.place(start)}: {error}"
                    continue
                if num_bad or num_surrogates:
                    num_bad, bad_at = num_bad + num_surrogates, max(bad_at, 0)
                    if form.strict:
                        if form.encoding != UTF_8:
                            where = f"{source.place(start + bad_at)} is not valid {form.encoding}"
                        else:
                            where = f"{path}: byte {start + bad_at} is not valid UTF-8"
                        raise InputError(
                            f"{where}; fix the file, name its encoding with --encoding, or build without --strict to "
                            "replace and count such bytes"
                        )
                    first_replaced = first_replaced or (index, start + bad_at)
                pieces.append(text)
                pieces.append(b"\n")
                lengths.append([len(text) + 1])
                replaced.append([num_bad])
                size += len(text) + 1
                count += 1
            if count == form.max_documents:
                yield from blocks()
                return
        base += source.size
        bytes_before += source.bytes_read
    source.bytes_read = 0  # it is already in bytes_before
    if pieces or skipped:
        yield from blocks()


def _every_unit(unit: int) -> bool:
    return True


def _source(path: Path, form: TextFormat) -> TextFile | Table:
    kind = form.kind or kind_of(path)
    return Table(path, kind, form) if kind in TABLE_KINDS else TextFile(path, kind, form)
