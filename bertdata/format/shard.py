"""Writes documents as the arrays of a shard and its commit record, and opens them again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import DatasetError
from bertdata.files import Stage
from bertdata.format.arrays import ArrayWriter, array_name, array_path, open_array
from bertdata.format.manifest import ARRAY_DTYPES, Shard
from bertdata.format.records import FORMAT_VERSION, sealed_record


class ShardWriter:
    """Writes the documents of one shard as files of a `Stage`; its commit record is the last one."""

    def __init__(
        self, stage: Stage, name: str, *, split: str, token_dtype: str, sentences: bool, words: bool = False
    ) -> None:
        self.name, self.split, self._stage = name, split, stage
        dtypes = {"tokens": token_dtype, "documents": "<u8"} | ({"sentences": "<u8"} if sentences else {})
        dtypes |= {"words": "|u1"} if words else {}
        self._arrays = {array: ArrayWriter(stage, array_name(name, array), dtypes[array]) for array in dtypes}
        for array in dtypes.keys() - {"tokens", "words"}:
            self._arrays[array].append(np.zeros(1, np.uint64))
        self._word_starts = np.zeros(0, np.bool_)  # up to 7, which do not fill a byte yet

    def append(
        self,
        tokens: NDArray[Any],
        documents: NDArray[np.uint64],
        sentences: NDArray[np.uint64] | None = None,
        word_starts: NDArray[np.bool_] | None = None,
        empty: NDArray[np.int64] | None = None,
    ) -> None:
        """Adds documents. tokens [n]: their ids, separators included.

        documents, sentences: where each ends in `tokens`, ascending; the last is n. word_starts bool [n]: whether each
        token begins a word. empty: for each document without an id, how many of `documents` come before it.
        """
        before = np.uint64(self._arrays["tokens"].length)
        if empty is not None and empty.size:
            if "empty" not in self._arrays:
                self._arrays["empty"] = ArrayWriter(self._stage, array_name(self.name, "empty"), "<u8")
            self._arrays["empty"].append(empty + (self._arrays["documents"].length - 1))
        self._arrays["tokens"].append(tokens)
        self._arrays["documents"].append(documents + before)
        if sentences is not None:
            self._arrays["sentences"].append(sentences + before)
        if word_starts is not None:
            waiting = np.concatenate([self._word_starts, word_starts])
            num_packed = waiting.size // 8 * 8
            self._arrays["words"].append(np.packbits(waiting[:num_packed], bitorder="little"))
            self._word_starts = waiting[num_packed:]

    def finish(self, *, input_range: tuple[int, int], counts: Mapping[str, int]) -> Shard:
        """Finish the arrays, write the commit record, and return what a manifest says of the shard."""
        if "words" in self._arrays:
            self._arrays["words"].append(np.packbits(self._word_starts, bitorder="little"))
        arrays = {name: array.finish() for name, array in self._arrays.items()}
        record = {
            "format_version": FORMAT_VERSION,
            "split": self.split,
            "arrays": arrays,
            "input": {"start": input_range[0], "stop": input_range[1]},
            "counts": dict(counts),
        }
        self._stage.write(f"{self.name}.json", sealed_record(record))
        num_sentences = arrays["sentences"]["length"] - 1 if "sentences" in arrays else None
        published = {name: {k: v for k, v in entry.items() if k != "crc32"} for name, entry in arrays.items()}
        return Shard(self.name, arrays["documents"]["length"] - 1, arrays["tokens"]["length"], num_sentences, published)

    def discard(self) -> None:
        """Remove the files of a shard without documents."""
        self._stage.discard(array_name(self.name, array) for array in self._arrays)


def open_shard(directory: Path, shard: Shard) -> dict[str, NDArray[Any]]:
    """Opens the arrays of a shard, by name. Raises DatasetError for a wrong size, header, first or last offset."""
    return {name: open_one(directory, shard, name) for name in ARRAY_DTYPES.keys() & shard.arrays.keys()}


def open_one(directory: Path, shard: Shard, name: str) -> NDArray[Any]:
    """Opens one of its arrays."""
    entry, path = shard.arrays[name], array_path(directory, shard.name, name)
    array = open_array(path, entry["dtype"], entry["length"])
    if name in ("documents", "sentences") and (array[0] != 0 or array[-1] != shard.num_tokens):
        sentence = (
            f"{path} is damaged: its offsets run from {array[0]} to {array[-1]}, not from 0 to "
            f"{shard.num_tokens}; copy or make it again"
        )
        raise DatasetError(sentence, "damaged", given=path)
    return array
