"""What a run writes and shows: log.jsonl, run.json, a progress bar or lines, trackers, warnings, the model card."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bertdata.support import counted, load_tokenizer, make_directory, spelled, write_file
from bertrain import card
from bertrain.data import Stream
from bertrain.evaluate import reference_losses, table
from bertrain.models.families import has_dropout
from bertrain.optim.optimizers import scaled_rates
from bertrain.ranks import Reading
from bertrain.speed import Clock
from bertrain.state import TrainingError, TrainState
from bertrain.trackers import Trackers
from bertrain.trainer import Trainer

PATIENCE = 10  # skipped steps in a row that end a run
QUIET_S = 30  # seconds between lines, where there is no terminal for a bar
COLLAPSED = 0.9  # share of predictions that are one token
COLLAPSE_STEPS = 500  # earlier, a model that predicts one token is no cause for a warning
SHOWN_PREDICTIONS = 5  # of an evaluation
KEPT_PREDICTIONS = 8  # of an evaluation, about 100 bytes each in log.jsonl


def entry_of(line: str) -> dict[str, Any] | None:
    """Return the entry in a line of log.jsonl; None for a line that is incomplete or damaged."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else None


class Log:
    """Appends one JSON object a line to log.jsonl.

    A run first removes the entries after its checkpoint; a new run removes all. An entry that does not fit on the disk
    is written with the next one, or at the end. If somebody removes the file, it is written again.
    """

    def __init__(self, path: Path, *, after_step: int) -> None:
        kept, is_kept = [], after_step > 0
        self.last_evaluation: dict[str, Any] = {}
        """The entry of the last evaluation in the log; empty if there is none."""
        self.bad_lines: list[int] = []
        """The numbers of invalid lines, from 1, which were removed; without the last line, which a kill may cut."""
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
        """Append an entry. Return why it could not be written, else None."""
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
        """Write a new file with the content of the removed one, which exists as long as it is open."""
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


class Report(contextlib.ExitStack):
    """Logs and prints a run. Call `log` and `flush` on all ranks; what only rank 0 does, others leave out."""

    def __init__(self, trainer: Trainer, stream: Stream, clock: Clock, *, step: int, guard: Callable[[], None]) -> None:
        """step: of the checkpoint. guard: called on rank 0 before each entry, to check the lock of the directory."""
        super().__init__()
        self._trainer, self._stream, self._clock, self._guard = trainer, stream, clock, guard
        self.config, self.plan, self.ranks = trainer.config, trainer.plan, trainer.ranks
        self.out, self.is_first = Path(self.config.out), self.ranks.rank == 0
        self.reference = reference_losses(stream.sources, "train")
        self.last_evaluation = -1
        """The step of the last evaluation in the log."""
        self._started = self._last_line = time.perf_counter()
        self._first_step = step
        self._warned: set[str] = set()
        self._rows: dict[str, Any] = {}
        self._write: Callable[[], None] = lambda: None
        self._run_json: dict[str, Any] = {}
        if self.is_first:
            make_directory(self.out)
            self._log = self.enter_context(Log(self.out / "log.jsonl", after_step=step))
            self._bar = self.enter_context(tqdm(total=self.plan.steps, initial=step, unit="step", disable=None))
            names = list(dict.fromkeys(self.config.log_to))
            if names:
                self._trackers = Trackers(names, self.out, self.config.flat(), step=step, warn=self.warn)
                self.callback(self._trackers.close)
            self._about = card.about_run(self._stream)

    # ------------------------------------------------------------------------------------------------ the first lines

    def begin(self, resumed_from: Path | None, warnings: list[str], changes: list[str]) -> None:
        """Print what the run is, and write run.json. Call it on all ranks.

        warnings: of models and checkpoints. changes: lines about what has changed since the checkpoint.
        """
        self.last_evaluation = self.ranks.from_first(lambda: self._begin(resumed_from, warnings, changes))

    def _begin(self, resumed_from: Path | None, warnings: list[str], changes: list[str]) -> int:
        config, plan, trainer, stream = self.config, self.plan, self._trainer, self._stream
        facts: dict[str, Any] = {
            "step": self._first_step,
            "resumed_from": str(resumed_from) if resumed_from else None,
            "precision": trainer.precision,
            "eval_precision": trainer.eval_precision,
            "attention": trainer.attention,
            "samples_per_epoch": stream.loader.num_samples,
            "parameters": trainer.num_parameters,
        }
        if config.lr_scale:
            facts["lr_scale"] = scaled_rates(trainer.learner.sizes, config)
        lines = changes + stream.describe_mix()
        for method in trainer.methods:
            if of_method := method.facts(trainer.learner):
                facts[method.name] = of_method
                lines.append(f"{method.name}: {', '.join(f'{key} {value}' for key, value in of_method.items())}")
        ids = [shards.dataset_id for shards, _ in stream.sources]
        facts |= {
            "dataset_id": ids if len(ids) > 1 else ids[0],
            "world_size": self.ranks.world_size,
            "device": str(self.ranks.device),
            "steps": plan.steps,
            "micro_batch_size": plan.micro_batch_size,
            "phases": [phase.saved() for phase in plan.phases],
            "reference_loss": self.reference,
            "versions": card.versions(),
        }
        self._run_json = {"config": config.flat(), "resolved": facts}
        self._write_run_json()
        for warning in [*warnings, *self._warnings(), *plan.warnings]:
            self.warn(warning)
        for line in [*lines, *self._lines(facts), *_scale_lines(facts.get("lr_scale", []))]:
            self.say(line)
        return int(self._log.last_evaluation.get("step", 0))

    def _warnings(self) -> Iterator[str]:
        for path, shards in self._stream.datasets.items():
            if "validation" not in shards.splits and self.config.eval_every:
                yield f"{path} has no validation split, so it is not evaluated; build it with a larger --validation"
        if any(has_dropout(each.model) for each in self._trainer.learner.encoders) and self.ranks.world_size > 1:
            yield "the model has dropout, so another number of ranks would give another run"
        if self._log.bad_lines:
            yield f"log.jsonl had invalid lines, which were removed: {', '.join(map(str, self._log.bad_lines))}"

    def _lines(self, facts: Mapping[str, Any]) -> list[str]:
        rows = self.plan.phases[0].options.global_batch_size
        size, number = self.plan.first_micro_batches()
        resumed = f", resumed after step {facts['step']} from {facts['resumed_from']}" if facts["resumed_from"] else ""
        return [
            f"{self.config.start}: {facts['parameters']:,} parameters, {counted(self.plan.steps, 'step')}, {rows} "
            f"{'row' if rows == 1 else 'rows'} a step, in {number} × {size} on each of "
            f"{counted(self.ranks.world_size, 'rank')}, {facts['precision']}, attention by "
            f"{' or '.join(facts['attention'])}, {counted(facts['samples_per_epoch'], 'sample')} an epoch{resumed}",
            f"losses to compare with, in nats a token of the train split: {self.reference['uniform']:.3f} by guessing "
            f"evenly, {self.reference['unigram']:.3f} by frequency alone",
            *self.plan.describe(),
        ]

    def _write_run_json(self) -> None:
        write_file(self.out / "run.json", json.dumps(self._run_json, indent=1).encode())

    def _renew_run_json(self) -> None:
        """Write run.json again. A full disk does not end a run."""
        try:
            self._write_run_json()
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
            self._clock.lap("trained")  # also the wait for the GPU
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
            self.ranks.on_first(lambda: self._entry(entry, is_last=step == self.plan.steps))
            # A run may be shorter; in fp16 it begins with steps that are skipped, until its scale is low enough.
            patience = PATIENCE if trainer.scaler.is_enabled() else min(PATIENCE, self.plan.steps)
            if in_a_row >= patience:
                self.ranks.on_first(lambda: self._give_up(step, int(in_a_row), entry["not_finite"]))

        self._write = write
        if now or numbers.is_here:
            self.flush()

    def flush(self) -> None:
        """Write the entry that waits for its numbers, if there is one; end the run if too many steps were skipped."""
        write, self._write = self._write, lambda: None
        write()

    def _entry(self, entry: dict[str, Any], *, is_last: bool) -> None:
        self._guard()
        step, loss = entry["step"], entry["loss"]
        self._keep(entry)
        if "skipped" in entry:
            self._warn_once(
                "skipped",
                f"{' and '.join(entry['not_finite'])} was not finite, so {entry['skipped']} of the steps up to step "
                f"{step} changed nothing; log.jsonl counts such steps as skipped",
            )
        shown = "-" if loss is None else f"{loss:.4f}"
        if self.config.objective.split("+")[0] == "mlm":  # its loss compares with guesses of a token
            shown += f" (unigram {self.reference['unigram']:.2f})"
        mfu = f", MFU {entry['mfu']:.1%}" if entry.get("mfu") else ""
        left = (self.plan.steps - step) * entry["seconds"] / max(1, step - self._first_step)
        line = (
            f"loss {shown}, {entry['tokens_per_s'] / 1000:.1f} ktok/s{mfu}, lr {entry['lr']:.2e}, data wait "
            f"{entry['data_wait']:.1%}, {timedelta(seconds=round(left))} left"
        )
        self._bar.set_postfix_str(line)
        if self._bar.disable and (is_last or time.perf_counter() - self._last_line > QUIET_S):
            self._last_line = time.perf_counter()
            self.say(f"step {step}/{self.plan.steps}: {line}, {entry['seconds']:.0f} s")

    def _give_up(self, step: int, in_a_row: int, losses: list[str]) -> None:
        config = self.config
        fp16 = ", or give another --precision than fp16" * (self._trainer.precision == "fp16")
        sentence = (
            f"the last {in_a_row} steps up to step {step} were skipped, because {' and '.join(losses)} was not finite; "
            f"lower --lr {config.lr} or lengthen --warmup{fp16}, and continue from a checkpoint in {self.out}"
        )
        raise TrainingError(sentence, "not-finite", option="lr", given=config.lr)

    def rows(self, step: int) -> None:
        """Log which rows are read after a step, at the start and after each change: all later batches follow from it.

        The entry has the state of the loader and its global_batch_size.
        """
        loader = self._stream.loader
        state = loader.state_dict() | {"global_batch_size": self._stream.phase.rows_at(step)}
        if self.is_first and state | {"position": None} != self._rows:
            self._rows = state | {"position": None}
            self._keep({"step": step, "stream": state})

    def model_changed(self, entry: dict[str, Any]) -> None:
        """Log and print how the model has changed. entry: step, change, parameters, loss_before and loss_after."""
        if not self.is_first:
            return
        self._keep(entry)
        scales = scaled_rates(self._trainer.learner.sizes, self.config)
        self._run_json["resolved"] |= {"parameters": entry["parameters"]} | ({"lr_scale": scales} if scales else {})
        self._renew_run_json()
        before, after = ("-" if loss is None else f"{loss:.4f}" for loss in (entry["loss_before"], entry["loss_after"]))
        changes = ", ".join(f"{name} {was} → {value}" for name, (was, value) in entry["change"].items())
        line = f"{changes}, {entry['parameters']:,} parameters; loss {before} before and {after} after"
        self.say("\n".join([f"step {entry['step']}: the model changes, {line}", *_scale_lines(scales)]))

    def evaluation(self, step: int, result: dict[str, Any], predictions: list[tuple[str, str, str]]) -> None:
        """Log and print an evaluation: what `Evaluator.evaluate` returned."""
        self.last_evaluation = step
        if not self.is_first:
            return
        names = ("loss", "accuracy", "targets", "length", "masking", "precision")
        entry = {"step": step} | {f"validation_{name}": result[name] for name in names}
        by_source = result.get("sources", {})
        if by_source:
            entry["validation_sources"] = by_source
        self._keep(entry | {"validation_s": round(result["s"], 3), "predictions": predictions[:KEPT_PREDICTIONS]})
        loss = "no target in it" if result["loss"] is None else f"{result['loss']:.4f}, {result['accuracy']:.1%} right"
        for name, part in by_source.items():
            loss += f"; {name} {'-' if part['loss'] is None else format(part['loss'], '.4f')}"
        lines = [f"step {step}: validation loss {loss}, {result['s']:.1f} s", *table(predictions[:SHOWN_PREDICTIONS])]
        self.say("\n".join(lines))
        if step >= COLLAPSE_STEPS and result["same_share"] > COLLAPSED and result["targets"] > 100:
            token = spelled(load_tokenizer(str(next(iter(self._stream.datasets.values())).path)))(result["same_token"])
            self._warn_once(
                "collapse",
                f"at step {step} {result['same_share']:.0%} of all predictions are the token {token!r}: the model has "
                "collapsed; try a lower --lr or a longer --warmup",
            )

    def finish(self) -> None:
        """Print what the time of the run was used for, and keep it in run.json."""
        if self.is_first:
            names = {"waited": "waited for checkpoints"}
            parts = [(kind, seconds) for kind, seconds in self._clock.seconds.items() if seconds or kind != "compiled"]
            self.say(", ".join(f"{names.get(kind, kind)} {seconds:.1f} s" for kind, seconds in parts))
            self._run_json["clock"] = self._clock.entry()
            self._renew_run_json()

    def card(self, state: TrainState) -> bytes:
        """Return the model card of a checkpoint, with the last evaluation. On rank 0."""
        facts = {"seconds": self._clock.seconds["trained"], "unigram": self.reference["unigram"]}
        return card.of_run(self._trainer, state, self._about, self._log.last_evaluation, **facts)

    # ----------------------------------------------------------------------------------------------------------- output

    def say(self, line: str) -> None:
        """Print a line on rank 0, above the progress bar. A closed pipe does not end the run."""
        if self.is_first:
            try:
                tqdm.write(line, file=sys.stdout)
                sys.stdout.flush()
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def warn(self, line: str) -> None:
        """Print a warning."""
        self.say(f"warning: {line}")

    def advance(self) -> None:
        """Move the progress bar by a step."""
        if self.is_first:
            self._bar.update()

    def _keep(self, entry: dict[str, Any]) -> None:
        was_removed = not (self.out / "log.jsonl").exists()
        if fault := self._log.write(entry):
            self._warn_once("log", f"log.jsonl cannot be written and is tried again with the next entry: {fault}")
        elif was_removed:
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
    """Yield the numbers of an entry by name, those of sources as sources/<name>/tokens."""
    for name, value in entry.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}/")
        else:
            yield before + name, value


def _scale_lines(scales: list[dict[str, Any]]) -> list[str]:
    """Return a line for each --lr-scale: which parameters it scales."""
    return [
        f"--lr-scale {row['pattern']}={row['factor']:g}: {row['tensors']} tensors, {row['parameters']:,} parameters"
        + " are frozen" * (row["factor"] == 0)
        for row in scales
    ]
