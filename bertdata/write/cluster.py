"""The units of a build on a Ray cluster: a task makes one part.

Ray runs a task again if its process, node or disk fails, and an attempt that was taken for lost may still write. So
each unit has a directory of its own, .build/attempts-*/*/, for its unfinished files. What two attempts give names in
.build/ has the same bytes. The driver publishes.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import bertdata
from bertdata.errors import BertdataError, BuildError, InputError, UsageError, counted, install
from bertdata.sources.maps import code_of
from bertdata.sources.plan import Part
from bertdata.write.encoding import TextEncoder, functions_of, one_thread_each
from bertdata.write.staging import ATTEMPTS, require_unchanged
from bertdata.write.state import FinishedUnits, UnitRecord
from bertdata.write.units import make_units

_ADDRESS = re.compile(r"auto|local|[^/\s]+:\d+")


def versions(encoder: TextEncoder) -> list[str]:
    """Return the version of bertdata, and those of the functions of --map and --words."""
    return [bertdata.__version__, *(f"{spec}: {code_of(spec)}" for spec in functions_of(encoder.form))]


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

    units: those that are finished, which are not made again; the new ones are added. workers: how many tasks at the
    same time; None: as many as the cluster takes. progress: called with the bytes of input whose units are finished.

    Raises what the first task raises that fails in the order of the text, and BuildError if Ray gives a task up.
    """
    import ray

    retries: dict[str, Any] = {"max_retries": 3, "retry_exceptions": [OSError]}
    make = ray.remote(num_cpus=1, **retries)(make_task)
    every = encoder.plan.parts(_cpus())
    missing = [part for part in every if not units.numbers.issuperset(part.units)]
    done = sum(part.size for part in every) - sum(part.size for part in missing)
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
    """The first sentence of a message of Ray."""
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
    with one_thread_each():
        make_units([part], encoder, attempts.parent, finished, records.append, workers=1, apart=attempts)
    return records
