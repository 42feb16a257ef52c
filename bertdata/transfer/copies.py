"""Copies of datasets under URLs in the cache of this host."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from bertdata.files import cache_directory, locked, make_directory, write_file
from bertdata.format.manifest import MANIFEST
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
    target = cache_directory() / "datasets" / hashlib.sha256(content).hexdigest()[:32]
    if not (target / MANIFEST).exists():
        make_directory(target)
        with locked(target.with_name(f"{target.name}.lock"), wait=True):
            if not (target / MANIFEST).exists():
                say(f"copying {root} to {target}")
                get_files(file_of, target, manifest, lambda done, total: None)
                write_file(target / MANIFEST, content)
    return target
