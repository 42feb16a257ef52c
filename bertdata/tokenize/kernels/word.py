"""The ids of one word: its normalized bytes, then their ids by the model."""

from __future__ import annotations

from numba import int64, uint64

from bertdata.bits import store64
from bertdata.jit import part
from bertdata.tokenize.kernels.bits import decoded
from bertdata.tokenize.kernels.merges import character_ids, merge
from bertdata.tokenize.kernels.records import BYTE_BPE, CHARACTER_BPE, EACH_WORD, SPACE_FORM, UNIGRAM, WORD_PIECE
from bertdata.tokenize.kernels.splits import cut_bytes
from bertdata.tokenize.kernels.tries import longest_token
from bertdata.tokenize.kernels.unigram import most_probable


@part(forceinline=True)
def _normal_form(text, start, stop, prefixed, tables, word):
    """Write the normal form of text[start:stop] to word. Return its numbers of bytes and characters."""
    size, num_chars, after_space = 0, 0, False
    if prefixed:
        for k in range(tables.prefix.size):
            word[k] = tables.prefix[k]
        size, num_chars, after_space = tables.prefix.size, 1, True
    i = start
    if tables.is_plain != 0:
        for k in range(start, stop):
            word[size] = text[k]
            size += 1
        i = stop
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
        if size + 16 <= word.size:  # else the word has too many characters for WordPiece
            store64(word, size, tables.points[point, 1])
            store64(word, size + 8, entry >> uint64(32))
        size += length
        num_chars += int64((entry >> uint64(16)) & uint64(255))
    if prefixed and tables.prefix_when == EACH_WORD:
        width = tables.prefix.size
        has_it = size == width or size >= 2 * width
        for k in range(width, min(2 * width, size)):
            has_it = has_it and word[k] == tables.prefix[k - width]
        if has_it:
            size -= width
            num_chars -= 1
            for k in range(size):
                word[k] = word[k + width]
    return size, num_chars


@part()
def _longest_matches(word, size, num_chars, tables, ids):
    """Write the ids of a normalized word of `size` bytes to `ids`, longest match first. Return their number.

    A word that the vocabulary cannot spell is one unknown token.
    """
    count, start = 0, 0
    while start < size and num_chars <= tables.max_chars:
        ids[count], start = longest_token(tables.trie, int64(start > 0), word, start, size)
        if ids[count] < 0:
            break
        count += 1
    if start < size:
        ids[0] = tables.unk
        return 1
    return count


@part(forceinline=True)
def encode_word(text, start, stop, prefixed, tables, runs):
    """Write the ids of the word text[start:stop] to runs.ids. Return their number.

    prefixed: whether to put the prefix before the word. If each word gets a prefix, skips words that begin with it.
    """
    word, ids = runs.word, runs.ids
    size, num_chars = _normal_form(text, start, stop, prefixed, tables, word)
    if size == 0:
        return 0
    if tables.model == BYTE_BPE:
        return cut_bytes(size, tables, runs)
    if tables.model == CHARACTER_BPE:
        return merge(character_ids(word, size, tables, ids), tables.pairs, tables.merged, ids, runs.ranks[0])[0]
    if tables.model == UNIGRAM:
        return most_probable(word, size, tables, ids, runs.ranks, runs.best)
    if tables.model == WORD_PIECE:
        return _longest_matches(word, size, num_chars, tables, ids)
    found, after = longest_token(tables.trie, 0, word, 0, size)
    ids[0] = found if after == size else tables.unk
    return 1
