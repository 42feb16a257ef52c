"""The table of results in README, written from committed results: `make proof`, or python benchmarks/proof.py.

Rows come from comparison.json (`make bench`), and those of 1 GB of text and of a GPU from proof.jsonl. A row whose
source has changed since it was measured is stale: its name is printed, and the exit status is 1.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from table import compared, number, source_digest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- begin: proof -->", "<!-- end: proof -->"
ROWS = {  # a row of README → what the names of its rows in comparison.json contain, and what README calls them
    "64 MB of text to shards, whole command": {"text to shards": ""},
    "a tokenizer's file to the ids of 20 MB": {
        "tokenizing, BERT, from file": "BERT",
        "tokenizing, GPT-2, from file": "GPT-2",
        "tokenizing, Llama 3, from file": "Llama 3",
    },
    "the same text again, warm": {"tokenizing, GPT-2, warm": "GPT-2", "tokenizing, Llama 3, warm": "Llama 3"},
    "masked batches on one core, others with the same NumPy masks": {"masked batches, others by the same NumPy": ""},
    "masked batches, others with their own masks": {"masked batches, others by their own means": ""},
    "the same without masks": {"batches without masks": ""},
    "training step, fp32 on CPUs": {"training step, fp32": ""},
    "raw text to the same steps of a script like run_mlm.py": {"the same steps of a script": ""},
    "raw text to the script's loss, each by its recipe": {"time to the script's loss": ""},
}


def cells(data: dict[str, Any], parts: dict[str, str]) -> tuple[str, str]:
    """Return ours, and how many times as fast it is as each library, those that are faster first."""
    ours, times = [], []
    for what, name in parts.items():
        found = [one for one in data["rows"] if one["what"].startswith(what) and (one["times"] or not one["reason"])]
        found.sort(key=lambda one: one["times"] or 0)
        ours.append(f"{name} {number(found[0]['ours'])} {found[0]['unit']}".strip())
        libraries = ", ".join(compared(found)).replace("**", "")
        times.append(f"{name}: {libraries}" if name else libraries)
    return ", ".join(ours), "; ".join(times)


def table(data: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """Return what README holds between its two comments."""
    stamp, cpu = data["stamp"], data["stamp"]["machine"]
    lines = [
        f"Measured on {stamp['date']} on {cpu['cores']} cores of {cpu['cpu']}. 4.5 means that ours is 4.5 times as",
        "fast. Times of tokenizers and readers exclude imports; kernels are already compiled, tables of tokenizers",
        "cached on disk, input files in memory.",
        "",
        "| question | ours | compared with |",
        "|---|---|---|",
        *(f"| {question} | {' | '.join(cells(data, parts))} |" for question, parts in ROWS.items()),
        *(f"| {one['question']} | {one['ours']} | {one['times']} ([how]({one['page']})) |" for one in others),
    ]
    return "\n".join(lines)


def read() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the comparison with other libraries, and the other rows."""
    data = json.loads((RESULTS / "comparison.json").read_text())
    return data, [json.loads(line) for line in (RESULTS / "proof.jsonl").read_text().splitlines()]


def stale(data: dict[str, Any], others: list[dict[str, Any]]) -> list[str]:
    """Return the rows whose source has changed since they were measured."""
    questions = [name for name, one in data["measured"].items() if one.get("source") != source_digest(name)]
    return questions + [one["question"] for one in others if one["source"] != source_digest(one["measures"])]


def main() -> None:
    path = ROOT / "README.md"
    before, rest = path.read_text().split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{table(*read())}\n{END}{rest.split(END)[1]}")
    if names := stale(*read()):
        sys.exit(f"the source has changed since: {'; '.join(names)}. Measure again with make bench or make gpu.")


if __name__ == "__main__":
    main()
