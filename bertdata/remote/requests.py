"""A request to a server: made again where a failure may pass, and one sentence where it does not."""

from __future__ import annotations

import http.client
import re
import threading
import time
import urllib.error
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from typing import TypeVar

from bertdata.errors import RemoteError
from bertdata.urls import LOGIN, scheme_of, without_secrets

NO_BUCKET = "there is no such bucket"
TIMEOUT_S = 60.0  # of silence
_TRIES, _FIRST_WAIT_S = 6, 0.5  # of a request that a server may answer later; the wait doubles each time
_Result = TypeVar("_Result")


def patiently(url: str, ask: Callable[[], _Result]) -> _Result:
    """What `ask` returns. Asks several times where the reason for a failure may pass. Raises RemoteError."""
    is_main = threading.current_thread() is threading.main_thread()
    for tries in range(_TRIES):
        try:
            return in_background(ask).result() if is_main else ask()  # no Ctrl-C ends a call of obstore
        except expected() as error:
            problem = sentence(url, error)
            if isinstance(error, urllib.error.HTTPError):
                error.close()
        if not problem.may_pass:
            raise problem
        if tries + 1 < _TRIES:
            time.sleep(_FIRST_WAIT_S * 2**tries)
    raise RemoteError(f"{problem} (tried {_TRIES} times); try again later")


def in_background(work: Callable[[], _Result]) -> Future[_Result]:
    """Runs in a thread of its own, which nobody waits for at the end of the program."""
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="fetch", daemon=True).start()
    return future


@lru_cache(maxsize=1)
def expected() -> tuple[type[Exception], ...]:
    """What the libraries raise when a request fails."""
    kinds: list[type[Exception]] = [OSError, http.client.HTTPException]
    try:
        from obstore.exceptions import BaseError

        kinds.append(BaseError)
    except ImportError:
        pass
    try:
        from huggingface_hub import errors

        kinds += [errors.HfHubHTTPError, errors.HFValidationError, errors.HTTPError]
    except (ImportError, AttributeError):
        pass
    return tuple(kinds)


def absent(shown: str) -> RemoteError:
    problem = RemoteError(f"{shown} does not exist; check the name")
    problem.is_absent = True
    return problem


def sentence(url: str, error: Exception) -> RemoteError:
    """What a user is told of a failed request."""
    text, kind, shown = str(error), type(error).__name__, without_secrets(url)
    status = getattr(error, "code", None) or getattr(getattr(error, "response", None), "status_code", None)
    if found := re.search(r"status code: (\d+)", text):
        status = int(found[1])
    login = LOGIN[scheme_of(url)]
    if "NoSuchBucket" in text or "ContainerNotFound" in text:
        return RemoteError(f"{shown}: {NO_BUCKET}; check the name and the region")
    if any(word in text for word in ("169.254.169.254", "metadata.google", "Account must be specified", "/api/token")):
        return RemoteError(f"{shown}: no credentials were found; {login}")
    if status in (401, 403) or kind in ("PermissionDeniedError", "UnauthenticatedError", "GatedRepoError"):
        refusal = RemoteError(f"{shown}: the server refuses access ({status or 403}); {login}")
        refusal.is_refused = True
        return refusal
    if kind == "PreconditionError" or status == 412:
        return RemoteError(f"{shown} changed while it was read; run again when nobody changes it")
    if status == 404 or isinstance(error, FileNotFoundError) or kind.endswith("NotFoundError"):
        return absent(shown)
    problem = RemoteError(
        f"{shown}: " + (f"the server answers with {status}" if status else "no answer, or a part of it")
    )
    is_wrong = isinstance(error, http.client.InvalidURL) or "InvalidPath" in kind or "path segment" in text
    problem.may_pass = not is_wrong and (status is None or status == 429 or status >= 500)
    if not problem.may_pass:
        return RemoteError(f"{problem}; check the URL")
    return problem
