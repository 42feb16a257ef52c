"""Threads that share the work of a build."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Generic, TypeVar

from bertdata.errors import BertdataError

LARGE = 1 << 24  # bytes of an item that is alone in memory in its task: it has a long document
_Task = TypeVar("_Task")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class _Stopped(Exception):
    """Nobody needs the result of this task."""


class Crew(Generic[_Task]):
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
