"""How kernels are compiled: at first use, and once on a machine.

What is used here of numba's private interface (the cache of compiled functions, dispatchers, the features of the
processor) was tried with 0.61.0 and 0.68.1.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from numba.core import config, event
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.codegen import get_host_cpu_features
from numba.core.registry import CPUDispatcher

_COMMON = [Path(__file__).with_name(name) for name in ("bits.py", "jit.py", "keys.py")]  # that kernels import

_OPTIONS = {"nopython": True, "nogil": True, "boundscheck": None, "no_cfunc_wrapper": True}


class _Cache(FunctionCache):
    """numba's cache on disk, which forgets a kernel when a file changes that it may import.

    And without what only compiling needs: the definitions of all functions that numba knows. Loading these takes 0.3 s,
    a quarter of the start of a build. numba loads them itself before it compiles.
    """

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        stamp = _stamp(function.__code__.co_filename)
        self._cache_file = IndexDataCacheFile(self._cache_path, self._impl.filename_base, stamp)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        # Imported here: a global rtsys cannot be pickled. The dill of Hugging Face datasets pickles all globals of a
        # module of an editable install when a function names it.
        from numba.core.runtime import rtsys

        rtsys.initialize(target_context)  # kernels make arrays
        try:
            return self._load_overload(sig, target_context)
        except (AttributeError, ImportError):  # numba reads the records' classes of another version before its stamp
            with suppress(OSError):
                self._cache_file.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):  # a full disk; then each process compiles for itself
            super().save_overload(sig, data)


@cache
def _stamp(file: str) -> list[tuple[str, int, int]]:
    """Name, time and size of the files whose change may change the kernels of a file.

    They are the file itself, those beside it in a package of kernels, and _COMMON.
    """
    own = Path(file)
    beside = sorted(own.parent.glob("*.py")) if own.parent.name == "kernels" else [own]
    known = [(path.name, path.stat()) for path in [*beside, *_COMMON] if path.exists()]
    return [(name, facts.st_mtime_ns, facts.st_size) for name, facts in known]


def jit(**options: Any) -> Any:
    """numba's njit without the GIL, cached on disk; without a writable cache each process compiles for itself."""
    return partial(_compiled, CPUDispatcher, options)


def part(**options: Any) -> Any:
    """As `jit`, for a function that only kernels call. It has no entry for Python, which takes long to compile."""
    return partial(_compiled, _Part, {"no_cpython_wrapper": True, **options})


def inline() -> Any:
    """As `jit`, for a small function that numba writes out where a kernel calls it."""
    return jit(inline="always")


class _Part(CPUDispatcher):
    """numba would let Python call what is not there, which ends the process."""

    def __call__(self, *arguments: Any) -> Any:
        raise TypeError(f"{self.py_func.__name__} is a part of kernels, which Python cannot call")


def _compiled(dispatcher: Callable[..., Any], options: dict[str, Any], function: Any) -> Any:
    if getattr(config, "DISABLE_JIT", False):
        return function
    kernel = dispatcher(function, targetoptions=_OPTIONS | options)
    with suppress(RuntimeError):  # numba found no directory it may write its cache to
        kernel._cache = _Cache(function)
    return kernel


def cpu_has(feature: str) -> bool:
    """Whether kernels may use a feature of the processor, by LLVM's name of it, such as avx512vbmi2.

    NUMBA_CPU_NAME=generic or NUMBA_CPU_FEATURES can withhold it.
    """
    chosen = getattr(config, "CPU_FEATURES", None)
    features = get_host_cpu_features() if chosen is None else chosen
    return f"+{feature}" in features.split(",")


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
