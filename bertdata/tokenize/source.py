"""A tokenizer.json and data derived from it, computed on first use, and cached on disk if that is slow."""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken

from bertdata.errors import TokenizerError, UsageError
from bertdata.files import cache_directory, make_directory, write_file
from bertdata.tokenize.models import read_only

MOST_KEPT = 1 << 30  # bytes of the cached files of all tokenizers


class NotAnObject(TokenizerError):
    """A file is not a JSON object."""


class Source:
    """A tokenizer.json. Thread-safe."""

    special_is_text = True
    """Whether `library` treats special tokens in a text as plain text."""
    is_as_stored = True
    """Whether `content` still has the added tokens and the post-processor of the file."""
    outline: dict[str, Any]
    """`content` without the vocabulary and the merges, with the normalizer and the pre-tokenizer in the library's
    current form; {}: not computed yet."""
    added: dict[int, AddedToken]
    """Id → added token."""

    def __init__(self, spelled: bytes, *settings: object) -> None:
        """spelled: the bytes of tokenizer.json. settings: all other data that determines the cached values."""
        self._spelled, self._lock, self.outline = spelled.removeprefix(b"\xef\xbb\xbf"), threading.RLock(), {}
        self._key = hashlib.sha256(self._spelled)
        self._key.update(repr((settings, tokenizers.__version__, np.__version__, _code())).encode())
        self.unused: list[tokenizers.Tokenizer] = []  # parsed, but not yet the library of a source

    def allowing_special(self) -> Source:
        """Return the same source with a library that recognizes special tokens in a text."""
        other = copy.copy(self)
        other.special_is_text = False
        other.__dict__.pop("library", None)
        self.forget()
        return other

    @cached_property
    def content(self) -> dict[str, Any]:
        """JSON that a dataset stores. Raises NotAnObject."""
        collects = gc.isenabled()
        gc.disable()  # the garbage collector doubles the time to create many objects
        try:
            changed = {name: self.outline[name] for name in ("added_tokens", "post_processor") if name in self.outline}
            no_limits = {"truncation": None, "padding": None}  # a dataset has whole documents
            return {} | json.loads(self._spelled.decode()) | no_limits | changed
        except (TypeError, ValueError, RecursionError) as error:
            sentence = f"the `tokenizers` library cannot read this tokenizer: {error}"
            raise NotAnObject(sentence, "tokenizer-unreadable", option="tokenizer") from None
        finally:
            (gc.enable if collects else gc.disable)()

    @cached_property
    def library(self) -> tokenizers.Tokenizer:
        """The tokenizer of `tokenizers`. Raises TokenizerError if the JSON is not a tokenizer."""
        with self._lock:
            library = self.unused.pop() if self.unused else self.parse()
        library.encode_special_tokens = self.special_is_text
        return library

    def parse(self) -> tokenizers.Tokenizer:
        """Return a new tokenizer of the library. Raises TokenizerError if the JSON is not a tokenizer."""
        try:
            # The library parses the scores of Unigram with an error in the last bit that depends on their spelling.
            if self.is_as_stored and b'"Unigram"' not in self._spelled and b'"unk_id"' not in self._spelled:
                with suppress(Exception):
                    library = tokenizers.Tokenizer.from_buffer(self._spelled)
                    library.no_truncation()
                    library.no_padding()
                    return library
            return tokenizers.Tokenizer.from_str(json.dumps(self.content, ensure_ascii=False))
        except TokenizerError:
            raise
        except BaseException as error:  # the library raises plain Exception, or panics
            if not is_failure(error):
                raise
            sentence = f"the `tokenizers` library cannot read this tokenizer: {error}"
            raise TokenizerError(sentence, "tokenizer-unreadable", option="tokenizer") from None

    def model(self) -> dict[str, Any]:
        """Return the JSON of the model, with the scores of Unigram as the library parsed them."""
        is_unigram = self.outline["model"]["type"] == "Unigram"
        return (json.loads(self.library.to_str()) if is_unigram else self.content)["model"]

    def vocabulary(self, *, with_added: bool = False) -> dict[str, int]:
        """Return token → id."""
        tokens = self.content["model"]["vocab"]
        known = tokens if isinstance(tokens, dict) else {token: number for number, (token, _) in enumerate(tokens)}
        return known | {token.content: number for number, token in self.added.items()} if with_added else known

    def forget(self) -> None:
        """Free the JSON. It is parsed again on the next use."""
        self.__dict__.pop("content", None)

    def kept(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the cached values of a name, or else the result of `make`, after caching it.

        The values are arrays, which become read-only, and JSON values.
        """
        return self.read(name) or self.keep(name, make())

    def read(self, name: str) -> dict[str, Any]:
        """Return the cached values of a name, {} if there are none."""
        with suppress(OSError, ValueError, UsageError):  # missing file, damaged file, or no cache directory
            return _values(self._path(name).read_bytes())
        return {}

    def keep(self, name: str, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values, and write them to the cache if possible."""
        values = {name: read_only(v) if isinstance(v, np.ndarray) else v for name, v in values.items()}
        with suppress(OSError, UsageError):
            _keep(self._path(name), values)
        return values

    def _path(self, name: str) -> Path:
        key = self._key.copy()
        key.update(name.encode())
        return cache_directory() / "tokenizers" / key.hexdigest()


def is_failure(error: BaseException) -> bool:
    """Return whether an error comes from the library, including panics of its Rust code, unlike KeyboardInterrupt."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@cache
def _code() -> list[tuple[str, int, int]]:
    """Return name, time and size of each source file whose code computes cached values."""
    facts = [(path.name, path.stat()) for path in sorted(Path(__file__).parent.rglob("*.py"))]
    return [(name, fact.st_mtime_ns, fact.st_size) for name, fact in facts]


def _values(file: bytes) -> dict[str, Any]:
    """Return the values in a file of the cache. Raises ValueError if the file is damaged."""
    if zlib.crc32(file[4:]) != int.from_bytes(file[:4], "little"):
        raise ValueError
    end = file.index(b"\n", 4)
    rest, shapes = json.loads(file[4:end])
    arrays, start = {}, end + 1
    for name, (dtype, shape) in shapes.items():
        start += -start % 64
        arrays[name] = np.ndarray(shape, dtype, file, start)
        start += arrays[name].nbytes
    return arrays | rest


def _keep(path: Path, values: dict[str, Any]) -> None:
    """Write a file of the cache, and remove the oldest files if all files together exceed MOST_KEPT bytes.

    The file has the CRC-32 of its remaining bytes, a line of JSON, and arrays at multiples of 64 bytes.
    """
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    rest = {name: value for name, value in values.items() if name not in arrays}
    file = bytearray(4) + json.dumps([rest, {name: (a.dtype.str, a.shape) for name, a in arrays.items()}]).encode()
    file += b"\n"
    for array in arrays.values():
        file += bytes(-len(file) % 64) + array.tobytes()
    file[:4] = zlib.crc32(memoryview(file)[4:]).to_bytes(4, "little")
    make_directory(path.parent)
    write_file(path, bytes(file))
    known = sorted(((each, each.stat()) for each in path.parent.iterdir()), key=lambda pair: -pair[1].st_mtime_ns)
    size = 0
    for each, facts in known:
        size += facts.st_size
        if size > MOST_KEPT:
            each.unlink(missing_ok=True)
