"""Rows of ids → masked rows and their targets.

A masked language model predicts about 15 % of the tokens from the others. Of the places selected, 80 % show [MASK],
10 % a random id and 10 % their own, so that the model cannot trust any token it sees (Devlin et al., 2019):

    the  cat  sat  on  the  mat  .          selected: cat, the, mat
    the [MASK] sat on  the [MASK] .         cat and mat were hidden, the second "the" was kept; all three are targets

Specials, separators and [UNK] are never selected, and specials are never drawn. A row's mask is a function of
(seed, epoch, sample_id) and of nothing else: not of rank, batch, worker or restart.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bertdata.choices import MASKING_POLICIES
from bertdata.errors import UsageError
from bertdata.read import kernels
from bertdata.types import Masking, SpecialTokens

SPAN_STOPS, SPAN_LONGEST = 0.2, 10  # SpanBERT's: a span ends after each of its words with the first, and is no longer


class Masker:
    """A masking policy made ready for one vocabulary and row length. Nine bytes of tables an id."""

    def __init__(
        self,
        masking: Masking,
        special: SpecialTokens,
        *,
        length: int,
        seed: int,
        continues: NDArray[np.bool_] | None = None,
    ) -> None:
        """continues bool [vocab_size]: ids that go on with the word before them. None: every token is a word."""
        if special.mask is None:
            raise UsageError(
                "the tokenizer has no mask token, so nothing can be masked; build with one that has [MASK]"
            )
        self.num_slots = masking.num_slots(length)
        ordinary = np.ones(special.vocab_size, np.bool_)
        ordinary[list(special.special_ids)] = False
        if special.unk is not None:
            ordinary[special.unk] = False
        if not ordinary.any():
            raise UsageError("the vocabulary has only special tokens, so there is nothing to mask or to draw")
        kinds = ordinary * kernels.MASKABLE
        if continues is not None:
            kinds |= continues * kernels.CONTINUES
        everything = masking.random_from == "vocabulary"
        pool = np.arange(special.vocab_size) if everything else np.flatnonzero(ordinary)
        quota = np.array([masking.quota(n) for n in range(length + 1)])
        whole = 1 - (1 - SPAN_STOPS) ** SPAN_LONGEST
        shares = [(1 - (1 - SPAN_STOPS) ** words) / whole for words in range(1, SPAN_LONGEST)]
        lengths_below = np.array([round(share * 2**32) for share in shares], np.uint64)
        below = [masking.probability, masking.mask_fraction, masking.mask_fraction + masking.random_fraction]
        select_below, mask_below, random_below = (np.uint64(round(share * 2**32)) for share in below)
        self._policy, self._seed, self._length = MASKING_POLICIES.index(masking.policy), np.uint64(seed), length
        self._select = quota, select_below, lengths_below
        self._change = kinds, special.mask, mask_below, random_below, pool
        self._identity = np.arange(length)

    def apply(
        self,
        ids: NDArray[np.int64],
        filled: NDArray[np.int64],
        epochs: NDArray[np.int64],
        sample_ids: NDArray[np.int64],
        goes_on: NDArray[np.uint8] | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Masks ids [B, T] in place; returns masked_positions and targets, int64 [B, K]. For any thread.

        Every id MUST be below the vocabulary's size. filled int64 [B] counts the tokens between the [CLS] at the start
        and the last [SEP]; epochs and sample_ids int64 [B] name the rows. goes_on [B, T]: 1 where a place goes on with
        a word whatever its id.
        """
        masked_positions = np.empty((ids.shape[0], self.num_slots), np.int64)
        targets = np.empty_like(masked_positions)
        if self.num_slots:
            starts, stops = np.empty((2, self._length), np.int64)
            selected = np.zeros(self._length // 64 + 1, np.uint64)
            rows = ids, filled, epochs, sample_ids, self._seed
            scratch = self._identity, starts, stops, selected
            flags = np.zeros((0, 0), np.uint8) if goes_on is None else goes_on
            outputs = masked_positions, targets
            kernels.mask(self._policy, *rows, *self._select, *self._change, flags, *outputs, *scratch)
        return masked_positions, targets
