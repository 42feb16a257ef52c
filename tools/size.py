"""How large the packages of bertrain are: lines of code, without docstrings, comments and blank lines.

    python tools/size.py                 a table by package, and functions of more than 60 lines
    python tools/size.py bertdata        of another package

The core is what a pre-training run imports.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 60  # lines of a function
CORE = ("pretrain", "methods", "options", "run", "models", "objectives", "optim", "runtime", "recipes")
"""What a pre-training run imports."""
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> set[int]:
    """The numbers of the lines that have code. Texts that stand alone, as docstrings do, are none."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def long_functions(source: str) -> Iterator[tuple[str, int]]:
    """Functions with more than LONGEST lines of code."""
    lines = code_lines(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            number = len(lines & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)))
            if number > LONGEST:
                yield node.name, number


def group_of(name: str) -> str:
    """The package of a module such as lab/elastic/space, or its name."""
    return name.partition("/")[0]


@click.command()
@click.argument("package", default="bertrain")
def main(package: str) -> None:
    """Print lines of code by package, and functions that are too long."""
    sizes: dict[str, int] = defaultdict(int)
    long: list[str] = []
    for path in sorted((ROOT / package).rglob("*.py")):
        source, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT / package).with_suffix("").as_posix()
        sizes[group_of(name)] += len(code_lines(source))
        long += [f"{number:>6}  {name}: {function}" for function, number in long_functions(source)]
    for group, number in sorted(sizes.items(), key=lambda pair: -pair[1]):
        click.echo(f"{number:>6}  {group}")
    click.echo(f"{sum(sizes.values()):>6}  in all")
    if package == "bertrain":
        click.echo(f"{sum(sizes[group] for group in CORE):>6}  in the core: {', '.join(CORE)}")
    click.echo(f"functions of more than {LONGEST} lines: {len(long)}")
    for line in long:
        click.echo(line)


if __name__ == "__main__":
    main()
