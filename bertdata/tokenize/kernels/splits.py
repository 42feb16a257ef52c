"""Byte-pair encoding of a word without merging: cut it into the longest tokens that no merge would join or undo.

The ids from merging are the only way to cut a word into tokens such that no merge would ever cross a cut. Whether a
merge crosses a cut depends only on the tokens on both sides. So cuts are found from left to right, with a step back if
no token fits (van Antwerpen and Neubeck, 2024, "So many tokens, so little time"). This takes linear time in the length
of a word; merging takes quadratic time.

Tokens are numbered as *symbols*: first the 256 bytes, then the bytes at the end of a word if the model marks it, then
the tokens that merges make, in the order of these merges. A symbol is *sorted* if its two parts have lower numbers and
are sorted; in some vocabularies a few symbols are not sorted, and words with such a symbol are merged. The tests
compare with `tokenizers`, which merges.
"""

from __future__ import annotations

from numba import int64, uint64

from bertdata.jit import jit, part
from bertdata.tokenize.kernels.merges import NO_RANK, SUFFIX, merge, rank_of
from bertdata.tokenize.kernels.tries import child_of, token_of

NUM_BYTES = 256
LEFT, RIGHT, SHORTER, LENGTH = range(4)  # columns of WordTables.symbols


@part(forceinline=True)
def stay_apart(left, right, tables):
    """Return whether merging keeps two adjacent symbols unchanged.

    Undoes merges, from the two symbols back to the bytes at the border, and looks for a merge across the border that
    precedes the last undone merge. Of equal merges the leftmost comes first.
    """
    symbols, pairs, limit = tables.symbols, tables.pairs, NO_RANK
    while rank_of(pairs, left, right) >= limit:
        is_left = left > right  # the later of the two merges; of equal ones the right one
        last = max(left, right)
        inner = int64(symbols[uint64(last), RIGHT if is_left else LEFT])
        if inner < 0:
            return True
        limit = last if is_left else last + 1
        left, right = inner if is_left else left, right if is_left else inner
    return False


@part(forceinline=True)
def cut_word(word, size, tables, chain, dead):
    """Write the symbols of word[:size] to `chain`, and return their number.

    If the word is a token in WordTables.trie that no merge makes, writes its number. Returns 0 if merging gives a
    symbol that is not sorted. dead: uint64 [at least size / 64 + 1], scratch memory: places from which no cut
    continues.
    """
    trie, symbols = tables.trie, tables.symbols
    for k in range((size >> 6) + 1):
        dead[k] = uint64(0)
    i, count, is_new, symbol = 0, 0, True, int64(-1)
    while i < size:
        if is_new:
            entry, k = trie[0], i
            while k < size:
                entry = child_of(trie, entry, word[k])
                if entry == uint64(0):
                    break
                k += 1
                found = token_of(entry)
                if found >= symbols.shape[0]:
                    if i == 0 and k == size:
                        chain[0] = found
                        return 1
                elif found >= 0:
                    symbol = found
        while symbol >= 0:
            stop = i + int64(symbols[uint64(symbol), LENGTH])
            is_dead = (dead[uint64(stop >> 6)] >> uint64(stop & 63)) & uint64(1) != uint64(0)
            if not is_dead and (count == 0 or stay_apart(chain[count - 1], symbol, tables)):
                break
            symbol = int64(symbols[uint64(symbol), SHORTER])
        is_new = symbol >= 0
        if is_new:
            chain[count] = symbol
            count += 1
            i = stop
            symbol = int64(-1)
        else:
            if count == 0:
                return 0
            dead[uint64(i >> 6)] |= uint64(1) << uint64(i & 63)
            count -= 1
            i -= int64(symbols[uint64(chain[count]), LENGTH])
            symbol = int64(symbols[uint64(chain[count]), SHORTER])
    return count


@part(forceinline=True)
def cut_bytes(size, tables, runs):
    """Write the ids of byte-level BPE for runs.word[:size] to runs.ids. Return their number.

    Drops bytes without an id.
    """
    word, ids, byte_ids, count, has_suffix = runs.word, runs.ids, tables.byte_ids, 0, False
    for k in range(size):
        is_end = k == size - 1 and byte_ids.shape[0] > 1
        if byte_ids[int64(is_end), word[k]] >= 0:
            word[count], has_suffix = word[k], is_end
            count += 1
    word[count] = SUFFIX
    num_symbols = cut_word(word, count + has_suffix, tables, ids, runs.dead) if count > 0 else 0
    if num_symbols == 0:
        for k in range(count):
            ids[k] = int64(word[k]) + NUM_BYTES * (has_suffix and k == count - 1)
        num_symbols = merge(count, tables.pairs, tables.merged, ids, runs.ranks[0])[0]
    for k in range(num_symbols):
        ids[k] = tables.symbol_ids[ids[k]]
    return num_symbols


@jit()
def mark_sorted(symbols, num_bytes, is_sorted):
    """Fill is_sorted, bool [num_symbols], from the columns LEFT and RIGHT of symbols. The first symbols are bytes."""
    for s in range(num_bytes, symbols.shape[0]):  # a symbol with a lower number is marked before
        left, right = symbols[s, LEFT], symbols[s, RIGHT]
        is_sorted[s] = 0 <= left < s and 0 <= right < s and is_sorted[left] and is_sorted[right]


@jit()
def fill_shorter(text, bounds, trie, symbols):
    """Write to symbols[:, SHORTER] the longest shorter symbol that each begins with, -1 if there is none.

    Symbol s is text[bounds[s] : bounds[s + 1]]. trie: as in WordTables.
    """
    for s in range(symbols.shape[0]):
        entry, shorter = trie[0], int64(-1)
        for k in range(bounds[s], bounds[s + 1] - 1):
            entry = child_of(trie, entry, text[k])
            if 0 <= token_of(entry) < symbols.shape[0]:
                shorter = token_of(entry)
        symbols[s, SHORTER] = shorter
