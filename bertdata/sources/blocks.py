"""Inputs → documents, in blocks of about 4 MiB.

docs/format.md says what a line, a document and a unit are. Memory: two blocks, and a few copies of the longest
document, which has at most 1 GiB. The text of a plain file is copied once, by the kernel that cuts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import BertdataError, InputError
from bertdata.sources import documents
from bertdata.sources.documents import TextFile, TextFormat
from bertdata.sources.inputs import Input
from bertdata.sources.maps import mapped
from bertdata.sources.split import Plan, Stretch
from bertdata.sources.streams import UTF_8
from bertdata.sources.tables import TABLE_KINDS, Rows, TableFile
from bertdata.sources.texts import Decoded, Documents, joined, padded


@dataclass(frozen=True)
class Block:
    """Some documents of one unit. Document i is data[offsets[i] : offsets[i + 1] - 1]; a newline follows each."""

    data: NDArray[np.uint8]  # valid UTF-8 up to offsets[-1], then at least PADDING bytes
    offsets: NDArray[np.int64]  # [num_documents + 1]
    unit: int
    inputs: NDArray[np.int64]  # [num_documents] number of the input that each is from
    places: NDArray[np.int64]  # [num_documents] where it begins there: Documents.starts
    replaced: NDArray[np.int64]  # [num_documents] how many invalid byte sequences became U+FFFD
    first_replaced: tuple[int, int] | None  # the first of them: number of the input, offset or row in it
    bytes_read: int  # of all inputs on disk, up to the end of this block
    skipped: int = 0  # rows that cannot be used, before or between these documents
    first_skipped: tuple[int, int, str] | None = None  # the first: number of the input, offset or row, reason
    num_removed: int = 0  # documents before or between these that --map left out
    num_duplicates: int = 0  # documents left out because their text came before

    @classmethod
    def empty(cls) -> Block:
        none = np.zeros(0, np.int64)
        return cls(padded(0), np.zeros(1, np.int64), 0, none, none, none, None, 0)

    def without(self, gone: NDArray[np.bool_]) -> Block:
        """The block without some documents. gone: bool [num_documents]."""
        if not gone.any():
            return self
        kept = np.flatnonzero(~gone)
        bounds = zip(self.offsets[kept].tolist(), self.offsets[kept + 1].tolist(), strict=True)
        return replace(
            self, data=joined([self.data[:0], *(self.data[start:stop] for start, stop in bounds)]),
            offsets=np.append(0, np.cumsum(np.diff(self.offsets)[kept])), inputs=self.inputs[kept],
            places=self.places[kept], replaced=self.replaced[kept],
        )  # fmt: skip

    @property
    def num_documents(self) -> int:
        return self.offsets.size - 1

    @property
    def num_bytes(self) -> int:
        """Bytes of the documents with the newline after each."""
        return int(self.offsets[-1])


class Piece(NamedTuple):
    """Lines or rows of one input."""

    input: int  # its number
    source: TextFile | TableFile
    content: Documents | Rows | Decoded

    def decoded(self) -> Decoded:
        """Their documents, as --map makes them. Raises InputError for what the options do not allow."""
        form = self.source.form
        decoded = self.content
        if not isinstance(decoded, Decoded):
            decoded = self.source.decoded(decoded)  # type: ignore[arg-type]  # what this source gave
        invalid = decoded.documents.invalid[decoded.documents.invalid >= 0].tolist() if form.strict else []
        refused = decoded.bad if form.on_error == "fail" else []
        if refused and (not invalid or refused[0][0] <= invalid[0]):
            start, reason = refused[0]
            sentence = f"{self.source.place(start)}: {reason}; {reason.advice}, or use --on-error skip"
            raise InputError(sentence, "bad-row", option="inputs", given=self.source.file.name)
        if invalid:
            place = self.source.invalid_place(invalid[0])
            name = "UTF-8" if form.encoding == UTF_8 else form.encoding
            sentence = (
                f"{place} is not valid {name}; fix the file, name its encoding with --encoding, or build without "
                "--strict to replace and count such bytes"
            )
            raise InputError(sentence, "not-text", option="inputs", given=self.source.file.name)
        if not form.maps:
            return decoded
        documents = mapped(decoded.documents, form.maps, self.source.place)
        return Decoded(documents, decoded.bad, decoded.documents.starts.size - documents.starts.size)


@dataclass(frozen=True)
class FoundBlock:
    """A block whose documents are found and not yet taken out of JSON or of a table, nor made valid."""

    unit: int
    pieces: list[Piece]
    bytes_read: int

    def decoded(self) -> Block:
        """The block. May be called in any thread. Raises InputError, which names file and line, byte or row."""
        first_replaced, skipped, first_skipped, num_removed = None, 0, None, 0
        parts = list[Documents]()
        for piece in self.pieces:
            some, bad, removed = piece.decoded()
            parts.append(some)
            skipped, num_removed = skipped + len(bad), num_removed + removed
            if bad and first_skipped is None:
                first_skipped = piece.input, bad[0][0], str(bad[0][1])
            if first_replaced is None and (some.invalid >= 0).any():
                first_replaced = piece.input, int(some.invalid[some.invalid >= 0][0])
        if len(parts) == 1:  # the usual case, without a copy
            data, offsets, places, replaced = parts[0].text, parts[0].offsets, parts[0].starts, parts[0].replaced
        else:
            data = joined([part.text[: part.num_bytes] for part in parts])
            offsets = np.append(0, np.cumsum(np.concatenate([np.diff(part.offsets) for part in parts])))
            places = np.concatenate([part.starts for part in parts])
            replaced = np.concatenate([part.replaced for part in parts])
        inputs = np.repeat([piece.input for piece in self.pieces], [part.starts.size for part in parts])
        return Block(
            data,
            offsets,
            self.unit,
            inputs,
            places,
            replaced,
            first_replaced,
            self.bytes_read,
            skipped,
            first_skipped,
            num_removed,
        )


def read_blocks(plan: Plan, is_wanted: Callable[[int], bool] = lambda unit: True) -> Iterator[Block]:
    """The documents of all inputs in order, in blocks. A block has documents of one unit, or only skipped rows.

    is_wanted: which units to give. Raises InputError, which names file and line, byte or row, for input that cannot be
    read.
    """
    return (block.decoded() for block in find_blocks(plan, is_wanted))


def find_blocks(plan: Plan, is_wanted: Callable[[int], bool] = lambda unit: True) -> Iterator[FoundBlock]:
    """The blocks of `read_blocks` before most of the work on them.

    What is not wanted is not read: units of plain files and of Parquet, and other files of which no unit is wanted.
    """
    form, bytes_before = plan.form, 0
    unit, pieces, size, count = 0, list[Piece](), 0, 0
    # With max_documents every document counts, also those of units that are not wanted.
    is_read = is_wanted if form.max_documents is None else _every_unit
    for stretch in plan.stretches:
        base = stretch.base
        for index in stretch.inputs:
            source = source_of(plan.files[index], form)
            for number, content in _of_source(source, stretch, base, is_read):
                unit_of_content = stretch.unit(number)
                if pieces and (unit_of_content != unit or size + content.num_bytes > documents.BLOCK_BYTES):
                    if is_wanted(unit):
                        yield FoundBlock(unit, pieces, bytes_before + source.bytes_read)
                    pieces, size = [], 0
                unit, size = unit_of_content, size + content.num_bytes
                if form.max_documents is None:
                    pieces.append(Piece(index, source, content))
                else:
                    taken = _first(source, content, form.max_documents - count)
                    count += taken.documents.starts.size
                    pieces.append(Piece(index, source, taken))
                if count == form.max_documents:
                    if is_wanted(unit):
                        yield FoundBlock(unit, pieces, bytes_before + source.bytes_read)
                    return
            base += source.size
            bytes_before += source.bytes_read
        if pieces and is_wanted(unit):  # before anything of the next stretch is read, whose fault comes later
            yield FoundBlock(unit, pieces, bytes_before)
        pieces, size = [], 0


def _of_source(
    source: TextFile | TableFile, stretch: Stretch, base: int, is_wanted: Callable[[int], bool]
) -> Iterator[tuple[int, Documents | Rows]]:
    """What an input has of the units that are wanted. A file that has nothing of them is not opened."""
    size = source.file.size or 0
    if stretch.is_divisible and isinstance(source, TextFile):
        of_size = source.form.shard_size
        stop = base + (size if source.form.documents != "file" else min(size, 1))  # such a file belongs to one unit
        units: Iterable[int] = (stretch.unit(number) for number in range(base // of_size, -(-stop // of_size)))
    else:
        units = stretch.units
    if not any(map(is_wanted, units)):
        source.size = source.bytes_read = size
        return iter(())
    return source.documents(base, lambda number: is_wanted(stretch.unit(number)))


def _first(source: TextFile | TableFile, content: Documents | Rows, most: int) -> Decoded:
    """At most so many documents, and the rows without a text before the last of them."""
    some, bad, _ = source.decoded(content)  # type: ignore[arg-type]  # what this source gave
    if some.starts.size >= most:
        some = some.part(0, most)
        bad = [each for each in bad if each[0] < some.starts[-1]]
    return Decoded(some, bad)


def source_of(file: Input, form: TextFormat) -> TextFile | TableFile:
    kind = form.kind or file.kind
    return TableFile(file, kind, form) if kind in TABLE_KINDS else TextFile(file, kind, form)


def place_in(file: Input, form: TextFormat, what: Literal["place", "invalid_place"], offset: int) -> str:
    """'file, line n', or 'file, byte n' if the file cannot be read any more."""
    try:
        return str(getattr(source_of(file, form), what)(offset))
    except BertdataError:
        return f"{file}, byte {offset}"


def _every_unit(unit: int) -> bool:
    return True
