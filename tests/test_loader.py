"""The stream of batches is a pure function of (dataset, seed, position): the same however it is cut up or resumed."""

import json
import pickle
from dataclasses import FrozenInstanceError, asdict, fields
from functools import partial
from inspect import Parameter, signature

import numpy as np
import pytest
from support.commands import refuses
from support.data import assert_goes_on, assert_same, write_dataset

import bertdata
from bertdata import Loader, Masking, SpecialTokens

NAN = float("nan")
POLICIES = [Masking(), Masking(policy="bernoulli", probability=0.3), None]
KINDS = [("windows", masking) for masking in POLICIES]
KINDS += [(samples, Masking()) for samples in ("documents", "packed", "pairs")]


# -------------------------------------------------------------------------------------------------------- invariance


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 1), (1, 5), (1, 64), (1, 1000), (3, 13), (8, 13)])
@pytest.mark.parametrize(("samples", "masking"), KINDS)
def test_ranks_share_the_batches_of_one_stream(dataset, world_size, batch_size, samples, masking):
    """Also where they continue a stream that had another size of batches, on one rank."""
    options = {"length": 16, "seed": 4, "samples": samples, "masking": masking}
    before = Loader(dataset, **options, global_batch_size=10)
    next(before)
    options["global_batch_size"] = batch_size
    ranks = [Loader(dataset, **options, rank=rank, world_size=world_size) for rank in range(world_size)]
    for rank in ranks:
        rank.load_state_dict(before.state_dict())
    num_batches = ranks[0].num_samples // batch_size + 3
    parts = [next(rank) for _ in range(num_batches) for rank in ranks]
    sizes = [part.input_ids.shape[0] for part in parts]
    assert max(sizes) - min(sizes) <= 1
    whole = Loader(dataset, **options).read(np.arange(10, 10 + num_batches * batch_size)).arrays()
    for name in whole.keys() - {"attention_mask"}:  # of parts only padded ones have it
        assert np.array_equal(whole[name], np.concatenate([getattr(part, name) for part in parts])), name


# ------------------------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize(("samples", "masking"), KINDS)
def test_restoring_from_every_step_gives_the_rest_of_the_stream(dataset, samples, masking):
    options = {"length": 64, "seed": 9, "samples": samples, "masking": masking, "epochs": 2}
    n = Loader(dataset, **options).num_samples
    batches = assert_goes_on(lambda: Loader(dataset, **options, global_batch_size=n // 9))
    assert len(batches) == -(-2 * n // (n // 9))


def test_numbers_may_be_those_of_numpy(dataset):
    """The state is JSON, at the end of the stream too."""
    options = {"length": 16, "global_batch_size": 1000, "seed": 2**63, "rank": 1, "world_size": 3}
    options |= {"epochs": 1, "variants": 2}
    masking = Masking(probability=np.float32(0.25), min_targets=np.int8(1), max_targets=np.int64(20))
    plain = Loader(dataset, masking=Masking(probability=0.25, min_targets=1, max_targets=20), **options)
    loader = Loader(dataset, masking=masking, **{name: np.uint64(value) for name, value in options.items()})
    assert_same(next(loader), next(plain))
    for _ in (0, [*loader]):
        plain.load_state_dict(json.loads(json.dumps(loader.state_dict())))


def test_state_of_another_stream_is_refused(dataset, other):
    """Each value that differs is given, in the state and here; of two maskings only what differs."""
    a, b, default = dataset.dataset_id, other.dataset_id, asdict(Masking())
    mix, of_mix = [(dataset, 0.7), (other, "0.30")], [[a, 7], [b, 3]]
    for there, here, given in (
        ({}, {"seed": 2**64 - 1}, {"seed": (0, 2**64 - 1)}),
        ({}, {"length": 32}, {"length": (16, 32)}),
        ({}, {"split": "validation"}, {"split": ("train", "validation")}),
        ({}, {"shuffle": "blocks"}, {"shuffle": ("full", "blocks")}),
        ({}, {"samples": "documents"}, {"samples": ("windows", "documents")}),
        ({}, {"masking": None}, {"masking": (default, None)}),
        ({}, {"masking": Masking(probability=0.2)}, {"masking": ({"probability": 0.15}, {"probability": 0.2})}),
        ({}, {"masking": Masking(policy="bernoulli")}, {"masking": ({"policy": "exact"}, {"policy": "bernoulli"})}),
        ({}, {"shards": other}, {"dataset_id": (a, b)}),
        ({}, {"shards": mix}, {"dataset_id": (a, None), "sources": (None, of_mix)}),
        ({"shards": mix}, {}, {"dataset_id": (None, a), "sources": (of_mix, None)}),
        ({"shards": mix}, {"shards": mix[::-1]}, {"sources": (of_mix, of_mix[::-1])}),
        ({"shards": mix}, {"shards": [mix[0], (other, 0.6)]}, {"sources": (of_mix, [[a, 7], [b, 6]])}),
        ({"shards": mix, "starts": (7, 9)}, {"shards": mix}, {"starts": ([7, 9], None)}),
    ):
        state = Loader(**{"shards": dataset, "length": 16} | there).state_dict()
        loader = Loader(**{"shards": dataset, "length": 16} | here)
        with refuses("other-stream", "state", given=given):
            loader.load_state_dict(json.loads(json.dumps(state)))
        assert loader.position == 0
    loader = Loader(dataset, length=16)
    with refuses("other-stream", "state", given={"version": (2, 1)}):
        loader.load_state_dict(loader.state_dict() | {"version": 2})
    for position in (-1, 1.5, "7", None, True, 2**62):
        with refuses("damaged", "state"):
            loader.load_state_dict(loader.state_dict() | {"position": position})


def test_a_state_without_a_rule_continues_with_rule_1(dataset):
    """As version 0.1.0 wrote states."""
    options = {"length": 16, "global_batch_size": 8}
    old, loader, other = (Loader(dataset, masking=Masking(policy="span", rule=rule), **options) for rule in (1, 2, 2))
    state = old.state_dict()
    del state["masking"]["rule"]
    loader.load_state_dict(state)
    first = next(old)
    assert not np.array_equal(first.masked_positions, next(other).masked_positions)
    assert_same(next(loader), first)
    other.load_state_dict(loader.state_dict())  # which has the rule
    expected = next(old)
    for resumed in (pickle.loads(pickle.dumps(loader)), other):
        assert_same(next(resumed), expected)
    old.load_state_dict(Loader(dataset, masking=Masking(policy="span"), **options).state_dict())
    assert old.masking == Masking(policy="span")


# ---------------------------------------------------------------------------------------------------------- contract


@pytest.mark.parametrize(("samples", "masking"), KINDS)
@pytest.mark.parametrize("length", [16, 60_000])
def test_arrays_are_the_callers_own(dataset, samples, masking, length):
    loader = Loader(dataset, length=length, global_batch_size=5, samples=samples, masking=masking)
    batch, again = loader.read(np.arange(5)), loader.read(np.arange(5))
    assert batch.targets.shape == batch.masked_positions.shape == (5, loader.num_slots)
    assert (batch.attention_mask is None) == (length == 16 and samples != "documents")
    for name, array in (batch.arrays() | {"labels": batch.labels}).items():
        assert array.dtype == np.int64, name
        assert array.flags.c_contiguous, name
        assert array.flags.writeable, name
        assert not any(np.shares_memory(array, other) for other in again.arrays().values()), name
        array[...] = -1
    assert_same(again, loader.read(np.arange(5)))  # nothing above reached the dataset


def test_values_are_given_by_name_and_stay(dataset):
    groups = [bertdata.Batch, bertdata.IdsFormat, bertdata.Machines, Masking, bertdata.Shares, SpecialTokens]
    groups += [bertdata.TextFormat, bertdata.Vocabulary]
    for group in groups:
        assert {each.kind for each in signature(group).parameters.values()} == {Parameter.KEYWORD_ONLY}, group
    for group in (*groups, type(dataset.manifest), type(dataset.splits["train"][0])):
        with pytest.raises(FrozenInstanceError):
            setattr(object.__new__(group), fields(group)[0].name, None)


WRONG = {  # kind of the error → option of a Loader → values
    "out-of-range": {
        "length": [2, 128.5, True, 2**20 + 1],
        "global_batch_size": [0, 2.5, 2**24 + 1],
        "seed": [-1, 2**64, 0.5],
        "rank": [-1, 2],
        "epochs": [0, "3", 1.5],
        "variants": [0, 2.0, 2**32],
        "short_seq_prob": ["0.1", NAN, 1.5],
        "starts": [5],
    },
    "unknown": {"samples": ["rows"], "shuffle": ["some"]},
    "malformed": {"masking": ["span"]},
    "no-split": {"split": ["dev", ["train"]]},
}
WRONG_MASKING = {
    "out-of-range": {
        "probability": [-0.1, 1.1, NAN, "0.15"],
        "min_targets": [-1, 3, 2.5, None],
        "max_targets": [2.5],
        "mask_fraction": [-0.1, 0.95, NAN],
        "random_fraction": [NAN],
    },
    "unknown": {"policy": ["whole words"], "rounding": ["up"], "random_from": ["anywhere"]},
}


def test_wrong_arguments_are_named(dataset):
    makes = [(partial(Loader, dataset, world_size=2, shuffle=shuffle), WRONG) for shuffle in ("full", "blocks")]
    for make, wrong in (*makes, (partial(Masking, max_targets=2), WRONG_MASKING)):
        for kind, options in wrong.items():
            for name, value in ((name, value) for name, values in options.items() for value in values):
                with refuses(kind, name):
                    make(**{name: value})
    for kind, options in (
        ("out-of-range", {"length": 4, "samples": "pairs"}),
        ("too-long", {"length": 70_000, "samples": "packed"}),
    ):
        with refuses(kind, "length"):
            Loader(dataset, **options)
    Loader(dataset, length=2**20, global_batch_size=2**24, variants=2**32 - 1, masking=None)  # the largest there are


@pytest.mark.parametrize("samples", ["windows", "documents"])
def test_positions_are_integers_from_0_of_any_width(dataset, samples):
    loader = Loader(dataset, length=5, global_batch_size=4, samples=samples, seed=2, variants=2)
    positions = np.arange(np.iinfo(np.int8).max)
    expected = loader.read(positions).input_ids
    assert loader.num_samples > len(positions)  # so that ids of samples do not fit in a byte
    for other in (positions.tolist(), *map(positions.astype, (np.int8, np.uint8, np.int16, np.uint64))):
        assert np.array_equal(loader.read(other).input_ids, expected)
    for kind, read, wrong in (
        *(("malformed", loader.read, wrong) for wrong in (positions.astype(float), positions[None], np.array("0"))),
        *(("out-of-range", read, np.array([3, -1])) for read in (loader.read, loader.spans)),
        ("out-of-range", loader.batch, -1),
    ):
        with refuses(kind, "positions"):
            read(wrong)
    first = next(loader)
    assert_same(loader.batch(-1), first)


@pytest.mark.parametrize(
    ("roles", "sentences", "options", "kind", "option"),
    [
        ({"mask": None}, None, {"masking": Masking()}, "tokenizer-lacks-token", "masking"),
        ({"cls": None}, None, {}, "tokenizer-lacks-token", "shards"),
        ({"sep": None}, None, {}, "tokenizer-lacks-token", "shards"),
        ({"special_ids": tuple(range(9))}, None, {"masking": Masking()}, "unsupported", "masking"),
        ({}, None, {"samples": "pairs"}, "not-stored", "samples"),
        ({}, [2], {"samples": "pairs"}, "empty", "split"),
    ],
)
def test_a_dataset_that_cannot_fill_a_row_is_refused(tmp_path, roles, sentences, options, kind, option):
    special = SpecialTokens(vocab_size=9, **{"cls": 2, "sep": 3, "mask": 4, "special_ids": (2, 3, 4)} | roles)
    dataset = bertdata.open(write_dataset(tmp_path / "shards", [([7, 3], [2], sentences)], special=special))
    with refuses(kind, option):
        Loader(dataset, length=8, **{"masking": None} | options)
