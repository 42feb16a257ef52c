"""Every kernel equals its slow reference implementation, and hostile arguments do no harm."""

from bisect import bisect_right
from functools import partial
from itertools import pairwise

import hypothesis
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference import keys
from support.data import word_list

from bertdata import IGNORE_INDEX, Masking, SpecialTokens
from bertdata.choices import MASKING_POLICIES
from bertdata.read import order
from bertdata.read.kernels.pairs import PAIR, DocumentRange, PairRules, segment
from bertdata.read.kernels.pieces import pack_pieces, piece_rows
from bertdata.read.kernels.rows import SPAN, Frames, TokenTable
from bertdata.read.kernels.windows import window_rows
from bertdata.read.masking import Masker
from bertdata.sources.kernels import TEXT_PADDING
from bertdata.tokenize.kernels.splits import SHORTER, fill_shorter
from bertdata.tokenize.models import trie_of
from bertdata.write import kernels as build_kernels

SEEDS = st.integers(0, 2**64 - 1)


SIZES_OF_BLOCKS = st.none() | st.integers(1, 9) | st.integers(1, 2**20) | st.just(2**40)


@given(SEEDS, st.integers(1, 70) | st.integers(1, 2**62), SIZES_OF_BLOCKS, st.lists(st.integers(0, 2**62), max_size=8))
@example(0, 33, None, [*range(330)])
@example(1, 65, None, [*range(650)])
@example(0, 64 * 7 * 3 + 5, 7, [*range(0, 1400, 3)])
def test_orders_equal_their_reference(seed, num_samples, block, positions):
    found = order.sample_ids(np.array(positions, np.int64), num_samples=num_samples, seed=seed, block=block)
    permute = keys.permute if block is None else partial(keys.permute_blocks, block=min(block, num_samples))
    for position, epoch, sample_id in zip(positions, *map(np.ndarray.tolist, found), strict=True):
        assert epoch == position // num_samples
        assert sample_id == permute(position % num_samples, num_samples=num_samples, seed=seed, epoch=epoch)


SIZES = st.lists(st.integers(1, 99) | st.integers(2**31 - 9, 2**32 + 9), min_size=1, max_size=5)
PLACES = st.tuples(st.integers(0, 2**31 + 99) | st.integers(2**31, 2**35), st.integers(0, 99))


@given(SIZES, st.lists(PLACES, min_size=1, max_size=5))
@example([2**31 - 1, 50, 2**32, 9], [(2**31 - 2, 1), (2**31, 9), (2**31 + 48, 1), (2**31 + 2**32, 48)])
def test_spans_of_pieces_equal_their_reference(sizes, pieces):
    """Of streams of any size, whose tokens are not read. A piece that is not inside one shard is refused."""
    starts, addresses = np.append(0, np.cumsum(sizes)), np.arange(len(sizes)) << 40
    shards = [bisect_right(starts[:-1].tolist(), start) - 1 for start, _ in pieces]
    fits = [size and start + size <= starts[k + 1] for k, (start, size) in zip(shards, pieces, strict=True)]
    num_rows = fits.index(False) if False in fits else len(pieces)
    rows, table = np.arange(len(pieces)), TokenTable(starts, addresses, itemsize=2, separator=1, cls=2, sep=3)
    frames = Frames(np.empty((rows.size, 101), np.int64), np.empty_like(rows), np.empty(rows.size, SPAN))
    index = pack_pieces(*np.array(pieces).T), np.zeros(0, np.uint64)
    rest = tuple(table), tuple(frames), np.zeros((0, 0), np.int64), 0
    for bounds in ([2**32, 1], [0, 2**32 + 1]):  # which are no small numbers
        assert piece_rows(rows[:1], rows[:1], index[0], np.array(bounds, np.uint64), *rest) == -1
    assert piece_rows(rows, rows, *index, *rest) == (len(pieces) if all(fits) else -1)
    for row, (k, (start, size)) in enumerate(zip(shards[:num_rows], pieces, strict=False)):
        assert frames.spans[row].tolist() == (addresses[k] + 2 * (start - starts[k]), row, 1, size, start)


@given(SIZES, SEEDS, st.integers(0, 9))
def test_windows_equal_their_reference(sizes, seed, epoch):
    """Of streams of any size, whose tokens are not read: the first, the middle and the last window."""
    starts, addresses = np.append(0, np.cumsum(sizes)), np.arange(len(sizes)) << 40
    total, num_windows = int(starts[-1]), -(-int(starts[-1]) // 16)
    numbers, first = (
        sorted({0, num_windows // 2, num_windows - 1}),
        keys.phase(seed=seed, variant=epoch, num_tokens=total),
    )
    rows, table = np.arange(len(numbers)), TokenTable(starts, addresses, itemsize=2, separator=1, cls=2, sep=3)
    frames = Frames(np.empty((rows.size, 18), np.int64), np.empty_like(rows), np.empty(rows.size * 17, SPAN))
    count = window_rows(
        rows, np.full_like(rows, epoch), np.array(numbers), np.uint64(seed), tuple(table), tuple(frames), 0
    )
    found = [[] for _ in numbers]
    for address, row, place, length, _ in frames.spans[:count].tolist():
        assert place == 1 + len(found[row])
        found[row] += range(address, address + 2 * length, 2)
    for row, number in enumerate(numbers):
        places = [(first + place) % total for place in range(16 * number, min(16 * number + 16, total))]
        shards = [bisect_right(starts[:-1].tolist(), place) - 1 for place in places]
        assert found[row] == [addresses[k] + 2 * (place - starts[k]) for k, place in zip(shards, places, strict=True)]


@given(st.integers(0, 9) | st.integers(2**32, 2**35), SIZES)
def test_segments_of_sentences_of_any_size_follow_one_another(shard_start, sizes):
    """Of streams of any size, whose tokens are not read."""
    ends, most = np.append(0, np.cumsum(sizes)).astype(np.uint64), 29
    part, rules = DocumentRange(ends[[0, -1]], ends, 0, 0, shard_start, 0), PairRules(most, np.uint64(0), np.uint64(0))
    pairs, sentences = np.zeros(len(sizes), PAIR), np.zeros(len(sizes), np.uint64)
    count = segment(part, rules, pairs, sentences)
    assert sentences.tolist() == [2 * (shard_start + int(end)) + (end == 0) for end in ends[:-1]]
    assert pairs["a_start"][0] == shard_start
    assert 0 < count <= len(sizes)


@settings(max_examples=3 * hypothesis.settings().max_examples)
@given(st.data(), st.sampled_from(MASKING_POLICIES))
def test_masks_equal_their_reference(data, policy):
    vocab_size = data.draw(st.integers(7, 40), "vocab_size")
    special = {0, 1, 2, 3, 4} | data.draw(st.sets(st.integers(5, vocab_size - 2), max_size=8), "more specials")
    roles = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4, "special_ids": tuple(sorted(special - {1}))}
    length = data.draw(st.one_of(st.integers(3, 40), st.integers(3, 300)), "length")
    text = st.lists(st.integers(0, vocab_size - 1), max_size=length - 2)
    long = st.builds(lambda part, n: (part * n)[: length - 2], text, st.integers(1, 30))
    rows = data.draw(st.lists(st.one_of(text, long), max_size=4), "rows")
    seed = data.draw(SEEDS, "seed")
    any_size = st.lists(st.integers(0, 2**62), min_size=len(rows), max_size=len(rows))
    epochs, ids = data.draw(any_size, "epochs"), data.draw(any_size, "sample ids")
    p = data.draw(st.one_of(st.sampled_from([0.0, 0.15, 0.5, 1.0]), st.floats(0, 1)), "probability")
    shares = data.draw(st.sampled_from([(0.8, 0.1), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (0.3, 0.7)]), "shares")
    min_targets, more = data.draw(st.integers(0, 3), "min"), data.draw(st.sampled_from([None, 0, 5, 20]), "more")
    amounts = {"rounding": data.draw(st.sampled_from(["nearest", "even", "floor"])), "min_targets": min_targets}
    amounts["max_targets"] = None if more is None else min_targets + more
    rule = data.draw(st.sampled_from([1, 2]), "rule")
    random_from = data.draw(st.sampled_from(["tokens", "ordinary", "vocabulary"]), "random from")
    replacing = data.draw(st.sets(st.integers(0, vocab_size - 1)), "tokens") | {vocab_size - 1}
    pool = {"tokens": replacing - special, "vocabulary": range(vocab_size)}.get(random_from)
    ids_of_words = st.one_of(st.sets(st.integers(0, vocab_size - 1)), st.just({*range(vocab_size)}))
    continues = data.draw(ids_of_words, "continues")
    stored = data.draw(st.lists(st.integers(0, 2), min_size=len(rows) * length, max_size=len(rows) * length), "stored")
    flags = np.array(stored, np.uint8).reshape(-1, length) * data.draw(st.sampled_from([0, 1]), "any inside")

    fractions = {"mask_fraction": shares[0], "random_fraction": shares[1]}
    masking = Masking(probability=p, policy=policy, random_from=random_from, rule=rule, **fractions, **amounts)
    continuing, replaces = (np.isin(np.arange(vocab_size), sorted(each)) for each in (continues, replacing))
    tokens = SpecialTokens(vocab_size=vocab_size, **roles)
    masker = Masker(masking, tokens, length=length, seed=seed, continuing_ids=continuing, replacing_ids=replaces)
    assert masker.num_slots == keys.num_slots(length=length, p=p, policy=policy, **amounts)
    whole = [[2, *row, 3] for row in rows]
    matrix = np.array([row + [0] * (length - len(row)) for row in whole], np.int64).reshape(-1, length)
    text_places = np.array([len(row) for row in rows], np.int64)
    given = data.draw(st.sampled_from([flags, None]), "what is stored")
    flags = np.full_like(flags, 2) if given is None else flags
    named = np.array(epochs, np.int64), np.array(ids, np.int64)
    positions, targets, weights = masker.apply(matrix, text_places, *named, given)

    common = {"length": length, "seed": seed, "special": special, "mask_id": 4, "vocab_size": vocab_size, "p": p}
    common |= {"policy": policy, "shares": shares, "continues": continues, "pool": pool, "rule": rule} | amounts
    for b, row in enumerate(whole):
        inside, begins = (np.flatnonzero(flags[b] == kind).tolist() for kind in (1, 0))
        named = {"variant": epochs[b], "sample_id": ids[b], "inside": inside, "begins": begins}
        changed, places, old = keys.mask(row, **named, **common)
        unused = masker.num_slots - len(places)
        assert matrix[b].tolist() == changed + [0] * (length - len(row))
        assert positions[b].tolist() == places + [0] * unused
        assert targets[b].tolist() == old + [IGNORE_INDEX] * unused
        if policy == "uniform":
            candidates = sum(token not in special for token in row)
            assert weights[b] == (np.float32(candidates / len(places)) if places else 0)
    assert (weights is not None) == (policy == "uniform")


ANYWHERE = st.one_of(st.integers(-3, 12), st.sampled_from([-(2**62), 2**62]))


@given(st.binary(max_size=80), st.lists(ANYWHERE | st.integers(0, 81), min_size=1, max_size=6))
def test_text_hash_equals_its_reference(data, offsets):
    """Of texts with a byte between them. Nothing outside of the data is read."""
    out, expected = np.empty(len(offsets) - 1, np.uint64), []
    build_kernels.hash_documents(np.frombuffer(data, np.uint8), np.array(offsets), 1, out)
    for start, stop in pairwise(offsets):
        expected.append(keys.text_hash(data[max(0, start) : max(0, stop - 1)]))
    assert out.tolist() == expected


@given(st.integers(0, 9), st.lists(st.tuples(ANYWHERE, ANYWHERE), max_size=5), st.integers(0, 20))
def test_ranges_are_copied_one_after_the_other_and_nothing_outside(size, ranges, space):
    source, out = np.arange(1, size + 1, dtype=np.uint16), np.zeros(space + 1, np.uint16)
    build_kernels.copy_ranges(source, np.array(ranges, np.int64).reshape(-1, 2), out[:space])
    expected = [number for start, stop in ranges for number in source.tolist()[max(start, 0) : max(stop, 0)]]
    expected = expected[:space]
    assert out.tolist() == expected + [0] * (space + 1 - len(expected))


@given(
    st.lists(st.sampled_from([b"[MASK]", b"[MAS", b"[[", b"<s>", "é".encode(), b"aa", b"a" * 60, b"\n"]), max_size=12),
    st.lists(st.sampled_from(["[MASK]", "[[", "<s>", "aa", "é", "aaa"]), max_size=6, unique=True),
)
@example([b"a" * 60, b"[MASK]", b"a" * 60, b"[MASK]"], ["[MASK]", "aa"])
def test_spellings_are_counted_as_python_counts_them(pieces, strings):
    """Also where a string crosses 64 bytes; what stands after the text does not count."""
    text, counts = b"".join(pieces), np.zeros(len(strings), np.int64)
    data = np.frombuffer((text + b"aa[MASK]<s>" * 12)[: len(text) + TEXT_PADDING], np.uint8)
    build_kernels.count_literals(data, len(text), build_kernels.literals(strings), counts)
    assert counts.tolist() == [text.count(string.encode()) for string in strings]


@given(st.sets(st.text("ab", min_size=1, max_size=5)))
def test_each_symbol_has_the_longest_shorter_one_that_begins_it(spellings):
    tokens = [each.encode() for each in sorted({"a", *spellings})]
    symbols, bounds = np.zeros((len(tokens), 4), np.int32), np.append(0, np.cumsum([*map(len, tokens)]))
    trie = trie_of({token: number for number, token in enumerate(tokens)})
    fill_shorter(np.frombuffer(b"".join(tokens), np.uint8), bounds, trie, symbols)
    begins = [[n for n, one in enumerate(tokens) if one != token and token.startswith(one)] for token in tokens]
    assert symbols[:, SHORTER].tolist() == [max(each, default=-1) for each in begins]  # sorted: the last is the longest


WORDS = [*word_list("counted", "latin-1"), "é\xa0".encode(), b"a" * 63, b" " * 63, b"ab " * 20]


@given(st.lists(st.lists(st.sampled_from(WORDS), max_size=6).map(b"".join), max_size=4))
@example([b"a" * 64 + b"b", b" " * 64 + b"a", b"a" * 63 + b" a", b"", b" "])
def test_words_are_counted_as_python_counts_them(texts):
    """Also where a word crosses 64 bytes; what stands after the text does not count."""
    data = np.frombuffer(b"".join(text + b"\n" for text in texts) + b"a " * (TEXT_PADDING // 2), np.uint8)
    offsets = np.append(0, np.cumsum([len(text) + 1 for text in texts], dtype=np.int64))
    counts = np.empty(len(texts), np.int64)
    build_kernels.count_words(data, offsets, 1, counts)
    assert counts.tolist() == [len(text.split()) for text in texts]
