"""log.jsonl, the sums of losses between its entries, and the losses to compare them with."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertdata import Dataset
from bertdata.files import make_directory, write_file
from bertrain.objectives.losses import LossSum
from bertrain.run.entries import entry_of
from bertrain.runtime.dist import World

Sources = Sequence[tuple[Dataset, float]]
"""The datasets of --data, with their weights."""


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


_LOSS, _CORRECT, _COUNT = 0, 1, 2  # the columns of Sums
_SKIPPED = ".skipped"  # beside the names of objectives, none of which has a dot


class Sums:
    """Sums since the last entry of the log, by objective: float64 [N, 3], losses, correct predictions and counts."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        """names: of objectives."""
        self._names = list(names)
        self._values = torch.zeros((len(names), 3), dtype=torch.float64, device=device)
        self._before = self._values  # without the step under way
        self._skipped = torch.zeros(1 + len(names), dtype=torch.float64, device=device)
        """Skipped steps, counted on rank 0, and on each rank those in which each loss was not finite."""

    def add_counts(self, counts: torch.Tensor) -> None:
        """Begins a step. counts float64 [N]: what this rank's sums are over."""
        self._before = self._values.clone()
        self._values[:, _COUNT] += counts

    def add(self, losses: Mapping[str, LossSum]) -> None:
        """Add those of a micro-batch, by objective."""
        for row, name in zip(self._values, self._names, strict=True):
            row[_LOSS] += losses[name].sum.detach()
            row[_CORRECT] += losses[name].num_correct

    def end_step(self, skipped: torch.Tensor, ranks: World) -> None:
        """Leaves out what was added since `add_counts` if the step was skipped.

        skipped: float32 [], 1 for a step that was, else 0.
        """
        self._skipped[0] += skipped * (ranks.rank == 0)
        self._skipped[1:] += ~self._values[:, _LOSS].isfinite()
        torch.where(skipped != 0, self._before, self._values, out=self._values)

    def take(self, ranks: World) -> torch.Tensor:
        """The sums of all ranks for `means`, float64 [3 N + 1 + N]. They begin again at 0."""
        taken = torch.cat([ranks.sum(self._values).flatten(), ranks.sum(self._skipped)])
        self._values.zero_()
        self._skipped.zero_()
        return taken

    def means(self, taken: Sequence[float], log_names: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
        """The mean loss and share of correct predictions of each objective over all ranks; None where nothing was.

        If steps were skipped, `skipped` says how many, and `not_finite` which of the losses were the cause. taken: what
        `take` gave.
        """
        means: dict[str, Any] = {}
        size = self._values.numel()
        rows = (taken[start : start + 3] for start in range(0, size, 3))
        for name, (loss, correct, count) in zip(self._names, rows, strict=True):
            loss_name, accuracy_name = log_names[name]
            means |= {loss_name: loss / count if count else None, accuracy_name: correct / count if count else None}
        steps, *wild = taken[size:]
        if steps:
            names = [log_names[name][0] for name, times in zip(self._names, wild, strict=True) if times]
            means |= {"skipped": int(steps), "not_finite": names or ["grad_norm"]}
        return means

    def gather(self, ranks: World) -> None:
        """Moves the sums of all ranks to rank 0, which saves them."""
        ranks.sum(self._values).mul_(ranks.rank == 0)
        ranks.sum(self._skipped).mul_(ranks.rank == 0)

    def state(self) -> dict[str, list[float]]:
        skipped = {_SKIPPED: self._skipped.tolist()} if self._skipped[0] else {}
        return dict(zip(self._names, self._values.tolist(), strict=True)) | skipped

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        """Continues from a state. Those of earlier versions have further columns, which are left out."""
        for sums, name in [*zip(self._values, self._names, strict=True), (self._skipped, _SKIPPED)]:
            saved = torch.tensor(state.get(name, ())[: len(sums)], dtype=torch.float64)
            sums[: len(saved)] += saved.to(sums.device)


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
