"""The site of docs/, without mkdocs: what leads where, and what tools/site.py makes. `make docs` builds the site."""

import re
import runpy

import pytest
import yaml
from conftest import ROOT

DOCS = ROOT / "docs"
SITE = runpy.run_path(str(ROOT / "tools" / "site.py"))
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


def test_faults_of_built_pages_are_found(tmp_path):
    (tmp_path / "a").mkdir()
    two = '<h1 id="top">Two</h1><a href="../one.html#here">back</a><a href="#top">x</a>'
    (tmp_path / "a" / "two.html").write_text(two)
    good = '<link href="style.css" rel="stylesheet"><p id="here"><a href="a/two.html#top">x</a>'
    good += '<a href="https://example.org/paper">paper</a><img src="data:image/png;base64,AA">'
    (tmp_path / "one.html").write_text(good)
    (tmp_path / "style.css").write_text("b { background: url(data:image/svg+xml;utf8,x) }")
    assert SITE["faults"](tmp_path) == []
    bad = '<a href="none.html">x</a><a href="a/two.html#gone">x</a><script src="//cdn/x.js">'
    (tmp_path / "one.html").write_text(bad)
    (tmp_path / "style.css").write_text("@import 'https://fonts/x.css'; b { background: url(//host/x.png) }")
    assert SITE["faults"](tmp_path) == [
        "a/two.html links to ../one.html#here, which has no such anchor",
        "one.html loads //cdn/x.js",
        "one.html links to a/two.html#gone, which has no such anchor",
        "one.html links to none.html, which is no file of the site",
        "style.css loads https://fonts/x.css",
        "style.css loads //host/x.png",
    ]
