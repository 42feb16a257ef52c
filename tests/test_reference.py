"""docs/errors.md and docs/commands.md are those of the source, and tests hold no sentence that stands there."""

import ast
import re

import pytest
import reference_pages as pages
from support.data import ROOT

from bertdata.errors import KINDS

NUM_WORDS = 4  # so many words in a row are a sentence's, and not by chance


@pytest.mark.parametrize("page", pages.PAGES)
def test_the_page_is_that_of_the_source(page):
    assert (ROOT / page).read_text(encoding="utf-8") == pages.PAGES[page](), (
        "run make reference, and look at the changes"
    )


def test_every_error_states_a_kind_and_every_kind_is_used():
    assert [error for error in pages.errors() if error.kind not in KINDS] == []
    assert {error.kind for error in pages.errors()} == {*KINDS}
    assert 40 <= len(KINDS) <= 60
    assert len(pages.errors()) > 300


def test_every_sentence_is_one_that_a_user_can_read():
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


def texts_of(tree):
    """The constant texts of a module, without docstrings: pairs of line and text."""
    described = (ast.Module, ast.FunctionDef, ast.ClassDef)
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, described) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.lineno, node.value


def test_no_test_holds_a_sentence_of_an_error():
    """Tests look at the kind, the option and the value; a better sentence must not break them."""
    ours = {error.name for error in pages.errors()} | {"BertdataError"}
    known = set().union(
        *(word_rows(part) for error in pages.errors() for part in re.split(r"⟨.*?⟩|…|;", error.message))
    )
    for path in sorted((ROOT / "tests").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert [(path.name, *place) for place in texts_of(tree) if word_rows(place[1]) & known] == []
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.raises" and call.args:
                names = {node.id for node in ast.walk(call.args[0]) if isinstance(node, ast.Name)}
                has_match = any(keyword.arg == "match" for keyword in call.keywords)
                assert not (names & ours and has_match), (path.name, call.lineno)


def test_no_option_states_its_default_twice_or_as_an_empty_text():
    commands = pages.command_page()
    assert '[default: ""]' not in commands
    assert not re.search(r"\[default: [^]]*\]\s+\[default: ", commands)


def test_what_is_required_is_written_in_one_form():
    commands = pages.command_page()
    for name in ("pretrain", "doctor", "teacher"):
        section = commands.partition(f"\n### bertrain {name}\n")[2].partition("\n### ")[0]
        data = section.partition("  --data ")[2].partition("\n  --")[0]
        assert data.rstrip().endswith("[required]")
