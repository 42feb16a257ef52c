"""Shows that a change of structure changes no result: bytes of builds, losses and weights of short runs.

    python tools/freeze.py --commits HEAD     a commit and this working tree, to the bit
    python tools/freeze.py --commits A B      two commits, to the bit
    python tools/freeze.py                    this working tree and tests/golden/frozen.json, within its bounds
    python tools/freeze.py --write            replace frozen.json

It prints what differs, a run with its first differing step, and ends with exit code 1; else it says that all is the
same. A scenario is a command line as users type it. Each commit is checked out into a worktree, and its scenarios run
in processes that have imported its packages already, one thread each. All scenarios of a commit take about 3 minutes
of CPU time, a quarter of which compiles kernels. --only 'grow.*' runs fewer.

Builds give the same bytes on every machine. Losses give the same bits only on one kind of machine with one version of
torch; on others, runs may differ from frozen.json by BOUND.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from forks import QUIET, differing_entries, digests, flat, parts, rank_environments, run
from inputs import as_toml, write_inputs

ROOT = Path(__file__).resolve().parent.parent
FROZEN = ROOT / "tests" / "golden" / "frozen.json"
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

READS = {"--data", "--model", "--init", "--config", "--teacher", "--teacher-cache", "--checkpoint"}
"""What stands before the name of another scenario whose output is read."""

BUILDS = {
    "wordpiece": "english.txt --tokenizer vocab.txt --sentences line",
    "bpe": "english.txt --tokenizer bpe.json --test 0.05",
    "chinese": "chinese.txt --tokenizer characters.txt --words inputs:two_characters",
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
PACKAGES = re.compile(r"(bertdata|bertrain)(\.|$)")  # modules of the commit
LAST = {
    "dropout": "bertrain pretrain --out dropout --model dropout.json",
    "evaluate": "bertrain evaluate --checkpoint modernbert --data wordpiece --json",
    "minimal-pairs": "bertrain evaluate --checkpoint bert --pairs pairs.jsonl --json",
    "finetune": "bertrain finetune --checkpoint bert --out finetune",
    "finetune-lora": "bertrain finetune --checkpoint modernbert --out finetune-lora --lora r=4,alpha=8 --test dev.tsv",
    "extract": "bertrain extract --checkpoint elastic --layers 1 --width 64 --heads 1 --feed-forward 256 --out extract",
}
SMALLEST = 0.01  # smaller figures are compared as if they were this large
BOUND, BOUND_OF_16_BITS = 6e-5, 2e-3
"""Four times the largest relative difference of two runs whose libraries compute as on other processors, such as with
ATEN_CPU_CAPABILITY=default, MKL_CBWR=COMPATIBLE, ONEDNN_MAX_CPU_ISA=SSE41 or OPENBLAS_CORETYPE=Prescott."""
SHOWN = re.compile(r"lr|tokens|grad_norm|agreement|.*loss|.*accuracy|.*targets|f1|matthews|bits_per_byte")  # figures
KEPT = re.compile(r"grad_norm|(validation_|nsp_|distil_)?loss")  # figures of frozen.json


def prepare(folder: Path) -> None:
    """Write the files that scenarios read."""
    write_inputs(folder)
    for name, phases in PHASES.items():
        (folder / f"{name}.toml").write_text(as_toml({"phase": phases}))


def scenarios(only: str = "") -> list[dict[str, str]]:
    """Name → command lines, joined by " ; ", in stages: a scenario needs only what earlier stages wrote.

    only: a regular expression for names; the others are left out unless one of these needs them.
    """

    def lines(command: str, options: dict[str, str]) -> dict[str, str]:
        return {name: f"{command} --out {name} {more}" for name, more in options.items()}

    builds, first = lines("bertdata build", BUILDS), lines("bertrain pretrain", FIRST_RUNS)
    runs = lines("bertrain pretrain", RUNS) | lines("torchrun bertrain pretrain", ON_TWO_RANKS) | LAST
    stages = [
        {name: builds.pop(name) for name in ("wordpiece", "bpe")},  # first, and so "bert": they compile kernels
        builds,
        MORE_BUILDS,
        {"bert": first.pop("bert")},
        first,
        lines("bertrain teacher", CACHES),
        runs,
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
    """Runs a command line in this process; returns what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = run(shlex.join(words))
    if code:
        raise RuntimeError(f"{shlex.join(words)}: {(err.getvalue() or out.getvalue()).strip()}")
    return out.getvalue()


def weights(directory: Path) -> dict[str, str]:
    """The digest of each tensor in the files of weights below a directory."""
    files = sorted(directory.rglob("*.safetensors"))
    return {f"{path.relative_to(directory)} {name}": part for path in files for name, part in parts(path).items()}


def figures(value: Any) -> dict[str, float]:
    """The numbers in nested JSON whose names are SHOWN, each with the names that lead to it."""
    return {
        name: part
        for name, part in flat(value).items()
        if type(part) in (int, float) and SHOWN.fullmatch(name.rpartition(".")[2])
    }


def scenario(line: str) -> Result:
    """Runs the command lines of a scenario in this process and folder, and reads what the last one wrote."""
    words: list[str] = []
    for command in line.split(" ; "):
        words = complete(command.removeprefix("torchrun "))
        said = call(words)
    if int(os.environ.get("RANK", "0")):
        return {}
    out = Path(words[words.index("--out") + 1]) if "--out" in words else Path()
    if words[:2] == ["bertdata", "build"] and "--workers" in words:
        for workers in ("2", "4", "8"):
            call([*words, "--workers", workers, "--out", f"{out}-{workers}"])
            if digests(out) != digests(Path(f"{out}-{workers}")):
                return {"error": f"--workers {workers} gives other bytes than --workers 1"}
    if words[0] == "bertdata" or words[1] == "teacher":
        return {"steps": [], "files": digests(out)}
    if words[1] == "pretrain":
        log = [json.loads(entry) for entry in (out / "log.jsonl").read_text().splitlines()]
        steps = [{"step": entry["step"]} | figures(entry) for entry in log if "stream" not in entry]
        return {"steps": steps, "files": weights(max(out.glob("step-*")))}
    if words[1] == "extract":
        return {"steps": [], "files": weights(out)}
    result = (out / "result.json").read_text() if words[1] == "finetune" else said.splitlines()[-1]
    return {"steps": [figures(json.loads(result))], "files": weights(out) if words[1] == "finetune" else {}}


def _in_child(line: str, root: Path, folder: Path, out: Path, environment: dict[str, str]) -> None:
    """A scenario in its own process; the result goes to a file."""
    os.environ.update(environment)
    os.chdir(folder)
    try:
        result = scenario(line)
        files = [module.__file__ for name, module in sys.modules.items() if PACKAGES.match(name)]
        if strays := [file for file in files if file and not Path(file).is_relative_to(root)]:
            result = {"error": f"{strays[0]} was imported, which is not below {root}"}
    except Exception as error:  # a commit may not know an option
        result = {"error": f"{type(error).__name__}: {error}"}
    if not int(os.environ.get("RANK", "0")):
        out.write_text(json.dumps(result))


def collect(root: Path, folder: Path, only: str, jobs: int) -> dict[str, Result]:
    """The results of all scenarios of the commit in `root`, whose packages python must import from there."""
    server = multiprocessing.get_context("forkserver")
    models = [f"transformers.models.{name}.modeling_{name}" for name in ("bert", "modernbert")]
    ours = ["bertdata.cli", "bertrain.pretrain", "bertrain.commands.evaluate", "bertrain.lab.finetune"]
    server.set_forkserver_preload([*ours, "peft", *models])

    def result_of(name: str, line: str) -> Result:
        out = folder / f"{name}.result.json"
        environments = rank_environments(2) if "torchrun" in line else [{}]
        given = [(line, root, folder, out, environment) for environment in environments]
        processes = [server.Process(target=_in_child, args=arguments) for arguments in given]
        for process in processes:
            process.start()
        for process in processes:
            process.join(600)
            process.kill()
        return json.loads(out.read_text()) if out.exists() else {"error": "a process ended early, or not in 600 s"}

    prepare(folder)
    for path in folder.rglob("*"):
        os.utime(path, (0, 0))  # a dataset has the times of its inputs
    results: dict[str, Result] = {}
    with ThreadPoolExecutor(jobs) as pool:
        for stage in scenarios(only):
            results |= zip(stage, pool.map(result_of, stage, stage.values()), strict=True)
    return results


def results_of(root: Path, folder: Path, options: list[str]) -> dict[str, Result]:
    """What `collect` returns, in a process that imports the packages from `root`.

    folder: made for this call. It should have the same name for all that is compared, because a dataset says where its
    text is.
    """
    caches = {"BERTDATA_CACHE": f"{folder}/cache", "NUMBA_CACHE_DIR": f"{folder}/numba"}
    environment = os.environ | QUIET | caches | {"PYTHONPATH": str(root)}
    folder.mkdir()
    try:
        command = [sys.executable, __file__, "--collect", str(root), str(folder), *options]
        # Not in the present folder, whose packages the forkserver would prefer.
        subprocess.run(command, env=environment, cwd=folder, check=True)
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
        sides = {"before": before.get(name), "after": after.get(name)}
        one, two = (result or {"error": "not run"} for result in sides.values())
        if "error" in one or "error" in two:
            results = zip(sides, (one, two), strict=True)
            lines += [f"{name}: {side}: {result['error']}" for side, result in results if "error" in result]
        elif one != two:
            files = [file for file in one["files"] | two["files"] if one["files"].get(file) != two["files"].get(file)]
            lines.append(f"{name}: {differing_entries(one['steps'], two['steps']) or ', '.join(files)}")
    return lines


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
            columns = {figure: [step.get(figure) for step in result["steps"]] for figure in names}
            runs[name] = {
                figure: [value and float(f"{value:.7g}") for value in column] for figure, column in columns.items()
            }
    return {"builds": builds, "runs": runs}


def as_text(frozen: dict[str, Any]) -> str:
    """JSON with a line for each build and run."""
    parts = []
    for part, entries in frozen.items():
        lines = [f"{json.dumps(name)}: {json.dumps(entry, separators=(',', ':'))}" for name, entry in entries.items()]
        parts.append(f'"{part}": {{\n' + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def beyond(results: dict[str, Result]) -> list[str]:
    """A line for each build and run among results that failed, or differs from frozen.json by more than its bound."""
    frozen, now = json.loads(FROZEN.read_bytes()), kept(results)
    lines = [f"{name}: {result['error']}" for name, result in results.items() if "error" in result]
    lines += [f"{name}: other arrays" for name, digest in now["builds"].items() if digest != frozen["builds"].get(name)]
    for name, after in now["runs"].items():
        bound, before = BOUND_OF_16_BITS if "16" in name else BOUND, frozen["runs"].get(name, {})
        for figure in after.keys() | before.keys():
            pairs = itertools.zip_longest(before.get(figure, []), after.get(figure, []))
            close = functools.partial(math.isclose, rel_tol=bound, abs_tol=bound * SMALLEST)
            apart = [f"{a} -> {b}" for a, b in pairs if a is not b and (None in (a, b) or not close(a, b))]
            lines += [f"{name}: {figure} {apart[0]}"] if apart else []
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commits", nargs="+", metavar="COMMIT", help="Compare one with this working tree, or two.")
    parser.add_argument("--write", action="store_true", help="Write frozen.json.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="Scenarios at the same time.")
    parser.add_argument(
        "--only", default="", help="Regular expression for names of scenarios; those that they need run too."
    )
    parser.add_argument("--collect", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.collect:
        root, folder = map(Path, given.collect)
        (folder / "work").mkdir()
        results = collect(root, folder / "work", given.only, given.jobs)
        (folder / "results.json").write_text(json.dumps(results))
        return
    if len(given.commits or []) > 2:
        parser.error(f"--commits has {len(given.commits)} commits; give one or two")
    if not any(scenarios(given.only)):
        parser.error(f"--only {given.only} matches the name of no scenario; the first are {', '.join(BUILDS)}")
    options = ["--jobs", str(given.jobs)]
    options += ["--only", given.only or ("" if given.commits else "|".join(map(re.escape, KEPT_SCENARIOS)))]
    both = []
    with tempfile.TemporaryDirectory(prefix="freeze-") as name:
        for commit in (given.commits + [""])[:2] if given.commits else [""]:
            with checked_out(commit) as root:
                both.append(results_of(root, Path(name) / "run", options))
    lines = differences(*both) if given.commits else beyond(both[0])
    if given.write and not any("error" in result for result in both[0].values()):
        FROZEN.write_text(as_text(kept(both[0])))
        return
    print("\n".join(lines) or ("the same to the bit" if given.commits else "the same but for rounding"))
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
