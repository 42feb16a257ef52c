"""Text → tokens on disk by five other engines, each as its documentation does it; bench_build.py times the commands.

    python other_build.py build NAME TOKENIZER OUT FILE...    NAME: datasets, datatrove, litdata, streaming or megatron
    python other_build.py count NAME TOKENIZER OUT            prints the number of tokens, and the sum of their ids

FILE is text with a blank line between documents, for datatrove JSON lines; there are two, one for each worker.
Documents are tokenized by `encode_batch_fast` of `tokenizers` in batches, without special tokens, but where an engine
brings its own way. Ids are kept as uint16 where the engine can. By the count, bench_build.py sees that all have made
the same ids.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"
import numpy as np
from environments import without_pictures

BATCH = 100  # documents, for one call of the tokenizer
WORKERS = 2


def tokenizer_of(path: str) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def documents(path: str) -> list[str]:
    return [text for text in Path(path).read_text(encoding="utf-8").split("\n\n") if text.strip()]


def batches(texts: list[str]) -> Iterator[list[str]]:
    for first in range(0, len(texts), BATCH):
        yield texts[first : first + BATCH]


def encoded(tokenizer: str, path: str) -> Iterator[np.ndarray]:
    """The ids of each document of a file."""
    encode = tokenizer_of(tokenizer).encode_batch_fast
    for batch in batches(documents(path)):
        for one in encode(batch, add_special_tokens=False):
            yield np.array(one.ids, dtype=np.uint16)


def datasets(tokenizer: str, out: str, files: list[str]) -> None:
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    encode = tokenizer_of(tokenizer).encode_batch_fast

    def ids(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"ids": [one.ids for one in encode(rows["text"], add_special_tokens=False)]}

    text = load_dataset("text", data_files=files, sample_by="paragraph", split="train", cache_dir=f"{out}/cache")
    rows = text.map(ids, batched=True, batch_size=BATCH, num_proc=WORKERS, remove_columns=["text"])
    rows.save_to_disk(f"{out}/rows")


def count_datasets(out: str, special: dict[str, int]) -> Iterator[np.ndarray]:
    from datasets import load_from_disk

    for batch in load_from_disk(f"{out}/rows").data.column("ids").chunks:
        yield batch.flatten().to_numpy(zero_copy_only=False)


def datatrove(tokenizer: str, out: str, files: list[str]) -> None:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    write = DocumentTokenizer(f"{out}/tokens", tokenizer, eos_token="[SEP]", shuffle_documents=False, batch_size=BATCH)
    steps = [JsonlReader(str(Path(files[0]).parent), glob_pattern="*.jsonl"), write]
    LocalPipelineExecutor(steps, tasks=len(files), workers=WORKERS, logging_dir=f"{out}/logs").run()


def count_datatrove(out: str, special: dict[str, int]) -> Iterator[np.ndarray]:
    for path in sorted(Path(out, "tokens").rglob("*.ds")):
        ids = np.fromfile(path, dtype="<u2")
        yield ids[ids != special["[SEP]"]]


class Litdata:
    """What a worker of litdata does with a file; it must be found by its name in a new process."""

    def __init__(self, tokenizer: str) -> None:
        self.tokenizer = tokenizer

    def __call__(self, path: str) -> Iterator[Any]:
        import torch

        for ids in encoded(self.tokenizer, path):
            yield torch.from_numpy(ids)


def litdata(tokenizer: str, out: str, files: list[str]) -> None:
    from litdata import TokensLoader, optimize

    optimize(
        fn=Litdata(tokenizer), inputs=files, output_dir=f"{out}/chunks", chunk_size=1 << 23, num_workers=WORKERS,
        item_loader=TokensLoader(), verbose=False,
    )  # fmt: skip


def count_litdata(out: str, special: dict[str, int]) -> Iterator[np.ndarray]:
    for path in sorted(Path(out, "chunks").glob("*.bin")):
        raw = path.read_bytes()
        first = int(np.frombuffer(raw[:4], "<u4")[0])  # items, then where each begins, then the tokens
        yield np.frombuffer(raw[4 * (first + 2) :], dtype="<u2")


def write_mds(job: tuple[str, str, str]) -> None:
    without_pictures()
    from streaming import MDSWriter

    tokenizer, out, path = job
    with MDSWriter(out=out, columns={"ids": "ndarray:uint16"}) as writer:
        for ids in encoded(tokenizer, path):
            writer.write({"ids": ids})


def streaming(tokenizer: str, out: str, files: list[str]) -> None:
    without_pictures()
    from streaming.base.util import merge_index

    jobs = [(tokenizer, f"{out}/mds/{number}", path) for number, path in enumerate(files)]
    with get_context("spawn").Pool(WORKERS) as pool:
        pool.map(write_mds, jobs, chunksize=1)
    merge_index(f"{out}/mds", keep_local=True)


def count_streaming(out: str, special: dict[str, int]) -> Iterator[np.ndarray]:
    without_pictures()
    from streaming.base.format import reader_from_json

    for index in sorted(Path(out, "mds").glob("*/index.json")):
        for shard in json.loads(index.read_text())["shards"]:
            reader = reader_from_json(str(index.parent), None, shard)
            for number in range(len(reader)):
                yield reader[number]["ids"]


_tokenizer: Any = None


def begin(path: str) -> None:
    global _tokenizer
    _tokenizer = tokenizer_of(path)


def megatron_ids(batch: list[str]) -> list[list[int]]:
    return [one.ids for one in _tokenizer.encode_batch_fast(batch, add_special_tokens=False)]


def megatron(tokenizer: str, out: str, files: list[str]) -> None:
    """As its tools/preprocess_data.py, which pip does not install: workers tokenize, one process writes."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{out}/all.bin", dtype=np.uint16)
    with get_context("spawn").Pool(WORKERS, begin, (tokenizer,)) as pool:
        for path in files:
            for rows in pool.imap(megatron_ids, batches(documents(path))):
                for ids in rows:
                    builder.add_document(ids, [len(ids)])
    builder.finalize(f"{out}/all.idx")


def count_megatron(out: str, special: dict[str, int]) -> Iterator[np.ndarray]:
    yield np.fromfile(f"{out}/all.bin", dtype="<u2")


ENGINES = {
    "datasets": (datasets, count_datasets), "datatrove": (datatrove, count_datatrove),
    "litdata": (litdata, count_litdata), "streaming": (streaming, count_streaming),
    "megatron": (megatron, count_megatron),
}  # fmt: skip


def main(what: str, name: str, tokenizer: str, out: str, *files: str) -> None:
    build, count = ENGINES[name]
    if what == "build":
        build(tokenizer, out, list(files))
        return
    special = tokenizer_of(tokenizer).get_vocab()
    found = [(ids.size, int(ids.astype(np.int64).sum())) for ids in count(out, special)]
    print(json.dumps({"tokens": sum(size for size, _ in found), "sum": sum(total for _, total in found)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
