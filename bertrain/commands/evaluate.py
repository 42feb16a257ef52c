"""Measure loss and accuracy of a checkpoint on held-out text, or its accuracy on minimal pairs.

    bertrain evaluate --checkpoint run/ --data shards/ --show 2
    bertrain evaluate --checkpoint run/ --pairs blimp.jsonl.gz    (pairs.py)

It always masks 15 % of the tokens (80/10/10), with a fixed seed, so that results of all runs can be compared. The loss
is a mean over tokens. Losses of different vocabularies cannot be compared; bits per byte can.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

import bertdata
from bertdata.support import OneSentence, UsageError, counted
from bertrain import checkpoint, state
from bertrain.commands import pairs
from bertrain.evaluate import Shown, evaluate, reference_losses, samples
from bertrain.models.encoder import Encoder
from bertrain.models.load import check_fits, check_length, load_model, max_length
from bertrain.ranks import World, world

BEST = 5  # predictions per masked token for --show
ONLY_WITH = {
    "data": ("split", "length", "show"),
    "pairs": ("score",),
}  # options that need --data, and options that need --pairs


def _samples(shown: list[Shown]) -> str:
    """Return samples for display: the text of each, and a line for each masked token."""
    blocks = []
    for number, (text, masked) in enumerate(shown, 1):
        lines = [f"sample {number} of {len(shown)}, with >masked< tokens:", ""]
        lines += textwrap.wrap(text, 110, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        lines += ["", f"  {'':<2}{'target':<16}  the {BEST} most probable predictions, the best first"]
        for _, target, best in masked:
            wrong = "" if target == best[0] else "x"
            lines.append(f"  {wrong:<2}{target:<16}  {'  '.join(best)}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def opened(
    path: str, data: str, split: str, length: int | None, ranks: World
) -> tuple[Encoder, bertdata.Dataset, Path, int]:
    """Return the encoder, the shards, the checkpoint and the row length. Raises UsageError if they do not match."""
    directory, shards = checkpoint.find(Path(path)), bertdata.open(data)
    trained: dict[str, Any] = {"length": 128, "samples": "windows"}
    if (directory / state.TRAINER).exists():
        trained |= state.read(directory).loader
    encoder = Encoder(load_model(directory), isolate=trained["samples"] == "packed").to(ranks.device)
    check_fits(directory, shards, encoder.model)
    length = length or trained["length"]
    check_length(length, encoder.model.config, directory)
    return encoder, shards, directory, length


def _text(result: dict[str, Any], directory: Path, length: int, reference: dict[str, float]) -> str:
    """Return the result as text."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    unknown = result["loss"] is not None and result["bits_per_byte"] is None
    rows = [
        (
            "loss",
            f"{number(result['loss'], '.4f')} nats a token ({reference['uniform']:.4f} by guessing evenly, "
            f"{reference['unigram']:.4f} by the frequencies of tokens in {result['split']})",
        ),
        ("accuracy", number(result["accuracy"], ".2%")),
        ("perplexity", number(result["mlm_ppl"], ",.2f")),
        (
            "bits per byte",
            number(result["bits_per_byte"], ".4f") + " (the bytes of the text were not counted)" * unknown,
        ),
        (
            "measured on",
            f"{result['targets']:,} masked tokens of {counted(result['samples'], 'sample')} of {length}, split "
            f"{result['split']}",
        ),
    ]
    return "\n".join([str(directory), *(f"  {name:<15}{value}" for name, value in rows)])


def _check(context: click.Context, data: str | None, pairs_path: str | None) -> None:
    """Raise UsageError unless exactly one of --data and --pairs is set, with only its own options."""
    if (data is None) == (pairs_path is None):
        sentence = "give either --data, a directory of shards, or --pairs, a file of minimal pairs"
        raise UsageError(sentence, "conflict" if data else "missing", option="data", given=data)
    given, other = ("pairs", "data") if data is None else ("data", "pairs")
    for name in ONLY_WITH[other]:
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise UsageError(f"--{name} is for --{other}; leave it out with --{given}", "conflict", option=name)


def _judge(path: str, file: str, ranks: World, *, score: str, most: int | None, as_json: bool) -> None:
    """Evaluate on minimal pairs, and print the result on rank 0."""

    def ready() -> tuple[Any, ...]:
        chosen, directory = pairs.read(file, most), checkpoint.find(Path(path))
        encoder = Encoder(load_model(directory)).to(ranks.device)
        tokenizer = pairs.tokenizer_of(directory, encoder)
        rows = pairs.encode(chosen, tokenizer, path=file, most=max_length(encoder.model.config))
        return encoder, chosen, rows, tokenizer, directory

    encoder, chosen, rows, tokenizer, directory = ranks.together(ready)
    result = pairs.evaluate(encoder, chosen, rows, tokenizer, ranks, score=score)
    if ranks.rank == 0:
        facts = {"checkpoint": str(directory), "file": file}
        click.echo(json.dumps(facts | result) if as_json else pairs.text(result, directory, file))


@click.command(cls=OneSentence, epilog="\b\nExample:\n  bertrain evaluate --checkpoint run/ --data shards/ --show 4")
@click.option("--checkpoint", "path", required=True, help="A run directory, or any directory with a masked LM in it.")
@click.option("--data", help="Directory of shards.")
@click.option(
    "--pairs", "pairs_path", help="Minimal pairs, instead of --data: JSON lines with a good and a bad sentence."
)
@click.option(
    "--score",
    type=click.Choice(pairs.SCORES),
    default="word-l2r",
    help="Score of a sentence. sum: mask each token in turn, and add up the log-probabilities. mean: the sum divided "
    "by the number of tokens. word-l2r: as sum, but also mask the rest of the token's word.",
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
        path = ranks.from_first(lambda: checkpoint.resolved(path))  # once, as a running one later has newer ones
        if pairs_path is not None:
            _judge(path, pairs_path, ranks, score=score, most=max_samples, as_json=as_json)
            return
        assert data is not None  # noqa: S101  (one of the two is given)
        encoder, shards, directory, of_rows = ranks.together(lambda: opened(path, data, split, length, ranks))
        result = evaluate(encoder, shards, ranks, split=split, length=of_rows, max_samples=max_samples)
        if ranks.rank == 0 and result is not None:
            if show:
                options: dict[str, Any] = {"split": split, "length": of_rows, "rows": show, "best": BEST}
                click.echo(_samples(samples(encoder, shards, **options)))
            reference = reference_losses([(shards, 1.0)], split)
            if as_json:
                facts = {"checkpoint": str(directory), "length": of_rows}
                click.echo(json.dumps(facts | result | {"reference": reference}))
            else:
                click.echo(_text(result, directory, of_rows, reference))


if __name__ == "__main__":
    main()
