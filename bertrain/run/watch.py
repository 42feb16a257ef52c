"""What a run shows while it runs: log.jsonl, run.json, a progress bar or lines, trackers if asked, warnings."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

import bertdata
from bertdata.errors import counted
from bertdata.files import make_directory, write_file
from bertdata.tokenize.load import load as load_tokenizer
from bertdata.tokenize.spelling import spelled
from bertrain.options.config import Config
from bertrain.run import card
from bertrain.run.log import Log, Sources, reference_losses
from bertrain.run.phases import Phase
from bertrain.run.schedule import Plan
from bertrain.runtime.clock import Clock
from bertrain.runtime.dist import World
from bertrain.runtime.trackers import Trackers

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


class TrainingError(bertdata.BertdataError):
    """A run cannot continue."""


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
