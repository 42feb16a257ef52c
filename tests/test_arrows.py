"""What may import what (ARCHITECTURE.md), and what importing the package costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import bertdata

ROOT = Path(__file__).parent.parent
ANYONE = {"errors", "types"}
ARROWS = {
    "errors": set(),
    "types": {"errors"},
    "_kernels": set(),
    "shard": set(),
    "inputs": set(),
    "text": {"inputs"},
    "_kernels_text": {"_kernels"},
    "engine": {"_kernels_text"},
    "tokens": {"engine"},
    "manifest": {"shard"},
    "reader": {"manifest", "shard"},
    "units": {"_kernels", "_kernels_text", "manifest", "shard", "text", "tokens"},
    "build": {"_kernels", "units", "inputs", "text", "tokens", "shard", "manifest", "reader"},
    "order": {"_kernels"},
    "index": {"shard"},
    "samples": {"reader", "index", "shard", "_kernels"},
    "masking": {"_kernels"},
    "cache": {"shard"},
    "loader": {"reader", "order", "samples", "masking", "cache"},
    "verify": {"reader", "manifest", "shard", "cache"},
    "report": {"reader", "loader", "shard", "tokens", "cache"},
    "bench": {"reader", "loader"},
}
ENGINE = sorted(path.stem for path in (ROOT / "bertdata").glob("*.py"))
TRAINER = sorted(path.stem for path in (ROOT / "bertrain").glob("*.py"))


def imports(package, module, *, only_top=False):
    """Dotted names that a module imports; `from bertdata import x` counts as bertdata.x."""
    tree = ast.parse((ROOT / package / f"{module}.py").read_text())
    found = set()
    for node in tree.body if only_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def rooms(names, package):
    """The modules of a package among dotted names."""
    known = {path.stem for path in (ROOT / package).glob("*.py")}
    return {name.split(".")[1] for name in names if name.startswith(f"{package}.")} & known


@pytest.mark.parametrize("module", sorted(ARROWS))
def test_arrows_of_the_engine_point_one_way(module):
    allowed = ARROWS[module] | (ANYONE - {module} if module not in ANYONE else set())
    found = rooms(imports("bertdata", module), "bertdata")
    assert found <= allowed
    assert ARROWS[module] <= found, "an arrow nobody uses"


def test_every_room_of_the_engine_is_on_the_map():
    assert set(ENGINE) - {"__init__", "__main__", "cli"} == set(ARROWS)


@pytest.mark.parametrize("module", ENGINE)
def test_libraries_are_where_they_belong(module):
    used = {name.split(".")[0] for name in imports("bertdata", module)}
    assert "bertrain" not in used
    assert "torch" not in used
    for library, homes in (
        ("pyarrow", ["inputs", "text"]),
        ("tokenizers", ["tokens", "engine"]),
        ("transformers", ["tokens"]),
    ):
        assert library not in used or module in homes
    assert not {"torch", "transformers", "pyarrow"} & {
        name.split(".")[0] for name in imports("bertdata", module, only_top=True)
    }


@pytest.mark.parametrize("module", TRAINER)
def test_the_trainer_uses_no_private_part_of_the_engine(module):
    found = imports("bertrain", module)
    assert rooms(found, "bertdata") <= {"cache", "cli", "errors", "shard", "tokens", "verify"}
    assert not any(part.startswith("_") for name in found for part in name.split(".") if part != "__future__")
    source = (ROOT / "bertrain" / f"{module}.py").read_text()
    assert "from_numpy" not in source or module == "feed"


def loaded_after(statement):
    """Top-level modules in a fresh interpreter after a statement."""
    code = f"import sys\n{statement}\nprint(' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
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


def test_public_names_are_exactly_these():
    names = "IGNORE_INDEX Batch BertdataError Dataset Loader Masking SpecialTokens key open"
    assert sorted(bertdata.__all__) == sorted(names.split())
    assert all(getattr(bertdata, name) is not None for name in bertdata.__all__)
    with pytest.raises(AttributeError, match="no attribute 'loda'"):
        _ = bertdata.loda
