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
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import pyarrow as pa
import torch
from freeze import write_ids
from pyarrow import parquet
from soak import write_text, write_vocab

import bertdata
from bertdata.errors import BertdataError
from bertdata.format.records import canonical
from bertdata.options import IdsFormat, Shares, TextFormat
from bertdata.sources.inputs import find_inputs
from bertdata.sources.plan import find_blocks, split
from bertdata.tokenize.load import load
from bertdata.write.encoding import TextEncoder
from bertrain.lab.distillation import answers

TEXTS = ["the river", "stone, light and bread.\nunder the house", "", "naïve 水 \x00 \u2028 end", "wind " * 60]
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
    ends: Callable[[bytes], bool] = lambda content: False  # does a library end the process for such a file?


def ends_pyarrow(content: bytes) -> bool:
    """Does reading the footer alone end the process? pyarrow then throws where nothing catches (seen with version 26).

    That is where the sizes that a footer states contradict its schema.
    """
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with contextlib.suppress(Exception):
            meta = parquet.read_metadata(io.BytesIO(content))
            for group in range(meta.num_row_groups):
                meta.row_group(group).to_dict()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def of_texts(scratch: Path) -> Iterator[tuple[str, Target]]:
    """Inputs of a build. Used: their texts are tokenized."""
    tokenizer = load(str(write_vocab(scratch / "vocab.txt")))
    rows = pa.table({"text": TEXTS, "number": range(len(TEXTS))})
    lines = "".join(json.dumps({"text": text, "number": 1}) + "\n" for text in TEXTS).encode()
    fasta = b">one\nMKVLA\nGGX\n>two description\nAC*DE\n\n>three\n"
    csv = b'number,text\n1,"the river, the ""house"""\n2,wind\n3,"two\nlines"\n'
    arrow, table = io.BytesIO(), io.BytesIO()
    with pa.ipc.new_file(arrow, rows.schema) as writer:
        writer.write_table(rows)
    parquet.write_table(rows, table, row_group_size=2, compression="zstd")
    plain = "\n\n".join(TEXTS).encode()
    for name, content in {
        "text.txt": plain,
        "lines.jsonl": lines,
        "packed.jsonl.gz": gzip.compress(lines),
        "table.csv": csv,
        "table.tsv": csv.replace(b",", b"\t"),
        "proteins.fasta": fasta,
        "table.arrow": arrow.getvalue(),
        "table.parquet": table.getvalue(),
    }.items():
        path = scratch / name
        path.write_bytes(content)

        def use(path: Path = path) -> None:
            form = TextFormat(documents="blank", shard_size=64)
            plan = split(find_inputs([str(path)]).files, form)
            encoder = TextEncoder(tokenizer, Shares(validation=0.1), plan)
            for block in find_blocks(plan):
                encoder.encode(block)

        yield name, Target(path, use, ends=ends_pyarrow) if path.suffix == ".parquet" else Target(path, use)


def of_ids(scratch: Path) -> Iterator[tuple[str, Target]]:
    """What `bertdata import` reads. Used: it is a dataset."""
    vocabulary, out = str(scratch / "vocab.txt"), scratch / "imported"
    text = write_text(scratch / "text.of-ids.txt", 600)
    bertdata.build([text], scratch / "small", tokenizer=vocabulary, shares=Shares(validation=0.0))
    write_ids(scratch / "tokens", 30)
    (scratch / "ids.bin").write_bytes(np.arange(5, 40, dtype=np.uint16).tobytes())

    def use(given: Path, **of_format: Any) -> Callable[[], None]:
        def imported() -> None:
            shutil.rmtree(out, ignore_errors=True)
            groups = {"ids": IdsFormat.pop_from(dict(of_format)), "shares": Shares(validation=0.0)}
            dataset = bertdata.import_ids([given], out, tokenizer=vocabulary, **groups)
            assert dataset.num_tokens > 0

        return imported

    rows = scratch / "tokens.parquet"
    yield "megatron.idx", Target(scratch / "tokens.idx", use(scratch / "tokens", format="megatron"))
    yield "ids.bin", Target(scratch / "ids.bin", use(scratch / "ids.bin", format="nanogpt", end_token="[SEP]"))
    yield "rows", Target(rows, use(rows, format="rows"), ends=ends_pyarrow)


def of_others(scratch: Path) -> Iterator[tuple[str, Target]]:
    """Tokenizers, datasets, teacher caches, and the states and files of runs."""
    small = scratch / "small"

    def sealed(content: bytes) -> bytes:
        with contextlib.suppress(ValueError, AttributeError, UnicodeError):
            value = json.loads(content)
            value.pop("checksum", None)
            return json.dumps(value | {"checksum": hashlib.sha256(canonical(value)).hexdigest()}).encode()
        return content

    def read() -> None:
        loader = bertdata.Loader(bertdata.open(small), length=16, global_batch_size=4)
        next(loader)

    yield "manifest.json", Target(small / "manifest.json", read, sealed)

    def tokenized() -> None:
        bertdata.Tokenizer.load(str(small / "tokenizer.json")).encode_batch(TEXTS[:3])

    yield "tokenizer.json", Target(small / "tokenizer.json", tokenized)
    yield from _teacher_cache(scratch / "answers", sealed)
    yield from _of_runs(scratch, small)


def _teacher_cache(cache: Path, sealed: Callable[[bytes], bytes]) -> Iterator[tuple[str, Target]]:
    header = dict.fromkeys(answers.HEADER, 0) | {"format_version": 1, "format": answers.FORMAT}
    header |= {
        "samples": 8,
        "slots": 2,
        "vocab_size": 40,
        "top_k": 4,
        "unit_samples": 4,
        "epoch_samples": 8,
        "id_dtype": "<u2",
        "variants": 1,
        "stream": {},
    }
    cache.mkdir()
    for number in answers.begin(cache, header):
        ids = np.tile(np.arange(4, dtype=np.uint16), (4, 2, 1))
        given = answers.Answers(ids, np.full(ids.shape, -2, np.float16), np.full(ids.shape[:2], -1, np.float16))
        counts = {"samples": 4, "targets": 8, "entropy": 1.0, "tail_mass": 0.1}
        answers.write_unit(cache, header, number, [(given, counts)])
    answers.publish(cache, header)
    use: Callable[[], object] = lambda: answers.TeacherCache(cache).read(np.arange(8), 40)  # noqa: E731
    yield "teacher cache", Target(cache / "cache.json", use, sealed)
    yield "teacher's ids", Target(next(cache.glob("*ids.npy")), use)


def _of_runs(scratch: Path, small: Path) -> Iterator[tuple[str, Target]]:
    from click.testing import CliRunner

    from bertrain import checkpoint, state
    from bertrain.cli import read_options
    from bertrain.config import Config
    from bertrain.data import Stream
    from bertrain.methods import methods_of
    from bertrain.pretrain import main as pretrain
    from bertrain.ranks import World

    run, runner = scratch / "run", CliRunner()
    given = ["--model", "bert-tiny", "--length", "16", "--global-batch-size", "4", "--steps", "1", "--eval-every", "0"]
    done = runner.invoke(pretrain, ["--data", str(small), "--out", str(run), *given])
    assert done.exit_code == 0, done.output
    made = checkpoint.find(run)
    yield "trainer.json", Target(made / "trainer.json", lambda: state.read(made))

    def planned() -> None:
        config = Config.make(**read_options(scratch / "run.toml"))
        Stream(config, World(0, 1, torch.device("cpu")), methods_of(config))

    yield "checkpoint.json", Target(made / "checkpoint.json", lambda: checkpoint.choose(run))
    (scratch / "run.toml").write_text(
        f'data = "{small}"\nmodel = "bert-tiny"\nlength = 16\nglobal_batch_size = 4\nlr = 1e-3\n[[phase]]\nsteps = 4\n'
        'warmup = 0.1\n[[phase]]\ntokens = "1K"\nlength = 32\nmlm_probability = 0.3\nschedule = "1-sqrt"\n'
    )
    yield "run.toml", Target(scratch / "run.toml", planned)


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
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _try(name, target, count, seed, keep, writing, seen)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os.close(writing)
        with open(reading) as file:
            lines = file.readlines()
        status = os.waitpid(pid, 0)[1]
        if not lines:
            raise click.ClickException(f"{name}: the process ended with status {status} before it changed a file")
        seen = json.loads(lines[-1])
        last = target.file.read_bytes()
        if status and not (os.WIFSIGNALED(status) and target.ends(last)):
            seen["faults"] += 1
            (keep / f"{name}.{seen['inputs'] - 1}").write_bytes(last)
            click.echo(f"{name}, input {seen['inputs'] - 1}: the process ended with status {status}", err=True)
    target.file.write_bytes(sound)
    return seen


def _try(name: str, target: Target, count: int, seed: int, keep: Path, writing: int, seen: dict[str, int]) -> None:
    """Does what `tried` says from input `seen["inputs"]` on, and writes the counts, each as a line of JSON."""
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    signal.signal(signal.SIGALRM, _too_long)
    sound = target.file.read_bytes()
    target.use()
    for number in range(seen["inputs"], count):
        content = target.seals(changed(sound, random.Random(f"{seed} {name} {number}")))
        target.file.write_bytes(content)
        seen["inputs"] += 1
        os.write(writing, f"{json.dumps(seen)}\n".encode())
        signal.alarm(LIMIT_S)
        try:
            target.use()
            seen["used"] += 1
        except BertdataError:
            pass
        except (Exception, TooLongError) as error:  # what a command would show as a traceback
            seen["faults"] += 1
            (keep / f"{name}.{number}").write_bytes(content)
            click.echo(f"{name}, input {number}: {type(error).__name__}: {str(error)[:300]}", err=True)
        signal.alarm(0)
    os.write(writing, f"{json.dumps(seen)}\n".encode())


class TooLongError(BaseException):
    """Nothing in the library catches it."""


def _too_long(*of_signal: object) -> None:
    raise TooLongError(f"it took more than {LIMIT_S} s")


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
