"""The files of a dataset, here or under a URL: which there are, whether each is sound, and several at the same time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np

from bertdata.errors import DatasetError, RemoteError, damaged
from bertdata.format.arrays import HEADER_BYTES, array_name, digest, file_bytes, npy_header
from bertdata.format.manifest import MANIFEST, Manifest, not_a_dataset, parse_manifest
from bertdata.format.records import MAX_RECORD_BYTES, read_record
from bertdata.remote.files import within
from bertdata.remote.reader import RemoteFile

THREADS = 8  # files at the same time
Progress = Callable[[int, int], None]
"""Is called with the bytes that are done, and all."""
FileOf = Callable[[str], RemoteFile]
_Result = TypeVar("_Result")


def files_of(manifest: Manifest) -> dict[str, str | None]:
    """Name → SHA-256 of every file of a dataset but its manifest; None for commit records, which hold their own."""
    files: dict[str, str | None] = {**manifest.tokenizer, **manifest.tables}
    for shard in manifest.shards:
        files |= {array_name(shard.name, name): entry["sha256"] for name, entry in shard.arrays.items()}
        files[f"{shard.name}.json"] = None
    return files


def array_sizes(manifest: Manifest) -> dict[str, int]:
    """Return name → bytes of the file of each array."""
    return {
        array_name(shard.name, array): file_bytes(entry)
        for shard in manifest.shards
        for array, entry in shard.arrays.items()
    }


def require_own_id(manifest: Manifest) -> None:
    """Raises DatasetError if a dataset gives itself the id of another, which `local_copy` would then take it for."""
    if manifest.computed_id() != manifest.dataset_id:
        why = f"its dataset_id {manifest.dataset_id[:16]} is not that of its arrays"
        raise damaged(MANIFEST, why)


def require_sound(path: Path, sha256: str | None) -> None:
    """Raises DatasetError for a file that is missing or damaged. sha256: None for a record, which has a checksum."""
    if sha256 is None:
        read_record(path)
        return
    try:
        is_sound = digest(path)[0] == sha256
    except FileNotFoundError:
        is_sound = False
    if not is_sound:
        raise damaged(path, f"it is not the file that {MANIFEST} names")


def other_file(name: str) -> DatasetError:
    return damaged(name, f"it is not the file that {MANIFEST} names")


def id_under(root: str) -> str | None:
    """The dataset_id of what is under a URL; None: there is no dataset."""
    try:
        return dataset_under(root)[2].dataset_id
    except DatasetError as error:
        if error.kind == "not-a-dataset":
            return None
        raise


def dataset_under(root: str) -> tuple[FileOf, bytes, Manifest]:
    """Name → file, and the manifest, as bytes too. Raises DatasetError if there is no dataset."""
    try:
        file_of = within(root)
        content = file_of(MANIFEST).read(MAX_RECORD_BYTES)
    except RemoteError as error:
        if error.kind == "not-found":
            raise not_a_dataset(root) from None
        raise

    def open_table(name: str, dtype: str, length: int) -> np.ndarray:
        raw = file_of(name).read(MAX_RECORD_BYTES)
        if (
            raw[:HEADER_BYTES] != npy_header(dtype, length)
            or len(raw) != HEADER_BYTES + np.dtype(dtype).itemsize * length
        ):
            raise other_file(f"{root}/{name}")
        return np.frombuffer(raw, dtype, offset=HEADER_BYTES)

    return file_of, content, parse_manifest(content, f"{root}/{MANIFEST}", open_table)


def at_once(do: Callable[[str], _Result], names: Iterable[str]) -> Iterator[_Result]:
    """The results of `do` for all names, as they come.

    After a failure or Ctrl-C nothing new begins, and nobody waits for what has begun, which may take minutes.
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

    for _ in range(min(THREADS, len(names))):
        threading.Thread(target=work, name="transfer", daemon=True).start()
    try:
        for _ in names:
            if isinstance(result := results.get(), BaseException):
                raise result
            yield result
    finally:
        is_over.set()
