"""The units of a build on a Ray cluster. A task makes those of one section, or of some small ones that follow it.

Ray runs a task again if its process or its node is lost, and an attempt that was taken for lost may still write. So
each attempt writes in a directory of its own, .build/attempts-*/*/, and moves the files of a unit to .build/ when they
are finished, the unit's record last. What two attempts move has the same bytes. Only records come back, and the driver
publishes.

attempts-*/ has all that tasks read: the tokenizer, and a copy of the record of each unit that an attempt finished. Its
name is new with each command, because a node may remember for a minute what a file on a server was before.
"""

from __future__ import annotations

import importlib
import logging
import os
import platform
import re
import shutil
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import bertdata
from bertdata.errors import BertdataError, BuildError, InputError, UsageError, counted, install
from bertdata.files import fsync_directory, write_file
from bertdata.sources.inputs import Input
from bertdata.sources.maps import code_of, function_of
from bertdata.sources.split import Plan, Task
from bertdata.tokenize.load import load
from bertdata.tokenize.tokenizer import LoadedTokenizer
from bertdata.write.encoding import Recipe, TextEncoder
from bertdata.write.staging import ATTEMPTS
from bertdata.write.state import FinishedUnits, UnitRecord, unit_name
from bertdata.write.units import UnitWriter, make_units

_RETRIES = 3  # of a task whose process, node or disk fails
_ANSWER_S = 10.0  # that a cluster has to answer
_ADDRESS = re.compile(r"auto|local|[^/\s]+:\d+")


@dataclass(frozen=True)
class Job:
    """What all tasks of a build have in common. Paths are absolute, or relative to `directory`."""

    plan: Plan
    recipe: Recipe
    staging: Path
    directory: Path  # in which the command was run
    codes: Mapping[str, str] = field(default_factory=dict)  # of functions of --map and --words, by their names
    version: str = bertdata.__version__


@contextmanager
def connected(address: str, say: Callable[[str], None]) -> Iterator[None]:
    """A context in which this process is a driver of a Ray cluster. The cluster that it has already joined is kept.

    address: HOST:PORT; "auto", which is $RAY_ADDRESS or the cluster that runs on this machine; or "local", a cluster of
    this machine's cores that ends with the context. say: called with a line that names the cluster. Raises UsageError
    for what is not an address, and BuildError if Ray is not installed or there is no such cluster.
    """
    where = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    if not _ADDRESS.fullmatch(where):
        sentence = f"{where} is not an address of a Ray cluster; give HOST:PORT, auto or local, or put --ray at the end"
        raise UsageError(sentence, "malformed", option="ray", given=where)
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # Ray prints each retry on standard output
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        sentence = f"--ray needs Ray, which is not installed; {install('ray')}"
        raise BuildError(sentence, "not-installed", option="ray") from None
    is_joined = ray.is_initialized()
    if not is_joined:
        only_here: dict[str, Any] = {"include_dashboard": False} if where == "local" else {}
        try:
            if ":" in where:  # Ray itself would try for minutes
                host, _, port = where.rpartition(":")
                socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
            ray.init(where, log_to_driver=False, logging_level=logging.CRITICAL, **only_here)
        except (OSError, OverflowError, RuntimeError, ValueError) as error:
            sentence = f"{where} is no Ray cluster to join ({_reason(error)}); run ray start, or give another address"
            raise BuildError(sentence, "cluster-failed", option="ray", given=where) from None
    try:
        size = f"{counted(sum(node['Alive'] for node in ray.nodes()), 'node')}, {counted(_cpus(), 'CPU')}"
        say(f"Ray cluster at {ray.get_runtime_context().gcs_address}: {size}")
        yield
    finally:
        if not is_joined:
            ray.shutdown()


def _cpus() -> int:
    import ray

    return int(ray.cluster_resources().get("CPU", 0))


def encode_on_cluster(
    job: Job, tokenizer: LoadedTokenizer, *, units: FinishedUnits, workers: int | None, progress: Callable[[int], None]
) -> None:
    """Makes the units of a plan by tasks, in a `connected` context.

    units: those that are finished, which are not made again; the new ones are added. workers: how many tasks at the
    same time; None: as many as the cluster takes. progress: called with the bytes of input whose units are finished.

    Raises what the first task raises that fails in the order of the text, and BuildError if Ray gives a task up.
    """
    import ray

    here = __name__

    rules: dict[str, Any] = {"max_retries": _RETRIES, "retry_exceptions": [OSError], "scheduling_strategy": "SPREAD"}

    @ray.remote(num_cpus=1, **rules)
    def make(*arguments: Any) -> Any:
        """Is sent as code, so that a node without this package can say so."""
        return importlib.import_module(here).records_of_task(*arguments)

    common, attempts = ray.put(job), job.staging / f"{ATTEMPTS}{uuid4().hex}"
    attempts.mkdir()
    for name, content in tokenizer.files.items():
        write_file(attempts / name, content)
    every = job.plan.tasks(max(1, _cpus()))
    waiting = deque(task for task in every if not units.numbers.issuperset(task.units))
    done = sum(task.size for task in every) - sum(task.size for task in waiting)
    running: dict[Any, Task] = {}
    failed: dict[int, BaseException] = {}  # by the first unit of the task
    try:
        while waiting or running:
            while waiting and len(running) < (workers or max(2 * _cpus(), 1)):
                task = waiting.popleft()
                missing = [unit for unit in task.units if unit not in units.numbers]
                running[make.remote([common], attempts, missing)] = task
            (ready, *_), _ = ray.wait(list(running))
            task = running.pop(ready)
            try:
                records = ray.get(ready)
                if isinstance(records, BertdataError):
                    raise records
            except Exception as error:
                failed[task.units.start] = _as_here(error)
                waiting.clear()  # all tasks before this one are running or done, and one of them may fail too
                running = {ref: other for ref, other in running.items() if other.units.start < task.units.start}
            else:
                for record in records.values():
                    units.add(record)
                done += task.size
                progress(int(done))
        if failed:
            raise failed[min(failed)]
    finally:  # what still runs fails at its next file; ray.cancel (2.60) ends this process if a task ends meanwhile
        shutil.rmtree(attempts, ignore_errors=True)


def _as_here(error: Exception) -> BaseException:
    """What a failed task would have raised in this process."""
    from ray.exceptions import RayError, RayTaskError

    cause = error.cause if isinstance(error, RayTaskError) else None
    if isinstance(cause, OSError | MemoryError):
        return cause
    if isinstance(cause, ImportError):
        sentence = f"a node of the cluster lacks a package ({cause}); install the same ones on all nodes"
        return BuildError(sentence, "cluster-failed", option="ray", given=cause.name)
    if isinstance(error, RayError) and not isinstance(error, RayTaskError):
        tries = _RETRIES + 1
        sentence = f"Ray gave a task up after {tries} attempts ({_reason(error)}); run the command again to continue"
        return BuildError(sentence, "cluster-failed", option="ray", given=tries)
    return error


def _reason(error: Exception) -> str:
    """The first sentence of a message of Ray."""
    return " ".join(str(error).split()).partition(". ")[0].rstrip(".")


# ------------------------------------------------------------------------------------------------ what runs on a node


def records_of_task(common: list[Any], attempts: Path, units: Sequence[int]) -> dict[int, UnitRecord] | BertdataError:
    """Makes units, unless an earlier attempt did. Returns number → record of each that has documents.

    common: a reference to the Job. An error that the user can act on is a result, so that Ray adds nothing to it.
    """
    try:
        return _attempt(*_prepared(common[0], attempts), attempts, units)
    except BertdataError as error:
        return error


def _require_functions(job: Job) -> None:
    """Raises BuildError for a function of --map or --words that this node cannot import, or has in another version."""
    for option, spec in job.recipe.functions:
        try:
            function_of(spec, option)
        except UsageError as error:
            sentence = (
                f"on node {platform.node()} {error}; the module must be importable on every node, so install it, or "
                "put it into PYTHONPATH before ray start"
            )
            raise BuildError(sentence, "cluster-failed", option=option.removeprefix("--"), given=spec) from None
        if spec in job.codes and code_of(spec) != job.codes[spec]:
            sentence = f"node {platform.node()} has another version of {spec}; install one version on all nodes"
            raise BuildError(sentence, "cluster-failed", option=option.removeprefix("--"), given=spec)


@lru_cache(maxsize=1)
def _prepared(common: Any, attempts: Path) -> tuple[Job, LoadedTokenizer]:
    """What the tasks of a process share."""
    import ray

    job: Job = ray.get(common)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task has one CPU
    with suppress(OSError):  # where all inputs are absolute paths or URLs it need not be there
        os.chdir(job.directory)
    node, version = platform.node(), bertdata.__version__
    if version != job.version:
        sentence = f"node {node} has bertdata {version}, the command {job.version}; install one version on all nodes"
        raise BuildError(sentence, "cluster-failed", option="ray", given=version)
    if not attempts.exists():
        out = job.staging.parent
        sentence = f"node {node} does not see {out}; give an --out that all nodes see under one name"
        raise BuildError(sentence, "cluster-failed", option="out", given=out)
    _require_functions(job)
    return job, load(str(attempts))


def _attempt(job: Job, tokenizer: LoadedTokenizer, attempts: Path, units: Sequence[int]) -> dict[int, UnitRecord]:
    paths = {unit: attempts / unit_name(unit) for unit in units}
    records = {unit: UnitRecord.read(path) for unit, path in paths.items() if path.exists()}
    plan = job.plan.narrowed(range(units[0], units[-1] + 1))
    for index in (index for stretch in plan.stretches for index in stretch.inputs):
        _require_same(plan.files[index])
    for left in attempts.glob(f"{units[0]}-*"):
        shutil.rmtree(left, ignore_errors=True)
    directory = attempts / f"{units[0]}-{uuid4().hex}"
    directory.mkdir()
    try:
        make_units(
            plan.tasks(1),
            TextEncoder(tokenizer, job.recipe, plan),
            lambda unit: _AttemptWriter(directory, unit, plan.form.shard_size),
            is_missing=(frozenset(units) - records.keys()).__contains__,
            keep=lambda record: records.update({record.unit: record}),
            workers=1,
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return records


class _AttemptWriter(UnitWriter):
    """Writes in the directory of an attempt, .build/attempts-*/*, and moves the files of a finished unit to .build."""

    def commit(self) -> UnitRecord:
        record = super().commit()
        last, attempts = unit_name(record.unit), self.directory.parent
        staging = attempts.parent
        for path in [path for path in self.directory.iterdir() if path.name != last]:
            os.replace(path, staging / path.name)
        fsync_directory(staging)
        record.write(self.directory / "copy.json")
        os.replace(self.directory / last, staging / last)
        fsync_directory(staging)
        os.replace(self.directory / "copy.json", attempts / last)
        return record


def _require_same(file: Input) -> None:
    """Raises InputError if a node sees another file. (Under a URL, each request asks for the version of the plan.)"""
    if file.remote is None:
        with suppress(InputError):
            if file.now() == file:
                return
        sentence = (
            f"{file} is not on node {platform.node()} what it was where the build began; give inputs that all nodes "
            "see under one name, and that nobody changes"
        )
        raise InputError(sentence, "cluster-failed", option="inputs", given=file.name)
