"""The notebooks of examples/: each was executed from its first cell to its last, and shows nothing of where that was.

tools/notebooks.py executes them (`make outside`).
"""

import ast
import json
import re

import pytest
from support.commands import succeeds
from support.data import ROOT

from bertdata.cli import main as data_main
from bertrain.__main__ import main

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_executed_in_order_and_shows_a_plot(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert path.stat().st_size < 300_000
    text = json.dumps([{name: output[name] for name in output if name != "data"} for output in outputs])
    assert not re.search(r"/(tmp|home|root|work|usr)/", text)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_imports_and_types_exists(path):
    """Modules, the names that it takes from them, and the options of commands."""
    cells = [cell["source"] for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    lines = "\n".join("".join(source) for source in cells).replace("\\\n", " ").split("\n")
    nodes = [*ast.walk(ast.parse("\n".join(line for line in lines if line[:1] not in ("!", "%"))))]
    imported = {}
    exec("\n".join(ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)), imported)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
            assert hasattr(imported[node.value.id], node.attr), ast.unparse(node)
    for line in lines:
        if match := re.match(r"!(bertdata|bertrain) (\S+) ", line):
            known = succeeds(data_main if match[1] == "bertdata" else main, match[2], "--help").output
            assert all(f" {option} " in known for option in re.findall(r" (--[a-z-]+)", line))
