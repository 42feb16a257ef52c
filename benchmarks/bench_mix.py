"""What does a mix cost, beside one dataset of the same text?

    python benchmarks/bench_mix.py text.txt --tokenizer bert-base-uncased

Builds the text whole, in two halves and in four quarters, and reads batches of 256 rows of 128 tokens of each in
turns, on one thread: windows and packed rows, masked and not. Prints microseconds a batch, and the speed of a mix as a
share of that of one dataset.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click
from common import report, rounds

import bertdata
from bertdata.write import build

WEIGHTS = {2: (0.7, 0.3), 4: (0.4, 0.3, 0.2, 0.1)}
BATCHES = 300


def reader(loader: bertdata.Loader) -> Any:
    def run() -> float:
        for _ in range(BATCHES):
            next(loader)
        return BATCHES

    return run


@click.command()
@click.argument("text", type=click.Path(path_type=Path, exists=True))
@click.option("--tokenizer", required=True, help="A directory or a name on the hub.")
@click.option("--repeats", default=15, show_default=True)
def main(text: Path, tokenizer: str, repeats: int) -> None:
    lines = text.read_bytes().splitlines(keepends=True)
    with tempfile.TemporaryDirectory() as scratch:

        def built(name: str, part: list[bytes]) -> bertdata.Dataset:
            path = Path(scratch) / f"{name}.txt"
            path.write_bytes(b"".join(part))
            build(path, Path(scratch) / name, tokenizer=tokenizer)
            return bertdata.open(Path(scratch) / name)

        given: dict[str, Any] = {"one": built("all", lines)}
        for count, weights in WEIGHTS.items():
            size = len(lines) // count + 1
            parts = [built(f"{count}-{n}", lines[n * size : (n + 1) * size]) for n in range(count)]
            given[f"{count} mixed"] = list(zip(parts, weights, strict=True))
        result = {}
        for samples in ("windows", "packed"):
            for masking in (bertdata.Masking(), None):
                loaders = {
                    name: bertdata.Loader(data, length=128, global_batch_size=256, samples=samples, masking=masking)
                    for name, data in given.items()
                }
                found = rounds({name: reader(loader) for name, loader in loaders.items()}, repeats=repeats)
                rates = {name: rate["median"] for name, rate in found.items()}
                row = f"{samples}, {'masked' if masking else 'not masked'}"
                result[row] = {name: round(1e6 / rate, 1) for name, rate in rates.items()}
                shares = (f"{name} {rate / rates['one']:.2f}" for name, rate in rates.items() if name != "one")
                print(f"{row:20} {1e6 / rates['one']:6.1f} us a batch; speed: {', '.join(shares)}", flush=True)
    report("mix", "microseconds a batch of 256 rows of 128, one thread, page cache", result)


if __name__ == "__main__":
    main()
