"""How kernels are compiled: at first use, and once on a machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from numba import njit
from numba.core import event


def jit(**options: Any) -> Any:
    """numba's njit without the GIL, cached on disk; without a writable cache each process compiles for itself."""

    def decorate(function: Any) -> Any:
        try:
            return njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:  # numba found no directory it may write its cache to
            return njit(nogil=True, **options)(function)

    return decorate


class _Announcer(event.Listener):
    """Says one line when the first kernel is compiled."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say: Callable[[str], None] | None = say

    def on_start(self, event: Any) -> None:
        if self.say:
            self.say("compiling for this machine; this takes some seconds and is done once ...")
            self.say = None

    def on_end(self, event: Any) -> None:
        pass


def announcing_compilation(say: Callable[[str], None]) -> AbstractContextManager[None]:
    """Calls `say` with one line if a kernel is compiled within the context, and not loaded from the cache."""
    return event.install_listener("numba:compile", _Announcer(say))
