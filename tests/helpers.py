"""What tests share: commands that run in this process, and errors by their kind."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import click
import numpy as np
import pytest
from click.testing import CliRunner
from numba import njit

import bertdata
from bertdata.errors import BertdataError, UsageError
from bertdata.options import IdsFormat, Shares, TextFormat, Vocabulary, build_arguments
from bertdata.remote import stores

CLICK_KINDS = {click.MissingParameter: "missing", click.NoSuchOption: "unknown", click.UsageError: "malformed"}
"""click's own errors by the nearest kind of ours; the first class that fits is taken."""


class Refusal(NamedTuple):
    """Why a command ended: the kind of its error, the option that the error names, and its value."""

    kind: str
    option: str | None
    given: Any
    sentence: str


class Touch:
    """What a pickle would run."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def damages(content, path):
    """What a file may hold in place of its content. path: what a pickle would make."""
    return {
        "empty": b"",
        "cut": content[: len(content) // 2],
        "noise": bytes(range(255, 0, -1)) * 9,
        "list": b"[1]",
        "number": b"5",
        "object": b"{}",
        "deep": b"[" * 100_000,
        "pickle": pickle.dumps(Touch(path)),
    }


def word_list(name, encoding=None):
    """The texts that tests/word_lists.json lists under a name, as bytes of an encoding if one is given."""
    found = json.loads((Path(__file__).parent / "word_lists.json").read_text(encoding="utf-8"))[name]
    return [text.encode(encoding) for text in found] if encoding else found


def as_kernel(part):
    """A kernel that calls a part of kernels, for tests of the part."""
    return njit(lambda *arguments: part(*arguments))


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


def refused(command, *arguments, kind, option=None, given=..., says="", **options):
    """Runs a command that must end in one sentence, with an error of this kind about this option; returns the Refusal.

    The exit code is 2 for an error of usage and else 1, and the last line of stderr is the sentence. given, says: as
    those of `refuses`.
    """
    errors, show = [], click.UsageError.show
    with patch.object(click.UsageError, "show", lambda error, file=None: errors.append(error) or show(error, file)):
        result = invoke(command, *arguments, **options)
    error = errors[0] if errors else result.exception
    while error is not None and not isinstance(error, (BertdataError, click.ClickException)):
        error = error.__context__
    assert error is not None, result.output
    refusal = checked(error, kind, option, given, says)
    assert result.exit_code == (2 if isinstance(error, (UsageError, click.UsageError)) else 1)
    assert result.stderr.splitlines()[-1] == f"Error: {refusal.sentence}"
    return refusal


def checked(error, kind, option, given, says):
    """The Refusal that an error is, which must be this one."""
    if isinstance(error, BertdataError):
        refusal = Refusal(error.kind, error.option, error.given, str(error))
    else:
        nearest = next(kind for fits, kind in CLICK_KINDS.items() if isinstance(error, fits))
        name = error.param.name if getattr(error, "param", None) else getattr(error, "option_name", None)
        refusal = Refusal(nearest, name, None, error.format_message())
    assert (refusal.kind, refusal.option) == (kind, option), refusal
    assert given is ... or refusal.given == given, refusal
    assert says in refusal.sentence, refusal
    return refusal


@contextmanager
def refuses(kind, option=None, *, given=..., says="", error=BertdataError):
    """The block must raise an error of this class and kind about this option. Gives pytest's information about it.

    given: the value that the error names, says: a part of its sentence; each is checked if there is one.
    """
    with pytest.raises(error) as caught:
        yield caught
    checked(caught.value, kind, option, given, says)


def python(*arguments, environment=None, **more):
    """What a fresh interpreter prints, which must end well. environment: variables beside those of this process."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | (environment or {}), capture_output=True, text=True, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def of_vocabulary(special):
    """The arguments of reference.keys.mask that the special tokens of a dataset decide."""
    ids = {*special.special_ids, special.unk}
    return {"special": ids, "mask_id": special.mask, "vocab_size": special.vocab_size}


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
        for owner, name in ((os, "replace"), (os, "fsync"), (Path, "unlink"), (Path, "rmdir"), (shutil, "rmtree")):
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
    fsync, replace, rename, mkdir, rmdir = os.fsync, os.replace, os.rename, Path.mkdir, Path.rmdir
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
        for path in () if source.is_symlink() else source.rglob("*") if source.is_dir() else [source]:
            assert holds(path), f"{path} is renamed before all of it is on disk"
        if source.is_dir() and not source.is_symlink():
            assert synced.get(source.stat().st_ino), f"the names in {source} are not on disk"
        directory = str(target.parent.resolve())
        assert directory not in unpublished, f"{directory} may have its old manifest and this {target.name}"
        if records.fullmatch(target.name) or (target.suffix == ".json" and target.parent.name == "cache"):
            assert directory not in renamed, f"{target} would survive a loss of power and what it names would not"
        replace(source, target)
        renamed.add(directory)
        pending.add(directory)
        if source.name == "manifest.json":
            unpublished.add(str(source.parent.resolve()))
        renames.append(target)
        return None

    def on_rename(source, target):
        rename(source, target)
        if Path(target).resolve().is_relative_to(root):
            pending.add(str(Path(target).parent.resolve()))

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
                is_known_empty = function is rmdir and str(Path(path).resolve()) not in pending
                if not is_known_empty:  # an empty directory that comes back does no harm
                    pending.add(directory)
                for directories in (renamed, pending, unpublished):  # what was inside may be lost
                    directories.difference_update({each for each in directories if Path(each).is_relative_to(path)})
            function(path, *args, **kwargs)

        return call

    with ExitStack() as patched:
        for owner, name, changed in (
            (os, "fsync", on_fsync),
            (os, "replace", on_replace),
            (os, "rename", on_rename),
            (Path, "mkdir", on_mkdir),
            (Path, "unlink", removing(Path.unlink)),
            (Path, "rmdir", removing(rmdir)),
            (shutil, "rmtree", removing(shutil.rmtree)),
        ):
            patched.enter_context(patch.object(owner, name, changed))
        yield SimpleNamespace(renames=renames, pending=pending, holds=holds)


def json_of(command, *arguments, **options):
    """The object that a command prints in its last line with --json."""
    return json.loads(succeeds(command, *arguments, "--json", **options).stdout.splitlines()[-1])


def flip(path, at):
    """Flips a bit of a byte of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def contents(folder):
    """Name → bytes of all files below a folder but locks, in which processes write their numbers."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name not in (".lock", "lock"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def stream_of(dataset, split="train"):
    """All tokens of a split, as a list."""
    return [int(t) for shard in range(len(dataset.splits[split])) for t in dataset.tokens(split, shard)]


def assert_same(one, other):
    """Two batches of a Loader have the same arrays."""
    assert one.arrays().keys() == other.arrays().keys()
    for name, array in one.arrays().items():
        assert np.array_equal(array, other.arrays()[name]), name


def assert_joined(whole, parts):
    """A batch has the rows of these, one after the other. Of each only padded rows have a mask of attention."""
    for name, array in whole.arrays().items():
        if name != "attention_mask":
            assert np.array_equal(array, np.concatenate([getattr(part, name) for part in parts])), name


def assert_goes_on(make):
    """The loader of `make()` goes on to the rest of its batches from every state, and as a pickle; returns them all."""
    loader = make()
    states, pickled, batches = [json.dumps(loader.state_dict())], [pickle.dumps(loader)], []
    for batch in loader:
        batches.append(batch)
        states.append(json.dumps(loader.state_dict()))
        pickled.append(pickle.dumps(loader))
    assert max(map(len, pickled)) < 4096
    for step, (state, copy) in enumerate(zip(states, pickled, strict=True)):
        restored = make()
        restored.load_state_dict(json.loads(state))
        for rest in (list(restored), list(pickle.loads(copy))):  # noqa: S301
            assert len(rest) == len(batches) - step
            for expected, batch in zip(batches[step:], rest, strict=True):
                assert_same(expected, batch)
    return batches


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


class Handler(BaseHTTPRequestHandler):
    """Sends answers of a web server, and prints nothing about them."""

    def log_message(self, *arguments):
        pass

    def answer(self, status, content=b"", **headers):
        """The content is not sent to who asks for the headers alone. headers: with _ in place of -."""
        self.send_response(status)
        for name, value in {"Content_Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def serving(handler):
    """A context in which a web server answers as `handler`; yields its host and port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def use_server(monkeypatch, address):
    """Makes an address the store of s3:// URLs."""
    values = {"ACCESS_KEY_ID": "a-key", "SECRET_ACCESS_KEY": "a-secret", "REGION": "us-east-1", "ENDPOINT_URL": address}
    for name, value in values.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    stores.store_at.cache_clear()


def members(record, path=()):
    """The path of every value in a JSON record, outer ones first."""
    items = record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ()
    for name, value in items:
        yield (*path, name)
        yield from members(value, (*path, name))


def with_member(record, path, value):
    """A copy of a JSON record with another value of the member that a path leads to."""
    record = json.loads(json.dumps(record))
    holder = record
    for name in path[:-1]:
        holder = holder[name]
    holder[path[-1]] = value
    return record


def waited(condition, seconds=120):
    """Waits until something holds; returns what it then gives."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)
    return value


def write_all(directory, contents):
    """Writes the bytes of files by name, also in directories that are not there yet; returns the directory."""
    for name, content in contents.items():
        path = Path(directory, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return directory


def write(path, *lines):
    """Writes lines of text, also in a directory that is not there yet; returns the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def data_of(html):
    """The data inside a page, which must be whole and small and ask for nothing.

    A browser knows no NaN, so there must be none.
    """
    (content,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', html, re.DOTALL)
    assert html.count("</script>") == 3
    assert len(html.encode()) < 2_000_000
    assert not re.search(r"""(src|href)\s*=\s*["']|<[^<>]*(src|href)\s*=|url\(|@import|fetch\(""", html)
    assert not re.search(r'https?://(?!www\.w3\.org/2000/svg")', html)
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


def tuning(run, data, out, *more):
    """The arguments of a fine-tuning on a table, of one seed and one epoch. more: others, which win over these."""
    return ["--checkpoint", run, "--train", data, "--dev", data, "--out", out, "--seeds", 1, "--epochs", 1, *more]


def stored(dataset):
    """All ids of each document, separators included, in the order of the dataset."""
    documents = []
    for split in dataset.splits.values():
        for shard in split:
            tokens, offsets = (dataset.array(shard.name, array) for array in ("tokens", "documents"))
            documents += [tokens[a:b].tolist() for a, b in pairwise(offsets)]
    return documents


def build(inputs, out, **options):
    """bertdata.build, with options by their names on the command line."""
    return bertdata.build(inputs, out, **build_arguments(options))


def import_ids(inputs, out, **options):
    """bertdata.import_ids, with options by their names on the command line."""
    groups = {"ids": IdsFormat.pop_from(options), "shares": Shares.pop_from(options)}
    return bertdata.import_ids(inputs, out, **options, **groups)


def train_tokenizer(inputs, out, **options):
    """bertdata.train_tokenizer, with options by their names on the command line."""
    vocabulary, text = Vocabulary.pop_from(options), TextFormat.pop_from(options, documents="line")
    return bertdata.train_tokenizer(inputs, out, vocabulary, text=text, **options)
