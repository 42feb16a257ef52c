"""Our engine and trainer beside the rivals, measured in one run: `make bench`, docs/benchmarks.md.

    python benchmarks/table.py [--directory .bench] [--corpus FILE] [--rounds 3] [--minutes 2]
    python benchmarks/table.py --only-write        the outputs once more, from what was measured

The directory gets the corpus, the vocabulary, the shards, the environments of the rivals, and measured.jsonl, with one
line for each question. A question that has a line of the same commit, text, settings and machine is not measured again,
so a run that was stopped goes on; but with changes that are not committed, all is measured. The results are
benchmarks/results/rivals.json, .md and .png, and a part of README.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import click
from common import machine
from environments import PINS, ROOT, LeftOut, last_line, python_of

from bertdata.sources import docstrings

HERE, OUT = Path(__file__).parent, ROOT / "benchmarks" / "results" / "rivals"
VOCABULARY = 30_522
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
BUSY = 0.05  # of the cores' time; if other programs take more, the stamp says so
BEGIN, END = "<!-- begin: beside the rivals -->", "<!-- end: beside the rivals -->"
NAMES = {
    "tokenizers 1.0": "tokenizers 1.0", "nanotoken": "nanotoken", "tokie": "tokie", "datasets": "datasets",
    "datatrove": "datatrove", "litdata": "litdata", "streaming": "mosaicml-streaming", "megatron": "Megatron",
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ measuring


def cpu_seconds() -> tuple[float, float]:
    """Seconds that all cores were busy since the machine started, and those of this process and its ended children."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, softirq, stolen, *_ = (int(field) for field in file.readline().split()[1:])
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    busy = (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")
    return busy, sum(one.ru_utime + one.ru_stime for one in used)


class Measurements:
    """measured.jsonl: the answer to each question, with what it depends on: settings, `commit` among them."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # a line was cut off as the disk was full or the process died
            path.write_text(whole)
        self.lines = [json.loads(line) for line in whole.splitlines()]

    def found(self, question: str) -> dict[str, Any] | None:
        """The newest line of a question under these settings."""
        same = (one for one in reversed(self.lines) if one["question"] == question and one["settings"] == self.settings)
        return next(same, None)

    def ask(self, question: str, measure: Callable[[], Any]) -> None:
        """Measures, if there is no line. A failure is kept as a reason, and is measured again in the next run.

        So is everything outside git, or where files differ from the commit: the line may be of other code.
        """
        before, commit = self.found(question), self.settings["commit"]
        if commit != "unknown" and not commit.endswith("+") and before and "reason" not in before:
            print(f"{question}: measured before")
            return
        start, (busy, own) = time.perf_counter(), cpu_seconds()
        try:
            answer = {"result": measure()}
        except LeftOut as reason:
            answer = {"reason": str(reason)}
        passed, (busy_after, own_after) = time.perf_counter() - start, cpu_seconds()
        others = max(0.0, (busy_after - busy) - (own_after - own)) / passed / (os.cpu_count() or 1)
        line = {"question": question, "settings": self.settings, **answer, "seconds": round(passed, 1),
                "share of other programs": round(others, 3)}  # fmt: skip
        self.lines.append(line)
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")
        print(
            f"{question}: {answer.get('reason', 'measured')}, {passed:.0f} s, other programs {others:.0%}", flush=True
        )


def script(name: str, *arguments: object, limit: float) -> dict[str, Any]:
    """The result of a benchmark of this directory."""
    found = last_line([sys.executable, str(HERE / name), *map(str, arguments)], seconds=limit)
    return {"regime": found["regime"]} | found["result"]


def prepare(directory: Path, corpus: Path | None, megabytes: float) -> Path:
    """Text, vocabulary and shards, if they are not there. Returns the text.

    Documents in which a special token is spelled out are not in it: `tokenizers` can take that as text, as ours do, and
    other engines cannot.
    """
    text, made_of = directory / "text.txt", directory / "text.json"
    source = corpus or directory / f"corpus-{megabytes:g}.txt"
    if not source.exists():
        docstrings.write(source, int(1e6 * megabytes))
    if not made_of.exists() or json.loads(made_of.read_text()) != {"corpus": digest(source)}:
        documents = source.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n").split("\n\n")
        kept = [one.strip("\n") for one in documents if one.strip() and not any(name in one for name in SPECIALS)]
        text.write_text("\n\n".join(kept) + "\n", encoding="utf-8")
        tokenizer, shards = directory / "tokenizer", directory / "shards"
        for made in (tokenizer, shards):
            shutil.rmtree(made, ignore_errors=True)
        run("-m", "bertdata", "train-tokenizer", text, "--vocab-size", VOCABULARY, "--out", tokenizer)
        run("-m", "bertdata", "build", text, "--tokenizer", tokenizer, "--out", shards)
        made_of.write_text(json.dumps({"corpus": digest(source)}))
    return text


def run(*arguments: object) -> None:
    subprocess.run([sys.executable, *map(str, arguments)], check=True)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def commit() -> str:
    """The commit that is checked out, with a + where files that are measured differ from it."""
    git = ["git", "-c", "safe.directory=*", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True)
    code = ["bertdata", "bertrain", "benchmarks/*.py"]
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *code], capture_output=True)
    return (head.stdout.strip() or "unknown") + "+" * (changed.returncode == 1)


def stamp(corpus: Path, measurements: Measurements, questions: list[str]) -> dict[str, Any]:
    """What the figures depend on."""
    lines = [line for question in questions if (line := measurements.found(question))]
    seconds = sum(line["seconds"] for line in lines)
    others = sum(line["share of other programs"] * line["seconds"] for line in lines) / max(seconds, 1e-9)
    with open("/proc/meminfo") as file:
        kilobytes = int(next(line for line in file if line.startswith("MemTotal")).split()[1])
    return {
        "date": date.today().isoformat(), "memory, GB": round(kilobytes / 1e6, 1),
        "system": platform.platform(), "corpus, MB": round(corpus.stat().st_size / 1e6, 1),
        "share of other programs": round(others, 3), "other programs ran": others > BUSY,
        "seconds": round(seconds), "rivals": sorted(pin for pins in PINS.values() for pin in pins),
    } | measurements.settings  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- a table


def row(what: str, rival: str, ours: Any, theirs: Any, unit: str, *, better: str = "more", reason: str = "") -> dict:
    """ours, theirs: figures, or None, of which `reason` says why. better: more, less, or none for no ratio."""
    found = {
        "what": what,
        "rival": rival,
        "ours": ours,
        "theirs": theirs,
        "unit": unit,
        "times": None,
        "reason": reason,
    }
    if ours and theirs and better != "none":
        found["times"] = float(f"{ours / theirs if better == 'more' else theirs / ours:.3g}")
    return found


def tokenizing(result: dict[str, Any]) -> list[dict]:
    rates, rows = result["MB/s median"], []
    for state in ("cold", "warm"):
        what = f"tokenizing, {state}"
        rows.append(row(what, "tokenizers 0.23", rates[state], rates["encode_batch_fast"], "MB/s"))
        for name in ("tokenizers 1.0", "nanotoken", "tokie"):
            theirs = rates.get(f"{name} {state}")
            rows.append(row(what, name, rates[state], theirs, "MB/s", reason=result["left out"].get(name, "")))
    return rows


def building(result: dict[str, Any]) -> list[dict]:
    seconds, slopes, rows = result["seconds"], result["MB/s by slope"], []
    rivals = ("datasets", "datatrove", "litdata", "streaming", "megatron")
    for name in rivals:
        why = result["left out"].get(name, "")
        rows.append(
            row(
                "building, whole command",
                NAMES[name],
                seconds["ours, one"],
                seconds.get(name),
                "s",
                better="less",
                reason=why,
            )
        )
    for name in rivals:
        theirs, ours = slopes.get(name), slopes["ours"]
        why = result["left out"].get(name, "")
        noise = "the larger text took no longer: noise"
        if theirs is not None and theirs <= 0:
            theirs, why = None, noise
        if ours <= 0:
            ours, why = None, f"ours: {noise}"
        rows.append(row("building, each further MB", NAMES[name], ours, theirs, "MB/s", reason=why))
    return rows


def reading(result: dict[str, Any]) -> list[dict]:
    figures, rows = result["figures"], []
    parts = {
        "warm": ("reading", "Mtok/s", "more"), "cold": ("cold reading", "Mtok/s", "more"),
        "opening": ("opening to the first batch", "ms", "less"),
        "resuming": ("resuming to the first batch", "ms", "less"), "memory": ("memory of a reader", "MB", "less"),
    }  # fmt: skip
    for part, (what, unit, better) in parts.items():
        for name in ("datasets", "litdata", "streaming", "megatron", "datatrove"):
            theirs, ours = (figures.get(one, {}).get(part, {}) for one in (name, "ours"))
            why = result["left out"].get(name) or theirs.get("reason") or ""
            if unit not in ours:
                why = f"ours: {result['left out'].get('ours') or ours.get('reason')}"
            rows.append(row(what, NAMES[name], ours.get(unit), theirs.get(unit), unit, better=better, reason=why))
    return rows


def stepping(result: dict[str, Any]) -> list[dict]:
    rates = result["tokens/s"]
    named = {"usual": "transformers' Trainer", "sparse": "Trainer with our batches and head"}
    return [row("training step", rival, rates["ours"], rates[name], "tokens/s") for name, rival in named.items()]


def time_to_loss(result: dict[str, Any]) -> list[dict]:
    (mine,), (other,) = result["ours"]["seeds"], result["run_mlm"]["seeds"]
    minutes = float(result["regime"].split(" minutes")[0])
    trained, what = mine["seconds to the loss of run_mlm"], f"loss {minutes:g} minutes after raw text"
    seconds = None if trained is None else round(result["ours"]["until training"] + trained, 1)
    theirs = round(result["run_mlm"]["until training"] + other["trained_s"], 1)
    why = "ours: has not reached it" if seconds is None else ""
    return [
        row(what, "run_mlm", mine["loss"], other["loss"], "nats", better="none"),
        row("time to run_mlm's loss", "run_mlm", seconds, theirs, "s", better="less", reason=why),
    ]


REGIMES = {
    "tokenizing": "documents in memory, one core; cold: empty tables of words",
    "building": "whole command from a file in the page cache to shards, two workers",
    "reading": "masked batches of 256 × 128, one core, random order; cold: 20 batches from files dropped from the "
    "page cache; memory: what the engine adds to a process with torch and transformers",
    "training step": "BERT of 4 layers, width 256, on all cores",
    "time to a loss": "ModernBERT of 6 layers, width 256, rows of 64, from raw text, neither is compiled",
}
ROWS = {
    "tokenizing": tokenizing, "building": building, "reading": reading, "training step": stepping,
    "time to a loss": time_to_loss,
}  # fmt: skip


def ceilings(answers: dict[str, Any]) -> dict[str, str]:
    """How near ours is to what the machine can do at most, by question."""
    found = {}
    if "result" in (tokens := answers["tokenizing"]):
        rates = tokens["result"]["MB/s median"]
        found["tokenizing"] = (
            f"copying the text in memory: {rates['copy in memory']:,.0f} MB/s; ours cold {rates['cold']:,.0f}"
        )
    if "result" in (build := answers["building"]):
        seconds = build["result"]["seconds"]
        found["building"] = f"reading the text and writing its ids with fsync: {seconds['least']:.3f} s"
    if "result" in (read := answers["reading"]):
        figures = read["result"]["figures"]
        named = {
            "copy": "copying random rows unmasked by np.memmap",
            "collator": "transformers' collator alone",
            "ours": "ours",
        }
        rates = {what: figures.get(name, {}).get("warm", {}).get("Mtok/s") for name, what in named.items()}
        found["reading"] = "; ".join(f"{what} {number(rate)} Mtok/s" for what, rate in rates.items() if rate)
    if "result" in (step := answers["training step"]):
        found["training step"] = f"matrix products alone: ours has {step['result']['share of peak']:.0%} of their speed"
    return found


def rows_of(answers: dict[str, Any]) -> list[dict]:
    """The rows of all questions; a question that failed is one row with its reason."""
    rows = []
    for question, make in ROWS.items():
        answer = answers[question]
        found = (
            make(answer["result"])
            if "result" in answer
            else [row(question, "all", None, None, "", reason=answer["reason"])]
        )
        rows += [{"question": question} | one for one in found]
    return rows


def counted(count: int, what: str) -> str:
    return f"{count} {what}" + "s" * (count != 1)


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def markdown(data: dict[str, Any]) -> str:
    """The whole table."""
    stamped = data["stamp"]
    cpu = stamped["machine"]
    lines = [
        "# Beside the rivals", "",
        f"Made by `make bench` on {stamped['date']}, commit {stamped['commit']}: {counted(cpu['cores'], 'core')} of "
        f"{cpu['cpu']}, {stamped['memory, GB']:.0f} GB, Python {cpu['python']}, {stamped['corpus, MB']:.0f} MB of "
        f"text, medians of {counted(stamped['rounds'], 'round')} in turns.",
    ]  # fmt: skip
    if stamped["other programs ran"]:
        lines += ["", f"**Other programs ran**: they took {stamped['share of other programs']:.0%} of the cores' time."]
    for question, regime in REGIMES.items():
        lines += ["", f"## {question.capitalize()}", "", f"{regime[0].upper()}{regime[1:]}.", ""]
        if question in data["ceilings"]:
            lines += [f"Ceiling: {data['ceilings'][question]}.", ""]
        lines += ["| | rival | ours | theirs | | times |", "|---|---|---|---|---|---|"]
        for one in (one for one in data["rows"] if one["question"] == question):
            ours = one["reason"] if one["ours"] is None else number(one["ours"])
            missing = "–" if one["ours"] is None else one["reason"]
            theirs = missing if one["theirs"] is None else number(one["theirs"])
            times = f"{one['times']:g}" if one["times"] else ""
            lines.append(f"| {one['what']} | {one['rival']} | {ours} | {theirs} | {one['unit']} | {times} |")
    return "\n".join(lines) + "\n"


def readme(data: dict[str, Any]) -> str:
    """What README.md holds between its two comments: no ratio of a run that had other programs beside it."""
    stamped = data["stamp"]
    cpu = stamped["machine"]
    if stamped["other programs ran"]:
        return (
            f"The newest run of `make bench` ({stamped['date']}) had other programs beside it; its figures are in\n"
            "[benchmarks/results/rivals.md](benchmarks/results/rivals.md)."
        )
    lines = [
        f"`make bench` measured this on {stamped['date']}: commit {stamped['commit']}, "
        f"{counted(cpu['cores'], 'core')} of {cpu['cpu']}, {stamped['corpus, MB']:.0f} MB of text, "
        f"{counted(stamped['rounds'], 'round')}.",
        "A cell says how many times as good as the rival we are; below 1 the rival is better.",
        "[docs/benchmarks.md](docs/benchmarks.md) says how each is measured, and",
        "[benchmarks/results/rivals.md](benchmarks/results/rivals.md) has all figures.",
        "",
        "| what | times as good as each rival | how |",
        "|---|---|---|",
    ]
    regimes = {question: regime.split(";")[0] for question, regime in REGIMES.items()}  # in the first row of each
    whats = dict.fromkeys((one["question"], one["what"]) for one in data["rows"])
    for question, what in whats:
        rows = [one for one in data["rows"] if one["what"] == what]
        cells = []
        reasons: dict[str, list[str]] = {}
        for one in rows:
            if one["times"]:
                cells.append(f"{one['rival']} **{one['times']:g}**")
            elif one["reason"]:
                reasons.setdefault(one["reason"], []).append(one["rival"])
            elif one["unit"] == "nats":
                cells.append(f"ours {one['ours']:.3f}, {one['rival']} {one['theirs']:.3f} nats")
            else:
                cells.append(f"ours {number(one['ours'])}, {one['rival']} {number(one['theirs'])} {one['unit']}")
        cells += [why if why.startswith("ours: ") else f"{', '.join(names)}: {why}" for why, names in reasons.items()]
        lines.append(f"| {what} | {', '.join(cells)} | {regimes.pop(question, '')} |")
    return "\n".join(lines)


def plot(data: dict[str, Any], path: Path) -> None:
    """Bars of all ratios, on a logarithmic axis."""
    from matplotlib.figure import Figure

    rows = [one for one in data["rows"] if one["times"]][::-1]
    figure = Figure(figsize=(8, 0.24 * len(rows) + 1), layout="constrained")
    axes = figure.subplots()
    questions = list(REGIMES)
    colors = [f"C{questions.index(one['question'])}" for one in rows]
    axes.barh([f"{one['what']}: {one['rival']}" for one in rows], [one["times"] for one in rows], color=colors)
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    for place, one in enumerate(rows):
        axes.text(one["times"], place, f" {one['times']:g}", va="center", fontsize=7)
    axes.tick_params(axis="y", labelsize=7)
    axes.margins(x=0.1, y=0.01)
    note = ", other programs ran" if data["stamp"]["other programs ran"] else ""
    axes.set_title(f"Times as good as the rival: {data['stamp']['date']}, {data['stamp']['commit']}{note}", fontsize=9)
    figure.savefig(path, dpi=110)


def write(data: dict[str, Any]) -> None:
    OUT.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    OUT.with_suffix(".md").write_text(markdown(data))
    plot(data, OUT.with_suffix(".png"))
    path = ROOT / "README.md"
    before, rest = path.read_text().split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{readme(data)}\n{END}{rest.split(END)[1]}")
    print(f"{OUT.with_suffix('.md')}\n\n{markdown(data)}")


@click.command()
@click.option(
    "--directory", type=Path, default=Path(".bench"), show_default=True, help="Environments and all that is made."
)
@click.option("--corpus", type=Path, help="Text to use. Default: docstrings of the installed packages.")
@click.option("--megabytes", default=16.0, show_default=True, help="Of docstrings.")
@click.option("--rounds", default=3, show_default=True, help="Of every measurement but the time to a loss.")
@click.option("--minutes", default=2.0, show_default=True, help="Of the time to a loss, for either side.")
@click.option("--steps", default=12, show_default=True, help="Of training, 5 of which are not counted.")
@click.option("--only", type=click.Choice(list(ROWS)), multiple=True, help="Measure these questions and write nothing.")
@click.option("--only-write", is_flag=True, help="Write the outputs once more from benchmarks/results/rivals.json.")
def main(
    directory: Path,
    corpus: Path | None,
    megabytes: float,
    rounds: int,
    minutes: float,
    steps: int,
    only: tuple[str, ...],
    only_write: bool,
) -> None:
    """Measures ours beside the rivals, and writes the table."""
    if only_write:
        data = json.loads(OUT.with_suffix(".json").read_text())
        write(data | {"rows": rows_of(data["measured"]), "ceilings": ceilings(data["measured"])})
        return
    directory.mkdir(parents=True, exist_ok=True)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for name in PINS:
        try:
            python_of(name, directory)
        except LeftOut as reason:
            print(f"{name}: {reason}")
    text = prepare(directory, corpus, megabytes)
    tokenizer, shards = directory / "tokenizer", directory / "shards"
    file, ranks = tokenizer / "tokenizer.json", min(2, len(os.sched_getaffinity(0)))
    settings = {"commit": commit(), "machine": machine(), "text": digest(text)[:16]}
    settings |= {"rounds": rounds, "minutes": minutes, "steps": steps}
    measurements = Measurements(directory / "measured.jsonl", settings)
    rivals = ("--rivals", directory)
    questions: dict[str, Callable[[], Any]] = {
        "tokenizing": lambda: script(
            "bench_tokenize.py", text, file, "--megabytes", 1e9, "--rounds", rounds, *rivals, limit=1800
        ),
        "building": lambda: script("bench_build.py", text, file, "--rounds", rounds, *rivals, limit=1800),
        "reading": lambda: script(
            "bench_reading.py", shards, file, "--rounds", rounds, "--directory", directory, *rivals, limit=1800
        ),
        "training step": lambda: script(
            "bench_trainer.py", shards, "--ranks", ranks, "--rows", 32, "--steps", steps, "--rounds", rounds,
            "--precision", "bf16", limit=1800,
        ),
        "time to a loss": lambda: script(
            "speedrun.py", text, tokenizer, "--minutes", minutes, "--eager", "--rows", 32, "--eval-every", 20, *rivals,
            limit=1800,
        ),
    }  # fmt: skip
    for question, measure in questions.items():
        if not only or question in only:
            measurements.ask(question, measure)
    if only:
        return
    answers = {question: measurements.found(question) or {"reason": "not measured"} for question in questions}
    write(
        {
            "stamp": stamp(text, measurements, list(questions)),
            "rows": rows_of(answers),
            "ceilings": ceilings(answers),
            "measured": answers,
        }  # fmt: skip
    )


if __name__ == "__main__":
    main()
