"""Masks: which places of a row are predicted, and what stands there instead."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import uint64
from numpy.typing import NDArray

from bertdata import keys
from bertdata.bits import trailing_zeros
from bertdata.jit import inline, jit, part
from bertdata.read.kernels.draws import LOW32, U0, U1, U6, U32, U63, absorb, below32, draw, key3
from bertdata.types import IGNORE_INDEX

MASK = np.uint64(keys.purpose("mask"))
EXACT, BERNOULLI, WHOLE_WORD, SPANS, UNIFORM = range(5)  # as choices.MASKING_POLICIES lists them
MASKABLE, CONTINUES = np.uint8(1), np.uint8(2)  # bits of an id: it may be selected; it continues a word
INSIDE, NOT_STORED = np.uint8(1), np.uint8(2)  # a place of inside_word: it continues a word; nothing is stored for it
MOST_IN_WORD = 16  # tokens, by rule 2
SELECT, AMOUNT = np.uint64(1 << 32), np.uint64(1 << 33)
"""Draws from index 2**32 on select places, except with BERNOULLI.

Draw AMOUNT says how many places UNIFORM selects, and with WHOLE_WORD at which place a part of a word begins.

Draw t: its low half decides what replaces place t; its high half selects it (BERNOULLI) or picks the random id (SPANS).
"""


class MaskRules(NamedTuple):
    """A masking policy for one vocabulary and row length. One for each Loader."""

    policy: int  # EXACT, BERNOULLI, WHOLE_WORD, SPANS or UNIFORM
    seed: np.uint64
    quota: NDArray[np.int64]  # [T + 1]: places to select, by the number of filled places of the row
    select_below: np.uint64  # BERNOULLI: a place is selected if the high 32 bits of its draw are below this
    lengths_below: NDArray[np.uint64]  # SPANS, [9]: one word more for each bound that the high 32 bits of a draw reach
    kinds: NDArray[np.uint8]  # [V]: MASKABLE and CONTINUES of each id
    is_rule_1: bool
    mask_id: int
    mask_below: np.uint64  # a selected place becomes [MASK] if the low 32 bits of its draw are below this
    random_below: np.uint64  # else a random id if they are below this, else it keeps its id
    pool: NDArray[np.int64]  # ids to draw a random one from
    every_place: NDArray[np.int64]  # [T]: 0, 1, 2, ...


class MaskRows(NamedTuple):
    """The rows of a batch to mask. ids change in place; the last three are overwritten."""

    ids: NDArray[np.int64]  # [B, T], each below V
    text_places: NDArray[np.int64]  # [B], as in Frames
    epochs: NDArray[np.int64]  # [B]
    sample_ids: NDArray[np.int64]  # [B]
    inside_word: NDArray[np.uint8]  # [B, T]: 0 where a word begins, INSIDE or NOT_STORED; [0, 0]: nothing is stored
    masked_positions: NDArray[np.int64]  # [B, K]
    targets: NDArray[np.int64]  # [B, K]
    weights: NDArray[np.float32]  # [B] with UNIFORM, else [0]


@inline()
def _is_set(bits, place):
    """Whether bit `place` of a uint64 array is set."""
    return bits[uint64(place) >> U6] >> (uint64(place) & U63) & U1


@inline()
def _set(bits, place):
    bits[uint64(place) >> U6] |= U1 << (uint64(place) & U63)


@part()
def _select_exact(key, num_candidates, quota, selected):
    """Selects `quota` of the numbers [0, num_candidates), all subsets equally likely (Floyd's method)."""
    for j in range(quota):
        last = uint64(num_candidates - quota + j)
        t = below32(draw(key, SELECT + uint64(j)), last + U1)
        if _is_set(selected, t):
            t = last
        _set(selected, t)


@part()
def _select_bernoulli(key, n, select_below, selected):
    """Selects each of the places [1, n - 1) by its own draw."""
    for word in range((n + 62) >> 6):
        bits = U0
        for t in range(max(1, word << 6), min(n - 1, (word + 1) << 6)):
            bits |= uint64((draw(key, uint64(t)) >> U32) < select_below) << uint64(t & 63)
        selected[word] = bits


@part()
def _find_words(row, n, kinds, inside_word, is_rule_1, starts, stops):
    """Writes where the words of a row begin and end. Returns the number of words, and of candidates."""
    num_words, num_candidates, kind_before = 0, 0, np.uint8(0)
    for t in range(1, n - 1):
        kind = kinds[uint64(row[t])]
        if kind & MASKABLE:
            num_candidates += 1
            continues = kind & CONTINUES != 0
            if inside_word.size:
                stored = inside_word[t]
                continues = stored == INSIDE or (continues and (is_rule_1 or stored == NOT_STORED))
            if not (continues and kind_before & MASKABLE):
                starts[num_words] = t
                num_words += 1
            stops[num_words - 1] = t + 1
        kind_before = kind
    return num_words, num_candidates


@part()
def _split_long_words(num_words, most, starts, stops):
    """Splits each word of more than `most` places into words of one place. Returns the number of words."""
    total = 0
    for w in range(num_words):
        size = stops[w] - starts[w]
        total += size if size > most else 1
    if total == num_words:
        return num_words
    place = total
    for w in range(num_words - 1, -1, -1):
        start, stop = starts[w], stops[w]
        step = 1 if stop - start > most else stop - start
        for first in range(stop - step, start - 1, -step):
            place -= 1
            starts[place], stops[place] = first, first + step
    return total


@part()
def _select_range(start, stop, selected):
    for t in range(start, stop):
        _set(selected, t)


@part()
def _select_words(key, num_words, quota, is_rule_1, starts, stops, selected):
    """Goes through the words in random order, and selects each that still fits into the quota of places.

    If that leaves more than half of the quota, rule 2 selects a part of the first word that did not fit: consecutive
    places from a random one, which continue with the first place of the word after its last one.
    """
    left, passed_over = quota, -1
    for j in range(num_words):
        if left == 0:
            break
        r = j + np.int64(below32(draw(key, SELECT + uint64(j)), uint64(num_words - j)))
        start, stop = starts[r], stops[r]
        starts[r], stops[r] = starts[j], stops[j]
        if stop - start <= left:
            _select_range(start, stop, selected)
            left -= stop - start
        elif passed_over < 0:
            passed_over = j
            starts[j], stops[j] = start, stop
    if 2 * left > quota and passed_over >= 0 and not is_rule_1:
        start, size = starts[passed_over], stops[passed_over] - starts[passed_over]
        place = np.int64(below32(draw(key, AMOUNT), uint64(size)))
        for _ in range(left):
            _set(selected, start + place)
            place = place + 1 if place + 1 < size else 0


@part()
def _select_spans(key, num_words, quota, lengths_below, starts, stops, selected):
    """Selects spans of neighbouring words, of random length, until the quota of places is full; the last is cut."""
    left = quota
    for attempt in range(64 + 16 * quota):
        if left == 0:
            break
        bits = draw(key, SELECT + uint64(2 * attempt)) >> U32
        w = np.int64(below32(draw(key, SELECT + uint64(2 * attempt + 1)), uint64(num_words)))
        words_left = 1
        for bound in lengths_below:
            words_left += bits >= bound
        place = starts[w]
        while words_left > 0 and w < num_words and starts[w] == place and left > 0:
            if _is_set(selected, place):
                break
            place = min(stops[w], place + left)
            left -= place - starts[w]
            _select_range(starts[w], place, selected)
            words_left -= 1
            w += 1


@jit(arrays=True)
def mask(rules, rows):
    """Selects places of each row, notes their ids as targets, and changes them in the row."""
    rules, rows = MaskRules(*rules), MaskRows(*rows)
    policy, kinds, pool = rules.policy, rules.kinds, rules.pool  # local names are faster in the inner loop
    masked_positions, targets = rows.masked_positions, rows.targets
    length = rules.every_place.size
    # starts and stops of words; with EXACT and UNIFORM, `starts` holds the candidates
    starts, stops = np.empty(length, np.int64), np.empty(length, np.int64)
    selected = np.zeros((length >> 6) + 1, np.uint64)  # a bit for each place or candidate; all 0 between rows
    num_slots, pool_size = targets.shape[1], uint64(pool.size)
    for b in range(rows.ids.shape[0]):
        row = rows.ids[b]
        key = absorb(key3(rules.seed, MASK, uint64(rows.epochs[b])), uint64(rows.sample_ids[b]))
        n = rows.text_places[b] + 2
        quota = rules.quota[n]

        candidates = rules.every_place  # bit i of `selected` is place candidates[i]
        if policy in (EXACT, UNIFORM):
            m, candidates = n - 2, rules.every_place[1:]
            for t in range(1, n - 1):
                m -= np.int64(kinds[uint64(row[t])] & MASKABLE) ^ 1
            if m < n - 2:
                m, candidates = 0, starts
                for t in range(1, n - 1):
                    starts[m] = t
                    m += np.int64(kinds[uint64(row[t])] & MASKABLE)
            quota = min(m, quota)
            if policy == UNIFORM:
                rows.weights[b] = 0
                if quota:
                    quota = 1 + np.int64(below32(draw(key, AMOUNT), uint64(quota)))
                    rows.weights[b] = m / quota
            _select_exact(key, m, quota, selected)
        elif policy == BERNOULLI:
            _select_bernoulli(key, n, rules.select_below, selected)
        else:
            inside_word = rows.inside_word[b] if rows.inside_word.size else rows.inside_word.ravel()
            num_words, m = _find_words(row, n, kinds, inside_word, rules.is_rule_1, starts, stops)
            if not rules.is_rule_1:
                most = min(MOST_IN_WORD, quota) if policy == SPANS else MOST_IN_WORD
                num_words = _split_long_words(num_words, most, starts, stops)
            if policy == WHOLE_WORD:
                _select_words(key, num_words, min(m, quota), rules.is_rule_1, starts, stops, selected)
            else:
                _select_spans(key, num_words, min(m, quota), rules.lengths_below, starts, stops, selected)

        slot, place_before, span_low_bits = 0, np.int64(-2), U0
        for word in range((n + 63) >> 6):
            bits = selected[word]
            selected[word] = U0
            while bits:
                t = candidates[(word << 6) + trailing_zeros(bits)]
                bits &= bits - U1
                old = row[t]
                if slot == num_slots or not kinds[uint64(old)] & MASKABLE:
                    continue
                masked_positions[b, slot] = t
                targets[b, slot] = old
                slot += 1
                drawn = draw(key, uint64(t))
                low_bits = drawn & LOW32
                if policy != SPANS:
                    if low_bits < rules.mask_below:
                        row[t] = rules.mask_id
                    elif low_bits < rules.random_below:
                        width = rules.random_below - rules.mask_below
                        row[t] = pool[(low_bits - rules.mask_below) * pool_size // width]
                    continue
                if t != place_before + 1:
                    span_low_bits = low_bits
                place_before = t
                if span_low_bits < rules.mask_below:
                    row[t] = rules.mask_id
                elif span_low_bits < rules.random_below:
                    row[t] = pool[below32(drawn, pool_size)]
        masked_positions[b, slot:] = 0
        targets[b, slot:] = IGNORE_INDEX
