"""The few shapes of data that every room knows. B rows, T places, K slots for masked places."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import UsageError

IGNORE_INDEX = -100
"""Target of a place that is not to be predicted; the default `ignore_index` of torch's cross entropy."""


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """What a dataset knows about its vocabulary. A role the tokenizer does not have is None."""

    vocab_size: int  # largest id + 1
    pad: int | None = None
    unk: int | None = None
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None
    bos: int | None = None
    eos: int | None = None
    special_ids: tuple[int, ...] = ()  # every special id, ascending; never selected by a mask, never drawn

    @property
    def separator(self) -> int | None:
        """The id stored after each document: [SEP], else the end token, else none."""
        return self.sep if self.sep is not None else self.eos

    def roles(self) -> dict[str, int]:
        names = ("pad", "unk", "cls", "sep", "mask", "bos", "eos")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True, kw_only=True)
class Masking:
    """How a row is masked for masked language modelling (Devlin et al., 2019).

    Of the selected places, `mask_fraction` become [MASK], `random_fraction` another id, and the rest keep theirs;
    all of them are targets. docs/determinism.md gives the rule to the bit and a worked example.
    """

    probability: float = 0.15  # share of a row's filled places to select
    policy: str = "exact"  # "exact": floor(p * n + 0.5) places of every row; "bernoulli": each place on its own
    mask_fraction: float = 0.8
    random_fraction: float = 0.1

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability <= 1.0:
            raise UsageError(f"masking probability is {self.probability}; give a share between 0 and 1, such as 0.15")
        if self.policy not in ("exact", "bernoulli"):
            raise UsageError(f"masking policy is {self.policy!r}; give 'exact' or 'bernoulli'")
        total = self.mask_fraction + self.random_fraction
        if not (min(self.mask_fraction, self.random_fraction) >= 0 and total <= 1 + 1e-9):  # NaN is refused too
            raise UsageError(
                f"mask_fraction {self.mask_fraction} and random_fraction {self.random_fraction} must be shares, "
                "together at most 1"
            )

    def num_slots(self, length: int) -> int:
        """K: room for the masked places of a row of `length` places."""
        p, n = self.probability, length - 2
        if p == 0.0:
            return 0
        if self.policy == "exact":
            return min(n, math.floor(p * length + 0.5))
        return min(n, math.ceil(p * n + 6 * math.sqrt(p * (1 - p) * n)) + 1)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's rows of one step. Every array is int64, contiguous and fresh: it is the caller's to keep or change."""

    input_ids: NDArray[np.int64]  # [B, T]
    masked_positions: NDArray[np.int64]  # [B, K] ascending; an unused slot holds 0
    targets: NDArray[np.int64]  # [B, K]; an unused slot holds IGNORE_INDEX
    sample_ids: NDArray[np.int64]  # [B]
    attention_mask: NDArray[np.int64] | None = None  # [B, T], 1 where filled; None when no row is padded
    token_type_ids: NDArray[np.int64] | None = None  # [B, T]; None unless rows are sentence pairs

    @property
    def labels(self) -> NDArray[np.int64]:
        """[B, T]: the target of each selected place, IGNORE_INDEX elsewhere. Derived anew at each call."""
        labels = np.full_like(self.input_ids, IGNORE_INDEX)
        rows, slots = np.nonzero(self.targets != IGNORE_INDEX)
        labels[rows, self.masked_positions[rows, slots]] = self.targets[rows, slots]
        return labels

    def arrays(self) -> dict[str, NDArray[np.int64]]:
        """The arrays by name, those that are None left out."""
        named: dict[str, Any] = vars(self)
        return {name: array for name, array in named.items() if array is not None}
