"""A million parameters on a CPU: a corpus, shards, training at full depth and with growth, and the best loss there is.

    python examples/one_million.py --out million/

A hidden Markov grammar of 995 words makes the text, so the floor of the loss is known (grammar.py). 80 % of the
documents are for training, 10 % each for validation and test. A BERT of 4 layers and width 128 learns them: with all
layers from the start, and growing to them along the run, whose phases are in a file (docs/phases.md). The table has the
loss on the test split, the floor on the same rows and masks, the time of training, and its floating point operations.
Everything goes through the commands of bertdata and bertrain; what is done stays in --out and is not done again.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import click
from grammar import END, Grammar

import bertdata
from bertdata.cli import main as bertdata_command
from bertrain.commands.evaluate import main as evaluate
from bertrain.pretrain import main as pretrain

TOPICS, NOUNS, VERBS, ADJECTIVES, ADVERBS = 5, 60, 30, 60, 30  # nouns and verbs of each topic
LENGTH = 64
MODEL = {"model_type": "bert", "num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 2,
         "intermediate_size": 512, "max_position_embeddings": LENGTH, "hidden_dropout_prob": 0.0,
         "attention_probs_dropout_prob": 0.0}  # fmt: skip
WAYS = {  # name: the phases of the run, in TOML
    "complete": "",
    "progressive, 2 then 4 layers": "phase = [{share = 0.5, layers = 2}, {}]",
    "progressive, 1, 2, then 4 layers": "phase = [{share = 0.25, layers = 1}, {share = 0.25, layers = 2}, {}]",
}
TRAINING = f"--length {LENGTH} --global-batch-size 32 --lr 2e-3 --eval-every 0 --save-every 1000000 --log-every 20"


def grammar() -> Grammar:
    """A document has a topic, which decides its nouns and verbs. Nouns and verbs of a clause agree in number."""
    move: dict[str, dict[str, float]] = {END: {}}
    emit: dict[str, dict[str, float]] = {}
    stems = [a + b for a in _SYLLABLES for b in _SYLLABLES]
    adjectives, adverbs = _zipf(stems[:ADJECTIVES]), _zipf(stems[ADJECTIVES : ADJECTIVES + ADVERBS])
    for topic in range(TOPICS):
        first = ADJECTIVES + ADVERBS + topic * (NOUNS + VERBS)
        nouns, verbs = stems[first : first + NOUNS], stems[first + NOUNS : first + NOUNS + VERBS]
        for number, articles, noun_ending, verb_ending in (
            ("sg", {"the": 0.5, "a": 0.3, "this": 0.2}, "", "es"),
            ("pl", {"the": 0.5, "many": 0.2, "these": 0.3}, "s", ""),
        ):
            article, adjective, noun, verb = (f"{kind}.{number}.{topic}" for kind in ("det", "adj", "noun", "verb"))
            emit[article], emit[adjective] = articles, adjectives
            emit[noun] = _zipf([stem + "n" + noun_ending for stem in nouns])
            emit[verb] = _zipf([stem + "v" + verb_ending for stem in verbs])
            move[article] = {adjective: 0.5, noun: 0.5}
            move[adjective] = {adjective: 0.2, noun: 0.8}
            move[noun] = {verb: 1.0}
            other = {"sg": "pl", "pl": "sg"}[number]
            move[verb] = {f"adv.{topic}": 0.4, article: 0.35, f"det.{other}.{topic}": 0.2, END: 0.05}
            move[END][article] = 0.5 / TOPICS
        emit[f"adv.{topic}"] = adverbs
        move[f"adv.{topic}"] = {f"det.sg.{topic}": 0.45, f"det.pl.{topic}": 0.45, END: 0.1}
    return Grammar(move, emit)


_SYLLABLES = [consonant + vowel for consonant in "bdfgklmprt" for vowel in "aiou"]


def _zipf(words: list[str]) -> dict[str, float]:
    """The first word is the most frequent, the k-th has a k-th of its share."""
    shares = [1 / (rank + 1) for rank in range(len(words))]
    return {word: share / sum(shares) for word, share in zip(words, shares, strict=True)}


def run(command: click.Command, line: str, *more: str) -> str:
    """What a command prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        command([*line.split(), *more], standalone_mode=False)
    return said.getvalue()


def prepare(out: Path, made: Grammar, num_documents: int) -> None:
    """Writes corpus, vocabulary and configuration, and builds the shards, unless they are there.

    Raises click.UsageError if shards of another number of documents are there.
    """
    if (out / "shards" / "manifest.json").exists():
        there = bertdata.open(out / "shards").num_documents
        if there != num_documents:
            raise click.UsageError(
                f"--out {out} holds shards of {there} documents, and --documents is {num_documents}; give --documents "
                f"{there}, or another --out"
            )
    (out / "vocab.txt").write_text("\n".join(made.vocabulary) + "\n")
    (out / "model.json").write_text(json.dumps(MODEL | {"vocab_size": len(made.vocabulary)}))
    if not (out / "shards" / "manifest.json").exists():
        (out / "corpus.txt").write_text(made.text(num_documents, seed=0))
        run(
            bertdata_command, "build --validation 0.1 --test 0.1 --out", str(out / "shards"), str(out / "corpus.txt"),
            "--tokenizer", str(out / "vocab.txt"),
        )  # fmt: skip


def floor(shards: Path, made: Grammar, most: int) -> float:
    """The best loss on the rows and masks that `bertrain evaluate --split test` measures, in nats a token."""
    loader = bertdata.Loader(
        bertdata.open(shards), length=LENGTH, global_batch_size=64, seed=0, split="test", epochs=1,
        masking=bertdata.Masking(probability=0.15),
    )  # fmt: skip
    total = count = 0
    for batch in loader:
        for row in range(len(batch.input_ids)):
            ids = batch.input_ids[row]
            ids = ids if batch.attention_mask is None else ids[batch.attention_mask[row] > 0]
            loss, number = made.best_loss(ids, batch.masked_positions[row], batch.targets[row])
            total, count = total + loss, count + number
        if loader.position >= most:
            break
    return total / count


def cost(place: Path) -> tuple[float, float]:
    """Seconds and floating point operations of a run's training, from its log."""
    entries = [json.loads(line) for line in (place / "log.jsonl").read_text().splitlines()]
    steps = [entry for entry in entries if "tokens_per_s" in entry]
    operations, before = 0.0, 0
    for entry in steps:
        operations += (entry["tokens"] - before) * entry["flops_per_s"] / entry["tokens_per_s"]
        before = entry["tokens"]
    return steps[-1]["trained_s"], operations


@click.command()
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Directory for corpus, shards and runs.")
@click.option("--documents", "num_documents", default=20_000, show_default=True, help="Number of documents.")
@click.option("--steps", default=800, show_default=True, help="Optimizer steps of each run.")
@click.option("--max-samples", default=1024, show_default=True, help="Rows of the test split to measure on.")
@click.option("--seed", default=0, show_default=True, help="Random seed of the runs.")
def main(out: Path, num_documents: int, steps: int, max_samples: int, seed: int) -> None:
    """Train a model of a million parameters in all ways, and print what each reached."""
    out.mkdir(parents=True, exist_ok=True)
    made = grammar()
    prepare(out, made, num_documents)
    best = floor(out / "shards", made, max_samples)
    results: list[dict[str, Any]] = []
    for way, phases in WAYS.items():
        place = out / f"{way.replace(',', '').replace(' ', '-')}-{seed}"
        click.echo(f"{way} …", err=True)
        (file := out / f"{place.name}.toml").write_text(f"{phases}\n")
        run(
            pretrain, f"{TRAINING} --steps {steps} --seed {seed}", "--data", str(out / "shards"),
            "--model", str(out / "model.json"), "--out", str(place), "--config", str(file),
        )  # fmt: skip
        said = run(
            evaluate, f"--split test --json --length {LENGTH} --max-samples {max_samples}",
            "--checkpoint", str(place), "--data", str(out / "shards"),
        )  # fmt: skip
        seconds, operations = cost(place)
        results.append(json.loads(said.splitlines()[-1]) | {"way": way, "seconds": seconds, "operations": operations})
    whole = out / f"complete-{seed}" / "run.json"
    parameters = json.loads(whole.read_text())["resolved"]["parameters"]
    reference = results[0]["reference"]
    click.echo(
        f"{parameters:,} parameters; {steps} steps of 32 rows of {LENGTH}, seed {seed}. Measured on "
        f"{results[0]['targets']:,} targets of the test split, in nats a target; guessing evenly loses "
        f"{reference['uniform']:.3f}, guessing by frequency {reference['unigram']:.3f}."
    )
    click.echo("| training | loss | floor | accuracy | seconds | 10¹² operations |\n|---|---|---|---|---|---|")
    for one in results:
        click.echo(
            f"| {one['way']} | {one['loss']:.3f} | {best:.3f} | {one['accuracy']:.1%} | {one['seconds']:.0f} | "
            f"{one['operations'] / 1e12:.2f} |"
        )


if __name__ == "__main__":
    main()
