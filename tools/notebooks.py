"""Executes the notebooks of examples/ and keeps what they print and draw: python tools/notebooks.py [NOTEBOOK ...]

Each runs in a new kernel of the Python that runs this, from its first cell to its last; a cell that fails ends the
program. Needs nbclient and ipykernel. Takes about four minutes of one core for all.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent


def execute(path: Path) -> None:
    """Runs a notebook in place. Its file has the same bytes but for outputs."""
    notebook = nbformat.read(path, 4)
    for cell in notebook.cells:
        cell.get("outputs", []).clear()
    NotebookClient(notebook, timeout=900, kernel_name="python3", record_timing=False, coalesce_streams=True).execute()
    notebook.metadata.language_info = {"name": "python"}  # without the version
    nbformat.write(notebook, path)


if __name__ == "__main__":
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # for cells that begin with !
    for path in [*map(Path, sys.argv[1:])] or sorted((ROOT / "examples").glob("*.ipynb")):
        execute(path)
        print(path.name, flush=True)
