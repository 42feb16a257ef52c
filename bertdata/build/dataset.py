"""Text → a published dataset.

The inputs are cut into units of a fixed number of bytes, snapped to documents; a unit becomes at most one shard per
split, whose bytes depend on the text, the tokenizer and the settings alone. Threads encode blocks, one place writes
them in order. Killed at any point, the same command continues from the finished units and ends in the same bytes.

Memory: the blocks in flight, two per worker. Nothing outside the output directory is written.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertdata.build.publish import file_digests, publish
from bertdata.build.staging import STAGING, continue_or_start, finished_units, part_name, planning, staging_directory
from bertdata.build.units import UnitWriter, encode_all
from bertdata.build.vocabulary import trained_tokenizer
from bertdata.errors import BuildError, InputError, UsageError
from bertdata.files import write_file
from bertdata.format.dataset import Dataset
from bertdata.format.records import FORMAT_VERSION, read_record, write_record
from bertdata.jit import compiling_told
from bertdata.sources.blocks import Block
from bertdata.sources.documents import TextFormat
from bertdata.sources.find import describe, find_inputs, is_stream
from bertdata.tokenize.load import load
from bertdata.tokenize.tokenizer import TOKENIZER, Segment

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
    loaded = load(tokenizer) if tokenizer is not None else None
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
    chosen = f"SHA-256 {file_digests(loaded)[TOKENIZER][:16]}" if loaded else f"trained, {vocab_size} tokens"
    plan = {
        "settings": settings
        | {"format": format, "text_key": text_key, "on_error": on_error, "strict": strict, "tokenizer": chosen},
        "published": settings,
        "inputs": described,
    }
    directory = Path(out)
    with staging_directory(directory, overwrite=overwrite, part=part) as staging:
        with planning(staging):
            continue_or_start(staging, plan, overwrite=overwrite, anew=bool(streams))
            loaded = loaded or trained_tokenizer(staging, paths, form, vocab_size, say)
            for name, content in loaded.files.items():
                write_file(staging / name, content)
        units = finished_units(staging)
        reused = len(units)
        if reused and part is None:
            say(f"continuing: {reused} finished shard{'s' * (reused > 1)} of an earlier run kept")
        writer = UnitWriter(staging, loaded, form, (validation, test), sentences=sentences == "line", segment=segment)
        with compiling_told(say):
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
            write_record(staging / part_name(*part), {"format_version": FORMAT_VERSION, "units": made})
            return None
        publish(directory, staging, units, loaded, settings)
    return _report(directory, units, paths, reused)


def _segmenter(spec: str) -> Segment:
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
    lacking = {n: [f"{k + 1}/{n}" for k in range(n) if part_name(k, n) not in parts] for n in totals}
    total = next((n for n in totals if not lacking[n]), 0)
    if not total and len(totals) > 1:
        raise BuildError(f"{directory} has parts of {' and of '.join(map(str, totals))}; make all of one of them")
    if not total:
        missing = ", ".join(lacking[totals[0]])
        raise BuildError(f"{directory} lacks part {missing}; run bertdata build --part for each first")
    with staging_directory(directory, overwrite=True):
        units = finished_units(staging)
        made = [staging / part_name(number, total) for number in range(total)]
        expected = {unit for path in made for unit in read_record(path)["units"]}
        if expected - units.keys():
            raise BuildError(
                f"{staging} lost the records of units {sorted(expected - units.keys())}; make the parts again"
            )
        plan = json.loads((staging / "plan.json").read_bytes())
        publish(directory, staging, units, load(str(staging)), plan["published"])
    return _report(directory, units, [Path(entry["path"]) for entry in plan["inputs"]], 0)


def _report(directory: Path, units: dict[int, dict[str, Any]], paths: list[Path], reused: int) -> BuildReport:
    in_order = [unit for _, unit in sorted(units.items())]
    place = next((unit["first_replaced"] for unit in in_order if unit["first_replaced"]), None)
    return BuildReport(
        dataset=Dataset(directory),
        first_replaced=f"{paths[place[0]]}, byte {place[1]}" if place else None,
        first_skipped=next((unit["first_skipped"] for unit in in_order if unit["first_skipped"]), None),
        reused_units=reused,
    )
