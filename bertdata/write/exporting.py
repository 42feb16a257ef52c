"""A split of a dataset → Parquet: all documents in order, and the ids as they are stored."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import BuildError, UsageError, damaged
from bertdata.files import TEMPORARY, fsync_directory, make_directory, naming, open_plain
from bertdata.format.dataset import Dataset
from bertdata.format.manifest import Shard
from bertdata.sources.idfile import in_blocks, slices_of
from bertdata.sources.rows import write_parquet
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
    shards, directory, num_done = dataset.splits[split].shards, Path(out), 0
    itemsize, total = np.dtype(dataset.manifest.token_dtype).itemsize, dataset.splits[split].num_tokens

    def documents(ids: NDArray[Any], offsets: NDArray[np.int64]) -> Iterator[tuple[NDArray[Any], NDArray[np.int64]]]:
        nonlocal num_done
        for _, some in in_blocks(offsets.size - 1, slices_of(offsets)):
            yield ids[int(some[0]) : int(some[-1])], some - some[0]
            num_done += int(some[-1] - some[0])
            progress(num_done * itemsize, total * itemsize)

    make_directory(directory)
    with _new_files([directory / f"{shard.name}.parquet" for shard in shards]) as names:
        for number, (shard, (temporary, _)) in enumerate(zip(shards, names, strict=True)):
            rows = documents(dataset.tokens(split, number), _offsets(dataset, shard))
            with naming(temporary), open_plain(temporary, "wb") as file:
                write_parquet(file, rows)
                file.flush()
                os.fsync(file.fileno())
    return [path for _, path in names]


def _offsets(dataset: Dataset, shard: Shard) -> NDArray[np.int64]:
    """Return the offsets of the documents of a shard, with those that have no id where they were, checked to ascend."""
    offsets = dataset.array(shard.name, "documents").astype(np.int64)
    if "empty" in shard.arrays:  # how many documents come before each one that has no id
        empty = dataset.array(shard.name, "empty").astype(np.int64)
        if empty.size and not 0 <= empty.min() <= empty.max() < offsets.size:
            raise damaged(dataset.path)
        offsets = np.insert(offsets, empty, offsets[empty])
    lengths = np.diff(offsets)
    if lengths.min(initial=0) < 0:
        raise damaged(dataset.path)
    if (most := lengths.max(initial=0)) >= 1 << 31:
        sentence = f"{dataset.path} has a document of {most:,} ids, but a row holds 2^31 - 1; build shorter ones"
        raise BuildError(sentence, "too-large", option="shards")
    return offsets


@contextmanager
def _new_files(paths: Sequence[Path]) -> Iterator[list[tuple[Path, Path]]]:
    """Give temporary names for files, and name them when all are complete; after a failure nothing is left of them.

    Yields pairs of a temporary name and a name. The last file gets its name last, after the directory was synced. So
    where its temporary name is, an export was killed between the first and the last name, and what it named is written
    again. Raises BuildError if another file exists already.
    """
    directory, names = paths[0].parent, [(path.with_name(path.name + TEMPORARY), path) for path in paths]
    if names[-1][0].exists():
        for temporary, path in names:
            if path.exists() and not temporary.exists():
                path.unlink()
        fsync_directory(directory)
    if existing := next((path for path in paths if path.exists()), None):
        sentence = f"{existing} exists already; remove it, or give another --out"
        raise BuildError(sentence, "out-exists", option="out", given=str(existing))
    named: list[Path] = []
    try:
        yield names
        for temporary, path in names:
            if path in (paths[0], paths[-1]):
                fsync_directory(directory)
            named.append(path)
            os.replace(temporary, path)
    except BaseException:
        for path in (*named, *(temporary for temporary, _ in names)):  # the last temporary name last
            path.unlink(missing_ok=True)
        raise
    fsync_directory(directory)
