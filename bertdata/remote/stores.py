"""Objects of s3://, gs:// and az://. Only this file imports obstore."""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote_plus, urlencode
from urllib.request import urlopen
from xml.etree import ElementTree

from bertdata.errors import RemoteError
from bertdata.remote import access, web
from bertdata.remote.access import RemoteFile, as_remote_error, expected, library, missing_error, patiently

_PARTS = 2  # parts of 5 MiB that one file sends at the same time
_VALID = timedelta(hours=1)  # lifetime of a signed URL
_REFUSED = re.compile(r"^/|//|/$|[\0-\x1f\x7f]")  # keys that obstore rejects or changes


def file_at(url: str) -> RemoteFile:
    """Return the object of a URL, with its size. Raises RemoteError if it does not exist or cannot be read."""
    store, key = store_of(url), _key(url)
    if _is_odd(url):
        if key not in (found := files_below(url, key)):
            raise missing_error(url)
        return found[key]
    try:
        return _described(url, patiently(url, lambda: _obstore().head(store, key)))
    except RemoteError as error:
        if error.kind == "not-found":
            _require_bucket(url)
        raise


def files_below(url: str, prefix: str) -> dict[str, RemoteFile]:
    """Return the files of a bucket whose keys start with `prefix`, by key. url: any URL in the bucket."""
    root, store = _root(url), store_of(url)
    if root.startswith("s3:"):  # obstore strips slashes from both ends of a key
        listed = list(_listed_by_urllib(root, prefix))
    else:
        listed = patiently(url, lambda: [meta for page in _obstore().list(store, prefix or None) for meta in page])
    again = partial(files_below, url, prefix)
    return {meta["path"]: _described(f"{root}/{meta['path']}", meta, again) for meta in listed if meta["size"]}


def _listed_by_urllib(root: str, prefix: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of an S3 bucket in the form of obstore, with unchanged keys."""
    query: dict[str, Any] = {"list-type": 2, "encoding-type": "url", "prefix": prefix}
    while True:
        page = _page(root, query)
        decoded = unquote_plus if page.findtext("{*}EncodingType") == "url" else str
        for each in page.iterfind("{*}Contents"):
            key, size = decoded(each.findtext("{*}Key", "")), int(each.findtext("{*}Size", "0"))
            yield {"path": key, "size": size, "e_tag": each.findtext("{*}ETag")}
        query["continuation-token"] = page.findtext("{*}NextContinuationToken")
        if not query["continuation-token"]:
            return


def _page(root: str, query: dict[str, Any]) -> ElementTree.Element:
    rest = f"?{urlencode(query, quote_via=quote)}&"
    return patiently(root, lambda: ElementTree.XML(urlopen(_signed(root, rest), timeout=access.TIMEOUT_S).read()))


def _signed(root: str, rest: str) -> str:
    """Return a URL, signed by obstore, for a request to an S3 bucket that obstore cannot make itself.

    rest: a path and a query that ends in ? or &. obstore signs it as part of the address of the server, to which it
    appends "/x" and its own query. So this depends on how obstore joins URLs.
    """
    is_open = os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true", "on", "yes", "y")
    keys = {"access_key_id": "-", "secret_access_key": "-", "skip_signature": "false"} if is_open else {}
    address = _obstore().sign(store_at(root, **keys), "GET", "x", _VALID).partition("/x?")[0]
    there = {"endpoint": f"{address}{rest}x=", "virtual_hosted_style_request": "true", **keys}
    signed: str = _obstore().sign(store_at(root, **there), "GET", "x", _VALID)
    return signed.partition("&X-Amz-")[0] if is_open else signed


def write(url: str, content: Path | bytes) -> None:
    """Write a local file, or bytes, to an object, completely or not at all."""
    patiently(url, lambda: _obstore().put(store_of(url), _key(url), content, max_concurrency=_PARTS))


def _ask(url: str, version: str, start: int, stop: int) -> bytes:
    key = _key(url)
    if _is_odd(url):
        return web.part_of(_signed(_root(url), f"/{quote(key)}?"), url, start, stop, version=f'"{version}"')
    same = {"if_match": f'"{version}"'} if not version.startswith(("W/", "time ")) else {}
    return bytes(_obstore().get(store_of(url), key, options={"range": (start, stop), **same}).bytes())


def _described(url: str, meta: Any, listing: Any = None) -> RemoteFile:
    tag = meta["e_tag"]  # some stores list the ETag without quotes
    version = tag.strip('"') if tag else f"time {int(meta['last_modified'].timestamp())}"
    return RemoteFile(url, meta["size"], version, partial(_ask, url, version), partial(file_at, url), listing)


def _require_bucket(url: str) -> None:
    """Raise RemoteError if the bucket does not exist. A failed request for an object does not show this."""
    try:
        patiently(url, lambda: next(iter(_obstore().list(store_of(url), "-", chunk_size=1)), None))
    except RemoteError as error:
        if error.kind == "bad-url":
            raise


def _obstore() -> Any:
    obstore = library("obstore", "s3://, gs:// and az://")
    if _first_process() != os.getpid():
        sentence = "this process was forked after an object store was used; fork earlier, or spawn the process"
        raise RemoteError(sentence, "unsupported")
    return obstore


@lru_cache(maxsize=1)
def _first_process() -> int:
    """Return the id of the process that used obstore first."""
    return os.getpid()


def _root(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


def _is_odd(url: str) -> bool:
    """Return whether obstore cannot request the object of a URL, but urllib can."""
    return url.startswith("s3:") and bool(_REFUSED.search(_key(url)))


def _key(url: str) -> str:
    return url.partition("://")[2].partition("/")[2]


def store_of(url: str) -> Any:
    """Return the store of obstore for the bucket of a URL."""
    return store_at(_root(url))


@lru_cache(maxsize=64)
def store_at(root: str, **config: str) -> Any:
    """Return the store of obstore for a bucket. config: options of S3 that replace the configured ones."""
    _obstore()
    from obstore.store import from_url

    silence, total = timedelta(seconds=access.TIMEOUT_S), timedelta(hours=1)
    options: dict[str, Any] = {"retry_config": {"max_retries": 0}}  # `patiently` retries
    options["client_options"] = {"connect_timeout": silence, "read_timeout": silence, "timeout": total}
    if root.startswith("s3:"):
        options["config"] = s3_config() | config
        if options["config"].get("endpoint", "").startswith("http://"):
            options["client_options"]["allow_http"] = True
    try:
        return from_url(root, **options)
    except expected() as error:
        raise as_remote_error(root, error) from None


def s3_config() -> dict[str, str]:
    """Return settings that obstore does not find itself: the endpoint, and those from files of the AWS command line."""
    variable, config = os.environ.get, dict[str, str]()
    if endpoint := variable("AWS_ENDPOINT_URL_S3") or variable("AWS_ENDPOINT_URL"):
        config["endpoint"] = endpoint
    home, profile = Path(os.path.expanduser("~/.aws")), variable("AWS_PROFILE", "default")
    if not (variable("AWS_REGION") or variable("AWS_DEFAULT_REGION")):
        section = profile if profile == "default" else f"profile {profile}"
        config |= _section(Path(variable("AWS_CONFIG_FILE") or home / "config"), section, "region")
    if not variable("AWS_ACCESS_KEY_ID"):
        names = "aws_access_key_id", "aws_secret_access_key", "aws_session_token"
        config |= _section(Path(variable("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials"), profile, *names)
    return config


def _section(file: Path, section: str, *names: str) -> dict[str, str]:
    """Return values of a section of an INI file. names: name in the file → new name."""
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read([file])
    except (configparser.Error, OSError, UnicodeError):  # the text of these errors may contain a secret
        sentence = f"{file} cannot be read as a file of the AWS command line; correct it"
        raise RemoteError(sentence, "not-of-format", given=file) from None
    return {name.removeprefix("aws_"): parser[section][name] for name in names if parser.has_option(section, name)}
