"""Tries of tokens as double arrays: filling one, and walking along its branches."""

from __future__ import annotations

import numpy as np
from numba import int64, uint64

from bertdata.jit import jit, part

NO_BYTE = np.uint64(256)  # parts of an entry of a trie; see `child_of`
OPEN_BLOCKS, MOST_TRIES = 16, 512  # limits of the search for a place for the children of a node


@part(forceinline=True)
def child_of(trie, entry, byte):
    """Return the entry of the child along a byte of a trie's node, given by its entry. 0 if there is none.

    The trie is a double array (Aoe, 1989): the child of a node along a byte is the entry at index (base ^ byte). An
    entry has the byte that leads to it in bits 0 to 8 (NO_BYTE: the entry is free, or a root), its base in bits 16 to
    39 (unique; 0 without a child), and from bit 40 the id, plus one, of the token that ends there (0 for none). The
    roots are entries 0 and 1.
    """
    child = trie[((entry >> uint64(16)) & uint64(0xFFFFFF)) ^ uint64(byte)]
    return child if child & uint64(0x1FF) == uint64(byte) else uint64(0)


@part(forceinline=True)
def token_of(entry):
    """Return the id of the token that ends at an entry of a trie, -1 for none."""
    return int64(entry >> uint64(40)) - 1


@jit(arrays=True)
def grow_trie(text, bounds, roots, ids, trie):
    """Fill a trie with tokens: token t is text[bounds[t] : bounds[t + 1]] under root roots[t], with id ids[t].

    The tokens are sorted by root and spelling, and none is empty. trie: uint64, all NO_BYTE, a multiple of 256 and at
    least 512. Return the number of used entries, 0 if there are too few.
    """
    most = bounds[-1] + 2
    first_child, next_sibling, last_child = np.zeros(most, np.int32), np.zeros(most, np.int32), np.zeros(most, np.int32)
    byte_of, id_of, place_of = np.zeros(most, np.uint8), np.full(most, -1, np.int32), np.zeros(most, np.int32)
    path, num_nodes = np.zeros(most, np.int32), 2
    for t in range(ids.size):
        length, shared = bounds[t + 1] - bounds[t], 0
        if t > 0 and roots[t - 1] == roots[t]:
            start, width = bounds[t - 1], bounds[t] - bounds[t - 1]
            while shared < min(length, width) and text[start + shared] == text[bounds[t] + shared]:
                shared += 1
        path[0] = roots[t]
        for depth in range(shared, length):
            parent, node = path[depth], num_nodes
            if last_child[parent] == 0:
                first_child[parent] = node
            else:
                next_sibling[last_child[parent]] = node
            last_child[parent], byte_of[node], path[depth + 1] = node, text[bounds[t] + depth], node
            num_nodes += 1
        id_of[path[length]] = ids[t]
    # A list of the free entries of the last blocks: after[e] and before[e] are the free entries around e.
    after, before = np.zeros(trie.size, np.int32), np.zeros(trie.size, np.int32)
    has_base, bytes_of_node = np.zeros(trie.size, np.bool_), np.zeros(256, np.int64)
    size, place_of[1] = 256, 1  # no node has its children in the first block
    for node in range(num_nodes):
        count, child = 0, first_child[node]
        while child != 0:
            bytes_of_node[count] = byte_of[child]
            count += 1
            child = next_sibling[child]
        base, free, tries = 0, after[0], 0
        while count > 0 and base == 0 and free != 0 and tries < MOST_TRIES:
            base = free ^ bytes_of_node[0]
            is_free = not has_base[base]
            for k in range(1, count):
                is_free = is_free and trie[base ^ bytes_of_node[k]] == NO_BYTE
            if not is_free:
                base, free, tries = 0, after[free], tries + 1
        if count > 0 and base == 0:  # a new block; the free entries of an old block are abandoned
            if size + 256 > trie.size:
                return 0
            base = size
            for e in range(max(size - 256 * OPEN_BLOCKS, 256), max(size - 256 * OPEN_BLOCKS, 256) + 256):
                if size > 256 * OPEN_BLOCKS and trie[e] == NO_BYTE:
                    after[before[e]], before[after[e]] = after[e], before[e]
            for e in range(size, size + 256):
                before[e], after[e] = before[0], 0
                after[before[0]], before[0] = e, e
            size += 256
        has_base[base] = True
        entry = uint64(id_of[node] + 1) << uint64(40) | uint64(base) << uint64(16)
        trie[place_of[node]] = entry | (uint64(byte_of[node]) if node > 1 else NO_BYTE)
        child = first_child[node]
        for k in range(count):
            e = base ^ bytes_of_node[k]
            trie[e] = uint64(bytes_of_node[k])  # no longer free; completed when the child is processed
            after[before[e]], before[after[e]] = after[e], before[e]
            place_of[child] = e
            child = next_sibling[child]
    return size


@part()
def longest_token(trie, root, word, start, stop):
    """Return the id and the end of the longest token that word[start:stop] begins with; -1 and `start` for none."""
    entry, token, end = trie[root], int64(-1), start
    for k in range(start, stop):
        entry = child_of(trie, entry, word[k])
        if entry == uint64(0):
            break
        if token_of(entry) >= 0:
            token, end = token_of(entry), k + 1
    return token, end
