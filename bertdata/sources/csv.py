"""A CSV or TSV file → the texts of one column, by Python's csv.

pyarrow reads such files faster. But it does not tell that a quoted field has no end: the field has all that follows.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from bertdata.errors import refused
from bertdata.options import TextFormat
from bertdata.sources import formats
from bertdata.sources.documents import BadRow
from bertdata.sources.formats import require_text, without_column
from bertdata.sources.inputs import Input
from bertdata.sources.streams import CHUNK, InputStream

SEPARATORS = {"csv": ",", "tsv": "\t"}


def texts_of_column(
    file: Input, stream: InputStream, kind: str, form: TextFormat
) -> Iterator[tuple[list[bytes | None], dict[int, BadRow]]]:
    """Yield the texts of the column `form.text_key`, about a block at a time, and None for each bad row.

    With them comes why each bad row is one, by its number; rows are counted from 1, without the header and blank lines.
    A text may be invalid UTF-8. kind: one of SEPARATORS. Sets the longest field of the module csv. Raises InputError
    for what cannot be text, for a header without the column, and for a quoted field without an end.
    """
    csv.field_size_limit(formats.LONGEST_ROW)
    content = io.BufferedReader(stream.file, CHUNK)
    require_text(file, content.peek(), form.encoding)
    texts, reasons, size, number, left = list[bytes | None](), dict[int, BadRow](), 0, 0, 0
    header: list[str] = []
    column: int | BadRow = 0
    with io.TextIOWrapper(content, "utf-8-sig", "surrogateescape", newline="") as decoded:

        def lines() -> Iterator[str]:
            nonlocal left
            while line := decoded.readline(left + 1):
                left -= len(line)
                if left < 0:
                    raise csv.Error("field larger than field limit")  # as csv says it of a field
                yield line

        rows = csv.reader(lines(), delimiter=SEPARATORS[kind], strict=True)
        while True:
            text, why, left = None, None, formats.LONGEST_ROW  # characters that the row may still have
            try:
                if (row := next(rows, None)) is None:
                    break
                if not row:
                    continue
                if not header:
                    header, (column, is_header) = row, _column_in(file, row, form)
                    if is_header:
                        continue
                if isinstance(column, BadRow):
                    why = column
                elif len(row) == len(header):
                    text = row[column].encode("utf-8", "surrogateescape")
                else:
                    why = BadRow(f"the row has {len(row)} fields and the first line {len(header)}")
            except csv.Error as error:
                is_row = header or _is_number(form.text_key)
                _require_end(file, f"row {number + 1}" if is_row else "header", str(error))
                if not is_row:
                    break
                why = BadRow(f"quotation marks are not where CSV has them ({error})")
            number += 1
            texts.append(text)
            reasons |= {number: why} if why else {}
            size += len(text or b"") + 1
            if size >= formats.BLOCK_BYTES:
                yield texts, reasons
                texts, reasons, size = [], {}, 0
        if not header and not number:
            raise refused(
                file, "not-of-format", " has no header; name its columns in a first line, or give --format text"
            )
        if texts:
            yield texts, reasons


def _require_end(file: Input, place: str, error: str) -> None:
    """Raises InputError for an error of csv after which it cannot continue."""
    if error == "unexpected end of data":
        what = f", {place}: a quotation mark begins a field, and none ends it; write the file as CSV again"
        raise refused(file, "not-of-format", what) from None
    if error.startswith("field larger"):
        most = f"{formats.LONGEST_ROW >> 20} Mi characters"
        raise refused(file, "too-large", f", {place} is longer than {most}; split it, or end its quotes") from None


def _is_number(key: str) -> bool:
    """Return whether a key may be the number of a column in a file without a header."""
    return key.removeprefix("-").isdecimal() and len(key) < 10


def _column_in(file: Input, header: list[str], form: TextFormat) -> tuple[int | BadRow, bool]:
    """Return the number of the text's column, or why there is none, and whether the first row is a header.

    It is none if the key is the number of a column and not all fields are numbers: a label of the first row may be one.
    Raises InputError if there is no such column, unless bad rows are skipped.
    """
    key = form.text_key
    is_number = _is_number(key) and -len(header) <= int(key) < len(header)
    if is_number and not (key in header and all(name.isdecimal() for name in header if name)):
        return int(key), False
    if header.count(key) == 1:
        return header.index(key), True
    return without_column(file, form, header.count(key), header), True
