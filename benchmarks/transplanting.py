"""What does a new vocabulary for trained weights give, on text of another language?

    python benchmarks/transplanting.py english.txt estonian.txt --out study/

Trains a modernbert-tiny on the first text with a vocabulary of its own. Then, for each other text, it trains as many
steps from four starts: the trained model with its old vocabulary, the trained model with a vocabulary of the new text
(bertrain transplant), the same with embeddings at random, and a new model with that vocabulary. One thread, float32. It
compares bits a byte of masked tokens on the validation split, as vocabularies differ; rows have as many tokens, so a
vocabulary that fits the text reads more text in a step. What is done is not run again.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import click
from common import machine
from study import evaluated, run, shards_of, train

from bertdata.tokenize.load import load
from bertrain import checkpoint
from bertrain.lab import transplant

OPTIONS = "--recipe tiny --length 64 --global-batch-size 32 --precision fp32 --eval-every 0 --save-every 1000000"
STARTS = ("old vocabulary", "transplanted", "embeddings at random", "new model")


def without_embeddings(directory: Path, tokenizer: str, out: Path) -> None:
    """A transplanted model, all embeddings of which are at random, those of special tokens too."""
    new = load(tokenizer)
    made_of = transplant.Pieces([[] for _ in range(new.special.vocab_size)], 0)
    model = transplant.transplanted(directory, new, made_of, seed=0)
    model.save_pretrained(out)
    for name, content in new.files.items():
        (out / name).write_bytes(content)


@click.command()
@click.argument("first", type=click.Path(exists=True, path_type=Path))
@click.argument("others", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Directory for shards, runs and results.")
@click.option("--vocab-size", default=4096, show_default=True)
@click.option("--steps", default=1500, show_default=True, help="Steps on the first text.")
@click.option("--further", default=300, show_default=True, help="Steps on each other text.")
@click.option("--seeds", default=3, show_default=True)
def main(
    first: Path, others: tuple[Path, ...], out: Path, vocab_size: int, steps: int, further: int, seeds: int
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    new = ["--validation", "0.1", "--vocab-size", str(vocab_size)]
    old_shards, base = shards_of(first, out / "shards-first", *new), out / "base"
    train(base, steps, f"{OPTIONS} --data {old_shards}")
    trained = checkpoint.find(base)
    for other in others:
        name = other.stem
        shards = shards_of(other, out / f"shards-{name}", *new)
        moved, bare = out / f"{name}-moved", out / f"{name}-bare"
        if not moved.exists():
            words = ["--checkpoint", str(base), "--tokenizer", str(shards), "--out", str(moved)]
            print(run(["bertrain", "transplant", *words], out, 1).strip())
        if not bare.exists():
            without_embeddings(trained, str(shards), bare)
        kept = shards_of(other, out / f"shards-{name}-old", "--validation", "0.1", "--tokenizer", str(trained))
        starts = zip(STARTS, (kept, shards, shards, shards), (trained, moved, bare, None), strict=True)
        for start, data, init in starts:
            bits = []
            for seed in range(seeds):
                place = out / f"{name}-{start}-{seed}".replace(" ", "-")
                given = f"--init {init}" if init else "--model modernbert-tiny"
                train(place, further, f"{OPTIONS} --data {data} --seed {seed} {given}")
                bits.append(evaluated(place, data, 64)["bits_per_byte"])
            shown = ", ".join(f"{value:.3f}" for value in bits)
            print(f"| {name} | {start} | {statistics.median(bits):.3f} | {shown} |", flush=True)
    regime = f"{steps} steps on {first.name}, then {further}; vocabularies of {vocab_size}"
    print(json.dumps({"question": "a new vocabulary", "regime": regime, "machine": machine()}))


if __name__ == "__main__":
    main()
