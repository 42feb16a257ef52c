"""What is a fixed time worth: corpus → shards → model → bits per byte → SST-2, by us and by a run_mlm script?

    python benchmarks/speedrun.py corpus.txt tokenizer/ --sst2 sst2/ [--minutes 10] [--ranks 2]

Both get the same minutes, text, tokenizer, architecture (ModernBERT of 6 layers, width 256), batch and dtype (bf16),
and their time begins with the raw text. Ours: bertdata build, then pretrain with the rest as --budget. The other:
`datasets` tokenizes and groups the text as run_mlm.py does, then transformers' Trainer with
DataCollatorForLanguageModeling trains with the same peak rate and schedule, compiled or not, whichever gives it more
steps in the time by trials of 10 and 30 steps, which are not counted. Ours is compiled. Both are then scored alike:
masked loss as bits per byte on the same held-out shards, SST-2 by bertrain.finetune over three seeds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
from common import report

LENGTH, ROWS, LR = 64, 128, 2e-3
CONFIG = {
    "model_type": "modernbert", "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
    "intermediate_size": 384, "max_position_embeddings": 512, "layer_types": ["full_attention"] * 6,
    "classifier_pooling": "mean",
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
PREPARE = """
import os, sys
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from itertools import chain
from datasets import load_dataset
from transformers import AutoTokenizer
corpus, name, out, length = sys.argv[1:4] + [int(sys.argv[4])]
tokenizer = AutoTokenizer.from_pretrained(name)
text = load_dataset("text", data_files=corpus, sample_by="paragraph", split="train", cache_dir=out + "/cache")
encode = lambda rows: tokenizer(rows["text"], return_special_tokens_mask=True)
def group(rows):
    joined = {k: list(chain(*rows[k])) for k in rows}
    total = len(joined["input_ids"]) // length * length
    return {k: [v[i : i + length] for i in range(0, total, length)] for k, v in joined.items()}
tokens = text.map(encode, batched=True, num_proc=2, remove_columns=["text"])
tokens.map(group, batched=True, num_proc=2).save_to_disk(out + "/rows")
"""
TRAIN = """
import json, os, shutil, sys
import torch
from datasets import load_from_disk
from transformers import (AutoTokenizer, DataCollatorForLanguageModeling, ModernBertConfig, ModernBertForMaskedLM,
                          Trainer, TrainingArguments)
name, data, out, config, rows, lr, ranks, steps, compiled = sys.argv[1:]
torch.set_num_threads(1)
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(name)
values = json.loads(config)
values.pop("model_type")
model = ModernBertForMaskedLM(ModernBertConfig(**values))
arguments = TrainingArguments(
    output_dir=out, max_steps=int(steps), per_device_train_batch_size=int(rows) // int(ranks), learning_rate=float(lr),
    warmup_steps=max(1, int(0.06 * int(steps))), lr_scheduler_type="linear", weight_decay=0.01, adam_beta2=0.98,
    adam_epsilon=1e-6, bf16=True, use_cpu=not torch.cuda.is_available(), save_strategy="no", report_to=[],
    torch_compile=compiled == "compiled", disable_tqdm=True, logging_steps=50, optim="adamw_torch_fused",
    ddp_find_unused_parameters=False)
trainer = Trainer(model=model, args=arguments, train_dataset=load_from_disk(data),
                  data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15))
trainer.train()
if trainer.args.process_index == 0:
    trainer.save_model(out)
    for file in ("tokenizer.json", "tokenizer_config.json"):  # as they were: what is written anew is another file
        shutil.copy(os.path.join(name, file), out)
"""


def run(command: list[str], **more: Any) -> str:
    with tempfile.TemporaryDirectory() as cache:  # who compiles compiles from the start
        environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TORCHINDUCTOR_CACHE_DIR": cache}
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, **more)
    if done.returncode:
        sys.exit(f"{' '.join(command[:6])} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def ours(corpus: str, tokenizer: str, scratch: Path, seconds: float, ranks: int) -> tuple[str, dict[str, Any]]:
    start = time.perf_counter()
    shards = str(scratch / "shards")
    run([sys.executable, "-m", "bertdata", "build", corpus, "--out", shards, "--tokenizer", tokenizer])
    built = time.perf_counter() - start
    command = ["--data", shards, "--out", scratch / "ours", "--model", scratch / "config.json", "--length", LENGTH]
    command += ["--global-batch-size", ROWS, "--lr", LR, "--precision", "bf16", "--log-every", 50]
    command += ["--compile", "on", "--budget", f"{seconds - built - 12:.0f}s"]
    command += ["--eval-every", 0, "--save-every", 10**9]  # twelve seconds are for starting and the last checkpoint
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    run([*launch, "-m", "bertrain.pretrain", *map(str, command)])
    entries = [json.loads(line) for line in (scratch / "ours" / "log.jsonl").read_text().splitlines()]
    return str(scratch / "ours"), {
        "seconds": round(time.perf_counter() - start, 1),
        "until training": round(built, 1),
        "tokens": entries[-1].get("tokens") or entries[-2]["tokens"],
    }


def theirs(corpus: str, tokenizer: str, scratch: Path, seconds: float, ranks: int) -> tuple[str, dict[str, Any]]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    script, out = scratch / "train.py", scratch / "theirs"
    script.write_text(TRAIN)
    start = time.perf_counter()
    run([sys.executable, "-c", PREPARE, corpus, tokenizer, str(scratch), str(LENGTH)])
    prepared = time.perf_counter() - start
    rest = [str(scratch / "shards"), str(scratch / "rows"), str(out)]
    rest += [(scratch / "config.json").read_text(), str(ROWS), str(LR), str(ranks)]

    def train(steps: int, how: str) -> float:
        begun = time.perf_counter()
        run([*launch, str(script), *rest, str(steps), how])
        return time.perf_counter() - begun

    def fitting(how: str) -> int:
        few, more = train(10, how), train(30, how)
        return 30 + int((seconds - prepared - more) / ((more - few) / 20))

    trials = {how: fitting(how) for how in ("eager", "compiled")}
    how = max(trials, key=lambda name: trials[name])
    took = train(trials[how], how)
    figures = {
        "seconds": round(prepared + took, 1),
        "until training": round(prepared, 1),
        "tokens": trials[how] * ROWS * LENGTH,
        "steps that fit": trials,
    }
    return str(out), figures


@click.command()
@click.argument("corpus")
@click.argument("tokenizer")
@click.option("--sst2", required=True, help="Directory with train.tsv, dev.tsv, test.tsv.")
@click.option("--minutes", default=10.0)
@click.option("--ranks", default=2)
@click.option("--epochs", default=3, help="Of fine-tuning.")
def main(corpus: str, tokenizer: str, sst2: str, minutes: float, ranks: int, epochs: int) -> None:
    found: dict[str, dict[str, Any]] = {}
    models: dict[str, str] = {}

    def tune(name: str, model: str) -> Any:
        tuning = [
            "--checkpoint",
            model,
            "--out",
            str(scratch / f"tuned-{name}"),
            "--epochs",
            str(epochs),
            "--lr",
            "3e-4",
        ]
        tuning += ["--length", str(LENGTH), "--precision", "bf16"]
        for part in ("train", "dev", "test"):
            tuning += [f"--{part}", str(Path(sst2, f"{part}.tsv"))]
        return json.loads(run([sys.executable, "-m", "bertrain.finetune", "--json", *tuning]).splitlines()[-1])

    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        from bertdata.tokenize.load import load as load_tokenizer

        special = load_tokenizer(tokenizer).special
        ids = {"vocab_size": special.vocab_size, "pad_token_id": special.pad, "cls_token_id": special.cls,
               "sep_token_id": special.sep}  # fmt: skip
        (scratch / "config.json").write_text(json.dumps(CONFIG | ids))
        for name, contender in (("ours", ours), ("run_mlm", theirs)):
            model, figures = contender(corpus, tokenizer, scratch, 60 * minutes, ranks)
            options = ["--checkpoint", model, "--data", str(scratch / "shards"), "--length", str(LENGTH)]
            scored = json.loads(run([sys.executable, "-m", "bertrain.evaluate", "--json", *options]).splitlines()[-1])
            score = {key: round(scored[key], 4) for key in ("loss", "accuracy", "bits_per_byte")}
            found[name], models[name] = figures | {"validation": score}, model
            print(name, found[name], flush=True)
        with ThreadPoolExecutor() as both:
            for name, tuned in zip(models, both.map(lambda name: tune(name, models[name]), models), strict=True):
                found[name] |= {"SST-2 dev": tuned["dev_accuracy"], "SST-2 test": tuned["test_accuracy"]}
    report("what a fixed time is worth", f"{minutes} minutes, {ranks} CPU ranks, bf16", found)


if __name__ == "__main__":
    main()
