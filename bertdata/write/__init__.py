"""Text, or ids from other libraries → a published dataset; a dataset → Parquet."""

from bertdata.write.dataset import BuildReport, build, finish
from bertdata.write.exchange import export, import_ids
from bertdata.write.vocabulary import train_tokenizer

__all__ = ["BuildReport", "build", "export", "finish", "import_ids", "train_tokenizer"]
