"""Make the units of a build or an import: by threads of this machine or tasks of a Ray cluster, a part each.

Ray runs a task again if its process, node or disk fails, and an attempt that was given up may still write. So each unit
has its own directory, .build/attempts-*/*/, for its unfinished files. Files of two attempts that get the same name in
.build/ have the same bytes. The driver publishes.
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

LARGE = 1 << 24  # bytes of an item that is alone in memory in its task: it has a long document
_ADDRESS = re.compile(r"auto|local|[^/\s]+:\d+")
_PARALLELISM = "TOKENIZERS_PARALLELISM"  # false: `tokenizers` starts no threads in addition to ours
_Task = TypeVar("_Task")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Block = TypeVar("_Block")


class _Stopped(Exception):
    """Nobody needs the result of this task."""


class Crew:
    """Threads that make tasks, each from beginning to end, and threads that work on the items of all tasks.

    The caller's thread only waits, so it can be interrupted at any time.
    """

    def __init__(self, workers: int) -> None:
        """workers: how many threads work on items; as many tasks are made at the same time."""
        self.workers, self._lock = workers, threading.Lock()
        self._first_failed, self._is_stopped = sys.maxsize, False

    def run(self, work: Callable[[_Task, Any], None], tasks: Sequence[_Task]) -> None:
        """Call work(task, in_order) for each task; in_order is `in_order` below. Tasks begin in order.

        After a BertdataError later tasks end, and earlier ones continue, because they may fail too: raises the error of
        the first task that failed. After any other error all end.
        """
        self._num_left = len(tasks)
        with (
            ThreadPoolExecutor(self.workers, "encode") as self._pool,
            ThreadPoolExecutor(self.workers, "build") as pool,
        ):
            made = [pool.submit(self._make, work, number, task) for number, task in enumerate(tasks)]
            try:
                wait(made)
            finally:  # after Ctrl-C the threads still run
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
        """Yield work(item) of each item of a task, in order. This thread makes the items.

        number: of the task. size_of: bytes of an item. One of more than LARGE is alone in memory: this thread does the
        work on it when all before it are done, and makes the next item after that.

        If an item cannot be made, because of a BertdataError, an error of the work on an earlier item is raised
        instead, if there is one.
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
            ahead = 2 * self.workers // min(self.workers, self._num_left) - 1  # of one task, more if others have ended
            while waiting and (waiting[0].done() or len(waiting) > ahead):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class Encoder(Protocol[_Block]):
    """What makes documents of an input."""

    shard_size: int  # of a unit, in bytes
    keeps_empty: bool  # whether to store where documents without ids were

    def find(self, units: range, finished: Container[int]) -> Iterator[_Block]:
        """Return the blocks of some units but those that are finished, in order."""

    def encode(self, block: _Block) -> EncodedDocuments:
        """Encode a block. Several threads may call it at once."""


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

    One thread finds the blocks of a part and writes them in order; others encode them. A part is ahead of what it has
    written by 2 blocks, or by up to 2 * workers blocks where fewer parts are left than workers.

    parts: in order. finished: units to skip. keep: called with the record of each unit, by several
    threads at once. apart: as `Stage`. progress: called with the bytes of input that are read. items: the iterable that
    is read, if the input is one.
    """
    missing, done = _missing(parts, finished)
    lock = threading.Lock()

    def add(read: float) -> None:
        nonlocal done
        with lock:
            done += read
            progress(int(done))

    def counted_blocks(part: Part, blocks: Iterator[EncodedDocuments]) -> Iterator[EncodedDocuments]:
        """Yield the blocks of a part, and count the bytes read for each. Their sum is the size of the part."""
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
                        del documents  # before the next ones are made
                    keep(writer.commit(items.checksums[unit] if items else None))

    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"
    try:
        Crew(workers).run(make, missing)
    finally:
        os.environ.pop(_PARALLELISM, None)  # another thread may have removed it
        if before is not None:
            os.environ[_PARALLELISM] = before
    if items:
        items.end_unit(is_last=True)


def _missing(parts: Sequence[Part], finished: Container[int]) -> tuple[list[Part], float]:
    """Return the parts that have a unit to make, and the bytes of input of the others."""
    missing = [part for part in parts if not all(unit in finished for unit in part.units)]
    return missing, sum(part.size for part in parts) - sum(part.size for part in missing)


# ------------------------------------------------------------------------------------------------ a Ray cluster


def versions(encoder: TextEncoder) -> list[str]:
    """Return the version of bertdata, and those of the functions of --map and --words."""
    return [bertdata.__version__, *(f"{spec}: {code_of(spec)}" for spec in functions_of(encoder.form))]


@contextmanager
def connected(address: str, say: Callable[[str], None]) -> Iterator[None]:
    """Make this process a driver of a Ray cluster within the context. A cluster that it has joined before is kept.

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
    try:
        if not is_joined:
            if ":" in where:  # Ray itself would try for minutes
                host, _, port = where.rpartition(":")
                socket.create_connection((host.strip("[]"), int(port)), timeout=10.0).close()
            only_here: dict[str, Any] = {"include_dashboard": False} if where == "local" else {}
            ray.init(where, log_to_driver=False, logging_level=logging.CRITICAL, **only_here)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        sentence = f"{where} is no Ray cluster to join ({_reason(error)}); run ray start, or give another address"
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
    """Make the units of a plan by tasks, in a `connected` context.

    units: those that are finished, which are skipped; the new ones are added. workers: how many tasks at the
    same time; None: as many as the cluster takes. progress: called with the bytes of input whose units are finished.

    Raises what the first task raises that fails in the order of the text, and BuildError if Ray gives a task up.
    """
    import ray

    retries: dict[str, Any] = {"max_retries": 3, "retry_exceptions": [OSError]}
    make = ray.remote(num_cpus=1, **retries)(make_task)
    missing, done = _missing(encoder.plan.parts(_cpus()), units.numbers)
    # At the end what still runs fails at its next file; ray.cancel (2.60) ends this process if a task ends meanwhile.
    with TemporaryDirectory(prefix=ATTEMPTS, dir=staging.absolute(), ignore_cleanup_errors=True) as attempts:
        job = [ray.put((encoder, Path(attempts), Path.cwd(), versions(encoder)))]
        results = (make.remote(job, part, units.numbers.intersection(part.units)) for part in missing)
        running = deque(islice(results, workers))
        for part in missing:
            for record in _result(running.popleft()):
                units.add(record)
            running.extend(islice(results, 1))
            done += part.size
            progress(int(done))


def _result(reference: Any) -> list[UnitRecord]:
    """Return the result of a task. Raises what the task raised, as if it had run in this process."""
    import ray
    from ray.exceptions import RayError

    try:
        return list(ray.get(reference))
    except RayError as error:
        problem: BaseException = getattr(error, "cause", None) or error
    if isinstance(problem, BertdataError | OSError | MemoryError):
        raise problem
    sentence = f"a task failed on the cluster ({_reason(problem)}); run the command again to continue"
    raise BuildError(sentence, "cluster-failed", option="ray")


def _reason(error: BaseException) -> str:
    """Return the first sentence of a message of Ray."""
    return " ".join(str(error).split()).partition(" traceback:")[0].partition(". ")[0].rstrip(".")


# ------------------------------------------------------------------------------------------------ what runs on a node


@lru_cache(maxsize=1)
def _received(job: Any) -> tuple[TextEncoder, Path]:
    """Return the encoder and the directory of attempts, which all tasks of a process share. job: a reference."""
    import ray

    encoder, attempts, working_directory, expected_versions = ray.get(job)
    with suppress(OSError):  # where all inputs are absolute paths or URLs it need not be there
        os.chdir(working_directory)
    node, here, out = platform.node(), versions(encoder), attempts.parent.parent
    if not attempts.exists():
        sentence = f"node {node} does not see {out}; give an --out that all nodes see under one name"
        raise BuildError(sentence, "cluster-failed", option="out", given=out)
    if here != expected_versions:
        sentence = f"node {node} has {here}, and the command {expected_versions}; install the same on all nodes"
        raise BuildError(sentence, "cluster-failed", option="ray", given=here)
    return encoder, attempts


def make_task(job: list[Any], part: Part, finished: set[int]) -> list[UnitRecord]:
    """Make the units of a part but those that are finished. Return the record of each that has documents.

    job: a list with a reference: Ray would load the content of a reference alone for each task.
    """
    encoder, attempts = _received(job[0])
    records, plan = list[UnitRecord](), encoder.plan
    inputs = [plan.files[index] for index in plan.inputs_of(part.units)]
    local = [file for file in inputs if not file.remote]  # each request for a URL asks for the version of the plan
    try:
        require_unchanged(local, "let all nodes see the same files, and run again")
    except InputError as error:
        raise InputError(f"node {platform.node()}: {error}", error.kind, option="inputs", given=error.given) from None
    make_units([part], encoder, attempts.parent, finished, records.append, workers=1, apart=attempts)
    return records
