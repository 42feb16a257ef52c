"""What the commands take, for a shell that completes a line, read from their sources: an import would take seconds.

The modules of the commands import torch. Their options are calls of click.option with texts, so the names and the helps
can be read without running anything. `pretrain` and `doctor` have theirs of Config, which imports no torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import click

from bertdata.cli import OneSentence
from bertrain.config import Config, command

OF_CONFIG = ("pretrain", "doctor")
SHARED = {"suite": ("finetune", "OPTIONS")}  # command → the module and the list of options that it takes from there


def outline(name: str, line: str) -> click.Command:
    """A command that has the options of a command of bertrain, and does nothing. line: what it is for."""
    module = _parsed(name)
    parameters = command(_nothing).params if name in OF_CONFIG else []
    parameters += [click.Argument(["names"], nargs=-1), *_options(module)]
    if shared := SHARED.get(name):
        lists = (node for node in _parsed(shared[0]).body if isinstance(node, ast.Assign))
        parameters += [option for node in lists if _assigns(node, shared[1]) for option in _options(node)]
    return OneSentence(name, params=parameters, help=line)


def _nothing(config: Config) -> None:
    """Is never run."""


def _parsed(name: str) -> ast.Module:
    return ast.parse(Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8"))


def _assigns(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def _options(tree: ast.AST) -> Iterator[click.Option]:
    """The options that click.option and click.Option are called for, in the order of the source."""
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            continue
        texts = [node.value for part in call.args for node in ast.walk(part) if isinstance(node, ast.Constant)]
        if call.func.attr in ("option", "Option") and texts and str(texts[0]).startswith("--"):
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            text = given.get("help")
            yield click.Option(
                [str(text) for text in texts], is_flag="is_flag" in given,
                help=str(text.value) if isinstance(text, ast.Constant) else None,
            )  # fmt: skip
