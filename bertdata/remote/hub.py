"""Datasets of the Hugging Face hub: hf://datasets/org/name[/path][@revision]."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bertdata.errors import UsageError
from bertdata.remote import web
from bertdata.remote.access import RemoteFile, if_there, library, patiently


def repository_of(url: str) -> tuple[str, str, str | None]:
    """Return (org/name, path, revision) of a URL. The revision may follow the name or the path. Raises UsageError."""
    revision = r"@(refs/(?:convert|pr)/[^/@]+|[^/@]+)"
    match = re.fullmatch(rf"hf://datasets/([^/@]+/[^/@]+)(?:{revision})?/?(.*?)/?(?:{revision})?", url)
    if not match or (match[2] and match[4]):
        sentence = f"{url} is not a dataset of the hub; give hf://datasets/org/name, with /path or @revision if needed"
        raise UsageError(sentence, "bad-url", given=url)
    return match[1], match[3], urllib.parse.unquote(match[2] or match[4] or "") or None


def files_of(url: str) -> dict[str, RemoteFile]:
    """Return all files of a URL's repository in one commit, by path."""
    repository, _, revision = repository_of(url)
    info = patiently(url, lambda: _hub().HfApi().dataset_info(repository, revision=revision, files_metadata=True))
    return {each.rfilename: _described(repository, info.sha, each) for each in info.siblings or []}


def head(url: str) -> tuple[str | None, bool]:
    """Return the last commit of a repository (None if there is none), and whether the repository is public."""
    repository, _, revision = repository_of(url)
    ask = partial(_hub().HfApi().dataset_info, repository, revision=revision)
    info = if_there(lambda: patiently(url, ask), "not-found")
    return (info.sha, not info.private) if info else (None, False)


def commit(
    url: str,
    files: Mapping[str, Path | bytes],
    parent: str | None,
    message: str,
    *,
    public: bool,
    check: Callable[[], None],
) -> None:
    """Add files, by name, to a repository in one commit. A new repository is private unless `public`.

    Uploads large files first, then calls `check`, then makes the commit with all other files. parent: the last commit
    of the repository, from `head`. Raises RemoteError if there is a later commit.
    """
    repository, path, revision = repository_of(url)
    api, add = _hub().HfApi(), _hub().CommitOperationAdd
    where: dict[str, Any] = {"repo_type": "dataset", "revision": revision}

    def put() -> None:
        api.create_repo(repository, repo_type="dataset", exist_ok=True, private=not public)
        before = parent or api.list_repo_commits(repository, **where)[-1].commit_id
        operations = [add(f"{path}/{name}".lstrip("/"), content) for name, content in files.items()]
        api.preupload_lfs_files(repository, operations, **where)
        check()
        api.create_commit(repository, operations, **where, commit_message=message, parent_commit=before)

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
    return library("huggingface_hub", "hf://")
