"""The bertrain command, with torch and without."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import bertdata
from bertrain.__main__ import COMMANDS, main

ROOT = Path(__file__).parent.parent
HIDE = "import os, sys\nfor name in os.environ['HIDE'].split():\n    sys.modules[name] = None\n"


# ---------------------------------------------------------------------------------------------------------- the command


def python(*arguments, hide="", **more):
    """Runs a fresh interpreter that has this checkout, and in which the modules in `hide` cannot be imported."""
    environment = {**os.environ, "HIDE": hide}
    environment["PYTHONPATH"] = os.pathsep.join([str(more.pop("before", "")), str(ROOT)]).strip(os.pathsep)
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, **more)


@pytest.fixture(scope="module")
def hiding(tmp_path_factory):
    """A directory that makes an interpreter hide what HIDE names."""
    directory = tmp_path_factory.mktemp("hiding")
    (directory / "sitecustomize.py").write_text(HIDE)
    return directory


def test_help_names_every_command_with_a_line():
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    for name, line in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(line)}$", result.output, re.MULTILINE)


def test_every_module_that_is_a_command_is_one_of_bertrain():
    has_main = re.compile(r"^(def main\(|main = )", re.MULTILINE)
    modules = {path.stem for path in (ROOT / "bertrain").glob("*.py") if has_main.search(path.read_text())}
    assert modules - {"__main__"} == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_the_main_of_its_module(name):
    module = importlib.import_module(f"bertrain.{name}")
    assert isinstance(module.main, click.Command)
    assert main.get_command(click.Context(main), name) is module.main
    assert CliRunner().invoke(main, [name, "--help"]).exit_code == 0


def test_help_loads_nothing_heavy():
    run = "import sys; from bertrain.__main__ import main; main(['--help'], standalone_mode=False); print(*sys.modules)"
    result = python("-c", run)
    assert result.returncode == 0, result.stderr
    loaded = result.stdout.splitlines()[-1].split()
    assert "bertrain.__main__" in loaded
    assert not {"torch", "transformers", "numpy", "numba", "tokenizers", "pyarrow", "matplotlib"} & set(loaded)


def test_version_is_that_of_the_package():
    result = python("-m", "bertrain", "--version")
    assert (result.returncode, result.stdout) == (0, f"bertrain, version {bertdata.__version__}\n")


def test_an_unknown_command_is_wrong_usage():
    result = python("-m", "bertrain", "pretain")
    assert result.returncode == 2
    assert "No such command 'pretain'" in result.stderr
    assert "Traceback" not in result.stderr


# -------------------------------------------------------------------------------------------------------- without torch


@pytest.mark.parametrize(
    ("hide", "missing"),
    [("torch transformers", "torch and transformers, which are"), ("torch", "torch, which is"),
     ("transformers", "transformers, which is")],
)  # fmt: skip
def test_without_libraries_a_command_says_one_sentence(hiding, hide, missing):
    sentence = f"error: training needs {missing} not installed; pip install 'bertdata[train]'\n"
    for command in (["bertrain", "pretrain", "--help"], ["bertrain.pretrain", "--help"]):
        result = python("-m", *command, hide=hide, before=hiding)
        assert (result.returncode, result.stdout, result.stderr) == (1, "", sentence)


@pytest.mark.parametrize("name", COMMANDS)
def test_without_torch_every_command_says_so(hiding, name):
    result = python("-m", f"bertrain.{name}", hide="torch", before=hiding)
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
    assert "training needs torch, which is not installed" in result.stderr


def test_without_torch_help_still_answers(hiding):
    result = python("-m", "bertrain", "--help", hide="torch transformers", before=hiding)
    assert (result.returncode, result.stderr) == (0, "")
    assert "pretrain" in result.stdout


def test_without_torch_an_import_is_an_error_that_can_be_caught(hiding):
    for statement in ("import bertrain.feed", "from bertrain import feed"):
        run = f"try:\n    {statement}\nexcept ImportError as error:\n    print(type(error).__name__, error)"
        result = python("-c", run, hide="torch transformers", before=hiding)
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith("MissingLibraries training needs torch and transformers, which are not inst")


def test_without_torch_a_program_run_by_m_can_catch_it_too(hiding, tmp_path):
    """The place where `python -m bertrain.x` ends is not one where a program of others does."""
    (tmp_path / "other").mkdir()
    text = "try:\n    import bertrain.feed\nexcept ImportError:\n    print('without')\n"
    (tmp_path / "other" / "__init__.py").write_text(text)
    (tmp_path / "other" / "tool.py").write_text("print('done')")
    result = python("-m", "other.tool", hide="torch", before=hiding, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "without\ndone\n"), result.stderr
