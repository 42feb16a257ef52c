"""Every kernel equals its slow reference implementation, and hostile arguments do no harm."""

import os

import hypothesis
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numba import njit
from reference import bytes64, keys
from reference import documents as reference
from support.data import as_kernel, word_list

from bertdata.bits import are_equal128, keep_masked, load64, store64
from bertdata.choices import MASKING_POLICIES
from bertdata.read import order
from bertdata.read.kernels import rows, windows
from bertdata.read.masking import Masker
from bertdata.sources.kernels import TEXT_PADDING, _copy_line
from bertdata.tokenize.kernels.bits import (
    _places_one_by_one,
    decoded,
    in_ranges64,
    write_places,
)
from bertdata.types import IGNORE_INDEX, Masking, SpecialTokens
from bertdata.write import kernels as build_kernels
from bertdata.write.kernels import _equal64, _spaces64

SEEDS = st.integers(0, 2**64 - 1)


@given(SEEDS, st.integers(1, 70) | st.integers(1, 2**62), st.lists(st.integers(0, 2**62), max_size=8))
@example(0, 33, [*range(330)])
@example(1, 65, [*range(650)])
def test_permute_equals_its_reference(seed, num_samples, positions):
    epochs, ids = order.sample_ids(np.array(positions, np.int64), num_samples=num_samples, seed=seed)
    expected = [keys.sample(p, num_samples=num_samples, seed=seed) for p in positions]
    assert list(zip(epochs.tolist(), ids.tolist(), strict=True)) == expected


SIZES_OF_BLOCKS = st.one_of(st.integers(1, 9), st.integers(1, 2**20), st.just(2**40))


@given(SEEDS, st.integers(1, 2**62), SIZES_OF_BLOCKS, st.lists(st.integers(0, 2**62), max_size=8))
@example(0, 64 * 7 * 3 + 5, 7, list(range(0, 1400, 3)))
def test_permute_blocks_equals_its_reference(seed, num_samples, block, positions):
    found = order.sample_ids(np.array(positions, np.int64), num_samples=num_samples, seed=seed, block=block)
    block = min(block, num_samples)
    for position, epoch, sample_id in zip(positions, *map(np.ndarray.tolist, found), strict=True):
        assert epoch == position // num_samples
        x, options = position % num_samples, {"num_samples": num_samples, "block": block}
        assert sample_id == keys.permute_blocks(x, seed=seed, epoch=epoch, **options)


@given(st.integers(0, 10**6), st.integers(0, 50), st.integers(1, 9))
def test_rank_slice_equals_its_reference(start, size, world_size):
    slices = [order.rank_slice(start, start + size, rank=r, world_size=world_size) for r in range(world_size)]
    for rank, (first, last) in enumerate(slices):
        whole = keys.rank_positions(0, batch=size, rank=rank, world_size=world_size)
        assert [p - start for p in range(first, last)] == whole
    sizes = [last - first for first, last in slices]
    assert max(sizes) - min(sizes) <= 1


@given(st.data())
def test_windows_equal_their_reference(data):
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=6), "tokens of each shard")
    text_length = data.draw(st.integers(1, 50), "text_length")
    seed = data.draw(SEEDS, "seed")
    dtype = data.draw(st.sampled_from([np.uint16, np.uint32]), "dtype")
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    stream = list(range(7, 7 + starts[-1]))
    shards = [np.array(stream[a:b], dtype) for a, b in zip(starts, starts[1:], strict=False)]
    num_samples = -(-len(stream) // text_length)
    samples = st.tuples(st.integers(0, 2**40), st.integers(0, num_samples - 1))
    chosen = data.draw(st.lists(samples, max_size=6), "epochs and samples")
    epochs, ids = (np.array([row[i] for row in chosen], np.int64) for i in (0, 1))

    spans = np.empty(len(chosen) * (min(len(sizes), text_length) + 1), rows.SPAN)
    text_places = np.empty(len(chosen), np.int64)
    out = np.full((len(chosen) + 2, text_length + 2), -7, np.int64)  # the first and last row are not the kernels'
    addresses = np.array([shard.ctypes.data for shard in shards])
    table = tuple(rows.TokenTable(starts, addresses, shards[0].itemsize, separator=1, cls=2, sep=3))
    frames = tuple(rows.Frames(out[1:-1], text_places, spans))
    is_first = np.array(data.draw(st.lists(st.booleans(), min_size=len(chosen), max_size=len(chosen)), "first"), bool)
    which, others = np.flatnonzero(is_first), np.flatnonzero(~is_first)  # as rows of two sources
    count = windows.window_rows(which, epochs, ids, np.uint64(seed), table, frames, 0)
    count = windows.window_rows(others, epochs, ids, np.uint64(seed), table, frames, count)
    largest, padding = rows.fill_rows(frames, count, dtype(0), 1)

    expected = []
    for epoch, sample_id in chosen:
        text = keys.windows(stream, text_length=text_length, seed=seed, variant=epoch)[sample_id]
        expected.append([2, *text, 3] + [1] * (text_length - len(text)))
    assert out[1:-1].tolist() == expected
    assert text_places.tolist() == [len(row) - 2 - row[1:].count(1) for row in expected]
    assert padding == sum(row[1:].count(1) for row in expected)
    assert largest == max((token for row in expected for token in row[1:] if token > 6), default=0)
    assert (out[[0, -1]] == -7).all()


@settings(max_examples=3 * hypothesis.settings().max_examples)
@given(st.data(), st.sampled_from(MASKING_POLICIES))
def test_masks_equal_their_reference(data, policy):
    vocab_size = data.draw(st.integers(7, 40), "vocab_size")
    special = {0, 1, 2, 3, 4} | data.draw(st.sets(st.integers(5, vocab_size - 2), max_size=8), "more specials")
    tokens = SpecialTokens(
        vocab_size=vocab_size, pad=0, unk=1, cls=2, sep=3, mask=4, special_ids=tuple(sorted(special - {1}))
    )
    length = data.draw(st.one_of(st.integers(3, 40), st.integers(3, 300)), "length")
    text = st.lists(st.integers(0, vocab_size - 1), max_size=length - 2)
    long = st.builds(lambda part, n: (part * n)[: length - 2], text, st.integers(1, 30))
    rows = data.draw(st.lists(st.one_of(text, long), max_size=4), "rows")
    seed = data.draw(SEEDS, "seed")
    epochs = data.draw(st.lists(st.integers(0, 2**62), min_size=len(rows), max_size=len(rows)), "epochs")
    ids = data.draw(st.lists(st.integers(0, 2**62), min_size=len(rows), max_size=len(rows)), "sample ids")
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
    masker = Masker(masking, tokens, length=length, seed=seed, continuing_ids=continuing, replacing_ids=replaces)
    assert masker.num_slots == keys.num_slots(length=length, p=p, policy=policy, **amounts)
    whole = [[2, *row, 3] for row in rows]
    matrix = np.zeros((len(rows), length), np.int64)
    for b, row in enumerate(whole):
        matrix[b, : len(row)] = row
    text_places = np.array([len(row) for row in rows], np.int64)
    given = data.draw(st.sampled_from([flags, None]), "what is stored")
    flags = np.full_like(flags, 2) if given is None else flags
    named = np.array(epochs, np.int64), np.array(ids, np.int64)
    positions, targets, weights = masker.apply(matrix, text_places, *named, given)

    common = {"length": length, "seed": seed, "special": special, "mask_id": 4, "vocab_size": vocab_size, "p": p}
    common |= {"policy": policy, "shares": shares, "continues": continues, "pool": pool, "rule": rule} | amounts
    for b, row in enumerate(whole):
        changed, places, old = keys.mask(
            row,
            variant=epochs[b],
            sample_id=ids[b],
            inside=np.flatnonzero(flags[b] == 1).tolist(),
            begins=np.flatnonzero(flags[b] == 0).tolist(),
            **common,
        )
        unused = masker.num_slots - len(places)
        assert matrix[b].tolist() == changed + [0] * (length - len(row))
        assert positions[b].tolist() == places + [0] * unused
        assert targets[b].tolist() == old + [IGNORE_INDEX] * unused
        if policy == "uniform":
            candidates = sum(token not in special for token in row)
            assert weights[b] == (np.float32(candidates / len(places)) if places else 0)
    assert (weights is not None) == (policy == "uniform")


@given(st.lists(st.one_of(st.binary(max_size=40), st.text(max_size=20).map(lambda s: s.encode())), max_size=6))
def test_text_hash_equals_its_reference(texts):
    data = b"".join(text + b"\n" for text in texts)
    offsets = np.concatenate([[0], np.cumsum([len(text) + 1 for text in texts])]).astype(np.int64)
    out = np.empty(len(texts), np.uint64)
    build_kernels.hash_documents(np.frombuffer(data, np.uint8), offsets, 1, out)
    assert out.tolist() == [keys.text_hash(text) for text in texts]


ANYWHERE = st.one_of(st.integers(-3, 12), st.sampled_from([-(2**63), 2**62]))


@given(st.integers(0, 9), st.lists(st.tuples(ANYWHERE, ANYWHERE), max_size=5), st.integers(0, 20))
def test_ranges_are_copied_one_after_the_other_and_nothing_outside(size, ranges, space):
    source, out = np.arange(1, size + 1, dtype=np.uint16), np.zeros(space + 1, np.uint16)
    build_kernels.copy_ranges(source, np.array(ranges, np.int64).reshape(-1, 2), out[:space])
    expected = [number for start, stop in ranges for number in source.tolist()[max(start, 0) : max(stop, 0)]]
    expected = expected[:space]
    assert out.tolist() == expected + [0] * (space + 1 - len(expected))


def test_text_hash_reads_nothing_outside_its_data():
    data, out = np.frombuffer(b"abcdef\n", np.uint8), np.empty(3, np.uint64)
    build_kernels.hash_documents(data, np.array([-(2**63), 2**62, 4, 9]), 1, out)
    assert out.tolist() == [keys.text_hash(b"abcdef\n"), keys.text_hash(b""), keys.text_hash(b"ef\n")]


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


WORDS = [*word_list("counted", "latin-1"), "é\xa0".encode(), b"a" * 63, b" " * 63, b"ab " * 20]


@given(st.lists(st.lists(st.sampled_from(WORDS), max_size=6).map(b"".join), max_size=4))
@example([b"a" * 64 + b"b", b" " * 64 + b"a", b"a" * 63 + b" a", b"", b" "])
def test_words_are_counted_as_the_reference_counts_them(texts):
    """Also where a word crosses 64 bytes; what stands after the text does not count."""
    data = np.frombuffer(b"".join(text + b"\n" for text in texts) + b"a " * (TEXT_PADDING // 2), np.uint8)
    offsets = np.append(0, np.cumsum([len(text) + 1 for text in texts], dtype=np.int64))
    counts = np.empty(len(texts), np.int64)
    build_kernels.count_words(data, offsets, 1, counts)
    assert counts.tolist() == [reference.num_words(text) for text in texts]


BYTES = st.integers(0, 255)
PARTS = word_list("contractions", "latin-1")


@njit
def words_at(data, place, ranges, byte):
    """What all operations on 64 bytes at a time find at an offset of an array; all but the first give a bit a byte."""
    return (
        load64(data, place),
        in_ranges64(data, place, ranges),
        _spaces64(data, place),
        _equal64(data, place, byte),
    )


@njit
def copied(source, i, target, p):
    """Copies 64 bytes, and the first 8 of them once more behind these. Returns which are newlines, and not ASCII."""
    bits = _copy_line(source, i, target, p)
    store64(target, p + 64, load64(source, i))
    return bits


WRITES = {part.__name__: as_kernel(part) for part in (write_places, _places_one_by_one)}


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled")
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@given(
    bits=st.integers(0, 2**64 - 1) | st.just(2**64 - 1), count=st.integers(0, 9), distance=st.integers(0, 2**16 - 64)
)
def test_places_of_bits(write, bits, count, distance):
    places = np.zeros(count + 64, np.uint16)
    found = write(places, count, np.uint64(bits), distance)
    expected = [distance + k for k in range(64) if bits >> k & 1]
    assert places[count : count + found].tolist() == expected
    assert not places[:count].any()


@njit
def masked(data, place, masks, kept):
    words = keep_masked(data, place, masks, 2, kept, 4)
    return words, are_equal128(kept, 4, kept, 0), are_equal128(kept, 4, kept, 2)


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled")
@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16), st.integers(0, 9), st.integers(0, 127))
def test_sixteen_bytes_are_masked_kept_and_compared(text, mask, place, bit):
    data = np.frombuffer(bytes(place) + text, np.uint8)
    masks = np.frombuffer(bytes(16) + mask, np.uint64)
    expected = int.from_bytes(text, "little") & int.from_bytes(mask, "little")
    halves = [expected & 2**64 - 1, expected >> 64]
    other = expected ^ 1 << bit
    kept = np.array([*halves, other & 2**64 - 1, other >> 64, 0, 0], np.uint64)
    words, is_same, is_other = masked(data, place, masks, kept)
    assert [*words] == kept[4:].tolist() == halves
    assert (is_same, is_other) == (True, False)


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled")
@given(
    st.lists(st.one_of(st.sampled_from(PARTS), st.binary(min_size=1, max_size=4)), min_size=64, max_size=80),
    st.integers(0, 60),
    st.lists(st.tuples(BYTES, BYTES), min_size=4, max_size=4),
    BYTES,
)
@example([bytes(range(256))], 0, [(0, 0)] * 4, 0)
@example([bytes(range(256))], 64, [(70, 0), (72, 0), (74, 4), (80, 255)], 97)
@example([bytes(range(256))], 128, [(200, 100), (130, 0), (131, 1), (140, 9)], 255)
@example([bytes(range(256))], 192, [(255, 0), (254, 0), (253, 0), (200, 7)], 192)
def test_operations_on_64_bytes_are_those_on_each(parts, place, ranges, byte):
    data, pairs = np.frombuffer(b"".join(parts) + bytes(TEXT_PADDING), np.uint8), np.array(ranges, np.uint8)
    found = words_at(data, place, pairs, np.uint8(byte))
    assert found == bytes64.words_at(data, place, pairs, byte)


@njit
def points_of(text, size, points):
    """Writes the code points of text[:size] one after the other."""
    i = k = 0
    while i < size:
        points[k], width = decoded(text, i)
        i, k = i + width, k + 1


def test_every_code_point_is_decoded():
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    points, text = np.zeros(len(every), np.int64), every.encode()
    points_of(np.frombuffer(text + bytes(TEXT_PADDING), np.uint8), len(text), points)
    assert np.array_equal(points, np.frombuffer(every.encode("utf-32-le"), np.uint32))


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled")
def test_offsets_of_bytes_may_be_beyond_4_gb():
    """As those of a large file that is mapped into memory. Zeros that are not written take no memory."""
    text = "I'll eat; it's -N, In\tthe Year\n2026 é\0".encode() * 4
    far, near, ranges = 2**32, np.frombuffer(text, np.uint8), np.array([[97, 3], [48, 9], [10, 0], [65, 25]], np.uint8)
    data = np.zeros(far + 2 * len(text), np.uint8)
    data[far : far + len(text)] = near
    more = ranges, np.uint8(97)
    assert words_at(data, far, *more) == words_at(near, 0, *more)
    assert all(words_at(near, 0, *more))
    start = far + len(text)
    expected = tuple(sum(1 << k for k in range(64) if is_set(text[k])) for is_set in (b"\n".__contains__, (127).__lt__))
    assert copied(near, 0, data, start) == copied(data, far, np.zeros(72, np.uint8), 0) == expected
    assert data[start : start + 72].tobytes() == text[:64] + text[:8]
