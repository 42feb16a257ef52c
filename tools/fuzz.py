"""Changes files of others at random, and reads each as a command would: is the answer a result, or one of our errors?

    python tools/fuzz.py --count 20000               of all kinds together
    python tools/fuzz.py --only parquet --seed 7     of one kind

Each input is a sound file with one to four changes: bytes are flipped, cut out, repeated or put in, or numbers and JSON
values are replaced. What accepts it goes on to its use: texts are tokenized, ids are imported, rows are read, a run is
planned. Prints for each kind how many inputs there were and how many were used. An input with any other end (another
exception, a dead process, more than a minute or 8 GiB) is kept in --keep, and the exit code is 1.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch
from forks import FORKS, run
from inputs import as_toml, write_inputs

import bertdata
from bertdata.errors import BertdataError
from bertdata.format.records import canonical
from bertdata.options import IdsFormat, Shares, TextFormat
from bertdata.sources.inputs import find_inputs
from bertdata.sources.plan import find_blocks, split
from bertdata.tokenize.load import load
from bertdata.write.encoding import TextEncoder
from bertrain import checkpoint, state
from bertrain.cli import read_options
from bertrain.config import Config
from bertrain.data import Stream
from bertrain.lab.distillation.answers import TeacherCache
from bertrain.methods import methods_of
from bertrain.ranks import World

CSV = b'number,body\n1,"the river, the ""house"""\n2,wind\n3,"two\nlines"\n'
FASTA = b">one\nMKVLA\nGGX\n>two description\nAC*DE\n\n>three\n"
ODD_TEXT = "the river\n\nstone, light and bread.\nunder the house\n\nna\u00efve \u6c34 \x00 \u2028 end\n"
MADE = {"table.csv": CSV, "table.tsv": CSV.replace(b",", b"\t"), "proteins.fasta": FASTA, "text.txt": ODD_TEXT.encode()}
MADE["packed.jsonl.gz"] = gzip.compress(b'{"body": "the river"}\n')  # so short that most bytes are not of the checksum
"""Inputs of a build that inputs.py does not write."""
TEXTS = "english.jsonl", "english.jsonl.zst", "english.arrow", "english.parquet"
PHASES = [
    {"steps": 4, "warmup": 0.1},
    {"tokens": "1K", "length": 32, "mlm_probability": 0.3, "schedule": "1-sqrt"},
]
ODD = (
    None,
    True,
    -1,
    0,
    1.5,
    1 << 31,
    1 << 63,
    -(1 << 70),
    float("inf"),
    "",
    "é\ud800",
    "../x",
    [],
    {},
    [[]],
    {"a": 1},
)
NUMBERS = (0, 1, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
LIMIT_S, LIMIT_BYTES = 60, 8 << 30  # a kernel that a changed tokenizer needs may have to be compiled


class Target(NamedTuple):
    file: Path  # what is changed
    use: Callable[[], object]  # reads it, and goes on to what it is for
    seals: Callable[[bytes], bytes] = lambda content: content  # makes the checksum of a changed file fit


def of_texts(scratch: Path) -> Iterator[tuple[str, Target]]:
    """Inputs of a build. Used: their texts are tokenized."""
    tokenizer = load(str(scratch / "vocab.txt"))
    for name, content in MADE.items():
        (scratch / name).write_bytes(content)

    def use(path: Path) -> None:
        on_error = "skip" if path.suffix == ".jsonl" else "fail"
        form = TextFormat(documents="blank", shard_size=64, text_key="body", on_error=on_error)
        plan = split(find_inputs([str(path)]).files, form)
        encoder = TextEncoder(tokenizer, Shares(validation=0.1), plan)
        for block in find_blocks(plan):
            encoder.encode(block)

    for name in (*MADE, *TEXTS):
        yield name.removeprefix("english."), Target(scratch / name, partial(use, scratch / name))


def of_ids(scratch: Path) -> Iterator[tuple[str, Target]]:
    """What `bertdata import` reads. Used: it is a dataset."""

    def use(given: Path, **of_format: Any) -> None:
        shutil.rmtree(scratch / "imported", ignore_errors=True)
        groups = {"ids": IdsFormat.pop_from(dict(of_format)), "shares": Shares(validation=0.0)}
        vocabulary = str(scratch / "vocab.txt")
        assert bertdata.import_ids([given], scratch / "imported", tokenizer=vocabulary, **groups).num_tokens > 0

    ids, rows = scratch / "tokens.bin", scratch / "tokens.parquet"
    yield "megatron.idx", Target(scratch / "tokens.idx", partial(use, scratch / "tokens", format="megatron"))
    yield "ids.bin", Target(ids, partial(use, ids, format="nanogpt", end_token="[SEP]"))
    yield "rows", Target(rows, partial(use, rows, format="rows"))


def of_others(scratch: Path) -> Iterator[tuple[str, Target]]:
    """Tokenizers, datasets, teacher caches, and the states and files of runs."""
    small, trained, cache, options = (scratch / name for name in ("small", "run", "answers", "run.toml"))
    rows = f"--data {small} --length 16 --model"
    lines = [
        f"bertdata build {scratch / 'english.txt'} --out {small} --tokenizer {scratch / 'vocab.txt'} --validation 0",
        f"bertrain pretrain {rows} bert-tiny --out {trained} --global-batch-size 4 --steps 1 --eval-every 0",
        f"bertrain teacher {rows} {trained} --out {cache} --top-k 4 --max-samples 8 --unit-samples 4",
    ]
    assert run(" ; ".join(lines)) == 0
    saved = checkpoint.find(trained)
    common = {"data": str(small), "model": "bert-tiny", "length": 16, "global_batch_size": 4, "lr": 1e-3}
    options.write_text(as_toml(common | {"phase": PHASES}))

    def sealed(content: bytes) -> bytes:
        with contextlib.suppress(ValueError, AttributeError, UnicodeError):
            value = json.loads(content)
            value.pop("checksum", None)
            return json.dumps(value | {"checksum": hashlib.sha256(canonical(value)).hexdigest()}).encode()
        return content

    def planned() -> None:
        config = Config.make(**read_options(options))
        Stream(config, World(0, 1, torch.device("cpu")), methods_of(config))

    def read() -> None:
        next(bertdata.Loader(bertdata.open(small), length=16, global_batch_size=4))

    def tokenized() -> None:
        bertdata.Tokenizer.load(str(small / "tokenizer.json")).encode_batch(ODD_TEXT.split("\n\n"))

    def answered() -> None:
        TeacherCache(cache).read(np.arange(8), 1 << 16)

    yield "manifest.json", Target(small / "manifest.json", read, sealed)
    yield "tokenizer.json", Target(small / "tokenizer.json", tokenized)
    yield "teacher cache", Target(cache / "cache.json", answered, sealed)
    yield "teacher's ids", Target(next(cache.glob("*ids.npy")), answered)
    yield "trainer.json", Target(saved / "trainer.json", lambda: state.read(saved))
    yield "checkpoint.json", Target(saved / "checkpoint.json", lambda: checkpoint.choose(trained))
    yield "run.toml", Target(options, planned)


def changed(content: bytes, draw: random.Random) -> bytes:
    """A file with one to four changes."""
    if content[:1] in b"{[" and draw.random() < 0.6:
        with contextlib.suppress(ValueError):
            return _changed_json(json.loads(content), draw)
    body = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at, size = draw.randrange(len(body) + 1), draw.choice((1, 2, 4, 8, 30))
        kind = draw.randrange(6)
        if kind == 0:
            body[at : at + 1] = bytes([draw.randrange(256)])
        elif kind == 1:
            del body[at : at + size]
        elif kind == 2:
            body[at:at] = body[at : at + size] * draw.choice((1, 2, 100))
        elif kind == 3:
            body[at:at] = draw.randbytes(size)
        elif kind == 4:
            width = draw.choice((1, 2, 4, 8))
            body[at : at + width] = (draw.choice(NUMBERS) % (1 << 8 * width)).to_bytes(width, "little")
        else:
            digits = [place for place, byte in enumerate(body) if 48 <= byte < 58]
            if digits:
                place = draw.choice(digits)
                body[place : place + 1] = str(draw.choice(NUMBERS)).encode()
    return bytes(body)


def _changed_json(value: Any, draw: random.Random) -> bytes:
    def places(inside: Any) -> Iterator[tuple[Any, Any]]:
        for key in list(inside) if isinstance(inside, dict) else range(len(inside)):
            yield inside, key
            if isinstance(inside[key], dict | list):
                yield from places(inside[key])

    for _ in range(draw.choice((1, 1, 3))):
        if found := list(places(value)):
            holder, key = draw.choice(found)
            if draw.random() < 0.2:
                del holder[key]
            else:
                holder[key] = deepcopy(draw.choice(ODD))
    return json.dumps(value).encode()


def tried(name: str, target: Target, count: int, seed: int, keep: Path) -> dict[str, int]:
    """Uses so many changed files, in a process of its own. Returns how many there were, were used, and were faults."""
    seen = {"inputs": 0, "used": 0, "faults": 0}
    sound = target.file.read_bytes()
    while seen["inputs"] < count:  # a process that is ended by an input is followed by another
        target.file.write_bytes(sound)
        reads, writes = FORKS.Pipe(duplex=False)
        process = FORKS.Process(target=_try, args=(name, target, count, seed, keep, writes, seen))
        process.start()
        writes.close()
        before = seen
        with reads, contextlib.suppress(EOFError):
            while True:
                seen = reads.recv()
        process.join()
        if seen is before:
            raise click.ClickException(f"{name}: the process ended with {process.exitcode} before it changed a file")
        # pyarrow throws where nothing catches if the sizes of a footer contradict its schema (seen with version 26)
        if process.exitcode and not (target.file.suffix == ".parquet" and process.exitcode == -signal.SIGABRT):
            seen["faults"] += 1
            (keep / f"{name}.{seen['inputs'] - 1}").write_bytes(target.file.read_bytes())
            click.echo(f"{name}, input {seen['inputs'] - 1}: the process ended with {process.exitcode}", err=True)
    target.file.write_bytes(sound)
    return seen


def _try(name: str, target: Target, count: int, seed: int, keep: Path, writes: Any, seen: dict[str, int]) -> None:
    """Does what `tried` says from input `seen["inputs"]` on, and sends the counts after each."""
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    sound = target.file.read_bytes()
    target.use()
    for number in range(seen["inputs"], count):
        content = target.seals(changed(sound, random.Random(f"{seed} {name} {number}")))
        target.file.write_bytes(content)
        seen["inputs"] += 1
        writes.send(seen)
        signal.alarm(LIMIT_S)  # which ends the process
        try:
            target.use()
            seen["used"] += 1
        except BertdataError:
            pass
        except Exception as error:  # what a command would show as a traceback
            seen["faults"] += 1
            (keep / f"{name}.{number}").write_bytes(content)
            click.echo(f"{name}, input {number}: {type(error).__name__}: {str(error)[:300]}", err=True)
        signal.alarm(0)
    writes.send(seen)


@click.command(help=__doc__)
@click.option("--count", default=1000, show_default=True, help="Inputs, over all kinds.")
@click.option("--seed", default=0, show_default=True)
@click.option("--only", default="", help="Kinds with this in their name.")
@click.option("--keep", default="fuzz-faults", show_default=True, help="Directory for inputs that are faults.")
def main(count: int, seed: int, only: str, keep: str) -> None:
    Path(keep).mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        os.environ["BERTDATA_CACHE"] = str(scratch / "cache")
        write_inputs(scratch, 4)
        with contextlib.redirect_stdout(sys.stderr):
            made = [*of_texts(scratch), *of_ids(scratch), *of_others(scratch)]
        chosen = [(kind, target) for kind, target in made if only in kind]
        counts = {}
        for number, (kind, target) in enumerate(chosen):
            share = count * (number + 1) // len(chosen) - count * number // len(chosen)
            counts[kind] = tried(kind, target, share, seed, Path(keep))
    total = {key: sum(each[key] for each in counts.values()) for key in ("inputs", "used", "faults")}
    for kind, each in (counts | {"all": total}).items():
        click.echo(f"{kind:<16} {json.dumps(each)}")
    sys.exit(total["faults"] > 0)


if __name__ == "__main__":
    main()
