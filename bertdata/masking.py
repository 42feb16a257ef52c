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

from bertdata import _kernels
from bertdata.errors import UsageError
from bertdata.types import IGNORE_INDEX, Masking, SpecialTokens


class Masker:
    """A masking policy made ready for one vocabulary and row length. Nine bytes of tables an id."""

    def __init__(self, masking: Masking, special: SpecialTokens, *, length: int, seed: int) -> None:
        if special.mask is None:
            raise UsageError(
                "the tokenizer has no mask token, so nothing can be masked; build with one that has [MASK]"
            )
        self._masking, self._seed, self._length = masking, np.uint64(seed), length
        self.num_slots = masking.num_slots(length)
        ordinary = np.ones(special.vocab_size, np.bool_)
        ordinary[list(special.special_ids)] = False
        if special.unk is not None:
            ordinary[special.unk] = False
        self._pool = np.flatnonzero(ordinary)
        if self._pool.size == 0:
            raise UsageError("the vocabulary has only special tokens, so there is nothing to mask or to draw")
        self._maskable = ordinary
        self._mask_id = special.mask
        self._mask_below = np.uint64(round(masking.mask_fraction * 2**32))
        self._random_below = np.uint64(round((masking.mask_fraction + masking.random_fraction) * 2**32))

    def apply(
        self,
        ids: NDArray[np.int64],
        filled: NDArray[np.int64],
        epochs: NDArray[np.int64],
        sample_ids: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Masks ids [B, T] in place; returns masked_positions and targets, int64 [B, K].

        Every id MUST be below the vocabulary's size. filled int64 [B] counts the tokens between [CLS] and [SEP];
        epochs and sample_ids int64 [B] name the rows.
        """
        shape = (ids.shape[0], self.num_slots)
        masked_positions = np.zeros(shape, np.int64)
        targets = np.full(shape, IGNORE_INDEX, np.int64)
        if self.num_slots == 0:
            return masked_positions, targets
        row = (ids, filled, epochs, sample_ids, self._seed)
        change = (self._maskable, self._mask_id, self._mask_below, self._random_below, self._pool)
        if self._masking.policy == "exact":
            scratch = np.empty(self._length, np.int64), np.zeros(self._length, np.bool_)
            _kernels.mask_exact(*row, self._masking.probability, *change, masked_positions, targets, *scratch)
        else:
            select_below = np.uint64(round(self._masking.probability * 2**32))
            _kernels.mask_bernoulli(*row, select_below, *change, masked_positions, targets)
        return masked_positions, targets
