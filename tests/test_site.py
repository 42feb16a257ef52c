"""The site of docs/, without mkdocs: what leads where, and what tools/site.py makes. `make docs` builds the site."""

import re

import pytest
import yaml
from conftest import ROOT

DOCS = ROOT / "docs"
MADE = {"changes.md"}  # by tools/site.py
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")}


def prose(text):
    """A page without its blocks of code."""
    return re.sub(r"^(```|~~~).*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)


def links(page):
    """(text, path from docs/, anchor) of each link of a page to something that is not on another host."""
    for text, target in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", prose(PAGES[page])):
        if "://" not in target and not target.startswith("mailto:"):
            file, _, anchor = target.partition("#")
            path = (DOCS / page).parent / file if file else DOCS / page
            yield text, path.resolve(), anchor


def anchors(page):
    """The anchors that GitHub and the site both give to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(PAGES[page]), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_link_leads_to_a_file_of_docs_and_an_anchor_of_it(page):
    for text, path, anchor in links(page):
        assert path.is_file(), (text, path)
        assert path.is_relative_to(DOCS), f"{path} is not on the site; name it, and do not link it"
        if anchor:
            assert anchor in anchors(path.relative_to(DOCS).as_posix()), (text, anchor)


def test_every_page_is_in_the_navigation_once():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    named = [page for group in nav for pages in group.values() for page in pages]
    assert sorted(named) == sorted({*PAGES} | MADE)
    assert named[0] == "index.md"
