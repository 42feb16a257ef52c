"""bertdata turns text into memory-mapped token shards, once, and reads these as masked batches.

    import bertdata
    bertdata.build("corpus.txt", "shards/", tokenizer="bert-base-uncased")
    shards = bertdata.open("shards/")                       # .num_documents .num_tokens .dataset_id .splits
    loader = bertdata.Loader(shards, length=128, global_batch_size=256, seed=0)
    for batch in loader:                                    # endless; int64 arrays of numpy
        batch.input_ids, batch.masked_positions, batch.targets

Importing this package loads neither torch nor transformers nor numba: each name imports its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertdata.errors import BertdataError
    from bertdata.format.dataset import Dataset
    from bertdata.keys import key
    from bertdata.options import IdsFormat, Machines, Shares, TextFormat, Vocabulary
    from bertdata.read.loader import Loader
    from bertdata.tokenize.texts import Tokenizer
    from bertdata.types import IGNORE_INDEX, Batch, Masking, SpecialTokens
    from bertdata.write import BuildReport, build, export, finish, import_ids, train_tokenizer

__version__ = "0.2.0"
_MODULES = {
    "errors": "BertdataError",
    "format.dataset": "Dataset",
    "keys": "key",
    "options": "IdsFormat Machines Shares TextFormat Vocabulary",
    "read.loader": "Loader",
    "tokenize.texts": "Tokenizer",
    "types": "IGNORE_INDEX Batch Masking SpecialTokens",
    "write": "BuildReport build export finish import_ids train_tokenizer",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = [
    "IGNORE_INDEX",
    "Batch",
    "BertdataError",
    "BuildReport",
    "Dataset",
    "IdsFormat",
    "Loader",
    "Machines",
    "Masking",
    "Shares",
    "SpecialTokens",
    "TextFormat",
    "Tokenizer",
    "Vocabulary",
    "build",
    "export",
    "finish",
    "import_ids",
    "key",
    "open",
    "train_tokenizer",
]


def open(path: Any) -> Dataset:
    """Open the dataset in the directory `path`, in O(shards). Raises DatasetError if it is missing or damaged.

    path: a directory, or a URL (s3, gs, az, hf, http or https). A remote dataset is copied to the cache of this host
    once ($BERTDATA_CACHE, else ~/.cache/bertdata). Raises RemoteError if the download fails.
    """
    from bertdata.format.dataset import Dataset
    from bertdata.urls import is_remote

    if is_remote(str(path)):
        from bertdata.remote.copies import local_copy

        path = local_copy(str(path))
    return Dataset(path)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bertdata' has no attribute {name!r}")
    return getattr(importlib.import_module(f"bertdata.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names, including names that are not imported yet, for tab completion."""
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "annotations", "importlib"})
