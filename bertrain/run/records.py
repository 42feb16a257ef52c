"""What a run writes down: its first lines, entries of the log, checkpoints and their cards."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import bertdata
from bertdata.errors import counted
from bertrain.models.families import has_dropout
from bertrain.run import card, checkpoint, rundir
from bertrain.run.rates import Rates
from bertrain.run.run import Run
from bertrain.run.state import TRAINER, TrainState
from bertrain.run.training import PATIENCE
from bertrain.run.validation import EVALUATED_SAMPLES
from bertrain.run.watch import TrainingError
from bertrain.run.writer import Writer
from bertrain.runtime.dist import LONG_S, SILENT_S, Reading


class Records:
    """Writes what is due. Its methods are called on every rank; rank 0 writes."""

    def __init__(self, run: Run, lock: rundir.Lock) -> None:
        """lock: of --out, which rank 0 holds."""
        self._run, self._lock = run, lock
        options: dict[str, Any] = {"keep": run.config.keep, "saved": run.resumed_from, "methods": run.methods}
        self.writer = Writer(run.out, warn=run.watch.warn, **options)
        self._write: Callable[[], None] = lambda: None
        self._tried: int | None = None  # the step of the newest checkpoint that was to be written
        self._milestones: list[str] = []  # that it is for, and those of writes before it that failed

    def begin(self) -> int:
        """Prints what the run is. Returns the step of the last evaluation in the log."""
        return self._run.ranks.from_first(self._announce)

    def _announce(self) -> int:
        """Returns the step of the last evaluation in the log."""
        run = self._run
        if run.resumed_from:
            self.writer.remove_others(run.resumed_from)  # what a kill kept from it
        facts: dict[str, Any] = {
            "step": run.step,
            "resumed_from": str(run.resumed_from) if run.resumed_from else None,
            "precision": run.training.precision,
            "eval_precision": run.training.eval_precision,
            "attention": run.training.attention,
            "samples_per_epoch": run.loader.num_samples,
            "parameters": run.training.num_parameters(),
        }
        if run.config.lr_scale:
            facts["lr_scale"] = run.training.scaled_rates()
        lines = run.batches.shares()
        for method in run.methods:
            lines += method.lines(run.learner)
            if of_method := method.facts(run.learner):
                facts[method.name] = of_method
        for path, shards in run.datasets.items():
            if "validation" not in shards.splits and run.config.eval_every:
                where = " on it" if run.batches.names else ""
                run.warnings.append(
                    f"{path} has no validation split, so nothing is evaluated{where}; build it with a larger "
                    "--validation"
                )
        if any(has_dropout(each.model) for each in run.learner.encoders) and run.ranks.world_size > 1:
            run.warnings.append("the model has dropout, so another number of ranks would give another run")
        run.watch.announce(facts, lines, [*run.warnings, *run.plan.warnings])
        return run.watch.last_evaluation.get("step", 0)

    def log(self, rates: Rates, *, is_last: bool) -> None:
        """Makes an entry of the log, on every rank. On a GPU it is written by `write_entry`, but for the last one."""
        run, training = self._run, self._run.training
        numbers = Reading(torch.cat([run.sums.take(run.ranks), training.norm.double()[None], training.in_a_row]))
        step, rate, tokens, clock = run.step, training.rate, run.tokens, run.clock.entry()
        read, epochs = run.batches.source_tokens(), run.batches.epochs()

        def write() -> None:
            *sums, norm, in_a_row = numbers.take()
            means = run.sums.means(sums, run.learner.log_names())
            sources = {
                name: {"tokens": read[name], "epochs": round(epochs.get(name, 0.0), 4)} for name in run.batches.names
            }
            entry = {
                "step": step,
                **means,
                **({"sources": sources} if sources else {}),
                "lr": rate,
                "grad_norm": norm if math.isfinite(norm) else None,
                "tokens": tokens,
                **rates.take(run.ranks.world_size),  # after the numbers, for which the host waits for the GPU
                "seconds": round(time.perf_counter() - run.watch.started, 3),
                **clock,
            }
            run.ranks.together(lambda: self._show(entry, done=is_last))
            # A run may be shorter; in fp16 it begins with steps that are skipped, until its scale is low enough.
            patience = PATIENCE if training.scaler.is_enabled() else min(PATIENCE, run.plan.steps)
            if in_a_row >= patience:
                run.ranks.on_first(lambda: self._give_up(step, int(in_a_row), entry["not_finite"]))

        self._write = write
        if is_last or numbers.is_here:
            self.write_entry()

    def write_entry(self) -> None:
        """Writes the entry that waits for its numbers, if one does; ends the run if too many steps were skipped.

        Called on every rank: when the GPU has the work of the step after it, and before an evaluation or a checkpoint.
        """
        write, self._write = self._write, lambda: None
        write()

    def _show(self, entry: dict[str, Any], *, done: bool) -> None:
        if self._run.ranks.rank == 0:
            self._lock.require()
        self._run.watch.entry(entry, done=done)
        self.writer.poll()

    def _give_up(self, step: int, in_a_row: int, losses: list[str]) -> None:
        """Raises TrainingError. On rank 0."""
        config = self._run.config
        self.writer.wait()
        saved = f"continue from {self.writer.saved}, the newest checkpoint" if self.writer.saved else "begin again"
        fp16 = ", or give another --precision than fp16" * (self._run.training.precision == "fp16")
        sentence = (
            f"the last {in_a_row} steps up to step {step} were skipped, as {' and '.join(losses)} was not "
            f"finite; lower --lr {config.lr} or lengthen --warmup{fp16}, and {saved}"
        )
        raise TrainingError(sentence, "not-finite", option="lr", given=config.lr)

    def reserve(self) -> None:
        """Gets the memory for checkpoints, beside training. Called after the first step, which makes the moments."""
        run = self._run
        if run.ranks.rank == 0:
            self.writer.reserve(self._content())

    def save(self, *, required: bool) -> None:
        """Copies the state, and writes a checkpoint beside training, unless there is one of this step.

        Called on every rank. Waits until the checkpoint before this one is written; required: until this one is, too. A
        full disk ends no run that has steps to go: its newest checkpoint stays, and the next one may fit.
        """
        run = self._run
        self.write_entry()
        run.end_of_steps()
        run.sums.gather(run.ranks)

        def write() -> None:
            self._lock.require()
            self.writer.wait()
            if self.saved_step != run.step:
                if self.saved_step == self._tried:
                    self._milestones = []
                self._milestones, self._tried = [*self._milestones, *run.milestones], run.step
                self.writer.save(self._target, run.learner.model, self._content(), required=required)

        run.ranks.wait_for_others(LONG_S)
        run.ranks.on_first(write)
        run.ranks.wait_for_others(SILENT_S)
        run.clock.lap("waited")

    def wait(self) -> None:
        """Until the checkpoint that is being written is on disk: it has the configuration of the model as it is."""
        self._run.ranks.on_first(self.writer.wait)
        self._run.clock.lap("waited")

    def _content(self) -> checkpoint.Content:
        """What is saved. Its tensors are those that training changes."""
        run = self._run
        saved = TrainState(
            step=run.step,
            tokens=run.tokens,
            seconds=run.clock.seconds,
            phase=run.phase.number,
            phases=run.batches.saved_phases(),
            loader=run.loader.state_dict(),
            streams=run.batches.positions,
            since_entry=run.sums.state(),
            scaler=run.training.scaler.state_dict(),
            milestones=self._milestones,
            made_with=run.made_with,
            world_size=run.ranks.world_size,
            versions=card.versions(),
        )
        objects: dict[str, Any] = {checkpoint.OPTIMIZER: run.training.optimizer.state_dict()}
        if beside := run.learner.objective_tensors():
            objects[checkpoint.BESIDE] = beside
        files = run.tokenizer | {TRAINER: saved.content(), card.CARD: self._card()}
        return checkpoint.Content(run.learner.model.state_dict(), objects, files)

    @property
    def _target(self) -> Path:
        """The directory of the checkpoint of this step."""
        return self._run.out / f"{rundir.STEP}{self._run.step:08d}"

    def _card(self) -> bytes:
        """The model card of the checkpoint of this step, with the newest evaluation. On rank 0."""
        run, config = self._run, self._run.learner.model.config
        total = sum(weight for _, weight in run.batches.sources)
        is_frozen = any(method.frozen_by for method in run.methods)  # then the model in training has other parts
        names = {path: f"`{shards.dataset_id}`" for path, shards in run.datasets.items()}  # paths are for no one else
        phases = run.plan.describe(names)
        size = "" if is_frozen else f" with {run.training.num_parameters():,} parameters"
        return card.content(
            self._target.name,
            f"A masked language model{size}, trained with bertrain.",
            title=f"{run.out.resolve().name} after step {run.step:,}",
            config=config,
            parts={
                "Data": {
                    f"`{shards.dataset_id}`": f"{counted(shards.num_documents, 'document')}, "
                    f"{counted(shards.num_tokens, 'token')}, "
                    + ("all rows" if weight == total else f"{weight / total:.4g} of the rows")
                    for shards, weight in run.batches.sources
                },
                "Training": {
                    "steps": f"{run.step:,} of {run.plan.steps:,}",
                    "tokens read, with padding": f"{run.tokens:,}",
                    "seconds of training": f"{run.clock.seconds['trained']:.1f}",
                    "processes": f"{run.ranks.world_size} on {run.ranks.device.type}, {run.training.precision}",
                    "bertrain": bertdata.__version__,
                },
                **({"Phases": "\n".join(f"- {line}" for line in phases)} if phases else {}),
                "Options that differ from the defaults": run.config.differing(),
                "Loss": self._losses(),
            },
        )

    def _losses(self) -> str | dict[str, str]:
        """Of the newest evaluation, for a card."""
        evaluation, run = self._run.watch.last_evaluation, self._run
        loss = evaluation.get("validation_loss")
        if loss is None:
            return "No validation loss had been measured when this checkpoint was written."
        return {
            "validation loss": f"{loss:.4f} nats a token",
            "guessing by frequency alone, on the train split": f"{run.watch.reference['unigram']:.4f} nats a token",
            "right": f"{evaluation['validation_accuracy']:.2%}",
            "after step": f"{evaluation['step']:,}",
            "measured on": f"at most {EVALUATED_SAMPLES:,} rows of {evaluation['validation_length']} tokens of the "
            f"validation split, {evaluation['validation_masking']:.0%} of them masked, whatever the share in training, "
            f"in {evaluation['validation_precision']}",
        }

    def finish(self) -> None:
        """Gives the card of the last step its evaluation. Called on every rank."""
        run = self._run
        if run.is_done:
            run.ranks.wait_for_others(LONG_S)
            run.ranks.on_first(self._finish)
            run.ranks.wait_for_others(SILENT_S)

    def _finish(self) -> None:
        """Renew the card of the last step with the evaluation after its checkpoint. A full disk ends no run."""
        self.writer.wait()
        try:
            card.renew(self._target, self._card())
        except OSError as error:
            self._run.watch.warn(f"the model card of step {self._run.step} lacks its validation loss: {error.strerror}")

    @property
    def saved_step(self) -> int | None:
        """The step of the newest checkpoint that is on disk, on rank 0."""
        return int(self.writer.saved.name.removeprefix(rundir.STEP)) if self.writer.saved else None

    def describe_newest(self) -> str:
        """What a stopped run has saved: a sentence."""
        saved = f"Step {self.saved_step} is saved" if self.writer.saved else "Nothing is saved yet"
        return f"{saved}; run the same command to continue."
