"""Our engine and trainer beside other libraries, measured in one run: `make bench`, docs/benchmarks.md.

    python benchmarks/table.py [--directory .bench] [--corpus FILE] [--tokenizers DIR] [--rounds 5] [--minutes 1.5]
    python benchmarks/table.py --only-write        the outputs once more, from what was measured

The directory gets the corpus, the vocabulary, the shards, the environments of other libraries, and measured.jsonl, with
one line for each question. A question that has a line of the same source, text, settings and machine is not measured
again, so a run that was stopped resumes. The results are benchmarks/results/comparison.json, and the table of
docs/benchmarks.md.
"""

from __future__ import annotations

import ast
import ctypes
import hashlib
import json
import math
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import click
from common import machine
from environments import PINS, ROOT, LeftOut, last_line, python_of

from bertrain.commands import docstrings

HERE = Path(__file__).parent
OUT = ROOT / "benchmarks" / "results" / "comparison.json"
VOCABULARY = 30_522
LIMIT_S = 900  # of a question; twice as much for the time to a loss
# Spellings of special tokens of all tokenizers below; <extra_id_0> and the like are T5's.
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<|", "<pad>", "<unk>", "</s>", "<extra_id_")
TOKENIZERS = {
    "BERT": "bert-base-uncased",
    "GPT-2": "gpt2",
    "Llama 3": "llama3",
    "T5": "t5-small",
}  # names of directories
PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h
BUSY = 0.05  # of the cores' time; if other programs take more, the stamp says so
SOURCES = {  # first word of a question → the source that it measures
    "tokenizing": ("bertdata/tokenize", "bertdata/bits.py", "bertdata/jit.py"),
    "building": ("bertdata/[a-z]*.py", "bertdata/format", "bertdata/sources", "bertdata/tokenize", "bertdata/write"),
    "reading": ("bertdata/read", "bertdata/format", "bertdata/bits.py", "bertdata/jit.py"),
    "training": ("bertrain/*.py", "bertrain/models", "bertrain/optim", "bertrain/objectives", "bertdata/read"),
    "time": ("bertrain/*.py", "bertrain/models", "bertrain/optim", "bertrain/objectives", "bertdata/read"),
}
BEGIN, END = "<!-- begin: comparison -->", "<!-- end: comparison -->"
NAMES = {
    "gigatoken": "gigatoken", "tokenizers 1.0": "tokenizers 1.0rc3", "nanotoken": "nanotoken", "tokie": "tokie",
    "memmap": "NumPy memmap", "datasets": "datasets", "datatrove": "datatrove", "litdata": "litdata",
    "streaming": "mosaicml-streaming", "megatron": "Megatron",
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ measuring


def cpu_seconds() -> tuple[float, float]:
    """Seconds that all cores were busy since the machine started, and those of this process and its ended children.

    Children of ended children count too, such as those of a fork server: the kernel gives them to this process.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, softirq, stolen, *_ = (int(field) for field in file.readline().split()[1:])
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    busy = (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")
    return busy, sum(one.ru_utime + one.ru_stime for one in used)


def source_digest(question: str) -> str:
    """Return a digest of the source that a question measures, without comments, docstrings and messages."""
    found = hashlib.sha256()
    for pattern in SOURCES[question.split()[0].rstrip(",")]:
        for path in sorted(ROOT.glob(pattern)):
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                tree = ast.parse(file.read_text(encoding="utf-8"))
                for node in ast.walk(tree):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                        node.value = ""
                found.update(f"{file.relative_to(ROOT)}\n{ast.unparse(tree)}\n".encode())
    return found.hexdigest()[:16]


class Measurements:
    """measured.jsonl: the answer to each question, with the source and the settings that it depends on."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings
        text = path.read_text() if path.exists() else ""
        complete = text[: text.rfind("\n") + 1]
        if complete != text:  # a line was cut off as the disk was full or the process died
            path.write_text(complete)
        self.lines = [json.loads(line) for line in complete.splitlines()]

    def key(self, question: str) -> dict[str, Any]:
        return {"question": question, "source": source_digest(question), "settings": self.settings}

    def newest(self, question: str) -> dict[str, Any] | None:
        """Return the newest line of a question with this source and these settings."""
        key = self.key(question)
        return next((one for one in reversed(self.lines) if key.items() <= one.items()), None)

    def ask(self, question: str, measure: Callable[[], Any], *, again: bool) -> None:
        """Measure a question without a result, or any if `again`. Failures are stored, and measured again."""
        before = self.newest(question)
        if before and "reason" not in before and not again:
            print(f"{question}: measured before")
            return
        start, (busy, own) = time.perf_counter(), cpu_seconds()
        try:
            answer = {"result": measure()}
        except LeftOut as reason:
            answer = {"reason": str(reason)}
        passed, (busy_after, own_after) = time.perf_counter() - start, cpu_seconds()
        others = max(0.0, (busy_after - busy) - (own_after - own)) / passed / (os.cpu_count() or 1)
        line = {**self.key(question), **answer, "commit": commit(), "seconds": round(passed, 1),
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


def files_of(directory: Path | None, trained: Path) -> dict[str, Path]:
    """The files of the tokenizers that are there. trained: takes the place of BERT's without a directory."""
    if directory is None:
        return {"BERT": trained}
    files = {name: directory / folder / "tokenizer.json" for name, folder in TOKENIZERS.items()}
    return {name: path for name, path in files.items() if path.exists()}


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
    lines = [line for question in questions if (line := measurements.newest(question))]
    seconds = sum(line["seconds"] for line in lines)
    others = sum(line["share of other programs"] * line["seconds"] for line in lines) / max(seconds, 1e-9)
    with open("/proc/meminfo") as file:
        kilobytes = int(next(line for line in file if line.startswith("MemTotal")).split()[1])
    return {
        "date": date.today().isoformat(), "memory, GB": round(kilobytes / 1e6, 1),
        "system": platform.platform(), "corpus, MB": round(corpus.stat().st_size / 1e6, 1),
        "share of other programs": round(others, 3), "other programs ran": others > BUSY,
        "seconds": round(seconds), "packages": sorted(pin for pins in PINS.values() for pin in pins),
        "commit": commit(),
    } | measurements.settings  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- a table


def row(what: str, library: str, ours: Any, theirs: Any, unit: str, *, better: str = "more", reason: str = "") -> dict:
    """ours, theirs: figures, or None, of which `reason` says why. better: more, less, or none for no ratio."""
    times = None
    if ours and theirs and better != "none":
        times = float(f"{ours / theirs if better == 'more' else theirs / ours:.3g}")
    found = {"what": what, "library": library, "ours": ours, "theirs": theirs, "unit": unit}
    return found | {"times": times, "reason": reason}


def tokenizing(name: str, result: dict[str, Any]) -> list[dict]:
    rates, rows = result["MB/s median"], []
    for state in ("from file", "warm"):
        for library in ("tokenizers 0.23", "tokenizers 1.0", "gigatoken", "nanotoken", "tokie"):
            why = result["left out"].get(library, "")
            if not why or state == "from file":  # a reason is given once
                rates_of = (rates[f"ours {state}"], rates.get(f"{library} {state}"))
                rows.append(row(f"tokenizing, {name}, {state}", library, *rates_of, "MB/s", reason=why))
    return rows


def building(result: dict[str, Any]) -> list[dict]:
    seconds, what = result["seconds"], f"text to shards, {result['MB']:.0f} MB, whole command"
    return [
        row(
            what,
            NAMES[name],
            seconds["ours"],
            seconds.get(name),
            "s",
            better="less",
            reason=result["left out"].get(name, ""),
        )
        for name in ("datasets", "datatrove", "megatron")
    ]


def reading(result: dict[str, Any]) -> list[dict]:
    numbers, rows = result["figures"], []
    parts = {
        "masked": ("masked batches, others by the same NumPy", "Mtok/s", "more"),
        "own": ("masked batches, others by their own means", "Mtok/s", "more"),
        "unmasked": ("batches without masks", "Mtok/s", "more"),
        "cold": ("cold reading, without masks", "Mtok/s", "more"),
        "opening": ("opening to the first batch, without masks", "ms", "less"),
        "resuming": ("resuming to the first batch, without masks", "ms", "less"),
        "memory": ("memory of a reader", "MB", "less"),
    }  # fmt: skip
    for part, (what, unit, better) in parts.items():
        for name in ("memmap", "datasets", "litdata", "streaming", "megatron", "datatrove"):
            if (part, name) == ("own", "memmap"):  # it has none
                continue
            theirs, ours = (numbers.get(one, {}).get(part, {}) for one in (name, "ours"))
            why = result["left out"].get(name) or theirs.get("reason") or ""
            if unit not in ours:
                why = f"ours: {result['left out'].get('ours') or ours.get('reason')}"
            rows.append(row(what, NAMES[name], ours.get(unit), theirs.get(unit), unit, better=better, reason=why))
    return rows


def stepping(result: dict[str, Any]) -> list[dict]:
    what, rates = "training step, fp32", result["tokens/s"]
    named = {"usual": "transformers' Trainer", "sparse": "Trainer with our batches and head"}
    return [row(what, library, rates["ours"], rates[name], "tokens/s") for name, library in named.items()]


def time_to_loss(result: dict[str, Any]) -> list[dict]:
    """Of equal recipes, the time of the same steps; of ours, the time to the loss of the script. Medians of seeds."""

    def median(name: str, key: str) -> float:
        values = [seed[key] for seed in result[name]["seeds"]]
        return statistics.median(math.inf if value is None else value for value in values)

    minutes, equal = float(result["regime"].split(" minutes")[0]), "the same steps of a script like run_mlm.py"
    start, same = result["ours"]["until training"], "ours, same recipe"
    theirs = round(result["script"]["until training"] + median("script", "trained_s"), 1)
    trained = median("ours", "seconds to the loss of the script")
    seconds = None if trained == math.inf else round(start + trained, 1)
    reached, ended = (
        "time to the script's loss, each by its recipe",
        f"loss after {minutes:g} minutes, each by its recipe",
    )
    why = "" if seconds else "ours: has not reached it"
    losses = {name: median(name, "loss") for name in ("ours", same, "script")}
    return [
        row(equal, "the script", round(start + median(same, "trained_s"), 1), theirs, "s", better="less"),
        row(f"loss after {equal}", "the script", losses[same], losses["script"], "nats", better="none"),
        row(reached, "the script", seconds, theirs, "s", better="less", reason=why),
        row(ended, "the script", losses["ours"], losses["script"], "nats", better="none"),
        row(ended, "token frequencies alone", losses["ours"], median("ours", "frequencies"), "nats", better="none"),
    ]  # fmt: skip


ROWS: dict[str, Callable[[dict[str, Any]], list[dict]]] = {
    **{f"tokenizing, {name}": partial(tokenizing, name) for name in TOKENIZERS},
    "building": building, "reading": reading, "training step, fp32": stepping, "time to a loss": time_to_loss,
}  # fmt: skip


def notes(answers: dict[str, Any]) -> dict[str, str]:
    """By question: what bounds all sides, and what the figures need besides their regime."""
    results = {question: answer["result"] for question, answer in answers.items() if "result" in answer}
    found = {}
    for question, result in results.items():
        if question.startswith("tokenizing"):
            copied = result["MB/s median"]["copy in memory"]
            found[question] = f"tokenizer: {result['tokenizer']}; copying the text in memory: {copied:,.0f} MB/s"
        elif question.startswith("training step"):
            found[question] = (
                f"attention: {result['attention']}; ours has {result['share of peak']:.0%} of the speed of matrix "
                "products alone"
            )
    if "building" in results:
        least = results["building"]["seconds"]["least"]
        found["building"] = f"reading the text and writing its ids with fsync: {least:.3f} s"
    if rate := results.get("reading", {}).get("figures", {}).get("collator", {}).get("own", {}).get("Mtok/s"):
        found["reading"] = (
            f"transformers' collator alone, the own means of all but memmap and Megatron: {number(rate)} Mtok/s"
        )
    if "time to a loss" in results:
        found["time to a loss"] = results["time to a loss"]["regime"]
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


def page(data: dict[str, Any]) -> str:
    """Return what docs/benchmarks.md holds between its two comments: no ratio of a run with other programs."""
    stamped = data["stamp"]
    cpu = stamped["machine"]
    if stamped["other programs ran"]:
        return (
            f"Other programs ran during the newest run of `make bench` ({stamped['date']}); its numbers are in\n"
            "`benchmarks/results/comparison.json`."
        )
    lines = [
        f"`make bench` measured the source of commit {stamped['commit']} on {stamped['date']}: "
        f"{counted(cpu['cores'], 'core')} of {cpu['cpu']}, {stamped['corpus, MB']:.0f} MB of text, "
        f"{counted(stamped['rounds'], 'round')}.",
        "4.9 means that ours is 4.9 times as fast (or small); below 1 the other library is better.",
        "",
        "| what | ours | compared with each library |",
        "|---|---|---|",
    ]
    for what in dict.fromkeys(one["what"] for one in data["rows"]):
        rows = sorted((one for one in data["rows"] if one["what"] == what), key=lambda one: one["times"] or 0)
        mine = next((f"{number(one['ours'])} {one['unit']}" for one in rows if one["ours"] is not None), "")
        lines.append(f"| {what} | {mine} | {', '.join(compared(rows))} |")
    return "\n".join(lines)


def compared(rows: list[dict[str, Any]]) -> list[str]:
    """Return the libraries of a row with their ratios, or the reasons why there are none."""
    cells = []
    reasons: dict[str, list[str]] = {}
    for one in rows:
        if one["times"]:
            cells.append(f"{one['library']} **{number(one['times'])}**")
        elif one["reason"]:  # what the library itself says is in comparison.json
            why = "does not support this tokenizer" if "nsupported" in one["reason"] else one["reason"]
            reasons.setdefault(why, []).append(one["library"])
        else:
            cells.append(f"{one['library']} {number(one['theirs'])} {one['unit']}")
    return cells + [why if why.startswith("ours: ") else f"{', '.join(names)}: {why}" for why, names in reasons.items()]


def write(data: dict[str, Any]) -> None:
    """Write the results, and the table of the page."""
    OUT.write_text(json.dumps(data, indent=1) + "\n")
    path = ROOT / "docs" / "benchmarks.md"
    before, rest = path.read_text().split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{page(data)}\n{END}{rest.split(END)[1]}")
    print(page(data))


@click.command()
@click.option(
    "--directory", type=Path, default=Path(".bench"), show_default=True, help="Environments and all that is made."
)
@click.option("--corpus", type=Path, help="Text to use. Default: docstrings of the installed packages.")
@click.option(
    "--tokenizers", type=Path,
    help=f"Directory with tokenizer.json of {', '.join(TOKENIZERS.values())}, each in a directory of that name. "
    "Default: a WordPiece that is trained on the text, and no others.",
)  # fmt: skip
@click.option("--megabytes", default=64.0, show_default=True, help="Of docstrings, if there are as many.")
@click.option("--rounds", default=5, show_default=True, help="Of every measurement but the time to a loss.")
@click.option("--minutes", default=1.5, show_default=True, help="Of the time to a loss, for either side.")
@click.option("--steps", default=10, show_default=True, help="Of training, 5 of which are not counted.")
@click.option("--only", type=click.Choice(list(ROWS)), multiple=True, help="Measure these questions again.")
@click.option("--only-write", is_flag=True, help="Write the outputs once more from benchmarks/results/comparison.json.")
def main(
    directory: Path,
    corpus: Path | None,
    tokenizers: Path | None,
    megabytes: float,
    rounds: int,
    minutes: float,
    steps: int,
    only: tuple[str, ...],
    only_write: bool,
) -> None:
    """Measures ours beside other libraries, and writes the table."""
    if only_write:
        data = json.loads(OUT.read_text())
        write(data | {"rows": rows_of(data["measured"]), "notes": notes(data["measured"])})
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
    settings = {"machine": machine(), "text": digest(text)[:16]}
    settings |= {"rounds": rounds, "minutes": minutes, "steps": steps}
    files = files_of(tokenizers, file)
    settings["tokenizers"] = {name: digest(path)[:16] for name, path in files.items()}
    measurements = Measurements(directory / "measured.jsonl", settings)
    environments = ("--environments", directory)

    def tokenize(name: str) -> dict[str, Any]:
        if name not in files:
            raise LeftOut(f"no {TOKENIZERS[name]}/tokenizer.json; give its directory with --tokenizers")
        options = ("--rounds", rounds, *environments)
        return script("bench_tokenize.py", text, files[name], *options, limit=LIMIT_S)

    questions: dict[str, Callable[[], Any]] = {f"tokenizing, {name}": partial(tokenize, name) for name in TOKENIZERS}
    questions |= {
        "building": lambda: script("bench_build.py", text, file, "--rounds", rounds, *environments, limit=LIMIT_S),
        "reading": lambda: script(
            "bench_reading.py", shards, file, "--rounds", rounds, "--directory", directory, *environments, limit=LIMIT_S
        ),
        "training step, fp32": lambda: script(
            "bench_trainer.py", shards, "--ranks", ranks, "--rows", 32, "--steps", steps, "--rounds", rounds,
            limit=LIMIT_S,
        ),
        "time to a loss": lambda: script(
            "fixed_time.py", text, tokenizer, "--minutes", minutes, "--eager", "--tiny", "--rows", 32,
            "--eval-every", 20, "--seeds", 2, *environments, limit=2 * LIMIT_S,
        ),
    }  # fmt: skip
    for question, measure in questions.items():
        if not only or question in only:
            measurements.ask(question, measure, again=question in only)
    answers = {question: measurements.newest(question) or {"reason": "not measured"} for question in questions}
    if only:  # the other answers stay
        answers = json.loads(OUT.read_text())["measured"] | {question: answers[question] for question in only}
    stamped = stamp(text, measurements, list(questions))
    write({"stamp": stamped, "rows": rows_of(answers), "notes": notes(answers), "measured": answers})


if __name__ == "__main__":
    main()
