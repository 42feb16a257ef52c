"""The command line. Each command parses its options, makes one call and prints the result.

An error that the user can fix is printed as one sentence. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
Each command imports its modules when it runs, so `bertdata --help` starts fast.
"""

from __future__ import annotations

import atexit
import codecs
import errno
import gc
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

import bertdata
from bertdata.choices import FIXED_TOKENIZERS, MASKING_POLICIES, MaskingPolicy
from bertdata.errors import BertdataError, UsageError, counted, is_out_of_memory, require
from bertdata.options import Arguments, Options, build_arguments, helps

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
_FEW_INVALID = 1e-4  # invalid sequences per byte of text; a higher share suggests that the text is not UTF-8
_ROWS = "global-batch-size"
_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def _bytes_of(value: str) -> int:
    """Return a number of bytes, such as 64MiB or 1000000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", value.strip().lower())
    size = float(match[1]) * _SIZES[match[2] or ""] if match else 0
    if not 1 <= size < 1 << 62:
        raise click.BadParameter(f"{value!r} is not a size below 4 EiB; write it like 1GiB, 64MiB or 1000000")
    return int(size)


_OTHER_NAMES = {
    **{"learning-rate": "lr", "max-steps": "steps", "wd": "weight-decay", "max-grad-norm": "clip-norm", "bs": _ROWS},
    **{"batch-size": _ROWS, "train-batch-size": _ROWS, "per-device-train-batch-size": "micro-batch-size"},
    **{"num-train-epochs": "epochs", "lr-scheduler-type": "schedule", "max-seq-length": "length", "fp16": "precision"},
    **{"warmup-ratio": "warmup", "save-total-limit": "keep", "report-to": "log-to", "bf16": "precision"},
}
"""Option names of other trainers → option names of bertdata and bertrain."""


def nearest(given: str, names: Iterable[str]) -> list[str]:
    """Return [the known name that the user probably meant], or [] if no name is similar."""
    import difflib

    given, known = given.lstrip("-").replace("_", "-"), {name.lstrip("-").replace("_", "-"): name for name in names}
    known |= {other: known[name] for other, name in _OTHER_NAMES.items() if name in known and other not in known}
    words = [word for word in known if given not in (f"no-{word}", f"un{word}")]
    begun = [word for word in words if word.startswith(given) or (given.startswith(word) and len(word) > 2)]
    near = difflib.get_close_matches(given, begun, 1, 0) or difflib.get_close_matches(given, words, 1, 0.76)
    return [known[word] for word in near]


@contextmanager
def one_sentence(*, quiet: bool = False) -> Iterator[None]:
    """Turn an error that the user can fix into one line on stderr and an exit code.

    Other exceptions pass: they are bugs of the library or of the user's code. quiet: print nothing, on ranks that would
    repeat the line of rank 0.
    """

    def fail(line: str, code: int = 1) -> NoReturn:
        if not quiet:
            click.echo(line, err=True)
        sys.exit(code)

    try:
        yield
    except BertdataError as error:
        fail(f"Error: {error}", 2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt as interrupt:  # the message of a build lists what is kept
        begin = "\n" * sys.stderr.isatty()  # the terminal has shown ^C
        fail(f"{begin}interrupted; {str(interrupt) or 'run the same command again'}", 130)
    except BrokenPipeError:  # the reader of the output has ended, as in `bertdata show … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (MemoryError, RuntimeError, OSError) as error:
        if is_out_of_memory(error):
            size = re.search(r"tried to allocate [\d.]+ \w+", str(error), re.IGNORECASE)  # in long messages of torch
            reason = size[0] if size else str(error).partition("\n")[0]
            reason = f": {reason}" if reason else ""
            fail(f"Error: not enough memory{reason}; use smaller batches, shorter rows or fewer processes")
        if "No available kernel" in str(error):  # an error of torch, in the first step
            fail("Error: no such kernel of attention supports this model and its rows; give --attention auto", 2)
        if not isinstance(error, OSError):
            raise
        where = f"{error.filename}: " if error.filename else ""
        advice = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            advice = "; make room and run the same command again with --out DIR"
        elif error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS):
            advice = "; correct the path or its permissions, or give another"
        fail(f"Error: {where}{error.strerror or error}{advice}")


class _Text(click.types.StringParamType):
    """A text option. The shell completes it as a file name, because most values are file names."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "show_default": True}


class OneSentence(click.Command):
    """A command whose errors end in one_sentence. Its context settings are SETTINGS by default.

    headings: heading → names of the options that --help lists below it; all remaining options come last.
    """

    def __init__(self, *arguments: Any, headings: Mapping[str, Sequence[str]] | None = None, **options: Any) -> None:
        super().__init__(*arguments, **{"context_settings": SETTINGS} | options)
        self.headings = headings or {}

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        parameters = super().get_params(ctx)
        for parameter in parameters:
            if type(parameter.type) is click.types.StringParamType:
                parameter.type = _Text()
        return parameters

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rest = "Other" if self.headings else "Options"
        lists: dict[str, list[tuple[str, str]]] = {heading: [] for heading in (*self.headings, rest)}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)):
                names = (heading for heading, options in self.headings.items() if parameter.name in options)
                lists[next(names, rest)].append(record)
        for heading, records in lists.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with one_sentence():  # option types may reject values
            try:
                return super().parse_args(ctx, args)
            except click.NoSuchOption as error:  # click's own suggestions are less similar
                parameters = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
                names = [name for each in parameters for name in (*each.opts, *each.secondary_opts)]
                vars(error)["possibilities"] = nearest(error.option_name, names)
                raise

    def invoke(self, ctx: click.Context) -> Any:
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            is_utf8 = codecs.lookup(sys.stdout.encoding).name == "utf-8"
            sys.stdout.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")  # paths have any bytes
        with one_sentence():
            return super().invoke(ctx)


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from tqdm import tqdm

    with tqdm(desc=what, unit="B", unit_scale=True, leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress


def _say(line: str) -> None:
    """Print a line on stderr, above a progress bar if there is one. Names in it may have control characters."""
    line = line.translate(_CONTROLS)
    if sys.stderr.isatty():
        from tqdm import tqdm

        tqdm.write(line, file=sys.stderr)
    else:
        click.echo(line, err=True)


def _local(shards: str) -> str:
    """Return the directory of a dataset. For a URL it is the copy in the cache."""
    from bertdata.urls import is_remote

    if not is_remote(shards):
        return shards
    from bertdata.remote.copies import local_copy

    return str(local_copy(shards, say=_say))


@click.group(context_settings=SETTINGS)
@click.version_option(bertdata.__version__, prog_name="bertdata")
def main() -> None:
    """Turn text into memory-mapped token shards, for pre-training BERT-style encoders, and look at them."""
    gc.set_threshold(100_000)  # imports create many objects and no garbage: this saves a fifth of the start-up time
    atexit.register(gc.freeze)  # and this spares the interpreter two searches through them at exit


def _command(name: str, short_help: str, *examples: str, **options: Any) -> Callable[[Callable[..., None]], Any]:
    heading = f"Example{'s' * (len(examples) > 1)}:"
    epilog = "\n  ".join(["\b\n" + heading, *examples]) if examples else None
    return main.command(name, cls=OneSentence, short_help=short_help, epilog=epilog, **options)


def _part_of(value: str) -> tuple[int, int]:
    """Return 1/4 as (0, 4): the index of the part, from 0, and the number of parts."""
    match = re.fullmatch(r"(\d+)/(\d+)", value)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise click.BadParameter(f"{value!r} is not a part; write 1/4 for the first of four parts")
    return int(match[1]) - 1, int(match[2])


_TYPES = {"shard_size": _bytes_of, "part": _part_of, "workers": click.INT, "max_documents": click.INT}


def _options(group: type[Options], *names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options of a group to a command: all of them, or only those with these Python names."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        texts = helps(group)
        for name, each in reversed([*group.declared()]):
            if names and each.name not in names:
                continue
            settings: dict[str, Any] = {"type": _TYPES.get(name), "default": each.default, "help": texts.get(each.name)}
            if choices := each.metadata["choices"]:
                settings["type"] = click.Choice([*filter(None, choices)])
            if each.default is False:
                settings["is_flag"] = True
            if each.default == ():
                settings |= {"multiple": True, "default": None}
            if each.metadata["click"].get("required"):
                del settings["default"]  # click would treat None as a value
            command = click.option(f"--{name.replace('_', '-')}", **settings | each.metadata["click"])(command)
        return command

    return decorate


_inputs = click.argument("inputs", nargs=-1, metavar="INPUT...")
_dataset = click.argument("shards", metavar="SHARDS")


@_command(
    "build",
    "Build a dataset from text, JSON lines, CSV, Parquet or Arrow.",
    "bertdata build 'dump/*.jsonl' --out shards/ --tokenizer bert-base-uncased",
    headings={
        "Output": ("out", "overwrite", "shard_size", "validation", "test"),
        "Tokenizer": ("tokenizer", "special_tokens", "roles", "type", "cased", "vocab_size"),
        "Input": ("format", "text_key", "encoding", "include", "exclude", "strict", "on_error"),
        "Documents": ("documents", "sentences", "words", "map", "dedup", "max_documents"),
        "Threads and machines": ("workers", "part", "finish", "ray"),
    },
)
@_inputs
@_options(Arguments, "out", "tokenizer", "special_tokens", "roles")
@_options(bertdata.Vocabulary)
@_options(bertdata.TextFormat)
@_options(bertdata.Shares)
@_options(bertdata.Machines)
@_options(Arguments, "finish", "overwrite")
def build(inputs: tuple[str, ...], out: str, finish: bool, **options: Any) -> None:
    """Build a dataset from text, JSON lines, CSV, TSV, Parquet, Arrow or FASTA files.

    INPUT is a file, a directory, a pattern such as 'dump/*.jsonl', one of these under a URL (s3, gs, az, hf; files of
    http and https), a named pipe, or - for standard input. Files may be compressed (gzip, bzip2, xz, zstd). If a build
    is interrupted, run the same command again to continue it.
    """
    from bertdata import write

    if finish:
        if given := _given(("inputs", *options)):
            named = "INPUT" if given[0] == "inputs" else "--" + given[0].replace("_", "-")
            sentence = f"--finish does not go with {named}, because it only publishes what the parts made; leave it out"
            raise UsageError(sentence, "conflict", option=given[0])
        _say_built(write.finish(out), out)
        return
    if options["tokenizer"]:
        _say_without_effect(("type", "cased", "vocab_size"), "--tokenizer has a vocabulary")
    elif options["type"] in FIXED_TOKENIZERS:
        _say_without_effect(("cased", "vocab_size"), f"--type {options['type']} has a fixed vocabulary")
    part = options["part"]
    with _bar("build") as progress:
        report = write.build(inputs, out, **build_arguments(options), say=_say, progress=progress)
    if report is None:
        number = f"{part[0] + 1}/{part[1]}"
        click.echo(f"{out}: made part {number}; when all are made, run bertdata build --finish --out {out}")
    else:
        _say_built(report, out)


def _given(names: Iterable[str]) -> list[str]:
    """Return the parameters, among these, that appear on the command line."""
    source_of = click.get_current_context().get_parameter_source
    return [name for name in names if source_of(name) is click.core.ParameterSource.COMMANDLINE]


def _say_without_effect(names: Iterable[str], because: str) -> None:
    """Print a note for each of these options that appears on the command line."""
    for name in _given(names):
        click.echo(f"note: --{name.replace('_', '-')} has no effect, because {because}", err=True)


def _say_built(report: Any, out: str) -> None:
    """Print warnings about a new dataset to stderr, and its size and id to stdout."""
    dataset, counts = report.dataset, report.dataset.manifest.counts
    for warning in _warnings(report):
        _say(f"warning: {warning}")
    kept = (f"{token} {counted(number, 'time')} as text" for token, number in counts["special_literals"].items())
    _say_dataset(dataset, out, "without a token dropped", *kept)


def _say_dataset(dataset: Any, out: str, dropped: str, *more: str) -> None:
    """Print the size and id of a new dataset. dropped: the reasons for dropped documents. more: additional facts."""
    whys = {"dropped_documents": dropped, "removed_documents": "removed by --map"}
    whys["duplicate_documents"] = "removed as duplicates"
    numbers = ((dataset.manifest.counts.get(name, 0), why) for name, why in whys.items())
    details = [_size(dataset), *(f"{number:,} {why}" for number, why in numbers if number), *more]
    click.echo(f"{out}: {', '.join(details)}\ndataset_id {dataset.dataset_id}")


def _size(part: Any) -> str:
    """Return the size of a dataset or of a split as text."""
    return f"{counted(part.num_documents, 'document')}, {counted(part.num_tokens, 'token')}"


def _warnings(report: Any) -> Iterator[str]:
    dataset, counts = report.dataset, report.dataset.manifest.counts
    settings = dataset.manifest.settings
    if num_invalid := counts["replaced_characters"]:
        first = f", the first at {report.first_replaced}" if report.first_replaced else ""
        is_json = "encoding" not in settings and report.replaced_kind == "jsonl"
        what, encoding = "lone surrogate" if is_json else "sequence", settings.get("encoding", "UTF-8")
        kind = "or invalid bytes of JSON" if is_json else f"of bytes that are not {encoding}"
        is_other = not ("encoding" in settings or is_json) and num_invalid > _FEW_INVALID * counts["text_bytes"]
        advice = "; if a text file is not UTF-8, name its encoding, for example --encoding latin-1" * is_other
        yield f"replaced by U+FFFD: {counted(num_invalid, what)} {kind}{first}; --strict fails instead{advice}"
    if counts["skipped_rows"]:
        first = f", the first: {report.first_skipped}" if report.first_skipped else ""
        yield f"skipped: {counted(counts['skipped_rows'], 'row')} that cannot be used{first}"
    if counts["special_ids_replaced"]:
        words = counted(counts["special_ids_replaced"], "word")
        yield f"replaced by the unknown id: {words} for which the tokenizer gave a special id"
    shares = {"validation": settings["validation"], "test": settings["test"]}
    shares["train"] = 1 - sum(shares.values())
    for split, share in shares.items():
        if share > 0 and split not in dataset.splits:
            option = "a smaller --validation" if split == "train" else f"a larger --{split}"
            size = f"its share is {share:g} of {counted(dataset.num_documents, 'document')}"
            advice = f"build with {option}, or from more documents (--documents line makes each line one)"
            yield f"the {split} split is empty: {size}; {advice}"


@_command(
    "import",
    "Import the ids that other libraries made.",
    "bertdata import corpus_text_document --out shards/ --tokenizer bert-base-uncased",
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@_options(Arguments, "out", "tokenizer_of_ids", "special_tokens")
@_options(bertdata.IdsFormat)
@_options(bertdata.Shares)
@_options(Arguments, "overwrite")
def import_command(files: tuple[str, ...], out: str, **options: Any) -> None:
    """Import the ids that other libraries made as a dataset. No id is added, left out or changed.

    FILE is a Megatron prefix (or its .bin or .idx), a .bin of nanoGPT or llm.c, a Parquet or Arrow file with a column
    input_ids of lists, or a directory of Parquet files or of save_to_disk. If an import is interrupted, run the same
    command again to continue it.
    """
    from bertdata.look.facts import times
    from bertdata.write import import_ids

    with _bar("import") as progress:
        options |= {"ids": bertdata.IdsFormat.pop_from(options), "shares": bertdata.Shares.pop_from(options)}
        dataset = import_ids(files, out, **options, say=_say, progress=progress)
    counts, separator = dataset.manifest.counts, dataset.special_tokens.separator
    if separator is None:
        click.echo("note: documents do not all end with one special token, so the dataset has no separator", err=True)
    if inside := times(counts.get("special_ids_inside", {})):
        line = f"special tokens are inside documents: {inside}; they are kept, and are never masked or predicted"
        click.echo(f"note: {line}", err=True)
    _say_dataset(dataset, out, "without an id dropped")


@_command("export", "Write a split as Parquet.", "bertdata export shards/ --out ids/")
@_dataset
@click.option("--out", required=True, help="Directory for the files.")
@click.option("--split", default="train", help="Split: train, validation or test.")
def export_command(shards: str, out: str, split: str) -> None:
    """Write the documents of a split, in order and with their separators, as Parquet for another library.

    There is one file for each shard, with a column input_ids of lists; a row is a document.
    """
    from bertdata.format.dataset import Dataset
    from bertdata.write import export

    dataset = Dataset(_local(shards))
    with _bar("export") as progress:
        files = export(dataset, out, split=split, progress=progress)
    click.echo(f"{', '.join(map(str, files))}: {_size(dataset.splits[split])}")


@_command(
    "train-tokenizer",
    "Train a tokenizer on text, or write one for proteins or DNA.",
    "bertdata train-tokenizer corpus.txt --out tokenizer/ --vocab-size 30522",
    "bertdata train-tokenizer --type residues --out tokenizer/",
)
@_inputs
@_options(bertdata.Vocabulary)
@click.option("--out", required=True, help="Directory for tokenizer.json and tokenizer_config.json.")
@_options(bertdata.TextFormat, "kind", "text_key", "encoding", "include", "exclude", "maps", "on_error")
def train_tokenizer(inputs: tuple[str, ...], out: str, **options: Any) -> None:
    """Train a tokenizer on at most 100 MiB of the text: WordPiece, byte-level BPE or unigram.

    INPUT: as for bertdata build. If there is more text than 100 MiB, evenly spaced parts of it are used. The same text
    and options give the same tokenizer. --type residues and --type bytes take no INPUT and no other option but --out.
    """
    from bertdata import write

    vocabulary, text = bertdata.Vocabulary.pop_from(options), bertdata.TextFormat.pop_from(options, documents="line")
    if vocabulary.kind in FIXED_TOKENIZERS:
        others = click.get_current_context().params.keys() - {"inputs", "type", "out"}
        _say_without_effect(sorted(others), f"--type {vocabulary.kind} has a fixed vocabulary")
    with _bar("read") as progress:
        trained = write.train_tokenizer(inputs, out, vocabulary, text=text, say=_say, progress=progress)
    click.echo(f"{out}: {trained.loaded.special.vocab_size:,} tokens")


@_command("inspect", "Print facts about a dataset.", "bertdata inspect shards/ --html report.html")
@_dataset
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for scripts.")
@click.option("--html", help="Write a page with the facts, charts and samples to this file, instead of printing.")
@click.option("--length", default=128, help="Row length in tokens, used to count samples.")
@click.option("--global-batch-size", default=256, help="Rows of a step over all ranks, used to count steps.")
@click.option("--world-size", default=1, help="Number of ranks that share a step, used to count the rows of each.")
@_options(Arguments, "samples")
def inspect(shards: str, as_json: bool, html: str | None, samples: str, **steps: int) -> None:
    """Print facts about a dataset: contents, settings, and what was dropped or replaced."""
    from bertdata.files import write_page
    from bertdata.format.dataset import Dataset
    from bertdata.look import facts

    if html and as_json:
        raise UsageError("--json and --html were given; give one of them", "conflict", option="html", given=html)
    shards = _local(shards)
    for option, value in steps.items():
        least = 3 if option == "length" else 1
        require(value >= least, option, value, f"at least {least}")
    if html:
        write_page(Path(html), facts.report(Dataset(shards), **steps, samples=samples).encode())
        click.echo(html)
        return
    about = facts.facts(Dataset(shards), **steps, samples=samples)
    click.echo(json.dumps(about, indent=1, ensure_ascii=False) if as_json else facts.text(about))


@_command("show", "Print samples as a trainer gets them, decoded to text.", "bertdata show shards/ --masked --count 3")
@_dataset
@click.option("--sample", default=0, help="Position of the first sample to show, from 0.")
@click.option("--count", default=1, type=click.IntRange(min=1), help="Number of samples to show.")
@click.option("--masked", is_flag=True, help="Mask the samples, and show input, target and mask side by side.")
@click.option("--split", default="train", help="Split: train, validation or test.")
@click.option("--length", default=128, help="Row length in tokens, special tokens included.")
@click.option("--seed", default=0, help="Random seed for order and masks.")
@_options(Arguments, "samples")
@click.option(
    "--masking", "--policy", type=click.Choice(MASKING_POLICIES), default="exact", help="Policy for --masked."
)
def show(shards: str, masked: bool, masking: MaskingPolicy, **options: Any) -> None:
    """Print samples as a trainer gets them, decoded to text."""
    from bertdata.format.dataset import Dataset
    from bertdata.look import show as look

    if not masked:
        _say_without_effect(["masking"], "--masked was not given")
    click.echo(look.shown(Dataset(_local(shards)), policy=masking if masked else None, **options))


@_command("push", "Copy a dataset to a URL.", "bertdata push shards/ s3://bucket/name")
@_dataset
@click.argument("url")
@_options(Arguments, "public", "origins")
def push(shards: str, url: str, public: bool, origins: bool) -> None:
    """Copy a dataset to a URL of s3, gs, az or hf, such as s3://bucket/name, and check its files on the way.

    The dataset appears there when it is complete. If the copy is interrupted, run the same command again.
    """
    from bertdata.remote.copies import push as run

    with _bar("push") as progress:
        dataset_id = run(shards, url, public=public, origins=origins, progress=progress)
    click.echo(f"{url}: dataset_id {dataset_id}")


@_command("pull", "Copy a dataset from a URL, and check it.", "bertdata pull s3://bucket/name shards/")
@click.argument("url")
@click.argument("directory")
def pull(url: str, directory: str) -> None:
    """Copy a dataset from a URL of s3, gs, az, hf, http or https to a new directory, and check its files.

    If the copy is interrupted, run the same command again to continue it.
    """
    from bertdata.remote.copies import pull as run

    with _bar("pull") as progress:
        dataset_id = run(url, directory, progress=progress)
    click.echo(f"{directory}: dataset_id {dataset_id}")


@_command("verify", "Check every byte of a dataset.", "bertdata verify shards/")
@_dataset
def verify(shards: str) -> None:
    """Read every byte of a dataset, and check every rule of its format."""
    from bertdata.format.verify import verify as run

    with _bar("verify") as progress:
        faults = run(_local(shards), progress=progress)
    for fault in faults:
        click.echo(f"Error: {fault}", err=True)
    if faults:
        sys.exit(1)
    click.echo(f"{shards}: sound")


@_command("bench", "Measure how fast this machine reads a dataset.", "bertdata bench shards/ --length 512")
@_dataset
@click.option("--length", default=128, type=click.IntRange(min=5), help="Row length in tokens.")
@click.option("--rows", default=256, type=click.IntRange(min=1), help="Rows of a batch.")
def bench(shards: str, length: int, rows: int) -> None:
    """Measure how fast one process of this machine reads a dataset, masked and unmasked, for each kind of samples."""
    from bertdata.look.bench import measured

    click.echo(measured(_local(shards), length=length, rows=rows))


@_command("demo", "Run all steps once: from text to a trained model.")
@click.option("--out", default="demo", help="Directory for the text, the shards and the run.")
def demo(out: str) -> None:
    """Run all steps once: text, shards, two minutes of training on two CPU cores, predictions.

    The same as bertrain demo, which needs the extra train (docs/install.md). After Ctrl-C the same command continues.
    """
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "bertrain", "demo", "--out", out])  # this package never imports it


if __name__ == "__main__":
    main()
