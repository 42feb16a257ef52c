"""Text → tokens on disk by three other engines, each as its documentation does it; bench_build.py times the commands.

    python other_build.py build NAME TOKENIZER OUT FILE...    NAME: datasets, datatrove or megatron
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


def datasets(tokenizer: str, out: str, files: list[str]) -> None:
    from datasets import Features, List, Value, disable_progress_bars, load_dataset

    disable_progress_bars()
    encode = tokenizer_of(tokenizer).encode_batch_fast

    def ids(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"ids": [one.ids for one in encode(rows["text"], add_special_tokens=False)]}

    text = load_dataset("text", data_files=files, sample_by="paragraph", split="train", cache_dir=f"{out}/cache")
    features = Features({"ids": List(Value("uint16"))})
    rows = text.map(ids, batched=True, batch_size=BATCH, num_proc=WORKERS, remove_columns=["text"], features=features)
    rows.save_to_disk(f"{out}/rows", num_proc=WORKERS)


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
