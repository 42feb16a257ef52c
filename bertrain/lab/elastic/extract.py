"""Write a sub-network of an elastic run as an ordinary Hugging Face checkpoint.

    bertrain extract --checkpoint run/ --layers 4 --width 192 --heads 3 --feed-forward 384 --out small/

Its logits are the same as inside the large model. To train it further: bertrain pretrain --init small/.
docs/subnetworks.md lists the possible sub-networks.
"""

from __future__ import annotations

from pathlib import Path

import click

from bertdata.support import TOKENIZER, TOKENIZER_CONFIG, OneSentence
from bertrain import card, checkpoint
from bertrain.commands.reading import plain_tokenizer
from bertrain.lab.elastic import space as elastic
from bertrain.lab.elastic.training import trained_space
from bertrain.models.load import load_model
from bertrain.options import Output


@click.command(cls=OneSentence, epilog="\b\nExample:\n  bertrain extract --checkpoint run/ --layers 4 --out small/")
@click.option("--checkpoint", "path", required=True, help="A run that was trained with --elastic, or a checkpoint.")
@click.option("--layers", type=int, help="Number of layers. Default of all sizes: the size of the checkpoint.")
@click.option("--width", type=int, help="Width of the hidden states.")
@click.option("--heads", type=int, help="Number of attention heads; each has width / heads dimensions.")
@click.option("--feed-forward", type=int, help="Width of the feed-forward part of a layer.")
@click.option("--out", required=True, type=Output(), help="New directory for the sub-network.")
def main(path: str, out: str, **given: int | None) -> None:
    """Write a sub-network of an elastic run as a separate checkpoint: config, weights and tokenizer."""
    target, directory = checkpoint.require_new(out), checkpoint.find(Path(path))
    model = load_model(directory, nsp=None)
    config, trained = model.config, trained_space(directory)
    sizes = elastic.sizes_of(config)._replace(**{name: size for name, size in given.items() if size is not None})
    elastic.check(config, sizes)
    small = elastic.cut(model, sizes)
    names = [name for name in (TOKENIZER, TOKENIZER_CONFIG) if (directory / name).is_file()]
    about = (
        f"A sub-network of {sizes}, with {small.num_parameters():,} parameters, of the checkpoint `{directory.name}`, "
        "whose card has the data and the training."
    )
    files = plain_tokenizer({name: (directory / name).read_bytes() for name in names})
    files |= {card.CARD: card.content(target.name, about, config=small.config)}
    checkpoint.write(target, small, checkpoint.Content(small.state_dict(), {}, files))
    if not trained or sizes not in elastic.Space(trained, config):
        was = f"--elastic {trained}" if trained else "no --elastic"
        click.echo(f"warning: {directory} was trained with {was}, so it has not trained this sub-network", err=True)
    click.echo(f"{out}: {sizes}, {small.num_parameters():,} parameters; --init {out} trains it further")
