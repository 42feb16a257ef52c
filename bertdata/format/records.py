"""JSON records, each sealed with a checksum of its own."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from bertdata.errors import DatasetError
from bertdata.files import open_plain, write_file

FORMAT_VERSION = 1
MOST_RECORD_BYTES = 1 << 27  # of a JSON record: about 100,000 shards


def canonical(record: Any) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Writes a JSON object sealed with its own checksum."""
    sealed = record | {"checksum": hashlib.sha256(canonical(record)).hexdigest()}
    write_file(path, json.dumps(sealed, indent=1).encode() + b"\n")


def read_record(path: Path) -> dict[str, Any]:
    """The object written by write_record. Raises DatasetError if the file is missing, damaged or of another version."""
    try:
        with open_plain(path, "rb") as file:
            content = file.read(MOST_RECORD_BYTES + 1)
        if len(content) > MOST_RECORD_BYTES:
            raise DatasetError(f"{path} is damaged: it has more than {MOST_RECORD_BYTES:,} bytes")
        record = json.loads(content)
        checksum = record.pop("checksum")
        if hashlib.sha256(canonical(record)).hexdigest() != checksum:
            raise DatasetError(f"{path} is damaged: its contents do not give the checksum it states")
        version = record["format_version"]
    except FileNotFoundError:
        raise DatasetError(f"{path} is missing") from None
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DatasetError(f"{path} is damaged: it is not a record of ours") from None
    if version != FORMAT_VERSION:
        raise DatasetError(
            f"{path} has format version {version!r} and this library reads {FORMAT_VERSION}; upgrade bertdata"
        )
    return record
