"""bertrain: a lean data-parallel loop that trains BERT-style encoders on bertdata's batches.

torchrun --nproc-per-node 2 -m bertrain.pretrain --data shards/ --out run/
bertrain evaluate --checkpoint run/ --data shards/

Without torch, `bertrain COMMAND` prints what to install; `bertrain --help` does not need it. If `bertdata` is a package
of a different project (the package index has one of that name), importing this package raises ImportError.
"""

import os
import sys
from pathlib import Path

import bertdata

# libgomp reads this when torch is imported. A waiting thread of torch spins before it sleeps, and keeps its core from
# other programs; by default it spins 30 times as long.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if "Loader" not in getattr(bertdata, "__all__", ()):
    _place = getattr(bertdata, "__file__", None) or [*bertdata.__path__][0]  # a directory without __init__.py
    _sentence = (
        f"Python imports bertdata from {_place}, which is not the bertdata that bertrain was installed with; "
        "remove it (pip uninstall bertdata, if pip installed it), then install bertrain again"
    )
    _command = sys.orig_argv[1:3]  # of `python …/bin/bertrain` or `python -m bertrain.pretrain`
    if any(Path(word.removeprefix("-m")).name.partition(".")[0] == "bertrain" for word in _command):
        sys.exit(f"Error: {_sentence}")
    raise ImportError(_sentence)
