"""Sampling indexes, computed once and cached on disk as memory-mapped arrays.

The name of an index in the cache directory is a hash of everything that decides its contents, so two processes that
make the same index write the same bytes. An index appears when it is complete. Its arrays are compared with their
SHA-256 when it is opened, about 1.5 GB/s. The directory can be deleted at any time; what is needed is made again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from bertdata.errors import BuildError, DatasetError, damaged
from bertdata.files import Stage, cache_directory, make_directory
from bertdata.format.arrays import ArrayWriter, array_name, array_path, digest, open_array
from bertdata.format.records import FORMAT_VERSION, canonical, read_record, sealed_record
from bertdata.read.stream import TokenStream

INDEX_VERSION = 3  # raised when the contents of an index change
Append = Callable[[str, NDArray[Any]], None]
"""append(name, values): adds values to the end of an array of the index."""


def index_identity(stream: TokenStream, kind: str) -> dict[str, Any]:
    """What decides the contents of every index of a split; a kind of samples adds what else it depends on."""
    return {
        "version": INDEX_VERSION,
        "dataset_id": stream.dataset.dataset_id,
        "split": stream.split,
        "samples": kind,
        "length": stream.length,
    }


def open_index(
    identity: dict[str, Any], dtypes: dict[str, str], make: Callable[[Append], dict[str, Any]]
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Returns the arrays of an index by name, read-only memory maps, and facts about them. Makes it if there is none.

    identity: JSON-able; everything that decides the contents. dtypes: of the arrays, by name. make: calls append for
    the values of each array in order, and returns the facts. Raises BuildError if the index cannot be written.
    """
    directory, name = cache_directory(), hashlib.sha256(canonical(identity)).hexdigest()[:32]
    try:
        return _read(directory, name, dtypes)
    except (DatasetError, OSError):  # missing, damaged, or of another version
        pass
    try:
        make_directory(directory)
        with Stage(directory, apart=directory) as stage:
            writers = {array: ArrayWriter(stage, array_name(name, array), dtype) for array, dtype in dtypes.items()}
            facts = make(lambda array, values: writers[array].append(values))
            entries = {array: writer.finish() for array, writer in writers.items()}
            record = {"format_version": FORMAT_VERSION, "identity": identity, "facts": facts}
            record |= {key: {array: entry[key] for array, entry in entries.items()} for key in ("length", "sha256")}
            stage.write(f"{name}.json", sealed_record(record))
            stage.publish()
    except OSError as error:
        reason = error.strerror or error
        sentence = f"the sampling index cannot be written to {directory}: {reason}; set BERTDATA_CACHE"
        raise BuildError(sentence, "unwritable", given=directory) from None
    return _read(directory, name, dtypes)


def _read(directory: Path, name: str, dtypes: dict[str, str]) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    record = read_record(directory / f"{name}.json")
    arrays = {
        array: open_array(array_path(directory, name, array), dtype, record["length"][array])
        for array, dtype in dtypes.items()
    }
    for array, sha256 in record["sha256"].items():
        if digest(path := array_path(directory, name, array))[0] != sha256:
            raise damaged(path)
    return arrays, record["facts"]
