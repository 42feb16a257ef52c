"""Text → a published dataset.

The inputs are cut into units of a fixed number of bytes, snapped to documents; a unit becomes at most one shard per
split, whose bytes depend on the text, the tokenizer and the settings alone. Threads encode blocks, one place writes
them in order. Killed at any point, the same command continues from the finished units and ends in the same bytes.

Memory: the blocks in flight, two per worker. Nothing outside the output directory is written.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertdata import _kernels, tokens
from bertdata.errors import BuildError, InputError, UsageError
from bertdata.inputs import describe, find_inputs, is_compressed, is_stream
from bertdata.manifest import MANIFEST, REPLACED, SPLITS, Manifest, Shard, Split
from bertdata.reader import Dataset
from bertdata.shard import (
    FORMAT_VERSION,
    array_path,
    fsync_directory,
    locked,
    make_directory,
    open_plain,
    read_record,
    write_file,
    write_record,
)
from bertdata.text import Block, TextFormat, read_blocks
from bertdata.units import COUNTS, UnitWriter, encode_all

STAGING = ".build"
_SHARD_FILE = re.compile(rf"(?:{'|'.join(SPLITS)})-[0-9]{{5,}}\.(?:json|[a-z_]+\.npy)")
SAMPLE_BYTES = 100 << 20  # of text, for training a vocabulary
Progress = Callable[[int, int], None]
"""Called now and then with bytes of input done and in all."""


@dataclass(frozen=True, kw_only=True)
class BuildReport:
    """What a build did beyond what its manifest says."""

    dataset: Dataset
    first_replaced: str | None  # 'file, byte n' of the first invalid byte
    first_skipped: str | None  # 'file, line n: why' of the first bad row that was left out
    reused_units: int  # finished by an earlier, interrupted run


def build(
    inputs: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str | None = None,
    vocab_size: int = 30522,
    documents: str = "blank",
    sentences: str = "none",
    words: str | None = None,
    format: str | None = None,
    text_key: str = "text",
    on_error: str = "fail",
    validation: float = 0.01,
    test: float = 0.0,
    shard_size: int = 1 << 30,
    workers: int | None = None,
    max_documents: int | None = None,
    strict: bool = False,
    part: tuple[int, int] | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda done, total: None,
) -> BuildReport | None:
    """Builds a dataset in directory `out` from text files; the options are those of `bertdata build`.

    part: (i, n), i in [0, n), makes every n-th shard and publishes nothing: the result is None, and `finish` publishes
    when all parts are made.

    words: module:function of a segmenter, text → its words, whose beginnings are stored for whole word masks; called
    from several threads. tokenizer: a path or hub name; None trains a WordPiece vocabulary of `vocab_size` on the text.
    `say` is told what happens, a line at a time. Raises UsageError, InputError, TokenizerError or BuildError; OSError
    if the disk fails.
    """
    form = TextFormat(
        documents=documents, kind=format, text_key=text_key, on_error=on_error, strict=strict, shard_size=shard_size,
        max_documents=max_documents,
    )  # fmt: skip
    if sentences not in ("none", "line"):
        raise UsageError(f"sentences is {sentences!r}; give 'none' or 'line'")
    segment = _segmenter(words) if words else None
    validation, test = float(validation), float(test)  # 0 and 0.0 are one setting
    if not (min(validation, test) >= 0 and validation + test < 1):  # NaN is refused too
        raise UsageError(f"validation {validation} and test {test} must be shares that leave some text for training")
    if workers is not None and workers < 1:
        raise UsageError(f"workers is {workers}; give at least 1")
    if not str(out):
        raise UsageError("--out is empty; give a directory")
    paths = find_inputs([inputs] if isinstance(inputs, str | Path) else inputs)
    described = describe(paths)
    streams = [str(path) for path in paths if is_stream(path)]
    if streams and tokenizer is None:
        raise UsageError(
            f"{streams[0]} can be read only once, so there must be a --tokenizer; train-tokenizer makes one"
        )
    if part is not None:
        if not 0 <= part[0] < part[1]:
            raise UsageError(f"part is {part}; give (i, n) with 0 <= i < n")
        for given, why in ((streams, "a pipe"), (overwrite, "--overwrite"), (max_documents, "--max-documents")):
            if given:
                raise UsageError(f"--part does not go with {why}: each part sees only its own shards")
    loaded = tokens.load(tokenizer) if tokenizer is not None else None
    settings = {
        "documents": documents,
        "sentences": sentences,
        "validation": validation,
        "test": test,
        "shard_size": shard_size,
        "max_documents": max_documents,
    }
    if words:
        settings["words"] = words
    chosen = f"SHA-256 {_file_digests(loaded)[tokens.TOKENIZER][:16]}" if loaded else f"trained, {vocab_size} tokens"
    plan = {
        "settings": settings
        | {"format": format, "text_key": text_key, "on_error": on_error, "strict": strict, "tokenizer": chosen},
        "published": settings,
        "inputs": described,
    }
    directory = Path(out)
    with _staging(directory, overwrite=overwrite, part=part) as staging:
        with _planning(staging):
            _continue_or_start(staging, plan, overwrite=overwrite, anew=bool(streams))
            loaded = loaded or _trained(staging, paths, form, vocab_size, say)
            for name, content in loaded.files.items():
                write_file(staging / name, content)
        units = _units_done(staging)
        reused = len(units)
        if reused and part is None:
            say(f"continuing: {reused} finished shard{'s' * (reused > 1)} of an earlier run kept")
        writer = UnitWriter(staging, loaded, form, (validation, test), sentences=sentences == "line", segment=segment)
        with _kernels.compiling_told(say):
            writer.ready(Block.empty())
        total = sum(entry["bytes"] or 0 for entry in described)
        threads = workers or len(os.sched_getaffinity(0))
        try:
            encode_all(paths, form, loaded, writer, units, threads, lambda done: progress(done, total), part or (0, 1))
            progress(total, total)
        finally:
            writer.discard()
        if describe(paths) != described:
            raise InputError("an input changed while it was read; run again with --overwrite when it is at rest")
        if part is not None:
            made = sorted(unit for unit in units if unit % part[1] == part[0])
            write_record(staging / _part_name(*part), {"format_version": FORMAT_VERSION, "units": made})
            return None
        _publish(directory, staging, units, loaded, settings)
    return _report(directory, units, paths, reused)


def _segmenter(spec: str) -> tokens.Segment:
    """The function named module:function."""
    module, _, name = spec.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"--words {spec} names no function ({error}); give module:function, of text to its words, such as jieba:cut"
        ) from None
    return found  # type: ignore[no-any-return]


def finish(out: str | Path) -> BuildReport:
    """Publishes a dataset whose parts are all made. Raises BuildError, naming those that are not."""
    directory = Path(out)
    staging = directory / STAGING
    parts = sorted(path.name for path in staging.glob("part-*-of-*.json"))
    if not parts:
        raise BuildError(f"{directory} has no part that is made; run bertdata build --part 1/n and the others first")
    totals = sorted({int(name.removesuffix(".json").split("-of-")[1]) for name in parts})
    lacking = {n: [f"{k + 1}/{n}" for k in range(n) if _part_name(k, n) not in parts] for n in totals}
    total = next((n for n in totals if not lacking[n]), 0)
    if not total and len(totals) > 1:
        raise BuildError(f"{directory} has parts of {' and of '.join(map(str, totals))}; make all of one of them")
    if not total:
        missing = ", ".join(lacking[totals[0]])
        raise BuildError(f"{directory} lacks part {missing}; run bertdata build --part for each first")
    with _staging(directory, overwrite=True):
        units = _units_done(staging)
        made = [staging / _part_name(number, total) for number in range(total)]
        expected = {unit for path in made for unit in read_record(path)["units"]}
        if expected - units.keys():
            raise BuildError(
                f"{staging} lost the records of units {sorted(expected - units.keys())}; make the parts again"
            )
        plan = json.loads((staging / "plan.json").read_bytes())
        _publish(directory, staging, units, tokens.load(str(staging)), plan["published"])
    return _report(directory, units, [Path(entry["path"]) for entry in plan["inputs"]], 0)


def _part_name(number: int, total: int) -> str:
    return f"part-{number + 1}-of-{total}.json"


def _report(directory: Path, units: dict[int, dict[str, Any]], paths: list[Path], reused: int) -> BuildReport:
    in_order = [unit for _, unit in sorted(units.items())]
    place = next((unit["first_replaced"] for unit in in_order if unit["first_replaced"]), None)
    return BuildReport(
        dataset=Dataset(directory),
        first_replaced=f"{paths[place[0]]}, byte {place[1]}" if place else None,
        first_skipped=next((unit["first_skipped"] for unit in in_order if unit["first_skipped"]), None),
        reused_units=reused,
    )


def train_tokenizer(
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    vocab_size: int = 30522,
    form: TextFormat | None = None,
) -> tokens.Tokenizer:
    """Trains a WordPiece vocabulary on at most 100 MB of the text and writes tokenizer.json and its config to `out`."""
    paths, form, directory = find_inputs(inputs), form or TextFormat(documents="line"), Path(out)
    describe(paths)
    if any((directory / name).exists() for name in (tokens.TOKENIZER, MANIFEST)):
        raise BuildError(f"{directory} already holds a tokenizer; give another --out")
    trained = tokens.train_wordpiece(_sample(paths, form), vocab_size)
    make_directory(directory)
    for name, content in trained.files.items():
        write_file(directory / name, content)
    return trained


# ---------------------------------------------------------------------------------------------- the output directory


@contextmanager
def _staging(directory: Path, *, overwrite: bool, part: tuple[int, int] | None = None) -> Iterator[Path]:
    """The directory's .build, locked; parts share it, each having its own lock besides."""
    if directory.exists() and not directory.is_dir():
        raise BuildError(f"{directory} is a file; give a directory that does not exist yet, or an empty one")
    staging = directory / STAGING
    if (directory / MANIFEST).exists():
        if not overwrite and not (staging / "plan.json").exists():
            raise BuildError(f"{directory} already holds a dataset; use --overwrite to replace it, or another --out")
    elif directory.exists() and not staging.exists() and any(directory.iterdir()):
        raise BuildError(f"{directory} holds other files and no dataset; give a directory that is new or empty")
    created = not directory.exists()
    make_directory(staging)
    busy, advice = f"{directory} is being built", "wait for it"
    with ExitStack() as locks:
        locks.enter_context(locked(staging / "lock", busy, advice, shared=part is not None))
        if part is not None:
            mine = staging / _part_name(*part).replace(".json", ".lock")
            locks.enter_context(locked(mine, f"part {part[0] + 1}/{part[1]} of {busy}", advice))
        try:
            yield staging
        except Exception as error:  # a failure, not an interruption: leave nothing behind unless a shard is finished
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(directory)
            if part is None and not any(staging.glob("unit-*")):
                shutil.rmtree(staging, ignore_errors=True)
                if created and not any(directory.iterdir()):
                    directory.rmdir()
            raise


@contextmanager
def _planning(staging: Path) -> Iterator[None]:
    """One process at a time; the others wait."""
    with open_plain(staging / "planning.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _continue_or_start(staging: Path, plan: dict[str, Any], *, overwrite: bool, anew: bool) -> None:
    """anew: what an earlier run finished is of no use, as the input cannot be read again from there."""
    path = staging / "plan.json"
    try:
        old = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        old = None
    if old == plan and not anew:
        return
    if old is not None and old != plan and not overwrite:
        settings, inputs = old["settings"], old["inputs"]
        differing = [
            f"{name} was {settings.get(name)!r} and is now {value!r}"
            for name, value in plan["settings"].items()
            if settings.get(name) != value
        ]
        if inputs != plan["inputs"]:
            was, now = (", ".join(f"{e['path']} ({e['bytes']} bytes)" for e in p["inputs"]) for p in (old, plan))
            differing.append(f"the input was {was} and is now {now}" if was != now else f"{now} was changed since")
        raise BuildError(
            f"{staging.parent} holds an unfinished build with other settings: {'; '.join(differing)}. Repeat the old "
            "command to finish it, or use --overwrite to discard it"
        )
    for leftover in staging.iterdir():
        if leftover.suffix != ".lock" and leftover.name != "lock":
            leftover.unlink()
    write_file(path, json.dumps(plan).encode())


def _units_done(staging: Path) -> dict[int, dict[str, Any]]:
    units = {}
    for path in staging.glob("unit-*.json"):
        units[int(path.stem.removeprefix("unit-"))] = read_record(path)
    return units


def _file_digests(tokenizer: tokens.Tokenizer) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in tokenizer.files.items()}


def _publish(
    directory: Path,
    staging: Path,
    units: dict[int, dict[str, Any]],
    tokenizer: tokens.Tokenizer,
    settings: dict[str, Any],
) -> None:
    """Moves everything up, the manifest last. Interrupted anywhere, running it again ends in the same place."""
    names = {name: [u["shards"][name] for _, u in sorted(units.items()) if name in u["shards"]] for name in SPLITS}
    splits = {
        split: Split(tuple(Shard(**{**shard, "arrays": _without_crc(shard["arrays"])}) for shard in shards))
        for split, shards in names.items()
        if shards
    }
    literals = {
        token: sum(u["special_literals"].get(token, 0) for u in units.values()) for token in tokenizer.spellings
    }
    counts = {name: sum(unit[name] for unit in units.values()) for name in COUNTS}
    counts["special_literals"] = {token: count for token, count in literals.items() if count}
    if not splits:
        empty, bad = counts["dropped_documents"], counts["skipped_rows"]
        what = ["there is nothing but blank lines"] if not (empty or bad) else []
        what += [f"{empty} documents gave no token"] * bool(empty) + [f"{bad} bad rows were left out"] * bool(bad)
        for path in staging.glob("unit-*"):
            path.unlink()
        raise InputError(f"no document to build from: {' and '.join(what)}; give a file with text in it")
    files = list(tokenizer.files)
    for shard in (shard for split in splits.values() for shard in split.shards):
        files += [*(array_path(Path(), shard.name, array).name for array in shard.arrays), f"{shard.name}.json"]
    if (directory / MANIFEST).exists():
        os.replace(directory / MANIFEST, directory / REPLACED)
        fsync_directory(directory)
    for old in directory.iterdir():
        if _SHARD_FILE.fullmatch(old.name) and old.name not in files:
            old.unlink()
    for name in files:
        if (staging / name).exists():
            os.replace(staging / name, directory / name)
    fsync_directory(directory)
    Manifest(
        token_dtype=tokenizer.token_dtype,
        special_tokens=tokenizer.special,
        tokenizer=_file_digests(tokenizer),
        settings=settings,
        splits=splits,
        counts=counts,
    ).write(directory)
    (staging / "plan.json").unlink()  # from here on there is nothing to continue
    shutil.rmtree(staging)
    fsync_directory(directory)


def _without_crc(arrays: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {k: v for k, v in entry.items() if k != "crc32"} for name, entry in arrays.items()}


# -------------------------------------------------------------------------------------------- vocabulary


def _trained(
    staging: Path, paths: list[Path], form: TextFormat, vocab_size: int, say: Callable[[str], None]
) -> tokens.Tokenizer:
    if all((staging / name).exists() for name in (tokens.TOKENIZER, tokens.TOKENIZER_CONFIG)):
        return tokens.load(str(staging))
    sample = _sample(paths, form)
    sampled = sum(len(text) for text in sample)
    say(f"no --tokenizer given: training a lower-casing WordPiece vocabulary on {sampled / 1e6:.1f} MB of the text")
    trained = tokens.train_wordpiece(sample, vocab_size)
    got = trained.special.vocab_size
    say(
        f"vocabulary of {got:,} tokens trained"
        + (f"; the text gives no more ({vocab_size:,} asked)" * (got < vocab_size))
    )
    return trained


def _sample(paths: list[Path], form: TextFormat) -> list[str]:
    """The lines of at most 100 MB of text, in evenly spaced blocks of about 1 MiB; of all of it, if it is less.

    Of a pipe, the first 100 MB.
    """
    if any(is_stream(path) for path in paths):  # no more than one pass: the first of it
        size = 0
    elif any(is_compressed(path) or path.suffix in (".parquet", ".arrow", ".feather") for path in paths):
        size = sum(len(block.data) for block in read_blocks(paths, form))
    else:
        size = sum(path.stat().st_size for path in paths)
    stride = max(1, -(-size // SAMPLE_BYTES))
    texts: list[str] = []
    taken = 0
    for number, block in enumerate(read_blocks(paths, form)):
        if number % stride == 0 and taken < SAMPLE_BYTES:
            texts += block.data.decode().split("\n")
            taken += len(block.data)
    if not any(texts):
        raise InputError("no document to build from: there is nothing but blank lines; give a file with text in it")
    return texts
