"""The values that options can have. Command lines, checks and messages use these lists."""

from typing import Literal, get_args

SAMPLE_KINDS = ("windows", "documents", "packed", "pairs")  # what a row is made of; read/stream.py explains each
MaskingPolicy = Literal["exact", "bernoulli", "whole_word", "span", "uniform"]  # docs/determinism.md defines each
MASKING_POLICIES: tuple[MaskingPolicy, ...] = get_args(MaskingPolicy)
MOST_ROWS = 1 << 24  # of a step over all ranks
SHUFFLES = ("full", "blocks")  # the order of an epoch: over all samples, or 64 MiB at a time
INPUT_FORMATS = {  # the format of an input file → the file extensions that tell it
    "text": (".txt", ".text"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "csv": (".csv",),
    "tsv": (".tsv",),
    "parquet": (".parquet",),
    "arrow": (".arrow", ".feather"),
    "fasta": (".fasta", ".fa", ".fna", ".faa"),
}
TOKENIZER_TYPES = ("wordpiece", "bpe", "unigram")  # of a vocabulary that is trained; tokenize/train.py explains each
FIXED_TOKENIZERS = ("residues", "bytes")  # of a vocabulary that is the same for every text; tokenize/fixed.py
IDS_FORMATS = ("megatron", "nanogpt", "rows")  # of files of ids that others wrote
