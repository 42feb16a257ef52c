"""Ids that others made → a published dataset, with no id added, left out or changed.

The documents of all inputs, end to end, are divided into units of about `shard_size` bytes of ids. An import that was
killed continues from its finished units, when the same command is run again, and gives the same bytes. It takes one
thread, and the memory of a block of ids or of the longest document.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bertdata.choices import IDS_FORMATS
from bertdata.errors import InputError, UsageError, counted
from bertdata.files import write_file
from bertdata.format.dataset import Dataset
from bertdata.format.manifest import Manifest
from bertdata.format.records import FORMAT_VERSION, write_record
from bertdata.format.shard import ShardWriter
from bertdata.jit import announcing_compilation
from bertdata.sources.find import require_directory
from bertdata.sources.ids import Ids, IdsFile, format_of, open_ids
from bertdata.sources.inputs import now
from bertdata.sources.split import UNIT_RULE
from bertdata.tokenize.load import load, name_of
from bertdata.tokenize.tokenizer import TOKENIZER, Tokenizer
from bertdata.urls import is_remote, without_secrets
from bertdata.write.dataset import Progress, missing_roles_warning
from bertdata.write.kernels import count_special, hash_documents
from bertdata.write.publish import file_digests, move_up, splits_of
from bertdata.write.staging import continue_or_start, finished_units, staging_directory
from bertdata.write.units import (
    COUNTS,
    SPLIT_COUNTS,
    SPLITS_BY_HASH,
    ends_of,
    hash_bounds,
    require_shares,
    select,
    shard_entry,
    unit_name,
)


def import_ids(
    inputs: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str,
    special_tokens: bool = False,
    format: str = "auto",
    end_token: str | None = None,
    validation: float = 0.01,
    test: float = 0.0,
    shard_size: int = 1 << 30,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda done, total: None,
) -> Dataset:
    """Imports files of ids and publishes them as a dataset in directory `out`. The options are those of the command.

    format: one of choices.IDS_FORMATS, or "auto", by the names. tokenizer: a path or hub name; the one that made the
    ids. end_token: the token that ends a document of nanoGPT; None: the end token of the tokenizer.

    Raises UsageError, InputError, TokenizerError or BuildError, and OSError if the disk fails.
    """
    names = [str(name) for name in ([inputs] if isinstance(inputs, str | Path) else inputs)]
    validation, test = float(validation), float(test)
    require_shares(validation, test)
    if shard_size < 1:
        raise UsageError(
            f"shard_size is {shard_size}; give at least 1, in bytes of ids",
            "out-of-range",
            option="shard_size",
            given=shard_size,
        )
    if format not in ("auto", *IDS_FORMATS):
        known = ", ".join(("auto", *IDS_FORMATS))
        raise UsageError(f"format is {format!r}; give one of {known}", "unknown", option="format", given=format)
    if not names:
        raise UsageError("there is no input; give a file of ids", "missing", option="inputs")
    require_directory(str(out))
    for name in names:
        if is_remote(name):
            url = without_secrets(name)
            raise UsageError(
                f"{url} is a URL, and ids are imported from files of this machine; copy it here first",
                "bad-url",
                option="inputs",
                given=url,
            )
    formats = {format_of(name) if format == "auto" else format for name in names}
    if len(formats) != 1:
        raise UsageError(
            f"the inputs are of the formats {', '.join(sorted(formats))}; give files of one format",
            "conflict",
            option="inputs",
        )
    loaded, (kind,) = load(tokenizer), formats
    if special_tokens:
        loaded = loaded.with_special_tokens()
    settings: dict[str, Any] = {"imported": kind, "validation": validation, "test": test, "shard_size": shard_size}
    end_id = None
    if kind == "nanogpt":
        end_id = _end_id(loaded, end_token)
        settings["end_token"] = loaded.spell(end_id)
    elif end_token is not None:
        raise UsageError(
            f"--end-token is for nanogpt, and {kind} says itself where documents end; leave it out",
            "conflict",
            option="end_token",
            given=end_token,
        )
    files = [open_ids(name, kind, end_id) for name in names]
    dtypes = {file.dtype for file in files}
    if len(dtypes) == 1 and None not in dtypes:
        settings["dtype"] = files[0].dtype
    read = [each for file in files for each in file.files]
    plan = {
        "unit_rule": UNIT_RULE,
        "settings": settings | {"tokenizer": f"SHA-256 {file_digests(loaded)[TOKENIZER][:16]}"},
        "published": settings,
        "inputs": [{"path": file.name, "bytes": file.size, "version": file.version} for file in read],
    }
    directory = Path(out)
    with staging_directory(directory, overwrite=overwrite) as staging:
        continue_or_start(staging, plan, overwrite=overwrite, start_over=False)
        for name, content in loaded.files.items():
            write_file(staging / name, content)
        if loaded.missing_roles:
            say(missing_roles_warning(loaded.missing_roles))
        units = finished_units(staging)
        if units:
            say(f"continuing: keeping {counted(len(units), 'finished unit')} of an earlier run")
        writer = _Writer(staging, loaded, settings, sentences=any(file.has_sentences for file in files))
        with announcing_compilation(say):
            _store_all(files, writer, units, progress)
        if changed := [file.name for file, later in zip(read, now(read), strict=True) if file != later]:
            raise InputError(
                f"{changed[0]} changed while it was read; run again with --overwrite when nobody changes it",
                "changed",
                option="inputs",
                given=changed[0],
            )
        manifest = _manifest(units, loaded, settings, name_of(tokenizer), sum(file.empty_sentences for file in files))
        if not manifest.splits:
            for path in staging.glob("unit-*"):
                path.unlink()
            raise InputError(
                f"no document to import: there is no id in {', '.join(names)}; give files with ids",
                "empty",
                option="inputs",
            )
        move_up(directory, staging, units, plan, manifest)
    return Dataset(directory)


def _end_id(tokenizer: Tokenizer, spelling: str | None) -> int:
    """The id of the token that ends documents."""
    special = tokenizer.special
    known = " ".join(tokenizer.spellings[:10])
    if not known:
        raise UsageError(
            "the tokenizer has no special token, and nanogpt needs one that ends documents; give another --tokenizer",
            "tokenizer-lacks-token",
            option="tokenizer",
        )
    if spelling is not None:
        if spelling not in tokenizer.spellings:
            raise UsageError(
                f"the tokenizer has no special token {spelling}; give --end-token, one of {known}",
                "unknown",
                option="end_token",
                given=spelling,
            )
        return dict(zip(tokenizer.spellings, special.special_ids, strict=True))[spelling]
    end_id = special.eos if special.eos is not None else special.sep
    if end_id is None:
        raise UsageError(
            "the tokenizer has no end token, and nanogpt needs one that ends documents; give --end-token, one of "
            f"{known}",
            "missing",
            option="end_token",
        )
    return end_id


def _store_all(files: list[IdsFile], writer: _Writer, units: dict[int, dict[str, Any]], progress: Progress) -> None:
    """Writes the units that are not finished, and adds their records to `units`."""
    total, finished = sum(file.num_bytes for file in files), set(units)
    num_ids = before = unit = 0
    itemsize = np.dtype(writer.tokenizer.token_dtype).itemsize
    try:
        for file in files:
            for some in file.documents():
                lengths = np.diff(some.documents)
                # A document belongs to the unit of its first id, and one without an id to that of the one before it.
                starts = np.where(lengths > 0, (num_ids + some.documents[:-1]) * itemsize // writer.shard_size, unit)
                unit_of = np.maximum.accumulate(starts)
                cuts = [0, *(np.flatnonzero(np.diff(unit_of)) + 1).tolist(), unit_of.size]
                for first, stop in pairwise(cuts):
                    if writer.unit not in (None, unit_of[first]):
                        units |= writer.commit()
                    unit = int(unit_of[first])
                    if unit not in finished:
                        writer.append(unit, _slice(some, first, stop))
                num_ids += some.ids.size
                progress(before + some.bytes_read, total)
            before += file.num_bytes
        if writer.unit is not None:
            units |= writer.commit()
        progress(total, total)
    finally:
        writer.discard()


def _slice(some: Ids, first: int, stop: int) -> Ids:
    """Documents `first` to `stop` - 1."""
    if stop - first == some.documents.size - 1:
        return some
    start, end = int(some.documents[first]), int(some.documents[stop])
    sentences = some.sentences
    if sentences is not None:
        sentences = sentences[np.searchsorted(sentences, start) : np.searchsorted(sentences, end)] - start
    documents = some.documents[first : stop + 1] - start
    return Ids(some.ids[start:end], documents, sentences, lambda index: some.place(start + index), some.bytes_read)


@dataclass
class _Unit:
    """What is known of a unit while it is written."""

    number: int
    writers: dict[str, ShardWriter]
    counts: dict[str, dict[str, int]]  # split → what its commit record counts
    num_bytes: int = 0  # of ids, as they were read
    last_ids: frozenset[int] = frozenset()  # some of those with which documents end; one only if all end with it
    num_bare: int = 0  # documents of one id, or whose last sentence is one id


class _Writer:
    """Writes the documents of one unit after the other to the shards of their splits."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, settings: dict[str, Any], *, sentences: bool) -> None:
        """sentences: store where they begin."""
        self.directory, self.tokenizer, self.sentences = directory, tokenizer, sentences
        self.shard_size: int = settings["shard_size"]
        self._below = hash_bounds(settings["validation"], settings["test"])
        self._special_ids = list(tokenizer.special.special_ids)
        self._is_special = np.zeros(tokenizer.special.vocab_size, np.bool_)
        self._is_special[self._special_ids] = True
        borders = np.append(np.append(-1, np.flatnonzero(self._is_special)), self._is_special.size)
        widest = int(np.diff(borders).argmax())
        self._plain = int(borders[widest]) + 1, int(borders[widest + 1])  # the most ids side by side, none special
        self._counts = np.zeros(tokenizer.special.vocab_size, np.int64)
        self._unit: _Unit | None = None

    @property
    def unit(self) -> int | None:
        """The unit that is being written."""
        return self._unit.number if self._unit else None

    def append(self, number: int, some: Ids) -> None:
        """Adds documents of unit `number`. Raises InputError for an id outside the vocabulary."""
        if self._unit is None:
            self._unit = _Unit(number, {}, {split: dict.fromkeys(SPLIT_COUNTS, 0) for split in SPLITS_BY_HASH})
            self._counts[:] = 0
        unit, documents = self._unit, some.documents
        given = some.ids.view(np.int64) if some.ids.dtype == np.uint64 else some.ids
        wrong = count_special(given, self._is_special, self._plain, self._counts)
        if wrong >= 0:
            raise InputError(
                f"{some.place(wrong)}: id {some.ids[wrong]} is outside the vocabulary of {self._is_special.size:,} "
                "ids; give the --tokenizer that made the ids",
                "id-outside-vocabulary",
                option="tokenizer",
            )
        ids = given.astype(self.tokenizer.token_dtype, copy=False)
        unit.num_bytes += some.ids.nbytes
        has_ids = np.diff(documents) > 0
        sentences = documents[:-1][has_ids] if some.sentences is None else some.sentences
        if ids.size:
            ends = documents[1:][has_ids]
            last_ids, last_sentences = ids[ends - 1], sentences[np.searchsorted(sentences, ends) - 1]
            unit.last_ids |= {int(last_ids.min()), int(last_ids.max())}
            unit.num_bare += int((ends - last_sentences == 1).sum())
        splits = np.full(has_ids.size, SPLITS_BY_HASH.index("train"))
        if self._below.any():
            hashes = np.empty(has_ids.size, np.uint64)
            hash_documents(ids.view(np.uint8), documents * ids.itemsize, 0, hashes)
            splits = np.searchsorted(self._below, hashes >> np.uint64(32), side="right")
        for index, split in enumerate(SPLITS_BY_HASH):
            chosen = splits == index
            kept = chosen & has_ids
            num_kept, num_empty = int(kept.sum()), int((chosen & ~has_ids).sum())
            unit.counts[split]["documents"] += num_kept
            unit.counts[split]["dropped_documents"] += num_empty
            keeps_empty = num_empty and not self._below.any()
            if not (num_kept or keeps_empty):
                continue
            if split not in unit.writers:
                unit.writers[split] = ShardWriter(
                    self.directory, f"{split}-{number:05d}", split=split, token_dtype=self.tokenizer.token_dtype,
                    sentences=self.sentences,
                )  # fmt: skip
            empty = np.cumsum(kept)[~kept] if keeps_empty else None
            offsets, begins, chosen_ids = select(kept, documents, sentences if self.sentences else None, ids)
            sentence_ends = ends_of(begins, chosen_ids.size)
            unit.writers[split].append(chosen_ids, offsets[1:].astype(np.uint64), sentence_ends, empty=empty)

    def commit(self) -> dict[int, dict[str, Any]]:
        """Finishes the shards of the unit, then writes its record. Returns the record by the unit's number."""
        unit = self._unit
        assert unit is not None  # noqa: S101  (append came before)
        shards = {}
        for split, writer in unit.writers.items():
            counts = unit.counts[split]
            if counts["documents"]:  # else there is nothing but documents without an id in all inputs
                input_range = unit.number * self.shard_size, (unit.number + 1) * self.shard_size
                record = writer.commit(input_range=input_range, counts=counts)
                shards[split] = shard_entry(writer.name, record["arrays"])
            else:
                writer.discard()
        record = {name: sum(counts[name] for counts in unit.counts.values()) for name in SPLIT_COUNTS} | {
            "format_version": FORMAT_VERSION,
            "shards": shards,
            "ids_bytes": unit.num_bytes,
            "special_ids": self._counts[self._special_ids].tolist(),
            "last_ids": sorted(unit.last_ids),
            "bare": unit.num_bare,
        }
        write_record(self.directory / unit_name(unit.number), record)
        self._unit = None
        return {unit.number: record}

    def discard(self) -> None:
        """Removes the files of the unit that is not finished, if there is one."""
        if self._unit is not None:
            for writer in self._unit.writers.values():
                writer.discard()


def _manifest(
    units: dict[int, dict[str, Any]],
    tokenizer: Tokenizer,
    settings: dict[str, Any],
    tokenizer_name: str | None,
    empty_sentences: int,
) -> Manifest:
    """The manifest of an import. The separator is the special id with which every document ends, if there is one."""
    counts: dict[str, Any] = dict.fromkeys(COUNTS, 0)
    counts |= {name: sum(unit[name] for unit in units.values()) for name in (*SPLIT_COUNTS, "ids_bytes")}
    special, special_counts = tokenizer.special, dict.fromkeys(tokenizer.special.special_ids, 0)
    for unit in units.values():
        for token, count in zip(special_counts, unit["special_ids"], strict=True):
            special_counts[token] += count
    last_ids = {token for unit in units.values() for token in unit["last_ids"]}
    separator = None
    if (
        len(last_ids) == 1
        and last_ids <= special_counts.keys() - {special.unk}
        and not any(unit["bare"] for unit in units.values())
    ):
        (separator,) = last_ids
        special_counts[separator] -= counts["documents"]
    inside = {
        tokenizer.spell(token): count for token, count in special_counts.items() if count and token != special.unk
    }
    counts |= {"special_literals": {}, "special_ids_inside": inside, "empty_sentences": empty_sentences}
    return Manifest(
        token_dtype=tokenizer.token_dtype,
        special_tokens=replace(special, separator=separator),
        tokenizer=file_digests(tokenizer),
        settings=settings,
        splits=splits_of(units),
        counts=counts,
        tokenizer_name=tokenizer_name,
    )
