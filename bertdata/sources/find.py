"""What the user names → the files to read, their kinds and sizes."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertdata.errors import InputError, UsageError

STANDARD_INPUT = Path("-")
_KIND_OF = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".arrow": "arrow",
            ".feather": "arrow"}  # fmt: skip
COMPRESSION_OF = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}


def find_inputs(named: Sequence[str | Path]) -> list[Path]:
    """Files as named; for a directory all files below it, for a pattern all that match, both in order of their names.

    Names that begin with "." or "_" are left out of directories. Raises InputError if a name gives no file.
    """
    found: list[Path] = []
    for name in map(str, named):
        path = Path(name)
        if path == STANDARD_INPUT and name != "-":
            path = path.absolute()  # a file of that name
        if not name:
            raise UsageError("an input is the empty string; name a file")
        if path.is_dir():
            inside = (p for p in path.rglob("*") if not any(part[0] in "._" for part in p.relative_to(path).parts))
            files = sorted(p for p in inside if p.is_file())
            if not files:
                raise InputError(f"{path} is a directory without files; name the text files or their directory")
            found += files
        elif glob.has_magic(name) and not os.path.lexists(name):
            files = sorted(Path(match) for match in glob.glob(name, recursive=True) if os.path.isfile(match))
            if not files:
                raise InputError(f"{name} matches no file; check the pattern")
            found += files
        else:
            found.append(path)
    if found.count(STANDARD_INPUT) > 1:
        raise UsageError("standard input (-) is named twice; it can be read once")
    return found


def kind_of(path: Path) -> str:
    return _KIND_OF.get(Path(path.name.lower().removesuffix(_compression_ending(path))).suffix, "text")


def _compression_ending(path: Path) -> str:
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSION_OF else ""


def is_compressed(path: Path) -> bool:
    return bool(_compression_ending(path))


def is_stream(path: Path) -> bool:
    """Whether it can be read only once: standard input or a named pipe."""
    return path == STANDARD_INPUT or stat.S_ISFIFO(path.stat().st_mode)


def describe(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Path, size and modification time of each input, as far as it has them. Raises InputError for the unreadable."""
    described: list[dict[str, Any]] = []
    for path in paths:
        if path == STANDARD_INPUT:
            described.append({"path": "-", "bytes": None, "modified_ns": None})
            continue
        try:
            status = path.stat()
            if stat.S_ISFIFO(status.st_mode):
                described.append({"path": str(path), "bytes": None, "modified_ns": None})
                continue
            if not stat.S_ISREG(status.st_mode):
                raise InputError(f"{path} is neither a file nor a named pipe; write its text to a file")
            open(path, "rb").close()
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        described.append({"path": str(path), "bytes": status.st_size, "modified_ns": status.st_mtime_ns})
    if all(entry["bytes"] == 0 for entry in described):
        names = ", ".join(str(path) for path in paths)
        raise InputError(f"{names}: empty file, so there is no document to build from; give a file with text in it")
    return described
