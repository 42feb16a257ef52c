"""Pairs of segments, for next sentence prediction."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import uint64
from numpy.typing import NDArray

from bertdata import keys
from bertdata.bits import count_ones
from bertdata.jit import inline, jit, part
from bertdata.read.kernels.draws import U0, U1, U2, U32, U63, absorb, below, draw, key3
from bertdata.read.kernels.rows import Frames, TokenTable, add_piece

PAIRS = np.uint64(keys.purpose("pairs"))


PAIR = np.dtype(
    [
        ("a_start", np.int64),  # start of segment A in the stream
        ("a_stop", np.int64),  # end of A; a B that is not random starts here
        ("b_stop", np.int64),  # end of B; 0 if B is random
        ("b_wanted", np.int64),  # target length of a random B in tokens; 0 if B is not random
        ("first_sentence", np.int64),  # index in the split of the first sentence of A's document
        ("num_sentences", np.int64),  # number of sentences of A's document
    ]
)
"""A sample of `pairs` in an index. The epoch determines the document of a random B."""


class DocumentRange(NamedTuple):
    """Consecutive documents of one shard, and the numbers of documents, sentences and tokens before them."""

    documents: NDArray[np.uint64]  # [D + 1]: offsets of the shard
    sentences: NDArray[np.uint64]  # [S + 1]: offsets of the shard, from documents[0] to documents[-1]
    first_document: int  # number of documents before these, in the split
    first_sentence: int  # number of sentences before these, in the split
    shard_start: int  # number of tokens before the shard
    separator: int  # as in TokenTable


class PairRules(NamedTuple):
    """How documents are cut into pairs (docs/determinism.md, "pairs")."""

    max_tokens: int  # tokens of text in a pair: T - 3
    short_below: np.uint64  # a document gets a shorter target if the high 32 bits of its draw are below this
    seed: np.uint64


class PairIndex(NamedTuple):
    """The output of `segment` for a split."""

    pairs: NDArray[Any]  # PAIR [N], the samples
    sentences: NDArray[np.uint64]  # [Q + 1]: see `pack_sentence`; the last one is the end of the stream, as a document


class PairColumns(NamedTuple):
    """The arrays of a batch that only pairs have. int64."""

    token_type_ids: NDArray[np.int64]  # [B, T]: 1 for B and the [SEP] after it
    next_sentence_label: NDArray[np.int64]  # [B]: 1 if B is random
    cropped: NDArray[np.int64]  # [B]: number of tokens cut off


def pack_sentence(start, begins_document):
    """Return a sentence as in an index, uint64: its start in the stream, then 1 bit: a document starts there."""
    return np.uint64(start) << U1 | np.uint64(begins_document)


_pack_sentence = inline()(pack_sentence)


@inline()
def _sentence_start(sentence):
    return np.int64(sentence >> U1)


@jit()
def segment(part, rules, pairs, sentences):
    """Cut documents into pairs of segments as BERT does (Devlin et al., 2019).

    part: a DocumentRange of S sentences. rules: PairRules. pairs PAIR [S], sentences uint64 [S]: outputs. Return the
    number of pairs, or -1 if the offsets are damaged.
    """
    num_pairs, s, num_sentences = 0, 0, part.sentences.size - 1
    for d in range(part.documents.size - 1):
        document_stop = part.documents[d + 1]
        document_first = s
        while s < num_sentences and part.sentences[s] < document_stop:
            if part.sentences[s + 1] <= part.sentences[s]:
                return np.int64(-1)
            sentences[s] = _pack_sentence(uint64(part.shard_start) + part.sentences[s], s == document_first)
            s += 1
        if (
            s == document_first
            or part.sentences[document_first] != part.documents[d]
            or part.sentences[s] != document_stop
        ):
            return np.int64(-1)
        key = absorb(key3(rules.seed, PAIRS, U0), uint64(part.first_document + d))
        target = rules.max_tokens
        if draw(key, U0) >> U32 < rules.short_below:
            target = 2 + np.int64(below(draw(key, U1), uint64(rules.max_tokens - 1)))
        drawn = U2
        i = first = document_first  # sentences first to i are used
        num_tokens = np.int64(0)
        while i < s:
            num_tokens += np.int64(part.sentences[i + 1] - part.sentences[i])
            if i == s - 1:
                num_tokens -= part.separator
            if i < s - 1 and num_tokens < target:
                i += 1
                continue
            pair_sentences = i + 1 - first
            a_sentences = 1
            if pair_sentences > 1:
                a_sentences += np.int64(below(draw(key, drawn), uint64(pair_sentences - 1)))
            is_random = pair_sentences == 1 or draw(key, drawn + U1) >> U63 == U0
            drawn += U2
            a_start = np.int64(part.sentences[first])
            a_stop = np.int64(part.sentences[first + a_sentences])
            if first + a_sentences == s:
                a_stop -= part.separator
            pair = pairs[num_pairs]
            pair["a_start"] = part.shard_start + a_start
            pair["a_stop"] = part.shard_start + a_stop
            if is_random:
                pair["b_stop"] = 0
                pair["b_wanted"] = max(1, target - (a_stop - a_start))
                i = first + a_sentences - 1  # the sentences after A start the next pair
            else:
                b_stop = np.int64(part.sentences[i + 1]) - (part.separator if i == s - 1 else 0)
                pair["b_stop"] = part.shard_start + b_stop
                pair["b_wanted"] = 0
            pair["first_sentence"] = part.first_sentence + document_first
            pair["num_sentences"] = s - document_first
            num_pairs += 1
            i += 1
            first, num_tokens = i, np.int64(0)
    return num_pairs if s == num_sentences else np.int64(-1)


@part()
def _cut_front(key, segment, excess):
    """Return how many of the `excess` tokens to cut from a segment (1: A, 2: B) are at its front."""
    front = 0
    for word in range((excess + 63) >> 6):
        bits = draw(key, (segment << U32) + uint64(word))
        if excess - (word << 6) < 64:
            bits &= (U1 << uint64(excess & 63)) - U1
        front += count_ones(bits)
    return front


@jit()
def pair_rows(which, epochs, sample_ids, seed, index, table, frames, columns, num_spans):
    """Lay out rows [CLS] A [SEP] B [SEP]; text_places counts A, [SEP] and B.

    index: PairIndex. columns: PairColumns, outputs. num_spans: as in Samples.lay_out; -1 if the index is damaged.
    """
    index, table, frames, columns = PairIndex(*index), TokenTable(*table), Frames(*frames), PairColumns(*columns)
    pairs, sentences, ids = index.pairs, index.sentences, frames.ids
    token_type_ids, next_sentence_label, cropped = columns.token_type_ids, columns.next_sentence_label, columns.cropped
    max_tokens, total = ids.shape[1] - 3, table.starts[-1]
    num_sentences = sentences.size - 1
    for b in which:
        pair = pairs[sample_ids[b]]
        a_start, a_stop, b_stop, b_wanted = pair["a_start"], pair["a_stop"], pair["b_stop"], pair["b_wanted"]
        key = absorb(key3(seed, PAIRS, uint64(epochs[b]) + U1), uint64(sample_ids[b]))
        b_start = a_stop
        next_sentence_label[b] = b_wanted > 0
        if b_wanted > 0:
            first, size = pair["first_sentence"], pair["num_sentences"]
            if not (first >= 0 and size > 0 and first + size <= num_sentences and size < num_sentences):
                return -1
            x = np.int64(below(draw(key, U0), uint64(num_sentences - size)))
            x += size if x >= first else 0
            b_start = _sentence_start(sentences[x])
            while True:
                x += 1
                begins = np.int64(sentences[x] & U1)  # a document
                b_stop = _sentence_start(sentences[x]) - begins * table.separator
                if begins or b_stop - b_start >= b_wanted or x == num_sentences:
                    break
        if not (0 <= a_start < a_stop <= total and 0 <= b_start < b_stop <= total):
            return -1
        a_length, b_length = a_stop - a_start, b_stop - b_start
        excess = cropped[b] = max(0, a_length + b_length - max_tokens)
        if excess:  # tokens are cut one by one from the longer segment, or from B for equal lengths
            from_a = min(excess, max(0, a_length - b_length))
            from_b = min(excess, max(0, b_length - a_length))
            rest = excess - from_a - from_b
            from_a, from_b = from_a + rest // 2, from_b + (rest + 1) // 2
            a_start, a_length = a_start + _cut_front(key, U1, from_a), a_length - from_a
            b_start, b_length = b_start + _cut_front(key, U2, from_b), b_length - from_b
        place = a_length + 2
        frames.text_places[b] = a_length + b_length + 1
        num_spans = add_piece(table, frames, num_spans, a_start, a_length, b, 1)
        if num_spans < 0:
            return -1
        num_spans = add_piece(table, frames, num_spans, b_start, b_length, b, place)
        if num_spans < 0:
            return -1
        ids[b, 0] = table.cls
        ids[b, place - 1] = table.sep
        ids[b, place + b_length] = table.sep
        token_type_ids[b] = 0
        token_type_ids[b, place : place + b_length + 1] = 1
    return num_spans
