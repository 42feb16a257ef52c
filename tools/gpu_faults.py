"""Plants ten faults in the path on GPUs, one at a time, and says whether the tests of `make gpu-dry` find them.

    python tools/gpu_faults.py                    all of them, in some minutes
    python tools/gpu_faults.py --only "a barrier on one rank"

Each fault is planted in a copy of the project, and the test that should find it runs there. First all these tests must
pass in a copy without a fault. Exit code 1 if a fault is not found.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import click
from mutate import copy_of_project

LIMIT_S = 400  # for a test; one that does not end fails


class Fault(NamedTuple):
    """A change of one place of one file, and the test that should find it."""

    file: str
    old: str
    new: str
    test: str


STEP = "tests/test_gpu_dry.py::test_a_step_needs_no_number[bert-base-windows]"
FORWARD = "tests/test_gpu_dry.py::test_a_forward_pass_on_a_gpu"
KERNEL = "tests/test_gpu_dry.py::test_the_kernel_of_gpus_gives_what_masks_give"
RANKS = "tests/test_gpu_dry.py::test_compiled_ranks_learn_what_one_does[packed]"
FAULTS = {
    "a number of a tensor is read in the step": Fault(
        "bertrain/objectives/mlm.py",
        "        num_rows =",
        '        assert piece["targets"].max().item() >= 0\n        num_rows =',
        STEP,
    ),
    "a tensor on the CPU": Fault(
        "bertrain/models/encoder.py",
        "    return states.gather(",
        '    states = states + torch.zeros(states.shape[-1], device="cpu")\n    return states.gather(',
        f"{FORWARD}[bert-base-windows]",
    ),
    "a mask of all pairs of tokens": Fault(
        "bertrain/models/isolation.py",
        "    can = is_half and",
        "    can = query.shape[2] < 64 and is_half and",
        f"{FORWARD}[bert-base-packed]",
    ),
    "a shape that follows from numbers": Fault(
        "bertrain/objectives/losses.py",
        "    logits, rows = logits.float(), None\n",
        "    logits, rows = logits.float(), None\n"
        "    logits, targets = logits[targets != IGNORE_INDEX], targets[targets != IGNORE_INDEX]\n",
        STEP,
    ),
    "a second graph": Fault(
        "bertrain/models/encoder.py",
        "        return self._head(",
        "        torch._dynamo.graph_break()\n        return self._head(",
        f"{KERNEL}[bert-True-64]",
    ),
    "the gradients of the other rank are left out": Fault(
        "bertrain/run/training.py",
        "        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()\n",
        "        future = dist.all_reduce(bucket.buffer().clone(), async_op=True).get_future()\n"
        "        return future.then(lambda done: bucket.buffer())\n",
        RANKS,
    ),
    "a NaN in a gradient reaches the weights": Fault(
        "bertrain/run/training.py",
        "self.skipped = 1 - self.norm.isfinite().float()",
        "self.skipped = torch.zeros_like(self.norm)",
        "tests/test_finite.py::test_a_run_goes_on_after_a_skipped_step[adamw]",
    ),
    "a window that is one token wider": Fault(
        "bertrain/models/isolation.py",
        "else sliding_window - 1",
        "else sliding_window",
        f"{KERNEL}[modernbert-True-64]",
    ),
    "bounds of documents in another dtype": Fault(
        "bertrain/runtime/feed.py",
        "dtype=torch.int32)",
        "dtype=torch.int64)",
        f"{KERNEL}[bert-True-64]",
    ),
    "a barrier on one rank": Fault(
        "bertrain/run/training.py",
        "        prepared = self.learner.prepare(piece)  # not in",
        "        if self._ranks.rank:\n            dist.barrier()\n"
        "        prepared = self.learner.prepare(piece)  # not in",
        RANKS,
    ),
}
"""What is wrong → where, and the test that should find it."""


def planted(fault: Fault, folder: Path) -> None:
    """Plants a fault in the copy of the project in a folder. Its text must be in the file once."""
    path = folder / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise click.ClickException(f"{fault.file} does not hold {fault.old.strip()!r} once; correct FAULTS")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")


def passes(folder: Path, tests: list[str]) -> bool:
    """Whether tests pass in a copy of the project. Tests that do not end fail."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not gpu", *tests]
    environment = os.environ | {"PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **quiet) as process:
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ranks of a test too
    if code not in (0, 1):
        raise click.ClickException(f"pytest ends with code {code} for {' '.join(tests)}")
    return code == 0


@click.command(help=__doc__)
@click.option("--only", multiple=True, type=click.Choice([*FAULTS]), help="This fault; may be given several times.")
def main(only: tuple[str, ...]) -> None:
    chosen = {name: fault for name, fault in FAULTS.items() if not only or name in only}
    found = 0
    with tempfile.TemporaryDirectory() as scratch:
        copy = copy_of_project(Path(scratch))
        if not passes(copy, sorted({fault.test for fault in chosen.values()})):
            raise click.ClickException("these tests fail without a fault; correct that first")
        for name, fault in chosen.items():
            path, start = copy / fault.file, time.monotonic()
            plain = path.read_bytes()
            planted(fault, copy)
            is_found = not passes(copy, [fault.test])
            path.write_bytes(plain)
            found += is_found
            verdict = "found" if is_found else "NOT FOUND"
            click.echo(f"{verdict:10} {name}  ({time.monotonic() - start:.0f} s)")
    click.echo(f"{found} of {len(chosen)} faults were found")
    sys.exit(found < len(chosen))


if __name__ == "__main__":
    main()
