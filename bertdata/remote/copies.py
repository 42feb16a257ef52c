"""Copy datasets: `push` uploads one to a URL, `pull` copies one to a directory, `local_copy` to the cache.

The manifest is copied last. Every byte is checked before an upload and after a copy.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np

from bertdata.errors import BertdataError, BuildError, DatasetError, RemoteError, UsageError, damaged
from bertdata.files import (
    TEMPORARY,
    Stage,
    cache_directory,
    fsync_directory,
    locked,
    make_directory,
    naming,
    write_file,
)
from bertdata.format.arrays import HEADER_BYTES, digest, npy_header
from bertdata.format.dataset import stamp
from bertdata.format.manifest import MANIFEST, Manifest, not_a_dataset, parse_manifest, read_manifest, read_with_content
from bertdata.format.origins import ORIGINS, RECORD, Origins, prepare_directory
from bertdata.format.records import LARGEST_RECORD, parse_record, read_record
from bertdata.format.verify import require_own_tokens
from bertdata.remote import hub, stores
from bertdata.remote.access import RemoteFile, if_there
from bertdata.remote.find import file_getter
from bertdata.types import Progress
from bertdata.urls import is_url, without_secrets

LOCK = ".pull.lock"
THREADS = 8  # files at the same time
_PIECE = 1 << 23
FileOf = Callable[[str], RemoteFile]


def push(
    directory: str | Path,
    url: str,
    *,
    public: bool = False,
    origins: bool = False,
    progress: Progress = lambda done, total: None,
) -> str:
    """Upload the dataset in a directory to a URL, and return its dataset_id. Checks every file before its upload.

    url: a directory of an object store, or hf://datasets/org/name[/path][@revision]. If the URL already has the
    dataset, nothing is uploaded, unless `origins` is true. After an interruption, all files are uploaded again. public:
    allow a public repository of the hub. origins: also upload origins/, which has the paths of inputs, to the hub; an
    object store always gets it. progress: called with the uploaded bytes and the total bytes.

    Raises UsageError, DatasetError if the dataset is damaged or was replaced, BuildError if the URL has a different
    dataset, and RemoteError.
    """
    source, root = Path(directory), url.rstrip("/")
    is_hub = root.startswith("hf:")
    if not is_url(root) or root.startswith("http"):
        shown = without_secrets(root)
        sentence = f"{shown} cannot hold a dataset; give a URL of s3, gs, az or hf, such as s3://bucket/name"
        raise UsageError(sentence, "bad-url", option="url", given=shown)
    before = stamp(source / MANIFEST)
    manifest, content = read_with_content(source)
    _require_own_id(manifest)
    parent, is_public = hub.head(root) if is_hub else (None, False)
    there = if_there(lambda: _dataset_under(root)[2].dataset_id, "not-a-dataset")
    if there == manifest.dataset_id and not origins:
        return there
    if there not in (None, manifest.dataset_id):
        sentence = f"{root} already has a different dataset; give a different URL, or remove that dataset first"
        raise BuildError(sentence, "out-exists", option="url", given=root)
    if is_public and not public:
        sentence = f"{root} is a public repository; give --public if this dataset may be public"
        raise RemoteError(sentence, "missing", option="public")
    files = dict(manifest.files())
    if (origins or not is_hub) and (known := Origins.read(source, manifest)):
        files |= known.files() | {RECORD: (None, LARGEST_RECORD)}

    def upload(name: str) -> int:
        _require_sound(source / name, files[name][0])
        if not is_hub:
            stores.write(f"{root}/{name}", source / name)
        return (source / name).stat().st_size

    def require_same(error: Exception | None = None) -> None:
        if stamp(source / MANIFEST) != before or type(error) in (FileNotFoundError, ValueError):
            sentence = f"{source} was replaced during the push; push again"
            raise DatasetError(sentence, "replaced", given=source) from None

    try:
        _for_each(upload, files, manifest.num_bytes, progress)
        if is_hub:
            paths = {name: source / name for name in files}
            contents = {name: path if path.suffix == ".npy" else path.read_bytes() for name, path in paths.items()}
            message = f"Dataset {manifest.dataset_id[:16]}"
            hub.commit(root, {**contents, MANIFEST: content}, parent, message, public=public, check=require_same)
        else:
            require_same()
            stores.write(f"{root}/{MANIFEST}", content)
    except (BertdataError, OSError, ValueError) as error:
        require_same(error)
        raise
    return manifest.dataset_id


def pull(url: str, directory: str | Path, *, progress: Progress = lambda done, total: None) -> str:
    """Copy the dataset under a URL to a directory, check every byte, and return its dataset_id.

    After a kill, the same command continues with the missing files. Raises UsageError, DatasetError if the URL has no
    dataset or a damaged file, BuildError if the directory has other files, and RemoteError.
    """
    root, target = url.rstrip("/"), Path(directory)
    if not is_url(root):
        raise UsageError(f"{url} is not a URL; give one such as s3://bucket/name", "bad-url", option="url", given=url)
    file_of, content, manifest = _dataset_under(root)
    if target.exists() and any(target.iterdir()) and not any((target / name).exists() for name in (LOCK, MANIFEST)):
        raise BuildError(f"{target} is not empty; give a new directory", "out-exists", option="directory", given=target)
    make_directory(target)
    with locked(target / LOCK, f"{target} is being filled", "wait for it"):
        there = [*target.iterdir()]  # list once, because a build, which has .build or the manifest, may end meanwhile
        if target / MANIFEST not in there:
            fsync_directory(target)  # before any file: the name of the lock identifies the owner of the files
            names = {*dict(manifest.files()), MANIFEST, LOCK, ORIGINS}
            if other := next((path for path in there if path.name.removesuffix(TEMPORARY) not in names), None):
                sentence = f"{other} does not belong to this dataset; remove it, or give a new directory"
                raise BuildError(sentence, "out-exists", option="directory", given=target)
            _get_files(file_of, content, target, manifest, progress)
            there = []
        (target / LOCK).unlink(missing_ok=True)
    if read_manifest(target).dataset_id != manifest.dataset_id:
        sentence = f"{target} already has a different dataset; give a different directory"
        raise BuildError(sentence, "out-exists", option="directory", given=target)
    for name, (sha256, _) in manifest.files() if there else ():  # nothing was copied in this call
        _require_sound(target / name, sha256)
    return manifest.dataset_id


def local_copy(url: str, *, say: Callable[[str], None] = lambda line: None) -> Path:
    """Return the directory in this host's cache with the dataset of a URL. The dataset is copied there once.

    The first of several processes copies; all others wait for it. The digest of the manifest is part of the directory's
    name, so a different dataset under the same URL gets a different directory. Nothing removes it; you may delete it
    when no process reads it. say: called with a message before a copy starts. Raises the errors of `pull`.
    """
    root = url.rstrip("/")
    file_of, content, manifest = _dataset_under(root)
    target = cache_directory() / "datasets" / hashlib.sha256(content).hexdigest()[:32]
    if not (target / MANIFEST).exists():
        make_directory(target)
        with locked(target.with_name(f"{target.name}.lock"), wait=True):
            if not (target / MANIFEST).exists():
                say(f"copying {root} to {target}")
                _get_files(file_of, content, target, manifest, lambda done, total: None)
    return target


def _dataset_under(root: str) -> tuple[FileOf, bytes, Manifest]:
    """Return name → file, and the manifest as bytes and parsed. Raises DatasetError if there is no dataset."""
    file_of = if_there(lambda: file_getter(root), "not-found")
    content = if_there(lambda: file_of(MANIFEST).read(LARGEST_RECORD), "not-found") if file_of else None
    if file_of is None or content is None:
        raise not_a_dataset(root)

    def open_table(name: str, dtype: str, length: int) -> np.ndarray:
        raw, size = file_of(name).read(LARGEST_RECORD), np.dtype(dtype).itemsize * length
        if raw[:HEADER_BYTES] != npy_header(dtype, length) or len(raw) != HEADER_BYTES + size:
            raise _not_named(f"{root}/{name}")
        return np.frombuffer(raw, dtype, offset=HEADER_BYTES)

    return file_of, content, parse_manifest(content, f"{root}/{MANIFEST}", open_table)


def _require_own_id(manifest: Manifest) -> None:
    """Raise DatasetError if the dataset_id does not match the arrays: `local_copy` would take it for another."""
    if manifest.computed_id() != manifest.dataset_id:
        raise damaged(MANIFEST, f"its dataset_id {manifest.dataset_id[:16]} does not match its arrays")


def _require_sound(path: Path, sha256: str | None) -> None:
    """Raise DatasetError if a file is missing or damaged. sha256: None for a record, which has a checksum."""
    if sha256 is None:
        read_record(path)
    elif not path.exists() or digest(path)[0] != sha256:
        raise _not_named(path)


def _not_named(path: str | Path) -> DatasetError:
    return damaged(path, f"it does not match {MANIFEST}")


def _get_files(file_of: FileOf, content: bytes, target: Path, manifest: Manifest, progress: Progress) -> None:
    """Copy all missing files, and check each. The manifest, with the bytes `content`, is the last one."""
    _require_own_id(manifest)
    files, is_over = dict(manifest.files()), threading.Event()
    file = if_there(lambda: file_of(RECORD), "not-found", "access-denied")  # some stores deny access to missing files
    raw = file.read(LARGEST_RECORD) if file else b""
    record = Origins.parse(parse_record(raw, file.name), manifest, file.name, target) if file else None
    files |= record.files() if record else {}
    prepare_directory(target, record.shards if record else {})
    try:
        _for_each(lambda name: _copy(file_of, name, target, *files[name], is_over), files, manifest.num_bytes, progress)
    finally:
        is_over.set()
    require_own_tokens(target, manifest)
    if record:
        write_file(target / RECORD, raw)
    write_file(target / MANIFEST, content)


def _copy(file_of: FileOf, name: str, target: Path, sha256: str | None, most: int, is_over: threading.Event) -> int:
    """Copy a file of at most `most` bytes, unless it exists, and return its size."""
    path, copied = target / name, hashlib.sha256()
    if sha256 is not None and path.exists() and digest(path)[0] == sha256:
        return path.stat().st_size
    file = file_of(name)
    if file.size > most:
        raise _not_named(file.name)
    path.with_name(path.name + TEMPORARY).unlink(missing_ok=True)  # a failed copy may still write to this file
    stage = Stage(path.parent)  # not a context manager, which would remove the file of a later copy
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
            raise _not_named(file.name)
        stage.publish()
    return file.size


def _for_each(do: Callable[[str], int], names: Iterable[str], total: int, progress: Progress) -> None:
    """Call `do`, which returns a number of bytes, for all names, several at the same time.

    After a failure or Ctrl-C, starts no new call and does not wait for running calls, which may take minutes.
    """

    def attempt(name: str) -> int | BaseException:
        try:
            return do(name)
        except BaseException as error:  # otherwise the pool would wait forever for the thread
            return error

    done = 0
    with ThreadPool(THREADS) as pool:  # its threads are daemons
        for result in pool.imap_unordered(attempt, names):
            if isinstance(result, BaseException):
                raise result
            done += result
            progress(min(done, total), total)
