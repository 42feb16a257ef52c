"""A dataset under a URL: `push` puts one there, `pull` copies it here and checks it, `local_copy` does so once a host.

All files but the manifest come first, and the manifest comes last, only if there is none. So what has a manifest is
complete. Files are a function of the text, the tokenizer and the settings, so a copy that was killed goes on when it is
run again.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from bertdata.errors import BuildError, DatasetError, RemoteError, UsageError
from bertdata.files import (
    TEMPORARY,
    cache_directory,
    fsync_directory,
    locked,
    make_directory,
    naming,
    open_plain,
    write_file,
)
from bertdata.format.arrays import HEADER_BYTES, array_path, digest, npy_header
from bertdata.format.dataset import stamp
from bertdata.format.manifest import MANIFEST, SPLITS, Manifest, not_a_dataset, parse_manifest, read_manifest
from bertdata.format.origins import ORIGINS, RECORD, Record, prepare_directory
from bertdata.format.records import MAX_RECORD_BYTES, canonical, parse_record, read_record
from bertdata.format.table import DIGESTS, TABLE
from bertdata.format.verify import require_own_tokens
from bertdata.remote import hub, stores
from bertdata.remote.files import within
from bertdata.remote.reader import RemoteFile
from bertdata.urls import is_url, without_secrets

CLAIM = ".bertdata-push"  # beside a manifest that is to come: whose files are put there, and which are there
LOCK = ".pull.lock"
_THREADS = 8  # files at the same time
_PIECE = 1 << 23
_CLAIMED_EVERY = 1 << 28  # bytes that a push puts at least between two notes of what is there
_FILE = re.compile(
    rf"(({'|'.join(SPLITS)})-[0-9]{{5,}}\.(json|[a-z0-9_-]+\.npy)|tokenizer(_config)?\.json|"
    rf"{TABLE}|{DIGESTS}|{MANIFEST})({TEMPORARY})?"
)  # what a pull may leave
_NO_FILE = ("not-found", "access-denied")  # kinds of errors: some stores refuse access to what does not exist
Progress = Callable[[int, int], None]
_Result = TypeVar("_Result")
FileOf = Callable[[str], RemoteFile]


def push(
    directory: str | Path,
    url: str,
    *,
    public: bool = False,
    origins: bool = False,
    progress: Progress = lambda done, total: None,
) -> str:
    """Puts the dataset of a directory under a URL, and returns its dataset_id. Checks every file before it goes.

    url: a directory of an object store, or hf://datasets/org/name[/path][@revision]. Run again after a kill, it goes on
    with the files that are not there. A dataset that is there already stays: the same one is what was asked for, and
    another one is refused. public: of the hub, also put it where everybody sees it. origins: also put origins/, which
    names inputs with their paths, on the hub; an object store always gets it. progress: called with the bytes that are
    done, and all.

    Raises UsageError, DatasetError for a damaged dataset, BuildError for another dataset, and RemoteError.
    """
    source, root = Path(directory), url.rstrip("/")
    require_writable(root, option="url")
    before, manifest = stamp(source / MANIFEST), read_manifest(source)
    _require_own_id(manifest)
    there = _id_under(root)
    if there is None and root.startswith("hf:"):
        if not public and hub.is_public(root):
            sentence = f"{root} exists and is public; give --public if everybody may see this dataset"
            raise RemoteError(sentence, "missing", option="public")
        files = files_of(manifest) | (_origins_of(source, manifest) if origins else {})
        for name, sha256 in files.items():
            _require_sound(source / name, sha256)
        names, message = [*files, MANIFEST], f"Dataset {manifest.dataset_id[:16]}"
        with _kept(source, root, before):
            hub.commit_folder(root, source, names, unless=MANIFEST, message=message, public=public)
        there = _id_under(root)
    elif there is None:
        there = _put_all(source, root, manifest, before, progress)
    elif there == manifest.dataset_id and not root.startswith("hf:"):
        stores.remove(f"{root}/{CLAIM}")  # of a push that was killed after its manifest was there
    if there is None:
        sentence = f"{root}: the server did not keep {MANIFEST}; run the same command again"
        raise RemoteError(sentence, "server-failed", given=root)
    if there != manifest.dataset_id:
        sentence = f"{root} holds another dataset already; give another URL, or remove that one first"
        raise BuildError(sentence, "out-exists", option="url", given=root)
    return manifest.dataset_id


def require_writable(url: str, *, option: str) -> None:
    """Raises UsageError for a URL that no dataset can be put under. option: which has it."""
    if not is_url(url) or url.startswith("http"):
        shown = without_secrets(url)
        sentence = f"{shown} cannot hold a dataset; give a URL of s3, gs, az or hf, such as s3://bucket/name"
        raise UsageError(sentence, "bad-url", option=option, given=shown)


def require_free(url: str) -> None:
    """Raises BuildError if a dataset is under the URL of a build's --out, or if everybody would see it there."""
    if _id_under(url.rstrip("/")) is not None:
        sentence = f"{url} already holds a dataset; give another URL, or remove that one first"
        raise BuildError(sentence, "out-exists", option="out", given=url)
    if url.startswith("hf:") and hub.is_public(url):
        sentence = f"{url} exists and is public; build into a directory, and give it to bertdata push --public"
        raise BuildError(sentence, "out-exists", option="out", given=url)


def pull(url: str, directory: str | Path, *, progress: Progress = lambda done, total: None) -> str:
    """Copies the dataset under a URL to a directory, checks every byte, and returns its dataset_id.

    Run again after a kill, it goes on with the files that are not here. Raises UsageError, DatasetError if there is no
    dataset or a file is not what the manifest says, BuildError if the directory holds something else, and RemoteError.
    """
    root, target = url.rstrip("/"), Path(directory)
    if not is_url(root):
        raise UsageError(f"{url} is not a URL; give one such as s3://bucket/name", "bad-url", option="url", given=url)
    file_of, content, manifest = _dataset_under(root)
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
            _get_files(file_of, target, manifest, progress)
            write_file(target / MANIFEST, content)
            there = []
        (target / LOCK).unlink(missing_ok=True)
    if read_manifest(target).dataset_id != manifest.dataset_id:
        sentence = f"{target} already holds another dataset; give another directory"
        raise BuildError(sentence, "out-exists", option="directory", given=target)
    for name, sha256 in files_of(manifest).items() if there else ():  # nothing was copied now
        _require_sound(target / name, sha256)
    return manifest.dataset_id


def local_copy(url: str, *, say: Callable[[str], None] = lambda line: None) -> Path:
    """The directory of this host that has the dataset under a URL: in the cache, and copied there once.

    Of several processes the first one copies, and the others wait for it. The copy is named by the digest of its
    manifest, so another dataset under the same URL is another copy. Nothing removes it; the directory may be deleted
    when nobody reads it. say: called with a line before a copy begins. Raises as `pull` does.
    """
    root = url.rstrip("/")
    file_of, content, manifest = _dataset_under(root)
    target = _cached_copy(content)
    if not (target / MANIFEST).exists():
        make_directory(target)
        with _filling(target):
            if not (target / MANIFEST).exists():
                say(f"copying {root} to {target}")
                _get_files(file_of, target, manifest, lambda done, total: None)
                write_file(target / MANIFEST, content)
    return target


def _cached_copy(manifest: bytes) -> Path:
    """Where the copy of a dataset with this manifest.json is. Its dataset_id may be that of another's manifest, too."""
    return cache_directory() / "datasets" / hashlib.sha256(manifest).hexdigest()[:32]


def _filling(target: Path) -> AbstractContextManager[None]:
    """A context that one process at a time is in; the others wait."""
    return locked(target.with_name(f"{target.name}.lock"), wait=True)


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


def files_of(manifest: Manifest) -> dict[str, str | None]:
    """Name → SHA-256 of every file of a dataset but its manifest; None for commit records, which hold their own."""
    files: dict[str, str | None] = {**manifest.tokenizer, **manifest.tables}
    for shard in manifest.shards:
        files |= {array_path(Path(), shard.name, name).name: entry["sha256"] for name, entry in shard.arrays.items()}
        files[f"{shard.name}.json"] = None
    return files


def _origins_of(directory: Path, manifest: Manifest) -> dict[str, str | None]:
    """The same of the origins that a dataset here has, the record last; nothing if it has none."""
    record = Record.read(directory, manifest)
    return {name: sha256 for name, (sha256, _) in record.files(manifest).items()} | {RECORD: None} if record else {}


def _id_under(root: str) -> str | None:
    """The dataset_id of what is under a URL; None: there is no dataset."""
    try:
        return _manifest_under(root)[2].dataset_id
    except RemoteError as error:
        if error.kind == "not-found":
            return None
        raise


def _dataset_under(root: str) -> tuple[FileOf, bytes, Manifest]:
    """As `_manifest_under`, but raises DatasetError if there is no dataset."""
    try:
        return _manifest_under(root)
    except RemoteError as error:
        if error.kind == "not-found":
            raise not_a_dataset(root) from None
        raise


def _manifest_under(root: str) -> tuple[FileOf, bytes, Manifest]:
    """Name → file, and the manifest, as bytes too."""
    file_of = within(root)
    content = file_of(MANIFEST).read(MAX_RECORD_BYTES)

    def open_table(name: str, dtype: str, length: int) -> np.ndarray:
        raw = file_of(name).read(MAX_RECORD_BYTES)
        if (
            raw[:HEADER_BYTES] != npy_header(dtype, length)
            or len(raw) != HEADER_BYTES + np.dtype(dtype).itemsize * length
        ):
            raise _other_file(f"{root}/{name}")
        return np.frombuffer(raw, dtype, offset=HEADER_BYTES)

    return file_of, content, parse_manifest(content, f"{root}/{MANIFEST}", open_table)


def _other_file(name: str) -> DatasetError:
    sentence = f"{name} is not the file that {MANIFEST} names; push the dataset again"
    return DatasetError(sentence, "damaged", given=name)


def _put_all(source: Path, root: str, manifest: Manifest, before: object, progress: Progress) -> str | None:
    """Puts all files, the manifest last. Returns the dataset_id that is there in the end, which may be another one.

    before: the stamp of manifest.json. A build that replaces the dataset removes it before it touches another file.
    """
    done = _claim(root, manifest)
    there = _id_under(root)  # again: who had the claim before may have finished
    if there is None:
        with _kept(source, root, before):
            _put_files(source, root, manifest, done, progress)
            content = (source / MANIFEST).read_bytes()
        is_mine = stores.create(f"{root}/{MANIFEST}", content)
        there = manifest.dataset_id if is_mine else _id_under(root)
    if there is not None:
        stores.remove(f"{root}/{CLAIM}")
    return there


@contextmanager
def _kept(source: Path, root: str, before: object) -> Iterator[None]:
    """A context that ends in DatasetError if a build has replaced the dataset, whatever error came of that."""
    try:
        yield
    finally:
        if stamp(source / MANIFEST) != before:
            sentence = f"{source} was replaced by a build while it was copied to {root}; push it again"
            raise DatasetError(sentence, "replaced", given=source) from None


def _claim(root: str, manifest: Manifest) -> set[str]:
    """Keeps two programs from putting different datasets under one URL. Returns the files that are there already.

    Raises BuildError if another dataset is being put there, and RemoteError for a store that cannot keep them apart.
    """
    while not stores.create(f"{root}/{CLAIM}", _claimed(manifest, set())):
        if (claim := _read_claim(root)) is None:
            continue  # whoever it was is done meanwhile
        if claim[0] == manifest.dataset_id:
            return claim[1]
        sentence = (
            f"{root} is being filled with another dataset ({claim[0][:16]}); give another URL, or remove {CLAIM} there "
            "if nobody does that any more"
        )
        raise BuildError(sentence, "busy", option="url", given=root)
    if stores.create(f"{root}/{CLAIM}", _claimed(manifest, set())) and _id_under(root) is None:  # else one has ended
        stores.remove(f"{root}/{CLAIM}")
        sentence = f"{root}: the server ignores If-None-Match, so two pushes could mix; push to another store"
        raise RemoteError(sentence, "server-unsuitable", option="url", given=root)
    return set()


def _read_claim(root: str) -> tuple[str, set[str]] | None:
    """The dataset_id of the claim under a URL, and the files that are there as it says; None: there is no claim."""
    try:
        claim = json.loads(stores.read(f"{root}/{CLAIM}", MAX_RECORD_BYTES))
        return str(claim["dataset_id"]), set(map(str, claim["files"]))
    except RemoteError as error:
        if error.kind != "not-found":
            raise
        return None
    except (ValueError, TypeError, KeyError):
        return "unknown", set()


def _require_claim(root: str, manifest: Manifest) -> None:
    """Raises BuildError if this push has lost its claim, as what it puts could replace files of another dataset."""
    claim = _read_claim(root)
    if (claim[0] if claim else _id_under(root)) != manifest.dataset_id:
        sentence = (
            f"{CLAIM} of this push was removed from {root}; run the same command again if nobody else pushes there"
        )
        raise BuildError(sentence, "busy", option="url", given=root)


def _claimed(manifest: Manifest, done: set[str]) -> bytes:
    return json.dumps({"dataset_id": manifest.dataset_id, "files": sorted(done)}).encode()


def _put_files(source: Path, root: str, manifest: Manifest, done: set[str], progress: Progress) -> None:
    """Puts all files but the manifest and those of `done`. The claim says now and then which are there."""
    origins = _origins_of(source, manifest)  # which another push of this dataset may have of other inputs: all go anew
    digests = files_of(manifest) | origins
    size_of = {name: _size_of(source / name) for name in digests}
    there = _sizes_under(root) if done else {}
    done = {name for name in done & size_of.keys() - origins.keys() if there.get(name) == size_of[name]}
    total, num_bytes, unclaimed = sum(size_of.values()), sum(size_of[name] for name in done), 0

    def put(name: str) -> str:
        _require_sound(source / name, digests[name])
        _require_claim(root, manifest)
        stores.write(f"{root}/{name}", source / name)
        return name

    progress(num_bytes, total)
    for name in _at_once(put, [name for name in digests if name not in done]):
        done.add(name)
        num_bytes, unclaimed = num_bytes + size_of[name], unclaimed + size_of[name]
        progress(num_bytes, total)
        if unclaimed >= max(_CLAIMED_EVERY, total // 100):
            _require_claim(root, manifest)
            stores.overwrite(f"{root}/{CLAIM}", _claimed(manifest, done))
            unclaimed = 0
    there = _sizes_under(root)
    if lost := [name for name, size in size_of.items() if there.get(name) != size]:
        sentence = f"{root}/{lost[0]}: the server did not keep this file as it was put; run the same command again"
        raise RemoteError(sentence, "server-failed", given=root)
    _require_claim(root, manifest)


def _sizes_under(root: str) -> dict[str, int]:
    """Name → bytes of every file that is under a URL."""
    folder = f"{root.partition('://')[2].partition('/')[2]}/".removeprefix("/")
    return {path.removeprefix(folder): file.size for path, file in stores.files_below(root, folder).items()}


def _get_files(file_of: FileOf, target: Path, manifest: Manifest, progress: Progress) -> None:
    """Copies all files but the manifest, those that are here excepted, and checks each."""
    _require_own_id(manifest)
    digests, most = files_of(manifest), dict[str, int]()
    for shard in manifest.shards:
        for array, entry in shard.arrays.items():
            name = array_path(Path(), shard.name, array).name
            most[name] = HEADER_BYTES + np.dtype(entry["dtype"]).itemsize * entry["length"]
    total, done, is_over = sum(most.values()), 0, threading.Event()

    def get(name: str) -> int:
        return _copy(lambda: file_of(name), target / name, digests[name], most.get(name, MAX_RECORD_BYTES), is_over)

    try:
        for size in _at_once(get, digests):
            done += size
            progress(min(done, total), total)
        require_own_tokens(target, manifest)
        _get_origins(file_of, target, manifest)
    finally:
        is_over.set()
    fsync_directory(target)


def _get_origins(file_of: FileOf, target: Path, manifest: Manifest) -> None:
    """Copies the origins. A dataset is complete without them, so they are left out if they are not complete."""
    is_over = threading.Event()

    def get(name: str) -> int:
        return _copy(lambda: file_of(name), target / name, *files[name], is_over)

    try:
        origins, content = _origins_under(file_of, manifest)
        if origins:
            files = origins.files(manifest)
            prepare_directory(target, origins.shards)
            for _ in _at_once(get, files, when_failed=is_over.set):  # no other copy may write what is removed below
                pass
            write_file(target / RECORD, content)
            return
    except DatasetError:  # damaged, or of a later version
        pass
    except RemoteError as error:
        if error.kind not in _NO_FILE:
            raise
    finally:
        is_over.set()
    prepare_directory(target, {})


def _require_own_id(manifest: Manifest) -> None:
    """Raises DatasetError if a dataset gives itself the id of another, which `local_copy` would then take it for."""
    if manifest.computed_id() != manifest.dataset_id:
        sentence = (
            f"{MANIFEST} states dataset_id {manifest.dataset_id[:16]}, which is not that of its arrays; make the "
            "dataset again, and push it to another URL"
        )
        raise DatasetError(sentence, "damaged", given=manifest.dataset_id)


def _origins_under(file_of: FileOf, manifest: Manifest) -> tuple[Record | None, bytes]:
    """The record of the origins of a dataset under a URL, as bytes too; None: it has none."""
    try:
        file = file_of(RECORD)
    except RemoteError as error:
        if error.kind not in _NO_FILE:
            raise
        return None, b""
    content = file.read(MAX_RECORD_BYTES)
    return Record.of(parse_record(content, file.name), manifest, file.name), content


def _require_sound(path: Path, sha256: str | None) -> None:
    """Raises DatasetError for a file that is missing or damaged. sha256: None for a record, which has a checksum."""
    if sha256 is None:
        read_record(path)
        return
    try:
        is_sound = digest(path)[0] == sha256
    except FileNotFoundError:
        is_sound = False
    if not is_sound:
        sentence = f"{path} is not the file that {MANIFEST} names; bertdata verify {path.parent} says more"
        raise DatasetError(sentence, "damaged", given=path)


def _size_of(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        sentence = f"{path}, which {MANIFEST} names, is missing; bertdata verify {path.parent} says more"
        raise DatasetError(sentence, "damaged", given=path) from None


def _copy(find: Callable[[], RemoteFile], path: Path, sha256: str | None, most: int, is_over: threading.Event) -> int:
    """Copies a file of at most so many bytes, unless it is here. Returns its size."""
    if sha256 is not None and path.exists() and digest(path)[0] == sha256:
        return path.stat().st_size
    file, temporary, copied = find(), path.with_name(path.name + TEMPORARY), hashlib.sha256()
    if file.size > most:
        raise _other_file(file.name)
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
        raise _other_file(file.name)
    os.replace(temporary, path)
    return file.size


def _at_once(
    do: Callable[[str], _Result], names: Iterable[str], when_failed: Callable[[], None] | None = None
) -> Iterator[_Result]:
    """The results of `do` for all names, as they come.

    After a failure or Ctrl-C nothing new begins, and nobody waits for what has begun, which may take minutes. With
    `when_failed`, which must cut that short, a failure is raised only after it has ended.
    """
    waiting, results = queue.SimpleQueue[str](), queue.SimpleQueue[_Result | BaseException]()
    for name in (names := list(names)):
        waiting.put(name)
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            try:
                results.put(do(waiting.get_nowait()))
            except queue.Empty:
                return
            except BaseException as error:
                is_over.set()
                results.put(error)

    threads = [threading.Thread(target=work, name="transfer", daemon=True) for _ in range(min(_THREADS, len(names)))]
    for thread in threads:
        thread.start()
    try:
        for _ in names:
            if isinstance(result := results.get(), BaseException):
                if when_failed:
                    when_failed()
                    for thread in threads:
                        thread.join()
                raise result
            yield result
    finally:
        is_over.set()
