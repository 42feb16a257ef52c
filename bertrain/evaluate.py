"""Loss, accuracy and predictions of a model on held-out text, with masks that a seed determines.

By default 15 % of the tokens are masked (80/10/10), even if training used other masks, so that results can be compared.
The loss is a mean over tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

import bertdata
from bertdata.support import TOKENIZER, Spelling, load_tokenizer, spelled
from bertrain.data import Sources, Stream, micro_batches
from bertrain.models.encoder import PLACES, Encoder
from bertrain.ranks import Signals, World
from bertrain.speed import Clock
from bertrain.trainer import Trainer, autocast_of

MASKING = bertdata.Masking(probability=0.15, rule=1)  # never changes, so that results of all versions can be compared
ROWS = 64  # rows in a batch, and in a forward pass
CONTEXT = 5  # tokens on each side of a masked one
EVALUATED_SAMPLES = 2048  # largest number in one evaluation of a run
KEPT_PREDICTIONS = 8  # per evaluation of a run; each has about 100 bytes in log.jsonl


@torch.no_grad()
def evaluate(
    encoder: Encoder,
    shards: bertdata.Dataset,
    ranks: World,
    *,
    split: str,
    length: int,
    max_samples: int | None = None,
    masking: bertdata.Masking = MASKING,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Return the mean loss (nats per token), accuracy and counts on a split, or on its first `max_samples` samples.

    The order is random and fixed. bits_per_byte: bits per token × tokens per byte; None if the dataset's bytes are
    unknown. All ranks must call it: each evaluates a part, and all get the same result. autocast: returns the context
    of forward passes. interrupted: called on all ranks after each batch; if it returns true, the result is None.
    """
    options: dict[str, Any] = {"split": split, "length": length, "masking": masking}
    options |= {"rank": ranks.rank, "world_size": ranks.world_size}
    loader = loader_for(encoder, shards, rows=ROWS * ranks.world_size, **options)
    totals = torch.zeros(4, dtype=torch.float64, device=ranks.device)  # loss, correct, targets, samples
    was_training = encoder.training
    encoder.eval()
    size = max(1, min(ROWS, PLACES // length))
    last = min(loader.num_samples, max_samples or loader.num_samples)
    while loader.position < last:
        loader.global_batch_size = min(ROWS * ranks.world_size, last - loader.position)
        batch, rows = next(loader), -(-loader.global_batch_size // ranks.world_size)  # of the rank with most rows
        for piece in micro_batches(batch, size=size, count=-(-rows // size), device=ranks.device):
            with autocast():
                logits = encoder.logits(**piece).flatten(0, 1).float()
            wanted = piece["targets"].flatten()
            loss = F.cross_entropy(logits, wanted, ignore_index=bertdata.IGNORE_INDEX, reduction="sum")
            totals[:2] += torch.stack([loss.double(), (logits.argmax(-1) == wanted).sum().double()])
        num_targets = int((batch.targets != bertdata.IGNORE_INDEX).sum())
        totals[2:] += torch.tensor([num_targets, batch.sample_ids.size], device=ranks.device)
        if interrupted():
            encoder.train(was_training)
            return None
    encoder.train(was_training)
    *sums, targets, samples = ranks.sum(totals).tolist()
    mean, accuracy = (total / targets if targets else None for total in sums)
    text_bytes = shards.manifest.counts.get("text_bytes")  # absent if another program made the shards
    tokens = shards.num_tokens - shards.num_documents * (shards.special_tokens.separator is not None)
    return {
        "split": split,
        "loss": mean,
        "accuracy": accuracy,
        "mlm_ppl": None if mean is None else math.exp(min(700.0, mean)),
        "bits_per_byte": None if mean is None or not text_bytes else mean / math.log(2) * tokens / text_bytes,
        "targets": int(targets),
        "samples": int(samples),
    }


def loader_for(encoder: Encoder, shards: bertdata.Dataset, *, rows: int, **options: Any) -> bertdata.Loader:
    """Return a loader that reads each row of a split once, in an order and with masks that never change.

    options: more options of bertdata.Loader.
    """
    options = {"masking": MASKING, "samples": "packed" if encoder.isolate else "windows"} | options
    return bertdata.Loader(shards, global_batch_size=rows, seed=0, epochs=1, **options)


Shown = tuple[str, list[tuple[str, str, list[str]]]]
"""A sample for display: its text, with masked tokens between > and <, and (tokens around, target, most probable
tokens) for each masked token."""


@torch.no_grad()
def samples(encoder: Encoder, shards: bertdata.Dataset, *, rows: int, best: int, **options: Any) -> list[Shown]:
    """Return the first rows that `evaluate` reads, with the `best` most probable tokens for each mask.

    options: split, length and masking, as in `evaluate`.
    """
    batch = next(loader_for(encoder, shards, rows=rows, **options))
    piece = next(micro_batches(batch, size=rows, count=1, device=encoder.model.device))
    was_training = encoder.training
    encoder.eval()
    logits = encoder.logits(**piece)[..., : shards.special_tokens.vocab_size]
    predicted = logits.topk(min(best, logits.shape[-1]), dim=-1).indices.cpu().numpy()
    encoder.train(was_training)
    tokenizer = load_tokenizer(str(shards.path))
    spelling, as_read = Spelling(tokenizer.files[TOKENIZER]), spelled(tokenizer)
    shown: list[Shown] = []
    for row, ids in enumerate(batch.input_ids):
        size = ids.size if batch.attention_mask is None else int(batch.attention_mask[row].sum())
        tokens, masked = [tokenizer.spell(int(token)) for token in ids[:size]], {}
        for slot in np.flatnonzero(batch.targets[row] != bertdata.IGNORE_INDEX):
            position = int(batch.masked_positions[row, slot])
            first = max(0, position - CONTEXT)
            around = spelling.text(tokens[first : position + CONTEXT + 1], {position - first})
            guesses = [as_read(int(token)) for token in predicted[row, slot]]
            masked[position] = around, as_read(int(batch.targets[row, slot])), guesses
        shown.append((spelling.text(tokens, {*masked}), list(masked.values())))
    return shown


def reference_losses(sources: Sources, split: str) -> dict[str, float]:
    """Return losses for comparison, in nats per token: uniform guesses, and guesses by token frequency (unigram).

    The unigram loss is the entropy of the split's tokens without special tokens, over at most ten million tokens of
    each dataset. sources: datasets with one tokenizer, and their weights; datasets without the split are ignored.
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


class Evaluator:
    """An evaluator of a run on the validation splits of its phase's datasets. All ranks call its methods together."""

    def __init__(self, trainer: Trainer, stream: Stream, clock: Clock) -> None:
        self._trainer, self._stream, self._clock = trainer, stream, clock

    @property
    def splits(self) -> dict[str, bertdata.Dataset]:
        """The datasets of the phase that have a validation split, by path."""
        datasets = {path: self._stream.datasets[path] for path, _ in self._stream.phase.sources}
        return {path: shards for path, shards in datasets.items() if "validation" in shards.splits}

    def is_due(self, step: int, last: int) -> bool:
        """Return whether an evaluation follows a step. last: the step of the last evaluation."""
        every = self._trainer.config.eval_every
        is_last = step >= self._trainer.plan.steps
        return bool(self.splits) and last < step and (is_last or (every > 0 and step % every == 0))

    def evaluate(self, signals: Signals) -> dict[str, Any] | None:
        """Return an evaluation as an entry of the log, on rank 0 with predictions, or None if a signal interrupted it.

        A prediction is (tokens around, target, most probable token).
        """
        before = self._clock.seconds["evaluated"]
        result, shown = self._evaluate(interrupted=signals.poll), None
        if result is not None:
            options: dict[str, Any] = {"rows": 1, "best": 1} | self._rows("validation")
            shards = next(iter(self.splits.values()))
            shown = self._trainer.ranks.on_first(lambda: samples(self._trainer.learner, shards, **options))
        self._clock.lap("evaluated")
        if result is None:
            return None
        config, seconds = self._trainer.config, round(self._clock.seconds["evaluated"] - before, 3)
        result |= {"length": self._stream.loader.length, "masking": config.eval_masking, "s": seconds}
        result["precision"] = self._trainer.eval_precision
        predictions = [(around, target, best) for _, masked in shown or [] for around, target, (best,) in masked]
        entry = {f"validation_{name}": value for name, value in result.items()}
        return entry | {"predictions": predictions[:KEPT_PREDICTIONS]}

    def loss(self) -> float | None:
        """Return the loss on the validation splits, or on the first dataset's train split if there are none."""
        self._trainer.wait()
        self._clock.lap("trained")
        result = self._evaluate()
        self._clock.lap("evaluated")
        return result["loss"] if result else None

    def _rows(self, split: str) -> dict[str, Any]:
        """Return the options that select and mask the evaluated rows."""
        masking = replace(MASKING, probability=self._trainer.config.eval_masking)
        return {"split": split, "length": self._stream.loader.length, "masking": masking}

    def _evaluate(self, interrupted: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
        """Return loss, accuracy and targets; for a mix, means by weight, and `sources` with the results by dataset.

        A dataset without predicted tokens is ignored.
        """
        trainer, stream, splits, names = self._trainer, self._stream, self.splits, ("loss", "accuracy", "targets")
        options = self._rows("validation" if splits else "train") | {"max_samples": EVALUATED_SAMPLES}
        options |= {"autocast": autocast_of(trainer.ranks.device, trainer.eval_precision), "interrupted": interrupted}
        results = {}
        for path in splits or [stream.phase.sources[0][0]]:
            result = evaluate(trainer.learner, stream.datasets[path], trainer.ranks, **options)
            if result is None:
                return None
            results[path] = {name: result[name] for name in names}
        if not splits or len(stream.datasets) == 1:
            return next(iter(results.values()))
        weights = dict(stream.phase.sources)
        counted = {path: result for path, result in results.items() if result["targets"]}
        total = sum(weights[path] for path in counted)
        means: dict[str, Any] = dict.fromkeys(names)
        for name in names[: 2 * bool(counted)]:
            means[name] = sum(weights[path] * result[name] for path, result in counted.items()) / total
        return means | {"targets": sum(result["targets"] for result in results.values()), "sources": results}
