"""Loss and accuracy of a checkpoint on held-out text, on masks fixed by a seed.

    python -m bertrain.evaluate --checkpoint run/ --data shards/

Always masks 15 % (80/10/10), whatever a run was trained with, so that numbers compare; the mean is over tokens. The
last line of standard output is a JSON object. Losses of different vocabularies do not compare.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click
import torch
from torch.nn import functional as F

import bertdata
from bertdata.cli import OneSentence
from bertdata.errors import UsageError
from bertdata.tokenize.load import load as load_tokenizer
from bertrain import checkpoint, feed, metrics, model
from bertrain.dist import World, world
from bertrain.loss import MaskedLM

MASKING = bertdata.Masking(probability=0.15)
SEED = 0
ROWS = 64  # of a forward pass, and a batch
PLACES = 64 * 128  # of a forward pass at most: rows that are longer come fewer at a time


@torch.no_grad()
def evaluate(
    module: MaskedLM, shards: bertdata.Dataset, ranks: World, *, split: str, length: int, max_samples: int | None = None
) -> dict[str, Any]:
    """Mean loss (nats a token), accuracy and counts over a split, or its first `max_samples` in a fixed random order.

    Also bits_per_byte, which compares between vocabularies as far as a masked loss can (bits a token × tokens a byte of
    the whole dataset), and the token predicted most often and its share of all predictions. All ranks must call it;
    each takes its part, and all get the same result.
    """
    loader = bertdata.Loader(
        shards,
        length=length,
        global_batch_size=ROWS * ranks.world_size,
        seed=SEED,
        rank=ranks.rank,
        world_size=ranks.world_size,
        split=split,
        masking=MASKING,
        samples="packed" if module.isolate else "windows",
        epochs=1,
    )
    predicted = torch.zeros(module.model.config.vocab_size, dtype=torch.int64, device=ranks.device)
    totals = torch.zeros(4, dtype=torch.float64, device=ranks.device)  # loss, right, targets, samples
    was_training = module.training
    module.eval()
    size = max(1, min(ROWS, PLACES // length))
    for batch in loader:
        for piece in feed.micro_batches(batch, size=size, count=-(-ROWS // size), device=ranks.device):
            targets = piece.pop("targets")
            logits, wanted = module.logits(**piece).flatten(0, 1).float(), targets.flatten()
            best, counts = logits.argmax(-1), wanted != bertdata.IGNORE_INDEX
            loss = F.cross_entropy(logits, wanted, ignore_index=bertdata.IGNORE_INDEX, reduction="sum")
            totals[:2] += torch.stack([loss.double(), (best == wanted).sum().double()])
            predicted += torch.bincount(best[counts], minlength=predicted.numel())
        totals[2:] += torch.tensor([feed.num_targets(batch), batch.sample_ids.size], device=ranks.device)
        if max_samples is not None and loader.position >= max_samples:
            break
    module.train(was_training)
    sum_of_losses, num_right, num_targets, num_samples = ranks.sum(totals).tolist()
    mean = metrics.means(sum_of_losses, num_right, num_targets)
    most = int(ranks.sum(predicted).argmax())
    same = {"same_token": most, "same_share": int(predicted[most]) / max(1.0, num_targets)}
    perplexity = None if mean["loss"] is None else math.exp(min(700.0, mean["loss"]))
    text_bytes, counts = shards.manifest.counts["text_bytes"], shards.manifest.counts["documents"]
    tokens = shards.num_tokens - counts * (shards.special_tokens.separator is not None)
    bits = None if mean["loss"] is None or not text_bytes else mean["loss"] / math.log(2) * tokens / text_bytes
    whole = {"bits_per_byte": bits, "targets": int(num_targets), "samples": int(num_samples)}
    return {"split": split, **mean, "mlm_ppl": perplexity, **whole, **same}


@torch.no_grad()
def predictions(
    module: MaskedLM, shards: bertdata.Dataset, device: torch.device, *, split: str, length: int, rows: int
) -> list[str]:
    """A table of masked places of the first rows that `evaluate` sees: input, target, predicted."""
    samples = "packed" if module.isolate else "windows"
    options = {"length": length, "global_batch_size": rows, "seed": SEED, "split": split, "samples": samples}
    loader = bertdata.Loader(shards, masking=MASKING, **options)
    batch = next(loader)
    piece = next(feed.micro_batches(batch, size=rows, count=1, device=device))
    piece.pop("targets")
    was_training = module.training
    module.eval()
    predicted = module.logits(**piece).argmax(-1).cpu().numpy()
    module.train(was_training)
    return metrics.table(load_tokenizer(str(shards.path)), batch, predicted)


def _open(
    path: str, data: str, split: str, length: int | None, ranks: World
) -> tuple[MaskedLM, bertdata.Dataset, Path, int]:
    """The checkpoint and the shards, after checking that they belong together."""
    directory, shards = checkpoint.find(Path(path)), bertdata.open(data)
    if split not in shards.splits:
        raise UsageError(f"{data} has no split {split!r}, only {', '.join(shards.splits)}; choose with --split")
    known: dict[str, Any] = {"length": 128, "samples": "windows"}
    if (directory / checkpoint.TRAINER).exists():
        known |= checkpoint.read_trainer(directory)["loader"]
    module = MaskedLM(model.load(directory), isolate=known["samples"] == "packed").to(ranks.device)
    model.check_fits(directory, shards, module.model)
    length = length or known["length"]
    if length > module.model.config.max_position_embeddings:
        raise UsageError(f"--length {length} is more than the places of {directory}")
    return module, shards, directory, length


@click.command(cls=OneSentence, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--checkpoint", "path", required=True, help="A run directory, or any directory with a masked LM in it.")
@click.option("--data", required=True, help="Directory of shards.")
@click.option("--split", default="validation", help="Split to evaluate on.")
@click.option("--length", type=click.IntRange(min=3), help="Tokens of a row. None: as the run was trained, else 128.")
@click.option("--max-samples", type=click.IntRange(min=1), help="Stop after about so many samples.")
@click.option("--show", default=0, type=click.IntRange(min=0), help="Also print the masked places of so many rows.")
def main(path: str, data: str, split: str, length: int | None, max_samples: int | None, show: int) -> None:
    """Evaluate a checkpoint on held-out text; runs alone or under torchrun."""
    with world() as ranks:
        module, shards, directory, places = ranks.together(lambda: _open(path, data, split, length, ranks))
        result = evaluate(module, shards, ranks, split=split, length=places, max_samples=max_samples)
        if ranks.rank == 0:
            if show:
                print("\n".join(predictions(module, shards, ranks.device, split=split, length=places, rows=show)))
            reference = metrics.reference_losses(shards, split)
            print(json.dumps({"checkpoint": str(directory), "length": places} | result | {"reference": reference}))


if __name__ == "__main__":
    main()
