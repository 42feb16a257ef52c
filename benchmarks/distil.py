"""Does a student learn better from a teacher's cache than alone, at equal steps and at equal seconds?

    python benchmarks/distil.py shards/ --out distil/ --steps 2000 --teacher-steps 4000
    python benchmarks/distil.py shards/ --out distil/ --steps 2000 --teacher run/

A teacher is trained, unless there is one. For each seed its answers are cached for the very samples of that seed's
student, and students of one architecture are trained: alone, and distilled, for as many steps; alone for as long as
cache and distilled student took together; and, if the teacher was trained here, alone for as long as these and its
training. Losses are those of the validation split, on masks fixed by a seed. Ends with a table in Markdown and a JSON
line; OUT/curves.png has the curves.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
from common import report

from bertrain.lab.distillation import answers


def run(module: str, *arguments: Any) -> float:
    """Return the seconds that a module of ours takes."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", module, *map(str, arguments)], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def train(out: Path, *arguments: Any) -> dict[str, float]:
    seconds = run("bertrain.pretrain", "--out", out, *arguments)
    return summary(out) | {"seconds": round(seconds, 1)}


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
@click.option("--teacher-steps", default=0, help="Of a teacher. 0: twice the student's.")
@click.option("--teacher", default="bert-mini", help="A model to train, or a run of one that was.")
@click.option("--student", default="bert-tiny")
@click.option("--length", default=64)
@click.option("--rows", default=64, help="Of a step.")
@click.option("--lr", default=2e-3)
@click.option("--top-k", default=64)
@click.option("--alpha", default=0.5)
@click.option("--temperature", default=1.0)
@click.option("--seeds", default=3)
def main(
    data: str, out: str, steps: int, teacher_steps: int, teacher: str, student: str, length: int, rows: int, lr: float,
    top_k: int, alpha: float, temperature: float, seeds: int,
) -> None:  # fmt: skip
    place, found = Path(out), dict[str, list[dict[str, float]]]()
    shared = {
        "--optimizer": "adamw",
        "--length": length,
        "--global-batch-size": rows,
        "--lr": lr,
        "--save-every": 10**6,
    }

    def pretrain(name: str, model: str, seed: int, number: int, *taught: Any) -> dict[str, float]:
        options = shared | {"--model": model, "--seed": seed, "--steps": number, "--eval-every": max(1, number // 5)}
        given = (item for pair in options.items() for item in pair)
        return train(place / f"{name}-{seed}", "--data", data, *given, *taught)

    trained = Path(teacher).is_dir()
    asked = Path(teacher) if trained else place / "teacher-0"
    big = summary(Path(teacher)) if trained else pretrain("teacher", teacher, 0, teacher_steps or 2 * steps)
    found["teacher"] = [big]
    print("teacher", big, flush=True)
    for seed in range(seeds):
        logits, results = place / f"logits-{seed}", dict[str, dict[str, float]]()
        seconds = run(
            "bertrain.lab.distillation.teacher", "--model", asked, "--data", data, "--out", logits, "--length", length,
            "--seed", seed, "--top-k", top_k, "--max-samples", steps * rows, "--yes",
        )  # fmt: skip
        header = answers.read_header(logits)
        tokens = header["samples"] * header["epoch_tokens"] / header["epoch_samples"]
        results["cache"] = {"seconds": seconds, "bytes_per_corpus_token": answers.num_bytes(header) / tokens}
        results["alone"] = pretrain("alone", student, seed, steps)
        taught = ["--teacher-cache", logits, "--alpha", alpha, "--temperature", temperature]
        results["distilled"] = pretrain("distilled", student, seed, steps, *taught)
        rate = results["alone"]["steps_seconds"] / steps
        more_seconds = results["distilled"]["seconds"] + seconds - results["alone"]["seconds"]
        number = steps + round(more_seconds / rate)
        results["alone, seconds of cache and student"] = pretrain("longer", student, seed, number)
        if not trained:
            number += round(big["seconds"] / rate)
            results["alone, seconds of teacher, cache and student"] = pretrain("longest", student, seed, number)
        for name, result in results.items():
            found.setdefault(name, []).append(result)
            print(seed, name, result, flush=True)
    names = ("alone", "distilled", "longer") if trained else ("alone", "distilled", "longer", "longest")
    runs = [place / f"{name}-{seed}" for name in names for seed in range(seeds)]
    run("bertrain.commands.plot", *runs, "--out", place / "curves.png")
    print(table(found))
    regime = (
        f"{seeds} seeds, {Path(teacher).name} teaches {student}, {steps} steps of {rows} rows of {length}, k = {top_k}"
    )
    report("does a teacher's cache help a student", f"{regime}, alpha {alpha}, T {temperature}", found)


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
