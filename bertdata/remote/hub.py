"""Datasets of the Hugging Face hub: hf://datasets/org/name[/path][@revision]."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bertdata.errors import RemoteError, UsageError, install
from bertdata.remote import web
from bertdata.remote.reader import RemoteFile
from bertdata.remote.requests import patiently


def repository_of(url: str) -> tuple[str, str, str | None]:
    """(org/name, path, revision); the revision may also follow the name. Raises UsageError."""
    revision = r"@(refs/(?:convert|pr)/[^/@]+|[^/@]+)"
    match = re.fullmatch(rf"hf://datasets/([^/@]+/[^/@]+)(?:{revision})?/?(.*?)/?(?:{revision})?", url)
    if not match or (match[2] and match[4]):
        sentence = f"{url} names no dataset of the hub; give hf://datasets/org/name, and /path or @revision"
        raise UsageError(sentence, "bad-url", given=url)
    return match[1], match[3], urllib.parse.unquote(match[2] or match[4] or "") or None


def files_of(url: str) -> dict[str, RemoteFile]:
    """All files of the repository of a URL, by their path in it. They are of one commit."""
    repository, _, revision = repository_of(url)
    info = patiently(url, lambda: _hub().HfApi().dataset_info(repository, revision=revision, files_metadata=True))
    return {each.rfilename: _described(repository, info.sha, each) for each in info.siblings or []}


def is_public(url: str) -> bool:
    """Whether everybody sees the repository of a URL. One that does not exist will be made private."""
    try:
        return not patiently(url, lambda: _hub().HfApi().dataset_info(repository_of(url)[0], revision=None)).private
    except RemoteError as error:
        if error.kind != "not-found":
            raise
        return False


def commit(url: str, files: Mapping[str, Path | bytes], *, message: str, public: bool) -> None:
    """Puts files, by name, into a repository in one commit. A repository that it makes is private, or `public`."""
    repository, path, revision = repository_of(url)
    api, add = _hub().HfApi(), _hub().CommitOperationAdd

    def put() -> None:
        api.create_repo(repository, repo_type="dataset", exist_ok=True, private=not public)
        operations = [add(f"{path}/{name}".lstrip("/"), content) for name, content in files.items()]
        api.create_commit(repository, operations, repo_type="dataset", revision=revision, commit_message=message)

    patiently(url, put)


def _described(repository: str, commit: str, file: Any) -> RemoteFile:
    version = (file.lfs.sha256 if file.lfs else file.blob_id) or ""
    name = f"hf://datasets/{repository}/{file.rfilename}"
    return RemoteFile(name, file.size or 0, version, partial(_ask, repository, commit, file.rfilename, name))


def _ask(repository: str, commit: str, path: str, name: str, start: int, stop: int) -> bytes:
    hub = _hub()
    address = hub.hf_hub_url(repository, path, repo_type="dataset", revision=commit)
    login = {key.capitalize(): value for key, value in hub.utils.build_hf_headers().items()}
    return web.part_of(address, name, start, stop, headers=login)


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise RemoteError(f"hf:// needs huggingface_hub; {install('remote')}", "not-installed") from None
    return huggingface_hub
