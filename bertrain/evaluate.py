"""Loss and accuracy of a checkpoint on held-out text, on masks fixed by a seed; or its accuracy on minimal pairs.

    bertrain evaluate --checkpoint run/ --data shards/ --show 2
    bertrain evaluate --checkpoint run/ --pairs blimp.jsonl.gz    (pairs.py)

Always masks 15 % (80/10/10), whatever a run was trained with, so that numbers compare; the loss is a mean over tokens.
Losses of different vocabularies do not compare; bits per byte do, as far as a masked loss can.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch
from click.core import ParameterSource
from torch.nn import functional as F
from tqdm import tqdm

import bertdata
from bertdata.cli import OneSentence
from bertdata.errors import UsageError
from bertdata.tokenize.load import load as load_tokenizer
from bertdata.tokenize.spelling import Spelling, spelled
from bertdata.tokenize.tokenizer import TOKENIZER
from bertrain import feed, pairs
from bertrain.models import build
from bertrain.models.encoder import PLACES, Encoder
from bertrain.runtime import checkpoint, log, state
from bertrain.runtime.dist import World, world

MASKING = bertdata.Masking(probability=0.15)
SEED = 0
ROWS = 64  # of a batch, and of a forward pass
BEST = 5  # predictions of a masked token that --show prints
CONTEXT = 5  # tokens on each side of a masked one
ONLY_WITH = {"data": ("split", "length", "show"), "pairs": ("score",)}  # options that mean nothing with the other one


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
    interrupted: Callable[[], bool] = lambda: False,
    progress: bool = False,
) -> dict[str, Any] | None:
    """Mean loss (nats a token), accuracy and counts over a split, or its first `max_samples` in a fixed random order.

    Also bits_per_byte (bits a token × tokens a byte of the dataset), and the token predicted most often and its share
    of all predictions. All ranks must call it; each takes its part, and all get the same result. interrupted:
    asked on all ranks after each batch; where it is true the result is None. progress: show a bar on rank 0.
    """
    loader = bertdata.Loader(
        shards,
        length=length,
        global_batch_size=ROWS * ranks.world_size,
        seed=SEED,
        rank=ranks.rank,
        world_size=ranks.world_size,
        split=split,
        masking=masking,
        samples="packed" if encoder.isolate else "windows",
        epochs=1,
    )
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
            for piece in feed.micro_batches(batch, size=size, count=-(-rows // size), device=ranks.device):
                logits, wanted = encoder.logits(**piece).flatten(0, 1).float(), piece["targets"].flatten()
                best, counts = logits.argmax(-1), wanted != bertdata.IGNORE_INDEX
                loss = F.cross_entropy(logits, wanted, ignore_index=bertdata.IGNORE_INDEX, reduction="sum")
                totals[:2] += torch.stack([loss.double(), (best == wanted).sum().double()])
                predicted += torch.bincount(best[counts], minlength=predicted.numel())
            totals[2:] += torch.tensor([feed.num_targets(batch), batch.sample_ids.size], device=ranks.device)
            bar.update(loader.position - bar.n)
            if interrupted():
                encoder.train(was_training)
                return None
    encoder.train(was_training)
    sum_of_losses, num_correct, num_targets, num_samples = ranks.sum(totals).tolist()
    mean: dict[str, float | None] = {"loss": None, "accuracy": None}
    if num_targets:
        mean = {"loss": sum_of_losses / num_targets, "accuracy": num_correct / num_targets}
    most = int(ranks.sum(predicted).argmax())
    perplexity = None if mean["loss"] is None else math.exp(min(700.0, mean["loss"]))
    text_bytes, counts = shards.manifest.counts["text_bytes"], shards.manifest.counts["documents"]
    tokens = shards.num_tokens - counts * (shards.special_tokens.separator is not None)
    bits = None if mean["loss"] is None or not text_bytes else mean["loss"] / math.log(2) * tokens / text_bytes
    return {
        "split": split,
        **mean,
        "mlm_ppl": perplexity,
        "bits_per_byte": bits,
        "targets": int(num_targets),
        "samples": int(num_samples),
        "same_token": most,
        "same_token_text": spelled(load_tokenizer(str(shards.path)))(most),
        "same_share": int(predicted[most]) / max(1.0, num_targets),
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


def predictions(
    encoder: Encoder,
    shards: bertdata.Dataset,
    device: torch.device,
    *,
    split: str,
    length: int,
    rows: int,
    masking: bertdata.Masking = MASKING,
) -> list[tuple[str, str, str]]:
    """The masked tokens of the first rows that `evaluate` sees: what is around each, its target, what is predicted."""
    batch, predicted = _predicted(
        encoder, shards, device, split=split, length=length, rows=rows, best=1, masking=masking
    )
    return [(around, target, best) for row in _read(shards, batch, predicted) for around, target, (best,) in row.masked]


class Shown(NamedTuple):
    """A sample as people read it."""

    text: str  # as the model sees it; what is masked stands between > and <
    masked: list[tuple[str, str, list[str]]]  # of each masked token: tokens around, target, the best predictions


@torch.no_grad()
def _predicted(
    encoder: Encoder,
    shards: bertdata.Dataset,
    device: torch.device,
    *,
    split: str,
    length: int,
    rows: int,
    best: int,
    masking: bertdata.Masking = MASKING,
) -> tuple[bertdata.Batch, np.ndarray]:
    """The first rows that `evaluate` sees, and the most probable ids for their masks, int64 [B, K, best]."""
    samples = "packed" if encoder.isolate else "windows"
    loader = bertdata.Loader(
        shards, masking=masking, length=length, global_batch_size=rows, seed=SEED, split=split, samples=samples
    )
    batch = next(loader)
    piece = next(feed.micro_batches(batch, size=rows, count=1, device=device))
    was_training = encoder.training
    encoder.eval()
    logits = encoder.logits(**piece)[..., : shards.special_tokens.vocab_size]
    predicted = logits.topk(min(best, logits.shape[-1]), dim=-1).indices.cpu().numpy()
    encoder.train(was_training)
    return batch, predicted


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


def _samples(shown: list[Shown]) -> str:
    """Samples for a terminal: the text of each, and below it a line for each masked token."""
    blocks = []
    for number, sample in enumerate(shown, 1):
        lines = [f"sample {number} of {len(shown)}, with >masked< tokens:", ""]
        lines += textwrap.wrap(sample.text, 110, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        lines += ["", f"  {'':<2}{'target':<16}  the {BEST} most probable predictions, the best first"]
        for _, target, best in sample.masked:
            wrong = "" if target == best[0] else "x"
            lines.append(f"  {wrong:<2}{target:<16}  {'  '.join(best)}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def opened(
    path: str, data: str, split: str, length: int | None, ranks: World
) -> tuple[Encoder, bertdata.Dataset, Path, int]:
    """The checkpoint, the shards and the row length, after checking that they belong together."""
    directory, shards = checkpoint.find(Path(path)), bertdata.open(data)
    if split not in shards.splits:
        sentence = f"{data} has no split {split!r}, only {', '.join(shards.splits)}; choose with --split"
        raise UsageError(sentence, "no-split", option="split", given=split)
    trained: dict[str, Any] = {"length": 128, "samples": "windows"}
    if (directory / state.TRAINER).exists():
        trained |= state.read(directory).loader
    encoder = Encoder(build.load(directory), isolate=trained["samples"] == "packed").to(ranks.device)
    build.check_fits(directory, shards, encoder.model)
    length = length or trained["length"]
    most = build.max_length(encoder.model.config)
    if length > most:
        sentence = f"--length {length} is more than the {most} positions of {directory}; give at most {most}"
        raise UsageError(sentence, "too-long", option="length", given=length)
    return encoder, shards, directory, length


def _text(result: dict[str, Any], directory: Path, length: int, reference: dict[str, float]) -> str:
    """The result for a terminal."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    rows = [
        (
            "loss",
            f"{number(result['loss'], '.4f')} nats a token ({reference['uniform']:.4f} by guessing evenly, "
            f"{reference['unigram']:.4f} by the frequencies of tokens in {result['split']})",
        ),
        ("accuracy", number(result["accuracy"], ".2%")),
        ("perplexity", number(result["mlm_ppl"], ",.2f")),
        ("bits per byte", number(result["bits_per_byte"], ".4f")),
        (
            "measured on",
            f"{result['targets']:,} masked tokens of {result['samples']:,} samples of {length}, split "
            f"{result['split']}",
        ),
    ]
    return "\n".join([str(directory), *(f"  {name:<15}{value}" for name, value in rows)])


def _check(context: click.Context, data: str | None, pairs_path: str | None) -> None:
    """Raises UsageError unless there is one thing to evaluate on, and no option for the other."""
    if data is None and pairs_path is None:
        sentence = (
            "there is nothing to evaluate on; give --data, a directory of shards, or --pairs, a file of minimal pairs"
        )
        raise UsageError(sentence, "missing", option="data")
    if data is not None and pairs_path is not None:
        raise UsageError(
            "--data and --pairs were given; leave one of them out", "conflict", option="pairs", given=pairs_path
        )
    given, other = ("pairs", "data") if data is None else ("data", "pairs")
    for name in ONLY_WITH[other]:
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise UsageError(f"--{name} is for --{other}; leave it out with --{given}", "conflict", option=name)


def _judge(path: str, file: str, ranks: World, *, score: str, most: int | None, as_json: bool) -> None:
    """Evaluates on minimal pairs, and prints the result on rank 0."""

    def ready() -> tuple[Any, ...]:
        chosen, directory = pairs.read(file, most), checkpoint.find(Path(path))
        encoder = Encoder(build.load(directory)).to(ranks.device)
        tokenizer = pairs.tokenizer_of(directory, encoder)
        rows = pairs.encode(chosen, tokenizer, path=file, most=build.max_length(encoder.model.config))
        return encoder, chosen, rows, tokenizer, directory

    encoder, chosen, rows, tokenizer, directory = ranks.together(ready)
    result = pairs.evaluate(encoder, chosen, rows, tokenizer, ranks, score=score, progress=True)
    if ranks.rank == 0:
        facts = {"checkpoint": str(directory), "file": file}
        click.echo(json.dumps(facts | result) if as_json else pairs.text(result, directory, file))


@click.command(cls=OneSentence)
@click.option("--checkpoint", "path", required=True, help="A run directory, or any directory with a masked LM in it.")
@click.option("--data", help="Directory of shards.")
@click.option(
    "--pairs", "pairs_path", help="Minimal pairs, instead of --data: JSON lines with a good and a bad sentence."
)
@click.option(
    "--score",
    type=click.Choice(pairs.SCORES),
    default="word-l2r",
    help="How a token of a pair is scored. pll: only this token is masked. word-l2r: the rest of its word is masked "
    "too.",
)
@click.option("--split", default="validation", help="Split to evaluate on.")
@click.option(
    "--length", type=click.IntRange(min=3), help="Row length in tokens. Default: the length of the run, else 128."
)
@click.option(
    "--max-samples",
    type=click.IntRange(min=1),
    help="Number of samples, or of pairs. Default: all.",
)
@click.option(
    "--show",
    default=0,
    type=click.IntRange(min=0),
    help=f"Number of samples to print, with the {BEST} best predictions of each masked token.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object on the last line.")
@click.pass_context
def main(
    context: click.Context,
    path: str,
    data: str | None,
    pairs_path: str | None,
    score: str,
    split: str,
    length: int | None,
    max_samples: int | None,
    show: int,
    as_json: bool,
) -> None:
    """Measure a checkpoint on held-out text, or on minimal pairs. Runs alone or under torchrun.

    On text it always masks 15 % of the tokens, with a fixed seed, for every run.
    """
    with world() as ranks:
        ranks.together(lambda: _check(context, data, pairs_path))
        if pairs_path is not None:
            _judge(path, pairs_path, ranks, score=score, most=max_samples, as_json=as_json)
            return
        assert data is not None  # noqa: S101  (one of the two is given)
        encoder, shards, directory, of_rows = ranks.together(lambda: opened(path, data, split, length, ranks))
        result = evaluate(encoder, shards, ranks, split=split, length=of_rows, max_samples=max_samples, progress=True)
        if ranks.rank == 0 and result is not None:
            if show:
                options: dict[str, Any] = {"split": split, "length": of_rows, "rows": show, "best": BEST}
                click.echo(_samples(_read(shards, *_predicted(encoder, shards, ranks.device, **options))))
            reference = log.reference_losses([(shards, 1.0)], split)
            if as_json:
                facts = {"checkpoint": str(directory), "length": of_rows}
                click.echo(json.dumps(facts | result | {"reference": reference}))
            else:
                click.echo(_text(result, directory, of_rows, reference))


if __name__ == "__main__":
    main()
