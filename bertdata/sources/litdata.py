"""Datasets that `optimize` of litdata wrote → their documents. docs/format.md says what is taken."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from bertdata.errors import InputError
from bertdata.sources.idfile import Ids, IdsFile, ended_by, require_room
from bertdata.sources.indexed import COLUMNS, Block, Index, SampleFile, count_of, documents_of, open_indices
from bertdata.sources.inputs import Input

# The integers in litdata's own lists of dtypes.
_TORCH = dict(enumerate(["uint8", "int8", "int16", "int16", "int32", "int32", "int64", "int64"], 11)) | {20: "uint16"}
_NUMPY = {0: "int8", 1: "int16", 2: "int32", 3: "int64", 4: "uint8", 5: "uint16", 6: "uint32", 7: "uint64"}
_DTYPES = {f"no_header_tensor:{number}": dtype for number, dtype in _TORCH.items()} | {
    f"no_header_numpy:{number}": dtype for number, dtype in _NUMPY.items()
}


def open_litdata(name: str, end_token: int | None) -> IdsFile:
    """name: a directory or a URL with an index.json, or a directory of such directories.

    end_token: the id that ends a document; None: each item is a document.
    """
    chunks, files = list[SampleFile](), list[Input]()
    for index in open_indices(name):
        files.append(index.file)
        with index.parsing():
            num_columns, column, dtype = _column(index)
            if end_token is not None:
                require_room(index.file, dtype, end_token)
            for entry in index.content["chunks"]:
                files.append(index.named(entry["filename"]))
                chunks.append(
                    SampleFile(
                        file=files[-1],
                        num_samples=count_of(entry["chunk_size"]),
                        num_bytes=count_of(entry["chunk_bytes"]),
                        ids_of=partial(_ids_of, num_columns, column, dtype),
                    )
                )

    def items() -> Iterator[Ids]:
        return documents_of(chunks) if end_token is None else ended_by(end_token, documents_of(chunks))

    return IdsFile(files, sum(chunk.file.size or 0 for chunk in chunks), items)


def _ids_of(num_columns: int, column: int, dtype: np.dtype[Any], block: Block) -> Ids:
    starts, stops = block.offsets[:-1], block.offsets[1:]
    if num_columns:
        starts, stops = block.column([None] * num_columns, column)
    return block.ids(starts, stops, dtype)


def _column(index: Index) -> tuple[int, int, np.dtype[Any]]:
    """How many columns an item has, the one of the ids, and its dtype. An item of TokensLoader is ids alone: 0 columns.

    Raises InputError for what cannot be read.
    """
    config = index.content["config"]
    leaves, loader = config["data_format"], config.get("item_loader", "PyTreeLoader")
    if config.get("compression") is not None or config.get("encryption") is not None:
        sentence = f"{index.file} has compressed or encrypted chunks, which are not read; call optimize without either"
        raise InputError(sentence, "unsupported", option="inputs", given=index.file.name)
    if loader not in ("TokensLoader", "PyTreeLoader"):
        sentence = f"{index.file} has chunks for {loader}; optimize with TokensLoader or PyTreeLoader, or give Parquet"
        raise InputError(sentence, "unsupported", option="inputs", given=index.file.name)
    names = _names(config["data_spec"], len(leaves))
    column = next((names.index(each) for each in COLUMNS if each in names), None if len(leaves) > 1 or names else 0)
    if column is None:
        shown = ", ".join(names) or f"{len(leaves)} values without names"
        sentence = f"{index.file} has no column {COLUMNS[0]!r}, only {shown}; let optimize give ids that name, or alone"
        raise InputError(sentence, "no-column", option="inputs", given=index.file.name)
    if leaves[column] not in _DTYPES:
        sentence = f"{index.file} has ids as {leaves[column]}; let optimize give one-axis arrays or tensors of integers"
        raise InputError(sentence, "wrong-column-type", option="inputs", given=index.file.name)
    return (0 if loader == "TokensLoader" else len(leaves)), column, np.dtype(_DTYPES[leaves[column]])


def _names(spec: str | None, num_leaves: int) -> list[str]:
    """The names of the values of an item, if it is a dictionary of values; else none."""
    if spec is None:
        return []
    tree = json.loads(spec)[1]
    if tree["type"] != "builtins.dict" or len(tree["children_spec"]) != num_leaves:
        return []
    return [str(name) for name in json.loads(tree["context"])]
