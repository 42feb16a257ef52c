"""The docstrings of this project as Markdown, for mkdocstrings: an extension of griffe, which mkdocs.yml names.

    length: T, places of a row.            - `length`: T, places of a row.
    >>> Masking().quota(128)          →    a block of code
    docs/format.md defines it              a link to that page
    pad: int | None = None  # its id       the comment is the docstring of `pad`

Without it Markdown would join the lines about arguments to one paragraph, and fields of dataclasses would be bare.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import griffe

_ARGUMENT = re.compile(r"^((?:\.?[a-z_]\w*)(?:, [a-z_]\w*)*):(?= |$)")
_PAGE = re.compile(r"docs/(\w[\w-]*)\.md")
_COMMENT = re.compile(r"  # (?!noqa|type:)(.*)$")


def markdown(text: str) -> str:
    """A docstring as Markdown."""
    lines, in_list, in_code = list[str](), False, False
    for line in text.splitlines():
        is_code = line.startswith(">>> ") or (in_code and bool(line))
        if is_code != in_code:
            lines.append("```pycon" if is_code else "```")
        if not is_code and (match := _ARGUMENT.match(line)):
            if not in_list and lines and lines[-1]:
                lines.append("")
            names = ", ".join(f"`{name.lstrip('.')}`" for name in match[1].split(", "))
            line, in_list = f"- {names}:{line[match.end() :]}", True
        elif in_list and line.startswith('    "'):  # the values that an argument may have
            line = f"    - {line.strip()}"
        elif not line:
            in_list = False
        in_code = is_code
        lines.append(line if is_code else _PAGE.sub(r"[\1.md](\1.md)", line))
    return "\n".join(lines + ["```"] * in_code)


class Style(griffe.Extension):
    """Called by griffe for everything that it reads."""

    def on_object(self, *, obj: griffe.Object, loader: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, agent: Any, **_: Any) -> None:
        if attr.docstring or not isinstance(node, ast.stmt) or not isinstance(attr.filepath, Path):
            return
        line = attr.filepath.read_text(encoding="utf-8").splitlines()[(node.end_lineno or 1) - 1]
        if match := _COMMENT.search(line):
            attr.docstring = griffe.Docstring(match[1], parent=attr)
