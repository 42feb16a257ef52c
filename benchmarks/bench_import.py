"""How fast are ids of others imported, beside the least that must be done with them?

    taskset -c 0 python benchmarks/bench_import.py --tokenizer bert-base-uncased [--gigabytes 2]

Imports a nanoGPT file of uint16 in documents of about 700 ids, which it makes: random ids in 32 MB that repeat. The
other is no importer: it copies the file, reads the copy, and takes its SHA-256 and its CRC-32, which every shard has.
Both find the file in the page cache. `taskset` gives the rate of one core.
"""

from __future__ import annotations

import hashlib
import shutil
import statistics
import tempfile
import time
import zlib
from pathlib import Path

import click
import numpy as np
from common import report

from bertdata.tokenize.load import load
from bertdata.write import IdsFormat, import_ids


def make_file(path: Path, num_bytes: int, end: int, vocab_size: int) -> None:
    random = np.random.default_rng(0)
    ids = random.integers(min(1000, vocab_size // 2), vocab_size, 1 << 24, dtype=np.uint16)
    ends = np.cumsum(random.geometric(1 / 700, ids.size // 600))
    ids[ends[ends < ids.size]] = end
    with path.open("wb") as file:
        for _ in range(max(1, num_bytes // ids.nbytes)):
            file.write(ids.data)


@click.command()
@click.option("--tokenizer", required=True, help="One with at most 65,536 ids: a directory or a name on the hub.")
@click.option("--gigabytes", default=2.0, show_default=True, help="Size of the file.")
@click.option("--repeats", default=5, show_default=True)
@click.option("--directory", help="Where to write. Default: the directory for temporary files.")
def main(tokenizer: str, gigabytes: float, repeats: int, directory: str | None) -> None:
    special = load(tokenizer).special
    end = special.eos if special.eos is not None else special.sep
    if end is None or special.vocab_size > 1 << 16:
        raise click.UsageError(f"--tokenizer {tokenizer} needs an end token and at most 65,536 ids")
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        source, out, copy = Path(scratch) / "ids.bin", Path(scratch) / "out", Path(scratch) / "copy"
        make_file(source, int(gigabytes * 1e9), end, special.vocab_size)
        size = source.stat().st_size

        def imported() -> None:
            import_ids(source, out, ids=IdsFormat(kind="nanogpt"), tokenizer=tokenizer)

        def least() -> None:
            sha256, block = hashlib.sha256(), memoryview(bytearray(1 << 20))
            with source.open("rb") as read, copy.open("wb") as write:
                while count := read.readinto(block):
                    write.write(block[:count])
            with copy.open("rb") as read:
                while count := read.readinto(block):
                    sha256.update(block[:count])
                    zlib.crc32(block[:count])

        rates: dict[str, list[float]] = {"import": [], "copy and digests": []}
        for number in range(repeats + 1):
            for name, run in zip(rates, (imported, least), strict=True):
                shutil.rmtree(out, ignore_errors=True)
                copy.unlink(missing_ok=True)
                start = time.perf_counter()
                run()
                if number:  # the first round compiles
                    rates[name].append(size / 1e6 / (time.perf_counter() - start))
    for name, each in rates.items():
        print(f"{name:16} {statistics.median(each):6.0f} MB/s  ({min(each):.0f} to {max(each):.0f})")
    result: dict[str, float] = {f"{name}, MB/s": round(statistics.median(each)) for name, each in rates.items()}
    result["ratio"] = statistics.median(a / b for a, b in zip(*rates.values(), strict=True))
    print(f"ratio {result['ratio']:.2f}")
    report("import", f"{size / 1e9:.2f} GB of uint16, page cache, {repeats} rounds", result)


if __name__ == "__main__":
    main()
