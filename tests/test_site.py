"""The site of docs/, without mkdocs: what leads where, and what tools/site.py makes. `make docs` builds the site."""

import importlib
import io
import re
import runpy
import tokenize
from pathlib import Path

import click
import pytest
import yaml

ROOT = Path(__file__).parent.parent
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


# ------------------------------------------------------------------------------------------------------------ the pages


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


def test_the_site_fetches_nothing_and_takes_no_warning():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert settings["strict"] is True
    assert settings["theme"]["font"] is False
    assert {value for part in settings["validation"].values() for value in part.values()} == {"warn"}


def test_the_ten_questions_are_those_of_the_checklist_and_each_has_its_answer():
    checklist = (ROOT / "CONTRIBUTING.md").read_text().partition("ten questions")[2].partition("\n## ")[0]
    asked = re.findall(r"^\d+\. (.*)$", checklist, re.MULTILINE)
    answered = re.findall(r"^\d+\. \[(.*?)\]", PAGES["index.md"], re.MULTILINE)
    assert len(asked) == 10
    assert answered == asked
    targets = [path.relative_to(DOCS).as_posix() for text, path, _ in links("index.md") if text in asked]
    assert len(set(targets)) == 10  # their anchors are checked with those of all links
    assert "index.md" not in targets


# ----------------------------------------------------------------------------------------------------------- the errors


@pytest.fixture(scope="module")
def errors():
    return SITE["errors"]()


def test_no_error_of_the_source_is_missing(errors):
    """Counted by the tokens of the source: the name of one of our errors where it is called."""
    names = {"UsageError", "InputError", "TokenizerError", "BuildError", "DatasetError", "RemoteError", "StateError",
             "TrainingError", "BadRow"}  # fmt: skip
    assert names | {"BertdataError"} == SITE["error_classes"](SITE["sources"]())
    listed, raised = {(error.file, error.line) for error in errors}, 0
    for path in sorted([*(ROOT / "bertdata").rglob("*.py"), *(ROOT / "bertrain").rglob("*.py")]):
        text = path.read_text(encoding="utf-8")
        found = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.string.strip()]
        for before, token, after in zip(found, found[1:], found[2:], strict=False):
            if token.string in names and after.string == "(" and before.string in ("raise", "return", "=", "."):
                raised += 1
                rest = text.splitlines()[token.start[0] - 1][token.start[1] :]
                if rest.startswith(("UsageError(str(error)", "DatasetError(warnings[0]")):
                    continue  # which repeat the message of another error
                assert (path.relative_to(ROOT).as_posix(), token.start[0]) in listed
    assert raised > 400


def test_every_message_is_one_sentence_that_a_user_can_read(errors):
    for error in errors:
        words = re.sub(r"⟨[\w ]+⟩|…", "", error.message)
        is_prefix = error.message.endswith(": …")  # of the message of another error
        assert is_prefix or len(re.findall(r"[A-Za-z]{2,}", words)) >= 2, error
        assert not re.search(r"[⟨⟩\n\\]|\. [A-Z]", words), error
        assert not re.search(r"[.!?:;,]$", error.message), error
        assert words.count("(") == words.count(")"), error


def test_every_file_with_errors_has_a_group_and_every_group_has_errors_and_a_page(errors):
    groups = SITE["GROUPS"]
    assert {SITE["group_of"](error.file) for error in errors} == {*groups}
    assert {page for page, _ in groups.values()} <= {*PAGES}
    with pytest.raises(KeyError, match="bertdata/new.py has errors"):
        SITE["group_of"]("bertdata/new.py")


def test_the_page_and_the_search_have_the_words_of_an_error_that_a_user_sees():
    page, message = SITE["error_index"](), "<em>directory</em> already holds a dataset; use --overwrite to replace it"
    assert f"{message}, or another --out</li>" in page
    assert "is not a dataset: it has no manifest.json" in page
    places = [
        {"location": place, "title": "", "text": ""} for place in ("a.html", "errors.html", "errors.html#a-group")
    ]
    found = SITE["searchable"]({"config": {}, "docs": places})
    assert found["config"] == {}
    assert found["docs"][:2] == places[:2]
    (one,) = (place for place in found["docs"] if place["title"].startswith(message))
    assert one["text"] == "Building a dataset"
    assert f'<li id="{one["location"].partition("#")[2]}">{one["title"]}</li>' in page


def test_an_expression_is_shown_as_the_user_reads_it():
    import ast

    def shown(expression):
        return SITE["_words"](ast.parse(expression, mode="eval").body, {"NAME": "a.json"})

    assert shown("f'{self.path} has {n} rows of {len(x)}'") == "⟨path⟩ has … rows of …"
    assert shown("f'{NAME} of {where.NAME}'") == "a.json of a.json"
    assert shown("f'{name}{advice if x else 1}' + ' end'") == "⟨name⟩⟨advice⟩ / 1 end"
    assert shown("'one' if x else f'two {most_rows}'") == "one / two ⟨most rows⟩"
    assert shown("' (more)' * few") == " (more)"


# --------------------------------------------------------------------------------------------------------- the commands


def test_the_page_of_commands_has_every_option_of_every_command():
    index = SITE["command_index"]()
    for program, module in (("bertdata", "bertdata.cli"), ("bertrain", "bertrain.__main__")):
        group = importlib.import_module(module).main
        above = click.Context(group, info_name=program)
        for name in group.list_commands(above):
            section = index.partition(f"\n### {program} {name}\n")[2].partition("\n## ")[0].partition("\n### ")[0]
            options = [option for option in group.get_command(above, name).params if isinstance(option, click.Option)]
            assert f"Usage: {program} {name}" in section
            for option in options:
                assert option.hidden or max(option.opts, key=len) in section, (name, option.opts)


# -------------------------------------------------------------------------------------------------------- built pages


def test_faults_of_built_pages_are_found(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "two.html").write_text(
        '<h1 id="top">Two</h1><a href="../one.html#here">back</a><a href="#top">x</a>'
    )
    good = '<link href="style.css" rel="stylesheet"><p id="here"><a href="a/two.html#top">x</a>'
    good += '<a href="https://example.org/paper">paper</a><img src="data:image/png;base64,AA">'
    (tmp_path / "one.html").write_text(good)
    (tmp_path / "style.css").write_text("b { background: url(data:image/svg+xml;utf8,x) }")
    assert SITE["faults"](tmp_path) == []
    (tmp_path / "one.html").write_text(
        '<a href="none.html">x</a><a href="a/two.html#gone">x</a><script src="//cdn/x.js">'
    )
    (tmp_path / "style.css").write_text("@import 'https://fonts/x.css'; b { background: url(//host/x.png) }")
    assert SITE["faults"](tmp_path) == [
        "a/two.html links to ../one.html#here, which has no such anchor",
        "one.html loads //cdn/x.js",
        "one.html links to a/two.html#gone, which has no such anchor",
        "one.html links to none.html, which is no file of the site",
        "style.css loads https://fonts/x.css",
        "style.css loads //host/x.png",
    ]
