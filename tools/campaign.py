"""Training runs of options drawn at random, killed twice and resumed: each must end as if nothing had happened.

    python tools/campaign.py --count 200 --seed 0 --out campaign/
    python tools/campaign.py --count 5000 --minutes 60 --ranks 3,4 --steps 12 --out campaign/
    python tools/campaign.py --seed 0 --only 17 --out campaign/        the 17th of these runs again

A run draws its options from DIMENSIONS and `_changes`, the number of its ranks, and two stops: a signal, the ranks that
get it, and when. It is made once undisturbed, and once stopped twice and started three times. Then the last checkpoint,
the mean of the weights and log.jsonl must be the same to the bit, except for what tells the time. It prints a line for
each run, and for one that differs what differs and the command line that draws it again. The directories of such a run
stay in --out. Exit code 1 if there is one.

A process of one thread imports everything once, and is forked for each rank, so that a start takes half a second. What
is drawn is the same each time, but the machine decides what a stop hits. Linux.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import re
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM, SIGUSR1, Signals
from typing import Any, NamedTuple

import click
from forks import QUIET, differing_entries, digests, fork, load, parts, rank_environments, run, succeeds, without_times
from inputs import MODELS, as_toml, write_inputs

Options = dict[str, Any]  # of Config
Entry = dict[str, Any]  # of log.jsonl

LIMIT_S = 180  # of a start; a rank that takes longer hangs
GRACE_S = 2  # so long after a rank has failed the others are killed, as torchrun does
ENDING_S = 10  # the same for a rank that ended as Ctrl-C ends it: the others end by themselves, unless they begin
POLL_S = 0.002
HANGS = "Timeout ("  # what faulthandler prints of a rank after LIMIT_S

BASE: Options = {
    "data": ["english"],
    "model": "plain.json",
    "optimizer": "adamw",
    "precision": "fp32",
    "length": 32,
    "global_batch_size": 6,
    "lr": 3e-3,
    "log_every": 1,
    "eval_every": 0,
    "save_every": 1,
    "keep": 9,
}
"""What a run has unless something else is drawn."""


_CACHED = {"data": ["english"], "masking": "exact", "shuffle": "full", "data_seed": 3, "alpha": 0.5}
_SIZES = "layers=1:2,width=16:32:16,heads=1:2,feed_forward=24:48:24"
DIMENSIONS: list[list[Options]] = [
    [{"model": f"{name}.json"} for name in [*MODELS, "plain", "dropout", "modernbert", "modern-dropout"]],
    [{}] * 6 + [{"init": "teacher"}, {"init": "teacher", "lora": "r=4,alpha=8"}],
    [
        {},
        {},
        {"data": ["part"]},
        {"data": ["small"]},
        {"data": ["english", "part"], "weights": "0.7,0.3"},
        {"data": ["small", "english"], "weights": "0.6,0.4"},
    ],
    [{}] * 5 + [{"data_seed": 5}],
    [{}] * 3 + [{"objective": "mlm+nsp", "model": "dropout.json"}],
    [{}] * 2 + [{"isolate_documents": True}],
    [{}] * 3 + [{"masking": masking} for masking in ("bernoulli", "whole_word", "span")],
    [{}, {"shuffle": "blocks"}],
    [{"global_batch_size": size} for size in (3, 5, 6, 8)],
    [{}] * 3 + [{"micro_batch_size": size} for size in (1, 2, 3)],
    [{}, {}, {"precision": "bf16"}, {"precision": "fp16"}],
    [
        {},
        {"beta1": 0.8, "weight_decay": 0.3},
        {"optimizer": "muon", "muon_rate": 2.0},
        {"optimizer": "muon", "muon_momentum": 0.9},
        {"optimizer": "stableadamw"},
        {"optimizer": "lamb"},
    ],
    [{}, {"schedule": "cosine", "warmup": 0.0}, {"schedule": "wsd", "decay_share": 0.5, "warmup_steps": 2}],
    [{}] * 3 + [{"clip_norm": 0.1}],
    [{}] * 4
    + [{"lr_scale": ["embeddings=0.1"]}, {"lr_scale": ["orm=0", "embeddings=0.5"]}, {"lr_scale": ["embeddings=0"]}],
    [{}] * 4 + [{"elastic": "layers=1:2"}, {"elastic": _SIZES, "sub_networks": 3}],
    [{}] * 8
    + [
        {"teacher": "teacher", "distil": "logits", "temperature": 2.0, "alpha": 0.7},
        {"teacher": "teacher", "distil": "relations"},
        {"teacher": "teacher", "distil": "hidden", "alpha": 0.3},
        {"teacher": "teacher", "distil": "hidden", "distil_layers": "last"},
        {"teacher_cache": "answers"} | _CACHED,
        {"teacher_cache": "answers-again"} | _CACHED | {"data": ["small"]},
    ],
    [{}] * 3 + [{"gradient_checkpointing": True}],
    [{"save_every": number} for number in (1, 1, 1, 2, 3, 1000)],
    [{"keep": number} for number in (1, 2, 9)],
    [{"log_every": number} for number in (1, 1, 2, 3)],
    [{"eval_every": number} for number in (0, 0, 1, 2, 3)],
]
"""Each is drawn from independently of the others, but what does not go with something drawn before is left out."""

EXCLUDES = [
    ("elastic", "gradient_checkpointing"),
    ("elastic", "lora"),
    ("objective", "isolate_documents"),
    ("teacher_cache", "objective"),
    ("teacher_cache", "isolate_documents"),
    ("teacher_cache", "phase"),
    ("teacher_cache", "weights"),
    ("init", "model"),
    ("lora", "lr_scale"),
    ("warmup_steps", "phase"),
]
"""Pairs of options that are not drawn together. What bertrain refuses besides is drawn, and counted."""


def _changes(draw: random.Random) -> list[Options]:
    """One to three phases, in which anything that a phase may set may change."""
    if draw.random() < 0.5:
        return []
    shares = draw.choice([[0.5, 0.5], [0.3, 0.7], [0.7, 0.3], [0.4, 0.2, 0.4], [0.2, 0.5, 0.3]])
    phases: list[Options] = [{"share": share} for share in shares]
    growth = [1, *draw.choices([1, 2], k=len(shares) - 2), None] if draw.random() < 0.25 else [None] * len(shares)
    for phase, layers in zip(phases, growth, strict=True):
        for alternatives in _OF_PHASES:
            phase |= draw.choice(alternatives)
        if layers:
            phase["layers"] = layers
    if draw.random() < 0.2:
        phases = [{"steps": draw.randint(1, 3)} | phase for phase in phases]
        for phase in phases:
            del phase["share"]
        return [{"phase": phases, "steps": None}]
    return [{"phase": phases}]


_OF_PHASES: list[list[Options]] = [
    [{}, {}, {"length": 32}, {"length": 48}, {"length": 64}],
    [{}, {}, {"global_batch_size": 4}, {"global_batch_size": 7}, {"global_batch_size": "2..6"}],
    [{}, {}, {"mlm_probability": 0.3}, {"mask_fraction": 0.5, "random_fraction": 0.5}, {"masking": "span"}],
    [{}, {}, {"lr": 1e-3}, {"schedule": "constant", "lr": 2e-3}, {"schedule": "1-sqrt", "lr_end": 0.1, "warmup": 0.3}],
    [{}, {}, {"weight_decay": 0.3}],
    [{}, {}, {}, {"trains": "layer|attention"}],
    [
        {},
        {},
        {},
        {"data": ["part"]},
        {"data": ["small", "english"], "weights": [0.6, 0.4]},
        {"data": ["english", "part", "small"], "mix_temperature": 0.5},
    ],
]


class Stop(NamedTuple):
    """A signal to ranks of a run, as a user, a scheduler or a lack of memory sends it."""

    signal: Signals
    rank: int | None  # None: to all
    steps: int  # sent when the log or a checkpoint has so many steps more than before; -1: from the beginning
    after: float  # seconds later
    patience: float | None = None  # seconds after which all ranks get SIGKILL; None: they have all time


class Run(NamedTuple):
    """What is drawn."""

    options: Options
    ranks: int
    stops: tuple[Stop, ...]

    @property
    def steps(self) -> int:
        """The steps of the run, or of its phases together."""
        return self.options.get("steps") or sum(phase["steps"] for phase in self.options["phase"])

    def __str__(self) -> str:
        shown = {name: value for name, value in self.options.items() if BASE.get(name) != value}
        return f"{self.ranks} ranks, {json.dumps(shown)}, {', '.join(map(str, self.stops))}"


class Verdict(NamedTuple):
    """How a run went."""

    word: str  # equal, DIFFERS or refused
    lines: list[str]  # what differs, or why it was refused
    resumed: list[int]  # from the checkpoint of which step each start went on


def drawn(draw: random.Random, ranks: list[int], steps: int) -> Run:
    """A run of at most so many steps, on one of these numbers of ranks."""
    options: Options = {}
    alternatives = [draw.choice(dimension) for dimension in DIMENSIONS] + _changes(draw)
    draw.shuffle(alternatives)
    for alternative in alternatives:
        if _go_together(options, alternative):
            options |= alternative
    options = BASE | {"steps": draw.randint(min(3, steps), steps), "seed": draw.randrange(10)} | options
    if options["steps"] is None:  # the phases have steps
        del options["steps"]
    run = Run(options, draw.choice(ranks), ())
    first = draw.randrange(1, max(2, run.steps - 1))
    second = draw.randrange(max(1, run.steps - first))
    return run._replace(stops=(_stop(draw, run.ranks, first), _stop(draw, run.ranks, second)))


def _go_together(options: Options, more: Options) -> bool:
    clash = any(options.get(name, value) != value for name, value in more.items())
    pairs = [*EXCLUDES, *((other, one) for one, other in EXCLUDES)]
    return not clash and not any(one in options and other in more for one, other in pairs)


def _stop(draw: random.Random, ranks: int, steps: int) -> Stop:
    number = draw.choice([SIGKILL, SIGKILL, SIGKILL, SIGTERM, SIGINT, SIGUSR1])
    rank = draw.randrange(ranks) if draw.random() < 0.3 else None
    patience = draw.uniform(0, 0.06) if number != SIGKILL and draw.random() < 0.3 else None
    if draw.random() < 0.2:
        return Stop(number, rank, -1, draw.uniform(0, 2), patience)
    return Stop(number, rank, steps, draw.choice([0.0, draw.uniform(0, 0.02)]), patience)


# --------------------------------------------------------------------------------------------------------------- ranks


class Start(NamedTuple):
    """How the ranks of a start ended."""

    codes: list[int]
    is_stop_due: bool  # whether the run trained when a signal came that asks it to end with a checkpoint


def _rank(line: str, environment: dict[str, str]) -> int:
    os.environ.update(environment)
    os.fsync = lambda fd: None  # a signal loses nothing that a disk has not yet
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    return run(line)


def watched(processes: list[BaseProcess], out: Path, stop: Stop | None) -> Start:
    """Waits for ranks of a run in `out`, and sends them a signal when it is due."""

    def inode() -> int:  # a start replaces the log with a new file
        return (out / "log.jsonl").stat().st_ino if (out / "log.jsonl").exists() else 0

    log, saved, is_stop_due = inode(), _saved(out), False
    due_at = kill_at = failed_at = float("inf")
    try:
        while any(process.is_alive() for process in processes):
            now = time.monotonic()
            if stop:
                taken = _reached(out) - saved if inode() != log else -1  # steps of this start
                if taken >= stop.steps:
                    due_at = min(due_at, now + stop.after)
                if now >= due_at:
                    kill_at = kill_at if stop.patience is None else now + stop.patience
                    is_stop_due = stop.signal != SIGKILL and stop.patience is None and taken > 0
                    for process in processes if stop.rank is None else [processes[stop.rank]]:
                        if process.is_alive():
                            os.kill(process.pid or 0, stop.signal)
                    stop = None
            if codes := {process.exitcode for process in processes} - {None, 0}:
                failed_at = min(failed_at, now)
            if now >= kill_at or now > failed_at + (ENDING_S if codes == {130} else GRACE_S):
                break
            time.sleep(POLL_S)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return Start([process.exitcode or 0 for process in processes], is_stop_due)


def _reached(out: Path) -> int:
    """The last step that the log or a checkpoint has."""
    with contextlib.suppress(OSError):
        steps = re.findall(rb'^{"step": (\d+)[,}]', (out / "log.jsonl").read_bytes(), re.MULTILINE)
        return max([0, *map(int, steps), _saved(out)])
    return 0


def _saved(out: Path) -> int:
    """The step of the newest checkpoint, 0 without one."""
    return max((int(path.name.removeprefix("step-")) for path in out.glob("step-*")), default=0)


# --------------------------------------------------------------------------------------------------------- differences

OWN = {"step", "lr", "grad_norm", "tokens"}  # what of an entry of the log is of its step alone


def differences(whole: Path, stopped: Path, *, is_asked: bool) -> Iterator[str]:
    """What the last checkpoints and logs of two runs differ in.

    is_asked: whether a signal asked the second one to end after a step. Such a run has an entry of that step, too, and
    the next one is about fewer steps.
    """
    expected, found = _entries(whole), _entries(stopped)
    if is_asked:
        expected, found = _without_early_ends(expected, found)
    if line := differing_entries(expected, found):
        yield line
    one, two = (max(run.glob("step-*"), default=None) for run in (whole, stopped))
    if (one and one.name) != (two and two.name):
        yield f"{one and one.name} -> {two and two.name}"
    elif one and two:
        yield from _differences_of_directories(one, two)
    yield from (f"{path.name} is in the run" for path in [*stopped.glob("damaged-*"), *stopped.glob(".*.tmp")])
    facts = json.loads((stopped / "run.json").read_bytes())
    if (number := len(list(stopped.glob("step-*")))) > facts["config"]["keep"]:
        yield f"{number} checkpoints are kept"


def _entries(run: Path) -> list[Entry]:
    entries = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [without_times(entry) for entry in entries if "stream" not in entry]


def _without_early_ends(expected: list[Entry], found: list[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Leaves out the entries of steps after which a run was asked to end, and the means of the entries that follow."""
    known = {entry["step"] for entry in expected if "lr" in entry}
    kept, shorter, is_early = [], set(), False
    for entry in found:
        if "lr" in entry and entry["step"] not in known:
            is_early = True
            continue
        kept.append(entry)
        if "lr" in entry:
            shorter |= {entry["step"]} if is_early else set()
            is_early = False

    def comparable(entry: Entry) -> Entry:
        is_shorter = "lr" in entry and entry["step"] in shorter
        return {name: value for name, value in entry.items() if name in OWN} if is_shorter else entry

    return list(map(comparable, expected)), list(map(comparable, kept))


def _differences_of_directories(one: Path, two: Path) -> Iterator[str]:
    """The files of two checkpoints that differ; of those with tensors by the names of these. Not the cards."""
    files = digests(one), digests(two)
    for name in sorted((files[0].keys() | files[1].keys()) - {"README.md", "checkpoint.json"}):
        if name not in files[0] or name not in files[1]:
            yield f"{one.name}/{name} is only in {'one' if name in files[0] else 'the stopped one'}"
        elif files[0][name] != files[1][name]:
            first, second = parts(one / name), parts(two / name)
            apart = [where for where in first | second if first.get(where) != second.get(where)]
            if apart or not first:
                yield f"{one.name}/{name}: {', '.join(apart[:8])}" + f" and {len(apart) - 8} more" * (len(apart) > 8)


# ------------------------------------------------------------------------------------------------------------ campaign

BUILD = "bertdata build english.txt --tokenizer vocab.txt --sentences line"
ANSWER = "bertrain teacher --model teacher --data english --top-k 8 --length 32 --seed 3 --yes"
INPUTS = [
    f"{BUILD} --out english --shard-size 20000 --validation 0.05",
    f"{BUILD} --out part --max-documents 150 --validation 0.1",
    f"{BUILD} --out small --max-documents 25 --validation 0",
    "bertrain pretrain --config teacher.toml --out teacher",
    f"{ANSWER} --out answers --max-samples 200",
    f"{ANSWER} --out answers-again --data small --variants 1",
]
"""What is made of the text: datasets of one vocabulary, a trained teacher and its answers."""


def made(chosen: Run, folder: Path) -> Verdict:
    """Makes a run undisturbed, and once more with its stops, in a new folder. The present one has the inputs."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    file, steps, resumed, is_asked = folder / "options.toml", chosen.steps, list[int](), False
    file.write_text(as_toml(chosen.options), encoding="utf-8")

    def once(out: Path, said: Path, stop: Stop | None) -> tuple[Start, str]:
        """A start, and why it ended as no start may."""
        line = shlex.join(["bertrain", "pretrain", "--config", str(file), "--out", str(out)])
        ranks = [fork(partial(_rank, line, environment), said) for environment in rank_environments(chosen.ranks)]
        ended, words = watched(ranks, out, stop), said.read_text(errors="replace")
        is_done = (out / f"step-{steps:08d}" / "checkpoint.json").exists()
        if HANGS in words:
            return ended, f"hangs: {words[words.index(HANGS) :][:2000]}"
        is_wrong = any(ended.codes) if stop is None else ended.is_stop_due and not set(ended.codes) <= {0, 130}
        if is_wrong or (stop is None and not is_done):
            return ended, f"ends with {ended.codes} after {stop}: {' / '.join(words.splitlines()[-4:])[-600:]}"
        return ended, ""

    whole, stopped = folder / "whole", folder / "stopped"
    ended, fault = once(whole, folder / "whole.said", None)
    said = (folder / "whole.said").read_text(errors="replace")
    if 2 in ended.codes and (sentences := re.findall("^Error: (.*)", said, re.MULTILINE)):
        return Verdict("refused", [sentences[0]], [])
    if fault:
        return Verdict("DIFFERS", [f"the undisturbed run {fault}"], [])
    for number, stop in enumerate([*chosen.stops, None], 1):
        resumed.append(_saved(stopped))
        ended, fault = once(stopped, folder / "stopped.said", stop)
        is_asked = is_asked or (stop is not None and stop.signal != SIGKILL)
        if fault:
            return Verdict("DIFFERS", [f"start {number} {fault}"], resumed)
    lines = list(differences(whole, stopped, is_asked=is_asked))
    return Verdict("DIFFERS" if lines else "equal", lines, resumed)


def prepare(said: Path) -> None:
    """Writes what runs read into the present folder, and loads what they import and compile, so that forks have it."""

    def make() -> int:
        write_inputs(Path())
        Path("teacher.toml").write_text(as_toml(BASE | {"seed": 3, "steps": 4}))
        return run(" ; ".join(INPUTS))

    def warm() -> int:
        import peft  # noqa: F401

        import bertrain.lab.distillation.objective  # noqa: F401

        return run("bertrain pretrain --config teacher.toml --out warm")

    succeeds(make, said)
    import bertdata

    shards = bertdata.open("english")
    for samples in ("windows", "pairs", "packed"):
        for policy in ("exact", "bernoulli", "whole_word", "span"):
            masking = bertdata.Masking(probability=0.15, policy=policy)
            next(bertdata.Loader(shards, length=32, global_batch_size=4, samples=samples, masking=masking))
    load(warm, said)


@click.command()
@click.option("--count", default=200, show_default=True, help="Runs.")
@click.option("--seed", default=0, show_default=True, help="What is drawn.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Directory of inputs, and of what differs.")
@click.option("--minutes", type=float, default=1e6, help="Draw no more runs after so long.")
@click.option("--ranks", default="1,2,3,4", show_default=True, help="Numbers of ranks to draw from.")
@click.option("--steps", default=6, type=click.IntRange(3), show_default=True, help="Most steps of a run.")
@click.option("--only", type=int, help="Make this run alone, and keep its directories.")
def main(count: int, seed: int, out: Path, minutes: float, ranks: str, steps: int, only: int | None) -> None:
    """Training runs of options drawn at random, killed twice and resumed, compared with undisturbed ones to the bit."""
    out = out.resolve()
    inputs, said = out / "inputs", out / "said"
    os.environ |= QUIET | {"BERTDATA_CACHE": str(out / "cache")}
    shutil.rmtree(inputs, ignore_errors=True)
    inputs.mkdir(parents=True)
    os.chdir(inputs)
    prepare(said)
    again = [sys.executable, *sys.argv[:1], "--seed", seed, "--ranks", ranks, "--steps", steps, "--out", out, "--only"]
    words, began = Counter[str](), time.monotonic()
    for number in range(count) if only is None else [only]:
        if time.monotonic() > began + 60 * minutes:
            break
        chosen = drawn(random.Random(f"{seed} {number}"), [*map(int, ranks.split(","))], steps)
        verdict = made(chosen, out / f"{number}")
        words[verdict.word] += 1
        resumed = f", resumed from {' and '.join(map(str, verdict.resumed[1:]))}" if verdict.resumed else ""
        click.echo("\n    ".join([f"{number}: {chosen}{resumed}: {verdict.word}", *verdict.lines]))
        if verdict.word == "DIFFERS":
            click.echo(f"    {shlex.join([*map(str, again), str(number)])}")
        elif only is None:
            shutil.rmtree(out / f"{number}")
    num_made, seconds = words["equal"] + words["DIFFERS"], time.monotonic() - began
    click.echo(f"{num_made} runs ({seconds:.0f} s); {words['refused']} refused; {words['DIFFERS']} differ")
    raise SystemExit(words["DIFFERS"] > 0)


if __name__ == "__main__":
    main()
