"""`pull` copies a dataset from a URL to a directory, and checks it: all files but the manifest, which comes last."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

from bertdata.errors import BuildError, RemoteError, UsageError
from bertdata.files import TEMPORARY, Stage, fsync_directory, locked, make_directory, naming, write_file
from bertdata.format.arrays import digest
from bertdata.format.manifest import MANIFEST, Manifest, read_manifest
from bertdata.format.origins import ORIGINS, RECORD, Record, prepare_directory
from bertdata.format.records import MAX_RECORD_BYTES, parse_record
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
            names = {*files_of(manifest), MANIFEST, LOCK, ORIGINS}
            if other := next((path for path in there if path.name.removesuffix(TEMPORARY) not in names), None):
                sentence = f"{other} does not belong to this dataset; remove it, or give a new directory"
                raise BuildError(sentence, "out-exists", option="directory", given=target)
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
    record, content = _origins_under(file_of, manifest)
    sizes, is_over = array_sizes(manifest), threading.Event()
    files = {name: (sha256, sizes.get(name, MAX_RECORD_BYTES)) for name, sha256 in files_of(manifest).items()}
    files |= record.files(manifest) if record else {}
    total, done = sum(sizes.values()), 0
    prepare_directory(target, record.shards if record else {})
    try:
        for size in at_once(lambda name: _copy(lambda: file_of(name), target / name, *files[name], is_over), files):
            done += size
            progress(min(done, total), total)
    finally:
        is_over.set()
    require_own_tokens(target, manifest)
    if record:
        write_file(target / RECORD, content)


def _origins_under(file_of: FileOf, manifest: Manifest) -> tuple[Record | None, bytes]:
    """The record of the origins of a dataset under a URL, as bytes too; None: it has none."""
    try:
        file = file_of(RECORD)
    except RemoteError as error:
        if error.kind not in ("not-found", "access-denied"):  # some stores refuse access to what does not exist
            raise
        return None, b""
    content = file.read(MAX_RECORD_BYTES)
    return Record.of(parse_record(content, file.name), manifest, file.name), content


def _copy(find: Callable[[], RemoteFile], path: Path, sha256: str | None, most: int, is_over: threading.Event) -> int:
    """Copies a file of at most so many bytes, unless it is here. Returns its size."""
    if sha256 is not None and path.exists() and digest(path)[0] == sha256:
        return path.stat().st_size
    file, copied = find(), hashlib.sha256()
    if file.size > most:
        raise other_file(file.name)
    path.with_name(path.name + TEMPORARY).unlink(missing_ok=True)  # to which a copy that failed may still write
    stage = Stage(path.parent)  # no context, whose end would remove the file of a later copy
    with file.open() as source, naming(path), stage.open(path.name) as copy:
        while not is_over.is_set() and (piece := source.read(_PIECE)):
            copied.update(piece)
            copy.write(piece)
        if is_over.is_set():
            return 0
        if sha256 is None:
            copy.seek(0)
            parse_record(copy.read(), file.name)
        elif sha256 != copied.hexdigest():
            stage.discard([path.name])
            raise other_file(file.name)
        stage.publish()
    return file.size
