"""What is installed: the bertrain command, with torch and without, metadata, and what the archives hold."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.commands import invoke
from support.data import ROOT
from support.disk import write

import bertdata
from bertdata.errors import install
from bertrain.__main__ import main

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HIDE = "import os, sys\nfor name in os.environ['HIDE'].split():\n    sys.modules[name] = None\n"
SETS_UP = {"PKG-INFO", "setup.cfg"}  # what setuptools adds to a source archive, beside *.egg-info


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


def test_an_unknown_command_is_wrong_usage():
    result = invoke(main, "pretain")
    assert result.exit_code == 2
    assert "'pretain'" in result.stderr


def completed(program, *words, **more):
    """What a shell gets for the last of the words."""
    module = {"bertdata": "bertdata.cli", "bertrain": "bertrain.__main__"}[program]
    variables = {f"_{program.upper()}_COMPLETE": "bash_complete", "COMP_WORDS": " ".join([program, *words])}
    lines = [
        f"import os, sys; os.environ |= {variables | {'COMP_CWORD': str(len(words))}}",
        f"from {module} import main",
        f"main(prog_name='{program}')",
    ]
    result = python("-c", "\n".join(lines), **more)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["bertdata", "ver"], ["plain,verify"]),
        (["bertdata", "build", "--type", "w"], ["plain,wordpiece"]),
        (["bertdata", "build", "cor"], ["file,cor"]),
        (["bertrain", "pre"], ["plain,pretrain"]),
    ],
)
def test_a_shell_completes_a_line_without_torch(hiding, words, expected):
    heavy = "torch transformers numpy numba tokenizers pyarrow matplotlib"
    assert completed(*words, hide=heavy, before=hiding) == expected


@pytest.mark.parametrize("hide", ["torch transformers", pytest.param("transformers", marks=pytest.mark.slow)])
def test_without_libraries_a_command_says_one_sentence(hiding, hide):
    result = python("-m", "bertrain", "pretrain", "--data", "x", hide=hide, before=hiding)
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert f" {hide.split()[0]}," in line
    assert install("train") in line


def test_without_torch_help_still_answers_and_an_import_is_pythons_own_error(hiding):
    run = """from bertrain.__main__ import main
main(["--help"], standalone_mode=False)
try:
    import bertrain.data
except ModuleNotFoundError as error:
    print(error.name)"""
    result = python("-c", run, hide="torch transformers", before=hiding)
    assert (result.returncode, result.stderr) == (0, "")
    assert "pretrain" in result.stdout
    assert result.stdout.endswith("\ntorch\n")


def test_an_import_needs_no_module_that_windows_lacks(hiding):
    run = "import bertdata, bertrain\nfor name in bertdata.__all__:\n    getattr(bertdata, name)"
    result = python("-c", run, hide="fcntl resource", before=hiding)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    "command", ["-c import bertrain.commands.doctor", "-m bertrain doctor", "-m bertrain.pretrain --help"]
)
def test_a_bertdata_that_is_not_ours_is_one_sentence(tmp_path, command):
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "bertrain").symlink_to(ROOT / "bertrain")
    theirs = write(tmp_path / "theirs" / "bertdata" / "__init__.py", "def load(): pass").parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(theirs.parent), str(ours)])}
    option, words = command.split(" ", 1)
    words = [words] if option == "-c" else words.split()
    command = [sys.executable, option, *words]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    *before, last = result.stderr.splitlines()
    assert str(theirs) in last
    assert last.startswith("ImportError: " if option == "-c" else "Error: ")
    assert option == "-c" or not before


def names(requirements):
    return {canonicalize_name(Requirement(line).name) for line in requirements}


@pytest.mark.parametrize(
    ("given", "count"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "active"}, "30000000000")],
)
def test_threads_that_wait_do_not_keep_their_core(given, count):
    """libgomp prints what it has read."""
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"} | given
    environment["OMP_DISPLAY_ENV"] = "verbose"
    command = [sys.executable, "-c", "import bertrain, torch"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert f"GOMP_SPINCOUNT = '{count}'" in done.stderr


def test_the_engine_needs_no_torch_and_the_extra_does():
    heavy, train = {"torch", "transformers"}, names(PROJECT["optional-dependencies"]["train"])
    assert not heavy & names(PROJECT["dependencies"])
    assert heavy <= train
    assert not {"matplotlib", "tensorboard", "accelerate"} & train


def pins(file):
    """Package → the version that a file of constraints names."""
    lines = [line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def test_every_requirement_is_pinned_to_a_version_it_allows():
    newest, extras = pins("constraints.txt"), PROJECT["optional-dependencies"]
    for line in [*PROJECT["dependencies"], *(line for extra in extras.values() for line in extra)]:
        requirement = Requirement(line)
        if requirement.name == PROJECT["name"]:
            assert requirement.extras <= set(extras)
        else:
            assert requirement.specifier.contains(newest[canonicalize_name(requirement.name)], prereleases=True), line


def test_every_lower_bound_is_a_version_that_is_tested():
    oldest, extras = pins("constraints-oldest.txt"), PROJECT["optional-dependencies"]
    tested = [
        *PROJECT["dependencies"],
        *(line for name in extras.keys() - {"wandb", "trackio", "docs"} for line in extras[name]),
    ]
    for requirement in map(Requirement, tested):
        if requirement.name not in (PROJECT["name"], "torch"):  # of torch, older ones than the tested one are allowed
            bounds = {item.version for item in requirement.specifier if item.operator == ">="}
            assert bounds == {oldest[canonicalize_name(requirement.name)]}, requirement
        assert requirement.name != "tokenizers" or not requirement.specifier.contains("1.0")


@pytest.fixture(scope="module")
def targets():
    """The targets of the Makefile that `make help` lists."""
    return set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_workflow_runs_targets_of_the_makefile_on_every_supported_python_and_may_only_read(targets):
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"].values()
    assert not any("permissions" in job for job in jobs)
    assert {step.get("run", "make test").removeprefix("make ") for job in jobs for step in job["steps"]} <= targets
    versions = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    stated = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert set(stated) <= set(versions)
    assert f">={versions[0]}" == PROJECT["requires-python"]


def sources():
    """The files of the project that git tracks."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.split("\0") if name and (ROOT / name).exists()}


def build(kind, directory, out):
    """Builds an archive of the project in a directory, as pip does."""
    run = f"import sys; from setuptools.build_meta import build_{kind} as build; build(sys.argv[1])"
    result = subprocess.run([sys.executable, "-c", run, out], cwd=directory, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """A source archive of the project's files, and a wheel made from what is in it."""
    if not (ROOT / ".git").exists():
        pytest.skip("git says which files are the project's")
    tree, out = (tmp_path_factory.mktemp(name) for name in ("tree", "archives"))
    for name in sources():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    cache = tree / "bertdata" / "__pycache__"  # as in a directory somebody works in
    cache.mkdir()
    for name in ("order.cpython-311.pyc", "order.slot-20.py311.nbi"):
        (cache / name).touch()

    build("sdist", tree, out)
    (source,) = out.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(out, filter="data")
    build("wheel", out / source.name.removesuffix(".tar.gz"), out)
    (wheel,) = out.glob("*.whl")
    return source, wheel


@pytest.mark.slow
def test_a_source_archive_holds_the_files_of_the_project_and_no_others(archives):
    with tarfile.open(archives[0]) as archive:
        held = {item.name.partition("/")[2]: item.mode for item in archive if item.isfile()}
    assert {name for name in held if ".egg-info/" not in name} - SETS_UP == sources()
    assert held[".ci/run"] & 0o111, "cannot be run"


@pytest.mark.slow
def test_a_wheel_holds_every_module_and_the_commands(archives):
    with zipfile.ZipFile(archives[1]) as wheel:
        held = set(wheel.namelist())
        metadata = {name.partition("/")[2]: name for name in held if ".dist-info/" in name}
        about = message_from_string(wheel.read(metadata["METADATA"]).decode())
        commands = wheel.read(metadata["entry_points.txt"]).decode()
    packages = {name for name in sources() if name.startswith(("bertdata/", "bertrain/"))}
    assert held - set(metadata.values()) == packages
    assert {"bertdata/py.typed", "bertrain/py.typed"} <= packages
    assert "licenses/LICENSE" in metadata
    assert about["Version"] == bertdata.__version__
    assert about["License-Expression"] == PROJECT["license"]
    assert about["Author"] == PROJECT["authors"][0]["name"]
    assert all(f"{name} = {target}" in commands for name, target in PROJECT["scripts"].items())
