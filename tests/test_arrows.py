"""What may import what (ARCHITECTURE.md), what importing costs, through how many files a run goes, what tests patch."""

import ast
import re
import sys
import threading
from functools import cache

import pytest
from support.commands import python, succeeds
from support.data import ROOT
from support.runs import QUIET, flags

import bertdata
from bertrain.methods import options_of_methods
from bertrain.pretrain import main
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
TRAINER_ORDER = "recipes options methods trackers config models optim plan cli state card objectives ranks speed "
TRAINER_ORDER += "data checkpoint trainer evaluate report pretrain commands lab"
# Words that names and texts of a method have. The core has none of them but these, which mean something else.
OF_METHODS = re.compile("lora|adapter|elastic|sub[-_]?net|grow|teacher|distil|student", re.IGNORECASE)
NOT_OF_METHODS = {"distilbert", "adapter_kwargs", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}

ENGINE, TRAINER = (
    {".".join(path.relative_to(root).with_suffix("").parts): path for path in sorted(root.rglob("*.py"))}
    for root in (ROOT / "bertdata", ROOT / "bertrain")
)


@cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path, *, only_top=False, only_run=False):
    """Dotted names that a file imports: all, those at its top, or those that are not below `if TYPE_CHECKING`."""
    names, tests = set(), [node for node in ast.walk(parsed(path)) if isinstance(node, ast.If)]
    skipped = {inner for node in tests if ast.unparse(node.test) == "TYPE_CHECKING" for inner in ast.walk(node)}
    for node in parsed(path).body if only_top else {*ast.walk(parsed(path))} - (skipped if only_run else set()):
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


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_of_the_engine_imports_those_that_it_may(package):
    files = [path for name, path in ENGINE.items() if name.startswith(f"{package}.")]
    imported = set().union(*(modules(imports(path), "bertdata", ENGINE) for path in files)) - COMMON
    assert {name.split(".")[0] for name in imported} - {package} == PACKAGES[package]


def test_common_modules_import_no_package_and_every_package_is_on_the_map():
    for name in COMMON:
        assert modules(imports(ENGINE[name]), "bertdata", ENGINE) <= COMMON
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
    at_once = {name.split(".")[0] for name in imports(ENGINE[module], only_top=True)}
    assert not {"transformers", "pyarrow", "ray"} & at_once


@pytest.mark.parametrize("module", [name for name in TRAINER if name not in ("__init__", "__main__")])
def test_a_package_of_the_trainer_imports_those_before_it(module):
    """So no file of the core imports the lab, but `methods` the names of our methods."""
    before, package = TRAINER_ORDER.split(), module.partition(".")[0]
    imported = modules(imports(TRAINER[module], only_run=True), "bertrain", {*TRAINER} - {"__init__", "__main__"})
    imported -= {"lab"} if module == "methods" else set()
    assert {name.partition(".")[0] for name in imported} <= {*before[: before.index(package) + 1]}


def words_of(path):
    """The words of a file, without those of comments and docstrings."""
    for node in ast.walk(tree := ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [
                each for each in body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
            ]
    return {*re.findall(r"\w+", ast.unparse(tree))}


@pytest.mark.parametrize("module", [name for name in TRAINER if name.partition(".")[0] not in ("commands", "lab")])
def test_the_core_knows_no_method(module):
    if module == "__main__":  # it lists all commands
        return
    words = words_of(TRAINER[module])
    assert {word for word in words if OF_METHODS.search(word)} <= NOT_OF_METHODS
    options = set().union(*(kind.names() for kind in options_of_methods().values())) - {
        "layers",
        "alpha",
        "temperature",
    }
    assert not options & words


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
    imported = imports(TRAINER[module])
    support = imports(ENGINE["support"]) | {"bertdata.support.load_tokenizer", "bertdata.support.bertdata_main"}
    names = {f"bertdata.support.{name.rpartition('.')[2]}" for name in support}
    names |= {f"bertdata.{name}" for name in bertdata.__all__}
    assert {name for name in imported if name.startswith("bertdata.")} <= names
    private = {part for name in imported for part in name.split(".") if part.startswith("_")}
    assert private <= {"__future__", "__main__", "_subclasses"}
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
    assert set(bertdata.__all__) <= set(dir(bertdata))
    assert not {"Any", "annotations", "importlib"} & set(dir(bertdata))
    assert all(getattr(bertdata, name) is not None for name in bertdata.__all__)
    with pytest.raises(AttributeError, match="no attribute 'loda'"):
        _ = bertdata.loda


# ------------------------------------------------------------------------------------------------------- files of a run


MOST = {"run": 24, "step": 10}


def test_a_run_goes_through_few_files(dataset, tmp_path):
    """Those of bertrain that are called in all, and in a step of training."""
    files, stages = {name: set() for name in MOST}, ["run"]

    def profile(frame, event, _):
        code = frame.f_code
        if event == "call" and code is Trainer.step.__code__:
            stages.append("step")
        if event == "call" and code.co_filename.startswith(f"{ROOT / 'bertrain'}/"):
            for stage in stages if threading.current_thread() is threading.main_thread() else ["run"]:
                files[stage].add(code.co_filename)
        if event == "return" and code is Trainer.step.__code__:
            stages.remove("step")

    for module in (threading, sys):
        module.setprofile(profile)
    try:
        options = QUIET | {"steps": 2, "save_every": 1, "eval_every": 1}
        succeeds(main, *flags(dataset.path, tmp_path / "run", **options))
    finally:
        for module in (threading, sys):
            module.setprofile(None)
    assert {name: len(found) for name, found in files.items() if not 0 < len(found) <= MOST[name]} == {}, files


# --------------------------------------------------------------------------------------------- what tests may not touch


TOUCHED = {  # file → what its tests patch or read of the product; support/limits.py has the constants
    "conftest": "of_a_build.announcing_compilation",
    "sources": "_read text_module.TextFile._read",
    "test_dist": "_checkpoints checkpoint._checkpoints",
    "test_families": "bertrain.lab.distillation.taps._PROJECTIONS",
    "test_finite": "Trainer._seed Trainer.add_gradients _seed optimizers.OPTIMIZERS.sgd",
    "test_gpu": "Trainer.update trainer_module.micro_batches",
    "test_gpu_dry": "Report.finish pretrain.world trainer_module.DistributedDataParallel",
    "test_pretrain": "checkpoint.shutil.rmtree",
    "test_run": "Trainer.step _devices speed.peak_flops speed.time",
    "test_samples": "bertdata.read.stream.Samples._request",
    "test_step": "Pretraining.name Report.finish Stream.next_batch _numbers ranks.Reading.take "
    "report_module.Reading trainer_module.DistributedDataParallel",
    "test_texts": "Source.content engine.encode_words",
    "test_tokens": "_sample",
    "test_transfer": "_copy",
    "test_words": "_local _pages engine.ids_by",
}
DEFINED = re.compile(r"(?:def |class |self\.|^)(_(?!replace\b)[A-Za-z]\w*)", re.MULTILINE)


@cache
def private_names():
    return {name for path in [*ENGINE.values(), *TRAINER.values()] for name in DEFINED.findall(path.read_text())}


def touched(path):
    """What a file puts in place of functions and constants of the product, and the private names that it reads."""
    from_ours = [node for node in ast.walk(parsed(path)) if str(getattr(node, "module", ""))[:4] == "bert"]
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
                if name.partition(".")[0] in ours:
                    yield name


def test_tests_patch_nothing_of_the_product_and_read_no_private_name():
    found = {path.stem: {*touched(path)} for path in (ROOT / "tests").rglob("*.py")}
    assert {name: more for name in found if (more := found[name] - {*TOUCHED.get(name, "").split()})} == {}
    assert sum(name in private_names() for names in TOUCHED.values() for name in names.split()) <= 10
