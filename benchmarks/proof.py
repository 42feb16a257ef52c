"""One table of what was measured, for README: python benchmarks/proof.py writes it from committed results.

    make proof            the table and its picture, from benchmarks/results/
    make proof RUN=1      repeats the measurements that take less than half an hour in all, and prints them beside it

Speeds beside other libraries come from comparison.json (`make bench`). Everything else is a line of proof.jsonl: what
was asked, what was found here, the page that has it whole, and perhaps a command that repeats it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- begin: proof -->", "<!-- end: proof -->"
SPEEDS = {  # name of a row in comparison.json → its name in the table
    "tokenizing, BERT, cold": "tokenizing, first time: BERT",
    "tokenizing, GPT-2, cold": "tokenizing, first time: GPT-2",
    "tokenizing, Llama 3, cold": "tokenizing, first time: Llama 3",
    "building, whole command": "text to shards, whole command",
    "building, each further MB": "text to shards, each further MB",
    "reading": "masked batches, one core",
    "reading without masks": "unmasked batches, one core",
    "memory of a reader": "memory of a reader",
    "training step, fp32": "training step, fp32 on CPUs",
    "147 steps of run_mlm's recipe, from raw text": "run_mlm.py's recipe, from raw text",
    "time to run_mlm's loss, each by its recipe": "run_mlm.py's loss, by our recipe",
}
LAST = "tokenizers 0.23"  # a row names the newer release first
PICTURE = "docs/proof.png"


def speeds(data: dict[str, Any]) -> list[tuple[str, str]]:
    """What is compared, and ours beside each library: above 1 ours is faster or smaller."""
    rows = []
    for what, said in SPEEDS.items():
        found = [one for one in data["rows"] if one["what"] == what and one["times"]]
        found.sort(key=lambda one: one["library"] == LAST)
        rows.append((said, ", ".join(f"{one['library']} **{one['times']:g}**" for one in found)))
    return rows


def table(data: dict[str, Any], proofs: list[dict[str, Any]]) -> str:
    stamp, cpu = data["stamp"], data["stamp"]["machine"]
    lines = [
        f"Speeds are of {stamp['date']}, {cpu['cores']} cores of {cpu['cpu']}. 4.9 means that ours is 4.9 times as",
        "fast (or small); below 1 the other library is better. For masked batches, all readers but memmap and Megatron",
        "use Hugging Face's collator, which limits them to 3.9 million tokens a second; Megatron masks in Python.",
        "[All rows](docs/benchmarks.md).",
        "",
        "| question | result |",
        "|---|---|",
        *(f"| {said} | {found} |" for said, found in speeds(data)),
        *(f"| {one['asked']} | {one['found']} ([how]({one['page']})) |" for one in proofs),
    ]
    return "\n".join(lines)


def plot(data: dict[str, Any], path: Path) -> None:
    """Bars of the speeds in the table, on a logarithmic axis."""
    from matplotlib.figure import Figure

    found = [one for what in SPEEDS for one in data["rows"] if one["what"] == what and one["times"]][::-1]
    figure = Figure(figsize=(8, 0.19 * len(found) + 0.6), layout="constrained")
    axes = figure.subplots()
    names = [f"{SPEEDS[one['what']]}: {one['library']}" for one in found]
    colors = [f"C{list(SPEEDS).index(one['what'])}" for one in found]
    axes.barh(names, [one["times"] for one in found], color=colors)
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    for place, one in enumerate(found):
        axes.text(one["times"], place, f" {one['times']:g}", va="center", fontsize=7)
    axes.tick_params(axis="y", labelsize=7)
    axes.margins(x=0.1, y=0.01)
    axes.set_title(f"Times as fast, or as small, as other libraries ({data['stamp']['date']}, CPUs)", fontsize=9)
    figure.savefig(path, dpi=110)


def read() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The comparison with other libraries, and the other measurements."""
    data = json.loads((RESULTS / "comparison.json").read_text())
    return data, [json.loads(line) for line in (RESULTS / "proof.jsonl").read_text().splitlines()]


def write(root: Path = ROOT) -> None:
    """Writes the table between the two comments of README, and its picture."""
    data, proofs = read()
    path = root / "README.md"
    before, rest = path.read_text().split(BEGIN)
    made = table(data, proofs)
    path.write_text(f"{before}{BEGIN}\n{made}\n{END}{rest.split(END)[1]}")
    plot(data, root / PICTURE)


@click.command()
@click.option("--run", "repeats", is_flag=True, help="Repeat what takes less than half an hour in all.")
def main(repeats: bool) -> None:
    if not repeats:
        write()
        return
    for one in read()[1]:
        if "again" in one:
            print(f"\n{one['asked']}\n  recorded: {one['found']}\n  $ {one['again']}", flush=True)
            words = [sys.executable, *one["again"].split()[1:]]
            done = subprocess.run(words, cwd=ROOT, env=os.environ, capture_output=True, text=True)
            last = (done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["nothing"])[-1]
            print(f"  now: {last if not done.returncode else f'failed: {last}'}", flush=True)


if __name__ == "__main__":
    main()
