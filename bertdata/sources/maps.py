"""What --map does: documents → the documents that a user's functions make of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from bertdata.errors import InputError
from bertdata.options import function_of
from bertdata.sources.documents import Documents


def code_of(spec: str) -> str:
    """What tells whether the code of "module:function" changed: the SHA-256 of its module, and the versions.

    These are the __version__ of its package, if there is one, and that of Python, on which Unicode's tables depend.
    """
    module = importlib.import_module(name := spec.partition(":")[0])
    path = Path(getattr(module, "__file__", None) or "")
    digest = sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else "unknown"
    version = getattr(sys.modules[name.partition(".")[0]], "__version__", "without a version")
    return f"{digest}, {version}, Python {sys.version_info.major}.{sys.version_info.minor}"


def mapped(documents: Documents, specs: Sequence[str], place: Callable[[int], str]) -> Documents:
    """The documents that the functions leave, in order, with what they made of each text.

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
    return replace(Documents.of(texts, *kept), bad=documents.bad, num_removed=num_removed)
