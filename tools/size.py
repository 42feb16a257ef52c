"""Measure the size of the project, and compare it with its ceilings.

    python tools/size.py                 lines of code by package
    python tools/size.py --check         fail if a size exceeds its ceiling in tools/ceilings.toml

The check also fails for a function of more than 60 lines in the core of bertrain.

A line of code is a line of Python that is not blank, a comment or a docstring. Tests, tools and benchmarks count all
their lines. Pages are the hand-written files of docs/, so not errors.md, commands.md and api.md.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 60  # lines of a function
APART = ("commands", "lab", "__init__", "__main__")
"""What is not part of bertrain's core: a pre-training run imports none of it, but for the methods that it uses."""
GENERATED = ("errors.md", "commands.md", "api.md")
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_UNFORMATTED = re.compile(r"# fmt: (?:skip|off)")


def code_lines(source: str) -> set[int]:
    """Return the numbers of the lines of code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def long_functions(source: str) -> Iterator[tuple[str, int]]:
    """Yield the functions with more than LONGEST lines of code."""
    lines = code_lines(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            number = len(lines & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)))
            if number > LONGEST:
                yield node.name, number


def packages(product: str) -> dict[str, int]:
    """Return the lines of code of bertdata or bertrain by package, or by module at its top level."""
    sizes: dict[str, int] = defaultdict(int)
    for path in (ROOT / product).rglob("*.py"):
        group = path.relative_to(ROOT / product).parts[0].removesuffix(".py")
        sizes[group] += len(code_lines(path.read_text(encoding="utf-8")))
    return sizes


def num_options(command: str) -> int:
    """Return the number of options that docs/commands.md lists for a command."""
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    section = page.partition(f"### {command}\n")[2].partition("\n### ")[0].partition("\n## ")[0]
    return len(re.findall(r"^  -", section, re.MULTILINE))


def num_lines(folder: str) -> int:
    """Return the number of lines of the source files in a folder."""
    paths = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".c", ".in", ".toml")]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def sizes() -> dict[str, int]:
    """Return all sizes that have a ceiling."""
    bertrain, pages = packages("bertrain"), (ROOT / "docs").rglob("*.md")
    words = [len(path.read_text(encoding="utf-8").split()) for path in pages if path.name not in GENERATED]
    errors = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    return {
        "bertdata": sum(packages("bertdata").values()),
        "bertrain": sum(bertrain.values()),
        "core": sum(number for group, number in bertrain.items() if group not in APART),
        "commands": bertrain["commands"],
        "lab": bertrain["lab"],
        "tests": num_lines("tests"),
        "tools": num_lines("tools"),
        "benchmarks": num_lines("benchmarks"),
        "words": sum(words),
        "pretrain_options": num_options("bertrain pretrain"),
        "build_options": num_options("bertdata build"),
        "errors": len(re.findall(r"^- ", errors, re.MULTILINE)),
    }


def problems() -> Iterator[str]:
    """Yield a line for each size above its ceiling, each long function of the core, and each unformatted place."""
    ceilings = tomllib.loads((ROOT / "tools" / "ceilings.toml").read_text(encoding="utf-8"))
    largest = dict(zip(ceilings["sizes"], ceilings["stages"][ceilings["current"]], strict=True))
    for name, size in sizes().items():
        if size > (largest[name] or size):
            yield f"{name}: {size:,}, and the ceiling of {ceilings['current']} is {largest[name]:,}"
    for path in sorted((ROOT / "bertrain").rglob("*.py")):
        if path.relative_to(ROOT / "bertrain").parts[0].removesuffix(".py") not in APART:
            for function, number in long_functions(path.read_text(encoding="utf-8")):
                yield f"{path.relative_to(ROOT)}: {function} has {number} lines"
    for folder in ("bertdata", "bertrain", "tests", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if _UNFORMATTED.search(line):
                    yield f"{path.relative_to(ROOT)}:{number}: the formatter must not skip code"


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Compare with tools/ceilings.toml, and fail if a size is too large.")
def main(check: bool) -> None:
    for name, size in sizes().items():
        click.echo(f"{size:>7,}  {name}")
    if check:
        if found := [*problems()]:
            raise click.ClickException("\n".join(found))
        return
    for product in ("bertdata", "bertrain"):
        click.echo(f"\n{product}")
        for group, number in sorted(packages(product).items(), key=lambda pair: -pair[1]):
            click.echo(f"{number:>7,}  {group}")


if __name__ == "__main__":
    main()
