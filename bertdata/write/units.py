"""Blocks of text → the finished shards of a unit, in the staging directory of a build.

One thread makes a unit from beginning to end. Others may encode some of its blocks, and it writes them in the order of
the text. So the bytes of a shard do not depend on the number of threads.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import UsageError, counted
from bertdata.format.arrays import ArrayWriter, array_path
from bertdata.format.manifest import SPLITS
from bertdata.format.origins import DTYPE, origins_of
from bertdata.format.records import FORMAT_VERSION, write_record
from bertdata.format.shard import ShardWriter
from bertdata.sources.blocks import Block, FoundBlock, find_blocks
from bertdata.sources.split import Plan, Task
from bertdata.tokenize.tokenizer import Encoded, Tokenizer, WordSplitter
from bertdata.write.duplicates import without_duplicates
from bertdata.write.kernels import copy_ranges, count_literals, hash_documents, literals
from bertdata.write.threads import Crew, Share

SPLIT_COUNTS = ("documents", "dropped_documents", "replaced_characters")  # also in the commit record of each shard
UNIT_COUNTS = ("special_ids_replaced", "skipped_rows", "text_bytes")  # of a unit over all splits
OPTION_COUNTS = {"removed_documents": "map", "duplicate_documents": "dedup"}  # name → setting that counts them
COUNTS = SPLIT_COUNTS + UNIT_COUNTS
SPLITS_BY_HASH = ("validation", "test", "train")  # in ascending order of the text's hash


def make_units(
    plan: Plan,
    encoder: BlockEncoder,
    new_writer: Callable[[], UnitWriter],
    *,
    units: dict[int, dict[str, Any]],
    is_wanted: Callable[[int], bool],
    workers: int,
    progress: Callable[[int], None] = lambda done: None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Makes the units of a plan on `workers` threads.

    A thread makes all units of a task by itself: it finds, encodes and writes the text. Threads for which there is no
    task encode blocks of the others' tasks, at most two each at a time.

    new_writer: gives a writer for one thread. units: number → record of the finished units, which are not made again;
    the new ones are added. is_wanted: whether to make a unit. progress: called with the bytes of input that are read.
    say: called with a line where `tokenizers` encodes the text, about 100 times slower than an engine.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads here are enough
    finished, crew = frozenset(units), Crew[Task](workers)
    is_missing = lambda unit: is_wanted(unit) and unit not in finished  # noqa: E731
    tasks = [task for task in plan.tasks(workers) if any(map(is_missing, task.units))]
    todo = sum(task.size for task in tasks)
    done = _Sum(progress, sum(file.size or 0 for file in plan.files) - todo)
    slow = iter([encoder.why_slow] if encoder.why_slow else [])  # what is said once

    def make(share: Share[Task]) -> None:
        task, writer = share.task, new_writer()
        read, given = -1, 0.0  # of what is read: where it ends, and how much of it was counted

        def commit() -> None:
            unit, record = writer.commit()
            units[unit] = record

        narrowed = plan.narrowed(task.units)
        blocks = find_blocks(narrowed, lambda unit: unit in task.units and is_missing(unit))
        try:
            with closing(share.in_order(encoder.encode_found, blocks)) as encoded_blocks:
                for encoded in encoded_blocks:
                    if why := next(slow, None):
                        is_begin = any(encoded.block.unit == stretch.first for stretch in narrowed.stretches)
                        speed = _speed(encoded, todo if is_begin else 0, workers)
                        say(f"note: {why}, so `tokenizers` encodes the text, {speed}")
                    if writer.unit not in (None, encoded.block.unit):
                        commit()
                    writer.append(encoded)
                    step: float = encoded.block.bytes_read - read if read >= 0 else 0
                    step = max(0, min(step, task.size - given))
                    read, given = encoded.block.bytes_read, given + step
                    done.add(step)
            if writer.unit is not None:
                commit()
        finally:
            writer.discard()
        done.add(task.size - given)

    crew.run(make, tasks)


class _Sum:
    """Bytes that several threads have read."""

    def __init__(self, progress: Callable[[int], None], begin: float) -> None:
        self._progress, self._sum, self._lock = progress, begin, threading.Lock()

    def add(self, more: float) -> None:
        with self._lock:
            self._sum += more
            self._progress(int(self._sum))


def unit_name(unit: int) -> str:
    """The file that says what the shards of a unit are. It is there if the unit is finished."""
    return f"unit-{unit:05d}.json"


def _speed(first: EncodedBlock, more_bytes: float, workers: int) -> str:
    """At what speed a build goes, judged by the first block of a file. more_bytes: of input on disk; 0: not known."""
    if first.block.num_bytes < 1 << 16:
        return "at 1 to 3 MB/s a thread"
    rate = first.block.num_bytes / first.seconds
    speed = f"at about {rate / 1e6:.1f} MB/s a thread"
    if more_bytes <= 0:
        return speed
    text_bytes = more_bytes * first.block.num_bytes / first.block.bytes_read
    seconds = text_bytes / rate / workers
    duration = (
        f"{seconds:.0f} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 6000
        else f"{seconds / 3600:.0f} h"
    )
    return f"{speed}: expect {duration} with {counted(workers, 'thread')}"


@dataclass(frozen=True)
class EncodedBlock:
    """A block, and everything about it that will be written."""

    block: Block
    encoded: Encoded
    splits: NDArray[np.int64]  # [num_documents] split of each document, an index of SPLITS_BY_HASH
    literals: NDArray[np.int64]  # [num_special_tokens] how often the text contains each special token
    word_starts: NDArray[np.bool_] | None  # [num_ids] whether an id begins a word; None if words are not stored
    seconds: float  # that it took


class BlockEncoder:
    """Does all work on a block of text except writing it. May be used by several threads at once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        shares: tuple[float, float],
        *,
        num_inputs: int,
        sentences: bool,
        word_splitter: WordSplitter | None = None,
        duplicates: NDArray[np.uint64] | None = None,
    ) -> None:
        """shares: of validation and test. word_splitter: a text → its words; None: do not store where words begin.

        duplicates: origins of documents to leave out, ascending.
        """
        self.tokenizer, self.sentences, self.word_splitter = tokenizer, sentences, word_splitter
        self.num_inputs, self.duplicates = num_inputs, duplicates
        self._spellings = literals(tokenizer.spellings)
        self._first_bytes = np.flatnonzero(self._spellings.begins).astype(np.uint8)
        self._below = hash_bounds(*shares)

    def encode_found(self, raw: FoundBlock) -> EncodedBlock:
        """A block as it will be written. Raises InputError, as `FoundBlock.decoded` does."""
        block = raw.decoded()
        if self.duplicates is not None:
            block = without_duplicates(block, self.duplicates, self.num_inputs)
        return self.encode_block(block)

    def encode_block(self, block: Block) -> EncodedBlock:
        """The same for a block whose documents are known."""
        start = time.perf_counter()
        encoded = self.tokenizer.encode(block.data, block.offsets, sentences=self.sentences)
        starts = None
        if self.word_splitter:
            starts = self.tokenizer.word_starts(block.data, block.offsets, encoded.documents, self.word_splitter)
        counts = np.zeros(len(self.tokenizer.spellings), np.int64)
        count_literals(block.data, block.num_bytes, self._spellings, self._first_bytes, counts)
        splits = np.full(block.num_documents, SPLITS_BY_HASH.index("train"))
        if self._below.any():
            hashes = np.empty(block.num_documents, np.uint64)
            hash_documents(block.data, block.offsets, 1, hashes)
            splits = np.searchsorted(self._below, hashes >> np.uint64(32), side="right")
        return EncodedBlock(block, encoded, splits, counts, starts, time.perf_counter() - start)

    @property
    def why_slow(self) -> str | None:
        """Why `tokenizers` encodes the text, as a clause; None: an engine does. Needs a prepared tokenizer."""
        tokenizer = self.tokenizer
        if tokenizer.engine is None:
            return f"there is no engine for this tokenizer, because {tokenizer.engine_refusal}"
        if self.word_splitter:
            return "--words needs the offsets of tokens in the text"
        if self.sentences and not tokenizer.engine_gives_lines:
            return f"the engine for {tokenizer.engine} does not find sentences (--sentences line)"
        return None


class UnitWriter:
    """Writes the documents of one unit after the other to the shards of their splits."""

    def __init__(self, directory: Path, encoder: BlockEncoder, shard_size: int) -> None:
        self.directory, self.encoder, self.shard_size = directory, encoder, shard_size
        self.unit: int | None = None

    def append(self, encoded_block: EncodedBlock) -> None:
        """Writes a block. All blocks between two commits must be of one unit."""
        block, encoded, splits = encoded_block.block, encoded_block.encoded, encoded_block.splits
        if self.unit is None:
            self.unit = block.unit
            self._writers: dict[str, ShardWriter] = {}
            self._origins: dict[str, ArrayWriter] = {}
            self._counts = {split: dict.fromkeys(SPLIT_COUNTS, 0) for split in SPLITS}
            self._totals: dict[str, Any] = dict.fromkeys((*UNIT_COUNTS, *OPTION_COUNTS), 0)
            self._totals |= {"first_replaced": None, "first_skipped": None}
            self._literals = np.zeros_like(encoded_block.literals)
        has_ids = np.diff(encoded.documents) > (self.encoder.tokenizer.special.separator is not None)
        for number, split in enumerate(SPLITS_BY_HASH):
            chosen = splits == number
            kept = chosen & has_ids
            self._counts[split]["documents"] += int(kept.sum())
            self._counts[split]["dropped_documents"] += int(chosen.sum() - kept.sum())
            self._counts[split]["replaced_characters"] += int(block.replaced[chosen].sum())
            if kept.any():
                self._write(split, encoded, kept, encoded_block.word_starts)
                origins = origins_of(block.inputs[kept], block.places[kept], self.encoder.num_inputs)
                self._origins[split].append(origins)
        self._totals["special_ids_replaced"] += encoded.special_ids_replaced
        self._totals["skipped_rows"] += block.skipped
        self._totals["removed_documents"] += block.num_removed
        self._totals["duplicate_documents"] += block.num_duplicates
        self._totals["first_skipped"] = self._totals["first_skipped"] or block.first_skipped
        self._totals["text_bytes"] += block.num_bytes - block.num_documents
        self._totals["first_replaced"] = self._totals["first_replaced"] or block.first_replaced
        self._literals += encoded_block.literals

    def _write(
        self, split: str, encoded: Encoded, kept: NDArray[np.bool_], word_starts: NDArray[np.bool_] | None
    ) -> None:
        """Appends the documents that `kept` selects to the shard of a split."""
        if split not in self._writers:
            name = f"{split}-{self.unit:05d}"
            dtype = self.encoder.tokenizer.token_dtype
            self._writers[split] = ShardWriter(
                self.directory, name, split=split, token_dtype=dtype, sentences=self.encoder.sentences,
                words=self.encoder.word_splitter is not None,
            )  # fmt: skip
            self._origins[split] = ArrayWriter(array_path(self.directory, name, "origins"), DTYPE)
        documents, sentences, ids, word_starts = select(
            kept, encoded.documents, encoded.sentences, encoded.ids, word_starts
        )
        self._writers[split].append(ids, documents[1:].astype(np.uint64), ends_of(sentences, ids.size), word_starts)

    def commit(self) -> tuple[int, dict[str, Any]]:
        """Finishes the shards of the unit, then writes its record. Returns the unit's number and the record."""
        unit, size = self.unit, self.shard_size
        assert unit is not None  # noqa: S101  (append came before)
        shards = {}
        origins = {self._writers[split].name: array.commit()["sha256"] for split, array in self._origins.items()}
        for split, writer in self._writers.items():
            record = writer.commit(input_range=(unit * size, (unit + 1) * size), counts=self._counts[split])
            shards[split] = shard_entry(writer.name, record["arrays"])
        literals = dict(zip(self.encoder.tokenizer.spellings, self._literals.tolist(), strict=True))
        totals = {name: sum(counts[name] for counts in self._counts.values()) for name in SPLIT_COUNTS}
        record = {"format_version": FORMAT_VERSION, "shards": shards, "special_literals": literals, "origins": origins}
        record |= totals | self._totals
        write_record(self.directory / unit_name(unit), record)
        self.unit = None
        return unit, record

    def discard(self) -> None:
        """Removes the files of the unit that is not finished, if there is one."""
        if self.unit is not None:
            for writer in self._writers.values():
                writer.discard()
            for array in self._origins.values():
                array.discard()


def select(
    kept: NDArray[np.bool_], documents: NDArray[np.int64], sentences: NDArray[np.int64] | None, *columns: Any
) -> tuple[Any, ...]:
    """The documents that `kept` bool [num_documents] selects: their offsets, their sentences, and columns.

    documents [num_documents + 1]: half-open offsets. sentences: where sentences begin, ascending, or None. columns:
    arrays with a number for each token, or None.
    """
    if kept.all():
        return documents, sentences, *columns
    turns = np.flatnonzero(np.diff(kept, prepend=False, append=False))  # where stretches start and stop
    offsets = np.append(0, np.cumsum(np.diff(documents)[kept]))
    if sentences is not None:
        number = np.searchsorted(documents, sentences, side="right") - 1
        number, sentences = number[kept[number]], sentences[kept[number]]
        sentences = sentences - documents[number] + offsets[np.cumsum(kept)[number] - 1]
    chosen = [None if column is None else np.empty(offsets[-1], column.dtype) for column in columns]
    for column, copy in zip(columns, chosen, strict=True):
        if column is not None:
            copy_ranges(column, documents[turns].reshape(-1, 2), copy)
    return offsets, sentences, *chosen


def ends_of(sentences: NDArray[np.int64] | None, num_tokens: int) -> NDArray[np.uint64] | None:
    """Where sentences end, from where they begin."""
    return None if sentences is None else np.append(sentences[1:], num_tokens).astype(np.uint64)


def shard_entry(name: str, arrays: dict[str, Any]) -> dict[str, Any]:
    """What a unit's record says about a shard. arrays: those of its commit record."""
    return {
        "name": name,
        "num_documents": arrays["documents"]["length"] - 1,
        "num_tokens": arrays["tokens"]["length"],
        "num_sentences": arrays["sentences"]["length"] - 1 if "sentences" in arrays else None,
        "arrays": arrays,
    }


def require_shares(validation: float, test: float) -> None:
    """Raises UsageError for shares of validation and test that cannot be."""
    if not (min(validation, test) >= 0 and validation + test < 1):  # NaN is refused too
        option, given = ("test", test) if 0 <= validation < 1 else ("validation", validation)
        sentence = (
            f"validation is {validation} and test is {test}; give shares that are at least 0 and together less than 1, "
            "so that some text is left for training"
        )
        raise UsageError(sentence, "out-of-range", option=option, given=given)


def hash_bounds(validation: float, test: float) -> NDArray[np.uint64]:
    """The bounds [2] of the upper half of a hash, below which a document is in validation, and in test."""
    return np.array([round(validation * 2**32), round((validation + test) * 2**32)], np.uint64)
