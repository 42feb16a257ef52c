"""Threads that share the work of a build."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from bertdata.errors import BertdataError

LARGE = 1 << 24  # bytes of an item that no other one of its task is beside in memory: it has a long document
_Task = TypeVar("_Task")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class _Stopped(Exception):
    """The work of this task is not wanted any more."""


class Crew(Generic[_Task]):
    """A number of threads. Each does a task from beginning to end; one for which no task is left helps the others.

    The caller's thread only waits, so it can be interrupted at any time.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._changed = threading.Condition()  # guards all that follows
        self._tasks: deque[tuple[int, _Task]] = deque()
        self._jobs: deque[Callable[[], None]] = deque()  # pieces of tasks for threads that help
        self._num_owners = self._num_helpers = 0  # threads that have a task, and those for which none is left
        self._failed: tuple[int, BaseException] | None = None  # the first task that failed, and how
        self._is_stopped = False

    def run(
        self,
        work: Callable[[Share[_Task]], None],
        tasks: Sequence[_Task],
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """work(share) of each task. They begin in order. on_stop: called when no more work is wanted.

        After a BertdataError later tasks end, and earlier ones go on, because they may fail too: raises the error of
        the first task that failed. After any other error all end.
        """
        self._tasks.extend(enumerate(tasks))
        threads = [
            threading.Thread(target=self._serve, args=(work,), name=f"build-{number}") for number in range(self.workers)
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:  # after Ctrl-C the threads still run
            self._stop()
            on_stop()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        if self._failed:
            raise self._failed[1]

    def _stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._tasks.clear()
            self._changed.notify_all()

    def _serve(self, work: Callable[[Share[_Task]], None]) -> None:
        """What each thread does."""
        is_helper = False
        while True:
            with self._changed:
                while not (self._jobs or self._tasks):
                    if not is_helper:
                        is_helper, self._num_helpers = True, self._num_helpers + 1
                    if self._num_owners == 0:
                        self._changed.notify_all()
                        return
                    self._changed.wait()
                job = self._jobs.popleft() if self._jobs else None
                if job is None:
                    number, task = self._tasks.popleft()
                    self._num_owners += 1
            if job is not None:
                job()
                continue
            try:
                work(Share(self, number, task))
            except _Stopped:
                pass
            except BaseException as error:  # noqa: BLE001  (raised again by `run`)
                with self._changed:
                    if self._failed is None or number < self._failed[0]:
                        self._failed = number, error
                    self._tasks.clear()
                    self._is_stopped |= not isinstance(error, BertdataError)
            finally:
                with self._changed:
                    self._num_owners -= 1
                    self._changed.notify_all()

    def require_wanted(self, number: int) -> None:
        """Raises _Stopped if what this task makes cannot be used any more."""
        failed = self._failed
        if self._is_stopped or (failed and number > failed[0]):
            raise _Stopped

    def result_of(self, work: Callable[[_Item], _Result], item: _Item) -> Future[_Result]:
        """work(item), by a thread that helps; where these have enough to do, by this one."""
        future = Future[_Result]()

        def job() -> None:
            try:
                if self._is_stopped:
                    raise _Stopped
                future.set_result(work(item))
            except BaseException as error:  # noqa: BLE001  (raised again where the result is used)
                future.set_exception(error)

        with self._changed:
            is_handed_out = len(self._jobs) < self._num_helpers  # as many may be at work
            if is_handed_out:
                self._jobs.append(job)
                self._changed.notify()
        if not is_handed_out:
            job()
        return future


class Share(Generic[_Task]):
    """A task of a crew, in the thread that owns it."""

    def __init__(self, crew: Crew[Any], number: int, task: _Task) -> None:
        self._crew, self._number, self.task = crew, number, task

    def in_order(
        self,
        work: Callable[[_Item], _Result],
        items: Iterable[_Item],
        size_of: Callable[[_Item], int] = lambda item: 0,
    ) -> Generator[_Result]:
        """work(item) of each item, in order. This thread makes the items; others may do the work on some of them.

        size_of: bytes of an item. One of more than LARGE is never beside another one in memory: this thread does the
        work on it when all before it are done, and makes the next item after that.

        If an item cannot be made, because of a BertdataError, an error of the work on an earlier item is raised
        instead, if there is one.
        """
        waiting, coming = deque[Future[_Result]](), iter(items)
        while True:
            self._crew.require_wanted(self._number)
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
            waiting.append(self._crew.result_of(work, item))
            while waiting and (waiting[0].done() or len(waiting) > 2 * self._crew.workers):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
