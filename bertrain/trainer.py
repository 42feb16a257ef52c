"""A model in training on one rank: how to build it and its optimizer, and how to take a step."""

from __future__ import annotations

import contextlib
import re
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
from bertrain import checkpoint
from bertrain.config import Config, pick
from bertrain.data import Stream, micro_batches, to_device
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
from bertrain.models.load import check_length, check_runs, load_model, new_model, start_from
from bertrain.objectives import Learner, LossSum, objectives_of
from bertrain.optim import SCHEDULES, optimizers
from bertrain.options import flag
from bertrain.plan import Phase, Plan, longest
from bertrain.ranks import World
from bertrain.speed import has_bf16
from bertrain.state import TrainState

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_model(
    config: Config,
    shards: bertdata.Dataset,
    phase: Phase | None = None,
    *,
    resume: Path | None = None,
    methods: Sequence[Method] = (),
) -> tuple[PreTrainedModel, list[str]]:
    """Return the model of a run and warnings. Weights: from the checkpoint `resume`, --init, or random.

    phase: the phase for which methods change the model; None for the complete model.
    methods: the methods of the run.
    """
    nsp, length = "nsp" in objectives_of(config), longest(config)
    torch.manual_seed(bertdata.key(config.seed, "init") >> 1)  # seed of the weights that --init lacks
    source = next((given for method in methods if (given := method.base_model(config, resume))), None)
    if source or (config.init and not resume):
        path = checkpoint.resolved(source or config.init, "init")
        is_frozen = any(method.frozen_by for method in methods)
        weights, warnings = start_from(path, shards, length=length, nsp=nsp, complete=is_frozen)
    elif resume:
        weights, warnings = load_model(resume, nsp=nsp), []
        check_length(length, weights.config, resume)
    else:

        def configure(made: PreTrainedConfig) -> None:
            if phase:
                for method in methods:
                    method.configure(made, phase)

        special = shards.special_tokens
        weights, warnings = new_model(
            config.model, special, length=length, seed=config.seed, nsp=nsp, configure=configure
        )
    for method in methods:
        method.change_model(weights, config, resume)
    if not nsp:  # only known families support it
        warnings = [*warnings, *check_runs(weights, length=length)]
    return weights, warnings


def build_learner(
    config: Config,
    weights: PreTrainedModel,
    shards: bertdata.Dataset,
    ranks: World,
    precision: str,
    methods: Sequence[Method] = (),
) -> Learner:
    """Return the module to train, on its device: the model, its objectives, and the additions of methods."""
    options: dict[str, Any] = {"precision": precision, "device": ranks.device, "length": longest(config)}
    choose_attention(weights, config.attention, **options)
    torch.manual_seed(bertdata.key(config.seed, "objectiv") >> 1)
    objectives = {name: kind(weights, config) for name, kind in objectives_of(config).items()}
    setting = LearnerSetting(config, shards, ranks.device, precision)
    for method in methods:
        method.objectives(objectives, weights, setting)
    learner = Learner(weights, objectives, isolate=config.isolate_documents)
    for method in methods:
        learner = method.learner(learner, setting)
    return learner.to(ranks.device).train()


def resolve_precision(
    config: Config, device: torch.device, weights: PreTrainedModel, *, option: str = "precision"
) -> str:
    """Return fp32, bf16 or fp16 for the value of --precision, or of --eval-precision if `option` names it.

    Raises UsageError if the model cannot compute in it.
    """
    has_half, given = family_of(weights).half, str(getattr(config, option))
    if given not in ("auto", "fp32") and not has_half:
        sentence = f"{weights.config.model_type} computes only in fp32; give {flag(option)} fp32"
        raise UsageError(sentence, "unsupported", option=option, given=given)
    if given != "auto":
        return given
    if device.type != "cuda" or not has_half:
        return "fp32"
    if option == "eval_precision":
        return resolve_precision(config, device, weights)
    return "bf16" if has_bf16(device) else "fp16"


def autocast_of(device: torch.device, precision: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a function that returns the context of forward passes."""
    dtype = DTYPES[precision]
    return lambda: torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext()


def check_run(stream: Stream, learner: Learner, methods: Sequence[Method]) -> None:
    """Raise UsageError for a model that does not fit the phases, an unknown schedule, or a pattern without a match.

    Build the optimizer first: --lr-scale may freeze parameters.
    """
    config, shards = stream.config, next(iter(stream.datasets.values()))

    def built(phase: Phase | None) -> PreTrainedModel:
        return build_model(config, shards, phase, methods=methods)[0]

    later = [name for method in methods for name in method.check_run(stream, learner, built)]
    for given, (pattern, _) in zip(config.lr_scale, config.rate_scales, strict=True):
        optimizers.require_match(pattern, [*learner.sizes, *later], "--lr-scale", given)
    model, before = learner.model, stream.phase
    for phase in stream.plan.phases[stream.phase.number - 1 :]:
        pick(SCHEDULES, phase.options.schedule, "--schedule")
        if any(method.remake(before, phase) for method in methods):
            model = built(phase)
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        optimizers.require_match(phase.options.trains, trained, "trains", repr(phase.options.trains))
        before = phase


class LossSums:
    """Sums since the last log entry, by objective: float64 [N, 3] of losses, correct predictions and counts."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        """names: of the objectives."""
        self._names = list(names)
        self._values = torch.zeros((len(names), 3), dtype=torch.float64, device=device)
        self._before = self._values  # before the current step
        self._skipped = torch.zeros(1 + len(names), dtype=torch.float64, device=device)
        """Skipped steps, counted on rank 0; and on each rank, the steps in which each loss was not finite."""

    def begin_step(self, counts: torch.Tensor) -> None:
        """Begin a step. counts: float64 [N], number of terms in the sums of this rank."""
        self._before = self._values.clone()
        self._values[:, 2] += counts

    def add(self, losses: Mapping[str, LossSum]) -> None:
        """Add the losses of a micro-batch, by objective."""
        for row, name in zip(self._values, self._names, strict=True):
            row[0] += losses[name].sum.detach()
            row[1] += losses[name].num_correct

    def end_step(self, skipped: torch.Tensor, ranks: World) -> None:
        """Drop the sums of a skipped step. skipped: float32 [], 1 or 0."""
        self._skipped[0] += skipped * (ranks.rank == 0)
        self._skipped[1:] += ~self._values[:, 0].isfinite()
        torch.where(skipped != 0, self._before, self._values, out=self._values)

    def take(self, ranks: World) -> torch.Tensor:
        """Return the sums over all ranks for `means`, float64 [4 N + 1], and reset them to 0."""
        taken = torch.cat([ranks.sum(self._values).flatten(), ranks.sum(self._skipped)])
        self._values.zero_()
        self._skipped.zero_()
        return taken

    def means(self, taken: Sequence[float], log_names: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
        """Return the mean loss and accuracy of each objective over all ranks; None if its count is 0.

        If steps were skipped, `skipped` is their number, and `not_finite` lists the losses that caused it. taken: the
        result of `take`. log_names: that of `Learner.log_names`.
        """
        means: dict[str, Any] = {}
        for number, name in enumerate(self._names):
            *sums, count = taken[3 * number : 3 * number + 3]
            means |= {key: total / count if count else None for key, total in zip(log_names[name], sums, strict=True)}
        num_skipped, *not_finite = taken[3 * len(self._names) :]
        if num_skipped:
            names = [log_names[name][0] for name, times in zip(self._names, not_finite, strict=True) if times]
            means |= {"skipped": int(num_skipped), "not_finite": names or ["grad_norm"]}
        return means


class Trainer:
    """A learner, its optimizer, and the scaler of fp16, on one rank."""

    def __init__(
        self,
        config: Config,
        shards: bertdata.Dataset,
        ranks: World,
        methods: Sequence[Method],
        plan: Plan,
        weights: PreTrainedModel,
    ) -> None:
        """shards: a dataset with the tokenizer of all datasets of the run. weights: a model from `build_model`."""
        self.config, self.shards, self.ranks, self.methods, self.plan = config, shards, ranks, methods, plan
        device = ranks.device
        self.precision = resolve_precision(config, device, weights)
        self.eval_precision = resolve_precision(config, device, weights, option="eval_precision")
        self.autocast = autocast_of(device, self.precision)
        can_compile = device.type == "cuda" and all(method.can_compile(config) for method in methods)
        self.compiles = config.compile == "on" or (config.compile == "auto" and can_compile)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision == "fp16")
        self.rate = 0.0
        self.norm = torch.zeros((), device=device)
        """float32 []: the norm of the last gradient. A step is skipped if it is not finite."""
        self.skipped = torch.zeros((), device=device)
        """float32 []: 1 if the last step was skipped, else 0."""
        self.skipped_in_a_row = torch.zeros(1, dtype=torch.float64, device=device)
        """float64 [1]: the number of steps since the last one that was not skipped."""
        self._build(weights)
        self.sums = LossSums(list(self.learner.objectives), device)

    def _build(self, weights: PreTrainedModel) -> None:
        config, device = self.config, self.ranks.device
        if config.gradient_checkpointing:
            recompute_activations(weights)
        self.learner = build_learner(config, weights, self.shards, self.ranks, self.precision, self.methods)
        for encoder in self.learner.encoders:
            require_kernel(config.attention, encoder, device, self.precision)
        self.attention = attention_kernels(config.attention, self.learner, device)
        """The names of the attention kernels that may run."""
        self._limited = limit_kernels(self.attention)
        if self.compiles:
            torch._dynamo.config.recompile_limit = 64  # a run has more shapes and modes than the default of 8
            # torch caches compiled models on disk with their attention kernel, and its key does not name the kernel.
            torch.compiler.config.cache_key_tag = f"attention by {' or '.join(self.attention)}"
            self.learner.compile(fullgraph=not self.learner.is_dense, dynamic=False)
        self.optimizer = optimizers.build(self.learner, replace(config, precision=self.precision))
        for method in self.methods:
            method.optimizer(self.optimizer, self.learner)
        self.trained = {name: p for name, p in self.learner.model.named_parameters() if p.requires_grad}
        """The parameters that train unless the `trains` of a phase excludes them."""

    def load(self, path: Path, state: TrainState) -> None:
        """Load the optimizer, the parameters of objectives, and the scaler from a checkpoint."""
        checkpoint.read_optimizer(path, self.optimizer, self.learner)
        if self.scaler.is_enabled() and state.scaler:
            self.scaler.load_state_dict(dict(state.scaler))

    @property
    def num_parameters(self) -> int:
        """The number of parameters in the model, the objectives and the methods."""
        return sum(parameter.numel() for parameter in self.learner.parameters())

    # ------------------------------------------------------------------------------------------------------- phases

    def apply(self, phase: Phase) -> None:
        """Set the options of a phase in the model and the optimizer, except those of methods."""
        set_rotary_bases(self.learner.model, phase.options.rope_base, phase.options.rope_base_local)
        for name, parameter in self.trained.items():
            parameter.requires_grad_(re.search(phase.options.trains, name) is not None)
        for group in self.optimizer.param_groups:
            if group.get("decays"):
                group["weight_decay"] = phase.options.weight_decay

    def enter(self, phase: Phase) -> torch.nn.Module:
        """Apply the options of a phase, and return the module for its steps. All ranks call it at the same time.

        Drop the module before the process group ends: DistributedDataParallel needs the group in its destructor.
        """
        self.apply(phase)
        self._has_buckets = self.ranks.world_size == 1
        return self.learner if self.ranks.world_size == 1 else _over_ranks(self.learner)

    def carry_into(self, before: Phase, phase: Phase) -> Carry | None:
        """Return the function with which a method fills the new model of a phase; None if the model stays the same."""
        return next(filter(None, (method.remake(before, phase) for method in self.methods)), None)

    def remake(self, before: Phase, phase: Phase, carry: Carry) -> Mapping[str, Any]:
        """Build the model of a phase, and fill it with `carry`. Return the changes, by name.

        The new model has the rotary bases of the phase before, so that the losses of both can be compared.
        """
        learner, optimizer = self.learner, self.optimizer
        self._build(build_model(self.config, self.shards, phase, methods=self.methods)[0])
        set_rotary_bases(self.learner.model, before.options.rope_base, before.options.rope_base_local)
        return carry(learner, self.learner, optimizer, self.optimizer)

    # -------------------------------------------------------------------------------------------------------- a step

    def step(self, module: torch.nn.Module, batch: bertdata.Batch, step: int, phase: Phase, rows: int) -> None:
        """Take an optimizer step, the one after `step` steps, and add its losses to `sums`.

        module: the result of `enter`. rows: number of rows in the step, over all ranks.
        """
        device, (size, number) = self.ranks.device, self.plan.micro_batches(phase.options.length, rows)
        counts = to_device(torch.tensor([*self.learner.counts(batch).values()], dtype=torch.float64), device)
        self.sums.begin_step(counts)
        scale = (1 / self.ranks.sum(counts).clamp(min=1)).float()  # gradients are summed over ranks, not averaged
        for method in self.methods:
            method.begin_step(step, phase, self.learner)
        self._seed(step)
        flat = self.learner.takes_flat and not self.compiles  # fewer targets; compiled steps need equal shapes
        for place, piece in enumerate(micro_batches(batch, size=size, count=number, device=device, flat=flat), 1):
            if not self._has_buckets:
                self._lay_buckets(module, piece, scale, step)
            self.sums.add(self.add_gradients(module, piece, scale, is_last=place == number))
        self.update(phase.curve.rate(step))
        self.sums.end_step(self.skipped, self.ranks)

    def _seed(self, step: int) -> None:
        """Seed torch by step and rank, so that dropout is the same in a resumed run as in a run without a stop."""
        torch.manual_seed(bertdata.key(self.config.seed, "dropout", step, self.ranks.rank) >> 1)

    def add_gradients(
        self, module: torch.nn.Module, piece: MicroBatch, scale: torch.Tensor, *, is_last: bool
    ) -> dict[str, LossSum]:
        """Add the gradients of a micro-batch; after the last one of a step, sum them over all ranks.

        scale: float32 [N], a factor on the loss of each objective. Return the losses by objective.
        """
        prepared = self.learner.prepare(piece)  # outside autocast, which would cache weights without gradients
        is_apart = isinstance(module, DistributedDataParallel) and not is_last  # one all-reduce per step
        with cast(Any, module).no_sync() if is_apart else contextlib.nullcontext(), self._limited():
            with self.autocast():
                losses: dict[str, LossSum] = module(**prepared)
            total = self.scaler.scale(self.learner.total(losses, scale))
            one_or_nan = 1 + 0 * total.detach()  # a loss that is not finite affects the gradients of all ranks
            total.backward(one_or_nan)
        return losses

    def _lay_buckets(self, module: torch.nn.Module, piece: MicroBatch, scale: torch.Tensor, step: int) -> None:
        """Run a forward and a backward pass whose gradients are not used.

        After the first backward pass of a process, DistributedDataParallel changes its gradient buckets, and with them
        the order of sums over three or more ranks. So a process runs one pass before its first step. Then a resumed run
        adds gradients in the same order as a run without a stop.
        """
        self._has_buckets = True
        self.add_gradients(module, piece, scale, is_last=True)
        self.optimizer.zero_grad()
        self._seed(step)  # again, because the pass used random numbers

    def update(self, rate: float) -> None:
        """Clip the gradients and take an optimizer step; all ranks skip it if the norm is not finite.

        A skipped step changes neither weights nor the state of the optimizer. The host does not wait.
        """
        self.rate = rate
        self.scaler.unscale_(self.optimizer)
        self.norm = torch.nn.utils.clip_grad_norm_(self.learner.parameters(), self.config.clip_norm)
        self.skipped = 1 - self.norm.isfinite().float()
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * self.skipped
        optimizers.set_learning_rate(self.optimizer, rate)
        optimizers.step(self.optimizer, self.skipped)
        self.scaler.update()
        self.optimizer.zero_grad()

    def wait(self) -> None:
        """Wait until the device has finished the last step."""
        float(self.norm)


def _over_ranks(learner: Learner) -> DistributedDataParallel:
    """Return a learner whose gradients are summed over all ranks; DistributedDataParallel would average them.

    Its buffers are broadcast from rank 0 in each step only if an objective may change them.
    """

    def add(_, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  (torch refuses annotations as text)
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    unused = learner.leaves_unused
    module = DistributedDataParallel(learner, gradient_as_bucket_view=True, find_unused_parameters=unused)
    constant = set() if learner.is_dense else set(map(id, learner.model.buffers()))
    module.broadcast_buffers = not constant.issuperset(map(id, learner.buffers()))  # deprecated as an argument
    module.register_comm_hook(None, add)
    return module
