"""A split of a dataset → files of other libraries: all documents in order, and the ids as they are stored."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from bertdata.choices import EXPORT_FORMATS
from bertdata.errors import BuildError, UsageError, damaged, require_known
from bertdata.files import TEMPORARY, fsync_directory, make_directory, naming, open_plain
from bertdata.format.dataset import Dataset
from bertdata.format.manifest import Shard
from bertdata.sources.idfile import in_blocks, slices_of
from bertdata.sources.megatron import MEGATRON_DTYPES, MEGATRON_HEADER, MEGATRON_MAGIC
from bertdata.sources.rows import write_parquet
from bertdata.urls import require_local_output

_PIECE = 1 << 20  # ids or offsets that are written at a time
_SMALL_VOCABULARY = 65500  # below it Megatron stores uint16
Advance = Callable[[int], None]  # takes a number of ids that are done


def export(
    dataset: Dataset,
    out: str | Path,
    *,
    format: str,
    split: str = "train",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Path]:
    """Writes a split, and returns the files. A separator is part of its document.

    format: "megatron" writes `out`.bin and then `out`.idx; a sequence is a sentence if the dataset has sentences, else
    a document. "parquet" writes a file for each shard into directory `out`, and a row for each document. progress:
    called with the bytes of ids that are done, and of all. Takes 16 bytes of memory a document of a shard.

    Raises UsageError if the dataset has no such split, BuildError if a file exists already, DatasetError for damage.
    """
    require_local_output(str(out))
    require_known("format", format, EXPORT_FORMATS)
    if split not in dataset.splits:
        sentence = f"{dataset.path} has no split {split!r}; give one of {', '.join(dataset.splits)}"
        raise UsageError(sentence, "no-split", option="split", given=split)
    num_done, total = 0, dataset.splits[split].num_tokens
    itemsize = np.dtype(dataset.manifest.token_dtype).itemsize

    def advance(num_ids: int) -> None:
        nonlocal num_done
        num_done += num_ids
        progress(num_done * itemsize, total * itemsize)

    return (_megatron if format == "megatron" else _parquet)(dataset, split, str(out), advance)


def _megatron(dataset: Dataset, split: str, prefix: str, advance: Advance) -> list[Path]:
    shards, settings = dataset.splits[split].shards, dataset.manifest.settings
    small = dataset.special_tokens.vocab_size < _SMALL_VOCABULARY
    stored = settings.get("dtype", "uint16" if small else "int32")
    code = next((code for code, name in MEGATRON_DTYPES.items() if name == stored), None)
    if code is None:
        raise damaged(dataset.path)
    dtype = np.dtype(stored)
    stores = "documents" if any(shard.num_sentences is None for shard in shards) else "sentences"
    num_sequences = sum(shard.arrays[stores]["length"] - 1 for shard in shards)
    num_documents = sum(shard.num_documents + _empty(dataset, shard).size for shard in shards)
    data, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    make_directory(data.parent)
    with _new_files(data, index) as (new_data, new_index), _written(new_index) as index_file:
        with _written(new_data) as data_file:
            for number in range(len(shards)):
                tokens = dataset.tokens(split, number)
                for start in range(0, tokens.size, _PIECE):
                    piece = tokens[start : start + _PIECE]
                    data_file.write(piece.astype(dtype).data)
                    advance(piece.size)
        index_file.write(struct.pack(MEGATRON_HEADER, MEGATRON_MAGIC, 1, code, num_sequences, num_documents + 1))
        for _, sequences in _pieces(dataset, shards, stores):
            lengths = np.diff(sequences)
            _require_lengths(dataset, lengths)
            index_file.write(lengths.astype("<i4").data)
        for first_id, sequences in _pieces(dataset, shards, stores):
            index_file.write(((first_id + sequences[:-1]) * dtype.itemsize).astype("<i8").data)
        before = 0
        for shard in shards:
            sequences = dataset.array(shard.name, stores)
            indices = np.searchsorted(sequences, _offsets(dataset, shard).astype(sequences.dtype))
            index_file.write((before + indices[:-1]).astype("<i8").data)
            before += sequences.size - 1
        index_file.write(np.array([before], "<i8").data)
    return [data, index]


def _parquet(dataset: Dataset, split: str, out: str, advance: Advance) -> list[Path]:
    directory = Path(out)
    make_directory(directory)
    shards = dataset.splits[split].shards
    paths = [directory / f"{shard.name}.parquet" for shard in shards]
    with _new_files(*paths) as temporaries:
        for number, (shard, temporary) in enumerate(zip(shards, temporaries, strict=True)):
            tokens, offsets = dataset.tokens(split, number), _offsets(dataset, shard)
            _require_lengths(dataset, np.diff(offsets))
            with _written(temporary) as file:
                write_parquet(file, _documents(tokens, offsets, advance))
    return paths


def _documents(
    tokens: NDArray[Any], offsets: NDArray[np.int64], advance: Advance
) -> Iterator[tuple[NDArray[Any], NDArray[np.int64]]]:
    """Some documents of a shard at a time: their ids, and their offsets in them."""
    for _, some in in_blocks(offsets.size - 1, slices_of(offsets)):
        yield tokens[int(some[0]) : int(some[-1])], some - some[0]
        advance(int(some[-1] - some[0]))


def _pieces(dataset: Dataset, shards: Sequence[Shard], array: str) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Some offsets of an array at a time, each time with the next one, and how many ids are in the shards before."""
    first_id = 0
    for shard in shards:
        offsets = dataset.array(shard.name, array)
        for start in range(0, offsets.size - 1, _PIECE):
            yield first_id, offsets[start : start + _PIECE + 1].astype(np.int64)
        first_id += shard.num_tokens


def _offsets(dataset: Dataset, shard: Shard) -> NDArray[np.int64]:
    """The offsets of the documents of a shard, with those that have no id where they were. Checked to ascend."""
    offsets, empty = dataset.array(shard.name, "documents").astype(np.int64), _empty(dataset, shard)
    if empty.size and not 0 <= empty.min() <= empty.max() < offsets.size:
        raise damaged(dataset.path)
    offsets = np.insert(offsets, empty, offsets[empty])
    if (np.diff(offsets) < 0).any():
        raise damaged(dataset.path)
    return offsets


def _empty(dataset: Dataset, shard: Shard) -> NDArray[np.int64]:
    """How many documents of a shard come before each one that has no id."""
    if "empty" not in shard.arrays:
        return np.zeros(0, np.int64)
    counts: NDArray[np.int64] = dataset.array(shard.name, "empty").astype(np.int64)
    return counts


def _require_lengths(dataset: Dataset, lengths: NDArray[np.int64]) -> None:
    if lengths.min(initial=0) < 0:
        raise damaged(dataset.path)
    if (most := lengths.max(initial=0)) >= 1 << 31:
        sentence = f"{dataset.path} has a document of {most:,} ids, but the format holds 2^31 - 1; build shorter ones"
        raise BuildError(sentence, "too-large", option="format")


@contextmanager
def _new_files(*paths: Path) -> Iterator[list[Path]]:
    """Names for the files to write, which get their own names when all are complete; else nothing is left of them.

    The last file gets its name last, after the directory was synced. So where its temporary name is, an export was
    killed between the first and the last name, and what it named is written again. Raises BuildError if another file
    exists already.
    """
    directory, temporaries = paths[0].parent, [path.with_name(path.name + TEMPORARY) for path in paths]
    _remove_unfinished(paths, temporaries)
    if existing := next((path for path in paths if path.exists()), None):
        sentence = f"{existing} exists already; remove it, or give another --out"
        raise BuildError(sentence, "out-exists", option="out", given=str(existing))
    named: list[Path] = []
    try:
        yield temporaries
        for temporary, path in zip(temporaries, paths, strict=True):
            if path in (paths[0], paths[-1]):
                fsync_directory(directory)
            named.append(path)
            os.replace(temporary, path)
    except BaseException:
        for path in (*named, *temporaries):  # the temporary name of the last file at the end, if no removal fails
            path.unlink(missing_ok=True)
        raise
    fsync_directory(directory)


def _remove_unfinished(paths: Sequence[Path], temporaries: Sequence[Path]) -> None:
    """Removes the files that a killed export named, if it did not come to the last one."""
    if not temporaries[-1].exists():
        return
    pairs = zip(paths, temporaries, strict=True)
    if named := [path for path, temporary in pairs if path.exists() and not temporary.exists()]:
        for path in named:
            path.unlink()
        fsync_directory(paths[0].parent)


@contextmanager
def _written(temporary: Path) -> Iterator[IO[bytes]]:
    """A file that is synced at its end."""
    with naming(temporary), open_plain(temporary, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
