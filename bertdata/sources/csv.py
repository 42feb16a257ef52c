"""A CSV or TSV file → the texts of one column, by Python's csv.

pyarrow reads such files faster. But it does not tell that a quoted field has no end: the field has all that follows.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from bertdata.errors import InputError
from bertdata.sources import formats
from bertdata.sources.documents import BadRow
from bertdata.sources.formats import TextFormat, require_text, skipped
from bertdata.sources.inputs import Input
from bertdata.sources.streams import CHUNK, InputStream

SEPARATORS = {"csv": ",", "tsv": "\t"}
_SHOWN = 200  # characters of a header in a message


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
            sentence = f"{file} has no header; give one whose first line names its columns, or --format text for prose"
            raise InputError(sentence, "not-of-format", option="inputs", given=file.name)
        if texts:
            yield texts, reasons


def _require_end(file: Input, place: str, error: str) -> None:
    """Raises InputError for an error of csv after which it cannot continue."""
    if error == "unexpected end of data":
        sentence = f"{file}, {place}: a quotation mark begins a field, and none ends it; write the file as CSV again"
        raise InputError(sentence, "not-of-format", option="inputs", given=file.name) from None
    if error.startswith("field larger"):
        most = formats.LONGEST_ROW >> 20
        sentence = f"{file}, {place} is longer than {most:,} Mi characters; split it, or end its quotation marks"
        raise InputError(sentence, "too-large", option="inputs", given=file.name) from None


def _is_number(key: str) -> bool:
    """Return whether a key may be the number of a column in a file without a header."""
    return key.removeprefix("-").isdecimal() and len(key) < 10


def _column_in(file: Input, header: list[str], form: TextFormat) -> tuple[int | BadRow, bool]:
    """Return the number of the text's column, or why there is none, and whether the first row is a header.

    It is none if the key is the number of a column and not all fields are numbers: a label of the first row may be one.
    Raises InputError if there is no such column, unless bad rows are skipped.
    """
    key, columns = form.text_key, ", ".join(header)
    is_number = _is_number(key) and -len(header) <= int(key) < len(header)
    if is_number and not (key in header and all(name.isdecimal() for name in header if name)):
        return int(key), False
    if header.count(key) == 1:
        return header.index(key), True
    if key in header:
        sentence = f"{file} has {header.count(key)} columns {key!r}; rename all but one of them, or use --on-error skip"
        return skipped(form, InputError(sentence, "not-of-format", option="text_key", given=key)), True
    columns = columns[:_SHOWN] + "..." * (len(columns) > _SHOWN)
    advice = "name one with --text-key, or give its number from 0 if there is no header, or use --on-error skip"
    sentence = f"{file} has no column {key!r} in its first line, only {columns}; {advice}"
    return skipped(form, InputError(sentence, "no-column", option="text_key", given=key)), True
