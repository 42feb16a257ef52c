"""What pages and notebooks say is so, and is shown as it is meant."""

import ast
import importlib
import json
import re

import pytest
import reference_pages as pages
from markdown_it import MarkdownIt
from support.commands import succeeds
from support.data import ROOT

from bertdata.cli import main as data_main
from bertdata.errors import KINDS
from bertrain.__main__ import main

# ------------------------------------------------------------------------------------------------------ generated pages


NUM_WORDS = 4  # so many words in a row are a sentence's, and not by chance


@pytest.mark.parametrize("page", pages.PAGES)
def test_the_page_is_that_of_the_source(page):
    assert (ROOT / page).read_text(encoding="utf-8") == pages.PAGES[page](), (
        "run make reference, and look at the changes"
    )


def test_every_error_states_a_kind_and_is_a_sentence_that_a_user_can_read():
    assert {error.kind for error in pages.errors()} == {*KINDS}
    assert len(pages.errors()) > 300
    for error in pages.errors():
        words = re.sub(r"⟨[\w ]+⟩|…", "", error.message)
        is_prefix = error.message.endswith(": …")  # of the message of another error
        assert is_prefix or len(re.findall(r"[A-Za-z]{2,}", words)) >= 2, error
        assert not re.search(r"[⟨⟩\n\\]|\. [A-Z]", words), error
        assert not re.search(r"[.!?:;,]$", error.message), error
        assert words.count("(") == words.count(")"), error


def word_rows(text):
    """All rows of NUM_WORDS words of a text."""
    words = [word.strip(",;.()") for word in text.split()]
    rows = (tuple(words[at : at + NUM_WORDS]) for at in range(len(words) - NUM_WORDS + 1))
    return {row for row in rows if all(re.fullmatch(r"[A-Za-z'_-]+", word) for word in row)}


def test_no_test_holds_a_sentence_of_an_error():
    """Tests look at the kind, the option and the value; a better sentence must not break them."""
    ours = rf"(?<!click\.)\b({'|'.join({error.name for error in pages.errors()} | {'BertdataError'})})\b"
    parts = [part for error in pages.errors() for part in re.split(r"⟨.*?⟩|…|;", error.message)]
    known = set().union(*map(word_rows, parts))
    for path in sorted((ROOT / "tests").glob("*.py")):
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        texts = [(node.lineno, node.value) for node in texts if id(node) not in docstrings]
        assert [(path.name, *text) for text in texts if word_rows(text[1]) & known] == []
        calls = [ast.unparse(node) for node in nodes if isinstance(node, ast.Call)]
        assert not [call for call in calls if re.match(rf"pytest\.raises\(.*{ours}.*match=", call)], path.name


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


COLUMNS = re.compile(r" *\w[\w ]*\w  +[^|]+")  # of what a program prints: a name and a value


def misread(text):
    """Numbers of lines where a code host shows something else than what the text looks like."""
    lines = text.splitlines()
    for token in MarkdownIt().enable("table").parse(text):
        first, last = token.map or (0, 0)
        part, language, is_wrong = lines[first:last], token.info.partition(" ")[0], False
        if token.type == "paragraph_open":  # a row of no table, or a line that is not indented as its list is
            is_wrong = any(line[:1] == "|" or (token.level > 1 and line[:1] != " ") for line in part[1:])
        elif token.type in ("ordered_list_open", "bullet_list_open"):  # a line of text that begins like an item
            is_wrong = token.level == 0 and first > 0 and lines[first - 1].strip() != ""
        elif token.type == "table_open":
            is_wrong = len({(line[0], line[-1], len(re.findall(r"(?<!\\)\|", line))) for line in part}) > 1
        elif token.type in ("code_block", "fence") and language in ("", "bash", "text"):
            rows = re.sub(r"<<'END'\n.*?\nEND\n|'[^']*'", "", token.content, flags=re.DOTALL).splitlines()
            indents = [len(row) - len(row.lstrip()) for row in rows]
            if language == "text":
                near = [n for n in range(1, len(rows) - 1) if indents[n - 1] == indents[n + 1] < indents[n]]
                is_wrong = any(all(map(COLUMNS.fullmatch, rows[n - 1 : n + 2])) for n in near)
            else:
                deeper = [n for n in range(1, len(rows)) if indents[n] > indents[n - 1]]
                is_wrong = any(rows[n - 1][-1:] != "\\" for n in deeper)
        if is_wrong:
            yield first + 1


WRONG = ["- item\ntext\n", "text\n1. text\n", "| a | b |\n|---|---|\n| 1\n| 2 |\n", "    one\n        two\n"]
WRONG += ["```text\n  loss      2.6\n    perplexity  13\n  tokens    9\n```\n"]


def test_lists_tables_and_indented_lines_are_shown_as_they_are_meant():
    assert all([*misread(text)] for text in WRONG)
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    found = {str(path.relative_to(ROOT)): [*misread(path.read_text())] for path in files if path.name != "api.md"}
    assert {name: lines for name, lines in found.items() if lines} == {}


# ------------------------------------------------------------------------------------------------------- names of tests


NAMED = re.compile(r"`((?:tables/)?test_\w+\.py)(?:::(test_\w+))?`")


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/reliability.md"])
def test_tests_that_a_page_names_exist_and_each_line_about_security_names_some(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    named = NAMED.findall(text)
    assert len({file for file, _ in named}) > 10
    for file, test in named:
        source = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert not test or f"\ndef {test}(" in source, f"{file} has no {test}"
    if page == "SECURITY.md":
        last_cells = [line.split("|")[-2].strip() for line in text.splitlines() if line.startswith("|")]
        cells = [cell for cell in last_cells if cell not in ("tests", "---")]
        assert len(cells) > 24
        for cell in cells:
            assert any(test for _, test in NAMED.findall(cell)), cell
            assert re.sub(r"`[\w.:/]+`", "", cell).strip(" ,") == "", cell


# --------------------------------------------------------------------------------------------------------- measurements


@pytest.fixture
def script(monkeypatch):
    """script(name): a module of benchmarks/."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


def test_the_page_holds_the_table_of_what_was_measured(script):
    table, data = script("table"), json.loads((ROOT / "benchmarks" / "results" / "comparison.json").read_text())
    _, _, rest = (ROOT / "docs" / "benchmarks.md").read_text().partition(f"{table.BEGIN}\n")
    assert rest.partition(f"\n{table.END}")[0] == table.page(data)
    assert data["rows"] == table.rows_of(data["measured"])
    assert data["notes"] == table.notes(data["measured"])
    assert {row["question"] for row in data["rows"]} == {*table.ROWS}
    assert {row["library"] for row in data["rows"]} >= {*table.NAMES.values()}


def test_readme_has_the_table_of_committed_results_whose_rows_name_a_section_of_a_page(script):
    proof, text = script("proof"), (ROOT / "README.md").read_text()
    assert text.partition(f"{proof.BEGIN}\n")[2].partition(f"\n{proof.END}")[0] == proof.table(*proof.read())
    assert len(text.splitlines()) <= 120
    for one in proof.read()[1]:
        page, _, section = one["page"].partition("#")
        headings = re.findall(r"^## (.*)$", (ROOT / page).read_text(), re.MULTILINE)
        assert section in {re.sub(r"[^\w -]", "", text).replace(" ", "-").lower() for text in headings}


# ------------------------------------------------------------------------------------------------------------ notebooks


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_shows_a_plot_and_no_path_and_has_options_that_exist(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert path.stat().st_size < 300_000
    text = json.dumps([{name: output[name] for name in output if name != "data"} for output in outputs])
    assert not re.search(r"/(tmp|home|root|work|usr)/", text)
    source = "\n".join("".join(cell["source"]) for cell in cells).replace("\\\n", " ")
    for program, command, words in re.findall(r"^!(bertdata|bertrain) (\S+) (.*)", source, re.MULTILINE):
        known = succeeds(data_main if program == "bertdata" else main, command, "--help").output
        assert all(f" {option} " in known for option in re.findall(r"(--[a-z-]+)", words))
