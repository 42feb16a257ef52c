"""Which recipe reaches the lowest loss in given minutes?

    python benchmarks/recipes.py corpus.txt --out study/ --size tiny
    python benchmarks/recipes.py corpus.txt --out study/ --size small --tokenizer bert/ --row Muon

A row of the study is a name, options of bertrain pretrain, and phases if it has some (docs/phases.md); their file lies
beside the run. `bertrain doctor` measures how many steps of each fit into the same time of training, without compiling
and evaluation, and every seed takes so many; with --steps all take the same number. The last evaluation is on the
same 2,048 samples of the validation split for all. What is done stands in OUT/results.jsonl and is not run again, so
the command may be stopped at any time. It ends with a table: of each row the loss of every seed, their median, the
steps that fitted, and the seconds of training that were used.

tiny: ModernBERT of 2 layers and width 128, a vocabulary of 1,024 made from the corpus, one thread.
small: ModernBERT of 6 layers and width 256 with the vocabulary of --tokenizer, two threads.
post-LN: BERT of about the same size.
Rows of a study may run side by side only if there are cores for all.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from pathlib import Path
from typing import Any

import click
from common import machine, small_modernbert, steps_in
from study import Results, known, losses_of, result_of, run, shards_of, with_phases


def changed(base: str, changes: dict[str, str]) -> dict[str, str]:
    """By the name of a row, the options `base` with some changed or added."""

    def values(options: str) -> dict[str, str]:
        words = options.split()
        return dict(zip(words[::2], words[1::2], strict=True))

    rows = {name: values(base) | values(change) for name, change in changes.items()}
    return {name: " ".join(f"{option} {value}" for option, value in row.items()) for name, row in rows.items()}


TIMES = {"tiny": 280.0, "small": 600.0, "post-LN": 600.0}  # seconds
THREADS = {"tiny": 1, "small": 2, "post-LN": 2}
EVERY_RUN = "--length 64 --precision bf16 --compile on --eval-every 0 --save-every 1000000 --log-every 50"
ROWS = {
    "tiny": changed(
        "--optimizer adamw --lr 4e-3 --mlm-probability 0.3 --global-batch-size 64",
        {
            "AdamW": "",
            "AdamW, 2e-3": "--lr 2e-3",
            "AdamW, 8e-3": "--lr 8e-3",
            "AdamW, 32 rows": "--global-batch-size 32",
            "AdamW, 15 % masked": "--mlm-probability 0.15",
        },
    )
    | changed(
        "--optimizer muon --lr 4e-3 --muon-rate 2 --mlm-probability 0.3 --global-batch-size 64",
        {
            "Muon": "",
            "Muon, 2e-3 x 4": "--lr 2e-3 --muon-rate 4",
            "Muon, 8e-3 x 1": "--lr 8e-3 --muon-rate 1",
            "Muon, 32 rows": "--global-batch-size 32",
            "Muon, 32 rows, then 64": "",
            "Muon, 128 rows": "--global-batch-size 128",
            "Muon, 15 % masked": "--mlm-probability 0.15",
            "Muon, 40 % masked": "--mlm-probability 0.4",
            "Muon, 30 % masked, then 15 %": "",
            "Muon, rows of 32, then 64": "",
            "Muon, weight decay 0.1": "--weight-decay 0.1",
            "Muon, WSD": "--schedule wsd --decay-share 0.4",
        },
    ),
    "small": changed(
        "--optimizer adamw --lr 2e-3 --mlm-probability 0.3 --global-batch-size 32",
        {
            "AdamW": "",
            "AdamW, 1e-3": "--lr 1e-3",
            "AdamW, 4e-3": "--lr 4e-3",
        },
    )
    | changed(
        "--optimizer muon --lr 3e-3 --muon-rate 3 --muon-momentum 0.9 --warmup 0.1 --mlm-probability 0.3 "
        "--global-batch-size 32",
        {
            "Muon": "",
            "Muon, 2e-3 x 4": "--lr 2e-3 --muon-rate 4",
            "Muon, 15 % masked": "--mlm-probability 0.15",
            "Muon, 30 % masked, then 15 %": "",
            "Muon, WSD": "--schedule wsd --decay-share 0.4",
            "Muon, weight decay 0.1": "--weight-decay 0.1",
        },
    ),
    "post-LN": {
        "AdamW": "--optimizer adamw --lr 1e-3 --mlm-probability 0.3 --global-batch-size 32",
        "AdamW, 2e-3": "--optimizer adamw --lr 2e-3 --mlm-probability 0.3 --global-batch-size 32",
        **changed(
            "--optimizer muon --lr 1e-3 --muon-rate 6 --muon-momentum 0.9 --warmup 0.1 --mlm-probability 0.3 "
            "--global-batch-size 32",
            {"Muon": "", "Muon, 3e-3 x 3": "--lr 3e-3 --muon-rate 3"},
        ),
    },
}
PHASES = {  # of rows that have some, in TOML
    "Muon, 32 rows, then 64": "phase = [{share = 0.3, global_batch_size = 32}, {global_batch_size = 64}]",
    "Muon, 30 % masked, then 15 %": "phase = [{share = 0.5, mlm_probability = 0.3}, {mlm_probability = 0.15}]",
    "Muon, rows of 32, then 64": "phase = [{share = 0.3, length = 32}, {length = 64}]",
}


def prepare(corpus: str, tokenizer: str | None, size: str, out: Path) -> list[str]:
    """Builds the shards and writes the configuration, unless they are there. Returns options for pretrain."""
    vocabulary = ["--tokenizer", tokenizer] if tokenizer else ["--vocab-size", "1024"]
    shards, config = shards_of(corpus, out / f"{size}-shards", *vocabulary), out / f"{size}.json"
    if size == "tiny":
        return ["--data", str(shards), "--model", "modernbert-tiny"]
    config.write_text(json.dumps((small_modernbert if size == "small" else small_bert)(str(shards))))
    return ["--data", str(shards), "--model", str(config)]


def small_bert(tokenizer: str) -> dict[str, Any]:
    """A BERT with the layers, the width and about the parameters of `small_modernbert`. Its norms follow the sums."""
    other = small_modernbert(tokenizer)
    same = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "pad_token_id")
    return {"model_type": "bert", "intermediate_size": 576, "max_position_embeddings": 64} | {
        name: other[name] for name in same
    }


def table(results: list[dict[str, Any]]) -> str:
    """Markdown, a line for each row, the best first."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in results:
        rows.setdefault((result["row"], result["options"]), []).append(result)
    lines = ["| recipe | options | loss, median | of each seed | steps | tokens | seconds |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for (row, options), found in sorted(
        rows.items(), key=lambda item: statistics.median(x["validation_loss"] for x in item[1])
    ):
        lines.append(
            f"| {row} | `{options}` | {losses_of(found)} | "
            f"{statistics.median(one['steps'] for one in found):,.0f} | "
            f"{statistics.median(one['tokens'] for one in found) / 1e6:.1f} M | "
            f"{statistics.median(one['trained_s'] for one in found):,.0f} |"
        )
    return "\n".join(lines)


@click.command()
@click.argument("corpus")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Directory for shards, runs and results.")
@click.option("--size", type=click.Choice(list(ROWS)), default="tiny", show_default=True)
@click.option("--tokenizer", help="For small and post-LN: a directory or tokenizer.json.")
@click.option("--row", "names", multiple=True, help="A row to run, by its name. Default: all.")
@click.option("--options", help="Run these options of pretrain instead; --row names them.")
@click.option("--seeds", default=3, show_default=True)
@click.option("--seconds", type=float, help="Time of training of a run. Default: 280 for tiny, else 600.")
@click.option("--steps", type=int, help="Number of steps of a run, instead of a time.")
def main(
    corpus: str, out: Path, size: str, tokenizer: str | None, names: tuple[str, ...], options: str | None, seeds: int,
    seconds: float | None, steps: int | None,
) -> None:  # fmt: skip
    if size != "tiny" and not tokenizer:
        raise click.UsageError(f"--size {size} needs a --tokenizer")
    if options and len(names) != 1:
        raise click.UsageError("--options needs one --row, a name for them")
    rows = {names[0]: options} if options else {name: ROWS[size][name] for name in known(names, ROWS[size])}
    results, given = Results(out), prepare(corpus, tokenizer, size, out)
    seconds = seconds or TIMES[size]
    length = f"{steps} steps" if steps else f"{seconds:g}s"
    for name, facts in results.missing(rows, range(seeds), size=size, length=length):
        phases = "" if options else PHASES.get(name, "")
        shown = f"{rows[name]} {phases}".strip()
        tag = hashlib.sha256(f"{shown} {length}".encode()).hexdigest()[:8]
        place = out / f"{size}-{name}-{tag}-{facts['seed']}".translate(str.maketrans(" ,%", "---"))
        words = f"{EVERY_RUN} {rows[name]}"
        more = with_phases(words, phases, out / f"{place.name}.toml") if phases else words.split()
        command, cache = [*given, "--out", str(place), "--seed", str(facts["seed"]), *more], out / "inductor"
        first = results.of(**facts | {"seed": 0})  # all seeds take the steps of the first one
        number = steps or (first[0]["steps"] if first else 0)
        if not number:
            said = run(["bertrain", "doctor", *command, "--steps", "1000"], cache, THREADS[size])
            number = steps_in(seconds, said)
        run(["bertrain.pretrain", *command, "--steps", str(number)], cache, THREADS[size])
        result = result_of(place)
        results.add(facts | {"options": shown} | result)
        print(f"{name}, seed {facts['seed']}: {result['validation_loss']:.4f} after {number:,} steps", flush=True)
    print(table(results.of(size=size, length=length)))
    print(json.dumps({"question": "recipes", "regime": f"{size}, {length} of training", "machine": machine()}))


if __name__ == "__main__":
    main()
