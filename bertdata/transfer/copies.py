"""Datasets in the cache of this host: copies of those under URLs, and those that a build makes for a URL."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from bertdata.files import cache_directory, locked, make_directory, write_file
from bertdata.format.manifest import MANIFEST
from bertdata.format.records import canonical
from bertdata.transfer.files import dataset_under
from bertdata.transfer.pulling import get_files


def local_copy(url: str, *, say: Callable[[str], None] = lambda line: None) -> Path:
    """The directory of this host that has the dataset under a URL: in the cache, and copied there once.

    Of several processes the first one copies, and the others wait for it. The copy is named by the digest of its
    manifest, so another dataset under the same URL is another copy. Nothing removes it; the directory may be deleted
    when nobody reads it. say: called with a line before a copy begins. Raises as `pull` does.
    """
    root = url.rstrip("/")
    file_of, content, manifest = dataset_under(root)
    target = _cached_copy(content)
    if not (target / MANIFEST).exists():
        make_directory(target)
        with _filling(target):
            if not (target / MANIFEST).exists():
                say(f"copying {root} to {target}")
                get_files(file_of, target, manifest, lambda done, total: None)
                write_file(target / MANIFEST, content)
    return target


@contextmanager
def outgoing(url: str, plan: Mapping[str, Any]) -> Iterator[Path]:
    """A directory of the cache, locked, where a dataset for a URL is built. Each plan of a build has its own."""
    name = hashlib.sha256(canonical({"url": url.rstrip("/"), "plan": plan})).hexdigest()[:32]
    directory = cache_directory() / "outgoing" / name
    make_directory(directory)
    with locked(directory.with_name(f"{name}.lock"), f"{url} is being built", "wait for it"):
        try:
            yield directory
        finally:
            if directory.exists() and not any(directory.iterdir()):
                directory.rmdir()


def keep(directory: Path) -> Path:
    """Moves a dataset to where `local_copy` looks for it."""
    target = _cached_copy((directory / MANIFEST).read_bytes())
    make_directory(target.parent)
    with _filling(target):
        if (target / MANIFEST).exists():
            doomed = directory.with_name(f"{directory.name}.old")
            shutil.rmtree(doomed, ignore_errors=True)  # of a kill
            os.replace(directory, doomed)  # at once: half of a dataset would be taken for other files
            shutil.rmtree(doomed)
        else:
            shutil.rmtree(target, ignore_errors=True)  # what a copy left that was killed
            os.replace(directory, target)
    return target


def _cached_copy(manifest: bytes) -> Path:
    """Where the copy of a dataset with this manifest.json is. Its dataset_id may be that of another's manifest, too."""
    return cache_directory() / "datasets" / hashlib.sha256(manifest).hexdigest()[:32]


def _filling(target: Path) -> AbstractContextManager[None]:
    """A context that one process at a time is in; the others wait."""
    return locked(target.with_name(f"{target.name}.lock"), wait=True)
