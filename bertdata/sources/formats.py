"""How inputs are divided into documents, how much of them is read at a time, and what is no text."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, field

from bertdata.choices import DOCUMENT_ENDS, INPUT_FORMATS, ON_ERROR
from bertdata.errors import InputError, UsageError, require_known, require_positive
from bertdata.sources.inputs import Input, magic_of
from bertdata.sources.maps import function_of
from bertdata.sources.streams import UTF_8
from bertdata.sources.texts import BadRow, valid_utf8

BLOCK_BYTES = 1 << 22  # that are read at a time
LONGEST_DOCUMENT = 1 << 28  # bytes; a longer one comes from a wrong --documents, or from a file that unpacks endlessly
LONGEST_ROW = 1 << 26  # bytes of a line of JSON, characters of a row of CSV: parsers take more memory for each
JUNK_SHARE = 0.3  # a file is not text if a larger share of its first JUDGED_BYTES is invalid or NUL
JUDGED_BYTES = 1 << 20
_FEWEST_JUDGED = 1 << 10  # bytes
_OTHERS = re.compile(
    rb"(?s)(?P<zip>PK\x03\x04)|(?P<Parquet>PAR1\x15)|.{257}(?P<tar>ustar(?:  )?\0)|"
    rb"(?P<lz4>\x04\x22\x4d\x18)|(?P<SevenZip>7z\xbc\xaf\x27\x1c)|(?P<UTF_16>\xff\xfe|\xfe\xff)"
)


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """How inputs are divided into documents. Raises UsageError for values that are not possible."""

    documents: str = "blank"  # what ends a document of plain text, one of DOCUMENT_ENDS
    kind: str | None = None  # of every input, one of INPUT_FORMATS; None: the ending of each input tells
    text_key: str = "text"  # name of the JSON key, or of the column of a table, that holds the text
    encoding: str = UTF_8  # of all but Parquet and Arrow; any text encoding that Python knows
    strict: bool = False  # whether an invalid byte is an error; else it becomes U+FFFD and is counted
    on_error: str = "fail"  # one of ON_ERROR: whether a row that cannot be used is an error, or is skipped
    shard_size: int = 1 << 30  # bytes of text in a unit, of Parquet up to the end of a row group
    max_documents: int | None = None  # None: no limit
    warnings: set[str] = field(default_factory=set, compare=False, repr=False)  # what is found while reading
    maps: tuple[str, ...] = ()  # functions from a text to a text or None, as sources.maps takes them

    def __post_init__(self) -> None:
        require_known("documents", self.documents, DOCUMENT_ENDS)
        require_known("format", self.kind, (None, *INPUT_FORMATS))
        require_known("on_error", self.on_error, ON_ERROR)
        object.__setattr__(self, "shard_size", require_positive("shard_size", self.shard_size))
        if self.max_documents is not None:
            object.__setattr__(self, "max_documents", require_positive("max_documents", self.max_documents))
        object.__setattr__(self, "encoding", _canonical(self.encoding))
        for spec in self.maps:
            function_of(spec, "--map")


def _canonical(encoding: str) -> str:
    """Python's name for a text encoding, such as iso8859-1 for latin-1. Raises UsageError for an unknown one."""
    try:
        "a".encode(encoding)  # refuses codecs that are not text encodings, such as base64
        codecs.getincrementaldecoder(encoding)
        return codecs.lookup(encoding).name
    except (LookupError, UnicodeError, ValueError):
        sentence = f"encoding is {encoding!r}, no text encoding of Python; give one such as utf-8, latin-1 or gb18030"
        raise UsageError(sentence, "unknown", option="encoding", given=encoding) from None


def num_not_text(first: bytes) -> int:
    """Return how many of the first bytes of an input are invalid or NUL if they are too many for text, else 0."""
    num_bad = valid_utf8(first)[1] + first.count(0)
    return num_bad if len(first) >= _FEWEST_JUDGED and num_bad > JUNK_SHARE * len(first) else 0


def require_text(file: Input, first: bytes, encoding: str) -> None:
    """Raises InputError if the first bytes of an input, decompressed and in UTF-8, cannot be text."""
    other = _OTHERS.match(first)
    what = magic_of(first) or (other.lastgroup or "" if other else "").replace("_", "-")
    if what:
        advice = "unpack it, or correct its ending, --format or --encoding"
        sentence = f"{file} is not {encoding.upper()} text, but {what}; {advice}"
        raise InputError(sentence, "not-text", option="inputs", given=file.name)
    if num_bad := num_not_text(first):
        shown, num_bytes = encoding.upper(), len(first)
        sentence = f"{file} is not {shown} text: {num_bad:,} of {num_bytes:,} bytes are invalid; give its --encoding"
        raise InputError(sentence, "not-text", option="inputs", given=file.name)


def skipped(form: TextFormat, error: InputError) -> BadRow:
    """Return why no row of a table has a text, if bad rows are skipped. Raises the error if they are not."""
    if form.on_error == "fail":
        raise error
    sentence = str(error).rpartition("; ")[0]
    return BadRow(f"no row of this file has a text: {sentence}")
