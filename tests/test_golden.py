"""Datasets of every format version are read as they were written, and the reference gives the published vectors."""

import json
from pathlib import Path

import numpy as np
import pytest
from reference import keys, rows
from support.commands import refuses
from support.data import ROOT, faults_of

import bertdata
from bertdata import Loader
from bertdata.format.manifest import VERSIONS
from bertdata.format.origins import Origins

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("version", [f"v{number}" for number in VERSIONS])
def test_a_golden_dataset_is_read_as_it_was_written(version):
    expected = json.loads((GOLDEN / f"{version}.json").read_bytes())
    assert faults_of(GOLDEN / version) == []
    dataset = bertdata.open(GOLDEN / version)
    assert dataset.dataset_id == expected["dataset_id"]
    assert {name: [s.num_documents, s.num_tokens] for name, s in dataset.splits.items()} == expected["splits"]
    assert {index: dataset[int(index)].tolist() for index in expected["documents"]} == expected["documents"]
    origins = Origins.read(dataset.path, dataset.manifest)
    assert [[*origins.input_and_place(number), number] for *_, number in expected["origins"]] == expected["origins"]
    batch = next(Loader(dataset, **expected["loader"])).arrays()
    assert batch.keys() == expected["batch"].keys()
    for name, values in expected["batch"].items():
        assert np.array_equal(batch[name], values), name


VECTORS = json.loads((ROOT / "tests" / "golden" / "vectors.json").read_text())


def test_keys_that_would_be_equal_are_refused():
    """Eight bytes of a name and 64 bits of a number make a key."""
    refused = [((0, name), "purpose_name", name) for name in ("augment-a", "", "é")]
    refused += [((seed, "init"), "seed", seed) for seed in (-1, 0.5)]
    for words, option, given in (*refused, ((0, "init", 2**64), "seed", 2**64)):
        with refuses("out-of-range", option, given=given):
            bertdata.key(*words)
    assert bertdata.key(np.int64(1), "init", np.uint64(2)) == bertdata.key(1, "init", 2)


def named(vector, *names):
    return {name: vector[name] for name in names if name in vector}


def masked(vector):
    amounts = named(vector, "rounding", "min_targets", "max_targets", "rule", "policy", "continues")
    options = amounts | named(vector, "seed", "variant", "sample_id", "mask_id", "vocab_size")
    for name, bit in (("inside", 0), ("begins", 1)):
        options[name] = [t for t, stored in enumerate(vector.get("words", [])) if stored == bit]
    if vector.get("random_from") == "vocabulary":
        options["pool"] = range(vector["vocab_size"])
    elif "tokens" in vector:
        options["pool"] = set(vector["tokens"]) - set(vector["special"])
    options |= {"shares": (vector.get("mask_fraction", 0.8), vector.get("random_fraction", 0.1))}
    options |= {"p": vector.get("probability", 0.15), "special": set(vector["special"]), "length": len(vector["row"])}
    return keys.mask(vector["row"], **options), [vector["masked"], vector["positions"], vector["targets"]]


def paired(vector):
    options, documents = named(vector, "length", "seed"), vector["documents"]
    pairs = rows.segment(documents, short_seq_prob=vector["short_seq_prob"], **options)
    options["epoch"] = vector["epoch"]
    found = [rows.pair_row(pair, documents, sample_id=number, **options) for number, pair in enumerate(pairs)]
    return found, vector["pairs"]


ORDER = ("seed", "num_samples", "epoch")
ANSWERS = {  # name of vectors → (what the reference gives for one, what was published)
    "mix": lambda vector: (keys.mix(vector[0]), vector[1]),
    "key": lambda vector: ([keys.key(*vector[0]), bertdata.key(*vector[0])], 2 * [vector[1]]),
    "draw": lambda vector: (keys.draw(*vector[:2]), vector[2]),
    "below": lambda vector: (keys.below(*vector[:2]), vector[2]),
    "permute": lambda vector: ([keys.permute(x, **named(vector, *ORDER)) for x in range(8)], vector["first"]),
    "blocks": lambda vector: (
        [keys.permute_blocks(x, **named(vector, *ORDER, "block")) for x in vector["positions"]],
        vector["samples"],
    ),
    "mixes": lambda vector: (
        [keys.mixed(p, **named(vector, "weights", "seed")) for p in vector["positions"]],
        vector["places"],
    ),
    "phase": lambda vector: (keys.phase(seed=vector[0], variant=vector[1], num_tokens=vector[2]), vector[3]),
    "mask": masked,
    "pack": lambda vector: (rows.best_fit(vector["sizes"], vector["capacity"]), vector["rows"]),
    "pairs": paired,
    "text_hash": lambda vector: (keys.text_hash(vector[0].encode()), vector[1]),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_reference_gives_the_published_vectors(name):
    for vector in VECTORS[name]:
        found, expected = ANSWERS[name](vector)
        assert json.loads(json.dumps(found)) == expected, vector
