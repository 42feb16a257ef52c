"""Write the mean of the weights of several checkpoints as a new checkpoint.

    bertrain merge run/step-00008000 run/step-00009000 run/step-00010000 --out merged/

The checkpoints must have the same model and the same tokenizer. Checkpoints of --lora count with their merged weights.
docs/models.md explains when a mean is useful.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import click
from transformers import PreTrainedModel

from bertdata.support import TOKENIZER, OneSentence, UsageError, give_same_ids, load_tokenizer
from bertrain import card, checkpoint
from bertrain.commands.reading import plain_tokenizer
from bertrain.models.families import add_names_of_4
from bertrain.models.load import OF_FILES, load_model
from bertrain.options import Output

NAMED = 3  # settings to list if two models differ


def chosen(paths: Sequence[str]) -> list[Path]:
    """Return the checkpoints at the paths, in the order of their directories.

    Raises UsageError for fewer than two checkpoints, and for duplicates.
    """
    path = paths[0]
    if len(paths) < 2:
        sentence = f"{path} is the only checkpoint; give two or more"
        raise UsageError(sentence, "missing", option="checkpoints", given=list(paths))
    found = sorted((checkpoint.find(Path(name), "checkpoints") for name in paths), key=Path.resolve)
    for one, other in pairwise(found):
        if one.resolve() == other.resolve():
            sentence = f"{other} was given twice; give each checkpoint once (a run stands for its newest one)"
            raise UsageError(sentence, "conflict", option="checkpoints", given=str(other))
    return found


def mean(directories: Sequence[Path]) -> PreTrainedModel:
    """Return a model with the mean weights of checkpoints. Weights are added in float64, and rounded once.

    Raises UsageError for models that differ in more than their weights.
    """
    first = directories[0]
    model = load_model(first, nsp=None)
    sums = {name: weight.double() for name, weight in model.state_dict().items()}
    for directory in directories[1:]:
        other = load_model(directory, nsp=None)
        _refuse_another_model(first, model, directory, other)
        for name, weight in other.state_dict().items():
            sums[name] += weight
    model.load_state_dict({name: total / len(directories) for name, total in sums.items()})
    return model


def _refuse_another_model(first: Path, model: PreTrainedModel, directory: Path, other: PreTrainedModel) -> None:
    """Raise UsageError, which lists the differences, if two checkpoints have different models."""
    for config in (model.config, other.config):
        add_names_of_4(config)  # checkpoints of earlier versions lack these names
    one, two = model.config.to_dict(), other.config.to_dict()
    if one["model_type"] != two["model_type"]:
        names = ["model_type"]
    else:
        names = [name for name in sorted(one | two) if name not in OF_FILES and one.get(name) != two.get(name)]
    if names:
        differences = ", ".join(f"{name} ({one.get(name)} and {two.get(name)})" for name in names[:NAMED])
        sentence = f"the models of {first} and {directory} differ in {differences}; give checkpoints of the same model"
        raise UsageError(sentence, "conflict", option="checkpoints", given=str(directory))


def tokenizer_of(directories: Sequence[Path]) -> dict[str, bytes]:
    """Return the tokenizer files of the checkpoints. Raises UsageError if their tokenizers differ."""
    first = directories[0]
    files = load_tokenizer(str(first)).files
    for directory in directories[1:]:
        if not give_same_ids(files[TOKENIZER], load_tokenizer(str(directory)).files[TOKENIZER]):
            sentence = f"{directory} has a different tokenizer than {first}; give checkpoints with the same tokenizer"
            raise UsageError(sentence, "tokenizer-differs", option="checkpoints", given=str(directory))
    own = {name: (first / name).read_bytes() for name in files if (first / name).is_file()}
    return plain_tokenizer(files | own)


@click.command(cls=OneSentence, epilog="\b\nExample:\n  bertrain merge run-a/ run-b/ --out mean/")
@click.argument("checkpoints", metavar="CHECKPOINT...", nargs=-1, required=True)
@click.option("--out", required=True, type=Output(), help="New directory for the mean.")
def main(checkpoints: tuple[str, ...], out: str) -> None:
    """Write the mean of the weights of two or more checkpoints as a new checkpoint.

    Each CHECKPOINT is a checkpoint, or a run, which stands for its newest complete checkpoint. All have the same model
    and the same tokenizer. Their order has no effect.
    """
    target = checkpoint.require_new(out)
    directories = chosen(checkpoints)
    files = tokenizer_of(directories)
    model = mean(directories)
    parts = "\n".join(f"- `{path.resolve().parent.name}/{path.resolve().name}`" for path in directories)
    about = f"The weights are the mean of those of:\n\n{parts}\n\nThe cards of these have the data and the training."
    files |= {card.CARD: card.content(target.name, about, config=model.config)}
    checkpoint.write(target, model, checkpoint.Content(model.state_dict(), {}, files))
    click.echo(f"{out}: the mean of {len(directories)} checkpoints; bertrain pretrain --init {out} trains it further")


if __name__ == "__main__":
    main()
