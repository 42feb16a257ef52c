"""A Python iterable as an input: a thread reads it, and checksums tell whether a later call gives the same items."""

from __future__ import annotations

import queue
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from typing import Any

from bertdata.errors import InputError, UsageError


class Items:
    """A Python iterable that is read once, by a thread of its own. So Ctrl-C need not wait for an item.

    It keeps a checksum of what was read for each unit. The record of a finished unit stores it, and a later call
    compares it with what it reads.
    """

    def __init__(self, items: Any, pieces_of: Callable[[Iterator[tuple[int, Any]]], Iterator[Any]]) -> None:
        """pieces_of: (number, item) of all items → pieces. Raises UsageError if `items` cannot be iterated over."""
        if not (hasattr(items, "__iter__") or hasattr(items, "__getitem__")):
            sentence = f"inputs is of type {type(items).__name__}; give names of files, or an iterable of documents"
            raise UsageError(sentence, "malformed", option="inputs", given=items)
        self.checksums = dict[int, int]()  # of the units that were read
        self._items, self._pieces_of, self._is_stopped = items, pieces_of, False
        self._ready = queue.SimpleQueue[tuple[Any, BaseException | None]]()
        self._room = threading.Semaphore(1)
        self._unit, self._finished = -1, deque[tuple[int, int]]()

    def __iter__(self) -> Iterator[Any]:
        """Yield the pieces. What the iterable raises passes unchanged."""
        threading.Thread(target=self._read, daemon=True, name="read-iterable").start()
        while True:
            piece, error = self._ready.get()
            if self._is_stopped:  # so the piece may not be the last, though nothing follows
                raise CancelledError
            if error:
                raise error
            if piece is None:
                return
            self._room.release()
            yield piece

    def _read(self) -> None:
        try:
            for piece in self._pieces_of(self._until_stopped()):
                self._ready.put((piece, None))
                self._room.acquire()
            self._ready.put((None, None))
        except BaseException as error:  # noqa: BLE001  (raised again by the thread that takes the pieces)
            vars(error)["is_of_iterable"] = True  # files.naming leaves it as it is
            self._ready.put((None, error))

    def _until_stopped(self) -> Iterator[tuple[int, Any]]:
        for numbered in enumerate(self._items, 1):
            if self._is_stopped:
                return
            yield numbered

    def stop(self) -> None:
        """Nobody needs more pieces: whoever waits for one gets CancelledError, and the reader ends after its item."""
        self._is_stopped = True
        self._ready.put((None, None))
        self._room.release()

    def expect(self, finished: Mapping[int, int]) -> None:
        """Compare what will be read with the checksums of finished units."""
        self._finished = deque(sorted(finished.items()))

    def add(self, unit: int, *contents: Any) -> None:
        """Add contents of a unit to its checksum. Units come in order. Raises InputError as `end_unit`."""
        if unit != self._unit and self._unit >= 0:
            self.end_unit()
        self._unit = unit
        for content in contents:
            self.checksums[unit] = zlib.crc32(content, self.checksums.get(unit, 0))

    def end_unit(self, *, is_last: bool = False) -> None:
        """Raises InputError if a finished unit was made from other items than those that were read."""
        expected = self._finished.popleft() if self._finished else None
        if (expected and expected != (self._unit, self.checksums.get(self._unit))) or (is_last and self._finished):
            sentence = "the items are not those of the interrupted call; repeat them, or give overwrite=True"
            raise InputError(sentence, "other-settings", option="inputs")
