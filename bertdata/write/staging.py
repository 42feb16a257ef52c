"""An unfinished build in the directory .build: its locks, its plan, its finished units, and its publication."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from os.path import exists
from pathlib import Path
from typing import Any

from bertdata.errors import BuildError, DatasetError, InputError, counted
from bertdata.files import TEMPORARY, Stage, fsync_directory, locked, make_directory, naming, write_file
from bertdata.format.arrays import array_file
from bertdata.format.manifest import MANIFEST, REPLACED, Manifest, read_manifest
from bertdata.format.origins import origins_name, prepare_directory, write_origins
from bertdata.format.records import FORMAT_VERSION, read_record, sealed_record
from bertdata.format.shards import DIGESTS, SPLITS, TABLE, Shard, Split
from bertdata.sources.inputs import Input, refresh_all
from bertdata.sources.plan import UNIT_RULE
from bertdata.tokenize.tokenizer import LoadedTokenizer
from bertdata.types import SpecialTokens

STAGING = ".build"
PLAN = "plan.json"
ATTEMPTS = "attempts-"  # prefix of the directory where the tasks of a cluster write
SPLIT_COUNTS = ("documents", "dropped_documents", "replaced_characters")  # also in the commit record of each shard
COUNTS = (*SPLIT_COUNTS, "special_ids_replaced", "skipped_rows", "text_bytes")
OPTION_COUNTS = {"removed_documents": "map", "duplicate_documents": "dedup"}  # name → the option that counts them
_ROWS_JOINED = 256  # shards to join at a time, because a single one takes 1 KB
_SHARD_FILE = rf"({'|'.join(SPLITS)})-[0-9]{{5,}}\.(json|[a-z0-9_-]+\.npy)"
_OF_SHARDS = re.compile(rf"{_SHARD_FILE}|{TABLE}|{DIGESTS}")
_OURS = re.compile(  # names in a staging directory; NFS renames removed open files to .nfs…
    rf"(\.nfs.+|(.+\.)?lock|(plan|replaced|tokenizer(_config|_name)?)\.json|(unit-[0-9]+|part-[0-9]+-of-[0-9]+)\.json|"
    rf"duplicates|hashes-[0-9]+|(removed-)?{ATTEMPTS}.*|{_SHARD_FILE})({TEMPORARY})?"
)
_NUMBER = re.compile(r"-([0-9]{5,})\.")  # the unit's number in the file names of its shards


@dataclass(frozen=True)
class BuildPlan:
    """Everything that determines the bytes of a dataset. An unfinished build continues only with the same plan."""

    settings: Mapping[str, Any]  # by command-line names
    published: Mapping[str, Any]  # the settings that are in the manifest
    inputs: tuple[Input, ...]
    tokenizer_name: str | None  # name of its directory or on the hub
    unit_rule: int = UNIT_RULE

    @classmethod
    def read(cls, staging: Path) -> BuildPlan | None:
        """Return the plan of an unfinished build, or None. Raise BuildError if a different version wrote it."""
        try:
            members = json.loads((staging / PLAN).read_bytes())
            plan = cls(**members | {"inputs": tuple(Input(*each) for each in members["inputs"])})
            if plan.unit_rule != UNIT_RULE:
                raise ValueError(plan.unit_rule)
            return plan
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, RecursionError):
            sentence = f"{staging / PLAN} is from a different version of bertdata; use that version, or --overwrite"
            raise BuildError(sentence, "other-version", option="out", given=staging.parent) from None

    def as_json(self) -> dict[str, Any]:
        """Return the plan in the form that is written."""
        return vars(self) | {"inputs": [[file.name, file.size, file.version] for file in self.inputs]}


@dataclass(frozen=True)
class Tally:
    """Counts over documents, in addition to the stored arrays."""

    counts: Counter[str] = field(default_factory=Counter)
    """"[SEP] inside" counts a special token that the text spells or the ids contain. An import has "ends with 3", which
    is not 0 if a document ends with id 3; if documents end with different ids, it has at least two such counts."""
    first: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Kind of problem → (number of the input, offset or row in it, ...) for the first document with this problem:

    "replaced": invalid bytes, "skipped": a skipped row, with the reason.
    """

    def add(self, other: Tally) -> None:
        """Add the counts of other documents."""
        self.counts.update(other.counts)
        for name, place in other.first.items():
            self.first[name] = min(place, self.first.get(name, place))


@dataclass(frozen=True)
class UnitRecord:
    """A finished unit."""

    unit: int
    tally: Tally
    shards: Mapping[str, Shard]  # split → its shard; empty splits are missing
    origins: Mapping[str, str]  # name of a shard → SHA-256 of its origins; {} for imports
    crc32: int | None = None  # CRC-32 of its items, if the input is an iterable

    def sealed(self) -> bytes:
        """Return the bytes of the record's file."""
        shards = {split: vars(shard) for split, shard in self.shards.items()}
        record = {**vars(self), "format_version": FORMAT_VERSION, "tally": vars(self.tally), "shards": shards}
        return sealed_record(record, indent=None)

    @classmethod
    def read(cls, path: Path) -> UnitRecord:
        """Read a record. Raises DatasetError if the file is missing or damaged."""
        record = read_record(path)
        counts, first = record["tally"]["counts"], record["tally"]["first"]
        tally = Tally(Counter(counts), {name: tuple(place) for name, place in first.items()})
        shards = {split: Shard(**entry) for split, entry in record["shards"].items()}
        return cls(record["unit"], tally, shards, record["origins"], record.get("crc32"))


def record_name(unit: int) -> str:
    """Return the file name of a unit's record. The file exists if the unit is finished."""
    return f"unit-{unit:05d}.json"


class FinishedUnits:
    """The finished units of an unfinished build. Several threads may add units at once.

    A record takes 3 KB, but a unit takes only 0.4 KB here, because all counts are added up. Raises DatasetError if a
    record is damaged.
    """

    def __init__(self, staging: Path) -> None:
        self.numbers, self.tally = set[int](), Tally()
        self.origins = dict[str, str]()  # name of a shard → SHA-256 of the origins of its documents
        self.checksums = dict[int, int]()  # number of a unit → CRC-32 of its items, if the input is an iterable
        self._shards = {split: list[Split]() for split in SPLITS}
        self._lock = threading.Lock()
        for path in staging.glob("unit-*.json"):
            self.add(UnitRecord.read(path))

    def add(self, record: UnitRecord) -> None:
        """Add a unit, unless it is there already."""
        with self._lock:
            for split, shard in record.shards.items():
                parts = self._shards[split]
                parts.append(Split.from_shards([shard]))
                if len(parts) > _ROWS_JOINED:
                    parts[:] = [Split.joined(parts)]
            self.origins |= record.origins
            self.tally.add(record.tally)
            self.numbers.add(record.unit)
            if record.crc32 is not None:
                self.checksums[record.unit] = record.crc32

    def splits(self) -> dict[str, Split]:
        """Return the nonempty splits, each with its shards in the order of the units."""
        return {split: Split.joined(parts) for split, parts in self._shards.items() if parts}


@contextmanager
def staging_directory(directory: Path, *, overwrite: bool, part: tuple[int, int] | None = None) -> Iterator[Path]:
    """Make and lock the directory .build of a dataset. All parts share the directory, and each has its own lock.

    A failure removes .build, unless it is of another command, a unit or a part is finished, or publication has begun.
    Raise BuildError if another process holds the lock, or if the dataset's directory holds a dataset (without
    `overwrite`) or other files.
    """
    staging = directory / STAGING
    require_usable(directory, overwrite=overwrite, is_new=not staging.exists())
    created = not directory.exists()
    busy, advice = f"{directory} is being built", "wait for it"
    with ExitStack() as locks:
        while True:  # until the locked directory still exists: a build that ends removes it
            is_new = not staging.exists()
            make_directory(staging)
            with suppress(FileNotFoundError):
                locks.enter_context(locked(staging / "lock", busy, advice, shared=part is not None))
                break
        if part is not None:
            lock_of_part = staging / part_name(*part).replace(".json", ".lock")
            locks.enter_context(locked(lock_of_part, f"part {part[0] + 1}/{part[1]} of {busy}", advice))
        try:
            require_usable(directory, overwrite=overwrite, is_new=is_new)  # a build may have ended or a pull begun
            with naming(directory):
                yield staging
        except Exception as error:  # not KeyboardInterrupt, after which the build can continue
            is_begun = any(staging.glob("unit-*")) or any(staging.glob("part-*.json"))  # a part may have no units
            is_begun |= getattr(error, "kind", "") == "other-settings"  # it is of another command
            # Without .build, files that a killed build has moved would look like foreign files.
            is_moved = not (directory / MANIFEST).exists() and any(path != staging for path in directory.iterdir())
            if part is None and not is_begun and (is_new or not is_moved):
                with suppress(OSError):
                    remove_staging(staging)
                if created and not any(directory.iterdir()):
                    directory.rmdir()
            raise


def remove_staging(staging: Path) -> None:
    """Remove the directory of a build. This process must hold its lock.

    Removes the lock last, because a new process may start as soon as the lock is gone. Then the directory stays.
    """
    for path in sorted(staging.iterdir(), key=lambda path: path.name == "lock"):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    try:
        staging.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
            raise


def require_usable(directory: Path, *, overwrite: bool, is_new: bool) -> None:
    """Raise BuildError if a directory holds a dataset (without `overwrite`) or files that no build wrote.

    is_new: there was no build before, so other files cannot be files that a build moved.
    """
    staging, why = directory / STAGING, None
    if directory.exists() and not directory.is_dir():
        why = f"{directory} is a file"
    elif staging.is_symlink() or (staging.exists() and not staging.is_dir()):
        why = f"{staging} is not a directory that a build made"
    elif foreign := next((path for path in staging.glob("*") if not _OURS.fullmatch(path.name)), None):
        why = f"a build would remove {foreign}, which no build wrote"
    elif (directory / MANIFEST).exists():
        if not overwrite and not (staging / PLAN).exists():
            why = f"{directory} already holds a dataset, and there is no --overwrite"
    elif is_new and directory.exists() and any(path != staging for path in directory.iterdir()):
        why = f"{directory} holds other files and no dataset"
    if why:
        raise BuildError(f"{why}; give an --out that does not exist yet", "out-exists", option="out", given=directory)


def continue_or_start(staging: Path, plan: BuildPlan, *, overwrite: bool, is_part: bool = False) -> None:
    """Keep an unfinished build with the same plan; else remove it and write the new plan.

    Always removes an unfinished build from a pipe, and with `overwrite` also one from an iterable, because their plans
    are all equal. Raise BuildError if the plans differ, without `overwrite`.
    """
    for left in staging.glob(f"{ATTEMPTS}*"):  # left by a killed command
        gone = left.with_name(f"removed-{left.name}")
        os.replace(left, gone)  # at once, so that processes that still write there fail
        shutil.rmtree(gone, ignore_errors=True)
    try:
        old = BuildPlan.read(staging)
    except BuildError:
        if not overwrite:
            raise
        old = None
    if old is not None and old.as_json() == json.loads(json.dumps(plan.as_json())):
        if not any(file.is_pipe or (overwrite and file.is_stream) for file in plan.inputs):
            return
    elif old is not None and not overwrite:
        raise _other_settings(staging.parent, old, plan, is_part=is_part)
    # Remove the plan first: without it, no command continues with files that a kill leaves.
    (staging / PLAN).unlink(missing_ok=True)
    for leftover in staging.iterdir():
        if leftover.suffix != ".lock" and leftover.name != "lock" and not leftover.is_dir():
            leftover.unlink()
    write_file(staging / PLAN, json.dumps(plan.as_json()).encode())


def _other_settings(directory: Path, old: BuildPlan, new: BuildPlan, *, is_part: bool) -> BuildError:
    """Return the error for an unfinished build with a different plan. It names the differences."""
    both = {name: (old.settings.get(name), new.settings.get(name)) for name in {**old.settings, **new.settings}}
    differing = [f"{name} was {before!r} and is {after!r}" for name, (before, after) in both.items() if before != after]
    if old.inputs != new.inputs:
        before, after = (", ".join(f"{each} ({each.size} bytes)" for each in plan.inputs) for plan in (old, new))
        differing.append(f"the input was {before} and is {after}" if before != after else f"{after} was changed since")
    discard = "use --overwrite to discard it"
    if is_part:  # other parts may be built now
        discard = f"remove {directory / STAGING} once no part is being made, and make all parts again"
    changes = "; ".join(differing)
    sentence = f"{directory} holds an unfinished build with other settings: {changes}; finish that build, or {discard}"
    return BuildError(sentence, "other-settings", option="out", given=directory)


def begin(
    staging: Path,
    plan: BuildPlan,
    make_tokenizer: Callable[[], LoadedTokenizer],
    say: Callable[[str], None],
    *,
    overwrite: bool,
    is_part: bool = False,
) -> tuple[LoadedTokenizer, FinishedUnits]:
    """Continue an unfinished build or start a new one. Return its tokenizer and its finished units.

    make_tokenizer: called by one part at a time. Prints the notes of the tokenizer, roles without a token, and the
    number of kept units.
    """
    with locked(staging / "planning.lock", wait=True):
        continue_or_start(staging, plan, overwrite=overwrite, is_part=is_part)
        tokenizer = make_tokenizer()
        for name, content in tokenizer.files.items():
            write_file(staging / name, content)
    for note in tokenizer.notes:
        say(note)
    if roles := tokenizer.missing_roles:
        names = ", ".join(f"[{role.upper()}]" for role in roles)
        kind, effect = "warning", "the Loader refuses this dataset for masked language modelling"
        if list(roles) == ["pad"]:
            kind, effect = "note", "padding has the id 0"
        say(f"{kind}: the tokenizer has no {names}, so {effect}; --special-tokens adds what is missing")
    units = FinishedUnits(staging)
    for items in filter(None, (file.items for file in plan.inputs)):
        items.expect(units.checksums)
    if units.numbers and not is_part:
        say(f"continuing: keeping {counted(len(units.numbers), 'finished unit')} of an earlier run")
    return tokenizer, units


def require_unchanged(files: Sequence[Input], advice: str, staging: Path | None = None) -> None:
    """Raise InputError if an input changed since the build in `staging` began. No command continues this build."""
    files = [file for file in files if not file.is_stream]  # a pipe may no longer exist
    if changed := [file.name for file, later in zip(files, refresh_all(files), strict=True) if file != later]:
        if staging:
            (staging / PLAN).unlink()
        sentence = f"{changed[0]} changed while it was read; {advice} when nobody changes it"
        raise InputError(sentence, "changed", option="inputs", given=changed[0])


def part_name(number: int, total: int) -> str:
    """Return the name of the file that lists the units of part `number`, from 0."""
    return f"part-{number + 1}-of-{total}.json"


def counts_of_text(tally: Tally, splits: Iterable[str], tokenizer: LoadedTokenizer, plan: BuildPlan) -> dict[str, Any]:
    """Return the counts of a build for its manifest. splits: the nonempty splits."""
    names = [*COUNTS, *(name for name, setting in OPTION_COUNTS.items() if setting in plan.published)]
    return {
        **{name: tally.counts.get(name, 0) for name in names},
        "special_literals": {
            each: tally.counts[f"{each} inside"] for each in tokenizer.spellings if f"{each} inside" in tally.counts
        },
        "words": {split: tally.counts[f"{split}_words"] for split in splits},
    }


def no_documents(counts: Mapping[str, int]) -> InputError:
    """Return the error for a build without a document. counts: the counts for its manifest."""
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
    """Move all files of a dataset from `staging` to its parent directory, and write the manifest last.

    special: the special tokens, with the separator of the documents. counts: for the manifest. After an interruption, a
    second call gives the same result. Raise BuildError if a file is missing, and `if_none` if there is no shard.
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
        for path in staging.glob("unit-*"):  # records without documents
            path.unlink()
        raise if_none
    origins = {shard.name: units.origins[shard.name] for shard in manifest.shards if units.origins}
    _require_all(staging, manifest, origins)
    with Stage(directory) as stage:
        for name, content in tokenizer.files.items():  # they stay in `staging`: --finish reads them after a kill
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
                plan.as_json()["inputs"],
                input_format=plan.settings["format"],
                text_key=plan.settings["text_key"],
                shards=origins,
            )
        stage.publish()
    (directory / REPLACED).unlink(missing_ok=True)  # readers wait for the manifest
    (staging / PLAN).unlink()  # without a plan there is no unfinished build
    remove_staging(staging)
    fsync_directory(directory)


def _require_all(staging: Path, manifest: Manifest, origins: Iterable[str]) -> None:
    """Raise BuildError if a file is neither in `staging` nor where an interrupted publication moved it.

    Then removes the record of its unit, so that the next command makes the unit again.
    """
    directory, may_be_moved = staging.parent, True
    if (directory / MANIFEST).exists():
        try:
            may_be_moved = read_manifest(directory).dataset_id == manifest.dataset_id
        except DatasetError:
            may_be_moved = False
        # else nothing is moved yet, and files with these names belong to the older dataset
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
    """Yield (name in `staging`, name in the dataset) of each published file except the manifest and its tables."""
    yield from ((name, name) for name, _ in manifest.files())
    yield from ((array_file(shard, "origins"), origins_name(shard)) for shard in origins)


def file_digests(tokenizer: LoadedTokenizer) -> dict[str, str]:
    """Return the SHA-256 in hex of the tokenizer's files in a dataset, by file name."""
    return {name: hashlib.sha256(content).hexdigest() for name, content in tokenizer.files.items()}
