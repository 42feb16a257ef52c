"""Is a commit as fast as another one? Build, loader, training step and start-up of two checkouts, in turns.

    git worktree add /tmp/before COMMIT
    python benchmarks/between_commits.py /tmp/before . corpus.txt tokenizer.json [--rounds 5] [--only mix]

Regime: every measurement is a process of its own with the checkout first on PYTHONPATH, one thread, warm pages, and
kernels compiled by a first round that is not counted. The two checkouts take turns, so that noise of the machine hits
both alike. Times are CPU seconds of the process for the loader and the step, and wall seconds of the whole command on
one core for the build and the start-up. The result is the median of before ÷ after for each, and the ratio of the best
times: above 1 the commit after is faster.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import click
from common import report

LOADER = """
import os, sys, time, bertdata
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
kind, policy, weights = sys.argv[2], sys.argv[3], (0.4, 0.3, 0.2, 0.1)
shards = [(bertdata.open(path), weight) for path, weight in zip(sys.argv[1].split(","), weights)]
shards = shards if len(shards) > 1 else shards[0][0]
masking = bertdata.Masking(policy=policy) if policy != "none" else None
loader = bertdata.Loader(shards, length=128, global_batch_size=256, samples=kind, masking=masking)
for _ in range(20): next(loader)
turns = []
for _ in range(80):
    start = time.thread_time()
    for _ in range(20): next(loader)
    turns.append((time.thread_time() - start) / 20)
print(sorted(turns)[8])  # the best tenth: what a neighbour on the machine did not disturb
"""
STEP = """
import contextlib, io, os, statistics, sys, time, torch
torch.set_num_threads(1)
import bertrain.pretrain
marks, step = [], torch.optim.AdamW.step
def marked(self, *arguments, **options):
    result = step(self, *arguments, **options)
    marks.append(time.process_time())
    return result
torch.optim.AdamW.step = marked
flags = ["--data", sys.argv[1], "--out", sys.argv[2], "--model", sys.argv[3], "--optimizer", "adamw",
         "--global-batch-size", "32", "--steps", "40", "--eval-every", "0", "--save-every", "10000"]
with contextlib.redirect_stdout(io.StringIO()):
    bertrain.pretrain.main(flags, standalone_mode=False)
if os.environ.get("RANK", "0") == "0":
    print(statistics.median(b - a for a, b in zip(marks[5:], marks[6:])))
"""
RANKS = """
import pathlib, subprocess, sys
code = pathlib.Path(sys.argv[1]).with_suffix(".py")
code.write_text(sys.argv[2])
command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", code, *sys.argv[3:]]
print(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
"""
TIMED = """
import os, subprocess, sys, time
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # a build by one worker may have other threads
start = time.perf_counter()
subprocess.run([sys.executable, *sys.argv[1:]], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(time.perf_counter() - start)
"""


def seconds(checkout: Path, code: str, *arguments: str) -> float:
    """What a program prints last, run with a checkout's packages."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else a new checkout compiles its modules in each turn
    environment["PYTHONSAFEPATH"] = "1"  # else the packages of the directory from which this was started come first
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


@click.command()
@click.argument("before", type=click.Path(exists=True, path_type=Path))
@click.argument("after", type=click.Path(exists=True, path_type=Path))
@click.argument("corpus", type=click.Path(exists=True))
@click.argument("tokenizer", type=click.Path(exists=True))
@click.option("--rounds", default=5, help="Counted turns of each measurement.  [default: 5]")
@click.option("--only", default="", help="Measure only what has this in its name.")
def main(before: Path, after: Path, corpus: str, tokenizer: str, rounds: int, only: str) -> None:
    """Compare the speed of two checkouts."""
    with tempfile.TemporaryDirectory() as name:
        folder, turn = Path(name), iter(range(10**6))
        os.environ["BERTDATA_CACHE"] = str(folder / "cache")
        build = ["-m", "bertdata", "build", corpus, "--tokenizer", tokenizer, "--sentences", "line", "--out"]
        shards = str(folder / "shards")
        subprocess.run([sys.executable, *build, shards], check=True, env=os.environ | {"PYTHONPATH": str(before)})

        def mix_of(count: int) -> str:
            """Datasets of the parts of the corpus, for LOADER."""
            lines = Path(corpus).read_bytes().splitlines(keepends=True)
            paths = [folder / f"part-{number}-of-{count}" for number in range(count)]
            for number, path in enumerate(paths if not paths[0].exists() else ()):
                part = path.with_suffix(".txt")
                part.write_bytes(b"".join(lines[len(lines) * number // count : len(lines) * (number + 1) // count]))
                command = [sys.executable, "-m", "bertdata", "build", part, "--tokenizer", tokenizer, "--out", path]
                subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(before)})
            return ",".join(map(str, paths))

        def new() -> str:
            return str(folder / f"out-{next(turn)}")

        def sized(megabytes: int) -> list[str]:
            """A build of so much text, the corpus again and again, by one worker."""
            path = folder / f"{megabytes}.txt"
            if not path.exists():
                text = Path(corpus).read_bytes().rstrip(b"\n") + b"\n\n"
                path.write_bytes((text * (megabytes * 1_000_000 // len(text) + 1))[: megabytes * 1_000_000])
            out = new()
            return ["-m", "bertdata", "build", str(path), "--tokenizer", tokenizer, "--workers", "1", "--out", out]

        kinds = (("windows", "exact"), ("windows", "whole_word"), ("packed", "exact"), ("pairs", "exact"))
        measurements = {
            "build of the corpus": lambda at: seconds(at, TIMED, *build, new()),
            "build of 64 MB": lambda at: seconds(at, TIMED, *sized(64)),
            "build by slope, 64 to 256 MB": lambda at: seconds(at, TIMED, *sized(256)) - seconds(at, TIMED, *sized(64)),
            **{
                f"batch of {kind}, {policy}": lambda at, given=(kind, policy): seconds(at, LOADER, shards, *given)
                for kind, policy in kinds
            },
            **{
                f"batch of a mix of {count}, {kind}, {policy}":
                    lambda at, given=(kind, policy), count=count: seconds(at, LOADER, mix_of(count), *given)
                for count in (1, 2, 4) for kind in ("windows", "packed") for policy in ("exact", "none")
            },
            **{f"step of {model}": lambda at, model=model: seconds(at, STEP, shards, new(), model)
               for model in ("bert-tiny", "modernbert-tiny")},
            "step of bert-tiny, two ranks":
                lambda at: seconds(at, RANKS, new(), STEP, shards, new(), "bert-tiny"),
            "start: bertdata --help": lambda at: seconds(at, TIMED, "-m", "bertdata", "--help"),
            "start: bertrain.pretrain --help": lambda at: seconds(at, TIMED, "-m", "bertrain.pretrain", "--help"),
        }  # fmt: skip
        result = {}
        for what, measure in measurements.items():
            if only not in what:
                continue
            turns = [(measure(before.absolute()), measure(after.absolute())) for _ in range(1 + rounds)][1:]
            ratios = [old / new for old, new in turns]
            medians = [statistics.median(times) for times in zip(*turns, strict=True)]
            result[what] = {
                "before_s": medians[0], "after_s": medians[1], "ratio": statistics.median(ratios),
                "ratio_of_best": min(old for old, _ in turns) / min(new for _, new in turns),
                "least": min(ratios), "most": max(ratios),
            }  # fmt: skip
            click.echo(
                f"{what:<34}{json.dumps({key: round(value, 5) for key, value in result[what].items()})}", err=True
            )
    report("is a commit as fast as another one", f"{rounds} turns each, one thread", result)


if __name__ == "__main__":
    main()
