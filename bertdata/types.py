"""The few shapes of data that every room knows. B rows, T places, K slots for masked places."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.choices import MASKING_POLICIES
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
    """How a row is masked for masked language modelling; docs/determinism.md gives each rule to the bit, with examples.

    policy: "exact" selects the same share of every row (Devlin et al., 2019), "bernoulli" each place on its own (as
    transformers' collator does), "whole_word" all tokens of a word or none (whole word masking, Google, 2019), "span"
    stretches of one to ten words, 3.8 on average (SpanBERT, Joshi et al., 2020). All but "bernoulli" select
    `quota(n)` of a row's n filled places.

    Of the selected places, `mask_fraction` become [MASK], `random_fraction` another id, and the rest keep theirs; all
    of them are targets. With "span", neighbours share their fate.

    Of the rules of others, BERT's is rounding="even", min_targets=1, max_targets=20, random_from="vocabulary".
    """

    probability: float = 0.15  # share of a row's filled places to select
    policy: str = "exact"
    rounding: str = "nearest"  # of p * n: "nearest" with halves up, "even" with halves to even (Python's), "floor"
    min_targets: int = 0  # of a row that has so many candidates
    max_targets: int | None = None  # of a row
    mask_fraction: float = 0.8
    random_fraction: float = 0.1
    random_from: str = "ordinary"  # "ordinary": ids that are not special; "vocabulary": all

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability <= 1.0:
            raise UsageError(f"masking probability is {self.probability}; give a share between 0 and 1, such as 0.15")
        for name, known in (
            ("policy", MASKING_POLICIES),
            ("rounding", ("nearest", "even", "floor")),
            ("random_from", ("ordinary", "vocabulary")),
        ):
            if getattr(self, name) not in known:
                raise UsageError(f"masking {name} is {getattr(self, name)!r}; give one of {', '.join(known)}")
        if not 0 <= self.min_targets <= (math.inf if self.max_targets is None else self.max_targets):
            raise UsageError(
                f"min_targets {self.min_targets} and max_targets {self.max_targets} must be numbers of places, the "
                "first no larger than the second"
            )
        total = self.mask_fraction + self.random_fraction
        if not (min(self.mask_fraction, self.random_fraction) >= 0 and total <= 1 + 1e-9):  # NaN is refused too
            raise UsageError(
                f"mask_fraction {self.mask_fraction} and random_fraction {self.random_fraction} must be shares, "
                "together at most 1"
            )

    def quota(self, filled: int) -> int:
        """How many places to select of a row with `filled` places, [CLS] and [SEP] included, if it has the candidates.

        >>> Masking().quota(128), Masking(max_targets=20).quota(512)
        (19, 20)
        """
        exactly = self.probability * filled
        whole = {"nearest": math.floor(exactly + 0.5), "even": round(exactly), "floor": math.floor(exactly)}
        most = max(0, filled - 2)
        return min(
            max(whole[self.rounding], self.min_targets), most if self.max_targets is None else self.max_targets, most
        )

    def num_slots(self, length: int) -> int:
        """K: room for the masked places of a row of `length` places."""
        p, n = self.probability, length - 2
        if self.policy != "bernoulli":
            return self.quota(length)
        most = n if self.max_targets is None else min(n, self.max_targets)
        return min(most, math.ceil(p * n + 6 * math.sqrt(p * (1 - p) * n)) + 1) if p else 0


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's rows of one step. Every array is contiguous and fresh: it is the caller's to keep or change.

    All are int64, but for what a teacher said, which comes as it is stored.
    """

    input_ids: NDArray[np.int64]  # [B, T]
    masked_positions: NDArray[np.int64]  # [B, K] ascending; an unused slot holds 0
    targets: NDArray[np.int64]  # [B, K]; an unused slot holds IGNORE_INDEX
    sample_ids: NDArray[np.int64]  # [B]
    attention_mask: NDArray[np.int64] | None = None  # [B, T], 1 where filled; None when no row is padded
    token_type_ids: NDArray[np.int64] | None = None  # [B, T]: 1 in the second segment; None unless rows are pairs
    next_sentence_label: NDArray[np.int64] | None = None  # [B]: 0 if B follows A, 1 if it is from another document
    position_ids: NDArray[np.int64] | None = None  # [B, T], from 0 in each packed piece; None unless rows are packed
    teacher_ids: NDArray[Any] | None = None  # [B, K, k] uint16 or uint32: what a teacher holds most probable
    teacher_logprobs: NDArray[np.float16] | None = None  # [B, K, k]; None without a teacher's cache
    teacher_tails: NDArray[np.float16] | None = None  # [B, K]: log of the probability of all other tokens

    @property
    def labels(self) -> NDArray[np.int64]:
        """[B, T]: the target of each selected place, IGNORE_INDEX elsewhere. Derived anew at each call."""
        labels = np.full_like(self.input_ids, IGNORE_INDEX)
        rows, slots = np.nonzero(self.targets != IGNORE_INDEX)
        labels[rows, self.masked_positions[rows, slots]] = self.targets[rows, slots]
        return labels

    @property
    def cu_seqlens(self) -> NDArray[np.int32]:
        """int32 [pieces + 1]: where in the B · T places the pieces of packed rows begin, and B · T.

        The padding of a row is a piece of its own. What attention kernels for rows of unequal length ask for. Derived
        anew at each call. Of rows that are not packed each is one piece.
        """
        num_rows, length = self.input_ids.shape
        if self.position_ids is None:
            return np.arange(0, num_rows * length + 1, max(1, length), dtype=np.int32)
        return np.append(np.flatnonzero(self.position_ids == 0), num_rows * length).astype(np.int32)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays by name, those that are None left out."""
        named: dict[str, Any] = vars(self)
        return {name: array for name, array in named.items() if array is not None}
