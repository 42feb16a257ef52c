"""A corpus that every machine with Python has: the docstrings of its installed packages.

    python tools/docstrings.py corpus.txt --bytes 10000000

One document per docstring, a blank line between documents (blank lines inside one are dropped), no docstring twice,
none under 200 characters. The order is that of a hash of the text, so that any prefix is a fair sample.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

SHORTEST = 200  # characters
DOCSTRING = re.compile(r'(?:\A(?:\s|#[^\n]*\n)*|:[ \t]*(?:#[^\n]*)?\n\s+)[rRuU]?"""(.*?)"""', re.DOTALL)


def sources() -> list[Path]:
    """Every Python source file of the standard library and the installed packages."""
    roots = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    found = {path.resolve() for root in roots for path in Path(root).rglob("*.py")}
    return sorted(found)


def docstrings(path: Path) -> Iterator[str]:
    """The docstrings of a module, its classes and its functions, without blank lines.

    Found by what they look like, a string after a colon or at the top of a file: parsing takes over ten times as long.
    """
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return  # not every file that ends in .py is one
    for match in DOCSTRING.finditer(source):
        text = inspect.cleandoc(match[1])
        if len(text) >= SHORTEST:
            yield "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--bytes", type=int, default=10_000_000, help="size to stop at (default: %(default)s)")
    options = parser.parse_args()
    texts: dict[bytes, bytes] = {}
    for path in tqdm(sources(), desc="reading docstrings", unit="file", disable=None):
        for text in docstrings(path):
            encoded = text.encode("utf-8", "replace")
            texts[hashlib.sha256(encoded).digest()] = encoded
    chosen, size = [], 0
    for _, text in sorted(texts.items()):
        if size >= options.bytes:
            break
        chosen.append(text)
        size += len(text) + 2
    if not chosen:
        sys.exit("error: no docstring found in the installed packages")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    temporary = options.out.with_name(options.out.name + ".tmp")
    temporary.write_bytes(b"\n\n".join(chosen) + b"\n")
    os.replace(temporary, options.out)
    print(f"{options.out}: {len(chosen):,} docstrings, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
