"""What a run writes and shows: log.jsonl, run.json, a progress bar or lines, trackers, warnings, checkpoints."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

import bertdata
from bertdata.support import counted, load_tokenizer, make_directory, spelled, write_file
from bertrain import card, checkpoint
from bertrain.checkpoint import Writer
from bertrain.config import Config
from bertrain.data import Sources
from bertrain.evaluate import EVALUATED_SAMPLES
from bertrain.models.families import has_dropout
from bertrain.plan import Phase, Plan
from bertrain.ranks import Reading, World
from bertrain.speed import Clock
from bertrain.state import TRAINER, TrainingError, TrainState, kept_options
from bertrain.trackers import Trackers
from bertrain.trainer import PATIENCE, Run


def entry_of(line: str) -> dict[str, Any] | None:
    """The entry in a line; None if there is none, as in a line that was cut off or damaged."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else None


class Log:
    """Appends one JSON object a line to log.jsonl. A resumed run first drops the entries after its checkpoint.

    A new run drops them all.

    An entry that a full disk refuses is kept, and written with the next one or at the end. A file that somebody
    removed is written again.
    """

    def __init__(self, path: Path, *, after_step: int) -> None:
        kept, is_kept = [], after_step > 0
        self.last_evaluation: dict[str, Any] = {}
        """The entry of the last evaluation in the log; empty if there is none."""
        self.bad_lines: list[int] = []
        """The numbers of lines that are no entries and were left out, from 1; not of the last, which a kill may cut."""
        if path.exists():
            lines = path.read_text(errors="replace").splitlines()
            for number, line in enumerate(lines, 1):
                if (entry := entry_of(line)) is None:
                    self.bad_lines += [number] * (number < len(lines))
                    continue
                if entry["step"] + ("change" in entry) > after_step:  # a change at a border is after its step
                    is_kept = False
                if not is_kept:
                    continue
                if "validation_loss" in entry:
                    self.last_evaluation = entry
                kept.append(line + "\n")
        write_file(path, "".join(kept).encode())
        self._path = path
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115  (lives as long as the run)
        self._waiting = b""

    def write(self, entry: dict[str, Any]) -> str | None:
        """Returns why the entry could not be written, if so."""
        self._waiting += json.dumps(entry).encode() + b"\n"
        if "validation_loss" in entry:
            self.last_evaluation = entry
        try:
            if not self._path.exists():
                self._begin_again()
            self._flush()
        except OSError as error:
            return error.strerror
        return None

    def _begin_again(self) -> None:
        """Writes a new file with all that the removed one has; it lives as long as it is open."""
        self._file.seek(0)
        content = self._file.read()
        make_directory(self._path.parent)
        write_file(self._path, content)
        self._file.close()
        self._file = open(self._path, "a+b", buffering=0)  # noqa: SIM115

    def _flush(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        with self._file, contextlib.suppress(*([OSError] if kind else [])):
            self._flush()
            os.fsync(self._file.fileno())


def reference_losses(sources: Sources, split: str) -> dict[str, float]:
    """What a loss is compared with, in nats a token: guessing evenly, and guessing by frequency alone.

    The unigram entropy is that of the split's tokens without special ids, over at most ten million of them of each
    dataset. sources: datasets with one tokenizer, and their weights; those without the split are left out.
    """
    special = sources[0][0].special_tokens
    total = sum(weight for shards, weight in sources if split in shards.splits)
    shares = np.zeros(special.vocab_size)
    for shards, weight in sources:
        if split in shards.splits:
            counts = shards.token_counts(split)
            counts[list(special.special_ids)] = 0
            shares += weight / total * (counts / max(1, counts.sum()))
    shares = shares[shares > 0]
    unigram = max(0.0, -float(np.sum(shares * np.log(shares))))
    return {"uniform": math.log(special.vocab_size), "unigram": unigram}


QUIET_S = 30  # seconds between lines, where there is no terminal for a bar
COLLAPSED = 0.9  # share of predictions that are one token
COLLAPSE_STEPS = 500  # earlier, a model that predicts one token has only begun
SHOWN_PREDICTIONS = 5  # of an evaluation
KEPT_PREDICTIONS = 8  # of an evaluation, about 100 bytes each in log.jsonl


def table(predictions: list[tuple[str, str, str]]) -> list[str]:
    """Lines for a terminal, one for each (tokens around, target, predicted); a cross marks a wrong one."""
    lines = [f"{'Input':<76} | {'Target':<16} | Predicted"]
    return lines + [
        f"{around[:76]:<76} | {target:<16} | {guess}{'' if guess == target else '  x'}"
        for around, target, guess in predictions
    ]


class Watch(contextlib.ExitStack):
    """Rank 0 writes and prints; the other ranks show nothing, but errors are raised on all ranks."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        ranks: World,
        sources: Sources,
        *,
        step: int,
    ) -> None:
        """sources: the datasets of --data, and their weights."""
        super().__init__()
        self.config, self.plan, self.ranks, self.sources = config, plan, ranks, sources
        self.out, self.is_first = Path(config.out), ranks.rank == 0
        self.reference = reference_losses(sources, "train")
        self.started = self._last_line = time.perf_counter()
        self._is_mlm = config.objective.split("+")[0] == "mlm"  # the loss compares with guessing a token
        self._warned: set[str] = set()
        self._stream: dict[str, Any] = {}
        self._log: Log | None = None
        if not self.is_first:
            return
        make_directory(self.out)
        self._log = self.enter_context(Log(self.out / "log.jsonl", after_step=step))
        self._bar = self.enter_context(tqdm(total=plan.steps, initial=step, unit="step", disable=None))
        names = list(dict.fromkeys(config.log_to))
        self._trackers = Trackers(names, self.out, config.flat(), step=step, warn=self.warn)
        self.callback(self._trackers.close)

    @property
    def last_evaluation(self) -> dict[str, Any]:
        """The entry of the last evaluation in the log; empty if there is none."""
        return self._log.last_evaluation if self._log else {}

    def announce(self, facts: dict[str, Any], lines: list[str], warnings: list[str]) -> None:
        """Prints what the run amounts to, and keeps it in run.json.

        lines: about methods, and about the sources of a mix.
        """
        config, plan = self.config, self.plan
        ids = [shards.dataset_id for shards, _ in self.sources]
        resolved = facts | {
            "dataset_id": ids if len(ids) > 1 else ids[0],
            "world_size": self.ranks.world_size,
            "device": str(self.ranks.device),
            **asdict(plan),
            "reference_loss": self.reference,
            "versions": card.versions(),
        }
        resolved.pop("warnings")
        self._run_json: dict[str, Any] = {"config": config.flat(), "resolved": resolved}
        self._write_run_json()
        if self._log and self._log.bad_lines:
            numbers = ", ".join(map(str, self._log.bad_lines))
            warnings = [*warnings, f"log.jsonl had lines that are no entries, which were left out: {numbers}"]
        for warning in warnings:
            self.warn(warning)
        resumed = f", resumed after step {facts['step']} from {facts['resumed_from']}" if facts["resumed_from"] else ""
        rows = plan.phases[0].rows
        size, steps = f"{rows} {'row' if max(rows) == 1 else 'rows'}", counted(plan.steps, "step")
        of_pass, number = plan.first_micro_batches()
        passes = "one pass" if number == 1 else f"{number} passes of {of_pass}"
        ranks = "one process" if self.ranks.world_size == 1 else f"each of {self.ranks.world_size} processes"
        first = (
            f"{config.start}: {facts['parameters']:,} parameters, {steps}, {size} a step, in {passes} on "
            f"{ranks}, {facts['precision']}, attention by {' or '.join(facts['attention'])}, "
            f"{counted(facts['samples_per_epoch'], 'sample')} an epoch{resumed}"
        )
        reference = (
            f"losses to compare with, in nats a token of the train split: {self.reference['uniform']:.3f} by guessing "
            f"evenly, {self.reference['unigram']:.3f} by frequency alone"
        )
        lines = [first, *lines, reference, *plan.describe()]
        for line in [*lines, *_scale_lines(resolved.get("lr_scale", []))]:
            self.say(line)

    def phase(self, step: int, phase: Phase) -> None:
        """Shows that a phase begins after a step."""
        self.say(f"step {step}: {self.plan.line(phase)}")

    def model_changed(self, entry: dict[str, Any], scales: list[dict[str, Any]]) -> None:
        """Keeps and shows how the model has changed. scales: what --lr-scale amounts to from then on."""
        if not self.is_first:
            return
        self._keep(entry)
        self._run_json["resolved"] |= {"parameters": entry["parameters"]} | ({"lr_scale": scales} if scales else {})
        self._renew_run_json()
        losses = " before and ".join(
            "-" if entry[f"loss_{when}"] is None else f"{entry[f'loss_{when}']:.4f}" for when in ("before", "after")
        )
        changes = ", ".join(f"{name} {was} → {value}" for name, (was, value) in entry["change"].items())
        self.say(
            f"step {entry['step']}: the model changes, {changes}, {entry['parameters']:,} parameters; loss {losses} "
            "after"
        )
        for line in _scale_lines(scales):
            self.say(line)

    def _write_run_json(self) -> None:
        write_file(self.out / "run.json", json.dumps(self._run_json, indent=1).encode())

    def _renew_run_json(self) -> None:
        """Writes run.json again. A full disk does not end a run."""
        try:
            self._write_run_json()
        except OSError as error:
            self.warn(f"run.json cannot be written: {error.strerror}")

    def say(self, line: str) -> None:
        """Prints a line on rank 0, above the progress bar if there is one. A reader that has gone ends no run."""
        if self.is_first:
            try:
                tqdm.write(line, file=sys.stdout)
                sys.stdout.flush()
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def warn(self, line: str) -> None:
        self.say(f"warning: {line}")

    def advance(self) -> None:
        if self.is_first:
            self._bar.update()

    def stream(self, step: int, loader: bertdata.Loader) -> None:
        """Keeps what a run reads after a step, at its start and at each change: then every later batch is known.

        The entry has the state of the loader and its global_batch_size.
        """
        if not self.is_first:
            return
        state = loader.state_dict() | {"global_batch_size": loader.global_batch_size}
        if state | {"position": None} != self._stream:
            self._stream = state | {"position": None}
            self._keep({"step": step, "stream": state})

    def entry(self, entry: dict[str, Any], *, done: bool) -> None:
        """Keeps and shows what happened since the last entry."""
        if not self.is_first:
            return
        step, loss = entry["step"], entry["loss"]
        self._keep(entry)
        if "skipped" in entry:
            self._warn_once(
                "skipped",
                f"{' and '.join(entry['not_finite'])} was not finite, so {entry['skipped']} of the steps up to step "
                f"{step} changed nothing; log.jsonl counts such steps as skipped",
            )
        shown = "-" if loss is None else f"{loss:.4f}"
        if self._is_mlm:
            shown += f" (unigram {self.reference['unigram']:.2f})"
        mfu = f", MFU {entry['mfu']:.1%}" if entry.get("mfu") else ""
        line = (
            f"loss {shown}, {entry['tokens_per_s'] / 1000:.1f} ktok/s{mfu}, "
            f"lr {entry['lr']:.2e}, data wait {entry['data_wait']:.1%}"
        )
        self._bar.set_postfix_str(line)
        if self._bar.disable and (done or time.perf_counter() - self._last_line > QUIET_S):
            self._last_line = time.perf_counter()
            self.say(f"step {step}/{self.plan.steps}: {line}, {entry['seconds']:.0f} s")

    def evaluation(
        self, step: int, result: dict[str, Any], predictions: list[tuple[str, str, str]], *, seconds: float
    ) -> None:
        """Keeps and shows an evaluation. predictions: tokens around, target, predicted. seconds: what both took.

        result: of `evaluate`, with the length, masking and precision of its rows.
        """
        if not self.is_first:
            return
        names = ("loss", "accuracy", "targets", "length", "masking", "precision")
        entry = {"step": step} | {f"validation_{name}": result[name] for name in names}
        by_source = result.get("sources", {})
        if by_source:
            entry["validation_sources"] = by_source
        self._keep(entry | {"validation_s": round(seconds, 3), "predictions": predictions[:KEPT_PREDICTIONS]})
        loss = "no target in it" if result["loss"] is None else f"{result['loss']:.4f}, {result['accuracy']:.1%} right"
        if by_source:
            losses = ((name, part["loss"]) for name, part in by_source.items())
            loss += "; " + ", ".join(f"{name} {'-' if value is None else f'{value:.4f}'}" for name, value in losses)
        lines = [f"step {step}: validation loss {loss}, {seconds:.1f} s", *table(predictions[:SHOWN_PREDICTIONS])]
        self.say("\n".join(lines))
        if step >= COLLAPSE_STEPS and result["same_share"] > COLLAPSED and result["targets"] > 100:
            token = spelled(load_tokenizer(str(self.sources[0][0].path)))(result["same_token"])
            self._warn_once(
                "collapse",
                f"at step {step} {result['same_share']:.0%} of all predictions are the token {token!r}: the model has "
                "collapsed; try a lower --lr or a longer --warmup",
            )

    def finish(self, clock: Clock) -> None:
        """Says what the time of the run went to, and keeps it in run.json."""
        if not self.is_first:
            return
        names = {"waited": "waited for checkpoints"}
        parts = [(kind, seconds) for kind, seconds in clock.seconds.items() if seconds or kind != "compiled"]
        self.say(", ".join(f"{names.get(kind, kind)} {seconds:.1f} s" for kind, seconds in parts))
        self._run_json["clock"] = clock.entry()
        self._renew_run_json()

    def _keep(self, entry: dict[str, Any]) -> None:
        assert self._log is not None  # noqa: S101  (rank 0)
        gone = not (self.out / "log.jsonl").exists()
        if fault := self._log.write(entry):
            self._warn_once("log", f"log.jsonl cannot be written and is tried again with the next entry: {fault}")
        elif gone:
            self._renew_run_json()
            self._warn_once("gone", f"{self.out} was removed during the run and has been made again")
        if self.config.log_to and "stream" not in entry:
            numbers = {
                name.replace("validation_", "validation/"): value
                for name, value in _flat(entry)
                if name != "step" and isinstance(value, (int, float))
            }
            self._trackers.write(numbers, entry["step"])

    def _warn_once(self, kind: str, line: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self.warn(line)


def _flat(entry: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers of an entry of the log: those of sources as sources/<name>/tokens."""
    for name, value in entry.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}/")
        else:
            yield before + name, value


def _scale_lines(scales: list[dict[str, Any]]) -> list[str]:
    """What --lr-scale amounts to, a line for each."""
    return [
        f"--lr-scale {row['pattern']}={row['factor']:g}: {row['tensors']} tensors, {row['parameters']:,} parameters"
        + " are frozen" * (row["factor"] == 0)
        for row in scales
    ]


class Records:
    """Writes what is due. Its methods are called on every rank; rank 0 writes."""

    def __init__(self, run: Run, lock: checkpoint.Lock) -> None:
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
        lines = run.told + run.batches.shares()
        if run.resumed_from and run.is_done:
            lines.append(f"the run is complete, with step {run.step:,}; give more --steps, or another --out")
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

    def log(self, *, is_last: bool) -> None:
        """Makes an entry of the log, on every rank. On a GPU it is written by `write_entry`, but for the last one."""
        run, training = self._run, self._run.training
        numbers = Reading(torch.cat([run.sums.take(run.ranks), training.norm.double()[None], training.in_a_row]))
        step, rate, tokens = run.step, training.rate, run.tokens
        read, epochs = run.batches.source_tokens(), run.batches.epochs()

        def write() -> None:
            *sums, norm, in_a_row = numbers.take()
            run.clock.lap("trained")  # also the wait for the GPU
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
                **run.clock.rates(run.ranks.world_size),
                "seconds": round(time.perf_counter() - run.watch.started, 3),
                **run.clock.entry(),
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

        def write() -> None:
            self._lock.require()
            self.writer.wait()
            if self.saved_step != run.step:
                if self.saved_step == self._tried:
                    self._milestones = []
                self._milestones, self._tried = [*self._milestones, *run.milestones], run.step
                self.writer.save(self._target, run.learner.model, self._content(), required=required)

        run.ranks.on_first(write)
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
            scaler=run.training.scaler.state_dict(),
            milestones=self._milestones,
            made_with=run.made_with,
            options=kept_options(run.config.flat()),
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
        return self._run.out / f"{checkpoint.STEP}{self._run.step:08d}"

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
            run.ranks.on_first(self._finish)

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
        return int(self.writer.saved.name.removeprefix(checkpoint.STEP)) if self.writer.saved else None

    def describe_newest(self) -> str:
        """What a stopped run has saved: a sentence."""
        saved = f"Step {self.saved_step} is saved" if self.writer.saved else "Nothing is saved yet"
        return f"{saved}; run the same command to continue."
