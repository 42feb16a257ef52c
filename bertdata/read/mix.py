"""Several datasets as one stream: position → the source, and the position in the stream of the source.

    weights    0.7 and 0.3
    positions  0 1 2 3 4 5 6 7 8 9 | 10 11 12 ...          blocks of 10 (here; 100 really)
    sources    a a b a a a b a b a |  b  a  a ...          of each block 7 are a and 3 are b, in random order
    in a       0 1   2 3 4   5   6 |     7  8 ...
    in b           0       1   2   |  3       ...

A formula computes how many samples of a source precede a block, and a key determines the order in a block. So there is
no table and no state, and the shares do not drift. docs/determinism.md defines both.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import combinations, pairwise
from math import gcd, lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import UsageError, require
from bertdata.format.dataset import Dataset
from bertdata.read.kernels import order as kernels

Weight = int | float | str | Decimal | Fraction
MAX_SUM = (1 << 31) - 1  # limit of the weights as whole numbers, because kernels multiply two of them


class Places(NamedTuple):
    """The sources of the positions of a batch."""

    sources: NDArray[np.int64] | None  # [B]: index of the source; None for a single source
    positions: NDArray[np.int64]  # [B]: position in the stream of the source
    which: NDArray[np.int64]  # [B]: indices of the rows of source 0, ascending, then of source 1, and so on
    bounds: NDArray[np.int64]  # [S + 1]: start of the rows of each source in `which`

    def rows(self) -> list[NDArray[np.int64]]:
        """Return the indices of the rows of each source, int64 [n]."""
        if self.sources is None:
            return [self.which]
        return [self.which[first:stop] for first, stop in pairwise(self.bounds.tolist())]


class Mix:
    """The order of two or more sources. weights: from `whole`.

    starts: the number of samples of each source that were read before; empty for none.
    """

    def __init__(self, weights: tuple[int, ...], *, seed: int, starts: tuple[int, ...] = ()) -> None:
        self.weights, self._seed = np.array(weights, np.int64), np.uint64(seed)
        self._starts = np.array(starts, np.int64) if starts else None

    def places(self, positions: NDArray[np.int64]) -> Places:
        """Return the places of positions, int64 [B]. About 10 ns each if they are consecutive, else up to 1 µs each."""
        sources, inner, which = np.empty((3, positions.size), np.int64)
        places = Places(sources, inner, which, np.empty(self.weights.size + 1, np.int64))
        kernels.mix_sources(positions, self.weights, self._seed, *places)
        if self._starts is not None:
            inner += self._starts[sources]
        return places

    def counts(self, position: int) -> list[int]:
        """Return the number of samples of each source before a position, including samples from before the mix."""
        block = position // kernels.MIX_BLOCK
        counts = np.empty_like(self.weights)
        kernels.counts_before(self.weights, block, counts)
        begun = self.places(np.arange(block * kernels.MIX_BLOCK, position))
        counts += np.diff(begun.bounds)
        return (counts if self._starts is None else counts + self._starts).tolist()


def one_source(positions: NDArray[np.int64]) -> Places:
    """Return the places of positions, int64 [B], of a single source."""
    return Places(None, positions, *_every_row(positions.size))


@functools.lru_cache(maxsize=4)
def _every_row(num_rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return Places.which and Places.bounds of a batch of one source; do not change them."""
    return np.arange(num_rows), np.array([0, num_rows])


def ratio(weights: Sequence[Weight]) -> tuple[int, ...]:
    """Return weights as the smallest whole numbers in the same ratio: 0.7 and 0.3 → 7 and 3.

    A float counts as the decimal that Python prints for it. Raises UsageError unless all weights are numbers above 0.
    """
    exact = []
    for weight in weights:
        try:
            exact.append(Fraction(str(weight)))
        except (ValueError, ZeroDivisionError):
            exact.append(Fraction(0))
        require(exact[-1] > 0, "shards", weight, "each dataset a weight above 0, such as 0.7")
    common = lcm(*(fraction.denominator for fraction in exact))
    numbers = [int(fraction * common) for fraction in exact]
    numbers = [number // gcd(*numbers) for number in numbers]
    if sum(numbers) > MAX_SUM:
        sentence = f"the weights {', '.join(map(str, weights))} have too many digits; give decimals such as 0.25"
        raise UsageError(sentence, "malformed", option="shards", given=weights)
    return tuple(numbers)


def require_alike(datasets: Sequence[Dataset]) -> None:
    """Raise UsageError unless datasets can share a batch: they must be different, with the same tokenizer."""
    for one, other in combinations(datasets, 2):
        if one.dataset_id == other.dataset_id:
            sentence = f"{one.path} and {other.path} are the same dataset; give it once, with the sum of the weights"
            raise UsageError(sentence, "conflict", option="shards", given=other.path)
    first = datasets[0]
    for other in datasets[1:]:
        from bertdata.tokenize.tokenizer import give_same_ids

        digests = {item.manifest.tokenizer.get("tokenizer.json") for item in (first, other)}
        files = (item.tokenizer_file("tokenizer.json") for item in (first, other))
        if len(digests) > 1 and not give_same_ids(*files):
            difference = "tokenizers"
        elif first.special_tokens != other.special_tokens or first.manifest.token_dtype != other.manifest.token_dtype:
            difference = "special tokens or separators"
        else:
            continue
        sentence = f"{first.path} and {other.path} have different {difference}; build both with the same tokenizer"
        raise UsageError(sentence, "tokenizer-differs", option="shards", given=other.path)
