"""Kernels come from the cache on disk, and give the same results on every machine."""

import importlib
import os
import pkgutil
import sys
from types import ModuleType

import pytest
from ray import cloudpickle
from support.commands import python
from support.data import make_text, train_tokenizer
from support.disk import put

import bertdata


@pytest.mark.slow
def test_a_kernel_is_compiled_anew_when_a_file_beside_it_changes(tmp_path):
    """numba itself looks at the file of the kernel alone, and so would go on with what it inlined.

    A kernel from the cache loads nothing that only compiling needs.
    """
    put(tmp_path / "kernels" / "__init__.py", "")
    head = "from bertdata.jit import jit\nfrom kernels.low import low\n"
    put(tmp_path / "kernels" / "high.py", head + "@jit()\ndef high(n):\n    return low(n) * 2\n")
    program = "import sys\nfrom kernels.high import high\nprint(high(1), 'numba.np.linalg' in sys.modules)"
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    environment["NUMBA_CACHE_DIR"] = str(tmp_path / "cache")
    for added, said in ((1, "4 True\n"), (None, "4 False\n"), (20, "42 True\n")):
        if added:
            low = f"from bertdata.jit import part\n@part()\ndef low(n):\n    return n + {added}\n"
            put(tmp_path / "kernels" / "low.py", low)
        assert python("-c", program, environment=environment) == said


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


@pytest.mark.slow
@pytest.mark.parametrize(("way", "place", "said", "kinds"), WAYS)
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
