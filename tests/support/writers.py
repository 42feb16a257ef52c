"""Ids written by the libraries themselves, each run in its environment of benchmarks/environments.py.

    python tests/support/writers.py LIBRARY < documents.json

documents.json is a list of lists of ids. It writes the directory that docs/import.md reads.
"""

import json
import sys

import numpy as np


def streaming(documents):
    from environments import without_pictures

    without_pictures()
    from streaming import MDSWriter

    with MDSWriter(out="mds", columns={"input_ids": "ndarray:uint16"}, size_limit=300) as writer:
        for ids in documents:
            writer.write({"input_ids": np.array(ids, np.uint16)})


def array_of(ids):
    """What optimize calls; it must be found by its name in a new process."""
    return np.array(ids, np.uint16)


def litdata(documents):
    from litdata import optimize

    optimize(fn=array_of, inputs=documents, output_dir="optimized", chunk_bytes=300, num_workers=1, verbose=False)


if __name__ == "__main__":
    {"streaming": streaming, "litdata": litdata}[sys.argv[1]](json.load(sys.stdin))
