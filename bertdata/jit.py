"""Compile kernels at first use, and cache them on disk.

This is the only file that uses numba's private interface: the cache of compiled functions, dispatchers, compilers,
libraries of code, events and three options. It was tested with numba 0.61.0 and 0.68.1. If a part is missing, or if
BERTDATA_PLAIN_NUMBA is set, kernels are compiled by `njit(cache=True)`: the results are the same, but compiling takes
longer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llvmlite import binding
from numba import config, njit

try:
    if os.environ.get("BERTDATA_PLAIN_NUMBA"):
        raise ImportError
    from numba.core.caching import FunctionCache, IndexDataCacheFile
    from numba.core.codegen import JITCodeLibrary
    from numba.core.compiler import Compiler
    from numba.core.event import Listener, install_listener
    from numba.core.registry import CPUDispatcher
except ImportError:
    FunctionCache = JITCodeLibrary = Compiler = Listener = CPUDispatcher = object
IS_PLAIN = CPUDispatcher is object
_COMMON = [Path(__file__).with_name(name) for name in ("bits.py", "jit.py", "keys.py")]  # modules that kernels import
_OPTIONS = {"nopython": True, "nogil": True, "boundscheck": None, "no_cfunc_wrapper": True}


class _Cache(FunctionCache):
    """numba's cache on disk, which drops a kernel when a file changes that the kernel may import.

    It also skips the definitions of all numba functions, which only compilation needs. Loading these takes 0.3 s, a
    quarter of the start of a build. numba loads them itself before it compiles.
    """

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        stamp = _stamp(function.__code__.co_filename)
        self._cache_file = IndexDataCacheFile(self._cache_path, self._impl.filename_base, stamp)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        # Imported here, because a global rtsys cannot be pickled. In an editable install, the dill of Hugging Face
        # datasets pickles all globals of a module that a function uses.
        from numba.core.runtime import rtsys

        rtsys.initialize(target_context)  # for kernels that make arrays
        try:
            return self._load_overload(sig, target_context)
        except (AttributeError, ImportError):  # numba loads classes of a different version before its stamp
            with suppress(OSError):
                self._cache_file.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):  # a full disk: then each process compiles for itself
            super().save_overload(sig, data)


class _PartLibrary(JITCodeLibrary):
    """The LLVM code of a part. Only the kernels that call the part need machine code."""

    # numba would store the globals of the part in its machine code
    codegen = SimpleNamespace(set_env=lambda name, environment: None)  # noqa: ARG005

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:  # noqa: ARG002
        self._ensure_finalized()
        return 0


class _PartCompiler(Compiler):
    def __init__(self, typing: Any, target: Any, library: Any, *more: Any) -> None:
        super().__init__(typing, target, library or _PartLibrary(target.codegen(), "part"), *more)


class _Part(CPUDispatcher):
    """A function that only kernels call. numba would allow calls from Python, which crash the process."""

    def __init__(self, function: Any, **options: Any) -> None:
        super().__init__(function, pipeline_class=_PartCompiler, **options)

    def __call__(self, *arguments: Any) -> Any:
        raise TypeError(f"{self.py_func.__name__} is a part of kernels, which Python cannot call")


class _Announcer(Listener):
    """Print one line when the first kernel is compiled."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say: Callable[[str], None] | None = say

    def on_start(self, event: Any) -> None:
        if self.say:
            self.say("compiling for this machine; this takes up to half a minute and is done once ...")
            self.say = None

    def on_end(self, event: Any) -> None:
        pass


def jit(*, arrays: bool = False, **options: Any) -> Any:
    """Return a decorator: numba's njit without the GIL, cached on disk if a directory can be written.

    arrays: whether the kernel makes arrays, so that numba must count references, which makes slices slower.
    """
    return partial(_compiled, CPUDispatcher, {"_nrt": arrays, **options})


def part(**options: Any) -> Any:
    """Return a decorator like `jit`, for a function that only kernels call.

    It has no entry point for Python and no machine code of its own, so it compiles faster.
    """
    return partial(_compiled, _Part, {"_nrt": False, "no_cpython_wrapper": True, **options})


def inline() -> Any:
    """Return a decorator like `jit`, for a small function that numba inlines into the calling kernel."""
    return jit(inline="always")


def cpu_has(feature: str) -> bool:
    """Return whether kernels may use a feature of the processor, by LLVM's name for it, such as avx512vbmi2.

    NUMBA_CPU_NAME=generic, NUMBA_CPU_FEATURES and NUMBA_ENABLE_AVX=0 can turn features off.
    """
    if config.CPU_FEATURES is not None:
        return f"+{feature}" in config.CPU_FEATURES.split(",")
    with suppress(RuntimeError):  # LLVM does not know this processor
        return bool(binding.get_host_cpu_features().get(feature) and (config.ENABLE_AVX or "avx" not in feature))
    return False


def announcing_compilation(say: Callable[[str], None]) -> AbstractContextManager[Any]:
    """Call `say` with one line if a kernel is compiled, instead of loaded from the cache, within the context."""
    return nullcontext() if IS_PLAIN else install_listener("numba:compile", _Announcer(say))


def _compiled(dispatcher: Callable[..., Any], options: dict[str, Any], function: Any) -> Any:
    if config.DISABLE_JIT:
        return function
    if IS_PLAIN:
        public = {name: value for name, value in options.items() if name in ("inline", "forceinline")}
        return njit(nogil=True, cache=True, **public)(function)
    kernel = dispatcher(function, targetoptions=_OPTIONS | options)
    if dispatcher is _Part:
        return kernel
    with suppress(RuntimeError):  # numba found no writable directory for its cache
        kernel._cache = _Cache(function)
    return kernel


@cache
def _stamp(file: str) -> list[tuple[str, int, int]]:
    """Return name, time and size of the files that may affect the kernels of a file.

    These are the file itself, the files in the same package of kernels, and _COMMON.
    """
    own = Path(file)
    package = sorted(own.parent.glob("*.py")) if own.parent.name == "kernels" else [own]
    known = [(path.name, path.stat()) for path in [*package, *_COMMON] if path.exists()]
    return [(name, facts.st_mtime_ns, facts.st_size) for name, facts in known]
