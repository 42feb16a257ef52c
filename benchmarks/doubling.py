"""Does no time grow with the square of an input?

    python benchmarks/doubling.py --directory /var/tmp/bounds [--only PATTERN]

CPU time of a piece of work at n, 2n, 4n and 8n, the least of some calls in one process. Linear work gives ratios near
2, quadratic work ratios near 4. Two ratios in a row above 2.6 are a finding. Each result is appended to
benchmarks/results/bounds.jsonl as it is found.
"""

from __future__ import annotations

import contextlib
import fnmatch
import gzip
import io
import lzma
import shutil
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from bounds import Fixtures, keep, many_files, nested, zstd

import bertdata
from bertdata.format.verify import verify
from bertdata.options import IdsFormat, build_arguments
from bertdata.tokenize.load import load
from bertrain.lab import tables
from bertrain.lab.augment import read_vectors
from bertrain.report import Log

STEEP = 2.6  # a ratio of CPU times for twice the input that linear work does not have
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
    """Work on inputs of a size, in a directory."""

    def __init__(self, fixtures: Fixtures) -> None:
        self.f, self.scratch = fixtures, fixtures.path("doubling")
        self.out = self.scratch / "out"

    def file(self, name: str, content: bytes) -> Path:
        self.scratch.mkdir(exist_ok=True)
        (self.scratch / name).write_bytes(content)
        return self.scratch / name

    def build(self, path: Path, tokenizer: str = "wordpiece", **options: Any) -> Work:
        def run() -> Any:
            options.setdefault("tokenizer", self.f.at(tokenizer))
            shutil.rmtree(self.out, ignore_errors=True)
            return bertdata.build([path], self.out, **build_arguments({"workers": 1} | options))

        return quietly(run)

    def shards(self, n: int) -> Path:
        """A dataset of n shards."""
        self.build(self.file("a.txt", b"the stone 1234\n\n" * n), shard_size=16, validation=0)()
        return self.out


def files(made: Doubling, n: int) -> Work:
    many_files(made.scratch / "files", n)
    return made.build(made.scratch / "files")


def ids_to_import(made: Doubling, n: int) -> Work:
    path = made.file("a.bin", SEED.integers(200, 1900, n).astype(np.uint16).tobytes())

    def run() -> Any:
        shutil.rmtree(made.out, ignore_errors=True)
        ids = IdsFormat(kind="nanogpt", dtype="uint16", end_token="[SEP]")
        return bertdata.import_ids([path], made.out, tokenizer=made.f.at("wordpiece"), ids=ids)

    return run


def shards_to_open_and_read(made: Doubling, n: int) -> Work:
    out = made.shards(n)
    return lambda: next(bertdata.Loader(bertdata.open(out), length=32, global_batch_size=8, masking=None))


def shards_to_verify(made: Doubling, n: int) -> Work:
    out = made.shards(n)
    return lambda: verify(out)


def steps_in_the_log_to_resume(made: Doubling, n: int) -> Work:
    entry = '{{"step": {}, "loss": 5.1, "lr": 0.001, "tokens_per_s": 1000.0, "validation_loss": 5.0}}\n'
    path = made.file("log.jsonl", "".join(map(entry.format, range(1, n + 1))).encode())

    def run() -> None:
        with Log(path, after_step=n):
            pass

    return run


Make = Callable[[Doubling, int], Work]


def built(name: str, content: Callable[[int], bytes], **options: Any) -> Make:
    """A build of a file whose content has a size."""
    return lambda made, n: made.build(made.file(name, content(n)), **options)


def used(name: str, content: Callable[[int], bytes], use: Callable[[str], Any]) -> Make:
    """The use of a file whose content has a size."""

    def make(made: Doubling, n: int) -> Work:
        path = made.file(name, content(n))
        return quietly(lambda: use(str(path)))

    return make


def examples(path: str) -> Any:
    return tables.read(path, {"text": "text", "label": "label"}, only=True)


def words(count: int) -> Callable[[int], bytes]:
    return lambda n: b" ".join(letters(n) for _ in range(count))


def table_of_columns(n: int) -> bytes:
    """CSV of one row with a text, a label and n other columns."""
    names = ",".join([*(f"c{k}" for k in range(n)), "text", "label"])
    return f"{names}\n{'0,' * n}a b,1\n".encode()


def object_of_keys(n: int) -> bytes:
    return b"{" + b", ".join(b'"k%d": 0' % k for k in range(n)) + b', "text": "a b"}\n'


def parquet_of_columns(n: int) -> bytes:
    table = pa.table({name: ["a b"] for name in [*(f"c{k}" for k in range(n)), "text", "label"]})
    pq.write_table(table, file := io.BytesIO(), write_statistics=False)
    return file.getvalue()


def parquet(**options: Any) -> Callable[[int], bytes]:
    def content(n: int) -> bytes:
        pq.write_table(pa.table({"text": ["the stone"] * n}), file := io.BytesIO(), **options)
        return file.getvalue()

    return content


def vocabulary(n: int) -> bytes:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    return "\n".join([*tokens, *(f"##{letters(8).decode()}{k}" for k in range(n))]).encode()


def marks(n: int) -> bytes:
    return ("e" + "\u0301\u0323" * n).encode()


LINES: dict[str, Any] = {"documents": "line"}
CASES: dict[str, tuple[int, Make]] = {
    "files": (2000, files),
    "documents": (2_000_000, built("a.txt", lambda n: b"the stone\n" * n, **LINES)),
    "different documents with --dedup": (
        200_000,
        built("a.txt", lambda n: b"".join(b"%d\n" % k for k in range(n)), dedup=True, **LINES),
    ),
    "equal documents with --dedup": (200_000, built("a.txt", lambda n: b"the stone\n" * n, dedup=True, **LINES)),
    "length of a document": (16_000_000, built("a.txt", lambda n: b"the stone " * (n // 10))),
    "sentences of a document": (1_000_000, built("a.txt", lambda n: b"a b\n" * n, sentences="line")),
    "invalid bytes": (200_000, built("a.txt", lambda n: b"stone \xff river \n" * n)),
    "blank lines": (16_000_000, built("a.txt", lambda n: b"a" + b"\n" * n + b"b")),
    "length of a word, WordPiece": (16_000_000, built("a.txt", letters)),
    "length of a word, BPE": (400_000, built("a.txt", letters, tokenizer="bpe")),
    "length of a word, Unigram": (400_000, built("a.txt", letters, tokenizer="unigram")),
    "length of a word, bytes": (16_000_000, built("a.txt", letters, tokenizer="bytes")),
    "length of 2000 words, BPE": (500, built("a.txt", words(2000), tokenizer="bpe")),
    "length of 2000 words, Unigram": (500, built("a.txt", words(2000), tokenizer="unigram")),
    "length of 2000 words, WordPiece": (1000, built("a.txt", words(2000))),
    "marks on a letter": (20_000, built("a.txt", marks)),
    "marks on a letter, Unigram": (20_000, built("a.txt", marks, tokenizer="unigram")),
    "punctuation in a row": (100_000, built("a.txt", lambda n: b"!?." * n, tokenizer="bpe")),
    "spaces in a row": (400_000, built("a.txt", lambda n: b"a" + b" " * n + b"b", tokenizer="bpe")),
    "spelled special tokens": (1_000_000, built("a.txt", lambda n: b"[MASK]" * n)),
    "nesting of JSON": (500_000, built("a.jsonl", nested, on_error="skip")),
    "keys of a JSON object": (100_000, built("a.jsonl", object_of_keys)),
    "quotation marks in CSV": (2_000_000, built("a.csv", lambda n: b'text\n"' + b'""' * n + b'"\n')),
    "lines in a cell of CSV": (500_000, built("a.csv", lambda n: b'text\n"' + b"a\n" * n + b'"\n')),
    "columns of CSV": (100_000, built("a.csv", table_of_columns)),
    "columns of CSV in finetune": (50_000, used("a.csv", table_of_columns, examples)),
    "rows of CSV in finetune": (100_000, used("a.csv", lambda n: b"text,label\n" + b"a b,1\n" * n, examples)),
    "columns of Parquet": (10_000, built("a.parquet", parquet_of_columns)),
    "columns of Parquet in finetune": (5000, used("a.parquet", parquet_of_columns, examples)),
    "row groups of Parquet": (500, built("a.parquet", parquet(row_group_size=1))),
    "rows of Parquet": (1_000_000, built("a.parquet", parquet())),
    "members of gzip": (20_000, built("a.txt.gz", lambda n: gzip.compress(b"the stone\n\n") * n)),
    "frames of zstd": (20_000, built("a.txt.zst", lambda n: zstd(b"the stone\n\n") * n)),
    "streams of xz": (2000, built("a.txt.xz", lambda n: lzma.compress(b"the stone\n\n") * n)),
    "records of FASTA": (500_000, built("a.fa", lambda n: b">a\nACGT\n" * n, tokenizer="bytes")),
    "units": (100, built("a.txt", lambda n: b"the stone 1234\n\n" * n, shard_size=16)),
    "ids to import": (16_000_000, ids_to_import),
    "shards to open and read": (100, shards_to_open_and_read),
    "shards to verify": (100, shards_to_verify),
    "vocabulary of WordPiece": (50_000, used("vocab.txt", vocabulary, lambda path: load(path).engine)),
    "steps in the log to resume": (50_000, steps_in_the_log_to_resume),
    "lines of vectors": (10_000, used("v.txt", lambda n: b"stone 0.1 0.2 0.3 0.4\n" * n, read_vectors)),
    "length of a line of vectors": (100_000, used("v.txt", lambda n: b"a" * n, read_vectors)),
}
"""The first size of each kind of input, and its work; the other sizes are two, four and eight times as large."""


def cpu_s(work: Work) -> float:
    """The least CPU time of up to three calls, all threads together."""
    found: list[float] = []
    while len(found) < 3 and sum(found) < 2:
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


@click.command()
@click.option("--directory", required=True, type=Path)
@click.option("--only", default="*", help="Pattern of names.")
def main(directory: Path, only: str) -> None:
    """CPU time where an input doubles."""
    directory.mkdir(parents=True, exist_ok=True)
    made = Doubling(Fixtures.made(directory))
    for name, (first, make) in CASES.items():
        if not fnmatch.fnmatch(name, only):
            continue
        times = []
        for n in (0, 1, 2, 4, 8):  # the first one compiles kernels and fills caches
            shutil.rmtree(made.scratch, ignore_errors=True)
            time_of = cpu_s(make(made, first * max(n, 1)))
            times += [time_of] if n else []
        shutil.rmtree(made.scratch, ignore_errors=True)
        ratios = [round(later / before, 2) for before, later in pairwise(times)]
        is_quadratic = any(min(pair) > STEEP for pair in pairwise(ratios))
        keep("doubling", name, sizes=[first * n for n in (1, 2, 4, 8)],
             cpu_s=[round(each, 3) for each in times], ratios=ratios, is_quadratic=is_quadratic)  # fmt: skip


if __name__ == "__main__":
    main()
