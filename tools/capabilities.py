"""Tries every line of docs/howto/migrate.md at a small size, and checks that what the line says comes true.

    python tools/capabilities.py                 all lines, in about a minute of CPU time
    python tools/capabilities.py --only 7,12     some of them

It prints a line for each capability: its number, ok or what failed, and seconds of CPU time. The exit code is 1 if one
failed, or if a line of the table has no trial in trials.py.

A process of one thread imports everything once, makes the inputs, and is forked for each trial. A trial has a directory
of its own. Parts of lines that need a network or a package that is not installed are in NOT_RUN, with the test that
tries them in another way. Linux.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import os
import re
import resource
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import freeze
import trials
from trials import FORKS, LIMIT_S, ROOT, TRIALS

import bertdata

TABLE = ROOT / "docs" / "howto" / "migrate.md"
POLL_S = 0.01
IMPORTED = [
    "bertdata.cli",
    "bertrain.pretrain",
    "bertrain.commands.doctor",
    "bertrain.commands.evaluate",
    "bertrain.commands.plot",
    "bertrain.lab.augment",
    "bertrain.lab.distillation.method",
    "bertrain.lab.distillation.teacher",
    "bertrain.lab.elastic.extract",
    "bertrain.lab.elastic.search",
    "bertrain.lab.suite",
    "peft",
    "transformers.models.bert.modeling_bert",
    "transformers.models.distilbert.modeling_distilbert",
]
NOT_RUN = {
    7: "names on the hub: test_tokens.py::test_a_hub_gives_a_tokenizer_or_says_that_it_has_none",
    38: "names on the hub: test_tokens.py::test_a_hub_gives_a_tokenizer_or_says_that_it_has_none, and "
    "transformers, which loads models",
    46: "bits=4 where bitsandbytes is not installed: only its refusal, test_adapters.py::"
    "test_a_missing_library_is_one_sentence; docs/methods.md says what was tried",
    52: "wandb and trackio: test_trackers.py::"
    "test_a_tracker_gets_the_numbers_of_the_log_and_a_run_continues_its_record",
}
"""By line: what of it is not run here, because it needs a network or a package, and the test in tests/ that takes its
place."""


def lines_of(table: str) -> dict[int, str]:
    """The numbers and names of the capabilities in docs/howto/migrate.md."""
    return {int(number): name for number, name in re.findall(r"^\| (\d+) \| ([^|]+) \|", table, re.MULTILINE)}


def untried(lines: dict[int, str]) -> list[str]:
    """A sentence for each line of the table without a trial, and each trial without a line."""
    return [f"{number}: {name}: has no trial" for number, name in lines.items() if number not in TRIALS] + [
        f"{number}: is not in {TABLE.name}" for number in TRIALS if number not in lines
    ]


def attempt(number: int, inputs: Path, folder: Path) -> str:
    """Runs a trial in a new folder with links to the inputs; returns what failed, in one line."""
    folder.mkdir()
    for path in inputs.iterdir():
        (folder / path.name).symlink_to(path)
    try:
        with contextlib.chdir(folder):
            TRIALS[number]()
    except Exception as error:
        mine = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == trials.__file__]
        said = str(error) or f"{mine[-1].line}"
        return f"line {mine[0].lineno}: {type(error).__name__}: {' / '.join(said.split(chr(10)))}"
    return ""


def _in_child(work: Callable[[], str], result: Path) -> None:
    """Works in a forked process, in a group of its own; writes to a file what failed, and seconds of CPU time."""
    os.setpgid(0, 0)
    gc.unfreeze = lambda: None  # what `prepare` has frozen stays so
    failed = work()
    result.write_text(json.dumps([failed, cpu_seconds()]))


def cpu_seconds() -> float:
    """Of this process, and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in used)


class Fork:
    """Work in another process, for at most LIMIT_S. It writes its result to a file."""

    def __init__(self, work: Callable[[], str], result: Path) -> None:
        assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
        self.result, self.began = result, time.monotonic()
        self.process = FORKS.Process(target=_in_child, args=(work, result))
        self.process.start()

    def ended(self) -> tuple[str, float] | None:
        """What failed, and seconds; None while it works."""
        took = time.monotonic() - self.began
        if self.process.is_alive() and took < LIMIT_S:
            return None
        self.kill()
        if self.result.exists():
            failed, seconds = json.loads(self.result.read_bytes())
            return failed, seconds
        return f"ended with {self.process.exitcode} after {took:.0f} s", took

    def kill(self) -> None:
        """Ends the process, and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.join()


def prepare(folder: Path) -> None:
    """Imports what commands import, makes the inputs, and loads the compiled loops, so that forks have all."""
    for name in IMPORTED:
        importlib.import_module(name)
    inputs = folder / "inputs"
    inputs.mkdir()

    def work() -> str:
        with contextlib.chdir(inputs):
            trials.make_inputs(inputs)
        return ""

    made = Fork(work, folder / "inputs.json")  # because it may start threads
    while (ended := made.ended()) is None:
        time.sleep(POLL_S)
    if ended[0]:
        raise click.ClickException(f"the inputs cannot be made: {ended[0]}")
    kinds, policies = ("windows", "documents", "pairs", "packed"), ("exact", "bernoulli", "whole_word", "span")
    for samples, policy in itertools.product(kinds, policies):
        next(trials.loader(str(inputs / "shards"), samples=samples, masking=bertdata.Masking(policy=policy)))
    gc.collect()
    gc.freeze()  # to look at all that is imported takes longer than some trials


def try_all(numbers: list[int], folder: Path, jobs: int) -> int:
    """Runs trials beside each other, prints a line for each in order, and returns how many failed."""
    lines, waiting, num_failed = lines_of(TABLE.read_text(encoding="utf-8")), [*numbers], 0
    running: dict[int, Fork] = {}
    done: dict[int, tuple[str, float]] = {}
    try:
        for number in numbers:
            while number not in done:
                while waiting and len(running) < jobs:
                    next_ = waiting.pop(0)
                    work = partial(attempt, next_, folder / "inputs", folder / f"{next_}")
                    running[next_] = Fork(work, folder / f"{next_}.json")
                ended = {other: result for other, fork in running.items() if (result := fork.ended())}
                done |= ended
                running = {other: fork for other, fork in running.items() if other not in ended}
                time.sleep(POLL_S)
            failed, seconds = done[number]
            num_failed += bool(failed)
            left_out = f" (without {NOT_RUN[number]})" if number in NOT_RUN else ""
            click.echo(f"{number:2} {failed or 'ok'}, {seconds:.1f} s: {lines[number]}{left_out}")
    finally:
        for fork in running.values():
            fork.kill()
    return num_failed


@click.command()
@click.option("--only", default="", help="Numbers of lines, with commas between. Default: all.")
@click.option("--jobs", default=os.cpu_count(), type=click.IntRange(1), help="Trials at the same time.")
def main(only: str, jobs: int) -> None:
    """Tries what docs/howto/migrate.md says, line by line."""
    began = time.monotonic()
    lines = lines_of(TABLE.read_text(encoding="utf-8"))
    if missing := untried(lines):
        raise click.ClickException("; ".join(missing))
    numbers = [int(number) if number.isdigit() else 0 for number in only.split(",")] if only else [*lines]
    if not lines.keys() >= set(numbers):
        raise click.UsageError(f"--only is {only}; give numbers of {TABLE.name}, from 1 to {max(lines)}, such as 7,12")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= freeze.QUIET | {"PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory(prefix="capabilities-") as name:
        os.environ["BERTDATA_CACHE"] = f"{name}/cache"
        prepare(Path(name))
        num_failed = try_all(numbers, Path(name), jobs)
    took = f"{cpu_seconds():.0f} s of CPU time, {time.monotonic() - began:.0f} s"
    click.echo(f"{len(numbers)} capabilities, {num_failed} failed; {took}")
    raise SystemExit(num_failed > 0)


if __name__ == "__main__":
    main()
