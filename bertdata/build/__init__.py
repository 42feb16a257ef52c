"""Text, or ids that others made → a published dataset; a dataset → files of others."""

from bertdata.build.dataset import BuildReport, build, finish
from bertdata.build.exporting import export
from bertdata.build.importing import import_ids
from bertdata.build.vocabulary import train_tokenizer
from bertdata.sources.documents import TextFormat

__all__ = ["BuildReport", "TextFormat", "build", "export", "finish", "import_ids", "train_tokenizer"]
