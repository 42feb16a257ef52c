"""Sampling indexes: memory-mapped arrays, computed once and cached on disk.

The name of an index is a hash of everything that determines its contents, so two processes that make the same index
write the same bytes. Its record is written last. An array that is newer than the record was changed or copied, and is
checked against its SHA-256. You may delete the directory at any time; missing indexes are computed again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from bertdata.errors import BuildError, DatasetError, damaged
from bertdata.files import Stage, cache_directory, make_directory
from bertdata.format.arrays import ArrayWriter, array_file, array_path, digest, open_array
from bertdata.format.records import FORMAT_VERSION, canonical, read_record, sealed_record
from bertdata.read.stream import Samples

INDEX_VERSION = 3  # increase it when the contents of an index change
Append = Callable[[str, NDArray[Any]], None]
"""append(name, values): append values to an array of the index."""


def index_identity(samples: Samples) -> dict[str, Any]:
    """Return the values that determine the contents of an index. A kind of samples may add more."""
    return {
        "version": INDEX_VERSION,
        "dataset_id": samples.dataset.dataset_id,
        "split": samples.split,
        "samples": samples.kind,
        "length": samples.length,
    }


def open_index(
    identity: dict[str, Any], dtypes: dict[str, str], make: Callable[[Append], dict[str, Any]]
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Return the arrays of an index by name, as read-only memory maps, and facts about them. Make the index if needed.

    identity: all values that determine the contents, as JSON. dtypes: array → dtype. make: calls `append` with the
    values of each array in order, and returns the facts. Raises BuildError if the index cannot be written.
    """
    directory, name = cache_directory(), hashlib.sha256(canonical(identity)).hexdigest()[:32]
    try:
        return _read(directory, name, dtypes)
    except (DatasetError, OSError):  # missing, damaged, or of a different version
        pass
    try:
        make_directory(directory)
        with Stage(directory, apart=directory) as stage:
            writers = {array: ArrayWriter(stage, array_file(name, array), dtype) for array, dtype in dtypes.items()}
            facts = make(lambda array, values: writers[array].append(values))
            entries = {array: writer.finish() for array, writer in writers.items()}
            record = {"format_version": FORMAT_VERSION, "identity": identity, "facts": facts}
            record |= {key: {array: entry[key] for array, entry in entries.items()} for key in ("length", "sha256")}
            stage.write(f"{name}.json", sealed_record(record))
            stage.publish()
    except OSError as error:
        reason = error.strerror or error
        sentence = f"the sampling index cannot be written to {directory}: {reason}; set BERTDATA_CACHE to a directory"
        raise BuildError(sentence, "unwritable", given=directory) from None
    return _read(directory, name, dtypes)


def _read(directory: Path, name: str, dtypes: dict[str, str]) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    record_path, arrays = directory / f"{name}.json", dict[str, NDArray[Any]]()
    record, written = read_record(record_path), record_path.stat().st_mtime_ns
    for array, dtype in dtypes.items():
        path = array_path(directory, name, array)
        arrays[array] = open_array(path, dtype, record["length"][array])
        if path.stat().st_mtime_ns > written and digest(path)[0] != record["sha256"][array]:
            raise damaged(path)
    return arrays, record["facts"]
