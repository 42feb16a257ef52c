"""Does a student learn better from a teacher's cache than alone, at equal steps and at equal seconds?

    python benchmarks/distil.py shards/ --out distil/ --steps 2000 --teacher run/

For each seed the teacher's answers are cached for the samples of that seed's student, and students of one architecture
are trained: alone, and distilled, for as many steps; and alone for as long as cache and distilled student took
together. Losses are those of the validation split, on masks fixed by a seed. Ends with a table in Markdown and a JSON
line; OUT/curves.png has the curves.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path

import click
from common import report
from study import run

from bertrain.lab.distillation import answers


def summary(out: Path) -> dict[str, float]:
    """Seconds and number of steps, the last validation loss, and the share of time that was waited for data."""
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    final = [entry["validation_loss"] for entry in log if "validation_loss" in entry][-1]
    steps = [entry for entry in log if "data_wait" in entry]
    return {
        "seconds": steps[-1]["seconds"],
        "steps_seconds": steps[-1]["seconds"],
        "steps": steps[-1]["step"],
        "loss": final,
        "data_wait": statistics.mean(entry["data_wait"] for entry in steps),
    }


@click.command(help=__doc__, context_settings={"show_default": True})
@click.argument("data")
@click.option("--out", default="distil", help="Directory for runs, caches and curves; new.")
@click.option("--steps", default=1000, help="Of a student.")
@click.option("--teacher", required=True, help="The run of a trained model.")
@click.option("--student", default="bert-tiny")
@click.option("--length", default=64)
@click.option("--rows", default=64, help="Of a step.")
@click.option("--lr", default=2e-3)
@click.option("--seeds", default=3)
def main(
    data: str, out: str, steps: int, teacher: str, student: str, length: int, rows: int, lr: float, seeds: int
) -> None:
    place, found = Path(out), dict[str, list[dict[str, float]]]()

    def seconds_of(command: str) -> float:
        started = time.perf_counter()
        run(command.split(), place / "inductor", len(os.sched_getaffinity(0)))
        return time.perf_counter() - started

    def pretrain(name: str, seed: int, number: int, taught: str = "") -> dict[str, float]:
        shared = f"--data {data} --model {student} --optimizer adamw --length {length} --global-batch-size {rows}"
        options = f"--lr {lr} --save-every 1000000 --eval-every {max(1, number // 5)} --seed {seed} --steps {number}"
        seconds = seconds_of(f"bertrain.pretrain --out {place / f'{name}-{seed}'} {shared} {options} {taught}")
        return summary(place / f"{name}-{seed}") | {"seconds": round(seconds, 1)}

    found["teacher"] = [summary(Path(teacher))]
    for seed in range(seeds):
        logits, results = place / f"logits-{seed}", dict[str, dict[str, float]]()
        shared = f"--data {data} --out {logits} --length {length} --seed {seed} --max-samples {steps * rows}"
        seconds = seconds_of(f"bertrain teacher --model {teacher} {shared} --top-k 64 --yes")
        header = answers.read_header(logits)
        tokens = header["samples"] * header["epoch_tokens"] / header["epoch_samples"]
        results["cache"] = {"seconds": seconds, "bytes_per_corpus_token": answers.num_bytes(header) / tokens}
        results["alone"] = pretrain("alone", seed, steps)
        results["distilled"] = pretrain("distilled", seed, steps, f"--teacher-cache {logits} --alpha 0.5")
        rate = results["alone"]["steps_seconds"] / steps
        more_seconds = results["distilled"]["seconds"] + seconds - results["alone"]["seconds"]
        number = steps + round(more_seconds / rate)
        results["alone, seconds of cache and student"] = pretrain("longer", seed, number)
        for name, result in results.items():
            found.setdefault(name, []).append(result)
            print(seed, name, result, flush=True)
    runs = [place / f"{name}-{seed}" for name in ("alone", "distilled", "longer") for seed in range(seeds)]
    seconds_of(f"bertrain plot {' '.join(map(str, runs))} --out {place / 'curves.png'}")
    print(table(found))
    regime = f"{seeds} seeds, {Path(teacher).name} teaches {student}, {steps} steps of {rows} rows of {length}, k = 64"
    report("does a teacher's cache help a student", f"{regime}, alpha 0.5, T 1", found)


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Means over seeds, and the loss of each."""
    lines = ["| | steps | seconds | validation loss | of each seed | data wait |", "|---|---|---|---|---|---|"]
    for name, results in found.items():
        seconds = statistics.mean(result["seconds"] for result in results)
        if "loss" not in results[0]:
            lines.append(f"| {name} | | {seconds:,.0f} | | {results[0]['bytes_per_corpus_token']} bytes a token | |")
            continue
        mean = statistics.mean(result["loss"] for result in results)
        each = ", ".join(f"{result['loss']:.4f}" for result in results)
        waited = statistics.mean(result["data_wait"] for result in results)
        steps = statistics.mean(result["steps"] for result in results)
        lines.append(f"| {name} | {steps:,.0f} | {seconds:,.0f} | {mean:.4f} | {each} | {waited:.2%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
