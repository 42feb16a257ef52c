"""Data types that every package uses. Letters in shapes: B rows, T tokens of a row, K slots for targets of a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bertdata.choices import MASKING_POLICIES, MaskingPolicy
from bertdata.errors import require, require_integer, require_known, require_share

IGNORE_INDEX = -100
"""The target of a token that is not predicted: the default `ignore_index` of torch's cross entropy."""
ROLES = ("pad", "unk", "cls", "sep", "mask", "bos", "eos")  # roles of special tokens
LARGEST_VOCABULARY = 1 << 24
Progress = Callable[[int, int], None]
"""A function that is called from time to time with the bytes done so far and the total bytes."""
_BY_ROLE = -1  # no id


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The size of a vocabulary, and the ids of its special tokens by role; None for a missing role."""

    vocab_size: int  # largest id + 1
    pad: int | None = None
    unk: int | None = None
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None
    bos: int | None = None
    eos: int | None = None
    special_ids: tuple[int, ...] = ()  # all, ascending; never masked; sampled only with random_from="vocabulary"
    separator: int | None = _BY_ROLE  # stored after each document; not given: [SEP], else the end token, else None

    def __post_init__(self) -> None:
        if self.separator == _BY_ROLE:
            object.__setattr__(self, "separator", self.sep if self.sep is not None else self.eos)

    def roles(self) -> dict[str, int]:
        """Return the ids by role, for the roles that the vocabulary has."""
        return {name: getattr(self, name) for name in ROLES if getattr(self, name) is not None}


@dataclass(frozen=True, kw_only=True)
class Masking:
    """How rows are masked for masked language modelling. docs/determinism.md defines each rule exactly.

    policy:
        "exact" selects the same share of every row (Devlin et al., 2019).
        "bernoulli" selects each token independently, as transformers' collator does.
        "whole_word" selects all tokens of a word or none (whole word masking, Google, 2019). It selects a part of a
            word only in rows that would otherwise have less than half of their targets.
        "span" selects spans of one to ten words, 3.8 on average (SpanBERT, Joshi et al., 2020).
        "uniform" samples the share of selected tokens for each row, and replaces all of them with [MASK]; the batch
            has a weight for each row (masked diffusion: LLaDA, Nie et al., 2025). probability, min_targets and the
            fractions have no effect.

    All policies except "bernoulli" select at most `quota(n)` tokens of a row with n tokens. All selected tokens are
    targets. The share `mask_fraction` of the targets becomes [MASK], the share `random_fraction` becomes a random id,
    and the rest keeps its id. With "span" all tokens of a span have the same outcome.

    Rule 1 reproduces the batches of version 0.1.0. Its random ids include ids without a token. With "whole_word" and
    "span" it finds no words in some vocabularies, so rows have few targets.

    The masks of BERT's own code: rounding="even", min_targets=1, max_targets=20, random_from="vocabulary". Raises
    UsageError for values out of range.
    """

    probability: float = 0.15  # share of the tokens of a row, without padding, to select
    policy: MaskingPolicy = "exact"
    rounding: Literal["nearest", "even", "floor"] = "nearest"  # rounding of p * n: halves up, halves to even, down
    min_targets: int = 0  # minimum of selected tokens in a row, if it has as many candidates
    max_targets: int | None = None  # maximum of selected tokens in a row
    mask_fraction: float = 0.8  # share of the selected tokens that becomes [MASK]
    random_fraction: float = 0.1  # share of the selected tokens that becomes a random id
    random_from: Literal["tokens", "ordinary", "vocabulary"] | None = None
    """Range of random ids: "tokens" (the default), ids of tokens that are neither special nor [unusedN]; "ordinary"
    (the default of rule 1), all ids except special ones; "vocabulary", all ids."""
    rule: Literal[1, 2] = 2  # version of the rule that finds and selects words, and of the default of random_from

    def __post_init__(self) -> None:
        require(self.rule in (1, 2), "rule", self.rule, "1 or 2", "unknown")
        if self.random_from is None:
            object.__setattr__(self, "random_from", "ordinary" if self.rule == 1 else "tokens")
        object.__setattr__(self, "min_targets", require_integer("min_targets", self.min_targets))
        if self.max_targets is not None:
            object.__setattr__(self, "max_targets", require_integer("max_targets", self.max_targets))
        for name in ("probability", "mask_fraction", "random_fraction"):
            object.__setattr__(self, name, require_share(name, getattr(self, name)))
        require_known("policy", self.policy, MASKING_POLICIES)
        require_known("rounding", self.rounding, ("nearest", "even", "floor"))
        require_known("random_from", self.random_from, ("tokens", "ordinary", "vocabulary"))
        most = math.inf if self.max_targets is None else self.max_targets
        require(0 <= self.min_targets <= most, "min_targets", self.min_targets, "0 to max_targets places")
        is_share = self.mask_fraction + self.random_fraction <= 1 + 1e-9
        require(is_share, "mask_fraction", self.mask_fraction, "shares that are at most 1 with random_fraction")

    def with_rule_of(self, stored: Mapping[str, Any]) -> Masking:
        """Return this masking with the rule of a stored masking.

        stored: the members of the stored masking, with rule 1 if "rule" is missing. If random_from has its default
        value here, it becomes the default of the stored rule.
        """
        rule = stored.get("rule", 1)
        if rule not in (1, 2) or rule == self.rule:
            return self
        is_default = self.random_from == Masking(rule=self.rule).random_from
        return replace(self, rule=rule, random_from=None if is_default else self.random_from)

    def quota(self, filled: int) -> int:
        """Return how many tokens to select in a row of `filled` tokens with [CLS] and [SEP], if it has the candidates.

        >>> Masking().quota(128), Masking(max_targets=20).quota(512)
        (19, 20)
        """
        share = filled if self.policy == "uniform" else self.probability * filled
        number = {"nearest": math.floor(share + 0.5), "even": round(share), "floor": math.floor(share)}[self.rounding]
        places = max(0, filled - 2)
        return min(max(number, self.min_targets), places if self.max_targets is None else self.max_targets, places)

    def num_slots(self, length: int) -> int:
        """Return K: the most tokens that can be selected in a row of `length` tokens."""
        p, n = self.probability, length - 2
        if self.policy != "bernoulli":
            return self.quota(length)
        limit = n if self.max_targets is None else min(n, self.max_targets)
        return min(limit, math.ceil(p * n + 6 * math.sqrt(p * (1 - p) * n)) + 1) if p else 0


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The rows of one step for one rank. Arrays are int64, except weights.

    Every array is contiguous and newly allocated: the caller may keep and change it.
    """

    input_ids: NDArray[np.int64]  # [B, T]
    masked_positions: NDArray[np.int64]  # [B, K]: selected positions in the row, ascending; unused slots are 0
    targets: NDArray[np.int64]  # [B, K]: ids there before masking; unused slots are IGNORE_INDEX
    sample_ids: NDArray[np.int64]  # [B]
    attention_mask: NDArray[np.int64] | None = None  # [B, T]: 1 for tokens, 0 for padding; None when no row is padded
    token_type_ids: NDArray[np.int64] | None = None  # [B, T]: 1 in the second segment; None unless rows are pairs
    next_sentence_label: NDArray[np.int64] | None = None  # [B]: 0 if B follows A, 1 if it is from a different document
    position_ids: NDArray[np.int64] | None = None  # [B, T]: from 0 in each packed sequence; None unless rows are packed
    weights: NDArray[np.float32] | None = None  # [B]: weight of each row's loss; None unless the policy is "uniform"
    sources: NDArray[np.int64] | None = None  # [B]: index of the dataset of each row; None for a single dataset

    @property
    def labels(self) -> NDArray[np.int64]:
        """int64 [B, T]: the target at each selected position, IGNORE_INDEX elsewhere. Computed on each access.

        Unused slots write IGNORE_INDEX at position 0, which is [CLS] and never selected.
        """
        num_rows, length = self.input_ids.shape
        labels = np.full((num_rows, length), IGNORE_INDEX)
        starts = length * np.arange(num_rows)[:, None]  # one flat index is faster than two indices
        labels.reshape(-1)[(starts + self.masked_positions).reshape(-1)] = self.targets.reshape(-1)
        return labels

    @property
    def cu_seqlens(self) -> NDArray[np.int32]:
        """int32 [sequences + 1]: where each packed sequence begins among the B * T tokens, then B * T.

        For attention kernels with sequences of variable length. The padding of a row counts as one sequence, and so
        does a row that is not packed. Computed on each access.
        """
        num_rows, length = self.input_ids.shape
        if self.position_ids is None:
            return np.arange(0, num_rows * length + 1, max(1, length), dtype=np.int32)
        return np.append(np.flatnonzero(self.position_ids == 0), num_rows * length).astype(np.int32)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by name, except members that are None."""
        named: dict[str, Any] = vars(self)
        return {name: array for name, array in named.items() if array is not None}
