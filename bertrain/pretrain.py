"""Pre-train a masked language model on shards.

    torchrun --nproc-per-node 2 -m bertrain.pretrain --data shards/
    python -m bertrain.pretrain --data shards/ --out run/ --model bert-base --steps 100000
    python -m bertrain.pretrain --config run/run.json --out run2/ --seed 1

The global batch of a step is the same for any number of ranks. So is the run, up to the order of sums, unless it has
dropout, which each rank samples separately. A run that is stopped and started again resumes from the newest checkpoint.
On CPUs, the result is bitwise identical to that of a run without a stop.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # main imports this module again, after it has parsed the options
    from bertrain.__main__ import imported

    sys.exit(imported("cli").pretrain())

import contextlib
import gc
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from bertdata.support import UsageError, one_sentence
from bertrain import card, checkpoint, trackers
from bertrain.cli import pretrain as main  # noqa: F401  (public)
from bertrain.config import Config
from bertrain.data import Stream
from bertrain.evaluate import Evaluator
from bertrain.methods import methods_of
from bertrain.models.families import auto_class
from bertrain.models.load import max_length, model_identity, tokenizer_files
from bertrain.plan import Phase
from bertrain.ranks import Signals, World, world
from bertrain.report import Report
from bertrain.speed import Clock
from bertrain.state import TRAINER, TrainState, kept_options, read, require_same
from bertrain.trainer import Trainer, build_model, check_run


def pretrain(config: Config) -> None:
    """Pre-train a masked language model on the shards that bertdata build made. Runs alone or under torchrun."""
    with one_sentence(), world() as ranks, contextlib.ExitStack() as stack:
        out = ranks.from_first(lambda: checkpoint.directory_of(config))
        is_new, config = not config.out, replace(config, out=str(out))
        made = is_new or not out.exists()
        ranks.on_first(lambda: stack.enter_context(checkpoint.lock(out)))
        if ranks.rank == 0:  # only with the lock: a different run may hold it
            stack.callback(checkpoint.remove_unused, out, made)
        resumed_from, warnings = ranks.from_first(lambda: checkpoint.choose(out))
        run = ranks.together(lambda: Pretraining(config, ranks, resumed_from, warnings))
        ranks.require_same_on_all_ranks(run.facts())
        if is_new:
            command = f"bertrain pretrain --config {shlex.quote(f'{out}/run.json')}"
            run.changes.append(f"--out {out}; {command} resumes this run")
        run.begin()
        with run.report, Signals(ranks) as signals:
            run.report.callback(run.writer.wait)
            try:
                run.train(signals)
            except KeyboardInterrupt:  # second Ctrl-C: the next run removes an incomplete checkpoint
                run.report.say(f"Interrupted at step {run.state.step}. {run.writer.describe()}")
                os._exit(130)
        if ranks.rank == 0 and signals.stopped:
            by = "Ctrl-C" if signals.stopped == "SIGINT" else signals.stopped
            click.echo(f"Stopped by {by} after step {run.state.step}. {run.writer.describe()}")
        elif ranks.rank == 0:
            name = auto_class(run.trainer.learner.model).__name__
            click.echo(f"done: {run.writer.saved}\n{name}.from_pretrained({str(run.writer.saved)!r})")
        if signals.stopped == "SIGINT":
            sys.exit(130)


class Pretraining:
    """A run: its parts, and its loop."""

    def __init__(self, config: Config, ranks: World, resumed_from: Path | None, warnings: Sequence[str] = ()) -> None:
        """Build the parts. Changes no file, and uses no collective operation.

        resumed_from: the checkpoint that rank 0 chose. warnings: warnings about other checkpoints. Raises UsageError,
        DatasetError or TrainingError for options, files or rows that cannot be trained on.
        """
        self._index_sha256 = checkpoint.wait_until_seen(resumed_from) if resumed_from else None
        if config.log_to and ranks.rank == 0:
            trackers.require(config.log_to)
        methods = methods_of(config)
        self.config, self.ranks, self.resumed_from = config, ranks, resumed_from
        self.stream = Stream(config, ranks, methods)
        shards = next(iter(self.stream.datasets.values()))  # any dataset: all have the same tokenizer
        source = checkpoint.resolved(config.init, "init") or config.model
        self.made_with: dict[str, Any] = {"model": model_identity(source)}  # identified by content: a file may move
        self.changes: list[str] = []  # changes since the checkpoint, as lines
        self.state = self._resume()
        weights, lines = build_model(config, shards, self.stream.phase, resume=resumed_from, methods=methods)
        self.trainer = Trainer(config, shards, ranks, methods, self.stream.plan, weights)
        for method in methods:
            self.made_with |= method.identity(self.trainer.learner)
        check_run(self.stream, self.trainer.learner, methods)
        self.stream.check()
        if resumed_from:
            require_same(self.state, replace(self.state, made_with=self.made_with), resumed_from)
            self.trainer.load(resumed_from, self.state)
        self.trainer.apply(self.stream.phase)
        self.clock = Clock(self.state.seconds, ranks.device, self.trainer.precision)
        self.tokenizer = tokenizer_files(shards.tokenizer_file, weights, max_length(weights.config))
        self.warnings, self._marks = [*warnings, *lines], config.milestones
        self._on_disk = self._amounts()  # amounts at the newest checkpoint on disk
        self._tried = self.state.step, self._on_disk  # step and amounts of the last checkpoint, which may be incomplete

    def _resume(self) -> TrainState:
        """Return the state to start from. Raises UsageError if an option has changed that must not change."""
        if self.resumed_from is None:
            return TrainState()
        if self.config.resume == "no":
            out = self.config.out
            sentence = f"{out} already has checkpoints; give a different --out, or --resume auto to continue"
            raise UsageError(sentence, "out-exists", option="out", given=out)
        saved = read(self.resumed_from)
        self.stream.resume(self.resumed_from, saved, self.made_with)
        with contextlib.suppress(ArithmeticError, KeyError, TypeError, ValueError):  # from a damaged checkpoint
            self.changes = self.stream.plan.describe_change(saved.phases, saved.step)
        if saved.step >= self.stream.plan.steps:  # an evaluation may be missing
            self.changes.append(f"the run is complete, with step {saved.step:,}; give more --steps, or a new --out")
        return saved

    def facts(self) -> dict[str, object]:
        """Return the facts that must be equal on all ranks: options, resolved values, datasets and versions."""
        datasets = {path: shards.dataset_id for path, shards in self.stream.datasets.items()}
        resolved = {"precision": self.trainer.precision, "checkpoint": self._index_sha256}
        return self.config.flat() | resolved | self.made_with | datasets | card.versions()

    def begin(self) -> None:
        """Open the log, and print the first lines. Call it on all ranks."""
        state = self.state
        state.phases, state.options = self.stream.saved_phases(), kept_options(self.config.flat())
        state.made_with, state.world_size, state.versions = self.made_with, self.ranks.world_size, card.versions()
        self.report = self.ranks.together(lambda: Report(self.trainer, self.stream, self.clock, step=state.step))
        self.evaluator = Evaluator(self.trainer, self.stream, self.clock)
        self.writer = checkpoint.Writer(self.config.keep, self.resumed_from, self.report.warn, self.trainer.methods)
        if self.ranks.rank == 0 and self.resumed_from:
            self.writer.clear(self.resumed_from)  # old checkpoints of a killed run
        self.report.begin(self.resumed_from, self.warnings, self.changes)

    def train(self, signals: Signals) -> None:
        """Take the steps of all phases. Stop after the last step, or when any rank receives a signal."""
        self._train_phase(self.stream.phase, signals)
        for phase in self.stream.plan.phases[self.stream.phase.number :]:
            if signals.stopped:
                return
            self._enter(phase)
            self._train_phase(phase, signals)
        self.writer.wait()
        self.report.finish()

    def _enter(self, phase: Phase) -> None:
        """Switch to a phase. A method may build a new model and fill it with the learned state."""
        before, state = self.stream.phase, self.state
        self.ranks.on_first(self.writer.wait)  # a write may still read the model's configuration, which changes now
        self.clock.lap("waited")
        if carry := self.trainer.carry_into(before, phase):
            entry: dict[str, Any] = {"step": state.step, "loss_before": self.evaluator.loss()}
            entry["change"] = self.ranks.together(lambda: self.trainer.remake(before, phase, carry))
            self.clock.lap("compiled")
            entry |= {"loss_after": self.evaluator.loss(), "parameters": self.trainer.num_parameters}
            self.report.model_changed(entry)
        self.stream.enter(phase)
        self.report.say(f"step {state.step}: {self.stream.plan.line(phase)}")

    def _train_phase(self, phase: Phase, signals: Signals) -> None:
        trainer, state, report, config = self.trainer, self.state, self.report, self.config
        module, is_saved, logged = trainer.enter(phase), True, state.step
        gc.unfreeze()
        gc.collect()
        gc.freeze()  # the objects of a run live until its end, so the garbage collector can skip them
        loader = self.stream.loader
        self.clock.start(trainer.learner.model, loader.length, phase.masking.quota(loader.length))
        while True:
            if not signals.stopped and self.evaluator.is_due(state.step, report.last_evaluation):
                self._evaluate(signals)
                if signals.stopped and is_saved and logged < state.step:
                    report.log(state, now=True)
                is_saved = is_saved and not signals.stopped
            if not is_saved:
                self.save(required=bool(signals.stopped) or state.step >= self.stream.plan.steps)
                is_saved = True
            if signals.stopped or state.step >= phase.stop:
                return
            report.rows(state.step)
            started = time.perf_counter()
            batch = self.stream.next_batch()
            waited = time.perf_counter() - started
            rows = loader.global_batch_size
            trainer.step(module, batch, state.step, phase, rows)
            state.step, state.tokens = state.step + 1, state.tokens + rows * phase.options.length
            report.flush()  # the entry of the previous step, while the GPU works
            self.clock.end_step(rows=rows / self.ranks.world_size, waited=waited)
            signals.poll()
            is_saved = not (self._milestones(since=self._tried[1]) or state.step % config.save_every == 0)
            is_saved = is_saved and not signals.stopped and state.step < phase.stop
            if not is_saved or state.step % config.log_every == 0:
                report.log(state, now=not is_saved)
                logged = state.step

    def _evaluate(self, signals: Signals) -> None:
        self.report.flush()
        self.trainer.wait()
        self.clock.lap("trained")
        evaluated = self.evaluator.evaluate(signals)
        if evaluated is not None:
            self.report.evaluation(self.state.step, evaluated)

    def _amounts(self) -> dict[str, float]:
        """Return the amounts that --save-at counts: the tokens and words read."""
        words = self.stream.words() if self._marks["words"] else 0.0
        return {"tokens": self.state.tokens, "words": words}

    def _milestones(self, *, since: dict[str, float]) -> list[str]:
        """Return the milestones of --save-at that the run has passed since these amounts."""
        now, marks = self._amounts(), self._marks.items()
        return [f"{unit}={n}" for unit, numbers in marks for n in numbers if since[unit] < n <= now[unit]]

    def save(self, *, required: bool) -> None:
        """Copy the state, and write it while training continues. Call it on all ranks.

        required: wait for the end, and fail if the write fails. Otherwise a full disk does not end the run: the newest
        checkpoint stays, and the next one may fit.
        """
        self.report.flush()
        self.trainer.wait()
        self.clock.lap("trained")
        self.ranks.on_first(lambda: self._write(required=required))
        self._tried = self.state.step, self._amounts()
        self.clock.lap("waited")

    def _write(self, *, required: bool) -> None:
        self.writer.wait()
        if self.writer.saved_step == self._tried[0]:
            self._on_disk = self._tried[1]
        if self.writer.saved_step != (step := self.state.step):
            target = Path(self.config.out) / f"{checkpoint.STEP}{step:08d}"
            self.writer.save(target, self.trainer.learner.model, self._content(), required=required)

    def _content(self) -> checkpoint.Content:
        """Return the content of a checkpoint, whose tensors are shared with training."""
        trainer, stream, state = self.trainer, self.stream, self.state
        state.seconds, state.milestones = self.clock.seconds, self._milestones(since=self._on_disk)
        state.scaler, state.phase = trainer.scaler.state_dict(), stream.phase.number
        state.loader, state.streams = stream.loader.state_dict(), stream.positions
        objects: dict[str, Any] = {checkpoint.OPTIMIZER: trainer.optimizer.state_dict()}
        if beside := checkpoint.objective_tensors(trainer.learner):
            objects[checkpoint.BESIDE] = beside
        files = self.tokenizer | {TRAINER: state.content(), card.CARD: self.report.card(state)}
        return checkpoint.Content(trainer.learner.model.state_dict(), objects, files)
