"""Masked tokens, replaced tokens and masked diffusion beside each other: which encoder does better on tasks?

    python benchmarks/objectives.py corpus.txt --out study/ --sst2 sst2/ --ewt ewt/

Trains the same BERT from random weights by each objective, on one thread in float32 with AdamW, for the same number of
steps and, where a step costs more or less, also for as many steps as take the CPU time of the first objective. For
replaced tokens it is the discriminator; its generator has as wide layers and half as many. Each encoder is fine-tuned
on a part of SST-2 and of EWT (benchmarks/tasks.py) with each of RATES, as no rate suits all on SST-2; dev chooses, and
test is reported. CPU times are of the process, start included; they are little disturbed by other programs. What is
done stands in OUT/results.jsonl and is not run again.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
from pathlib import Path
from typing import Any

import click
from common import machine
from recipes import run
from tasks import TASKS, files_of, finetuned

OPTIONS = (
    "--length 64 --global-batch-size 32 --optimizer adamw --lr 2e-3 --warmup 0.1 --precision fp32 --eval-every 0 "
    "--save-every 1000000 --log-every 50"
)
OBJECTIVES = {
    "masked tokens": "--mlm-probability 0.15",
    "masked tokens, 30 %": "--mlm-probability 0.3",
    "replaced tokens": "--discriminator {encoder}",
    "masked diffusion": "--objective diffusion --masking uniform",
}
RATES = {"sst2": ("3e-4", "1e-3"), "ewt": ("1e-3",)}
SIZES = {"2 x 128": (2, 128), "4 x 128": (4, 128)}  # layers and width


def bert(layers: int, width: int) -> dict[str, Any]:
    return {"model_type": "bert", "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": width // 64,
            "intermediate_size": 4 * width, "max_position_embeddings": 128, "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0}  # fmt: skip


def trained(name: str, size: str, steps: int, seed: int, shards: Path, out: Path) -> tuple[Path, float]:
    """The directory of an encoder, and the CPU seconds of its training."""
    layers, width = SIZES[size]
    place = out / f"{name}-{size}-{steps}-{seed}".translate(str.maketrans(" ,%", "---"))
    encoder, generator = out / f"{size}.json".replace(" ", ""), out / f"{size}-half.json".replace(" ", "")
    encoder.write_text(json.dumps(bert(layers, width)))
    generator.write_text(json.dumps(bert(layers // 2, width)))
    is_pair = "--discriminator" in OBJECTIVES[name]
    words = OBJECTIVES[name].format(encoder=encoder).split()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    given = f"--data {shards} --out {place} --steps {steps} --seed {seed}"
    command = ["bertrain.pretrain", *given.split()]
    run([*command, "--model", str(generator if is_pair else encoder), *OPTIONS.split(), *words], out / "inductor", 1)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    checkpoint = place / f"step-{steps:08d}"
    return checkpoint / "discriminator" if is_pair else checkpoint, seconds


def head_of(file: str, rows: int, out: Path) -> str:
    """The first so many blocks of a .conllu file, or lines of another, in a file of `out`."""
    ends = "\n\n" if file.endswith(".conllu") else "\n"
    parts = Path(file).read_text(encoding="utf-8").split(ends)[:rows]
    path = out / f"first-{rows}-{Path(file).name}"
    path.write_text(ends.join(parts) + ends, encoding="utf-8")
    return str(path)


def best(task: str, files: dict[str, str], encoder: Path, place: Path) -> float:
    """The measure of a task with the rate that is best on dev."""
    found = []
    for rate in RATES[task]:
        out = place.with_name(f"{place.name}-{rate}")
        finetuned(TASKS[task], files, str(encoder), out, ["--seeds=1", "--epochs=3", f"--lr={rate}", "--length=64"])
        result = json.loads((out / "result.json").read_text())
        found.append([result[f"{split}_{TASKS[task].measure}"]["median"] for split in ("dev", "test")])
    return max(found)[1]


def table(results: list[dict[str, Any]]) -> str:
    rows: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for one in results:
        rows.setdefault((one["size"], one["equal"], one["objective"]), []).append(one)
    lines = ["| size | equal | objective | steps | CPU s | SST-2 | EWT |", "|---|---|---|---|---|---|---|"]
    for (size, equal, name), found in rows.items():
        cells = []
        for task in ("sst2", "ewt"):
            values = [one[task] for one in found if task in one]
            spread = f"{min(values):.1%} to {max(values):.1%}" if values else ""
            cells.append(f"{statistics.median(values):.1%} ({spread})" if values else "")
        seconds = statistics.median(one["cpu_s"] for one in found)
        steps = statistics.median(one["steps"] for one in found)
        lines.append(f"| {size} | {equal} | {name} | {steps:,.0f} | {seconds:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


@click.command(context_settings={"show_default": True})
@click.argument("corpus")
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--sst2", required=True, type=click.Path(path_type=Path))
@click.option("--ewt", required=True, type=click.Path(path_type=Path))
@click.option("--vocab-size", default=4096)
@click.option("--steps", default=1000)
@click.option("--seeds", default=3)
@click.option("--rows", default=6000, help="Labelled rows of SST-2 that are trained on; a third of it of EWT.")
@click.option("--size", "sizes", multiple=True, default=list(SIZES), type=click.Choice(list(SIZES)))
def main(
    corpus: str, out: Path, sst2: Path, ewt: Path, vocab_size: int, steps: int, seeds: int, rows: int,
    sizes: tuple[str, ...],
) -> None:  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    shards = out / "shards"
    if not (shards / "manifest.json").exists():
        run(["bertdata", "build", corpus, "--out", str(shards), "--vocab-size", str(vocab_size)], out, 2)
    files = {}
    for task, place in (("sst2", sst2), ("ewt", ewt)):
        (out / task).mkdir(exist_ok=True)
        files[task] = files_of(task, place, out / task)
        files[task]["train"] = head_of(files[task]["train"], rows if task == "sst2" else rows // 3, out / task)
    file = out / "results.jsonl"
    results = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(one["size"], one["equal"], one["objective"], one["seed"]): one for one in results}

    def measure(size: str, equal: str, name: str, seed: int, number: int) -> dict[str, Any]:
        if (key := (size, equal, name, seed)) not in done:
            encoder, seconds = trained(name, size, number, seed, shards, out)
            facts = {"size": size, "equal": equal, "objective": name, "seed": seed}
            done[key] = facts | {"steps": number, "cpu_s": seconds}
            for task in files:
                place = out / "-".join([task, *map(str, key)]).replace(" ", "-")
                done[key][task] = best(task, files[task], encoder, place)
            with file.open("a") as stream:
                stream.write(json.dumps(done[key]) + "\n")
            print(done[key], flush=True)
        return done[key]

    for size in sizes:
        for seed in range(seeds):
            by_steps = {name: measure(size, "steps", name, seed, steps) for name in OBJECTIVES}
            first = by_steps["masked tokens"]["cpu_s"]
            for name in OBJECTIVES:
                share = first / by_steps[name]["cpu_s"]
                if abs(share - 1) > 0.05:
                    measure(size, "CPU time", name, seed, round(steps * share))
    print(table(list(done.values())))
    print(json.dumps({"question": "objectives", "regime": f"{steps} steps of 32 rows of 64", "machine": machine()}))


if __name__ == "__main__":
    main()
