"""Is the memory of every command bounded?

    python benchmarks/bounds.py hostile --directory /var/tmp/bounds     # 11 GB of disk, most of it holes
    python benchmarks/bounds.py commands --directory /var/tmp/bounds

hostile: inputs that somebody made to take all memory, or to end a command in a traceback. Each command runs as a child
process. A line says how it ended ("done", or its sentence), the most resident memory of its processes together, and
the CPU time. The bound is 1 GiB; a child that takes four is ended.

commands: the most memory of each command for a text, and for one that is eight times as large.

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
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from common import machine

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "bounds.jsonl"
BOUND, TOO_MUCH = 1 << 30, 4 << 30  # bytes: the bound, and where a child is ended
MANY = 1_000_000
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


def damaged(sound: Path, out: Path, name: str, write: Callable[[Path], Any]) -> None:
    """A copy of a directory in which one file is another."""
    shutil.copytree(sound, out)
    (out / name).unlink(missing_ok=True)
    write(out / name)


def sparse(path: Path, size: int) -> None:
    with open(path, "wb") as file:
        file.write(b"{")
        file.truncate(size)


def hostile_cases(f: Fixtures) -> list[tuple[str, str, Callable[[Path], Any], list[list[str]]]]:
    """Name, name of the input, how it is made, and the commands that read it."""
    gib, ten = 1 << 30, 10_000_000_000
    kinds = ("wordpiece", "bpe", "unigram", "bytes")
    line = ("--documents", "line")
    row = b'{"text": "'
    packers: dict[str, Callable[[bytes], bytes]] = {
        "gz": gzip.compress, "zst": zstd, "bz2": bz2.compress, "xz": lzma.compress,
    }  # fmt: skip
    with_labels = ("--text", "text", "--label", "label")
    pairs = ["bertrain", "evaluate", "--checkpoint", f.at("run"), "--pairs"]

    def broken(kind: str, write: Callable[[Path], Any]) -> list[tuple[str, str, Callable[[Path], Any], Any]]:
        """A manifest, tokenizer, configuration of a model and TOML that are too large or too deep."""
        a, b, c, d = (f"{kind}-{name}" for name in ("manifest", "tokenizer", "config", "run.toml"))
        return [
            (f"a {kind} manifest", a, lambda path: damaged(f.path("shards-wordpiece"), path, "manifest.json", write),
             [["bertdata", "inspect", f.at(a)], ["bertdata", "verify", f.at(a)]]),
            (f"a {kind} tokenizer", b, lambda path: damaged(f.path("shards-wordpiece"), path, "tokenizer.json", write),
             [["bertdata", "inspect", f.at(b)], f.build("small.txt", tokenizer=b)]),
            (f"a {kind} configuration", c, lambda path: damaged(newest(f), path, "config.json", write),
             [["bertrain", "extract", "--checkpoint", f.at(c), "--out", f.at("out")],
              ["bertrain", "evaluate", "--checkpoint", f.at(c), "--data", f.at("shards-wordpiece")]]),
            (f"a {kind} TOML", d, write, [["bertrain", "pretrain", "--config", f.at(d)]]),
        ]  # fmt: skip

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
         [*(f.build("word.txt", tokenizer=kind) for kind in kinds), f.build("word.txt", "--encoding", "latin-1"),
          ["bertdata", "train-tokenizer", f.at("word.txt"), "--out", f.at("out")]]),
        ("a line of 10 GB", "line.txt", lambda path: with_hole(path, b"a b ", ten),
         [f.build("line.txt", *line), f.build("line.txt", *line, tokenizer="bpe"),
          ["bertdata", "train-tokenizer", f.at("line.txt"), "--out", f.at("out")]]),
        *[(f"a line of 10 GB in .{ending}", f"line.txt.{ending}", lambda path, pack=pack: bomb(path, pack, ten),
           [f.build(f"line.txt.{ending}", *line), f.build(f"line.txt.{ending}", "--documents", "file")])
          for ending, pack in packers.items()],
        ("3 x 10^7 documents of one letter", "lines.txt.zst",
         lambda path: path.write_bytes(zstd(b"a\n\n" * (1 << 22)) * 8),
         [f.build("lines.txt.zst"), f.build("lines.txt.zst", "--dedup")]),
        ("JSON nested 10^6 deep", "deep.jsonl", lambda path: path.write_bytes(nested(MANY)),
         [f.build("deep.jsonl"), f.finetune("deep.jsonl", *with_labels), f.augment("deep.jsonl", *with_labels),
          [*pairs, f.at("deep.jsonl")]]),
        ("a JSON line of 60 MB", "long60.jsonl", lambda path: repeated(path, b"a ", 60_000_000, row, b'"}\n'),
         [f.build("long60.jsonl")]),
        ("a JSON line of 30 MB of lists, without a text", "odd30.jsonl",
         lambda path: repeated(path, b"[],", 30_000_000, b'{"a": [', b"0]}\n"), [f.build("odd30.jsonl")]),
        ("a JSON line of 1 GiB", "row.jsonl", lambda path: repeated(path, b"a ", gib, row, b'", "label": 0}\n'),
         [f.build("row.jsonl"), f.finetune("row.jsonl", *with_labels), f.augment("row.jsonl", *with_labels),
          [*pairs, f.at("row.jsonl")]]),
        ("a cell of 1 GiB in CSV", "cell.csv", lambda path: repeated(path, b"a ", gib, b'text,label\n"', b'",0\n'),
         [f.build("cell.csv"), f.finetune("cell.csv", *with_labels), f.augment("cell.csv", *with_labels)]),
        ("a cell of 60 MB in CSV", "cell60.csv",
         lambda path: repeated(path, "é ".encode(), 60_000_000, b'text,label\n"', b'",0\n'), [f.build("cell60.csv")]),
        ("a table of 100 MB", "table.tsv", lambda path: repeated(path, b"a good text\t0\n", 10**8),
         [f.augment("table.tsv", "--copies", "1")]),
        ("a Parquet bomb: 4,000 rows of 1 MB", "bomb.parquet",
         lambda path: parquet_of_one_text(path, 10**6, 4000),
         [f.build("bomb.parquet"), f.finetune("bomb.parquet", "--text", "text", "--label", "text"),
          ["bertdata", "import", f.at("bomb.parquet"), "--tokenizer", f.at("wordpiece"), "--out", f.at("out")]]),
        ("a Parquet bomb: a text of 500 MB", "giant.parquet", lambda path: parquet_of_one_text(path, 500_000_000, 1),
         [f.build("giant.parquet"), f.finetune("giant.parquet", "--text", "text", "--label", "text")]),
        ("a Parquet bomb of ids: lists of 10^8", "ids.parquet",
         lambda path: parquet_of_long_lists(path, 2, 10**8),
         [["bertdata", "import", f.at("ids.parquet"), "--tokenizer", f.at("wordpiece"), "--out", f.at("out")]]),
        ("10 GB in a .gz of vectors, words and pairs", "bomb.txt.gz", lambda path: bomb(path, gzip.compress, ten),
         [*(f.augment("train.tsv", option, f.at("bomb.txt.gz")) for option in ("--vectors", "--keep")),
          [*pairs, f.at("bomb.txt.gz")]]),
        *broken("huge", lambda at: sparse(at, ten)),
        *broken("deep", lambda at: at.write_bytes(nested(MANY))),
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


if __name__ == "__main__":
    main()
