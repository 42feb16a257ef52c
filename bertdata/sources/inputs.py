"""One input: a file of this machine, a stream that can be read only once, or a file under a URL."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from bertdata.errors import InputError

if TYPE_CHECKING:
    from bertdata.remote.reader import RemoteFile
    from bertdata.sources.items import Items

STANDARD_INPUT = "-"
_REQUESTS = 16  # at the same time
HEAD_BYTES = 16  # at the start of a file, which tell its compression
COMPRESSION_OF = {".gz": "gzip", ".gzip": "gzip", ".bgz": "gzip", ".bz2": "bzip2", ".xz": "xz"}
COMPRESSION_OF |= {".zst": "zstd", ".zstd": "zstd"}
_MAGIC = re.compile(
    rb"(?P<gzip>\x1f\x8b)|(?P<bzip2>BZh[1-9](?:1AY&SY|\x17rE8P\x90))|(?P<xz>\xfd7zXZ\0)|"
    rb"(?P<zstd>\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18)"  # a frame, or one that is to be skipped
)
_ENDINGS = {
    "text": (".txt", ".text"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "csv": (".csv",),
    "tsv": (".tsv",),
    "parquet": (".parquet",),
    "arrow": (".arrow", ".feather"),
    "fasta": (".fasta", ".fa", ".fna", ".faa"),
}
KIND_OF = {ending: kind for kind, endings in _ENDINGS.items() for ending in endings}


@dataclass(frozen=True)
class Input:
    """What is known of an input without reading it. Two descriptions differ if the file was changed in between."""

    name: str  # a path, "-", or a URL
    size: int | None  # bytes; None: a stream
    version: int | str | None  # of a file when it was last changed, in ns; under a URL what RemoteFile says
    remote: RemoteFile | None = field(default=None, repr=False, compare=False)
    items: Items | None = field(default=None, repr=False, compare=False)  # of an iterable
    magic: str = field(default="", repr=False, compare=False)  # the compression that its first bytes tell

    def __str__(self) -> str:
        return self.name

    @property
    def is_stream(self) -> bool:
        return self.size is None

    @property
    def is_pipe(self) -> bool:
        """Whether it is a pipe, of which nobody can give the same bytes again. The caller can those of an iterable."""
        return self.is_stream and not self.items

    @property
    def compression(self) -> str:
        """By the first bytes, or, where they were not read, the ending of the name; "" for none."""
        return self.magic or compression_of(self.name)

    @property
    def kind(self) -> str:
        """One of INPUT_FORMATS by the ending of the name, without that of a compression; "text" for all others."""
        return "jsonl" if self.items else KIND_OF.get(ending_of(self.name), "text")

    def open(self) -> Any:
        """A binary file object."""
        return self.remote.open() if self.remote else open(self.name, "rb")

    def now(self, remote: RemoteFile | None = None) -> Input:
        """The same input as it is now. remote: the file as it is now, if that is known."""
        if not self.remote:
            return local(self.name)
        remote = remote or self.remote.now()
        return replace(self, size=remote.size, version=remote.version, remote=remote)


def local(path: str | Path) -> Input:
    """Describes a file of this machine, a pipe, or "-" for standard input. Raises InputError if it cannot be read."""
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
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(f"{name} cannot be read: {error.strerror}; check the name", "not-found", given=name) from None
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}", "unreadable", given=name) from None
    return Input(name, status.st_size, status.st_mtime_ns, magic=magic)


def of_remote(file: RemoteFile) -> Input:
    """A remote file as an input. Asks for its first bytes, if its name does not tell how it is compressed."""
    is_told = not file.size or compression_of(file.name) or ending_of(file.name) in KIND_OF
    magic = "" if is_told else magic_of(file.fetch(0, min(file.size, HEAD_BYTES)))
    return Input(file.name, file.size, file.version, file, magic=magic)


def now(files: Sequence[Input]) -> list[Input]:
    """The same inputs as they are now. What a list of files found is looked up in a new list."""
    listings = {file.remote.listing for file in files if file.remote and file.remote.listing}
    listed = {each.name: each for listing in listings for each in listing().values()}
    with ThreadPoolExecutor(_REQUESTS) as pool:
        of_urls = pool.map(lambda file: file.now(listed.get(file.name)), [file for file in files if file.remote])
        return [next(of_urls) if file.remote else file.now() for file in files]


def ending_of(name: str) -> str:
    """The ending of a path or URL, lower-case, without that of a compression."""
    last = PurePosixPath(name).name.lower()
    return PurePosixPath(last.removesuffix(PurePosixPath(last).suffix) if compression_of(name) else last).suffix


def magic_of(first: bytes) -> str:
    """The compression of a file with these first bytes, at least HEAD_BYTES of them; "" for none."""
    match = _MAGIC.match(first)
    return match.lastgroup or "" if match else ""


def compression_of(name: str) -> str:
    return COMPRESSION_OF.get(PurePosixPath(name).suffix.lower(), "")
