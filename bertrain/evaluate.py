"""Loss, accuracy and predictions of a model on held-out text, on masks fixed by a seed.

Masks 15 % (80/10/10) unless something else is asked for, whatever a run was trained with, so that numbers compare; the
loss is a mean over tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F
from tqdm import tqdm

import bertdata
from bertdata.support import TOKENIZER, Spelling, load_tokenizer, spelled
from bertrain.data import Sources, Stream, micro_batches
from bertrain.models.encoder import PLACES, Encoder
from bertrain.ranks import Signals, World
from bertrain.speed import Clock
from bertrain.trainer import Trainer, autocast_of

MASKING = bertdata.Masking(probability=0.15, rule=1)  # for good, so that results of all versions compare
SEED = 0
ROWS = 64  # of a batch, and of a forward pass
CONTEXT = 5  # tokens on each side of a masked one


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
    progress: bool = False,
) -> dict[str, Any] | None:
    """Mean loss (nats a token), accuracy and counts over a split, or its first `max_samples` in a fixed random order.

    Also bits_per_byte (bits a token × tokens a byte of the dataset; None where its bytes are not known), and the token
    predicted most often and its share of all predictions. All ranks must call it; each takes its part, and all get the
    same result. autocast: makes the context of forward passes. interrupted: called on all ranks after each batch; if
    it returns true, the result is None. progress: show a bar on rank 0.
    """
    options: dict[str, Any] = {"split": split, "length": length, "masking": masking}
    options |= {"rank": ranks.rank, "world_size": ranks.world_size}
    loader = loader_for(encoder, shards, rows=ROWS * ranks.world_size, **options)
    predicted = torch.zeros(encoder.model.config.vocab_size, dtype=torch.int64, device=ranks.device)
    totals = torch.zeros(4, dtype=torch.float64, device=ranks.device)  # loss, correct, targets, samples
    was_training = encoder.training
    encoder.eval()
    size = max(1, min(ROWS, PLACES // length))
    last = min(loader.num_samples, max_samples or loader.num_samples)
    with tqdm(total=last, unit="sample", leave=False, disable=None if progress and ranks.rank == 0 else True) as bar:
        while loader.position < last:
            loader.global_batch_size = min(ROWS * ranks.world_size, last - loader.position)
            batch, rows = next(loader), -(-loader.global_batch_size // ranks.world_size)  # of the fullest rank
            for piece in micro_batches(batch, size=size, count=-(-rows // size), device=ranks.device):
                with autocast():
                    logits = encoder.logits(**piece).flatten(0, 1).float()
                wanted = piece["targets"].flatten()
                best, counts = logits.argmax(-1), wanted != bertdata.IGNORE_INDEX
                loss = F.cross_entropy(logits, wanted, ignore_index=bertdata.IGNORE_INDEX, reduction="sum")
                totals[:2] += torch.stack([loss.double(), (best == wanted).sum().double()])
                predicted += torch.bincount(best[counts], minlength=predicted.numel())
            num_targets = int((batch.targets != bertdata.IGNORE_INDEX).sum())
            totals[2:] += torch.tensor([num_targets, batch.sample_ids.size], device=ranks.device)
            bar.update(loader.position - bar.n)
            if interrupted():
                encoder.train(was_training)
                return None
    encoder.train(was_training)
    most = int(ranks.sum(predicted).argmax())
    result = _means(ranks.sum(totals).tolist(), shards)
    share = int(predicted[most]) / max(1, result["targets"])
    return {"split": split} | result | {"same_token": most, "same_share": share}


def loader_for(encoder: Encoder, shards: bertdata.Dataset, *, rows: int, **options: Any) -> bertdata.Loader:
    """The rows of a split, each once, as an encoder takes them, in an order and with masks that never change.

    options: further ones of bertdata.Loader.
    """
    kind = "packed" if encoder.isolate else "windows"
    return bertdata.Loader(shards, global_batch_size=rows, seed=SEED, samples=kind, epochs=1, **options)


def _means(totals: Sequence[float], shards: bertdata.Dataset) -> dict[str, Any]:
    """What follows from sums over all ranks: of losses, right predictions, targets and samples."""
    sum_of_losses, num_correct, num_targets, num_samples = totals
    loss = sum_of_losses / num_targets if num_targets else None
    text_bytes = shards.manifest.counts.get("text_bytes")  # which other programs need not count
    tokens = shards.num_tokens - shards.num_documents * (shards.special_tokens.separator is not None)
    return {
        "loss": loss,
        "accuracy": num_correct / num_targets if num_targets else None,
        "mlm_ppl": None if loss is None else math.exp(min(700.0, loss)),
        "bits_per_byte": None if loss is None or not text_bytes else loss / math.log(2) * tokens / text_bytes,
        "targets": int(num_targets),
        "samples": int(num_samples),
    }


def mean(results: Mapping[str, dict[str, Any]], weights: Mapping[str, float]) -> dict[str, Any]:
    """Results of `evaluate` for the datasets of a mix, by name → their means by weight; `sources` has each one's.

    Where nothing was predicted in a dataset, it does not count. The token that is predicted most often is that of the
    dataset in which it has the smallest share.
    """
    counted = {name: result for name, result in results.items() if result["targets"]}
    total = sum(weights[name] for name in counted)
    names = ("loss", "accuracy")
    means = {
        kind: sum(weights[name] * result[kind] for name, result in counted.items()) / total if counted else None
        for kind in names
    }
    least = min(results.values(), key=lambda result: result["same_share"])
    parts = {name: {kind: result[kind] for kind in (*names, "targets")} for name, result in results.items()}
    return least | means | {"targets": sum(result["targets"] for result in results.values()), "sources": parts}


class Shown(NamedTuple):
    """A sample as people read it."""

    text: str  # as the model sees it; what is masked stands between > and <
    masked: list[tuple[str, str, list[str]]]  # of each masked token: tokens around, target, the best predictions


@torch.no_grad()
def samples(
    encoder: Encoder,
    shards: bertdata.Dataset,
    device: torch.device,
    *,
    split: str,
    length: int,
    rows: int,
    best: int,
    masking: bertdata.Masking = MASKING,
) -> list[Shown]:
    """The first rows that `evaluate` sees, with the `best` most probable tokens for each mask."""
    batch = next(loader_for(encoder, shards, rows=rows, split=split, length=length, masking=masking))
    piece = next(micro_batches(batch, size=rows, count=1, device=device))
    was_training = encoder.training
    encoder.eval()
    logits = encoder.logits(**piece)[..., : shards.special_tokens.vocab_size]
    predicted = logits.topk(min(best, logits.shape[-1]), dim=-1).indices.cpu().numpy()
    encoder.train(was_training)
    return _read(shards, batch, predicted)


def _read(shards: bertdata.Dataset, batch: bertdata.Batch, predicted: np.ndarray) -> list[Shown]:
    """The rows of a batch as people read them. predicted: int64 [B, K, best]."""
    tokenizer = load_tokenizer(str(shards.path))
    spelling, as_read = Spelling(tokenizer.files[TOKENIZER]), spelled(tokenizer)
    shown = []
    for row, ids in enumerate(batch.input_ids):
        size = ids.size if batch.attention_mask is None else int(batch.attention_mask[row].sum())
        tokens = [tokenizer.spell(int(token)) for token in ids[:size]]
        slots = np.flatnonzero(batch.targets[row] != bertdata.IGNORE_INDEX)
        positions = batch.masked_positions[row, slots].tolist()
        masked = []
        for slot, position in zip(slots, positions, strict=True):
            first = max(0, position - CONTEXT)
            around = spelling.text(tokens[first : position + CONTEXT + 1], {position - first})
            best = [as_read(int(token)) for token in predicted[row, slot]]
            masked.append((around, as_read(int(batch.targets[row, slot])), best))
        shown.append(Shown(spelling.text(tokens, {*positions}), masked))
    return shown


def reference_losses(sources: Sources, split: str) -> dict[str, float]:
    """Return losses to compare with, in nats a token: of uniform guesses, and of guesses by token frequency (unigram).

    The unigram loss is the entropy of the split's tokens without special tokens, over at most ten million tokens of
    each dataset. sources: datasets with one tokenizer, and their weights; a dataset without the split does not count.
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


def table(predictions: list[tuple[str, str, str]]) -> list[str]:
    """Return lines for a terminal, one for each (tokens around, target, predicted); x marks a wrong one."""
    lines = [f"{'Input':<76} | {'Target':<16} | Predicted"]
    return lines + [
        f"{around[:76]:<76} | {target:<16} | {guess}{'' if guess == target else '  x'}"
        for around, target, guess in predictions
    ]


EVALUATED_SAMPLES = 2048  # of the validation split


class Evaluator:
    """Evaluates a run on the validation splits of the datasets of its phase. All ranks call its methods together."""

    def __init__(self, trainer: Trainer, stream: Stream, clock: Clock) -> None:
        self._trainer, self._stream, self._clock, self._ranks = trainer, stream, clock, trainer.ranks

    @property
    def splits(self) -> dict[str, bertdata.Dataset]:
        """The datasets of the phase that have a validation split, by path."""
        datasets = {path: self._stream.datasets[path] for path, _ in self._stream.phase.sources}
        return {path: shards for path, shards in datasets.items() if "validation" in shards.splits}

    def is_due(self, step: int, last: int) -> bool:
        """Return whether the run is evaluated after a step. last: the step of the last evaluation."""
        every = self._trainer.config.eval_every
        is_last = step >= self._trainer.plan.steps
        return bool(self.splits) and last < step and (is_last or (every > 0 and step % every == 0))

    def evaluate(self, signals: Signals) -> tuple[dict[str, Any], list[tuple[str, str, str]]] | None:
        """Return the entry of an evaluation for the log, and on rank 0 predictions; None if a signal came.

        The entry has the result of `evaluate`, and the length, masking and precision of its rows. A prediction is
        (tokens around, target, most probable token).
        """
        before = self._clock.seconds["evaluated"]
        result = self._evaluate(interrupted=signals.poll)
        if result is None:
            self._clock.lap("evaluated")
            return None
        predictions: list[tuple[str, str, str]] = []

        def predict() -> None:
            shards, options = next(iter(self.splits.values())), self._options
            (row,) = samples(self._trainer.learner, shards, self._ranks.device, rows=1, best=1, **options)
            predictions.extend((around, target, best) for around, target, (best,) in row.masked)

        self._ranks.on_first(predict)
        self._clock.lap("evaluated")
        config = self._trainer.config
        rows: dict[str, Any] = {"length": self._stream.loader.length, "masking": config.eval_masking}
        rows |= {"precision": self._trainer.eval_precision, "s": self._clock.seconds["evaluated"] - before}
        return result | rows, predictions

    def loss(self) -> float | None:
        """Return the loss on the validation splits; without any, on the train split of the first dataset."""
        self._trainer.wait()
        self._clock.lap("trained")
        if self.splits:
            result = self._evaluate()
        else:
            shards = self._stream.datasets[self._stream.phase.sources[0][0]]
            result = evaluate(self._trainer.learner, shards, self._ranks, **self._limits | {"split": "train"})
        self._clock.lap("evaluated")
        return result["loss"] if result else None

    @property
    def _options(self) -> dict[str, Any]:
        """Which rows are evaluated, and how they are masked."""
        masking = replace(MASKING, probability=self._trainer.config.eval_masking)
        return {"split": "validation", "length": self._stream.loader.length, "masking": masking}

    @property
    def _limits(self) -> dict[str, Any]:
        """The same, with the number of rows and the context of forward passes."""
        autocast = autocast_of(self._ranks.device, self._trainer.eval_precision)
        return self._options | {"max_samples": EVALUATED_SAMPLES, "autocast": autocast}

    def _evaluate(self, **more: Any) -> dict[str, Any] | None:
        """Return the result of `evaluate`; for a mix the mean of each source's by weight."""
        results = {}
        for path, shards in self.splits.items():
            result = evaluate(self._trainer.learner, shards, self._ranks, **self._limits | more)
            if result is None:
                return None
            results[path] = result
        is_mix = len(self._stream.datasets) > 1
        return mean(results, dict(self._stream.phase.sources)) if is_mix else next(iter(results.values()))
