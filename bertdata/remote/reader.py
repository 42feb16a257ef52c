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

FIRST_BYTES, MOST_BYTES = 1 << 16, 1 << 23  # bytes of a request: after a jump, and at most


@dataclass(frozen=True)
class RemoteFile:
    """A file under a URL."""

    name: str  # the URL without login and query
    size: int  # bytes
    version: str  # its ETag, else the time of its last change; on the hub the digest of its content
    ask: Callable[[int, int], bytes] = field(repr=False, compare=False)  # (start, stop) → these bytes, tried once
    again: Callable[[], RemoteFile] | None = field(default=None, repr=False, compare=False)  # None: it cannot change
    listing: Callable[[], dict[str, RemoteFile]] | None = field(default=None, repr=False, compare=False)
    """Lists again the files among which this one was found; the same object for all of them."""

    def now(self) -> RemoteFile:
        """The same file as it is now. Raises RemoteError if it does not exist."""
        return self.again() if self.again else self

    def open(self) -> io.BufferedReader:
        """A file object that can seek. Holds at most three requests of 8 MiB in memory."""
        return io.BufferedReader(_Reader(self), FIRST_BYTES)

    def fetch(self, start: int, stop: int) -> bytes:
        """These bytes. Raises RemoteError, also if the file has changed."""

        def complete() -> bytes:
            data = self.ask(start, stop)
            if len(data) != stop - start:
                raise ConnectionError(f"{len(data)} of {stop - start} bytes")
            return data

        return patiently(self.name, complete)

    def read(self, most: int) -> bytes:
        """All bytes of the file, in memory. Raises RemoteError if it has more than `most`."""
        if self.size > most:
            sentence = f"{self.name} has {self.size:,} bytes, more than the {most:,} that are read; check the URL"
            raise RemoteError(sentence, "bad-url", given=self.size)
        with self.open() as stream:
            return stream.read()


class _Reader(io.RawIOBase):
    """A file that is read in ranges. Reading on asks for more at a time, and ahead; after a jump it asks for little."""

    def __init__(self, file: RemoteFile) -> None:
        self._fetch = file.fetch
        self._size, self._position = file.size, 0
        self._chunk, self._begin, self._step = b"", 0, FIRST_BYTES
        self._ahead: tuple[int, Future[bytes]] | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        if self._position >= self._size or not len(view):
            return 0
        if not self._begin <= self._position < self._begin + len(self._chunk):
            self._load(len(view))
        start = self._position - self._begin
        piece = memoryview(self._chunk)[start : start + len(view)]
        view[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)

    def _load(self, wanted: int) -> None:
        """Fetches the bytes from the current position on."""
        reads_on = self._position == self._begin + len(self._chunk) and self._chunk != b""
        self._step = min(2 * self._step, MOST_BYTES) if reads_on else FIRST_BYTES
        ahead, self._ahead = self._ahead, None
        if ahead and ahead[0] == self._position:
            self._chunk = ahead[1].result()
        else:
            size = min(max(self._step, wanted), MOST_BYTES)
            self._chunk = self._fetch(self._position, min(self._size, self._position + size))
        self._begin = self._position
        stop = self._begin + len(self._chunk)
        if reads_on and stop < self._size:
            self._ahead = stop, in_background(partial(self._fetch, stop, min(self._size, stop + self._step)))
