"""Names of inputs → inputs: files, streams that can be read only once, and files under URLs."""

from __future__ import annotations

import glob
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import chain, takewhile
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from bertdata.choices import INPUT_FORMATS
from bertdata.errors import InputError, UsageError, counted, refused
from bertdata.urls import is_remote, is_url, is_url_of_any_kind

if TYPE_CHECKING:
    from bertdata.remote.access import RemoteFile

STANDARD_INPUT = "-"
STATE, INFO, SAVED = "state.json", "dataset_info.json", "dataset_dict.json"  # files that save_to_disk writes
_REQUESTS = 16  # requests at the same time
HEAD_BYTES = 16  # first bytes of a file, for the detection of compression
COMPRESSION_OF = {".gz": "gzip", ".gzip": "gzip", ".bgz": "gzip", ".bz2": "bzip2", ".xz": "xz"}
COMPRESSION_OF |= {".zst": "zstd", ".zstd": "zstd"}
_MAGIC = re.compile(
    rb"(?P<gzip>\x1f\x8b)|(?P<bzip2>BZh[1-9](?:1AY&SY|\x17rE8P\x90))|(?P<xz>\xfd7zXZ\0)|"
    rb"(?P<zstd>\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18)"  # a frame, or a skippable frame
)
KIND_OF = {extension: kind for kind, extensions in INPUT_FORMATS.items() for extension in extensions}
_HIDDEN, _UNKNOWN, _EXCLUDED = "hidden", "with an unknown file extension", "not selected by --include and --exclude"
_DOTS = "with a dot as a part of the key, for which no request can be made"
_LINK = "linked to a directory or to nothing"
_SHOWN = 3  # number of file names in a message


@dataclass(frozen=True)
class Input:
    """Description of an input, made without reading it. Descriptions before and after a change of the file differ."""

    name: str  # a path, "-", or a URL
    size: int | None  # bytes; None: a stream
    version: int | str | None  # modification time of a file, in ns; under a URL the version from RemoteFile
    remote: RemoteFile | None = field(default=None, repr=False, compare=False)
    items: Any = field(default=None, repr=False, compare=False)  # the iterables.Items of an iterable
    magic: str = field(default="", repr=False, compare=False)  # compression, by the first bytes

    def __str__(self) -> str:
        return self.name

    @property
    def is_stream(self) -> bool:
        return self.size is None

    @property
    def is_pipe(self) -> bool:
        """Whether the input is a pipe, which cannot be read again. For an iterable, the caller can pass it again."""
        return self.is_stream and not self.items

    @property
    def compression(self) -> str:
        """Compression by the first bytes, or by the file extension if they were not read; "" for none."""
        return self.magic or compression_of(self.name)

    @property
    def kind(self) -> str:
        """Format from INPUT_FORMATS, by the file extension before that of a compression; "text" if unknown."""
        return "jsonl" if self.items else KIND_OF.get(extension_of(self.name), "text")

    def open(self) -> Any:
        """Return a binary file object."""
        return self.remote.open() if self.remote else open(self.name, "rb")

    def refreshed(self, remote: RemoteFile | None = None) -> Input:
        """Return a new description of the same input. remote: the current remote file, if known."""
        if not self.remote:
            return local(self.name)
        remote = remote or (self.remote.again() if self.remote.again else self.remote)
        return replace(self, size=remote.size, version=remote.version, remote=remote)


def local(path: str | Path) -> Input:
    """Describe a local file, a pipe, or "-" for standard input. Raises InputError if it cannot be read."""
    name = str(path)
    if name == STANDARD_INPUT:
        return Input(name, None, None)
    try:
        status = os.stat(name)
        if stat.S_ISFIFO(status.st_mode):
            return Input(name, None, None)
        if not stat.S_ISREG(status.st_mode):
            sentence = f"{name} is neither a file nor a named pipe; write its text to a file"
            raise InputError(sentence, "wrong-file-type", given=name)
        with open(name, "rb", buffering=0) as file:
            magic = magic_of(file.read(HEAD_BYTES))
    except OSError as error:
        kind = "not-found" if isinstance(error, FileNotFoundError | NotADirectoryError) else "unreadable"
        raise InputError(f"{name} cannot be read: {error.strerror}; check the name", kind, given=name) from None
    return Input(name, status.st_size, status.st_mtime_ns, magic=magic)


def of_remote(file: RemoteFile) -> Input:
    """Return a remote file as an input. Requests its first bytes if the name does not show the compression."""
    is_told = not file.size or compression_of(file.name) or extension_of(file.name) in KIND_OF
    magic = "" if is_told else magic_of(file.fetch(0, min(file.size, HEAD_BYTES)))
    return Input(file.name, file.size, file.version, file, magic=magic)


def refresh_all(files: Sequence[Input]) -> list[Input]:
    """Return new descriptions of the same inputs. Files that a remote listing found are looked up in a new listing."""
    listings = {file.remote.listing for file in files if file.remote and file.remote.listing}
    listed = {each.name: each for listing in listings for each in listing().values()}
    with ThreadPoolExecutor(_REQUESTS) as pool:
        of_urls = pool.map(lambda file: file.refreshed(listed.get(file.name)), [file for file in files if file.remote])
        return [next(of_urls) if file.remote else file.refreshed() for file in files]


def extension_of(name: str) -> str:
    """Return the file extension of a path or URL in lower case, without the extension of a compression."""
    last = PurePosixPath(name).name.lower()
    return PurePosixPath(last.removesuffix(PurePosixPath(last).suffix) if compression_of(name) else last).suffix


def magic_of(first: bytes) -> str:
    """Return the compression of a file with these first bytes (at least HEAD_BYTES); "" for none."""
    match = _MAGIC.match(first)
    return match.lastgroup or "" if match else ""


def compression_of(name: str) -> str:
    return COMPRESSION_OF.get(PurePosixPath(name).suffix.lower(), "")


# ----------------------------------------------------------------------------------- what the names of a user stand for


_File = TypeVar("_File", bound="str | RemoteFile")


@dataclass
class Inputs:
    """The files to read, in order, and the files in directories and patterns that are not read."""

    files: list[Input] = field(default_factory=list)
    include: Sequence[str] = ()  # as in find_inputs
    exclude: Sequence[str] = ()
    any_kind: bool = False
    left_out: dict[str, list[str]] = field(default_factory=dict)  # reason → names of files
    is_searched: bool = False  # whether an input was a directory or a pattern

    def notes(self) -> list[str]:
        """Return lines about the files found in directories and patterns; none if every file was named."""
        if not self.is_searched:
            return []
        counts = ", ".join(f"{number:,} {kind}" for kind, number in Counter(file.kind for file in self.files).items())
        size = f"{sum(file.size or 0 for file in self.files):,} bytes"
        where = "" if all(file.remote for file in self.files) else " on disk"
        lines = [f"reading {counted(len(self.files), 'file')}: {counts}; {size}{where}"]
        if self.left_out:
            total = sum(map(len, self.left_out.values()))
            in_order = sorted(self.left_out.items(), key=lambda item: item[0] == _HIDDEN)
            reasons = "; ".join(f"{len(names):,} {why} ({_some(names)})" for why, names in in_order)
            advice = "; --include PATTERN reads files with other file extensions" if _UNKNOWN in self.left_out else ""
            lines.append(f"note: left out {counted(total, 'file')}: {reasons}{advice}")
        return lines

    def find(self, name: str, under: dict[str, RemoteFile] | None) -> list[Input]:
        """Return the files that a name matches. under: path below a URL → file; None: the name is not a URL."""
        if under is None:
            return [local(path) for path in self._chosen(name, self._here(name), is_directory=Path(name).is_dir())]
        dots = [path for path in under if not {".", ".."}.isdisjoint(path.split("/"))]
        self._leave_out(_DOTS, [under.pop(path).name for path in dots])
        if not self.include and (under.keys() >= {STATE, INFO} or SAVED in under):
            raise refused(name, "unsupported", " is of save_to_disk; copy it here, or select files with --include")
        return [of_remote(file) for file in self._chosen(name, under, is_directory=not glob.has_magic(name))]

    def _here(self, name: str) -> dict[str, str]:
        """Return {path below a directory: path}, or {"": path} for one file. Raises InputError if there is no file."""
        _require_path(name)
        path, links = Path(name), list[str]()
        if not _is_searched(name):
            is_named_so = path == Path(STANDARD_INPUT) and name != STANDARD_INPUT  # ./- is a file
            return {"": str(path.absolute() if is_named_so else path)}
        if not path.is_dir():
            path = Path(*takewhile(lambda part: not glob.has_magic(part), path.parts))
            self._require_listable(path, _searched(name), is_directory=False)
            files = sorted(Path(match) for match in glob.glob(name, recursive=True) if os.path.isfile(match))
        elif all((path / each).is_file() for each in (STATE, INFO)) or (not self.include and (path / SAVED).is_file()):
            files = files_of_saved(path)
        else:
            inside = sorted(path.rglob("*"))
            below = (each for each in inside if os.path.isdir(each) and not os.path.islink(each))
            self._require_listable(path, chain([path], below), is_directory=True)
            files = [file for file in inside if os.path.isfile(file)]
            links = [str(each) for each in inside if os.path.islink(each) and not os.path.isfile(each)]
            links = [each for each in links if not _is_hidden(Path(each).relative_to(path))]
            self._leave_out(_LINK, links)
        if not files:
            kind = "empty" if Path(name).is_dir() else "no-match"
            only = f"; links to directories are not followed ({_some(links)})" if links else ""
            raise refused(name, kind, f" stands for no file{only}; name files, or a directory or a pattern of them")
        return {str(file.relative_to(path)): str(file) for file in files}

    def _require_listable(self, base: Path, directories: Iterable[str | Path], *, is_directory: bool) -> None:
        """Raise InputError for a directory that the system cannot list, which `glob` and `rglob` ignore.

        Accepts one whose files are left out. directories: below `base`, parents first.
        """
        for directory in directories:
            try:
                os.stat(os.path.join(directory, "."))  # fails without the permission to open files
                os.scandir(directory).close()
            except OSError as error:
                below = Path(directory).relative_to(base)
                if not _matches(below / "_", self.exclude) and not (is_directory and _is_hidden(below)):
                    sentence = f"{directory} cannot be listed: {error.strerror}; make it readable, or leave it out with"
                    raise InputError(f"{sentence} --exclude", "unreadable", given=str(directory)) from None

    def _chosen(self, name: str, found: Mapping[str, _File], *, is_directory: bool) -> list[_File]:
        """Return the files to read among the files that a name matches. Raises InputError if there are none."""
        if "" in found:
            return [found[""]]
        reasons = {path: self._why_not(PurePath(path), is_directory=is_directory) for path in found}
        chosen = [file for path, file in found.items() if not reasons[path]]
        if not chosen:
            number, files = counted(len(found), "file"), _some([*map(_name, found.values())])
            raise refused(name, "no-match", f" has {number}, none to read ({files}); select some with --include '*'")
        for path, why in reasons.items():
            self._leave_out(why, [_name(found[path])] if why else [])
        return chosen

    def _why_not(self, path: PurePath, *, is_directory: bool) -> str:
        """Return the reason why a file is not read, from its path below the directory; "" if it is read."""
        if is_directory and _is_hidden(path):
            return _HIDDEN
        if _matches(path, self.exclude) or (self.include and not _matches(path, self.include)):
            return _EXCLUDED
        is_known = self.include or self.any_kind or extension_of(path.name) in ("", *KIND_OF)
        return "" if is_known or not is_directory else _UNKNOWN

    def _leave_out(self, why: str, names: list[str]) -> None:
        if names:
            self.left_out.setdefault(why, []).extend(names)


def find_inputs(
    named: Sequence[str | Path], *, include: Sequence[str] = (), exclude: Sequence[str] = (), any_kind: bool = False
) -> Inputs:
    """Return the files that the names match, in order.

    A name is a file, "-" for standard input, a directory, a pattern, or one of these under a URL. A named file is
    always read. A directory matches the files below it that have a known file extension or none; a pattern matches all
    files of its form. Both sort files by name, and skip files and subdirectories whose names begin with "." or "_",
    unless the pattern spells such a name. A directory from save_to_disk of Hugging Face datasets matches its Arrow
    files, in their own order.

    include, exclude: patterns that select among the files of directories and patterns. They match the path below the
    directory, and `*` matches `/` too. A file is read if it matches one of `include`, with any extension, and none of
    `exclude`. any_kind: read files of directories with any extension.

    Raises UsageError without a name and for a URL that cannot be read; InputError for a name that matches no file, for
    a file that cannot be read, and if all files are empty; and RemoteError if a server does not answer.
    """
    if not named:
        sentence = "no INPUT was given; give a file, a directory, a pattern, or - for standard input"
        raise UsageError(sentence, "missing", option="inputs")
    inputs = Inputs([], include, exclude, any_kind)
    under_urls: dict[str, dict[str, RemoteFile]] = {}
    for url in filter(is_remote, map(str, named)):
        from bertdata.remote.find import find  # takes 0.1 s

        under_urls[url] = find(url)
    inputs.is_searched = any("" not in files for files in under_urls.values())
    inputs.is_searched |= any(_is_searched(name) for name in map(str, named) if name not in under_urls)
    if (include or exclude) and not inputs.is_searched:
        sentence = "--include and --exclude select files of a directory or pattern, and no INPUT is one; leave them out"
        raise UsageError(sentence, "needs-option", option="include" if include else "exclude", given=include or exclude)
    for name in map(str, named):
        inputs.files += inputs.find(name, under_urls.get(name))
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


def _require_path(name: str) -> None:
    """Raise UsageError for an empty name, and for a URL scheme that cannot be read, unless it is file:."""
    if not name:
        raise UsageError("an input is the empty string; give the name of a file", "malformed", option="inputs")
    if is_url_of_any_kind(name):
        scheme = name.partition(":")[0]
        sentence = f"an input is a URL of the kind {scheme}; give a path, or a URL of s3, gs, az, hf, http or https"
        if is_url(f"{scheme}://"):
            sentence = f"an input has {scheme}:/ where a URL has {scheme}://; give it as text, not as a Path"
        raise UsageError(sentence, "bad-url", option="inputs")


def files_of_saved(directory: Path) -> list[Path]:
    """Return the files of save_to_disk, in their order. Raises InputError if they form several datasets."""
    if (directory / SAVED).is_file():
        below = ", ".join(sorted(str(state.parent) for state in directory.glob(f"*/{STATE}")))
        raise refused(directory, "wrong-file-type", f" has several datasets of save_to_disk; name one of them: {below}")
    try:
        state = json.loads((directory / STATE).read_bytes())
        names = [entry["filename"] for entry in state["_data_files"]]
        if not all(name == Path(name).name and "\0" not in name for name in names):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise refused(directory, "not-of-format", f": its {STATE} names no data files; save it again") from None
    if state.get("_indices_data_files"):
        raise refused(directory, "unsupported", " has an index of rows; call flatten_indices() and save_to_disk again")
    return [directory / name for name in names]


def _is_searched(name: str) -> bool:
    """Return whether a name is a directory or a pattern."""
    return Path(name).is_dir() if os.path.lexists(name) else glob.has_magic(name)


def _searched(pattern: str) -> Iterator[str]:
    """Yield the directories that `glob` lists for a pattern, parents first; some of them twice."""
    parts = Path(pattern).parts
    for number, part in enumerate(parts):
        if glob.has_magic(part):
            yield from glob.glob(os.path.join(".", *parts[:number], "**" * (part == "**"), ""), recursive=True)


def _is_hidden(path: PurePath) -> bool:
    return any(part[0] in "._" for part in path.parts)


def _matches(path: PurePath, patterns: Sequence[str]) -> bool:
    """Return whether a path matches one of the patterns; a leading `**/` also matches no directory."""
    return any(fnmatchcase(path.as_posix(), each) for p in patterns for each in (p, p.removeprefix("**/")))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + ", ..." * (len(names) > _SHOWN)


def _name(file: str | RemoteFile) -> str:
    return file if isinstance(file, str) else file.name
