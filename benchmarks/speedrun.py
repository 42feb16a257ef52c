"""How many seconds does an encoder train to a fixed loss? docs/speedrun.md has the rules.

    python benchmarks/speedrun.py --device cuda [--out results.jsonl]
    python benchmarks/speedrun.py --device cpu --seeds 1 -- --recipe tiny --steps 1000

Options after -- are those of bertrain pretrain; without any, those of BASELINE. The text is the docstrings of PACKAGES,
which pip downloads. --device cpu takes a tenth of it. Without a network, give --corpus a copy of CORPUS.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path
from statistics import mean
from typing import Any

try:
    import click
    import torch
    from table import commit, machine

    from bertdata.support import write_file
    from bertrain.commands.docstrings import DOCSTRING, SHORTEST
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not installed; pip install '.[train]' installs all that a speedrun needs")

PACKAGES = """
diffusers==0.42.1 jax==0.10.2 keras==3.15.1 kornia==0.9.0 mlflow==3.18.0 mne==1.13.2 monai==1.6.1 networkx==3.6.1
nltk==3.10.4 pennylane==0.45.1 python-telegram-bot==22.8 pyvista==0.49.1 sktime==1.2.0 sqlalchemy==2.1.9 sympy==1.14.0
tensorflow-probability==0.25.0 torch-geometric==2.8.1 torchmetrics==1.9.0 transformers==5.24.0 twisted==26.10.0
xarray==2026.9.0"""
PURE = "--only-binary=:all: --platform=any --implementation=py --abi=none --python-version=3.11"  # for any machine
SHA256 = "0c062d3a180ae66c6f0727f73cf5469374647fd1cb655deb2f0335124307d034"  # of the text
IDS = {
    "cuda": "c71ef74f142110766d98cb66e4db56cd9c8a0c7adb25ee91160bedd66a6e5811",
    "cpu": "1a8424ead4c25e8c4db8aed5c12c8e2a4eea805dab7d9cf04d493ab886a53b2d",
}  # of the datasets
TARGETS = {"cuda": 2.2, "cpu": 2.7}  # nats per masked token
BASELINE = {
    "cuda": "--recipe small --length 128 --global-batch-size 128 --steps 6000",
    "cpu": "--recipe tiny --length 128 --global-batch-size 32 --steps 2800",
}
LENGTH = 128  # of the rows of an evaluation
FIXED = "--eval-masking 0.15 --eval-precision auto --eval-every 50 --log-every 50 --no-isolate-documents"
REFUSED = {"--data", "--data-seed", "--init", "--teacher", "--teacher-cache", "--seed", "--out"}
REFUSED |= {word for word in FIXED.split() if word.startswith("--")}
NOT_IN_A_FILE = ("data", "init", "teacher", "teacher_cache", "data_seed")  # options that --config must not set
DIRECTORY = Path("runs/speedrun")
CORPUS = DIRECTORY / "corpus.txt.gz"


def run(*command: str, **more: Any) -> None:
    """Run a module of Python. Raise a ClickException with the last line of its errors if it fails."""
    words, streams = [sys.executable, "-m", *command], {"stdout": sys.stderr, "stderr": subprocess.PIPE}
    if (done := subprocess.run(words, text=True, **streams, **more)).returncode:
        lines = done.stderr.split("\n")
        raise click.ClickException(f"{command[0]} failed: {next(filter(None, reversed(lines)), 'no message')}")


def write_corpus() -> None:
    """Write the docstrings of PACKAGES, ordered by a hash, so that the first tenth is a fair sample."""
    texts: dict[bytes, bytes] = {}
    with tempfile.TemporaryDirectory() as wheels:
        options = f"--quiet --disable-pip-version-check --no-deps {PURE} --dest {wheels} {PACKAGES}"
        run("pip", "download", *options.split())
        for wheel in Path(wheels).iterdir():
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    source = archive.read(name).decode(errors="replace") if name.endswith(".py") else ""
                    for match in DOCSTRING.finditer(source):
                        text = "\n".join(filter(None, map(str.strip, match[1].splitlines()))).encode()
                        if len(text) >= SHORTEST:
                            texts[hashlib.sha256(text).digest()] = text
    write_file(CORPUS, gzip.compress(b"\n\n".join(text for _, text in sorted(texts.items())), mtime=0))


def build(device: str, corpus: Path, directory: Path) -> None:
    """Build the dataset of a device, with its tokenizer."""
    try:
        text = gzip.decompress(corpus.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise click.ClickException(f"{corpus} cannot be read ({error}); remove it, or give a --corpus") from error
    if (found := hashlib.sha256(text).hexdigest()) != SHA256:
        raise click.ClickException(f"{corpus} is a different text: its SHA-256 is {found}; remove it")
    if device == "cpu":
        documents = text.split(b"\n\n")
        text = b"\n\n".join(documents[: len(documents) // 10])
    (directory / "text.txt").write_bytes(text)
    options = f"--out {directory}/shards --overwrite --vocab-size 8192 --validation 0.05"
    run("bertdata", "build", f"{directory}/text.txt", *options.split())
    found = json.loads((directory / "shards" / "manifest.json").read_text())["dataset_id"]
    if found != IDS[device]:
        raise click.ClickException(f"the dataset is {found}, not {IDS[device]}: this version builds other tokens")


def train(device: str, options: list[str], directory: Path, seed: int) -> dict[str, Any]:
    """Return the first evaluation at the target, or the last one, with `seconds` null."""
    out = os.path.relpath(tempfile.mkdtemp(prefix=f"seed-{seed}-", dir=directory))  # results name no home directory
    fixed = ["--data", f"{directory}/shards", "--out", out, "--seed", str(seed), *FIXED.split()]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    run("bertrain.pretrain", *options, *fixed, env=os.environ | hidden)
    config = json.loads(Path(out, "run.json").read_text())["config"]
    for values in (config | {"data": None}, *config["phase"]):
        if named := [name for name in NOT_IN_A_FILE if values.get(name)]:
            raise click.ClickException(f"{named[0]} in --config is against the rules; remove it")
    entries = [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]
    trained = {entry["step"]: entry for entry in entries if "trained_s" in entry}
    losses = {one["step"]: one["validation_loss"] for one in entries if one.get("validation_length") == LENGTH}
    if not losses:
        raise click.ClickException(f"no evaluation was in rows of {LENGTH} tokens; give --length {LENGTH}")
    reached = [step for step, loss in losses.items() if loss <= TARGETS[device]]
    step = min(reached, default=max(losses))
    compiled = trained[step]["compiled_s"] - trained[min(trained)]["compiled_s"]  # that of the first steps is free
    seconds, tokens = trained[step]["trained_s"] + compiled if reached else None, trained[step]["tokens"]
    result = {"seed": seed, "seconds": seconds, "step": step, "loss": losses[step], "tokens": tokens}
    return result | {"threads": torch.get_num_threads(), "config": config}


@click.command()
@click.argument("options", nargs=-1, metavar="[-- OPTIONS OF PRETRAIN]")
@click.option("--device", type=click.Choice([*TARGETS]), default="cuda", show_default=True)
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Number of runs.")
@click.option("--corpus", type=Path, help=f"Text that was downloaded before. Default: {CORPUS}.")
@click.option("--out", type=click.File("a"), help="File of JSON lines to add the results to.")
def main(options: tuple[str, ...], device: str, seeds: int, corpus: Path | None, out: Any) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("torch finds no GPU here; --device cpu takes a tenth of the text")
    if refused := REFUSED.intersection(option.partition("=")[0] for option in options):
        raise click.UsageError(f"{min(refused)} is fixed by the rules (docs/speedrun.md); leave it out")
    directory, given = DIRECTORY / device, [*options] or BASELINE[device].split()
    directory.mkdir(parents=True, exist_ok=True)
    if not corpus and not CORPUS.exists():
        write_corpus()
    build(device, corpus or CORPUS, directory)
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    facts = {"device": name, "target": TARGETS[device], "dataset_id": IDS[device], "options": shlex.join(given)}
    facts |= {"commit": commit(), "machine": machine()}
    seconds = []
    for seed in range(seeds):
        result = train(device, given, directory, seed)
        seconds += [result["seconds"]] * (result["seconds"] is not None)
        for file in {sys.stdout, out or sys.stdout}:
            print(json.dumps(result | facts), file=file, flush=True)
    if len(seconds) < seeds:
        raise click.ClickException(f"{len(seconds)} of {seeds} seeds reached a loss of {TARGETS[device]}")
    click.echo(f"{mean(seconds):.1f} s to a loss of {TARGETS[device]}: mean of {seeds} seeds", err=True)


if __name__ == "__main__":
    main()
