"""Ids written by the libraries themselves, each run in its environment of benchmarks/environments.py.

    python tests/writers.py LIBRARY OUT < documents.json

documents.json is a list of lists of ids. Each dataset is a directory of OUT.
"""

import json
import sys
from pathlib import Path

import numpy as np

MDS = {  # name of a dataset → encoding of input_ids, compression, hashes
    "uint16": ("ndarray:uint16", None, []),
    "uint32 zstd": ("ndarray:uint32", "zstd", ["sha1"]),
    "int32 zstd 7": ("ndarray:int32", "zstd:7", ["md5", "sha256", "xxh64"]),
    "int64": ("ndarray:int64", None, ["md5", "sha1", "xxh3_128"]),
    "any dtype": ("ndarray", "zstd", []),
    "bytes": ("bytes", None, ["xxh64"]),
    "bytes zstd": ("bytes", "zstd", ["sha3_256"]),
    "gzip": ("ndarray:uint16", "gz", []),
}
LITDATA = (  # names of datasets: what an item is, and how it is stored
    "torch uint16 tokens",
    "torch int64 tokens",
    "torch int32 items",
    "numpy uint16 items",
    "numpy uint32 tokens",
    "columns int64 items",
)
SHARD_BYTES = 1000
LENGTH = 6  # of the samples of equal length


def streaming(out, documents):
    sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
    from environments import without_pictures

    without_pictures()
    from streaming import MDSWriter
    from streaming.base.util import merge_index

    def write(directory, documents, encoding, compression, hashes, **columns):
        dtype = np.dtype(encoding.split(":")[1] if ":" in encoding else "int64")
        with MDSWriter(
            out=str(directory),
            columns={"input_ids": encoding, **columns},
            compression=compression,
            hashes=hashes,
            size_limit=SHARD_BYTES,
        ) as writer:
            for number, ids in enumerate(documents):
                array = np.array(ids, dtype)
                sample = {"input_ids": array.tobytes() if encoding == "bytes" else array}
                writer.write(sample | {"id": number, "text": "w" * (number % 5)} if columns else sample)

    for name, (encoding, compression, hashes) in MDS.items():
        write(out / name, documents, encoding, compression, hashes)
    write(out / "columns", documents, "ndarray:uint16", "zstd", ["sha1"], id="int", text="str")
    for kind in ("streams", "merged"):
        for number in range(12):
            write(out / kind / str(number), documents[number::12], "ndarray:int32", None, [])
    merge_index(str(out / "merged"))
    blocks = [ids[:LENGTH] for ids in documents if len(ids) >= LENGTH]
    write(out / "equal", blocks, f"ndarray:uint16:{LENGTH}", None, [])
    write(out / "equal columns", blocks, f"ndarray:uint16:{LENGTH}", "zstd", [], id="int", text="str")


class Items:
    """What optimize calls; it must be found by its name in a new process."""

    def __init__(self, documents, kind):
        self.documents, self.kind = documents, kind

    def __call__(self, number):
        import torch

        ids, kind = self.documents[number], self.kind
        if kind.startswith("numpy"):
            return np.array(ids, kind.removeprefix("numpy "))
        tensor = torch.tensor(ids, dtype=getattr(torch, kind.split()[1]))
        return {"length": len(ids), "input_ids": tensor, "text": "w" * number} if kind.startswith("columns") else tensor


def litdata(out, documents):
    from litdata import TokensLoader, optimize

    for name in LITDATA:
        kind, _, loader = name.rpartition(" ")
        optimize(
            fn=Items(documents, kind),
            inputs=list(range(len(documents))),
            output_dir=str(out / name),
            chunk_bytes=SHARD_BYTES,
            num_workers=1,
            verbose=False,
            item_loader=TokensLoader() if loader == "tokens" else None,
        )


if __name__ == "__main__":
    {"streaming": streaming, "litdata": litdata}[sys.argv[1]](Path(sys.argv[2]), json.load(sys.stdin))
