"""A file under a URL, and reading it in ranges."""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bertdata.errors import RemoteError
from bertdata.remote.requests import in_background, patiently

_FIRST, _MOST = 1 << 16, 1 << 23  # bytes of a request: after a jump, and at most


@dataclass(frozen=True)
class RemoteFile:
    """A file under a URL."""

    name: str  # the URL without login and query
    size: int  # bytes
    version: str  # its ETag, else the time of its last change; on the hub the digest of its content
    ask: Callable[[int, int], bytes] = field(repr=False, compare=False)  # (start, stop) → these bytes, tried once
    again: Callable[[], RemoteFile] | None = field(default=None, repr=False, compare=False)  # None: it cannot change

    def now(self) -> RemoteFile:
        """The same file as it is now. Raises RemoteError if it does not exist."""
        return self.again() if self.again else self

    def open(self) -> io.BufferedReader:
        """A file object that can seek. Holds at most three requests of 8 MiB in memory."""
        return io.BufferedReader(_Reader(self), _FIRST)

    def fetch(self, start: int, stop: int) -> bytes:
        """These bytes. Raises RemoteError, also if the file has changed."""

        def whole() -> bytes:
            data = self.ask(start, stop)
            if len(data) != stop - start:
                raise ConnectionError(f"{len(data)} of {stop - start} bytes")
            return data

        return patiently(self.name, whole)

    def read(self, most: int) -> bytes:
        """The whole file, in memory. Raises RemoteError if it has more than `most` bytes."""
        if self.size > most:
            raise RemoteError(
                f"{self.name} has {self.size:,} bytes, more than the {most:,} that are read; check the URL"
            )
        with self.open() as stream:
            return stream.read()


class _Reader(io.RawIOBase):
    """A file that is read in ranges. Reading on asks for more at a time, and ahead; after a jump it asks for little."""

    def __init__(self, file: RemoteFile) -> None:
        self._fetch = file.fetch
        self._size, self._place = file.size, 0
        self._chunk, self._begin, self._step = b"", 0, _FIRST
        self._ahead: tuple[int, Future[bytes]] | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, place: int, whence: int = io.SEEK_SET) -> int:
        self._place = place + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        if self._place >= self._size or not len(view):
            return 0
        if not self._begin <= self._place < self._begin + len(self._chunk):
            self._load(len(view))
        start = self._place - self._begin
        piece = memoryview(self._chunk)[start : start + len(view)]
        view[: len(piece)] = piece
        self._place += len(piece)
        return len(piece)

    def _load(self, wanted: int) -> None:
        """Fetches the bytes from the current place on."""
        reads_on = self._place == self._begin + len(self._chunk) and self._chunk != b""
        self._step = min(2 * self._step, _MOST) if reads_on else _FIRST
        ahead, self._ahead = self._ahead, None
        if ahead and ahead[0] == self._place:
            self._chunk = ahead[1].result()
        else:
            self._chunk = self._fetch(self._place, min(self._size, self._place + min(max(self._step, wanted), _MOST)))
        self._begin = self._place
        stop = self._begin + len(self._chunk)
        if reads_on and stop < self._size:
            self._ahead = stop, in_background(partial(self._fetch, stop, min(self._size, stop + self._step)))
