"""The names that options take: one owner for each list, which command lines, checks and messages all use."""

SAMPLE_KINDS = (
    "windows",
    "documents",
    "packed",
    "pairs",
)  # what a row is made of; read/samples.py has a class for each
MASKING_POLICIES = ("exact", "bernoulli", "whole_word", "span")  # docs/determinism.md has the rule of each
SHUFFLES = ("full", "blocks")  # the order of an epoch: any sample anywhere, or 64 MiB at a time
INPUT_FORMATS = ("text", "jsonl", "parquet", "arrow")  # what a file of text is
DOCUMENT_ENDS = ("blank", "line", "file")  # what ends a document of plain text
SENTENCE_ENDS = ("none", "line")  # what ends a sentence, if sentences are stored
ON_ERROR = ("fail", "skip")  # what happens at a row without text
