"""An input of plain text, JSON lines or FASTA → lines, and lines → documents. tables.py does the same for tables."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import BertdataError, InputError, refused
from bertdata.sources import formats
from bertdata.sources.blocks import Block, Source, runs_of
from bertdata.sources.documents import Documents, padded, valid_utf8
from bertdata.sources.formats import require_text
from bertdata.sources.jsonl import texts_of
from bertdata.sources.kernels import RECORD, TEXT_PADDING, CutDocuments, cut, cut_fasta
from bertdata.sources.streams import UTF_8, InputStream, opened

_MARK = codecs.BOM_UTF8
_HEAD = 256  # first bytes, which are searched for the beginning of JSON
_MARGIN = 1 << 12  # bytes read before and after a range, for documents that cross its ends
_LONGEST_READ = 1 << 24  # bytes read at a time if a document is longer than a block


class TextFile(Source):
    """One input of plain text, JSON lines or FASTA."""

    def blocks(self, base: int, is_wanted: Callable[[int], bool]) -> Iterator[Block]:
        """Yield the lines of the requested units, some at a time."""
        with opened(self.file, self.form.encoding) as stream:
            for first, stop in self._ranges(stream, base, is_wanted):
                for lines in self._all(stream) if self.is_one_document else self._starting_in(stream, first, stop):
                    yield from self._blocks_of(lines, stream, base, is_wanted)
                    del lines  # before more is read

    def _ranges(self, stream: InputStream, base: int, is_wanted: Callable[[int], bool]) -> Iterator[tuple[int, int]]:
        """Yield the ranges of bytes where documents of the requested units begin."""
        if not stream.is_seekable or self.is_one_document:
            yield 0, sys.maxsize
            return
        size = self.form.shard_size
        for is_read, run in groupby(range(base // size, -(-(base + (self.file.size or 0)) // size)), is_wanted):
            if is_read:
                wanted = list(run)
                yield max(0, wanted[0] * size - base), (wanted[-1] + 1) * size - base

    def _all(self, stream: InputStream) -> Iterator[Documents]:
        """Yield the whole input as one document, unless it is blank."""
        raw = stream.read(formats.LONGEST_DOCUMENT + 1)
        self._judge(raw[: formats.JUDGED_BYTES])
        self._require_short(len(raw), 0)
        if (text := raw.removeprefix(_MARK)).strip(b" \t\r\n"):
            if text.endswith(b"\n"):
                text = text.removesuffix(b"\n").removesuffix(b"\r")
            yield Documents.from_texts([text.replace(b"\r\n", b"\n")], [0], [0], [valid_utf8(raw)[2]])

    def _starting_in(self, stream: InputStream, first: int, stop: int) -> Iterator[Documents]:
        """Yield the raw documents that start in [first, stop)."""
        block, is_fasta = formats.BLOCK_BYTES, self.kind == "fasta"
        if stream.is_seekable and self.file.size is not None:
            block = min(block, self.file.size + 4)  # a small file needs little memory; new pages cost time
        by_line = self.kind == "jsonl" or self.form.documents == "line"
        buffer = _Buffer(self._before(stream, first), block)
        while not buffer.is_end and buffer.begin < stop:
            # An incomplete document is scanned again after at least doubling its bytes. At the start of a file a whole
            # block is read, because its first bytes are checked.
            wanted = block if buffer.begin == 0 else min(block, stop - buffer.begin + _MARGIN)
            buffer.extend(max(wanted, min(len(buffer), _LONGEST_READ)), partial(self._read, stream))
            if buffer.begin < first and len(buffer) > block and not buffer.has_line_end():
                buffer.skip()  # bytes of an earlier document, whose text is not needed
                first = buffer.begin + 1
                continue
            lines, used, start = buffer.cut(*((cut_fasta, buffer.is_at_head) if is_fasta else (cut, by_line)))
            if is_fasta and buffer.is_at_head and start >= 0 and buffer.bytes[start - buffer.begin] != RECORD:
                what = "a record of FASTA begins with >name; correct the file, or give --format text"
                sentence = f"{self.place(start)}: {what}"
                raise InputError(sentence, "not-of-format", option="inputs", given=self.file.name)
            chosen = lines.between(*lines.starts.searchsorted((first, stop)).tolist())
            del lines  # a long document is freed before more is read
            buffer.drop(used)
            if chosen.starts.size:
                yield chosen
            del chosen
            self._require_short(len(buffer), buffer.begin)
            if buffer.begin < first and buffer.has_line_end(stop - buffer.begin):
                return  # a document that started before `first` ends after `stop`

    def _blocks_of(
        self, lines: Documents, stream: InputStream, base: int, is_wanted: Callable[[int], bool]
    ) -> Iterator[Block]:
        """Yield the lines of each requested unit."""
        if self.file.items and lines.starts.size:
            self.file.items.remember(lines.starts)
        for unit, first, stop in runs_of((base + lines.starts) // self.form.shard_size):
            if self.file.items:
                self.file.items.add(unit, lines.text[lines.offsets[first] : lines.offsets[stop]])
            if is_wanted(unit):
                some = lines.between(first, stop)
                yield Block(unit, some.num_bytes, stream.bytes_read, [(self, some)])

    def decode(self, raw: Documents) -> Documents:
        """Return the lines in valid UTF-8, or, for JSON lines, the texts in them."""
        return texts_of(raw, self.form.text_key) if self.kind == "jsonl" else raw.repaired()

    def place(self, start: int) -> str:
        """Return 'file, line n' for a byte of this input. Reads the file again up to this byte.

        'file, byte n' for a pipe or a file that can no longer be read; 'item n of the iterable' for an iterable.
        """
        if self.file.items:
            return str(self.file.items.place(start))
        if self.file.is_stream:
            return f"{self.file}, byte {start}"
        number, left = 1, start
        try:
            with opened(self.file, self.form.encoding) as stream:
                while left > 0 and (piece := stream.read(min(formats.BLOCK_BYTES, left))):
                    number += piece.count(b"\n")
                    left -= len(piece)
        except BertdataError:
            return f"{self.file}, byte {start}"
        return f"{self.file}, line {number}"

    def invalid_place(self, start: int) -> str:
        """Return 'file, byte n' for an invalid byte, or 'file, line n' for JSON and encodings other than UTF-8."""
        is_byte = self.kind != "jsonl" and self.form.encoding == UTF_8
        return f"{self.file}, byte {start}" if is_byte else self.place(start)

    def _read(self, stream: InputStream, buffer: NDArray[np.uint8], *, is_first: bool) -> int:
        """Read bytes into a buffer, and return their number; 0 at the end. is_first: whether they begin the input."""
        length = int(stream.file.readinto(buffer.data))
        if is_first:
            self._judge(buffer[: min(length, formats.JUDGED_BYTES)].tobytes())
        return length

    def _judge(self, first: bytes) -> None:
        """Raise InputError if the first bytes of the input cannot be text."""
        require_text(self.file, first, self.form.encoding)
        if self.kind == "jsonl" and first[:_HEAD].removeprefix(_MARK).lstrip().startswith(b"["):
            raise refused(self.file, "not-of-format", " is a JSON array; write a row on each line, as jq -c '.[]' does")
        if first.count(b"\r") - first.count(b"\r\n") > first.count(b"\n"):
            self.form.warnings.add(f"{self.file}: lines end with CR alone, so they are one line; end them with LF")

    def _require_short(self, size: int, start: int) -> None:
        longest = formats.LONGEST_ROW if self.kind == "jsonl" else formats.LONGEST_DOCUMENT
        if size > longest:
            what = (
                f": the document at byte {start} is longer than {longest >> 20:,} MiB; split it, or choose --documents"
            )
            raise refused(self.file, "too-large", what)

    def _before(self, stream: InputStream, offset: int) -> int:
        """Move the stream to the last byte before `offset` that is not white space, or to byte 0. Return its offset.

        Also moves to byte 0 if at most a byte order mark precedes that byte.
        """
        before = offset
        while before > 0:
            start = max(0, before - min(formats.BLOCK_BYTES, _MARGIN))
            stream.file.seek(start)
            length = len(stream.read(before - start).rstrip(b" \t\r\n"))
            before = start + max(0, length - 1)
            if length:
                break
        before = before if before >= len(_MARK) else 0
        if offset > 0:
            stream.file.seek(before)
        return before


class _Buffer:
    """The bytes of an input in memory: reads append at the end, and complete documents are removed from the front."""

    def __init__(self, begin: int, block: int) -> None:
        """block: bytes read at a time."""
        self.begin = begin  # offset of the first byte in the input
        self.is_at_head = begin == 0  # whether only a byte order mark was dropped
        self.is_end = False  # whether all of the input was read
        self._size = 0  # bytes that were read and not dropped
        self._memory, self._numbers = _memory(block + block // 4)

    def __len__(self) -> int:
        return self._size

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """uint8 [len]: a view, which changes when bytes are read or dropped."""
        return self._memory[: self._size]

    def has_line_end(self, first: int = 0) -> bool:
        """Return whether a line ends at or after a byte."""
        return bool((self.bytes[first:] == ord("\n")).any())

    def extend(self, wanted: int, read: Callable[..., int]) -> None:
        """Read at most `wanted` more bytes, at least 3, and drop a byte order mark at the start of the input.

        read: TextFile._read for a stream.
        """
        size, is_first = self._size + max(wanted, len(_MARK)), self.begin + self._size == 0
        if (capacity := self._memory.size - TEXT_PADDING) < size:
            memory, self._numbers = _memory(max(size, 2 * capacity))
            memory[: self._size] = self.bytes
            self._memory = memory
        length = read(self._memory[self._size : size], is_first=is_first)
        self._size, self.is_end = self._size + length, not length
        if is_first and self.bytes[: len(_MARK)].tobytes() == _MARK:
            self.drop(len(_MARK))
            self.is_at_head = True

    def cut(self, kernel: Any, how: bool) -> tuple[Documents, int, int]:
        """Return the complete documents, the bytes consumed, and the offset of the first document in the input.

        kernel: `cut` or `cut_fasta`. how: by_line or is_at_head of the kernel. The first document may be incomplete;
        its offset is negative if no document begins.
        """
        text, used = padded(self._size + 1), np.empty(1, np.int64)
        offsets, starts, invalid = self._numbers
        cuts = CutDocuments(text, offsets, starts, invalid, used)
        count = kernel(self._memory, self._size, self.begin, self.is_end, how, cuts)
        none = np.zeros(count, np.int64)
        columns = starts[:count].copy(), none, invalid[:count].copy(), none
        return Documents(text, offsets[: count + 1].copy(), *columns), int(used[0]), int(starts[0])

    def drop(self, used: int) -> None:
        """Drop the first bytes."""
        left = self.bytes[used:]
        self.begin, self._size, self.is_at_head = self.begin + used, left.size, self.is_at_head and not used
        self.bytes[:] = left

    def skip(self) -> None:
        """Drop all bytes except one of an unneeded document: so the next bytes are not at a start of a document."""
        self.drop(self._size - 1)
        self.bytes[0] = ord(".")


def _memory(capacity: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return memory for text, and for offsets, starts and first invalid bytes of the most documents it may hold."""
    return np.empty(capacity + TEXT_PADDING, np.uint8), np.empty((3, capacity // 2 + 3), np.int64)
