"""The names a user gives → the files to read, and what is known about each file without reading it."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from bertdata.errors import InputError, UsageError, counted
from bertdata.sources.inputs import KIND_OF, STANDARD_INPUT, Input, ending_of, local, of_remote
from bertdata.sources.saved import INFO, SPLITS, STATE, files_of_saved
from bertdata.urls import is_remote, is_url, is_url_of_any_kind

if TYPE_CHECKING:
    from bertdata.remote.reader import RemoteFile

_HIDDEN, _UNKNOWN, _EXCLUDED = "hidden", "with an unknown ending", "not selected by --include and --exclude"
_DOTS = "with a dot as a part of the key, for which no request can be made"
_LINK = "linked to a directory or to nothing"
_SHOWN = 3  # names of files that a message lists


@dataclass(frozen=True)
class Inputs:
    """The files to read, in order, and the files of directories and patterns that are not read."""

    files: list[Input] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)  # reason → names of files
    is_searched: bool = False  # whether an input was a directory or a pattern

    def notes(self) -> list[str]:
        """Lines that tell what was found in directories and patterns; none if every file was named."""
        if not self.is_searched:
            return []
        kinds = Counter(file.kind for file in self.files)
        counts = ", ".join(f"{number:,} {kind}" for kind, number in kinds.items())
        size = _readable(sum(file.size or 0 for file in self.files))
        where = "" if all(file.remote for file in self.files) else " on disk"
        lines = [f"reading {counted(len(self.files), 'file')}: {counts}; {size}{where}"]
        if self.left_out:
            total = sum(map(len, self.left_out.values()))
            in_order = sorted(self.left_out.items(), key=lambda item: item[0] == _HIDDEN)
            reasons = "; ".join(f"{len(names):,} {why} ({_some(names)})" for why, names in in_order)
            advice = "; --include PATTERN reads files with other endings" if _UNKNOWN in self.left_out else ""
            lines.append(f"note: left out {counted(total, 'file')}: {reasons}{advice}")
        return lines


def find_inputs(
    named: Sequence[str | Path], *, include: Sequence[str] = (), exclude: Sequence[str] = (), any_ending: bool = False
) -> Inputs:
    """The files that the names stand for, in order.

    A name is a file, "-" for standard input, a directory, a pattern, or one of these under a URL. A file that is named
    is always read. A directory stands for the files below it that have a known ending or none, a pattern for all files
    that match it; both in the order of their names, and without files whose name, or that of a directory below, begins
    with "." or "_". (A pattern that spells such a name finds it.) A directory that save_to_disk of the library datasets
    wrote stands for its Arrow files, in its own order.

    include, exclude: patterns that select among the files of directories and patterns. They are compared with the path
    below the directory, and `*` matches `/` too. A file is read if it matches one of `include`, whatever its ending is,
    and none of `exclude`. any_ending: read files of directories whatever their ending is.

    Raises UsageError without a name, and for a URL that cannot be read, InputError for a name that gives no file, for a
    file that cannot be read, and if all files are empty, and RemoteError where a server gives no answer.
    """
    if not named:
        sentence = "no INPUT was given; give a file, a directory, a pattern, or - for standard input"
        raise UsageError(sentence, "missing", option="inputs")
    local_names = [str(name) for name in named if not is_remote(str(name))]
    under_urls = _find_under([str(name) for name in named if is_remote(str(name))])
    is_searched = any(map(_is_searched, local_names)) or any("" not in files for files in under_urls.values())
    inputs = Inputs(is_searched=is_searched)
    if (include or exclude) and not is_searched:
        sentence = "--include and --exclude select files of a directory or pattern, and no INPUT is one; leave them out"
        raise UsageError(sentence, "needs-option", option="include" if include else "exclude", given=include or exclude)
    choice = _Choice(include, exclude, any_ending, inputs.left_out)
    for name in map(str, named):
        if not name:
            raise UsageError("an input is the empty string; give the name of a file", "malformed", option="inputs")
        if name not in under_urls:
            inputs.files.extend(map(local, _files_here(name, choice)))
            continue
        for path in [path for path in under_urls[name] if not {".", ".."}.isdisjoint(path.split("/"))]:
            inputs.left_out.setdefault(_DOTS, []).append(under_urls[name].pop(path).name)
        remote = {file.name: file for file in under_urls[name].values()}
        names = list(remote)
        if "" not in under_urls[name]:
            paths = {file.name: PurePath(path) for path, file in under_urls[name].items()}
            if not include and _is_saved_there({*paths.values()}):
                sentence = f"{name} was written by save_to_disk; copy it here, or select files with --include"
                raise InputError(sentence, "unsupported", option="inputs", given=name)
            names = choice.taken(name, paths, is_directory=not glob.has_magic(name))
        inputs.files.extend(of_remote(remote[each]) for each in names)
    pipes = [file.name for file in inputs.files if file.is_stream]
    if twice := next((name for name in pipes if pipes.count(name) > 1), None):
        what = "standard input (-)" if twice == STANDARD_INPUT else f"the pipe {twice}"
        sentence = f"{what} is named twice, but it can be read only once; name it once"
        raise UsageError(sentence, "read-once", option="inputs")
    if all(file.size == 0 for file in inputs.files):
        shown = ", ".join(file.name for file in inputs.files)
        sentence = f"{shown}: empty file, so there is no document to build from; give a file with text in it"
        raise InputError(sentence, "empty", option="inputs")
    return inputs


@dataclass(frozen=True)
class _Choice:
    """What is taken of the files that a directory or a pattern stands for."""

    include: Sequence[str]
    exclude: Sequence[str]
    any_ending: bool
    left_out: dict[str, list[str]]  # reason → files; `taken` adds to it

    def taken(self, name: str, paths: Mapping[str, PurePath], *, is_directory: bool) -> list[str]:
        """The files that are read, of those that a name stands for. Raises InputError if there is none.

        paths: name of a file → path below the directory.
        """
        by_ending = is_directory and not self.any_ending
        reasons = {file: _why_not(path, self.include, self.exclude, by_ending) for file, path in paths.items()}
        if is_directory:
            reasons |= {file: _HIDDEN for file, path in paths.items() if _is_hidden(path)}
        chosen = [file for file, why in reasons.items() if why is None]
        if not chosen:
            number, files = counted(len(paths), "file"), _some(list(paths))
            sentence = f"{name} has {number}, of which none is read ({files}); select some with --include, such as '*'"
            raise InputError(sentence, "no-match", option="inputs", given=name)
        for file, why in reasons.items():
            if why is not None:
                self.left_out.setdefault(why, []).append(file)
        return chosen


def _files_here(name: str, choice: _Choice) -> list[str | Path]:
    """The files of this machine that a name stands for. Raises InputError if there is none."""
    _require_path(name)
    path = Path(name)
    if path == Path(STANDARD_INPUT) and name != STANDARD_INPUT:
        path = path.absolute()  # a file with that name
    if not _is_searched(name):
        return [path]
    if path.is_dir():
        root = path
        files, links = (files_of_saved(path), []) if _is_saved(path, choice.include) else _below(path)
        if links:
            choice.left_out.setdefault(_LINK, []).extend(links)
        if not files:
            only = f"; its links are not followed ({_some(links)})" if links else ""
            sentence = f"{path} is a directory without files{only}; name text files or a directory of them"
            raise InputError(sentence, "empty", option="inputs", given=name)
    else:
        root = _root_of(name)
        files = sorted(Path(match) for match in glob.glob(name, recursive=True) if os.path.isfile(match))
        if not files:
            raise InputError(f"{name} matches no file; check the pattern", "no-match", option="inputs", given=name)
    below = {str(file): file.relative_to(root) for file in files}
    return [*choice.taken(name, below, is_directory=path.is_dir())]


def _find_under(urls: list[str]) -> dict[str, dict[str, RemoteFile]]:
    """URL → path below a directory → file."""
    if not urls:
        return {}
    from bertdata.remote.files import find  # takes 0.1 s

    return {url: find(url) for url in urls}


def _require_path(name: str) -> None:
    """Raises UsageError if an input is a URL of a kind that cannot be read, and no file has this name."""
    if is_url_of_any_kind(name):
        scheme = name.partition(":")[0]
        sentence = f"an input is a URL of the kind {scheme}; give a path, or a URL of s3, gs, az, hf, http or https"
        if is_url(f"{scheme}://"):
            sentence = f"an input has {scheme}:/ where a URL has {scheme}://; give it as text, not as a Path"
        raise UsageError(sentence, "bad-url", option="inputs")


def _below(directory: Path) -> tuple[list[Path], list[str]]:
    """The files of a directory and of those below it, in order, and the names of links that are not followed."""
    inside = sorted(directory.rglob("*"))
    files = [file for file in inside if file.is_file()]
    others = [file for file in inside if file.is_symlink() and not file.is_file()]
    return files, [str(file) for file in others if not _is_hidden(file.relative_to(directory))]


def _is_saved(directory: Path, include: Sequence[str]) -> bool:
    """Whether save_to_disk wrote a directory. One of several datasets is a directory as any other with `include`."""
    if all((directory / name).is_file() for name in (STATE, INFO)):
        return True
    return not include and (directory / SPLITS).is_file()


def _is_saved_there(paths: Set[PurePath]) -> bool:
    """Whether save_to_disk wrote what is under a URL. paths: of the files, below it."""
    return paths >= {PurePath(STATE), PurePath(INFO)} or PurePath(SPLITS) in paths


def _is_searched(name: str) -> bool:
    """Whether the name is a directory or a pattern."""
    return Path(name).is_dir() if os.path.lexists(name) else glob.has_magic(name)


def _root_of(pattern: str) -> Path:
    """The directory that the pattern's matches are below."""
    parts = Path(pattern).parts
    fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    return Path(*parts[:fixed])


def _is_hidden(path: PurePath) -> bool:
    return any(part[0] in "._" for part in path.parts)


def _why_not(path: PurePath, include: Sequence[str], exclude: Sequence[str], by_ending: bool) -> str | None:
    """Why a file is not read, given its path below the directory; None if it is read."""
    if _matches(path, exclude) or (include and not _matches(path, include)):
        return _EXCLUDED
    if by_ending and not include and ending_of(path.name) not in ("", *KIND_OF):
        return _UNKNOWN
    return None


def _matches(path: PurePath, patterns: Sequence[str]) -> bool:
    """Whether the path matches one of the patterns; a leading `**/` matches no directory too."""
    return any(fnmatchcase(path.as_posix(), each) for p in patterns for each in (p, p.removeprefix("**/")))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + ", ..." * (len(names) > _SHOWN)


def _readable(size: float) -> str:
    """A number of bytes as people read it: 1.2 GB."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"
