"""The manifest of a dataset: manifest.json ⇄ plain frozen objects.

It is written last: a directory without a manifest is not a dataset.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertdata.errors import DatasetError
from bertdata.format.records import FORMAT_VERSION, canonical, parse_record, read_record, write_record
from bertdata.types import SpecialTokens

MANIFEST = "manifest.json"
REPLACED = ".build/replaced.json"  # the old manifest, while a build puts a new dataset in its place
LARGEST_VOCABULARY = 1 << 24
SPLITS = ("train", "validation", "test")
ARRAY_DTYPES = {
    "tokens": ("<u2", "<u4"),
    "documents": ("<u8",),
    "sentences": ("<u8",),
    "words": ("|u1",),
    "empty": ("<u8",),
}


@dataclass(frozen=True)
class Shard:
    """What the manifest says about one shard."""

    name: str
    num_documents: int
    num_tokens: int  # separators included
    num_sentences: int | None  # None: sentences are not stored
    arrays: Mapping[str, Mapping[str, Any]]  # name → dtype, length, sha256


@dataclass(frozen=True)
class Split:
    """The shards of train, validation or test, in order. It has at least one."""

    shards: tuple[Shard, ...]

    @property
    def num_documents(self) -> int:
        return sum(shard.num_documents for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)


@dataclass(frozen=True)
class Manifest:
    """What manifest.json holds; docs/format.md explains each member."""

    token_dtype: str  # "<u2" or "<u4"
    special_tokens: SpecialTokens
    tokenizer: Mapping[str, str]  # file name → SHA-256
    settings: Mapping[str, Any]
    splits: Mapping[str, Split]
    counts: Mapping[str, Any]
    tokenizer_name: str | None = None  # of the tokenizer's directory or on the hub

    @property
    def dataset_id(self) -> str:
        """SHA-256, in hex, of everything that decides what a reader gets."""
        arrays = [
            [split, array, entry["dtype"], entry["length"], entry["sha256"]]
            for split, shards in self.splits.items()
            for shard in shards.shards
            for array, entry in sorted(shard.arrays.items())
        ]
        identity = {
            "format_version": FORMAT_VERSION,
            "token_dtype": self.token_dtype,
            "separator_id": self.special_tokens.separator,
            "tokenizer": dict(self.tokenizer),
            "settings": dict(self.settings),
            "arrays": arrays,
        }
        return hashlib.sha256(canonical(identity)).hexdigest()

    @property
    def is_imported(self) -> bool:
        """Whether others made the ids, so that special ids may be inside documents."""
        return "imported" in self.settings

    def write(self, directory: Path) -> None:
        """Writes manifest.json, which publishes the dataset."""
        special = self.special_tokens
        shards = {name: [dict(vars(shard)) for shard in split.shards] for name, split in self.splits.items()}
        record = {
            "format": "bertdata",
            "format_version": FORMAT_VERSION,
            "dataset_id": self.dataset_id,
            "token_dtype": self.token_dtype,
            "vocab_size": special.vocab_size,
            "special_tokens": special.roles(),
            "special_ids": list(special.special_ids),
            "separator_id": special.separator,
            "tokenizer": dict(self.tokenizer),
            "settings": dict(self.settings),
            "splits": shards,
            "counts": dict(self.counts),
        }
        if self.tokenizer_name is not None:
            record["tokenizer_name"] = self.tokenizer_name
        write_record(directory / MANIFEST, record)


def read_manifest(directory: Path) -> Manifest:
    """Reads manifest.json. Raises DatasetError if it is missing, damaged, of another version, or contradicts itself."""
    path = directory / MANIFEST
    if not path.exists():
        if not directory.exists():
            raise DatasetError(f"{directory} does not exist; make a dataset with bertdata build")
        if (directory / ".build").exists():
            raise DatasetError(f"{directory} holds an unfinished build; run the same command again to finish it")
        raise DatasetError(f"{directory} is not a dataset: it has no {MANIFEST}")
    return _checked(read_record(path), path)


def parse_manifest(content: bytes, place: str) -> Manifest:
    """As `read_manifest`, from the bytes of a file. place: what an error names it."""
    return _checked(parse_record(content, place), place)


def _checked(record: dict[str, Any], path: object) -> Manifest:
    try:
        manifest = _parse(record)
        dataset_id = manifest.dataset_id
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DatasetError(f"{path} is damaged: {type(error).__name__} {error}") from None
    if dataset_id != record.get("dataset_id"):
        raise DatasetError(f"{path} is damaged: its contents do not match its dataset_id")
    return manifest


def _parse(record: dict[str, Any]) -> Manifest:
    """Raises ValueError, KeyError, TypeError and the like for a record that breaks a rule."""
    special = SpecialTokens(
        vocab_size=record["vocab_size"], special_ids=tuple(record["special_ids"]), **record["special_tokens"]
    )
    separator = record["separator_id"]
    if "imported" in record["settings"] and (separator is None or separator in special.special_ids):
        special = replace(special, separator=separator)
    ids = (*special.special_ids, *special.roles().values())
    if any(type(number) is not int for number in (special.vocab_size, *ids)):
        raise ValueError("an id is not an integer")
    if not 0 < special.vocab_size <= LARGEST_VOCABULARY or record["token_dtype"] not in ARRAY_DTYPES["tokens"]:
        raise ValueError("vocab_size or token_dtype")
    if any(not 0 <= token < special.vocab_size for token in ids):
        raise ValueError("a special id is outside the vocabulary")
    if separator != special.separator:
        raise ValueError(f"separator_id {separator!r}")
    if any(not re.fullmatch(r"[a-z0-9_.-]+", name) for name in record["tokenizer"]):
        raise ValueError(f"tokenizer files {list(record['tokenizer'])}")
    tokenizer_name = record.get("tokenizer_name")
    if not isinstance(tokenizer_name, str | None):
        raise ValueError(f"tokenizer_name {tokenizer_name!r}")
    splits = {}
    for name, entries in record["splits"].items():
        if name not in SPLITS or not entries:
            raise ValueError(f"split {name!r}")
        splits[name] = Split(tuple(Shard(**entry) for entry in entries))
        for shard in splits[name].shards:
            _check_shard(shard, name, record["token_dtype"])
        units = [int(shard.name.removeprefix(f"{name}-")) for shard in splits[name].shards]
        if units != sorted(set(units)):
            raise ValueError(f"shard numbers of {name} do not ascend")
    if list(splits) != [name for name in SPLITS if name in splits] or not splits:
        raise ValueError("splits")
    keys = ("tokenizer", "settings", "counts")
    return Manifest(
        record["token_dtype"],
        special,
        splits=splits,
        **{key: record[key] for key in keys},
        tokenizer_name=tokenizer_name,
    )


def _check_shard(shard: Shard, split: str, token_dtype: str) -> None:
    if not re.fullmatch(rf"{split}-[0-9]{{5,}}", shard.name):
        raise ValueError(f"shard name {shard.name!r}")
    for array, entry in shard.arrays.items():  # also those of unknown names, which verify reads
        named = re.fullmatch(r"[a-z0-9_-]+", array) and re.fullmatch(r"[<|][a-z][1248]", entry["dtype"])
        if not named or type(entry["length"]) is not int:
            raise ValueError(f"array {array!r} of shard {shard.name}")
    if ("sentences" in shard.arrays) != (shard.num_sentences is not None):
        raise ValueError(f"sentences of shard {shard.name}")
    lengths = {"tokens": shard.num_tokens, "documents": shard.num_documents + 1}
    if shard.num_sentences is not None:
        lengths["sentences"] = shard.num_sentences + 1
    if "words" in shard.arrays:
        lengths["words"] = -(-shard.num_tokens // 8)
    if "empty" in shard.arrays:
        lengths["empty"] = shard.arrays["empty"]["length"]
    for array, length in lengths.items():
        entry = shard.arrays[array]
        dtypes = (token_dtype,) if array == "tokens" else ARRAY_DTYPES[array]
        if type(length) is not int or length < 1 or entry["length"] != length or entry["dtype"] not in dtypes:
            raise ValueError(f"array {array} of shard {shard.name}")
