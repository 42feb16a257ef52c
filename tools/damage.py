"""Damage a small dataset that has all arrays: `python tools/damage.py flips` flips every byte and cuts at every length.

It prints one JSON object, and fails if verify misses a change or reading leaves its arrays. With NUMBA_BOUNDSCHECK=1
and a NUMBA_CACHE_DIR of its own, as numba's cache does not tell the two apart, the kernels check their indices as well.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from soak import write_text, write_vocab

import bertdata
from bertdata.errors import BertdataError
from bertdata.format.verify import verify
from bertdata.options import build_arguments
from bertdata.write import build

WAYS = ("windows", "documents", "packed", "pairs")


def small_dataset(scratch: Path) -> Path:
    """Three shards with all arrays there can be."""
    sys.path.insert(0, str(Path(__file__).parent))
    options = {"tokenizer": str(write_vocab(scratch / "vocab.txt")), "words": f"{Path(__file__).stem}:halves"}
    options |= {"sentences": "line", "shard_size": 700, "validation": 0.3}
    return build([write_text(scratch / "text", 1200)], scratch / "shards", **build_arguments(options)).dataset.path


def halves(text: str) -> list[str]:
    """A segmenter."""
    return [text[: len(text) // 2], text[len(text) // 2 :]]


def read_all(path: Path, cache: Path) -> int:
    """Every sample of a dataset, each way, or one of our errors. Returns how many ways there was an error."""
    errors = 0
    os.environ["BERTDATA_CACHE"] = str(cache)
    shutil.rmtree(cache, ignore_errors=True)
    try:
        opened = bertdata.open(path)
    except BertdataError:
        return len(WAYS)
    for way in WAYS:
        for policy in ("exact", "whole_word"):
            try:
                options = {"samples": way, "masking": bertdata.Masking(policy=policy)}
                loader = bertdata.Loader(opened, length=16, **options)
                batch = loader.read(np.arange(min(loader.num_samples, 300)))
                assert batch.input_ids.min() >= 0
                assert batch.input_ids.max() < opened.special_tokens.vocab_size
            except BertdataError:
                errors += policy == "exact"
    return errors


def flips(scratch: Path, draw: random.Random, every: int) -> dict[str, Any]:
    path = small_dataset(scratch)
    assert verify(path) == []
    files, flipped, cut, refused = sorted(p for p in path.iterdir() if p.is_file()), 0, 0, 0
    for file in files:
        whole = file.read_bytes()
        shown = file.name.removesuffix(".json").split(".")[0]
        for at in range(draw.randrange(every), len(whole), every):
            changed = bytearray(whole)
            changed[at] ^= 1 << draw.randrange(8)
            file.write_bytes(changed)
            _require_found(path, shown)
            flipped += 1
            if file.suffix == ".npy":
                refused += read_all(path, scratch / "cache") > 0
        for size in range(0, len(whole), every * (1 if file.suffix == ".npy" else 7)):
            file.write_bytes(whole[:size])
            _require_found(path, shown)
            cut += 1
        file.write_bytes(whole)
    assert verify(path) == []
    size = sum(len(file.read_bytes()) for file in files)
    return {"bytes": size, "flips_detected": flipped, "cuts_detected": cut, "flips_that_reading_met": refused}


def _require_found(path: Path, name: str) -> None:
    try:
        faults = verify(path)
    except BertdataError as error:
        faults = [str(error)]
    assert any(name in fault for fault in faults), (name, faults)


@click.command()
@click.argument("campaign", type=click.Choice(["flips"]))
@click.option("--every", default=1, show_default=True, help="Flip one of so many bytes.")
@click.option("--seed", default=0, show_default=True)
def main(campaign: str, every: int, seed: int) -> None:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        counts = flips(Path(scratch), random.Random(seed), every)
    click.echo(json.dumps({"campaign": campaign, **counts, "took_s": round(time.perf_counter() - started, 1)}))


if __name__ == "__main__":
    main()
