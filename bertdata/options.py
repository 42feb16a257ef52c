"""The options of build, import and train-tokenizer, declared once for Python and for the command line."""

from __future__ import annotations

import ast
import codecs
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field, fields
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from bertdata.choices import FIXED_TOKENIZERS, IDS_FORMATS, INPUT_FORMATS, SAMPLE_KINDS, TOKENIZER_TYPES
from bertdata.errors import UsageError, require, require_known, require_positive, require_share

_Group = TypeVar("_Group", bound="Options")
_Check = Callable[[str, Any], Any]


def option(default: Any, /, *choices: str, flag: str = "", check: _Check | None = None, **command_line: Any) -> Any:
    """Return a dataclass field that is also a command-line option. The docstring below it is its help.

    flag: the name on the command line and in errors, if it differs from the field name. check: function that returns
    the value to store, or raises UsageError; it is not called for None. command_line: arguments of click.option.
    """
    if choices and default not in choices:
        choices = (default, *choices)
    return field(default=default, metadata={"flag": flag, "check": check, "choices": choices, "click": command_line})


@dataclass(frozen=True, kw_only=True)
class Options:
    """A group of options. Raises UsageError for an invalid value."""

    def __post_init__(self) -> None:
        for name, each in self.declared():
            value, check = getattr(self, each.name), each.metadata["check"]
            if each.metadata["choices"]:
                require_known(name, value, each.metadata["choices"])
            if check and value is not None:
                object.__setattr__(self, each.name, check(name, value))

    @classmethod
    def declared(cls) -> Iterator[tuple[str, Field[Any]]]:
        """Yield each option with its name on the command line."""
        return ((each.metadata["flag"] or each.name, each) for each in fields(cls) if each.metadata)

    @classmethod
    def pop_from(cls: type[_Group], options: dict[str, Any], **more: Any) -> _Group:
        """Remove the options of this group from a dict of command-line names, and return them as an object."""
        return cls(**{each.name: options.pop(name) for name, each in cls.declared() if name in options} | more)


def helps(options: type) -> dict[str, str]:
    """Return the help of each option of a class: the docstring below its field. {} if there is no source file."""
    pairs = pairwise(_classes(getattr(sys.modules.get(options.__module__), "__file__", "")).get(options.__name__, []))
    return {each.target.id: " ".join(text.value.value.split()) for each, text in pairs if hasattr(each, "annotation")}


@lru_cache
def _classes(file: str) -> dict[str, list[Any]]:
    """Return the statements of each class of a file."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except OSError:
        return {}
    return {each.name: each.body for each in tree.body if isinstance(each, ast.ClassDef)}


@lru_cache
def _lock_of_functions() -> threading.Lock:
    """Return the lock that a thread holds while it runs a function of the user. A global lock cannot be pickled."""
    return threading.Lock()


_lock_of_functions()  # creates it: two threads with the first call could get two locks


@lru_cache
def function_of(spec: str, option: str) -> Callable[[str], Any]:
    """Return the function "module:function", or the result of the call "module:function(1, 2)". Raises UsageError.

    Only one thread at a time runs the function, or the iterator that it returns.
    """
    module, _, call = spec.partition(":")
    name, has_arguments, arguments = call.partition("(")
    try:
        function = getattr(importlib.import_module(module), name)
        if has_arguments:
            if not arguments.endswith(")"):
                raise ValueError("a parenthesis is not closed")
            function = function(*ast.literal_eval(f"({arguments.removesuffix(')')},)" if arguments != ")" else "()"))
    except Exception as error:  # importing and calling run user code
        advice = "give module:function, or module:function(1, 2) of one that returns a function"
        if isinstance(error, ModuleNotFoundError) and error.name == module and Path(f"{module}.py").is_file():
            advice = f"if you wrote all .py files here, begin the command with PYTHONPATH=. to find {module}.py"
        sentence = f"{option} {spec} is not a function ({type(error).__name__}: {error}); {advice}"
        raise UsageError(sentence, "bad-function", option=option.removeprefix("--"), given=spec) from None
    if not callable(function):
        sentence = f"{option} {spec} is of type {type(function).__name__} and not a function; give module:function"
        raise UsageError(sentence, "bad-function", option=option.removeprefix("--"), given=spec)

    def one_at_a_time(text: str) -> Any:
        with _lock_of_functions():
            result = function(text)
            return [*result] if isinstance(result, Iterator) else result

    return one_at_a_time


def _functions(name: str, given: Any) -> Any:
    for spec in [given] if isinstance(given, str) else given:
        function_of(spec, f"--{name}")
    return given if isinstance(given, str) else tuple(given)


def _encoding(name: str, value: str) -> str:
    """Return Python's name for a text encoding, such as iso8859-1 for latin-1."""
    try:
        "a".encode(value)  # fails for codecs that are not text encodings, such as base64
        codecs.getincrementaldecoder(value)
        return codecs.lookup(value).name
    except (LookupError, UnicodeError, ValueError):
        require(False, name, value, "a text encoding of Python, such as utf-8, latin-1 or gb18030", "unknown")
        raise


@dataclass(frozen=True, kw_only=True)
class TextFormat(Options):
    """How to read files as text, and how to divide the text into documents."""

    documents: str = option("blank", "blank", "line", "file")
    """What ends a document of plain text: a blank line, every line, or the end of the file."""
    sentences: str = option("none", "none", "line")
    """Where sentences begin, for sentence pairs. none: do not store. line: each line is a sentence."""
    words: str | None = option(None, check=_functions, metavar="MODULE:FUNCTION")
    """Python function that returns the words of a text, such as jieba:cut. The dataset then stores where words begin,
    for whole word masking. Default: words are not stored.
    """
    kind: str | None = option(None, *INPUT_FORMATS, flag="format")
    """Format of every INPUT. Default: by the extension of each file; a file without a known extension is text."""
    text_key: str = option("text")
    """Name of the JSON key, or of the column of a table, that holds the text; a.b is b in the object a. For a CSV or
    TSV without a header: the number of the column, from 0.
    """
    encoding: str = option("utf-8", check=_encoding)
    """Encoding of all but Parquet and Arrow, by its Python name, such as latin-1."""
    include: tuple[str, ...] = option((), metavar="PATTERN")
    """For an INPUT that is a directory or a pattern: read only files whose relative path matches, such as '*.md'. May
    be repeated. Default: of a directory, files with a known extension (.txt .jsonl .csv .parquet .arrow ..., also
    compressed) or without one; with --format, all files.
    """
    exclude: tuple[str, ...] = option((), metavar="PATTERN")
    """For an INPUT that is a directory or a pattern: leave out files whose relative path matches, such as 'drafts/*'.
    May be repeated.
    """
    maps: tuple[str, ...] = option((), flag="map", check=_functions, metavar="MODULE:FUNCTION")
    """Python function that takes the text of a document and returns a changed text, or None to leave the document out,
    such as bertdata.prepare:nfkc or 'bertdata.prepare:length(10, 512)'. May be repeated; the functions are applied in
    order. Default: none.
    """
    dedup: bool = option(False)
    """Leave out documents whose text, after --map, equals that of an earlier document. The input is read twice."""
    on_error: str = option("fail", "fail", "skip")
    """For a row that cannot be used, such as one without text: fail, or skip and count it."""
    shard_size: int = option(1 << 30, check=require_positive, default="1GiB", metavar="SIZE")
    """Decompressed text of one shard, such as 64MiB or 1GiB. A shard of Parquet ends with a row group."""
    max_documents: int | None = option(None, check=require_positive)
    """Stop after this number of documents. Default: no limit."""
    strict: bool = option(False)
    """Fail at an invalid byte, instead of replacing and counting it."""
    warnings: set[str] = field(default_factory=set, compare=False, repr=False)  # about the text, added while reading


@dataclass(frozen=True, kw_only=True)
class Vocabulary(Options):
    """A tokenizer to train on the text, or a fixed one."""

    kind: str = option("wordpiece", *TOKENIZER_TYPES, *FIXED_TOKENIZERS, flag="type")
    """Kind of tokenizer to train: wordpiece as in BERT, bpe (byte-level) as in ModernBERT, unigram as in ALBERT and
    XLM-R. Or one that is not trained: residues, the letters of proteins as in ESM-2; bytes, as for DNA.
    """
    cased: bool = option(False)
    """Train a tokenizer that keeps case; wordpiece and unigram then keep accents, too. Default: lower case."""
    size: int = option(30522, flag="vocab_size")
    """Number of tokens in the trained vocabulary, special tokens included."""


@dataclass(frozen=True, kw_only=True)
class Shares(Options):
    """Shares of the documents in the validation and test splits."""

    validation: float = option(0.01, check=require_share)
    """Share of the documents for the validation split, from 0 to 1."""
    test: float = option(0.0, check=require_share)
    """Share of the documents for the test split, from 0 to 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        name = "test" if self.validation < 1 else "validation"
        require(self.validation + self.test < 1, name, getattr(self, name), "shares whose sum is below 1")

    @property
    def limits(self) -> tuple[int, int]:
        """Bounds for the upper half of a document's hash: validation is below the first, test below the second."""
        return round(self.validation * 2**32), round((self.validation + self.test) * 2**32)


@dataclass(frozen=True, kw_only=True)
class Machines(Options):
    """Where to build: on the threads of this machine, on one of several machines, or on a Ray cluster."""

    workers: int | None = option(None, check=require_positive)
    """Number of threads that tokenize; with --ray, number of tasks at the same time. Default: the number of cores; with
    --ray, as many as the cluster has CPUs for.
    """
    part: tuple[int, int] | None = option(None, metavar="I/N")
    """Build only part i of n, written i/n, so that n machines can share the work and --out. A compressed file is built
    by one of them.
    """
    ray: str | None = option(None, is_flag=False, flag_value="auto", metavar="[ADDRESS]")
    """Build on a Ray cluster. HOST:PORT: its address. No value, or auto: $RAY_ADDRESS or the cluster on this machine.
    local: a new cluster on this machine. All nodes must see the inputs and --out under the same names.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        part = self.part  # counted from 0 in Python: (0, 4) is 1/4 on the command line
        require(part is None or 0 <= part[0] < part[1], "part", part, "(i, n) with 0 <= i < n")

    @property
    def threads(self) -> int:
        """Number of threads: `workers`, or by default the number of cores that this process may use."""
        return self.workers or (len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)


@dataclass(frozen=True, kw_only=True)
class IdsFormat(Options):
    """How to read files of ids."""

    kind: str = option("auto", *IDS_FORMATS, flag="format")
    """Format of every FILE. auto: by the names of the files."""
    end_token: str | None = option(None)
    """For nanogpt: the token that ends a document. Default: the end token of the tokenizer."""
    dtype: str | None = option(None, "uint16", "uint32", "int32", "int64")
    """Of the ids in a .bin without a header. Default: guessed, and the guess is printed."""
    shard_size: int = option(1 << 30, check=require_positive, default="1GiB", metavar="SIZE")
    """Bytes of ids in a unit, as they are stored. A unit becomes at most one shard of each split."""


@dataclass(frozen=True, kw_only=True)
class Arguments(Options):
    """Help of the options that are plain function arguments in Python."""

    out: str = option(None, required=True)
    """Directory for the dataset, new or empty."""
    overwrite: bool = option(False)
    """Replace a dataset or an unfinished build in --out."""
    finish: bool = option(False)
    """Publish the dataset after all parts are built. Give --out alone."""
    tokenizer: str | None = option(None)
    """A tokenizer.json, a vocab.txt, a directory of one, or a name on the Hugging Face hub. Default: train one on the
    text, with --type, --cased and --vocab-size; with --type residues or bytes, one that needs no training.
    """
    tokenizer_of_ids: str = option(None, flag="tokenizer", required=True)
    """The tokenizer that produced the ids: a tokenizer.json, a vocab.txt, a directory of one, or a name on the Hugging
    Face hub.
    """
    special_tokens: bool = option(False)
    """Add the tokens among [PAD], [CLS], [SEP] and [MASK] that the tokenizer lacks. Needed for gpt2."""
    roles: str = option("", show_default=False, metavar="ROLE=TOKEN,...")
    """Give tokens of the tokenizer the roles mask, cls, sep and pad, so that a decoder can be trained with masks."""
    samples: str = option("windows", *SAMPLE_KINDS)
    """Content of a row: a window over the text, a document, several packed documents, or a pair of segments."""
    public: bool = option(False)
    """Allow a public repository of the hub. Default: a new one is private, and an existing public one is an error."""
    origins: bool = option(False)
    """Also send origins/ to the hub, which names the inputs with their paths. Object stores always get it."""


def build_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `build` from options by their command-line names."""
    rest = dict(options)
    groups = {"text": TextFormat.pop_from(rest), "shares": Shares.pop_from(rest), "machines": Machines.pop_from(rest)}
    vocabulary, tokenizer = Vocabulary.pop_from(rest), rest.pop("tokenizer", None)
    return {**rest, **groups, "tokenizer": vocabulary if tokenizer is None else tokenizer}
