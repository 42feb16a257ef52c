"""Mask rows of ids, and return the targets.

A masked language model predicts about 15 % of the tokens from all other tokens. Of the selected tokens, 80 % become
[MASK], 10 % become a random id, and 10 % keep their id, so that the model cannot trust any token (Devlin et al., 2019):

    the  cat   sat  on  the   mat   .          selected: cat, the, mat
    the [MASK] sat  on  the  [MASK] .          cat and mat were hidden, the second "the" was kept; all three are targets

Special tokens, separators and [UNK] are never selected. They are random ids only with random_from="vocabulary". The
mask of a row depends only on (seed, epoch, sample_id), not on rank, batch, worker or restart. docs/determinism.md
defines it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bertdata.choices import MASKING_POLICIES
from bertdata.errors import UsageError
from bertdata.read.kernels import masks as kernels
from bertdata.types import Masking, SpecialTokens

SPAN_END_PROBABILITY, MAX_SPAN_WORDS = 0.2, 10  # SpanBERT: after each word a span ends with this probability
_NOWHERE = np.zeros((0, 0), np.uint8)


class Masker:
    """A masking policy for one vocabulary and one row length. Its tables need nine bytes per id.

    .num_slots: K, the largest number of targets of a row.

    Raises UsageError if the tokenizer has no [MASK], or only special tokens.
    """

    def __init__(
        self,
        masking: Masking,
        special: SpecialTokens,
        *,
        length: int,
        seed: int,
        continuing_ids: NDArray[np.bool_] | None = None,
        replacing_ids: NDArray[np.bool_] | None = None,
    ) -> None:
        """Prepare the tables.

        continuing_ids bool [V]: ids that continue the previous word (words.py). None: each token is a word.
        replacing_ids bool [V]: ids that random_from="tokens" allows; special ones are never allowed. None: all.
        """
        if special.mask is None:
            sentence = "the tokenizer of the dataset has no [MASK]; build with --special-tokens or --roles"
            raise UsageError(sentence, "tokenizer-lacks-token", option="masking")
        self.num_slots = masking.num_slots(length)
        ordinary = np.ones(special.vocab_size, np.bool_)
        ordinary[list(special.special_ids)] = False
        if special.unk is not None:
            ordinary[special.unk] = False
        replaces = ordinary
        if masking.random_from == "vocabulary":
            replaces = np.ones_like(ordinary)
        elif masking.random_from == "tokens" and replacing_ids is not None:
            replaces = ordinary & replacing_ids
        if not (ordinary.any() and replaces.any()):
            sentence = "the vocabulary has only special tokens, so nothing can be masked; give a different dataset"
            raise UsageError(sentence, "unsupported", option="masking")
        kinds = ordinary * kernels.MASKABLE
        if continuing_ids is not None:
            kinds |= continuing_ids * kernels.CONTINUES
        special_ids = np.flatnonzero(~ordinary) if special.special_ids else [special.vocab_size]
        self._is_weighted = masking.policy == "uniform"
        hidden = 1.0 if self._is_weighted else masking.mask_fraction
        hidden_or_random = 1.0 if self._is_weighted else masking.mask_fraction + masking.random_fraction
        rules = kernels.MaskRules(
            policy=MASKING_POLICIES.index(masking.policy),
            seed=np.uint64(seed),
            quota=np.array([masking.quota(filled) for filled in range(length + 1)]),
            select_below=_of_2_32(masking.probability),
            lengths_below=_span_lengths_below(),
            kinds=kinds,
            is_rule_1=masking.rule == 1,
            mask_id=special.mask,
            mask_below=_of_2_32(hidden),
            random_below=_of_2_32(hidden_or_random),
            pool=np.flatnonzero(replaces),
            first_special=np.uint64(special_ids[0]),
            special_range=np.uint64(special_ids[-1] - special_ids[0]),
        )
        self._rules = tuple(rules)  # a plain tuple, for the kernel

    def apply(
        self,
        ids: NDArray[np.int64],
        text_places: NDArray[np.int64],
        epochs: NDArray[np.int64],
        sample_ids: NDArray[np.int64],
        inside_word: NDArray[np.uint8] | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32] | None]:
        """Mask ids [B, T] in place. Return masked_positions and targets, int64 [B, K], and weights. Thread-safe.

        Every id must be below the size of the vocabulary. text_places int64 [B]: the number of tokens between the first
        [CLS] and the last [SEP]. epochs, sample_ids int64 [B]: of each row. inside_word uint8 [B, T]: starts of stored
        words, as in stream.Rows. The weights, float32 [B], are None unless the policy is "uniform".
        """
        masked_positions = np.empty((ids.shape[0], self.num_slots), np.int64)
        targets = np.empty_like(masked_positions)
        weights = np.zeros(ids.shape[0] if self._is_weighted else 0, np.float32)
        if self.num_slots:
            inside_word = _NOWHERE if inside_word is None else inside_word
            given = (ids, text_places, epochs, sample_ids, inside_word)
            kernels.mask(self._rules, tuple(kernels.MaskRows(*given, masked_positions, targets, weights)))
        return masked_positions, targets, weights if self._is_weighted else None


def _of_2_32(share: float) -> np.uint64:
    """Return a bound: a random number of 32 bits is below it with probability `share`."""
    return np.uint64(round(share * 2**32))


def _span_lengths_below() -> NDArray[np.uint64]:
    """Return MaskRules.lengths_below: bound w, from 1 to 9, is the probability that a span has at most w words."""
    whole = 1 - (1 - SPAN_END_PROBABILITY) ** MAX_SPAN_WORDS
    shares = [(1 - (1 - SPAN_END_PROBABILITY) ** words) / whole for words in range(1, MAX_SPAN_WORDS)]
    return np.array([_of_2_32(share) for share in shares])
