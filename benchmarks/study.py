"""What the studies of training share: shards, runs of bertrain, and results that are kept."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

import bertdata


def run(command: list[str], cache: Path, threads: int) -> str:
    """Run a module, and return what it prints."""
    more = {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-m", *command], env=os.environ | more, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def answer(command: str, out: Path) -> dict[str, Any]:
    """Run a command of bertrain with --json in one thread, and return its answer."""
    return json.loads(run(["bertrain", *command.split(), "--json"], out, 1).splitlines()[-1])


def evaluated(model: Path, data: Path, length: int) -> dict[str, Any]:
    """Return what `bertrain evaluate` finds on the whole validation split."""
    return answer(f"evaluate --checkpoint {model} --data {data} --length {length}", model.parent)


def shards_of(corpus: Path | str, shards: Path, *options: str) -> Path:
    """Build shards, unless they are there."""
    if not (shards / "manifest.json").exists():
        run(["bertdata", "build", str(corpus), "--out", str(shards), *options], shards.parent, 2)
    return shards


def prepare(corpus: str, out: Path, model: dict[str, Any]) -> tuple[Path, Path]:
    """Return shards with a vocabulary of 1,024 tokens of the corpus, and the file of a configuration for them."""
    shards, config = shards_of(corpus, out / "shards", "--vocab-size", "1024"), out / "model.json"
    special = bertdata.open(shards).special_tokens
    ids = {"pad_token_id": special.pad, "cls_token_id": special.cls, "sep_token_id": special.sep}
    none = {"bos_token_id": None, "eos_token_id": None}
    config.write_text(json.dumps(model | ids | none | {"vocab_size": special.vocab_size}))
    return shards, config


def train(place: Path, steps: int, options: str) -> None:
    """Run `bertrain pretrain` in one thread, unless the run is complete."""
    if not list(place.glob(f"step-{steps:08d}")):
        words = f"--out {place} --steps {steps} {options}".split()
        run(["bertrain.pretrain", *words], place.parent / "inductor", 1)


def with_phases(options: str, phases: str, file: Path) -> list[str]:
    """Return the words of a command line, and --config FILE, which is written. phases: in TOML.

    An option may not stand on the command line if a phase sets it, so it is left out.
    """
    file.write_text(f"{phases}\n")
    in_phases = {f"--{name.replace('_', '-')}" for phase in tomllib.loads(phases)["phase"] for name in phase}
    words = options.split()
    pairs = zip(words[::2], words[1::2], strict=True)
    return [*(word for pair in pairs if pair[0] not in in_phases for word in pair), "--config", str(file)]


def result_of(place: Path) -> dict[str, Any]:
    """Return what the log of a run says at its end."""
    entries = [json.loads(line) for line in (place / "log.jsonl").read_text().splitlines()]
    steps = [entry for entry in entries if "lr" in entry]
    last, judged = steps[-1], next((entry for entry in reversed(entries) if "validation_loss" in entry), None)
    if judged is None:
        sys.exit(f"{place} was not evaluated, as the corpus is too small for a validation split; give a larger one")
    kept = {name: judged[name] for name in ("validation_loss", "validation_accuracy")}
    times = {name: last[name] for name in ("trained_s", "compiled_s")}
    return kept | times | {"steps": last["step"], "tokens": last["tokens"]}


def losses_of(runs: list[dict[str, Any]]) -> str:
    """Return two cells of a Markdown table, "loss, median | of each seed", for runs of one row."""
    losses = [one["validation_loss"] for one in sorted(runs, key=lambda one: one["seed"])]
    return f"{statistics.median(losses):.3f} | {', '.join(f'{loss:.3f}' for loss in losses)}"


class Results:
    """The lines of OUT/results.jsonl. What is done is not run again, so a study may be stopped at any time."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.file = out / "results.jsonl"
        self.lines = [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []

    def of(self, **facts: Any) -> list[dict[str, Any]]:
        """Return the lines with these facts."""
        return [one for one in self.lines if facts.items() <= one.items()]

    def missing(self, rows: Iterable[str], seeds: Iterable[int], **facts: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the row and the facts of each run that is not there."""
        for seed in seeds:
            for row in rows:
                given = {"row": row, "seed": seed, **facts}
                if not self.of(**given):
                    yield row, given

    def add(self, result: dict[str, Any]) -> None:
        self.lines.append(result)
        with self.file.open("a") as file:
            file.write(json.dumps(result) + "\n")


def known(names: tuple[str, ...], rows: Iterable[str]) -> list[str]:
    """Return the names, or all rows if there are none."""
    if unknown := [name for name in names if name not in rows]:
        raise click.UsageError(f"--row {unknown[0]} is unknown; give one of {'; '.join(rows)}")
    return list(names or rows)
