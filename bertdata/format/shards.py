"""The shards of a dataset: columns in memory, a list or two tables in a manifest, and array files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import damaged
from bertdata.files import Stage
from bertdata.format.arrays import ArrayWriter, array_file, array_path, npy_header, open_array
from bertdata.format.records import FORMAT_VERSION, sealed_record

TABLE, DIGESTS = "shards.npy", "digests.npy"
DTYPES = {TABLE: "<u8", DIGESTS: "|u1"}
ARRAY_DTYPES = {
    "tokens": ("<u2", "<u4"),
    "documents": ("<u8",),
    "sentences": ("<u8",),
    "words": ("|u1",),
    "empty": ("<u8",),
}
_IN_TABLES = ARRAY_DTYPES.keys() - {"empty"}  # their lengths follow from the numbers of documents, tokens and sentences
_ANY_DTYPE = r"[<|](b1|[iu][1248]|f[248]|c8)"  # dtypes of arrays with unknown names
SPLITS = ("train", "validation", "test")
_COLUMNS = 4  # columns of TABLE: number in the shard's name, its documents, tokens and sentences
_DIGEST_BYTES = 32
_ROWS_AT_ONCE = 1024
_LARGEST = 1 << 62
OpenTable = Callable[[str, str, int], NDArray[Any]]
"""(name, dtype, length) of a table → its elements. Raises DatasetError if the file is different."""


@dataclass(frozen=True)
class Shard:
    """The entry of one shard in a manifest."""

    name: str
    num_documents: int
    num_tokens: int  # separators included
    num_sentences: int | None  # None: sentences are not stored
    arrays: Mapping[str, Mapping[str, Any]]  # name → dtype, length, sha256


@dataclass(eq=False, repr=False)
class Split(Sequence[Shard]):
    """A split (train, validation or test) of at least one shard, stored as columns. Makes each Shard on demand."""

    name: str
    numbers: NDArray[np.int64]  # [num_shards, 4]: the rows of TABLE
    arrays: Sequence[tuple[str, str]]  # name and dtype of each array of a shard
    lengths: NDArray[np.int64]  # [num_shards, num_arrays]: lengths; -1 for a missing array
    read_digests: Callable[[], NDArray[np.uint8]]

    @classmethod
    def from_shards(cls, shards: Sequence[Shard]) -> Split:
        """Return the split of some shards, as columns."""
        numbers = [
            (int(each.name.rpartition("-")[2]), each.num_documents, each.num_tokens, each.num_sentences or 0)
            for each in shards
        ]
        rows = [{(name, entry["dtype"]): entry for name, entry in each.arrays.items()} for each in shards]
        arrays = list(dict.fromkeys(array for row in rows for array in row))
        missing = {"length": -1, "sha256": "00" * _DIGEST_BYTES}
        entries = [row.get(array, missing) for row in rows for array in arrays]
        lengths = np.array([entry["length"] for entry in entries], np.int64).reshape(len(rows), -1)
        digests = np.frombuffer(bytes.fromhex("".join(entry["sha256"] for entry in entries)), np.uint8)
        digests = digests.reshape(len(rows), -1, _DIGEST_BYTES)
        split = shards[0].name.rpartition("-")[0]
        return cls(split, np.array(numbers, np.int64), arrays, lengths, lambda: digests)

    @classmethod
    def joined(cls, parts: Sequence[Split]) -> Split:
        """Return the shards of all parts of a split, in the order of their numbers."""
        numbers = np.concatenate([part.numbers for part in parts])
        arrays = list(dict.fromkeys(array for part in parts for array in part.arrays))
        lengths = np.full((len(numbers), len(arrays)), -1)
        digests = np.zeros((*lengths.shape, _DIGEST_BYTES), np.uint8)
        order = np.argsort(numbers[:, 0], kind="stable")
        rows = np.split(np.argsort(order), np.cumsum([*map(len, parts)]))
        for part, some in zip(parts, rows, strict=False):
            place = some[:, None], [arrays.index(array) for array in part.arrays]
            lengths[place], digests[place] = part.lengths, part.digests
        return cls(parts[0].name, numbers[order], arrays, lengths, lambda: digests)

    @cached_property
    def digests(self) -> NDArray[np.uint8]:
        """uint8 [num_shards, num_arrays, 32]: the SHA-256 of each file."""
        return self.read_digests()

    @cached_property
    def first_documents(self) -> NDArray[np.int64]:
        """int64 [num_shards + 1]: the index of the first document of each shard, then the number of all documents."""
        return np.append(0, np.cumsum(self.numbers[:, 1]))

    @cached_property
    def first_tokens(self) -> NDArray[np.int64]:
        """int64 [num_shards + 1]: the index of each shard's first token, then the number of tokens, with separators."""
        return np.append(0, np.cumsum(self.numbers[:, 2]))

    @property
    def num_documents(self) -> int:
        return int(self.first_documents[-1])

    @property
    def num_tokens(self) -> int:
        return int(self.first_tokens[-1])

    @property
    def has_pairs(self) -> bool:
        """Whether pairs of segments can be made: sentences are stored, and there are two documents."""
        return self.stores("sentences") and self.num_documents > 1

    @property
    def shards(self) -> Split:
        """The shards of the split, in order."""
        return self

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        return tuple(self._shards(index)) if isinstance(index, slice) else next(self._shards([index]))

    def __iter__(self) -> Iterator[Shard]:
        slices = (slice(first, first + _ROWS_AT_ONCE) for first in range(0, len(self), _ROWS_AT_ONCE))
        return chain.from_iterable(map(self._shards, slices))

    def _shards(self, index: Any) -> Iterator[Shard]:
        rows = self.numbers[index].tolist(), self.lengths[index].tolist(), self.digests[index]
        for (unit, documents, tokens, sentences), lengths, digests in zip(*rows, strict=True):
            text = digests.tobytes().hex()
            arrays = {
                name: {"dtype": dtype, "length": length, "sha256": text[64 * number : 64 * number + 64]}
                for number, ((name, dtype), length) in enumerate(zip(self.arrays, lengths, strict=True))
                if length >= 0
            }
            num_sentences = sentences if "sentences" in arrays else None
            yield Shard(shard_name(self.name, unit), documents, tokens, num_sentences, arrays)

    def number_of(self, name: str) -> int:
        """Return the index of a shard in the split, by its name. Raises KeyError if there is none."""
        unit = int(name.removeprefix(f"{self.name}-"))
        number = int(np.searchsorted(self.numbers[:, 0], unit))
        if number == len(self) or self.numbers[number, 0] != unit:
            raise KeyError(name)
        return number

    def stores(self, array: str) -> bool:
        """Return whether every shard has an array of this name."""
        columns = [name == array for name, _ in self.arrays]
        return bool((self.lengths[:, columns] >= 0).any(1).all())

    def checked(self, token_dtype: str) -> Split:
        """Return the same split. Raises ValueError if it breaks a rule of the format."""
        numbers, lengths_of = self.numbers, _lengths(self.numbers)
        is_too_large = (numbers >= _LARGEST).any() or (numbers.astype(np.float64).sum(axis=0) >= _LARGEST).any()
        if is_too_large or (numbers[:, 1:3] < 1).any() or (np.diff(numbers[:, 0]) <= 0).any():
            raise ValueError(f"numbers of the shards of {self.name}")
        if not (self.stores("tokens") and self.stores("documents")):
            raise ValueError(f"{self.name} has a shard without tokens or documents")
        has_sentences = np.zeros(len(self), np.bool_)
        for (name, dtype), lengths in zip(self.arrays, self.lengths.T, strict=True):
            dtypes, is_stored = ARRAY_DTYPES.get(name, (dtype,)), lengths >= 0
            is_right = lengths[is_stored] == lengths_of.get(name, lengths)[is_stored]
            if dtype not in ((token_dtype,) if name == "tokens" else dtypes) or not is_right.all():
                raise ValueError(f"array {name!r} of {self.name}")
            if not (re.fullmatch(r"[a-z0-9_-]+", name) and re.fullmatch(_ANY_DTYPE, dtype)):
                raise ValueError(f"array {name!r} of {self.name}")
            if name == "empty" and (lengths == 0).any():
                raise ValueError(f"array {name!r} of {self.name}")
            has_sentences |= is_stored & (name == "sentences")
        if ((numbers[:, 3] > 0) != has_sentences).any():
            raise ValueError(f"sentences of {self.name}")
        return self


def _lengths(numbers: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    """Return the length of each array that tables can hold, from the rows of TABLE."""
    documents, tokens, sentences = numbers[:, 1:].T
    return {"tokens": tokens, "documents": documents + 1, "sentences": sentences + 1, "words": -(-tokens // 8)}


def shard_name(split: str, unit: int) -> str:
    return f"{split}-{unit:05d}"


def from_list(split: str, entries: Sequence[Mapping[str, Any]], token_dtype: str) -> Split:
    """Return the shards in the list of a manifest. Raises ValueError, KeyError and others if a rule is broken."""
    listed = [Shard(**entry) for entry in entries]
    shards = Split.from_shards(listed).checked(token_dtype)
    if split != shards.name or list(shards) != listed:
        raise ValueError(f"split {split!r}")
    return shards


def fits_tables(splits: Iterable[Split]) -> bool:
    """Return whether tables can store the shards: all have the same arrays, of known lengths."""
    names = {frozenset(name for name, _ in shards.arrays) for shards in splits}
    return len(names) == 1 and next(iter(names)) <= _IN_TABLES and all((each.lengths >= 0).all() for each in splits)


def write_tables(stage: Stage, splits: Mapping[str, Split]) -> dict[str, Any]:
    """Write shards as tables, and return the members of the tables for the manifest."""
    arrays = sorted(name for name, _ in next(iter(splits.values())).arrays)
    writers = {name: ArrayWriter(stage, name, dtype) for name, dtype in DTYPES.items()}
    for shards in splits.values():
        order = np.argsort([name for name, _ in shards.arrays])
        writers[TABLE].append(shards.numbers.reshape(-1))
        writers[DIGESTS].append(shards.digests[:, order].reshape(-1))
    tables = {name: writer.finish()["sha256"] for name, writer in writers.items()}
    return {"arrays": arrays, "splits": {name: len(each) for name, each in splits.items()}, "tables": tables}


def read_tables(record: Mapping[str, Any], open_table: OpenTable) -> dict[str, Split]:
    """Return the shards by split from a manifest. Raises ValueError, KeyError or TypeError if a rule is broken."""
    names, counts, tables = record["arrays"], record["splits"], record["tables"]
    if not set(names) <= _IN_TABLES or names != sorted(set(names)) or tables.keys() != DTYPES.keys():
        raise ValueError(f"arrays {names!r}, tables {list(tables)}")
    if any(type(count) is not int or count < 1 for count in counts.values()):
        raise ValueError(f"splits {counts!r}")
    total = sum(counts.values())
    content = open_table(TABLE, DTYPES[TABLE], _COLUMNS * total)
    sha256 = hashlib.sha256(npy_header(DTYPES[TABLE], content.size))
    sha256.update(content.data)
    if sha256.hexdigest() != tables[TABLE] or (content >= _LARGEST).any():
        raise ValueError(f"{TABLE} is not the file that is named, or has numbers that are too large")
    numbers = content.astype(np.int64).reshape(total, _COLUMNS)
    arrays = [(name, record["token_dtype"] if name == "tokens" else ARRAY_DTYPES[name][0]) for name in names]
    lengths = np.stack([_lengths(numbers)[name] for name in names], axis=1)
    opened: list[NDArray[np.uint8]] = []

    def digests(first: int, stop: int) -> NDArray[np.uint8]:
        if not opened:
            opened.append(open_table(DIGESTS, DTYPES[DIGESTS], _DIGEST_BYTES * len(arrays) * total))
        return opened[0].reshape(total, len(arrays), _DIGEST_BYTES)[first:stop]

    splits, first = {}, 0
    for split, count in counts.items():
        some = slice(first, first + count)
        shards = Split(split, numbers[some], arrays, lengths[some], partial(digests, some.start, some.stop))
        splits[split], first = shards.checked(record["token_dtype"]), some.stop
    return splits


class ShardWriter:
    """Write the documents of one shard as files of a `Stage`, its commit record last.

    .origins: SHA-256 of the origins, after `finish`; None without origins.
    """

    def __init__(self, stage: Stage, name: str) -> None:
        self.name, self._stage = name, stage
        self.origins: str | None = None
        self._arrays: dict[str, ArrayWriter] = {}
        self._word_starts = np.zeros(0, np.bool_)  # up to 7 bits that do not fill a byte yet

    def append(
        self,
        tokens: NDArray[Any],
        documents: NDArray[np.uint64],
        sentences: NDArray[np.uint64] | None = None,
        word_starts: NDArray[np.bool_] | None = None,
        empty: NDArray[np.int64] | None = None,
        origins: NDArray[np.uint64] | None = None,
    ) -> None:
        """Append documents. Each call must pass the same arrays. tokens [n]: their ids, including separators.

        documents, sentences: their ends in `tokens`, ascending; the last one is n. word_starts bool [n]: whether each
        token starts a word. empty: for each empty document, the number of `documents` before it.
        """
        before = self._append("tokens", tokens, tokens.dtype.str)
        num_documents = self._append("documents", documents + np.uint64(before))
        if sentences is not None:
            self._append("sentences", sentences + np.uint64(before))
        if word_starts is not None:
            waiting = np.concatenate([self._word_starts, word_starts])
            num_packed = waiting.size // 8 * 8
            self._append("words", np.packbits(waiting[:num_packed], bitorder="little"), "|u1")
            self._word_starts = waiting[num_packed:]
        if empty is not None and empty.size:
            self._append("empty", empty + (num_documents - 1))
        if origins is not None:
            self._append("origins", origins)

    def _append(self, array: str, values: NDArray[Any], dtype: str = "<u8") -> int:
        """Append numbers to an array, and return its previous length."""
        if array not in self._arrays:
            self._arrays[array] = ArrayWriter(self._stage, array_file(self.name, array), dtype)
            if array in ("documents", "sentences"):
                self._arrays[array].append(np.zeros(1, np.uint64))
        length = self._arrays[array].length
        self._arrays[array].append(values)
        return length

    def finish(self, *, input_range: tuple[int, int], counts: Mapping[str, int]) -> Shard:
        """Finish the arrays, write the commit record, and return the entry of the shard in a manifest."""
        if "words" in self._arrays:
            self._arrays["words"].append(np.packbits(self._word_starts, bitorder="little"))
        arrays = {name: array.finish() for name, array in self._arrays.items()}
        self.origins = arrays.pop("origins", {}).get("sha256")
        record = {
            "format_version": FORMAT_VERSION,
            "split": self.name.rpartition("-")[0],
            "arrays": arrays,
            "input": {"start": input_range[0], "stop": input_range[1]},
            "counts": dict(counts),
        }
        self._stage.write(f"{self.name}.json", sealed_record(record))
        num_sentences = arrays["sentences"]["length"] - 1 if "sentences" in arrays else None
        published = {name: {k: v for k, v in entry.items() if k != "crc32"} for name, entry in arrays.items()}
        return Shard(self.name, arrays["documents"]["length"] - 1, arrays["tokens"]["length"], num_sentences, published)

    def discard(self) -> None:
        """Remove the files of an empty shard."""
        self._stage.discard(array_file(self.name, array) for array in self._arrays)


def open_shard(directory: Path, shard: Shard) -> dict[str, NDArray[Any]]:
    """Open the arrays of a shard, by name. Raises DatasetError for a wrong size, header, first or last offset."""
    return {name: open_one(directory, shard, name) for name in ARRAY_DTYPES.keys() & shard.arrays.keys()}


def open_one(directory: Path, shard: Shard, name: str) -> NDArray[Any]:
    """Open one array of a shard."""
    entry, path = shard.arrays[name], array_path(directory, shard.name, name)
    array = open_array(path, entry["dtype"], entry["length"])
    if name in ("documents", "sentences") and (array[0] != 0 or array[-1] != shard.num_tokens):
        raise damaged(path, f"its offsets are {array[0]} to {array[-1]} and should be 0 to {shard.num_tokens}")
    return array
