"""sample_id → spans of shards → rows of ids. Four ways to cut a split into samples:

windows    the documents end to end with their separators, cut every C = length − 2 tokens from a phase that each epoch
           moves. No index: an address is arithmetic. Nothing is lost; at most one row an epoch is padded.
documents  a document, or a piece of C tokens of one: never two in a row.
packed     rows of several such pieces, each between a [CLS] and a [SEP] of its own, by best fit.
pairs      two segments of sentences, half of the time not from the same document: BERT's next sentence prediction.

The last three need to know where documents begin: an index, made once (index.py).
"""

from __future__ import annotations

from bertdata.format.dataset import Dataset
from bertdata.read.pairs import Pairs
from bertdata.read.pieces import Pieces
from bertdata.read.stream import TokenStream
from bertdata.read.windows import Windows


def of(
    dataset: Dataset, samples: str, *, split: str, length: int, seed: int, short_seq_prob: float, words: bool
) -> Windows | Pieces | Pairs:
    """The samples of one split by one of the ways above."""
    stream = TokenStream(dataset, split=split, length=length, words=words)
    if samples == "windows":
        return Windows(stream, seed=seed)
    if samples == "pairs":
        return Pairs(stream, seed=seed, short_seq_prob=short_seq_prob)
    return Pieces(stream, packed=samples == "packed")
