"""What does growth along a run save, against full depth from the start?

    python benchmarks/growing.py corpus.txt --out study/
    python benchmarks/growing.py corpus.txt --out study/ --row "3, then 6: stack" --seeds 1 --steps 200

Trains a ModernBERT of 6 layers and width 64 with a vocabulary of 1,024 made from the corpus, on one thread in float32.
Every row runs with every seed. The runs of full depth take all steps, and shares of them, so that loss can be compared
at equal operations and at equal seconds. What is done stands in OUT/results.jsonl and is not run again, so the command
may be stopped at any time. It ends with a table: loss at the end, operations, seconds of training, and the loss on the
validation split just before and just after each growth.

Operations are counted from the model (bertrain/speed.py): 2 for a multiply-add, the backward pass twice the
forward pass, and no backward pass through a frozen trunk. The phases of a run (docs/phases.md) lie beside it in a file.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import click
from common import machine
from study import Results, known, losses_of, prepare, result_of, run, with_phases
from transformers import PreTrainedConfig

import bertdata
from bertrain.models.load import new_model
from bertrain.speed import flops_of_row

LENGTH, ROWS_OF_A_STEP, LAYERS = 64, 32, 6
MODEL = {"model_type": "modernbert", "num_hidden_layers": LAYERS, "hidden_size": 64, "num_attention_heads": 2,
         "intermediate_size": 128, "max_position_embeddings": LENGTH,
         "layer_types": ["full_attention"] * LAYERS}  # fmt: skip
EVERY_RUN = (
    f"--length {LENGTH} --global-batch-size {ROWS_OF_A_STEP} --optimizer adamw --lr 4e-3 --mlm-probability 0.3 "
    "--precision fp32 --eval-every 0 --save-every 1000000 --log-every 20"
)
ABOVE = r"layers\.[345]\.|final_norm|^head\.|^decoder\."  # what is trained with the first three layers frozen
TWO = "phase = [{share = 0.5, layers = 3}, {}]"
THREE = "phase = [{share = 0.25, layers = 2}, {share = 0.25, layers = 4}, {}]"
FROZEN = f"phase = [{{share = 0.4, layers = 3}}, {{share = 0.3, trains = '{ABOVE}'}}, {{}}]"
ROWS = {  # name: share of the steps, phases, options
    "6 layers": (1.0, "", ""),
    "6 layers, 3/4 of the steps": (0.75, "", ""),
    "6 layers, 1/2 of the steps": (0.5, "", ""),
    "3, then 6: stack": (1.0, TWO, ""),
    "3, then 6: fresh": (1.0, TWO, "--grow-by fresh"),
    "2, 4, then 6: stack": (1.0, THREE, ""),
    "2, 4, then 6: fresh": (1.0, THREE, "--grow-by fresh"),
    "3, then 6, trunk frozen 0.4-0.7: stack": (1.0, FROZEN, ""),
    "3, then 6, trunk frozen 0.4-0.7: fresh": (1.0, FROZEN, "--grow-by fresh"),
}


def forward_of_layers(config: Path, shards: Path, layers: int) -> float:
    """Operations of a forward pass through the first layers alone, for each token."""
    special = bertdata.open(shards).special_tokens

    def shorten(config: PreTrainedConfig) -> None:
        config.num_hidden_layers = layers

    model, _ = new_model(str(config), special, length=LENGTH, seed=0, configure=shorten)
    return flops_of_row(model, LENGTH, 0) / LENGTH / 3


def growth_of(place: Path, config: Path, shards: Path) -> dict[str, Any]:
    """Operations of a run, and its growths, from its log."""
    entries = [json.loads(line) for line in (place / "log.jsonl").read_text().splitlines()]
    phases = json.loads((place / "run.json").read_text())["resolved"]["phases"]
    operations, tokens, of_trunk, growths = 0.0, 0, 0.0, []
    for entry in entries:
        if "layers" in entry.get("change", ()):
            of_trunk = 2 * forward_of_layers(config, shards, entry["change"]["layers"][0])
            growths.append({name: entry[name] for name in ("change", "loss_before", "loss_after")})
        elif "tokens_per_s" in entry:
            phase = next(phase for phase in phases if entry["step"] <= phase["stop"])
            each = entry["flops_per_s"] / entry["tokens_per_s"] - (of_trunk if phase["trains"] else 0.0)
            operations, tokens = operations + each * (entry["tokens"] - tokens), entry["tokens"]
    return {"operations": operations, "growths": growths}


def table(results: list[dict[str, Any]]) -> str:
    """Markdown, a line for each row in the order of ROWS: medians over seeds."""
    lines = ["| row | loss, median | of each seed | 10¹² operations | seconds | loss at growths, before → after |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for row in ROWS:
        found = [one for one in results if one["row"] == row]
        if not found:
            continue
        growths = [
            "→".join(map(str, many[0]["change"]["layers"]))
            + ": "
            + " → ".join(
                f"{statistics.median(one[f'loss_{when}'] for one in many):.3f}" for when in ("before", "after")
            )
            for many in zip(*(one["growths"] for one in found), strict=True)
        ]
        lines.append(
            f"| {row} | {losses_of(found)} | "
            f"{statistics.median(one['operations'] for one in found) / 1e12:.2f} | "
            f"{statistics.median(one['trained_s'] for one in found):.0f} | {'; '.join(growths)} |"
        )
    return "\n".join(lines)


@click.command()
@click.argument("corpus")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Directory for shards, runs and results.")
@click.option("--row", "names", multiple=True, help="A row to run, by its name. Default: all.")
@click.option("--seeds", default=3, show_default=True)
@click.option("--steps", default=600, show_default=True, help="Steps of the longest runs.")
def main(corpus: str, out: Path, names: tuple[str, ...], seeds: int, steps: int) -> None:
    rows, results = known(names, ROWS), Results(out)
    shards, config = prepare(corpus, out, MODEL)
    for name, facts in results.missing(rows, range(seeds), of_steps=steps):
        share, phases, options = ROWS[name]
        place = out / f"{list(ROWS).index(name)}-{steps}-{facts['seed']}"
        given = ["--data", str(shards), "--model", str(config), "--out", str(place)]
        words = f"{EVERY_RUN} {options} --seed {facts['seed']} --steps {round(share * steps)}"
        more = with_phases(words, phases, out / f"{place.name}.toml") if phases else words.split()
        run(["bertrain.pretrain", *given, *more], out / "inductor", 1)
        result = {"options": f"{options} {phases}".strip()} | result_of(place) | growth_of(place, config, shards)
        results.add(facts | result)
        loss, seconds = result["validation_loss"], result["trained_s"]
        print(f"{name}, seed {facts['seed']}: {loss:.4f} after {seconds:.0f} s", flush=True)
    print(table(results.of(of_steps=steps)))
    regime = f"ModernBERT of {LAYERS} layers and width 64, {steps} steps of {ROWS_OF_A_STEP} rows of {LENGTH}, fp32"
    print(json.dumps({"question": "growing", "regime": regime, "machine": machine()}))


if __name__ == "__main__":
    main()
