"""Text → a published dataset.

The inputs are divided into units of about `shard_size` bytes (sources/split.py). A unit becomes at most one shard in
each split. The bytes of a shard depend only on the text, the tokenizer and the settings. A build that was killed
continues from its finished units, when the same command is run again, and gives the same bytes.

Memory: two blocks of about 2 MiB for each worker. A build writes only to its output directory, or to
the cache if its output is a URL.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bertdata.errors import BertdataError, BuildError, InputError, UsageError, counted
from bertdata.files import write_file
from bertdata.format.dataset import Dataset
from bertdata.format.manifest import MANIFEST
from bertdata.format.records import FORMAT_VERSION, read_record, write_record
from bertdata.jit import announcing_compilation
from bertdata.sources.blocks import Block, source_of
from bertdata.sources.documents import TextFormat
from bertdata.sources.find import find_inputs, require_directory
from bertdata.sources.inputs import Input, now
from bertdata.sources.maps import code_of, function_of
from bertdata.sources.split import UNIT_RULE, Plan, split
from bertdata.sources.streams import UTF_8
from bertdata.sources.texts import load_kernels
from bertdata.tokenize.load import load, name_of
from bertdata.tokenize.tokenizer import TOKENIZER, Tokenizer, WordSplitter
from bertdata.urls import is_remote
from bertdata.write.cluster import Job, connected, encode_on_cluster
from bertdata.write.duplicates import find_duplicates
from bertdata.write.publish import file_digests, publish
from bertdata.write.staging import (
    PLAN,
    STAGING,
    continue_or_start,
    finished_units,
    part_name,
    planning,
    require_rule,
    staging_directory,
)
from bertdata.write.units import BlockEncoder, UnitWriter, make_units, require_shares
from bertdata.write.vocabulary import require_type, trained_tokenizer

_NAME = "tokenizer_name.json"  # in the staging directory
MOST_UNITS = 1 << 20  # of a build, those of pipes excepted
Progress = Callable[[int, int], None]
"""Called now and then with the bytes of input that are done, and of all input."""


@dataclass(frozen=True, kw_only=True)
class BuildReport:
    """The result of a build: the dataset, and what its manifest does not say."""

    dataset: Dataset
    first_replaced: str | None = None  # 'file, byte n': the first invalid byte sequence that was replaced
    first_skipped: str | None = None  # 'file, line n: reason': the first row without text that was skipped
    reused_units: int = 0  # how many units an earlier, interrupted run had finished


def build(
    inputs: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str | None = None,
    special_tokens: bool = False,
    type: str = "wordpiece",
    cased: bool = False,
    vocab_size: int = 30522,
    documents: str = "blank",
    sentences: str = "none",
    words: str | None = None,
    map: Sequence[str] = (),
    format: str | None = None,
    text_key: str = "text",
    encoding: str = UTF_8,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    dedup: bool = False,
    on_error: str = "fail",
    validation: float = 0.01,
    test: float = 0.0,
    shard_size: int = 1 << 30,
    workers: int | None = None,
    max_documents: int | None = None,
    strict: bool = False,
    part: tuple[int, int] | None = None,
    ray: str | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda done, total: None,
) -> BuildReport | None:
    """Builds a dataset from text and publishes it in directory `out`. The options are those of `bertdata build`.

    out: with a URL, the dataset is built in the cache of this host, copied there, and stays in the cache.
    tokenizer: a path or hub name; None trains a vocabulary of `vocab_size` tokens on the text, of a `type` (one of
    choices.TOKENIZER_TYPES), `cased` or not.
    special_tokens: add those of [PAD], [CLS], [SEP] and [MASK] that the tokenizer lacks. words: "module:function" of a
    function from a text to its words; the build stores where words begin, for whole word masking, and calls the
    function from several threads. map: functions "module:function" from a text to a text, or None to leave the document
    out; they are applied in order. dedup: leave out documents whose text came before; the input is then read twice.
    workers: threads; None: one for each core. part: (i, n) with 0 <= i < n makes only
    every n-th unit and returns None; `finish` publishes when all n parts are made. ray: the address of a Ray cluster
    that does the work, or "auto" or "local"; workers is then how many tasks it does at the same time, and None means as
    many as it takes. say: called with one line at a time that says what happens.

    Raises UsageError, InputError, TokenizerError or BuildError, and OSError if the disk fails. A KeyboardInterrupt says
    what is finished and kept. Takes about the time of reading the text once, where the tokenizer has a kernel.
    """
    form = TextFormat(
        documents=documents, kind=format, text_key=text_key, encoding=encoding, on_error=on_error, strict=strict,
        shard_size=shard_size, max_documents=max_documents, maps=tuple(map),
    )  # fmt: skip
    if sentences not in ("none", "line"):
        raise UsageError(
            f"sentences is {sentences!r}; give none or line", "unknown", option="sentences", given=sentences
        )
    require_type(type)
    word_splitter = function_of(words, "--words") if words else None
    validation, test = float(validation), float(test)  # 0 and 0.0 are one setting
    require_shares(validation, test)
    if workers is not None and workers < 1:
        raise UsageError(f"workers is {workers}; give at least 1", "out-of-range", option="workers", given=workers)
    if not str(out):
        raise UsageError("--out is empty; give a directory", "missing", option="out")
    if is_remote(str(out)):
        from bertdata.format.transfer import require_writable

        require_writable(str(out), option="out")
        if part or ray is not None or overwrite:
            option = "part" if part else "overwrite" if overwrite else "ray"
            sentence = f"--{option} does not go with a URL as --out; give a directory, and bertdata push it there"
            raise UsageError(sentence, "conflict", option=option, given=str(out))
    else:
        require_directory(str(out))
    named = [inputs] if isinstance(inputs, str | Path) else inputs
    selected = find_inputs(named, include=include, exclude=exclude, any_ending=format is not None)
    files = selected.files
    streams = [file.name for file in files if file.is_stream]
    if streams and tokenizer is None:
        sentence = (
            f"{streams[0]} can be read only once, so it cannot also train a vocabulary; give a --tokenizer, for "
            "example one that bertdata train-tokenizer made"
        )
        raise UsageError(sentence, "needs-option", option="tokenizer", given=streams[0])
    if part is not None:
        if not 0 <= part[0] < part[1]:
            raise UsageError(f"part is {part}; give (i, n) with 0 <= i < n", "out-of-range", option="part", given=part)
        if overwrite or ray is not None:
            other = "--overwrite" if overwrite else "--ray"
            sentence = (
                f"--part does not go with {other}, because other parts may be made at the same time; leave one out"
            )
            raise UsageError(sentence, "conflict", option="part", given=part)
    if (part is not None or ray is not None) and (streams or max_documents):
        option, it = ("part", "a part") if part is not None else ("ray", "a task")
        other = "a pipe" if streams else "--max-documents"
        sentence = f"--{option} does not go with {other}, because {it} sees only its own units; leave one out"
        raise UsageError(sentence, "conflict", option=option)
    if dedup and (streams or part is not None or ray is not None):
        other, why = "a pipe", "it reads the text twice"
        if not streams:
            other, why = "--part" if part is not None else "--ray", "it compares all documents"
        raise UsageError(f"--dedup does not go with {other}, because {why}; leave one out", "conflict", option="dedup")
    loaded = load(tokenizer) if tokenizer is not None else None
    if loaded and special_tokens:
        loaded = loaded.with_special_tokens()
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
    if form.maps:
        settings["map"] = list(form.maps)
    if dedup:
        settings["dedup"] = True
    if form.encoding != UTF_8:
        settings["encoding"] = form.encoding
    chosen = f"trained, {vocab_size} tokens" + (type != "wordpiece") * f", {type}" + cased * ", cased"
    if loaded:
        chosen = f"SHA-256 {file_digests(loaded)[TOKENIZER][:16]}"
    plan = {
        "unit_rule": UNIT_RULE,
        "settings": settings
        | {"format": format, "text_key": text_key, "on_error": on_error, "strict": strict, "tokenizer": chosen}
        | {f"the code of {spec}": code_of(spec) for spec in (*form.maps, *([words] if words else []))},
        "published": settings,
        "inputs": [{"path": file.name, "bytes": file.size, "version": file.version} for file in files],
    }
    for line in selected.notes():
        say(line)
    work = _Work(
        files, form, plan, loaded, tokenizer, train=(type, cased, vocab_size), word_splitter=word_splitter,
        workers=workers, part=part, on_cluster=ray is not None, is_for_url=is_remote(str(out)),
    )  # fmt: skip
    if not work.is_for_url:
        with connected(ray, say) if ray is not None else nullcontext():
            return work.run(Path(out), overwrite=overwrite, say=say, progress=progress)
    from bertdata.format.transfer import keep, outgoing, push, require_free

    with outgoing(str(out), plan) as directory:
        if (directory / MANIFEST).exists() and not streams:  # what could not be copied, or was not copied to its end
            report: BuildReport | None = BuildReport(dataset=Dataset(directory))
        else:
            require_free(str(out))
            report = work.run(directory, overwrite=bool(streams), say=say, progress=progress)
        assert report is not None  # noqa: S101  (a part has no URL)
        say(f"copying the dataset to {out}")
        push(directory, str(out))
        return replace(report, dataset=Dataset(keep(directory)))


@dataclass(frozen=True)
class _Work:
    """What a build makes. Its options were checked."""

    files: list[Input]
    form: TextFormat
    plan: dict[str, Any]
    tokenizer: Tokenizer | None  # None: one that is trained
    tokenizer_name: str | None
    train: tuple[str, bool, int]  # type, cased and vocab_size of one that is trained
    word_splitter: WordSplitter | None
    workers: int | None
    part: tuple[int, int] | None
    on_cluster: bool
    is_for_url: bool

    def run(
        self, directory: Path, *, overwrite: bool, say: Callable[[str], None], progress: Progress
    ) -> BuildReport | None:
        """Makes the dataset in a directory, or a part of it."""
        files, form, settings, part = self.files, self.form, self.plan["published"], self.part
        by_unit, streams = split(files, form), any(file.is_stream for file in files)
        _require_few_units(by_unit)
        with staging_directory(directory, overwrite=overwrite, part=part) as staging:
            with planning(staging):
                continue_or_start(staging, self.plan, overwrite=overwrite, start_over=streams)
                loaded = self.tokenizer or trained_tokenizer(staging, files, form, *self.train, say)
                for name, content in loaded.files.items():
                    write_file(staging / name, content)
                if self.tokenizer_name is not None:
                    write_file(staging / _NAME, json.dumps(name_of(self.tokenizer_name)).encode())
            if loaded.missing_roles:
                say(missing_roles_warning(loaded.missing_roles))
            units = finished_units(staging)
            reused = len(units)
            if reused and part is None:
                say(f"continuing: keeping {counted(reused, 'finished unit')} of an earlier run")
            total = passes = sum(file.size or 0 for file in files)
            duplicates = None
            if "dedup" in settings:
                passes = 2 * total
                duplicates = find_duplicates(
                    staging, by_unit, workers=self.threads, progress=lambda done: progress(done, passes), say=say
                )
            shares = settings["validation"], settings["test"]
            encoder = BlockEncoder(
                loaded, shares, num_inputs=len(files), sentences=settings["sentences"] == "line",
                word_splitter=self.word_splitter, duplicates=duplicates,
            )  # fmt: skip
            with announcing_compilation(say):  # loads or compiles the kernels before the threads start
                encoder.encode_block(Block.empty())
                if any((form.kind or file.kind) != "text" for file in files):
                    load_kernels()
            try:
                before = passes - total
                self._make_units(encoder, staging, by_unit, units, say, lambda done: progress(before + done, passes))
                progress(passes, passes)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(_what_is_kept(finished_units(staging), is_pipe=streams)) from None
            if changed := [file.name for file, later in zip(files, now(files), strict=True) if file != later]:
                how = "" if self.is_for_url else " with --overwrite"  # each plan for a URL has its own directory
                sentence = f"{changed[0]} changed while it was read; run again{how} when nobody changes it"
                raise InputError(sentence, "changed", option="inputs", given=changed[0])
            if part is not None:
                made = sorted(unit for unit in units if by_unit.section(unit) % part[1] == part[0])
                write_record(staging / part_name(*part), {"format_version": FORMAT_VERSION, "units": made})
                return None
            publish(directory, staging, units, loaded, self.plan, _tokenizer_name(staging))
        return _report(directory, units, files, form, reused)

    @property
    def threads(self) -> int:
        return self.workers or len(os.sched_getaffinity(0))

    def _make_units(
        self,
        encoder: BlockEncoder,
        staging: Path,
        by_unit: Plan,
        units: dict[int, dict[str, Any]],
        say: Callable[[str], None],
        progress: Callable[[int], None],
    ) -> None:
        """Makes what is not in `units` yet, on a cluster or by threads."""
        if self.on_cluster:
            if encoder.why_slow:
                say(f"note: {encoder.why_slow}, so `tokenizers` encodes the text, at 1 to 3 MB/s a core")
            settings = self.plan["published"]
            job = Job(
                by_unit, staging.absolute(), shares=(settings["validation"], settings["test"]),
                sentences=encoder.sentences, words=settings.get("words"), directory=Path.cwd(),
            )  # fmt: skip
            encode_on_cluster(job, encoder.tokenizer, units=units, workers=self.workers, progress=progress)
            return
        number, parts = self.part or (0, 1)
        make_units(
            by_unit, encoder, lambda: UnitWriter(staging, encoder, self.form.shard_size), units=units,
            is_wanted=lambda unit: by_unit.section(unit) % parts == number, workers=self.threads, progress=progress,
            say=say,
        )  # fmt: skip


def _require_few_units(plan: Plan) -> None:
    """Raises UsageError for a plan of more units than anybody wants: a size in gigabytes may have been meant."""
    num_units = sum(stretch.count for stretch in plan.stretches if plan.files[stretch.inputs[0]].size is not None)
    if num_units > MOST_UNITS:
        size = plan.form.shard_size
        sentence = (
            f"--shard-size {size} cuts the input into {num_units:,} units, more than {MOST_UNITS:,}; give a larger "
            "size, written like 1GiB or 64MiB"
        )
        raise UsageError(sentence, "out-of-range", option="shard_size", given=size)


def _what_is_kept(units: Mapping[int, Mapping[str, Any]], *, is_pipe: bool) -> str:
    """What an interrupted build says. units: number → record of each that is finished."""
    if is_pipe:
        return "nothing is kept, because a pipe can be read only once"
    if not units:
        return "no unit is finished, so the same command begins anew"
    size = sum(record["text_bytes"] for record in units.values())
    amount = f"{counted(len(units), 'finished unit')} ({size / 1e6:,.1f} MB of text) kept"
    return f"{amount}; run the same command again to continue"


def _tokenizer_name(staging: Path) -> str | None:
    """What `build` noted of the tokenizer's name; of a tokenizer that the build trained, nothing."""
    noted = staging / _NAME
    name: str | None = json.loads(noted.read_bytes()) if noted.exists() else None
    return name


def missing_roles_warning(roles: Sequence[str]) -> str:
    """roles: those of tokenizer.ROW_ROLES that no token has; at least one."""
    *before, last = (f"[{role.upper()}]" for role in roles)
    names = f"{', '.join(before)} and {last} tokens" if before else f"{last} token"
    if list(roles) == ["pad"]:
        return f"note: the tokenizer has no {names}, so padded places hold id 0; --special-tokens adds one"
    return (
        f"warning: the tokenizer has no {names}, so the Loader will refuse this dataset for masked language modelling; "
        "--special-tokens adds what is missing"
    )


def finish(out: str | Path) -> BuildReport:
    """Publishes a dataset whose parts are all made. Raises BuildError, which names the parts that are missing."""
    require_directory(str(out))
    directory = Path(out)
    staging = directory / STAGING
    parts = sorted(path.name for path in staging.glob("part-*-of-*.json"))
    if not parts:
        sentence = f"{directory} has no finished part; run bertdata build --part 1/n to --part n/n first"
        raise BuildError(sentence, "parts-missing", option="out", given=directory)
    totals = sorted({int(name.removesuffix(".json").split("-of-")[1]) for name in parts})
    lacking = {n: [f"{k + 1}/{n}" for k in range(n) if part_name(k, n) not in parts] for n in totals}
    total = next((n for n in totals if not lacking[n]), 0)
    if not total and len(totals) > 1:
        sentence = (
            f"{directory} has parts of {' and of '.join(map(str, totals))}, and none of these is complete; make all "
            "parts of one of them"
        )
        raise BuildError(sentence, "parts-missing", option="out", given=lacking)
    if not total:
        missing = lacking[totals[0]]
        sentence = f"{directory} lacks part {', '.join(missing)}; run bertdata build --part for each of them first"
        raise BuildError(sentence, "parts-missing", option="out", given=missing)
    with staging_directory(directory, overwrite=True):
        units = finished_units(staging)
        records = [read_record(staging / part_name(number, total)) for number in range(total)]
        lost = sorted({unit for record in records for unit in record["units"]} - units.keys())
        if lost:
            sentence = (
                f"the records of units {', '.join(map(str, lost))} are missing in {staging}; make the parts again"
            )
            raise BuildError(sentence, "parts-missing", option="out", given=lost)
        plan = json.loads((staging / PLAN).read_bytes())
        require_rule(staging, plan)
        publish(directory, staging, units, load(str(staging)), plan, _tokenizer_name(staging))
    files = [Input(entry["path"], entry["bytes"], entry["version"]) for entry in plan["inputs"]]
    settings = plan["settings"]
    form = TextFormat(kind=settings["format"], encoding=settings.get("encoding", UTF_8))
    return _report(directory, units, files, form, 0)


def _report(
    directory: Path, units: dict[int, dict[str, Any]], files: list[Input], form: TextFormat, reused: int
) -> BuildReport:
    in_order = [unit for _, unit in sorted(units.items())]
    replaced = next((unit["first_replaced"] for unit in in_order if unit["first_replaced"]), None)
    skipped = next((unit["first_skipped"] for unit in in_order if unit["first_skipped"]), None)
    return BuildReport(
        dataset=Dataset(directory),
        first_replaced=_named(files[replaced[0]], form, "invalid_place", replaced[1]) if replaced else None,
        first_skipped=f"{_named(files[skipped[0]], form, 'place', skipped[1])}: {skipped[2]}" if skipped else None,
        reused_units=reused,
    )


def _named(file: Input, form: TextFormat, what: Literal["place", "invalid_place"], offset: int) -> str:
    """'file, line n', or 'file, byte n' if the file cannot be read any more."""
    try:
        return str(getattr(source_of(file, form), what)(offset))
    except BertdataError:
        return f"{file}, byte {offset}"
