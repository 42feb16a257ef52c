"""How long does text take to become fsynced shards, start-up and all, beside a `datasets` script that does the same?

    python benchmarks/bench_build.py corpus.txt tokenizer.json [--copies 10] [--rival-copies 2] [--rounds 3]

Regime: file in the page cache, kernels compiled, two workers each, every run a process of its own from start to exit.
The rival loads the text by paragraph-separated documents, maps the tokenizer's fast batch call over it in two processes
and saves to disk. Besides the ratio of whole times, the ratio of slopes: seconds for each further megabyte, from one
copy of the corpus to several. The rival is too slow for ten copies, so its slope is taken from fewer. The documents are
also built from JSON lines, Parquet and zstd. The parts of our own run (reading, tokenizing, writing) are timed by
themselves on one thread.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from common import report

from bertdata.format.arrays import ArrayWriter
from bertdata.sources.blocks import read_blocks
from bertdata.sources.documents import TextFormat
from bertdata.sources.inputs import local
from bertdata.sources.split import split
from bertdata.tokenize.load import load as load_tokenizer

RIVAL = """
import os, sys
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from datasets import load_dataset
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[2])
tokenizer.no_truncation(); tokenizer.no_padding()
def encode(rows):
    return {"ids": [e.ids for e in tokenizer.encode_batch_fast(rows["text"], add_special_tokens=False)]}
text = load_dataset("text", data_files=sys.argv[1], sample_by="paragraph", split="train", cache_dir=sys.argv[3])
text.map(encode, batched=True, batch_size=100, num_proc=2, remove_columns=["text"]).save_to_disk(sys.argv[3] + "/out")
"""


def timed(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


@click.command()
@click.argument("corpus", type=Path)
@click.argument("tokenizer")
@click.option("--copies", default=10)
@click.option("--rival-copies", default=2, help="0: leave the rival out.")
@click.option("--rounds", "repeats", default=3)
def main(corpus: Path, tokenizer: str, copies: int, rival_copies: int, repeats: int) -> None:
    size = corpus.stat().st_size / 1e6

    def build(path: Path) -> float:
        with tempfile.TemporaryDirectory() as out:
            command = ["build", str(path), "--out", f"{out}/shards", "--tokenizer", tokenizer, "--workers", "2"]
            return timed([sys.executable, "-m", "bertdata", *command])

    def rival(path: Path) -> float:
        with tempfile.TemporaryDirectory() as out:
            return timed([sys.executable, "-c", RIVAL, str(path), tokenizer, out])

    with tempfile.TemporaryDirectory() as directory:
        many, several = Path(directory) / "many.txt", Path(directory) / "several.txt"
        for path, count in ((many, copies), (several, rival_copies)):
            with open(path, "wb") as file:
                for _ in range(count):
                    file.write(corpus.read_bytes() + b"\n\n")
        build(corpus)
        seconds: dict[str, list[float]] = {"ours, one": [], "ours, many": [], "rival, one": [], "rival, several": []}
        kinds = in_other_kinds(corpus, Path(directory))
        seconds |= {f"ours, {path.suffix}": [] for path in kinds}
        for _ in range(repeats):
            for path in kinds:
                seconds[f"ours, {path.suffix}"].append(build(path))
            seconds["ours, one"].append(build(corpus))
            seconds["ours, many"].append(build(many))
            if rival_copies:
                seconds["rival, one"].append(rival(corpus))
                seconds["rival, several"].append(rival(several))
    medians = {name: round(statistics.median(found), 2) for name, found in seconds.items() if found}
    for name, median in medians.items():
        print(f"{name:<20}{median:>9.2f} s")
    slope = size * (copies - 1) / (medians["ours, many"] - medians["ours, one"])
    result = {"seconds": medians, "MB": round(size, 1), "ours MB/s by slope": round(slope, 1)}
    if rival_copies:
        theirs = size * (rival_copies - 1) / (medians["rival, several"] - medians["rival, one"])
        result |= {
            "rival MB/s by slope": round(theirs, 2),
            "whole, times": round(medians["rival, one"] / medians["ours, one"], 1),
            "slope, times": round(slope / theirs, 1),
        }
    report("file to shards", "whole command, two workers", result | {"parts, MB/s": parts(corpus, tokenizer)})


def in_other_kinds(corpus: Path, directory: Path) -> list[Path]:
    """Files with the documents of the corpus."""
    texts = list[str]()
    for block in read_blocks(split([local(corpus)], TextFormat())):
        texts += [bytes(block.data[a : b - 1]).decode() for a, b in pairwise(block.offsets.tolist())]
    paths = [directory / f"one{ending}" for ending in (".jsonl", ".parquet", ".zst")]
    paths[0].write_text("".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts)))
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), paths[1], compression="zstd")
    paths[2].write_bytes(pa.compress(corpus.read_bytes(), "zstd", asbytes=True))
    return paths


def parts(corpus: Path, tokenizer: str) -> dict[str, float]:
    """Megabytes of text a second of each part alone, on one thread."""
    encoder, size = load_tokenizer(tokenizer), corpus.stat().st_size / 1e6
    encoder.prepare()
    start = time.perf_counter()
    blocks = list(read_blocks(split([local(corpus)], TextFormat())))
    read = time.perf_counter()
    encoded = [encoder.encode(block.data, block.offsets, sentences=False) for block in blocks]
    tokenized = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        writer = ArrayWriter(Path(directory) / "tokens.npy", np.dtype(encoded[0].ids.dtype).str)
        for found in encoded:
            writer.append(found.ids)
        writer.commit()
        written = time.perf_counter()
    laps = {"reading": read - start, "tokenizing": tokenized - read, "writing, fsync, digests": written - tokenized}
    return {name: round(size / lap, 1) for name, lap in laps.items()}


if __name__ == "__main__":
    main()
