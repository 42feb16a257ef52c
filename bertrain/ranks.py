"""Ranks: who this process is, sums over all ranks, how an error on one rank ends all of them, and signals."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bertdata.errors import UsageError, counted

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
LONGEST_WAIT = timedelta(days=30)  # for a rank that works by itself, as on a seed of a fine-tuning
LONG_S, SILENT_S = 1800, 600  # a rank may be silent so long while it compiles or writes a checkpoint, and else


@dataclass(frozen=True)
class World:
    """This process among all; the same program runs alone (world_size 1) and under torchrun."""

    rank: int
    world_size: int
    device: torch.device

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def wait_for_others(self, seconds: float) -> None:
        """From now on, a rank that is silent for so long is taken for dead."""
        if self.world_size > 1:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)  # noqa: SLF001

    def together(self, action: Callable[[], T]) -> T:
        """Runs `action` on every rank. If it fails on some, the first of them raises, and the others exit quietly."""
        error: Exception | None = None
        result: Any = None
        try:
            result = action()
        except Exception as failure:
            error = failure
        codes = self.gather(0 if error is None else 2 if isinstance(error, UsageError) else 1)
        failed = [rank for rank, code in enumerate(codes) if code]
        if error is not None and failed[0] == self.rank:
            raise error
        if failed:
            sys.exit(codes[failed[0]])
        return result

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order, on every rank. They are pickled, between processes of one run."""
        values: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def on_first(self, action: Callable[[], object]) -> None:
        """Runs `action` on rank 0 while the others wait; its failure ends all."""
        self.together(action if self.rank == 0 else lambda: None)

    def from_first(self, action: Callable[[], T]) -> T:
        """The result of `action` on rank 0, given to all ranks; its failure ends all."""
        result: list[Any] = [self.together(action if self.rank == 0 else lambda: None)]
        if self.world_size > 1:
            dist.broadcast_object_list(result, src=0, device=self.device)
        return result[0]

    def any(self, condition: bool) -> bool:
        """Whether a condition holds on any rank; all ranks get the same answer."""
        return bool(self.sum(torch.tensor([float(condition)], device=self.device)).item())


class Reading:
    """Numbers on their way from a GPU to the host, which waits for them only when it takes them."""

    def __init__(self, numbers: torch.Tensor) -> None:
        """numbers: a tensor that nothing changes later."""
        self.is_here = numbers.device.type == "cpu"
        self._numbers = numbers
        if not self.is_here:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def take(self) -> list[float]:
        if not self.is_here:
            self._copied.synchronize()
        return self._numbers.tolist()


class Readings:
    """Reads numbers of a GPU one step late, so that the GPU never waits for the host.

    On a GPU a reading gives the numbers of the call before (zeros at first), so that the GPU works on the next step
    while the host waits. All ranks read the same numbers if they pass the same.
    """

    def __init__(self) -> None:
        self._before: Reading | None = None

    def read(self, numbers: torch.Tensor) -> list[float]:
        reading = Reading(numbers)
        if reading.is_here:
            return reading.take()
        before, self._before = self._before, reading
        return before.take() if before else [0.0] * numbers.numel()


@contextlib.contextmanager
def world(patience: timedelta = timedelta(seconds=LONG_S)) -> Iterator[World]:
    """Joins the process group that torchrun describes: nccl on GPUs, gloo on CPUs; alone without torchrun.

    patience: how long a rank waits for the others, which may be compiling, before it gives them up. Raises UsageError
    on a machine with fewer GPUs than processes.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if "TORCHELASTIC_RUN_ID" in os.environ:  # die with the launcher, so that a killed job leaves no writer behind
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        _require_gpus(max(local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        _keep_freed_memory()
    if world_size > 1:
        on_gpu = device.type == "cuda"
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=patience, device_id=device if on_gpu else None)
    yield World(rank, world_size, device)
    if dist.is_initialized():  # not after an error: on GPUs this waits for ranks that may be waiting for this one
        dist.destroy_process_group()


def _require_gpus(processes: int) -> None:
    """Raises UsageError if the processes of this machine are more than its GPUs."""
    if processes > (count := torch.cuda.device_count()):
        sentence = (
            f"{counted(processes, 'rank')} were started on a machine with {counted(count, 'GPU')}, and each needs one "
            f"of its own; give torchrun --nproc-per-node {count}"
        )
        raise UsageError(sentence, "out-of-range", option="nproc_per_node", given=processes)


def _keep_freed_memory() -> None:
    """Tells glibc to keep what is freed, as every step needs it again.

    Otherwise a step gets its largest tensors, such as logits, from the system anew, and each first touch of a page
    costs a fault: 30,000 a step for 600 targets and 30,522 ids. Elsewhere than on glibc this does nothing.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


REPEAT_S = 2.0  # one Ctrl-C may come twice: from the terminal and from torchrun


class Signals:
    """Receives SIGINT, SIGTERM and SIGUSR1 while it is entered. len() says how many came to this rank.

    The first one asks the run to stop after the step. A second Ctrl-C, some seconds later, raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.stopped: str | None = None
        """The signal that the run stops for, once all ranks know."""
        self._received: list[str] = []
        self._first_interrupt = 0.0
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        with contextlib.suppress(ValueError):  # only the main thread may set handlers
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                self._handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def __len__(self) -> int:
        return len(self._received)

    def stop(self) -> None:
        """All ranks have agreed to stop."""
        self.stopped = (self._received or ["a signal to another rank"])[0]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received.append(signal.Signals(number).name)
        if number != signal.SIGINT:
            return
        seconds = time.monotonic()
        if self._first_interrupt and seconds - self._first_interrupt > REPEAT_S:
            raise KeyboardInterrupt
        if not self._first_interrupt:
            self._first_interrupt = seconds
            if os.environ.get("RANK", "0") == "0":
                with contextlib.suppress(OSError):  # print could not be called while it is running
                    os.write(2, b"\nstopping after this step, with a checkpoint; press Ctrl-C again to leave at once\n")
