"""Masks: which tokens of a row are predicted, and which ids replace them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import uint64
from numpy.typing import NDArray

from bertdata import keys
from bertdata.jit import inline, jit, part
from bertdata.read.kernels.draws import LOW32, U0, U32, absorb, below32, draw, key3
from bertdata.types import IGNORE_INDEX

MASK = np.uint64(keys.purpose("mask"))
EXACT, BERNOULLI, WHOLE_WORD, SPANS, UNIFORM = range(5)  # in the order of choices.MASKING_POLICIES
MASKABLE, CONTINUES = np.uint8(1), np.uint8(2)  # bits for an id: it may be selected; it continues a word
INSIDE, NOT_STORED = np.uint8(1), np.uint8(2)  # values of inside_word: the token continues a word; not stored
MOST_IN_WORD = 16  # tokens; used by rule 2
SELECT, AMOUNT = np.uint64(1 << 32), np.uint64(1 << 33)
"""Draws from index 2**32 on select token positions, except with BERNOULLI.

Draw AMOUNT determines how many positions UNIFORM selects, and the start of the part of a long word (WHOLE_WORD).

Draw t: its low half determines the replacement at t; its high half selects t (BERNOULLI) or a random id (SPANS).
"""


class MaskRules(NamedTuple):
    """A masking policy for one vocabulary and row length. Each Loader has one. A place is a token position in a row."""

    policy: int  # EXACT, BERNOULLI, WHOLE_WORD, SPANS or UNIFORM
    seed: np.uint64
    quota: NDArray[np.int64]  # [T + 1]: places to select, by the number of filled places of the row
    select_below: np.uint64  # BERNOULLI: a place is selected if the high 32 bits of its draw are below this
    lengths_below: NDArray[np.uint64]  # SPANS, [9]: one more word for each bound <= the high 32 bits of a draw
    kinds: NDArray[np.uint8]  # [V]: MASKABLE and CONTINUES of each id
    is_rule_1: bool
    mask_id: int
    mask_below: np.uint64  # a selected place becomes [MASK] if the low 32 bits of its draw are below this
    random_below: np.uint64  # otherwise a random id if they are below this, else it keeps its id
    pool: NDArray[np.int64]  # ids to choose random ids from
    first_special: np.uint64  # the least id that is not MASKABLE
    special_range: np.uint64  # the largest id that is not MASKABLE, minus the least


class MaskRows(NamedTuple):
    """The rows of a batch to mask: ids are masked in place, and the last three arrays are outputs."""

    ids: NDArray[np.int64]  # [B, T], each below V
    text_places: NDArray[np.int64]  # [B], as in Frames
    epochs: NDArray[np.int64]  # [B]
    sample_ids: NDArray[np.int64]  # [B]
    inside_word: NDArray[np.uint8]  # [B, T]: 0 at the start of a word, INSIDE or NOT_STORED; [0, 0]: not stored
    masked_positions: NDArray[np.int64]  # [B, K]
    targets: NDArray[np.int64]  # [B, K]
    weights: NDArray[np.float32]  # [B] with UNIFORM, else [0]


class Scratch(NamedTuple):
    """Scratch arrays of T + 8 elements, unless a shape is given."""

    selected: NDArray[np.uint8]  # 1 at selected places; all 0 before and after the work on a row
    places: NDArray[np.int64]  # the selected places, ascending
    draws: NDArray[np.uint64]
    starts: NDArray[np.int64]  # starts of words; with EXACT and UNIFORM, the candidates from index 1 on
    stops: NDArray[np.int64]  # stops of words
    random_places: NDArray[np.int64]  # [B * K + 1]: flat indexes of the tokens that get a random id
    random_draws: NDArray[np.uint64]  # [B * K + 1]


@part()
def _candidates(row, n, rules, starts):
    """Count the maskable places of a row, and write the places to starts[1:], unless all n - 2 places are maskable."""
    num_special = 0
    for t in range(1, n - 1):  # compiled to vector instructions, unlike a table look-up
        num_special += uint64(row[t]) - rules.first_special <= rules.special_range
    if num_special == 0:
        return n - 2
    num_candidates = 0
    for t in range(1, n - 1):
        starts[1 + num_candidates] = t
        num_candidates += np.int64(rules.kinds[uint64(row[t])] & MASKABLE)
    return num_candidates


@inline()
def _vectors(count):
    """Round up to a multiple of 8, so that a vectorized loop has no slow remainder."""
    return (count + 7) & ~7


@part()
def _select_exact(key, num_candidates, quota, selected, draws):
    """Select `quota` of the numbers 1 to num_candidates, all subsets equally likely (Floyd's method)."""
    first = num_candidates - quota
    for j in range(_vectors(quota)):
        draws[j] = below32(draw(key, SELECT + uint64(j)), uint64(first + j + 1))
    for j in range(quota):
        t = np.int64(draws[j]) + 1
        if selected[t]:
            t = first + j + 1
        selected[t] = 1


@part()
def _find_words(rows, b, n, kinds, is_rule_1, starts, stops):
    """Write the starts and stops of the words of a row. Return the numbers of words and of maskable places."""
    num_words, num_candidates, kind_before = 0, 0, np.uint8(0)
    for t in range(1, n - 1):
        kind = kinds[uint64(rows.ids[b, t])]
        if kind & MASKABLE:
            num_candidates += 1
            continues = kind & CONTINUES != 0
            if rows.inside_word.size:
                stored = rows.inside_word[b, t]
                continues = stored == INSIDE or (continues and (is_rule_1 or stored == NOT_STORED))
            if not (continues and kind_before & MASKABLE):
                starts[num_words] = t
                num_words += 1
            stops[num_words - 1] = t + 1
        kind_before = kind
    return num_words, num_candidates


@part()
def _split_long_words(num_words, most, starts, stops):
    """Split each word of more than `most` places into words of one place. Return the number of words."""
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
def _select_words(key, num_words, quota, is_rule_1, starts, stops, selected):
    """Select each word, in random order, that still fits into the quota of places.

    If more than half of the quota is left, rule 2 selects a part of the first word that did not fit: consecutive places
    of the word, cyclically, from a random place on.
    """
    left, passed_over = quota, -1
    for j in range(num_words):
        if left == 0:
            break
        r = j + np.int64(below32(draw(key, SELECT + uint64(j)), uint64(num_words - j)))
        start, stop = starts[r], stops[r]
        starts[r], stops[r] = starts[j], stops[j]
        if stop - start <= left:
            selected[start:stop] = 1
            left -= stop - start
        elif passed_over < 0:
            passed_over = j
            starts[j], stops[j] = start, stop
    if 2 * left > quota and passed_over >= 0 and not is_rule_1:
        start, size = starts[passed_over], stops[passed_over] - starts[passed_over]
        place = np.int64(below32(draw(key, AMOUNT), uint64(size)))
        for _ in range(left):
            selected[start + place] = 1
            place = place + 1 if place + 1 < size else 0


@part()
def _select_spans(key, num_words, quota, lengths_below, starts, stops, selected):
    """Select spans of adjacent words, of random length, until the quota is full. The last span is cut to fit."""
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
            if selected[place]:
                break
            place = min(stops[w], place + left)
            left -= place - starts[w]
            selected[starts[w] : place] = 1
            words_left -= 1
            w += 1


@part()
def _select(rules, rows, b, key, scratch):
    """Select places of row b. Return their number."""
    row, n = rows.ids[b], rows.text_places[b] + 2
    policy, quota = rules.policy, rules.quota[n]
    selected, places, starts, stops = scratch.selected, scratch.places, scratch.starts, scratch.stops
    num_candidates = np.int64(-1)
    if policy in (EXACT, UNIFORM):
        num_candidates = _candidates(row, n, rules, starts)
        quota = min(num_candidates, quota)
        if policy == UNIFORM:
            quota = 1 + np.int64(below32(draw(key, AMOUNT), uint64(quota))) if quota else 0
            rows.weights[b] = num_candidates / quota if quota else 0
        _select_exact(key, num_candidates, quota, selected, scratch.draws)
    elif policy == BERNOULLI:
        for t in range(1, n - 1):
            selected[t] = draw(key, uint64(t)) >> U32 < rules.select_below
    else:
        num_words, num_places = _find_words(rows, b, n, rules.kinds, rules.is_rule_1, starts, stops)
        if not rules.is_rule_1:
            most = min(MOST_IN_WORD, quota) if policy == SPANS else MOST_IN_WORD
            num_words = _split_long_words(num_words, most, starts, stops)
        quota = min(num_places, quota)
        if policy == WHOLE_WORD:
            _select_words(key, num_words, quota, rules.is_rule_1, starts, stops, selected)
        else:
            _select_spans(key, num_words, quota, rules.lengths_below, starts, stops, selected)
    count = 0
    for t in range(1, n - 1):  # without an unpredictable branch
        places[count] = t
        count += np.int64(selected[t])
    selected[:n] = 0
    if policy == BERNOULLI:
        num_selected, count = count, 0
        for i in range(num_selected):
            places[count] = places[i]
            count += np.int64(rules.kinds[uint64(row[places[i]])] & MASKABLE)
    elif 0 <= num_candidates < n - 2:
        for i in range(count):
            places[i] = starts[places[i]]
    return count


@part()
def _mask_row(rules, rows, b, num_random, scratch):
    """Mask row b. Append the places for random ids to the first `num_random` ones, and return their new number."""
    row, places, draws = rows.ids[b], scratch.places, scratch.draws
    masked_positions, targets = rows.masked_positions[b], rows.targets[b]
    key = absorb(key3(rules.seed, MASK, uint64(rows.epochs[b])), uint64(rows.sample_ids[b]))
    count = min(_select(rules, rows, b, key, scratch), targets.size)
    for i in range(count):
        masked_positions[i], targets[i] = places[i], row[places[i]]
    masked_positions[count:], targets[count:] = 0, IGNORE_INDEX
    for i in range(_vectors(count)):
        draws[i] = draw(key, uint64(places[i]))
    width, low_bits = rules.random_below - rules.mask_below, U0
    for i in range(count):  # without branches, as above
        place, target = places[i], targets[i]
        if rules.policy != SPANS or i == 0 or place != places[i - 1] + 1:
            low_bits = draws[i] & LOW32
        row[place] = rules.mask_id if low_bits < rules.mask_below else target
        scratch.random_places[num_random], scratch.random_draws[num_random] = b * row.size + place, draws[i]
        num_random += low_bits - rules.mask_below < width
    return num_random


@part()
def _mask_rows(rules, rows, scratch):
    """Mask all rows. Then write random ids, in a loop with independent steps."""
    num_random = np.int64(0)
    for b in range(rows.ids.shape[0]):
        num_random = _mask_row(rules, rows, b, num_random, scratch)
    ids, pool, width = rows.ids.reshape(-1), rules.pool, rules.random_below - rules.mask_below
    for i in range(num_random):
        drawn = scratch.random_draws[i]
        if rules.policy == SPANS:
            n = below32(drawn, uint64(pool.size))
        else:
            n = ((drawn & LOW32) - rules.mask_below) * uint64(pool.size) // width
        ids[scratch.random_places[i]] = pool[n]


@jit(arrays=True)
def mask(rules, rows):
    """Select places of each row, write their ids to targets, and replace them in the row."""
    rules, rows = MaskRules(*rules), MaskRows(*rows)
    room, most = rows.ids.shape[1] + 8, rows.targets.size + 1
    selected, places, draws = np.zeros(room, np.uint8), np.zeros(room, np.int64), np.empty(room, np.uint64)
    starts, stops = np.empty(room, np.int64), np.empty(room, np.int64)
    random = np.empty(most, np.int64), np.empty(most, np.uint64)
    _mask_rows(rules, rows, Scratch(selected, places, draws, starts, stops, *random))
