"""Check a run before it starts.

    bertrain doctor --data shards/ --out run/ --nproc 8 --model bert-base --global-batch-size 4096

Takes the options of bertrain pretrain and builds what it would build. Prints the phases of the run, then PASS, WARN or
FAIL for each check, and what to do. The exit code is 1 if a check fails. If none fails, it takes 25 steps for each row
length, batch size and number of layers, and prints the time of the run. It leaves no file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import torch
from transformers import PreTrainedModel

import bertdata
from bertdata import BertdataError
from bertdata.support import counted, verify
from bertrain import checkpoint, state
from bertrain.cli import command
from bertrain.config import Config
from bertrain.data import Batches, open_datasets, samples_of
from bertrain.methods import Method, methods_of, not_counted
from bertrain.models.families import family_of
from bertrain.objectives import Learner
from bertrain.plan import DURATIONS, Part, Plan, parts_of
from bertrain.pretrain import pretrain
from bertrain.ranks import World
from bertrain.trainer import (
    build_learner,
    build_model,
    build_optimizer,
    check_names,
    check_parts,
    made_with_of,
    resolve_compile,
    resolve_precision,
)

PASS, WARN, FAIL = "PASS", "WARN", "FAIL"
Finding = tuple[str, str]  # verdict, sentence
WARMUP_STEPS, TIMED_STEPS = 5, 20
SPARE = 1.2  # times the memory that is counted; buffers and fragmentation take the rest


def check(config: Config, nproc: int) -> Iterator[tuple[str, Finding]]:
    """Yield the phases and the checks of a run, with verdict and reason; a failure that later ones need is the last."""
    name = "shards"
    try:
        datasets = open_datasets(config)
        name = "samples"
        check_names(config)
        methods, on_gpu = methods_of(config), torch.cuda.is_available()
        batches = Batches(config, datasets, methods=methods, world_size=nproc, on_gpu=on_gpu)
        plan = batches.plan
        yield from (("phase", (PASS, plan.line(phase))) for phase in plan.phases)
        for shards in datasets.values():
            yield "shards", _shards(shards)
        yield from _of_rows(config, batches, nproc)
        name = "model"
        shards = next(iter(datasets.values()))  # which has the tokenizer of all
        weights, warnings = build_model(config, shards, methods=methods)
        learner = _learner(config, weights, shards, methods)
        build_optimizer(config, learner, methods)
        check_parts(config, shards, learner, plan.phases, methods)
        parameters, trained = _sizes(weights)
        size = f"{parameters:,} parameters, vocabulary {weights.config.vocab_size:,}"
        yield "model", (WARN, f"{size}; {'; '.join(warnings)}") if warnings else (PASS, size)
        run = _run(config, batches, shards, methods, learner)  # which moves the batches to the newest checkpoint
        name = "masks"  # after the model, which refuses another tokenizer, whose tokens are unknown
        yield "masks", (PASS, f"{batches.first_targets():,} targets in the first rows")
    except BertdataError as error:
        yield name, (FAIL, str(error))
        return
    passes = max([1, *(method.passes() for method in methods)])
    compiled = on_gpu and resolve_compile(config, methods, on_gpu=True)
    yield "devices", _devices(nproc)
    memory = _memory(config, plan, weights, nproc, passes, compiled=compiled)
    yield "memory", _less(memory, not_counted(methods))
    yield "disk", _less(_disk(config, parameters, trained), not_counted(methods, saved=True))
    yield "run", run


def _less(finding: Finding, left_out: str) -> Finding:
    """An estimate that leaves something out, which is no PASS then. left_out: what it says of that, or ""."""
    verdict, reason = finding
    return (WARN if left_out and verdict == PASS else verdict), reason + left_out


def _of_rows(config: Config, batches: Batches, nproc: int) -> Iterator[tuple[str, Finding]]:
    """The checks of what a run reads, but of its masks."""
    loader, plan = batches.loader, batches.plan
    tokens = sum(phase.samples() * phase.length for phase in plan.phases)
    sizes = f"{counted(loader.num_samples, 'sample')} of {loader.length} tokens an epoch, "
    sizes += f"{counted(plan.steps, 'step')}, {counted(tokens, 'token')}"
    sizes += f", {plan.samples() / loader.num_samples:.2g} epochs" * (len(plan.phases) == 1)
    yield "samples", (PASS, sizes)
    yield from (("mix", (PASS, line)) for line in batches.shares())
    padding, cropped = loader.facts["pad_share"], loader.facts["crop_share"]
    if padding > 0.1 or cropped > 0.1:
        shares = f"{padding:.0%} of all tokens are padding and {cropped:.0%} of the text is cut off"
        yield "rows", (WARN, f"{shares}; see bertdata inspect --samples {samples_of(config)} for other lengths")
    of_pass, number = plan.first_micro_batches()
    yield (
        "batch",
        (PASS, f"{plan.phases[0].rows} rows a step: {number} × {of_pass} on each of {counted(nproc, 'rank')}"),
    )
    yield from (("plan", (WARN, warning)) for warning in plan.warnings)
    largest = max(max(phase.rows) for phase in plan.phases)
    if largest >= nproc and -(-largest // nproc) * nproc > 1.1 * largest:
        yield (
            "plan",
            (WARN, f"{nproc} ranks do not share {largest} rows evenly; give a --global-batch-size that they do"),
        )
    for shards in batches.datasets.values():
        if "validation" not in shards.splits:
            reason = f"{shards.path} has no validation split, so nothing is evaluated; build with --validation 0.01"
            yield "validation", (WARN, reason)


def _shards(shards: bertdata.Dataset) -> Finding:
    if faults := verify(shards.path):
        return FAIL, f"{faults[0]}; build them again"
    documents = counted(shards.num_documents, "document")
    return PASS, f"{shards.path}: {documents}, {counted(shards.num_tokens, 'token')}, every byte as written"


def _learner(config: Config, weights: PreTrainedModel, shards: bertdata.Dataset, methods: Sequence[Method]) -> Learner:
    """What a run would train, on one CPU."""
    cpu = torch.device("cpu")
    return build_learner(config, weights, shards, World(0, 1, cpu), resolve_precision(config, cpu, weights), methods)


def _devices(nproc: int) -> Finding:
    if not torch.cuda.is_available():
        return WARN, f"no GPU that torch can use; {counted(nproc, 'rank')} on CPU cores: for small models only"
    count = torch.cuda.device_count()
    if count < nproc:
        return FAIL, f"{nproc} ranks and {counted(count, 'GPU')}; give --nproc {count}"
    return PASS, f"{count} × {torch.cuda.get_device_name(0)}"


def _sizes(weights: PreTrainedModel) -> tuple[int, int]:
    """The parameters of a model, and those that are trained."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in weights.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)


def _memory(
    config: Config,
    plan: Plan,
    weights: PreTrainedModel,
    nproc: int,
    passes: int,
    *,
    compiled: bool = False,
) -> Finding:
    """An estimate: weights, gradients, two moments, the activations of a backward pass, a copy for checkpoints.

    passes: forward passes whose activations are kept. compiled: whether the model is compiled.
    One that has a fast kernel of attention then keeps less, as an H100 showed (docs/gpu.md).
    """
    (parameters, trained), shape = _sizes(weights), weights.config
    on_gpu = torch.cuda.is_available()
    width, layers = getattr(shape, "hidden_size", 0), getattr(shape, "num_hidden_layers", 0)
    inner = getattr(shape, "intermediate_size", None) or getattr(shape, "hidden_dim", None) or 4 * width
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    size = 4 if resolve_precision(config, device, weights) == "fp32" else 2
    tokens = predicted = 0  # of a forward pass, at most
    for phase in plan.phases:
        rows, _ = plan.micro_batches(phase.length, max(phase.rows))
        slots = phase.length if family_of(shape).dense else phase.masking.num_slots(phase.length)
        tokens, predicted = max(tokens, rows * phase.length), max(predicted, rows * slots)
    is_lean = compiled and family_of(shape).isolation == "kernel" and config.attention != "math"
    kept = 12 + 1.5 * inner / max(1, width) if is_lean else 20 + 4 * inner / max(1, width)
    kept = 1 if config.gradient_checkpointing else kept
    activations = passes * tokens * width * layers * kept * size
    head = passes * predicted * shape.vocab_size * (size + 4)
    needed = (4 * parameters + 12 * trained + activations + head) * SPARE
    copied = 4 * parameters + 8 * trained
    if on_gpu:
        used = range(min(nproc, torch.cuda.device_count()))
        free, where = min(torch.cuda.mem_get_info(number)[0] for number in used), "a GPU"
    else:
        needed, where = needed * nproc + copied, "this machine"
        with open("/proc/meminfo") as file:
            free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    estimate = f"needs about {needed / 1e9:.1f} GB; {where} has {free / 1e9:.1f} GB free"
    if needed > free:
        return FAIL, f"{estimate}; give a smaller --micro-batch-size than {plan.micro_batch_size}"
    return (WARN, f"{estimate}; it may not fit") if needed > 0.85 * free else (PASS, estimate)


def _disk(config: Config, parameters: int, trained: int) -> Finding:
    directory = _existing(Path(config.out))
    names, needed = checkpoint.needed_space(config, parameters, trained)
    free = shutil.disk_usage(directory).free
    estimate = f"{names} need {needed / 1e9:.1f} GB; {free / 1e9:.1f} GB are free"
    return (FAIL, f"{estimate} at {directory}; make room or lower --keep") if needed > free else (PASS, estimate)


def _existing(path: Path) -> Path:
    """A path, or the first of the directories above it that exists."""
    while not path.exists():
        path = path.parent
    return path


def _run(
    config: Config, batches: Batches, shards: bertdata.Dataset, methods: Sequence[Method], learner: Learner
) -> Finding:
    run = Path(config.out)
    if run.exists() and not run.is_dir():
        return FAIL, f"--out {run} is a file; give a directory"
    if not os.access(parent := _existing(run), os.W_OK | os.X_OK):
        return FAIL, f"--out {run} cannot be written, as {parent} gives no permission; give another --out"
    try:
        newest, damaged = checkpoint.newest(run)
        if damaged and newest:
            return WARN, f"{damaged[0]}; a run sets it aside and continues from {newest.name}"
        if damaged:
            return FAIL, f"{damaged[0]}; move it away, or give another --out"
        if not newest:
            return PASS, f"{run} is new"
        if config.resume == "no":
            return FAIL, f"{run} holds {newest.name}; give another --out, or --resume auto"
        saved, made_with = state.read(newest), made_with_of(config)
        batches.resume(newest, saved, made_with)
        learner = _learner(config, build_model(config, shards, resume=newest, methods=methods)[0], shards, methods)
        for method in methods:
            made_with |= method.identity(learner)
        state.require_resumable(saved, state.TrainState(made_with=made_with), newest)
    except BertdataError as error:
        return FAIL, str(error)
    return PASS, f"continues from {newest.name}"


def _shape(part: Part, ranks: int) -> tuple[int, int, int | None]:
    """Return what the time of a step depends on: the row length, the rows of one of `ranks`, the number of layers."""
    return part.options.length, math.ceil(part.options.rows.mean / ranks), part.options.flat().get("layers")


def _trial(config: Config, out: str, ranks: int) -> Config:
    """Return the options of a short run, with one phase for each shape of the phases of `config`."""
    steps = WARMUP_STEPS + TIMED_STEPS
    tables = {_shape(part, ranks): table for part, table in zip(parts_of(config), config.phase or ({},), strict=True)}
    phases = tuple(
        {name: value for name, value in table.items() if name not in DURATIONS}
        | {"global_batch_size": rows, "steps": steps}
        for (_, rows, _), table in tables.items()
    )
    run: dict[str, Any] = {"out": out, "phase": phases, "steps": None, "epochs": None, "tokens": "", "resume": "auto"}
    run |= {"eval_every": steps, "save_every": steps, "log_every": WARMUP_STEPS, "save_at": (), "log_to": ()}
    return replace(config, **run)


def estimate(config: Config, nproc: int, hours: float | None) -> Iterator[tuple[str, Finding]]:
    """Train for a few steps. Yield the time of the run and, if `hours` is given, what fits into 95 % of it.

    Under torchrun all ranks must call it; only the first one yields. Yields nothing if a signal stops the steps.
    """
    is_alone = "WORLD_SIZE" not in os.environ  # torchrun divides the rows of a step itself
    ranks = nproc if is_alone and torch.cuda.is_available() else 1  # one process uses all cores
    with tempfile.TemporaryDirectory(prefix="doctor-", dir=_existing(Path(config.out))) as out:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            pretrain(_trial(config, out, ranks))
        if not _is_first():
            return
        log = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
        clock = json.loads((Path(out) / "run.json").read_text())["clock"]
    trained = {entry["step"]: entry["trained_s"] for entry in log if "trained_s" in entry}
    evaluated = {entry["step"]: entry["validation_s"] for entry in log if "validation_s" in entry}
    plan = Batches(config, open_datasets(config), methods=methods_of(config)).plan
    shapes = list(dict.fromkeys(_shape(part, ranks) for part in parts_of(config)))
    if (WARMUP_STEPS + TIMED_STEPS) * len(shapes) not in trained:
        return
    seconds = {"training": 0.0, "evaluations": 0.0}
    evaluations = max(1, plan.steps / config.eval_every) if config.eval_every else 1
    for phase, part in zip(plan.phases, parts_of(config), strict=True):
        last = (WARMUP_STEPS + TIMED_STEPS) * (1 + shapes.index(_shape(part, ranks)))
        seconds["training"] += phase.steps * (trained[last] - trained[last - TIMED_STEPS]) / TIMED_STEPS
        seconds["evaluations"] += phase.steps / plan.steps * evaluations * evaluated.get(last, 0.0)
    seconds["checkpoints at most"] = clock["waited_s"] / len(shapes) * max(1, plan.steps / config.save_every)
    growing, compiling = sum(seconds.values()), clock["compiled_s"]
    parts = ", ".join(f"{name} {number:,.1f} s" for name, number in {**seconds, "compiling": compiling}.items())
    left_out = f"; communication between the {nproc} ranks counts only under torchrun" if is_alone and nproc > 1 else ""
    yield "time", _less((PASS, f"about {timedelta(seconds=round(growing + compiling))}: {parts}"), left_out)
    if hours:
        factor = max(0, (0.95 * 3600 * hours - compiling) / growing)
        what = f"--steps {int(plan.steps * factor)}"
        if parts_of(config)[0].unit != "share":
            what = f"durations of the phases times {factor:.3g}"
        yield "hours", (PASS, f"{what} fit into 95 % of {hours:g} hours")


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def doctor(config: Config, nproc: int, hours: float | None) -> None:
    """Print the phases of a run, check its data, model, memory and disk, and take a few steps to estimate its time."""
    nproc, failed = int(os.environ.get("WORLD_SIZE", nproc)), False
    for findings in (check(config, nproc) if _is_first() else (), estimate(config, nproc, hours)):
        for name, (verdict, reason) in findings:
            failed |= verdict == FAIL
            click.echo(f"{verdict}  {name:<11}{reason}")
        if failed:
            sys.exit(1)


RANKS = click.Option(
    ["--nproc"], default=1, show_default=True, help="Number of ranks of the run.", type=click.IntRange(min=1)
)
HOURS = click.Option(
    ["--hours"],
    help="Print the number of steps that fits into 95 % of so many hours.",
    type=click.FloatRange(0, min_open=True),
)
main = command(doctor, example="bertrain doctor --data shards/ --model bert-base --nproc 8", own=[RANKS, HOURS])

if __name__ == "__main__":
    main()
