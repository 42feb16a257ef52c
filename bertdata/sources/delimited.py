"""A CSV or TSV file → the texts of one column, by Python's csv.

pyarrow reads such files faster. But it refuses a row that is longer than its block, and a block that is as long as the
longest row would cost its memory for every file.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from bertdata.errors import InputError
from bertdata.sources import formats
from bertdata.sources.formats import TextFormat, require_text, skipped
from bertdata.sources.inputs import Input
from bertdata.sources.streams import CHUNK, InputStream
from bertdata.sources.texts import BadRow

SEPARATORS = {"csv": ",", "tsv": "\t"}
_SHOWN = 200  # characters of a header in a message


def texts_of_column(
    file: Input, stream: InputStream, kind: str, form: TextFormat
) -> Iterator[tuple[list[bytes | None], dict[int, BadRow]]]:
    """The texts of the column `form.text_key`, about a block at a time: valid UTF-8 or not, and None for a bad row.

    With them comes why each bad row is one, by its number; rows are counted from 1, without the header and blank lines.
    kind: one of SEPARATORS. The longest field that csv takes, which is one number for the process, becomes that of the
    longest row. Raises InputError for what cannot be text, for a header without the column, and for a quoted field
    without an end.
    """
    csv.field_size_limit(formats.LONGEST_ROW)
    content = io.BufferedReader(stream.file, CHUNK)
    require_text(file, content.peek(), form.encoding)
    with io.TextIOWrapper(content, "utf-8-sig", "surrogateescape", newline="") as decoded:
        lines = _Lines(file, decoded)
        rows = csv.reader(lines, delimiter=SEPARATORS[kind], strict=True)
        texts, reasons, size, number = list[bytes | None](), dict[int, BadRow](), 0, 0
        header: list[str] = []
        column: int | BadRow = 0
        while True:
            lines.row = number + (bool(header) or _is_number(form.text_key))
            row, why = _next_row(rows, lines)
            if row is None and (why is None or not lines.row):
                break
            if row and not header:
                header, (column, is_header) = row, _column_in(file, row, form)
                if is_header:
                    continue
            number += 1
            text = None
            if isinstance(column, BadRow):
                why = column
            elif row is not None and len(row) != len(header):
                why = BadRow(f"the row has {len(row)} fields and the first line {len(header)}")
            elif row is not None:
                text = row[column].encode("utf-8", "surrogateescape")
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


def _is_number(key: str) -> bool:
    """Return whether a key may be the number of a column in a file without a header."""
    return key.removeprefix("-").isdecimal() and len(key) < 10


def _next_row(rows: Iterator[list[str]], lines: _Lines) -> tuple[list[str] | None, BadRow | None]:
    """The next row that is not blank, or None, and why it cannot be read; None and None at the end."""
    lines.size = 0
    try:
        for row in rows:
            if row:
                return row, None
            lines.size = 0
        return None, None
    except csv.Error as error:
        if lines.is_end:
            sentence = (
                f"{lines.place}: a quotation mark begins a field, and none ends it; write {lines.name} again with a "
                "program that knows CSV, or get it again if it was cut short"
            )
            raise InputError(sentence, "not-of-format", option="inputs", given=lines.name) from None
        return None, BadRow(f"quotation marks are not where CSV has them ({error})")


def _column_in(file: Input, header: list[str], form: TextFormat) -> tuple[int | BadRow, bool]:
    """The number of the text's column, or why there is none, and whether the first row is a header.

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
    sentence = (
        f"{file} has no column {key!r} in its first line, only {columns}; name one with --text-key, or give its "
        "number, from 0, if the file has no header, or use --on-error skip"
    )
    return skipped(form, InputError(sentence, "no-column", option="text_key", given=key)), True


class _Lines:
    """The lines of a text with their ends, and an InputError where a row has too many of them."""

    def __init__(self, file: Input, text: io.TextIOWrapper) -> None:
        self._text = text
        self.name, self.row = file.name, 0
        self.size = 0  # characters of the row so far
        self.is_end = False

    @property
    def place(self) -> str:
        return f"{self.name}, row {self.row}" if self.row else f"{self.name}, header"

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._text.readline(formats.LONGEST_ROW + 1)
        self.size += len(line)
        if self.size > formats.LONGEST_ROW:
            sentence = (
                f"{self.place} is longer than {formats.LONGEST_ROW >> 20:,} Mi characters; split it, or look "
                "for a quotation mark that begins a field and has no end"
            )
            raise InputError(sentence, "too-large", option="inputs", given=self.name)
        self.is_end = not line
        if self.is_end:
            raise StopIteration
        return line
