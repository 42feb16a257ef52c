"""Make the units of a build or an import, with threads of this machine or with one Ray task for each part.

Ray runs a task again if its process, node or disk fails, and the abandoned attempt may still write. So each attempt
writes its unfinished files of a unit to a separate directory, .build/attempts-*/*/. Two attempts that write the same
name in .build/ write the same bytes. The driver publishes.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from functools import lru_cache, partial
from itertools import groupby, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, TypeVar

import bertdata
from bertdata.errors import BertdataError, BuildError, InputError, UsageError, counted, install
from bertdata.sources.blocks import code_of
from bertdata.sources.iterables import Items
from bertdata.sources.plan import Part
from bertdata.write.encoding import TextEncoder, functions_of
from bertdata.write.staging import ATTEMPTS, FinishedUnits, UnitRecord, require_unchanged
from bertdata.write.units import EncodedDocuments, UnitWriter

LARGE = 1 << 24  # bytes; a larger item has a long document, and is alone in memory in its task
_ADDRESS = re.compile(r"auto|local|[^/\s]+:\d+")
_PARALLELISM = "TOKENIZERS_PARALLELISM"  # "false": `tokenizers` starts no threads of its own
_Task = TypeVar("_Task")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Block = TypeVar("_Block")


class _Stopped(Exception):
    """The result of this task is no longer needed."""


class Crew:
    """Threads that each run a task from beginning to end, and threads that process the items of all tasks.

    The caller's thread only waits, so Ctrl-C works at any time.
    """

    def __init__(self, workers: int) -> None:
        """workers: the number of threads that process items, and the number of tasks that run at the same time."""
        self.workers, self._lock = workers, threading.Lock()
        self._first_failed, self._is_stopped = sys.maxsize, False

    def run(self, work: Callable[[_Task, Any], None], tasks: Sequence[_Task]) -> None:
        """Call work(task, in_order) for each task, with the method `in_order`. Tasks start in order.

        After a BertdataError, later tasks stop, but earlier tasks continue, because they may fail too: the error of the
        first failed task is raised. After any other error all tasks stop.
        """
        self._num_left = len(tasks)
        with (
            ThreadPoolExecutor(self.workers, "encode") as self._pool,
            ThreadPoolExecutor(self.workers, "build") as pool,
        ):
            made = [pool.submit(self._make, work, number, task) for number, task in enumerate(tasks)]
            try:
                wait(made)
            finally:  # after Ctrl-C the threads are still running
                self._is_stopped = True
        for error in (future.exception() for future in made):
            if error and not isinstance(error, _Stopped):
                raise error

    def _make(self, work: Callable[[_Task, Any], None], number: int, task: _Task) -> None:
        try:
            self._require_needed(number)
            work(task, partial(self.in_order, number))
        except BaseException as error:
            with self._lock:
                if not isinstance(error, _Stopped):
                    self._first_failed = min(self._first_failed, number)
                    self._is_stopped |= not isinstance(error, BertdataError)
            raise
        finally:
            with self._lock:
                self._num_left -= 1

    def _require_needed(self, number: int) -> None:
        if self._is_stopped or number > self._first_failed:
            raise _Stopped

    def in_order(
        self,
        number: int,
        work: Callable[[_Item], _Result],
        items: Iterable[_Item],
        size_of: Callable[[_Item], int] = lambda item: 0,
    ) -> Generator[_Result]:
        """Yield work(item) for each item of a task, in order. The calling thread makes the items.

        number: the index of the task. size_of: returns the bytes of an item. An item of more than LARGE bytes is alone
        in memory: the calling thread processes it after all earlier items, before it makes the next item.

        If making an item raises BertdataError, and the work on an earlier item failed too, the earlier error is raised.
        """
        waiting, coming = deque[Future[_Result]](), iter(items)

        def do(item: _Item) -> _Result:
            self._require_needed(number)
            return work(item)

        while True:
            self._require_needed(number)
            try:
                item = next(coming)
            except StopIteration:
                break
            except BertdataError:
                for future in waiting:
                    future.result()
                raise
            if size_of(item) > LARGE:
                while waiting:
                    yield waiting.popleft().result()
                result = work(item)
                del item
                yield result
                del result
                continue
            waiting.append(self._pool.submit(do, item))
            del item
            ahead = 2 * self.workers // min(self.workers, self._num_left) - 1  # higher if other tasks have ended
            while waiting and (waiting[0].done() or len(waiting) > ahead):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class Encoder(Protocol[_Block]):
    """The interface of objects that turn inputs into encoded documents."""

    shard_size: int  # bytes of a unit
    keeps_empty: bool  # whether to store the places of empty documents

    def find(self, units: range, finished: Container[int]) -> Iterator[_Block]:
        """Return the blocks of some units in order, except finished units."""

    def encode(self, block: _Block) -> EncodedDocuments:
        """Encode a block. Several threads may call this at once."""


def make_units(
    parts: Sequence[Part],
    encoder: Encoder[_Block],
    staging: Path,
    finished: Container[int],
    keep: Callable[[UnitRecord], None],
    *,
    workers: int,
    apart: Path | None = None,
    progress: Callable[[int], None] = lambda done: None,
    items: Items | None = None,
) -> None:
    """Make units on `workers` threads.

    One thread finds the blocks of a part and writes them in order; other threads encode them. A part reads up to 2
    blocks ahead of its writes, or up to 2 * workers blocks if fewer parts are left than workers.

    parts: in order. finished: units to skip. keep: called with the record of each unit, by several threads at once.
    apart: as in `Stage`. progress: called with the bytes of input read so far. items: the iterable, if the input is
    one.
    """
    missing, done = _missing(parts, finished)
    lock = threading.Lock()

    def add(read: float) -> None:
        nonlocal done
        with lock:
            done += read
            progress(int(done))

    def counted_blocks(part: Part, blocks: Iterator[EncodedDocuments]) -> Iterator[EncodedDocuments]:
        """Yield the blocks of a part, and count the bytes read for each block. The sum is the size of the part."""
        before, left = -1, part.size
        for block in blocks:
            read: float = max(0, min(block.bytes_read - before, left)) if before >= 0 else 0
            before, left = block.bytes_read, left - read
            yield block
            del block
            add(read)
        add(left)

    def make(part: Part, in_order: Any) -> None:
        raw = encoder.find(part.units, finished)
        with closing(in_order(encoder.encode, raw, lambda block: block.num_bytes)) as blocks:
            for unit, of_unit in groupby(counted_blocks(part, blocks), key=lambda documents: documents.unit):
                with UnitWriter(staging, unit, encoder.shard_size, apart, keeps_empty=encoder.keeps_empty) as writer:
                    for documents in of_unit:
                        writer.append(documents)
                        del documents  # before the next blocks are made
                    keep(writer.commit(items.checksums[unit] if items else None))

    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"
    try:
        Crew(workers).run(make, missing)
    finally:
        os.environ.pop(_PARALLELISM, None)  # another thread may have removed the variable
        if before is not None:
            os.environ[_PARALLELISM] = before
    if items:
        items.end_unit(is_last=True)


def _missing(parts: Sequence[Part], finished: Container[int]) -> tuple[list[Part], float]:
    """Return the parts with unfinished units, and the bytes of input of all other parts."""
    missing = [part for part in parts if not all(unit in finished for unit in part.units)]
    return missing, sum(part.size for part in parts) - sum(part.size for part in missing)


# ------------------------------------------------------------------------------------------------ a Ray cluster


def versions(encoder: TextEncoder) -> list[str]:
    """Return the versions of bertdata and of the functions of --map and --words."""
    return [bertdata.__version__, *(f"{spec}: {code_of(spec)}" for spec in functions_of(encoder.form))]


@contextmanager
def connected(address: str, say: Callable[[str], None]) -> Iterator[None]:
    """Connect this process to a Ray cluster, as a driver, within the context. Keeps an existing connection.

    address: HOST:PORT; "auto", which means $RAY_ADDRESS or the running cluster on this machine; or "local", a new
    cluster on the cores of this machine that ends with the context. say: called with a line that names the cluster.
    Raises UsageError for an invalid address, and BuildError if Ray is not installed or there is no such cluster.
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
    try:
        if not is_joined:
            if ":" in where:  # Ray itself would retry for minutes
                host, _, port = where.rpartition(":")
                socket.create_connection((host.strip("[]"), int(port)), timeout=10.0).close()
            only_here: dict[str, Any] = {"include_dashboard": False} if where == "local" else {}
            ray.init(where, log_to_driver=False, logging_level=logging.CRITICAL, **only_here)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        sentence = f"{where} is no Ray cluster to join ({_reason(error)}); run ray start, or give a different address"
        raise BuildError(sentence, "cluster-failed", option="ray", given=where) from None
    try:
        say(f"Ray cluster at {ray.get_runtime_context().gcs_address}: {counted(_cpus(), 'CPU')}")
        yield
    finally:
        if not is_joined:
            ray.shutdown()


def _cpus() -> int:
    import ray

    return int(ray.cluster_resources().get("CPU", 1))


def encode_on_cluster(
    encoder: TextEncoder, staging: Path, units: FinishedUnits, *, workers: int | None, progress: Callable[[int], None]
) -> None:
    """Make the units of a plan with Ray tasks, in a `connected` context.

    units: the finished units; they are skipped, and new ones are added. workers: the number of tasks at the same time;
    None: as many as the cluster runs. progress: called with the bytes of input whose units are finished.

    Raises the error of the failed task that is first in the order of the text, and BuildError if Ray gives up a task.
    """
    import ray

    retries: dict[str, Any] = {"max_retries": 3, "retry_exceptions": [OSError]}
    make = ray.remote(num_cpus=1, **retries)(make_task)
    missing, done = _missing(encoder.plan.parts(_cpus()), units.numbers)
    # Tasks that still run fail at their next file. ray.cancel (2.60) would end this process if a task ends meanwhile.
    with TemporaryDirectory(prefix=ATTEMPTS, dir=staging.absolute(), ignore_cleanup_errors=True) as attempts:
        job = [ray.put((encoder, Path(attempts), Path.cwd(), versions(encoder)))]
        results = (make.remote(job, part, units.numbers.intersection(part.units)) for part in missing)
        running = deque(islice(results, workers))
        for part in missing:
            records, warnings = _result(running.popleft())
            encoder.form.warnings.update(warnings)
            for record in records:
                units.add(record)
            running.extend(islice(results, 1))
            done += part.size
            progress(int(done))


def _result(reference: Any) -> tuple[list[UnitRecord], set[str]]:
    """Return the result of a task. Raises the error of the task as if it had run in this process."""
    import ray
    from ray.exceptions import RayError

    try:
        records, warnings = ray.get(reference)
        return records, warnings
    except RayError as error:
        problem: BaseException = getattr(error, "cause", None) or error
    if isinstance(problem, BertdataError | OSError | MemoryError):
        raise problem
    sentence = f"a task failed on the cluster ({_reason(problem)}); run the command again to continue"
    raise BuildError(sentence, "cluster-failed", option="ray")


def _reason(error: BaseException) -> str:
    """Return the first sentence of a Ray error message."""
    return " ".join(str(error).split()).partition(" traceback:")[0].partition(". ")[0].rstrip(".")


# ------------------------------------------------------------------------------------------------ what runs on a node


@lru_cache(maxsize=1)
def _received(job: Any) -> tuple[TextEncoder, Path]:
    """Return the encoder and the directory of attempts, shared by all tasks of a process. job: a Ray reference."""
    import ray

    encoder, attempts, working_directory, expected_versions = ray.get(job)
    with suppress(OSError):  # with only absolute paths and URLs as inputs, it may be missing
        os.chdir(working_directory)
    node, here, out = platform.node(), versions(encoder), attempts.parent.parent
    if not attempts.exists():
        sentence = f"node {node} does not see {out}; give an --out that all nodes see under one name"
        raise BuildError(sentence, "cluster-failed", option="out", given=out)
    if here != expected_versions:
        sentence = f"node {node} has {here}, and the command {expected_versions}; install the same on all nodes"
        raise BuildError(sentence, "cluster-failed", option="ray", given=here)
    return encoder, attempts


def make_task(job: list[Any], part: Part, finished: set[int]) -> tuple[list[UnitRecord], set[str]]:
    """Make the unfinished units of a part. Return the records of the units that have documents, and warnings.

    job: a list with one reference: Ray would load a bare reference again for each task.
    """
    encoder, attempts = _received(job[0])
    records, plan = list[UnitRecord](), encoder.plan
    inputs = [plan.files[index] for index in plan.inputs_of(part.units)]
    local = [file for file in inputs if not file.remote]  # each request for a URL asks for the version in the plan
    try:
        require_unchanged(local, "let all nodes see the same files, and run again")
    except InputError as error:
        raise InputError(f"node {platform.node()}: {error}", error.kind, option="inputs", given=error.given) from None
    make_units([part], encoder, attempts.parent, finished, records.append, workers=1, apart=attempts)
    return records, encoder.form.warnings
