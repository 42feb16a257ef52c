"""Damage to a small dataset with all arrays there can be: is it found, and does reading stay within its arrays?

    python tools/damage.py flips                     every byte flipped, every length cut
    python tools/damage.py fuzz --count 1000000      coverage-guided (pip install atheris), checksums made to fit

Each prints one JSON object, and fails if something else than one of our errors came of it. With NUMBA_BOUNDSCHECK=1 and
a NUMBA_CACHE_DIR of its own, as numba's cache does not tell the two apart, the kernels check their indices as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from soak import content, write_text, write_vocab

import bertdata
from bertdata.errors import BertdataError
from bertdata.format import dataset, manifest, shard, table
from bertdata.format import verify as verification
from bertdata.format.arrays import HEADER_BYTES, open_array
from bertdata.format.manifest import MANIFEST
from bertdata.format.records import canonical
from bertdata.format.verify import verify
from bertdata.write import build

WAYS = ("windows", "documents", "packed", "pairs")


def small_dataset(scratch: Path) -> Path:
    """Three shards with all arrays there can be."""
    sys.path.insert(0, str(Path(__file__).parent))
    options = {"tokenizer": str(write_vocab(scratch / "vocab.txt")), "words": f"{Path(__file__).stem}:halves"}
    text = write_text(scratch / "text", 1200)
    return build([text], scratch / "shards", sentences="line", shard_size=700, validation=0.3, **options).dataset.path


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


def fuzz(scratch: Path, draw: random.Random, count: int) -> dict[str, Any]:
    import atheris  # type: ignore[import-not-found]

    path, cache, seen = small_dataset(scratch), scratch / "cache", Counter[str]()
    original = content(path)
    names = [name for name in original if name.endswith(".npy")]
    records = [MANIFEST, *(name for name in original if name[:-5] in {n.split(".")[0] for n in names})]
    for module in (dataset, manifest, shard, table, verification):
        for function in vars(module).values():
            if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
                function.__code__ = atheris.instrument_func(function).__code__

    def leaves(value: Any) -> Iterator[tuple[Any, Any]]:
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            if isinstance(value[key], dict | list):
                yield from leaves(value[key])

    def anything(data: Any) -> Any:
        kinds: list[Callable[[], Any]] = [
            lambda: data.ConsumeInt(9),
            lambda: data.ConsumeUnicode(12),
            lambda: data.ConsumeFloat(),
            lambda: None,
            lambda: [data.ConsumeInt(3)],
            lambda: {data.ConsumeUnicode(4): data.ConsumeInt(3)},
            data.ConsumeBool,
        ]
        return kinds[data.ConsumeIntInRange(0, len(kinds) - 1)]()

    def record(data: Any, name: str) -> None:
        value = json.loads(original[name])
        value.pop("checksum")
        for _ in range(data.ConsumeIntInRange(1, 3)):
            found = list(leaves(value))
            holder, key = found[data.ConsumeIntInRange(0, len(found) - 1)]
            if isinstance(holder, dict) and data.ConsumeBool() and data.ConsumeBool():
                del holder[key]
            else:
                holder[key] = anything(data)
        if name == MANIFEST and data.ConsumeBool():
            with contextlib.suppress(Exception):
                value["dataset_id"] = manifest._parse(value, open_array).dataset_id  # noqa: SLF001
        with contextlib.suppress(ValueError, UnicodeEncodeError):
            sealed = value | {"checksum": hashlib.sha256(canonical(value)).hexdigest()}
            (path / name).write_bytes(json.dumps(sealed).encode())

    def one(raw: bytes) -> None:
        data = atheris.FuzzedDataProvider(raw)
        kind = data.ConsumeIntInRange(0, 99)
        name = names[data.ConsumeIntInRange(0, len(names) - 1)]
        if kind < 45:
            what, name = "manifest", MANIFEST
            record(data, name)
        elif kind < 65:
            what, name = "commit record", records[1 + data.ConsumeIntInRange(0, len(records) - 2)]
            record(data, name)
        elif kind < 75:
            what, name = "record bytes", records[data.ConsumeIntInRange(0, len(records) - 1)]
            (path / name).write_bytes(data.ConsumeBytes(400))
        elif kind < 97:
            what, header = "header", bytearray(original[name][:HEADER_BYTES])
            at = data.ConsumeIntInRange(0, HEADER_BYTES - 1)
            header[at : at + 8] = data.ConsumeBytes(8)
            (path / name).write_bytes(bytes(header) + original[name][HEADER_BYTES:])
        else:
            what, body = "numbers", bytearray(original[name])
            for _ in range(data.ConsumeIntInRange(1, 4)):
                at = data.ConsumeIntInRange(HEADER_BYTES, len(body) - 1)
                more = data.ConsumeBytes(8)
                body[at : at + len(more)] = more
            (path / name).write_bytes(bytes(body[: len(original[name])]))
        seen["inputs"] += 1
        seen[what] += 1
        try:
            if what == "numbers":
                seen["numbers that reading met"] += read_all(path, cache) > 0
            elif what == "commit record":
                verify(path)
            else:
                bertdata.open(path)
        except BertdataError:
            seen[f"{what} refused"] += 1
        finally:
            (path / name).write_bytes(original[name])
        if seen["inputs"] % 1000 == 0:  # the fuzzer leaves without a word
            (scratch / "seen.json").write_text(json.dumps(seen))

    atheris.Setup(
        [sys.argv[0], f"-runs={count}", f"-seed={draw.randrange(1 << 31)}", "-max_len=512", "-verbosity=0"], one
    )
    with contextlib.suppress(SystemExit):
        pid = os.fork()
        if pid == 0:
            atheris.Fuzz()
        status = os.waitpid(pid, 0)[1]
        assert status == 0, f"the fuzzer ended with {status}"
    return json.loads((scratch / "seen.json").read_text())


@click.command()
@click.argument("campaign", type=click.Choice(["flips", "fuzz"]))
@click.option("--count", default=10_000, show_default=True, help="Inputs of the fuzzer.")
@click.option("--every", default=1, show_default=True, help="Flip each so many bytes.")
@click.option("--seed", default=0, show_default=True)
def main(campaign: str, count: int, every: int, seed: int) -> None:
    started, draw = time.perf_counter(), random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        found = flips(Path(scratch), draw, every) if campaign == "flips" else fuzz(Path(scratch), draw, count)
    click.echo(json.dumps({"campaign": campaign, **found, "took_s": round(time.perf_counter() - started, 1)}))


if __name__ == "__main__":
    main()
