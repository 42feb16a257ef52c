"""A file under a URL, read in ranges. Requests are retried if a failure may be temporary."""

from __future__ import annotations

import http.client
import importlib
import io
import re
import sys
import threading
import time
import urllib.error
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from xml.etree import ElementTree

from bertdata.errors import BertdataError, RemoteError, install
from bertdata.urls import LOGIN, scheme_of, without_secrets

NO_CREDENTIALS = ("169.254.169.254", "metadata.google", "Account must be specified", "/latest/api/token")
"""Parts of the error messages of a store without credentials."""
FIRST_BYTES, MOST_BYTES = 1 << 16, 1 << 23  # bytes of a request: after a seek, and at most
TIMEOUT_S = 60.0  # seconds of silence
TRIES, FIRST_WAIT_S = 6, 0.5  # attempts of a request, seconds before the first retry; the wait doubles each time
_Result = TypeVar("_Result")


def patiently(url: str, ask: Callable[[], _Result]) -> _Result:
    """Return the result of `ask`. Retry it if a failure may be temporary. Raises RemoteError."""
    is_main = threading.current_thread() is threading.main_thread()
    for tries in range(TRIES):
        try:
            return in_background(ask).result() if is_main else ask()  # Ctrl-C does not interrupt a call of obstore
        except expected() as error:
            problem = as_remote_error(url, error)
            if isinstance(error, urllib.error.HTTPError):
                error.close()
        if problem.kind != "server-failed":
            raise problem
        if tries + 1 < TRIES:
            time.sleep(FIRST_WAIT_S * 2**tries)
    raise RemoteError(f"{problem} (tried {TRIES} times); try again later", "server-failed")


def library(name: str, schemes: str) -> Any:
    """Import an optional package. Raises RemoteError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        sentence = f"{schemes} need {name}, which is not installed; {install('remote')}"
        raise RemoteError(sentence, "not-installed") from None


def if_there(ask: Callable[[], _Result], *kinds: str) -> _Result | None:
    """Return the result of `ask`, or None if it raises an error of one of these kinds."""
    try:
        return ask()
    except BertdataError as error:
        if error.kind not in kinds:
            raise
        return None


def in_background(work: Callable[[], _Result]) -> Future[_Result]:
    """Run work in a separate thread, which does not delay the end of the program."""
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="fetch", daemon=True).start()
    return future


def expected() -> tuple[type[Exception], ...]:
    """Return the exceptions that the imported libraries raise when a request fails."""
    kinds: list[type[Exception]] = [OSError, http.client.HTTPException, ElementTree.ParseError]
    if "obstore" in sys.modules:
        from obstore.exceptions import BaseError

        kinds.append(BaseError)
    if "huggingface_hub" in sys.modules:
        from huggingface_hub import errors

        kinds += [errors.HfHubHTTPError, errors.HFValidationError, errors.HTTPError]
    return tuple(kinds)


def missing_error(shown: str) -> RemoteError:
    return RemoteError(f"{shown} does not exist; check the name", "not-found", given=shown)


def changed_error(shown: str) -> RemoteError:
    return RemoteError(f"{shown} changed while it was read; run again when nobody changes it", "changed", given=shown)


def as_remote_error(url: str, error: Exception) -> RemoteError:
    """Return the error for a failed request. Its kind is "server-failed" if the request may succeed later.

    Some stores answer "access-denied" for a file that does not exist.
    """
    text, name, shown = str(error), type(error).__name__, without_secrets(url)
    status = getattr(error, "code", None) or getattr(getattr(error, "response", None), "status_code", None)
    if match := re.search(r"status code: (\d+)", text):
        status = int(match[1])
    login = LOGIN[scheme_of(url)]
    if "NoSuchBucket" in text or "ContainerNotFound" in text:
        return RemoteError(f"{shown}: there is no such bucket; check the name and the region", "bad-url", given=shown)
    if any(words in text for words in NO_CREDENTIALS):
        return RemoteError(f"{shown}: no credentials were found; {login}", "access-denied", given=shown)
    if status in (401, 403) or name in ("PermissionDeniedError", "UnauthenticatedError", "GatedRepoError"):
        sentence = f"{shown}: the server denies access ({status or 403}); {login}"
        return RemoteError(sentence, "access-denied", given=shown)
    if name == "PreconditionError" or status == 412:
        return changed_error(shown)
    if status == 404 or isinstance(error, FileNotFoundError) or name.endswith("NotFoundError"):
        return missing_error(shown)
    if key := re.search(r'[Pp]ath:? ("(?:[^"\\]|\\.)*")', text) if "InvalidPath" in name else None:
        sentence = f"{shown}: the key {key[1]} cannot be requested; rename the object, or give the other files"
        return RemoteError(sentence, "unsupported", given=key[1])
    if isinstance(error, http.client.InvalidURL) or "InvalidPath" in name or "path segment" in text:
        return RemoteError(f"{shown} is not a URL that can be requested; check it", "bad-url", given=shown)
    if status is None:
        return RemoteError(f"{shown}: the server gives no answer, or an incomplete one", "server-failed", given=shown)
    if status == 429 or status >= 500:
        return RemoteError(f"{shown}: the server answers with {status}", "server-failed", given=shown)
    sentence = f"{shown}: the server answers with {status}; check the URL, or copy the file to this machine"
    return RemoteError(sentence, "server-unsuitable", given=shown)


@dataclass(frozen=True)
class RemoteFile:
    """A file under a URL."""

    name: str  # the URL without login and query
    size: int  # bytes
    version: str  # its ETag, else its modification time; on the hub the digest of its content
    ask: Callable[[int, int], bytes] = field(repr=False, compare=False)  # (start, stop) → these bytes, in one attempt
    again: Callable[[], RemoteFile] | None = field(default=None, repr=False, compare=False)
    """Returns the current state of the file. Raises RemoteError if it no longer exists. None: it cannot change."""
    listing: Callable[[], dict[str, RemoteFile]] | None = field(default=None, repr=False, compare=False)
    """Lists the files of the directory again; all these files share this function."""

    def open(self) -> io.BufferedReader:
        """Return a seekable file object. It keeps at most three requests of 8 MiB in memory."""
        return io.BufferedReader(_Reader(self), FIRST_BYTES)

    def fetch(self, start: int, stop: int) -> bytes:
        """Return the bytes from start to stop. Raises RemoteError, also if the file has changed."""

        def complete() -> bytes:
            data = self.ask(start, stop)
            if len(data) != stop - start:
                raise ConnectionError(f"{len(data)} of {stop - start} bytes")
            return data

        return patiently(self.name, complete)

    def read(self, most: int) -> bytes:
        """Return all bytes of the file. Raises RemoteError if it has more than `most`."""
        if self.size > most:
            sentence = f"{self.name} has {self.size:,} bytes, and the limit is {most:,}; check the URL"
            raise RemoteError(sentence, "bad-url", given=self.size)
        with self.open() as stream:
            return stream.read()


class _Reader(io.RawIOBase):
    """A file that is read in ranges: small ones after a seek, then larger ones with read-ahead."""

    def __init__(self, file: RemoteFile) -> None:
        self._fetch = file.fetch
        self._size, self._position = file.size, 0
        self._chunk, self._begin, self._step = b"", 0, FIRST_BYTES
        self._ahead: tuple[int, Future[bytes]] | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

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
        """Fetch bytes from the current position on."""
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
