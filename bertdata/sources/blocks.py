"""A block: raw lines or rows of a unit, and the work on them that any thread may do.

docs/format.md defines lines, documents and units.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import InputError
from bertdata.options import TextFormat, function_of
from bertdata.sources.documents import Documents
from bertdata.sources.inputs import Input
from bertdata.sources.streams import UTF_8


class Block(NamedTuple):
    """Raw text of one unit, about 4 MiB, before most of the work on it."""

    unit: int  # number of the unit in the range of an input, or in the plan of a build
    num_bytes: int  # approximate bytes of text
    bytes_read: int  # bytes of the input, or of all inputs, on disk, up to the end of this text
    raw: list[tuple[Source, Any]]  # an input, and lines or rows of it in the form that its `blocks` yields
    is_decoded: bool = False  # whether `raw` holds Documents

    def decode(self) -> Documents:
        """Return the documents after --map. Raises InputError for text that the options do not allow."""
        return Documents.joined(
            [source.checked(raw if self.is_decoded else source.decode(raw)) for source, raw in self.raw]
        )


def runs_of(units: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """Yield (unit, first, stop) for the documents of each unit. units: the unit of each document, ascending."""
    cuts = [0, *((units[1:] != units[:-1]).nonzero()[0] + 1).tolist(), units.size]
    return ((int(units[first]), first, stop) for first, stop in pairwise(cuts) if first < stop)


@dataclass(frozen=True)
class Source(ABC):
    """One input of text."""

    file: Input
    kind: str  # one of INPUT_FORMATS
    form: TextFormat
    number: int = 0  # index of the input

    @property
    def is_one_document(self) -> bool:
        """Whether a whole file of plain text is one document."""
        return self.kind == "text" and self.form.documents == "file"

    @abstractmethod
    def blocks(self, base: int, is_wanted: Callable[[int], bool]) -> Iterator[Block]:
        """Yield the text of the requested units.

        base: offset of this input in its range of inputs, which is cut into units.
        """

    @abstractmethod
    def decode(self, raw: Any) -> Documents:
        """Return documents in valid UTF-8, and rows without a text, from the raw contents that `blocks` yields."""

    @abstractmethod
    def place(self, start: int) -> str:
        """Return 'file, line n' or 'file, row n' for a value of Documents.starts."""

    def invalid_place(self, start: int) -> str:
        """Return 'file, byte n' or 'file, row n' for a value of Documents.invalid."""
        return self.place(start)

    def checked(self, found: Documents) -> Documents:
        """Return the documents after --map, with the number of the input. Raises InputError like `Block.decode`."""
        form, first = self.form, found.first_replaced if self.form.strict else None
        bad = found.bad[:1] if form.on_error == "fail" else ()
        if bad and not (first and first[1] < bad[0].place):
            sentence = f"{self.place(bad[0].place)}: {bad[0].why}; {bad[0].why.advice}, or use --on-error skip"
            raise InputError(sentence, "bad-row", option="inputs", given=self.file.name)
        if first:
            name, where = "UTF-8" if form.encoding == UTF_8 else form.encoding, self.invalid_place(first[1])
            sentence = f"{where} is not valid {name}; correct it, change --encoding, or build without --strict"
            if self.kind == "jsonl":
                sentence = f"{where} has a lone surrogate or invalid bytes; correct it, or build without --strict"
            raise InputError(sentence, "not-text", option="inputs", given=self.file.name)
        if form.maps:
            found = mapped(found, form.maps, self.place)
        inputs = np.full(found.starts.size, self.number)
        return replace(found, inputs=inputs, bad=[each._replace(input=self.number) for each in found.bad])


def code_of(spec: str) -> str:
    """Return an identifier of the code of "module:function": the SHA-256 of its module, and versions.

    The versions are the __version__ of its package, if any, and of Python, which determines the Unicode tables.
    """
    module = importlib.import_module(name := spec.partition(":")[0])
    path = Path(getattr(module, "__file__", None) or "")
    digest = sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else "unknown"
    version = getattr(sys.modules[name.partition(".")[0]], "__version__", "without a version")
    return f"{digest}, {version}, Python {sys.version_info.major}.{sys.version_info.minor}"


def mapped(documents: Documents, specs: Sequence[str], place: Callable[[int], str]) -> Documents:
    """Apply functions to each text. Return the remaining documents, in order, with the changed texts.

    specs: specifications for `function_of`, applied in order. place: returns the name of a place in the input. Raises
    InputError if a function fails or returns neither a text nor None.
    """
    functions = [(spec, function_of(spec, "--map")) for spec in specs]
    offsets, view = documents.offsets.tolist(), documents.text.data
    texts, left = list[bytes](), list[int]()
    for number, start in enumerate(documents.starts.tolist()):
        text: Any = str(view[offsets[number] : offsets[number + 1] - 1], "utf-8")
        for spec, function in functions:
            try:
                text = function(text)
                if isinstance(text, str):
                    text.encode()
            except Exception as error:  # any exception of the user's function
                sentence = f"{place(start)}: --map {spec} failed ({type(error).__name__}: {error}); fix it or the text"
                raise InputError(sentence, "function-failed", option="map", given=spec) from None
            if not isinstance(text, str | None):
                kind = type(text).__name__
                sentence = f"{place(start)}: --map {spec} returned a {kind}; it must return a text or None"
                raise InputError(sentence, "bad-function", option="map", given=spec)
            if text is None:
                break
        else:
            texts.append(text.encode())
            left.append(number)
    columns = documents.starts, documents.replaced, documents.invalid
    kept = (column[left].tolist() for column in columns)
    num_removed = documents.starts.size - len(left)
    return replace(Documents.from_texts(texts, *kept), bad=documents.bad, num_removed=num_removed)
