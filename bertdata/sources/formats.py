"""Sizes of reads, limits of lines and documents, and the detection of inputs that are not text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bertdata.errors import InputError, refused
from bertdata.options import TextFormat
from bertdata.sources.documents import BadRow, valid_utf8
from bertdata.sources.inputs import Input, magic_of

BLOCK_BYTES = 1 << 22  # bytes of text read at a time
LONGEST_DOCUMENT = 1 << 28  # bytes; longer documents come from a wrong --documents or a decompression bomb
LONGEST_ROW = 1 << 26  # bytes of a JSON line, characters of a CSV row: parsers need more memory for each
JUNK_SHARE = 0.3  # a file with a larger share of invalid or NUL bytes in its first JUDGED_BYTES is not text
JUDGED_BYTES = 1 << 20
_FEWEST_JUDGED = 1 << 10  # bytes
_SHOWN = 200  # characters of a header in an error message
_OTHERS = re.compile(
    rb"(?s)(?P<zip>PK\x03\x04)|(?P<Parquet>PAR1\x15)|.{257}(?P<tar>ustar(?:  )?\0)|"
    rb"(?P<lz4>\x04\x22\x4d\x18)|(?P<SevenZip>7z\xbc\xaf\x27\x1c)|(?P<UTF_16>\xff\xfe|\xfe\xff)"
)


def num_not_text(first: bytes) -> int:
    """Return how many of an input's first bytes are invalid or NUL if there are too many for text, else 0."""
    num_bad = valid_utf8(first)[1] + first.count(0)
    return num_bad if len(first) >= _FEWEST_JUDGED and num_bad > JUNK_SHARE * len(first) else 0


def require_text(file: Input, first: bytes, encoding: str) -> None:
    """Raise InputError if the first bytes of an input, after decompression and conversion to UTF-8, cannot be text."""
    other = _OTHERS.match(first)
    what = magic_of(first) or (other.lastgroup or "" if other else "").replace("_", "-")
    if what:
        remedy = "give --encoding utf-16" if what == "UTF-16" else "unpack it, or correct its --format"
        raise refused(file, "not-text", f" is not {encoding.upper()} text, but {what}; {remedy}")
    if num_bad := num_not_text(first):
        advice = "correct its items" if file.items else "give its --encoding"
        raise refused(file, "not-text", f" is not {encoding.upper()}: {num_bad:,} bytes are invalid; {advice}")


def skipped(form: TextFormat, error: InputError) -> BadRow:
    """If bad rows are skipped, return the reason why no row of a table has a text. Otherwise raise the error."""
    if form.on_error == "fail":
        raise error
    return BadRow(f"no row of this file has a text: {str(error).rpartition('; ')[0]}")


def without_column(file: Input, form: TextFormat, count: int, columns: Sequence[str]) -> BadRow:
    """Like `skipped`, for a table that has no column for the text, or several."""
    key, shown = form.text_key, ", ".join(columns)
    shown = shown[:_SHOWN] + "..." * (len(shown) > _SHOWN)
    has = f"{count} columns {key!r}" if count else f"no column {key!r}, only {shown}"
    sentence = (
        f"{file} has {has}; name one with --text-key (or its number, if CSV has no header), or use --on-error skip"
    )
    return skipped(form, InputError(sentence, "not-of-format" if count else "no-column", option="text_key", given=key))
