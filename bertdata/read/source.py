"""One dataset of a stream: its samples, and what is read ahead of it from the disk."""

from __future__ import annotations

from bertdata.format.dataset import Dataset
from bertdata.read import order
from bertdata.read.samples import open_samples


class Source:
    """A dataset that a Loader reads.

    .dataset. .samples: how its split is cut into samples. .num_samples: N, those of an epoch.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        samples: str,
        split: str,
        length: int,
        seed: int,
        short_seq_prob: float,
        words: bool,
        block: int | None,
        variants: int | None,
    ) -> None:
        """words: as open_samples has it. block: as order.sample_ids has it. The others are arguments of Loader."""
        self.dataset, self._seed, self._variants = dataset, seed, variants
        self.samples = open_samples(
            dataset, samples, split=split, length=length, seed=seed, short_seq_prob=short_seq_prob, words=words
        )
        self.num_samples = self.samples.num_samples
        self._block = block
        self._group = self._requested = (-1, 0)  # groups of blocks: the one being read, the last that was read ahead
        if block is None:
            self.samples.stream.read_at_random()

    def read_ahead(self, position: int) -> None:
        """When a group of blocks is entered, asks the disk for it and for the next one, unless it was asked before."""
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
