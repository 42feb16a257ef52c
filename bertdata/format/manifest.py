"""The manifest of a dataset: manifest.json ⇄ plain frozen objects.

The manifest is written last: a directory without it is not a dataset.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from bertdata.errors import DatasetError, NoDatasetError, damaged
from bertdata.files import Stage
from bertdata.format.arrays import array_file, file_bytes, open_array
from bertdata.format.records import FORMAT_VERSION, LARGEST_RECORD, canonical, parse_record, read_content, sealed_record
from bertdata.format.shards import (
    ARRAY_DTYPES,
    SPLITS,
    OpenTable,
    Shard,
    Split,
    fits_tables,
    from_list,
    read_tables,
    write_tables,
)
from bertdata.types import LARGEST_VOCABULARY, SpecialTokens

MANIFEST = "manifest.json"
REPLACED = ".build/replaced.json"  # the old manifest, while a build replaces the dataset
MANY_SHARDS_VERSION = 2  # version of a manifest with more than MOST_LISTED shards
MOST_LISTED = 1024
VERSIONS = (FORMAT_VERSION, MANY_SHARDS_VERSION)
_TEXTS = ("documents", "sentences", "words", "encoding", "imported", "end_token", "dtype")  # settings that are text
_TABLES = ("special_literals", "special_ids_inside", "words")  # counts by name: {name: number}


@dataclass(frozen=True)
class Manifest:
    """The contents of manifest.json; docs/format.md explains each member."""

    token_dtype: str  # "<u2" or "<u4"
    special_tokens: SpecialTokens
    tokenizer: Mapping[str, str]  # file name → SHA-256
    settings: Mapping[str, Any]
    splits: Mapping[str, Split]
    counts: Mapping[str, Any]
    tokenizer_name: str | None = None  # name of the tokenizer's directory or on the hub
    tables: Mapping[str, str] = field(default_factory=dict)  # for many shards: file name → SHA-256
    stated_id: str | None = None  # for many shards: the stored dataset_id, to avoid computing it

    @cached_property
    def dataset_id(self) -> str:
        """SHA-256, in hex, of everything that determines the batches of a reader."""
        return self.stated_id or self.computed_id()

    def computed_id(self) -> str:
        """Compute the dataset_id from the digests of all arrays."""
        identity = {
            "format_version": FORMAT_VERSION,
            "token_dtype": self.token_dtype,
            "separator_id": self.special_tokens.separator,
            "tokenizer": dict(self.tokenizer),
            "settings": dict(self.settings),
        }
        # Only one shard at a time is in memory. "arrays" comes first, because names are sorted.
        sha256, comma = hashlib.sha256(b'{"arrays":['), b""
        for split, shards in self.splits.items():
            for shard in shards:
                arrays = [
                    [split, array, entry["dtype"], entry["length"], entry["sha256"]]
                    for array, entry in sorted(shard.arrays.items())
                ]
                sha256.update(comma + canonical(arrays)[1:-1])
                comma = b","
        sha256.update(b"]," + canonical(identity)[1:])
        return sha256.hexdigest()

    @property
    def shards(self) -> Iterator[Shard]:
        """The shards of all splits."""
        return (shard for split in self.splits.values() for shard in split)

    @property
    def num_bytes(self) -> int:
        """The bytes of all array files."""
        return sum(file_bytes(**entry) for shard in self.shards for entry in shard.arrays.values())

    def shard_of(self, document: int) -> tuple[str, int, int]:
        """Return the split, the index of the shard, and the index in the shard, of document `document`."""
        for name, split in self.splits.items():  # noqa: B007
            if document < split.num_documents:
                break
            document -= split.num_documents
        number = int(np.searchsorted(split.first_documents, document, side="right")) - 1
        return name, number, document - int(split.first_documents[number])

    def files(self) -> Iterator[tuple[str, tuple[str | None, int]]]:
        """Yield name, SHA-256 and maximum size in bytes of each file except the manifest.

        The SHA-256 of a commit record is None, because the record contains a checksum.
        """
        for name, sha256 in {**self.tokenizer, **self.tables}.items():
            yield name, (sha256, LARGEST_RECORD)
        for shard in self.shards:
            for name, entry in shard.arrays.items():
                yield array_file(shard.name, name), (entry["sha256"], file_bytes(**entry))
            yield f"{shard.name}.json", (None, LARGEST_RECORD)

    def write(self, stage: Stage) -> None:
        """Write manifest.json, which publishes the dataset, as the last file of a stage."""
        special = self.special_tokens
        has_many = sum(map(len, self.splits.values())) > MOST_LISTED and fits_tables(self.splits.values())
        record = {
            "format": "bertdata",
            "format_version": MANY_SHARDS_VERSION if has_many else FORMAT_VERSION,
            "dataset_id": self.dataset_id,
            "token_dtype": self.token_dtype,
            "vocab_size": special.vocab_size,
            "special_tokens": special.roles(),
            "special_ids": list(special.special_ids),
            "separator_id": special.separator,
            "tokenizer": dict(self.tokenizer),
            "settings": dict(self.settings),
            "splits": {},
            "counts": dict(self.counts),
        }
        if has_many:
            record |= write_tables(stage, self.splits)
        else:
            record["splits"] = {name: [vars(shard) for shard in each] for name, each in self.splits.items()}
        if self.tokenizer_name is not None:
            record["tokenizer_name"] = self.tokenizer_name
        stage.write(MANIFEST, sealed_record(record))


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a directory. Raises DatasetError if it is missing, invalid or of an unknown version."""
    return read_with_content(directory)[0]


def read_with_content(directory: Path) -> tuple[Manifest, bytes]:
    """Return the manifest and the bytes of manifest.json. Raises the errors of `read_manifest`."""
    path = directory / MANIFEST
    if not path.exists():
        if not directory.exists():
            sentence = f"{directory} does not exist; make a dataset with bertdata build, or check the name"
            raise NoDatasetError(sentence, "not-found", given=directory)
        if (directory / ".build").exists():
            sentence = f"{directory} holds an unfinished build; run the same command again to finish it"
            raise DatasetError(sentence, "unfinished", given=directory)
        raise not_a_dataset(directory)
    content = read_content(path)
    # Absolute: the last files are opened on first use, after the process may have changed its directory.
    absolute = Path(os.path.abspath(directory))
    manifest = parse_manifest(content, path, lambda name, dtype, length: open_array(absolute / name, dtype, length))
    return manifest, content


def not_a_dataset(path: object) -> DatasetError:
    sentence = f"{path} is not a dataset: it has no {MANIFEST}; give the directory that bertdata build or import made"
    return NoDatasetError(sentence, "not-a-dataset", given=path)


def parse_manifest(content: bytes, name: object, open_table: OpenTable) -> Manifest:
    """Parse the manifest from the bytes of a file. name: the file's name, for errors. Raises DatasetError."""
    record = parse_record(content, name, versions=VERSIONS)
    try:
        manifest = _parse(record, open_table)
        if manifest.dataset_id != record["dataset_id"]:
            raise ValueError("its dataset_id is not that of its contents")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise damaged(name, f"{type(error).__name__} {error}") from None
    return manifest


def _parse(record: dict[str, Any], open_table: OpenTable) -> Manifest:
    """Parse the manifest from a record. Raises ValueError, KeyError, TypeError and others if it breaks a rule."""
    special = SpecialTokens(
        vocab_size=record["vocab_size"], special_ids=tuple(record["special_ids"]), **record["special_tokens"]
    )
    separator = record["separator_id"]
    if "imported" in record["settings"] and (separator is None or separator in special.special_ids):
        special = replace(special, separator=separator)
    ids, dtype, listed = (*special.special_ids, *special.roles().values()), record["token_dtype"], record["splits"]
    files, settings, counts = record["tokenizer"], record["settings"], record["counts"]
    maps, tables = settings.get("map", []), [counts[name].values() for name in _TABLES if name in counts]
    texts = [settings[name] for name in _TEXTS if name in settings]
    numbers = chain((counts[name] for name in counts.keys() - set(_TABLES)), *tables)
    rules = {
        "an id is not an integer": all(type(number) is int for number in (special.vocab_size, *ids)),
        "token_dtype": dtype in ARRAY_DTYPES["tokens"],
        "vocab_size": 0 < special.vocab_size <= LARGEST_VOCABULARY,
        "a special id is outside the vocabulary": all(0 <= token < special.vocab_size for token in ids),
        "separator_id": separator == special.separator,
        "tokenizer": all(re.fullmatch(r"[a-z0-9_.-]+", file) and isinstance(files[file], str) for file in files),
        "tokenizer_name": isinstance(record.get("tokenizer_name"), str | None),
        "splits": listed and list(listed) == [split for split in SPLITS if split in listed],
        "settings": isinstance(maps, list) and all(isinstance(text, str) for text in chain(texts, maps)),
        "counts": all(type(number) is int and number >= 0 for number in numbers),
    }
    if broken := [what for what, holds in rules.items() if not holds]:
        raise ValueError(broken[0])
    more: dict[str, Any] = {"tokenizer_name": record.get("tokenizer_name")}
    if record["format_version"] == MANY_SHARDS_VERSION:
        splits = read_tables(record, open_table)
        more |= {"tables": dict(record["tables"]), "stated_id": str(record["dataset_id"])}
    else:
        splits = {name: from_list(name, entries, dtype) for name, entries in listed.items()}
    return Manifest(dtype, special, files, settings, splits, counts, **more)
