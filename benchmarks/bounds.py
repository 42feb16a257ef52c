"""Is the memory of every command bounded, and does no time grow with the square of an input?

    python benchmarks/bounds.py hostile --directory /var/tmp/bounds     # 11 GB of disk, most of it holes
    python benchmarks/bounds.py commands --directory /var/tmp/bounds
    python benchmarks/bounds.py doubling --directory /var/tmp/bounds

hostile: inputs that somebody made to take all memory, or to end a command in a traceback. Each command runs as a child
process. A line says how it ended ("done", or its sentence), the most resident memory of its processes together, and
the CPU time. The bound is 1 GiB; a child that takes four is ended.

commands: the most memory of each command for a text, and for one that is eight times as large.

doubling: CPU time of a piece of work at n, 2n, 4n and 8n, the least of some calls in one process. Linear work gives
ratios near 2, quadratic work ratios near 4. Two ratios in a row above 2.6 are a finding.

Each result is appended to benchmarks/results/bounds.jsonl as it is found. --only PATTERN chooses by name.
"""

from __future__ import annotations

import bz2
import contextlib
import fnmatch
import gzip
import json
import lzma
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import click.testing
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from common import machine

import bertdata
from bertdata.format.verify import verify
from bertdata.look.facts import facts
from bertdata.options import IdsFormat, Machines, Shares, TextFormat, build_arguments
from bertdata.tokenize.load import load
from bertrain.__main__ import main as trainer
from bertrain.commands.report import report
from bertrain.lab import tables
from bertrain.lab.augment import read_vectors
from bertrain.report import Log

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "bounds.jsonl"
BOUND, TOO_MUCH = 1 << 30, 4 << 30  # bytes: the bound, and where a child is ended
MANY = 1_000_000
STEEP = 2.6  # a ratio of CPU times for twice the input that linear work does not have
MODEL = {
    "model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class Ending:
    """What became of a child process."""

    code: int
    says: str  # its last line
    peak: int  # most resident bytes of its processes together
    cpu_s: float
    wall_s: float


def children_of(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                yield from children_of(int(child))


def resident(pid: int) -> int:
    """The most resident bytes so far of a process and all below it, each by itself, added up."""
    total = 0
    for each in children_of(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{each}/status").read_text().splitlines():
                total += int(line.split()[1]) * 1024 if line.startswith("VmHWM") else 0
    return total


def ran(command: list[str], limit_s: float) -> Ending:
    """Runs `python -m ...` and watches it."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    start, peak, why = time.monotonic(), 0, ""
    with subprocess.Popen(
        [sys.executable, "-m", *command], env=environment, stdin=subprocess.DEVNULL, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    ) as child:  # fmt: skip
        os.set_blocking(child.stdout.fileno(), False)
        said = b""
        while True:
            pid, status, usage = os.wait4(child.pid, os.WNOHANG)
            with contextlib.suppress(BlockingIOError):
                while some := os.read(child.stdout.fileno(), 1 << 16):
                    said = (said + some)[-(1 << 16) :]
            if pid:
                child.returncode = os.waitstatus_to_exitcode(status)
                break
            peak = max(peak, resident(child.pid))
            if peak > TOO_MUCH or time.monotonic() - start > limit_s:
                why = f"ended after {limit_s:.0f} s" if peak <= TOO_MUCH else "ended because of its memory"
                os.killpg(child.pid, 9)
            time.sleep(0.01)
    lines = said.decode(errors="replace").replace("\r", "\n").strip().split("\n")
    says = why or ("done" if child.returncode == 0 else lines[-1])
    if "Traceback" in said.decode(errors="replace"):
        says = f"TRACEBACK {says}"
    return Ending(child.returncode, says, peak, usage.ru_utime + usage.ru_stime, time.monotonic() - start)


def keep(kind: str, name: str, **figures: Any) -> None:
    """Prints a result, and appends it to the file of results."""
    commit = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    line = {"kind": kind, "name": name, **figures, "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "commit": commit.stdout.strip(), "machine": machine()}  # fmt: skip
    print(f"{name:<44} {figures}", flush=True)
    with open(RESULTS, "a") as file:
        file.write(json.dumps(line) + "\n")


# ------------------------------------------------------------------------------------------------------ what they read


@dataclass(frozen=True)
class Fixtures:
    """A small text, tokenizers, a dataset and a checkpoint, made once in a directory."""

    directory: Path

    @classmethod
    def made(cls, directory: Path) -> Fixtures:
        found = cls(directory)
        text = found.path("small.txt")
        if not text.exists():
            pages = sorted((ROOT / "docs").glob("*.md"))
            text.write_text("\n\n".join(page.read_text() for page in pages))
        for kind in ("wordpiece", "bpe", "unigram", "bytes"):
            if not found.path(kind).exists():
                given = [] if kind == "bytes" else [str(text), "--vocab-size", "2000"]
                must("bertdata", "train-tokenizer", *given, "--type", kind, "--out", found.at(kind))
        for kind in ("wordpiece", "bpe", "unigram", "bytes"):  # compiles the kernels, where they are not
            build = ["bertdata", "build", str(text), "--tokenizer", found.at(kind), "--overwrite"]
            must(*build, "--out", found.at(f"shards-{kind}"))
        if not found.path("run").exists():
            found.path("model.json").write_text(json.dumps(MODEL))
            must("bertrain", "pretrain", "--data", found.at("shards-wordpiece"), "--model", found.at("model.json"),
                 "--length", "32", "--steps", "2", "--global-batch-size", "4", "--out", found.at("run"))  # fmt: skip
        if not found.path("train.tsv").exists():
            found.path("train.tsv").write_text("".join(f"a good text {n}\t{n % 2}\n" for n in range(8)))
        return found

    def path(self, name: str) -> Path:
        return self.directory / name

    def at(self, name: str) -> str:
        return str(self.path(name))

    def build(self, name: str, *more: str, tokenizer: str = "wordpiece") -> list[str]:
        return ["bertdata", "build", self.at(name), "--tokenizer", self.at(tokenizer), "--out", self.at("out"), *more]

    def finetune(self, name: str, *more: str) -> list[str]:
        once = ["--dev", self.at("train.tsv"), "--out", self.at("out"), "--seeds", "1", "--epochs", "1"]
        return ["bertrain", "finetune", "--checkpoint", self.at("run"), "--train", self.at(name), *once, *more]

    def augment(self, name: str, *more: str) -> list[str]:
        out = self.at("out" + Path(name).suffix)
        return ["bertrain", "augment", "--checkpoint", self.at("run"), "--train", self.at(name), "--out", out, *more]


def must(*command: str) -> None:
    ending = ran(list(command), 600)
    if ending.code:
        raise SystemExit(f"{command}: {ending.says}")


# ------------------------------------------------------------------------------------------------------------- hostile


def repeated(path: Path, piece: bytes, size: int, first: bytes = b"", last: bytes = b"") -> None:
    """first, then `size` bytes of copies of a piece, then last."""
    many = piece * max(1, (1 << 20) // len(piece))
    with open(path, "wb") as file:
        file.write(first)
        for _ in range(size // len(many)):
            file.write(many)
        file.write(many[: size % len(many)] + last)


def with_hole(path: Path, piece: bytes, size: int) -> None:
    """1.2 GB of copies of a piece, and then zeros, which take no disk."""
    repeated(path, piece, 1_200_000_000)
    with open(path, "r+b") as file:
        file.truncate(size)


def bomb(path: Path, compress: Callable[[bytes], bytes], size: int) -> None:
    """A file that unpacks to `size` bytes: one packed piece, again and again."""
    packed = compress(b"a" * (1 << 24))
    path.write_bytes(packed * (size >> 24))


def zstd(raw: bytes) -> bytes:
    return bytes(pa.compress(raw, "zstd", asbytes=True))


def nested(depth: int) -> bytes:
    return b'{"text": ' + b"[" * depth + b"]" * depth + b"}\n"


def parquet_of_one_text(path: Path, size: int, rows: int) -> None:
    """Some hundred bytes: a text that a dictionary has once, and `rows` rows have."""
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array(["a" * size]))
    pq.write_table(
        pa.table({"text": column}), path, compression="zstd", compression_level=19, write_statistics=False,
        store_schema=False,
    )  # fmt: skip


def parquet_of_nulls(path: Path, groups: int, rows: int) -> None:
    table = pa.table({"text": pa.nulls(rows, pa.string())})
    with pq.ParquetWriter(path, table.schema, compression="zstd", store_schema=False, write_statistics=False) as writer:
        for _ in range(groups):
            writer.write_table(table, row_group_size=rows)


def parquet_of_columns(path: Path, columns: int) -> None:
    names = [*(f"c{n}" for n in range(columns - 2)), "text", "label"]
    table = pa.table({name: ["a b"] if name == "text" else ["0"] for name in names})
    pq.write_table(table, path, write_statistics=False)


def parquet_of_long_lists(path: Path, rows: int, length: int) -> None:
    values = pa.array(np.zeros(length, np.int32))
    one = pa.ListArray.from_arrays([0, length], values)
    with pq.ParquetWriter(path, pa.schema({"input_ids": one.type}), compression="zstd") as writer:
        for _ in range(rows):
            writer.write_table(pa.table({"input_ids": one}))


def many_files(directory: Path, number: int) -> None:
    """Tiny files, a thousand in a directory."""
    for first in range(0, number, 1000):
        folder = directory / f"{first // 1000:04d}"
        folder.mkdir(parents=True)
        for n in range(first, min(first + 1000, number)):
            with open(folder / f"{n:07d}.txt", "wb") as file:
                file.write(b"the stone %d\n" % n)


def damaged(fixtures: Fixtures, out: Path, name: str, write: Callable[[Path], None]) -> None:
    """A copy of the small dataset in which one file is another."""
    shutil.copytree(fixtures.path("shards-wordpiece"), out)
    (out / name).unlink(missing_ok=True)
    write(out / name)


def sparse(path: Path, size: int) -> None:
    with open(path, "wb") as file:
        file.write(b"{")
        file.truncate(size)


def hostile_cases(f: Fixtures) -> list[tuple[str, str, Callable[[Path], None], list[list[str]]]]:
    """Name, name of the input, how it is made, and the commands that read it."""
    gib, ten = 1 << 30, 10_000_000_000
    kinds = ("wordpiece", "bpe", "unigram", "bytes")
    line = ("--documents", "line")
    row = b'{"text": "'
    packers: dict[str, Callable[[bytes], bytes]] = {
        "gz": gzip.compress, "zst": zstd, "bz2": bz2.compress, "xz": lzma.compress,
    }  # fmt: skip
    return [
        ("the small text", "small.txt", lambda path: None, [f.build("small.txt", tokenizer=kind) for kind in kinds]),
        ("a word of 3 MiB", "word3.txt", lambda path: repeated(path, b"a", 3 << 20),
         [f.build("word3.txt", tokenizer=kind) for kind in kinds]),
        ("a word of 250 MB", "word250.txt", lambda path: repeated(path, b"a", 250_000_000),
         [f.build("word250.txt", tokenizer=kind) for kind in kinds]),
        ("8 documents of 250 MB", "eight.txt.zst",
         lambda path: path.write_bytes((zstd(b"a b " * 2_500_000) * 25 + zstd(b"\n\n")) * 8),
         [f.build("eight.txt.zst", tokenizer=kind) for kind in ("wordpiece", "bytes")]),
        ("a word of 1 GiB", "word.txt", lambda path: repeated(path, b"a", gib),
         [*(f.build("word.txt", tokenizer=kind) for kind in kinds),
          f.build("word.txt", "--documents", "file"), f.build("word.txt", "--encoding", "latin-1"),
          ["bertdata", "train-tokenizer", f.at("word.txt"), "--out", f.at("out")]]),
        ("words of 100 kB, 200 MB of them", "words.txt",
         lambda path: repeated(path, b"ab" * 50_000 + b"\n\n", 200_000_000),
         [f.build("words.txt", tokenizer=kind) for kind in ("bpe", "unigram")]),
        ("a line of 10 GB", "line.txt", lambda path: with_hole(path, b"a b ", ten),
         [f.build("line.txt", *line), f.build("line.txt", *line, tokenizer="bpe"),
          ["bertdata", "train-tokenizer", f.at("line.txt"), "--out", f.at("out")]]),
        *[(f"a line of 10 GB in .{ending}", f"line.txt.{ending}", lambda path, pack=pack: bomb(path, pack, ten),
           [f.build(f"line.txt.{ending}", *line), f.build(f"line.txt.{ending}", "--documents", "file")])
          for ending, pack in packers.items()],
        ("3 x 10^7 documents of one letter", "lines.txt.zst",
         lambda path: path.write_bytes(zstd(b"a\n\n" * (1 << 22)) * 8),
         [f.build("lines.txt.zst"), f.build("lines.txt.zst", "--dedup")]),
        ("blank lines, 4 GB in .gz", "blank.txt.gz",
         lambda path: path.write_bytes(gzip.compress(b"\n" * (1 << 24)) * 256), [f.build("blank.txt.gz")]),
        ("spelled special tokens, 64 MB", "spelled.txt", lambda path: repeated(path, b"[MASK]", 1 << 26),
         [f.build("spelled.txt", tokenizer=kind) for kind in ("wordpiece", "bpe")]),
        ("JSON nested 10^6 deep", "deep.jsonl", lambda path: path.write_bytes(nested(MANY)),
         [f.build("deep.jsonl"), f.build("deep.jsonl", "--on-error", "skip"),
          f.finetune("deep.jsonl", "--text", "text", "--label", "label"),
          f.augment("deep.jsonl", "--text", "text", "--label", "label"),
          ["bertrain", "evaluate", "--checkpoint", f.at("run"), "--pairs", f.at("deep.jsonl")]]),
        ("JSON nested 10^6 deep beside a text", "beside.jsonl",
         lambda path: path.write_bytes(nested(MANY).replace(b"text", b"a").replace(b"}", b', "text": "a b"}')),
         [f.build("beside.jsonl")]),
        ("a JSON line of 250 MB", "long.jsonl", lambda path: repeated(path, b"a ", 250_000_000, row, b'"}\n'),
         [f.build("long.jsonl")]),
        ("a JSON line of 60 MB", "long60.jsonl", lambda path: repeated(path, b"a ", 60_000_000, row, b'"}\n'),
         [f.build("long60.jsonl")]),
        ("a JSON line of 30 MB of lists, without a text", "odd30.jsonl",
         lambda path: repeated(path, b"[],", 30_000_000, b'{"a": [', b"0]}\n"), [f.build("odd30.jsonl")]),
        ("a JSON line of 250 MB, refused by pyarrow", "odd.jsonl",
         lambda path: repeated(path, b"[],", 250_000_000, b'{"a": [', b'0]}\n'),
         [f.build("odd.jsonl"), f.build("odd.jsonl", "--on-error", "skip")]),
        ("a JSON line of 1 GiB", "row.jsonl", lambda path: repeated(path, b"a ", gib, row, b'", "label": 0}\n'),
         [f.build("row.jsonl"), f.finetune("row.jsonl", "--text", "text", "--label", "label"),
          f.augment("row.jsonl", "--text", "text", "--label", "label"),
          ["bertrain", "evaluate", "--checkpoint", f.at("run"), "--pairs", f.at("row.jsonl")]]),
        ("a cell of 1 GiB in CSV", "cell.csv", lambda path: repeated(path, b"a ", gib, b'text,label\n"', b'",0\n'),
         [f.build("cell.csv"), f.finetune("cell.csv", "--text", "text", "--label", "label"),
          f.augment("cell.csv", "--text", "text", "--label", "label")]),
        ("a cell of 60 MB in CSV", "cell60.csv",
         lambda path: repeated(path, "é ".encode(), 60_000_000, b'text,label\n"', b'",0\n'), [f.build("cell60.csv")]),
        ("a row of 10^8 cells in CSV", "cells.csv", lambda path: repeated(path, b",", 10**8, b"text,label\na"),
         [f.build("cells.csv"), f.finetune("cells.csv", "--text", "text", "--label", "label")]),
        ("10^5 columns in CSV", "columns.csv",
         lambda path: path.write_text(",".join([*(f"c{n}" for n in range(10**5)), "text", "label"]) + "\n"
                                      + "0," * 10**5 + "a b,0\n"),
         [f.build("columns.csv"), f.finetune("columns.csv", "--text", "text", "--label", "label")]),
        ("10^5 columns in Parquet", "columns.parquet", lambda path: parquet_of_columns(path, 10**5),
         [f.build("columns.parquet"), f.finetune("columns.parquet", "--text", "text", "--label", "label")]),
        ("a cell of 1 GiB in TSV", "cell.tsv", lambda path: repeated(path, b"a ", gib, b"", b"\t0\n"),
         [f.finetune("cell.tsv"), f.augment("cell.tsv")]),
        ("a table of 100 MB", "table.tsv", lambda path: repeated(path, b"a good text\t0\n", 10**8),
         [f.augment("table.tsv", "--copies", "1")]),
        ("a Parquet bomb: 4,000 rows of 1 MB", "bomb.parquet",
         lambda path: parquet_of_one_text(path, 10**6, 4000),
         [f.build("bomb.parquet"), f.finetune("bomb.parquet", "--text", "text", "--label", "text"),
          ["bertdata", "import", f.at("bomb.parquet"), "--tokenizer", f.at("wordpiece"), "--out", f.at("out")]]),
        ("a Parquet bomb: a text of 500 MB", "giant.parquet", lambda path: parquet_of_one_text(path, 500_000_000, 1),
         [f.build("giant.parquet"), f.finetune("giant.parquet", "--text", "text", "--label", "text")]),
        ("a Parquet file of 10^9 nulls", "nulls.parquet", lambda path: parquet_of_nulls(path, 50, 20_000_000),
         [f.build("nulls.parquet"), f.finetune("nulls.parquet", "--text", "text", "--label", "text")]),
        ("a Parquet bomb of ids: lists of 10^8", "ids.parquet",
         lambda path: parquet_of_long_lists(path, 2, 10**8),
         [["bertdata", "import", f.at("ids.parquet"), "--tokenizer", f.at("wordpiece"), "--out", f.at("out")]]),
        ("vectors of one line of 10 GB", "vectors.txt.gz", lambda path: bomb(path, gzip.compress, ten),
         [f.augment("train.tsv", "--vectors", f.at("vectors.txt.gz"))]),
        ("words to keep, 10 GB", "keep.txt.gz", lambda path: bomb(path, gzip.compress, ten),
         [f.augment("train.tsv", "--keep", f.at("keep.txt.gz"))]),
        ("pairs of 10 GB", "pairs.jsonl.gz", lambda path: bomb(path, gzip.compress, ten),
         [["bertrain", "evaluate", "--checkpoint", f.at("run"), "--pairs", f.at("pairs.jsonl.gz")]]),
        ("a manifest of 10 GB", "big-manifest",
         lambda path: damaged(f, path, "manifest.json", lambda at: sparse(at, ten)),
         [["bertdata", "inspect", f.at("big-manifest")], ["bertdata", "verify", f.at("big-manifest")]]),
        ("a manifest nested 10^6 deep", "deep-manifest",
         lambda path: damaged(f, path, "manifest.json", lambda at: at.write_bytes(nested(MANY))),
         [["bertdata", "inspect", f.at("deep-manifest")], ["bertdata", "verify", f.at("deep-manifest")]]),
        ("a tokenizer of 10 GB", "big-tokenizer",
         lambda path: damaged(f, path, "tokenizer.json", lambda at: sparse(at, ten)),
         [["bertdata", "inspect", f.at("big-tokenizer")], ["bertdata", "verify", f.at("big-tokenizer")],
          f.build("small.txt", tokenizer="big-tokenizer")]),
        ("a tokenizer nested 10^6 deep", "deep-tokenizer",
         lambda path: damaged(f, path, "tokenizer.json", lambda at: at.write_bytes(nested(MANY))),
         [["bertdata", "inspect", f.at("deep-tokenizer")], f.build("small.txt", tokenizer="deep-tokenizer")]),
        ("a vocab.txt of one line of 1 GiB", "vocab.txt", lambda path: repeated(path, b"a", gib),
         [f.build("small.txt", tokenizer="vocab.txt")]),
        ("a checkpoint's config of 10 GB", "big-config",
         lambda path: (shutil.copytree(newest(f), path), sparse(path / "config.json", ten)),
         [["bertrain", "extract", "--checkpoint", f.at("big-config"), "--out", f.at("out")],
          ["bertrain", "evaluate", "--checkpoint", f.at("big-config"), "--data", f.at("shards-wordpiece")]]),
        ("a checkpoint's config nested 10^6 deep", "deep-config",
         lambda path: (shutil.copytree(newest(f), path), (path / "config.json").write_bytes(nested(MANY))),
         [["bertrain", "extract", "--checkpoint", f.at("deep-config"), "--out", f.at("out")],
          ["bertrain", "evaluate", "--checkpoint", f.at("deep-config"), "--data", f.at("shards-wordpiece")]]),
        ("a TOML of 10 GB", "big.toml", lambda path: sparse(path, ten),
         [["bertrain", "pretrain", "--config", f.at("big.toml")]]),
        ("a TOML nested 10^6 deep", "deep.toml", lambda path: path.write_bytes(b"a = " + b"[" * MANY),
         [["bertrain", "pretrain", "--config", f.at("deep.toml")]]),
        ("10^6 tiny files", "files", lambda path: many_files(path, MANY),
         [f.build("files"), f.build("files", "--documents", "file")]),
    ]  # fmt: skip


def newest(f: Fixtures) -> Path:
    return max(path for path in f.path("run").glob("step-*") if path.is_dir())


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@click.group()
def main() -> None:
    pass


@main.command()
@click.option("--directory", required=True, type=Path)
@click.option("--only", default="*", help="Pattern of names.")
@click.option("--seconds", default=300.0, help="Longest time of a command.")
def hostile(directory: Path, only: str, seconds: float) -> None:
    """Commands on inputs that were made to harm them."""
    directory.mkdir(parents=True, exist_ok=True)
    fixtures = Fixtures.made(directory)
    for name, file, make, commands in hostile_cases(fixtures):
        if not fnmatch.fnmatch(name, only):
            continue
        path = directory / file
        kept = path.exists()
        if not kept:
            make(path)
        try:
            size = path.stat().st_size if path.is_file() else 0
            for command in commands:
                for left in directory.glob("out*"):
                    remove(left)
                ending = ran(command, seconds)
                shown = " ".join(word.replace(f"{directory}/", "") for word in command)
                keep(
                    "hostile", name, command=shown, bytes=size, code=ending.code, peak_mb=round(ending.peak / 1e6),
                    cpu_s=round(ending.cpu_s, 1), is_bounded=ending.peak < BOUND,
                    says=ending.says.replace(f"{directory}/", "")[:400],
                )  # fmt: skip
        finally:
            if not kept:
                remove(path)
            for left in directory.glob("out*"):
                remove(left)


# ------------------------------------------------------------------------------------------------------------ commands


def commands_of(f: Fixtures, text: str, shards: str, more: str) -> dict[str, list[str]]:
    """A name and a command line for what grows with a text, or does not. more: labelled examples."""
    data, run, out = f.at(shards), f.at("run"), f.at("out")
    rows = ["--data", data, "--length", "32"]
    build = f.build(text, "--documents", "line")
    return {
        "build, 1 thread": [*build, "--workers", "1"],
        "build, 2 threads": [*build, "--workers", "2"],
        "build, 4 threads": [*build, "--workers", "4"],
        "build, 8 threads": [*build, "--workers", "8"],
        "build --dedup": [*build, "--dedup", "--workers", "2"],
        "build --words": [*build, "--words", "builtins:list", "--max-documents", "200000", "--workers", "2"],
        "build, 1000 units": [*build, "--workers", "2", "--shard-size", f"{f.path(text).stat().st_size // 1000}"],
        "train-tokenizer": ["bertdata", "train-tokenizer", f.at(text), "--out", out],
        "export": ["bertdata", "export", data, "--out", out],
        "inspect": ["bertdata", "inspect", data],
        "verify": ["bertdata", "verify", data],
        "pretrain": ["bertrain", "pretrain", *rows, "--model", f.at("model.json"), "--steps", "20", "--out", out],
        "evaluate": ["bertrain", "evaluate", "--checkpoint", run, *rows, "--max-samples", "1000"],
        "teacher": ["bertrain", "teacher", "--model", run, *rows, "--out", out, "--max-samples", "5000"],
        "merge": ["bertrain", "merge", run, run, "--out", out],
        "finetune": f.finetune(more),
        "augment": f.augment(more, "--copies", "1"),
    }


@main.command()
@click.option("--directory", required=True, type=Path)
@click.option("--only", default="*", help="Pattern of names.")
def commands(directory: Path, only: str) -> None:
    """The memory of each command for a text, and for one that is eight times as large."""
    directory.mkdir(parents=True, exist_ok=True)
    fixtures = Fixtures.made(directory)
    sizes = {"once": 32_000_000, "eight": 256_000_000}
    for name, size in sizes.items():
        path = fixtures.path(f"{name}.txt")
        if not path.exists():
            path.write_bytes(b"".join(b"the stone %d under the river\n" % n for n in range(size // 30)))
            rows = "".join(f"a good text of many words {n}\t{n % 2}\n" for n in range(size // 16_000))
            fixtures.path(f"{name}.tsv").write_text(rows)
            must("bertdata", "build", str(path), "--tokenizer", fixtures.at("wordpiece"), "--documents", "line",
                 "--out", fixtures.at(f"{name}-shards"))  # fmt: skip
    lines = [commands_of(fixtures, f"{name}.txt", f"{name}-shards", f"{name}.tsv") for name in sizes]
    for name in lines[0]:
        if not fnmatch.fnmatch(name, only):
            continue
        endings = []
        for line in lines:
            for left in directory.glob("out*"):
                remove(left)
            endings.append(ran(line[name], 300))
        keep("commands", name, text_bytes=[*sizes.values()], peak_mb=[round(each.peak / 1e6) for each in endings],
             cpu_s=[round(each.cpu_s, 1) for each in endings], says=[each.says[:200] for each in endings])  # fmt: skip
    for left in directory.glob("out*"):
        remove(left)


# ------------------------------------------------------------------------------------------------------------ doubling

Work = Callable[[], Any]
SEED = np.random.default_rng(0)


def letters(number: int) -> bytes:
    """Random small letters."""
    return np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)[SEED.integers(0, 26, number)].tobytes()


def quietly(work: Work) -> Work:
    """The work of which only an error of the library may be the end."""

    def run() -> Any:
        with contextlib.suppress(bertdata.BertdataError):
            return work()

    return run


class Doubling:
    """Work on inputs of a size. Each method makes an input and returns the work."""

    def __init__(self, fixtures: Fixtures) -> None:
        self.f, self.scratch = fixtures, fixtures.path("doubling")

    def _file(self, name: str, content: bytes) -> Path:
        self.scratch.mkdir(exist_ok=True)
        (self.scratch / name).write_bytes(content)
        return self.scratch / name

    def _build(self, path: Path, tokenizer: str = "wordpiece", **options: Any) -> Work:
        def run() -> Any:
            options.setdefault("tokenizer", self.f.at(tokenizer))
            shutil.rmtree(self.scratch / "out", ignore_errors=True)
            return bertdata.build([path], self.scratch / "out", **build_arguments({"workers": 1} | options))

        return quietly(run)

    def files(self, n: int) -> Work:
        many_files(self.scratch / "files", n)
        return self._build(self.scratch / "files")

    def documents(self, n: int) -> Work:
        return self._build(self._file("a.txt", b"the stone\n" * n), documents="line")

    def different_documents_with_dedup(self, n: int) -> Work:
        lines = b"".join(b"%d\n" % k for k in range(n))
        return self._build(self._file("a.txt", lines), documents="line", dedup=True)

    def equal_documents_with_dedup(self, n: int) -> Work:
        return self._build(self._file("a.txt", b"the stone\n" * n), documents="line", dedup=True)

    def length_of_a_document(self, n: int) -> Work:
        return self._build(self._file("a.txt", b"the stone " * (n // 10)))

    def sentences_of_a_document(self, n: int) -> Work:
        return self._build(self._file("a.txt", b"a b\n" * n), sentences="line")

    def invalid_bytes(self, n: int) -> Work:
        return self._build(self._file("a.txt", b"stone \xff river \n" * n))

    def blank_lines(self, n: int) -> Work:
        return self._build(self._file("a.txt", b"a" + b"\n" * n + b"b"))

    def length_of_a_word_wordpiece(self, n: int) -> Work:
        return self._build(self._file("a.txt", letters(n)), "wordpiece")

    def length_of_a_word_bpe(self, n: int) -> Work:
        return self._build(self._file("a.txt", letters(n)), "bpe")

    def length_of_a_word_unigram(self, n: int) -> Work:
        return self._build(self._file("a.txt", letters(n)), "unigram")

    def length_of_a_word_bytes(self, n: int) -> Work:
        return self._build(self._file("a.txt", letters(n)), "bytes")

    def length_of_2000_words_bpe(self, n: int) -> Work:
        return self._build(self._file("a.txt", b" ".join(letters(n) for _ in range(2000))), "bpe")

    def length_of_2000_words_unigram(self, n: int) -> Work:
        return self._build(self._file("a.txt", b" ".join(letters(n) for _ in range(2000))), "unigram")

    def length_of_2000_words_wordpiece(self, n: int) -> Work:
        return self._build(self._file("a.txt", b" ".join(letters(n) for _ in range(2000))), "wordpiece")

    def marks_on_a_letter(self, n: int) -> Work:
        return self._build(self._file("a.txt", ("e" + "\u0301\u0323" * n).encode()), "wordpiece")

    def marks_on_a_letter_unigram(self, n: int) -> Work:
        return self._build(self._file("a.txt", ("e" + "\u0301\u0323" * n).encode()), "unigram")

    def punctuation_in_a_row(self, n: int) -> Work:
        return self._build(self._file("a.txt", b"!?." * n), "bpe")

    def spaces_in_a_row(self, n: int) -> Work:
        return self._build(self._file("a.txt", b"a" + b" " * n + b"b"), "bpe")

    def spelled_special_tokens(self, n: int) -> Work:
        return self._build(self._file("a.txt", b"[MASK]" * n))

    def added_tokens_in_the_vocabulary(self, n: int) -> Work:
        content = json.loads((self.f.path("bpe") / "tokenizer.json").read_text())
        first = 1 + max(content["model"]["vocab"].values())
        blank = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
        content["added_tokens"] += [{"id": first + k, "content": f"<extra {k}>", **blank} for k in range(n)]
        tokenizer = self._file("added.json", json.dumps(content).encode())
        text = self._file("a.txt", b"".join(b"<extra %d> stone\n" % k for k in range(n)))
        return self._build(text, tokenizer=str(tokenizer))

    def nesting_of_json(self, n: int) -> Work:
        return self._build(self._file("a.jsonl", nested(n)), on_error="skip")

    def keys_of_a_json_object(self, n: int) -> Work:
        keys = b", ".join(b'"k%d": 0' % k for k in range(n))
        return self._build(self._file("a.jsonl", b"{" + keys + b', "text": "a b"}\n'))

    def quotation_marks_in_csv(self, n: int) -> Work:
        return self._build(self._file("a.csv", b'text\n"' + b'""' * n + b'"\n'))

    def lines_in_a_cell_of_csv(self, n: int) -> Work:
        return self._build(self._file("a.csv", b'text\n"' + b"a\n" * n + b'"\n'))

    def columns_of_csv(self, n: int) -> Work:
        names = ",".join([*(f"c{k}" for k in range(n)), "text"])
        return self._build(self._file("a.csv", f"{names}\n{'0,' * n}a b\n".encode()))

    def columns_of_csv_in_finetune(self, n: int) -> Work:
        names = ",".join([*(f"c{k}" for k in range(n)), "text", "label"])
        path = self._file("a.csv", f"{names}\n{'0,' * n}a b,1\n".encode())
        return lambda: tables.read(str(path), text="text", other="", label="label")

    def rows_of_csv_in_finetune(self, n: int) -> Work:
        path = self._file("a.csv", b"text,label\n" + b"a b,1\n" * n)
        return lambda: tables.read(str(path), text="text", other="", label="label")

    def columns_of_parquet(self, n: int) -> Work:
        self.scratch.mkdir(exist_ok=True)
        parquet_of_columns(self.scratch / "a.parquet", n)
        return self._build(self.scratch / "a.parquet")

    def columns_of_parquet_in_finetune(self, n: int) -> Work:
        self.scratch.mkdir(exist_ok=True)
        parquet_of_columns(path := self.scratch / "a.parquet", n)
        return lambda: tables.read(str(path), text="text", other="", label="label")

    def row_groups_of_parquet(self, n: int) -> Work:
        self.scratch.mkdir(exist_ok=True)
        pq.write_table(pa.table({"text": ["the stone"] * n}), self.scratch / "a.parquet", row_group_size=1)
        return self._build(self.scratch / "a.parquet")

    def rows_of_parquet(self, n: int) -> Work:
        self.scratch.mkdir(exist_ok=True)
        pq.write_table(pa.table({"text": ["the stone"] * n}), self.scratch / "a.parquet")
        return self._build(self.scratch / "a.parquet")

    def members_of_gzip(self, n: int) -> Work:
        return self._build(self._file("a.txt.gz", gzip.compress(b"the stone\n\n") * n))

    def frames_of_zstd(self, n: int) -> Work:
        return self._build(self._file("a.txt.zst", zstd(b"the stone\n\n") * n))

    def streams_of_xz(self, n: int) -> Work:
        return self._build(self._file("a.txt.xz", lzma.compress(b"the stone\n\n") * n))

    def records_of_fasta(self, n: int) -> Work:
        return self._build(self._file("a.fa", b">a\nACGT\n" * n), "bytes")

    def units(self, n: int) -> Work:
        return self._build(self._file("a.txt", b"the stone 1234\n\n" * n), shard_size=16)

    def parts_to_finish(self, n: int) -> Work:
        path, out = self._file("a.txt", b"the stone 1234\n\n" * n), self.scratch / "parts"
        shutil.rmtree(out, ignore_errors=True)
        for part in range(n):
            text, machines = TextFormat(shard_size=16), Machines(part=(part, n), workers=1)
            bertdata.build([path], out, tokenizer=self.f.at("wordpiece"), text=text, machines=machines)

        def run() -> None:
            shutil.rmtree(self.scratch / "out", ignore_errors=True)
            shutil.copytree(out, self.scratch / "out")  # which `finish` changes
            bertdata.finish(self.scratch / "out")

        return run

    def ids_to_import(self, n: int) -> Work:
        path = self._file("a.bin", SEED.integers(200, 1900, n).astype(np.uint16).tobytes())

        def run() -> Any:
            shutil.rmtree(self.scratch / "out", ignore_errors=True)
            ids = IdsFormat(kind="nanogpt", dtype="uint16", end_token="[SEP]")
            return bertdata.import_ids([path], self.scratch / "out", tokenizer=self.f.at("wordpiece"), ids=ids)

        return run

    def _shards(self, n: int) -> Path:
        self._build(self._file("a.txt", b"the stone 1234\n\n" * n), shard_size=16, validation=0)()
        return self.scratch / "out"

    def shards_to_open_and_read(self, n: int) -> Work:
        out = self._shards(n)
        return lambda: next(bertdata.Loader(bertdata.open(out), length=32, global_batch_size=8, masking=None))

    def shards_to_inspect(self, n: int) -> Work:
        out = self._shards(n)
        return lambda: facts(bertdata.open(out), length=32, global_batch_size=8, world_size=1)

    def shards_to_verify(self, n: int) -> Work:
        out = self._shards(n)
        return lambda: verify(out)

    def datasets_of_a_mix(self, n: int) -> Work:
        pairs = []
        for number in range(n):
            path, out = self._file("a.txt", b"the stone %d\n\n" % number * 50), self.scratch / f"mixed-{number}"
            if not out.exists():
                bertdata.build([path], out, tokenizer=self.f.at("wordpiece"), shares=Shares(validation=0))
            pairs.append((bertdata.open(out), 1))
        options: dict[str, Any] = {"length": 32, "global_batch_size": 64}

        def run() -> Any:
            loader = bertdata.Loader(pairs, **options)
            return [next(loader) for _ in range(50)]

        return run

    def vocabulary_of_wordpiece(self, n: int) -> Work:
        tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
        tokens += [f"##{letters(8).decode()}{k}" for k in range(n)]
        path = self._file("vocab.txt", "\n".join(tokens).encode())
        return lambda: load(str(path)).prepare()

    def vocabulary_of_bpe(self, n: int) -> Work:
        content = json.loads((self.f.path("bpe") / "tokenizer.json").read_text())
        model, alphabet = content["model"], "abcdefghijklmnopqrstuvwxyz"
        model["merges"] = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        known = [token for token in model["vocab"] if token.isalpha() and token.isascii()]
        for token in known:
            for letter in alphabet:
                if len(model["vocab"]) < n and token + letter not in model["vocab"]:
                    model["vocab"][token + letter] = len(model["vocab"]) + len(content["added_tokens"])
                    model["merges"].append(f"{token} {letter}")
                    known.append(token + letter)
        path = self._file("bpe.json", json.dumps(content).encode())
        return lambda: load(str(path)).prepare()

    def vocabulary_of_unigram(self, n: int) -> Work:
        content = json.loads((self.f.path("unigram") / "tokenizer.json").read_text())
        content["model"]["vocab"] += [[f"{letters(8).decode()}{k}", -9.0 - k / n] for k in range(n)]
        path = self._file("unigram.json", json.dumps(content).encode())
        return lambda: load(str(path)).prepare()

    def _log(self, n: int) -> Path:
        entry = '{{"step": {}, "loss": 5.1, "lr": 0.001, "tokens_per_s": 1000.0, "validation_loss": 5.0}}\n'
        return self._file("log.jsonl", "".join(map(entry.format, range(1, n + 1))).encode())

    def steps_in_the_log_to_resume(self, n: int) -> Work:
        path = self._log(n)

        def run() -> None:
            with Log(path, after_step=n):
                pass

        return run

    def steps_in_the_log_to_report(self, n: int) -> Work:
        shutil.copytree(self.f.path("run"), run := self.scratch / "run", dirs_exist_ok=True)
        self._log(n).replace(run / "log.jsonl")
        return lambda: report([run])

    def phases(self, n: int) -> Work:
        parts = "".join(f"[[phase]]\nsteps = 3\nlr = {0.001 + k / 10**7}\n" for k in range(n))
        path = self._file("run.toml", f'data = "{self.f.at("shards-wordpiece")}"\nout = "out"\n{parts}'.encode())

        def run() -> None:
            result = click.testing.CliRunner().invoke(trainer, ["plan", "--config", str(path)])
            if result.exit_code:
                raise SystemExit(result.output)

        return run

    def lines_of_vectors(self, n: int) -> Work:
        path = self._file("v.txt", b"stone 0.1 0.2 0.3 0.4\n" * n)
        return lambda: read_vectors(str(path))

    def length_of_a_line_of_vectors(self, n: int) -> Work:
        path = self._file("v.txt", b"a" * n)
        return quietly(lambda: read_vectors(str(path)))


SIZES = {
    "files": 2000, "documents": 2_000_000, "different_documents_with_dedup": 200_000,
    "equal_documents_with_dedup": 200_000, "length_of_a_document": 16_000_000, "sentences_of_a_document": 1_000_000,
    "invalid_bytes": 200_000, "blank_lines": 16_000_000, "length_of_a_word_wordpiece": 16_000_000,
    "length_of_a_word_bpe": 400_000, "length_of_a_word_unigram": 400_000, "length_of_a_word_bytes": 16_000_000,
    "length_of_2000_words_bpe": 500, "length_of_2000_words_unigram": 500, "length_of_2000_words_wordpiece": 1000,
    "marks_on_a_letter": 20_000, "marks_on_a_letter_unigram": 20_000, "punctuation_in_a_row": 100_000,
    "spaces_in_a_row": 400_000, "spelled_special_tokens": 1_000_000, "added_tokens_in_the_vocabulary": 1000,
    "nesting_of_json": 500_000, "keys_of_a_json_object": 100_000, "quotation_marks_in_csv": 2_000_000,
    "lines_in_a_cell_of_csv": 500_000, "columns_of_csv": 100_000, "columns_of_csv_in_finetune": 50_000,
    "rows_of_csv_in_finetune": 100_000, "columns_of_parquet": 10_000, "columns_of_parquet_in_finetune": 5000,
    "row_groups_of_parquet": 500, "rows_of_parquet": 1_000_000, "members_of_gzip": 20_000, "frames_of_zstd": 20_000,
    "streams_of_xz": 2000, "records_of_fasta": 500_000, "units": 100, "parts_to_finish": 8, "ids_to_import": 16_000_000,
    "shards_to_open_and_read": 100, "shards_to_inspect": 100, "shards_to_verify": 100, "datasets_of_a_mix": 16,
    "vocabulary_of_wordpiece": 50_000, "vocabulary_of_bpe": 20_000, "vocabulary_of_unigram": 50_000,
    "steps_in_the_log_to_resume": 50_000, "steps_in_the_log_to_report": 5000, "phases": 20, "lines_of_vectors": 10_000,
    "length_of_a_line_of_vectors": 100_000,
}  # fmt: skip
"""The first size of each kind of input; the others are two, four and eight times as large."""


def cpu_s(work: Work) -> float:
    """The least CPU time of up to three calls, all threads together."""
    found: list[float] = []
    while len(found) < 3 and sum(found) < 2:
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


@main.command()
@click.option("--directory", required=True, type=Path)
@click.option("--only", default="*", help="Pattern of names.")
def doubling(directory: Path, only: str) -> None:
    """CPU time where an input doubles."""
    directory.mkdir(parents=True, exist_ok=True)
    made = Doubling(Fixtures.made(directory))
    for name, first in SIZES.items():
        if not fnmatch.fnmatch(name, only):
            continue
        times = []
        for n in (0, 1, 2, 4, 8):  # the first one compiles kernels and fills caches
            shutil.rmtree(made.scratch, ignore_errors=True)
            time_of = cpu_s(getattr(made, name)(first * max(n, 1)))
            times += [time_of] if n else []
        shutil.rmtree(made.scratch, ignore_errors=True)
        ratios = [round(later / before, 2) for before, later in pairwise(times)]
        is_quadratic = any(min(pair) > STEEP for pair in pairwise(ratios))
        keep("doubling", name.replace("_", " "), sizes=[first * n for n in (1, 2, 4, 8)],
             cpu_s=[round(each, 3) for each in times], ratios=ratios, is_quadratic=is_quadratic)  # fmt: skip


if __name__ == "__main__":
    main()
