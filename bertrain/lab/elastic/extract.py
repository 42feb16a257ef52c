"""Write a sub-network of an elastic run as an ordinary Hugging Face checkpoint.

    bertrain extract --checkpoint run/ --layers 4 --width 192 --heads 3 --feed-forward 384 --out small/

Its logits are those that it has inside the large model, and it may be trained further: bertrain pretrain --init small/.
docs/subnetworks.md says which sub-networks there are.
"""

from __future__ import annotations

from pathlib import Path

import click
from transformers import PreTrainedModel

from bertdata.support import TOKENIZER, TOKENIZER_CONFIG, OneSentence, naming
from bertrain import card, checkpoint
from bertrain.commands.reading import plain_tokenizer
from bertrain.lab.elastic import space as elastic
from bertrain.lab.elastic.training import trained_space
from bertrain.models.load import load_model
from bertrain.options import Output


def write(small: PreTrainedModel, directory: Path, out: Path) -> None:
    """Write a sub-network of a checkpoint, complete or not at all: config, weights and the checkpoint's tokenizer."""
    checkpoint.require_new(str(out))
    paths = [path for name in (TOKENIZER, TOKENIZER_CONFIG) if (path := directory / name).is_file()]
    about = (
        f"A sub-network of {elastic.sizes_of(small.config)}, with {small.num_parameters():,} parameters, of the "
        f"checkpoint `{directory.name}`, whose card has the data and the training."
    )
    files = plain_tokenizer({path.name: path.read_bytes() for path in paths})
    files |= {card.CARD: card.content(out.name, about, config=small.config)}
    with naming(out):
        checkpoint.write(out, small, checkpoint.Content(small.state_dict(), {}, files))


@click.command(cls=OneSentence, epilog="\b\nExample:\n  bertrain extract --checkpoint run/ --layers 4 --out small/")
@click.option("--checkpoint", "path", required=True, help="A run that was trained with --elastic, or a checkpoint.")
@click.option("--layers", type=int, help="Number of layers. Default of all sizes: the size of the checkpoint.")
@click.option("--width", type=int, help="Width of the hidden states.")
@click.option("--heads", type=int, help="Number of attention heads; each has width / heads dimensions.")
@click.option("--feed-forward", type=int, help="Width of the feed-forward part of a layer.")
@click.option("--out", required=True, type=Output(), help="New directory for the sub-network.")
def main(path: str, out: str, **given: int | None) -> None:
    """Write a sub-network of an elastic run as a separate checkpoint: config, weights and tokenizer."""
    directory = checkpoint.find(Path(path))
    model = load_model(directory, nsp=None)
    config, trained = model.config, trained_space(directory)
    sizes = elastic.sizes_of(config)._replace(**{name: size for name, size in given.items() if size is not None})
    elastic.check(config, sizes)
    small = elastic.cut(model, sizes)
    write(small, directory, Path(out).resolve())
    if not trained or sizes not in elastic.Space(trained, config):
        was = f"--elastic {trained}" if trained else "no --elastic"
        click.echo(f"warning: {directory} was trained with {was}, so it has not trained this sub-network", err=True)
    click.echo(f"{out}: {sizes}, {small.num_parameters():,} parameters; --init {out} trains it further")
