"""Work on several threads, whose results come in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from bertdata.errors import BertdataError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_order(work: Callable[[_Item], _Result], items: Iterable[_Item], workers: int) -> Generator[_Result]:
    """work(item) of each item, in order, by `workers` threads, which are at most two items ahead each.

    The caller's thread makes the items. If that fails with a BertdataError, an error of the work on an earlier item is
    raised instead, if there is one. Close the iterator if you leave it before its end.
    """
    waiting, coming = deque[Future[_Result]](), iter(items)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="build")
    try:
        while True:
            try:
                item = next(coming)
            except StopIteration:
                break
            except BertdataError:
                while waiting:
                    waiting.popleft().result()
                raise
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
