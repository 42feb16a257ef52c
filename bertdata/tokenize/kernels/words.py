"""The loop over text for tokenizers that cut it into words by rules: BPE, Unigram and others."""

from __future__ import annotations

import numpy as np
from numba import int64, uint64

from bertdata.bits import are_equal128, keep_masked, prefetch, trailing_zeros
from bertdata.jit import jit, part
from bertdata.tokenize.kernels.begins import find_words
from bertdata.tokenize.kernels.bits import decoded, in_ranges64
from bertdata.tokenize.kernels.boundaries import MAY_DIFFER, cut_after, entry_at, is_unstable, strip, walk, word_end
from bertdata.tokenize.kernels.records import (
    AT_BEGIN,
    BYTE,
    CLASSES,
    DONE,
    EACH_PIECE,
    EACH_WORD,
    EMPTY,
    FIRST_PIECE,
    HARD_STEP,
    HAS_BEGUN,
    IN_MIDDLE,
    LATER_PIECE,
    LEVEL,
    LIMITS,
    LONE,
    MEETS,
    MEETS_STEP,
    NEXT_BEGINS,
    NOT_QUICK,
    NOTHING,
    NUM_HARD,
    ONE_WORD,
    OWN_WORD,
    PIECE,
    PLACE,
    PREFIXED,
    REPLACED,
    RUNS,
    SILENT_FORM,
    STATES,
    TOO_MANY_HARD,
    UNKNOWN_CODE_POINT,
    WINDOW,
    WITH_PREFIX,
    WORDS,
)
from bertdata.tokenize.kernels.runs import (
    KEY_MASKS,
    LONGEST_KEY,
    LOW32,
    first_slot,
    hash_of,
    keep_run,
    key_of,
    most_ids,
    near_key,
    num_ids,
    put_hard,
    put_ids,
    put_new,
    put_run,
)
from bertdata.tokenize.kernels.word import encode_word

HIGH = np.uint64(0x8080808080808080)
AHEAD = 2048  # bytes of text to prefetch
LONE_FIRST, LONE_LAST = 0xE3, 0xEA  # the first bytes from U+3000 and from U+A000 on: words of one character


@part(forceinline=True)
def _hard_until(text, begin, i, place, end, flags, tables, runs, state):
    """Return the end of the text that `tokenizers` must encode, -1 if the word at byte i is not hard; and a code.

    place: the end of the last code point that the automaton has read. flags: the flags of its steps. Code points after
    it may change the last one.
    """
    points = tables.points
    while place < end:
        entry, width = entry_at(text, place, points, state)
        if entry == uint64(0):
            return int64(-1), UNKNOWN_CODE_POINT
        if entry & (MEETS | SILENT_FORM) == uint64(0):
            break
        if entry & MEETS != uint64(0):
            flags |= MEETS_STEP
        place += width
    is_hard = int64(flags & HARD_STEP != 0)
    if is_hard == 0 and flags & MEETS_STEP != 0:
        is_hard = is_unstable(text, begin, i, place, points, runs.stable, state)
    if is_hard <= 0:
        return int64(-1), -is_hard
    stop = cut_after(text, place, end, points, tables.cuts, state)
    return stop, DONE if stop >= 0 else UNKNOWN_CODE_POINT


@part(forceinline=True)
def _next_word(text, begin, i, end, automaton, tables, runs, state):
    """Return a code; the end of the word at byte i, -1 for no word; and the end of the hard text, -1 for none."""
    code, word_stop, place, flags = walk(text, i, end, automaton, tables.points, tables.steps, tables.skips, state)
    hard_stop = int64(-1)
    if code == DONE and tables.meets != 0:
        hard_stop, code = _hard_until(text, begin, i, place, end, flags, tables, runs, state)
    if code == DONE and word_stop < 0 and tables.keeps_gaps[0]:
        word_stop = word_end(text, i, end, tables.starts[0], True, tables.points, tables.steps, tables.skips, state)
        if word_stop < 0:
            code = UNKNOWN_CODE_POINT
    return code, word_stop, hard_stop


@part(forceinline=True)
def _cut_by_rules(text, i, level, tables, limits, state):
    """Cut the text from byte i on by the rules from `level` on, each inside the word of the previous rule.

    limits: int64 [num_rules], the end of each rule's text. Return the number of rules whose limits are known; the last
    limit is the end of the word, below 0 if an entry is missing.
    """
    while level < tables.starts.size and limits[level - 1] >= 0:
        start, keeps_gaps, automaton = tables.starts[level], tables.keeps_gaps[level], (tables.steps, tables.skips)
        limits[level] = word_end(text, i, limits[level - 1], start, keeps_gaps, tables.points, *automaton, state)
        level += 1
    return level


@part(forceinline=True)
def _put_word(text, i, length, prefixed, p, tables, runs, output):
    """Write the ids of the word text[i : i + length] at output.ids[p:]. Return their number."""
    count = encode_word(text, i, i + length, prefixed, tables, runs)
    output.state[REPLACED] += put_new(output.ids, p, runs.ids, count, tables.special, tables.special_to)
    return count


@part(forceinline=True)
def _encode_word(text, begin, i, end, is_first, prefixed, run_length, p, tables, runs, output):
    """Encode the word at byte i, or skip a character that does not begin a word.

    is_first: whether the word begins a piece that may get a prefix. prefixed: whether it gets one. run_length: bytes of
    its run, if this is not in the tables, else 0. Return a code, and the byte and the output index to continue at.
    """
    state, hard, num_rules = output.state, output.hard, tables.starts.size
    limits, level, word_stop, hard_stop = state[LIMITS:], state[LEVEL], int64(-1), int64(-1)
    if state[NUM_HARD] == hard.shape[0]:
        return TOO_MANY_HARD, i, p
    if level == 0:
        automaton = uint64(tables.starts[0])
        if is_first and prefixed:
            automaton = uint64(tables.steps[automaton * uint64(CLASSES) + uint64(tables.prefix_class)] & STATES)
        code, word_stop, hard_stop = _next_word(text, begin, i, end, automaton, tables, runs, state)
        if code != DONE:
            return code, i, p
    if num_rules > 1 and hard_stop < 0 and (level > 0 or word_stop > i):
        if level == 0:
            limits[0], level = word_stop, 1
        level = _cut_by_rules(text, i, level, tables, limits, state)
        word_stop = limits[level - 1]
    stop = hard_stop if hard_stop >= 0 else word_stop
    if stop < i or (stop == i and not prefixed):  # no word begins here
        point, width = decoded(text, i)
        i += width
        if tables.points[point, 0] & LONE != uint64(0):
            p += put_ids(output.ids, p, tables.points[point, 1])
    else:
        length, count, key, rest = stop - i, int64(-1), EMPTY, EMPTY
        is_key = 0 < length <= LONGEST_KEY and length != run_length and not is_first and text[stop - 1] != 0
        if is_key:
            key, rest = key_of(text, i, length)
            tables_of_runs = runs.near, runs.far, runs.spelled, runs.pool
            count = put_run(text, i, length, key, rest, output.ids, p, *tables_of_runs)
        if count >= 0:
            p += count
        elif hard_stop >= 0 and is_first:  # with the skipped text, which may prevent stripping of a blank
            put_hard(output, begin, stop, p, AT_BEGIN)
        elif hard_stop >= 0 or length > tables.longest:
            where = IN_MIDDLE if hard_stop >= 0 else (WITH_PREFIX if prefixed else ONE_WORD)
            put_hard(output, i, stop, p, where)
        else:
            num_replaced = state[REPLACED]
            count = _put_word(text, i, length, prefixed, p, tables, runs, output)
            if is_key and num_replaced == state[REPLACED]:
                keep_run(text, i, length, key, rest, runs.ids, count, output.ids, runs)
            p += count
        i, state[HAS_BEGUN] = stop, 1
    while level > 0 and i >= limits[level - 1]:
        level -= 1
    state[LEVEL] = level
    return DONE, i, p


@part(forceinline=True)
def _find_runs(text, i, end, tables, runs):
    """Compute the keys of the runs from byte i on, and prefetch the set of each. See RunTables.keys.

    A run ends at one of the bytes tables.ends, a stop, or at the end of the piece. Return the number of runs, the byte
    after the last stop, and the byte before which the automaton must find further words.
    """
    near, keys, stops, quick, fold = runs.near, runs.keys, tables.stops, tables.quick, tables.fold
    count, first, limit = 0, i, min(i + WINDOW, end)
    if LONE_FIRST <= text[uint64(i)] < LONE_LAST:
        return count, i, i + 1
    while i < limit:
        base, mask = i, in_ranges64(text, i, tables.ends)
        prefetch(text, base + AHEAD)
        if end - base < 64:
            last = uint64(1) << uint64(end - base)
            mask = (mask & (last - uint64(1))) | last
        while mask != uint64(0):
            s = base + trailing_zeros(mask)
            mask &= mask - uint64(1)
            value, length = uint64(0) if s == end else stops[text[uint64(s)]], s - i
            if tables.finds == WORDS:
                if value == NEXT_BEGINS and length == 0:
                    continue  # the space that begins this word does not end it
                is_space = length == 1 and stops[text[uint64(i)]] == NEXT_BEGINS  # its role depends on the next bytes
                if is_space or value == NOT_QUICK or (length == 0 and value == OWN_WORD):
                    return count, i, i + 1
            elif value == NOT_QUICK:
                if text[uint64(s)] != 0:
                    continue
                return count, i, i + 1  # a key has no zero byte
            if tables.has_marks != 0 and s + 1 < end and quick[text[uint64(s + 1)]] == 0:
                return count, i, i + 1  # a mark may change the byte that ends the run
            if length <= 16:
                key, rest = near_key(text, i, length)
                if (key | rest) & HIGH == uint64(0):
                    key |= (key >> uint64(1)) & fold
                    rest |= (rest >> uint64(1)) & fold
            elif length > LONGEST_KEY or LONE_FIRST <= text[uint64(i)] < LONE_LAST:
                return count, i, i + 1
            else:
                key, rest = EMPTY, hash_of(text, i, length)
            j, q = first_slot(near, key, rest), uint64(4 * count)
            prefetch(near, int64(j << uint64(3)))
            keys[q], keys[q + uint64(1)] = key, rest
            keys[q + uint64(2)] = j | (uint64(i - first) << uint64(32)) | (uint64(length) << uint64(48))
            keys[q + uint64(3)] = value
            count += 1
            if value < OWN_WORD:
                i = s + 1
                continue
            keys[q + uint64(3)], i = uint64(0), s
            if value == OWN_WORD:
                if s + 1 >= end or text[uint64(s + 1)] != ord(" ") or quick[text[uint64(s + 2)]] == 0:
                    return count, i, i + 1
                key, q = uint64(text[uint64(s)]), uint64(4 * count)
                j = first_slot(near, key, uint64(0))
                keys[q], keys[q + uint64(1)], keys[q + uint64(3)] = key, uint64(0), uint64(0)
                keys[q + uint64(2)] = j | (uint64(i - first) << uint64(32)) | (uint64(1) << uint64(48))
                count += 1
                i = s + 1
        if i == base:
            return count, i, i + 1
    return count, i, i


@part(forceinline=True)
def _write_lone(text, i, end, points, out, p):
    """Write the ids of code points that are words by themselves, such as Chinese characters, from byte i on.

    Return the byte and the output index after them.
    """
    while i < end and text[uint64(i)] >= 0x80:
        point, width = decoded(text, i)
        if points[point, 0] & LONE == uint64(0):
            break
        p += put_ids(out, p, points[point, 1])
        i += width
    return i, p


@part()
def _hash_long(text, start, count, runs):
    """Compute the keys of words of more than 16 bytes, and prefetch the sets of words that may be in the tables."""
    first = start
    for k in range(count):
        stop = first + int64(runs.places[uint64(k)])
        length, q = stop - start, uint64(4 * k)
        if length > 16:
            runs.keys[q] = runs.keys[q + uint64(1)] = EMPTY
        if 16 < length <= LONGEST_KEY:
            run_hash = hash_of(text, start, length)
            runs.keys[q + uint64(1)] = run_hash
            prefetch(runs.far, int64(first_slot(runs.far, EMPTY, run_hash) << uint64(3)))
        start = stop


@part(forceinline=True)
def _find_words(text, i, end, tables, runs, state):
    """Like `_find_runs`, by the rule of GPT-2 or Llama 3. -1: the entry of state[CODE_POINT] is missing."""
    near, keys, places, first, num_long = runs.near, runs.keys, runs.places, i, 0
    count, slow_stop = find_words(text, i, end, tables, runs, state)
    for k in range(count):
        stop, q = first + int64(places[uint64(k)]), uint64(4 * k)
        length = stop - i
        key, rest = keep_masked(text, i, KEY_MASKS, 2 * min(length, 17), keys, 4 * k)
        j = first_slot(near, key, rest)
        prefetch(near, int64(j << uint64(3)))
        keys[q + uint64(2)] = j
        num_long += length > 16
        i = stop
    if num_long > 0:
        _hash_long(text, first, count, runs)
    return count, i, slow_stop


@part(forceinline=True)
def _write_known(k, count, has_stops, keys, near, out, p):
    """Write the ids of runs and stops from index k on, up to the first run that is not in its first two slots.

    Return the index of that run, `count` if there is none, and the output index after the ids.
    """
    while k < count:
        q = uint64(4 * k)
        j = keys[q + uint64(2)] & LOW32
        if not are_equal128(near, int64(j), keys, int64(q)):
            j ^= uint64(4)  # in the same cache line
            if not are_equal128(near, int64(j), keys, int64(q)):
                break
        value = near[j + uint64(2)]
        size = num_ids(out, value)
        if size > most_ids(out):
            break
        put_ids(out, p, value)
        if size > uint64(3):
            put_ids(out, p + 3, near[j + uint64(3)])
        p += int64(size)
        if has_stops:
            p += put_ids(out, p, keys[q + uint64(3)])
        k += 1
    return k, p


@part(forceinline=True)
def _encode_slow(text, begin, i, end, is_first, prefixed, run_length, p, tables, runs, output):
    """Encode characters that are words by themselves, or a word that the automaton finds. See `_encode_word`."""
    start, code = i, DONE
    i, p = _write_lone(text, i, end, tables.points, output.ids, p)
    if i == start or (i < end and text[uint64(i)] >= 0x80):
        code, i, p = _encode_word(text, begin, i, end, is_first, prefixed, run_length, p, tables, runs, output)
    return code, i, p


@part(forceinline=True)
def _encode_run(text, begin, i, stop, key, rest, p, tables, runs, output):
    """Encode a run, text[i:stop], that is not in the tables. See `_encode_word`."""
    state, start, length, first, code = output.state, i, stop - i, p, DONE
    num_others = state[NUM_HARD] + state[REPLACED]
    if tables.finds == RUNS:
        while i < stop and code == DONE:
            prefixed = tables.prefix_when == EACH_WORD
            code, i, p = _encode_slow(text, begin, i, stop, False, prefixed, length, p, tables, runs, output)
    elif length <= tables.longest:
        p += _put_word(text, i, length, False, p, tables, runs, output)
        i = stop
    elif state[NUM_HARD] == output.hard.shape[0]:
        return TOO_MANY_HARD, i, p
    else:
        put_hard(output, i, stop, p, ONE_WORD)
        i = stop
    if code == DONE and length <= LONGEST_KEY and num_others == state[NUM_HARD] + state[REPLACED]:
        keep_run(text, start, length, key, rest, output.ids[first:], p - first, output.ids, runs)
    return code, i, p


@part(forceinline=True)
def _write_window(text, begin, first, count, p, tables, runs, output):
    """Write the ids of the runs and stops that begin at byte `first`. See `_encode_word`."""
    keys, k, has_stops = runs.keys, int64(0), tables.finds == RUNS
    while True:
        k, p = _write_known(k, count, has_stops, keys, runs.near, output.ids, p)
        if k == count:
            return DONE, first, p
        q = uint64(4 * k)
        key, rest, where, size = keys[q], keys[q + uint64(1)], keys[q + uint64(2)] >> uint64(32), int64(0)
        start, length = first + int64(where & uint64(0xFFFF)), int64(where >> uint64(16))
        if tables.finds > RUNS:
            start = first + int64(runs.places[uint64(k - 1)]) if k > 0 else first
            length = first + int64(runs.places[uint64(k)]) - start
        if length > 0:
            tables_of_runs = runs.near, runs.far, runs.spelled, runs.pool
            size = put_run(text, start, length, key, rest, output.ids, p, *tables_of_runs)
        if size < 0:
            code, i, p = _encode_run(text, begin, start, start + length, key, rest, p, tables, runs, output)
            if code != DONE:
                return code, i, p
        p += max(size, 0)
        if has_stops:
            p += put_ids(output.ids, p, keys[q + uint64(3)])
        k += 1


@part(forceinline=True)
def _before_prefix(text, begin, i, end, p, tables, output):
    """Return the first byte from i on with a nonempty normal form, or `end`; whether it gets a prefix; and a code."""
    entry, width = SILENT_FORM, 0
    while i + width < end and entry & SILENT_FORM != uint64(0):
        i += width
        entry, width = entry_at(text, i, tables.points, output.state)
    if entry == uint64(0):
        return i, False, UNKNOWN_CODE_POINT
    if tables.prefix_when == FIRST_PIECE and i > begin:
        # The beginning of the text has an empty normal form; does it get a prefix?
        put_hard(output, begin, end, p, AT_BEGIN)
        return end, False, DONE
    i = end if entry & SILENT_FORM != uint64(0) else i
    return i, tables.prefix_always != 0 or entry & PREFIXED == uint64(0), DONE


@part(forceinline=True)
def _encode_piece(pieces, piece, tables, runs, output):
    """Encode a piece of text from the position in output.state, and store the new position there. Return a code."""
    text, begin, end = pieces.data, pieces.starts[piece], pieces.stops[piece]
    state, begins, when, finds = output.state, pieces.begins[piece], tables.prefix_when, tables.finds
    i, p, code = max(state[BYTE], begin), state[PLACE], DONE
    if state[NUM_HARD] == output.hard.shape[0]:
        return TOO_MANY_HARD
    if tables.strips != 0:
        start, end, code = strip(text, begin, end, tables.strips, tables.points, state)
        if code == UNKNOWN_CODE_POINT:
            return code
        if code == MAY_DIFFER and state[HAS_BEGUN] == 0:
            put_hard(output, begin, pieces.stops[piece], p, AT_BEGIN if begins or when != FIRST_PIECE else LATER_PIECE)
            return DONE
        i, code = max(i, start), DONE
    slow_stop = end if finds == NOTHING else i
    while i < end and code == DONE:
        is_first, prefixed = False, when == EACH_WORD
        if state[HAS_BEGUN] == 0 and (when == EACH_PIECE or (when == FIRST_PIECE and begins)):
            i, prefixed, code = _before_prefix(text, begin, i, end, p, tables, output)
            is_first = True
            if code != DONE or i >= end:
                break
        else:
            state[HAS_BEGUN] = 1
        if is_first or i < slow_stop:
            code, i, p = _encode_slow(text, begin, i, end, is_first, prefixed, 0, p, tables, runs, output)
            following = text[uint64(i)] if finds == RUNS else text[uint64(i)] | text[uint64(i + 1)]
            if following >= 0x80:
                slow_stop = max(slow_stop, i + 1)
            continue
        if finds <= RUNS:
            count, after, slow_stop = _find_runs(text, i, end, tables, runs)
        else:
            count, after, slow_stop = _find_words(text, i, end, tables, runs, state)
        if count < 0:
            code = UNKNOWN_CODE_POINT
        elif count > 0:
            code, i, p = _write_window(text, begin, i, count, p, tables, runs, output)
        i = after if code == DONE else i
    state[PLACE] = p
    if state[HAS_BEGUN] != 0:
        state[BYTE] = i
    else:  # the beginning of a text is read again
        state[BYTE], state[LEVEL] = begin, 0
    return code


@jit()
def encode_words(pieces, tables, runs, output):
    """Encode pieces of text by the rules and the model of `tables`. Return one of the codes of records.py.

    pieces: Text. tables: WordTables. runs: RunTables. output: Output. After any code except DONE, the caller supplies
    the missing data and calls the kernel again; it continues from output.state.

    The automaton finds the end of the next word. The ids of most words are copied from the tables of runs. A stretch
    whose code points change each other is hard: it begins and ends at places where any text can be cut.
    """
    state = output.state
    for piece in range(state[PIECE], pieces.starts.size):
        code = _encode_piece(pieces, piece, tables, runs, output)
        if code != DONE:
            state[PIECE] = piece
            return code
        if pieces.tails[piece] >= 0:
            output.ids[state[PLACE]] = pieces.tails[piece]
            state[PLACE] += 1
        output.bounds[piece + 1] = state[PLACE]
        state[BYTE], state[HAS_BEGUN], state[LEVEL] = pieces.stops[piece], 0, 0
    return DONE
