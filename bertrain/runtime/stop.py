"""Signals that end a run with a checkpoint: schedulers send them before they end a job, and a user types Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

REPEAT_S = 2.0  # one Ctrl-C may come twice: from the terminal and from torchrun


@contextlib.contextmanager
def leaving_at_interrupt() -> Iterator[None]:
    """Ends the process at once on Ctrl-C, while nothing but imports is done.

    A KeyboardInterrupt would not do: torch imports numpy from C++, which swallows it, and goes on with half of numpy.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        if os.environ.get("RANK", "0") == "0":
            os.write(2, b"interrupted; run the same command again\n")
        os._exit(130)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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
