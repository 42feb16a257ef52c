"""`pull` copies a dataset from a URL to a directory, and checks it: all files but the manifest, which comes last."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bertdata.errors import BuildError, DatasetError, RemoteError, UsageError
from bertdata.files import TEMPORARY, fsync_directory, locked, make_directory, naming, open_plain, write_file
from bertdata.format.arrays import digest
from bertdata.format.manifest import MANIFEST, SPLITS, Manifest, read_manifest
from bertdata.format.origins import ORIGINS, RECORD, Record, prepare_directory
from bertdata.format.records import MAX_RECORD_BYTES, parse_record
from bertdata.format.table import DIGESTS, TABLE
from bertdata.format.verify import require_own_tokens
from bertdata.remote.reader import RemoteFile
from bertdata.transfer.files import (
    FileOf,
    Progress,
    array_sizes,
    at_once,
    dataset_under,
    files_of,
    other_file,
    require_own_id,
    require_sound,
)
from bertdata.urls import is_url

LOCK = ".pull.lock"
_PIECE = 1 << 23
_FILE = re.compile(
    rf"(({'|'.join(SPLITS)})-[0-9]{{5,}}\.(json|[a-z0-9_-]+\.npy)|tokenizer(_config)?\.json|"
    rf"{TABLE}|{DIGESTS}|{MANIFEST})({TEMPORARY})?"
)  # what a pull may leave
_Result = TypeVar("_Result")


def pull(url: str, directory: str | Path, *, progress: Progress = lambda done, total: None) -> str:
    """Copies the dataset under a URL to a directory, checks every byte, and returns its dataset_id.

    Run again after a kill, it goes on with the files that are not here. Raises UsageError, DatasetError if there is no
    dataset or a file is not what the manifest says, BuildError if the directory holds something else, and RemoteError.
    """
    root, target = url.rstrip("/"), Path(directory)
    if not is_url(root):
        raise UsageError(f"{url} is not a URL; give one such as s3://bucket/name", "bad-url", option="url", given=url)
    file_of, content, manifest = dataset_under(root)
    if target.exists() and any(target.iterdir()) and not any((target / name).exists() for name in (LOCK, MANIFEST)):
        raise BuildError(f"{target} is not empty; give a new directory", "out-exists", option="directory", given=target)
    make_directory(target)
    with locked(target / LOCK, f"{target} is being filled", "wait for it"):
        there = [*target.iterdir()]  # looked at once, as a build may end meanwhile, which has .build or the manifest
        if target / MANIFEST not in there:
            fsync_directory(target)  # before any file, as the name of the lock says whose they are
            names = {*files_of(manifest), LOCK, ORIGINS}
            left = [path for path in there if path.name not in names]  # by a killed pull of another dataset
            if foreign := next((path for path in left if not _FILE.fullmatch(path.name) or path.is_dir()), None):
                sentence = f"{foreign} was not written by a pull; remove it, or give a new directory"
                raise BuildError(sentence, "out-exists", option="directory", given=target)
            for path in left:
                path.unlink()
            get_files(file_of, target, manifest, progress)
            write_file(target / MANIFEST, content)
            there = []
        (target / LOCK).unlink(missing_ok=True)
    if read_manifest(target).dataset_id != manifest.dataset_id:
        sentence = f"{target} already holds another dataset; give another directory"
        raise BuildError(sentence, "out-exists", option="directory", given=target)
    for name, sha256 in files_of(manifest).items() if there else ():  # nothing was copied now
        require_sound(target / name, sha256)
    return manifest.dataset_id


def get_files(file_of: FileOf, target: Path, manifest: Manifest, progress: Progress) -> None:
    """Copies all files but the manifest, those that are here excepted, and checks each."""
    require_own_id(manifest)
    digests, most = files_of(manifest), array_sizes(manifest)
    total, done, is_over = sum(most.values()), 0, threading.Event()

    def get(name: str) -> int:
        return _copy(lambda: file_of(name), target / name, digests[name], most.get(name, MAX_RECORD_BYTES), is_over)

    try:
        for size in at_once(get, digests):
            done += size
            progress(min(done, total), total)
        require_own_tokens(target, manifest)
        _get_origins(file_of, target, manifest, is_over)
    finally:
        is_over.set()
    fsync_directory(target)


def _get_origins(file_of: FileOf, target: Path, manifest: Manifest, is_over: threading.Event) -> None:
    """Copies the origins. A dataset is complete without them, so they are left out if they are not complete."""
    if not (found := _unless_absent(lambda: _origins_under(file_of, manifest))):
        prepare_directory(target, {})
        return
    origins, content = found
    files = origins.files(manifest)
    prepare_directory(target, origins.shards)

    def get(name: str) -> int | None:
        return _unless_absent(lambda: _copy(lambda: file_of(name), target / name, *files[name], is_over))

    if None in [*at_once(get, files)]:
        prepare_directory(target, {})
    else:
        write_file(target / RECORD, content)


def _unless_absent(get: Callable[[], _Result]) -> _Result | None:
    """What `get` returns; None: a file is not there, is damaged, or is of a later version."""
    try:
        return get()
    except DatasetError:
        return None
    except RemoteError as error:
        if error.kind not in ("not-found", "access-denied"):  # some stores refuse access to what does not exist
            raise
        return None


def _origins_under(file_of: FileOf, manifest: Manifest) -> tuple[Record, bytes] | None:
    """The record of the origins of a dataset under a URL, as bytes too; None: it is of another dataset."""
    file = file_of(RECORD)
    content = file.read(MAX_RECORD_BYTES)
    record = Record.of(parse_record(content, file.name), manifest, file.name)
    return (record, content) if record else None


def _copy(find: Callable[[], RemoteFile], path: Path, sha256: str | None, most: int, is_over: threading.Event) -> int:
    """Copies a file of at most so many bytes, unless it is here. Returns its size."""
    if sha256 is not None and path.exists() and digest(path)[0] == sha256:
        return path.stat().st_size
    file, temporary, copied = find(), path.with_name(path.name + TEMPORARY), hashlib.sha256()
    if file.size > most:
        raise other_file(file.name)
    temporary.unlink(missing_ok=True)  # to which a copy that failed may still write
    with file.open() as source, naming(path), open_plain(temporary, "wb") as copy:
        while not is_over.is_set() and (piece := source.read(_PIECE)):
            copied.update(piece)
            copy.write(piece)
        copy.flush()
        os.fsync(copy.fileno())
    if is_over.is_set():
        return 0
    if sha256 is None:
        parse_record(temporary.read_bytes(), file.name)
    elif sha256 != copied.hexdigest():
        temporary.unlink()
        raise other_file(file.name)
    os.replace(temporary, path)
    return file.size
