"""The output of a run: log.jsonl, run.json, lines about steps, trackers, warnings, the model card."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import bertdata
from bertdata.support import counted, write_file
from bertrain import card
from bertrain.data import Stream
from bertrain.evaluate import EVALUATED_SAMPLES, reference_losses
from bertrain.optim.optimizers import scaled_rates
from bertrain.ranks import Reading
from bertrain.speed import Clock
from bertrain.state import TrainingError, TrainState
from bertrain.trackers import Trackers
from bertrain.trainer import Trainer

PATIENCE = 10  # a run ends after this number of skipped steps in a row
QUIET_S = 10  # seconds between two printed lines about steps


def entry_of(line: str) -> dict[str, Any] | None:
    """Return the entry in a line of log.jsonl; None for a line that is incomplete or damaged."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else None


class Log(contextlib.AbstractContextManager["Log"]):
    """log.jsonl: JSON objects, one in each line.

    A resumed run first removes the entries after its checkpoint; a new run removes all. If the disk is full, an entry
    is written with the next one, or at the end.
    """

    def __init__(self, path: Path, *, after_step: int) -> None:
        self._waiting = b""
        lines = path.read_text(errors="replace").splitlines() if after_step and path.exists() else []
        entries = [(line, entry_of(line)) for line in lines]
        self.bad_lines = [number for number, (_, entry) in enumerate(entries[:-1], 1) if entry is None]
        """The numbers of invalid lines, from 1, which were removed; without the last line, which a kill may cut."""
        self.last_evaluation: dict[str, Any] = {}
        """The entry of the last evaluation in the log; empty if there is none."""
        kept = []
        for line, entry in entries:
            if entry is None:
                continue
            if entry["step"] + ("change" in entry) > after_step:  # a change between phases comes after the step
                break
            self._note(entry)
            kept.append(line + "\n")
        write_file(path, "".join(kept).encode())
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (lives as long as the run)

    def _note(self, entry: dict[str, Any]) -> None:
        if "validation_loss" in entry:
            self.last_evaluation = entry

    def write(self, entry: dict[str, Any]) -> str | None:
        """Append an entry. Return an error text if it could not be written, else None."""
        self._waiting += json.dumps(entry).encode() + b"\n"
        self._note(entry)
        try:
            self._flush()
        except OSError as error:
            return error.strerror
        return None

    def _flush(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def __exit__(self, kind: object, *exception: object) -> None:
        with self._file, contextlib.suppress(*([OSError] if kind else [])):
            self._flush()
            os.fsync(self._file.fileno())


class Report(contextlib.ExitStack):
    """The log and the printed lines of a run. Call `log` and `flush` on all ranks; only rank 0 writes and prints."""

    def __init__(self, trainer: Trainer, stream: Stream, clock: Clock, *, step: int) -> None:
        """step: the step of the checkpoint."""
        super().__init__()
        self._trainer, self._stream, self._clock = trainer, stream, clock
        self.config, self.plan, self.ranks = trainer.config, trainer.plan, trainer.ranks
        self.out, self.is_first = Path(self.config.out), self.ranks.rank == 0
        self.reference = reference_losses(stream.sources, "train")
        self.last_evaluation = -1
        """The step of the last evaluation in the log."""
        self._started = self._last_line = time.perf_counter()
        self._first_step, self._warned = step, set[str]()
        self._rows: dict[str, Any] = {}
        self._write: Callable[[], None] = lambda: None
        self._run_json: dict[str, Any] = {}
        data, total = {}, sum(weight for _, weight in stream.sources)
        for shards, weight in stream.sources:
            share = "all rows" if weight == total else f"{weight / total:.4g} of the rows"
            texts, tokens = counted(shards.num_documents, "document"), counted(shards.num_tokens, "token")
            data[f"`{shards.dataset_id}`"] = f"{texts}, {tokens}, {share}"
        phases = self.plan.describe({path: f"`{shards.dataset_id}`" for path, shards in stream.datasets.items()})
        self._about = {"Data": data, "Phases": dict(line.split(": ", 1) for line in phases)}
        self._about["Options that differ from the defaults"] = self.config.differing()
        """The parts of a card that do not change."""
        if self.is_first:
            self._log = self.enter_context(Log(self.out / "log.jsonl", after_step=step))
            if self.config.log_to:
                self._trackers = Trackers(self.config.log_to, self.out, self.config.flat(), step=step, warn=self.warn)
                self.callback(self._trackers.close)

    # ------------------------------------------------------------------------------------------------ the first lines

    def begin(self, resumed_from: Path | None, warnings: list[str], changes: list[str]) -> None:
        """Print the first lines of the run, and write run.json. Call it on all ranks.

        warnings: about models and checkpoints. changes: lines about changes since the checkpoint.
        """
        self.last_evaluation = self.ranks.from_first(lambda: self._begin(resumed_from, warnings, changes))

    def _begin(self, resumed_from: Path | None, warnings: list[str], changes: list[str]) -> int:
        config, plan, trainer, stream = self.config, self.plan, self._trainer, self._stream
        ids = [shards.dataset_id for shards, _ in stream.sources]
        method_facts = {method.name: method.facts(trainer.learner) for method in trainer.methods}
        method_facts = {name: facts for name, facts in method_facts.items() if facts}
        facts: dict[str, Any] = {
            "step": self._first_step,
            "resumed_from": str(resumed_from) if resumed_from else None,
            "precision": trainer.precision,
            "eval_precision": trainer.eval_precision,
            "attention": trainer.attention,
            "dataset_id": ids if len(ids) > 1 else ids[0],
            "world_size": self.ranks.world_size,
            "steps": plan.steps,
            "micro_batch_size": plan.micro_batch_size,
            "phases": [phase.saved() for phase in plan.phases],
            "reference_loss": self.reference,
        }
        self._run_json = {"config": config.flat() | {"out": str(self.out.absolute())}, "resolved": facts | method_facts}
        of_model = self._keep_model()
        for path, shards in stream.datasets.items():
            if "validation" not in shards.splits and config.eval_every:
                self.warn(f"{path} has no validation split and is not evaluated; build it with a larger --validation")
        settings = [item for each in trainer.learner.encoders for item in each.model.config.to_dict().items()]
        rates = [value for name, value in settings if "dropout" in name and isinstance(value, float)]
        if any(rates) and self.ranks.world_size > 1:
            self.warn("the model has dropout, so a different number of ranks gives different results")
        if self._log.bad_lines:
            self.warn(f"log.jsonl had invalid lines, which were removed: {', '.join(map(str, self._log.bad_lines))}")
        for warning in [*warnings, *plan.warnings]:
            self.warn(warning)
        size, number = plan.first_micro_batches()
        resumed = f", resumed after step {self._first_step} from {resumed_from}" if resumed_from else ""
        lines = [*changes, *stream.describe_mix()]
        for name, values in method_facts.items():
            lines.append(f"{name}: {', '.join(f'{key} {value}' for key, value in values.items())}")
        lines += [
            f"{config.init or config.model}: {trainer.num_parameters:,} parameters, {counted(plan.steps, 'step')}, "
            f"{plan.phases[0].options.global_batch_size} rows a step, in {number} "
            f"{'pass' if number == 1 else 'passes'} of {size} on each of {counted(self.ranks.world_size, 'rank')}, "
            f"{trainer.precision}, attention by {' or '.join(trainer.attention)}, "
            f"{counted(stream.loader.num_samples, 'sample')} an epoch{resumed}",
            f"losses to compare with, in nats a token of the train split: {self.reference['uniform']:.3f} by guessing "
            f"evenly, {self.reference['unigram']:.3f} by frequency alone",
        ]
        self.say("\n".join([*lines, *plan.describe(), *of_model]))
        return int(self._log.last_evaluation.get("step", 0))

    def _keep_model(self) -> list[str]:
        """Save the size of the model and --lr-scale in run.json; return a line for each --lr-scale."""
        scales = scaled_rates(self._trainer.learner.sizes, self.config)
        self._run_json["resolved"] |= {"parameters": self._trainer.num_parameters, "lr_scale": scales}
        self._write_run_json()
        return [
            f"--lr-scale {row['pattern']}={row['factor']:g}: {row['tensors']} tensors, {row['parameters']:,} parameters"
            + " are frozen" * (row["factor"] == 0)
            for row in scales
        ]

    def _write_run_json(self) -> None:
        """Write run.json. A full disk does not end a run."""
        try:
            write_file(self.out / "run.json", json.dumps(self._run_json, indent=1).encode())
        except OSError as error:
            self.warn(f"run.json cannot be written: {error.strerror}")

    # ------------------------------------------------------------------------------------------------------- entries

    def log(self, state: TrainState, *, now: bool) -> None:
        """Make an entry of the log about the steps since the last one. Call it on all ranks.

        On a GPU the entry is written one step later, by `flush`, when its numbers have been copied to the host.
        now: write it at once.
        """
        trainer, step, tokens, rate = self._trainer, state.step, state.tokens, self._trainer.rate
        sums, sources = trainer.sums.take(self.ranks), self._stream.read_by_source()
        numbers = Reading(torch.cat([sums, trainer.norm.double()[None], trainer.skipped_in_a_row]))

        def write() -> None:
            *sums, norm, in_a_row = numbers.take()
            self._clock.lap("trained")  # includes the wait for the GPU
            means = trainer.sums.means(sums, trainer.learner.log_names())
            entry = {
                "step": step,
                **means,
                **({"sources": sources} if sources else {}),
                "lr": rate,
                "grad_norm": norm if math.isfinite(norm) else None,
                "tokens": tokens,
                **self._clock.rates(self.ranks.world_size),
                "seconds": round(time.perf_counter() - self._started, 3),
                **self._clock.entry(),
            }
            self.ranks.on_first(lambda: self._entry(entry, in_a_row=int(in_a_row)))

        self._write = write
        if now or numbers.is_here:
            self.flush()

    def flush(self) -> None:
        """Write the pending entry, if there is one. End the run if too many steps were skipped."""
        write, self._write = self._write, lambda: None
        write()

    def _entry(self, entry: dict[str, Any], *, in_a_row: int) -> None:
        """Log and print an entry. in_a_row: number of skipped steps just before it; too many end the run."""
        step, loss, config = entry["step"], entry["loss"], self.config
        self._keep(entry)
        if causes := " and ".join(entry.get("not_finite", [])):
            line = f"{causes} was not finite, so {entry['skipped']} of the steps up to step {step} changed no weights"
            self.warn(f"{line}; log.jsonl counts such steps as skipped", once="skipped")
        if step == self.plan.steps or time.perf_counter() - self._last_line > QUIET_S:
            self._last_line = time.perf_counter()
            mfu = f"{entry['mfu']:.1%} MFU, " if "mfu" in entry else ""
            left = (self.plan.steps - step) * entry["seconds"] / max(1, step - self._first_step)
            self.say(
                f"step {step}/{self.plan.steps}: loss {'-' if loss is None else format(loss, '.4f')}, "
                f"{entry['tokens_per_s'] / 1000:.1f} ktok/s, {mfu}lr {entry['lr']:.2e}, data wait "
                f"{entry['data_wait']:.1%}, {timedelta(seconds=round(left))} left, {entry['seconds']:.0f} s"
            )
        # A run may have fewer steps than PATIENCE. In fp16 the first steps are skipped until the scale is low enough.
        if in_a_row >= (PATIENCE if self._trainer.scaler.is_enabled() else min(PATIENCE, self.plan.steps)):
            fp16 = ", or give a --precision other than fp16" * (self._trainer.precision == "fp16")
            sentence = (
                f"the last {in_a_row} steps up to step {step} were skipped, because {causes} was not finite; lower "
                f"--lr {config.lr} or lengthen --warmup{fp16}, and continue from a checkpoint in {self.out}"
            )
            raise TrainingError(sentence, "not-finite", option="lr", given=config.lr)

    def rows(self, step: int) -> None:
        """Log the position in the data, at the start and after each change. All later batches follow from it.

        The entry has the state of the loader and its global_batch_size.
        """
        loader = self._stream.loader
        state = loader.state_dict() | {"global_batch_size": self._stream.phase.rows_at(step)}
        if self.is_first and state | {"position": None} != self._rows:
            self._rows = state | {"position": None}
            self._keep({"step": step, "stream": state})

    def model_changed(self, entry: dict[str, Any]) -> None:
        """Log and print a change of the model. entry: step, change, parameters, loss_before and loss_after."""
        if not self.is_first:
            return
        self._keep(entry)
        before, after = ("-" if loss is None else f"{loss:.4f}" for loss in (entry["loss_before"], entry["loss_after"]))
        changes = ", ".join(f"{name} {was} → {value}" for name, (was, value) in entry["change"].items())
        line = f"{changes}, {entry['parameters']:,} parameters; loss {before} before and {after} after"
        self.say("\n".join([f"step {entry['step']}: the model changes, {line}", *self._keep_model()]))

    def evaluation(self, step: int, entry: dict[str, Any]) -> None:
        """Log and print an evaluation, the result of `Evaluator.evaluate`."""
        self.last_evaluation = step
        if not self.is_first:
            return
        self._keep({"step": step} | entry)
        loss, accuracy = entry["validation_loss"], entry["validation_accuracy"]
        line = "no target in it" if loss is None else f"{loss:.4f}, {accuracy:.1%} right"
        lines = [f"step {step}: validation loss {line}, {entry['validation_s']:.1f} s"]
        lines.append(f"{'Input':<76} | {'Target':<16} | Predicted")
        for around, target, guess in entry["predictions"]:
            lines.append(f"{around[:76]:<76} | {target:<16} | {guess}" + "  x" * (guess != target))
        self.say("\n".join(lines))

    def finish(self) -> None:
        """Print how the run used its time, and save it in run.json."""
        if self.is_first:
            self.say(", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in self._clock.seconds.items()))
            self._run_json["clock"] = self._clock.entry()
            self._write_run_json()

    def card(self, state: TrainState) -> bytes:
        """Return the model card of a checkpoint, with the last evaluation. Called on rank 0."""
        trainer, last = self._trainer, self._log.last_evaluation
        is_frozen = any(method.frozen_by for method in trainer.methods)  # an export changes the number of parameters
        size = "" if is_frozen else f" with {trainer.num_parameters:,} parameters"
        training = {
            "steps": f"{state.step:,} of {self.plan.steps:,}",
            "tokens read, with padding": f"{state.tokens:,}",
            "seconds of training": f"{state.seconds['trained']:.1f}",
            "processes": f"{self.ranks.world_size} on {self.ranks.device.type}, {trainer.precision}",
            "bertrain": bertdata.__version__,
        }
        losses = {}
        if last.get("validation_loss") is not None and "validation_length" in last:  # version 0.1.0 did not log it
            losses = {
                "validation loss": f"{last['validation_loss']:.4f} nats a token",
                "guessing by frequency alone, on the train split": f"{self.reference['unigram']:.4f} nats a token",
                "right": f"{last['validation_accuracy']:.2%}",
                "after step": f"{last['step']:,}",
                "measured on": f"at most {EVALUATED_SAMPLES:,} rows of {last['validation_length']} tokens of the "
                f"validation split, {last['validation_masking']:.0%} masked, in {last['validation_precision']}",
            }
        return card.content(
            f"step-{state.step:08d}",
            f"A masked language model{size}, trained with bertrain.",
            title=f"{self.out.resolve().name} after step {state.step:,}",
            config=trainer.learner.model.config,
            parts={"Training": training, "Loss": losses, **self._about},
        )

    # ----------------------------------------------------------------------------------------------------------- output

    def say(self, line: str) -> None:
        """Print a line on rank 0. A closed pipe does not end the run."""
        if self.is_first:
            try:
                print(line, flush=True)  # noqa: T201
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def warn(self, line: str, *, once: str = "") -> None:
        """Print a warning. once: its kind, if only the first one of that kind is printed."""
        if once not in self._warned:
            self._warned |= {once} - {""}
            self.say(f"warning: {line}")

    def _keep(self, entry: dict[str, Any]) -> None:
        if fault := self._log.write(entry):
            self.warn(f"log.jsonl cannot be written, and the next entry tries again: {fault}", once="log")
        if self.config.log_to and "stream" not in entry:
            self._trackers.write(entry)
