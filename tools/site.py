"""What the site has beside docs/: a hook of mkdocs, which mkdocs.yml names. `make docs` builds the site.

    changes.md         CHANGELOG.md
    the built pages    refused if a link or an anchor leads nowhere, or if a page loads something from another host

This file needs no mkdocs to be imported.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parent.parent
PACKAGES = ("bertdata", "bertrain")

# --------------------------------------------------------------------------------------------------------------- errors

GROUPS = {
    "Naming files and URLs": ("building.md", ["bertdata/urls.py", "bertdata/remote/*", "bertdata/sources/find.py",
                                              "bertdata/sources/inputs.py", "bertdata/files.py"]),
    "Reading text": ("building.md", ["bertdata/sources/[bdjst]*.py"]),
    "Changing texts with --map": ("preparing.md", ["bertdata/sources/maps.py"]),
    "Importing and exporting ids": ("import.md", ["bertdata/sources/ids.py", "bertdata/write/*porting.py"]),
    "Choosing or training a tokenizer": ("tokenizers.md", ["bertdata/tokenize/*", "bertdata/write/vocabulary.py"]),
    "Building on a Ray cluster": ("scale.md", ["bertdata/write/cluster.py"]),
    "Building a dataset": ("building.md", ["bertdata/write/*", "bertdata/cli.py"]),
    "Pushing and pulling a dataset": ("scale.md", ["bertdata/format/transfer.py"]),
    "Making or using a teacher's cache": ("distillation.md", ["bertdata/format/answers.py", "bertrain/teacher.py"]),
    "Opening or verifying a dataset": ("format.md", ["bertdata/format/*", "bertdata/errors.py"]),
    "Looking at a dataset": ("pages.md", ["bertdata/look/[bfs]*.py"]),
    "Tracing a batch": ("tracing.md", ["bertdata/look/trace.py"]),
    "Choosing masks": ("determinism.md", ["bertdata/types.py", "bertdata/read/masking.py"]),
    "Mixing datasets": ("mixing.md", ["bertdata/read/mix.py"]),
    "Reading batches": ("reading.md", ["bertdata/read/*"]),
    "Choosing the options of a run": ("training.md", ["bertrain/config.py", "bertrain/plan.py", "bertrain/recipes.py"]),
    "Training and searching sub-networks": ("search.md", ["bertrain/search.py", "bertrain/extract.py",
                                                          "bertrain/*/elastic.py"]),
    "Choosing a model": ("models.md", ["bertrain/models/[befit]*.py"]),
    "Growing a model": ("growing.md", ["bertrain/models/grow.py"]),
    "Training an adapter": ("adapters.md", ["bertrain/models/adapters.py"]),
    "Choosing objectives and optimizers": ("extending.md", ["bertrain/objectives/*", "bertrain/optim/*"]),
    "Starting, training and resuming": ("reliability.md", ["bertrain/assemble.py", "bertrain/batches.py",
                                                           "bertrain/pretrain.py", "bertrain/run.py",
                                                           "bertrain/runtime/*", "bertrain/doctor.py",
                                                           "bertrain/demo.py"]),
    "Drawing and sharing": ("pages.md", ["bertrain/plot.py", "bertrain/report.py", "bertrain/push.py"]),
    "Evaluating": ("evaluation.md", ["bertrain/evaluate.py", "bertrain/pairs.py"]),
    "Fine-tuning": ("finetuning.md", ["bertrain/finetune.py", "bertrain/suite.py", "bertrain/reading.py",
                                      "bertrain/tables.py", "bertrain/tasks/*"]),
    "Adding rows to a task": ("augmentation.md", ["bertrain/augment.py"]),
}  # fmt: skip
"""What the user was doing → the page about it, and the files whose errors come then; the first that fits is taken."""

BESIDE = {"BadRow"}  # no subclass of BertdataError: it becomes part of an InputError
REPEATED = {"str(error)", "warnings[0]"}  # the message of another error, which is listed where it is made


class Error(NamedTuple):
    message: str  # what the user reads; a value that is filled in is its name between ⟨ and ⟩, or …
    file: str  # from the root of the project
    line: int


def sources() -> dict[str, ast.Module]:
    """The parsed modules of both packages, by path."""
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def error_classes(modules: dict[str, ast.Module]) -> set[str]:
    """BertdataError, the names of all classes below it, and BESIDE."""
    classes = [node for tree in modules.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found, size = {"BertdataError"}, 0
    while len(found) > size:
        size = len(found)
        found |= {node.name for node in classes if {_last(base) for base in node.bases} & found}
    return found | BESIDE


@functools.cache
def errors() -> list[Error]:
    """Every error that the source makes, in the order of files and lines; the first line of the call is its line."""
    modules = sources()
    classes, constants = error_classes(modules), _constants(modules)
    found = {}
    for file, tree in modules.items():
        of_self = {name: text for name, text in _assigned(tree, constants).items() if name.startswith("self.")}
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for scope in (tree, *functions):  # outer ones first
            texts = {**constants, **of_self, **_assigned(scope, constants)}
            for call in (node for node in ast.walk(scope) if isinstance(node, ast.Call) and node.args):
                name, parts = _last(call.func), call.args
                if name == "fail":  # of a type of click
                    parts = parts[:1]
                elif name not in classes or ast.unparse(parts[0]) in REPEATED:
                    continue
                message = "; ".join(_words(part, texts) for part in parts)
                found[file, call.lineno, call.col_offset] = Error(message, file, call.lineno)
    return [found[place] for place in sorted(found)]


def group_of(file: str) -> str:
    """What the user was doing. Raises KeyError for a file that GROUPS does not name."""
    for name, (_, patterns) in GROUPS.items():
        if any(fnmatch(file, pattern) for pattern in patterns):
            return name
    raise KeyError(f"{file} has errors, and GROUPS of tools/site.py does not say what its user was doing")


def messages() -> dict[str, list[str]]:
    """The messages of each group, without repetitions, by their first words."""
    of_group: dict[str, set[str]] = {name: set() for name in GROUPS}
    for error in errors():
        of_group[group_of(error.file)].add(error.message)
    return {name: sorted(found, key=_sorted_by) for name, found in of_group.items()}


def error_index() -> str:
    """The errors by group, as HTML in Markdown."""
    sections = []
    for name, found in messages().items():
        page = GROUPS[name][0]
        rows = "\n".join(f'<li id="{_anchor(name, message)}">{_shown(message)}</li>' for message in found)
        about = f"The page about it: [{page.removesuffix('.md')}]({page})."
        sections.append(f"## {name}\n\n{about}\n\n<ul>\n{rows}\n</ul>\n")
    return "\n".join(sections)


def searchable(index: dict[str, Any]) -> dict[str, Any]:
    """A search index in which each error is a place of its own, so that a search for its words finds it first."""
    others = [place for place in index["docs"] if not place["location"].startswith("errors.html#")]
    found = [
        {"location": f"errors.html#{_anchor(name, message)}", "title": _shown(message), "text": name, "boost": 0.6}
        for name, of_group in messages().items()
        for message in of_group
    ]
    return index | {"docs": others + found}


def _anchor(group: str, message: str) -> str:
    return "e" + hashlib.sha256(f"{group}: {message}".encode()).hexdigest()[:8]


def _sorted_by(message: str) -> str:
    return re.sub(r"⟨.*?⟩|…|[^\w\s]", "", message).strip().lower()


def _shown(message: str) -> str:
    return re.sub(r"⟨(.*?)⟩", r"<em>\1</em>", html.escape(message, quote=False))


def _last(node: ast.AST) -> str:
    """a.b.C, C or C[…] → C; nothing for other expressions."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _constants(modules: dict[str, ast.Module]) -> dict[str, str]:
    """The values of names in capitals, where one text or number is all that the modules give to a name."""
    found: dict[str, set[str]] = {}
    for node in (node for tree in modules.values() for node in tree.body if isinstance(node, ast.Assign)):
        (target, value), pairs = (node.targets[0], node.value), []
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=True))
        for name, given in pairs or [(target, value)]:
            if isinstance(given, ast.Constant) and _last(name).isupper():
                found.setdefault(_last(name), set()).add(str(given.value))
    return {name: values.pop() for name, values in found.items() if len(values) == 1}


def _assigned(scope: ast.AST, constants: dict[str, str]) -> dict[str, str]:
    """Texts that a function puts together before it gives them to an error, by what it assigns them to."""
    found: dict[str, dict[str, None]] = {}
    targets = [
        target for node in ast.walk(scope) for target in getattr(node, "targets", [getattr(node, "target", None)])
    ]
    several = {ast.unparse(name) for target in targets if isinstance(target, ast.Tuple) for name in target.elts}
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and (name := ast.unparse(node.targets[0])) not in several:
            text = _words(node.value, constants)
            if re.search("[a-z] ", text):
                found.setdefault(name, {})[text] = None
    return {name: " / ".join(texts) for name, texts in found.items()}


def _words(node: ast.AST, texts: dict[str, str]) -> str:
    """An expression as the user reads it; texts: of the names that are known. A choice of two texts is both."""
    match node:
        case ast.Constant(value=value):
            return str(value)
        case ast.JoinedStr(values=parts):
            return "".join(_words(part, texts) for part in parts)
        case ast.FormattedValue(value=value):
            return _words(value, texts)
        case ast.Call(func=ast.Name(id="install"), args=[ast.Constant(value=str(extra))]):
            return install(extra)
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


# ------------------------------------------------------------------------------------------------------------- commands


def command_index() -> str:
    """The --help of every command of both programs, as it is printed, each under a heading."""
    import click

    from bertdata.cli import main as bertdata
    from bertrain.__main__ import main as bertrain

    sections = []
    for program, group in (("bertdata", bertdata), ("bertrain", bertrain)):
        above = click.Context(group, info_name=program, terminal_width=80)
        sections.append(f"## {program}\n\n```text\n{group.get_help(above)}\n```\n")
        for name in group.list_commands(above):
            command = group.get_command(above, name)
            help = command.get_help(click.Context(command, info_name=name, parent=above, terminal_width=80))
            sections.append(f"### {program} {name}\n\n```text\n{help}\n```\n")
    return "\n".join(sections)


# ----------------------------------------------------------------------------------------------------- the built pages

_LOADS = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("video", "src"), ("link", "href")}


class _Page(HTMLParser):
    """Anchors, links and loaded files of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors, self.links, self.loads = {""}, set[str](), set[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (tag, name) == ("a", "name"):
                self.anchors.add(value or "")
            elif (tag, name) == ("a", "href"):
                self.links.add(value or "")
            elif (tag, name) in _LOADS:
                self.loads.add(value or "")


def faults(site: Path) -> list[str]:
    """What is wrong with built pages: links and anchors that lead nowhere, and files that another host would give."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    wrong = []
    for path, page in pages.items():
        name = path.relative_to(site)
        for target in sorted(page.links | page.loads):
            scheme, host, file, _, anchor = urlsplit(target)
            if scheme or host:
                wrong += [f"{name} loads {target}"] if target in page.loads and scheme != "data" else []
                continue
            to = path if not file else (site / file[1:] if file[0] == "/" else path.parent / unquote(file)).resolve()
            to = to / "index.html" if to.is_dir() else to
            if not to.is_file():
                wrong.append(f"{name} links to {target}, which is no file of the site")
            elif to in pages and unquote(anchor) not in pages[to].anchors:
                wrong.append(f"{name} links to {target}, which has no such anchor")
    for path in sorted(site.rglob("*.css")):
        outside = re.findall(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)", path.read_text(encoding="utf-8"))
        wrong += [f"{path.relative_to(site)} loads {target}" for target in outside]
    return wrong


# ----------------------------------------------------------------------------------------------------- hooks of mkdocs


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    files.append(File.generated(config, "changes.md", abs_src_path=str(ROOT / "CHANGELOG.md")))
    return files


def on_post_build(config: Any) -> None:
    from mkdocs.exceptions import PluginError

    if wrong := faults(Path(config["site_dir"])):
        raise PluginError("\n".join(wrong))
