"""The values that options can have. Command lines, checks and messages use these lists."""

from typing import Literal, get_args

SAMPLE_KINDS = ("windows", "documents", "packed", "pairs")  # the content of a row; read/stream.py explains each
MaskingPolicy = Literal["exact", "bernoulli", "whole_word", "span", "uniform"]  # docs/determinism.md defines each
MASKING_POLICIES: tuple[MaskingPolicy, ...] = get_args(MaskingPolicy)
MOST_ROWS = 1 << 24  # most rows of a step over all ranks
SHUFFLES = ("full", "blocks")  # the order of an epoch: over all samples, or 64 MiB at a time
INPUT_FORMATS = {  # the format of an input file → its file extensions
    "text": (".txt", ".text"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "csv": (".csv",),
    "tsv": (".tsv",),
    "parquet": (".parquet",),
    "arrow": (".arrow", ".feather"),
    "fasta": (".fasta", ".fa", ".fna", ".faa"),
}
TOKENIZER_TYPES = ("wordpiece", "bpe", "unigram")  # types of trained vocabularies; tokenize/train.py explains each
FIXED_TOKENIZERS = ("residues", "bytes")  # types of vocabularies that are the same for every text; tokenize/fixed.py
IDS_FORMATS = ("megatron", "nanogpt", "rows")  # formats of files with ids from other libraries
