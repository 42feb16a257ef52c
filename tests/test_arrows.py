"""What may import what (ARCHITECTURE.md), and what importing the package costs."""

import ast
import runpy
from functools import cache
from pathlib import Path

import pytest
from helpers import python

import bertdata

ROOT = Path(__file__).parent.parent

# Modules that any package may import. Each may import those before it.
COMMON = ["choices", "errors", "keys", "jit", "bits", "types", "files", "urls", "prepare"]
# Packages, leaf first: the packages that each may import, and its files, of which each may import those before it.
PACKAGES = {
    "remote": ("", "requests reader stores web hub files"),
    "format": ("remote", "arrays records table manifest shard origins dataset answers verify transfer"),
    "sources": ("remote", "kernels inputs saved find streams texts maps jsonl documents delimited tables "
                          "idfile megatron flat rows indexed mds litdata ids split blocks docstrings"),
    "tokenize": ("",
                 "kernels.__init__ kernels.records kernels.bits kernels.tries kernels.runs kernels.added "
                 "kernels.merges kernels.splits kernels.unigram kernels.wordpiece kernels.boundaries kernels.words "
                 "kernels.bytes rules forms models added engine wordpiece words bytewords encoder tokenizer load rows "
                 "texts spelling train"),
    "write": ("format sources tokenize",
              "kernels threads state duplicates units encoding staging cluster publish vocabulary dataset importing "
              "exporting"),
    "read": ("format tokenize",
             "kernels order stream index windows pieces pairs samples source mix words masking loader"),
    "look": ("format sources tokenize read", "facts show trace page report bench"),
}  # fmt: skip
PACKAGES = {name: (set(may_import.split()), files.split()) for name, (may_import, files) in PACKAGES.items()}
# The trainer's files, leaf first; each may import those before it.
_LISTED = """
options.values recipes.__init__ options.config options.__init__ options.flags runtime.feed runtime.dist runtime.stop
runtime.clock runtime.trackers runtime.__init__ commands.reading lab.__init__ lab.tables models.families
models.isolation models.encoder lab.distillation.__init__ lab.distillation.taps lab.growth models.rotary
lab.elastic.__init__ lab.elastic.space models.build lab.adapters models.__init__ objectives.losses objectives.base
objectives.mlm objectives.nsp objectives.__init__ lab.distillation.objective lab.elastic.training optim.schedules
optim.average lab.side_channel optim.muon optim.moments optim.stable optim.lamb optim.optimizers optim.__init__
run.__init__ run.phases run.schedule run.rates run.log run.card run.state run.checkpoint run.writer run.watch
run.assemble run.batches run.milestones run.evaluate run.run run.validation run.records pretrain commands.__init__
commands.pairs commands.evaluate commands.report commands.plot commands.demo commands.plan commands.push
commands.doctor lab.tasks.metrics lab.tasks.base lab.tasks.texts lab.tasks.words lab.tasks.spans lab.tasks.choices
lab.tasks.__init__ lab.finetune lab.augment lab.suite lab.elastic.search lab.elastic.extract
lab.distillation.teacher
"""
TRAINER_FILES = _LISTED.split()

ENGINE, TRAINER = (
    {".".join(path.relative_to(root).with_suffix("").parts): path for path in sorted(root.rglob("*.py"))}
    for root in (ROOT / "bertdata", ROOT / "bertrain")
)


@cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path, *, only_top=False):
    """Dotted names that a file imports; `from bertdata import x` counts as bertdata.x."""
    names = set()
    for node in parsed(path).body if only_top else ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def modules(names, package, known):
    """The modules of a package that dotted names are in."""
    inside = set()
    for name in names:
        parts = name.split(".")
        if parts[0] == package:
            candidates = [".".join(parts[1 : 1 + n]) for n in range(len(parts), 0, -1)]
            inside |= set([module for module in candidates if module in known][:1])
    return inside


FILES = [f"{package}.{file}" for package, (_, files) in PACKAGES.items() for file in files]


@pytest.mark.parametrize("module", [*COMMON, *FILES])
def test_a_file_of_the_engine_imports_what_comes_before_it(module):
    """Common modules, files before it in its package, and the packages that its package may import."""
    imported = modules(imports(ENGINE[module]), "bertdata", ENGINE)
    if module in COMMON:
        assert imported <= set(COMMON[: COMMON.index(module)])
        return
    package, file = module.split(".", 1)
    may_import, files = PACKAGES[package]
    others = imported - {*COMMON, *(f"{package}.{other}" for other in files[: files.index(file)])}
    assert {name.split(".")[0] for name in others} <= may_import, others


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_every_package_that_it_may(package):
    may_import, files = PACKAGES[package]
    imported = set().union(*(modules(imports(ENGINE[f"{package}.{file}"]), "bertdata", ENGINE) for file in files))
    assert may_import == {name.split(".")[0] for name in imported if "." in name} - {package}


def test_every_file_is_on_the_map():
    others = {f"{package}.__init__" for package in PACKAGES} | {"__init__", "__main__", "cli", "torch"}
    assert set(ENGINE) - others == {*COMMON, *FILES}
    assert set(TRAINER) - {"__init__", "__main__"} == {*TRAINER_FILES}


@pytest.mark.parametrize("module", ENGINE)
def test_libraries_are_where_they_belong(module):
    used = {name.split(".")[0] for name in imports(ENGINE[module])}
    assert "bertrain" not in used
    assert ("torch" in used) == (module in ("torch", "tokenize.texts"))
    homes = (("pyarrow", "sources."), ("tokenizers", "tokenize."), ("transformers", "tokenize."),
             ("obstore", "remote."), ("ray", "write.cluster"))  # fmt: skip
    for library, home in homes:
        assert library not in used or module.startswith(home)
    at_once = {name.split(".")[0] for name in imports(ENGINE[module], only_top=True)}
    assert not {"transformers", "pyarrow", "ray"} & at_once


@pytest.mark.parametrize("module", TRAINER_FILES)
def test_a_file_of_the_trainer_imports_what_comes_before_it(module):
    before = TRAINER_FILES[: TRAINER_FILES.index(module)]
    allowed = {name.removesuffix(".__init__") for name in before}
    names = {name.removesuffix(".__init__") for name in TRAINER} - {"__init__", "__main__"}
    assert modules(imports(TRAINER[module]), "bertrain", names) <= allowed


@pytest.mark.parametrize("module", TRAINER)
def test_the_trainer_uses_no_private_part_of_the_engine(module):
    imported = imports(TRAINER[module])
    allowed = {"choices", "cli", "errors", "files", "format.answers", "format.arrays", "format.records",
               "format.verify", "look.page", "read.words", "sources.docstrings", "sources.inputs",
               "sources.streams", "tokenize.load", "tokenize.spelling",
               "tokenize.tokenizer"}  # fmt: skip
    assert modules(imported, "bertdata", ENGINE) - {"__init__"} <= allowed
    assert not any(part.startswith("_") for name in imported for part in name.split(".") if part != "__future__")
    source = TRAINER[module].read_text()
    assert "from_numpy" not in source or module == "runtime.feed"


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
    for module in ("bertdata.cli", "bertrain.__main__"):
        assert not heavy & loaded_after(f"from {module} import main\nmain(['--help'], standalone_mode=False)")


def test_a_loader_needs_neither_torch_nor_a_tokenizer(dataset):
    run = f"import bertdata; next(bertdata.Loader(bertdata.open({str(dataset.path)!r}), length=16))"
    assert not {"torch", "transformers", "tokenizers", "pyarrow"} & loaded_after(run)


def test_files_of_this_machine_need_nothing_for_servers(dataset, corpus, tmp_path):
    """It takes 0.1 s to import."""
    build = ["build", str(corpus), "--out", str(tmp_path / "out"), "--tokenizer", str(dataset.path)]
    run = f"from bertdata.cli import main; main({build!r}, standalone_mode=False); "
    run += f"main(['inspect', {str(tmp_path / 'out')!r}], standalone_mode=False)"
    assert not {"bertdata.remote", "bertdata.format.transfer", "obstore"} & loaded_after(run)


def test_public_names_are_exactly_these():
    names = "IGNORE_INDEX Batch BertdataError BuildReport Dataset Loader Masking SpecialTokens TextFormat Tokenizer "
    names += "build export finish import_ids key open train_tokenizer"
    assert sorted(bertdata.__all__) == sorted(names.split())
    assert set(bertdata.__all__) <= set(dir(bertdata))
    assert not {"Any", "annotations", "importlib"} & set(dir(bertdata))
    assert all(getattr(bertdata, name) is not None for name in bertdata.__all__)
    with pytest.raises(AttributeError, match="no attribute 'loda'"):
        _ = bertdata.loda


SIZE = runpy.run_path(str(ROOT / "tools" / "size.py"), run_name="read")


def test_lines_of_code_are_counted_without_words():
    source = '"""Of a\nmodule."""\n\n# why\ndef f(x):\n    """What."""\n    y = (  # so\n        x\n    )\n\n'
    source += '    return """a\nb"""\n'
    assert SIZE["code_lines"](source) == {5, 7, 8, 9, 11, 12}
    assert [*SIZE["long_functions"]("def f():\n" + "    x = 1\n" * 60)] == [("f", 61)]
    assert [*SIZE["long_functions"]("def f():\n" + "    x = 1\n" * 59)] == []
    assert [SIZE["group_of"](name) for name in ("run/run", "pretrain", "lab/growth", "lab/tasks/base")] == [
        "run", "pretrain", "lab", "lab",
    ]  # fmt: skip


@pytest.mark.parametrize("name", TRAINER)
def test_no_function_of_the_core_is_long(name):
    source, group = TRAINER[name].read_text(encoding="utf-8"), SIZE["group_of"](name.replace(".", "/"))
    if group in SIZE["CORE"]:
        assert [*SIZE["long_functions"](source)] == []
        assert "fmt: skip" not in source
