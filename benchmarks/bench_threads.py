"""How much of a build is work that only one thread can do at a time?

    python benchmarks/bench_threads.py corpus.txt tokenizer.json [--megabytes 4096] [--workers 2]

Two shares of the CPU time of a build set how many cores it can use: that of the first thread, and the time in which a
thread holds Python's interpreter lock. With a share of 3 %, about 30 cores are the end.

Regime: files of 256 MB, which repeat the corpus, in the page cache; units of 128 MB; the steady part alone, from the
first finished unit of each worker to the last unit but one of each. The lock is seen by a sampler outside the process
(py-spy --gil, 250 samples a second, no pauses). Where other programs run, a thread may wait for a core while it holds
the lock, and the share that is found is too large: run nothing else. With them come the functions in which the lock is
held most, by their share of the time under it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
from common import report
from environments import python_of

RATE = 250  # samples a second
FILE_BYTES, UNIT_BYTES = 256_000_000, 128_000_000


@click.command()
@click.argument("corpus", type=Path)
@click.argument("tokenizer")
@click.option("--megabytes", default=4096, help="Text to build, in MB.")
@click.option("--workers", default=2, help="Threads of the build.")
@click.option("--environments", type=Path, default=Path(".bench"), help="Where the sampler is installed.")
def main(corpus: Path, tokenizer: str, megabytes: int, workers: int, environments: Path) -> None:
    sampler = str(Path(python_of("py-spy", environments)).with_name("py-spy"))
    with tempfile.TemporaryDirectory() as scratch:
        text = (corpus.read_bytes().rstrip(b"\n") + b"\n\n") * (FILE_BYTES // corpus.stat().st_size + 1)
        (Path(scratch) / "text").mkdir()
        for number in range(max(1, megabytes * 1_000_000 // FILE_BYTES)):
            (Path(scratch) / "text" / f"{number:03d}.txt").write_bytes(text[:FILE_BYTES])
        result = watched(sampler, tokenizer, Path(scratch), workers)
    print(", ".join(f"{name}: {value}" for name, value in result.items()))
    report("threads of a build", f"{workers} workers, steady part", result)


def watched(sampler: str, tokenizer: str, scratch: Path, workers: int) -> dict[str, Any]:
    """Shares of the CPU time of a build."""
    out, samples = scratch / "shards", scratch / "samples"
    command = ["build", str(scratch / "text"), "--out", str(out), "--tokenizer", tokenizer, "--workers", str(workers)]
    num_units = 2 * len(list((scratch / "text").iterdir()))
    build = subprocess.Popen([sys.executable, "-m", "bertdata", *command, "--shard-size", str(UNIT_BYTES)])

    def wait_for(units: int) -> None:
        while len(list(out.glob(".build/unit-*.json"))) < units:
            if build.poll() is not None:
                raise click.ClickException("the build ended before its steady part did; give more --megabytes")
            time.sleep(0.01)

    wait_for(workers)
    record = ["record", "--gil", "--nonblocking", "-r", str(RATE), "-d", "600", "-f", "raw", "-o", str(samples)]
    watch = subprocess.Popen([sampler, *record, "--pid", str(build.pid)], stdout=subprocess.DEVNULL)
    process, first = Path(f"/proc/{build.pid}/stat"), Path(f"/proc/{build.pid}/task/{build.pid}/stat")
    time.sleep(0.3)  # in which the sampler begins
    before, begin = [cpu_seconds(path) for path in (process, first)], time.perf_counter()
    wait_for(num_units - workers)
    after, seconds = [cpu_seconds(path) for path in (process, first)], time.perf_counter() - begin
    watch.send_signal(signal.SIGINT)
    watch.wait(60)
    build.wait(600)
    held_in, total = Counter[str](), after[0] - before[0]
    for line in samples.read_text().splitlines():
        frames, _, count = line.rpartition(" ")
        ours = [frame for frame in frames.split(";") if "bertdata/" in frame]
        held_in[ours[-1].strip() if ours else "no frame of ours"] += int(count)
    held = sum(held_in.values()) / RATE
    return {
        "seconds": round(seconds, 2),
        "CPU seconds": round(total, 2),
        "first thread, share": round((after[1] - before[1]) / total, 4),
        "under the lock, share": round(held / total, 4),
        "of it": {frame: round(count / RATE / held, 3) for frame, count in held_in.most_common(12)},
    }


def cpu_seconds(path: Path) -> float:
    """Of a process or a thread, user and system time."""
    fields = path.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


if __name__ == "__main__":
    main()
