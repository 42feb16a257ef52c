"""What the site has beside docs/: a hook of mkdocs, which mkdocs.yml names. `make docs` builds the site.

    changes.md         CHANGELOG.md
    the built pages    refused if one loads something from another host; mkdocs itself refuses links that lead nowhere

This file needs no mkdocs to be imported.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OUTSIDE = r"""["']?((?:https?:)?//[^"')> ]+)"""
LOADS = re.compile(
    rf"<(?:script|img|iframe|source|video)\b[^>]*\bsrc={OUTSIDE}|<link\b[^>]*\bhref={OUTSIDE}|(?:url\(|@import)\s*{OUTSIDE}"
)


def faults(site: Path) -> list[str]:
    """What pages and styles load from another host."""
    paths = sorted(path for path in site.rglob("*") if path.suffix in (".html", ".css"))
    loads = {path.relative_to(site): LOADS.finditer(path.read_text(encoding="utf-8")) for path in paths}
    return [f"{name} loads {match[match.lastindex or 0]}" for name, matches in loads.items() for match in matches]


# ----------------------------------------------------------------------------------------------------- hooks of mkdocs


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    files.append(File.generated(config, "changes.md", abs_src_path=str(ROOT / "CHANGELOG.md")))
    return files


def on_post_build(config: Any) -> None:
    from mkdocs.exceptions import PluginError

    if wrong := faults(Path(config["site_dir"])):
        raise PluginError("\n".join(wrong))
