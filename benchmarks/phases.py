"""What do the three phases of the recipe ettin-17m gain, beside one phase of as many tokens?

    python benchmarks/phases.py corpus.txt --out study/
    python benchmarks/phases.py corpus.txt --out study/ --row "three phases" --seed 0 --steps 100

Trains a small ModernBERT with the layers of Ettin's, and a vocabulary of 1,024 made from the corpus, on one thread.
Rows have 32 and 256 tokens where Ettin's have 1,024 and 7,999, and a step has as many tokens in all phases. Every row
runs with every seed. At the end `bertrain evaluate` measures each model on the whole validation split, 15 % masked, in
short rows and in long ones. What is done stands in OUT/results.jsonl and is not run again, so the command may be
stopped at any time. It ends with a table.

Seconds are CPU time of the training command, with its start and its own evaluations, so that other programs count less.
The options of a run lie beside it in a file (docs/phases.md).
"""

from __future__ import annotations

import json
import resource
import statistics
from pathlib import Path
from typing import Any

import click
from common import machine
from study import Results, evaluated, known, losses_of, prepare, result_of, run

SHORT, LONG, TOKENS_OF_A_STEP = 32, 256, 2048
LAYERS, WIDTH = 7, 64
MODEL = {"model_type": "modernbert", "num_hidden_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": 2,
         "intermediate_size": WIDTH * 3 // 2, "max_position_embeddings": LONG, "local_attention": SHORT // 8,
         "layer_types": [("sliding" if layer % 3 else "full") + "_attention" for layer in range(LAYERS)]}  # fmt: skip
EVERY_RUN = """\
isolate_documents = true
masking = "bernoulli"
optimizer = "stableadamw"
weight_decay = 0.1
beta1 = 0.9
beta2 = 0.98
epsilon = 1e-6
clip_norm = 1e9
precision = "bf16"
"""
SHORT_ROWS = f"""
[[phase]]
length = {SHORT}
global_batch_size = {TOKENS_OF_A_STEP // SHORT}
mlm_probability = 0.3
lr = 3e-3
warmup_steps = 40
rope_base = 10000
rope_base_local = 10000
"""
LONG_ROWS = f"""
[[phase]]
length = {LONG}
global_batch_size = {TOKENS_OF_A_STEP // LONG}
schedule = "1-sqrt"
rope_base = 160000
"""
ROWS = {  # name: the file of its options; both end at 0.02 of the rate
    "three phases": f"""{EVERY_RUN}{SHORT_ROWS}\
share = 0.85
schedule = "constant"
{LONG_ROWS}\
share = 0.125
mlm_probability = 0.3
lr = 3e-3
lr_end = 0.5
rope_base_local = 10000
{LONG_ROWS}\
mlm_probability = 0.15
lr = 1.5e-3
lr_end = 0.04
rope_base_local = 160000
""",
    "one phase": f"""{EVERY_RUN}{SHORT_ROWS}\
schedule = "wsd"
decay_share = 0.15
lr_end = 0.02
""",
}


def trained(given: list[str], options: str, place: Path, seed: int, steps: int) -> dict[str, Any]:
    """Trains a model, and returns what the log says at its end, and the CPU time."""
    file = place.with_suffix(".toml")
    file.write_text(options)
    length = ["--seed", str(seed), "--steps", str(steps), "--eval-every", "0", "--log-every", "20"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(["bertrain.pretrain", "--config", str(file), *given, "--out", str(place), *length], place.parent, 1)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return result_of(place) | {"cpu_s": round(cpu_s, 1)}


def table(results: list[dict[str, Any]]) -> str:
    """Markdown, a line for each row in the order of ROWS: medians over seeds, and each seed's loss."""
    heads = [f"rows of {length}, median | of each seed" for length in (SHORT, LONG)]
    lines = [f"| run | {' | '.join(heads)} | tokens | CPU seconds |", "|---|---|---|---|---|---|---|"]
    for row in ROWS:
        if found := [one for one in results if one["row"] == row]:
            losses = [
                losses_of([one | {"validation_loss": one["judged"][str(length)]["loss"]} for one in found])
                for length in (SHORT, LONG)
            ]
            tokens, seconds = (statistics.median(one[name] for one in found) for name in ("tokens", "cpu_s"))
            lines.append(f"| {row} | {' | '.join(losses)} | {tokens:,.0f} | {seconds:.0f} |")
    return "\n".join(lines)


@click.command()
@click.argument("corpus")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Directory for shards, runs and results.")
@click.option("--row", "names", multiple=True, help="A row to run, by its name. Default: all.")
@click.option("--seed", "seeds", multiple=True, type=int, default=(0, 1, 2), show_default=True)
@click.option("--steps", default=1200, show_default=True, help=f"Steps of a run, of {TOKENS_OF_A_STEP:,} tokens each.")
def main(corpus: str, out: Path, names: tuple[str, ...], seeds: tuple[int, ...], steps: int) -> None:
    rows, results = known(names, ROWS), Results(out)
    shards, config = prepare(corpus, out, MODEL)
    given = ["--data", str(shards), "--model", str(config)]
    for name, facts in results.missing(rows, seeds, of_steps=steps):
        place = out / f"{name.replace(' ', '-')}-{steps}-{facts['seed']}"
        result = trained(given, ROWS[name], place, facts["seed"], steps)
        result["judged"] = {str(length): evaluated(place, shards, length) for length in (SHORT, LONG)}
        results.add(facts | {"options": ROWS[name]} | result)
        losses = ", ".join(f"{each['loss']:.4f} in rows of {length}" for length, each in result["judged"].items())
        print(f"{name}, seed {facts['seed']}: {losses}, after {result['cpu_s']:.0f} s of CPU time", flush=True)
    print(table(results.of(of_steps=steps)))
    regime = f"ModernBERT of {LAYERS} layers and width {WIDTH}, {steps} steps of {TOKENS_OF_A_STEP} tokens, bf16"
    print(json.dumps({"question": "phases", "regime": regime, "machine": machine()}))


if __name__ == "__main__":
    main()
