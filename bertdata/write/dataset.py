"""Text → a published dataset.

The inputs are divided into units of about `shard_size` bytes (sources/plan.py). A unit becomes at most one shard in
each split. The bytes of a shard depend only on the text, the tokenizer and the settings. After a kill, run the same
command again: the build continues after its finished units and writes the same bytes.

Memory: two blocks of about 4 MiB for each worker, and up to 16 MiB more for decoded texts of Parquet. A build writes
only to its output directory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertdata.errors import BuildError, UsageError, counted, require
from bertdata.format.dataset import Dataset
from bertdata.format.records import FORMAT_VERSION, read_record, write_record
from bertdata.jit import announcing_compilation
from bertdata.options import Machines, Shares, TextFormat, Vocabulary
from bertdata.sources.blocks import Block, code_of
from bertdata.sources.inputs import Inputs, find_inputs
from bertdata.sources.iterables import names_of, open_texts
from bertdata.sources.plan import UNITS_OF_A_STREAM, source_of, split
from bertdata.sources.streams import UTF_8
from bertdata.tokenize.load import load, name_of
from bertdata.tokenize.tokenizer import LoadedTokenizer
from bertdata.types import Progress
from bertdata.urls import require_local_output
from bertdata.write.duplicates import find_duplicates
from bertdata.write.encoding import TextEncoder, functions_of
from bertdata.write.machines import connected, encode_on_cluster, make_units
from bertdata.write.staging import (
    PLAN,
    STAGING,
    BuildPlan,
    FinishedUnits,
    begin,
    counts_of_text,
    no_documents,
    part_name,
    publish,
    record_name,
    require_unchanged,
    require_usable,
    staging_directory,
)
from bertdata.write.vocabulary import TokenizerChoice

MOST_UNITS = 1 << 20  # only for builds from files
PUBLISHED = ("documents", "sentences", "validation", "test", "shard_size", "max_documents")  # options in the manifest
PUBLISHED_IF_GIVEN = ("words", "map", "dedup", "encoding")


@dataclass(frozen=True, kw_only=True)
class BuildReport:
    """The result of a build: the dataset, and facts that its manifest lacks."""

    dataset: Dataset
    first_replaced: str | None = None  # 'file, byte n' or 'file, line n': the first replaced byte
    replaced_kind: str | None = None  # format of that file, one of choices.INPUT_FORMATS
    first_skipped: str | None = None  # 'file, line n: reason': the first row that was skipped
    reused_units: int = 0  # number of units from an earlier, interrupted run


def build(
    inputs: str | os.PathLike[str] | Iterable[Any],
    out: str | Path,
    *,
    tokenizer: str | Vocabulary | None = None,
    special_tokens: bool = False,
    roles: str = "",
    text: TextFormat | None = None,
    shares: Shares | None = None,
    machines: Machines | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda done, total: None,
) -> BuildReport | None:
    """Build a dataset from text, and publish it in the directory `out`.

    inputs: a name of a file, directory or URL, or a list or tuple of names. Any other iterable yields texts, str or
    bytes, one per document; so file names from a generator are read as texts. An iterable needs a `tokenizer` and is
    read once, in one thread; its exceptions pass to the caller. To continue an interrupted build, pass the same texts
    from the first on, without `overwrite`.
    tokenizer: a path, a name on the hub, or a Vocabulary to train on the text; None: Vocabulary().
    special_tokens: add the tokens among [PAD], [CLS], [SEP] and [MASK] that the tokenizer lacks.
    roles: "mask=TOKEN,cls=TOKEN,sep=TOKEN,pad=TOKEN", or some of these: use these tokens for these roles.
    text: how to read the inputs and divide them into documents; None: TextFormat().
    shares: the shares of the validation and test splits; None: Shares().
    machines: where to build; None: on all cores of this machine. For one part of several, `build` returns None; call
    `finish` after all parts are built.
    overwrite: replace a dataset or an unfinished build in `out`.
    say: called with lines of progress, one at a time.
    progress: called with the bytes of input done so far and the total bytes.

    Raises UsageError, InputError, TokenizerError or BuildError, and OSError if the disk fails. A KeyboardInterrupt
    lists the finished work in its message. With a compiled tokenizer, a build takes about as long as reading the text.
    """
    require_local_output(str(out))
    form, machines = replace(text or TextFormat(), warnings=set()), machines or Machines()
    shares = shares or Shares()
    choice = TokenizerChoice(Vocabulary() if tokenizer is None else tokenizer, special_tokens, roles)
    selected = _selected(inputs, form)
    streams = [file.name for file in selected.files if file.is_stream]
    _require_fits(machines, form, streams, overwrite=overwrite)
    if choice.loaded is None and streams:
        sentence = f"{streams[0]} can be read only once, so it cannot also train a vocabulary; give a --tokenizer"
        raise UsageError(sentence, "needs-option", option="tokenizer", given=streams[0])
    for line in selected.notes():
        say(line)
    name = choice.given if isinstance(choice.given, str) else None
    options, usual = _named(form) | vars(shares), _named(TextFormat())
    published = {option: options[option] for option in PUBLISHED}
    published |= {option: options[option] for option in PUBLISHED_IF_GIVEN if options[option] != usual[option]}
    options |= {"tokenizer": choice.described} | ({"roles": roles} if roles else {})
    options |= {f"the code of {spec}": code_of(spec) for spec in functions_of(form)}
    plan = BuildPlan(options, published, tuple(selected.files), name_of(name) if name else None)
    work = _Build(plan, form, shares, choice, machines, overwrite, say, progress)
    with nullcontext() if machines.ray is None else connected(machines.ray, say):
        return work.run(Path(out))


def _named(form: TextFormat) -> dict[str, Any]:
    """Return the options that determine the bytes of a dataset for given inputs, by their command-line names."""
    names = {name: each.name for name, each in form.declared() if name not in ("include", "exclude")}
    return {name: getattr(form, attribute) for name, attribute in names.items()} | {"map": list(form.maps)}


def _selected(inputs: Any, form: TextFormat) -> Inputs:
    """Return the inputs that the names match, or one input for an iterable of texts."""
    if (names := names_of(inputs)) is not None:
        return find_inputs(names, include=form.include, exclude=form.exclude, any_kind=form.kind is not None)
    if (form.kind, form.text_key, form.encoding, *form.include, *form.exclude) != (None, "text", UTF_8):
        sentence = "format, text_key, encoding, include, exclude are for files, not for an iterable; leave them out"
        raise UsageError(sentence, "conflict", option="inputs")
    return Inputs([open_texts(inputs, strict=form.strict)])


def _require_fits(machines: Machines, form: TextFormat, streams: Sequence[str], *, overwrite: bool) -> None:
    """Raise UsageError for options that exclude each other. streams: the inputs that are pipes or iterables."""
    stream, limit = "a pipe or an iterable", "--max-documents"
    given = {"--part": machines.part is not None, "--ray": machines.ray is not None, "--dedup": form.dedup}
    given |= {"--overwrite": overwrite, stream: bool(streams), limit: form.max_documents is not None}
    excluded = {"--part": ("--overwrite", "--ray", stream, limit), "--ray": (stream, limit)}
    for one, others in {**excluded, "--dedup": (stream, "--part", "--ray")}.items():
        if other := next((other for other in others if given[one] and given[other]), None):
            raise UsageError(f"{one} does not go with {other}; leave one out", "conflict", option=one[2:], given=other)


@dataclass(frozen=True)
class _Build:
    """Everything that a build needs, after its options were checked."""

    plan: BuildPlan
    form: TextFormat
    shares: Shares
    choice: TokenizerChoice
    machines: Machines
    overwrite: bool
    say: Callable[[str], None]
    progress: Progress

    def run(self, directory: Path) -> BuildReport | None:
        """Build the dataset, or a part of it, in a directory."""
        files, form, machines, part, say = self.plan.inputs, self.form, self.machines, self.machines.part, self.say
        units_of, is_pipe = split(files, form), any(file.is_pipe for file in files)
        count = len(units_of.units) - UNITS_OF_A_STREAM * sum(file.is_stream for file in files)
        size = f"more, such as 1GiB, because it makes {count:,} units, and {MOST_UNITS:,} are the most"
        require(count <= MOST_UNITS, "shard_size", form.shard_size, size)
        number, step = part or (0, 1)
        parts = units_of.parts(None if part else machines.threads)[number::step]
        total = round(sum(each.size for each in parts))
        passes = 2 * total if form.dedup else total

        def progress(done: int) -> None:
            self.progress(passes - total + done, passes)

        with staging_directory(directory, overwrite=self.overwrite, part=part) as staging:
            make_tokenizer = lambda: self.choice.make(staging, list(files), form, say)  # noqa: E731
            more: dict[str, Any] = {"overwrite": self.overwrite, "is_part": part is not None}
            tokenizer, units = begin(staging, self.plan, make_tokenizer, say, **more)
            reused, duplicates = len(units.numbers), None
            if form.dedup:
                of_first_pass = lambda done: self.progress(done, passes)  # noqa: E731
                duplicates = find_duplicates(staging, units_of, machines.threads, say, of_first_pass)
            encoder = TextEncoder(tokenizer, self.shares, units_of, duplicates)
            with announcing_compilation(say):  # load or compile the kernels before the threads start
                encoder.encode(Block(0, 0, 0, []))
            if encoder.why_slow:
                say(f"note: {encoder.why_slow}, so `tokenizers` encodes the text, at 1 to 3 MB/s a core")
            try:
                if machines.ray is not None:
                    encode_on_cluster(encoder, staging, units, workers=machines.workers, progress=progress)
                else:
                    more = {"workers": machines.threads, "progress": progress, "items": files[0].items}
                    make_units(parts, encoder, staging, units.numbers, units.add, **more)
                progress(total)
                for warning in sorted(form.warnings):
                    say(f"warning: {warning}")
            except KeyboardInterrupt:
                raise KeyboardInterrupt(_what_is_kept(FinishedUnits(staging), is_pipe=is_pipe)) from None
            again = "run again with --overwrite" if part is None else f"remove {staging}, and make all parts again"
            require_unchanged(files, again, staging if part is None else None)
            if part is not None:
                made = [unit for each in parts for unit in each.units if unit in units.numbers]
                write_record(staging / part_name(*part), {"format_version": FORMAT_VERSION, "units": made})
                return None
            _publish(staging, units, tokenizer, self.plan)
        return _report(directory, units, self.plan, reused)


def _what_is_kept(units: FinishedUnits, *, is_pipe: bool) -> str:
    """Return the message of an interrupted build. units: the finished units."""
    if is_pipe or not units.numbers:
        return "nothing is kept; run the same command again to start over"
    size = f"{units.tally.counts['text_bytes'] / 1e6:,.1f} MB of text"
    return f"{counted(len(units.numbers), 'finished unit')} ({size}) kept; run the same command again to continue"


def _publish(staging: Path, units: FinishedUnits, tokenizer: LoadedTokenizer, plan: BuildPlan) -> None:
    """Publish a build. Raise InputError if there is no document."""
    counts = counts_of_text(units.tally, units.splits(), tokenizer, plan)
    publish(staging, units, plan, tokenizer, tokenizer.special, counts, no_documents(counts))


def finish(out: str | Path) -> BuildReport:
    """Publish a dataset after all its parts are built.

    Raises BuildError if parts are missing, with their names, or if the dataset is published already.
    """
    require_local_output(str(out))
    directory = Path(out)
    require_usable(directory, overwrite=False, is_new=False)
    staging = directory / STAGING
    parts = {path.name for path in staging.glob("part-*-of-*.json")}
    totals = sorted({int(name.removesuffix(".json").rpartition("-")[2]) for name in parts})
    lacking = {n: [f"{k + 1}/{n}" for k in range(n) if part_name(k, n) not in parts] for n in totals}
    total = next((n for n in totals if not lacking[n]), 0)
    if not total:
        missing = ", or ".join(", ".join(parts) for parts in lacking.values()) or "1/n to n/n"
        sentence = f"{directory} lacks part {missing}; run bertdata build --part for each of them first"
        raise BuildError(sentence, "parts-missing", option="out", given=lacking)
    with staging_directory(directory, overwrite=False):
        plan, units = BuildPlan.read(staging), FinishedUnits(staging)
        numbers = {unit for k in range(total) for unit in read_record(staging / part_name(k, total))["units"]}
        lost = [*map(record_name, sorted(numbers - units.numbers)), *([] if plan else [PLAN])]
        if not plan or lost:
            sentence = f"{staging} lacks {', '.join(lost)}; make the parts again"
            raise BuildError(sentence, "parts-missing", option="out", given=lost)
        _publish(staging, units, load(str(staging)), plan)
    return _report(directory, units, plan, 0)


def _report(directory: Path, units: FinishedUnits, plan: BuildPlan, reused: int) -> BuildReport:
    form = TextFormat(kind=plan.settings["format"], encoding=plan.settings.get("encoding", UTF_8))
    files = plan.inputs
    replaced, skipped = (units.tally.first.get(name) for name in ("replaced", "skipped"))
    of_replaced = source_of(files[replaced[0]], form) if replaced else None
    return BuildReport(
        dataset=Dataset(directory),
        first_replaced=of_replaced.invalid_place(replaced[1]) if replaced and of_replaced else None,
        replaced_kind=of_replaced.kind if of_replaced else None,
        first_skipped=f"{source_of(files[skipped[0]], form).place(skipped[1])}: {skipped[2]}" if skipped else None,
        reused_units=reused,
    )
