"""How fast does text become shards, and how much of that is the tokenizer?

    python benchmarks/bench_build.py corpus.txt tokenizer.json

Regime: file in the page cache, two threads, fsynced shards in a temporary directory, start-up of Python not counted.
The ceiling for now is `tokenizers` itself, whose batch calls give the ids: it is measured in the same rounds, on the
same documents in memory, with its own two threads and nothing written.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from common import report, rounds
from tokenizers import Tokenizer

from bertdata.build import build
from bertdata.text import TextFormat, read_blocks


def main() -> None:
    corpus, tokenizer = Path(sys.argv[1]), sys.argv[2]
    size = corpus.stat().st_size
    theirs = Tokenizer.from_file(tokenizer)
    theirs.encode_special_tokens = True
    texts = corpus.read_text(errors="replace").split("\n\n")

    def ours() -> float:
        with tempfile.TemporaryDirectory() as directory:
            build([corpus], Path(directory) / "shards", tokenizer=tokenizer, workers=2)
        return size

    def reading() -> float:
        return sum(len(block.data) for block in read_blocks([corpus], TextFormat()))

    def tokenizing() -> float:
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        for start in range(0, len(texts), 200):
            theirs.encode_batch_fast(texts[start : start + 200], add_special_tokens=False)
        return size

    os.environ["RAYON_NUM_THREADS"] = "2"
    found = rounds({"bertdata build": ours, "reading only": reading, "encode_batch_fast": tokenizing}, repeats=3)
    rates = {name: round(rate["median"] / 1e6, 2) for name, rate in found.items()}
    for name, rate in rates.items():
        print(f"{name:<30}{rate:>10.2f} MB/s")
    report("text to shards", "warm file, two threads", {"MB/s": rates, "bytes": size})


if __name__ == "__main__":
    main()
