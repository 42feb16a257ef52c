"""Text → a published dataset."""

from bertdata.build.dataset import BuildReport, build, finish
from bertdata.build.vocabulary import train_tokenizer
from bertdata.sources.documents import TextFormat

__all__ = ["BuildReport", "TextFormat", "build", "finish", "train_tokenizer"]
