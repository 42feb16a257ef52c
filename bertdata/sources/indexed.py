"""What MDS and litdata have in common: an index.json that names files of samples, and samples of several columns.

A file of samples is: their number, uint32; where each begins and the last one ends, uint32, in bytes of the file; then,
in MDS, a description; then the samples. A sample is the sizes of its columns, uint32, but for those that have the same
size everywhere, and then the columns. Everything is little-endian.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import BertdataError, InputError
from bertdata.sources.idfile import Ids, file_of_ids, in_blocks, item_of, slices_of
from bertdata.sources.inputs import Input, of_remote
from bertdata.sources.streams import InputStream, opened
from bertdata.urls import is_remote

COLUMNS = ("input_ids", "tokens")  # the first that there is holds the ids
INDEX = "index.json"
_MOST_INDEX_BYTES = 1 << 28
_MOST_SAMPLES_BYTES = 1 << 32  # that uint32 can count
_PIECE = 1 << 20  # bytes that are read at a time
KNOWN_HASHES = {name for name in hashlib.algorithms_guaranteed if not name.startswith("shake_")}


@dataclass(frozen=True)
class Index:
    """An index.json, and the files below its directory."""

    file: Input
    content: Any  # of JSON: anything
    _inside: Callable[[str], Input]

    def named(self, name: Any) -> Input:
        """The file of a name in the index. Raises InputError for a name that leaves the directory, or for no file."""
        path = PurePosixPath(name)
        if not path.parts or path.is_absolute() or ".." in path.parts or not name.isprintable():
            sentence = f"{self.file} names the file {name!r}, which is not below its directory; write the dataset again"
            raise InputError(sentence, "not-of-format", option="inputs", given=self.file.name)
        return self._inside(name)

    def has(self, name: Any) -> bool:
        """Whether the directory is one of this machine and has a file of this name."""
        return not self.file.remote and name.isprintable() and (Path(self.file.name).parent / name).is_file()

    @contextmanager
    def parsing(self) -> Iterator[None]:
        """Turns what Python says of JSON with other members or types into an InputError."""
        try:
            yield
        except BertdataError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            what = f"no member {error.args[0]!r}" if isinstance(error, KeyError) else "a member of another type or size"
            sentence = f"{self.file} has {what}, unlike its format; write the dataset again"
            raise InputError(sentence, "not-of-format", option="inputs", given=self.file.name) from None


def directories_of(name: str) -> list[str]:
    """The directories with an index.json that an input stands for: itself, else those directly below it, by name.

    Shorter names come first, so that 2 comes before 10. Of a URL it is always the URL.
    """
    path = Path(name)
    if is_remote(name) or not path.is_dir() or (path / INDEX).exists():
        return [name]
    below = (file.parent for file in path.glob(f"*/{INDEX}"))
    return [str(each) for each in sorted(below, key=lambda each: (len(each.name), each.name))]


def open_indices(name: str) -> list[Index]:
    """Reads each index.json that an input stands for. Raises InputError if there is none, or one is no JSON."""
    directories = directories_of(name)
    if not directories:
        sentence = f"{name} has no index.json, and no directory directly below it has one; name the directory of one"
        raise InputError(sentence, "not-found", option="inputs", given=name)
    return [open_index(directory) for directory in directories]


def _below(directory: Path) -> Callable[[str], Input]:
    """The files of a directory of this machine, by name."""
    return lambda name: file_of_ids(directory / name, may_be_compressed=True)


def open_index(directory: str) -> Index:
    """Reads the index.json of a directory or of a URL. Raises InputError if it is not there, or is no JSON."""
    inside = _below_url(directory) if is_remote(directory) else _below(Path(directory))
    file = inside(INDEX)
    if (file.size or 0) > _MOST_INDEX_BYTES:
        sentence = f"{file} has {file.size:,} bytes, and at most {_MOST_INDEX_BYTES:,} are read; divide the dataset"
        raise InputError(sentence, "too-large", option="inputs", given=file.name)
    with file.open() as stream:
        content = stream.read()
    try:
        return Index(file, json.loads(content), inside)
    except (ValueError, RecursionError):
        sentence = f"{file} is not JSON; get the file again, or write the dataset again"
        raise InputError(sentence, "not-of-format", option="inputs", given=file.name) from None


def _below_url(url: str) -> Callable[[str], Input]:
    from bertdata.remote.files import within  # takes 0.1 s

    file_at = within(url.rstrip("/"))
    return lambda name: of_remote(file_at(name))


def count_of(value: Any) -> int:
    """A number that an index states. Raises TypeError if it is none, negative, or beyond any file of samples."""
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise TypeError
    return value


def require_size(file: Input, stated: int) -> None:
    """Raises InputError if a file has another size than its index states."""
    if file.size != stated:
        sentence = f"{file} has {file.size:,} bytes, and its index states {stated:,}; get the file again"
        raise InputError(sentence, "cut-short", option="inputs", given=file.name)


class Block(NamedTuple):
    """Some samples of a file, in order."""

    file: Input
    data: NDArray[np.uint8]  # all their bytes
    offsets: NDArray[np.int64]  # [num_samples + 1] half-open, into data
    first: int  # index of the first of them in the file
    bytes_read: int  # of the file, up to the end of these

    def name_of_first(self, chosen: NDArray[np.bool_]) -> str:
        """'file, sample n' of the first sample that is chosen."""
        return f"{self.file}, sample {self.first + int(chosen.argmax()) + 1}"

    def column(self, sizes: Sequence[int | None], number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where a column begins and ends in data, for each sample. sizes: of all columns; None: each sample states it.

        Raises InputError for a sample that its columns do not fill.
        """
        begins, num_stated = self.offsets[:-1], sizes.count(None)
        is_wrong = np.diff(self.offsets) < 4 * num_stated
        if not is_wrong.any():
            stated = iter(self.gather(begins, 4 * num_stated).view("<u4").T.astype(np.int64))
            lengths = [next(stated) if size is None else np.full(begins.size, size) for size in sizes]
            ends = begins + 4 * num_stated + np.cumsum(lengths, axis=0)
            is_wrong = ends[-1] != self.offsets[1:]
        if is_wrong.any():
            sentence = f"{self.name_of_first(is_wrong)}: its columns do not add up to its size; write the dataset again"
            raise InputError(sentence, "bad-row", option="inputs", given=self.file.name)
        return ends[number] - lengths[number], ends[number]

    def gather(self, starts: NDArray[np.int64], length: int) -> NDArray[np.uint8]:
        """[starts.size, length] bytes from each start on, which must be there."""
        return self.data[starts[:, None] + np.arange(length)]

    def ids(self, starts: NDArray[np.int64], stops: NDArray[np.int64], dtype: np.dtype[Any]) -> Ids:
        """What is between starts and stops, as the ids of a document for each sample."""
        lengths = stops - starts
        if (is_wrong := lengths % dtype.itemsize != 0).any():
            sentence = f"{self.name_of_first(is_wrong)}: its bytes are not ids of {dtype.name}; write the dataset again"
            raise InputError(sentence, "bad-row", option="inputs", given=self.file.name)
        data = self.data
        if lengths.sum() != data.size:
            view, slices = data.data, map(slice, starts.tolist(), stops.tolist())
            data = np.frombuffer(bytearray().join([view[each] for each in slices]), np.uint8)
        documents = np.append(0, np.cumsum(lengths // dtype.itemsize))
        place = item_of(self.file, "sample", self.first, documents)
        return Ids(data.view(dtype), documents, None, place, self.bytes_read)


@dataclass(frozen=True, kw_only=True)
class SampleFile:
    """A file of samples. Raises InputError if it cannot have these sizes."""

    file: Input
    num_samples: int
    num_bytes: int  # decompressed
    ids_of: Callable[[Block], Ids]
    is_zstd: bool = False
    digests: Mapping[str, str] = field(default_factory=dict)  # name of a hash → hex digest of the file

    def __post_init__(self) -> None:
        if self.num_bytes >= _MOST_SAMPLES_BYTES or 4 * (self.num_samples + 2) > self.num_bytes:
            raise self._other()
        if not self.is_zstd:
            require_size(self.file, self.num_bytes)

    def blocks(self) -> Iterator[Block]:
        """All samples, some at a time."""
        self._check_digests()
        size, begin = self.file.size or 0, 4 * (self.num_samples + 2)
        with opened(self.file, compression="zstd" if self.is_zstd else "") as stream:
            head = np.frombuffer(self._read(stream, begin), "<u4")
            offsets = head[1:].astype(np.int64)
            ascends = offsets[0] >= begin and bool((np.diff(offsets) >= 0).all())
            if head[0] != self.num_samples or not ascends or offsets[-1] != self.num_bytes:
                raise self._other()
            for start in range(begin, int(offsets[0]), _PIECE):
                self._read(stream, min(_PIECE, int(offsets[0]) - start))
            for first, some in in_blocks(self.num_samples, slices_of(offsets)):
                data = np.frombuffer(self._read(stream, int(some[-1] - some[0])), np.uint8)
                yield Block(self.file, data, some - some[0], first, size * int(some[-1]) // self.num_bytes)
            if stream.read(1):
                raise self._other()

    def _check_digests(self) -> None:
        """Raises InputError if the file has another digest than is stated. Those of unknown hashes are not checked."""
        hashes = {name: hashlib.new(name, usedforsecurity=False) for name in self.digests.keys() & KNOWN_HASHES}
        if hashes:
            with self.file.open() as stream:
                while piece := stream.read(1 << 20):
                    for each in hashes.values():
                        each.update(piece)
        for name, each in hashes.items():
            if each.hexdigest() != self.digests[name].lower():
                sentence = f"{self.file} has another {name} than its index states; get the file again"
                raise InputError(sentence, "damaged", option="inputs", given=self.file.name)

    def _read(self, stream: InputStream, size: int) -> bytearray:
        """Reads a number of bytes. Takes memory only for those that there are."""
        data = bytearray()
        while len(data) < size:
            piece = stream.read(min(_PIECE, size - len(data)))
            if not piece:
                sentence = f"{self.file} ends before the {self.num_bytes:,} bytes of its index; get the file again"
                raise InputError(sentence, "cut-short", option="inputs", given=self.file.name)
            data += piece
        return data

    def _other(self) -> InputError:
        what = f"places of {self.num_samples:,} samples in {self.num_bytes:,} bytes"
        sentence = f"{self.file} lacks the {what} that its index states; get the file again, or write it again"
        return InputError(sentence, "not-of-format", option="inputs", given=self.file.name)


def documents_of(files: Iterable[SampleFile]) -> Iterator[Ids]:
    """The documents of files of samples, end to end."""
    before = 0
    for file in files:
        for block in file.blocks():
            yield file.ids_of(block)._replace(bytes_read=before + block.bytes_read)
        before += file.file.size or 0
