"""The model in training on one rank, its optimizer, and what a step does to them."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedConfig, PreTrainedModel

import bertdata
from bertdata.support import UsageError
from bertrain import card, checkpoint, methods, state, trackers
from bertrain.config import Config, pick
from bertrain.data import Batches, open_datasets
from bertrain.methods import Carry, LearnerSetting, Method
from bertrain.models.encoder import (
    MicroBatch,
    attention_kernels,
    choose_attention,
    limit_kernels,
    recompute_activations,
    require_kernel,
    set_rotary_bases,
)
from bertrain.models.families import family_of
from bertrain.models.load import (
    check_length,
    check_runs,
    load_model,
    max_length,
    model_identity,
    new_model,
    start_from,
)
from bertrain.objectives import Learner, LossSum, objectives_of
from bertrain.optim import OPTIMIZERS, SCHEDULES, optimizers
from bertrain.options import flag
from bertrain.plan import Phase, longest, options_of
from bertrain.ranks import World
from bertrain.speed import Clock, has_bf16
from bertrain.state import TrainState


class Sums:
    """Sums since the last entry of the log, by objective: float64 [N, 3], losses, correct predictions and counts."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        """names: of objectives."""
        self._names = list(names)
        self._values = torch.zeros((len(names), 3), dtype=torch.float64, device=device)
        self._before = self._values  # without the step under way
        self._skipped = torch.zeros(1 + len(names), dtype=torch.float64, device=device)
        """Skipped steps, counted on rank 0, and on each rank those in which each loss was not finite."""

    def add_counts(self, counts: torch.Tensor) -> None:
        """Begins a step. counts float64 [N]: what this rank's sums are over."""
        self._before = self._values.clone()
        self._values[:, _COUNT] += counts

    def add(self, losses: Mapping[str, LossSum]) -> None:
        """Add those of a micro-batch, by objective."""
        for row, name in zip(self._values, self._names, strict=True):
            row[_LOSS] += losses[name].sum.detach()
            row[_CORRECT] += losses[name].num_correct

    def end_step(self, skipped: torch.Tensor, ranks: World) -> None:
        """Leaves out what was added since `add_counts` if the step was skipped.

        skipped: float32 [], 1 for a step that was, else 0.
        """
        self._skipped[0] += skipped * (ranks.rank == 0)
        self._skipped[1:] += ~self._values[:, _LOSS].isfinite()
        torch.where(skipped != 0, self._before, self._values, out=self._values)

    def take(self, ranks: World) -> torch.Tensor:
        """The sums of all ranks for `means`, float64 [3 N + 1 + N]. They begin again at 0."""
        taken = torch.cat([ranks.sum(self._values).flatten(), ranks.sum(self._skipped)])
        self._values.zero_()
        self._skipped.zero_()
        return taken

    def means(self, taken: Sequence[float], log_names: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
        """The mean loss and share of correct predictions of each objective over all ranks; None where nothing was.

        If steps were skipped, `skipped` says how many, and `not_finite` which of the losses were the cause. taken: what
        `take` gave.
        """
        means: dict[str, Any] = {}
        size = self._values.numel()
        rows = (taken[start : start + 3] for start in range(0, size, 3))
        for name, (loss, correct, count) in zip(self._names, rows, strict=True):
            loss_name, accuracy_name = log_names[name]
            means |= {loss_name: loss / count if count else None, accuracy_name: correct / count if count else None}
        steps, *wild = taken[size:]
        if steps:
            names = [log_names[name][0] for name, times in zip(self._names, wild, strict=True) if times]
            means |= {"skipped": int(steps), "not_finite": names or ["grad_norm"]}
        return means


_LOSS, _CORRECT, _COUNT = 0, 1, 2  # the columns of Sums


PATIENCE = 10  # steps in a row that may be skipped


DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_names(config: Config) -> None:
    """Raises UsageError for unknown objectives, optimizers and schedules."""
    objectives_of(config)
    pick(OPTIMIZERS, config.optimizer, "--optimizer")
    for options in options_of(config):
        pick(SCHEDULES, options.schedule, "--schedule")


def build_model(
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
    nsp = "nsp" in objectives_of(config)
    options: dict[str, Any]
    torch.manual_seed(bertdata.key(config.seed, "init") >> 1)  # for the weights that --init lacks
    source = next((given for method in methods if (given := method.source(config, resume))), None)
    if source or (config.init and not resume):
        frozen_by = next((flag(method.frozen_by) for method in methods if method.frozen_by), None)
        options = {"length": longest(config), "nsp": nsp, "frozen_by": frozen_by}
        weights, warnings = start_from(checkpoint.resolved(source or config.init, "init"), shards, **options)
    elif resume:
        weights, warnings = load_model(resume, nsp=nsp), []
        check_length(longest(config), weights.config, resume)
    else:

        def configure(made: PreTrainedConfig) -> None:
            if phase:
                for method in methods:
                    method.configure(made, phase)

        special, length = shards.special_tokens, longest(config)
        weights, warnings = new_model(
            config.model, special, length=length, seed=config.seed, nsp=nsp, configure=configure
        )
    for method in methods:
        method.change_model(weights, config, resume)
    if not nsp:  # only known families support it
        warnings = [*warnings, *check_runs(weights, length=longest(config))]
    return weights, warnings


def build_learner(
    config: Config,
    weights: PreTrainedModel,
    shards: bertdata.Dataset,
    ranks: World,
    precision: str,
    methods: Sequence[Method] = (),
) -> Learner:
    """The module to train, on its device: the model, its objectives, and what the methods of the run add."""
    device, length = ranks.device, longest(config)
    choose_attention(weights, config.attention, precision=precision, device=device, length=length)
    torch.manual_seed(bertdata.key(config.seed, "objectiv") >> 1)
    parts = {name: kind(weights, config) for name, kind in objectives_of(config).items()}
    setting = LearnerSetting(config, shards, ranks.device, precision)
    for method in methods:
        method.objectives(parts, weights, setting)
    made = Learner(weights, parts, isolate=config.isolate_documents)
    for method in methods:
        made = method.learner(made, setting)
    return made.to(ranks.device).train()


def build_optimizer(config: Config, learner: Learner, methods: Sequence[Method]) -> torch.optim.Optimizer:
    """The optimizer of a run."""
    made = optimizers.build(learner, config)
    for method in methods:
        method.optimizer(made, learner)
    return made


def resolve_compile(config: Config, methods: Sequence[Method], *, on_gpu: bool) -> bool:
    """--compile, resolved."""
    automatic = on_gpu and all(method.can_compile(config) for method in methods)
    return config.compile == "on" or (config.compile == "auto" and automatic)


def check_parts(
    config: Config, shards: bertdata.Dataset, learner: Learner, phases: Sequence[Phase], methods: Sequence[Method]
) -> None:
    """Raises UsageError for a model that cannot follow the phases, and for patterns that match no parameter.

    phases: the one under way and those ahead. Call `optimizer` first.
    """

    def built(phase: Phase | None) -> PreTrainedModel:
        return build_model(config, shards, phase, methods=methods)[0]

    later = [name for method in methods for name in method.check_model(config, learner, phases, built)]
    trained = [name for name, parameter in learner.model.named_parameters() if parameter.requires_grad]
    optimizers.check_scales([*learner.sizes, *later], config)
    for before, phase in zip((phases[0], *phases), phases, strict=False):
        if any(method.remake(before, phase) for method in methods):
            trained = [name for name, parameter in built(phase).named_parameters() if parameter.requires_grad]
        check_trains(phase, trained)


def check_trains(phase: Phase, names: Sequence[str]) -> None:
    """Raises UsageError for a phase that would train nothing. names: of the parameters that can be trained."""
    if not any(re.search(phase.trains, name) for name in names):
        sentence = (
            f"[[phase]] {phase.number}: trains {phase.trains!r} matches none of the {len(names)} parameters that can "
            f"be trained, such as {names[0]} and {names[-1]}; correct the pattern, or leave it out"
        )
        raise UsageError(sentence, "no-match", option="trains", given=phase.trains)


def resolve_precision(
    config: Config, device: torch.device, weights: PreTrainedModel, *, option: str = "precision"
) -> str:
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
        return resolve_precision(config, device, weights)
    return "bf16" if has_bf16(device) else "fp16"


def autocast_of(device: torch.device, precision: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A function that makes the context in which forward passes run."""
    dtype = DTYPES[precision]
    return lambda: torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext()


def made_with_of(config: Config) -> dict[str, Any]:
    """Return what a run begins with and keeps to its end, by its content: the file of a model may move."""
    return {"model": model_identity(checkpoint.resolved(config.init, "init") or config.model)}


class Training:
    """A learner, its optimizer, and the scaler of fp16."""

    def __init__(
        self,
        config: Config,
        shards: bertdata.Dataset,
        ranks: World,
        methods: Sequence[Method],
        weights: PreTrainedModel,
    ) -> None:
        """shards: which have the tokenizer of all datasets of the run."""
        self._config, self._shards, self._ranks, self._methods = config, shards, ranks, methods
        device = ranks.device
        self.precision = resolve_precision(config, device, weights)
        self.eval_precision = resolve_precision(config, device, weights, option="eval_precision")
        self.autocast = autocast_of(device, self.precision)
        self.compiles = resolve_compile(config, methods, on_gpu=device.type == "cuda")
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision == "fp16")
        self.rate = 0.0
        self.norm = torch.zeros((), device=device)
        """float32 []: the gradient's norm of the last step, which is skipped where it is not finite."""
        self.skipped = torch.zeros((), device=device)
        """float32 []: 1 if the last step was skipped, as a loss or the norm was not finite, else 0."""
        self.in_a_row = torch.zeros(1, dtype=torch.float64, device=device)
        """float64 [1]: how many of the last steps were skipped, without one between them that was taken."""
        self._prepare(weights)

    def _prepare(self, weights: PreTrainedModel) -> None:
        config = self._config
        if config.gradient_checkpointing:
            recompute_activations(weights)
        self.learner = build_learner(config, weights, self._shards, self._ranks, self.precision, self._methods)
        device, choice = self._ranks.device, config.attention
        for encoder in self.learner.encoders:
            require_kernel(choice, encoder, device, self.autocast)
        self.attention = attention_kernels(choice, self.learner, device)
        """The kernels of attention that may run."""
        self._limited = limit_kernels(self.attention)
        if self.compiles:
            torch._dynamo.config.recompile_limit = 64  # there are more shapes and modes than the 8 it would stop at
            # torch keeps compiled models on disk, with the kernel of attention in them, and does not ask which may run.
            torch.compiler.config.cache_key_tag = f"attention by {' or '.join(self.attention)}"
            self.learner.compile(fullgraph=not self.learner.is_dense, dynamic=False)
        resolved = replace(config, precision=self.precision)
        self.optimizer = build_optimizer(resolved, self.learner, self._methods)
        self.trained = {name: p for name, p in self.learner.model.named_parameters() if p.requires_grad}
        """The parameters that train in a phase that trains all."""

    def load(self, path: Path, saved: TrainState) -> None:
        """Takes the moments and the scaler's state of a checkpoint."""
        checkpoint.read_optimizer(path, self.optimizer, self.learner)
        if self.scaler.is_enabled() and saved.scaler:
            self.scaler.load_state_dict(dict(saved.scaler))

    def apply(self, phase: Phase) -> None:
        """Gives the model and the optimizer what a phase says about them, beside what methods change."""
        check_trains(phase, list(self.trained))
        set_rotary_bases(self.learner.model, phase.rope_base, phase.rope_base_local)
        for name, parameter in self.trained.items():
            parameter.requires_grad_(re.search(phase.trains, name) is not None)
        optimizers.set_weight_decay(self.optimizer, phase.weight_decay)

    def remake(self, before: Phase, phase: Phase, carry: Carry) -> Mapping[str, Any]:
        """Makes the model of a phase anew, with what `carry` takes over. Returns what it says has changed.

        The model has the rotary bases of the phase before, until `apply`, so that their losses can be compared.
        """
        learner, optimizer = self.learner, self.optimizer
        self._prepare(build_model(self._config, self._shards, phase, methods=self._methods)[0])
        set_rotary_bases(self.learner.model, before.rope_base, before.rope_base_local)
        return carry(learner, self.learner, optimizer, self.optimizer)

    def begin_phase(self) -> torch.nn.Module:
        """Called before the first step of a phase, on all ranks at the same time. Returns what its steps call.

        Nothing else may hold it: after the process group has gone, DistributedDataParallel does not come to its end.
        """
        self._has_laid_buckets = self._ranks.world_size == 1
        return self.learner if self._ranks.world_size == 1 else _over_ranks(self.learner)

    def begin_step(self, step: int, phase: Phase) -> None:
        """Called once, before the micro-batches of a step."""
        self._step = step
        for method in self._methods:
            method.begin_step(step, phase, self.learner)
        self._seed()

    def _seed(self) -> None:
        """Seeds torch by step and rank, so that dropout in a resumed run draws what the undisturbed run would have."""
        torch.manual_seed(bertdata.key(self._config.seed, "dropout", self._step, self._ranks.rank) >> 1)

    def add_gradients(
        self, module: torch.nn.Module, piece: MicroBatch, scale: torch.Tensor, *, is_last: bool
    ) -> dict[str, LossSum]:
        """Adds the gradients of a micro-batch, and with the last one of a step those of the other ranks.

        module: that of the phase. scale: float32 [N], a factor on the loss of each objective. Returns the losses by
        objective.
        """
        if not self._has_laid_buckets:
            self._lay_buckets(module, piece, scale)
        prepared = self.learner.prepare(piece)  # not in the autocast of gradients: its copies of weights have none
        is_apart = isinstance(module, DistributedDataParallel) and not is_last  # one all-reduce a step
        with cast(Any, module).no_sync() if is_apart else contextlib.nullcontext(), self._limited():
            with self.autocast():
                losses: dict[str, LossSum] = module(**prepared)
            total = self.scaler.scale(self.learner.total(losses, scale))
            total.backward(1 + 0 * total.detach())  # a loss that is not finite gives such gradients, to all ranks
        return losses

    def _lay_buckets(self, module: torch.nn.Module, piece: MicroBatch, scale: torch.Tensor) -> None:
        """Takes a forward and a backward pass without a use of the gradients.

        After the first backward pass of a process DistributedDataParallel lays its buckets of gradients anew, and the
        order in which three or more ranks are added follows them. So the first step that counts is not the first one: a
        run that was stopped adds in the same order as one that was not.
        """
        self._has_laid_buckets = True
        prepared = self.learner.prepare(piece)
        with self._limited():
            with self.autocast():
                losses = module(**prepared)
            self.learner.total(losses, scale).backward()
        self.optimizer.zero_grad()
        self._seed()  # again: the pass has drawn numbers

    def update(self, rate: float) -> None:
        """Clips the gradients and takes an optimizer step; skips it on all ranks if their norm is not finite.

        A skipped step changes no weight and no state of the optimizer. The host does not wait.
        """
        self.rate = rate
        self.scaler.unscale_(self.optimizer)
        self.norm = torch.nn.utils.clip_grad_norm_(self.learner.parameters(), self._config.clip_norm)
        self.skipped = 1 - self.norm.isfinite().float()
        self.in_a_row = (self.in_a_row + 1) * self.skipped
        optimizers.set_learning_rate(self.optimizer, rate)
        optimizers.step(self.optimizer, self.skipped)
        self.scaler.update()
        self.optimizer.zero_grad()

    def scaled_rates(self) -> list[dict[str, Any]]:
        """What each --lr-scale amounts to."""
        return optimizers.scaled_rates(self.learner.sizes, self._config)

    def num_parameters(self) -> int:
        """Those of the model, and of objectives and methods beside it."""
        return sum(parameter.numel() for parameter in self.learner.parameters())


def _over_ranks(learner: Learner) -> DistributedDataParallel:
    """A learner whose gradients are those of all ranks together, added up. (By itself, the class takes their mean.)

    The buffers of rank 0 are copied to the others in each step only if something may change them: a family in FAMILIES
    changes none in training, but an objective may.
    """

    def add(_, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  (torch refuses annotations as text)
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    unused = learner.leaves_unused
    module = DistributedDataParallel(learner, gradient_as_bucket_view=True, find_unused_parameters=unused)
    constant = set() if learner.is_dense else set(map(id, learner.model.buffers()))
    module.broadcast_buffers = not constant.issuperset(map(id, learner.buffers()))  # as an argument it is deprecated
    module.register_comm_hook(None, add)
    return module


class Run:
    """What a step needs and changes. Call it on all ranks together: then it fails on all if it fails on one."""

    def __init__(self, config: Config, ranks: World, choice: checkpoint.Choice) -> None:
        """choice: the checkpoint to resume from, as rank 0 chose it."""
        self.config, self.out, self.ranks = config, Path(config.out), ranks
        self.resumed_from, self.warnings = choice.path, list(choice.warnings)
        choice.check()
        check_names(config)
        if ranks.rank == 0:
            trackers.require(config.log_to)
        self.datasets = open_datasets(config)
        self.shards = next(iter(self.datasets.values()))  # which has the tokenizer of all
        self.methods = methods.methods_of(config)
        options = {"rank": ranks.rank, "world_size": ranks.world_size}
        on_gpu = ranks.device.type == "cuda"
        self.batches = Batches(config, self.datasets, methods=self.methods, **options, on_gpu=on_gpu)
        if config.milestones["words"]:
            self.batches.check_words()
        self.made_with = made_with_of(config)
        self.told: list[str] = []
        """What has changed since the checkpoint: lines."""
        begun = self._resume()
        self.plan = self.batches.plan
        self.step, self.tokens = begun.step, begun.tokens
        weights, warnings = build_model(config, self.shards, self.phase, resume=self.resumed_from, methods=self.methods)
        self.warnings += warnings
        self.batches.first_targets()  # which fails where there are none, as where the model has another tokenizer
        self.training = Training(config, self.shards, ranks, self.methods, weights)
        self.clock = Clock(begun.seconds, ranks.device, self.training.precision)
        self._load(begun)
        self.sums = Sums(list(self.learner.objectives), ranks.device)
        self.tokenizer = checkpoint.tokenizer_files(self.shards.tokenizer_file, weights, max_length(weights.config))
        self.watch: Any = None  # a Watch
        self._read = self._amounts()
        self.milestones: list[str] = []
        """Those of --save-at that the last step has passed."""

    @property
    def learner(self) -> Learner:
        """The module that is trained."""
        return self.training.learner

    @property
    def phase(self) -> Phase:
        """The phase of the next step, or of the last one if its border comes next."""
        return self.batches.phase

    @property
    def loader(self) -> bertdata.Loader:
        """The loader of the next batch."""
        return self.batches.loader

    def _resume(self) -> TrainState:
        """Move the batches to where the checkpoint was taken. Return the state to begin with.

        Raises UsageError if an option has changed that a resumed run must not change.
        """
        if self.resumed_from is None:
            return TrainState()
        if self.config.resume == "no":
            sentence = f"{self.out} already holds checkpoints; give another --out, or --resume auto to continue"
            raise UsageError(sentence, "out-exists", option="out", given=str(self.out))
        saved = state.read(self.resumed_from)
        self.batches.resume(self.resumed_from, saved, self.made_with)
        with contextlib.suppress(ArithmeticError, KeyError, TypeError, ValueError):  # of a damaged checkpoint
            self.told = self.batches.plan.describe_change(saved.phases, saved.step)
        return saved

    def _load(self, begun: TrainState) -> None:
        """Load what a checkpoint has of the model in training, and check that the model can follow the phases."""
        for method in self.methods:
            self.made_with |= method.identity(self.learner)
        if self.resumed_from:
            state.require_resumable(begun, TrainState(made_with=self.made_with), self.resumed_from)
        ahead = self.plan.phases[self.phase.number - 1 :]
        check_parts(self.config, self.shards, self.learner, ahead, self.methods)
        if self.resumed_from:
            self.training.load(self.resumed_from, begun)
        self.training.apply(self.phase)

    def facts(self) -> dict[str, object]:
        """Return what must be the same on all ranks: options, what they resolve to, datasets and versions."""
        datasets = {path: shards.dataset_id for path, shards in self.datasets.items()}
        return self.config.flat() | self.made_with | datasets | card.versions()

    # ------------------------------------------------------------------------------------------------------- a step

    @property
    def is_done(self) -> bool:
        return self.step >= self.plan.steps

    @property
    def phase_is_done(self) -> bool:
        """Whether the run is done, or another phase begins with the next step."""
        return self.is_done or self.plan.phase_at(self.step).number > self.phase.number

    def enter_next(self, loss: Callable[[], float | None]) -> None:
        """Goes on with the next phase. Called on every rank, once the phase before is done and written.

        loss: measures that of the model as it is, before and after a method makes it anew.
        """
        before, phase = self.phase, self.plan.phases[self.phase.number]
        carry = next(filter(None, (method.remake(before, phase) for method in self.methods)), None)
        if carry:
            loss_before = loss()
            change = self.ranks.together(lambda: self.training.remake(before, phase, carry))
            self.clock.lap("compiled")
            losses = {"loss_before": loss_before, "loss_after": loss()}
            parameters, scales = self.training.num_parameters(), self.training.scaled_rates()
            entry = {"step": self.step, "change": change, **losses, "parameters": parameters}
            self.watch.model_changed(entry, scales)
        self.batches.enter(phase)
        self.training.apply(phase)
        self.watch.phase(self.step, phase)

    def next_batch(self) -> tuple[bertdata.Batch, float]:
        """This rank's rows of the next step, and the seconds that it took to make them."""
        self.loader.global_batch_size = self.phase.rows_at(self.step)
        self.watch.stream(self.step, self.loader)
        started = time.perf_counter()
        return next(self.loader), time.perf_counter() - started

    def update(self) -> None:
        """Takes an optimizer step, and counts it."""
        self.training.update(self.phase.rate.at(self.step))
        self.step += 1
        self.tokens += self.loader.global_batch_size * self.loader.length
        before, self._read = self._read, self._amounts()
        self.milestones = [
            f"{unit}={number}"
            for unit, numbers in self.config.milestones.items()
            for number in numbers
            if before[unit] < number <= self._read[unit]
        ]
        self.watch.advance()

    def _amounts(self) -> dict[str, float]:
        """What --save-at counts: the tokens and words read so far."""
        words = self.batches.words() if self.config.milestones["words"] else 0.0
        return {"tokens": self.tokens, "words": words}

    def end_of_steps(self) -> None:
        """Waits for the GPU, and counts the time since the last step as training; what follows is not."""
        float(self.training.norm)
        self.clock.lap("trained")
