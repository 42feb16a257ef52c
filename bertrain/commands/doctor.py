"""Check a run before it starts.

    bertrain doctor --data shards/ --out run/ --nproc 8 --model bert-base --global-batch-size 4096

The command accepts the options of bertrain pretrain and builds the parts of this run. It prints the phases, then PASS,
WARN or FAIL for each check, with advice. The exit code is 1 if a check fails. If none fails, it runs 25 steps for each
row length, batch size and number of layers, and prints the time, memory and disk space of the run. It leaves no
file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import torch

from bertdata import BertdataError
from bertdata.support import counted, verify
from bertrain import checkpoint
from bertrain.cli import doctor as main
from bertrain.config import DURATIONS, Config, default_out
from bertrain.data import samples_of
from bertrain.plan import Plan, mean_rows, options_of
from bertrain.pretrain import Pretraining, pretrain
from bertrain.ranks import World

PASS, WARN, FAIL = "PASS", "WARN", "FAIL"
Finding = tuple[str, str]  # (verdict, message)
WARMUP_STEPS, TIMED_STEPS = 5, 20


def build(config: Config, nproc: int) -> Pretraining:
    """Return the parts of a run on rank 0. Changes no file. Raises the errors that would end the run."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Pretraining(config, World(0, nproc, device), checkpoint.newest(Path(config.out))[0])


def check(run: Pretraining) -> Iterator[tuple[str, Finding]]:
    """Yield the phases, and the checks of a run that need no training steps."""
    plan, loader, nproc = run.stream.plan, run.stream.loader, run.ranks.world_size
    yield from (("phase", (PASS, plan.line(phase))) for phase in plan.phases)
    for path, shards in run.stream.datasets.items():
        documents = f"{counted(shards.num_documents, 'document')}, {counted(shards.num_tokens, 'token')}"
        faults = verify(shards.path)
        yield "shards", (FAIL, f"{faults[0]}; build them again") if faults else (PASS, f"{path}: {documents}")
        if "validation" not in shards.splits:
            yield "shards", (WARN, f"{path} has no validation split for evaluations; build with --validation 0.05")
    tokens = sum(phase.samples() * phase.options.length for phase in plan.phases)
    sizes = f"{counted(loader.num_samples, 'sample')} of {loader.length} tokens an epoch, "
    sizes += f"{counted(plan.steps, 'step')}, {counted(tokens, 'token')}"
    sizes += f", {plan.samples() / loader.num_samples:.2g} epochs" * (len(plan.phases) == 1)
    yield "samples", (PASS, sizes)
    yield from (("mix", (PASS, line)) for line in run.stream.describe_mix())
    padding, cropped = loader.facts["pad_share"], loader.facts["crop_share"]
    if padding > 0.1 or cropped > 0.1:
        shares = f"{padding:.0%} of all tokens are padding and {cropped:.0%} of the text is cut off"
        yield "rows", (WARN, f"{shares}; see bertdata inspect --samples {samples_of(run.config)} for other lengths")
    size, number = plan.first_micro_batches()
    rows = (
        f"{plan.phases[0].options.global_batch_size} rows a step: {number} × {size} on each of {counted(nproc, 'rank')}"
    )
    yield "batch", (PASS, rows)
    yield from (("plan", (WARN, warning)) for warning in plan.warnings)
    model = run.trainer.learner.model
    about = f"{sum(weight.numel() for weight in model.parameters()):,} parameters"
    yield "model", (WARN if run.warnings else PASS, "; ".join([about, *run.warnings]))
    yield "devices", _devices(nproc)
    yield "run", _directory(Path(run.config.out))


def _devices(nproc: int) -> Finding:
    if not torch.cuda.is_available():
        return WARN, f"no GPU that torch can use; {counted(nproc, 'rank')} on CPU cores: for small models only"
    count = torch.cuda.device_count()
    if count < nproc:
        return FAIL, f"{nproc} ranks and {counted(count, 'GPU')}; give --nproc {count}"
    return PASS, f"{count} × {torch.cuda.get_device_name(0)}"


def _directory(out: Path) -> Finding:
    """Return the check of the output directory: whether a run can write to it, and what it resumes from."""
    if not ((parent := _existing(out)).is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        return FAIL, f"--out {out} cannot be written, because {parent} is a file or read-only; give a different --out"
    newest, damaged = checkpoint.newest(out)
    if damaged and not newest:
        return FAIL, f"{damaged[0]}; move it away, or give a different --out"
    begins = f"continues from {newest.name}" if newest else f"{out} is new"
    return (WARN, f"{damaged[0]}; a run renames it and {begins}") if damaged else (PASS, begins)


def _existing(path: Path) -> Path:
    """Return the path if it exists, else the nearest parent directory that exists."""
    while not path.exists():
        path = path.parent
    return path


def _shape(options: Config, ranks: int) -> tuple[int, int, int | None]:
    """Return what determines the time of a step: row length, rows on one of `ranks`, and number of layers."""
    return options.length, math.ceil(mean_rows(options) / ranks), options.flat().get("layers")


def _trial(config: Config, out: str, ranks: int) -> Config:
    """Return the options of a short run, with one phase for each shape in the phases of `config`."""
    steps = WARMUP_STEPS + TIMED_STEPS
    tables = {_shape(each, ranks): table for each, table in zip(options_of(config), config.phase or ({},), strict=True)}
    phases = tuple(
        {name: value for name, value in table.items() if name not in DURATIONS}
        | {"global_batch_size": rows, "steps": steps}
        for (_, rows, _), table in tables.items()
    )
    run: dict[str, Any] = {"out": out, "phase": phases, "steps": None, "epochs": None, "tokens": "", "resume": "auto"}
    run |= {"eval_every": steps, "save_every": steps, "log_every": WARMUP_STEPS, "save_at": (), "log_to": ()}
    return replace(config, **run)


def estimate(config: Config, plan: Plan | None, nproc: int, hours: float | None) -> Iterator[tuple[str, Finding]]:
    """Train for a few steps. Yield time, memory and disk space and, with `hours`, the steps that fit into 95 % of it.

    Under torchrun all ranks must call it; only rank 0 has a plan and yields. It yields nothing if a signal stops the
    steps.
    """
    is_alone = "WORLD_SIZE" not in os.environ  # under torchrun, the rows of a step are divided already
    ranks = nproc if is_alone and torch.cuda.is_available() else 1  # on CPUs, one process uses all cores
    parent = _existing(Path(config.out))
    with tempfile.TemporaryDirectory(prefix="doctor-", dir=parent) as out:
        trial = _trial(config, out, ranks)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            pretrain(trial)
        if plan is None:
            return
        log = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
        last = (WARMUP_STEPS + TIMED_STEPS) * len(trial.phase)
        if last not in (entry.get("step") for entry in log if "trained_s" in entry):
            return
        clock = json.loads((Path(out) / "run.json").read_text())["clock"]
        saved = sum(path.stat().st_size for path in (checkpoint.newest(Path(out))[0] or Path(out)).rglob("*"))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
    needed = max(entry.get("memory_bytes", 0) for entry in log)
    verdict = WARN if needed > 0.9 * total else PASS
    yield "memory", (verdict, f"{needed / 1e9:.1f} of {total / 1e9:.1f} GB in these steps; --micro-batch-size sets it")
    number, free = config.keep + sum(map(len, config.milestones.values())) + 1, shutil.disk_usage(parent).free
    space = f"{counted(number, 'checkpoint')} need {number * saved / 1e9:.1f} GB; {free / 1e9:.1f} GB are free"
    yield "disk", (FAIL, f"{space} at {parent}; make room or lower --keep") if number * saved > free else (PASS, space)
    seconds, compiling = _seconds(config, plan, log, clock, ranks), clock["compiled_s"]
    growing = sum(seconds.values())
    parts = ", ".join(f"{name} {number:,.1f} s" for name, number in {**seconds, "compiling": compiling}.items())
    spent = f"about {timedelta(seconds=round(growing + compiling))}: {parts}"
    if is_alone and nproc > 1:
        yield "time", (WARN, f"{spent}; communication between the {nproc} ranks counts only under torchrun")
    else:
        yield "time", (PASS, spent)
    if hours:
        factor = max(0, (0.95 * 3600 * hours - compiling) / growing)
        what = f"--steps {int(plan.steps * factor)}"
        if config.phase and not options_of(config)[0].share:
            what = f"durations of the phases times {factor:.3g}"
        yield "hours", (PASS, f"{what} fit into 95 % of {hours:g} hours")


def _seconds(
    config: Config, plan: Plan, log: list[dict[str, Any]], clock: dict[str, float], ranks: int
) -> dict[str, float]:
    """Return the seconds of a run by kind of work, without compiling. log, clock: those of the trial."""
    trained, evaluated = (
        {entry["step"]: entry[name] for entry in log if name in entry} for name in ("trained_s", "validation_s")
    )
    shapes = list(dict.fromkeys(_shape(phase.options, ranks) for phase in plan.phases))
    evaluations = max(1, plan.steps / config.eval_every) if config.eval_every else 1
    training = evaluating = 0.0
    for phase in plan.phases:
        last = (WARMUP_STEPS + TIMED_STEPS) * (1 + shapes.index(_shape(phase.options, ranks)))
        training += phase.steps * (trained[last] - trained[last - TIMED_STEPS]) / TIMED_STEPS
        evaluating += phase.steps / plan.steps * evaluations * evaluated.get(last, 0.0)
    saving = clock["waited_s"] / len(shapes) * max(1, plan.steps / config.save_every)
    return {"training": training, "evaluations": evaluating, "checkpoints at most": saving}


def _findings(config: Config, nproc: int, hours: float | None) -> Iterator[tuple[str, Finding]]:
    """Yield all checks on rank 0. After a failed check, only checks without training steps follow."""
    plan, failed = None, False
    config = config if config.out else replace(config, out=str(checkpoint.free(Path(default_out(config)))))
    if os.environ.get("RANK", "0") == "0":
        try:
            run = build(config, nproc)
        except BertdataError as error:
            yield "run", (FAIL, str(error))
            return
        plan = run.stream.plan
        for name, finding in check(run):
            failed |= finding[0] == FAIL
            yield name, finding
        del run  # frees its memory
    if not failed:
        yield from estimate(config, plan, nproc, hours)


def doctor(config: Config, nproc: int, hours: float | None) -> None:
    """Print the phases of a run, check what it needs, and take a few steps to measure its time, memory and disk space.

    Under torchrun the steps are those of all ranks.
    """
    failed = False
    for name, (verdict, reason) in _findings(config, int(os.environ.get("WORLD_SIZE", nproc)), hours):
        failed |= verdict == FAIL
        click.echo(f"{verdict}  {name:<11}{reason}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
