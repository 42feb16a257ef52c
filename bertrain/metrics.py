"""What is written down about a run: JSON lines, entropies to compare a loss with, rates, and rows to look at."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from bertdata import IGNORE_INDEX, Batch, Dataset
from bertdata.shard import write_file
from bertdata.tokens import Tokenizer


class Log:
    """Appends one JSON object a line to log.jsonl. A resumed run first drops what lies after its checkpoint."""

    def __init__(self, path: Path, *, after_step: int) -> None:
        kept = []
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    entry = json.loads(line)
                except ValueError:  # cut off as the process died
                    break
                if entry.get("step", 0) > after_step:
                    break
                kept.append(line + "\n")
        write_file(path, "".join(kept).encode())
        self._file = open(path, "a", buffering=1)  # noqa: SIM115  (lives as long as the run)

    def write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def means(loss: float, right: float, targets: float) -> dict[str, float | None]:
    """Loss and accuracy a target; None where there was no target."""
    return {"loss": loss / targets if targets else None, "accuracy": right / targets if targets else None}


class Rates:
    """Tokens a second and the share of time spent waiting for data, since the last `take`."""

    def __init__(self) -> None:
        self._since, self._tokens, self._waited = time.perf_counter(), 0, 0.0

    def add(self, *, tokens: int, waited: float) -> None:
        self._tokens += tokens
        self._waited += waited

    def take(self) -> dict[str, float]:
        seconds = time.perf_counter() - self._since
        rates = {"tokens_per_s": round(self._tokens / seconds, 1), "data_wait": round(self._waited / seconds, 5)}
        self.__init__()  # type: ignore[misc]
        return rates


def reference_losses(shards: Dataset, split: str) -> dict[str, float]:
    """What a loss is to be compared with, in nats: guessing evenly, and guessing by frequency alone.

    The unigram entropy is that of the split's tokens without special ids, over at most ten million of them.
    """
    counts = shards.token_counts(split)
    counts[list(shards.special_tokens.special_ids)] = 0
    shares = counts[counts > 0] / max(1, counts.sum())
    unigram = max(0.0, -float(np.sum(shares * np.log(shares))))
    return {"uniform": math.log(shards.special_tokens.vocab_size), "unigram": unigram}


def table(tokenizer: Tokenizer, batch: Batch, predicted: np.ndarray, *, context: int = 5) -> list[str]:
    """One line for each masked place: the tokens around it | target | predicted. predicted int64 [B, K]."""
    lines = [f"{'Input':<76} | {'Target':<16} | Predicted"]
    for row, ids in enumerate(batch.input_ids):
        for slot, place in enumerate(batch.masked_positions[row]):
            target = int(batch.targets[row, slot])
            if target == IGNORE_INDEX:
                continue
            first = max(0, place - context)
            around = [tokenizer.spell(int(token)) for token in ids[first : place + context + 1]]
            around[place - first] = f">{around[place - first]}<"
            text = " ".join(around)
            guess = int(predicted[row, slot])
            mark = "" if guess == target else "  x"
            lines.append(f"{text[:76]:<76} | {tokenizer.spell(target):<16} | {tokenizer.spell(guess)}{mark}")
    return lines
