"""The source of each document's text: the directory origins/, which is not part of the dataset."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import DatasetError, damaged
from bertdata.files import make_directory, write_file
from bertdata.format.arrays import file_bytes, open_array
from bertdata.format.manifest import Manifest
from bertdata.format.records import FORMAT_VERSION, read_content, read_record, write_record

ORIGINS = "origins"  # the directory
RECORD, INPUTS = f"{ORIGINS}/origins.json", f"{ORIGINS}/inputs.jsonl"
DTYPE = "<u8"


class NamedInput(NamedTuple):
    """An input of a build."""

    name: str
    size: int | None  # bytes; None for a pipe
    version: int | str | None  # modification time in ns; for a file under a URL, its ETag or digest


def place_bits(num_inputs: int) -> int:
    """Return how many low bits of an origin are the place (byte or row) in the input; the high bits are its number."""
    return 64 - max(1, (num_inputs - 1).bit_length())


def origins_of(inputs: NDArray[np.int64], places: NDArray[np.int64], num_inputs: int) -> NDArray[np.uint64]:
    """Combine numbers of inputs [n] and places in these inputs [n] to origins, uint64 [n]."""
    return inputs.astype(np.uint64) << np.uint64(place_bits(num_inputs)) | places.astype(np.uint64)


def origins_name(shard: str) -> str:
    """Return the file name for a shard, such as origins/train-00000.npy."""
    return f"{ORIGINS}/{shard}.npy"


def write_origins(
    directory: Path,
    dataset_id: str,
    inputs: Sequence[Sequence[Any]],
    *,
    input_format: str | None,
    text_key: str,
    shards: Mapping[str, str],
) -> None:
    """Write the list of inputs, then the record. The arrays must exist. shards: name → SHA-256 in hex."""
    lines = "".join(json.dumps(each) + "\n" for each in inputs).encode()
    write_file(directory / INPUTS, lines)
    record = {
        "format": "bertdata-origins",
        "format_version": FORMAT_VERSION,
        "dataset_id": dataset_id,
        "input_format": input_format,
        "text_key": text_key,
        "place_bits": place_bits(len(inputs)),
        "inputs": {"number": len(inputs), "bytes": len(lines), "sha256": hashlib.sha256(lines).hexdigest()},
        "shards": dict(shards),
    }
    write_record(directory / RECORD, record)


def prepare_directory(directory: Path, shards: Mapping[str, str]) -> None:
    """Create origins/, and remove files of other shards. Without shards, remove origins/."""
    folder = directory / ORIGINS
    if folder.is_symlink():  # only the link is removed, never a file behind it
        folder.unlink()
    if not shards:
        shutil.rmtree(folder, ignore_errors=True)
        return
    make_directory(folder)
    names = {f"{shard}.npy" for shard in shards}
    for old in folder.iterdir():
        if old.name not in names:
            old.unlink()


@dataclass(frozen=True)
class Origins:
    """The origins of the documents of a dataset, with the members of origins.json."""

    directory: Path
    manifest: Manifest
    input_format: str | None
    text_key: str
    place_bits: int
    inputs: Mapping[str, Any]  # number, bytes and sha256 of inputs.jsonl
    shards: Mapping[str, str]  # name → SHA-256 of its array

    @classmethod
    def parse(cls, record: Mapping[str, Any], manifest: Manifest, name: object, directory: Path) -> Origins | None:
        """Return checked origins, or None if they belong to a different dataset. name: the file's name, for errors."""
        if record.get("dataset_id") != manifest.dataset_id:
            return None
        try:
            _, _, *members = fields(cls)
            made = cls(directory, manifest, *(record[each.name] for each in members))
            number, size, sha256 = (made.inputs[key] for key in ("number", "bytes", "sha256"))
            sound = (
                made.shards.keys() == {shard.name for shard in manifest.shards}
                and all(type(value) is int and value >= 0 for value in (number, size, made.place_bits))
                and made.place_bits == place_bits(number)
                and all(isinstance(each, str) for each in (made.text_key, sha256, *made.shards.values()))
            )
            if not sound:
                raise ValueError
            return made
        except (KeyError, TypeError, AttributeError, ValueError):
            raise damaged(name, "it is not the record of the origins of this dataset") from None

    @classmethod
    def read(cls, directory: Path, manifest: Manifest) -> Origins | None:
        """Return the origins of a dataset, or None if it has none. Raises DatasetError if the record is damaged."""
        if (directory / ORIGINS).is_symlink():
            sentence = f"{directory / ORIGINS} is a symbolic link; replace it with the directory itself"
            raise DatasetError(sentence, "wrong-file-type", given=directory / ORIGINS)
        path = directory / RECORD
        return cls.parse(read_record(path), manifest, path, directory) if path.exists() else None

    def files(self) -> dict[str, tuple[str | None, int]]:
        """Return name → SHA-256 and bytes, for every file except the record."""
        arrays = {
            origins_name(shard.name): (self.shards[shard.name], file_bytes(DTYPE, shard.num_documents))
            for shard in self.manifest.shards
        }
        return {INPUTS: (self.inputs["sha256"], self.inputs["bytes"])} | arrays

    @cached_property
    def named_inputs(self) -> list[NamedInput]:
        """Inputs, in the order of the build. Raises DatasetError if the list does not match the record."""
        path = self.directory / INPUTS
        content = read_content(path, self.inputs["bytes"])
        if (len(content), hashlib.sha256(content).hexdigest()) != (self.inputs["bytes"], self.inputs["sha256"]):
            raise damaged(path, f"it does not match {RECORD}")
        try:
            inputs = [NamedInput(*json.loads(line)) for line in content.splitlines()]
            if len(inputs) != self.inputs["number"] or any(b"\0" in os.fsencode(each.name) for each in inputs):
                raise ValueError
            return inputs
        except (ValueError, TypeError, RecursionError):
            raise damaged(path, "each line should be a name, a size and a version") from None

    def input_and_place(self, document: int) -> tuple[str, int]:
        """Return the name of a document's input, and its place there. document: an index as in Dataset.document."""
        split, number, index = self.manifest.shard_of(document)
        shard = self.manifest.splits[split][number]
        array = open_array(self.directory / origins_name(shard.name), DTYPE, shard.num_documents)
        source, place = divmod(int(array[index]), 1 << self.place_bits)
        if source >= len(self.named_inputs):
            raise damaged(self.directory)
        return self.named_inputs[source].name, place
