"""What may import what (ARCHITECTURE.md), and what importing the package costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import bertdata

ROOT = Path(__file__).parent.parent

# Modules that any room may import. Each may import those before it.
COMMON = ["choices", "errors", "keys", "jit", "types", "files", "urls", "prepare"]
# Rooms, leaf first; the rooms that each may import; and its files, of which each may import those before it.
ROOMS = {
    "remote": (set(), ["requests", "reader", "stores", "web", "hub", "files"]),
    "format": (
        {"remote"},
        ["arrays", "records", "table", "manifest", "shard", "origins", "dataset", "answers", "verify", "transfer"],
    ),
    "sources": (
        {"remote"},
        [
            "kernels",
            "inputs",
            "find",
            "streams",
            "texts",
            "maps",
            "jsonl",
            "documents",
            "tables",
            "ids",
            "split",
            "blocks",
            "docstrings",
        ],
    ),
    "tokenize": (
        set(),
        ["kernels", "rules", "forms", "models", "added", "engine", "wordpiece", "words", "tokenizer", "load", "train"],
    ),
    "write": (
        {"format", "sources", "tokenize"},
        [
            "kernels",
            "threads",
            "duplicates",
            "units",
            "staging",
            "cluster",
            "publish",
            "vocabulary",
            "dataset",
            "importing",
            "exporting",
        ],
    ),
    "read": (
        {"format"},
        [
            "kernels",
            "order",
            "stream",
            "index",
            "windows",
            "pieces",
            "pairs",
            "samples",
            "source",
            "mix",
            "words",
            "masking",
            "loader",
        ],
    ),
    "look": ({"format", "sources", "tokenize", "read"}, ["facts", "show", "trace", "page", "report", "bench"]),
}
# The trainer's files, leaf first; each may import those before it. The commands import each other only as listed.
TRAINER_FILES = [
    "recipes", "config", "feed", "reading", "tables",
    "models.families", "models.isolation", "models.encoder", "models.taps", "models.grow",
    "models.elastic", "models.build", "models.adapters", "models.__init__",
    "objectives.losses", "objectives.base", "objectives.mlm", "objectives.nsp", "objectives.__init__",
    "objectives.distil", "objectives.elastic",
    "optim.schedules", "optim.average", "optim.side_channel", "optim.muon", "optim.optimizers", "optim.__init__",
    "plan",
    "runtime.dist", "runtime.stop", "runtime.clock", "runtime.rates", "runtime.log", "runtime.card",
    "runtime.checkpoint", "runtime.writer", "runtime.trackers",
    "runtime.watch", "runtime.__init__", "assemble", "batches", "pairs", "evaluate", "run",
    "tasks.metrics", "tasks.base", "tasks.texts", "tasks.words", "tasks.spans", "tasks.choices",
    "tasks.__init__", "finetune", "report", "plot",
    "pretrain",
]  # fmt: skip
COMMANDS = ["demo", "augment", "suite", "search", "extract", "push", "teacher", "doctor"]

ENGINE = {
    ".".join(path.relative_to(ROOT / "bertdata").with_suffix("").parts): path
    for path in sorted((ROOT / "bertdata").rglob("*.py"))
}
TRAINER = {
    ".".join(path.relative_to(ROOT / "bertrain").with_suffix("").parts): path
    for path in sorted((ROOT / "bertrain").rglob("*.py"))
}


def imports(path, *, only_top=False):
    """Dotted names that a file imports; `from bertdata import x` counts as bertdata.x."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in tree.body if only_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def modules(names, package, known):
    """The modules of a package that dotted names are in."""
    found = set()
    for name in names:
        parts = name.split(".")
        if parts[0] == package:
            inside = [".".join(parts[1 : 1 + n]) for n in range(len(parts), 0, -1)]
            found |= set([module for module in inside if module in known][:1])
    return found


FILES = [f"{room}.{file}" for room, (_, files) in ROOMS.items() for file in files]


@pytest.mark.parametrize("module", [*COMMON, *FILES])
def test_arrows_of_the_engine_point_one_way(module):
    """A file imports common modules, files before it in its room, and rooms that its room may import."""
    found = modules(imports(ENGINE[module]), "bertdata", ENGINE)
    if module in COMMON:
        assert found <= set(COMMON[: COMMON.index(module)])
        return
    room, file = module.split(".")
    may_import, files = ROOMS[room]
    allowed = {*COMMON, *(f"{room}.{other}" for other in files[: files.index(file)])}
    others = found - allowed
    assert {name.split(".")[0] for name in others} <= may_import, others


@pytest.mark.parametrize("room", ROOMS)
def test_every_arrow_between_rooms_is_used(room):
    may_import, files = ROOMS[room]
    found = set().union(*(modules(imports(ENGINE[f"{room}.{file}"]), "bertdata", ENGINE) for file in files))
    assert may_import == {name.split(".")[0] for name in found if "." in name} - {room}


def test_every_file_of_the_engine_is_on_the_map():
    rooms = {f"{room}.__init__" for room in ROOMS}
    assert set(ENGINE) - rooms - {"__init__", "__main__", "cli", "torch"} == {*COMMON, *FILES}


@pytest.mark.parametrize("module", ENGINE)
def test_libraries_are_where_they_belong(module):
    used = {name.split(".")[0] for name in imports(ENGINE[module])}
    assert "bertrain" not in used
    assert ("torch" in used) == (module == "torch")
    homes = (("pyarrow", "sources."), ("tokenizers", "tokenize."), ("transformers", "tokenize."),
             ("obstore", "remote."), ("ray", "write.cluster"))  # fmt: skip
    for library, home in homes:
        assert library not in used or module.startswith(home)
    assert not {"transformers", "pyarrow", "ray"} & {
        name.split(".")[0] for name in imports(ENGINE[module], only_top=True)
    }


@pytest.mark.parametrize("module", [*TRAINER_FILES, *COMMANDS])
def test_arrows_of_the_trainer_point_one_way(module):
    before = TRAINER_FILES[: TRAINER_FILES.index(module)] if module in TRAINER_FILES else TRAINER_FILES
    allowed = {name.removesuffix(".__init__") for name in before}
    names = {name.removesuffix(".__init__") for name in TRAINER} - {"__init__", "__main__"}
    assert modules(imports(TRAINER[module]), "bertrain", names) <= allowed


def test_every_file_of_the_trainer_is_on_the_map():
    assert set(TRAINER) - {"__init__", "__main__"} == {*TRAINER_FILES, *COMMANDS}


@pytest.mark.parametrize("module", TRAINER)
def test_the_trainer_uses_no_private_part_of_the_engine(module):
    found = imports(TRAINER[module])
    allowed = {"choices", "cli", "errors", "files", "format.answers", "format.arrays", "format.records",
               "format.verify", "look.page", "read.words", "sources.docstrings", "sources.inputs",
               "sources.streams", "tokenize.load", "tokenize.tokenizer"}  # fmt: skip
    assert modules(found, "bertdata", ENGINE) - {"__init__"} <= allowed
    assert not any(part.startswith("_") for name in found for part in name.split(".") if part != "__future__")
    source = TRAINER[module].read_text()
    assert "from_numpy" not in source or module == "feed"


def loaded_after(statement):
    """Modules in a fresh interpreter after a statement."""
    code = f"import sys\n{statement}\nprint(' '.join(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split("\n")[-2].split())


def test_importing_the_package_loads_nothing_heavy():
    heavy = {"torch", "transformers", "numba", "numpy", "tokenizers", "pyarrow", "click"}
    assert not heavy & loaded_after("import bertdata")


def test_help_loads_nothing_heavy():
    heavy = {"torch", "transformers", "numba", "numpy", "tokenizers", "pyarrow"}
    run = "from bertdata.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    assert not heavy & loaded_after(run)


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
    names = "IGNORE_INDEX Batch BertdataError BuildReport Dataset Loader Masking SpecialTokens TextFormat build export "
    names += "finish import_ids key open train_tokenizer"
    assert sorted(bertdata.__all__) == sorted(names.split())
    assert set(bertdata.__all__) <= set(dir(bertdata))
    assert all(getattr(bertdata, name) is not None for name in bertdata.__all__)
    with pytest.raises(AttributeError, match="no attribute 'loda'"):
        _ = bertdata.loda
