"""Campaigns that try to break what docs/reliability.md promises. Each prints one JSON object, and fails if it broke.

    python tools/survive.py builds --count 100        SIGKILL of a build at random moments
    python tools/survive.py checkpoints --count 100   SIGKILL of training, mostly while it writes a checkpoint
    python tools/survive.py ranks --count 20          SIGKILL of a rank, then of the launcher, of two ranks
    python tools/survive.py training --minutes 20     two ranks killed every minute
    python tools/survive.py soak --minutes 30         a loader, then four DataLoader workers, half of the time each
    python tools/survive.py large --gigabytes 10      a build, and the memory it took

Linux. What happens when is drawn from --seed, but the machine decides what it hits.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

import bertdata
from bertdata.format.manifest import MANIFEST
from bertdata.write import build

WORDS = ("the", "of", "and", "stone", "river", "light", "under", "morning", "bread", "letter", "wind", "house", "salt")


def write_text(path: Path, num_bytes: int, seed: int = 0) -> Path:
    """Documents of one to twelve sentences of few words."""
    draw, size = random.Random(seed), 0
    with open(path, "w", encoding="utf-8") as file:
        while size < num_bytes:
            for _ in range(draw.randint(1, 12)):
                size += file.write(" ".join(draw.choices(WORDS, k=draw.randint(1, 9))) + ".\n")
            size += file.write("\n")
    return path


def write_vocab(path: Path) -> Path:
    special, letters = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], "abcdefghijklmnopqrstuvwxyz"
    path.write_text("\n".join([*special, ".", *letters, *("##" + letter for letter in letters), *WORDS]) + "\n")
    return path


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def kill(process: subprocess.Popen[str], group: bool = True) -> None:
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if group else os.kill)(process.pid, signal.SIGKILL)
    process.wait()


# -------------------------------------------------------------------------------------------------------------- builds


def builds(scratch: Path, draw: random.Random, count: int) -> dict[str, Any]:
    corpus, vocab = write_text(scratch / "text", 3_000_000), write_vocab(scratch / "vocab.txt")
    options = ["--tokenizer", str(vocab), "--shard-size", "60000", "--sentences", "line", "--workers", "2"]
    command = [sys.executable, "-m", "bertdata", "build", str(corpus), *options, "--out"]
    subprocess.run([*command, str(scratch / "whole")], check=True, capture_output=True)
    whole, units = content(scratch / "whole"), -(-corpus.stat().st_size // 60_000)
    kills, datasets, kept_units, published = 0, 0, 0, 0
    while kills < count:
        out, datasets = scratch / f"out{datasets}", datasets + 1
        kept: dict[str, tuple[int, int]] = {}
        while True:
            process = subprocess.Popen([*command, str(out)], stdout=-1, stderr=-1, text=True, start_new_session=True)
            target = draw.randrange(-5, units + 1)  # of finished units; below 0: while it starts
            if kills >= count:
                process.wait()
            while process.poll() is None and len(list((out / ".build").glob("unit-*.json"))) < target:
                time.sleep(0.001)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(draw.uniform(0, 0.02 if target >= 0 else 0.5))
            ended = process.poll() is not None
            kill(process)
            for name, known in kept.items():  # what was finished is not made again
                path = next(p for p in (out / ".build" / name, out / name) if p.exists())
                status = path.stat()
                assert (status.st_ino, status.st_mtime_ns) == known, name
            if ended:
                assert process.returncode == 0, process.communicate()
            if (out / MANIFEST).exists() and not (out / ".build" / "plan.json").exists():
                kills += not ended
                break
            kills += 1
            published += (out / MANIFEST).exists()
            kept = {}
            for unit in (out / ".build").glob("unit-*.json"):
                for shard in json.loads(unit.read_bytes())["shards"].values():
                    name = f"{shard['name']}.tokens.npy"
                    path = next(p for p in (out / ".build" / name, out / name) if p.exists())
                    kept[name] = path.stat().st_ino, path.stat().st_mtime_ns
            kept_units += bool(kept)
        assert content(out) == whole
        shutil.rmtree(out)
    facts = {"kills": kills, "datasets": datasets, "kills_after_a_finished_shard": kept_units}
    return facts | {"kills_after_publication": published}


# ------------------------------------------------------------------------------------------------------------ training


def training_flags(shards: Path, out: Path, steps: int, **more: Any) -> list[str]:
    options = {"data": shards, "out": out, "length": 32, "global_batch_size": 8, "steps": steps, "eval_every": 0}
    options |= {"model": "bert-tiny", "lr": 1e-3, "log_every": 1, "save_every": 1} | more
    return [item for name, value in options.items() for item in ("--" + name.replace("_", "-"), str(value))]


def log_of(run: Path) -> list[tuple[Any, ...]]:
    """What of a log does not depend on time."""
    entries = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    steps = [e for e in entries if "stream" not in e]  # those say what is read, and each start writes one
    return [(e["step"], e.get("loss"), e.get("grad_norm"), e.get("validation_loss")) for e in steps]


def shards_with_large_vocabulary(scratch: Path) -> Path:
    """So that checkpoints take long to write and steps do not."""
    vocab = write_vocab(scratch / "vocab.txt")
    with open(vocab, "a") as file:
        file.writelines(f"unused{number}\n" for number in range(30_000))
    return build([write_text(scratch / "text", 200_000)], scratch / "shards", tokenizer=str(vocab)).dataset.path


def _train(arguments: list[str]) -> None:
    os.setpgrp()
    import torch

    from bertrain.pretrain import main

    torch.set_num_threads(1)
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    main(arguments)


def checkpoints(scratch: Path, draw: random.Random, count: int) -> dict[str, Any]:
    shards, steps = shards_with_large_vocabulary(scratch), 40
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["bertrain.pretrain"])

    def start(out: Path, save_every: int) -> multiprocessing.process.BaseProcess:
        process = server.Process(target=_train, args=(training_flags(shards, out, steps, save_every=save_every),))
        process.start()
        return process

    whole = start(scratch / "whole", steps)
    whole.join()
    kills = writing = runs = 0
    run = scratch / "run0"
    while kills < count or run.exists():
        run = scratch / f"run{runs}"
        process = start(run, 1)
        while process.is_alive() and not list(run.glob(".step-*")):
            time.sleep(0.005)
        if kills < count:
            process.join(draw.uniform(0, 1))
        else:
            process.join()
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGKILL)
            kills, writing = kills + 1, writing + bool(list(run.glob(".step-*")))
        process.join()
        if (run / f"step-{steps:08d}" / "checkpoint.json").exists():
            require_same(run, scratch / "whole", steps)
            shutil.rmtree(run)
            runs += 1
    return {"kills": kills, "kills_during_a_write": writing, "runs": runs, "steps_of_each": steps}


def require_same(run: Path, whole: Path, steps: int) -> None:
    assert log_of(run) == log_of(whole)
    name = f"step-{steps:08d}/model.safetensors"
    assert (run / name).read_bytes() == (whole / name).read_bytes()


def torchrun(arguments: list[str], out: Path) -> subprocess.Popen[str]:
    launcher = ["torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", "localhost:0", "-m", "bertrain.pretrain"]
    with open(out, "a") as file:
        job = subprocess.Popen(
            [sys.executable, "-m", *launcher, *arguments],
            stdout=file,
            stderr=file,
            text=True,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    atexit.register(kill, job)  # its ranks go with it
    return job


def ranks_of(launcher: subprocess.Popen[str]) -> list[int]:
    return [
        int(pid) for path in Path(f"/proc/{launcher.pid}/task").glob("*/children") for pid in path.read_text().split()
    ]


def wait_gone(pids: list[int], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"orphans: {left}"
        time.sleep(0.1)


def ranks(scratch: Path, draw: random.Random, count: int) -> dict[str, Any]:
    """Kills a rank (the launcher must end the other) and the launcher (its ranks must end) in turn."""
    shards, steps, kills, runs = shards_with_large_vocabulary(scratch), 100, Counter[str](), 0
    options = {"save_every": 5}
    assert torchrun(training_flags(shards, scratch / "whole", steps, **options), scratch / "said").wait() == 0
    run = scratch / "run0"
    while sum(kills.values()) < count or run.exists():
        run = scratch / f"run{runs}"
        log = run / "log.jsonl"
        before = log.stat().st_mtime_ns if log.exists() else 0
        job = torchrun(training_flags(shards, run, steps, **options), scratch / "said")
        while job.poll() is None and (not log.exists() or log.stat().st_mtime_ns == before or not log.stat().st_size):
            time.sleep(0.05)
        found: list[int] = []
        if sum(kills.values()) < count:
            time.sleep(draw.uniform(0, 2))
            what = "launcher" if sum(kills.values()) % 2 else "rank"
            if found := ranks_of(job):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(job.pid if what == "launcher" else draw.choice(found), signal.SIGKILL)
                    kills[what] += 1
        job.wait(300)
        wait_gone(found)
        if (run / f"step-{steps:08d}" / "checkpoint.json").exists():
            require_same(run, scratch / "whole", steps)
            shutil.rmtree(run)
            runs += 1
    return {"kills": dict(kills), "runs": runs, "steps_of_each": steps, "orphans": 0}


def training(scratch: Path, draw: random.Random, minutes: float) -> dict[str, Any]:
    """A run that takes half of the time undisturbed, killed every minute."""
    shards, kills, run = shards_with_large_vocabulary(scratch), 0, scratch / "run"

    def start(out: Path, steps: int) -> subprocess.Popen[str]:
        return torchrun(training_flags(shards, out, steps, save_every=20, log_every=10), scratch / "said")

    assert start(scratch / "pace", 100).wait() == 0
    entries = map(json.loads, (scratch / "pace" / "log.jsonl").read_text().splitlines())
    seconds = max(entry.get("seconds", 0.0) for entry in entries)
    steps = int(100 / seconds * 60 * minutes / 2) // 20 * 20
    assert start(scratch / "whole", steps).wait() == 0
    while True:
        job = start(run, steps)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(draw.uniform(50, 70))
        if job.poll() is not None:
            assert job.returncode == 0, (scratch / "said").read_text()[-2000:]
            break
        found = ranks_of(job)
        kill(job)
        wait_gone(found)
        kills += 1
    require_same(run, scratch / "whole", steps)
    return {"kills": kills, "steps": steps}


# ----------------------------------------------------------------------------------------------------------- endurance


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(scratch: Path, draw: random.Random, minutes: float) -> dict[str, Any]:
    """Resident memory, descriptors and threads, the first fifth of the time left out.

    Fails for more than 50 bytes a batch and 1 MiB in all: less is what the allocators of five processes come and go by.
    """
    from torch.utils.data import DataLoader

    from bertdata.torch import BatchDataset

    vocab = write_vocab(scratch / "vocab.txt")
    shards = build([write_text(scratch / "text", 4_000_000)], scratch / "shards", tokenizer=str(vocab)).dataset
    facts: dict[str, Any] = {"minutes": minutes}
    for kind in ("loader", "four_workers"):
        loader = bertdata.Loader(shards, length=128, global_batch_size=64)
        stream: Iterator[Any] = loader
        if kind == "four_workers":
            stream = iter(DataLoader(BatchDataset(loader), batch_size=None, num_workers=4))
        seen, began, batches, looked = [], time.monotonic(), 0, 0.0
        while (spent := time.monotonic() - began) < 30 * minutes:
            next(stream)
            batches += 1
            if spent - looked > 0.5:
                looked = spent
                open_files = len(os.listdir("/proc/self/fd"))
                threads = len(os.listdir("/proc/self/task"))
                seen.append((batches, resident() + sum(map(_resident_of, _children())), open_files, threads, spent))
        late = np.array([entry for entry in seen if entry[4] > 6 * minutes])
        slope, grown = np.polyfit(late[:, 0], late[:, 1], 1)[0], int(late[-1, 1] - late[0, 1])
        facts[kind] = {
            "batches": batches,
            "bytes_a_batch": round(float(slope), 2),
            "grown_bytes": grown,
            "descriptors": [
                int(late[:, 2].min()),
                int(late[:, 2].max()),
            ],  # tensors on their way from workers have some
            "threads": [int(late[:, 3].min()), int(late[:, 3].max())],
        }
        del stream
        half = late.shape[0] // 2
        assert slope < 50 or grown < 1 << 20, facts
        assert (late[half:, 2:4].min(0) <= late[:half, 2:4].min(0)).all(), facts
    return facts


def _children() -> list[int]:
    return [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]


def _resident_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def large(scratch: Path, draw: random.Random, gigabytes: float) -> dict[str, Any]:
    vocab, part = write_vocab(scratch / "vocab.txt"), write_text(scratch / "part", 20_000_000)
    count = round(gigabytes * 1e9 / part.stat().st_size)
    command = [sys.executable, "-m", "bertdata", "build", *[str(part)] * count, "--tokenizer", str(vocab)]
    started = time.perf_counter()
    subprocess.run([*command, "--out", str(scratch / "shards")], check=True, capture_output=True)
    seconds, peak = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    size = count * part.stat().st_size
    tokens = bertdata.open(scratch / "shards").num_tokens
    facts = {"bytes": size, "tokens": tokens, "seconds": round(seconds, 1), "peak_bytes": peak}
    assert peak < 1 << 30, facts
    return facts


# ------------------------------------------------------------------------------------------------------------- command

CAMPAIGNS: dict[str, Callable[..., dict[str, Any]]] = {
    "builds": builds,
    "checkpoints": checkpoints,
    "ranks": ranks,
    "training": training,
    "soak": soak,
    "large": large,
}


@click.command()
@click.argument("campaign", type=click.Choice(list(CAMPAIGNS)))
@click.option("--count", default=100, show_default=True, help="Kills.")
@click.option("--minutes", default=2.0, show_default=True)
@click.option("--gigabytes", default=1.0, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--directory", help="Where to make the scratch directory.")
def main(campaign: str, seed: int, directory: str | None, **options: Any) -> None:
    wanted = {"training": "minutes", "soak": "minutes", "large": "gigabytes"}.get(campaign, "count")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        found = CAMPAIGNS[campaign](Path(scratch), random.Random(seed), options[wanted])
    click.echo(json.dumps({"campaign": campaign, **found, "took_s": round(time.perf_counter() - started, 1)}))


if __name__ == "__main__":
    main()
