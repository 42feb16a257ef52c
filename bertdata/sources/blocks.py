"""Inputs → documents, in blocks of about 1 MiB, in bounded memory.

Nothing here knows a tokenizer. docs/format.md says what a line, a document and a unit are. Memory: some copies of the
longest document, which has at most 1 GiB, and two blocks.
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
from bertdata.sources.documents import BadRow, Source, TextFormat, valid_utf8


@dataclass(frozen=True)
class Block:
    """Some documents of one unit. Document i is data[offsets[i] : offsets[i + 1] - 1]: each is followed by one \\n."""

    data: bytes  # valid UTF-8
    offsets: NDArray[np.int64]  # [num_documents + 1]
    unit: int
    replaced: NDArray[np.int64]  # [num_documents] invalid byte sequences that became U+FFFD
    first_replaced: tuple[int, int] | None  # number of the input, byte in it
    bytes_read: int  # of the input files up to here, as they lie on disk
    skipped: int = 0  # bad rows before or between these documents
    first_skipped: str | None = None  # which, and why

    @classmethod
    def empty(cls) -> Block:
        return cls(b"", np.zeros(1, np.int64), 0, np.zeros(0, np.int64), None, 0)

    @property
    def num_documents(self) -> int:
        return self.offsets.size - 1


def read_blocks(
    paths: Sequence[Path], form: TextFormat, wanted: Callable[[int], bool] = lambda unit: True
) -> Iterator[Block]:
    """The documents of all inputs in order, each block within one unit and with at least one document.

    Only those of wanted units; what lies between is not even read where it can be sought over: in uncompressed files
    of text and JSON lines. Raises InputError, naming file and byte or line, for input that cannot be read.
    """
    pieces: list[bytes] = []  # of documents, each followed by a newline
    lengths: list[Any] = []
    replaced: list[Any] = []
    unit = size = count = base = bytes_before = skipped = 0
    first_replaced: tuple[int, int] | None = None
    first_skipped: str | None = None
    named = False

    def blocks() -> Iterator[Block]:
        nonlocal pieces, lengths, replaced, size, skipped, first_replaced, first_skipped
        none = np.zeros(0, np.int64)
        offsets = np.append(0, np.cumsum(np.concatenate([none, *lengths])))
        made = Block(
            b"".join(pieces), offsets, unit, np.concatenate([none, *replaced]), first_replaced,
            bytes_before + source.bytes_read, skipped, first_skipped,
        )  # fmt: skip
        pieces, lengths, replaced, size, skipped, first_replaced, first_skipped = [], [], [], 0, 0, None, None
        if wanted(unit):
            yield made

    for index, path in enumerate(paths):
        source = Source(path, form)
        for start, raw, starts in source.documents(base, wanted if form.max_documents is None else lambda unit: True):
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
                            f"{source.place(start)}: {error}; mend it, or leave such rows out with --on-error skip"
                        ) from None
                    skipped += 1
                    if not named:  # finding the line is another pass over the file
                        named, first_skipped = True, f"{source.place(start)}: {error}"
                    continue
                if num_bad or num_surrogates:
                    num_bad, bad_at = num_bad + num_surrogates, max(bad_at, 0)
                    if form.strict:
                        raise InputError(
                            f"{path}: byte {start + bad_at} is not valid UTF-8; mend the file, or build without "
                            "--strict to have such bytes replaced and counted"
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
    source.bytes_read = 0  # already in bytes_before
    if pieces or skipped:
        yield from blocks()
