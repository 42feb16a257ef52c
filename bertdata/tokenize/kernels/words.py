"""The loop over text for tokenizers that cut it into words by rules: BPE, Unigram and others."""

from __future__ import annotations

import numpy as np
from numba import int64, uint64

from bertdata.bits import store64, trailing_zeros
from bertdata.jit import jit
from bertdata.tokenize.kernels.bits import decoded, not_lower64, outside64
from bertdata.tokenize.kernels.boundaries import MAY_DIFFER, cut_after, is_unstable, strip, word_end
from bertdata.tokenize.kernels.merges import character_ids, merge_any
from bertdata.tokenize.kernels.records import (
    AT_BEGIN,
    BYTE,
    BYTE_BPE,
    CHARACTER_BPE,
    CLASSES,
    CODE_POINT,
    DONE,
    EMPTY,
    ENDED,
    GAP,
    GIVES_SPECIAL,
    HARD_STEP,
    HAS_BEGUN,
    IN_MIDDLE,
    LATER_PIECE,
    LEVEL,
    LIMITS,
    MEETS,
    MEETS_STEP,
    NEXT_BEGINS,
    NO_BYTES,
    NOT_QUICK,
    NUM_HARD,
    ONE_WORD,
    OWN_WORD,
    PIECE,
    PLACE,
    PREFIXED,
    REPLACED,
    SILENT_FORM,
    SPACE_FORM,
    STATES,
    TOO_MANY_HARD,
    UNIGRAM,
    UNKNOWN_CODE_POINT,
    WITH_PREFIX,
    WORD_PIECE,
)
from bertdata.tokenize.kernels.runs import (
    LONGEST_KEY,
    emit,
    find_far,
    find_near,
    find_run,
    hash_of,
    keep_run,
    near_key,
    near_set,
)
from bertdata.tokenize.kernels.tries import whole_word
from bertdata.tokenize.kernels.unigram import most_probable
from bertdata.tokenize.kernels.wordpiece import longest_matches


@jit(_nrt=False)
def _put_hard(hard, number, start, stop, place, where):
    """Writes row `number` of Output.hard. Returns the number of the next one."""
    hard[number, 0], hard[number, 1], hard[number, 2], hard[number, 3] = start, stop, place, where
    return number + 1


@jit(forceinline=True, _nrt=False)
def _encode_word(text, start, stop, prefixed, tables, runs):
    """Writes the ids of the word text[start:stop] to runs.ids. Returns how many.

    prefixed: whether the prefix is put before the word. Where each word gets one, a word that begins with it does not.
    """
    word, ids, size, num_chars, after_space = runs.word, runs.ids, 0, 0, False
    is_bpe = tables.model == BYTE_BPE or tables.model == CHARACTER_BPE  # noqa: PLR1714
    if is_bpe and not prefixed:
        while start + size < stop:
            ids[size] = tables.letters[int64(start + size == stop - 1), text[start + size]]
            if ids[size] < 0:
                break
            size += 1
        if start + size == stop:
            found = whole_word(text, start, stop, tables.trie) if tables.whole != 0 else int64(-1)
            if found >= 0:
                ids[0] = found
                return 1
            return merge_any(size, tables, runs)
        size = 0
    if prefixed:
        for k in range(tables.prefix.size):
            word[k] = tables.prefix[k]
        size, num_chars, after_space = tables.prefix.size, 1, True
    i = start
    while i < stop:
        point, width = decoded(text, i)
        entry = tables.points[point, 0]
        length = int64((entry >> uint64(8)) & uint64(255))
        i += width
        if tables.collapses != 0 and length > 0:
            is_space = entry & SPACE_FORM != uint64(0)
            if is_space and after_space:
                continue
            after_space = is_space
        store64(word, size, tables.points[point, 1])
        store64(word, size + 8, entry >> uint64(32))
        size += length
        num_chars += int64((entry >> uint64(16)) & uint64(255))
    if prefixed and tables.prefix_when == 3:
        width = tables.prefix.size
        has_it = size == width or size >= 2 * width
        for k in range(width, min(2 * width, size)):
            has_it = has_it and word[k] == tables.prefix[k - width]
        if has_it:
            size -= width
            num_chars -= 1
            for k in range(size):
                word[k] = word[k + width]
    if size == 0:
        return 0
    if is_bpe:
        if tables.whole != 0:
            found = whole_word(word, 0, size, tables.trie)
            if found >= 0:
                ids[0] = found
                return 1
        count = 0
        if tables.model == BYTE_BPE:
            for k in range(size):
                found = tables.byte_ids[int64(k == size - 1), word[k]]
                if found >= 0:
                    ids[count] = found
                    count += 1
        else:
            count = character_ids(word, size, tables, ids)
        return merge_any(count, tables, runs)
    if tables.model == UNIGRAM:
        return most_probable(word, size, tables, ids, runs.ranks, runs.best)
    if tables.model == WORD_PIECE:
        return longest_matches(word, size, num_chars, tables, ids)
    found = whole_word(word, 0, size, tables.trie)
    ids[0] = found if found >= 0 else tables.unk
    return 1


@jit(_nrt=False)
def encode_words(pieces, tables, runs, output):
    """Encodes pieces of text by the rules and the model of `tables`. Returns one of the codes above.

    pieces: Text. tables: WordTables. runs: RunTables. output: Output. After a code other than DONE the caller supplies
    what is missing and calls the kernel again; it continues from output.state. After GIVES_SPECIAL it gives up.

    The automaton finds where the next word ends. Most words are in the tables of runs and are copied from there. A
    stretch whose code points change each other is hard: it begins and ends where text can be cut, whatever it holds.
    """
    text, starts, stops = pieces.data, pieces.starts, pieces.stops
    points, ascii_classes, steps, cuts = tables.points, tables.ascii, tables.steps, tables.cuts
    quick, skips, after = tables.quick, tables.skips, tables.after
    near, far, spelled, pool = runs.near, runs.far, runs.spelled, runs.pool
    out, out_bounds, hard, state = output.ids, output.bounds, output.hard, output.state
    limits = state[LIMITS:]  # where the text ends that each rule is cutting
    num_rules, first_state = tables.starts.size, uint64(tables.starts[0])
    longest = runs.word.size // 4 - 16
    i, p, num_hard, has_begun = state[BYTE], state[PLACE], state[NUM_HARD], state[HAS_BEGUN]
    for piece in range(state[PIECE], starts.size):
        begin, end, level = starts[piece], stops[piece], state[LEVEL]
        i, code = max(i, begin), DONE if num_hard < hard.shape[0] else TOO_MANY_HARD
        if tables.strips != 0 and code == DONE:
            start, end, code = strip(text, begin, end, tables.strips, points, state)
            i = max(i, start)
            if code == MAY_DIFFER:
                code = DONE
                if has_begun == 0:
                    where = AT_BEGIN if pieces.begins[piece] or tables.prefix_when != 2 else LATER_PIECE
                    num_hard, i = _put_hard(hard, num_hard, begin, stops[piece], p, where), end
        while i < end and code == DONE:
            if num_hard == hard.shape[0]:
                code = TOO_MANY_HARD
                break
            automaton, prefixed, is_first = first_state, tables.prefix_when == 3, False
            if has_begun == 0 and (tables.prefix_when == 1 or (tables.prefix_when == 2 and pieces.begins[piece])):
                entry, width = SILENT_FORM, 0
                while i + width < end and entry & SILENT_FORM != uint64(0):
                    i += width
                    point, width = decoded(text, i)
                    entry = points[point, 0]
                if entry == uint64(0):
                    code, state[CODE_POINT] = UNKNOWN_CODE_POINT, point
                    break
                if tables.prefix_when == 2 and i > begin:  # what begins the text has no normal form; is there a prefix?
                    num_hard = _put_hard(hard, num_hard, begin, end, p, AT_BEGIN)
                    i, has_begun = end, 1
                    continue
                if entry & SILENT_FORM != uint64(0):
                    break  # nothing but code points without a normal form is left
                is_first, prefixed = True, tables.prefix_always != 0 or entry & PREFIXED == uint64(0)
                if prefixed:
                    automaton = uint64(steps[first_state * uint64(CLASSES) + uint64(tables.prefix_class)] & STATES)
            is_quick, word_stop, value, mask, base = False, int64(-1), EMPTY, uint64(0), i
            while tables.inside != NO_BYTES and not is_first:  # words that need no automaton
                if mask == uint64(0):
                    base, mask = i, outside64(text, i, tables.inside)
                    if mask & uint64(1) != uint64(0) and after[text[uint64(i)]] == NEXT_BEGINS:
                        mask &= mask - uint64(1)  # the space that begins this word does not end it
                    if mask == uint64(0):
                        break
                s = base + trailing_zeros(mask)
                what, length = after[text[uint64(s)]], s - i
                # a mark at s + 1 would change the byte that ends the word
                if s >= end or what == NOT_QUICK or (tables.meets != 0 and quick[text[uint64(s + 1)]] == 0):
                    break
                mask &= mask - uint64(1)
                if length == 0 and what == GAP:
                    i = s + 1
                    continue
                if length == 0 or (length == 1 and after[text[uint64(i)]] == NEXT_BEGINS):
                    break  # nothing, or nothing but a space: what follows decides what this is
                if length <= 16:
                    key, rest = near_key(text, i, length)
                    value = find_near(near, near_set(near, key, rest), key, rest)
                else:
                    value = find_far(text, i, length, hash_of(text, i, length), far, spelled)
                if value == EMPTY:
                    is_quick, word_stop = True, s
                    break
                p += emit(out, p, value, pool)
                i, has_begun = s, 1
                if what == GAP:
                    i += 1
                elif what == OWN_WORD:
                    if s + 1 >= end or text[uint64(s + 1)] != ord(" "):
                        break
                    if tables.meets != 0 and quick[text[uint64(s + 2)]] == 0:
                        break
                    key = uint64(text[uint64(s)])
                    value = find_near(near, near_set(near, key, uint64(0)), key, uint64(0))
                    if value == EMPTY:
                        break
                    p += emit(out, p, value, pool)
                    i, mask = s + 1 + int64(after[ord(" ")] == GAP), mask & (mask - uint64(1))
            if i >= end:
                break
            if not is_quick:
                value = EMPTY
            if level == 0 and not is_quick:
                place, word_stop, flags, width = i, int64(-1), np.uint16(0), 0
                while True:
                    kind = uint64(0)
                    if place < end:
                        point, width = int64(text[uint64(place)]), 1
                        if point < 0x80:
                            kind = uint64(ascii_classes[uint64(point)])
                        else:
                            point, width = decoded(text, place)
                            kind = points[point, 0] & uint64(0xFF)
                        if kind == uint64(0):
                            code, state[CODE_POINT] = UNKNOWN_CODE_POINT, point
                            break
                    step = steps[automaton * uint64(CLASSES) + kind]
                    flags |= step
                    if step & ENDED != 0:
                        word_stop = place
                    automaton = uint64(step & STATES)
                    if automaton == uint64(0) or place >= end:
                        break
                    place += width
                    if skips[automaton]:
                        mask = not_lower64(text, place)
                        skipped = min(trailing_zeros(mask) if mask != uint64(0) else 64, end - place)
                        if skipped > 0:
                            place += skipped
                            word_stop = place - 1
                if code != DONE:
                    break
                region_stop = int64(-1)
                if tables.meets != 0:
                    place = min(place + width, end)
                    while place < end:  # the automaton has seen the code point before; do these change it?
                        point, width = decoded(text, place)
                        entry = points[point, 0]
                        if entry == uint64(0):
                            code, state[CODE_POINT] = UNKNOWN_CODE_POINT, point
                        if entry & (MEETS | SILENT_FORM) == uint64(0):
                            break
                        if entry & MEETS != uint64(0):
                            flags |= MEETS_STEP
                        place += width
                    if code != DONE:
                        break
                    is_hard = int64(flags & HARD_STEP != 0)
                    if is_hard == 0 and flags & MEETS_STEP != 0:
                        is_hard = is_unstable(text, begin, i, place, points, runs.stable, state)
                    if is_hard > 0:
                        region_stop = cut_after(text, place, end, points, cuts, state)
                        if region_stop < 0:
                            is_hard = -UNKNOWN_CODE_POINT
                    if is_hard < 0:
                        code = -is_hard
                        break
                if word_stop < 0 and tables.keeps_gaps[0]:
                    word_stop = word_end(text, i, end, first_state, True, points, ascii_classes, steps, state)
                    if word_stop < 0:
                        code = UNKNOWN_CODE_POINT
                        break
                if region_stop >= 0:
                    value = EMPTY
                    if not is_first and region_stop - i <= LONGEST_KEY:
                        value = find_run(text, i, region_stop - i, near, far, spelled)
                    if value != EMPTY:
                        p += emit(out, p, value, pool)
                    elif is_first:  # with what was passed over, as it may keep a blank from being stripped
                        num_hard = _put_hard(hard, num_hard, begin, region_stop, p, AT_BEGIN)
                    else:
                        num_hard = _put_hard(hard, num_hard, i, region_stop, p, IN_MIDDLE)
                    i, has_begun = region_stop, 1
                    continue
            if num_rules > 1 and (level > 0 or word_stop > i):
                if level == 0:
                    limits[0], level = word_stop, 1
                word_stop = limits[level - 1]
                while level < num_rules and word_stop >= 0:
                    word_stop = word_end(
                        text, i, word_stop, tables.starts[level], tables.keeps_gaps[level], points, ascii_classes,
                        steps, state,
                    )  # fmt: skip
                    limits[level] = word_stop
                    level += 1
            if word_stop < i or (word_stop == i and not prefixed):  # no word begins here
                i += decoded(text, i)[1]
            elif word_stop - i > longest:
                num_hard = _put_hard(hard, num_hard, i, word_stop, p, WITH_PREFIX if prefixed else ONE_WORD)
                i, has_begun = word_stop, 1
            else:
                length = word_stop - i
                is_key = 0 < length <= LONGEST_KEY and not is_first
                if is_key and not is_quick:
                    value = find_run(text, i, length, near, far, spelled)
                if value != EMPTY:
                    p += emit(out, p, value, pool)
                else:
                    count = _encode_word(text, i, word_stop, prefixed, tables, runs)
                    num_special = 0
                    for k in range(count):
                        if tables.special[runs.ids[k]]:
                            num_special += 1
                            runs.ids[k] = tables.special_to
                        out[p + k] = runs.ids[k]
                    p += count
                    if num_special > 0 and tables.special_to < 0:
                        return GIVES_SPECIAL
                    state[REPLACED] += num_special
                    if is_key and num_special == 0:
                        keep_run(text, i, length, runs.ids, count, out, runs)
                i, has_begun = word_stop, 1
            if num_rules > 1:
                while level > 0 and i >= limits[level - 1]:
                    level -= 1
        if code != DONE:
            state[PIECE], state[PLACE], state[NUM_HARD] = piece, p, num_hard
            state[HAS_BEGUN], state[BYTE], state[LEVEL] = has_begun, i, level
            if has_begun == 0:  # what begins a text is looked at anew
                state[BYTE], state[LEVEL] = begin, 0
            return code
        i, has_begun, state[LEVEL] = stops[piece], 0, 0
        if pieces.tails[piece] >= 0:
            out[p] = pieces.tails[piece]
            p += 1
        out_bounds[piece + 1] = p
    state[NUM_HARD] = num_hard
    return DONE
