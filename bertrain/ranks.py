"""Ranks: this process and all others, collective operations, errors that end all ranks, and signals.

Values of the host are exchanged over gloo, even with GPUs, so that no rank waits for its GPU to exchange them. Tensors
of a GPU are exchanged over NCCL.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bertdata.support import UsageError

T = TypeVar("T")
TIMEOUT = timedelta(seconds=1800)  # time limit of a wait; compiling and writing a checkpoint are slow
LONGEST_WAIT = timedelta(days=30)  # for ranks that work alone for hours, such as seeds of a fine-tuning


@dataclass(frozen=True)
class World:
    """This process and the number of all processes. A program runs alone (world_size 1) or under torchrun."""

    rank: int
    world_size: int
    device: torch.device

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks in place: over NCCL on a GPU, else over gloo. Return the tensor."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank, on every rank. They are pickled."""
        values: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def together(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank. If it fails on some, the first of them raises, and the others exit quietly.

        The action must not communicate with other ranks: if it fails on one, the others would wait forever.
        """
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

    def on_first(self, action: Callable[[], T]) -> T | None:
        """Run `action` on rank 0 while the others wait. If it fails, all ranks end."""
        return self.together(action if self.rank == 0 else lambda: None)

    def from_first(self, action: Callable[[], T]) -> T:
        """Return, on all ranks, the result of `action` on rank 0. If it fails, all ranks end."""
        result: Any = self.gather(self.on_first(action))[0]
        return result

    def require_same_on_all_ranks(self, facts: Mapping[str, object]) -> None:
        """Raise UsageError if a fact differs between ranks. facts: options, dataset ids and versions, by name."""
        first = self.from_first(lambda: dict(facts))

        def compare() -> None:
            for name, value in first.items():
                if (given := facts.get(name)) != value:
                    sentence = (
                        f"{name} is {given} on rank {self.rank}, but {value} on rank 0; start all ranks with the same "
                        "options, files and versions"
                    )
                    raise UsageError(sentence, "other-settings", option=name, given=given)

        self.together(compare)


class Reading:
    """Numbers that are copied from a GPU to the host. Only `take` waits for the copy."""

    def __init__(self, numbers: torch.Tensor) -> None:
        """numbers: a tensor that does not change later."""
        self.is_here = numbers.device.type == "cpu"
        self._numbers = numbers.to("cpu", non_blocking=True)  # into pinned memory
        self._copied = None if self.is_here else torch.cuda.current_stream().record_event()

    def take(self) -> list[float]:
        """Return the numbers."""
        if self._copied:
            self._copied.synchronize()
        return self._numbers.tolist()


@contextlib.contextmanager
def world(timeout: timedelta = TIMEOUT) -> Iterator[World]:
    """Join the process group of torchrun: gloo, and NCCL for GPUs. Return a single process without torchrun.

    timeout: how long a rank waits for a silent one before it fails. Raises UsageError if the machine has fewer GPUs
    than processes.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        # PR_SET_PDEATHSIG: die with the launcher, so that no rank outlives it
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if count < (processes := max(local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))):
            sentence = f"{processes} ranks need a GPU each, but this machine has {count}; give --nproc-per-node {count}"
            raise UsageError(sentence, "out-of-range", option="nproc_per_node", given=processes)
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    elif sys.platform == "linux":
        # glibc must keep freed memory, or each step touches new pages (30,000 for 600 targets and 30,522 ids)
        with contextlib.suppress(AttributeError):  # a C library other than glibc
            ctypes.CDLL(None).mallopt(-4, 0)  # M_MMAP_MAX
            ctypes.CDLL(None).mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    if world_size > 1:
        dist.init_process_group(backend, timeout=timeout, device_id=device if device.type == "cuda" else None)
    yield World(rank, world_size, device)
    if dist.is_initialized():  # not after an error: on GPUs this waits for ranks that may be waiting for this one
        dist.destroy_process_group()


REPEAT_S = 2.0  # one Ctrl-C may arrive twice: from the terminal and from torchrun


class Signals(contextlib.ExitStack):
    """A context that receives SIGINT, SIGTERM and SIGUSR1.

    The first signal stops the run after the step. A second Ctrl-C, some seconds later, raises KeyboardInterrupt.
    """

    def __init__(self, ranks: World) -> None:
        super().__init__()
        self.stopped = ""
        """The signal that the run stops for, once all ranks know; else empty."""
        self._ranks, self._received = ranks, dict[str, float]()  # signal → time of its first arrival
        self._sum, self._sent = torch.tensor(0), None  # sum of the last poll

    def __enter__(self) -> Signals:
        with contextlib.suppress(ValueError):  # only the main thread may set handlers
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                self.callback(signal.signal, number, signal.signal(number, self._receive))
        return self

    def poll(self) -> bool:
        """Return whether any rank has received a signal. With several ranks the result is that of the previous call.

        Call it on all ranks after each step. The numbers of signals are summed during the next step: no rank waits.
        """
        is_known = bool(self._received)
        if self._ranks.world_size > 1:
            if self._sent:
                self._sent.wait()
            is_known, self._sum = bool(self._sum), torch.tensor(len(self._received))
            self._sent = dist.all_reduce(self._sum, async_op=True)
        if is_known:
            self.stopped = next(iter(self._received), "a signal to another rank")
        return bool(self.stopped)

    def _receive(self, number: int, frame: object) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        first = self._received.setdefault(name, now)
        if name == "SIGINT" and now > first + REPEAT_S:
            raise KeyboardInterrupt
        if name == "SIGINT" and now == first and self._ranks.rank == 0:
            with contextlib.suppress(OSError):  # a handler must not call print, which may be running
                os.write(2, b"\nstopping after this step, with a checkpoint; press Ctrl-C again to leave at once\n")
