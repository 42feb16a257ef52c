"""Ids from other libraries → a published dataset, with no id added, removed or changed; a dataset → Parquet.

The documents of all inputs, concatenated, are divided into units of about `shard_size` bytes of ids. After a kill, run
the same command again: the import continues after its finished units and writes the same bytes. One thread reads and
writes; all other threads check and hash. Memory: four blocks of ids for each thread, or a few copies of the longest
document or Arrow record batch.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import BuildError, InputError, UsageError, damaged
from bertdata.files import TEMPORARY, Stage, fsync_directory, make_directory, sync
from bertdata.format.dataset import Dataset
from bertdata.format.manifest import Shard
from bertdata.jit import announcing_compilation
from bertdata.options import IdsFormat, Machines, Shares
from bertdata.sources.blocks import runs_of
from bertdata.sources.ids import Ids, IdsFile, format_of, in_blocks, open_ids, prefix_of, write_parquet
from bertdata.sources.iterables import names_of, open_arrays
from bertdata.sources.plan import Part
from bertdata.tokenize.load import load, name_of
from bertdata.tokenize.tokenizer import TOKENIZER, LoadedTokenizer
from bertdata.types import Progress, SpecialTokens
from bertdata.urls import is_remote, require_local_output, without_secrets
from bertdata.write.kernels import count_special
from bertdata.write.machines import make_units
from bertdata.write.staging import (
    COUNTS,
    SPLIT_COUNTS,
    BuildPlan,
    Tally,
    begin,
    file_digests,
    publish,
    require_unchanged,
    staging_directory,
)
from bertdata.write.units import EncodedDocuments, special_counts, splits_of


def import_ids(
    inputs: str | os.PathLike[str] | Iterable[Any],
    out: str | Path,
    *,
    tokenizer: str,
    special_tokens: bool = False,
    ids: IdsFormat | None = None,
    shares: Shares | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda done, total: None,
) -> Dataset:
    """Import files of ids, and publish them as a dataset in the directory `out`.

    inputs: one name of a file or directory, or a list or tuple of names. Any other iterable, such as a generator,
    yields a list or an array of ids for each document, and is read like the texts of `build`. tokenizer: a path or hub
    name of the tokenizer that made the ids. say, progress: as in `build`.

    Raises UsageError, InputError, TokenizerError or BuildError, and OSError if the disk fails.
    """
    ids, shares = ids or IdsFormat(), shares or Shares()
    end_token, dtype, shard_size = ids.end_token, ids.dtype, ids.shard_size
    names, kind = names_of(inputs), "rows"
    if names is not None:
        kind = _format_of(names, ids.kind)
    elif (ids.kind, end_token, dtype) != ("auto", None, None):
        sentence = "format, end_token and dtype are for files, not for an iterable; leave them out"
        raise UsageError(sentence, "conflict", option="inputs")
    require_local_output(str(out))
    loaded = load(tokenizer)
    if special_tokens:
        loaded = loaded.with_special_tokens()
    settings: dict[str, Any] = {"imported": kind, **vars(shares), "shard_size": shard_size}
    end_id = _end_id(loaded, kind, end_token)
    if end_id is not None:
        settings["end_token"] = loaded.spell(end_id)
    files = [open_arrays(inputs)] if names is None else _opened(names, kind, end_id, dtype)
    for note in filter(None, (file.note for file in files)):
        say(note)
    if files[0].dtype and len({file.dtype for file in files}) == 1:
        settings["dtype"] = files[0].dtype
    read = [each for file in files for each in file.files]
    unpublished = {} if dtype is None else {"dtype": dtype}  # the ids show whether there was one
    unpublished["tokenizer"] = f"SHA-256 {file_digests(loaded)[TOKENIZER][:16]}"
    plan = BuildPlan({**settings, **unpublished}, settings, tuple(read), name_of(tokenizer))
    encoder = IdsEncoder(loaded, shares, files, shard_size)
    with staging_directory(Path(out), overwrite=overwrite) as staging:
        _, units = begin(staging, plan, lambda: loaded, say, overwrite=overwrite)
        total = sum(file.num_bytes for file in files)
        with announcing_compilation(say):
            make_units(
                [Part(range(sys.maxsize), total)],  # one, because the number of units is unknown before all is read
                encoder,
                staging,
                units.numbers,
                units.add,
                workers=Machines().threads,
                progress=lambda done: progress(done, total),
                items=files[0].files[0].items,
            )
        progress(total, total)
        require_unchanged(read, "run again with --overwrite", staging)
        special, counts = _counts(units.tally, loaded, sum(file.empty_sentences for file in files))
        nothing = f"no document to import: there is no id in {', '.join(map(str, read))}; give ids"
        publish(staging, units, plan, loaded, special, counts, InputError(nothing, "empty", option="inputs"))
    return Dataset(Path(out))


def _opened(names: Sequence[str], kind: str, end_id: int | None, dtype: str | None) -> list[IdsFile]:
    """Open the files of ids with these names."""
    if kind == "megatron":  # a shell pattern names both files of a dataset
        first = {prefix_of(name): name for name in reversed(names)}
        names = [name for name in names if first[prefix_of(name)] == name]
    return [open_ids(name, kind, end_id, dtype) for name in names]


def _format_of(names: Sequence[str], kind: str) -> str:
    """Return the format of all inputs. Raise UsageError if there is no input or more than one format."""
    if not names:
        raise UsageError("there is no input; give a file of ids", "missing", option="inputs")
    for name in names:
        if is_remote(name):
            url = without_secrets(name)
            sentence = f"{url} is a URL, and ids are imported from files of this machine; copy it here first"
            raise UsageError(sentence, "bad-url", option="inputs", given=url)
    formats = {format_of(name) if kind == "auto" else kind for name in names}
    if len(formats) != 1:
        sentence = f"the inputs are of the formats {', '.join(sorted(formats))}; give files of one format"
        raise UsageError(sentence, "conflict", option="inputs")
    return formats.pop()


def _end_id(tokenizer: LoadedTokenizer, kind: str, spelling: str | None) -> int | None:
    """Return the id of the token that ends documents, or None if the format stores where documents end."""
    if kind != "nanogpt":
        if spelling is not None:
            sentence = f"--end-token is for nanogpt, and {kind} says itself where documents end; leave it out"
            raise UsageError(sentence, "conflict", option="end_token", given=spelling)
        return None
    special, known = tokenizer.special, " ".join(tokenizer.spellings[:10]) or "none"
    end_id = special.eos if special.eos is not None else special.sep
    if spelling is not None:
        end_id = dict(zip(tokenizer.spellings, special.special_ids, strict=True)).get(spelling)
    if end_id is None:
        sentence = f"the tokenizer has no end token {spelling or ''}; give --end-token, one of: {known}"
        raise UsageError(sentence, "unknown" if spelling else "missing", option="end_token", given=spelling)
    return end_id


class IdsEncoder:
    """Encoder of ids: checks, counts and hashes them. Several threads may use it at once."""

    def __init__(self, tokenizer: LoadedTokenizer, shares: Shares, files: Sequence[IdsFile], shard_size: int) -> None:
        """shard_size: bytes of stored ids in a unit."""
        self.files, self.shard_size, self.keeps_empty = files, shard_size, not any(shares.limits)
        special_ids, vocab_size = list(tokenizer.special.special_ids), tokenizer.special.vocab_size
        self.shares, self.dtype = shares, np.dtype(tokenizer.token_dtype)
        self._tokenizer, self._sentences = tokenizer, any(file.has_sentences for file in files)
        self._num_special, self._number_of = len(special_ids), np.full(vocab_size, -1, np.int32)
        self._number_of[special_ids] = np.arange(len(special_ids))
        borders = np.append(np.append(-1, np.flatnonzero(self._number_of >= 0)), vocab_size)
        widest = int(np.diff(borders).argmax())
        self._plain = int(borders[widest]) + 1, int(borders[widest + 1])  # longest range of ids without a special one

    def find(self, units: range, finished: Container[int]) -> Iterator[Ids]:
        """Yield the documents of all files, in order, except documents of finished units.

        A document belongs to the unit of its first id. An empty document belongs to the unit of the document before it.
        """
        first_missing = next(unit for unit in units if unit not in finished)
        skipped = -(-first_missing * self.shard_size // self.dtype.itemsize)
        num_ids = before = unit = 0
        for file in self.files:
            end = num_ids
            for some in file.documents(max(0, skipped - num_ids)):
                start = end if some.first is None else num_ids + some.first
                lengths, end = np.diff(some.documents), start + some.ids.size
                begins = (start + some.documents[:-1]) * self.dtype.itemsize // self.shard_size
                unit_of = np.maximum.accumulate(np.where(lengths > 0, begins, unit))
                for unit, first, stop in runs_of(unit_of):  # noqa: B007  (a document without an id needs the last one)
                    if items := file.files[0].items:
                        start, stop_id = some.documents[[first, stop]]
                        items.add(unit, lengths[first:stop], some.ids[start:stop_id].astype(np.int64))
                    if unit not in finished:
                        yield some.between(first, stop)._replace(unit=unit, bytes_read=before + some.bytes_read)
            num_ids = max(end, num_ids + file.num_ids)
            before += file.num_bytes

    def encode(self, some: Ids) -> EncodedDocuments:
        """Raise InputError for an id outside the vocabulary."""
        documents, special = some.documents, np.zeros(self._num_special, np.int64)
        given = some.ids.view(np.int64) if some.ids.dtype == np.uint64 else some.ids
        wrong = count_special(given, self._number_of, self._plain, special)
        if wrong >= 0:
            place, size = some.place(wrong), self._number_of.size
            sentence = f"{place}: id {some.ids[wrong]} is not below {size:,}; give the --tokenizer that made the ids"
            raise InputError(sentence, "id-outside-vocabulary", option="tokenizer")
        ids, has_ids = given.astype(self.dtype, copy=False), np.diff(documents) > 0
        sentences = documents[:-1][has_ids] if some.sentences is None else some.sentences
        counts = Counter(special_counts(self._tokenizer, special))
        counts["ids_bytes"] = some.ids.nbytes
        if ids.size:
            ends = documents[1:][has_ids]
            last, last_sentences = ids[ends - 1], sentences[np.searchsorted(sentences, ends) - 1]
            counts.update({f"ends with {last.min()}": 1, f"ends with {last.max()}": 1})
            counts["bare"] = int(np.count_nonzero(ends - last_sentences == 1))
        return EncodedDocuments(
            unit=some.unit,
            ids=ids,
            offsets=documents,
            sentences=sentences if self._sentences else None,
            splits=splits_of(self.shares, ids.view(np.uint8), documents * ids.itemsize, 0),
            has_ids=has_ids,
            replaced=np.zeros(has_ids.size, np.int64),
            tally=Tally(counts),
            bytes_read=some.bytes_read,
        )


def _counts(tally: Tally, tokenizer: LoadedTokenizer, empty_sentences: int) -> tuple[SpecialTokens, dict[str, Any]]:
    """Return the special tokens, and the counts of an import.

    The separator is the special id that ends every document, if there is one.
    """
    special, separator = tokenizer.special, None
    counts: dict[str, Any] = dict.fromkeys(COUNTS, 0)
    counts |= {name: tally.counts.get(name, 0) for name in (*SPLIT_COUNTS, "ids_bytes")}
    spelled = zip(tokenizer.spellings, special.special_ids, strict=True)
    of_token = {token: tally.counts[f"{spelling} inside"] for spelling, token in spelled}
    last_ids = {int(name.removeprefix("ends with ")) for name in tally.counts if name.startswith("ends with ")}
    # bare: documents, or last sentences, of only one id
    if len(last_ids) == 1 and last_ids <= of_token.keys() - {special.unk} and not tally.counts["bare"]:
        (separator,) = last_ids
        of_token[separator] -= counts["documents"]
    inside = {tokenizer.spell(token): count for token, count in of_token.items() if count and token != special.unk}
    counts |= {"special_literals": {}, "special_ids_inside": inside, "empty_sentences": empty_sentences}
    return replace(special, separator=separator), counts


# ------------------------------------------------------------------------------------------------------------ export


def export(
    dataset: Dataset,
    out: str | Path,
    *,
    split: str = "train",
    progress: Progress = lambda done, total: None,
) -> list[Path]:
    """Write a Parquet file for each shard of a split to the directory `out`, and return the paths.

    Each row is a document including its separator, in the column `input_ids`, a list of int32. progress: called with
    the bytes of ids done so far and the total bytes. Memory: 16 bytes for each document of a shard.

    Raises UsageError if the dataset has no such split, BuildError if a file exists, DatasetError for damaged files.
    """
    require_local_output(str(out))
    if split not in dataset.splits:
        sentence = f"{dataset.path} has no split {split!r}; give one of {', '.join(dataset.splits)}"
        raise UsageError(sentence, "no-split", option="split", given=split)
    shards, directory, num_done = dataset.splits[split], Path(out), 0
    itemsize, total = np.dtype(dataset.manifest.token_dtype).itemsize, dataset.splits[split].num_tokens

    def documents(ids: NDArray[Any], offsets: NDArray[np.int64]) -> Iterator[tuple[NDArray[Any], NDArray[np.int64]]]:
        nonlocal num_done
        for _, some in in_blocks(offsets):
            yield ids[int(some[0]) : int(some[-1])], some - some[0]
            num_done += int(some[-1] - some[0])
            progress(num_done * itemsize, total * itemsize)

    make_directory(directory)
    paths = [directory / f"{shard.name}.parquet" for shard in shards]
    _require_new(paths)
    with Stage(directory) as stage:
        for number, (shard, path) in enumerate(zip(shards, paths, strict=True)):
            with stage.open(path.name) as file:
                write_parquet(file, documents(dataset.tokens(split, number), _offsets(dataset, shard)))
                sync(file)
        fsync_directory(directory)  # the next export finds the temporary name of the last file
        try:
            stage.publish()
        except BaseException:
            for path in paths:
                path.unlink(missing_ok=True)
            raise
    return paths


def _offsets(dataset: Dataset, shard: Shard) -> NDArray[np.int64]:
    """Return the offsets of the documents of a shard, including empty documents in their places. Checks their order."""
    offsets = dataset.array(shard.name, "documents").astype(np.int64)
    if "empty" in shard.arrays:  # number of documents before each empty one
        empty = dataset.array(shard.name, "empty").astype(np.int64)
        if empty.size and not 0 <= empty.min() <= empty.max() < offsets.size:
            raise damaged(dataset.path)
        offsets = np.insert(offsets, empty, offsets[empty])
    if np.diff(offsets).min(initial=0) < 0:
        raise damaged(dataset.path)
    return offsets


def _require_new(paths: Sequence[Path]) -> None:
    """Raise BuildError if a file exists that is not from an interrupted export.

    If the last file has its temporary name, an export was killed before it renamed that file. Then files with final
    names are complete, and are written again.
    """
    temporary = {path: path.with_name(path.name + TEMPORARY) for path in paths}
    if temporary[paths[-1]].exists() and not paths[-1].exists():
        for path in paths:
            if path.exists() and not temporary[path].exists():
                path.unlink()
        fsync_directory(paths[0].parent)
    if existing := next((path for path in paths if path.exists()), None):
        sentence = f"{existing} exists already; remove it, or give a different --out"
        raise BuildError(sentence, "out-exists", option="out", given=str(existing))
