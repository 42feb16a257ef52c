"""A published dataset, opened: read-only memory maps and the facts of its manifest.

Opening costs a few system calls per array whatever the corpus holds, and no page of tokens is read until it is used;
every process that opens the dataset shares the same pages. A Dataset pickles as its path and id, and opens its files
anew on the other side, where another dataset in the same place is refused.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import DatasetError
from bertdata.manifest import ARRAY_DTYPES, Manifest, Shard, Split, read_manifest
from bertdata.shard import array_path, open_array
from bertdata.types import SpecialTokens


class Dataset:
    """`bertdata.open(path)`. len() counts documents; iteration gives each one's ids."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._manifest = read_manifest(self.path)
        self.dataset_id: str = self._manifest.dataset_id
        self._arrays: dict[tuple[str, str], NDArray[Any]] = {}
        shards = [shard for split in self.splits.values() for shard in split.shards]
        self._shards = shards
        self._first_documents = [0, *accumulate(shard.num_documents for shard in shards)]
        for shard in shards:
            for name, array in open_shard(self.path, shard).items():
                self._arrays[shard.name, name] = array

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (str(self.path), self.dataset_id)

    def __repr__(self) -> str:
        return f"<Dataset {self.path}: {self.num_documents:,} documents, {self.num_tokens:,} tokens>"

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def splits(self) -> Mapping[str, Split]:
        """Name → Split, in the order train, validation, test; a split without documents is absent."""
        return self._manifest.splits

    @property
    def special_tokens(self) -> SpecialTokens:
        return self._manifest.special_tokens

    @property
    def num_documents(self) -> int:
        return self._first_documents[-1]

    @property
    def num_tokens(self) -> int:
        """Tokens stored, separators included."""
        return sum(split.num_tokens for split in self.splits.values())

    def tokens(self, split: str, shard: int) -> NDArray[Any]:
        """All tokens of one shard of a split: uint16 or uint32 [num_tokens], a view of the file."""
        return self._arrays[self.splits[split].shards[shard].name, "tokens"]

    def array(self, shard: str, name: str) -> NDArray[Any]:
        """One array of a shard by name, such as array("train-00000", "documents"); a view of the file."""
        return self._arrays[shard, name]

    def document(self, index: int) -> NDArray[Any]:
        """The ids of document `index` in manifest order, without separator: a read-only view, uint16 or uint32 [n]."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        index %= len(self)
        at = bisect.bisect_right(self._first_documents, index) - 1
        shard = self._shards[at]
        offsets = self._arrays[shard.name, "documents"]
        local = index - self._first_documents[at]
        start, stop = int(offsets[local]), int(offsets[local + 1])
        if not start < stop <= shard.num_tokens:
            raise DatasetError(
                f"{array_path(self.path, shard.name, 'documents')} is damaged: document {local} is [{start}, {stop})"
            )
        has_separator = self.special_tokens.separator is not None
        return self._arrays[shard.name, "tokens"][start : stop - has_separator]

    def __len__(self) -> int:
        return self.num_documents

    def __getitem__(self, index: int) -> NDArray[Any]:
        return self.document(index)

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self.document(index) for index in range(len(self)))

    def token_counts(self, split: str, *, sample_tokens: int = 10_000_000) -> NDArray[np.int64]:
        """How often each id occurs, int64 [vocab_size], over at most about `sample_tokens` evenly spaced tokens."""
        vocab_size = self.special_tokens.vocab_size
        step = 1 + self.splits[split].num_tokens // sample_tokens
        counts = np.zeros(vocab_size, np.int64)
        for shard in range(len(self.splits[split].shards)):
            tokens = self.tokens(split, shard)
            for start in range(0, tokens.size, 4096 * step):
                piece = tokens[start : start + 4096]
                if piece.max() >= vocab_size:
                    raise DatasetError(f"{self.path} is damaged; bertdata verify says where")
                counts += np.bincount(piece, minlength=vocab_size)
        return counts

    def continues(self) -> NDArray[np.bool_]:
        """By id, bool [vocab_size]: whether it goes on with the word before it.

        That is told by its spelling: the continuing prefix of WordPiece ("##"), or the lack of the mark that begins
        words in byte-level and SentencePiece vocabularies ("Ġ", "▁"). In a vocabulary without marks every token is a
        word. Raises DatasetError if the tokenizer cannot be read.
        """
        path = self.path / "tokenizer.json"
        try:
            model = json.loads(path.read_bytes())["model"]
            spelled = model["vocab"] if isinstance(model["vocab"], dict) else [token for token, _ in model["vocab"]]
            ids = spelled if isinstance(spelled, dict) else {token: number for number, token in enumerate(spelled)}
            prefix = model.get("continuing_subword_prefix")
        except (OSError, ValueError, KeyError, TypeError):
            raise DatasetError(f"{path} cannot be read; bertdata verify says why") from None
        begins = ("Ġ", "▁", "Ċ", "ĉ")  # the last two: a line end and a tab in byte-level vocabularies
        marked = any(token.startswith(begins) for token in ids)
        found = np.zeros(self.special_tokens.vocab_size, np.bool_)
        for token, token_id in ids.items():
            found[token_id] = token.startswith(prefix) if prefix else marked and not token.startswith(begins)
        return found


def open_shard(directory: Path, shard: Shard) -> dict[str, NDArray[Any]]:
    """The arrays of a shard by name, checked for size, header, first and last offset. Raises DatasetError."""
    arrays = {}
    for name in ARRAY_DTYPES.keys() & shard.arrays.keys():
        entry, path = shard.arrays[name], array_path(directory, shard.name, name)
        array = arrays[name] = open_array(path, entry["dtype"], entry["length"])
        if name in ("documents", "sentences") and (array[0] != 0 or array[-1] != shard.num_tokens):
            raise DatasetError(
                f"{path} is damaged: its offsets run from {array[0]} to {array[-1]}, not from 0 to {shard.num_tokens}"
            )
    return arrays


def _reopen(path: str, dataset_id: str) -> Dataset:
    dataset = Dataset(path)
    if dataset.dataset_id != dataset_id:
        raise DatasetError(f"{path} now holds dataset {dataset.dataset_id}, not {dataset_id}; it was rebuilt meanwhile")
    return dataset
