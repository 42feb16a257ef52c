"""An opened dataset: read-only memory maps of its arrays, and its manifest."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import DatasetError, UsageError, counted, damaged
from bertdata.format.arrays import array_path
from bertdata.format.manifest import MANIFEST, REPLACED, Manifest, read_manifest
from bertdata.format.records import read_content
from bertdata.format.shards import open_one, open_shard

PATIENCE_S = 5.0  # longest wait for a build that replaces the dataset


class Dataset:
    """A published dataset. `bertdata.open(path)` returns one.

    len(dataset) is the number of documents, dataset[i] is `document(i)`, and iterating yields the ids of each document.

    .manifest: the contents of manifest.json (docs/format.md): settings of the build, digests, counts.
    .splits: the nonempty splits by name, in the order train, validation, test.
    .special_tokens: the size of the vocabulary, and the ids of its special tokens.

    Opening makes a few system calls per array, for any dataset size. With more than 1,024 shards, arrays are opened on
    first use. Tokens are read from the disk on first use, and all processes that open the dataset share the memory. A
    Dataset pickles as its path and dataset_id. Unpickling opens the files again, and raises DatasetError if the path
    holds a different dataset.

    Raises DatasetError if the directory is not a dataset, or if a file is missing or has the wrong size.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        # Absolute: files are opened later, after the process may have changed its directory.
        self._directory = Path(os.path.abspath(path))
        self._manifest_path = self._directory / MANIFEST
        self.manifest, self._arrays, self._opened_at = _opened(self.path)
        self.dataset_id: str = self.manifest.dataset_id
        self.splits, self.special_tokens = self.manifest.splits, self.manifest.special_tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (str(self._directory), self.dataset_id)

    def __repr__(self) -> str:
        size = f"{counted(self.num_documents, 'document')}, {counted(self.num_tokens, 'token')}"
        return f"<Dataset {self.path}: {size}>"

    @property
    def num_documents(self) -> int:
        """Number of documents in all splits."""
        return sum(split.num_documents for split in self.splits.values())

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all splits, including separators."""
        return sum(split.num_tokens for split in self.splits.values())

    def tokens(self, split: str, shard: int) -> NDArray[Any]:
        """Return all tokens of shard `shard` of a split: uint16 or uint32 [num_tokens], a view of the file."""
        return self._array(split, shard, "tokens")

    def array(self, shard: str, name: str) -> NDArray[Any]:
        """Return an array of a shard, such as array("train-00000", "documents"): a view of the file.

        Raises UsageError if the dataset does not store it.
        """
        try:
            split = shard.partition("-")[0]
            return self._array(split, self.splits[split].number_of(shard), name)
        except (KeyError, ValueError):
            sentence = f"{self.path} has no array {name} of a shard {shard}; give the names of a shard and of an array"
            raise UsageError(sentence, "unknown", option="name", given=name) from None

    @property
    def opens_at_once(self) -> bool:
        """Whether all arrays are opened with the dataset. Otherwise only arrays of the last used shard are open."""
        return not self.manifest.tables

    def _array(self, split: str, number: int, name: str) -> NDArray[Any]:
        arrays, key, fault = self._arrays, (split, number, name), None
        if self.opens_at_once or key in arrays:
            return arrays[key]
        try:
            array = open_one(self._directory, self.splits[split][number], name)
        except DatasetError as error:
            fault = error
        if stamp(self._manifest_path) != self._opened_at:  # a build removes the manifest before it changes any file
            sentence = f"{self.path} was replaced by a build while it was read; open it again"
            raise DatasetError(sentence, "replaced", given=self.path)
        if fault:
            raise fault
        self._arrays = {each: open_array for each, open_array in arrays.items() if each[:2] == key[:2]} | {key: array}
        return array

    def document(self, index: int) -> NDArray[Any]:
        """Return the ids of a document, without its separator: uint16 or uint32 [n], a read-only view of the file.

        index: index over all documents, in the order of splits and shards; a negative index counts from the end.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        name, number, local = self.manifest.shard_of(index % len(self))
        offsets, tokens = self._array(name, number, "documents"), self._array(name, number, "tokens")
        start, stop = int(offsets[local]), int(offsets[local + 1])
        if not start < stop <= tokens.size:
            path = array_path(self.path, self.splits[name][number].name, "documents")
            raise damaged(path, f"document {local} has the offsets {start} to {stop}")
        has_separator = self.special_tokens.separator is not None
        return tokens[start : stop - has_separator]

    def __len__(self) -> int:
        return self.num_documents

    def __getitem__(self, index: int) -> NDArray[Any]:
        return self.document(index)

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self.document(index) for index in range(len(self)))

    def token_counts(self, split: str, *, sample_tokens: int = 10_000_000) -> NDArray[np.int64]:
        """Count each id in a sample of at most about `sample_tokens` evenly spaced tokens: int64 [vocab_size]."""
        vocab_size = self.special_tokens.vocab_size
        step = 1 + self.splits[split].num_tokens // sample_tokens
        every = 4096 * step
        counts = np.zeros(vocab_size, np.int64)
        first = 0  # start of the next sampled run in the shard
        for shard, size in enumerate(np.diff(self.splits[split].first_tokens).tolist()):
            starts = range(first, size, every)
            tokens = self.tokens(split, shard) if starts else None
            for start in starts:
                piece = tokens[start : start + 4096]  # type: ignore[index]  # there are tokens where there are starts
                if piece.max() >= vocab_size:
                    raise damaged(self.path)
                counts += np.bincount(piece, minlength=vocab_size)
            first = (first - size) % every if step > 1 and size < every else 0
        return counts

    def tokenizer_file(self, name: str) -> bytes:
        """Return the contents of tokenizer.json or tokenizer_config.json.

        Raises DatasetError if the file cannot be read or belongs to a different dataset.
        """
        path = self._directory / name
        content = read_content(path)  # a longer file has a different digest
        if hashlib.sha256(content).hexdigest() != self.manifest.tokenizer.get(name):
            raise damaged(path, f"it does not match {MANIFEST}")
        return content


def _opened(directory: Path) -> tuple[Manifest, dict[tuple[str, int, str], Any], Any]:
    """Return the manifest, its arrays by (split, index of the shard, name of the array), and its stamp.

    Leaves the arrays of a dataset with many shards closed. A build that replaces a dataset removes the manifest before
    it changes any other file (docs/format.md). So the arrays belong to the manifest if it is the same before and after
    they are opened. Otherwise this function waits for the new manifest.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        before = stamp(directory / MANIFEST)
        try:
            manifest = read_manifest(directory)
            arrays = {
                (split, number, name): array
                for split, each in ({} if manifest.tables else manifest.splits).items()
                for number, shard in enumerate(each)
                for name, array in open_shard(directory, shard).items()
            }
            fault = None
        except DatasetError as error:
            fault = error
        # A build removes REPLACED after it writes the new manifest, so the order of these checks matters. Next to a
        # manifest, ignore REPLACED: a build was killed before it removed that file.
        is_replacing = before is None and (directory / REPLACED).exists()
        stayed = not is_replacing and stamp(directory / MANIFEST) == before
        stayed = stayed and not (before is None and (directory / REPLACED).exists())
        if fault is None and stayed:
            return manifest, arrays, before
        if stayed and fault:
            raise fault
        if time.monotonic() > deadline:
            sentence = f"{directory} is being replaced by a build; open it when the build is done"
            raise DatasetError(f"{sentence}, or repeat that build if it has ended", "busy", given=directory)
        time.sleep(0.02)


def stamp(path: Path) -> tuple[int, int, int] | None:
    """Return (inode, modification time, size) of a file, which identify its version; None if the file is missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _reopen(path: str, dataset_id: str) -> Dataset:
    dataset = Dataset(path)
    if dataset.dataset_id != dataset_id:
        there = dataset.dataset_id
        sentence = f"{path} was rebuilt: it now has dataset {there}, not {dataset_id}; open it again"
        raise DatasetError(sentence, "replaced", given=there)
    return dataset
