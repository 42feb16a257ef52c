"""Inputs → documents, in blocks of about 4 MiB.

docs/format.md says what a line, a document and a unit are. Memory: two blocks, and a few copies of the longest
document, which has at most 256 MiB. The text of a plain file is copied once, by the kernel that cuts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from bertdata.errors import InputError
from bertdata.sources import formats
from bertdata.sources.documents import TextFile
from bertdata.sources.formats import TextFormat
from bertdata.sources.inputs import Input
from bertdata.sources.maps import mapped
from bertdata.sources.split import Plan, Stretch
from bertdata.sources.streams import UTF_8
from bertdata.sources.tables import TABLE_KINDS, TableFile
from bertdata.sources.texts import Chunk, Documents

MOST_PIECES = 1 << 12  # of files in a block: each takes 2 KB beside its text


def find_blocks(plan: Plan, is_wanted: Callable[[int], bool] = lambda unit: True) -> Iterator[Chunk]:
    """The text of all inputs in order, in blocks, each with the unit that it belongs to.

    `decode` of a block gives its documents, or only rows that are skipped. is_wanted: which units to give. What is not
    wanted is not read: units of plain files and of Parquet, and other files of which no unit is wanted.

    Raises InputError for input that cannot be read, as `decode` does. It names file and line, byte or row.
    """
    most, count, bytes_before = plan.form.max_documents, 0, 0
    # With max_documents every document counts, also those of units that are not wanted.
    is_read = is_wanted if most is None else lambda unit: True
    for stretch in plan.stretches:
        base, pieces, size = stretch.base, list[Chunk](), 0
        for index in stretch.inputs:
            source, bytes_read = source_of(plan.files[index], plan.form), bytes_before
            for chunk in _chunks_of(source, stretch, base, is_read):
                unit, bytes_read = stretch.unit(chunk.unit), bytes_before + chunk.bytes_read
                if pieces and (pieces[-1].unit != unit or size + chunk.num_bytes > formats.BLOCK_BYTES):
                    yield from _block(pieces, size, bytes_read, is_wanted)
                    pieces, size = [], 0
                decode = chunk.decode
                if most is not None:
                    taken = _first(decode(), most - count)
                    decode = partial(Documents.joined, [taken])  # these alone
                    count += taken.starts.size
                pieces.append(chunk._replace(unit=unit, decode=partial(_allowed, index, source, decode)))
                size += chunk.num_bytes
                del chunk, decode  # a long document goes before the next one is read
                if count == most:
                    yield from _block(pieces, size, bytes_read, is_wanted)
                    return
                if size >= formats.BLOCK_BYTES or len(pieces) >= MOST_PIECES:
                    yield from _block(pieces, size, bytes_read, is_wanted)
                    pieces, size = [], 0
            base += source.file.size or 0
            if source.file.size is None or source.kind == "arrow":  # whose end nobody reads
                bytes_before = bytes_read
            else:
                bytes_before += source.file.size
        yield from _block(pieces, size, bytes_before, is_wanted)  # before the next stretch, whose fault comes later


def _block(pieces: Sequence[Chunk], size: int, bytes_read: int, is_wanted: Callable[[int], bool]) -> Iterator[Chunk]:
    """Pieces of one unit as one chunk, if there are some and the unit is wanted."""
    if pieces and is_wanted(pieces[0].unit):
        yield Chunk(pieces[0].unit, size, bytes_read, lambda: Documents.joined([each.decode() for each in pieces]))


def _allowed(number: int, source: TextFile | TableFile, decode: Callable[[], Documents]) -> Documents:
    """The documents that `decode` gives, as --map makes them. Raises InputError for what the options do not allow.

    number: of the input that they are from.
    """
    form, found = source.form, decode()
    first = found.first_surrogate if form.strict else None
    invalid = found.invalid[found.invalid >= 0].tolist() if form.strict else []
    refused = found.bad if form.on_error == "fail" else ()
    if first and first[1] <= min([*invalid[:1], *(each.place for each in refused[:1])], default=first[1]):
        sentence = f"{source.place(first[1])}: the text has a lone surrogate; correct it, or build without --strict"
        raise InputError(sentence, "not-text", option="inputs", given=source.file.name)
    if refused and (not invalid or refused[0].place <= invalid[0]):
        why = refused[0].why
        sentence = f"{source.place(refused[0].place)}: {why}; {why.advice}, or use --on-error skip"
        raise InputError(sentence, "bad-row", option="inputs", given=source.file.name)
    if invalid:
        name = "UTF-8" if form.encoding == UTF_8 else form.encoding
        place = source.invalid_place(invalid[0])
        sentence = f"{place} is not valid {name}; correct it, name another --encoding, or build without --strict"
        raise InputError(sentence, "not-text", option="inputs", given=source.file.name)
    if form.maps:
        found = mapped(found, form.maps, source.place)
    bad = [each._replace(input=number) for each in found.bad]
    return replace(found, inputs=np.full(found.starts.size, number), bad=bad)


def _chunks_of(
    source: TextFile | TableFile, stretch: Stretch, base: int, is_wanted: Callable[[int], bool]
) -> Iterator[Chunk]:
    """What an input has of the units that are wanted. A file that has nothing of them is not opened."""
    units: Iterable[int] = stretch.units
    if stretch.is_divisible and isinstance(source, TextFile):
        size, of_size = source.file.size or 0, source.form.shard_size
        stop = base + (min(size, 1) if source.is_one_document else size)  # one document belongs to one unit
        units = (stretch.unit(number) for number in range(base // of_size, -(-stop // of_size)))
    if any(map(is_wanted, units)):
        yield from source.chunks(base, lambda number: is_wanted(stretch.unit(number)))


def _first(some: Documents, most: int) -> Documents:
    """At most so many documents, and the rows without a text before the last of them."""
    if some.starts.size < most:
        return some
    taken = some.part(0, most)
    return replace(taken, bad=[each for each in some.bad if each.place < taken.starts[-1]])


def source_of(file: Input, form: TextFormat) -> TextFile | TableFile:
    kind = form.kind or file.kind
    return TableFile(file, kind, form) if kind in TABLE_KINDS else TextFile(file, kind, form)
