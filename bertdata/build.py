"""Text → a published dataset.

The inputs are cut into units of a fixed number of bytes, snapped to documents; a unit becomes at most one shard per
split, whose bytes depend on the text, the tokenizer and the settings alone. Threads encode blocks, one place writes
them in order. Killed at any point, the same command continues from the finished units and ends in the same bytes.

Memory: the blocks in flight, two per worker. Nothing outside the output directory is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertdata import tokens
from bertdata.errors import BuildError, InputError, UsageError
from bertdata.manifest import MANIFEST, SPLITS, Manifest, Shard, Split
from bertdata.reader import Dataset
from bertdata.shard import (
    array_path,
    fsync_directory,
    locked,
    read_record,
    write_file,
)
from bertdata.text import TextFormat, check_inputs, read_blocks
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
    reused_units: int  # finished by an earlier, interrupted run


def build(
    inputs: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str | None = None,
    vocab_size: int = 30522,
    documents: str = "blank",
    sentences: str = "none",
    text_key: str = "text",
    validation: float = 0.01,
    test: float = 0.0,
    shard_size: int = 1 << 30,
    workers: int | None = None,
    max_documents: int | None = None,
    strict: bool = False,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda done, total: None,
) -> BuildReport:
    """Builds a dataset in directory `out` from text files; the options are those of `bertdata build`.

    tokenizer: a path or hub name; None trains a WordPiece vocabulary of `vocab_size` on the text. `say` is told what
    happens, a line at a time. Raises UsageError, InputError, TokenizerError or BuildError; OSError if the disk fails.
    """
    form = TextFormat(
        documents=documents, text_key=text_key, strict=strict, shard_size=shard_size, max_documents=max_documents
    )
    if sentences not in ("none", "line"):
        raise UsageError(f"sentences is {sentences!r}; give 'none' or 'line'")
    validation, test = float(validation), float(test)  # 0 and 0.0 are one setting
    if not (min(validation, test) >= 0 and validation + test < 1):  # NaN is refused too
        raise UsageError(f"validation {validation} and test {test} must be shares that leave some text for training")
    if workers is not None and workers < 1:
        raise UsageError(f"workers is {workers}; give at least 1")
    if not str(out):
        raise UsageError("--out is empty; give a directory")
    paths = [Path(path) for path in ([inputs] if isinstance(inputs, str | Path) else inputs)]
    described = check_inputs(paths)
    loaded = tokens.load(tokenizer) if tokenizer is not None else None
    settings = {
        "documents": documents,
        "sentences": sentences,
        "validation": validation,
        "test": test,
        "shard_size": shard_size,
        "max_documents": max_documents,
    }
    chosen = f"SHA-256 {_file_digests(loaded)[tokens.TOKENIZER][:16]}" if loaded else f"trained, {vocab_size} tokens"
    plan = {"settings": settings | {"text_key": text_key, "strict": strict, "tokenizer": chosen}, "inputs": described}
    directory = Path(out)
    with _staging(directory, overwrite=overwrite) as staging:
        _continue_or_start(staging, plan, overwrite=overwrite)
        loaded = loaded or _trained(staging, paths, form, vocab_size, say)
        for name, content in loaded.files.items():
            write_file(staging / name, content)
        units = _units_done(staging)
        reused = len(units)
        if reused:
            say(f"continuing: {reused} finished shard{'s' * (reused > 1)} of an earlier run kept")
        shares = validation, test
        writer = UnitWriter(staging, loaded, form, shares, sentences=sentences == "line")
        try:
            encode_all(paths, form, loaded, writer, units, workers or len(os.sched_getaffinity(0)), progress)
        finally:
            writer.discard()
        if check_inputs(paths) != described:
            raise InputError("an input changed while it was read; run again with --overwrite when it is at rest")
        _publish(directory, staging, units, loaded, settings)
    firsts = [unit["first_replaced"] for _, unit in sorted(units.items()) if unit["first_replaced"]]
    first = f"{paths[firsts[0][0]]}, byte {firsts[0][1]}" if firsts else None
    return BuildReport(dataset=Dataset(directory), first_replaced=first, reused_units=reused)


def train_tokenizer(
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    vocab_size: int = 30522,
    form: TextFormat | None = None,
) -> tokens.Tokenizer:
    """Trains a WordPiece vocabulary on at most 100 MB of the text and writes tokenizer.json and its config to `out`."""
    paths, form, directory = [Path(path) for path in inputs], form or TextFormat(documents="line"), Path(out)
    check_inputs(paths)
    if any((directory / name).exists() for name in (tokens.TOKENIZER, MANIFEST)):
        raise BuildError(f"{directory} already holds a tokenizer; give another --out")
    trained = tokens.train_wordpiece(_sample(paths, form), vocab_size)
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in trained.files.items():
        write_file(directory / name, content)
    return trained


# ---------------------------------------------------------------------------------------------- the output directory


@contextmanager
def _staging(directory: Path, *, overwrite: bool) -> Iterator[Path]:
    """The directory's .build, locked."""
    if directory.exists() and not directory.is_dir():
        raise BuildError(f"{directory} is a file; give a directory that does not exist yet, or an empty one")
    staging = directory / STAGING
    if (directory / MANIFEST).exists():
        if not overwrite and not (staging / "plan.json").exists():
            raise BuildError(f"{directory} already holds a dataset; use --overwrite to replace it, or another --out")
    elif directory.exists() and not staging.exists() and any(directory.iterdir()):
        raise BuildError(f"{directory} holds other files and no dataset; give a directory that is new or empty")
    created = not directory.exists()
    staging.mkdir(parents=True, exist_ok=True)
    with locked(staging / "lock", f"{directory} is being built", "wait for it"):
        try:
            yield staging
        except Exception as error:  # a failure, not an interruption: leave nothing behind unless a shard is finished
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(directory)
            if not any(staging.glob("unit-*")):
                shutil.rmtree(staging, ignore_errors=True)
                if created and not any(directory.iterdir()):
                    directory.rmdir()
            raise


def _continue_or_start(staging: Path, plan: dict[str, Any], *, overwrite: bool) -> None:
    path = staging / "plan.json"
    try:
        old = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        old = None
    if old == plan:
        return
    if old is not None and not overwrite:
        settings, inputs = old["settings"], old["inputs"]
        differing = [
            f"{name} was {settings.get(name)!r} and is now {value!r}"
            for name, value in plan["settings"].items()
            if settings.get(name) != value
        ]
        if inputs != plan["inputs"]:
            was, now = (", ".join(f"{e['path']} ({e['bytes']:,} bytes)" for e in p["inputs"]) for p in (old, plan))
            differing.append(f"the input was {was} and is now {now}" if was != now else f"{now} was changed since")
        raise BuildError(
            f"{staging.parent} holds an unfinished build with other settings: {'; '.join(differing)}. Repeat the old "
            "command to finish it, or use --overwrite to discard it"
        )
    for leftover in staging.iterdir():
        if leftover.name != "lock":
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
        what = f"{counts['dropped_documents']} documents gave no token" if units else "there is nothing but blank lines"
        for path in staging.glob("unit-*"):
            path.unlink()
        raise InputError(f"no document to build from: {what}; give a file with text in it")
    files = list(tokenizer.files)
    for shard in (shard for split in splits.values() for shard in split.shards):
        files += [*(array_path(Path(), shard.name, array).name for array in shard.arrays), f"{shard.name}.json"]
    (directory / MANIFEST).unlink(missing_ok=True)
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
    """The lines of at most 100 MB of text, in evenly spaced blocks of about 1 MiB; of all of it, if it is less."""
    if any(path.suffix in (".gz", ".parquet") for path in paths):  # only a pass over them tells how much they hold
        size = sum(len(block.data) for block in read_blocks(paths, form))
    else:
        size = sum(path.stat().st_size for path in paths)
    stride = max(1, -(-size // SAMPLE_BYTES))
    texts: list[str] = []
    for number, block in enumerate(read_blocks(paths, form)):
        if number % stride == 0:
            texts += block.data.decode().split("\n")
    if not any(texts):
        raise InputError("no document to build from: there is nothing but blank lines; give a file with text in it")
    return texts
