"""What every page that we write has in common: it is one file, and it needs no network.

    numbers ──► JSON ─┐
    page.html ────────┼──► one file, which a browser draws
    body of a page ───┘

page.html has the style, and the functions that draw. A body has the sections of one page, and a script that fills them.
"""

from __future__ import annotations

import html
import json
from importlib import resources
from typing import Any


def assemble_page(title: str, body: str, data: dict[str, Any]) -> str:
    """The page as HTML, which UTF-8 can hold. body: HTML. data: what its script finds in `data`, with finite floats.

    Bytes of a path that are not UTF-8 are a ? each.
    """
    content = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    frame = resources.files("bertdata.look").joinpath("page.html").read_text(encoding="utf-8")
    head, rest = frame.split("<!--TITLE-->")
    before, rest = rest.split("/*DATA*/")
    between, end = rest.split("<!--BODY-->")
    whole = head + html.escape(title) + before + content + between + body + end
    return whole.encode(errors="replace").decode()
