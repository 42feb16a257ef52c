"""What tests share: commands that run in this process, and errors by their kind."""

import json
import os
import re
import shutil
import threading
from contextlib import ExitStack, contextmanager
from http.server import ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import click
import numpy as np
import pytest
from click.testing import CliRunner

from bertdata.errors import BertdataError, UsageError

CLICK_KINDS = {click.MissingParameter: "missing", click.NoSuchOption: "unknown", click.UsageError: "malformed"}
"""click's own errors by the nearest kind of ours; the first class that fits is taken."""


class Refusal(NamedTuple):
    """Why a command ended: the kind of its error, the option that the error names, and its value."""

    kind: str
    option: str | None
    given: Any
    sentence: str


def invoke(command, *arguments, **options):
    """Runs a command of click in this process, to its end. An exception that is no planned end is raised."""
    result = CliRunner().invoke(command, [str(argument) for argument in arguments], **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def succeeds(command, *arguments, **options):
    """Runs a command that must end well; returns click's result."""
    result = invoke(command, *arguments, **options)
    assert result.exit_code == 0, result.output
    return result


def refused(command, *arguments, kind, option=None, **options):
    """Runs a command that must end in one sentence, with an error of this kind about this option; returns the Refusal.

    The exit code is 2 for an error of usage and else 1, and the last line of stderr is the sentence.
    """
    errors, show = [], click.UsageError.show
    with patch.object(click.UsageError, "show", lambda error, file=None: errors.append(error) or show(error, file)):
        result = invoke(command, *arguments, **options)
    error = errors[0] if errors else result.exception
    while error is not None and not isinstance(error, (BertdataError, click.ClickException)):
        error = error.__context__
    assert error is not None, result.output
    refusal = refusal_of(error)
    assert (refusal.kind, refusal.option) == (kind, option), refusal
    assert result.exit_code == (2 if isinstance(error, (UsageError, click.UsageError)) else 1)
    assert result.stderr.splitlines()[-1] == f"Error: {refusal.sentence}"
    return refusal


def refusal_of(error):
    if isinstance(error, BertdataError):
        return Refusal(error.kind, error.option, error.given, str(error))
    kind = next(kind for fits, kind in CLICK_KINDS.items() if isinstance(error, fits))
    option = error.param.name if getattr(error, "param", None) else getattr(error, "option_name", None)
    return Refusal(kind, option, None, error.format_message())


@contextmanager
def refuses(kind, option=None, *, given=..., says="", error=BertdataError):
    """The block must raise an error of this class and kind about this option. Gives pytest's information about it.

    given: the value that the error names, says: a part of its sentence; each is checked if there is one.
    """
    with pytest.raises(error) as caught:
        yield caught
    refusal = refusal_of(caught.value)
    assert (refusal.kind, refusal.option) == (kind, option), refusal
    assert given is ... or refusal.given == given, refusal
    assert says in refusal.sentence


def published(out):
    """Name → bytes of every file of a dataset, in whose directory nothing else is left."""
    assert [path.name for path in out.iterdir() if path.is_dir()] in ([], ["origins"])
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def without_origins(out):
    """The same without the numbers of the inputs, which depend on how many these are."""
    return {name: content for name, content in published(out).items() if not name.startswith("origins/")}


@contextmanager
def failing(number, error):
    """Raises `error()` instead of the given call of those that change the disk; gives the calls so far."""
    calls = []

    def watched(function):
        def call(*args, **kwargs):
            calls.append(function)
            if len(calls) - 1 == number:
                raise error()
            return function(*args, **kwargs)

        return call

    with ExitStack() as patched:
        for owner, name in ((os, "replace"), (os, "fsync"), (Path, "unlink"), (shutil, "rmtree")):
            patched.enter_context(patch.object(owner, name, watched(getattr(owner, name))))
        yield calls


@contextmanager
def recorded(root):
    """Checks changes of names below `root` as they happen: a rename makes visible what is on disk, with what came
    before it, and nothing is removed or replaced before that is safe.

    Yields an object with `renames`, the new names; `pending`, the directories whose newest names would not survive a
    loss of power, those of locks apart; and `holds(path)`, whether all of a file is on disk.
    """
    synced, renames, renamed, pending, unpublished = {}, [], set(), set(), set()
    fsync, replace, mkdir = os.fsync, os.replace, Path.mkdir
    records = re.compile(r"(manifest|cache|unit-\d+)\.json")

    def state(path):
        status = os.stat(path)
        return status.st_ino, (status.st_size, status.st_mtime_ns)

    def holds(path):
        inode, what = state(path)
        return synced.get(inode) == what

    def on_fsync(fd):
        fsync(fd)
        path = os.readlink(f"/proc/self/fd/{fd}")
        for directories in (renamed, pending, unpublished):
            directories.discard(path)
        inode, what = state(path)
        synced[inode] = what

    def on_replace(source, target):
        source, target = Path(source), Path(target)
        if not target.resolve().is_relative_to(root):  # numba's cache
            return replace(source, target)
        for path in source.rglob("*") if source.is_dir() else [source]:
            assert holds(path), f"{path} is renamed before all of it is on disk"
        if source.is_dir():
            assert synced.get(source.stat().st_ino), f"the names in {source} are not on disk"
        directory = str(target.parent.resolve())
        assert directory not in unpublished, f"{directory} may have its old manifest and this {target.name}"
        if records.fullmatch(target.name) or (target.suffix == ".json" and target.parent.name in (".build", "cache")):
            assert directory not in renamed, f"{target} would survive a loss of power and what it names would not"
        replace(source, target)
        renamed.add(directory)
        pending.add(directory)
        if source.name == "manifest.json":
            unpublished.add(str(source.parent.resolve()))
        renames.append(target)
        return None

    def on_mkdir(path, *args, **kwargs):
        existed = path.exists()
        mkdir(path, *args, **kwargs)
        if not existed:
            pending.add(str(path.parent.resolve()))

    def removing(function):
        def call(path, *args, **kwargs):
            directory = str(Path(path).parent.resolve())
            if Path(path).exists() and not str(path).endswith("lock"):
                assert directory not in unpublished, f"{directory} may have its old manifest and no {path}"
                is_checkpoint = path in renames and Path(path).is_dir()
                assert not is_checkpoint or directory not in renamed, f"{path} is removed before the next is on disk"
                pending.add(directory)
                for directories in (renamed, pending, unpublished):  # what was inside may be lost
                    directories.difference_update({each for each in directories if Path(each).is_relative_to(path)})
            function(path, *args, **kwargs)

        return call

    with ExitStack() as patched:
        for owner, name, changed in (
            (os, "fsync", on_fsync), (os, "replace", on_replace), (Path, "mkdir", on_mkdir),
            (Path, "unlink", removing(Path.unlink)), (shutil, "rmtree", removing(shutil.rmtree)),
        ):  # fmt: skip
            patched.enter_context(patch.object(owner, name, changed))
        yield SimpleNamespace(renames=renames, pending=pending, holds=holds)


def stop_after(blocks):
    """A callback for the progress of a build that is a Ctrl-C after some blocks."""
    left = iter(range(blocks))

    def progress(done, total):
        if next(left, None) is None:
            raise KeyboardInterrupt

    return progress


def json_of(command, *arguments, **options):
    """The object that a command prints in its last line with --json, and click's result."""
    result = succeeds(command, *arguments, "--json", **options)
    return json.loads(result.stdout.splitlines()[-1]), result


def stream_of(dataset, split="train"):
    """All tokens of a split, as a list."""
    return [int(t) for shard in range(len(dataset.splits[split].shards)) for t in dataset.tokens(split, shard)]


def assert_same(one, other):
    """Two batches of a Loader have the same arrays."""
    assert one.arrays().keys() == other.arrays().keys()
    for name, array in one.arrays().items():
        assert np.array_equal(array, other.arrays()[name]), name


def shard_of(documents, separator=(3,)):
    """Documents of sentences of ids as write_dataset takes a shard."""
    tokens, ends, cuts = [], [], []
    for document in documents:
        for sentence in document:
            cuts.append(len(tokens))
            tokens += sentence
        tokens += separator
        ends.append(len(tokens))
    return tokens, ends, [*cuts[1:], len(tokens)]


@contextmanager
def serving(handler):
    """A context in which a web server answers as `handler`; yields its host and port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def write(path, *lines):
    """Writes lines of text; returns the path."""
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def data_of(html):
    """The data inside a page. A browser knows no NaN, so there must be none."""
    (content,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', html, re.DOTALL)
    return json.loads(content, parse_constant=pytest.fail)


def joined(texts):
    """A block of these documents as Tokenizer.encode takes it: bytes, and int64 offsets."""
    encoded = [text.encode() + b"\n" for text in texts]
    return b"".join(encoded), np.cumsum([0, *map(len, encoded)], dtype=np.int64)


def ids_of(tokenizer, texts):
    """The ids of each document, without the separator that must be its last one if the tokenizer has one."""
    found, separator = tokenizer.encode(*joined(texts), sentences=False), tokenizer.special.separator
    documents = [found.ids[a:b].tolist() for a, b in pairwise(found.documents.tolist())]
    if separator is None:
        return documents
    assert all(ids[-1] == separator for ids in documents)
    return [ids[:-1] for ids in documents]


def plain(encoded):
    """All that an encoding is, as values to compare."""
    sentences = None if encoded.sentences is None else encoded.sentences.tolist()
    ids, documents = encoded.ids.tolist(), encoded.documents.tolist()
    return encoded.ids.dtype, ids, documents, sentences, encoded.special_ids_replaced


GOOD, BAD = ["river light", "the bread of morning", "light"], ["salt stone", "wind under stone", "salt"]


def write_labelled(path, *, repeat=1, header=()):
    """A table of the texts of GOOD and BAD with labels 1 and 0, between tabs."""
    return write(path, *header, *[f"{text}\t{int(text in GOOD)}" for text in GOOD + BAD] * repeat)
