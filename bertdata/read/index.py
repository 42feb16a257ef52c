"""What a way of sampling must know of a dataset and is computed from it once: arrays in a cache, memory-mapped.

The cache is $BERTDATA_CACHE, else bertdata/ in $XDG_CACHE_HOME, else ~/.cache/bertdata. An index is found by what it
was made of, appears when it is whole, is the same whoever makes it, and can be deleted at any time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from bertdata.errors import BuildError, DatasetError
from bertdata.files import fsync_directory, make_directory
from bertdata.format.arrays import (
    ArrayWriter,
    array_path,
    open_array,
)
from bertdata.format.records import FORMAT_VERSION, canonical, read_record, write_record

Append = Callable[[str, NDArray[Any]], None]


def cache_directory() -> Path:
    if found := os.environ.get("BERTDATA_CACHE"):
        return Path(found)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bertdata"


def derived(
    identity: dict[str, Any], dtypes: dict[str, str], make: Callable[[Append], dict[str, Any]]
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Arrays by name, and facts about them: read-only maps of an index, which is made if there is none.

    identity: JSON-able; all that decides what is in the index. dtypes: of the arrays by name. make: calls append(name,
    values) in order, and returns the facts. Raises BuildError if the index cannot be written.
    """
    directory, name = cache_directory(), hashlib.sha256(canonical(identity)).hexdigest()[:32]
    try:
        return _opened(directory, name, dtypes)
    except DatasetError:  # missing, cut short or of another version
        pass
    try:
        make_directory(directory)
        own = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=directory))
        try:
            writers = {array: ArrayWriter(array_path(own, name, array), dtype) for array, dtype in dtypes.items()}
            try:
                facts = make(lambda array, values: writers[array].append(values))
                lengths = {array: writer.commit()["length"] for array, writer in writers.items()}
            except BaseException:
                for writer in writers.values():
                    writer.discard()
                raise
            for array in dtypes:
                os.replace(array_path(own, name, array), array_path(directory, name, array))
            fsync_directory(directory)
            record = {"format_version": FORMAT_VERSION, "identity": identity, "lengths": lengths, "facts": facts}
            write_record(own / f"{name}.json", record)
            os.replace(own / f"{name}.json", directory / f"{name}.json")
        finally:
            shutil.rmtree(own, ignore_errors=True)
    except OSError as error:
        raise BuildError(
            f"the index of samples cannot be written to {directory}: {error.strerror or error}; "
            "set BERTDATA_CACHE to a directory with room"
        ) from None
    return _opened(directory, name, dtypes)


def _opened(directory: Path, name: str, dtypes: dict[str, str]) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    record = read_record(directory / f"{name}.json")
    arrays = {
        array: open_array(array_path(directory, name, array), dtype, record["lengths"][array])[:]
        for array, dtype in dtypes.items()
    }
    return arrays, record["facts"]
