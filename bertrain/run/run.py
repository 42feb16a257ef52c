"""A pre-training run on one rank: its model, its optimizer and its streams, which each step changes."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import bertdata
from bertdata.errors import UsageError
from bertrain import optim
from bertrain.methods import methods_of
from bertrain.models import rotary
from bertrain.models.build import max_length, recompute_activations
from bertrain.optim.average import EVERY, Average
from bertrain.options.config import Config
from bertrain.run import assemble, checkpoint, phases, state
from bertrain.run.batches import Batches
from bertrain.run.log import Sums
from bertrain.run.milestones import Milestones
from bertrain.run.phases import Phase
from bertrain.run.state import TrainState
from bertrain.run.watch import Watch
from bertrain.runtime import trackers
from bertrain.runtime.clock import Clock
from bertrain.runtime.dist import World


class Run:
    """What a step needs and changes. Call it on all ranks together: then it fails on all if it fails on one."""

    def __init__(self, config: Config, ranks: World, choice: checkpoint.Choice) -> None:
        """choice: the checkpoint to resume from, as rank 0 chose it."""
        self.config, self.out, self.ranks = config, Path(config.out), ranks
        self.resumed_from, self.warnings = choice.path, list(choice.warnings)
        branch = checkpoint.to_branch(Path(config.branch)) if config.branch and not choice.path else None
        self.begun_from = self.resumed_from or branch
        """The checkpoint whose state is taken."""
        choice.check()
        assemble.check_names(config)
        if ranks.rank == 0:
            trackers.require(config.log_to)
        self.datasets = assemble.datasets(config)
        self.shards = next(iter(self.datasets.values()))  # which has the tokenizer of all
        self.methods = methods_of(config)
        options = {"rank": ranks.rank, "world_size": ranks.world_size}
        self.batches = Batches(config, self.datasets, methods=self.methods, **options)
        self.batches.first_targets()  # which fails where there are none
        self.plan = self.batches.plan
        self.made_with = checkpoint.made_with(config, self.methods)
        begun = self._resume()
        weights, warnings = assemble.model(
            config, self.shards, self.phase, resume=self.begun_from, methods=self.methods
        )
        self.warnings += warnings
        self.step, self.tokens = begun.step, begun.tokens
        self.spent = begun.seconds.get("trained", 0.0)
        on_gpu = ranks.device.type == "cuda"
        self.clock = Clock(begun.seconds, compiles=on_gpu or assemble.compiles(config, self.methods, on_gpu=on_gpu))
        self.precision = assemble.precision(config, ranks.device, weights)
        self.autocast = assemble.autocast(ranks.device, self.precision)
        self._prepare(weights)
        for method in self.methods:
            self.made_with |= method.identity(self.learner)
        if self.begun_from:
            self._require_made_with(begun, dict.fromkeys(begun.made_with) | self.made_with)
            for method in self.methods if self.resumed_from else ():
                if method.name in begun.methods:
                    method.load(begun.methods[method.name])
        phases = self.plan.phases[self.phase.number - 1 :]
        assemble.check_parts(config, self.shards, self.learner, phases, self.methods)
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=self.precision == "fp16")
        if self.begun_from:
            checkpoint.read_optimizer(self.begun_from, self.optimizer, self.learner)
        self._apply(self.phase)
        if self.begun_from and self.scaler.is_enabled() and begun.scaler:
            self.scaler.load_state_dict(dict(begun.scaler))
        if self.average and self.resumed_from and self.progress > 1 - config.average:
            checkpoint.read_average(self.resumed_from, self.average)
        self.sums = Sums(list(self.learner.objectives), self.batches.names, ranks.device)
        if ranks.rank == 0:
            self.sums.load(begun.since_entry)
        self.rate, self.norm = 0.0, torch.zeros(())
        self.tokenizer = checkpoint.tokenizer_files(self.shards, weights, max_length(weights.config))
        self.watch = Watch(config, self.plan, ranks, self.batches.sources, step=self.step, read=begun.read)
        self.milestones = Milestones(config.milestones, self.batches, self.tokens)

    def _prepare(self, weights: PreTrainedModel) -> None:
        """Makes what trains a model: the learner, its optimizer, and the mean of its weights."""
        config = self.config
        if config.gradient_checkpointing:
            recompute_activations(weights)
        self.learner = assemble.learner(config, weights, self.shards, self.ranks, self.precision, self.methods)
        if assemble.compiles(config, self.methods, on_gpu=self.ranks.device.type == "cuda"):
            torch._dynamo.config.recompile_limit = 64  # there are more shapes and modes than the 8 it would stop at
            self.learner.compile(fullgraph=not self.learner.is_dense, dynamic=False)
        self.optimizer = assemble.optimizer(config, self.learner, self.methods)
        self.trained = {name: p for name, p in self.learner.model.named_parameters() if p.requires_grad}
        """The parameters that train in a phase that trains all."""
        self.average = Average(self.learner) if config.average else None

    def _apply(self, phase: Phase) -> None:
        """Gives the model and the optimizer what a phase says about them, beside what methods change."""
        assemble.check_trains(phase, list(self.trained))
        rotary.set_bases(self.learner.model, phase.rope_base, phase.rope_base_local)
        for name, parameter in self.trained.items():
            parameter.requires_grad_(re.search(phase.trains, name) is not None)
        optim.set_weight_decay(self.optimizer, phase.weight_decay)

    @property
    def phase(self) -> Phase:
        """The phase of the next step, or of the last one if its border comes next."""
        return self.batches.phase

    @property
    def loader(self) -> bertdata.Loader:
        """The loader of the next batch."""
        return self.batches.loader

    def _resume(self) -> TrainState:
        """Moves the batches to where the checkpoint was taken. Returns the state to begin with.

        Raises UsageError if the checkpoint belongs to another model, optimizer or stream of rows.
        """
        if self.begun_from is None:
            return TrainState()
        saved = state.read(self.begun_from)
        self._require_made_with(saved, self.made_with)
        if self.resumed_from is None:
            self.batches.branch(self.begun_from, saved)
            return saved.branch()
        if self.config.resume == "no":
            sentence = f"{self.out} already holds checkpoints; give another --out, or --resume auto to continue"
            raise UsageError(sentence, "out-exists", option="out", given=str(self.out))
        if saved.phases or self.config.phase:  # else more may change: run.json keeps what
            now = self.batches.saved_phases() if self.config.phase else []
            phases.check_begun(self.out, saved.phases, saved.phase, now)
        self.batches.resume(self.resumed_from, saved)
        if self.plan.seconds and saved.seconds["trained"] / self.plan.seconds * self.plan.steps < self.phase.start:
            sentence = (
                f"{self.out} is in [[phase]] {saved.phase}, and with so much more time it would be in an earlier one; "
                "give the time that it was begun with, or go on with --branch and another --out"
            )
            raise UsageError(sentence, "other-settings", option="budget", given=self.config.budget)
        return saved

    def _require_made_with(self, begun: TrainState, given: Mapping[str, str | None]) -> None:
        """Raises UsageError unless a state was made with the given settings. A branch may be of any model."""
        assert self.begun_from  # noqa: S101  (its state is begun)
        kept = {name: value for name, value in given.items() if self.resumed_from or name != "model"}
        begun.require_made_with(self.begun_from, kept)

    # ------------------------------------------------------------------------------------------------------- a step

    @property
    def progress(self) -> float:
        """Share of the run that is done: of its time if it is by time, else of its steps."""
        return self.spent / self.plan.seconds if self.plan.seconds else self.step / self.plan.steps

    @property
    def scheduled(self) -> int:
        """The step of the schedule that comes next."""
        return max(self.phase.start, self.plan.scheduled(self.step, self.progress))

    @property
    def is_done(self) -> bool:
        return self.progress >= 1

    @property
    def phase_is_done(self) -> bool:
        """Whether the run is done, or another phase begins with the next step."""
        return self.is_done or self.plan.phase_at(self.scheduled).number > self.phase.number

    def enter_next(self, loss: Callable[[], float | None]) -> None:
        """Goes on with the next phase. Called on every rank, once the phase before is done and written.

        loss: measures that of the model as it is, before and after a method makes it anew.
        """
        before, phase = self.phase, self.plan.phases[self.phase.number]
        if any(method.remakes(before, phase) for method in self.methods):
            self._remake(phase, loss)
        self.batches.enter(phase)
        self._apply(phase)
        self.watch.phase(self.step, phase)

    def _remake(self, phase: Phase, loss: Callable[[], float | None]) -> None:
        """Makes the model of a phase anew; methods carry over what it has learned."""
        before, old, loss_before = self.learner, self.optimizer, loss()
        change: dict[str, Any] = {}

        def renew() -> None:
            self._prepare(assemble.model(self.config, self.shards, phase, methods=self.methods)[0])
            for method in self.methods:
                change.update(method.carry(before, self.learner, old, self.optimizer))

        self.ranks.together(renew)
        self.clock.lap("compiled")
        losses = {"loss_before": loss_before, "loss_after": loss()}
        entry = {"step": self.step, "change": change, "parameters": sum(p.numel() for p in self.learner.parameters())}
        self.watch.change(entry | losses, optim.scaled_rates(self.learner.sizes, self.config))

    def next_batch(self) -> tuple[bertdata.Batch, float]:
        """This rank's rows of the next step, and the seconds that it took to make them."""
        self.loader.global_batch_size = self.phase.rows_at(self.scheduled)
        self.watch.stream(self.step, self.loader)
        started = time.perf_counter()
        return self.batches.next(), time.perf_counter() - started

    def begin_step(self) -> None:
        """Called once, before the micro-batches of a step."""
        for method in self.methods:
            method.begin_step(self.step, self.learner)
        self.seed()

    def seed(self) -> None:
        """Seeds torch by step and rank, so that dropout in a resumed run draws what the undisturbed run would have."""
        torch.manual_seed(bertdata.key(self.config.seed, "dropout", self.step, self.ranks.rank) >> 1)

    def update(self) -> None:
        """Clips the gradients and takes an optimizer step."""
        self.scaler.unscale_(self.optimizer)
        self.norm = torch.nn.utils.clip_grad_norm_(self.learner.parameters(), self.config.clip_norm)
        self.rate = self.phase.rate.at(self.scheduled)
        optim.set_learning_rate(self.optimizer, self.rate)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.step += 1
        self.tokens += self.loader.global_batch_size * self.loader.length
        self.milestones.advance(self.tokens)
        if self.average and self.step % EVERY == 0 and self.progress > 1 - self.config.average:
            self.average.add()
        self.watch.advance()

    def norm_or_none(self) -> float | None:
        """The gradient's norm; None where fp16 has overflowed, for then the scaler skips the step."""
        norm = float(self.norm)
        return None if self.scaler.is_enabled() and not math.isfinite(norm) else norm

    def end_of_steps(self) -> None:
        """Waits for the GPU, and counts the time since the last step as training; what follows is not."""
        float(self.norm)
        self.clock.lap("trained")

    def take_last(self) -> None:
        """At the end of a run that is too short for a mean, the mean is that of the last weights."""
        if self.average and self.is_done and not self.average.count:
            self.average.add()
