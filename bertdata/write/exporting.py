"""A split of a dataset → Parquet: all documents in order, and the ids as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import BuildError, UsageError, damaged
from bertdata.files import TEMPORARY, Stage, fsync_directory, make_directory, sync
from bertdata.format.dataset import Dataset
from bertdata.format.manifest import Shard
from bertdata.sources.ids import in_blocks, write_parquet
from bertdata.urls import require_local_output


def export(
    dataset: Dataset,
    out: str | Path,
    *,
    split: str = "train",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Path]:
    """Write a Parquet file for each shard of a split into directory `out`, and return the files.

    A row is a document, its separator included: the column `input_ids`, a list of int32. progress: called with the
    bytes of ids that are done, and of all. Takes 16 bytes of memory a document of a shard.

    Raises UsageError if the dataset has no such split, BuildError if a file exists already, DatasetError for damage.
    """
    require_local_output(str(out))
    if split not in dataset.splits:
        sentence = f"{dataset.path} has no split {split!r}; give one of {', '.join(dataset.splits)}"
        raise UsageError(sentence, "no-split", option="split", given=split)
    shards, directory, num_done = dataset.splits[split], Path(out), 0
    itemsize, total = np.dtype(dataset.manifest.token_dtype).itemsize, dataset.splits[split].num_tokens

    def documents(ids: NDArray[Any], offsets: NDArray[np.int64]) -> Iterator[tuple[NDArray[Any], NDArray[np.int64]]]:
        nonlocal num_done
        for _, some in in_blocks(offsets):
            yield ids[int(some[0]) : int(some[-1])], some - some[0]
            num_done += int(some[-1] - some[0])
            progress(num_done * itemsize, total * itemsize)

    make_directory(directory)
    paths = [directory / f"{shard.name}.parquet" for shard in shards]
    _require_new(paths)
    with Stage(directory) as stage:
        for number, (shard, path) in enumerate(zip(shards, paths, strict=True)):
            with stage.open(path.name) as file:
                write_parquet(file, documents(dataset.tokens(split, number), _offsets(dataset, shard)))
                sync(file)
        fsync_directory(directory)  # the next export finds the last file under its temporary name
        try:
            stage.publish()
        except BaseException:
            for path in paths:
                path.unlink(missing_ok=True)
            raise
    return paths


def _offsets(dataset: Dataset, shard: Shard) -> NDArray[np.int64]:
    """Return the offsets of the documents of a shard, with those that have no id where they were, checked to ascend."""
    offsets = dataset.array(shard.name, "documents").astype(np.int64)
    if "empty" in shard.arrays:  # how many documents come before each one that has no id
        empty = dataset.array(shard.name, "empty").astype(np.int64)
        if empty.size and not 0 <= empty.min() <= empty.max() < offsets.size:
            raise damaged(dataset.path)
        offsets = np.insert(offsets, empty, offsets[empty])
    if np.diff(offsets).min(initial=0) < 0:
        raise damaged(dataset.path)
    return offsets


def _require_new(paths: Sequence[Path]) -> None:
    """Raises BuildError if a file exists that no export left.

    Where the last file has a temporary name, an export was killed before it gave that name, and a file without one is
    complete and written again.
    """
    temporary = {path: path.with_name(path.name + TEMPORARY) for path in paths}
    if temporary[paths[-1]].exists() and not paths[-1].exists():
        for path in paths:
            if path.exists() and not temporary[path].exists():
                path.unlink()
        fsync_directory(paths[0].parent)
    if existing := next((path for path in paths if path.exists()), None):
        sentence = f"{existing} exists already; remove it, or give another --out"
        raise BuildError(sentence, "out-exists", option="out", given=str(existing))
