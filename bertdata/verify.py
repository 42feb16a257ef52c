"""Re-reads a whole dataset and checks every rule of docs/format.md. About 0.5 GB/s; memory: a few MiB."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import DatasetError
from bertdata.manifest import Shard, read_manifest
from bertdata.reader import Dataset
from bertdata.shard import BLOCK_BYTES, HEADER_BYTES, array_path, digest, read_record

_PIECE = 1 << 20  # numbers looked at at a time


def verify(path: str | Path, *, progress: Callable[[int, int], None] = lambda done, total: None) -> list[str]:
    """Every fault found, a sentence each, naming shard, array and byte range; an empty list for a sound dataset.

    Raises DatasetError if there is no manifest to start from. `progress` is told bytes done and in all.
    """
    directory = Path(path)
    manifest = read_manifest(directory)
    faults = []
    for name, expected in manifest.tokenizer.items():
        file = directory / name
        if not file.is_file():
            faults.append(f"{file} is missing")
        elif hashlib.sha256(file.read_bytes()).hexdigest() != expected:
            faults.append(f"{file}: its SHA-256 is not the one in the manifest; it was changed")
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    paths = [array_path(directory, shard.name, array) for shard in shards for array in shard.arrays]
    total = sum(file.stat().st_size for file in paths if file.exists())
    done = 0
    for shard in shards:
        damaged = False
        for array, entry in shard.arrays.items():
            file = array_path(directory, shard.name, array)
            found = list(_array_faults(directory, shard, array, entry))
            faults += found
            damaged |= bool(found)
            done += file.stat().st_size if file.exists() else 0
            progress(done, total)
        if not damaged:  # the contents of damaged arrays would only say so again
            faults += _content_faults(directory, shard)
    return faults


def _array_faults(directory: Path, shard: Shard, array: str, entry: Any) -> Iterator[str]:
    """Compares a file with the digests of the manifest and the commit record."""
    file = array_path(directory, shard.name, array)
    try:
        stated = read_record(directory / f"{shard.name}.json")["arrays"][array]
    except DatasetError as error:
        yield str(error)
        return
    except (KeyError, TypeError):
        stated = {}
    if any(stated.get(key) != entry.get(key) for key in ("dtype", "length", "sha256")):
        yield f"{directory / shard.name}.json and the manifest do not agree about array {array}"
        return
    try:
        sha256, crc32 = digest(file)
    except OSError as error:
        yield f"{file} cannot be read: {error.strerror}"
        return
    if sha256 == entry["sha256"]:
        return
    size = file.stat().st_size
    expected = HEADER_BYTES + int(entry["dtype"][-1]) * entry["length"]
    if size != expected:
        yield f"{file} has {size:,} bytes and should have {expected:,}"
    blocks = [number for number, (a, b) in enumerate(zip(crc32, stated["crc32"], strict=False)) if a != b]
    for number in blocks:
        start = number * BLOCK_BYTES
        yield f"{file}: bytes {start:,} to {min(start + BLOCK_BYTES, size):,} are damaged (CRC-32)"
    if not blocks and size == expected:
        yield f"{file} is damaged: its SHA-256 is not the one in the manifest"


def _content_faults(directory: Path, shard: Shard) -> Iterator[str]:
    """Checks what the numbers of an undamaged shard say."""
    try:
        dataset = Dataset(directory)
    except DatasetError as error:
        yield str(error)
        return
    special = dataset.special_tokens
    tokens = dataset.array(shard.name, "tokens")
    documents = dataset.array(shard.name, "documents")
    where = array_path(directory, shard.name, "tokens")
    forbidden = np.zeros(special.vocab_size, np.bool_)
    forbidden[list(special.special_ids)] = True
    for allowed in (special.unk, special.separator):
        if allowed is not None:
            forbidden[allowed] = False
    num_separators = 0
    for start in range(0, tokens.size, _PIECE):
        piece = tokens[start : start + _PIECE]
        large = np.flatnonzero(piece >= special.vocab_size)
        if large.size:
            at = start + int(large[0])
            yield f"{where}: token {at} is {tokens[at]}, outside the vocabulary of {special.vocab_size}"
            return
        wrong = np.flatnonzero(forbidden[piece])
        if wrong.size:
            at = start + int(wrong[0])
            yield f"{where}: token {at} is {tokens[at]}, a special id that must not be stored"
        if special.separator is not None:
            num_separators += int((piece == special.separator).sum())
    if special.separator is not None and num_separators != shard.num_documents:
        yield f"{where}: {num_separators} separators for {shard.num_documents} documents"
    for array in ("documents", "sentences"):
        if array not in shard.arrays:
            continue
        offsets = dataset.array(shard.name, array)
        fall = _first_fall(offsets)
        if fall is not None:
            yield f"{array_path(directory, shard.name, array)}: offset {fall + 1} is not above offset {fall}"
            return
    if special.separator is not None:
        for start in range(1, documents.size, _PIECE):
            ends = documents[start : start + _PIECE] - np.uint64(1)
            missing = np.flatnonzero(tokens[ends] != special.separator)
            if missing.size:
                yield f"{where}: document {start - 1 + int(missing[0])} does not end with the separator"
                break
    if "sentences" in shard.arrays:
        sentences = dataset.array(shard.name, "sentences")
        for start in range(0, documents.size, _PIECE):
            piece = documents[start : start + _PIECE]
            if not np.array_equal(sentences[np.searchsorted(sentences, piece)], piece):
                yield f"{array_path(directory, shard.name, 'sentences')}: a document does not begin with a sentence"
                break


def _first_fall(offsets: NDArray[np.uint64]) -> int | None:
    """The first index whose successor is not larger."""
    for start in range(0, offsets.size - 1, _PIECE):
        piece = offsets[start : start + _PIECE + 1]
        falls = np.flatnonzero(piece[1:] <= piece[:-1])
        if falls.size:
            return start + int(falls[0])
    return None
