"""How kernels are compiled: at first use, once on a machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from numba import njit
from numba.core import event


def jit(**options: Any) -> Any:
    """njit, compiled at first use and cached on disk where that is possible, else once per process."""

    def decorate(function: Any) -> Any:
        try:
            return njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:  # numba found no directory it may write its cache to
            return njit(nogil=True, **options)(function)

    return decorate


class _Told(event.Listener):
    def __init__(self, say: Callable[[str], None]) -> None:
        self.say: Callable[[str], None] | None = say

    def on_start(self, event: Any) -> None:
        if self.say:
            self.say("compiling for this machine, which is done once and takes some seconds ...")
            self.say = None

    def on_end(self, event: Any) -> None:
        pass


def compiling_told(say: Callable[[str], None]) -> AbstractContextManager[None]:
    """`say` is told if a kernel must be compiled within the context, instead of being found in the cache."""
    return event.install_listener("numba:compile", _Told(say))
