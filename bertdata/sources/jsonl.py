"""Lines of JSON → the strings under one key, or under nested keys: "a.b" is row["a"]["b"].

pyarrow parses a whole block of lines at once. If it rejects a block, or may parse it differently from Python's json,
json parses the block line by line.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from bertdata.sources.documents import BadRow, Documents, Skipped, valid_utf8
from bertdata.sources.kernels import may_be_special

_SURROGATE = re.compile("[\ud800-\udfff]")
_LONGEST = 1 << 25  # bytes of a line for Python's json, whose objects need up to 24 times as much


def texts_of(lines: Documents, key: str) -> Documents:
    """Return the strings in lines that hold one JSON value each, valid UTF-8 or not."""
    if documents := _at_once(lines, key):
        return documents
    texts, bad = list[bytes](), list[Skipped]()
    numbers = list[tuple[int, int, int]]()  # start, replaced and invalid of each text
    offsets, view = lines.offsets.tolist(), lines.text.data
    for number, start in enumerate(lines.starts.tolist()):
        raw, num_bad, bad_at = valid_utf8(bytes(view[offsets[number] : offsets[number + 1] - 1]))
        try:
            if len(raw) > _LONGEST:  # pyarrow may parse this line by itself
                raise RecursionError(f"longer than {_LONGEST >> 20} MiB")
            text, num_surrogates = _text(raw, key)
        except RecursionError as error:  # pyarrow parses JSON of any depth
            documents = _at_once(lines.between(number, number + 1), key)
            if not documents:
                bad.append(Skipped(0, start, BadRow(f"not JSON ({error})")))
                continue
            text, num_surrogates = documents.text[: documents.num_bytes - 1].tobytes(), 0
        except BadRow as error:
            bad.append(Skipped(0, start, error))
            continue
        texts.append(text)
        numbers.append((start, num_bad + num_surrogates, start + max(bad_at, 0) if num_bad or num_surrogates else -1))
    return replace(Documents.from_texts(texts, *([each[k] for each in numbers] for k in range(3))), bad=bad)


def _at_once(lines: Documents, key: str) -> Documents | None:
    """Return the strings from pyarrow; None if lines must be parsed one by one.

    pyarrow ignores line ends. But each line begins with { and ends with }, and no JSON value has a newline between }
    and {. So each line holds complete values, and equal counts mean one value per line. pyarrow stops at a NUL.
    """
    import pyarrow as pa
    from pyarrow import json as pa_json

    size, count = lines.num_bytes, lines.starts.size
    text = lines.text
    first, last = text[lines.offsets[:-1]], text[lines.offsets[1:] - 2]
    if (first != ord("{")).any() or (last != ord("}")).any() or (lines.invalid >= 0).any():
        return None
    if may_be_special(text, size):
        return None
    root, *names = key.split(".")
    fields, nested = {key: pa.large_string()}, pa.large_string()
    for name in reversed(names):
        nested = pa.struct([(name, nested)])
    fields |= {root: nested} if names else {}
    try:
        table = pa_json.read_json(
            pa.BufferReader(pa.py_buffer(text[:size])),
            read_options=pa_json.ReadOptions(use_threads=False, block_size=size + 1),
            parse_options=pa_json.ParseOptions(explicit_schema=pa.schema(fields), unexpected_field_behavior="ignore"),
        )
    except (pa.ArrowException, UnicodeError):
        return None
    column = table.column(key)
    if names:
        from pyarrow import compute  # takes 0.03 s

        column = compute.coalesce(column, compute.struct_field(table.column(root), names))
    if len(column) != count or column.null_count:
        return None
    documents = Documents.from_column(column.combine_chunks().cast(pa.large_binary()), lines.starts)
    return None if (documents.invalid >= 0).any() else documents


def _value(row: Any, key: str) -> Any:
    """Return the value under a key, or, if it is missing or null, under nested keys. Raise Python's error for none."""
    if "." not in key or row.get(key) is not None:
        return row[key]
    for name in key.split("."):
        row = row[name]
    return row


def _text(raw: bytes, key: str) -> tuple[bytes, int]:
    """Return the string, and the number of replaced lone surrogates in it. Raises BadRow or RecursionError."""
    try:
        text = _value(json.loads(raw, parse_int=float), key)  # Python rejects integers of 4,301 digits
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ValueError):
            raise BadRow(f"not JSON ({error})") from None
        raise BadRow(f"no key {key!r} in this row", "give --text-key, fix the row") from None
    if not isinstance(text, str):
        raise BadRow(f"the value of key {key!r} is not a string", "give --text-key, fix the row")
    try:
        return text.encode(), 0
    except UnicodeEncodeError:
        text, num_surrogates = _SURROGATE.subn("\ufffd", text)
        return text.encode(), num_surrogates
