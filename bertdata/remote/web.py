"""Files of http:// and https://."""

from __future__ import annotations

import base64
import http.client
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from functools import partial
from typing import Any

from bertdata.errors import RemoteError
from bertdata.remote import access
from bertdata.remote.access import RemoteFile, changed_error, patiently
from bertdata.urls import without_secrets


def file_at(url: str) -> RemoteFile:
    """Return the file of a URL. Requests the first byte, because a signed URL may allow only GET."""

    def ask() -> RemoteFile:
        try:
            with _request(url, 0, 1) as answer:
                span, version, is_part = answer.headers.get("Content-Range", ""), _version(answer), answer.status == 206
        except urllib.error.HTTPError as error:
            if error.code != 416:  # an empty file has no first byte
                raise
            span, version, is_part = error.headers.get("Content-Range", ""), _version(error), True
        size, name = span.rpartition("/")[2], without_secrets(url)
        if not is_part or not re.fullmatch(r"[0-9]{1,18}", size):
            sentence = f"{name}: the server does not support range requests; download the file first"
            raise RemoteError(sentence, "server-unsuitable", given=name)
        ask_part = partial(part_of, url, name, version=version)
        return RemoteFile(name, int(size), version, ask_part, partial(file_at, url))

    return patiently(url, ask)


def part_of(
    url: str, name: str, start: int, stop: int, *, version: str | None = None, headers: Mapping[str, str] | None = None
) -> bytes:
    """Return bytes of a file. version: the required version. headers: login headers."""
    with _request(url, start, stop, headers) as answer:
        if answer.status != 206 or version not in (None, _version(answer)):
            raise changed_error(name)
        data: bytes = answer.read(stop - start + 1)  # one byte more, to detect a response that is too long
        return data


def _version(answer: Any) -> str:
    return answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""


def _request(url: str, start: int, stop: int, headers: Mapping[str, str] | None = None) -> Any:
    """Request a part of a file. Sends a login only to the server of the URL, not to the server of a redirect."""
    parts = urllib.parse.urlsplit(url)
    login, _, host = parts.netloc.rpartition("@")
    secret = dict(headers or {})
    if login:
        secret["Authorization"] = f"Basic {base64.b64encode(urllib.parse.unquote(login).encode()).decode()}"
    path, query = (urllib.parse.quote(part, safe="/%:@!$&'()*+,;=~?") for part in (parts.path, parts.query))
    try:
        plain = parts._replace(netloc=host.encode("idna").decode(), path=path, query=query, fragment="")
        request = urllib.request.Request(urllib.parse.urlunsplit(plain))  # noqa: S310  (http alone)
        request.add_header("Range", f"bytes={start}-{stop - 1}")
        for name, value in secret.items():
            request.add_unredirected_header(name, value)
        return urllib.request.urlopen(request, timeout=access.TIMEOUT_S)  # noqa: S310
    except UnicodeError:  # an invalid host name, in the URL or in a redirect
        raise http.client.InvalidURL(host) from None
