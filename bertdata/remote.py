"""Files in object stores, on web servers and on the Hugging Face hub: what a URL stands for, reading and writing them.

obstore does the work for s3://, gs:// and az://, huggingface_hub for hf://, and urllib for http:// and https://: signed
URLs have a query, which obstore does not take. Credentials come from where these libraries look for them. They are
never stored, and no message has them: of an answer it says the status, and of a URL all but login and query.
"""

from __future__ import annotations

import base64
import configparser
import http.client
import io
import os
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from glob import has_magic
from pathlib import Path
from typing import Any, TypeVar

from bertdata.errors import RemoteError, UsageError

_URL = re.compile(r"(s3|gs|az|hf|https?)://")
_FIRST, _MOST = 1 << 16, 1 << 23  # bytes of a request: after a jump, and at most
_NO_BUCKET = "there is no such bucket"
_PARTS = 2  # of 5 MiB that one file sends at the same time
_TRIES, _FIRST_WAIT_S = 6, 0.5  # of a request that a server may answer later; the wait doubles each time
_TIMEOUT_S = 60.0  # of silence
_LOGIN = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to a file of a service account, or GOOGLE_SKIP_SIGNATURE=true",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_SKIP_SIGNATURE=true",
    "hf": "log in with an access token (HF_TOKEN)",
    "http": "give a URL that needs no login, or a signed one",
}
_Result = TypeVar("_Result")


def is_url(name: str) -> bool:
    return _URL.match(name) is not None


@dataclass(frozen=True)
class RemoteFile:
    """A file under a URL."""

    name: str  # the URL without login and query
    size: int  # bytes
    version: str  # its ETag, else the time of its last change; on the hub the digest of its content
    url: str = field(repr=False, compare=False)

    def open(self) -> io.BufferedReader:
        """A file object that can seek. Holds at most three requests of 8 MiB in memory."""
        return io.BufferedReader(_Reader(self), _FIRST)

    def now(self) -> RemoteFile:
        """The same file as it is now. Raises RemoteError if it does not exist."""
        if _scheme(self.url) == "hf":
            return self  # of a commit, which does not change
        return _web_file(self.url) if _scheme(self.url) == "http" else _object(self.url)


def find(url: str) -> dict[str, RemoteFile]:
    """The files that a URL stands for: one with the key "", or several by their path below a directory, in order.

    Several are the files below a directory, or those that match a pattern, as with paths of this machine. Raises
    UsageError for a URL that is none, and RemoteError if there is no file or the server does not answer.
    """
    scheme = _scheme(url)
    _require_sound(url)
    if scheme == "http":
        return {"": _web_file(url)}
    if scheme == "hf":
        return _in_repository(url)
    bucket, _, key = url.partition("://")[2].partition("/")
    if key and not key.endswith("/"):
        try:
            return {"": _object(url)}
        except RemoteError as error:
            if not error.is_absent:
                raise
    root, store = f"{url.partition('://')[0]}://{bucket}/", _store(url)
    prefix = _folder_of(key)
    listed = _patiently(url, lambda: [meta for some in _obstore().list(store, prefix or None) for meta in some])
    every = {meta["path"]: _described(root + meta["path"], meta) for meta in listed if meta["size"]}
    return _chosen(url, every, key)


def _chosen(url: str, every: dict[str, RemoteFile], key: str) -> dict[str, RemoteFile]:
    """The files below a directory or that match a pattern, of all files by path."""
    folder = _folder_of(key)
    if has_magic(key):
        every = {path: file for path, file in every.items() if _matches(path.split("/"), key.split("/"))}
    found = {path.removeprefix(folder): every[path] for path in sorted(every, key=_parts) if path.startswith(folder)}
    if not found:
        raise RemoteError(f"{url} does not exist, and no file is below it or matches it; check the name")
    return found


def _parts(path: str) -> list[str]:
    """By which paths of this machine are sorted too."""
    return path.split("/")


def _folder_of(key: str) -> str:
    """The directory that the files are below, of a directory or a pattern: "" or a path with a slash at its end."""
    if not has_magic(key):
        return key.rstrip("/") + "/" * bool(key.rstrip("/"))
    fixed = re.split(r"[*?\[]", key)[0]
    return fixed[: fixed.rfind("/") + 1]


def _matches(parts: list[str], patterns: list[str]) -> bool:
    """As `glob` does it: `*` stays in one directory, `**` does not, and a dot at the beginning must be spelled."""
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return _matches(parts, patterns[1:]) or (
            len(parts) > 1 and parts[0][:1] != "." and _matches(parts[1:], patterns)
        )
    return (
        bool(parts)
        and fnmatchcase(parts[0], patterns[0])
        and (parts[0][:1] != "." or patterns[0][:1] == ".")
        and _matches(parts[1:], patterns[1:])
    )


def _scheme(url: str) -> str:
    scheme = url.partition("://")[0]
    return "http" if scheme == "https" else scheme


def _require_sound(url: str) -> None:
    """Raises UsageError for what no request can be made of."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:  # whose text has the login
        raise UsageError("a URL has a server or a port that cannot be; give one such as s3://bucket/file.txt") from None
    if not parts.netloc:
        raise UsageError(f"{without_secrets(url)} names no server or bucket; give a URL such as s3://bucket/file.txt")
    if _scheme(url) in ("s3", "gs", "az") and ("@" in parts.netloc or "=" in parts.query):
        raise UsageError(
            f"{without_secrets(url)} was given with a login or a query; leave it out, and {_LOGIN[_scheme(url)]}"
        )
    path = url.partition("://")[2].partition("/")[2].rstrip("/")
    if any(each.isspace() or each in "<>{}|^`" for each in host) or (
        _scheme(url) != "http" and path and any(part in ("", ".", "..") for part in path.split("/"))
    ):
        raise UsageError(
            f"{without_secrets(url)} has an empty part, a dot for a part, or a space in its server; check the URL"
        )


def without_secrets(url: str) -> str:
    """A URL without what may be secret; any other name as it is."""
    if not is_url(url):
        return url
    scheme, _, rest = url.partition("://")
    server, slash, path = rest.partition("/")
    if _scheme(url) == "http" or "=" in path.partition("?")[2]:
        path = path.partition("?")[0].partition("#")[0]
    return f"{scheme}://{server.rpartition('@')[2].partition('?')[0]}{slash}{path}" if scheme != "hf" else url


# ------------------------------------------------------------------------------------------------- reading in ranges


class _Reader(io.RawIOBase):
    """A file that is read in ranges. Reading on asks for more at a time, and ahead; after a jump it asks for little."""

    def __init__(self, file: RemoteFile) -> None:
        self._fetch = _fetcher(file)
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
            self._ahead = stop, _in_background(partial(self._fetch, stop, min(self._size, stop + self._step)))


def _in_background(work: Callable[[], _Result]) -> Future[_Result]:
    """Runs in a thread of its own, which nobody waits for at the end of the program."""
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="fetch", daemon=True).start()
    return future


def _fetcher(file: RemoteFile) -> Callable[[int, int], bytes]:
    """(start, stop) → these bytes of a file. Raises RemoteError, also if the file has changed."""
    if _scheme(file.url) in ("http", "hf"):
        once: Callable[[int, int], bytes] = partial(_web_range, file)
    else:
        store, key = _store(file.url), _key(file.url)
        same = {"if_match": f'"{file.version}"'} if not file.version.startswith(("W/", "time ")) else {}

        def once(start: int, stop: int) -> bytes:
            return bytes(_obstore().get(store, key, options={"range": (start, stop), **same}).bytes())

    def whole(start: int, stop: int) -> bytes:
        data = once(start, stop)
        if len(data) != stop - start:
            raise ConnectionError(f"{len(data)} of {stop - start} bytes")
        return data

    return lambda start, stop: _patiently(file.url, lambda: whole(start, stop))


def _patiently(url: str, ask: Callable[[], _Result]) -> _Result:
    """What `ask` returns. Asks several times where the reason for a failure may pass. Raises RemoteError."""
    is_main = threading.current_thread() is threading.main_thread()
    for tries in range(_TRIES):
        try:
            return _in_background(ask).result() if is_main else ask()  # no Ctrl-C ends a call of obstore
        except _expected() as error:
            problem = _sentence(url, error)
            if isinstance(error, urllib.error.HTTPError):
                error.close()
        if not problem.may_pass:
            raise problem
        if tries + 1 < _TRIES:
            time.sleep(_FIRST_WAIT_S * 2**tries)
    raise RemoteError(f"{problem} (tried {_TRIES} times); try again later")


# ----------------------------------------------------------------------------------------------------- object stores


def _obstore() -> Any:
    try:
        import obstore
    except ImportError:
        raise RemoteError("s3://, gs:// and az:// need obstore; pip install 'bertdata[remote]'") from None
    if _first_process() != os.getpid():
        raise RemoteError(
            "an object store was used before this process was forked, and obstore would wait for ever in it; open the "
            "dataset before, or start processes by spawn"
        )
    return obstore


@lru_cache(maxsize=1)
def _first_process() -> int:
    """The process that was the first to use obstore."""
    return os.getpid()


def _key(url: str) -> str:
    return url.partition("://")[2].partition("/")[2]


def _store(url: str) -> Any:
    scheme, _, rest = url.partition("://")
    return _store_of(f"{scheme}://{rest.partition('/')[0]}")


@lru_cache(maxsize=64)
def _store_of(root: str) -> Any:
    _obstore()
    from obstore.store import from_url

    silence, whole = timedelta(seconds=_TIMEOUT_S), timedelta(hours=1)
    options: dict[str, Any] = {"retry_config": {"max_retries": 0}}  # _patiently tries again
    options["client_options"] = {"connect_timeout": silence, "read_timeout": silence, "timeout": whole}
    if root.startswith("s3:"):
        options["config"] = {"conditional_put": "etag", **_s3_config()}
        if options["config"].get("endpoint", "").startswith("http://"):
            options["client_options"]["allow_http"] = True
    try:
        return from_url(root, **options)
    except _expected() as error:
        raise _sentence(root, error) from None


def _s3_config() -> dict[str, str]:
    """What obstore does not look for itself: the address of a server, and the files of the AWS command line."""
    given, config = os.environ.get, dict[str, str]()
    if endpoint := given("AWS_ENDPOINT_URL_S3") or given("AWS_ENDPOINT_URL"):
        config["endpoint"] = endpoint
    home, profile = Path.home() / ".aws", given("AWS_PROFILE", "default")
    if not (given("AWS_REGION") or given("AWS_DEFAULT_REGION")):
        names = {"region": "region"}
        section = profile if profile == "default" else f"profile {profile}"
        config |= _section(Path(given("AWS_CONFIG_FILE") or home / "config"), section, names)
    if not given("AWS_ACCESS_KEY_ID"):
        names = {"aws_access_key_id": "access_key_id", "aws_secret_access_key": "secret_access_key",
                 "aws_session_token": "session_token"}  # fmt: skip
        config |= _section(Path(given("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials"), profile, names)
    return config


def _section(file: Path, section: str, names: dict[str, str]) -> dict[str, str]:
    """Values of a section of an INI file, by their new names."""
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read([file])
    except (configparser.Error, OSError, UnicodeError):  # whose text may hold a secret
        raise RemoteError(f"{file} cannot be read as a file of the AWS command line; correct it") from None
    return {new: parser[section][old] for old, new in names.items() if section in parser and old in parser[section]}


def _object(url: str) -> RemoteFile:
    store, key = _store(url), _key(url)
    try:
        return _described(url, _patiently(url, lambda: _obstore().head(store, key)))
    except RemoteError as error:
        if error.is_absent:
            _require_bucket(url)
        raise


def _require_bucket(url: str) -> None:
    """Raises RemoteError if there is no such bucket, which the answer to a question for an object does not say."""
    try:
        _patiently(url, lambda: next(iter(_obstore().list(_store(url), "-", chunk_size=1)), None))
    except RemoteError as error:
        if _NO_BUCKET in str(error):
            raise


def _described(url: str, meta: Any) -> RemoteFile:
    tag = meta["e_tag"]  # a list has it without quotes at some stores
    return RemoteFile(
        url, meta["size"], tag.strip('"') if tag else f"time {int(meta['last_modified'].timestamp())}", url
    )


# ---------------------------------------------------------------------------------------------------- whole files


def within(url: str) -> Callable[[str], RemoteFile]:
    """Name of a file below a directory → the file. That raises RemoteError if there is none.

    Of a repository on the hub it looks once, so all files are of one commit.
    """
    _require_sound(url)
    if "?" in url or "@" in urllib.parse.urlsplit(url).netloc:
        raise UsageError(f"{without_secrets(url)} was given with a login or a query, which a dataset cannot have")
    if _scheme(url) != "hf":
        return lambda name: (_web_file if _scheme(url) == "http" else _object)(f"{url}/{name}")
    found = _in_repository(url, is_directory=True)

    def one(name: str) -> RemoteFile:
        if name not in found:
            raise _absent(f"{url}/{name}")
        return found[name]

    return one


def read(file: RemoteFile, most: int) -> bytes:
    """The whole file, in memory. Raises RemoteError if it has more than `most` bytes."""
    if file.size > most:
        raise RemoteError(f"{file.name} has {file.size:,} bytes, more than the {most:,} that are read; check the URL")
    with file.open() as stream:
        return stream.read()


def write(url: str, path: Path) -> None:
    """Puts a file of this machine in the place of an object, whole or not at all."""
    _patiently(url, lambda: _obstore().put(_store(url), _key(url), path, max_concurrency=_PARTS))


def overwrite(url: str, content: bytes) -> None:
    """Puts a small object in place of another."""
    _patiently(url, lambda: _obstore().put(_store(url), _key(url), content))


def create(url: str, content: bytes) -> bool:
    """Puts a small object where none is. False: there is one."""
    from obstore.exceptions import AlreadyExistsError

    def put() -> bool:
        try:
            _obstore().put(_store(url), _key(url), content, mode="create")
        except AlreadyExistsError:
            return False
        return True

    return _patiently(url, put)


def remove(url: str) -> None:
    """Removes an object, if there is one."""
    _patiently(url, lambda: _obstore().delete(_store(url), _key(url)))


def commit_folder(url: str, directory: Path, names: list[str], *, unless: str, message: str) -> None:
    """Puts files of a directory into a repository of the hub in one commit. A repository that it makes is private.

    unless: there is this file already. Raises RemoteError if somebody else commits meanwhile.
    """
    repository, path, revision = _repository_of(url)
    api = _hub().HfApi()

    def put() -> None:
        api.create_repo(repository, repo_type="dataset", exist_ok=True, private=True)
        before = api.dataset_info(repository, revision=revision).sha
        if unless in _in_repository(url, is_directory=True):
            return
        api.upload_folder(
            repo_id=repository, repo_type="dataset", folder_path=directory, path_in_repo=path, revision=revision,
            allow_patterns=names, commit_message=message, parent_commit=before,
        )  # fmt: skip

    _patiently(url, put)


# --------------------------------------------------------------------------------------------- web servers, the hub


def _web_file(url: str) -> RemoteFile:
    """Asks for the first byte, as a signed URL may allow nothing but reading."""

    def ask() -> RemoteFile:
        try:
            with _request(url, 0, 1) as answer:
                said, version, is_part = answer.headers.get("Content-Range", ""), _version(answer), answer.status == 206
        except urllib.error.HTTPError as error:
            if error.code != 416:  # an empty file has no first byte
                raise
            said, version, is_part = error.headers.get("Content-Range", ""), _version(error), True
        size = said.rpartition("/")[2]
        if not is_part or not size.isdigit():
            raise RemoteError(f"{without_secrets(url)}: the server does not send parts of files; download it first")
        return RemoteFile(without_secrets(url), int(size), version, url)

    return _patiently(url, ask)


def _web_range(file: RemoteFile, start: int, stop: int) -> bytes:
    with _request(file.url, start, stop) as answer:
        is_same = _scheme(file.url) == "hf" or _version(answer) == file.version
        if answer.status != 206 or not is_same:
            raise RemoteError(f"{file.name} changed while it was read; run again when nobody changes it")
        data: bytes = answer.read()
        return data


def _version(answer: Any) -> str:
    return answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""


def _request(url: str, start: int, stop: int) -> Any:
    """Asks for a part of a file. A login is for the server of the URL, not for one that it names in its answer."""
    headers: dict[str, str] = {}
    if _scheme(url) == "hf":
        url, headers = _on_the_hub(url)
    parts = urllib.parse.urlsplit(url)
    login, _, host = parts.netloc.rpartition("@")
    if login:
        headers["Authorization"] = f"Basic {base64.b64encode(urllib.parse.unquote(login).encode()).decode()}"
    path, query = (urllib.parse.quote(part, safe="/%:@!$&'()*+,;=~?") for part in (parts.path, parts.query))
    plain = parts._replace(netloc=host.encode("idna").decode(), path=path, query=query, fragment="")
    request = urllib.request.Request(urllib.parse.urlunsplit(plain))  # noqa: S310  (http alone)
    request.add_header("Range", f"bytes={start}-{stop - 1}")
    for name, value in headers.items():
        request.add_unredirected_header(name, value)
    return urllib.request.urlopen(request, timeout=_TIMEOUT_S)  # noqa: S310


def _on_the_hub(url: str) -> tuple[str, dict[str, str]]:
    """The address of hf://datasets/org/name@commit/path, and the headers of a login."""
    hub = _hub()
    owner, repository, path = url.removeprefix("hf://datasets/").split("/", 2)
    name, _, commit = repository.partition("@")
    address = hub.hf_hub_url(f"{owner}/{name}", path, repo_type="dataset", revision=commit)
    return address, {name.capitalize(): value for name, value in hub.utils.build_hf_headers().items()}


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise RemoteError("hf:// needs huggingface_hub; pip install 'bertdata[remote]'") from None
    return huggingface_hub


def _repository_of(url: str) -> tuple[str, str, str | None]:
    """(org/name, path, revision) of hf://datasets/org/name[/path][@revision]; the revision may also follow the name."""
    revision = r"@(refs/(?:convert|pr)/[^/@]+|[^/@]+)"
    found = re.fullmatch(rf"hf://datasets/([^/@]+/[^/@]+)(?:{revision})?/?(.*?)/?(?:{revision})?", url)
    if not found or (found[2] and found[4]):
        raise UsageError(f"{url} names no dataset of the hub; give hf://datasets/org/name, and /path or @revision")
    return found[1], found[3], urllib.parse.unquote(found[2] or found[4] or "") or None


def _in_repository(url: str, *, is_directory: bool = False) -> dict[str, RemoteFile]:
    """The files of a commit of the hub, as `find` gives them; all below a directory may also be none."""
    repository, path, revision = _repository_of(url)
    info = _patiently(url, lambda: _hub().HfApi().dataset_info(repository, revision=revision, files_metadata=True))
    every = {}
    for each in info.siblings or []:
        version = (each.lfs.sha256 if each.lfs else each.blob_id) or ""
        shown, at = (f"hf://datasets/{repository}{commit}/{each.rfilename}" for commit in ("", f"@{info.sha}"))
        every[each.rfilename] = RemoteFile(shown, each.size or 0, version, at)
    if is_directory:
        folder = _folder_of(path)
        return {name.removeprefix(folder): file for name, file in every.items() if name.startswith(folder)}
    return {"": every[path]} if path in every else _chosen(url, every, path)


# ------------------------------------------------------------------------------------------------------------ errors


@lru_cache(maxsize=1)
def _expected() -> tuple[type[Exception], ...]:
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


def _absent(shown: str) -> RemoteError:
    problem = RemoteError(f"{shown} does not exist; check the name")
    problem.is_absent = True
    return problem


def _sentence(url: str, error: Exception) -> RemoteError:
    text, kind, shown = str(error), type(error).__name__, without_secrets(url)
    status = getattr(error, "code", None) or getattr(getattr(error, "response", None), "status_code", None)
    if found := re.search(r"status code: (\d+)", text):
        status = int(found[1])
    login = _LOGIN[_scheme(url)]
    if "NoSuchBucket" in text or "ContainerNotFound" in text:
        return RemoteError(f"{shown}: {_NO_BUCKET}; check the name and the region")
    if any(word in text for word in ("169.254.169.254", "metadata.google", "Account must be specified", "/api/token")):
        return RemoteError(f"{shown}: no credentials were found; {login}")
    if status in (401, 403) or kind in ("PermissionDeniedError", "UnauthenticatedError", "GatedRepoError"):
        return RemoteError(f"{shown}: the server refuses access ({status or 403}); {login}")
    if kind == "PreconditionError" or status == 412:
        return RemoteError(f"{shown} changed while it was read; run again when nobody changes it")
    if status == 404 or isinstance(error, FileNotFoundError) or kind.endswith("NotFoundError"):
        return _absent(shown)
    problem = RemoteError(
        f"{shown}: " + (f"the server answers with {status}" if status else "no answer, or a part of it")
    )
    is_wrong = isinstance(error, http.client.InvalidURL) or "InvalidPath" in kind or "path segment" in text
    problem.may_pass = not is_wrong and (status is None or status == 429 or status >= 500)
    if not problem.may_pass:
        return RemoteError(f"{problem}; check the URL")
    return problem
