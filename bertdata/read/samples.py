"""The kinds of samples: four ways to cut a split into samples, which become rows of ids.

windows    The documents end to end with their separators, cut every T - 2 tokens. Each epoch begins to cut at another
           place. Nothing is lost, and at most one row of an epoch is padded.
documents  A document, or a piece of T - 2 tokens of one: never two in a row.
packed     Several such pieces in a row, each between a [CLS] and a [SEP] of its own, chosen by best fit.
pairs      Two segments of sentences; half of the time they are not from the same document.

The last three need to know where documents begin: they use an index that is made once (index.py). The
protocol Samples, which all kinds implement, is in stream.py.
"""

from __future__ import annotations

from bertdata.format.dataset import Dataset
from bertdata.read.pairs import Pairs
from bertdata.read.pieces import Pieces
from bertdata.read.stream import Samples, TokenStream
from bertdata.read.windows import Windows


def open_samples(
    dataset: Dataset, kind: str, *, split: str, length: int, seed: int, short_seq_prob: float, words: bool
) -> Samples:
    """The samples of one split, of a kind of choices.SAMPLE_KINDS. Makes the index if there is none.

    words: fill Rows.inside_word, if the dataset stores where words begin. Raises UsageError if the dataset does not
    have what this kind needs.
    """
    stream = TokenStream(dataset, split=split, length=length, words=words)
    if kind == "windows":
        return Windows(stream, seed=seed)
    if kind == "pairs":
        return Pairs(stream, seed=seed, short_seq_prob=short_seq_prob)
    return Pieces(stream, packed=kind == "packed")
