"""A mix reads each of its sources as a Loader of it alone does, in exact shares and in an order without a pattern."""

import json
from fractions import Fraction
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import keys
from support.commands import refuses
from support.data import SPECIAL, assert_goes_on, assert_same, built, make_text, write_dataset

import bertdata
from bertdata import Loader, Masking, SpecialTokens
from bertdata.read.mix import Mix, ratio

NAN, TOO_MANY_DIGITS = float("nan"), [(0.1234567891, 1), (1 / 3, 0.5), (2**31 - 1, 1)]
KINDS = [
    {},
    {"samples": "documents"},
    {"samples": "packed", "masking": Masking(policy="span")},
    {"samples": "pairs", "masking": Masking(policy="whole_word")},
    {"shuffle": "blocks", "masking": Masking(policy="bernoulli")},
    {"masking": None, "starts": (7, 1000, 3)},
]


@pytest.fixture(scope="module")
def others(other, tmp_path_factory, vocab):
    """Two datasets more, with the tokenizer of `dataset`; the second one is small."""
    options = {"tokenizer": vocab, "sentences": "line", "validation": 0}
    return [other, built(tmp_path_factory.mktemp("small"), make_text(9, seed=2), **options)]


@pytest.fixture
def mix(dataset, others):
    return [(dataset, 0.7), (others[0], 0.25), (others[1], "0.05")]


def weights_and_seed():
    weights = st.lists(st.integers(1, 12) | st.integers(1, 10**8), min_size=2, max_size=6)
    return st.tuples(weights.map(ratio), st.integers(0, 2**64 - 1))


BEGINS = st.integers(0, 300) | st.integers(0, 2**62 - 1)
IN_A_ROW = st.tuples(BEGINS, st.integers(1, 250)).map(lambda parts: [*range(parts[0], sum(parts))])


@given(weights_and_seed(), st.lists(BEGINS, max_size=8) | IN_A_ROW)
def test_places_and_counts_equal_their_reference(given, positions):
    weights, seed = given
    mix = Mix(weights, seed=seed)
    places = mix.places(np.array(positions, np.int64))
    expected = [keys.mixed(position, weights=weights, seed=seed) for position in positions]
    assert list(zip(places.sources.tolist(), places.positions.tolist(), strict=True)) == expected
    rows = [[row for row, (source, _) in enumerate(expected) if source == number] for number in range(len(weights))]
    assert [which.tolist() for which in places.rows()] == rows
    for position, (source, place) in zip(positions[:8], expected, strict=False):
        counts = mix.counts(position)
        assert (counts[source], sum(counts)) == (place, position)


@given(weights_and_seed(), st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=3))
def test_positions_that_do_not_exist_lead_to_some_source(given, positions):
    """They are not refused, as those of one dataset are not, and nothing is written outside an array."""
    places = Mix(given[0], seed=given[1]).places(np.array(positions))
    assert ((places.sources >= 0) & (places.sources < len(given[0]))).all()
    assert sum(which.size for which in places.rows()) == len(positions)


def test_weights_are_exact_decimals():
    assert ratio([0.7, 0.3]) == ratio(["0.70", Fraction(3, 10)]) == ratio([np.float64(7), 3]) == (7, 3)
    assert ratio([0.1, 0.2, 0.3]) == (1, 2, 3)
    assert ratio([1 / 3, 2 / 3]) == (1, 2)  # their decimals are in this ratio
    assert ratio([5]) == (1,)
    assert ratio([2**31 - 2, 1]) == (2**31 - 2, 1)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_rows_are_those_of_each_source_alone(mix, limit, options):
    """Also of a mix that begins later in each of its sources: it begins at its own position 0."""
    limit(block_tokens=60)
    options = {"length": 32, "seed": 5} | options
    loader, starts = Loader(mix, **options), options.pop("starts", (0, 0, 0))
    alone = [Loader(dataset, **options) for dataset, _ in mix]
    end = 4 * loader.num_samples
    for positions in (np.arange(300), np.array([end, 3, 2**50, 4]), np.arange(end, end + 99), np.arange(0)):
        batch, places = loader.read(positions), Mix((14, 5, 1), seed=5).places(positions)
        assert np.array_equal(batch.sources, places.sources)
        for source, which in enumerate(places.rows()):
            own = alone[source].read(starts[source] + places.positions[which])
            arrays = batch.arrays()
            assert own.sources is None
            if own.attention_mask is None and which.size and "attention_mask" in arrays:
                assert (arrays["attention_mask"][which] == 1).all()
            for name, array in own.arrays().items():
                assert np.array_equal(arrays[name][which], array), name
    counts = Mix((14, 5, 1), seed=5).counts(250)
    assert loader.counts(250) == [count + start for count, start in zip(counts, starts, strict=True)]


def test_a_mix_that_begins_later_resumes_and_reads_an_epoch_of_all_sources(mix):
    options = {"starts": (7, 1000, 3), "length": 32, "seed": 5}
    batches = assert_goes_on(lambda: Loader(mix, global_batch_size=99, epochs=1, **options))
    loader = Loader(mix, **options)
    assert sum(batch.sources.size for batch in batches) == sum(source.num_samples for source in loader.sources)
    with refuses("other-stream", "state", given={"starts": ([7, 1000, 3], None)}):
        Loader(mix, length=32, seed=5).load_state_dict(loader.state_dict())


def test_facts_of_a_mix_are_means_by_weight(dataset, others):
    loader = Loader([(dataset, 3), (others[0], 1)], length=64, samples="documents")
    alone = [Loader(d, length=64, samples="documents").facts["pad_share"] for d in (dataset, others[0])]
    assert loader.facts == {"pad_share": 0.75 * alone[0] + 0.25 * alone[1], "crop_share": 0.0}


def test_one_dataset_with_a_weight_is_no_mix(dataset):
    one, plain = Loader([(dataset, 0.3)], length=16), Loader(dataset, length=16)
    assert one.state_dict() == plain.state_dict()
    assert one.counts(1000) == plain.counts(1000) == [1000]
    assert one.weights == (1,)
    assert_same(next(one), next(plain))


def test_what_cannot_be_mixed_is_refused(dataset, others, tmp_path):
    def written(name, special=dataset.special_tokens, **options):
        shards = [([9, len(name), 3], [3], None)]
        return bertdata.open(write_dataset(tmp_path / name, shards, special=special, **options)), 1

    one, other = (dataset, 1), others[0]
    indented = json.dumps(json.loads(dataset.tokenizer_file("tokenizer.json")), indent=3)
    Loader([one, written("the same tokenizer", tokenizer=indented)], length=8)
    bare = [written(f"{unk}", SpecialTokens(**vars(SPECIAL) | {"unk": unk})) for unk in (1, None)]
    no_datasets = [], [dataset, other], [(*one, 2)], [("a/", 1)], "a/", None, 3
    for kind, option, shards, more in (
        *(("out-of-range", "shards", [one, (other, weight)], {}) for weight in (0, -1, "x", NAN, inf, None, "")),
        *(("malformed", "shards", [(dataset, a), (other, b)], {}) for a, b in TOO_MANY_DIGITS),
        *(("out-of-range", "starts", [one, (other, 1)], {"starts": starts}) for starts in ((1, 2, 3), (1, -2), (1,))),
        *(("not-a-dataset", "shards", wrong, {}) for wrong in no_datasets),
        ("conflict", "shards", [one, (other, 1), (bertdata.open(dataset.path), 2)], {}),
        ("conflict", "variants", [one, (other, 1)], {"variants": 2}),
        *(("tokenizer-differs", "shards", mixed, {}) for mixed in ([one, written("another", tokenizer="{}")], bare)),
    ):
        with refuses(kind, option):
            Loader(shards, length=8, **more)


def test_the_damaged_source_is_named(tmp_path):
    shards = {"a": [7, 3], "b": [299, 3], "c": [300, 3]}  # of 300 ids
    made = [bertdata.open(write_dataset(tmp_path / name, [(ids, [2], None)])) for name, ids in shards.items()]
    next(Loader([(made[0], 1), (made[1], 1)], length=8))
    with refuses("damaged", says=str(tmp_path / "c")):
        next(Loader([(made[0], 1), (made[1], 1), (made[2], 1)], length=8))
