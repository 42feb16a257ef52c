"""The common part of all HTML pages: each is one file and needs no network.

    numbers ──► JSON ─┐
    page.html ────────┼──► one file for a browser
    body of a page ───┘

page.html has the style and the drawing functions. A body has the sections of one page, and a script that fills them.
"""

from __future__ import annotations

import html
import json
from importlib import resources
from typing import Any


def assemble_page(title: str, body: str, data: dict[str, Any]) -> str:
    """Return a page as HTML. body: HTML. data: the variable `data` of its script; floats must be finite.

    Each byte of a path that is not valid UTF-8 becomes a question mark.
    """
    content = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    frame = resources.files("bertdata.look").joinpath("page.html").read_text(encoding="utf-8")
    head, rest = frame.split("<!--TITLE-->")
    before, rest = rest.split("/*DATA*/")
    between, end = rest.split("<!--BODY-->")
    whole = head + html.escape(title) + before + content + between + body + end
    return whole.encode(errors="replace").decode()
