"""The model in training on one rank: its learner, its optimizer, and what a step does to them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

import bertdata
from bertrain.methods import Carry, Method
from bertrain.models import attention, rotary
from bertrain.models.encoder import recompute_activations
from bertrain.objectives import Learner, LossSum
from bertrain.optim import optimizers
from bertrain.options.config import Config
from bertrain.run import assemble, checkpoint
from bertrain.run.phases import Phase
from bertrain.run.state import TrainState
from bertrain.runtime.dist import World
from bertrain.runtime.feed import MicroBatch

PATIENCE = 10  # steps in a row that may be skipped


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
        self.precision = assemble.precision(config, device, weights)
        self.eval_precision = assemble.precision(config, device, weights, option="eval_precision")
        self.autocast = assemble.autocast(device, self.precision)
        self.compiles = assemble.compiles(config, methods, on_gpu=device.type == "cuda")
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
        self.learner = assemble.learner(config, weights, self._shards, self._ranks, self.precision, self._methods)
        device, choice = self._ranks.device, config.attention
        for encoder in self.learner.encoders:
            attention.require(choice, encoder, device, self.autocast)
        self.attention = attention.kernels(choice, self.learner, device)
        """The kernels of attention that may run."""
        self._limited = attention.limited(self.attention)
        if self.compiles:
            torch._dynamo.config.recompile_limit = 64  # there are more shapes and modes than the 8 it would stop at
            # torch keeps compiled models on disk, with the kernel of attention in them, and does not ask which may run.
            torch.compiler.config.cache_key_tag = f"attention by {' or '.join(self.attention)}"
            self.learner.compile(fullgraph=not self.learner.is_dense, dynamic=False)
        resolved = replace(config, precision=self.precision)
        self.optimizer = assemble.optimizer(resolved, self.learner, self._methods)
        self.trained = {name: p for name, p in self.learner.model.named_parameters() if p.requires_grad}
        """The parameters that train in a phase that trains all."""

    def load(self, path: Path, saved: TrainState) -> None:
        """Takes the moments and the scaler's state of a checkpoint."""
        checkpoint.read_optimizer(path, self.optimizer, self.learner)
        if self.scaler.is_enabled() and saved.scaler:
            self.scaler.load_state_dict(dict(saved.scaler))

    def apply(self, phase: Phase) -> None:
        """Gives the model and the optimizer what a phase says about them, beside what methods change."""
        assemble.check_trains(phase, list(self.trained))
        rotary.set_bases(self.learner.model, phase.rope_base, phase.rope_base_local)
        for name, parameter in self.trained.items():
            parameter.requires_grad_(re.search(phase.trains, name) is not None)
        optimizers.set_weight_decay(self.optimizer, phase.weight_decay)

    def remake(self, before: Phase, phase: Phase, carry: Carry) -> Mapping[str, Any]:
        """Makes the model of a phase anew, with what `carry` takes over. Returns what it says has changed.

        The model has the rotary bases of the phase before, until `apply`, so that their losses can be compared.
        """
        learner, optimizer = self.learner, self.optimizer
        self._prepare(assemble.model(self._config, self._shards, phase, methods=self._methods)[0])
        rotary.set_bases(self.learner.model, before.rope_base, before.rope_base_local)
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
