"""An input of plain text, JSON lines or FASTA → its documents. tables.py does the same for tables.

docs/format.md says what a line, a document and a unit are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import BertdataError, InputError
from bertdata.sources import formats
from bertdata.sources.buffer import MARK, Buffer
from bertdata.sources.formats import TextFormat, require_text
from bertdata.sources.inputs import Input
from bertdata.sources.jsonl import texts_of
from bertdata.sources.kernels import RECORD, cut, cut_fasta
from bertdata.sources.streams import UTF_8, InputStream, opened
from bertdata.sources.texts import Chunk, Documents, valid_utf8

_HEAD = 256  # bytes in which JSON begins
_MARGIN = 1 << 12  # bytes that are read before and after a range for the documents that its ends cut
_LONGEST_READ = 1 << 24  # bytes that are read at a time where a document is longer than a block


@dataclass(frozen=True)
class TextFile:
    """One input of plain text, JSON lines or FASTA."""

    file: Input
    kind: str  # "text", "jsonl" or "fasta"
    form: TextFormat

    def chunks(self, base: int, is_wanted: Callable[[int], bool]) -> Iterator[Chunk]:
        """The text of the units that are wanted, some at a time.

        base: offset of this input in a range of inputs that is cut into units.
        """
        with opened(self.file, self.form.encoding) as stream:
            for first, stop in self._ranges(stream, base, is_wanted):
                for some in self._starting_in(stream, first, stop):
                    yield from self._chunks_of(some, stream, base, is_wanted)
                    del some  # before more is read

    def _ranges(
        self, stream: InputStream, base: int, is_wanted: Callable[[int], bool]
    ) -> Iterator[tuple[int, int | None]]:
        """Where to look for documents of units that are wanted: each is a range of bytes. None: no limit."""
        if not stream.is_seekable or self.is_one_document:
            yield 0, None
            return
        size = self.form.shard_size
        units = range(base // size, -(-(base + (self.file.size or 0)) // size))
        for is_read, run in groupby(units, is_wanted):
            if is_read:
                wanted = list(run)
                yield max(0, wanted[0] * size - base), (wanted[-1] + 1) * size - base

    @property
    def is_one_document(self) -> bool:
        """Whether all of a file of plain text is one document, which no line ends."""
        return self.kind == "text" and self.form.documents == "file"

    def _all(self, stream: InputStream) -> Iterator[Documents]:
        """All of the input as one document, if it is not blank."""
        buffer = bytearray()
        chunk = np.empty(formats.BLOCK_BYTES, np.uint8)
        while length := self._read(stream, chunk, is_first=not buffer):
            buffer += chunk[:length].data
            self._require_short(len(buffer), 0)
        raw = bytes(buffer)
        if raw.removeprefix(MARK).strip(b" \t\r\n"):
            yield _whole(raw)

    def _decoded(self, found: Documents) -> Documents:
        """Documents as they are in the text → valid UTF-8; of JSON lines, the texts in them."""
        return texts_of(found, self.form.text_key) if self.kind == "jsonl" else found.repaired()

    def place(self, start: int) -> str:
        """'file, line n' of a byte of this input. Reads the file up to this byte again.

        'file, byte n' of a pipe, and of a file that cannot be read any more.
        """
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

    def invalid_place(self, place: int) -> str:
        """'file, byte n' of an invalid byte; in another encoding its line."""
        return f"{self.file}, byte {place}" if self.form.encoding == UTF_8 else self.place(place)

    def _read(self, stream: InputStream, buffer: NDArray[np.uint8], *, is_first: bool) -> int:
        """Reads bytes into `buffer`; 0: there are no more. Raises InputError if the first ones cannot be text."""
        length: int = stream.file.readinto(buffer.data)
        if is_first:
            first = buffer[: min(length, formats.JUDGED_BYTES)].tobytes()
            require_text(self.file, first, self.form.encoding)
            self._require_no_array(first[:_HEAD].removeprefix(MARK))
            if first.count(b"\r") - first.count(b"\r\n") > first.count(b"\n"):
                self.form.warnings.add(f"{self.file}: lines end with CR alone, so they are one line; end them with LF")
        return length

    def _starting_in(self, stream: InputStream, first: int, stop: int | None) -> Iterator[Documents]:
        """The documents that start in [first, stop), before they are repaired. stop None: no limit."""
        if self.is_one_document:
            yield from self._all(stream)
            return
        is_fasta, by_line = self.kind == "fasta", self.kind == "jsonl" or self.form.documents == "line"
        read = partial(self._read, stream)
        with Buffer(self._before(stream, first)) as buffer:
            is_at_head = buffer.begin == 0  # of FASTA: whether no record has begun
            is_inside = not is_at_head  # of an earlier document, whose text is not needed
            is_cut = False  # whether the start of this document has left
            while not buffer.is_end:
                # A document that is not complete is looked at again with at least as many bytes more. At the start of
                # a file all of a block is read, because its first bytes are judged.
                block = formats.BLOCK_BYTES
                wanted = block if stop is None or buffer.begin == 0 else min(block, stop - buffer.begin + _MARGIN)
                buffer.extend(max(wanted, min(len(buffer), _LONGEST_READ)), read)
                if is_inside and len(buffer) > block and not buffer.has_line_end():
                    buffer.skip()
                    is_cut = True
                    if stop is not None and buffer.begin >= stop:
                        return
                    continue
                kernel, how = (cut_fasta, is_at_head) if is_fasta else (cut, by_line)
                complete, used, start = buffer.cut(kernel, how)
                if is_fasta and is_at_head and start >= 0:
                    self._require_record(start, buffer.bytes[start - buffer.begin])
                    is_at_head = False
                if complete.starts.size:
                    complete = complete.part(int(is_cut), complete.starts.size)
                    is_inside = is_cut = False
                last = complete.starts.size if stop is None else int(complete.starts.searchsorted(stop))
                chosen = complete.part(min(last, int(complete.starts.searchsorted(first))), last)
                buffer.drop(used)
                del complete  # a long document goes before more is read
                if chosen.starts.size:
                    yield chosen
                del chosen
                self._require_short(len(buffer), buffer.begin)
                if stop is not None and buffer.begin >= stop:
                    return
                if stop is not None and buffer.begin < first and buffer.has_line_end(stop - buffer.begin):
                    return  # a document that started before `first` ends after `stop`

    def _require_no_array(self, head: bytes) -> None:
        if self.kind == "jsonl" and head.lstrip().startswith(b"["):
            sentence = f"{self.file} is a JSON array; write each of its rows on its own line, as jq -c '.[]' does"
            raise InputError(sentence, "not-of-format", option="inputs", given=self.file.name)

    def _require_record(self, start: int, byte: int) -> None:
        """byte: the first that is no white space, at `start`."""
        if byte != RECORD:
            place = self.place(start)
            sentence = f"{place}: a record of FASTA begins with >name; correct the file, or give --format text"
            raise InputError(sentence, "not-of-format", option="inputs", given=self.file.name)

    def _require_short(self, size: int, start: int) -> None:
        longest = formats.LONGEST_ROW if self.kind == "jsonl" else formats.LONGEST_DOCUMENT
        if size > longest:
            what = f"longer than {longest >> 20:,} MiB"
            sentence = f"{self.file}: the document at byte {start} is {what}; split it, or choose other --documents"
            raise InputError(sentence, "too-large", option="inputs", given=self.file.name)

    def _chunks_of(
        self, some: Documents, stream: InputStream, base: int, is_wanted: Callable[[int], bool]
    ) -> Iterator[Chunk]:
        """What belongs to each unit that is wanted."""
        units = (base + some.starts) // self.form.shard_size
        cuts = [0, *((units[1:] != units[:-1]).nonzero()[0] + 1).tolist(), units.size]
        for first, stop in pairwise(cuts):
            unit = int(units[first])
            if self.file.items:
                self.file.items.add(unit, some.text[some.offsets[first] : some.offsets[stop]])
            if is_wanted(unit):
                part = some.part(first, stop)
                yield Chunk(unit, part.num_bytes, stream.bytes_read, partial(self._decoded, part))

    def _before(self, stream: InputStream, offset: int) -> int:
        """Moves the stream to the last byte before `offset` that is not white space, or to byte 0. Returns where.

        It is byte 0, too, where only a byte order mark can be before it.
        """
        stop = offset
        while stop > 0:
            start = max(0, stop - min(formats.BLOCK_BYTES, _MARGIN))
            stream.file.seek(start)
            length = len(stream.read(stop - start).rstrip(b" \t\r\n"))
            if length:
                stop = start + length
                break
            stop = start
        before = stop - 1 if stop > len(MARK) else 0
        if offset > 0:
            stream.file.seek(before)
        return before


def _whole(raw: bytes) -> Documents:
    """A file that is one document."""
    text = raw.removeprefix(MARK)
    if raw.endswith(b"\n"):
        text = text.removesuffix(b"\n").removesuffix(b"\r")
    return Documents.of([text.replace(b"\r\n", b"\n")], [0], [0], [valid_utf8(raw)[2]])
