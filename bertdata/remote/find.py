"""Find the files of a URL: one file, the files of a directory, or the files that match a pattern."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Callable
from fnmatch import fnmatchcase
from glob import has_magic

from bertdata.errors import RemoteError, UsageError
from bertdata.remote import hub, stores, web
from bertdata.remote.access import RemoteFile, if_there, missing_error
from bertdata.urls import require_valid_url, scheme_of, without_secrets


def find(url: str) -> dict[str, RemoteFile]:
    """Return the files of a URL: one file with the key "", or several files by their path below a directory, in order.

    A directory or a pattern matches several files, like local paths. Raises UsageError for an invalid URL, and
    RemoteError if there is no file or the server does not respond.
    """
    scheme = scheme_of(url)
    require_valid_url(url)
    if scheme == "http":
        return {"": web.file_at(url)}
    if scheme == "hf":
        key, every = hub.repository_of(url)[1], hub.files_of(url)
        return {"": every[key]} if key in every else _chosen(url, every, key)
    key = url.partition("://")[2].partition("/")[2]
    if key and not key.endswith("/") and (file := if_there(lambda: stores.file_at(url), "not-found")):
        return {"": file}
    return _chosen(url, stores.files_below(url, _folder_of(key)), key)


def file_getter(url: str) -> Callable[[str], RemoteFile]:
    """Return a function: name of a file below a directory → the file. It raises RemoteError if the file is missing.

    A repository on the hub is listed once, so all files are from one commit.
    """
    require_valid_url(url)
    if "?" in url or "@" in urllib.parse.urlsplit(url).netloc:
        shown = without_secrets(url)
        sentence = f"{shown} has a login or a query, which the URL of a dataset must not have; remove it"
        raise UsageError(sentence, "bad-url", given=shown)
    if scheme_of(url) != "hf":
        file_at = web.file_at if scheme_of(url) == "http" else stores.file_at
        return lambda name: file_at(f"{url}/{name}")
    folder, every = _folder_of(hub.repository_of(url)[1]), hub.files_of(url)

    def one(name: str) -> RemoteFile:
        if folder + name not in every:
            raise missing_error(f"{url}/{name}")
        return every[folder + name]

    return one


def _chosen(url: str, every: dict[str, RemoteFile], key: str) -> dict[str, RemoteFile]:
    """Return the files below a directory, or the files that match a pattern. every: path → file."""
    folder = _folder_of(key)
    if has_magic(key):
        every = {path: file for path, file in every.items() if _matches(path.split("/"), key.split("/"))}
    in_order = sorted(every, key=lambda path: path.split("/"))  # like local paths
    chosen = {path.removeprefix(folder): every[path] for path in in_order if path.startswith(folder)}
    if not chosen:
        sentence = f"{url} does not exist, and no file is below it or matches it; check the name"
        raise RemoteError(sentence, "not-found", given=url)
    return chosen


def _folder_of(key: str) -> str:
    """Return the directory part of a directory or a pattern: "" or a path that ends with a slash."""
    if not has_magic(key):
        return key.rstrip("/") + "/" * bool(key.rstrip("/"))
    fixed = re.split(r"[*?\[]", key)[0]
    return fixed[: fixed.rfind("/") + 1]


def _matches(parts: list[str], patterns: list[str]) -> bool:
    """Return whether a path matches: `*` stays in one directory, `**` does not, and a first dot must be explicit."""
    if not parts or not patterns:
        return not parts and {*patterns} <= {"**"}
    if patterns[0] == "**":
        is_below = parts[0][:1] != "." and _matches(parts[1:], patterns)
        return is_below or (len(patterns) > 1 and _matches(parts, patterns[1:]))
    is_spelled = parts[0][:1] != "." or patterns[0][:1] == "."
    return is_spelled and fnmatchcase(parts[0], patterns[0]) and _matches(parts[1:], patterns[1:])
