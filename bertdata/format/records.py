"""JSON records with a checksum."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertdata.errors import DatasetError, damaged, unreadable
from bertdata.files import open_plain, write_file

FORMAT_VERSION = 1  # version of all records, except a manifest of many shards
LARGEST_RECORD = 1 << 27  # bytes; enough for a manifest of about 100,000 shards


def canonical(record: Any) -> bytes:
    """Return the bytes of a JSON value for hashing (docs/format.md, "JSON records")."""
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a JSON object with its checksum, atomically."""
    write_file(path, sealed_record(record))


def sealed_record(record: dict[str, Any], *, indent: int | None = 1) -> bytes:
    """Return a JSON object with its checksum, as the bytes of a file. indent=None: one line, which is faster."""
    sealed = record | {"checksum": hashlib.sha256(canonical(record)).hexdigest()}
    content = io.BytesIO()
    text = io.TextIOWrapper(content, encoding="ascii", newline="")
    if indent is None:
        text.write(json.dumps(sealed))  # compiled, in contrast to json.dump
    else:
        json.dump(sealed, text, indent=indent)  # piece by piece: all pieces together need more memory than the text
    text.write("\n")
    text.flush()
    return content.getvalue()


def read_record(path: Path, *, versions: Sequence[int] = (FORMAT_VERSION,)) -> dict[str, Any]:
    """Return the record of a file, without its checksum.

    versions: the format versions to accept. Raises DatasetError if the file is missing, damaged, or has a different
    version.
    """
    return parse_record(read_content(path), path, versions=versions)


def read_content(path: Path, most: int = LARGEST_RECORD) -> bytes:
    """Return at most `most` + 1 bytes of a file. Raises DatasetError if it is missing or cannot be read."""
    try:
        with open_plain(path, "rb") as file:
            return file.read(min(most, os.fstat(file.fileno()).st_size) + 1)
    except FileNotFoundError:
        raise damaged(path, "it is missing") from None
    except OSError as error:
        raise unreadable(path, error) from None


def parse_record(content: bytes, name: object, *, versions: Sequence[int] = (FORMAT_VERSION,)) -> dict[str, Any]:
    """Parse the record from the bytes of a file, like `read_record`. name: the file's name, for errors."""
    if len(content) > LARGEST_RECORD:
        raise damaged(name, f"it has more than {LARGEST_RECORD:,} bytes")
    try:
        record: dict[str, Any] = json.loads(content)
        checksum = record.pop("checksum")
        if hashlib.sha256(canonical(record)).hexdigest() != checksum:
            raise damaged(name, "its contents do not match its checksum")
        version = record["format_version"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise damaged(name, "it is not a JSON object with a checksum") from None
    if version not in versions:
        known = " and ".join(map(str, versions))
        sentence = f"{name} has format version {version!r}, and this library reads {known}; upgrade bertdata"
        raise DatasetError(sentence, "other-version", given=version)
    return record
