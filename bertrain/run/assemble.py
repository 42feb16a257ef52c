"""A Config → the parts of a run: loader, model, learner. A run and several commands use it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

import bertdata
from bertdata.errors import UsageError
from bertrain.methods import LearnerSetting, Method
from bertrain.models import attention, build, checks, pretrained
from bertrain.models.families import family_of
from bertrain.objectives import OBJECTIVES, Learner, Objective
from bertrain.optim import OPTIMIZERS, SCHEDULES, optimizers
from bertrain.options.config import Config, pick
from bertrain.options.fields import flag
from bertrain.run import rates, rundir
from bertrain.run.log import Sources
from bertrain.run.phases import Phase, masking_of
from bertrain.runtime import feed
from bertrain.runtime.dist import World

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_names(config: Config) -> None:
    """Raises UsageError for unknown objectives, optimizers and schedules."""
    objectives(config)
    pick(OPTIMIZERS, config.optimizer, "--optimizer")
    for part in config.parts:
        pick(SCHEDULES, part.options.schedule, "--schedule")


def objectives(config: Config) -> dict[str, type[Objective]]:
    """The objectives that --objective names, in its order. Raises UsageError for unknown names."""
    names = config.objective.split("+")
    if len(set(names)) < len(names):
        sentence = f"--objective {config.objective} names an objective twice; name each once"
        raise UsageError(sentence, "malformed", option="objective", given=config.objective)
    return {name: pick(OBJECTIVES, name, "--objective") for name in names}


def samples(config: Config) -> str:
    """The kind of rows a run reads: what --isolate-documents or an objective needs, else windows."""
    needed = {kind.samples for kind in objectives(config).values() if kind.samples}
    needed |= {"packed"} if config.isolate_documents else set()
    if len(needed) > 1:
        sentence = (
            f"--objective {config.objective} needs rows of {' and of '.join(sorted(needed))}"
            + " (--isolate-documents: packed)" * config.isolate_documents
            + "; leave one of them out"
        )
        raise UsageError(sentence, "conflict", option="objective", given=config.objective)
    return next(iter(needed), "windows")


def datasets(config: Config) -> dict[str, bertdata.Dataset]:
    """Opens the datasets of a run, by path. Raises UsageError unless all have the same tokenizer."""
    opened = {path: bertdata.open(path) for path in config.paths}
    if len(opened) > 1:
        bertdata.Loader([(shards, 1) for shards in opened.values()], masking=None)  # which refuses others
    return opened


def loader(
    config: Config,
    shards: bertdata.Dataset | Sources,
    *,
    length: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    variants: int | None = None,
    masking: bertdata.Masking | None = None,
    methods: Sequence[Method] = (),
    starts: Sequence[int] = (),
) -> bertdata.Loader:
    """The batches of a run, for one rank.

    length: None for that of the config.
    variants, starts: as Loader has them.
    masking: None for that of the first rows.
    methods: whose options of the loader are given.
    """
    further: dict[str, Any] = {}
    for method in methods:
        further |= method.loader_options()
    return bertdata.Loader(
        shards,
        length=length or config.length,
        global_batch_size=config.rows.first,
        seed=config.seed if config.data_seed is None else config.data_seed,
        rank=rank,
        world_size=world_size,
        samples=samples(config),
        shuffle=config.shuffle,
        masking=masking or masking_of(config),
        variants=variants,
        starts=starts,
        **further,
    )


def model(
    config: Config,
    shards: bertdata.Dataset,
    phase: Phase | None = None,
    *,
    resume: Path | None = None,
    methods: Sequence[Method] = (),
) -> tuple[PreTrainedModel, list[str]]:
    """The model of a run, and warnings: from a checkpoint to resume, from --init, or with random weights.

    phase: what methods change for it; None for the complete model.
    methods: those of the run.
    """
    nsp = "nsp" in objectives(config)
    options: dict[str, Any]
    torch.manual_seed(bertdata.key(config.seed, "init") >> 1)  # for the weights that --init lacks
    source = next((given for method in methods if (given := method.source(config, resume))), None)
    if source or (config.init and not resume):
        frozen_by = next((flag(method.frozen_by) for method in methods if method.frozen_by), None)
        options = {"length": config.longest, "nsp": nsp, "frozen_by": frozen_by}
        weights, warnings = pretrained.start_from(rundir.resolved(source or config.init, "init"), shards, **options)
    elif resume:
        weights, warnings = pretrained.load(resume, nsp=nsp), []
        checks.check_length(config.longest, weights.config, resume)
    else:

        def configure(made: PreTrainedConfig) -> None:
            if phase:
                for method in methods:
                    method.configure(made, phase)

        special, length = shards.special_tokens, config.longest
        weights, warnings = build.build(
            config.model, special, length=length, seed=config.seed, nsp=nsp, configure=configure
        )
    for method in methods:
        method.change_model(weights, config, resume)
    if not nsp:  # which is of families that are known to
        checks.check_runs(weights, length=config.longest)
    return weights, [*warnings, *checks.slower(weights)]


def learner(
    config: Config,
    weights: PreTrainedModel,
    shards: bertdata.Dataset,
    ranks: World,
    precision: str,
    methods: Sequence[Method] = (),
) -> Learner:
    """The module to train, on its device: the model, its objectives, and what the methods of the run add."""
    on_gpu = ranks.device.type == "cuda"
    if config.attention == "auto":
        attention.choose_attention(weights, bf16=precision == "bf16", on_gpu=on_gpu, length=config.longest)
    has_windows = precision != "fp32" and feed.has_kernel(ranks.device)
    if on_gpu or has_windows:
        attention.leave_out_masks(weights, in_windows=has_windows)
    torch.manual_seed(bertdata.key(config.seed, "objectiv") >> 1)
    parts = {name: kind(weights, config) for name, kind in objectives(config).items()}
    setting = LearnerSetting(config, shards, ranks.device, precision)
    for method in methods:
        method.objectives(parts, weights, setting)
    made = Learner(weights, parts, isolate=config.isolate_documents)
    for method in methods:
        made = method.learner(made, setting)
    return made.to(ranks.device).train()


def optimizer(config: Config, learner: Learner, methods: Sequence[Method]) -> torch.optim.Optimizer:
    """The optimizer of a run."""
    made = optimizers.build(learner, config)
    for method in methods:
        method.optimizer(made, learner)
    return made


def compiles(config: Config, methods: Sequence[Method], *, on_gpu: bool) -> bool:
    """--compile, resolved."""
    automatic = on_gpu and all(method.can_compile(config) for method in methods)
    return config.compile == "on" or (config.compile == "auto" and automatic)


def check_parts(
    config: Config, shards: bertdata.Dataset, learner: Learner, phases: Sequence[Phase], methods: Sequence[Method]
) -> None:
    """Raises UsageError for a model that cannot follow the phases, and for patterns that match no parameter.

    phases: the one under way and those ahead. Call `optimizer` first.
    """

    def build_model(phase: Phase | None) -> PreTrainedModel:
        return model(config, shards, phase, methods=methods)[0]

    later = [name for method in methods for name in method.check_model(config, learner, phases, build_model)]
    trained = [name for name, parameter in learner.model.named_parameters() if parameter.requires_grad]
    optimizers.check_scales([*learner.sizes, *later], config)
    for before, phase in zip((phases[0], *phases), phases, strict=False):
        if any(method.remake(before, phase) for method in methods):
            trained = [name for name, parameter in build_model(phase).named_parameters() if parameter.requires_grad]
        check_trains(phase, trained)


def check_trains(phase: Phase, names: Sequence[str]) -> None:
    """Raises UsageError for a phase that would train nothing. names: of the parameters that can be trained."""
    if not any(re.search(phase.trains, name) for name in names):
        sentence = (
            f"[[phase]] {phase.number}: trains {phase.trains!r} matches none of the {len(names)} parameters that can "
            f"be trained, such as {names[0]} and {names[-1]}; correct the pattern, or leave it out"
        )
        raise UsageError(sentence, "no-match", option="trains", given=phase.trains)


def precision(config: Config, device: torch.device, weights: PreTrainedModel, *, option: str = "precision") -> str:
    """--precision, resolved: fp32, bf16 or fp16. Raises UsageError for one that the model cannot compute in.

    option: eval_precision for that of evaluations.
    """
    half, given = family_of(weights).half, str(getattr(config, option))
    if given not in ("auto", "fp32") and not half:
        sentence = f"{weights.config.model_type} computes only in fp32; give {flag(option)} fp32"
        raise UsageError(sentence, "unsupported", option=option, given=given)
    if given != "auto":
        return given
    if device.type != "cuda" or not half:
        return "fp32"
    if option == "eval_precision":
        return precision(config, device, weights)
    return "bf16" if rates.has_bf16(device) else "fp16"


def autocast(device: torch.device, precision: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A function that makes the context in which forward passes run."""
    dtype = DTYPES[precision]
    return lambda: torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext()


def made_with(config: Config) -> dict[str, str | None]:
    """The options that a run keeps to its end, by what they contain, not by where that is."""
    start = rundir.resolved(config.init, "init") or config.model
    return {
        "model": build.identity(start),
        "optimizer": config.optimizer,
        "lr-scale": " ".join(config.lr_scale),
        "seed": str(config.seed),
    }
