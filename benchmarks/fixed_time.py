"""What is a fixed time worth: corpus → shards → model → bits a byte, with ours and with a script like run_mlm.py?

    python benchmarks/fixed_time.py corpus.txt tokenizer/ [--minutes 10] [--environments .bench]

Both get the same text, tokenizer, architecture (`small_modernbert`), implementation of attention, settings of malloc
and dtype (bf16; fp32 on processors without bf16), and their time begins with the raw text. Both run in one process on
all cores. Both are compiled, and both heads compute only masked positions; compiling, the start of processes (but of
our build) and checkpoints do not count for either. Ours: bertdata build, then pretrain with the recipe RECIPE and as
many steps as fit into the rest of the minutes, as bertrain doctor measures; trained_s of the figures is the time that
they took. The other: `datasets` tokenizes and groups the text as run_mlm.py does, then transformers' Trainer with its
DataCollatorForLanguageModeling trains as many steps as the minutes allow by trials of 10 and 30 steps, compiled or not,
whichever gives more. Its recipe is that of run_mlm.py: AdamW, a linear schedule, 15 % of the tokens masked
independently. But its peak rate is 2e-3, as that of run_mlm.py, 5e-5, suits fine-tuning, with a warm-up and 128 rows a
step. "ours, same recipe" trains as many steps with that recipe (SAME) from the same initial weights, so that only the
engine differs.

All are then scored alike: masked loss as bits a byte on the same held-out shards. The script trains on the held-out
documents too, as it gets all of the text. With --seeds N all are trained N times from the same shards and rows.

--eager: neither is compiled, which suits a minute or two, and --rows gives the script smaller batches. With
--eval-every, our run also says when it had reached the loss that the script ends with, both on the rows that our run is
evaluated on: evaluations do not count. --environments: the environment of `datasets` is made here (environments.py);
else it must be installed beside ours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
from common import MALLOC, has_bf16, report, small_modernbert, steps_in
from environments import python_of

from bertrain.evaluate import EVALUATED_SAMPLES

LENGTH, LR = 64, 2e-3  # LR: of the script
TINY = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 192}
TINY |= {"layer_types": ["sliding_attention", "full_attention"]}
RECIPE = "--optimizer muon --lr 3e-3 --muon-rate 3 --muon-momentum 0.9 --warmup 0.1"  # docs/recipes.md
RECIPE += " --weight-decay 0.1 --global-batch-size 32 --mlm-probability 0.3"
SAME = f"--optimizer adamw --lr {LR} --beta2 0.98 --epsilon 1e-6 --weight-decay 0.01 --clip-norm 1 --schedule linear"
SAME += " --mlm-probability 0.15 --masking bernoulli"  # with the script's rows, steps and warm-up: what TRAIN says
ON_GPU = torch.cuda.is_available()
PRECISION = "bf16" if ON_GPU or has_bf16() else "fp32"
ATTENTION = "eager" if PRECISION == "bf16" and not ON_GPU else "sdpa"  # what ours takes
PREPARE = """
import os, sys, time
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from itertools import chain
from datasets import load_dataset
from transformers import AutoTokenizer
start = time.perf_counter()
corpus, name, out, length = sys.argv[1:4] + [int(sys.argv[4])]
tokenizer = AutoTokenizer.from_pretrained(name)
text = load_dataset("text", data_files=corpus, sample_by="paragraph", split="train", cache_dir=out + "/cache")
encode = lambda rows: tokenizer(rows["text"], return_special_tokens_mask=True)
def group(rows):
    joined = {k: list(chain(*rows[k])) for k in rows}
    total = len(joined["input_ids"]) // length * length
    return {k: [v[i : i + length] for i in range(0, total, length)] for k, v in joined.items()}
tokens = text.map(encode, batched=True, num_proc=2, remove_columns=["text"])
tokens.map(group, batched=True, num_proc=2).save_to_disk(out + "/rows", num_proc=2)
print(time.perf_counter() - start)
"""
TRAIN = """
import json, os, shutil, sys
import torch
from datasets import load_from_disk
from transformers import (AutoTokenizer, DataCollatorForLanguageModeling, ModernBertConfig, ModernBertForMaskedLM,
                          Trainer, TrainingArguments)
name, data, out, config, rows, lr, steps, compiled, seed, warmup, precision, attention = sys.argv[1:]
torch.manual_seed(int(seed))
tokenizer = AutoTokenizer.from_pretrained(name)
values = json.loads(config)
values.pop("model_type")
model = ModernBertForMaskedLM(ModernBertConfig(**values, sparse_prediction=True))  # logits of masked positions
model.save_pretrained(out + "/initial")
model.set_attn_implementation(attention)
arguments = TrainingArguments(
    output_dir=out, max_steps=int(steps), per_device_train_batch_size=int(rows), learning_rate=float(lr),
    warmup_steps=int(warmup), lr_scheduler_type="linear", weight_decay=0.01, adam_beta2=0.98,
    adam_epsilon=1e-6, bf16=precision == "bf16", use_cpu=not torch.cuda.is_available(), save_strategy="no",
    report_to=[], torch_compile=compiled == "compiled", disable_tqdm=True, seed=int(seed), logging_steps=50,
    optim="adamw_torch_fused", ddp_find_unused_parameters=False)
trainer = Trainer(model=model, args=arguments, train_dataset=load_from_disk(data),
                  data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15))
trained = trainer.train()
if trainer.args.process_index == 0:
    trainer.save_model(out)
    with open(os.path.join(out, "trained.json"), "w") as file:
        json.dump(trained.metrics["train_runtime"], file)
    for file in ("tokenizer.json", "tokenizer_config.json"):  # as they were: what is written anew is another file
        shutil.copy(os.path.join(name, file), out)
"""


def run(command: list[str]) -> str:
    """What a command prints."""
    environment = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "TOKENIZERS_PARALLELISM": "false"} | MALLOC
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command[:6])} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def build(corpus: str, tokenizer: str, scratch: Path) -> float:
    """Our shards. Returns seconds."""
    start = time.perf_counter()
    options = ["--out", str(scratch / "shards"), "--tokenizer", tokenizer, "--validation", "0.003"]
    run([sys.executable, "-m", "bertdata", "build", corpus, *options])
    return time.perf_counter() - start


def options_of(scratch: Path, recipe: str, eager: bool) -> list[str]:
    """Options of bertrain for a run of ours."""
    options = ["--data", scratch / "shards", "--length", LENGTH]
    return [*map(str, options), *recipe.split(), "--precision", PRECISION, "--compile", "off" if eager else "on"]


def ours(scratch: Path, name: str, recipe: str, seed: int, eager: bool, eval_every: int) -> tuple[str, dict[str, Any]]:
    """A run `name`. `curve` of the figures: seconds of training and validation loss at each evaluation.

    A step that compiles counts as compiling in the log. With --eager it counts as training.
    """
    out = scratch / f"{name}-{seed}"
    command = ["--out", out, "--eval-every", eval_every, "--save-every", 10**9, "--log-every", eval_every or 50]
    command += [*options_of(scratch, recipe, eager), "--seed", seed]
    run([sys.executable, "-m", "bertrain.pretrain", *map(str, command)])
    entries = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    timed = [entry for entry in entries if "trained_s" in entry]
    for entry in timed if eager else ():
        entry["trained_s"] += entry["compiled_s"]
    seconds_at = {entry["step"]: entry["trained_s"] for entry in timed}
    losses = {entry["step"]: entry["validation_loss"] for entry in entries if "validation_loss" in entry}
    curve = [[seconds_at[step], loss] for step, loss in losses.items() if step in seconds_at]
    figures = {name: timed[-1][name] for name in ("trained_s", "compiled_s", "step", "tokens")}
    return str(out), figures | {"curve": curve}


def group(python: str, corpus: str, tokenizer: str, scratch: Path) -> float:
    """The script's rows. Returns seconds, without its imports."""
    (scratch / "train.py").write_text(TRAIN)
    return float(run([python, "-c", PREPARE, corpus, tokenizer, str(scratch), str(LENGTH)]).split()[-1])


def script(
    python: str, scratch: Path, rows: int, steps: int, how: str, tokenizer: str, seed: int = 0
) -> tuple[str, float]:
    """Trains by the script. Returns where its model is, and seconds."""
    out, begun = str(scratch / f"theirs-{seed}"), time.perf_counter()
    rest = [tokenizer, scratch / "rows", out, (scratch / "config.json").read_text(), rows, LR, steps, how, seed]
    rest += [warmup_of(steps), PRECISION, ATTENTION]
    run([python, str(scratch / "train.py"), *map(str, rest)])
    return out, time.perf_counter() - begun


def warmup_of(steps: int) -> int:
    return max(1, int(0.06 * steps))


def fitting(python: str, scratch: Path, rows: int, seconds: float, tokenizer: str, eager: bool) -> dict[str, int]:
    """How many steps of the script fit into seconds of training, compiled and not, by the time of some."""
    found, trials = {}, (5, 15) if eager else (10, 30)
    for how in ("eager",) if eager else ("eager", "compiled"):
        if not eager:
            script(python, scratch, rows, 2, how, tokenizer)  # which fills the cache of compiled code
        few, more = (script(python, scratch, rows, steps, how, tokenizer)[1] for steps in trials)
        found[how] = max(1, int(seconds / ((more - few) / (trials[1] - trials[0]))))
    return found


@click.command()
@click.argument("corpus")
@click.argument("tokenizer")
@click.option("--minutes", default=10.0, show_default=True)
@click.option("--seeds", default=1, show_default=True)
@click.option("--eager", is_flag=True, help="Compile neither.")
@click.option("--tiny", is_flag=True, help="A model of 2 layers and width 128.")
@click.option("--rows", default=128, show_default=True, help="Of a step of the script.")
@click.option("--eval-every", default=0, show_default=True, help="Steps of ours between evaluations; 0: none.")
@click.option("--environments", "environments", type=Path, help="Makes the environment of `datasets` here.")
def main(
    corpus: str, tokenizer: str, minutes: float, seeds: int, eager: bool, tiny: bool, rows: int, eval_every: int,
    environments: Path | None,
) -> None:  # fmt: skip
    python = python_of("datasets", environments) if environments else sys.executable

    def score(model: str) -> dict[str, Any]:
        """Loss on the rows that a run of ours is evaluated on."""
        options = ["--checkpoint", model, "--data", str(scratch / "shards"), "--length", str(LENGTH)]
        options += ["--max-samples", str(EVALUATED_SAMPLES), "--json"]
        scored = json.loads(run([sys.executable, "-m", "bertrain", "evaluate", *options]).splitlines()[-1])
        found = {key: round(scored[key], 4) for key in ("loss", "accuracy", "bits_per_byte")}
        return found | {"frequencies": round(scored["reference"]["unigram"], 4)}

    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        config = small_modernbert(tokenizer) | (TINY if tiny else {})
        (scratch / "config.json").write_text(json.dumps(config))
        built, grouped = build(corpus, tokenizer, scratch), group(python, corpus, tokenizer, scratch)
        fits = fitting(python, scratch, rows, 60 * minutes - grouped, tokenizer, eager)
        how = max(fits, key=lambda name: fits[name])
        seconds = {"ours": built, "ours, same recipe": built, "script": grouped}
        found: dict[str, Any] = {name: {"until training": round(s, 1), "seeds": []} for name, s in seconds.items()}
        found["script"]["steps that fit"] = fits
        recipe = f"{RECIPE} --model {scratch / 'config.json'}"
        doctor = [sys.executable, "-m", "bertrain", "doctor", *options_of(scratch, recipe, eager)]
        said = run([*doctor, "--out", str(scratch / "doctor"), "--steps", "1000"])
        recipe += f" --steps {steps_in(60 * minutes - built, said)}"
        for seed in range(seeds):
            model, _ = script(python, scratch, rows, fits[how], how, tokenizer, seed)
            theirs = {"trained_s": json.loads(Path(model, "trained.json").read_text())}
            same = f"{SAME} --global-batch-size {rows} --steps {fits[how]} --warmup-steps {warmup_of(fits[how])}"
            runs = {
                "ours": ours(scratch, "ours", recipe, seed, eager, eval_every),
                "ours, same recipe": ours(scratch, "same", f"{same} --init {model}/initial", seed, eager, 0),
                "script": (model, theirs),
            }
            for name, (model, figures) in runs.items():
                figures = figures | score(model)
                found[name]["seeds"].append(figures)
                print(name, seed, figures, flush=True)
        for mine, theirs in zip(found["ours"]["seeds"], found["script"]["seeds"], strict=True):
            reached = (second for second, loss in mine["curve"] if loss <= theirs["loss"])
            mine["seconds to the loss of the script"] = next(reached, None)
    report(
        "what a fixed time is worth",
        f"{minutes} minutes, {len(os.sched_getaffinity(0))} cores, {PRECISION}, "
        f"{ATTENTION} attention, {'not compiled' if eager else 'compiled'}, {RECIPE}; the script {rows} rows",
        found,
    )


if __name__ == "__main__":
    main()
