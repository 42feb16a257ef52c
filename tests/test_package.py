"""What is installed: the bertrain command, with torch and without, requirements, and what the archives hold."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.data import ROOT
from support.disk import write

from bertdata.errors import install

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HIDE = "import os, sys\nfor name in os.environ['HIDE'].split():\n    sys.modules[name] = None\n"
SETS_UP = {"PKG-INFO", "setup.cfg"}  # what setuptools adds to a source archive, beside *.egg-info


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """without(names, *arguments): what a fresh interpreter does that has this checkout and cannot import the names."""
    folder = write(tmp_path_factory.mktemp("hiding") / "sitecustomize.py", HIDE).parent

    def run(hide, *arguments):
        environment = os.environ | {"HIDE": hide, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
        return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)

    return run


@pytest.mark.parametrize("line", ["bertdata build --type w", "bertrain pre"])
def test_a_shell_completes_a_line_without_torch(without, line):
    program, *words = line.split()
    asked = {f"_{program.upper()}_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}
    module = PROJECT["scripts"][program].partition(":")[0]
    run = f"import os\nos.environ |= {asked}\nfrom {module} import main\nmain(prog_name='{program}')"
    result = without("torch transformers numpy numba tokenizers pyarrow matplotlib", "-c", run)
    assert (result.returncode, result.stderr, result.stdout.count("\n")) == (0, "", 1)
    assert result.stdout.startswith(f"plain,{words[-1]}")


@pytest.mark.parametrize("hide", ["torch transformers", pytest.param("transformers", marks=pytest.mark.slow)])
def test_without_libraries_a_command_says_one_sentence(without, hide):
    result = without(hide, "-m", "bertrain", "pretrain", "--data", "x")
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert f" {hide.split()[0]}," in line
    assert install("train") in line


def test_public_names_need_nothing_of_unix_and_an_import_without_torch_is_pythons_own_error(without):
    names = "import bertdata, bertrain\nfor name in bertdata.__all__:\n    getattr(bertdata, name)"
    result = without("fcntl resource", "-c", names)
    assert (result.returncode, result.stderr, result.stdout) == (0, "", "")
    last = without("torch transformers", "-c", "import bertrain.data").stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: ")


def test_a_bertdata_that_is_not_ours_is_one_sentence(tmp_path):
    theirs = write(tmp_path / "bertdata" / "__init__.py", "def load(): pass").parent
    (tmp_path / "bertrain").symlink_to(ROOT / "bertrain")
    command, environment = [sys.executable, "-m", "bertrain", "doctor"], os.environ | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert (line.startswith("Error: "), str(theirs) in line) == (True, True), line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "count"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "active"}, "30000000000")],
)
def test_threads_that_wait_do_not_keep_their_core(given, count):
    """libgomp prints what it has read."""
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"} | given
    command = [sys.executable, "-c", "import bertrain, torch"]
    done = subprocess.run(command, env=environment | {"OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True)
    assert f"GOMP_SPINCOUNT = '{count}'" in done.stderr


def names(requirements):
    return {canonicalize_name(Requirement(line).name) for line in requirements}


def test_the_engine_needs_no_torch_and_the_extra_does():
    heavy, train = {"torch", "transformers"}, names(PROJECT["optional-dependencies"]["train"])
    assert not heavy & names(PROJECT["dependencies"])
    assert heavy <= train
    assert not {"matplotlib", "tensorboard", "accelerate"} & train


def pins(file):
    """Package → the version that a file of constraints names."""
    lines = [line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def test_every_requirement_is_pinned_to_a_version_it_allows_and_its_lower_bound_is_tested():
    newest, oldest, extras = pins("constraints.txt"), pins("constraints-oldest.txt"), PROJECT["optional-dependencies"]
    for extra, lines in ({"": PROJECT["dependencies"]} | extras).items():
        for requirement in map(Requirement, lines):
            name, allowed = canonicalize_name(requirement.name), requirement.specifier
            if name == PROJECT["name"]:
                assert requirement.extras <= set(extras)
                continue
            assert allowed.contains(newest[name], prereleases=True), requirement
            if name != "torch" and extra not in ("wandb", "trackio", "docs"):  # of torch, older ones are allowed, too
                assert {item.version for item in allowed if item.operator == ">="} == {oldest[name]}, requirement
            assert name != "tokenizers" or not allowed.contains("1.0")


def archive(kind, directory, out):
    """Builds an archive of the project in a directory, as pip does, and returns its path."""
    run = f"import sys; from setuptools.build_meta import build_{kind} as build; print(build(sys.argv[1]))"
    result = subprocess.run([sys.executable, "-c", run, out], cwd=directory, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return out / result.stdout.split()[-1]


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git says which files are the project's")
def test_a_source_archive_holds_the_files_of_the_project_and_a_wheel_every_module(tmp_path):
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True
    )
    sources = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    for name in sources:
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "tree" / name)
    for name in ("order.cpython-311.pyc", "order.slot-20.py311.nbi"):  # as in a directory somebody works in
        write(tmp_path / "tree" / "bertdata" / "__pycache__" / name)
    source = archive("sdist", tmp_path / "tree", tmp_path)
    with tarfile.open(source) as opened:
        held = {item.name.partition("/")[2]: item.mode for item in opened if item.isfile()}
        opened.extractall(tmp_path, filter="data")
    assert {name for name in held if ".egg-info/" not in name} - SETS_UP == sources
    assert held[".ci/run"] & 0o111, "cannot be run"
    with zipfile.ZipFile(archive("wheel", tmp_path / source.name.removesuffix(".tar.gz"), tmp_path)) as wheel:
        held = set(wheel.namelist())
        metadata = {name for name in held if ".dist-info/" in name}
    packages = {name for name in sources if name.startswith(("bertdata/", "bertrain/"))}
    assert held - metadata == packages >= {"bertdata/py.typed", "bertrain/py.typed"}
