"""Unigram: the most probable way to cut one word (Kudo, 2018)."""

from __future__ import annotations

from numba import uint64

from bertdata.jit import part
from bertdata.tokenize.kernels.tries import child_of, longest_token, token_of


@part()
def most_probable(word, size, tables, ids, ranks, best):
    """Write the ids of the most probable way to cut word[:size] (Kudo, 2018) to `ids`. Return their number.

    Of equally probable ways, takes the first one found, from the left and with short tokens first, like `tokenizers`.
    """
    trie, scores = tables.trie, tables.scores
    came_from, token = ranks[0], ranks[1]
    for k in range(size + 1):
        came_from[k], best[k] = -1, 0.0
    i = 0
    while i < size:
        width = 1 if word[i] < 0x80 else 2 if word[i] < 0xE0 else 3 if word[i] < 0xF0 else 4
        so_far, entry, is_known, k = best[i], trie[0], False, i
        while k < size:
            entry = child_of(trie, entry, word[k])
            if entry == uint64(0):
                break
            k += 1
            found = token_of(entry)
            if found >= 0:
                score = scores[found] + so_far
                if came_from[k] < 0 or score > best[k]:
                    came_from[k], token[k], best[k] = i, found, score
                if k == i + width:
                    is_known = True
        if not is_known:
            score = tables.unk_score + so_far
            if came_from[i + width] < 0 or score > best[i + width]:
                came_from[i + width], token[i + width], best[i + width] = i, tables.unk, score
        i += width
    count, i, unknown_stop = 0, size, -1
    while i > 0 or unknown_stop >= 0:
        if i > 0 and token[i] == tables.unk:
            if unknown_stop < 0:
                unknown_stop = i
            i = came_from[i]
            continue
        if unknown_stop >= 0:  # word[i:unknown_stop] is unknown
            if tables.byte_ids[0, 0] >= 0 and longest_token(trie, 0, word, i, unknown_stop)[1] < unknown_stop:
                for k in range(unknown_stop - 1, i - 1, -1):
                    ids[count] = tables.byte_ids[0, word[k]]
                    count += 1
            else:
                ids[count] = tables.unk
                count += 1
            unknown_stop = -1
            continue
        ids[count] = token[i]
        count += 1
        i = came_from[i]
    for k in range(count // 2):
        ids[k], ids[count - 1 - k] = ids[count - 1 - k], ids[k]
    return count
