"""A Config → the parts of a run: loader, model, learner. Pre-training, the doctor and the teacher all use it."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import PreTrainedModel

import bertdata
from bertdata.errors import UsageError
from bertdata.format.answers import TeacherCache
from bertdata.tokenize.tokenizer import TOKENIZER
from bertrain.lab import adapters, side_channel
from bertrain.lab import growth as grow
from bertrain.lab.distillation.objective import Distil, Teacher
from bertrain.lab.elastic.space import Space
from bertrain.lab.elastic.training import Elastic
from bertrain.models import build
from bertrain.models.families import family_of
from bertrain.objectives import OBJECTIVES, Learner, Objective
from bertrain.optim import OPTIMIZERS, SCHEDULES, check_scales
from bertrain.options.config import Config, pick
from bertrain.run import checkpoint, rates
from bertrain.run.log import Sources
from bertrain.run.phases import Phase, masking_of
from bertrain.runtime.dist import World

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_names(config: Config) -> None:
    """Raises UsageError for unknown objectives, optimizers and schedules, and for what is no --lora."""
    objectives(config)
    if config.lora:
        adapters.parse(config.lora)
    pick(OPTIMIZERS, config.optimizer, "--optimizer")
    for part in config.parts:
        pick(SCHEDULES, part.options.schedule, "--schedule")


def objectives(config: Config) -> dict[str, type[Objective]]:
    """The objectives that --objective names, in its order. Raises UsageError for unknown names and faulty entries."""
    names = config.objective.split("+")
    if len(set(names)) < len(names):
        sentence = f"--objective {config.objective} names an objective twice; name each once"
        raise UsageError(sentence, "malformed", option="objective", given=config.objective)
    if taken := [name for name in names if hasattr(torch.nn.ModuleDict, name) or "." in name]:
        sentence = f"--objective {taken[0]}: torch does not allow this name for a module; choose another"
        raise UsageError(sentence, "bad-entry", option="objective", given=taken[0])
    classes = {name: pick(OBJECTIVES, name, "--objective") for name in names}
    for name, kind in classes.items():
        if not (isinstance(kind, type) and issubclass(kind, Objective)):
            sentence = f"--objective {name}: its entry in OBJECTIVES is {kind!r}; give a subclass of Objective"
            raise UsageError(sentence, "bad-entry", option="objective", given=name)
        for method in ("count", "forward"):
            if getattr(kind, method) is getattr(Objective, method):
                sentence = f"--objective {name}: {kind.__name__} has no {method}; define it (docs/extending.md)"
                raise UsageError(sentence, "bad-entry", option="objective", given=name)
    return classes


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
    with_answers: bool = True,
    starts: Sequence[int] = (),
) -> bertdata.Loader:
    """The batches of a run, for one rank.

    length: None for that of the config. variants: as Loader has them. masking: None for that of the first rows.
    with_answers: whether the teacher cache of the config is opened, which must have been made for this very stream.
    starts: as Loader has them.
    """
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
        teacher_cache=(with_answers and config.teacher_cache) or None,
        starts=starts,
    )


def model(
    config: Config, shards: bertdata.Dataset, phase: Phase | None = None, *, resume: Path | None = None
) -> tuple[PreTrainedModel, list[str]]:
    """The model of a run, and warnings: from a checkpoint to resume, from --init, or with random weights.

    phase: whose number of layers it has; None for all.
    """
    nsp = "nsp" in objectives(config)
    torch.manual_seed(bertdata.key(config.seed, "init") >> 1)  # for the weights that --init lacks
    if config.lora:
        weights, warnings = _with_adapter(config, shards, resume, nsp=nsp)
    elif resume:
        weights, warnings = build.load(resume, nsp=nsp), []
        if config.branch:
            build.check_fits(resume, shards, weights)
    elif config.init:
        weights, warnings = build.start_from(_start_of(config.init), shards, length=config.longest, nsp=nsp)
    else:
        special = shards.special_tokens
        sizes: dict[str, Any] = {"length": config.longest, "layers": phase.layers if phase else None}
        weights, warnings = build.build(config.model, special, **sizes, seed=config.seed, nsp=nsp)
    if not nsp:  # which is of families that are known to
        build.check_runs(weights, length=config.longest)
    return weights, [*warnings, *build.slower(weights)]


def _start_of(init: str) -> str:
    """The directory of --init, of a run that of its newest checkpoint; a name on the hub as it is."""
    if not Path(init).is_dir():
        return init
    build.refuse_adapter(Path(init))
    return str(checkpoint.find(Path(init), "init"))


def _with_adapter(
    config: Config, shards: bertdata.Dataset, resume: Path | None, *, nsp: bool
) -> tuple[PreTrainedModel, list[str]]:
    """The weights of --init with an adapter, a new one or that of a checkpoint to resume; and warnings."""
    start = adapters.start_of(resume, config.init) if resume else config.init
    weights, warnings = build.start_from(_start_of(start), shards, length=config.longest, nsp=nsp, whole=True)
    adapters.add(weights, adapters.parse(config.lora), seed=config.seed)
    if resume:
        adapters.read(weights, resume)
    return weights, warnings


def learner(
    config: Config, weights: PreTrainedModel, shards: bertdata.Dataset, ranks: World, precision: str
) -> Learner:
    """The module to train, on its device: the model, its objectives and, where one teaches, the teacher's.

    Raises UsageError for a teacher that does not fit.
    """
    on_gpu = ranks.device.type == "cuda"
    build.choose_attention(weights, bf16=precision == "bf16", on_gpu=on_gpu, length=config.longest)
    torch.manual_seed(bertdata.key(config.seed, "objectives") >> 1)
    parts = {name: kind(weights, config) for name, kind in objectives(config).items()}
    name = None
    if config.distil_method:
        parts["distil"], name = _distillation(config, weights, shards, ranks, precision)
        for text in list(parts.values())[:-1]:
            text.weight *= 1 - config.alpha
    isolate = config.isolate_documents
    module: Learner
    if config.elastic:
        space = Space(config.elastic, weights.config)
        module = Elastic(weights, parts, space=space, number=config.sub_networks, seed=config.seed, isolate=isolate)
    else:
        module = Learner(weights, parts, isolate=isolate)
    module.teacher, module.base = name, adapters.base_of(weights)
    if config.side_channel:
        module.side_channel = _side_channel(config, weights, shards)
    return module.to(ranks.device).train()


def _side_channel(config: Config, weights: PreTrainedModel, shards: bertdata.Dataset) -> side_channel.SideChannel:
    """Raises UsageError for a table that does not fit the vocabulary, or a model without a table of embeddings."""
    try:
        embeddings = weights.get_input_embeddings()
    except NotImplementedError:
        embeddings = None
    if not isinstance(embeddings, torch.nn.Embedding):
        sentence = (
            f"--side-channel needs a table of word embeddings, which {weights.config.model_type} does not have; "
            "leave it out"
        )
        raise UsageError(sentence, "unsupported", option="side_channel", given=config.side_channel)
    vocabulary = tokenizers.Tokenizer.from_str(shards.tokenizer_file(TOKENIZER).decode()).get_vocab()
    return side_channel.SideChannel(side_channel.read(config.side_channel, vocabulary), embeddings.embedding_dim)


def sizes(learner: Learner) -> dict[str, int]:
    """The elements of each tensor that --lr-scale may name: none of those that are frozen beside an adapter."""
    elements = {name.removeprefix("model."): parameter.numel() for name, parameter in learner.named_parameters()}
    own = (".lora_", "objectives.")
    return {name: size for name, size in elements.items() if learner.base is None or any(part in name for part in own)}


def check_parts(config: Config, shards: bertdata.Dataset, learner: Learner, phases: Sequence[Phase]) -> None:
    """Raises UsageError for a model that cannot follow the phases, and for a --lr-scale that cannot work.

    One cannot that never matches anything, or that leaves nothing to train in a sub-network of --elastic. phases: the
    one under way and those ahead. Call optim.build first.
    """
    names = list(sizes(learner))
    trained = [name for name, parameter in learner.model.named_parameters() if parameter.requires_grad]
    if config.grows:
        deepest, _ = model(config, shards)
        grow.check_depths(deepest, [phase.layers for phase in phases])
        grow.check_outside(deepest, model(config, shards, phases[0])[0])
        later = [name for name, _ in deepest.named_parameters()]
        names, trained = names + later, trained + later
    check_scales(names, config)
    for phase in phases:
        check_trains(phase, trained)
    if isinstance(learner, Elastic):
        learner.check_trained(config.lr_scale)


def check_trains(phase: Phase, names: Sequence[str]) -> None:
    """Raises UsageError for a phase that would train nothing. names: of the parameters that can be trained."""
    if not any(re.search(phase.trains, name) for name in names):
        sentence = (
            f"[[phase]] {phase.number}: trains {phase.trains!r} matches none of the {len(names)} parameters that can "
            f"be trained, such as {names[0]} and {names[-1]}; correct the pattern, or leave it out"
        )
        raise UsageError(sentence, "no-match", option="trains", given=phase.trains)


def _distillation(
    config: Config, weights: PreTrainedModel, shards: bertdata.Dataset, ranks: World, precision: str
) -> tuple[Distil, str]:
    """The teacher's objective, and a name for the teacher and what it teaches."""
    vocab_size = shards.special_tokens.vocab_size
    if config.teacher_cache:
        sha256 = TeacherCache(config.teacher_cache).header["teacher"]["sha256"]
        return Distil(weights, config, vocab_size=vocab_size), f"logits of teacher {sha256[:16]}"
    directory = checkpoint.find(Path(config.teacher), "teacher")
    teacher = build.load(directory)
    build.check_fits(directory, shards, teacher)
    if config.longest > build.max_length(teacher.config):
        most = build.max_length(teacher.config)
        sentence = (
            f"rows of {config.longest} tokens are longer than the {most} positions of --teacher {config.teacher}; give "
            "a smaller --length, or another teacher"
        )
        raise UsageError(sentence, "too-long", option="length", given=config.longest)
    objective = Distil(weights, config, vocab_size=vocab_size, teacher=teacher)
    computing = autocast(ranks.device, precision)
    if not family_of(teacher).half:  # it is called where the student computes in half precision
        computing = functools.partial(torch.autocast, ranks.device.type, enabled=False)
    objective.teacher = Teacher(teacher, objective, ranks.device, computing)
    return objective, f"{config.distil_method} of teacher {build.fingerprint(teacher)[:16]}"


def precision(config: Config, device: torch.device, weights: PreTrainedModel) -> str:
    """--precision, resolved: fp32, bf16 or fp16. Raises UsageError for one that the model cannot compute in."""
    half = family_of(weights).half
    if config.precision not in ("auto", "fp32") and not half:
        sentence = f"{weights.config.model_type} computes only in fp32; give --precision fp32"
        raise UsageError(sentence, "unsupported", option="precision", given=config.precision)
    if config.precision != "auto":
        return config.precision
    if device.type != "cuda" or not half:
        return "fp32"
    return "bf16" if rates.has_bf16(device) else "fp16"


def autocast(device: torch.device, precision: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A function that makes the context in which forward passes run."""
    dtype = DTYPES[precision]
    return lambda: torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext()
