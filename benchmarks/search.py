"""Does an evolutionary search among sub-networks find better ones than random choice, at equal trials?

    python benchmarks/search.py corpus.txt --out study/

Trains a bert of 4 layers and width 128 with sub-networks on the corpus (a vocabulary of 1,024 made from it), then
searches it with both methods and each seed, under the median latency of 20 random sub-networks. All searches share one
directory of measurements, so a sub-network has the same latency and loss in all of them, and what is done is not done
again: the command may be stopped at any time. Ends with a table and a JSON line.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
from common import report

MODEL = {"model_type": "bert", "num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4,
         "intermediate_size": 512, "max_position_embeddings": 128, "hidden_dropout_prob": 0.0,
         "attention_probs_dropout_prob": 0.0}  # fmt: skip
SPACE = "layers=1:4,width=32:128:16,heads=1:4,feed_forward=64:512:64"
METHODS = ("random", "evolution")


def run(module: str, *arguments: Any) -> str:
    """The last line of standard output of a module of ours."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1]


@click.command(help=__doc__, context_settings={"show_default": True})
@click.argument("corpus")
@click.option("--out", default="study", help="Directory for shards, the run and the search.")
@click.option("--steps", default=1500, help="Of training.")
@click.option("--trials", default=40, help="Of a search.")
@click.option("--seeds", default=3)
@click.option("--latency", default="", help="Default: the median of 20 random sub-networks, measured once.")
@click.option("--max-samples", default=256)
def main(corpus: str, out: str, steps: int, trials: int, seeds: int, latency: str, max_samples: int) -> None:
    place = Path(out)
    place.mkdir(parents=True, exist_ok=True)
    shards, trained, searched = (place / name for name in ("shards", "run", "search"))
    if not (shards / "manifest.json").exists():
        run("bertdata", "build", corpus, "--out", shards, "--vocab-size", 1024)
    (place / "bert.json").write_text(json.dumps(MODEL))
    run("bertrain.pretrain", "--data", shards, "--out", trained, "--model", place / "bert.json", "--elastic", SPACE,
        "--steps", steps, "--length", 64, "--global-batch-size", 32, "--lr", 2e-3, "--eval-every", 0, "--save-every",
        10**6)  # fmt: skip
    log = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    common = ["--checkpoint", trained, "--data", shards, "--batch-size", 8, "--max-samples", max_samples, "--json"]
    if not (place / "latency").exists():
        probe = json.loads(run("bertrain", "search", *common, "--latency", "100s", "--trials", 20, "--method", "random",
                               "--seed", 1000, "--out", searched))  # fmt: skip
        limit = latency or f"{statistics.median(trial['latency_ms'] for trial in probe['trials']):.2f}ms"
        (place / "latency").write_text(limit)
    limit = (place / "latency").read_text()
    best: dict[str, list[float]] = {method: [] for method in METHODS}
    rows = []
    for seed in range(seeds):
        for method in METHODS:
            found = json.loads(run("bertrain", "search", *common, "--latency", limit, "--trials", trials, "--method",
                                   method, "--seed", seed, "--out", searched))  # fmt: skip
            best[method].append(found["best"]["loss"])
            after = [min(trial["loss"] for trial in found["trials"][:number]) for number in (10, 20, 30, trials)]
            rows.append({"seed": seed, "method": method, "best": found["best"], "best_after_10_20_30_all": after})
            print(seed, method, found["best"], flush=True)
    print("| seed | random | evolution |\n|---|---|---|")
    for seed, pair in enumerate(zip(*best.values(), strict=True)):
        print(f"| {seed} | " + " | ".join(f"{loss:.4f}" for loss in pair) + " |")
    print("| mean | " + " | ".join(f"{statistics.mean(losses):.4f}" for losses in best.values()) + " |")
    validation = [entry["validation_loss"] for entry in log if "validation_loss" in entry]
    result = {"rows": rows, "limit": limit, "whole_validation_loss": validation[-1] if validation else None}
    regime = (
        f"bert of 4 layers, width 128, {SPACE}; {steps} steps of 32 rows of 64; {trials} trials, {seeds} seeds, "
        f"latency at most {limit} for 8 rows of 64, losses of {max_samples} samples"
    )
    report("does evolution find better sub-networks than random choice", regime, result)


if __name__ == "__main__":
    main()
