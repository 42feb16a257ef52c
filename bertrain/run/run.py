"""A pre-training run on one rank: where it is, what it reads next, and the model in training."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import bertdata
from bertdata.errors import DatasetError, UsageError
from bertrain import methods
from bertrain.models.checks import max_length
from bertrain.objectives import Learner
from bertrain.options.config import Config
from bertrain.run import assemble, checkpoint, rundir, state
from bertrain.run.batches import Batches
from bertrain.run.log import Sums
from bertrain.run.phases import Phase
from bertrain.run.state import TrainState
from bertrain.run.training import Training
from bertrain.run.watch import Watch
from bertrain.runtime import trackers
from bertrain.runtime.clock import Clock
from bertrain.runtime.dist import World


class Run:
    """What a step needs and changes. Call it on all ranks together: then it fails on all if it fails on one."""

    def __init__(self, config: Config, ranks: World, choice: rundir.Choice) -> None:
        """choice: the checkpoint to resume from, as rank 0 chose it."""
        self.config, self.out, self.ranks = config, Path(config.out), ranks
        self.resumed_from, self.warnings = choice.path, list(choice.warnings)
        choice.check()
        assemble.check_names(config)
        if ranks.rank == 0:
            trackers.require(config.log_to)
        self.datasets = assemble.datasets(config)
        self.shards = next(iter(self.datasets.values()))  # which has the tokenizer of all
        self.methods = methods.methods_of(config)
        options = {"rank": ranks.rank, "world_size": ranks.world_size}
        on_gpu = ranks.device.type == "cuda"
        self.batches = Batches(config, self.datasets, methods=self.methods, **options, on_gpu=on_gpu)
        if config.milestones["words"]:
            self.batches.check_words()
        self.made_with = assemble.made_with(config)
        begun = self._resume()
        self.plan = self.batches.plan
        self.step, self.tokens = begun.step, begun.tokens
        weights, warnings = assemble.model(
            config, self.shards, self.phase, resume=self.resumed_from, methods=self.methods
        )
        self.warnings += warnings
        self.batches.first_targets()  # which fails where there are none, as where the model has another tokenizer
        self.training = Training(config, self.shards, ranks, self.methods, weights)
        self.clock = Clock(begun.seconds, compiles=self.training.compiles or on_gpu)
        self._load(begun)
        self.sums = Sums(list(self.learner.objectives), ranks.device)
        if ranks.rank == 0:
            self.sums.load(begun.since_entry)
        self.tokenizer = checkpoint.tokenizer_files(self.shards.tokenizer_file, weights, max_length(weights.config))
        self.watch = Watch(config, self.plan, ranks, self.batches.sources, step=self.step)
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
        """Moves the batches to where the checkpoint was taken. Returns the state to begin with.

        Raises UsageError if the checkpoint belongs to another model, optimizer, stream of rows or phases.
        """
        if self.resumed_from is None:
            return TrainState()
        saved = state.read_to_resume(self.resumed_from)
        saved.require_made_with(self.resumed_from, self.made_with)
        if self.config.resume == "no":
            sentence = f"{self.out} already holds checkpoints; give another --out, or --resume auto to continue"
            raise UsageError(sentence, "out-exists", option="out", given=str(self.out))
        self.batches.resume(self.resumed_from, saved)
        return saved

    def _load(self, begun: TrainState) -> None:
        """Takes what a checkpoint has of the model in training, and checks that it can follow the phases."""
        for method in self.methods:
            self.made_with |= method.identity(self.learner)
        if self.resumed_from:
            made_with = dict.fromkeys(begun.made_with) | self.made_with
            begun.require_made_with(self.resumed_from, made_with)
        ahead = self.plan.phases[self.phase.number - 1 :]
        assemble.check_parts(self.config, self.shards, self.learner, ahead, self.methods)
        if self.resumed_from:
            self.training.load(self.resumed_from, begun)
        self.training.apply(self.phase)

    def check_ranks(self) -> None:
        """Raises DatasetError if a rank has another teacher than rank 0, whose newest checkpoint may be a later one."""
        first = self.ranks.from_first(lambda: self.made_with)

        def check() -> None:
            if name := next((name for name in first if first[name] != self.made_with[name]), None):
                sentence = (
                    f"rank {self.ranks.rank} has another --{name} than rank 0; give a checkpoint that does not change, "
                    "and that all machines see"
                )
                raise DatasetError(sentence, "other-stream", option=name, given=self.made_with[name])

        self.ranks.together(check)

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
