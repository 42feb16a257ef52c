"""What the site has beside docs/: a hook of mkdocs, which mkdocs.yml names. `make docs` builds the site.

    changes.md         CHANGELOG.md
    the built pages    refused if a link or an anchor leads nowhere, or if a page loads something from another host

This file needs no mkdocs to be imported.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parent.parent

_LOADS = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("video", "src"), ("link", "href")}


class _Page(HTMLParser):
    """Anchors, links and loaded files of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors, self.links, self.loads = {""}, set[str](), set[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (tag, name) == ("a", "name"):
                self.anchors.add(value or "")
            elif (tag, name) == ("a", "href"):
                self.links.add(value or "")
            elif (tag, name) in _LOADS:
                self.loads.add(value or "")


def faults(site: Path) -> list[str]:
    """What is wrong with built pages: links and anchors that lead nowhere, and files that another host would give."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    wrong = []
    for path, page in pages.items():
        name = path.relative_to(site)
        for target in sorted(page.links | page.loads):
            scheme, host, file, _, anchor = urlsplit(target)
            if scheme or host:
                wrong += [f"{name} loads {target}"] if target in page.loads and scheme != "data" else []
                continue
            to = path if not file else (site / file[1:] if file[0] == "/" else path.parent / unquote(file)).resolve()
            to = to / "index.html" if to.is_dir() else to
            if not to.is_file():
                wrong.append(f"{name} links to {target}, which is no file of the site")
            elif to in pages and unquote(anchor) not in pages[to].anchors:
                wrong.append(f"{name} links to {target}, which has no such anchor")
    for path in sorted(site.rglob("*.css")):
        outside = re.findall(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)", path.read_text(encoding="utf-8"))
        wrong += [f"{path.relative_to(site)} loads {target}" for target in outside]
    return wrong


# ----------------------------------------------------------------------------------------------------- hooks of mkdocs


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    files.append(File.generated(config, "changes.md", abs_src_path=str(ROOT / "CHANGELOG.md")))
    return files


def on_post_build(config: Any) -> None:
    from mkdocs.exceptions import PluginError

    if wrong := faults(Path(config["site_dir"])):
        raise PluginError("\n".join(wrong))
