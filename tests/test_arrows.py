"""What may import what (ARCHITECTURE.md), what importing costs, what tests patch."""

import ast
import re
from functools import cache

import pytest
from support.commands import python
from support.data import ROOT

import bertdata

# Modules that any package may import.
COMMON = ["choices", "errors", "options", "keys", "jit", "bits", "types", "files", "urls", "prepare"]
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
TRAINER_ORDER = "recipes options methods trackers config models optim plan cli state card objectives ranks speed "
TRAINER_ORDER += "data checkpoint trainer evaluate report pretrain commands lab"
ENGINE, TRAINER = (
    {".".join(path.relative_to(root).with_suffix("").parts): path for path in sorted(root.rglob("*.py"))}
    for root in (ROOT / "bertdata", ROOT / "bertrain")
)


@cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path, *, only_run=False):
    """Dotted names that a file imports: all, or those that are not below `if TYPE_CHECKING`."""
    names, tests = set(), [node for node in ast.walk(parsed(path)) if isinstance(node, ast.If)]
    skipped = {inner for node in tests if ast.unparse(node.test) == "TYPE_CHECKING" for inner in ast.walk(node)}
    for node in {*ast.walk(parsed(path))} - (skipped if only_run else set()):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def modules(names, package, known):
    """The modules of a package that dotted names are in."""
    known = {name.removesuffix(".__init__") for name in known}
    parts = [name.split(".")[1:] for name in names if name.split(".")[0] == package]
    found = ([".".join(part[:n]) for n in range(len(part), 0, -1)] for part in parts)
    return {module for each in found for module in [name for name in each if name in known][:1]}


@pytest.mark.parametrize("package", [*PACKAGES, *COMMON])
def test_a_package_of_the_engine_imports_those_that_it_may(package):
    files = [path for name, path in ENGINE.items() if name.partition(".")[0] == package]
    imported = set().union(*(modules(imports(path), "bertdata", ENGINE) for path in files)) - {*COMMON}
    assert {name.split(".")[0] for name in imported} - {package} == PACKAGES.get(package, set())


def test_every_package_is_on_the_map():
    others = {"__init__", "__main__", "cli", "support", "torch"}
    assert {name.partition(".")[0] for name in ENGINE} - others == {*COMMON, *PACKAGES}
    assert {name.partition(".")[0] for name in TRAINER} - {"__init__", "__main__"} == {*TRAINER_ORDER.split()}


@pytest.mark.parametrize("module", ENGINE)
def test_libraries_are_where_they_belong(module):
    used = {name.split(".")[0] for name in imports(ENGINE[module])}
    assert "bertrain" not in used
    assert ("torch" in used) == (module == "torch")
    homes = {"pyarrow": "sources.", "tokenizers": "tokenize.", "transformers": "tokenize.", "obstore": "remote."}
    for library, home in (homes | {"ray": "write.machines"}).items():
        assert library not in used or module.startswith(home)


@pytest.mark.parametrize("module", [name for name in TRAINER if name not in ("__init__", "__main__")])
def test_a_package_of_the_trainer_imports_those_before_it(module):
    """So no file of the core imports the lab, but `methods` the names of our methods."""
    before, package = TRAINER_ORDER.split(), module.partition(".")[0]
    imported = modules(imports(TRAINER[module], only_run=True), "bertrain", {*TRAINER} - {"__init__", "__main__"})
    imported -= {"lab"} if module == "methods" else set()
    assert {name.partition(".")[0] for name in imported} <= {*before[: before.index(package) + 1]}


def test_the_lab_uses_what_is_documented_as_public():
    """The names of the core and of commands that docs/extending.md says a method may import, by module."""
    rows = re.findall(r"^\| `(bertrain[\w.]*)` \| (.*) \|$", (ROOT / "docs" / "extending.md").read_text(), re.MULTILINE)
    documented = {f"{module}.{name}" for module, names in rows for name in re.findall(r"`(\w+)`", names)}
    known = {f"bertrain.{name.removesuffix('.__init__')}" for name in TRAINER}
    for path in (path for name, path in TRAINER.items() if name.startswith("lab.")):
        used = {name for name in imports(path) if name.startswith("bertrain.")}
        as_modules = {name.rpartition(".")[2]: name for name in used & known}
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in as_modules:
                used.add(f"{as_modules[ast.unparse(node.value)]}.{node.attr}")
        assert {name for name in used - known if not name.startswith("bertrain.lab")} <= documented


@pytest.mark.parametrize("module", TRAINER)
def test_the_trainer_uses_no_private_part_of_the_engine(module):
    support = imports(ENGINE["support"]) | {"bertdata.support.load_tokenizer", "bertdata.support.bertdata_main"}
    names = {f"bertdata.support.{name.rpartition('.')[2]}" for name in support}
    names |= {f"bertdata.{name}" for name in bertdata.__all__}
    assert {name for name in imports(TRAINER[module]) if name.startswith("bertdata.")} <= names


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


HEAVY = "torch transformers numba numpy tokenizers pyarrow matplotlib"
SERVERS = "bertdata.remote obstore"


def test_importing_help_and_reading_load_nothing_heavy(dataset, corpus, tmp_path):
    """What is for servers takes 0.1 s to import."""
    path, out = str(dataset.path), str(tmp_path / "out")
    commands = [("bertdata.cli", ["build", str(corpus), "--out", out, "--tokenizer", path], SERVERS)]
    commands += [("bertdata.cli", ["inspect", path], SERVERS), ("bertdata.cli", ["--help"], HEAVY)]
    trainer = (["--help"], ["pretrain", "--help"], ["doctor", "--help"], ["pretrain", "--lrr"], ["doctor", "--lr=-1"])
    for module, words, names in [*commands, *(("bertrain.__main__", words, HEAVY) for words in trainer)]:
        call = f"try:\n    main({words}, standalone_mode=False)\nexcept (click.UsageError, SystemExit):\n    pass"
        assert not {*names.split()} & loaded_after(f"import click\nfrom {module} import main\n{call}")
    assert not {*HEAVY.split(), "click"} & loaded_after("import bertdata")
    run = f"import bertdata; next(bertdata.Loader(bertdata.open({path!r}), length=16))"
    assert not {"torch", "transformers", "tokenizers", "pyarrow"} & loaded_after(run)
    assert (tmp_path / "out" / "manifest.json").exists()


def test_public_names_are_exactly_these():
    names = "IGNORE_INDEX Batch BertdataError BuildReport Dataset IdsFormat Loader Machines Masking Shares "
    names += "SpecialTokens TextFormat Tokenizer Vocabulary build export finish import_ids key open train_tokenizer"
    assert sorted(bertdata.__all__) == sorted(names.split())


TOUCHED = {  # file → what its tests patch or read of the product; support/limits.py has the constants
    "conftest": {"of_a_build.announcing_compilation"},
    "sources": {"_read", "text_module.TextFile._read"},
    "test_run": {"_devices", "speed.peak_flops"},
    "test_step": {"report.Reading", "trainer.Trainer.step"},
    "test_tokens": {"_sample"},
}
DEFINED = re.compile(r"(?:def |class |self\.|^)(_(?!replace\b)[A-Za-z]\w*)", re.MULTILINE)


@cache
def private_names():
    return {name for path in [*ENGINE.values(), *TRAINER.values()] for name in DEFINED.findall(path.read_text())}


@cache
def foreign_names():
    """What the product imports from libraries: it is theirs that a test patches by such a name."""
    names = set().union(*(imports(path) for path in [*ENGINE.values(), *TRAINER.values()]))
    return {name.rpartition(".")[2] for name in names if not name.startswith("bert")}


def touched(path):
    """What a file puts in place of functions and constants of the product, and the private names that it reads."""
    from_ours = [node for node in ast.walk(parsed(path)) if str(getattr(node, "module", ""))[:4] == "bert"]
    yield from {alias.name for node in from_ours for alias in node.names} & private_names()
    ours = {"bertdata", "bertrain"} | {alias.asname or alias.name for node in from_ours for alias in node.names}
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute) and (owner := getattr(node.value, "id", "")) not in ("self", "cls"):
            if isinstance(node.ctx, ast.Store) and owner in ours:
                yield f"{owner}.{node.attr}"
            elif node.attr in private_names():
                yield node.attr
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("setattr", "setitem", "patch", "object") and node.args:
                words = node.args[: 1 if isinstance(node.args[0], ast.Constant) else 2]
                name = ".".join(ast.unparse(each) for each in words).replace("'", "")
                if name.partition(".")[0] in ours and name.rpartition(".")[2] not in foreign_names():
                    yield name


def test_tests_seldom_patch_the_product_or_read_its_private_names():
    """They use the command line and the public names. support/limits.py has the constants that they change."""
    found = {path.stem: {*touched(path)} for path in (ROOT / "tests").rglob("*.py")}
    assert {file: names for file, names in found.items() if names} == TOUCHED
    assert sum(map(len, TOUCHED.values())) <= 10
