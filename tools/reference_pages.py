"""Makes docs/errors.md, commands.md and api.md from the source: `python tools/reference_pages.py`, or `make reference`.

docs/errors.md has every sentence of every error, by kind. It is the one place, besides the source, where the words of
errors stand: a test compares it with the source, so a change of words is one line to review. docs/commands.md has the
--help of every command.

The sentences are read by ast: a call of an error class is its sentence, its kind, and what is named with option=.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from pathlib import Path
from typing import NamedTuple

import api_page
import click

from bertdata.errors import KINDS, install

ROOT = Path(__file__).parent.parent
PACKAGES = ("bertdata", "bertrain")
BESIDE = {"BadRow"}  # no subclass of BertdataError: it becomes part of an InputError
REPEATED = {"str(error)", "warnings[0]", "error.kind", "kind"}  # of another error, which is listed where it is made
FUNCTIONS = {"BadParameter": "UsageError", "require": "UsageError", "refused": "InputError"}  # what they raise
NO_KIND = {"BadRow": "bad-row", "BadParameter": "malformed", "require": "out-of-range"}  # calls that name no kind

ERRORS = """# Errors

An error is one sentence: what was given, where, what was expected, and what you can do. The command ends with exit code
2 if an option or an argument is wrong (`UsageError`), else with 1. In Python, each error is a
[`bertdata.BertdataError`](api.md) with a `kind`, and with the `option` and the value (`given`) that are wrong, if there
are any. Programs should look at the kind and at the option: the words may change. Any other exception has a traceback.
It is a bug of the library, or of code of your own that the library calls.

This page has every sentence, by kind. Words in *italics* stand for a value, … for one that has no short name, and ` / `
between two texts means one or the other. `make reference` makes the page from the source.

The commands also pass on errors of the operating system about a file, such as
`Error: PATH: No space left on device; make room and run the same command again with --out DIR`, and
`Error: not enough memory: …; use smaller batches, shorter rows or fewer processes`, on CPUs and GPUs.
"""

COMMANDS = """# Commands

This is what `--help` prints, for every command. The exit code is 0 when the work is done, 1 when it failed, 2 for wrong
usage and 130 when you interrupted it. It is also 0 when SIGTERM or SIGUSR1, which schedulers send, stopped a run: the
run has a checkpoint, and prints `Stopped by` instead of `done:`. `make reference` makes the page from the source.

The Tab key completes commands, options and choices: [install.md](install.md#the-tab-key).
"""


class Error(NamedTuple):
    """One call of an error class in the source."""

    kind: str  # "" if the call does not state one
    message: str  # what the user reads; a value that is filled in is its name between ⟨ and ⟩, or …
    name: str  # of the class
    file: str  # from the root of the project
    line: int


def sources() -> dict[str, ast.Module]:
    """The parsed modules of both packages, by path."""
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def error_classes(modules: dict[str, ast.Module]) -> set[str]:
    """The names of BertdataError, of all classes below it, and BESIDE."""
    classes = [node for tree in modules.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    below = {node.name for node in classes if any(_last(base).endswith("Error") for base in node.bases)}
    return below | {"BertdataError"} | BESIDE


@functools.cache
def errors() -> list[Error]:
    """Every error that the source makes, in the order of files and lines; the first line of the call is its line."""
    modules = sources()
    names, constants = error_classes(modules) | {*FUNCTIONS}, _constants(modules)
    listed = {}
    for file, tree in modules.items():
        before = _assigned_before(tree)
        nodes = list(ast.walk(tree))
        of_self = {name: text for name, text in _assigned(nodes, constants).items() if name.startswith("self.")}
        functions = [list(ast.walk(node)) for node in nodes if isinstance(node, ast.FunctionDef)]
        for scope in (nodes, *functions):  # outer ones first
            calls = [node for node in scope if isinstance(node, ast.Call) and node.args and _last(node.func) in names]
            texts = {**constants, **of_self, **_assigned(scope, constants)} if calls else {}
            for call in calls:
                name = _last(call.func)
                is_method = name == "require" and len(call.args) < 4
                if is_method or {ast.unparse(part) for part in call.args[:2]} & REPEATED:
                    continue
                parts = [before.get(call, call.args[0]), *(call.args[1:] if name == "BadRow" else [])]
                words = [_words(part, texts) for part in (call.args if name in ("require", "refused") else parts)]
                message = f"{words[1]} is …; give {words[3]}" if name == "require" else "; ".join(words)
                message = f"{words[0]}{words[2]}" if name == "refused" else message
                for kind in _kinds(name, call):
                    listed[file, call.lineno, call.col_offset, kind] = Error(kind, message, name, file, call.lineno)
    return [listed[position] for position in sorted(listed)]


def _assigned_before(tree: ast.AST) -> dict[ast.AST, ast.expr]:
    """Calls whose first argument is a name that the statement just before assigns → what it assigns."""
    before = {}
    for node in ast.walk(tree):
        for body in (getattr(node, "body", None), getattr(node, "orelse", None), getattr(node, "finalbody", None)):
            statements = body if isinstance(body, list) else []
            for one, two in itertools.pairwise(statements):
                if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
                    for call in ast.walk(two):
                        if isinstance(call, ast.Call) and call.args and _last(call.args[0]) == one.targets[0].id:
                            before[call] = one.value
    return before


def _kinds(name: str, call: ast.Call) -> list[str]:
    """Return the kinds that a call states, several in a conditional expression; [""] if it states none."""
    if name in NO_KIND and not call.args[4:]:
        return [NO_KIND[name]]
    stated = [*call.args[1:2], *call.args[4:5], *(keyword.value for keyword in call.keywords if keyword.arg == "kind")]
    return sorted({getattr(node, "value", "") for each in stated for node in ast.walk(each)} & {*KINDS}) or [""]


def error_page() -> str:
    """docs/errors.md: the sentences of each kind, without repetitions, by their first words."""
    sections = [ERRORS]
    for kind, meaning in KINDS.items():
        of_kind = [error for error in errors() if error.kind == kind]
        names = {FUNCTIONS.get(error.name, error.name) for error in of_kind} - BESIDE
        by_words = {(re.sub(r"⟨.*?⟩|…|[^\w\s]", "", error.message).strip().lower(), error.message) for error in of_kind}
        classes = " or ".join(f"`{name}`" for name in sorted(names))
        lines = "".join(f"- {_shown(line)}\n" for _, line in sorted(by_words))
        sections.append(f"## {kind}\n\n{meaning} {classes}\n\n{lines}")
    return "\n".join(sections)


def _shown(message: str) -> str:
    """A sentence in Markdown: values in italics, and no other character that Markdown takes for itself."""
    return re.sub(r"⟨(.*?)⟩", r"*\1*", re.sub(r"([\\`*_\[\]<>|])", r"\\\1", message))


def _last(node: ast.AST) -> str:
    """a.b.C, C or C[…] → C; nothing for other expressions."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _constants(modules: dict[str, ast.Module]) -> dict[str, str]:
    """The values of names in capitals, where one text or number is all that the modules give to a name."""
    values_of: dict[str, set[str]] = {}
    for node in (node for tree in modules.values() for node in tree.body if isinstance(node, ast.Assign)):
        (target, value), pairs = (node.targets[0], node.value), []
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=True))
        for name, given in pairs or [(target, value)]:
            if isinstance(given, ast.Constant) and _last(name).isupper():
                values_of.setdefault(_last(name), set()).add(str(given.value))
    return {name: values.pop() for name, values in values_of.items() if len(values) == 1}


def _assigned(scope: list[ast.AST], constants: dict[str, str]) -> dict[str, str]:
    """Texts that a function puts together before it gives them to an error, by what it assigns them to."""
    texts_of: dict[str, dict[str, None]] = {}
    targets = [target for node in scope for target in getattr(node, "targets", [getattr(node, "target", None)])]
    several = {ast.unparse(name) for target in targets if isinstance(target, ast.Tuple) for name in target.elts}
    for node in scope:
        if isinstance(node, ast.Assign) and (name := ast.unparse(node.targets[0])) not in several:
            text = _words(node.value, constants)
            if re.search("[a-z] ", text):
                texts_of.setdefault(name, {})[text] = None
    return {name: " / ".join(texts) for name, texts in texts_of.items()}


def _words(node: ast.AST, texts: dict[str, str]) -> str:
    """An expression as the user reads it; texts: of the names that are known. A choice of two texts is both."""
    match node:
        case ast.Constant(value=value):
            return str(value)
        case ast.Call(func=ast.Name(id="install"), args=[ast.Constant(value=str(extra))]):
            return install(extra)
        case ast.JoinedStr(values=parts):
            return "".join(_words(part, texts) for part in parts)
        case ast.FormattedValue(value=value):
            return _words(value, texts)
        case ast.BinOp(left=left, op=ast.Add(), right=right) if _is_text(left) or _is_text(right):
            return _words(left, texts) + _words(right, texts)
        case ast.BinOp(left=ast.Constant(value=str(text)), op=ast.Mult()):
            return text
        case ast.IfExp(body=body, orelse=other):
            return " / ".join(filter(None, (_words(body, texts), _words(other, texts))))
        case ast.Name(id=name) | ast.Attribute(attr=name) if known := texts.get(ast.unparse(node)) or texts.get(name):
            return known
        case ast.Name(id=name) | ast.Attribute(attr=name) if len(name) > 1 and not name.startswith("_"):
            return "…" if name in ("strerror", "error") else f"⟨{name.replace('_', ' ')}⟩"
    return "…"


def _is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def command_page() -> str:
    """docs/commands.md: the --help of every command of both programs, as it is printed, each under a heading."""
    from bertdata.cli import main as bertdata
    from bertrain.__main__ import main as bertrain

    sections = [COMMANDS]
    for program, group in (("bertdata", bertdata), ("bertrain", bertrain)):
        above = click.Context(group, info_name=program, terminal_width=80, **group.context_settings)
        sections.append(f"## {program}\n\n```text\n{group.get_help(above)}\n```\n")
        for name in group.list_commands(above):
            command = group.get_command(above, name)
            settings = {"parent": above, "terminal_width": 80} | command.context_settings
            help = command.get_help(click.Context(command, info_name=name, **settings))
            sections.append(f"### {program} {name}\n\n```text\n{help}\n```\n")
    return "\n".join(sections)


PAGES = {"docs/errors.md": error_page, "docs/commands.md": command_page, "docs/api.md": api_page.page}


def main() -> None:
    for page, make in PAGES.items():
        (ROOT / page).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
