"""Objects of s3://, gs:// and az://. Only this file imports obstore."""

from __future__ import annotations

import configparser
import os
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from bertdata.errors import RemoteError
from bertdata.remote import access
from bertdata.remote.access import RemoteFile, as_remote_error, expected, library, patiently

_PARTS = 2  # of 5 MiB that one file sends at the same time


def file_at(url: str) -> RemoteFile:
    """The object of a URL, with its size. Raises RemoteError if it is not there or may not be read."""
    store = store_of(url)  # here, as Ctrl-C does not end an import in a thread
    return _described(url, patiently(url, lambda: _obstore().head(store, _key(url))))


def files_below(url: str, prefix: str) -> dict[str, RemoteFile]:
    """The files of a bucket whose key begins so, by key. url: any of the bucket."""
    root, store = _root(url), store_of(url)
    listed = patiently(url, lambda: [meta for page in _obstore().list(store, prefix or None) for meta in page])
    again = partial(files_below, url, prefix)
    return {meta["path"]: _described(f"{root}/{meta['path']}", meta, again) for meta in listed if meta["size"]}


def write(url: str, content: Path | bytes) -> None:
    """Puts a file of this machine, or bytes, in place of an object, completely or not at all."""
    patiently(url, lambda: _obstore().put(store_of(url), _key(url), content, max_concurrency=_PARTS))


def _ask(url: str, version: str, start: int, stop: int) -> bytes:
    same = {"if_match": f'"{version}"'} if not version.startswith(("W/", "time ")) else {}
    return bytes(_obstore().get(store_of(url), _key(url), options={"range": (start, stop), **same}).bytes())


def _described(url: str, meta: Any, listing: Any = None) -> RemoteFile:
    tag = meta["e_tag"]  # a list has it without quotes at some stores
    version = tag.strip('"') if tag else f"time {int(meta['last_modified'].timestamp())}"
    return RemoteFile(url, meta["size"], version, partial(_ask, url, version), partial(file_at, url), listing)


def _obstore() -> Any:
    obstore = library("obstore", "s3://, gs:// and az://")
    if _first_process() != os.getpid():
        sentence = "an object store was used before this process was forked; open the dataset before, or spawn"
        raise RemoteError(sentence, "unsupported")
    return obstore


@lru_cache(maxsize=1)
def _first_process() -> int:
    """The process that was the first to use obstore."""
    return os.getpid()


def _root(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


def _key(url: str) -> str:
    return url.partition("://")[2].partition("/")[2]


def store_of(url: str) -> Any:
    """obstore's object for the bucket of a URL."""
    return store_at(_root(url))


@lru_cache(maxsize=64)
def store_at(root: str) -> Any:
    _obstore()
    from obstore.store import from_url

    silence, total = timedelta(seconds=access.TIMEOUT_S), timedelta(hours=1)
    options: dict[str, Any] = {"retry_config": {"max_retries": 0}}  # `patiently` tries again
    options["client_options"] = {"connect_timeout": silence, "read_timeout": silence, "timeout": total}
    if root.startswith("s3:"):
        options["config"] = s3_config()
        if options["config"].get("endpoint", "").startswith("http://"):
            options["client_options"]["allow_http"] = True
    try:
        return from_url(root, **options)
    except expected() as error:
        raise as_remote_error(root, error) from None


def s3_config() -> dict[str, str]:
    """What obstore does not look for itself: the address of a server, and the files of the AWS command line."""
    variable, config = os.environ.get, dict[str, str]()
    if endpoint := variable("AWS_ENDPOINT_URL_S3") or variable("AWS_ENDPOINT_URL"):
        config["endpoint"] = endpoint
    home, profile = Path(os.path.expanduser("~/.aws")), variable("AWS_PROFILE", "default")
    if not (variable("AWS_REGION") or variable("AWS_DEFAULT_REGION")):
        names = {"region": "region"}
        section = profile if profile == "default" else f"profile {profile}"
        config |= _section(Path(variable("AWS_CONFIG_FILE") or home / "config"), section, names)
    if not variable("AWS_ACCESS_KEY_ID"):
        names = {
            "aws_access_key_id": "access_key_id",
            "aws_secret_access_key": "secret_access_key",
            "aws_session_token": "session_token",
        }
        config |= _section(Path(variable("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials"), profile, names)
    return config


def _section(file: Path, section: str, names: dict[str, str]) -> dict[str, str]:
    """Values of a section of an INI file, by their new names."""
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read([file])
    except (configparser.Error, OSError, UnicodeError):  # whose text may hold a secret
        sentence = f"{file} cannot be read as a file of the AWS command line; correct it"
        raise RemoteError(sentence, "not-of-format", given=file) from None
    return {new: parser[section][old] for old, new in names.items() if section in parser and old in parser[section]}
