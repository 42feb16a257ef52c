"""Datasets of every format version are read as they were written, and the reference gives the published vectors."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from reference import keys, rows
from support.commands import refuses
from support.data import ROOT, shard_of, write_dataset

import bertdata
from bertdata import Loader
from bertdata.format.manifest import VERSIONS as KNOWN
from bertdata.format.origins import Origins
from bertdata.format.verify import verify
from bertdata.types import Masking

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = [f"v{number}" for number in KNOWN]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_dataset_is_read_as_it_was_written(version):
    expected = json.loads((GOLDEN / f"{version}.json").read_bytes())
    assert verify(GOLDEN / version) == []
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


def test_golden_files_are_never_written_again():
    before = {path: path.read_bytes() for path in GOLDEN.rglob("*") if path.is_file()}
    tool = runpy.run_path(str(GOLDEN.parent.parent / "tools" / "golden.py"))
    with pytest.raises(SystemExit, match="golden files never change"):
        tool["main"]()
    assert {path: path.read_bytes() for path in GOLDEN.rglob("*") if path.is_file()} == before


# -------------------------------------------------------------------------------------------------------------- vectors


VECTORS = json.loads((ROOT / "tests" / "golden" / "vectors.json").read_text())


@pytest.mark.parametrize(
    ("words", "option", "given"),
    [
        *(((0, name), "purpose_name", name) for name in ("augment-a", "", "é")),
        *(((seed, "init"), "seed", seed) for seed in (-1, 0.5)),
        ((0, "init", 2**64), "seed", 2**64),
    ],
)
def test_keys_that_would_be_equal_are_refused(words, option, given):
    """Eight bytes of a name and 64 bits of a number make a key."""
    with refuses("out-of-range", option, given=given):
        bertdata.key(*words)


def test_keys_and_draws():
    assert bertdata.key(np.int64(1), "init", np.uint64(2)) == bertdata.key(1, "init", 2)
    for x, mixed in VECTORS["mix"]:
        assert keys.mix(x) == mixed
    for (seed, purpose, *words), value in VECTORS["key"]:
        assert keys.key(seed, purpose, *words) == bertdata.key(seed, purpose, *words) == value
    for k, i, value in VECTORS["draw"]:
        assert keys.draw(k, i) == value
    for x, n, value in VECTORS["below"]:
        assert keys.below(x, n) == value


@pytest.mark.parametrize("vector", VECTORS["permute"], ids=str)
def test_permutations(vector):
    seed, epoch, num_samples = vector["seed"], vector["epoch"], vector["num_samples"]
    expected = [keys.permute(x, num_samples=num_samples, seed=seed, epoch=epoch) for x in range(8)]
    assert expected == vector["first"]


@pytest.mark.parametrize("vector", VECTORS["blocks"], ids=str)
def test_permutations_in_blocks(vector):
    options = {name: vector[name] for name in ("seed", "num_samples", "block", "epoch")}
    assert [keys.permute_blocks(x, **options) for x in vector["positions"]] == vector["samples"]


@pytest.mark.parametrize("vector", VECTORS["mixes"], ids=str)
def test_mixes(vector):
    weights, seed = vector["weights"], vector["seed"]
    assert [list(keys.mixed(p, weights=weights, seed=seed)) for p in vector["positions"]] == vector["places"]


@pytest.mark.parametrize("vector", VECTORS["phase"], ids=str)
def test_phases(vector):
    seed, variant, num_tokens, phase = vector
    assert keys.phase(seed=seed, variant=variant, num_tokens=num_tokens) == phase


@pytest.mark.parametrize("vector", VECTORS["mask"], ids=lambda vector: f"{vector['policy']}-{len(vector)}")
def test_masks(vector):
    row, special, continues = vector["row"], vector["special"], vector.get("continues", [])
    stored = vector.get("words", [])  # of each place: 1 where a word begins, else 0
    common = {name: vector[name] for name in ("seed", "variant", "sample_id", "mask_id", "vocab_size", "policy")}
    masking = {"rule": 1} | {name: vector[name] for name in vars(Masking()) if name in vector}
    amounts = {"rounding": "nearest", "min_targets": 0, "max_targets": None, "rule": 1}
    options = {name: masking.get(name, default) for name, default in amounts.items()}
    inside, begins = ([t for t, bit in enumerate(stored) if bit == kind] for kind in (0, 1))
    options |= {"p": masking.get("probability", 0.15), "continues": continues, "inside": inside, "begins": begins}
    if masking.get("random_from") == "vocabulary":
        options["pool"] = range(vector["vocab_size"])
    elif "tokens" in vector:
        options["pool"] = set(vector["tokens"]) - set(special)
    options |= {"shares": (masking.get("mask_fraction", 0.8), masking.get("random_fraction", 0.1))}
    masked, positions, targets = keys.mask(row, length=len(row), special=set(special), **common, **options)
    expected = [vector["masked"], vector["positions"], vector["targets"]]
    assert [list(masked), list(positions), list(targets)] == expected


@pytest.mark.parametrize("vector", VECTORS["pack"], ids=str)
def test_packing(vector):
    assert rows.best_fit(vector["sizes"], vector["capacity"]) == vector["rows"]


@pytest.mark.parametrize("vector", VECTORS["pairs"], ids=lambda vector: str(vector["seed"]))
def test_pairs(vector, tmp_path):
    documents, length = vector["documents"], vector["length"]
    options = {"length": length, "seed": vector["seed"], "short_seq_prob": vector["short_seq_prob"]}
    dataset = bertdata.open(write_dataset(tmp_path / "shards", [shard_of(documents)]))
    loader = bertdata.Loader(dataset, samples="pairs", masking=None, **options)
    n = loader.num_samples
    batch = loader.read(vector["epoch"] * n + np.arange(n))
    for b, sample_id in enumerate(batch.sample_ids.tolist()):
        a, after, is_random = vector["pairs"][sample_id]
        row = [2, *a, 3, *after, 3]
        assert batch.input_ids[b, : len(row)].tolist() == row
        assert batch.next_sentence_label[b] == is_random
    names = {"epoch": vector["epoch"], "length": length, "seed": vector["seed"]}
    expected = [
        rows.pair_row(pair, documents, sample_id=number, **names)
        for number, pair in enumerate(rows.segment(documents, **options))
    ]
    assert [list(pair) for pair in expected] == vector["pairs"]


def test_text_hashes():
    for text, value in VECTORS["text_hash"]:
        assert keys.text_hash(text.encode()) == value
