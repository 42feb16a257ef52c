"""The golden vectors of docs/determinism.md, against the slow twins and against the kernels."""

import json
from pathlib import Path

import numpy as np
import pytest
from reference import keys

import bertdata
from bertdata import _kernels, order
from bertdata.masking import Masker
from bertdata.types import Masking, SpecialTokens

PAGE = (Path(__file__).parent.parent / "docs" / "determinism.md").read_text()
VECTORS = json.loads(PAGE.split("```json\n")[1].split("```")[0])


def test_keys_and_draws():
    for x, mixed in VECTORS["mix"]:
        assert keys.mix(x) == int(_kernels.mix(np.uint64(x))) == mixed
    for (seed, purpose, *words), value in VECTORS["key"]:
        assert keys.key(seed, purpose, *words) == bertdata.key(seed, purpose, *words) == value
    for k, i, value in VECTORS["draw"]:
        assert keys.draw(k, i) == int(_kernels.draw(np.uint64(k), np.uint64(i))) == value
    for x, n, value in VECTORS["below"]:
        assert keys.below(x, n) == int(_kernels.below(np.uint64(x), np.uint64(n))) == value


@pytest.mark.parametrize("vector", VECTORS["permute"], ids=str)
def test_permutations(vector):
    seed, epoch, num_samples = vector["seed"], vector["epoch"], vector["num_samples"]
    positions = np.arange(8) + epoch * num_samples
    epochs, found = order.sample_ids(positions, num_samples=num_samples, seed=seed)
    assert found.tolist() == vector["first"]
    assert epochs.tolist() == [epoch] * 8
    twin = [keys.permute(x, num_samples=num_samples, seed=seed, epoch=epoch) for x in range(8)]
    assert twin == vector["first"]


@pytest.mark.parametrize("vector", VECTORS["blocks"], ids=str)
def test_permutations_in_blocks(vector):
    seed, num_samples, block = vector["seed"], vector["num_samples"], vector["block"]
    positions = np.array(vector["positions"]) + vector["epoch"] * num_samples
    epochs, found = order.sample_ids(positions, num_samples=num_samples, seed=seed, block=block)
    assert found.tolist() == vector["samples"]
    assert set(epochs.tolist()) == {vector["epoch"]}


@pytest.mark.parametrize("vector", VECTORS["phase"], ids=str)
def test_phases(vector):
    seed, variant, num_tokens, phase = vector
    assert keys.phase(seed=seed, variant=variant, num_tokens=num_tokens) == phase
    spans, filled, ids = np.empty((2, 4), np.int64), np.empty(1, np.int64), np.empty((1, 3), np.int64)
    starts, zero = np.array([0, num_tokens]), np.zeros(1, np.int64)
    _kernels.window_rows(zero + variant, zero, np.uint64(seed), 1, starts, zero, 1, 2, 3, ids, filled, spans)
    assert spans[0, 0] == phase


@pytest.mark.parametrize("vector", VECTORS["mask"], ids=lambda vector: vector["policy"])
def test_masks(vector):
    row, special = vector["row"], vector["special"]
    common = {name: vector[name] for name in ("seed", "variant", "sample_id", "mask_id", "vocab_size", "policy")}
    masked, positions, targets = keys.mask(row, length=len(row), special=set(special), **common)
    expected = [vector["masked"], vector["positions"], vector["targets"]]
    assert [list(masked), list(positions), list(targets)] == expected
    tokens = SpecialTokens(vocab_size=vector["vocab_size"], unk=1, mask=4, special_ids=tuple(special))
    masker = Masker(Masking(policy=vector["policy"]), tokens, length=len(row), seed=vector["seed"])
    ids = np.array([row])
    names = np.array([vector["variant"]]), np.array([vector["sample_id"]])
    found_positions, found_targets = masker.apply(ids, np.array([len(row) - 2]), *names)
    used = found_targets[0] != bertdata.IGNORE_INDEX
    found = [ids[0].tolist(), found_positions[0][used].tolist(), found_targets[0][used].tolist()]
    assert found == expected


def test_text_hashes():
    for text, value in VECTORS["text_hash"]:
        data = text.encode() + b"\n"
        out = np.empty(1, np.uint64)
        _kernels.hash_documents(np.frombuffer(data, np.uint8), np.array([0, len(data)]), out)
        assert keys.text_hash(text.encode()) == int(out[0]) == value
