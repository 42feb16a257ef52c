"""One engine writes rows of ids in its own format, or opens and reads them, for bench_reading.py.

    python other_read.py write NAME ROWS TOKENIZER AT        ROWS: .npy, int64 [N, T], with special tokens
    python other_read.py read NAME ROWS TOKENIZER AT SECONDS

A batch is 256 rows in random order with 15 % of the tokens masked, as int64 `input_ids` and `labels`. Masked: ours by
our Loader, and all others by the same vectorized lines of NumPy (`Masks`), which are the fastest that we know. By its
own means: Megatron's by its BERTMaskedWordPieceDataset, all others by torch_mask_tokens of transformers'
DataCollatorForLanguageModeling, which gets the mask of special tokens; without it, a loop of Python finds them. Cold,
opening, resuming and unmasked: the same rows without masks, as int64 `input_ids` alone.
After writing, the rows of a batch are compared with ROWS; not Megatron's, which makes rows of its own from sentences.
One process without workers on one core, torch with one thread. The last line is JSON; a part that fails has a reason.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from environments import LeftOut, one_core, reason, without_pictures
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

SIZE, COLD, SHARE = 256, 20, 0.15  # rows of a batch, batches that are read cold, tokens that are masked
OPENED = 5  # times that a dataset is opened and resumed


class Engine:
    """What all that use transformers' collator share. `batches(skip)` opens the dataset anew and yields batches."""

    masked = True

    def __init__(self, rows: Path, tokenizer: str, at: str) -> None:
        self.rows, self.tokenizer, self.at = np.load(rows, mmap_mode="r"), tokenizer, at

    def prepare(self) -> None:
        """What is not counted as opening: imports and the collator."""
        names = {f"{name.lower()}_token": f"[{name}]" for name in ("CLS", "SEP", "PAD", "MASK", "UNK")}
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=self.tokenizer, **names)
        self.collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=SHARE)
        self.special = torch.zeros(len(tokenizer), dtype=torch.bool)
        self.special[tokenizer.all_special_ids] = True

    def collate(self, rows: list[Any]) -> Any:
        """A batch of rows, which are arrays or tensors, or of dicts that hold them."""
        rows = [row["input_ids"] if isinstance(row, dict) else row for row in rows]
        ids = np.stack(rows) if isinstance(rows[0], np.ndarray) else torch.stack(rows).numpy()
        return self.batch(torch.from_numpy(ids.astype(np.int64, copy=False)))

    def batch(self, ids: torch.Tensor) -> Any:
        if not self.masked:
            return {"input_ids": ids}
        ids, labels = self.collator.torch_mask_tokens(ids, special_tokens_mask=self.special[ids])
        return {"input_ids": ids, "labels": labels}

    def clear(self) -> None:
        """What must be done before a dataset is opened once more. It is not timed."""

    def loader(self, dataset: Any, **more: Any) -> Any:
        return torch.utils.data.DataLoader(dataset, SIZE, drop_last=True, collate_fn=self.collate, **more)


class Ours(Engine):
    """at: shards of the text that the rows are from."""

    def write(self) -> None:
        return

    def prepare(self) -> None:
        import bertdata

        length = self.rows.shape[1]
        self.open: Callable[[Any], Any] = lambda masking: bertdata.Loader(
            bertdata.open(self.at), length=length, global_batch_size=SIZE, masking=masking
        )
        self.masking = bertdata.Masking(probability=SHARE)

    def batches(self, skip: int = 0) -> Iterator[Any]:
        loader = self.open(self.masking if self.masked else None)
        if skip:
            loader.load_state_dict(loader.state_dict() | {"position": skip * SIZE})
        for batch in loader:
            arrays = {"input_ids": batch.input_ids} | ({"labels": batch.labels} if self.masked else {})
            yield {name: torch.from_numpy(array) for name, array in arrays.items()}


class Masks:
    """A few vectorized lines of NumPy that mask rows.

    One random number of 16 bits a token says whether it is masked, and how; all else touches masked tokens alone.
    """

    def __init__(self, path: str) -> None:
        from tokenizers import Tokenizer

        vocabulary = Tokenizer.from_file(path).get_vocab()
        self.mask, self.special = vocabulary["[MASK]"], np.zeros(len(vocabulary), bool)
        self.special[[vocabulary[f"[{name}]"] for name in ("CLS", "SEP", "PAD")]] = True
        self.random = np.random.Generator(np.random.SFC64(0))

    def __call__(self, ids: np.ndarray) -> dict[str, torch.Tensor]:
        """Of the chosen tokens 80 % become [MASK], 10 % become random ones, 10 % stay. ids: int64, masked in place."""
        limit, flat, labels = round(SHARE * 2**16), ids.reshape(-1), np.full(ids.size, -100)
        numbers = np.frombuffer(self.random.bytes(2 * ids.size), np.uint16)
        chosen = np.flatnonzero(numbers < limit)
        chosen = chosen[~self.special[flat[chosen]]]
        labels[chosen], kinds = flat[chosen], numbers[chosen]
        flat[chosen[kinds < 0.8 * limit]] = self.mask
        changed = chosen[kinds >= 0.9 * limit]
        flat[changed] = self.random.integers(self.special.size, size=changed.size)
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels.reshape(ids.shape))}


class Memmap(Engine):
    """No library: random rows of a file by np.memmap, masked by `Masks`."""

    def write(self) -> None:
        self.rows.astype("<u2").tofile(f"{self.at}/rows.bin")

    def prepare(self) -> None:
        self.masks = Masks(self.tokenizer)

    def batches(self, skip: int = 0) -> Iterator[Any]:
        rows = np.memmap(f"{self.at}/rows.bin", "<u2", "r").reshape(-1, self.rows.shape[1])
        order = np.random.default_rng(0).permutation(len(rows))
        for first in range(skip * SIZE, len(rows) - SIZE + 1, SIZE):
            ids = rows[order[first : first + SIZE]].astype(np.int64)
            yield self.masks(ids) if self.masked else {"input_ids": torch.from_numpy(ids)}


class Collator(Engine):
    """No engine: transformers' collator alone, on rows in memory. Most of the time of engines that use it is this."""

    def write(self) -> None:
        return

    def batches(self, skip: int = 0) -> Iterator[Any]:
        ids = torch.from_numpy(np.array(self.rows[:SIZE]))
        while True:
            yield self.batch(ids.clone())  # it masks in place


class Datasets(Engine):
    """Batches come as tables of Arrow: over twice as fast as tensors of torch, three times as fast as single rows."""

    def write(self) -> None:
        import datasets

        datasets.disable_progress_bars()
        features = datasets.Features({"input_ids": datasets.List(datasets.Value("uint16"))})
        rows = {"input_ids": list(self.rows.astype(np.uint16))}
        datasets.Dataset.from_dict(rows, features=features).save_to_disk(self.at)

    def batches(self, skip: int = 0) -> Iterator[Any]:
        import datasets
        from accelerate.data_loader import SkipBatchSampler

        stored, data = datasets.load_from_disk(self.at).with_format("arrow"), torch.utils.data
        numbers: Any = data.BatchSampler(data.RandomSampler(stored), SIZE, drop_last=True)
        if skip:
            numbers = SkipBatchSampler(numbers, skip)  # as transformers' Trainer resumes
        return iter(data.DataLoader(stored, batch_size=None, sampler=numbers, collate_fn=self.collate_table))

    def collate_table(self, table: Any) -> Any:
        flat = table.column("input_ids").combine_chunks().flatten().to_numpy(zero_copy_only=False)
        return self.batch(torch.from_numpy(flat.astype(np.int64)).view(SIZE, -1))


class Stateful(Engine):
    """One whose loader has a state, from which `batches` goes on: that after `stop_after`."""

    state: Any = None

    def stop_after(self, count: int) -> None:
        self.clear()
        loader = self.open()
        for _ in islice(iter(loader), count):
            pass
        self.state = loader.state_dict()

    def batches(self, skip: int = 0) -> Iterator[Any]:
        loader = self.open()
        if skip:
            loader.load_state_dict(self.state)
        return iter(loader)


class Streaming(Stateful):
    stored: Any = None

    def clear(self) -> None:
        without_pictures()
        from streaming.base.util import clean_stale_shared_memory

        if hasattr(self.stored, "_iterator"):
            self.stored._iterator.non_blocking_exit()  # or its threads go on waiting, which slows all that follows
        clean_stale_shared_memory()  # or the dataset that was opened before is in its way

    def write(self) -> None:
        without_pictures()
        from streaming import MDSWriter

        with MDSWriter(out=self.at, columns={"input_ids": f"ndarray:uint16:{self.rows.shape[1]}"}) as writer:
            for row in self.rows:
                writer.write({"input_ids": row.astype(np.uint16)})

    def open(self) -> Any:
        without_pictures()
        from streaming import StreamingDataLoader, StreamingDataset

        self.stored = StreamingDataset(local=self.at, shuffle=True, batch_size=SIZE)
        return StreamingDataLoader(self.stored, batch_size=SIZE, drop_last=True, collate_fn=self.collate)


class Litdata(Stateful):
    def write(self) -> None:
        from litdata.streaming.cache import Cache
        from litdata.streaming.item_loader import TokensLoader

        cache = Cache(self.at, chunk_bytes="64MB", item_loader=TokensLoader(block_size=self.rows.shape[1]))
        for number, row in enumerate(self.rows):
            cache[number] = torch.from_numpy(row.astype(np.uint16))
        cache.done()
        cache.merge()

    def open(self) -> Any:
        from litdata import StreamingDataLoader, StreamingDataset
        from litdata.streaming.item_loader import TokensLoader

        stored = StreamingDataset(self.at, item_loader=TokensLoader(block_size=self.rows.shape[1]), shuffle=True)
        return StreamingDataLoader(stored, batch_size=SIZE, drop_last=True, collate_fn=self.collate)


class Datatrove(Engine):
    """Reads its file front to back, for which it is made: it shuffles when it writes."""

    def write(self) -> None:
        self.rows.astype("<u2").tofile(f"{self.at}/00000.ds")

    def batches(self, skip: int = 0) -> Iterator[Any]:
        from datatrove.utils.dataset import DatatroveFolderDataset

        stored = DatatroveFolderDataset(self.at, seq_len=self.rows.shape[1] - 1)
        return iter(self.loader(torch.utils.data.Subset(stored, range(skip * SIZE, len(stored)))))


class MegatronTokenizer:
    """What BERTMaskedWordPieceDataset asks of a tokenizer."""

    def __init__(self, path: str) -> None:
        from tokenizers import Tokenizer

        vocabulary = Tokenizer.from_file(path).get_vocab()
        self.inv_vocab = {number: token for token, number in vocabulary.items()}
        self.cls, self.sep, self.mask, self.pad = (vocabulary[f"[{name}]"] for name in ("CLS", "SEP", "MASK", "PAD"))
        self.unique_identifiers = {"path": path}


class Megatron(Engine):
    """Rows without special tokens are its sentences, 20 of them a document."""

    def write(self) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        builder = IndexedDatasetBuilder(f"{self.at}/rows.bin", dtype=np.uint16)
        for number, row in enumerate(self.rows[:, 1:-2]):
            builder.add_item(torch.from_numpy(np.array(row)))
            if number % 20 == 19 or number == len(self.rows) - 1:
                builder.end_document()
        builder.finalize(f"{self.at}/rows.idx")

    def prepare(self) -> None:
        from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDatasetConfig

        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{self.at}/group-{os.getpid()}", rank=0, world_size=1
        )
        self.config = BERTMaskedWordPieceDatasetConfig(
            random_seed=1, sequence_length=self.rows.shape[1], path_to_cache=f"{self.at}/cache",
            tokenizer=MegatronTokenizer(self.tokenizer), masking_probability=SHARE, short_sequence_probability=0.0,
            masking_max_ngram=1, masking_do_full_word=False, masking_do_permutation=False,
            masking_use_longer_ngrams=False, masking_use_geometric_distribution=False, classification_head=False,
        )  # fmt: skip

    def collate(self, rows: list[Any]) -> Any:
        if not self.masked:
            return {"input_ids": torch.from_numpy(np.stack(rows).astype(np.int64))}
        return {
            "input_ids": torch.from_numpy(np.stack([row["text"] for row in rows])),
            "labels": torch.from_numpy(np.stack([row["labels"] for row in rows])),
        }

    def batches(self, skip: int = 0) -> Iterator[Any]:
        from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset
        from megatron.core.datasets.indexed_dataset import IndexedDataset
        from megatron.core.datasets.utils import Split

        stored = IndexedDataset(f"{self.at}/rows")
        if not self.masked:
            return iter(self.loader(torch.utils.data.Subset(stored, range(skip * SIZE, len(stored))), shuffle=True))
        documents = np.arange(stored.document_indices.size - 1, dtype=np.int32)
        rows = BERTMaskedWordPieceDataset(stored, "rows", documents, len(self.rows) // 2, Split.train, self.config)
        return iter(self.loader(torch.utils.data.Subset(rows, range(skip * SIZE, len(rows)))))


ENGINES = {
    "ours": Ours, "memmap": Memmap, "collator": Collator, "datasets": Datasets, "streaming": Streaming,
    "litdata": Litdata, "datatrove": Datatrove, "megatron": Megatron,
}  # fmt: skip


def private() -> int:
    """Bytes that this process alone has written: pages of files do not count."""
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Private_Dirty"))


def disk_bytes() -> int:
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))


def evict(directory: str) -> int:
    """Drops all files of a directory from the page cache, and says how many bytes they have."""
    total = 0
    for path in Path(directory).rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)  # what is not written yet cannot be dropped
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            total += os.fstat(file).st_size
            os.close(file)
    return total


def size_of(batch: Any) -> int:
    ids = batch["input_ids"]
    assert ids.shape[0] == SIZE
    assert np.asarray(ids).dtype == np.int64
    return int(np.prod(ids.shape))


def cold(engine: Any, seconds: float) -> dict[str, float]:
    engine.clear()
    held, before = evict(engine.at), disk_bytes()
    start = time.perf_counter()
    tokens = sum(size_of(batch) for batch in islice(engine.batches(), COLD))
    passed, read = time.perf_counter() - start, disk_bytes() - before
    if read < min(held, COLD * SIZE * engine.rows.shape[1] * 2) / 20:  # an id has two bytes at least
        raise LeftOut("its files stay in memory, so nothing is read cold")
    return {"Mtok/s": tokens / passed / 1e6, "seconds": passed, "MB from disk": read / 1e6, "MB of files": held / 1e6}


def opening(engine: Any, seconds: float, skip: int = 0) -> dict[str, float]:
    """Milliseconds from nothing to the first batch."""
    found = []
    for _ in range(OPENED):
        engine.clear()
        start = time.perf_counter()
        batches = engine.batches(skip)
        next(batches)
        found.append(1e3 * (time.perf_counter() - start))
        del batches
        gc.collect()
    return {"ms": float(np.median(found))}


def resuming(engine: Any, seconds: float) -> dict[str, float]:
    """The same, in the middle of an epoch."""
    middle = len(engine.rows) // SIZE // 4
    if hasattr(engine, "stop_after"):
        engine.stop_after(middle)
    return opening(engine, seconds, middle)


def own(engine: Any, seconds: float, mask: Callable[[np.ndarray], Any] | None = None) -> dict[str, float]:
    """Batches for so many seconds, but COLD of them at least. mask: applied to the ids of each."""
    engine.clear()
    batches = engine.batches()
    next(batches)
    start, count, tokens = time.perf_counter(), 0, 0
    while (passed := time.perf_counter() - start) < seconds or count < COLD:
        batch = next(batches, None)
        if batch is None:
            pause = time.perf_counter()
            engine.clear()
            start += time.perf_counter() - pause
            batches = engine.batches()
            continue
        batch = mask(batch["input_ids"].numpy()) if mask else batch
        count, tokens = count + 1, tokens + size_of(batch)
    return {"Mtok/s": tokens / passed / 1e6}


def masked(engine: Any, seconds: float) -> dict[str, float]:
    """Batches that ours masks, and that all others have masked by the same lines of NumPy."""
    if isinstance(engine, (Ours, Memmap)):
        return own(engine, seconds)
    engine.masked = False
    return own(engine, seconds, Masks(engine.tokenizer))


def memory(engine: Any, seconds: float) -> dict[str, float]:
    """Private memory that was added since the process had imported torch and transformers."""
    return {"MB": (private() - engine.bare) / 1e6, "MB before": engine.bare / 1e6}


def unmasked(engine: Any, seconds: float) -> dict[str, float]:
    """The same without masks."""
    return own(engine, seconds)


def check(engine: Any) -> None:
    """About the right share of tokens is masked. This loads kernels, and makes Megatron's index, which stays.

    It reads a copy, for what a process has mapped cannot be dropped from the page cache.
    """
    at = engine.at
    with tempfile.TemporaryDirectory() as scratch:
        engine.at = shutil.copytree(at, f"{scratch}/copy")
        engine.clear()
        batch = next(engine.batches())
        if "labels" in batch and not isinstance(engine, Megatron):  # whose labels are 0 where nothing is predicted
            share = float((np.asarray(batch["labels"]) != -100).mean())
            assert abs(share - SHARE) < 0.02, f"{share:.3f} of the tokens are masked"
    engine.at = at


def compare(engine: Any) -> None:
    """Raises AssertionError if a row of the first batch, its masks undone, is none of those that were written."""
    engine.prepare()
    engine.clear()
    batch = next(engine.batches())
    ids = np.asarray(batch["input_ids"])
    if "labels" in batch:
        labels = np.asarray(batch["labels"])
        ids = np.where(labels == -100, ids, labels)
    written = {hash(row.tobytes()) for row in engine.rows}
    assert all(hash(row.tobytes()) in written for row in ids), "it reads other ids than it was given"


def main(what: str, name: str, rows: str, tokenizer: str, at: str, seconds: str = "1") -> None:
    os.sched_setaffinity(0, one_core())
    torch.set_num_threads(1)
    engine: Any = ENGINES[name](Path(rows), tokenizer, at)
    if what == "write":
        engine.write()
        size = sum(path.stat().st_size for path in Path(at).rglob("*") if path.is_file())
        if name != "megatron":
            compare(engine)
        print(json.dumps({"MB": size / 1e6}), flush=True)
        os._exit(0)  # threads of some would keep the process
    engine.bare = private()
    found: dict[str, Any] = {}
    engine.prepare()
    check(engine)
    gc.collect()
    for part in (cold, opening, resuming, own, memory, masked, unmasked):
        engine.masked = part in (own, masked)
        try:
            found[part.__name__] = part(engine, float(seconds))
        except Exception as error:  # of which the table tells
            said = str(error) if isinstance(error, LeftOut) else f"{type(error).__name__}: {error}"
            found[part.__name__] = {"reason": reason(said)}
    print(json.dumps(found), flush=True)
    os._exit(0)  # threads of some would keep the process


if __name__ == "__main__":
    main(*sys.argv[1:])
