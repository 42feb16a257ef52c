"""A mix reads each source as a Loader of it alone does, in exact shares and random order; and training on a mix."""

import json
from fractions import Fraction
from math import inf
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import keys
from support.commands import invoke, json_of, refuses, succeeds
from support.data import SPECIAL, assert_goes_on, assert_same, built, make_text, write_dataset
from support.runs import flags, train

import bertdata
from bertdata import Loader, Masking, SpecialTokens
from bertdata.read.mix import Mix, ratio
from bertrain.cli import command

NAN, TOO_MANY_DIGITS = float("nan"), [(0.1234567891, 1), (1 / 3, 0.5), (2**31 - 1, 1)]
KINDS = [
    {},
    {"samples": "documents"},
    {"samples": "packed", "masking": Masking(policy="span")},
    {"samples": "pairs", "masking": Masking(policy="whole_word")},
    {"shuffle": "blocks", "masking": Masking(policy="bernoulli")},
    {"masking": None, "starts": (7, 2**40, 3)},
]


@pytest.fixture(scope="module")
def small(tmp_path_factory, vocab):
    """A dataset without a validation split, with the tokenizer of `dataset` and `other`."""
    options = {"tokenizer": vocab, "sentences": "line", "validation": 0}
    return built(tmp_path_factory.mktemp("small"), make_text(9, seed=2), **options)


WEIGHTS = st.lists(st.integers(1, 12) | st.integers(1, 10**8), min_size=2, max_size=6).map(ratio)
BEGINS = st.integers(0, 300) | st.integers(0, 2**62 - 1)
IN_A_ROW = st.tuples(BEGINS, st.integers(1, 250)).map(lambda parts: [*range(parts[0], sum(parts))])
ANYWHERE = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3)


@given(WEIGHTS, st.integers(0, 2**64 - 1), st.lists(BEGINS, max_size=8) | IN_A_ROW, ANYWHERE)
def test_places_and_counts_equal_their_reference(weights, seed, positions, anywhere):
    """A position that does not exist leads to some source, and nothing is written outside an array."""
    mix = Mix(weights, seed=seed)
    places = mix.places(np.array(positions, np.int64))
    expected = [keys.mixed(position, weights=weights, seed=seed) for position in positions]
    assert list(zip(places.sources.tolist(), places.positions.tolist(), strict=True)) == expected
    rows = [[row for row, (source, _) in enumerate(expected) if source == number] for number in range(len(weights))]
    assert [which.tolist() for which in places.rows()] == rows
    for position, (source, place) in zip(positions[:8], expected, strict=False):
        counts = mix.counts(position)
        assert (counts[source], sum(counts)) == (place, position)
    places = mix.places(np.array(anywhere, np.int64))
    assert ((places.sources >= 0) & (places.sources < len(weights))).all()
    assert sum(which.size for which in places.rows()) == len(anywhere)


def test_weights_are_exact_decimals():
    assert ratio([0.7, 0.3]) == ratio(["0.70", Fraction(3, 10)]) == ratio([np.float64(7), 3]) == (7, 3)
    assert ratio([0.1, 0.2, 0.3]) == (1, 2, 3)
    assert ratio([1 / 3, 2 / 3]) == (1, 2)  # their decimals are in this ratio
    assert ratio([5]) == (1,)
    assert ratio([2**31 - 2, 1]) == (2**31 - 2, 1)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_rows_are_those_of_each_source_alone(dataset, other, small, limit, options):
    """Also of a mix that begins later in each of its sources: it begins at its own position 0."""
    limit(block_tokens=60)
    mix, options = [(dataset, 0.7), (other, 0.25), (small, "0.05")], {"length": 32, "seed": 5} | options
    batches = assert_goes_on(lambda: Loader(mix, global_batch_size=99, epochs=1, **options))
    loader, starts = Loader(mix, **options), options.pop("starts", (0, 0, 0))
    alone = [Loader(each, **options) for each, _ in mix]
    end = 4 * loader.num_samples
    assert sum(batch.sources.size for batch in batches) == sum(each.num_samples for each in alone)
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


def test_facts_of_a_mix_are_means_by_weight(dataset, other):
    loader = Loader([(dataset, 3), (other, 1)], length=64, samples="documents")
    alone = [Loader(each, length=64, samples="documents").facts["pad_share"] for each in (dataset, other)]
    assert loader.facts == {"pad_share": 0.75 * alone[0] + 0.25 * alone[1], "crop_share": 0.0}


def test_one_dataset_with_a_weight_is_no_mix(dataset):
    one, plain = Loader([(dataset, 0.3)], length=16), Loader(dataset, length=16)
    assert one.state_dict() == plain.state_dict()
    assert one.counts(1000) == plain.counts(1000) == [1000]
    assert one.weights == (1,)
    assert_same(next(one), next(plain))


def test_what_cannot_be_mixed_is_refused(dataset, other, tmp_path):
    def written(name, special=dataset.special_tokens, **options):
        shards = [([9, len(name), 3], [3], None)]
        return bertdata.open(write_dataset(tmp_path / name, shards, special=special, **options)), 1

    one, two = (dataset, 1), (other, 1)
    indented = json.dumps(json.loads(dataset.tokenizer_file("tokenizer.json")), indent=3)
    Loader([one, written("the same tokenizer", tokenizer=indented)], length=8)
    bare = [written(f"{unk}", SpecialTokens(**vars(SPECIAL) | {"unk": unk})) for unk in (1, None)]
    no_datasets = [], [dataset, other], [(*one, 2)], [("a/", 1)], "a/", None, 3
    for kind, option, shards, more in (
        *(("out-of-range", "shards", [one, (other, weight)], {}) for weight in (0, -1, "x", NAN, inf, None, "")),
        *(("malformed", "shards", [(dataset, a), (other, b)], {}) for a, b in TOO_MANY_DIGITS),
        *(("out-of-range", "starts", [one, two], {"starts": starts}) for starts in ((1, 2, 3), (1, -2), (1,))),
        *(("not-a-dataset", "shards", wrong, {}) for wrong in no_datasets),
        ("conflict", "shards", [one, two, (bertdata.open(dataset.path), 2)], {}),
        ("conflict", "variants", [one, two], {"variants": 2}),
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


def test_a_run_states_what_it_reads_of_each_source(dataset, other, tmp_path):
    mix, out = [[str(dataset.path), 0.7], [str(other.path), 0.3]], tmp_path / "run"
    options = {"model": "bert-tiny", "steps": 3, "global_batch_size": 7, "micro_batch_size": 3}
    assert succeeds("bertrain", "doctor", *flags(mix, out, **options)).stdout.count("PASS  mix ") == 2
    log = [entry for entry in train(mix, out, **options) if "loss" in entry]
    loader = Loader([(dataset, 0.7), (other, 0.3)], length=32)
    assert [entry["step"] for entry in log] == [1, 2, 3]
    for entry in log:
        counts = loader.counts(7 * entry["step"])
        read = zip(mix, counts, loader.sources, strict=True)
        assert entry["tokens"] == 32 * sum(counts)
        assert entry["sources"] == {
            path: {"tokens": 32 * count, "epochs": round(count / source.num_samples, 4)}
            for (path, _), count, source in read
        }
    ids = [item.token_counts("train").astype(float) for item in (dataset, other)]
    for each in ids:
        each[list(dataset.special_tokens.special_ids)] = 0
    shares = 0.7 * ids[0] / ids[0].sum() + 0.3 * ids[1] / ids[1].sum()
    shares = shares[shares > 0]
    stated = json.loads((out / "run.json").read_text())["resolved"]["reference_loss"]["unigram"]
    assert stated == pytest.approx(-(shares * np.log(shares)).sum())


def test_each_source_with_a_validation_split_is_evaluated_as_if_it_were_alone(dataset, other, small, tmp_path, capsys):
    paths = [str(each.path) for each in (dataset, other, small)]
    log = train([*zip(paths, (7, 3, 1), strict=True)], tmp_path / "run", steps=3, save_every=3, model="bert-tiny")
    assert f"warning: {small.path} " in capsys.readouterr().out
    entry = log[-1]
    assert list(entry["validation_sources"]) == paths[:2]
    parts, last = [], tmp_path / "run" / "step-00000003"
    for path in paths[:2]:
        parts.append(json_of("bertrain", "evaluate", "--checkpoint", last, "--data", path))
        expected = {name: parts[-1][name] for name in ("loss", "accuracy", "targets")}
        assert entry["validation_sources"][path] == pytest.approx(expected, rel=1e-5)
    for name, weights in (("loss", (0.7, 0.3)), ("accuracy", (0.7, 0.3)), ("targets", (1, 1))):
        mean = sum(weight * part[name] for weight, part in zip(weights, parts, strict=True))
        assert entry[f"validation_{name}"] == pytest.approx(mean)


def test_weights_are_in_the_order_of_the_datasets_and_not_behind_them():
    run = Mock()
    assert invoke("bertrain", "pretrain", "--data", "A", "0.7", "--out", "nowhere").exit_code == 2
    succeeds(command(run), "--data", "A", "--weights=0.7,.3", "--out", "x", "--data", "B", "--lr", "1e-3")
    assert (run.call_args.args[0].data, run.call_args.args[0].weights) == (("A", "B"), (0.7, 0.3))
