"""--dedup: find duplicate documents in one pass over all text, before it is tokenized.

Texts are equal if their 128-bit hashes (BLAKE2b) are equal. The pass writes the hash and the origin (format/origins.py)
of each document to one of 256 files, by the first byte of the hash, and then sorts one file at a time. Memory: two
blocks for each thread, about 200 bytes for each distinct text in one file, and 24 bytes for each duplicate.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.files import open_plain, write_file
from bertdata.format.origins import origins_of
from bertdata.sources.blocks import Block
from bertdata.sources.documents import Documents
from bertdata.sources.plan import Plan, find_blocks
from bertdata.write.machines import Crew

_NAME = "duplicates"  # file in the staging directory: origins of the duplicates, ascending
_TOGETHER = 1 << 20  # rows of a file to sort at once, at least
_FILES = 256  # a file for each first byte of a hash


def find_duplicates(
    staging: Path, plan: Plan, workers: int, say: Callable[[str], None], progress: Callable[[int], None]
) -> NDArray[np.uint64]:
    """Return the origins of all documents whose text equals that of an earlier document: uint64 [n], ascending.

    Stores the origins in `staging`, and reuses those of an interrupted run. progress: called with the bytes of input
    read so far.
    """
    path = staging / _NAME
    if not path.exists():
        _hash_all(staging, plan, workers, progress)
        later = [_later_ones(_hash_file(staging, number)) for number in range(_FILES)]
        write_file(path, np.sort(np.concatenate(later)).tobytes())
    duplicates = np.fromfile(path, np.uint64)
    say(f"documents with the text of an earlier one, which are left out: {duplicates.size:,}")
    return duplicates


def _hash_file(staging: Path, number: int) -> Path:
    return staging / f"hashes-{number:03d}"


def _hash_all(staging: Path, plan: Plan, workers: int, progress: Callable[[int], None]) -> None:
    num_inputs = len(plan.files)

    def work(block: Block) -> tuple[NDArray[np.uint64], int]:
        return _hashes(block.decode(), num_inputs), block.bytes_read

    def write(plan: Plan, in_order: Any) -> None:
        with closing(in_order(work, find_blocks(plan), lambda block: block.num_bytes)) as blocks:
            for rows, bytes_read in blocks:
                first_bytes = rows[:, 0] >> np.uint64(56)
                rows = rows[np.argsort(first_bytes, kind="stable")]
                bounds = np.append(0, np.cumsum(np.bincount(first_bytes.astype(np.int64), minlength=_FILES)))
                for file, (start, stop) in zip(files, pairwise(bounds.tolist()), strict=True):
                    file.write(rows[start:stop].tobytes())
                progress(bytes_read)

    with ExitStack() as stack:
        files = [stack.enter_context(open_plain(_hash_file(staging, number), "wb")) for number in range(_FILES)]
        Crew(workers).run(write, [plan])


def _hashes(some: Documents, num_inputs: int) -> NDArray[np.uint64]:
    """Return two halves of a hash, and an origin, for each document: uint64 [num_documents, 3]."""
    text = some.text.data
    digests = (blake2b(text[start : stop - 1], digest_size=16).digest() for start, stop in pairwise(some.offsets))
    halves = np.frombuffer(b"".join(digests), ">u8").reshape(-1, 2).astype(np.uint64)
    return np.column_stack([halves, origins_of(some.inputs, some.starts, num_inputs)])


def _later_ones(path: Path) -> NDArray[np.uint64]:
    """Return the origins of all rows of a file except the first row of each hash. Removes the file.

    Most documents may have the same text, so each batch of rows is as large as the number of distinct rows so far.
    """
    firsts, later = np.zeros((0, 3), np.uint64), list[NDArray[np.uint64]]()
    with open(path, "rb") as file:
        while (some := np.fromfile(file, np.uint64, 3 * max(_TOGETHER, len(firsts)))).size:
            rows = np.concatenate([firsts, some.reshape(-1, 3)])
            rows = rows[np.lexsort(rows.T[[2, 1, 0]])]
            is_later = np.append(False, (rows[1:, :2] == rows[:-1, :2]).all(1))
            later.append(rows[is_later, 2])
            firsts = rows[~is_later]
    path.unlink()
    return np.concatenate([np.zeros(0, np.uint64), *later])
