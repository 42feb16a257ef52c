"""A block: lines or rows of a unit as they were read, and the work on them that any thread may do.

docs/format.md says what a line, a document and a unit are.
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
    """Text of one unit that was read, about 4 MiB, before most of the work on it."""

    unit: int  # its number in the range of an input, or in the plan of a build
    num_bytes: int  # more or less
    bytes_read: int  # of the input on disk, or of all inputs, up to the end of this text
    raw: list[tuple[Source, Any]]  # an input, and lines or rows of it, as its `blocks` gives them
    is_decoded: bool = False  # whether `raw` has Documents

    def decode(self) -> Documents:
        """Return the documents, as --map makes them. Raises InputError for what the options do not allow."""
        return Documents.joined(
            [source.checked(raw if self.is_decoded else source.decode(raw)) for source, raw in self.raw]
        )


def runs_of(units: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """Yield unit, first and stop for the documents of each unit. units: of documents, ascending."""
    cuts = [0, *((units[1:] != units[:-1]).nonzero()[0] + 1).tolist(), units.size]
    return ((int(units[first]), first, stop) for first, stop in pairwise(cuts) if first < stop)


@dataclass(frozen=True)
class Source(ABC):
    """One input of text."""

    file: Input
    kind: str  # one of INPUT_FORMATS
    form: TextFormat
    number: int = 0  # of the input

    @property
    def is_one_document(self) -> bool:
        """Whether all of a file of plain text is one document, which no line ends."""
        return self.kind == "text" and self.form.documents == "file"

    @abstractmethod
    def blocks(self, base: int, is_wanted: Callable[[int], bool]) -> Iterator[Block]:
        """Yield the text of the units that are wanted.

        base: offset of this input in a range of inputs that is cut into units.
        """

    @abstractmethod
    def decode(self, raw: Any) -> Documents:
        """Return the documents of what `blocks` gives, in valid UTF-8, and rows without a text."""

    @abstractmethod
    def place(self, start: int) -> str:
        """Return 'file, line n' or 'file, row n' of one of Documents.starts."""

    def invalid_place(self, start: int) -> str:
        """Return 'file, byte n' or 'file, row n' of one of Documents.invalid."""
        return self.place(start)

    def checked(self, found: Documents) -> Documents:
        """Return documents as --map makes them, with the number of the input. Raises InputError as `Block.decode`."""
        form, first = self.form, found.first_replaced if self.form.strict else None
        bad = found.bad[:1] if form.on_error == "fail" else ()
        if bad and not (first and first[1] < bad[0].place):
            sentence = f"{self.place(bad[0].place)}: {bad[0].why}; {bad[0].why.advice}, or use --on-error skip"
            raise InputError(sentence, "bad-row", option="inputs", given=self.file.name)
        if first:
            name, where = "UTF-8" if form.encoding == UTF_8 else form.encoding, self.invalid_place(first[1])
            sentence = f"{where} is not valid {name}; correct it, name another --encoding, or build without --strict"
            if self.kind == "jsonl":
                sentence = f"{where} has a lone surrogate or invalid bytes; correct it, or build without --strict"
            raise InputError(sentence, "not-text", option="inputs", given=self.file.name)
        if form.maps:
            found = mapped(found, form.maps, self.place)
        inputs = np.full(found.starts.size, self.number)
        return replace(found, inputs=inputs, bad=[each._replace(input=self.number) for each in found.bad])


def code_of(spec: str) -> str:
    """Return what tells whether the code of "module:function" changed: the SHA-256 of its module, and the versions.

    These are the __version__ of its package, if there is one, and that of Python, on which Unicode's tables depend.
    """
    module = importlib.import_module(name := spec.partition(":")[0])
    path = Path(getattr(module, "__file__", None) or "")
    digest = sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else "unknown"
    version = getattr(sys.modules[name.partition(".")[0]], "__version__", "without a version")
    return f"{digest}, {version}, Python {sys.version_info.major}.{sys.version_info.minor}"


def mapped(documents: Documents, specs: Sequence[str], place: Callable[[int], str]) -> Documents:
    """Return the documents that the functions leave, in order, with what they made of each text.

    specs: as `function_of` takes them; they are applied one after the other. place: names a place in the input. Raises
    InputError where a function fails or gives neither a text nor None.
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
            except Exception as error:  # whatever the function of a user raises
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
