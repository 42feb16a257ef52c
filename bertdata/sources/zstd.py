"""zstd files by the system's libzstd, which takes windows of up to 2 GiB; pyarrow takes at most 128 MiB."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import byref, c_char_p, c_size_t, c_void_p
from functools import cache
from typing import Any, ClassVar

_CHUNK = 1 << 17  # bytes read at a time
_MOST = 1 << 20  # bytes of a piece


class _Span(ctypes.Structure):
    """ZSTD_inBuffer or ZSTD_outBuffer."""

    _fields_: ClassVar = [("data", c_void_p), ("size", c_size_t), ("position", c_size_t)]


@cache
def library() -> ctypes.CDLL | None:
    """Return libzstd, or None if the system does not have it."""
    try:
        found = ctypes.CDLL("libzstd.so.1")
        found.ZSTD_createDCtx.restype, found.ZSTD_getErrorName.restype = c_void_p, c_char_p
        found.ZSTD_decompressStream.restype, found.ZSTD_DCtx_setParameter.restype = c_size_t, c_size_t  # new in 1.4
    except (OSError, AttributeError):
        return None
    return found


def frames(file: Any, zstd: ctypes.CDLL) -> Iterator[bytes]:
    """Yield the decompressed bytes of all frames of a file. Raises OSError or EOFError if it is damaged."""
    context, piece, left = c_void_p(zstd.ZSTD_createDCtx()), ctypes.create_string_buffer(_MOST), 0
    try:
        zstd.ZSTD_DCtx_setParameter(context, 100, 31)  # ZSTD_d_windowLogMax, and its largest value
        while data := file.read(_CHUNK):
            given, taken = _Span(ctypes.cast(c_char_p(data), c_void_p), len(data)), _Span(None, 0, 0)
            while given.position < given.size or (left and taken.position == taken.size):  # or more is ready
                taken = _Span(ctypes.addressof(piece), _MOST)
                left = zstd.ZSTD_decompressStream(context, byref(taken), byref(given))
                if zstd.ZSTD_isError(c_size_t(left)):
                    raise OSError(zstd.ZSTD_getErrorName(c_size_t(left)).decode())
                yield ctypes.string_at(piece, taken.position)
        if left:
            raise EOFError("it ends inside a frame")
    finally:
        zstd.ZSTD_freeDCtx(context)
