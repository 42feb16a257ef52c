"""The notebooks of examples/: each was executed from its first cell to its last, and shows nothing of where that was.

tools/notebooks.py executes them (`make outside`).
"""

import json
import re

import pytest
from conftest import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def test_there_are_three():
    assert [path.stem for path in NOTEBOOKS] == ["corpus_to_vectors", "first_model", "own_objective"]


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
