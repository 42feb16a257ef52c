"""A corpus from every machine with Python: the docstrings of its installed packages.

Each docstring of at least 200 characters is a document, without its blank lines; a blank line ends it. Repeated
docstrings are dropped. They are ordered by a hash of the text, so any prefix is a fair sample.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from bertdata.support import InputError, write_file

SHORTEST = 200  # characters
DOCSTRING = re.compile(r'(?:\A(?:\s|#[^\n]*\n)*|:[ \t]*(?:#[^\n]*)?\n\s+)[rRuU]?"""(.*?)"""', re.DOTALL)


def write(path: Path, num_bytes: int) -> tuple[int, int]:
    """Write a corpus of about `num_bytes` bytes, completely or not at all. Return its numbers of docstrings and bytes.

    It is smaller if the packages have less text. Reading all Python source files takes some seconds. Raises InputError
    if there is no docstring.
    """
    texts: dict[bytes, bytes] = {}
    for source in tqdm(sources(), desc="reading docstrings", unit="file", disable=None):
        for text in docstrings(source):
            encoded = text.encode("utf-8", "replace")
            texts[hashlib.sha256(encoded).digest()] = encoded
    chosen, size = list[bytes](), 0
    for _, encoded in sorted(texts.items()):
        if size >= num_bytes:
            break
        chosen.append(encoded)
        size += len(encoded) + 2
    if not chosen:
        sentence = "the installed packages have no docstrings to build a text from; build your own text"
        raise InputError(sentence, "empty")
    write_file(path, b"\n\n".join(chosen) + b"\n")
    return len(chosen), size


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and its functions, without blank lines.

    A regular expression finds them, after a colon or at the top of a file: parsing takes over ten times as long.
    """
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return  # not every .py file is Python source
    for match in DOCSTRING.finditer(source):
        text = inspect.cleandoc(match[1])
        if len(text) >= SHORTEST:
            yield "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


def sources() -> list[Path]:
    """Return every Python source file of the standard library and the installed packages."""
    roots = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    return sorted({path.resolve() for root in roots for path in Path(root).rglob("*.py")})
