"""Finished units → a published dataset."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertdata.errors import BuildError, InputError
from bertdata.files import fsync_directory
from bertdata.format.arrays import array_path
from bertdata.format.manifest import MANIFEST, REPLACED, SPLITS, Manifest
from bertdata.format.origins import NamedInput, array_name, prepare_directory, write_origins
from bertdata.format.table import DIGESTS, TABLE
from bertdata.tokenize.tokenizer import Tokenizer
from bertdata.write.state import PLAN, BuildPlan, UnitRecord, splits_of, tally_of
from bertdata.write.units import SPLIT_COUNTS

COUNTS = (*SPLIT_COUNTS, "special_ids_replaced", "skipped_rows", "text_bytes")
OPTION_COUNTS = {"removed_documents": "map", "duplicate_documents": "dedup"}  # name → setting that counts them
_SHARD_FILE = re.compile(rf"(?:{'|'.join(SPLITS)})-[0-9]{{5,}}\.(?:json|[a-z_]+\.npy)")


def manifest_of_text(
    units: Mapping[int, UnitRecord], tokenizer: Tokenizer, plan: BuildPlan, tokenizer_name: str | None
) -> Manifest:
    """The manifest of a build. units: all of them."""
    tally = tally_of(units)
    names = [*COUNTS, *(name for name, setting in OPTION_COUNTS.items() if setting in plan.published)]
    counts: dict[str, Any] = {name: tally.counts.get(name, 0) for name in names}
    counts["special_literals"] = {
        token: tally.special[token] for token in tokenizer.spellings if token in tally.special
    }
    splits = splits_of(units)
    counts["words"] = {split: tally.counts[f"{split}_words"] for split in splits}
    return Manifest(
        token_dtype=tokenizer.token_dtype,
        special_tokens=tokenizer.special,
        tokenizer=file_digests(tokenizer),
        settings=plan.published,
        splits=splits,
        counts=counts,
        tokenizer_name=tokenizer_name,
    )


def no_documents(counts: Mapping[str, int]) -> InputError:
    """What a build says that has no document. counts: those of its manifest."""
    dropped, skipped, removed = (
        counts.get(name, 0) for name in ("dropped_documents", "skipped_rows", "removed_documents")
    )
    counted = {"gave no token": dropped, "had no text and were skipped": skipped, "were left out by --map": removed}
    reasons = [f"{number:,} of the documents {what}" for what, number in counted.items() if number]
    nothing = f"there is no document to build from: {' and '.join(reasons) or 'all lines are blank'}"
    if removed:
        sentence = f"{nothing}; give a --map that keeps some, or other files"
        return InputError(sentence, "bad-function", option="map", given=removed)
    return InputError(f"{nothing}; give a file with text in it", "empty", option="inputs", given=dropped + skipped)


def publish(
    directory: Path, staging: Path, units: Mapping[int, UnitRecord], plan: BuildPlan, manifest: Manifest
) -> None:
    """Moves all files that a manifest names from `staging` to `directory`, and writes the manifest last.

    If it is interrupted, running it again gives the same result. Raises BuildError if a file is not there.
    """
    files = list(manifest.tokenizer)
    for shard in (shard for split in manifest.splits.values() for shard in split.shards):
        files += [*(array_path(Path(), shard.name, array).name for array in shard.arrays), f"{shard.name}.json"]
    for name in files:
        if not (staging / name).exists() and not (directory / name).exists():  # where an interrupted run moved it
            raise _lost(directory, name)
    if (directory / MANIFEST).exists():
        os.replace(directory / MANIFEST, directory / REPLACED)
        fsync_directory(directory)
    for table in (TABLE, DIGESTS):
        (directory / table).unlink(missing_ok=True)
    named = set(files)
    for old in directory.iterdir():
        if _SHARD_FILE.fullmatch(old.name) and old.name not in named:
            old.unlink()
    for name in files:
        if (staging / name).exists():
            os.replace(staging / name, directory / name)
    _publish_origins(directory, staging, units, plan, manifest)
    fsync_directory(directory)
    manifest.write(directory)
    (directory / REPLACED).unlink(missing_ok=True)  # for which readers wait
    (staging / PLAN).unlink()  # without it there is no unfinished build
    shutil.rmtree(staging)
    fsync_directory(directory)


def _publish_origins(
    directory: Path, staging: Path, units: Mapping[int, UnitRecord], plan: BuildPlan, manifest: Manifest
) -> None:
    """Moves the origins; an import has none."""
    digests = {name: sha256 for unit in units.values() for name, sha256 in unit.origins.items()}
    names = [shard.name for split in manifest.splits.values() for shard in split.shards] if digests else []
    shards = {name: digests[name] for name in names}
    prepare_directory(directory, shards)
    if not shards:
        return
    for name in shards:
        if (made := array_path(staging, name, "origins")).exists():
            os.replace(made, directory / array_name(name))
        elif not (directory / array_name(name)).exists():
            raise _lost(directory, made.name)
    write_origins(
        directory, manifest.dataset_id, [NamedInput(each.name, each.size, each.version) for each in plan.inputs],
        input_format=plan.settings["format"], text_key=plan.settings["text_key"], shards=shards,
    )  # fmt: skip


def _lost(directory: Path, name: str) -> BuildError:
    sentence = f"{name} was removed from {directory} during the build; use --overwrite to build the dataset again"
    return BuildError(sentence, "parts-missing", option="out", given=name)


def file_digests(tokenizer: Tokenizer) -> dict[str, str]:
    """File name → SHA-256 in hex, of the files that a dataset publishes of its tokenizer."""
    return {name: hashlib.sha256(content).hexdigest() for name, content in tokenizer.files.items()}
