"""Writes checkpoints beside training: a state is copied in memory, and a thread writes the copy."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

import bertdata
from bertdata.files import naming
from bertrain.methods import Method
from bertrain.run import checkpoint, rundir

T = TypeVar("T")


class Memory:
    """Host memory for a copy of a state, kept from one copy to the next: new pages cost more time than the copy.

    Takes as many bytes as the tensors of the state: with AdamW in float32, 12 for each parameter. Copies of tensors on
    a GPU are in pinned memory.
    """

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []

    def reserve(self, state: object) -> None:
        """Gets the memory for a copy of a state, whose tensors are not read."""
        for number, storage in enumerate(_storages(state)):
            self._block(number, storage)

    def copy(self, state: T) -> T:
        """A deep copy. Tensors that share memory do so in the copy. The next `copy` overwrites its tensors."""
        blocks, on_gpu = {}, False
        for number, storage in enumerate(_storages(state)):
            block = self._block(number, storage)
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            block.copy_(source, non_blocking=True)
            blocks[storage.data_ptr()] = block.untyped_storage()
            on_gpu = on_gpu or storage.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
        memo: dict[int, Any] = {}
        for tensor in _tensors(state):
            if tensor.untyped_storage().nbytes():
                storage = blocks[tensor.untyped_storage().data_ptr()]
                view = torch.empty(0, dtype=tensor.dtype)
                memo[id(tensor)] = view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        return copy.deepcopy(state, memo)

    def _block(self, number: int, storage: torch.UntypedStorage) -> torch.Tensor:
        """The memory of the storage with this number: uint8 [bytes]."""
        size = storage.nbytes()
        if number == len(self._blocks) or self._blocks[number].numel() != size:
            pinned = storage.device.type == "cuda"
            self._blocks[number : number + 1] = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned).zero_()]
        return self._blocks[number]


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _storages(state: object) -> list[torch.UntypedStorage]:
    """The memory that the tensors of a state are in, each once: tied weights share theirs."""
    storages = (tensor.untyped_storage() for tensor in _tensors(state))
    return list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values())


class Writer:
    """Writes the checkpoints of a run, one after the other. Enter it while the run trains; only rank 0 saves.

    At the end it waits for the write that is under way, also after an error. After a KeyboardInterrupt it leaves the
    write off, as soon as the file that is being written is complete, and nothing of it stays.
    """

    def __init__(
        self,
        run: Path,
        *,
        keep: int,
        saved: Path | None,
        warn: Callable[[str], None],
        methods: Sequence[Method] = (),
    ) -> None:
        """saved: the checkpoint that the run resumes from. warn: shows a line. methods: of the run."""
        self.run, self.keep, self.warn, self._methods = run, keep, warn, methods
        self.saved = saved
        """The newest checkpoint to resume from that is on disk."""
        self.leaving = threading.Event()
        self._memory = Memory()
        self._thread: threading.Thread | None = None
        self._name = ""
        self._failure: Exception | None = None
        self._not_removed: str | None = None

    def reserve(self, content: checkpoint.Content) -> None:
        """Gets memory for such content, beside training, so that the first save takes no longer than others."""

        def reserve() -> None:
            with contextlib.suppress(RuntimeError, MemoryError):  # then the first save says so
                self._memory.reserve(content)

        self._start(reserve)

    def save(self, target: Path, model: PreTrainedModel, content: checkpoint.Content, *, required: bool) -> None:
        """Copies the content of a checkpoint, and begins to write it into the directory `target`.

        First waits for the write before. A write that fails leaves the earlier checkpoints unchanged; a warning says so
        with the next call. required: waits for the end, and raises OSError or BertdataError if it fails.
        """
        self.wait()
        copied = self._memory.copy(content)
        self._name = target.name

        def write() -> None:
            self._sync_log()
            with naming(target):
                checkpoint.write(target, model, copied, leaving=self.leaving, methods=self._methods)
            self.saved = target
            self.remove_others(target)

        self._start(write)
        if required:
            self.wait(required=True)

    def remove_others(self, saved: Path) -> None:
        """Removes the oldest checkpoints that are too many. `saved` stays. A warning follows if one stays."""
        try:
            rundir.remove_others(saved, keep=self.keep)
        except OSError as error:
            self._not_removed = f"{error.filename} cannot be removed: {error.strerror}"

    def _sync_log(self) -> None:
        """Makes the entries of the log survive a loss of power before the checkpoint that follows them does."""
        path = self.run / "log.jsonl"
        with contextlib.suppress(FileNotFoundError), naming(path), open(path, "rb") as log:  # the next entry writes it
            os.fsync(log.fileno())

    def _start(self, job: Callable[[], None]) -> None:
        def run() -> None:
            try:
                job()
            except Exception as error:
                self._failure = error

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self, *, required: bool = False) -> None:
        """Until nothing is being written. Warns if the write failed; required: raises the error."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread, failure, self._failure = None, self._failure, None
        if self._not_removed:
            self.warn(f"a checkpoint that is not needed any more stays: {self._not_removed}")
            self._not_removed = None
        if failure is None or self.leaving.is_set():
            return
        if required or not isinstance(failure, OSError | bertdata.BertdataError):
            raise failure
        step = int(self._name.rpartition("-")[2])
        self.warn(f"no checkpoint of step {step} was written, and training continues: {failure}")

    def poll(self) -> None:
        """Warns of a write that has failed, without waiting for one that is under way."""
        if self._thread and not self._thread.is_alive():
            self.wait()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self.leaving.set()
        self.wait()
