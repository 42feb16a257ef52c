"""Check a run before it starts.

    bertrain doctor --data shards/ --out run/ --nproc 8 --model bert-base --global-batch-size 4096

Takes the options of bertrain pretrain and builds what it would build, without training. Prints the phases of the run,
then PASS, WARN or FAIL for each check, and what to do. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import torch
from transformers import PreTrainedModel

import bertdata
from bertdata.errors import BertdataError, DatasetError, counted
from bertdata.format.verify import verify
from bertrain.methods import Method, methods_of, not_counted
from bertrain.models.families import family_of
from bertrain.objectives import Learner
from bertrain.options.config import Config
from bertrain.options.flags import command
from bertrain.run import assemble, rundir, state
from bertrain.run.batches import Batches
from bertrain.run.schedule import Plan
from bertrain.runtime.dist import World

PASS, WARN, FAIL = "PASS", "WARN", "FAIL"
Finding = tuple[str, str]  # verdict, sentence
SPARE = 1.2  # times the memory that is counted; buffers and fragmentation take the rest


def check(config: Config, nproc: int) -> Iterator[tuple[str, Finding]]:
    """Yield the phases and the checks of a run, with verdict and reason; a failure that later ones need is the last."""
    name = "shards"
    try:
        datasets = assemble.datasets(config)
        name = "samples"
        assemble.check_names(config)
        methods, on_gpu = methods_of(config), torch.cuda.is_available()
        batches = Batches(config, datasets, methods=methods, world_size=nproc, on_gpu=on_gpu)
        plan = batches.plan
        yield from (("phase", (PASS, plan.line(phase))) for phase in plan.phases)
        for shards in datasets.values():
            yield "shards", _shards(shards)
        yield from _of_rows(config, batches, nproc)
        name = "model"
        shards = next(iter(datasets.values()))  # which has the tokenizer of all
        weights, warnings = assemble.model(config, shards, methods=methods)
        learner = _learner(config, weights, shards, methods)
        assemble.optimizer(config, learner, methods)
        assemble.check_parts(config, shards, learner, plan.phases, methods)
        parameters, trained = _sizes(weights)
        size = f"{parameters:,} parameters, vocabulary {weights.config.vocab_size:,}"
        yield "model", (WARN, f"{size}; {'; '.join(warnings)}") if warnings else (PASS, size)
        name = "masks"  # after the model, which refuses another tokenizer, whose tokens are unknown
        yield "masks", (PASS, f"{batches.first_targets():,} targets in the first rows")
    except BertdataError as error:
        yield name, (FAIL, str(error))
        return
    passes = max([1, *(method.passes() for method in methods)])
    compiled = on_gpu and assemble.compiles(config, methods, on_gpu=True)
    yield "devices", _devices(nproc)
    memory = _memory(config, plan, weights, nproc, passes, compiled=compiled)
    yield "memory", _less(memory, not_counted(methods))
    yield "disk", _less(_disk(config, parameters, trained), not_counted(methods, saved=True))
    yield "run", _run(config, batches, shards, methods, learner)


def _less(finding: Finding, left_out: str) -> Finding:
    """An estimate that leaves something out, which is no PASS then. left_out: what it says of that, or ""."""
    verdict, reason = finding
    return (WARN if left_out and verdict == PASS else verdict), reason + left_out


def _of_rows(config: Config, batches: Batches, nproc: int) -> Iterator[tuple[str, Finding]]:
    """The checks of what a run reads, but of its masks."""
    loader, plan = batches.loader, batches.plan
    steps = counted(plan.steps, "step") if not plan.seconds else f"{plan.seconds:,.0f} seconds"
    sizes = f"{counted(loader.num_samples, 'sample')} of {loader.length} tokens an epoch, {steps}"
    if plan.seconds is None:
        sizes += f", {counted(sum(phase.samples() * phase.length for phase in plan.phases), 'token')}"
        sizes += f", {plan.samples() / loader.num_samples:.2g} epochs" * (len(plan.phases) == 1)
    yield "samples", (PASS, sizes)
    for line in batches.shares():
        yield "mix", (PASS, line)
    facts = loader.facts
    if facts["pad_share"] > 0.1 or facts["crop_share"] > 0.1:
        shares = (
            f"{facts['pad_share']:.0%} of all tokens are padding and {facts['crop_share']:.0%} of the text is cut off"
        )
        yield "rows", (WARN, f"{shares}; see bertdata inspect --samples {assemble.samples(config)} for other lengths")
    yield "batch", _batch(plan, nproc)
    first = [warning for warning in plan.warnings if "warmup" in warning]
    curve = plan.phases[0].rate
    share = f"{curve.warmup_steps:,} of {curve.steps:,} steps"
    if plan.seconds:
        share = f"{curve.warmup_steps / curve.steps:.0%} of the time"
    yield "warm-up", (WARN, first[0]) if first else (PASS, share)
    for shards in batches.datasets.values():
        if "validation" not in shards.splits:
            reason = f"{shards.path} has no validation split, so nothing is evaluated; build with --validation 0.01"
            yield "validation", (WARN, reason)


def _shards(shards: bertdata.Dataset) -> Finding:
    if faults := verify(shards.path):
        return FAIL, f"{faults[0]}; build them again"
    documents = counted(shards.num_documents, "document")
    return PASS, f"{shards.path}: {documents}, {shards.num_tokens:,} tokens, every byte as written"


def _learner(config: Config, weights: PreTrainedModel, shards: bertdata.Dataset, methods: Sequence[Method]) -> Learner:
    """What a run would train, on one CPU."""
    cpu = torch.device("cpu")
    return assemble.learner(
        config, weights, shards, World(0, 1, cpu), assemble.precision(config, cpu, weights), methods
    )


def _batch(plan: Plan, nproc: int) -> Finding:
    ranks = "one rank" if nproc == 1 else f"each of {nproc} ranks"
    of_pass, number = plan.first_micro_batches()
    shape = f"{plan.phases[0].rows} rows a step: {number} × {of_pass} on {ranks}"
    others = [warning for warning in plan.warnings if "warmup" not in warning]
    if others:
        return WARN, f"{shape}; {others[0]}; give another --global-batch-size"
    largest = max(max(phase.rows) for phase in plan.phases)
    if -(-largest // nproc) * nproc > 1.1 * largest:
        return WARN, f"{shape}; some ranks wait for others; make the batch a multiple of the ranks"
    return PASS, shape


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
    size = 4 if assemble.precision(config, device, weights) == "fp32" else 2
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
    names, needed = rundir.needed_space(config, parameters, trained)
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
        newest, damaged = rundir.newest(run)
    except DatasetError as error:
        return FAIL, str(error)
    if damaged and newest:
        return WARN, f"{damaged[0]}; a run sets it aside and continues from {newest.name}"
    if damaged:
        return FAIL, f"{damaged[0]}; move it away, or give another --out"
    if not newest:
        return PASS, f"{run} is new"
    if config.resume == "no":
        return FAIL, f"{run} holds {newest.name}; give another --out, or --resume auto"
    try:
        saved = state.read_to_resume(newest)
        made_with = assemble.made_with(config)
        saved.require_made_with(newest, made_with)
        batches.resume(newest, saved)
        learner = _learner(config, assemble.model(config, shards, resume=newest, methods=methods)[0], shards, methods)
        for method in methods:
            made_with |= method.identity(learner)
        saved.require_made_with(newest, dict.fromkeys(saved.made_with) | made_with)
    except BertdataError as error:
        return FAIL, str(error)
    return PASS, f"continues from {newest.name}"


def doctor(config: Config, nproc: int) -> None:
    """Print the phases of a run, and check it: shards, samples, batch, warm-up, model, devices, memory, disk."""
    failed = False
    for name, (verdict, reason) in check(config, nproc):
        failed |= verdict == FAIL
        click.echo(f"{verdict}  {name:<11}{reason}")
    if failed:
        sys.exit(1)


RANKS = click.Option(
    ["--nproc"], default=1, show_default=True, help="Number of ranks of the run.", type=click.IntRange(min=1)
)
main = command(doctor, example="bertrain doctor --data shards/ --model bert-base --nproc 8", own=[RANKS])

if __name__ == "__main__":
    main()
