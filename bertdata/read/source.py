"""One dataset of a stream: its samples, and what is read ahead from the disk."""

from __future__ import annotations

from typing import Any

from bertdata.format.dataset import Dataset
from bertdata.read import order
from bertdata.read.pairs import Pairs
from bertdata.read.pieces import Pieces
from bertdata.read.stream import Samples, TokenStream
from bertdata.read.windows import Windows


class Source:
    """A dataset that a Loader reads.

    .dataset. .samples: the samples of its split, one of four kinds. .num_samples: N, the samples of an epoch.

    windows    The documents end to end with their separators, cut every T - 2 tokens. Each epoch begins to cut at
               another place. Nothing is lost, and at most one row of an epoch is padded.
    documents  A document, or a piece of T - 2 tokens of one: never two in a row.
    packed     Several such pieces in a row, each between its own [CLS] and [SEP], chosen by best fit.
    pairs      Two segments of sentences; half of the time they are not from the same document.

    The last three need to know where documents begin: they use an index that is made once (index.py).
    """

    def __init__(
        self, dataset: Dataset, kind: str, *, seed: int, block: int | None, variants: int | None, **options: Any
    ) -> None:
        """kind: of choices.SAMPLE_KINDS. block: as order.sample_ids has it. options: split, length, words,
        short_seq_prob.

        Raises UsageError if the dataset does not have what this kind needs.
        """
        self.dataset, self._seed, self._variants, self._block = dataset, seed, variants, block
        short_seq_prob = options.pop("short_seq_prob")
        stream = TokenStream(dataset, at_random=block is None, **options)
        if kind == "windows":
            self.samples: Samples = Windows(stream, seed=seed)
        elif kind == "pairs":
            self.samples = Pairs(stream, seed=seed, short_seq_prob=short_seq_prob)
        else:
            self.samples = Pieces(stream, packed=kind == "packed")
        self.num_samples = self.samples.num_samples
        self._group = self._requested = (-1, 0)  # groups of blocks: the one being read, the last that was read ahead

    def read_ahead(self, position: int) -> None:
        """Request a group of blocks and the next one from the disk when the first of its samples is read."""
        if self._block is None:
            return
        n, block = self.num_samples, self._block
        if self._variants is not None:
            position %= self._variants * n
        epoch, number = group = order.group_of(position, num_samples=n, block=block)
        if group == self._group:
            return
        is_last = order.group_of((epoch + 1) * n - 1, num_samples=n, block=block) == group
        next_epoch = epoch + 1 if self._variants is None else (epoch + 1) % self._variants
        next_group = (next_epoch, 0) if is_last else (epoch, number + 1)
        for wanted in [next_group] if group == self._requested else [group, next_group]:
            for first, stop in order.blocks_of(*wanted, num_samples=n, seed=self._seed, block=block):
                self.samples.stream.read_ahead(self.samples.ranges(wanted[0], first, stop))
        self._group, self._requested = group, next_group
