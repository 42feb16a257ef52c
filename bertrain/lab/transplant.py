"""Change the vocabulary of a trained model: compute the new embeddings from the old ones.

    bertrain transplant --checkpoint run/ --tokenizer new/ --out moved/
    bertdata build german.txt --tokenizer new/ --out german/
    bertrain pretrain --init moved/ --data german/ --out further/

A token in both vocabularies keeps its embedding. Any other new token begins as the mean of the old tokens that spell it
(compare WECHSEL, Minixhofer et al., 2022, and FOCUS, Dobler and de Melo, 2023, which also use word vectors). Other
weights do not change. docs/models.md shows results.
"""

from __future__ import annotations

import copy
from operator import methodcaller
from pathlib import Path

import click
import torch
from transformers import PreTrainedModel

from bertdata.support import TOKENIZER, LoadedTokenizer, OneSentence, Spelling, load_tokenizer
from bertrain import card, checkpoint
from bertrain.models.families import family_of, first_position
from bertrain.models.load import load_model, max_length, new_model, tokenizer_files
from bertrain.options import Output


def pieces(old: LoadedTokenizer, new: LoadedTokenizer) -> tuple[list[list[int]], int]:
    """Return, for each new token, the old ids to average (empty: random embedding), and the number of copied tokens.

    A special token is copied from the old token of the same role, any other from the old token that adds the same text.
    If there is none, its text is split from the beginning into the longest old tokens. If this fails, it is split again
    with a space added in front, or with the leading space removed.
    """
    texts = _texts(old)
    by_text: dict[bytes, int] = {}
    for number, text in enumerate(texts):
        by_text.setdefault(text, number)
    by_token = {(text, old.spell(number)): number for number, text in enumerate(texts)}
    known = old.special.roles()
    roles = {number: known[role] for role, number in new.special.roles().items() if role in known}
    longest = max(map(len, by_text))
    origins, copied = [], 0
    for number, text in enumerate(_texts(new)):
        same = roles.get(number, by_token.get((text, new.spell(number)), by_text.get(text)))
        other = text.removeprefix(b" ") if text.startswith(b" ") else b" " + text
        origins.append([same] if same is not None else _cut(text, by_text, longest) or _cut(other, by_text, longest))
        copied += same is not None
    return origins, copied


def _texts(tokenizer: LoadedTokenizer) -> list[bytes]:
    """Return the text that each id adds."""
    spelling = Spelling(tokenizer.files[TOKENIZER])
    return [spelling.text_after_space(tokenizer.spell(number)) for number in range(tokenizer.special.vocab_size)]


def _cut(text: bytes, by_text: dict[bytes, int], longest: int) -> list[int]:
    """Return the ids of the longest tokens from the start of a text to its end; empty if some text remains."""
    ids, place = [], 0
    while place < len(text):
        ends = range(min(len(text), place + longest), place, -1)
        end = next((end for end in ends if text[place:end] in by_text), None)
        if end is None:
            return []
        ids.append(by_text[text[place:end]])
        place = end
    return ids


def transplanted(directory: Path, new: LoadedTokenizer, origins: list[list[int]], *, seed: int) -> PreTrainedModel:
    """Return the model of a checkpoint with the vocabulary of a tokenizer. Random rows are as in a new model.

    Raises UsageError if its family does not support this vocabulary, for example without the required padding id.
    """
    old = load_model(directory, nsp=None)
    has_nsp = isinstance(old, family_of(old).next_sentence or ())
    length = max_length(old.config)

    resize = methodcaller("update", {"vocab_size": new.special.vocab_size})
    model, _ = new_model(str(directory), new.special, length=length, seed=seed, nsp=has_nsp, configure=resize)
    of_vocabulary, of_positions = growing(old, "vocab_size"), set[str]()
    if family_of(old).positions_after_padding:
        of_positions = growing(old, "max_position_embeddings")
    weights = model.state_dict()
    for name, tensor in old.state_dict().items():
        if name in of_vocabulary:
            for number, ids in enumerate(origins):
                if ids:
                    weights[name][number] = tensor[ids].mean(0)
        elif name in of_positions:
            # Position embeddings start after the padding id; the row before them is for padding.
            first, first_old = first_position(model.config) - 1, first_position(old.config) - 1
            number = min(len(tensor) - first_old, len(weights[name]) - first)
            weights[name][first : first + number] = tensor[first_old : first_old + number]
        else:
            weights[name].copy_(tensor)
    return model


def growing(model: PreTrainedModel, size: str) -> set[str]:
    """Return the names of the weights that grow with a size in the configuration, such as the vocabulary size."""
    config = copy.deepcopy(model.config)
    setattr(config, size, getattr(config, size) + 1)
    with torch.device("meta"):
        larger = type(model)(config).state_dict()
    return {name for name, tensor in model.state_dict().items() if tensor.ndim and len(larger[name]) > len(tensor)}


@click.command(
    cls=OneSentence, epilog="\b\nExample:\n  bertrain transplant --checkpoint run/ --tokenizer new/ --out moved/"
)
@click.option("--checkpoint", "path", required=True, help="The trained model: a run, or a checkpoint directory.")
@click.option("--tokenizer", "spec", required=True, help="The new vocabulary: a tokenizer as bertdata build takes it.")
@click.option("--out", required=True, type=Output(), help="New directory for the model with the new vocabulary.")
@click.option("--seed", default=0, type=click.IntRange(min=0), help="Random seed for tokens that nothing spells.")
def main(path: str, spec: str, out: str, seed: int) -> None:
    """Give a trained model another vocabulary, to train it further on text of another language or field.

    A token that both vocabularies have keeps its embedding. Another one begins as the mean of the old tokens that spell
    it. Weights that are not of the vocabulary do not change.
    """
    target = checkpoint.require_new(out)
    directory = checkpoint.find(Path(path))
    new = load_tokenizer(spec)
    origins, copied = pieces(load_tokenizer(str(directory)), new)
    model = transplanted(directory, new, origins, seed=seed)
    known = sum(map(bool, origins))
    counts = f"{copied:,} tokens copied, {known - copied:,} means of tokens, {len(origins) - known:,} at random"
    about = f"It has the weights of `{directory.resolve().name}` and another vocabulary: {counts}. Train it further."
    files = tokenizer_files(new.files.__getitem__, model, max_length(model.config))
    files |= {card.CARD: card.content(target.name, about, config=model.config)}
    checkpoint.write(target, model, checkpoint.Content(model.state_dict(), {}, files))
    click.echo(f"{out}: {counts}; bertrain pretrain --init {out} trains it further")
