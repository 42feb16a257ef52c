"""Facts about URLs that need no request. Imports are fast."""

from __future__ import annotations

import os
import re
import urllib.parse

from bertdata.errors import UsageError

_URL = re.compile(r"(s3|gs|az|hf|https?)://")
_ANY_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
LOGIN = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to a file of a service account, or GOOGLE_SKIP_SIGNATURE=true",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_SKIP_SIGNATURE=true",
    "hf": "log in with an access token (HF_TOKEN)",
    "http": "give a URL that needs no login, or a signed one",
}


def is_url(name: str) -> bool:
    return _URL.match(name) is not None


def is_remote(name: str) -> bool:
    """Return whether a name is a URL and not the name of a local file."""
    return is_url(name) and not os.path.lexists(name)


def is_url_of_any_kind(name: str) -> bool:
    """Return whether a name is a URL, of any scheme, and not the name of a local file."""
    return _ANY_URL.match(name) is not None and not os.path.lexists(name)


def require_local_output(name: str) -> None:
    """Raise UsageError for an --out that is empty or a URL."""
    if not name:
        raise UsageError("--out is empty; give a directory", "missing", option="out")
    if is_url_of_any_kind(name):
        sentence = "--out is a URL; give a path on this machine, and copy a dataset from there with bertdata push"
        raise UsageError(sentence, "bad-url", option="out")


def scheme_of(url: str) -> str:
    """Return a key of LOGIN."""
    scheme = url.partition("://")[0]
    return "http" if scheme == "https" else scheme


def without_secrets(url: str) -> str:
    """Return a URL without parts that may be secret. Return any other name unchanged."""
    if not is_url(url) or scheme_of(url) == "hf":
        return url
    scheme, _, rest = url.partition("://")
    server, slash, path = rest.partition("/")
    if scheme_of(url) == "http" or "=" in path.partition("?")[2]:
        path = path.partition("?")[0].partition("#")[0]
    return f"{scheme}://{server.rpartition('@')[2].partition('?')[0]}{slash}{path}"


def require_valid_url(url: str) -> None:
    """Raise UsageError for a URL that no request can be made for."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:  # the text of this error has the login
        sentence = "a URL has no valid server or port; give one such as s3://bucket/file.txt"
        raise UsageError(sentence, "bad-url") from None
    shown, scheme = without_secrets(url), scheme_of(url)
    if not parts.netloc:
        sentence = f"{shown} names no server or bucket; give a URL such as s3://bucket/file.txt"
        raise UsageError(sentence, "bad-url", given=shown)
    if scheme in ("s3", "gs", "az") and ("@" in parts.netloc or "=" in parts.query):
        sentence = f"{shown} was given with a login or a query; leave it out, and {LOGIN[scheme]}"
        raise UsageError(sentence, "bad-url", given=shown)
    path = url.partition("://")[2].partition("/")[2].rstrip("/")
    has_wrong_part = scheme != "http" and path and any(part in ("", ".", "..") for part in path.split("/"))
    if has_wrong_part or any(each.isspace() or each in "<>{}|^`" for each in host):
        sentence = f"{shown} has an empty part, a dot for a part, or a space in its server; check the URL"
        raise UsageError(sentence, "bad-url", given=shown)
