"""What may import what (ARCHITECTURE.md), what importing costs, and through how many files a run goes."""

import ast
import re
import runpy
import sys
import threading
from functools import cache
from pathlib import Path

import pytest
from support.commands import python, succeeds
from support.data import ROOT
from support.runs import QUIET, flags

import bertdata
from bertrain.data import Stream
from bertrain.methods import options_of_methods
from bertrain.pretrain import Pretraining, main
from bertrain.trainer import Trainer

# Modules that any package may import.
COMMON = {"choices", "errors", "options", "keys", "jit", "bits", "types", "files", "urls", "prepare"}
PACKAGES = {  # package → the others that it may import
    "format": set(),
    "remote": {"format"},
    "sources": {"remote"},
    "tokenize": set(),
    "write": {"format", "sources", "tokenize"},
    "read": {"format", "tokenize"},
    "look": {"format", "tokenize", "read"},
}
# The trainer's packages and files, leaf first: each may import those before it. `methods` only names what comes later.
TRAINER_ORDER = [
    "recipes",
    "options",
    "methods",
    "trackers",
    "config",
    "models",
    "optim",
    "plan",
    "cli",
    "state",
    "card",
    "objectives",
    "ranks",
    "speed",
    "data",
    "checkpoint",
    "trainer",
    "evaluate",
    "report",
    "pretrain",
    "commands",
    "lab",
]
# Words that names and texts of a method have. The core has none of them but these, which mean something else.
OF_METHODS = re.compile("lora|adapter|elastic|sub[-_]?net|grow|teacher|distil|student", re.IGNORECASE)
NOT_OF_METHODS = {
    "distilbert": "a family of models",
    "adapter_kwargs": "an argument of transformers",
    "TORCHELASTIC_RUN_ID": "a variable that torchrun sets",
    "TORCHELASTIC_RESTART_COUNT": "a variable that torchrun sets",
}

ENGINE, TRAINER = (
    {".".join(path.relative_to(root).with_suffix("").parts): path for path in sorted(root.rglob("*.py"))}
    for root in (ROOT / "bertdata", ROOT / "bertrain")
)


@cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path, *, only_top=False, only_run=False):
    """Dotted names that a file imports; `from bertdata import x` counts as bertdata.x.

    only_top: at the top of the file. only_run: not those below `if TYPE_CHECKING`.
    """
    names, tests = set(), [node for node in ast.walk(parsed(path)) if isinstance(node, ast.If)]
    skipped = {id(inner) for node in tests if ast.unparse(node.test) == "TYPE_CHECKING" for inner in ast.walk(node)}
    for node in parsed(path).body if only_top else ast.walk(parsed(path)):
        if only_run and id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def modules(names, package, known):
    """The modules of a package that dotted names are in; of a name of bertdata itself, the module that it is from."""
    inside = set()
    known = {name.removesuffix(".__init__") for name in known}
    for name in names:
        parts = name.split(".")
        if parts[0] == package:
            if package == "bertdata" and (home := bertdata._HOMES.get(".".join(parts[1:2]))):
                parts = [package, *home.split(".")]
            candidates = [".".join(parts[1 : 1 + n]) for n in range(len(parts), 0, -1)]
            inside |= set([module for module in candidates if module in known][:1])
    return inside


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_of_the_engine_imports_those_that_it_may(package):
    files = [path for name, path in ENGINE.items() if name.startswith(f"{package}.")]
    imported = set().union(*(modules(imports(path), "bertdata", ENGINE) for path in files)) - COMMON
    assert {name.split(".")[0] for name in imported} - {package} == PACKAGES[package]


def test_common_modules_import_no_package():
    for name in COMMON:
        assert modules(imports(ENGINE[name]), "bertdata", ENGINE) <= COMMON


def test_every_package_is_on_the_map():
    others = {"__init__", "__main__", "cli", "support", "torch"}
    assert {name.partition(".")[0] for name in ENGINE} - others == {*COMMON, *PACKAGES}
    assert {name.partition(".")[0] for name in TRAINER} - {"__init__", "__main__"} == set(TRAINER_ORDER)


@pytest.mark.parametrize("module", ENGINE)
def test_libraries_are_where_they_belong(module):
    used = {name.split(".")[0] for name in imports(ENGINE[module])}
    assert "bertrain" not in used
    assert ("torch" in used) == (module == "torch")
    homes = (
        ("pyarrow", "sources."),
        ("tokenizers", "tokenize."),
        ("transformers", "tokenize."),
        ("obstore", "remote."),
        ("ray", "write.machines"),
    )
    for library, home in homes:
        assert library not in used or module.startswith(home)
    at_once = {name.split(".")[0] for name in imports(ENGINE[module], only_top=True)}
    assert not {"transformers", "pyarrow", "ray"} & at_once


def ours(path):
    """The modules of bertrain that a file imports when it runs: not those that are only named for its types."""
    known = {name.removesuffix(".__init__") for name in TRAINER} - {"__init__", "__main__"}
    return modules(imports(path, only_run=True), "bertrain", known)


@pytest.mark.parametrize("module", [name for name in TRAINER if name not in ("__init__", "__main__")])
def test_a_package_of_the_trainer_imports_those_before_it(module):
    """So no file of the core imports the lab, but `methods` the names of our methods."""
    package = module.partition(".")[0]
    allowed = TRAINER_ORDER[: TRAINER_ORDER.index(package) + 1]
    imported = ours(TRAINER[module]) - ({"lab"} if module == "methods" else set())
    assert {name.partition(".")[0] for name in imported} <= set(allowed)


def words_of(path):
    """The names in a file, and its texts but docstrings."""
    tree = parsed(path)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value
        for field in ("id", "attr", "name", "arg"):
            if isinstance(word := getattr(node, field, None), str):
                yield word


@pytest.mark.parametrize("module", [name for name in TRAINER if name.partition(".")[0] not in ("commands", "lab")])
def test_the_core_knows_no_method(module):
    if module == "__main__":  # it lists all commands
        return
    words = {word for word in words_of(TRAINER[module]) if OF_METHODS.search(word)}
    assert words <= set(NOT_OF_METHODS)
    options = set().union(*(kind.names() for kind in options_of_methods().values())) - {"layers", "alpha"}
    assert not options & {*words_of(TRAINER[module])}


def public_names():
    """The names that docs/extending.md says a method may import, by module."""
    rows = re.findall(r"^\| `(bertrain[\w.]*)` \| (.*) \|$", (ROOT / "docs" / "extending.md").read_text(), re.MULTILINE)
    return {module: set(re.findall(r"`(\w+)`", names)) for module, names in rows}


def used_by_the_lab():
    """The names of the core and of commands that files of the lab use, by module."""
    found = {}
    known = {f"bertrain.{name.removesuffix('.__init__')}" for name in TRAINER}
    for path in (path for name, path in TRAINER.items() if name.startswith("lab.")):
        shown = {}  # how a file calls a module
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("bertrain"):
                for alias in node.names:
                    if (module := f"{node.module}.{alias.name}") in known:
                        shown[alias.asname or alias.name] = module
                    else:
                        found.setdefault(node.module, set()).add(alias.name)
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in shown:
                found.setdefault(shown[node.value.id], set()).add(node.attr)
    return {module: names for module, names in found.items() if not module.startswith("bertrain.lab")}


def test_the_lab_uses_what_is_documented_as_public():
    documented = public_names()
    for module, names in used_by_the_lab().items():
        assert names <= documented.get(module, set()), module
        assert not any(name.startswith("_") for name in names)


@pytest.mark.parametrize("module", TRAINER)
def test_the_trainer_uses_no_private_part_of_the_engine(module):
    imported = imports(TRAINER[module])
    support = imports(ENGINE["support"]) | {"bertdata.support.load_tokenizer"}
    names = {f"bertdata.{name}" for name in bertdata.__all__}
    names |= {f"bertdata.support.{name.rpartition('.')[2]}" for name in support} | {"bertdata.support.bertdata_main"}
    assert {name for name in imported if name.startswith("bertdata.")} <= names
    assert not any(
        part.startswith("_")
        for name in imported
        for part in name.split(".")
        if part not in ("__future__", "__main__", "_subclasses")
    )
    source = TRAINER[module].read_text()
    assert "from_numpy" not in source or module in ("data", "models.encoder")


@pytest.mark.parametrize("path", [*ENGINE.values(), *TRAINER.values()], ids=[*ENGINE, *TRAINER])
def test_no_source_unpickles_runs_a_shell_or_trusts_remote_code(path):
    for name in imports(path):
        assert not {"pickle", "marshal", "shelve", "subprocess", "dill", "joblib"} & set(name.split("."))
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert called not in ("eval", "exec", "os.system", "os.popen", "np.load", "numpy.load")
            assert called != "torch.load" or options["weights_only"] == "True"
            if called.endswith(".from_pretrained"):
                assert options.get("trust_remote_code") == "False" or "options" in ast.unparse(node)


def loaded_after(statement):
    """Modules in a fresh interpreter after a statement."""
    code = f"import sys\n{statement}\nprint(' '.join(sorted(sys.modules)))"
    return set(python("-c", code).split("\n")[-2].split())


def test_importing_the_package_and_help_load_nothing_heavy():
    heavy = {"torch", "transformers", "numba", "numpy", "tokenizers", "pyarrow", "matplotlib"}
    assert not {*heavy, "click"} & loaded_after("import bertdata")
    bertrain = (["--help"], ["pretrain", "--help"], ["doctor", "--help"], ["pretrain", "--lrr"], ["doctor", "--lr=-1"])
    for module, words in [("bertdata.cli", ["--help"]), *(("bertrain.__main__", words) for words in bertrain)]:
        call = f"try:\n    main({words}, standalone_mode=False)\nexcept (click.UsageError, SystemExit):\n    pass"
        assert not heavy & loaded_after(f"import click\nfrom {module} import main\n{call}")


def test_a_loader_needs_neither_torch_nor_a_tokenizer(dataset):
    run = f"import bertdata; next(bertdata.Loader(bertdata.open({str(dataset.path)!r}), length=16))"
    assert not {"torch", "transformers", "tokenizers", "pyarrow"} & loaded_after(run)


def test_files_of_this_machine_need_nothing_for_servers(dataset, corpus, tmp_path):
    """It takes 0.1 s to import."""
    build = ["build", str(corpus), "--out", str(tmp_path / "out"), "--tokenizer", str(dataset.path)]
    run = f"from bertdata.cli import main; main({build!r}, standalone_mode=False); "
    run += f"main(['inspect', {str(tmp_path / 'out')!r}], standalone_mode=False)"
    assert not {"bertdata.remote", "obstore"} & loaded_after(run)


def test_public_names_are_exactly_these():
    names = "IGNORE_INDEX Batch BertdataError BuildReport Dataset IdsFormat Loader Machines Masking Shares "
    names += "SpecialTokens TextFormat Tokenizer Vocabulary build export finish import_ids key open train_tokenizer"
    assert sorted(bertdata.__all__) == sorted(names.split())
    assert set(bertdata.__all__) <= set(dir(bertdata))
    assert not {"Any", "annotations", "importlib"} & set(dir(bertdata))
    assert all(getattr(bertdata, name) is not None for name in bertdata.__all__)
    with pytest.raises(AttributeError, match="no attribute 'loda'"):
        _ = bertdata.loda


SIZE = runpy.run_path(str(ROOT / "tools" / "size.py"), run_name="read")


def test_sizes_are_below_their_ceilings():
    assert [*SIZE["problems"]()] == []


@pytest.mark.parametrize("name", TRAINER)
def test_no_function_of_the_core_is_long(name):
    if name.partition(".")[0] not in SIZE["APART"]:
        assert [*SIZE["long_functions"](TRAINER[name].read_text(encoding="utf-8"))] == []


# ------------------------------------------------------------------------------------------------------- files of a run


STAGES = {
    Trainer.step.__code__: "step",
    Pretraining.save.__code__: "save",
    Pretraining._evaluate.__code__: "save",
}
MOST = {"begin": 22, "step": 10, "save": 12}


class Profile:
    """The files of bertrain that are called in each stage of a run."""

    def __init__(self):
        self.files = {name: set() for name in MOST}
        self._stages = ["begin"]

    def __call__(self, frame, event, _):
        code = frame.f_code
        if code is Stream.next_batch.__code__ and "begin" in self._stages:
            self._stages.remove("begin")
        if event == "call" and code in STAGES:
            self._stages.append(STAGES[code])
        if event == "return" and code in STAGES:
            self._stages.remove(STAGES[code])
        path = Path(code.co_filename)
        if event == "call" and path.is_relative_to(ROOT / "bertrain"):
            writes = threading.current_thread() is not threading.main_thread()
            for stage in ["save"] if writes else self._stages:
                self.files[stage].add(str(path.relative_to(ROOT)))


def test_a_run_goes_through_few_files(dataset, tmp_path):
    profile = Profile()
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        options = {"steps": 2, "save_every": 1, "eval_every": 1}
        succeeds(main, *flags(dataset.path, tmp_path / "run", **QUIET | options))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert {name: len(files) for name, files in profile.files.items() if len(files) > MOST[name]} == {}, profile.files
    assert all(profile.files.values())
