"""The names a user gives → the files to read, and what is known about each file without reading it."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from bertdata.errors import InputError, UsageError

STANDARD_INPUT = Path("-")
COMPRESSION_OF = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
_KIND_OF = {".txt": "text", ".text": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
            ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"}  # fmt: skip
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_HIDDEN, _UNKNOWN, _EXCLUDED = "hidden", "with an unknown ending", "not selected by --include and --exclude"
_SHOWN = 3  # names of files that a message lists


@dataclass(frozen=True)
class Inputs:
    """The files to read, in order, and the files of directories and patterns that are not read."""

    paths: list[Path] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)  # reason → names of files
    is_searched: bool = False  # whether an input was a directory or a pattern

    def notes(self) -> list[str]:
        """Lines that tell what was found in directories and patterns; none if every file was named."""
        if not self.is_searched:
            return []
        kinds = Counter(kind_of(path) for path in self.paths)
        size = sum(path.stat().st_size for path in self.paths if path != STANDARD_INPUT)
        counts = ", ".join(f"{number:,} {kind}" for kind, number in kinds.items())
        lines = [f"reading {_files(len(self.paths))}: {counts}; {_readable(size)} on disk"]
        if self.left_out:
            total = sum(map(len, self.left_out.values()))
            in_order = sorted(self.left_out.items(), key=lambda item: item[0] == _HIDDEN)
            reasons = "; ".join(f"{len(names):,} {why} ({_some(names)})" for why, names in in_order)
            advice = "; --include PATTERN reads files with other endings" if _UNKNOWN in self.left_out else ""
            lines.append(f"note: left out {_files(total)}: {reasons}{advice}")
        return lines


def find_inputs(
    named: Sequence[str | Path], *, include: Sequence[str] = (), exclude: Sequence[str] = (), any_ending: bool = False
) -> Inputs:
    """The files that the names stand for, in order.

    A name is a file, "-" for standard input, a directory, or a pattern. A file that is named is always read. A
    directory stands for the files below it that have a known ending or none, a pattern for all files that match it;
    both in the order of their names, and without files whose name, or that of a directory below, begins with "." or
    "_". (A pattern that spells such a name finds it.)

    include, exclude: patterns that select among the files of directories and patterns. They are compared with the path
    below the directory, and `*` matches `/` too. A file is read if it matches one of `include`, whatever its ending is,
    and none of `exclude`. any_ending: read files of directories whatever their ending is.

    Raises UsageError for a URL, and InputError for a name that gives no file.
    """
    inputs = Inputs(is_searched=any(_is_searched(str(name)) for name in named))
    if (include or exclude) and not inputs.is_searched:
        raise UsageError(
            "--include and --exclude select files of a directory or a pattern, and no INPUT is one of these; leave "
            "them out"
        )
    for name in map(str, named):
        path = Path(name)
        if path == STANDARD_INPUT and name != "-":
            path = path.absolute()  # a file with that name
        if not name:
            raise UsageError("an input is the empty string; give the name of a file")
        require_local(name)
        if not _is_searched(name):
            inputs.paths.append(path)
            continue
        if path.is_dir():
            root, files = path, sorted(file for file in path.rglob("*") if file.is_file())
            if not files:
                raise InputError(f"{path} is a directory without files; name text files or a directory of them")
        else:
            root = _root_of(name)
            files = sorted(Path(match) for match in glob.glob(name, recursive=True) if os.path.isfile(match))
            if not files:
                raise InputError(f"{name} matches no file; check the pattern")
        by_ending = path.is_dir() and not any_ending
        reasons = {file: _why_not(file.relative_to(root), include, exclude, by_ending) for file in files}
        if path.is_dir():
            reasons |= {file: _HIDDEN for file in files if _is_hidden(file.relative_to(root))}
        taken = [file for file, why in reasons.items() if why is None]
        if not taken:
            raise InputError(
                f"{name}: none of its {_files(len(files))} is read ({_some([str(file) for file in files])}); select "
                "files with --include, for example --include '*', or name them"
            )
        inputs.paths.extend(taken)
        for file, why in reasons.items():
            if why is not None:
                inputs.left_out.setdefault(why, []).append(str(file))
    if inputs.paths.count(STANDARD_INPUT) > 1:
        raise UsageError("standard input (-) is named twice, but it can be read only once")
    return inputs


def require_local(name: str) -> None:
    """Raises UsageError if the name is a URL, and no file has this name."""
    if _URL.match(name) and not os.path.lexists(name):
        url = name if "://" in name else name.replace(":/", "://", 1)  # pathlib.Path("s3://b") has lost a slash
        raise UsageError(f"{url} is a URL; remote files are not supported yet, so copy it to a local disk first")


def _is_searched(name: str) -> bool:
    """Whether the name is a directory or a pattern."""
    return Path(name).is_dir() if os.path.lexists(name) else glob.has_magic(name)


def _root_of(pattern: str) -> Path:
    """The directory that the pattern's matches are below."""
    parts = Path(pattern).parts
    fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    return Path(*parts[:fixed])


def _is_hidden(path: Path) -> bool:
    return any(part[0] in "._" for part in path.parts)


def _why_not(path: Path, include: Sequence[str], exclude: Sequence[str], by_ending: bool) -> str | None:
    """Why a file is not read, given its path below the directory; None if it is read."""
    if _matches(path, exclude) or (include and not _matches(path, include)):
        return _EXCLUDED
    if by_ending and not include and _suffix(path) not in ("", *_KIND_OF):
        return _UNKNOWN
    return None


def _matches(path: Path, patterns: Sequence[str]) -> bool:
    """Whether the path matches one of the patterns; a leading `**/` matches no directory too."""
    return any(fnmatchcase(path.as_posix(), each) for p in patterns for each in (p, p.removeprefix("**/")))


def kind_of(path: Path) -> str:
    """One of INPUT_FORMATS, by the file's ending; a file with another ending, or none, is text."""
    return _KIND_OF.get(_suffix(path), "text")


def _suffix(path: Path) -> str:
    """The ending, lower-case, without that of a compression."""
    name = path.name.lower()
    if is_compressed(path):
        name = name.removesuffix(path.suffix.lower())
    return Path(name).suffix


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in COMPRESSION_OF


def is_stream(path: Path) -> bool:
    """Whether the input can be read only once: standard input or a named pipe."""
    return path == STANDARD_INPUT or stat.S_ISFIFO(path.stat().st_mode)


def describe(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """For each input path, bytes and modified_ns, the last two None for standard input and pipes.

    Raises InputError for an input that cannot be read, and if all inputs are empty.
    """
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


def _files(number: int) -> str:
    return f"{number:,} file{'s' * (number != 1)}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + ", ..." * (len(names) > _SHOWN)


def _readable(size: float) -> str:
    """A number of bytes as people read it: 1.2 GB."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"
