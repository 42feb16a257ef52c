"""Kernels come from the cache on disk without what only compiling needs, and kernels that are compiled go with them."""

import importlib
import os
import pkgutil
import sys
from types import ModuleType

import numpy as np
import pytest
from ray import cloudpickle
from support.commands import python
from support.data import make_text, train_tokenizer
from support.disk import put

import bertdata
from bertdata.jit import announcing_compilation
from bertdata.tokenize.kernels.runs import num_ids

KERNELS = """
import numpy as np
from bertdata.jit import jit

@jit(arrays=True)
def total(numbers):
    copy = np.zeros(numbers.size, np.int64)
    for k in range(numbers.size):
        copy[k] = numbers[k]
    return copy[0] + copy[-1]

@jit()
def twice(numbers):
    return 2 * total(numbers)
"""


def program_of(folder, text):
    """What a program with the kernels prints."""
    if not (folder / "made.py").exists():  # the cache belongs to a file with its time
        (folder / "made.py").write_text(KERNELS)
    program = "import sys, numpy as np\nfrom made import *\n" + text
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    return python("-c", program, environment={"NUMBA_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": path})


@pytest.mark.slow
def test_a_kernel_from_the_cache_loads_nothing_that_compiles(tmp_path):
    for is_compiled in (True, False):
        said = program_of(tmp_path, "print(total(np.arange(5)), 'numba.np.linalg' in sys.modules)")
        assert said == f"4 {is_compiled}\n"


def test_compiling_is_announced_once_and_loading_is_not(tmp_path, monkeypatch):
    (tmp_path / "announced.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path / "cache"))
    for times in (1, 0):
        said, kernels = [], importlib.import_module("announced")
        with announcing_compilation(said.append):
            assert (kernels.total(np.arange(5)), kernels.twice(np.arange(5))) == (4, 8)
        assert len(said) == times
        del sys.modules["announced"]


def test_a_kernel_is_compiled_anew_when_a_file_beside_it_changes(tmp_path):
    """numba itself looks at the file of the kernel alone, and so would go on with what it inlined."""
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "low.py").write_text("from bertdata.jit import part\n@part()\ndef low(n):\n    return n + 1\n")
    (package / "high.py").write_text(
        "from bertdata.jit import jit\nfrom kernels.low import low\n@jit()\ndef high(n):\n    return low(n) * 2\n"
    )
    (tmp_path / "made.py").write_text("from kernels.high import high\n")
    assert program_of(tmp_path, "print(high(1))") == "4\n"
    (package / "low.py").write_text("from bertdata.jit import part\n@part()\ndef low(n):\n    return n + 20\n")
    assert program_of(tmp_path, "print(high(1))") == "42\n"


def test_python_cannot_call_a_part_of_kernels():
    with pytest.raises(TypeError, match="num_ids"):
        num_ids(np.zeros(1, np.uint16), np.uint64(0))


MODULES = [module.name for module in pkgutil.walk_packages(bertdata.__path__, "bertdata.")]


@pytest.mark.parametrize("name", [name for name in MODULES if name != "bertdata.__main__"])
def test_every_global_can_be_pickled(name):
    """datasets pickles the functions of `map` with dill, and so the globals of modules outside site-packages."""
    for key, value in vars(importlib.import_module(name)).items():
        if not (isinstance(value, ModuleType) or key.startswith("__")):
            cloudpickle.dumps(value)


PROGRAM = """
import sys, zlib, numpy as np, bertdata
from pathlib import Path
from bertdata import jit
from bertdata.tokenize.kernels.bits import write_places
dataset, *paths = sys.argv[1:]
batch = bertdata.Loader(bertdata.open(dataset), length=32, samples="packed").read(np.arange(50))
arrays = [batch.input_ids, batch.labels, batch.position_ids]
for path in paths:
    arrays.append(bertdata.Tokenizer.load(path).encode_batch([Path(path, "text").read_text()])[0])
print(jit.IS_PLAIN, write_places.__name__, *[zlib.crc32(array.tobytes()) for array in arrays])
"""
GENERIC = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}  # any processor that LLVM knows, ARM among them
WAYS = [
    ({"BERTDATA_PLAIN_NUMBA": "1"}, 0, "True", ()),
    (GENERIC, 1, "_places_one_by_one", ["wordpiece", "bpe", "unigram"]),
]


@pytest.mark.parametrize(("way", "place", "said", "kinds"), [WAYS[0], pytest.param(*WAYS[1], marks=pytest.mark.slow)])
def test_results_are_the_same_without_what_some_machines_lack(dataset, tmp_path, way, place, said, kinds):
    """Without the private parts of numba, or the vector instructions of this processor."""
    text = make_text(300) + "don't café 水火 12345 \0 ﬁ e\u0301\n" * 20
    for name in kinds:
        train_tokenizer(put(tmp_path / name / "text", text), tmp_path / name, type=name, vocab_size=600)
    words = ["-c", PROGRAM, dataset.path, *(tmp_path / name for name in kinds)]
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    usual, other = (python(*words, environment=environment).split() for environment in ({}, way | cache))
    assert usual[2:] == other[2:]
    assert (usual[0], other[place]) == ("False", said)
