"""Shows that a change of structure changes no result: bytes of builds, losses and weights of short runs.

    python tools/freeze.py --commits HEAD     a commit and this working tree, to the bit
    python tools/freeze.py --commits A B      two commits, to the bit
    python tools/freeze.py                    this working tree and tests/golden/frozen.json, within its bounds
    python tools/freeze.py --write            writes frozen.json anew, and finds its bounds

It prints what differs, a run with its first differing step, and ends with exit code 1; else it says that all is the
same. A scenario is a command line as users type it. Each commit is checked out into a worktree, and its scenarios run
in processes that have imported its packages already, one thread each. All scenarios of a commit take about 3.5 minutes
of CPU time, a quarter of which compiles kernels. --only 'grow.*' runs fewer.

Builds give the same bytes on every machine. Losses give the same bits only on one kind of machine with one version of
torch; for other machines frozen.json has a bound for each run, found by what SETTINGS change.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import runpy
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FROZEN = ROOT / "tests" / "golden" / "frozen.json"
QUIET = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""The environment of commands: CPUs alone, one thread each, no network."""
Result = dict[str, Any]  # of a scenario: "steps", a list of name → number; "files", name → SHA-256; or "error"

PHASES = {
    "masks": [{"share": 0.5, "mlm_probability": 0.3}, {"mlm_probability": 0.15}],
    "lengths": [{"share": 0.5, "length": 32}, {"length": 64}],
    "long": [{"share": 0.9, "length": 32}, {"length": 64}],
    "longer": [
        {"share": 0.5, "length": 32, "global_batch_size": 4},
        {"share": 0.4, "length": 32, "global_batch_size": 8},
        {"length": 64, "global_batch_size": 8},
    ],
    "batch": [
        {"share": 0.8, "global_batch_size": 4},
        {"global_batch_size": 8},
    ],
    "half": [{"share": 0.5, "layers": 1}, {}],
    "early": [{"share": 0.4, "layers": 1}, {}],
    "trunk": [{"share": 0.25, "layers": 1}, {"trains": "layer.1|cls"}],
}
"""Files of phases, by their name without .toml."""
DEFAULTS = {  # options of each command line that does not give them itself
    "bertdata build": "--shard-size 40000 --validation 0.05 --workers 1",
    "bertdata import": "--shard-size 20000 --validation 0.05",
    "bertrain pretrain": "--data wordpiece --model bert-tiny --optimizer adamw --length 32 --global-batch-size 8 "
    "--steps 16 --lr 3e-3 --log-every 1 --eval-every 0 --save-every 8 --keep 9 --seed 3",
    "bertrain teacher": "--model bert --data wordpiece --top-k 8 --max-samples 160 --length 32 --seed 3 --yes",
    "bertrain finetune": "--train train.tsv --dev dev.tsv --seeds 1 --epochs 2 --batch-size 8 --lr 1e-3 --length 32",
}
INSTEAD = {
    "--init": ["--model"],
    "--epochs": ["--steps"],
    "--variants": ["--max-samples"],
    "lengths.toml": ["--length"],
    "long.toml": ["--length"],
    "longer.toml": ["--length", "--global-batch-size"],
    "batch.toml": ["--global-batch-size"],
}
"""An option, or a file of phases, and the defaults that must not be beside it."""

READS = {"--data", "--model", "--init", "--config", "--teacher", "--teacher-cache", "--checkpoint", "resume"}
"""What stands before the name of another scenario whose output is read."""

BUILDS = {
    "wordpiece": "english.txt --tokenizer vocab.txt --sentences line",
    "bpe": "english.txt --tokenizer bpe.json --test 0.05",
    "chinese": "chinese.txt --tokenizer characters.txt --words freeze:two_characters",
    "jsonl": "english.jsonl --tokenizer vocab.txt --text-key body --on-error skip",
    "parquet": "english.parquet --tokenizer bpe.json --text-key body",
    "arrow": "english.arrow --tokenizer vocab.txt --text-key body",
    "gz": "english.txt.gz --tokenizer vocab.txt --sentences line",
    "zst": "english.jsonl.zst --tokenizer bpe.json --text-key body",
    "lines": "english.txt --tokenizer vocab.txt --documents line --max-documents 900",
    "folder": "pages --tokenizer vocab.txt --documents file --include '*.md' --exclude 'drafts/*' --validation 0.2",
    "map": "english.txt --tokenizer vocab.txt --map bertdata.prepare:nfkc --map 'bertdata.prepare:length(100, 400)'",
    "dedup": "english.txt english.jsonl --tokenizer vocab.txt --text-key body --on-error skip --dedup",
    "trained": "english.txt --vocab-size 120 --cased",
    "small": "english.txt --tokenizer vocab.txt --max-documents 25 --validation 0.3",
}
RAY = {"ray": "english.txt --tokenizer vocab.txt --sentences line --ray local"}
MORE_BUILDS = {
    "parts": "bertdata build english.txt --tokenizer vocab.txt --sentences line --out parts --part 1/2 ; "
    "bertdata build english.txt --tokenizer vocab.txt --sentences line --out parts --part 2/2 ; "
    "bertdata build --out parts --finish",
    "megatron": "bertdata import tokens.idx --tokenizer vocab.txt --out megatron",
    "rows": "bertdata import tokens.parquet --tokenizer bpe.json --out rows",
    "unigram": "bertdata train-tokenizer english.txt --type unigram --vocab-size 100 --out unigram",
}

FIRST_RUNS = {
    "bert": "",
    "modernbert": "--model modernbert-tiny --masking whole_word --schedule wsd",
    "elastic": "--elastic layers=1:2,width=64:128:64,heads=1:2,feed_forward=256:512:128 --sub-networks 3",
}
CACHES = {
    "answers": "",
    "answers-pairs": "--samples pairs --mlm-probability 0.3 --max-samples 128",
    "answers-packed": "--samples packed --masking span --model modernbert",
    "answers-again": "--variants 2 --data small",
}
RUNS = {
    # masks and rows
    "bernoulli": "--masking bernoulli --shuffle blocks --data-seed 5",
    "words": "--data chinese --masking whole_word",
    "masks": "--config masks.toml --masking span",
    "nsp": "--objective mlm+nsp --schedule cosine",
    "packed": "--model modernbert-tiny --isolate-documents --masking span --micro-batch-size 3",
    "packed-bert": "--isolate-documents --length 48",
    "lengths": "--config lengths.toml",
    "lengths-packed": "--config longer.toml --isolate-documents --model modernbert-tiny",
    "mix": "--data wordpiece --data dedup --weights 0.7,0.3",
    "mix-packed": "--data wordpiece --data lines --weights 0.5,0.5 --isolate-documents --masking bernoulli",
    "epochs": "--data bpe --epochs 0.07",
    # the schedule and the optimizer
    "batch": "--config batch.toml",
    "wsd": "--schedule wsd --decay-share 0.5 --warmup-steps 3",
    "cosine": "--schedule cosine --warmup 0",
    "adamw": "--beta1 0.8 --beta2 0.95 --epsilon 1e-4 --weight-decay 0.3 --seed 4",
    "scales": "--lr-scale embeddings=0.1 --lr-scale LayerNorm=0",
    "muon": "--optimizer muon --muon-rate 2 --mlm-probability 0.3 --model modernbert-tiny",
    "muon-bert": "--optimizer muon --muon-rate 2 --muon-momentum 0.9 --schedule cosine --weight-decay 0.1",
    "accumulation": "--micro-batch-size 3",
    "clipped": "--clip-norm 0.1",
    # the model
    "distilbert": "--model distilbert.json",
    "albert": "--model albert.json",
    "recomputed": "--model modernbert-tiny --gradient-checkpointing",
    "init": "--init bert --seed 5",
    "config": "--config bert/run.json --lr 1e-3 --model modernbert-tiny",
    "lora": "--init bert --lora r=4,alpha=8",
    "lora-muon": "--init modernbert --lora r=4,alpha=8,target=Wqkv --optimizer muon",
    "grow": "--config early.toml",
    "grow-fresh": "--config trunk.toml --grow-by fresh --optimizer muon",
    "elastic-modernbert": "--model modernbert-tiny --elastic layers=1:2 --optimizer muon --muon-rate 2 "
    "--mlm-probability 0.3 --isolate-documents",
    # a teacher
    "cached": "--teacher-cache answers --alpha 0.5 --temperature 2",
    "cached-pairs": "--teacher-cache answers-pairs --objective mlm+nsp --mlm-probability 0.3",
    "cached-packed": "--teacher-cache answers-packed --isolate-documents --masking span --model modernbert-tiny",
    "cached-again": "--teacher-cache answers-again --data small",
    "logits": "--teacher modernbert --distil logits --temperature 2 --alpha 0.7",
    "relations": "--model modernbert-tiny --teacher bert --distil relations",
    "hidden": "--teacher bert --distil hidden --alpha 0.3 --micro-batch-size 5",
    "hidden-last": "--model modernbert-tiny --teacher bert --distil hidden --distil-layers last --isolate-documents",
    "elastic-relations": "--teacher bert --distil relations --elastic layers=1:2,feed_forward=256:512:256",
    "grow-logits": "--teacher bert --distil logits --config half.toml",
    # number formats
    "bf16": "--precision bf16",
    "bf16-muon": "--precision bf16 --optimizer muon --steps 8 --save-every 4",
    "fp16": "--precision fp16",
}
ON_TWO_RANKS = {
    "ranks-bert": "--global-batch-size 7 --micro-batch-size 2",
    "ranks-muon": "--optimizer muon --muon-rate 2 --mlm-probability 0.3 --model modernbert-tiny",
    "ranks-relations": "--teacher bert --distil relations",
    "ranks-packed": "--model modernbert-tiny --isolate-documents --config long.toml",
    "ranks-elastic": "--elastic layers=1:2 --objective mlm+nsp",
    "ranks-grow": "--config half.toml --data wordpiece --data dedup --weights 0.7,0.3",
}
KEPT_SCENARIOS = [*BUILDS, *MORE_BUILDS, *FIRST_RUNS, *RUNS]  # of frozen.json
RESUMED = [
    "batch",
    "bf16",
    "cached",
    "elastic",
    "fp16",
    "grow",
    "grow-fresh",
    "hidden",
    "lengths-packed",
    "lora",
    "mix",
    "muon",
    "relations",
    "ranks-bert",
    "ranks-muon",
    "ranks-grow",
]
PACKAGES = re.compile(r"(bertdata|bertrain)(\.|$)")  # modules of the commit
RESUMES = ", resumed"  # the end of the names of runs that are killed and go on
LAST = {
    "dropout": "bertrain pretrain --out dropout --model bert.json",
    "evaluate": "bertrain evaluate --checkpoint modernbert --data wordpiece --json",
    "minimal-pairs": "bertrain evaluate --checkpoint bert --pairs pairs.jsonl --json",
    "finetune": "bertrain finetune --checkpoint bert --out finetune",
    "finetune-lora": "bertrain finetune --checkpoint modernbert --out finetune-lora --lora r=4,alpha=8 --test dev.tsv",
    "extract": "bertrain extract --checkpoint elastic --layers 1 --width 64 --heads 1 --feed-forward 256 --out extract",
}
KEPT_DIGITS = 7  # of a figure in frozen.json
PARTS = (1, 8, math.inf)  # ends of the parts of a run's entries that have bounds of their own
SMALLEST = 0.01  # smaller figures are compared as if they were this large
SLACK, LEAST_BOUND = 4, 2e-5  # a run may differ by SLACK times what was seen, or by LEAST_BOUND
SETTINGS = [
    {"ATEN_CPU_CAPABILITY": "default"},
    {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41", "OPENBLAS_CORETYPE": "Prescott"},
    {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"},
]
"""Environments in which torch, MKL, oneDNN and OpenBLAS compute as they do on other processors. frozen.json has under
"seen" the largest relative difference that any of them made to a run's figures, for each of the PARTS of its log."""
SHOWN = re.compile(r"lr|tokens|grad_norm|agreement|.*loss|.*accuracy|.*targets|f1|matthews|bits_per_byte")  # figures
KEPT = re.compile(r"grad_norm|(validation_|nsp_|distil_)?loss")  # figures of frozen.json

WORDS = [
    "the",
    "of",
    "and",
    "stone",
    "river",
    "light",
    "under",
    "morning",
    "bread",
    "letter",
    "wind",
    "house",
    "salt",
    "Häuser",
    "naïve",
    "rivers",
    "12",
    "x-ray",
    "水",
]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def documents() -> list[str]:
    """Of a few lines each, the same on every machine."""
    draw = random.Random(7)
    made = []
    for number in range(400):
        lines = [" ".join(draw.choices(WORDS, k=draw.randint(2, 12))) + "." for _ in range(draw.randint(1, 9))]
        made.append(f"Document {number}.\n" + "\n".join(lines) + "\n")
    return made


def english() -> str:
    return "\n".join(documents())


def chinese() -> str:
    draw = random.Random(8)
    letters = [chr(0x4E00 + number) for number in range(300)]
    lines = ["".join(draw.choices(letters, k=draw.randint(3, 40))) + "。" for _ in range(600)]
    return "\n\n".join(lines) + "\n"


def two_characters(text: str) -> list[str]:
    """The segmenter of the Chinese build."""
    return [text[at : at + 2] for at in range(0, len(text), 2)]


def byte_level_bpe() -> str:
    """A tokenizer.json with all merges that the words of the English text need, in a fixed order."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = [list(word) for word, _ in split.pre_tokenize_str(english()[:20_000])]
    vocabulary = ["<|endoftext|>", "[CLS]", "[SEP]", "[MASK]", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    while True:
        counts: dict[tuple[str, str], int] = {}
        for word in words:
            for pair in zip(word, word[1:], strict=False):
                counts[pair] = counts.get(pair, 0) + 1
        if not counts:
            break
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        vocabulary.append("".join(best))
        for word in words:
            for at in range(len(word) - 2, -1, -1):
                if at + 1 < len(word) and (word[at], word[at + 1]) == best:
                    word[at : at + 2] = ["".join(best)]
    ids = {token: number for number, token in enumerate(dict.fromkeys(vocabulary))}
    tokenizer = Tokenizer(models.BPE(ids, [pair for pair in merges if "".join(pair) in ids]))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(vocabulary[:4])
    return tokenizer.to_str()


def write_inputs(folder: Path) -> None:
    """The files that scenarios read: text in many forms, vocabularies, models, names, pairs and labelled examples."""
    import pyarrow as pa
    from pyarrow import parquet

    def write(name: str, text: str) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")

    text, rows = english(), [{"number": number, "body": body} for number, body in enumerate(documents())]
    letters = sorted(set(text + "abcdefghijklmnopqrstuvwxyz") - set(" \n"))
    vocabulary = [*SPECIALS, *letters, *("##" + letter for letter in letters), *sorted({w.lower() for w in WORDS[:13]})]
    write("vocab.txt", "\n".join(vocabulary) + "\n")
    write("characters.txt", "\n".join([*SPECIALS, *sorted(set(chinese()) - {"\n"})]) + "\n")
    write("bpe.json", byte_level_bpe())
    write("english.txt", text)
    write("chinese.txt", chinese())
    lines = "".join(json.dumps(row, ensure_ascii=row["number"] % 2 == 0) + "\n" for row in rows)
    write("english.jsonl", lines + '{"number": 400}\n{"number": 401, "body": null}\n')
    for number, body in enumerate(documents()[:60]):
        write(
            ("pages/drafts/" if number % 5 == 0 else "pages/") + f"{number}" + (".txt" if number % 3 else ".md"), body
        )
    (folder / "english.txt.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    with pa.CompressedOutputStream(str(folder / "english.jsonl.zst"), "zstd") as file:
        file.write(lines.encode())
    table = pa.Table.from_pylist(rows)
    parquet.write_table(table, folder / "english.parquet", row_group_size=64)
    with pa.ipc.new_file(str(folder / "english.arrow"), table.schema) as file:
        file.write_table(table, max_chunksize=100)

    write_ids(folder / "tokens")

    small = {"vocab_size": 100, "architectures": [], "max_position_embeddings": 80}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "embedding_size": 16}
    write("bert.json", json.dumps(small | sizes | {"model_type": "bert"}))
    write("albert.json", json.dumps(small | sizes | quiet | {"model_type": "albert"}))
    parts = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48, "dropout": 0.0, "attention_dropout": 0.0}
    write("distilbert.json", json.dumps(small | parts | {"model_type": "distilbert", "tie_word_embeddings": False}))
    draw = random.Random(9)
    for name, phases in PHASES.items():
        tables = [[f"{key} = {json.dumps(value)}\n" for key, value in phase.items()] for phase in phases]
        write(f"{name}.toml", "".join("".join(["[[phase]]\n", *table]) for table in tables))
    for name, number in (("train.tsv", 48), ("dev.tsv", 24)):
        texts = [draw.choices(WORDS, k=draw.randint(3, 14)) for _ in range(number)]
        write(name, "".join(f"{' '.join(words)}\t{'river' in words}\n" for words in texts))
    pairs = [draw.choices(WORDS[:13], k=6) for _ in range(20)]
    judged = [{"sentence_good": " ".join(pair), "sentence_bad": " ".join(sorted(pair))} for pair in pairs]
    write("pairs.jsonl", "".join(json.dumps(row) + "\n" for row in judged))


def write_ids(prefix: Path, number: int = 2000) -> None:
    """Write documents of five sentences as the two files of Megatron, and as rows of Parquet."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import parquet

    draw = random.Random(10)
    lengths, starts = [draw.randint(1, 30) for _ in range(number)], np.arange(0, number + 1, 5)
    ends, ids = np.cumsum(lengths), np.array([draw.randrange(5, 40) for _ in range(sum(lengths))], "<u2")
    prefix.with_suffix(".bin").write_bytes(ids.tobytes())
    arrays = np.array(lengths, "<i4"), 2 * (ends - lengths), starts
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, number, starts.size)
    prefix.with_suffix(".idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
    rows = [document.tolist() for document in np.split(ids, ends[4:-1:5])]
    parquet.write_table(pa.table({"input_ids": rows}), prefix.with_suffix(".parquet"))


def scenarios(only: str = "", *, ray: bool = False) -> list[dict[str, str]]:
    """Name → command lines, joined by " ; ", in stages: a scenario needs only what earlier stages wrote.

    only: a regular expression for names; the others are left out unless one of these needs them.
    """

    def lines(command: str, options: dict[str, str]) -> dict[str, str]:
        return {name: f"{command} --out {name} {more}" for name, more in options.items()}

    builds, caches = lines("bertdata build", BUILDS | (RAY if ray else {})), lines("bertrain teacher", CACHES)
    first, runs = lines("bertrain pretrain", FIRST_RUNS), lines("bertrain pretrain", RUNS)
    runs |= lines("torchrun bertrain pretrain", ON_TWO_RANKS) | LAST
    resumed = {f"{name}{RESUMES}": f"resume {name} ; {(first | runs)[name]}" for name in RESUMED}
    stages = [
        {name: builds.pop(name) for name in ("wordpiece", "bpe")},  # first, and so "bert": they compile kernels
        builds,
        MORE_BUILDS,
        {"bert": first.pop("bert")},
        first,
        caches,
        runs,
        resumed,
    ]
    every = {name: line for stage in stages for name, line in stage.items()}
    wanted = [name for name in every if re.fullmatch(only or ".*", name)]
    for name in wanted:  # which grows
        words = [word for line in every[name].split(" ; ") for word in complete(line.removeprefix("torchrun "))]
        read = [value.split("/")[0] for option, value in itertools.pairwise(words) if option in READS]
        wanted += [value for value in dict.fromkeys(read) if value in every and value not in wanted]
    return [{name: line for name, line in stage.items() if name in wanted} for stage in stages]


def complete(line: str) -> list[str]:
    """The words of a command line, with DEFAULTS."""
    words = shlex.split(line)
    command = " ".join(words[:2])
    given = set(words).union(*(INSTEAD.get(word, ()) for word in words))
    if "/run.json" not in line and "--finish" not in given:
        for option in re.findall(r"--[^ ]+(?: (?!--)[^ ]+)*", DEFAULTS.get(command, "")):
            line += f" {option}" if option.split()[0] not in given else ""
    return shlex.split(line)


def call(words: list[str]) -> str:
    """Runs a command line in this process as `python -m` runs it; returns what it printed."""
    before, sys.argv = sys.argv, words
    sys.modules.pop(f"{words[0]}.__main__", None)  # or runpy warns that it runs twice
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            try:
                runpy.run_module(words[0], run_name="__main__", alter_sys=True)
            except SystemExit as error:
                if error.code:
                    raise RuntimeError(f"{shlex.join(words)}: {(err.getvalue() or out.getvalue()).strip()}") from None
    finally:
        sys.argv = before
    return out.getvalue()


def digests(paths: list[Path], start: Path) -> dict[str, str]:
    return {str(path.relative_to(start)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(paths)}


def weights(directory: Path) -> dict[str, str]:
    """Of each file of weights below a directory the digest of its tensors, without what else stands in the file."""
    import torch
    from safetensors.torch import load_file

    found = {}
    for path in sorted(directory.rglob("*.safetensors")):
        digest = hashlib.sha256()
        for name, tensor in sorted(load_file(path).items()):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
        found[str(path.relative_to(directory))] = digest.hexdigest()
    return found


def figures(value: Any, name: str = "") -> dict[str, float]:
    """The numbers in nested JSON whose names are SHOWN, each with the names that lead to it."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    shown: dict[str, float] = {}
    for key, part in pairs:
        if isinstance(part, (int, float)) and not isinstance(part, bool) and SHOWN.fullmatch(str(key)):
            shown[f"{name}{key}"] = part
        shown |= figures(part, f"{name}{key} ")
    return shown


def scenario(line: str) -> Result:
    """Runs the command lines of a scenario in this process and folder, and reads what the last one wrote."""
    words: list[str] = []
    for command in line.split(" ; "):
        if command.startswith("resume "):
            _kill_after_first_half(Path(command.removeprefix("resume ")))
            continue
        words = complete(command.removeprefix("torchrun "))
        said = call(words)
    if int(os.environ.get("RANK", "0")):
        return {}
    given = words[words.index("--out") + 1] if "--out" in words else ""
    out = Path(given)
    if words[0] == "bertdata" and words[1] == "build" and "--workers" in words:
        for workers in ("2", "4", "8"):
            again = [f"{given}-{workers}" if word == given else word for word in words]
            again[again.index("--workers") + 1] = workers
            call(again)
            if _files(out) != _files(Path(f"{given}-{workers}")):
                return {"error": f"--workers {workers} gives other bytes than --workers 1"}
    if words[0] == "bertdata" or words[1] == "teacher":
        return {"steps": [], "files": _files(out)}
    if words[1] == "pretrain":
        log = [json.loads(entry) for entry in (out / "log.jsonl").read_text().splitlines()]
        steps = [{"step": entry["step"]} | figures(entry) for entry in log if "stream" not in entry]
        kept = max(out.glob("step-*"))
        return {"steps": steps, "files": {f"{kept.name}/{k}": v for k, v in weights(kept).items()}}
    if words[1] == "extract":
        return {"steps": [], "files": weights(out)}
    result = (out / "result.json").read_text() if words[1] == "finetune" else said.splitlines()[-1]
    return {"steps": [figures(json.loads(result))], "files": weights(out) if words[1] == "finetune" else {}}


def _files(out: Path) -> dict[str, str]:
    return digests([path for path in out.rglob("*") if path.is_file()], out)


def _kill_after_first_half(run: Path) -> None:
    """Makes a run look as if it had been killed before its last checkpoint."""
    for path in sorted(run.glob("step-*"))[1:]:
        shutil.rmtree(path)


def _in_child(line: str, root: Path, folder: Path, out: Path, environment: dict[str, str]) -> None:
    """A scenario in its own process; the result goes to a file."""
    import torch

    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        result = scenario(line)
        files = [
            getattr(module, "__file__", None) or "" for name, module in sys.modules.items() if PACKAGES.match(name)
        ]
        if strays := [file for file in files if file and not Path(file).is_relative_to(root)]:
            result = {"error": f"{strays[0]} was imported, which is not below {root}"}
    except Exception as error:  # a commit may not know an option
        result = {"error": f"{type(error).__name__}: {error}"}
    if not int(os.environ.get("RANK", "0")):
        out.write_text(json.dumps(result))


def collect(root: Path, folder: Path, *, only: str, ray: bool, jobs: int) -> dict[str, Result]:
    """The results of all scenarios of the commit in `root`, whose packages python must import from there."""
    server = multiprocessing.get_context("forkserver")
    models = [f"transformers.models.{name}.modeling_{name}" for name in ("bert", "modernbert")]
    ours = ["bertdata.cli", "bertrain.pretrain", "bertrain.commands.evaluate", "bertrain.lab.finetune"]
    server.set_forkserver_preload([*ours, "peft", *models])

    def run(name: str, line: str) -> Result:
        ranks = 2 if "torchrun" in line else 1
        with socket.socket() as free:
            free.bind(("localhost", 0))
            shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
        out = folder / f"{name}.result.json"
        processes = [
            server.Process(
                target=_in_child, args=(line, root, folder, out, shared | {"RANK": str(rank)} if ranks > 1 else {})
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(600)
            process.kill()
        return json.loads(out.read_text()) if out.exists() else {"error": "a process ended early, or not in 600 s"}

    write_inputs(folder)
    for path in folder.rglob("*"):
        os.utime(path, (0, 0))  # a dataset has the times of its inputs
    results: dict[str, Result] = {}
    with ThreadPoolExecutor(jobs) as pool:
        for stage in scenarios(only, ray=ray):
            results |= zip(stage, pool.map(run, stage, stage.values()), strict=True)
    for name in results:
        other = "wordpiece" if name == "ray" else name.removesuffix(RESUMES)
        lines = differences({name: results[other]}, {name: results[name]}) if other != name else []
        if lines:
            results[name] = {"error": f"differs from {other!r}, {lines[0]}"}
    return results


def results_of(root: Path, folder: Path, *options: str, **environment: str) -> dict[str, Result]:
    """What `collect` returns, in a process that imports the packages from `root`.

    folder: made for this call. It should have the same name for all that is compared, because a dataset says where its
    text is.
    """
    fixed = {
        "PYTHONPATH": str(root),
        "BERTDATA_CACHE": f"{folder}/cache",
        "NUMBA_CACHE_DIR": f"{folder}/numba",
        **QUIET,
    }
    folder.mkdir()
    try:
        command = [sys.executable, __file__, "--collect", str(root), str(folder), *options]
        # Not in the present folder, whose packages the forkserver would prefer.
        subprocess.run(command, env=os.environ | fixed | environment, cwd=folder, check=True)
        results: dict[str, Result] = json.loads((folder / "results.json").read_bytes())
        return results
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A worktree of a commit, for as long as the context lasts; this one for an empty text."""
    if not commit:
        yield ROOT
        return
    with tempfile.TemporaryDirectory(prefix="freeze-") as name:
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", f"{name}/tree", commit], check=True)
        try:
            yield Path(name) / "tree"
        finally:
            subprocess.run([*git, "remove", "--force", f"{name}/tree"], check=True)


def differences(before: dict[str, Result], after: dict[str, Result]) -> list[str]:
    """A line for each scenario that differs: the first figure that does, or else the files."""
    lines = []
    for name in before | after:
        one, two = (side.get(name, {"error": "not run"}) for side in (before, after))
        if one == two and "error" not in one:
            continue
        if "error" in one or "error" in two:
            lines += [
                f"{name}: {side}: {what['error']}"
                for side, what in (("before", one), ("after", two))
                if "error" in what
            ]
            continue
        lines.append(f"{name}: {_first_difference(one, two)}")
    return lines


def _first_difference(one: Result, two: Result) -> str:
    for at, (first, second) in enumerate(zip(one["steps"], two["steps"], strict=False)):
        if first != second:
            apart = [key for key in first | second if first.get(key) != second.get(key)]
            step = first.get("step", at + 1)
            return f"step {step}: " + ", ".join(f"{key} {first.get(key)} -> {second.get(key)}" for key in apart)
    if len(one["steps"]) != len(two["steps"]):
        return f"{len(one['steps'])} entries of the log -> {len(two['steps'])}"
    return ", ".join(file for file in one["files"] | two["files"] if one["files"].get(file) != two["files"].get(file))


def kept(results: dict[str, Result]) -> dict[str, Any]:
    """What frozen.json keeps of results: a digest of the arrays of each build, and the figures of each run."""
    builds, runs = {}, {}
    for name, result in results.items():
        if "error" in result:
            continue
        if name in BUILDS | MORE_BUILDS:
            arrays = sorted(pair for pair in result["files"].items() if re.fullmatch(r"[^/]+\.npy", pair[0]))
            builds[name] = hashlib.sha256(json.dumps(arrays).encode()).hexdigest()
        elif name in KEPT_SCENARIOS:
            names = sorted({figure for step in result["steps"] for figure in step if KEPT.fullmatch(figure)})
            runs[name] = {figure: [_rounded(step.get(figure)) for step in result["steps"]] for figure in names}
    return {"builds": builds, "runs": runs}


def _rounded(figure: float | None) -> float | None:
    return None if figure is None else float(f"{figure:.{KEPT_DIGITS}g}")


def farthest(before: dict[str, list[float | None]], after: dict[str, list[float | None]]) -> list[float]:
    """The largest relative difference of two runs' figures in each of the PARTS of their steps.

    It is infinite where one has a figure that the other lacks.
    """
    most = [0.0] * len(PARTS)
    for figure in before.keys() | after.keys():
        one, two = (run.get(figure, []) for run in (before, after))
        for at, (first, second) in enumerate(itertools.zip_longest(one, two)):
            part = next(number for number, end in enumerate(PARTS) if at < end)
            if first is None or second is None:
                apart = 0.0 if first is second else math.inf
            else:
                apart = abs(first - second) / max(abs(first), SMALLEST)
            most[part] = max(most[part], apart)
    return most


def _write(options: list[str], folder: Path) -> None:
    """frozen.json, with the figures of this machine as it is, and bounds from all SETTINGS."""
    shared = {"NUMBA_CACHE_DIR": f"{folder}-numba"}
    plain = results_of(ROOT, folder, *options, **shared)
    if errors := [f"{name}: {result['error']}" for name, result in plain.items() if "error" in result]:
        sys.exit("\n".join(errors))
    frozen = kept(plain)
    seen = {name: [0.0] * len(PARTS) for name in frozen["runs"]}
    for setting in SETTINGS:
        other = kept(results_of(ROOT, folder, *options, **shared, **setting))["runs"]
        for name, figures_ in frozen["runs"].items():
            seen[name] = [max(pair) for pair in zip(seen[name], farthest(figures_, other[name]), strict=True)]
    frozen["seen"] = {name: [float(f"{most:.2g}") for most in parts] for name, parts in seen.items()}
    FROZEN.write_text(as_text(frozen))


def as_text(frozen: dict[str, Any]) -> str:
    """JSON with a line for each build and run."""
    parts = []
    for part, entries in frozen.items():
        lines = [f"{json.dumps(name)}: {json.dumps(entry, separators=(',', ':'))}" for name, entry in entries.items()]
        parts.append(f'"{part}": {{\n' + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def bound(seen: float) -> float:
    return max(SLACK * seen, LEAST_BOUND)


def beyond(results: dict[str, Result]) -> list[str]:
    """A line for each build and run among results that failed, or differs from frozen.json by more than its bound."""
    frozen, now = json.loads(FROZEN.read_bytes()), kept(results)
    lines = [f"{name}: {result['error']}" for name, result in results.items() if "error" in result]
    lines += [f"{name}: other arrays" for name, digest in now["builds"].items() if digest != frozen["builds"].get(name)]
    for name, run in now["runs"].items():
        if name not in frozen["runs"]:
            lines.append(f"{name}: is not in {FROZEN.name}")
            continue
        for end, apart, seen in zip(PARTS, farthest(frozen["runs"][name], run), frozen["seen"][name], strict=True):
            if apart > bound(seen):
                lines.append(f"{name}: entries up to {end} differ by {apart:.2g}, more than {bound(seen):.2g}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commits", nargs="+", metavar="COMMIT", help="Compare one with this working tree, or two.")
    parser.add_argument("--write", action="store_true", help="Write frozen.json.")
    parser.add_argument("--ray", action="store_true", help="Also build on a Ray cluster of this machine.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="Scenarios at the same time.")
    parser.add_argument(
        "--only", default="", help="Regular expression for names of scenarios; those that they need run too."
    )
    parser.add_argument("--collect", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.collect:
        root, folder = map(Path, given.collect)
        (folder / "work").mkdir()
        results = collect(root, folder / "work", only=given.only, ray=given.ray, jobs=given.jobs)
        (folder / "results.json").write_text(json.dumps(results))
        return
    if len(given.commits or []) > 2:
        parser.error(f"--commits has {len(given.commits)} commits; give one or two")
    if not any(scenarios(given.only, ray=given.ray)):
        parser.error(f"--only {given.only} matches the name of no scenario; the first are {', '.join(BUILDS)}")
    options = ["--jobs", str(given.jobs), *["--ray"] * given.ray]
    options += ["--only", given.only or ("" if given.commits else "|".join(map(re.escape, KEPT_SCENARIOS)))]
    with tempfile.TemporaryDirectory(prefix="freeze-") as name:
        folder = Path(name) / "run"
        if given.write:
            _write(options, folder)
            return
        both = []
        for commit in (given.commits + [""])[:2] if given.commits else [""]:
            with checked_out(commit) as root:
                both.append(results_of(root, folder, *options))
    lines = differences(*both) if given.commits else beyond(both[0])
    print("\n".join(lines) or ("the same to the bit" if given.commits else "the same but for rounding"))
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
