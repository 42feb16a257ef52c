"""What pages and notebooks say is so, and is shown as it is meant."""

import importlib
import json
import re

import pytest
import reference_pages as pages
from markdown_it import MarkdownIt
from support.commands import succeeds
from support.data import ROOT

import bertdata
from bertdata.errors import KINDS

# ------------------------------------------------------------------------------------------------------ generated pages


@pytest.mark.parametrize("page", pages.PAGES)
def test_the_page_is_that_of_the_source(page):
    assert (ROOT / page).read_text(encoding="utf-8") == pages.PAGES[page](), (
        "run make reference, and look at the changes"
    )


def test_every_public_name_is_on_the_page_of_the_api():
    headings = re.findall(r"### bertdata\..*?(\w+)\n", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"))
    assert {*bertdata.__all__} - {*headings} == set()


def test_every_kind_of_error_is_used_and_listed():
    assert {error.kind for error in pages.errors()} == {*KINDS}
    assert len(pages.errors()) > 300


NEVER = (
    "anew|mended|planted|go on|goes on|going on|went on|to the bit|same bits|at hand|side channel|is refused|"
    "are refused|be refused|of others|laid|what there is|that is no|found by first bytes|made again|not any more|"
    "gives back|nothing but|what it gave|asked for|once more|the like|a stranger|figures|is said to"
)


def test_pages_and_source_use_the_words_of_the_field():
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bert*/**/*.py")]
    found = [(path.name, *re.findall(rf"(?i)\b({NEVER})\b", " ".join(path.read_text().split()))) for path in files]
    assert [each for each in found if each[1:]] == []


# ----------------------------------------------------------------------------------------------------- lists and tables


def misread(text):
    """Numbers of lines where a code host shows something else than what the text looks like."""
    lines = text.splitlines()
    for token in MarkdownIt().enable("table").parse(text):
        first, last = token.map or (0, 0)
        part, is_wrong = lines[first:last], False
        if token.type == "paragraph_open":  # a row of no table, or a line that is not indented as its list is
            is_wrong = any(line[:1] == "|" or (token.level > 1 and line[:1] != " ") for line in part[1:])
        elif token.type in ("ordered_list_open", "bullet_list_open"):  # a line of text that begins like an item
            is_wrong = token.level == 0 and first > 0 and lines[first - 1].strip() != ""
        elif token.type == "table_open":
            is_wrong = len({(line[0], line[-1], len(re.findall(r"(?<!\\)\|", line))) for line in part}) > 1
        if is_wrong:
            yield first + 1


def test_lists_and_tables_are_shown_as_they_are_meant():
    assert all([*misread(text)] for text in ("- item\ntext\n", "text\n1. text\n", "| a | b |\n|---|---|\n| 1\n| 2 |\n"))
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    found = {str(path.relative_to(ROOT)): [*misread(path.read_text())] for path in files if path.name != "api.md"}
    assert {name: lines for name, lines in found.items() if lines} == {}


# ------------------------------------------------------------------------------------------------------- names of tests


NAMED = re.compile(r"`((?:tables/)?test_\w+\.py)(?:::(test_\w+))?`")


def test_tests_that_pages_name_exist_and_each_line_about_security_names_one():
    security, reliability = (ROOT / page for page in ("SECURITY.md", "docs/reliability.md"))
    for file, test in NAMED.findall(security.read_text() + reliability.read_text()):
        assert not test or f"\ndef {test}(" in (ROOT / "tests" / file).read_text(), f"{file} has no {test}"
    cells = re.findall(r"^\| .*\| ([^|]*) \|$", security.read_text(), re.MULTILINE)
    assert len(cells) > 24
    assert [cell for cell in cells if cell != "tests" and not NAMED.search(cell)] == []


# --------------------------------------------------------------------------------------------------------- measurements


@pytest.fixture
def script(monkeypatch):
    """script(name): a module of benchmarks/."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


def between(page, script):
    """What a page holds between the marks of a script, which writes it."""
    return (ROOT / page).read_text().partition(f"{script.BEGIN}\n")[2].partition(f"\n{script.END}")[0]


def test_the_page_holds_the_table_of_what_was_measured(script):
    table, data = script("table"), json.loads((ROOT / "benchmarks" / "results" / "comparison.json").read_text())
    assert between("docs/benchmarks.md", table) == table.page(data)
    assert (data["rows"], data["notes"]) == (table.rows_of(data["measured"]), table.notes(data["measured"]))
    assert {row["question"] for row in data["rows"]} == {*table.ROWS}


def test_readme_has_the_table_of_committed_results(script):
    proof = script("proof")
    assert between("README.md", proof) == proof.table(*proof.read())


# ------------------------------------------------------------------------------------------------------------ notebooks


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_shows_no_path_and_has_options_that_exist(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    texts = json.dumps([output | {"data": ""} for cell in cells for output in cell["outputs"]])
    assert not re.search(r"/(tmp|home|root|work|usr)/", texts)
    source = "\n".join("".join(cell["source"]) for cell in cells).replace("\\\n", " ")
    for program, command, words in re.findall(r"^!(bertdata|bertrain) (\S+) (.*)", source, re.MULTILINE):
        known = succeeds(program, command, "--help").output
        assert all(f" {option} " in known for option in re.findall(r"(--[a-z-]+)", words))
