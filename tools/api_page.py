"""Makes docs/api.md from tools/api.in and the source: each line `::: name` of it becomes the description of that name.

The source is read by ast, so nothing is imported. A class has its signature, its docstring, its fields with their
comments, and its public methods; a module has its public names, or those that follow its name. `::: name in file`
says where a name is that several files have.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEMPLATE = ROOT / "tools" / "api.in"
_ARGUMENT = re.compile(r"^((?:\.?[a-z_]\w*)(?:, [a-z_]\w*)*):(?= |$)")
_PAGE = re.compile(r"docs/(\w[\w-]*)\.md")
_COMMENT = re.compile(r"  # (?!noqa|type:)(.*)$")
Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


def markdown(text: str) -> str:
    """A docstring as Markdown: arguments become a list, examples blocks of code, names of pages links."""
    lines, in_list, in_code = list[str](), False, False
    for line in text.splitlines():
        is_code = line.startswith(">>> ") or (in_code and bool(line))
        if is_code != in_code:
            lines.append("```pycon" if is_code else "```")
        if not is_code and (match := _ARGUMENT.match(line)):
            if not in_list and lines and lines[-1]:
                lines.append("")
            names = ", ".join(f"`{name.lstrip('.')}`" for name in match[1].split(", "))
            line, in_list = f"- {names}:{line[match.end() :]}", True
        elif in_list and line.startswith('    "'):  # the values that an argument may have
            line = f"    - {line.strip()}"
        elif not line:
            in_list = False
        in_code = is_code
        lines.append(line if is_code else _linked(line))
    return "\n".join(lines + ["```"] * in_code)


def _linked(text: str) -> str:
    return _PAGE.sub(r"[\1.md](\1.md)", text)


class Source:
    """A file of the source."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text(encoding="utf-8")
        self.lines, self.body = self.text.splitlines(), ast.parse(self.text).body

    def definition(self, name: str) -> tuple[Definition, str] | None:
        """Where a name is defined at the top, and what stands below it: the docstring of a table or a constant."""
        for node, below in zip(self.body, [*self.body[1:], None], strict=True):
            if name in _names(node):
                text = _text_of(below) if isinstance(node, ast.Assign | ast.AnnAssign) else ""
                assert isinstance(node, Definition)
                return node, text
        return None

    def comment(self, node: ast.stmt) -> str:
        match = _COMMENT.search(self.lines[(node.end_lineno or 1) - 1])
        return match[1] if match else ""


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _text_of(node: ast.AST | None) -> str:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return inspect.cleandoc(node.value.value) if is_text else ""  # type: ignore[union-attr]


def find(dotted: str) -> tuple[Source, str]:
    """The file that defines a name, and the name there; "" for a module. A name of a package may be in any file."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:end])
        if path.with_suffix(".py").is_file():
            return Source(path.with_suffix(".py")), ".".join(parts[end:])
        if path.is_dir() and end < len(parts):
            name = ".".join(parts[end:])
            found = [source for source in map(Source, sorted(path.rglob("*.py"))) if source.definition(name)]
            if len(found) == 1:
                return found[0], name
    raise LookupError(f"{TEMPLATE} names {dotted}, which is not in the source, or in several files of it")


def signature(node: ast.FunctionDef, name: str, *, is_method: bool) -> str:
    arguments = node.args
    is_static = any(getattr(each, "id", "") == "staticmethod" for each in node.decorator_list)
    if is_method and not is_static:
        arguments.args = arguments.args[1:]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and name != "__init__" else ""
    line = f"{name}({ast.unparse(arguments)}){returns}"
    return line if len(line) <= 100 else f"{name}(\n    {_broken(arguments)},\n){returns}"


def _broken(arguments: ast.arguments) -> str:
    """Arguments, one in a line."""
    depth, parts = 0, [""]
    for character in re.sub(r"lambda [^:]*", lambda match: match[0].replace(",", "\0"), ast.unparse(arguments)):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return ",\n    ".join(part.strip() for part in parts).replace("\0", ",")


def described(source: Source, node: Definition, name: str, below: str, level: int) -> Iterator[str]:
    """The parts of the page about one name."""
    yield f"{'#' * level} {name}"
    short = name.rpartition(".")[2]
    if isinstance(node, ast.FunctionDef):
        if not any(ast.unparse(each).endswith("property") for each in node.decorator_list):
            yield f"```python\n{signature(node, short, is_method='.' in name and level > 3)}\n```"
        yield markdown(ast.get_docstring(node) or "")
    elif isinstance(node, ast.ClassDef):
        yield from _class(source, node, name, level)
    else:
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant):
            yield f"```python\n{short} = {ast.unparse(value)}\n```"
        yield markdown(below or source.comment(node))


def _class(source: Source, node: ast.ClassDef, name: str, level: int) -> Iterator[str]:
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    start = next((each for each in methods if each.name == "__init__"), None)
    if start:
        yield f"```python\n{signature(start, node.name, is_method=True)}\n```"
    yield markdown(ast.get_docstring(node) or "")
    if start and ast.get_docstring(start):
        yield markdown(ast.get_docstring(start) or "")
    fields = []
    for each, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and not each.target.id.startswith("_"):
            value = f" = {ast.unparse(each.value)}" if each.value else ""
            text = " ".join((_text_of(after) or source.comment(each)).split())
            about = f"  \n  {_linked(text)}" if text else ""
            fields.append(f"- `{each.target.id}: {ast.unparse(each.annotation)}{value}`{about}")
    if fields:
        yield "\n".join(fields)
    for each in methods:
        if not each.name.startswith("_") and ast.get_docstring(each):
            yield from described(source, each, f"{node.name}.{each.name}", "", level + 1)


def page() -> str:
    """docs/api.md."""
    parts = []
    for block in TEMPLATE.read_text(encoding="utf-8").rstrip("\n").split("\n\n"):
        if not block.startswith("::: "):
            parts.append(block)
            continue
        dotted, *chosen = block.removeprefix("::: ").split()
        if chosen[:1] == ["in"]:  # the file, where several have the name
            source, name, chosen = Source(ROOT / chosen[1]), dotted.rpartition(".")[2], []
        else:
            source, name = find(dotted)
        names = [name] if name else chosen or [n for each in source.body for n in _names(each) if not n.startswith("_")]
        for each in names:
            found = source.definition(each)
            if found is None:
                raise LookupError(f"{TEMPLATE} names {dotted} {each}, which is not in the source")
            shown = dotted if name else f"{dotted}.{each}"
            parts += [part for part in described(source, found[0], shown, found[1], 3) if part]
    return "\n\n".join(parts) + "\n"
