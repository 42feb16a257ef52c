"""Finished units → a published dataset."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from os.path import exists
from pathlib import Path
from typing import Any

from bertdata.errors import BuildError, DatasetError, InputError
from bertdata.files import Stage, fsync_directory
from bertdata.format.arrays import array_name
from bertdata.format.manifest import MANIFEST, REPLACED, SPLITS, Manifest, read_manifest
from bertdata.format.origins import NamedInput, origins_name, prepare_directory, write_origins
from bertdata.format.shards import DIGESTS, TABLE
from bertdata.tokenize.tokenizer import LoadedTokenizer
from bertdata.types import SpecialTokens
from bertdata.write.staging import remove_staging
from bertdata.write.state import PLAN, BuildPlan, FinishedUnits, Tally, record_name
from bertdata.write.units import SPLIT_COUNTS

COUNTS = (*SPLIT_COUNTS, "special_ids_replaced", "skipped_rows", "text_bytes")
OPTION_COUNTS = {"removed_documents": "map", "duplicate_documents": "dedup"}  # name → setting that counts them
_OF_SHARDS = re.compile(rf"(?:{'|'.join(SPLITS)})-[0-9]{{5,}}\.(?:json|[a-z0-9_-]+\.npy)|{TABLE}|{DIGESTS}")
_NUMBER = re.compile(r"-([0-9]{5,})\.")  # of the unit, in the name of a file of a shard


def counts_of_text(tally: Tally, splits: Iterable[str], tokenizer: LoadedTokenizer, plan: BuildPlan) -> dict[str, Any]:
    """What the manifest of a build counts. splits: those that have documents."""
    names = [*COUNTS, *(name for name, setting in OPTION_COUNTS.items() if setting in plan.published)]
    return {
        **{name: tally.counts.get(name, 0) for name in names},
        "special_literals": {
            each: tally.counts[f"{each} inside"] for each in tokenizer.spellings if f"{each} inside" in tally.counts
        },
        "words": {split: tally.counts[f"{split}_words"] for split in splits},
    }


def no_documents(counts: Mapping[str, int]) -> InputError:
    """What a build says that has no document. counts: those of its manifest."""
    names = {"dropped_documents": "gave no token", "skipped_rows": "had no text", "removed_documents": "--map left out"}
    lost = {why: counts[name] for name, why in names.items() if counts.get(name)}
    reasons = " and ".join(f"{why}: {number:,}" for why, number in lost.items()) or "the inputs have no text"
    sentence = f"there is no document to build from ({reasons}); give inputs with text in them"
    return InputError(sentence, "empty", option="inputs", given=sum(lost.values()))


def publish(
    staging: Path,
    units: FinishedUnits,
    plan: BuildPlan,
    tokenizer: LoadedTokenizer,
    special: SpecialTokens,
    counts: Mapping[str, Any],
    if_none: InputError,
) -> None:
    """Moves all files of a dataset from `staging` to the directory that it is in, and writes the manifest last.

    special: of the tokenizer, with the separator of the documents. counts: of the manifest. If it is interrupted,
    running it again gives the same result. Raises BuildError if a file is not there, and `if_none` without a shard.
    """
    directory = staging.parent
    manifest = Manifest(
        token_dtype=tokenizer.token_dtype,
        special_tokens=special,
        tokenizer=file_digests(tokenizer),
        settings=plan.published,
        splits=units.splits(),
        counts=counts,
        tokenizer_name=plan.tokenizer_name,
    )
    if not manifest.splits:
        for path in staging.glob("unit-*"):  # they say nothing
            path.unlink()
        raise if_none
    origins = {shard.name: units.origins[shard.name] for shard in manifest.shards if units.origins}
    _require_all(staging, manifest, origins)
    with Stage(directory) as stage:
        for name, content in tokenizer.files.items():  # they stay in `staging`, where --finish reads them after a kill
            stage.write(name, content)
        manifest.write(stage)
        if (directory / MANIFEST).exists():
            os.replace(directory / MANIFEST, directory / REPLACED)
            fsync_directory(directory)
        if old := {name for name in os.listdir(directory) if _OF_SHARDS.fullmatch(name)}:
            for name in old.difference(name for _, name in _files(manifest, origins)):
                (directory / name).unlink()
        prepare_directory(directory, origins)
        for made, name in _files(manifest, origins):
            if made not in tokenizer.files and exists(f"{staging}/{made}"):
                os.replace(f"{staging}/{made}", f"{directory}/{name}")
        if origins:
            write_origins(
                directory,
                manifest.dataset_id,
                [NamedInput(each.name, each.size, each.version) for each in plan.inputs],
                input_format=plan.settings["format"],
                text_key=plan.settings["text_key"],
                shards=origins,
            )
        stage.publish()
    (directory / REPLACED).unlink(missing_ok=True)  # for which readers wait
    (staging / PLAN).unlink()  # without it there is no unfinished build
    remove_staging(staging)
    fsync_directory(directory)


def _require_all(staging: Path, manifest: Manifest, origins: Iterable[str]) -> None:
    """Raises BuildError if a file is not in `staging`, nor where an interrupted publication moved it.

    The unit that it is of is then no longer finished, so that the next command makes it again.
    """
    directory, may_be_moved = staging.parent, True
    if (directory / MANIFEST).exists():
        try:
            may_be_moved = read_manifest(directory).dataset_id == manifest.dataset_id
        except DatasetError:
            may_be_moved = False
        # else nothing is moved yet, and what has these names is of the older dataset
    lost = []
    for made, name in _files(manifest, origins):
        if not (exists(f"{staging}/{made}") or (may_be_moved and exists(f"{directory}/{name}"))):
            lost.append(made)
            if number := _NUMBER.search(made):
                (staging / record_name(int(number[1]))).unlink(missing_ok=True)
    if lost:
        sentence = f"{lost[0]} was removed from {directory} during the build; run the same command again to make it"
        raise BuildError(sentence, "parts-missing", option="out", given=lost[0])


def _files(manifest: Manifest, origins: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The name in `staging` and in the dataset of each file that is published, the manifest and its tables excepted."""
    yield from ((name, name) for name in manifest.tokenizer)
    for shard in manifest.shards:
        for name in (*(array_name(shard.name, array) for array in shard.arrays), f"{shard.name}.json"):
            yield name, name
    yield from ((array_name(shard, "origins"), origins_name(shard)) for shard in origins)


def file_digests(tokenizer: LoadedTokenizer) -> dict[str, str]:
    """File name → SHA-256 in hex, of the files that a dataset publishes of its tokenizer."""
    return {name: hashlib.sha256(content).hexdigest() for name, content in tokenizer.files.items()}
